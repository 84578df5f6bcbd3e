"""Statistics of a whole model, block by block: read from a store on the disk, or gathered by a walk.

The store is a folder named by a fingerprint of model, data, versions, device and arithmetic, with one safetensors file
per block. Files appear under their name only when they are complete (several processes may write the same one) and
carry a checksum; a damaged file counts as missing. Without a store, or when it is full, blocks are computed again.
"""

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
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
from quantry.models.weights import as_bytes
from quantry.quantizing.calibration.observe import ObservedBlock, collect
from quantry.quantizing.calibration.resumable_walk import ResumableWalk
from quantry.quantizing.calibration.statistics import Heads
from quantry.quantizing.calibration.text import CalibrationText
from quantry.storage import home
from quantry.storage.holding import hold, unused
from quantry.storage.reading import parse_object
from quantry.types import Stats

FORMAT = 1  # of the files; another number leaves older ones unread
BUDGET = 32 << 30  # bytes of all folders together
PARTS = ("gram", "absmax", "mean_abs", "histogram")


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of folders that may take `budget` bytes together."""

    folder: Path
    budget: int = BUDGET

    def put(self, path: Path, data: bytes) -> bool:
        """Writes a file if there is room for it; False if there is none or the store cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._make_room(path.parent, len(data)):
                return False
            write_whole(path, data)
        except OSError:
            return False
        return True

    def _make_room(self, own: Path, needed: int) -> bool:
        """Removes the folders that were not used for longest until `needed` bytes fit into the folder `own`.

        What a running job holds stays.
        """
        sizes = {folder: _size(folder) for folder in self.folder.iterdir() if folder.is_dir()}
        for folder in sorted(sizes.keys() - {own}, key=_last_used):
            if sum(sizes.values()) + needed <= self.budget or sizes[own] + needed > self.budget:
                break
            with unused(folder) as free:
                if free:
                    shutil.rmtree(folder, ignore_errors=True)
                    del sizes[folder]
        return sum(sizes.values()) + needed <= self.budget and needed < shutil.disk_usage(own).free


def default_store(budget: int = BUDGET) -> Store:
    """Returns the folder `statistics` of Quantry's cache."""
    return Store(home() / "statistics", budget)


class Statistics:
    """The statistics of a model on some text; nothing is read or run until a block is asked for.

    Ask for blocks in order: a walk goes forward, and starts again for a block that it has passed. `identity` names the
    weights; without one some values of each tensor are read.
    """

    def __init__(
        self,
        walk: ResumableWalk,
        text: CalibrationText,
        store: Store | None = None,
        identity: str | None = None,
        histogram: bool = False,
    ) -> None:
        self.walk, self.text, self.store = walk, text, store
        self.walked = 0  # blocks that were run for their statistics
        self._identity, self._histogram = identity, histogram
        self._last: tuple[int, ObservedBlock] | None = None
        self._full, self._held = store is None, False

    @property
    def count(self) -> int:
        """The number of blocks. Raises ConfigError if the config does not say."""
        layers = text_config(self.walk.source.config).get("num_hidden_layers")
        if type(layers) is not int or layers < 1:
            raise ConfigError(f"num_hidden_layers is {str(layers)[:40]}", fix="restore config.json")
        return layers

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that the statistics depend on."""
        facts = {
            "format": FORMAT,
            "versions": [__version__, *(version(name) for name in ("torch", "transformers"))],
            "model": self._identity or _values_digest(self.walk.source),
            "data": self.text.fingerprint,
            "device": self.walk.device.type,
            "dtype": str(self.walk.dtype),
            "histogram": self._histogram,
        }
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def observed(self, index: int) -> ObservedBlock:
        """Returns what was seen of a block. Raises QuantryError if there is no such block."""
        if not 0 <= index < self.count:
            raise QuantryError(f"there is no block {index}", fix=f"blocks go from 0 to {self.count - 1}")
        self._hold()
        if self._last is None or self._last[0] != index:
            self._last = None  # before another block takes memory
            self._last = (index, self._read(index) or self._walk_to(index))
        return self._last[1]

    def collect(self, block: Block) -> ObservedBlock:
        """Gathers the statistics of a block that another walk has reached, without running past it."""
        return collect(block, advance=False, histogram=self._histogram)

    def _hold(self) -> None:
        """Keeps the folder of these statistics from being cleared while they are used."""
        if self.store is not None and not self._held:
            with suppress(OSError):  # a store that cannot be written
                hold(self.store.folder / self.fingerprint, self)
            self._held = True

    def _walk_to(self, index: int) -> ObservedBlock:
        """Walks to a block; adds the blocks on the way that the store lacks."""
        for block in self.walk.to(index):
            if block.index == index:
                observed = self._collect(block)
            elif not (self._full or self._path(block.index).exists()):
                self._collect(block)
        if index == self.count - 1:
            self.walk.end()
        return observed

    def _collect(self, block: Block) -> ObservedBlock:
        self.walked += 1
        observed = collect(block, histogram=self._histogram)
        if not self._full:
            assert self.store is not None
            self._full = not self.store.put(self._path(block.index), _pack(observed))
        return observed

    def _path(self, index: int) -> Path:
        assert self.store is not None
        return self.store.folder / self.fingerprint / f"block-{index:05d}.safetensors"

    def _read(self, index: int) -> ObservedBlock | None:
        if self.store is None or not self._path(index).exists():
            return None
        observed = _load(self._path(index), self.walk.device)
        with suppress(OSError):
            if observed is None:
                self._path(index).unlink(missing_ok=True)
            os.utime(self._path(index).parent)  # the folder that was not used for longest is evicted first
        return observed


def _values_digest(source: WeightSource) -> str:
    """Hashes config and some values of each tensor, for a source that is no plain checkpoint."""
    digest = sha256(json.dumps(source.config, sort_keys=True, default=str).encode())
    digest.update(json.dumps({name: str(kind) for name, kind in sorted(source.activations.items())}).encode())
    for name in sorted(source.names):
        values = source.read(name)
        digest.update(f"{name} {values.dtype} {list(values.shape)}".encode())
        data = as_bytes(values)
        for start in places(len(data)):
            digest.update(data[start : start + SAMPLED])
    return digest.hexdigest()


def _pack(observed: ObservedBlock) -> bytes:
    """Returns a block as a safetensors file, with the upper triangle of each Gram matrix, row by row."""
    tensors: dict[str, Tensor] = {}
    for number, stats in enumerate(observed.stats.values()):
        upper = torch.cat([row[index:] for index, row in enumerate(stats.gram.cpu())])
        parts = {"gram": upper, "absmax": stats.absmax, "mean_abs": stats.mean_abs}
        if stats.histogram is not None:
            parts["histogram"] = stats.histogram
        tensors |= {f"{number}.{name}": part.cpu().contiguous() for name, part in parts.items()}
    if observed.heads:
        tensors |= {"heads.keys": observed.heads.keys.cpu(), "heads.values": observed.heads.values.cpu()}
    facts = {
        "groups": dict(observed.groups),
        "pools": dict(observed.pools),
        "tokens": {name: stats.tokens for name, stats in observed.stats.items()},
    }
    return pack_checked(tensors, facts)


def _load(path: Path, device: torch.device) -> ObservedBlock | None:
    """Reads a stored block; None if the file is damaged."""
    content = load_checked(path)
    if content is None:
        return None
    tensors, facts = content
    try:
        stats = {
            name: _stats(tokens, {part: tensors.get(f"{number}.{part}") for part in PARTS}, device)
            for number, (name, tokens) in enumerate(facts["tokens"].items())
        }
        keys, values = tensors.get("heads.keys"), tensors.get("heads.values")
        heads = None if keys is None or values is None else Heads(keys.to(device), values.to(device))
        return ObservedBlock(stats, facts["groups"], facts["pools"], heads)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None


def _stats(tokens: int, parts: Mapping[str, Any], device: torch.device) -> Stats:
    channels = len(parts["absmax"])
    gram = torch.zeros(channels, channels)
    for index, row in enumerate(parts["gram"].split(list(range(channels, 0, -1)))):
        gram[index, index:] = row
    gram += gram.triu(1).T
    square = gram.diagonal().clone()
    absmax, mean_abs, histogram = parts["absmax"].to(device), parts["mean_abs"].to(device), parts["histogram"]
    counts = None if histogram is None else histogram.to(device)
    return Stats(tokens, gram.to(device), absmax, mean_abs, square.to(device), counts)


def pack_checked(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Returns a safetensors file with facts as JSON and a checksum of the tensors."""
    return bytes(save(dict(tensors), {"quantry": json.dumps({**facts, "checksum": _checksum(tensors)})}))


def load_checked(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Reads what `pack_checked` made; None if the file is missing or damaged."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            facts = parse_object(file.metadata()["quantry"].encode(), str(path), fix="remove it")
        return (tensors, facts) if facts["checksum"] == _checksum(tensors) else None
    except (OSError, SafetensorError, QuantryError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(as_bytes(tensors[name]), zlib.crc32(name.encode(), total))
    return total


def _last_used(folder: Path) -> float:
    return folder.stat().st_mtime if folder.exists() else 0.0


def _size(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has finished or removed it
            total += file.stat().st_size
    return total


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, syncs it and renames it."""
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
