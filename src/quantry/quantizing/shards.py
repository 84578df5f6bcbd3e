"""Writes the stored tensors of a job front to back into the shards of a container.

One thread computes, another one writes, reads back and hashes. What a killed run left whole is kept: finished shards,
and the beginning of the shard it was writing.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

from torch import Tensor

from quantry.models.weights import as_bytes
from quantry.models.workspace import Finished, Workspace
from quantry.models.writer import Entry, ShardWriter, nbytes
from quantry.quantizing.tensor_plan import Piece, shards

PENDING = 2  # tensors that wait for the disk while the next is computed


class Container(Protocol):
    """How tensors are laid out in files, and which files go beside them."""

    alignment: int
    shard_bytes: int

    def shard_name(self, number: int, count: int) -> str: ...

    def header(self, number: int, cut: Sequence[Sequence[Entry]]) -> bytes: ...

    def companions(self, cut: Sequence[Sequence[Entry]]) -> Iterator[tuple[str, bytes]]: ...


def entries_of(cut: Sequence[Sequence[Piece]]) -> list[list[Entry]]:
    """Returns the stored tensors of each shard."""
    return [[entry for piece in pieces for entry in piece.entries] for pieces in cut]


def file_bytes(container: Container, pieces: Sequence[Piece]) -> int:
    """Returns the bytes of all shards, headers and padding included."""
    cut = entries_of(shards(pieces, container.shard_bytes))
    step = container.alignment
    padded = sum(-(-nbytes(dtype, shape) // step) * step for entries in cut for _, dtype, shape in entries)
    return padded + sum(len(container.header(number, cut)) for number in range(len(cut)))


class ShardedWriter:
    """Stores pieces in their order; use it in a `with` statement. `files` describes the finished shards."""

    def __init__(self, work: Workspace, container: Container, pieces: Sequence[Piece], shard_bytes: int) -> None:
        self._work, self._container = work, container
        self._cut = shards(pieces, shard_bytes)
        self._entries = entries_of(self._cut)
        self._stored: set[int] = set()  # by identity
        self._pending: deque[Future[None]] = deque()
        self._disk = ThreadPoolExecutor(1)
        self._number = -1  # of the open shard
        self._shard: ShardWriter | None = None
        self.files: dict[str, Finished] = {}
        self._open_next()

    def has(self, piece: Piece) -> bool:
        """Says if an earlier run, or this one, has stored a piece."""
        return id(piece) in self._stored

    def store(self, piece: Piece, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stores the tensors of a piece. One that is stored already is computed and not written again."""
        if self.has(piece):
            for _ in tensors:
                pass
            return
        assert self._shard is not None
        for name, tensor in tensors:
            self._pending.append(self._disk.submit(_write, self._shard, name, tensor))
            self._wait(PENDING)
        self._note(piece)
        if piece is self._cut[self._number][-1]:
            self._close()
            self._open_next()

    def __enter__(self) -> "ShardedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disk.shutdown()
        if self._shard:
            self._shard.__exit__(kind, error, trace)

    def _open_next(self) -> None:
        while self._shard is None and self._number + 1 < len(self._cut):
            self._number += 1
            finished = self._work.finished(self._name)
            if finished:
                self.files[self._name] = finished
                for piece in self._cut[self._number]:
                    self._note(piece)
                continue
            self._shard = self._open()
            if self.has(self._cut[self._number][-1]):  # killed after its last tensor
                self._close()

    def _close(self) -> None:
        assert self._shard is not None
        self._wait(0)
        done = Finished(self._shard.size, self._shard.close())
        self._work.finish(self._name, done)
        self.files[self._name] = done
        self._shard = None

    def _open(self) -> ShardWriter:
        """Opens a shard after the pieces that a killed run left whole."""
        number = self._number
        header = self._container.header(number, self._entries)
        shard = ShardWriter(self._work.folder / self._name, header, self._entries[number], self._container.alignment)
        whole = 0
        for piece in self._cut[number]:
            if whole + len(piece.entries) > shard.done:
                break
            whole += len(piece.entries)
            self._note(piece)
        shard.skip(whole)
        return shard

    def _note(self, piece: Piece) -> None:
        self._stored.add(id(piece))

    @property
    def _name(self) -> str:
        return self._container.shard_name(self._number, len(self._cut))

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            self._pending.popleft().result()


def _write(shard: ShardWriter, name: str, tensor: Tensor) -> None:
    """Fetches a tensor from its device and writes it; the device may already compute the next."""
    shard.write(name, as_bytes(tensor))
