"""Statistics of a whole model, block by block: from a store on the disk where they are there, else from a walk.

A store is a folder named by a fingerprint of model, data, versions, device and arithmetic, with one safetensors file
for each block. Files appear whole under their name (several processes may write the same one) and carry a checksum;
what cannot be read counts as not there. Without a store, or when it is full, blocks are computed anew.
"""

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from quantry import __version__
from quantry.blockwise.skeleton import WeightSource
from quantry.blockwise.walk import Block
from quantry.errors import ConfigError, QuantryError
from quantry.models.attention import text_config
from quantry.models.identity import SAMPLED, places
from quantry.models.parts import block_of
from quantry.models.weights import as_bytes
from quantry.quantizing.calibration.observe import LEAST, Heads, Observed, collect
from quantry.quantizing.calibration.resumable_walk import MEMORY, Passage
from quantry.quantizing.calibration.text import Data
from quantry.storage import home
from quantry.types import Progress, Stats

FORMAT = 1  # of the files; another number leaves older ones unread
BUDGET = 32 << 30  # bytes of all stores together

PARTS = ("gram", "absmax", "mean_abs", "histogram")


@dataclass(frozen=True, slots=True)
class Store:
    """Where statistics are kept, and how many bytes all of them may take."""

    folder: Path
    budget: int = BUDGET


def default_store(budget: int = BUDGET) -> Store:
    """The folder `statistics` of the cache."""
    return Store(home() / "statistics", budget)


@dataclass(slots=False, eq=False, kw_only=True)
class Statistics:
    """The statistics of a model on some data; nothing is read or run until a block is asked for.

    Blocks are best asked for in order: a walk goes forward, and begins again for a block that it has passed.
    """

    source: WeightSource
    data: Data
    device: torch.device
    dtype: torch.dtype = torch.float32
    batch: int = 4  # windows that run together
    histogram: bool = False
    least: int = LEAST  # tokens below which an expert borrows from all experts
    cache: Store | None = None
    memory: int = MEMORY
    scratch: Path | None = None  # where hidden states lie that are too large for memory; None: where temporary files do
    low_memory: bool = False  # one window at a time, hidden states in main memory
    progress: Progress | None = None
    identity: str | None = None  # of the weights, where it is known; else some values of each are read
    walked: int = field(default=0, init=False)  # blocks that were run for their statistics

    def __post_init__(self) -> None:
        self._last: tuple[int, Observed] | None = None
        self._full = self.cache is None

    @property
    def count(self) -> int:
        """The number of blocks."""
        layers = text_config(self.source.config).get("num_hidden_layers")
        if type(layers) is not int or layers < 1:
            raise ConfigError(f"num_hidden_layers is {str(layers)[:40]}", fix="restore config.json")
        return layers

    @cached_property
    def fingerprint(self) -> str:
        """What the statistics depend on."""
        known = {
            "format": FORMAT,
            "versions": [__version__, *(version(name) for name in ("torch", "transformers"))],
            "model": self.identity or _values_digest(self.source),
            "data": self.data.fingerprint,
            "device": self.device.type,
            "dtype": str(self.dtype),
            "histogram": self.histogram,
        }
        return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]

    def block(self, index: int) -> dict[str, Stats]:
        """The statistics of a block by group; starved experts have those of all experts of their layer."""
        return self.observed(index).covered(self.least)[0]

    def group(self, module: str) -> str:
        """The group whose statistics are those of a module."""
        index = block_of(f"{module}.")
        groups: Mapping[str, str] = {} if index is None else self.observed(index).groups
        if module not in groups:
            raise QuantryError(f"calibration has seen no module {module}", fix="name a linear layer of a decoder block")
        return groups[module]

    def observed(self, index: int) -> Observed:
        """What was seen of a block, experts without tokens included."""
        if not 0 <= index < self.count:
            raise QuantryError(f"there is no block {index}", fix=f"blocks go from 0 to {self.count - 1}")
        if self._last is None or self._last[0] != index:
            self._last = None  # before another takes memory
            self._last = (index, self._read(index) or self._walk(index))
        return self._last[1]

    def lighten(self) -> None:
        """Goes on in less memory."""
        self._passage.lighten()

    def _walk(self, index: int) -> Observed:
        """Walks up to a block; those on the way that the store lacks are put into it."""
        found = self._collect(self._passage.block(index))
        if index == self.count - 1:
            self._passage.end()
        return found

    @cached_property
    def _passage(self) -> Passage:
        return self.passage(self._store)

    def passage(self, leave: Callable[[Block], None]) -> Passage:
        """Another way through the same model with the same data."""
        return Passage(
            source=self.source,
            windows=self.data.tokens,
            device=self.device,
            leave=leave,
            dtype=self.dtype,
            batch=self.batch,
            memory=self.memory,
            scratch=self.scratch,
            low_memory=self.low_memory,
            progress=self.progress,
        )

    def _store(self, block: Block) -> None:
        """Collects on the way what the store lacks."""
        if not (self._full or self._path(block.index).exists()):
            self._collect(block)

    def _collect(self, block: Block) -> Observed:
        self.walked += 1
        found = collect(block, histogram=self.histogram)
        if not self._full:
            self._full = not self._write(block.index, found)
        return found

    def _path(self, index: int) -> Path:
        assert self.cache is not None
        return self.cache.folder / self.fingerprint / f"block-{index:05d}.safetensors"

    def _read(self, index: int) -> Observed | None:
        if self.cache is None or not self._path(index).exists():
            return None
        found = _load(self._path(index), self.device)
        with suppress(OSError):
            if found is None:
                self._path(index).unlink(missing_ok=True)
            os.utime(self._path(index).parent)  # the store that was not used for longest makes way first
        return found

    def _write(self, index: int, observed: Observed) -> bool:
        """Stores a block if there is room for it; a store that cannot be written to is as good as full."""
        assert self.cache is not None
        path, data = self._path(index), _pack(observed)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not make_room(self.cache, path.parent, len(data)):
                return False
            write_whole(path, data)
        except OSError:
            return False
        return True


def statistics(
    source: WeightSource, data: Data, *, device: str | torch.device = "cpu", cache: Store | None = None, **how: Any
) -> Statistics:
    """The statistics of a model on some data, kept in `cache` if one is given; `how` has the other fields."""
    return Statistics(source=source, data=data, device=torch.device(device), cache=cache, **how)


def _values_digest(source: WeightSource) -> str:
    """The same of a source that is no plain checkpoint; decoding takes as long as reading all of it."""
    digest = sha256(json.dumps(source.config, sort_keys=True, default=str).encode())
    digest.update(json.dumps({name: str(kind) for name, kind in sorted(source.activations.items())}).encode())
    for name in sorted(source.names):
        values = source.read(name)
        digest.update(f"{name} {values.dtype} {list(values.shape)}".encode())
        data = as_bytes(values)
        for start in places(len(data)):
            digest.update(data[start : start + SAMPLED])
    return digest.hexdigest()


def _pack(observed: Observed) -> bytes:
    """A block as a safetensors file: of each Gram matrix the upper triangle, row after row."""
    tensors: dict[str, Tensor] = {}
    for number, stats in enumerate(observed.stats.values()):
        upper = torch.cat([row[index:] for index, row in enumerate(stats.gram.cpu())])
        parts = {"gram": upper, "absmax": stats.absmax, "mean_abs": stats.mean_abs}
        parts |= {} if stats.histogram is None else {"histogram": stats.histogram}
        tensors |= {f"{number}.{name}": part.cpu().contiguous() for name, part in parts.items()}
    if observed.heads:
        tensors |= {"heads.keys": observed.heads.keys.cpu(), "heads.values": observed.heads.values.cpu()}
    facts = {
        "groups": dict(observed.groups),
        "pools": dict(observed.pools),
        "tokens": {name: stats.tokens for name, stats in observed.stats.items()},
        "checksum": checksum(tensors),
    }
    return bytes(save(tensors, {"quantry": json.dumps(facts)}))


def _load(path: Path, device: torch.device) -> Observed | None:
    """A stored block, or nothing if the file is not what was written."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            facts: dict[str, Any] = json.loads(file.metadata()["quantry"])
        if facts["checksum"] != checksum(tensors):
            return None
        stats = {
            name: _stats(tokens, {part: tensors.get(f"{number}.{part}") for part in PARTS}, device)
            for number, (name, tokens) in enumerate(facts["tokens"].items())
        }
        heads = (
            Heads(tensors["heads.keys"].to(device), tensors["heads.values"].to(device))
            if "heads.keys" in tensors
            else None
        )
        return Observed(stats, facts["groups"], facts["pools"], heads)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def _stats(tokens: int, parts: Mapping[str, Any], device: torch.device) -> Stats:
    channels = len(parts["absmax"])
    gram = torch.zeros(channels, channels)
    for index, row in enumerate(parts["gram"].split(list(range(channels, 0, -1)))):
        gram[index, index:] = row
    gram += gram.triu(1).T
    square = gram.diagonal().clone()
    kept = [part.to(device) for part in (gram, parts["absmax"], parts["mean_abs"], square)]
    histogram = parts["histogram"]
    return Stats(tokens, *kept, *([] if histogram is None else [histogram.to(device)]))


def checksum(tensors: Mapping[str, Tensor]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(as_bytes(tensors[name]), zlib.crc32(name.encode(), total))
    return total


def make_room(store: Store, own: Path, needed: int) -> bool:
    """Whether so many bytes fit, once the stores that were not used for longest have made way."""
    sizes = {folder: _size(folder) for folder in store.folder.iterdir() if folder.is_dir()}
    for folder in sorted(sizes.keys() - {own}, key=lambda one: one.stat().st_mtime if one.exists() else 0):
        if sum(sizes.values()) + needed <= store.budget or sizes[own] + needed > store.budget:
            break
        shutil.rmtree(folder, ignore_errors=True)
        del sizes[folder]
    return sum(sizes.values()) + needed <= store.budget and needed < shutil.disk_usage(own).free


def _size(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # another process has finished or removed it
            continue
    return total


def put(store: Store, path: Path, data: bytes) -> None:
    """Keeps a file, if there is room; a store that cannot be written to is as good as full."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if make_room(store, path.parent, len(data)):
            write_whole(path, data)


def write_whole(path: Path, data: bytes) -> None:
    """A file that is either whole or not there, under a name of its own until then."""
    descriptor, partial = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
