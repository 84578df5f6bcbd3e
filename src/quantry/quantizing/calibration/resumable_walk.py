"""A walk through the blocks of a model that can start in the middle: after a kill, or again in less memory.

A walk goes forward and runs every block. A `ResumableWalk` goes to the block it is asked for and starts again for one
that it has passed. It can keep the hidden states before the last two blocks in a folder: two, since a killed job may
have entered a block before everything of the block before was on the disk.
"""

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from quantry.blockwise.skeleton import WeightSource
from quantry.blockwise.walk import Block, Walk
from quantry.errors import ConfigError, QuantryError
from quantry.models.weights import DTYPES, NAMES, as_bytes
from quantry.storage.reading import parse_object
from quantry.types import Progress

MEMORY = 8 << 30  # bytes of hidden states kept in memory: 128 windows of 2048 tokens and 8192 channels take 4.3 GB
HEADER = 4096  # bytes before the hidden states in a file
STEP = 16 << 20
KEPT = re.compile(r"hidden-(\d{5})\.partial")  # a workspace removes files that end in .partial when the job is done


class Header(TypedDict):
    """The first bytes of a file of hidden states, as JSON."""

    dtype: str
    channels: int
    checksum: int


@dataclass(slots=False, eq=False, kw_only=True)
class ResumableWalk:
    """A walk to any block; nothing runs before a block is asked for. `progress` counts blocks."""

    source: WeightSource
    windows: Sequence[Sequence[int]]
    device: torch.device
    dtype: torch.dtype = torch.float32
    batch: int = 4  # windows that run together
    memory: int = MEMORY
    scratch: Path | None = None  # for hidden states that are too large for memory
    low_memory: bool = False  # one window at a time, hidden states in main memory
    progress: Progress | None = None
    folder: Path | None = None  # where `keep` stores hidden states

    def __post_init__(self) -> None:
        self._walk: Walk | None = None
        self._blocks: Iterator[Block] = iter(())
        self._block: Block | None = None
        self._saved: tuple[int, list[Tensor]] | None = None  # a block and the hidden states before it

    def to(self, index: int) -> Iterator[Block]:
        """Yields the present block and every later one up to `index`; each runs before the next is yielded.

        Starts again, at the last block with kept hidden states, if the walk has passed `index`.
        """
        here = self._block
        if here is None or here.index > index or (here.index == index and here.advanced):
            self._start(index)
        while self._block is not None:
            yield self._block
            if self._block is None or self._block.index == index:
                return
            self._next()

    def block(self, index: int) -> Block:
        """Returns block `index` with the hidden states before it."""
        *_, block = self.to(index)
        return block

    def keep(self, index: int) -> None:
        """Stores the hidden states before block `index`, which the walk has reached, and removes all but the last."""
        if self.folder is None or self._walk is None:
            return
        with suppress(OSError):  # without them a killed job starts at the first block
            for number in _kept(self.folder) - {index - 1}:
                _path(self.folder, number).unlink()
            save(_path(self.folder, index), self._walk.hidden())

    def last_kept(self, index: int) -> int:
        """Returns the last block up to `index` that the walk can start at."""
        return self._hidden_before(index)[0]

    def lighten(self) -> None:
        """Goes on in less memory; keeps the hidden states unless they are between two blocks."""
        walk = self._walk
        if walk and walk.reached is not None:
            self._saved = (walk.reached, [state.cpu() for state in walk.hidden()])
        self.end()
        self.low_memory = True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def end(self) -> None:
        """Frees the block and all hidden states."""
        self._block, self._walk, self._blocks = None, None, iter(())

    def _start(self, index: int) -> None:
        self.end()
        start, hidden = self._hidden_before(index)
        self._saved = None
        self._walk = Walk(
            self.source,
            device=self.device,
            dtype=self.dtype,
            batch=1 if self.low_memory else self.batch,
            memory=self.memory,
            scratch=self.scratch,
            sparing=self.low_memory,
        )
        self._blocks = self._walk.blocks(self.windows, start, hidden)
        self._next()

    def _hidden_before(self, index: int) -> tuple[int, list[Tensor] | None]:
        """Returns the last block up to `index` with kept hidden states, and these; block 0 needs none."""
        if self._saved and self._saved[0] <= index:
            return self._saved
        for number in sorted((kept for kept in _kept(self.folder) if kept <= index), reverse=True):
            assert self.folder is not None
            states = load(_path(self.folder, number), [len(window) for window in self.windows])
            if states is not None:
                return number, states
        return 0, None

    def _next(self) -> None:
        """Runs the present block, if that has not happened, and loads the next."""
        assert self._walk is not None
        self._block = None  # it is freed now, and an error may come instead of the next
        self._block = next(self._blocks, None)
        if self._block is None:
            raise ConfigError(f"the model ends after {self._walk.count} blocks", fix="restore config.json")
        if self.progress:
            self.progress(self._block.index, self._walk.count, self._block.name)


def save(path: Path, states: Sequence[Tensor]) -> None:
    """Writes the hidden states (tokens, channels) of all windows to a file that appears only when it is complete.

    The file is not synced: after a power failure its checksum does not match, and the states are computed again.
    """
    partial = path.with_name(f"{path.stem}.new.partial")
    checksum = 0
    try:
        with partial.open("wb") as file:
            file.seek(HEADER)
            for state in states:
                data = as_bytes(state)
                file.write(data)
                checksum = zlib.crc32(data, checksum)
            facts = {"dtype": NAMES[states[0].dtype], "channels": states[0].shape[1], "checksum": checksum}
            file.seek(0)
            file.write(json.dumps(facts).encode().ljust(HEADER))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load(path: Path, lengths: Sequence[int]) -> list[Tensor] | None:
    """Maps the hidden states of windows of these lengths from a file; None if the file is damaged."""
    try:
        with path.open("rb") as file:
            facts = parse_object(file.read(HEADER), str(path), Header, fix="remove it")
            checksum = 0
            while data := file.read(STEP):
                checksum = zlib.crc32(data, checksum)
        if checksum != facts["checksum"]:
            return None
        dtype, channels = DTYPES[facts["dtype"]], facts["channels"]
        skipped, values = HEADER // dtype.itemsize, sum(lengths) * channels
        if path.stat().st_size != (skipped + values) * dtype.itemsize:
            return None
        mapped = torch.from_file(str(path), shared=False, size=skipped + values, dtype=dtype)
        return list(torch.split(mapped[skipped:].view(-1, channels), list(lengths)))
    except (OSError, QuantryError, KeyError, RuntimeError):
        return None


def _kept(folder: Path | None) -> set[int]:
    if folder is None:
        return set()
    return {int(match[1]) for file in folder.iterdir() if (match := KEPT.fullmatch(file.name))}


def _path(folder: Path, index: int) -> Path:
    return folder / f"hidden-{index:05d}.partial"
