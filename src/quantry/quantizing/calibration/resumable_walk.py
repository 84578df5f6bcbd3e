"""A way through the blocks of a model that can be taken up again: by a job that was killed, or in less memory.

A walk goes forward. A `Passage` goes to the block that is asked for and begins anew for one that it has passed; before
it leaves a block, whoever goes along may do something to it. What comes to the last two blocks may be kept in a folder:
two, since a job that is killed may have come to a block before all of the one before it was on the disk.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantry.blockwise.skeleton import WeightSource
from quantry.blockwise.walk import Block, Walk
from quantry.errors import ConfigError
from quantry.models.weights import DTYPES, NAMES, as_bytes
from quantry.types import Progress

MEMORY = 8 << 30  # bytes of hidden states that stay in memory: 128 windows of 2048 tokens and 8192 channels take 4.3 GB
HEADER = 4096  # bytes before the hidden states in a file
STEP = 16 << 20
KEPT = re.compile(r"hidden-(\d{5})\.partial")  # a workspace removes what ends in .partial when the job is done


@dataclass(slots=False, eq=False, kw_only=True)
class Passage:
    """A walk to where it is asked to go; nothing is run before."""

    source: WeightSource
    windows: Sequence[Sequence[int]]
    device: torch.device
    leave: Callable[[Block], None]  # what is done to a block before it is left behind
    dtype: torch.dtype = torch.float32
    batch: int = 4  # windows that run together
    memory: int = MEMORY
    scratch: Path | None = None
    low_memory: bool = False  # one window at a time, hidden states in main memory
    progress: Progress | None = None
    folder: Path | None = None  # where hidden states are kept

    def __post_init__(self) -> None:
        self._walk: Walk | None = None
        self._blocks: Iterator[Block] = iter(())
        self._at_hand: tuple[int, list[Tensor]] | None = None  # a block and what comes to it
        self.here: Block | None = None

    def block(self, index: int) -> Block:
        """The block, with all that comes to it."""
        while True:
            here = self.here
            if here is None or here.index > index or (here.index == index and here.advanced):
                self._begin(index)
            elif here.index == index:
                return here
            else:
                if not here.advanced:
                    self.leave(here)
                if self.here is here:  # else the way was begun anew meanwhile
                    self._step()
                    self._keep()

    def lighten(self) -> None:
        """Goes on in less memory, with the hidden states at hand unless they are between two blocks."""
        walk = self._walk
        if walk and walk.reached is not None:
            self._at_hand = (walk.reached, [state.cpu() for state in walk.hidden()])
        self.end()
        self.low_memory = True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def end(self) -> None:
        """Lets go of the block and of all hidden states."""
        self.here, self._walk, self._blocks = None, None, iter(())

    def _begin(self, index: int) -> None:
        """Begins at the last block up to the one that is wanted for which hidden states are there."""
        self.end()
        start, hidden = self._start(index)
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
        self._step()

    def _start(self, index: int) -> tuple[int, list[Tensor] | None]:
        at_hand, self._at_hand = self._at_hand, None
        if at_hand and at_hand[0] <= index:
            return at_hand
        if self.folder:
            for number in sorted((one for one in _kept(self.folder) if one <= index), reverse=True):
                found = load(_path(self.folder, number), [len(window) for window in self.windows])
                if found is not None:
                    return number, found
        return 0, None

    def _step(self) -> None:
        """Goes on to the next block."""
        assert self._walk is not None
        self.here = None  # it goes now, and an error may come instead of the next
        self.here = next(self._blocks, None)
        if self.here is None:
            raise ConfigError(f"the model ends after {self._walk.count} blocks", fix="restore config.json")
        if self.progress:
            self.progress(self.here.index, self._walk.count, self.here.name)

    def _keep(self) -> None:
        """Keeps what has come to this block, and of the others only what came to the one before."""
        if self.folder is None or self.here is None or self._walk is None:
            return
        with suppress(OSError):  # without them a job that was killed begins at the first block
            for number in _kept(self.folder) - {self.here.index - 1}:
                _path(self.folder, number).unlink()
            save(_path(self.folder, self.here.index), self._walk.hidden())


def save(path: Path, states: Sequence[Tensor]) -> None:
    """Writes the hidden states (tokens, channels) of all windows to a file that is either whole or not there.

    It is not forced onto the disk: should the machine go down, the checksum tells, and they are computed again.
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
    """The hidden states of windows of these lengths, mapped from a file; nothing if it is not what was written."""
    try:
        with path.open("rb") as file:
            facts = json.loads(file.read(HEADER))
            checksum = 0
            while data := file.read(STEP):
                checksum = zlib.crc32(data, checksum)
        if checksum != facts["checksum"]:
            return None
        dtype, channels = DTYPES[facts["dtype"]], facts["channels"]
        skipped, values = HEADER // dtype.itemsize, sum(lengths) * channels
        mapped = torch.from_file(str(path), shared=False, size=skipped + values, dtype=dtype)
        return list(torch.split(mapped[skipped:].view(-1, channels), list(lengths)))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def _kept(folder: Path) -> set[int]:
    """The blocks for which hidden states are kept."""
    return {int(found[1]) for file in folder.iterdir() if (found := KEPT.fullmatch(file.name))}


def _path(folder: Path, index: int) -> Path:
    return folder / f"hidden-{index:05d}.partial"
