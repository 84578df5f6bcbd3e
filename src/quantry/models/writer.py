"""Writing shards front to back: the header first, since every size is known before any weight is read.

So a shard of any size needs the memory of one tensor. Every piece is read back and compared as it is written. The file
gets its final name only when it is complete and on the disk; until then it ends in `.partial`, and a journal next to it
lists the checksum of each complete tensor: a killed job goes on after the last tensor that still agrees. The container
makes the header (`safetensors_header` below, containers/gguf_file.py for GGUF).
"""

import hashlib
import json
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from types import TracebackType

from quantry.errors import OutputError
from quantry.models.gguf import block_sizes
from quantry.models.safetensors import DTYPE_BITS

STEP = 8 << 20
Entry = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of a stored tensor, by safetensors' or ggml's name of its type."""
    if dtype in DTYPE_BITS:
        return prod(shape) * DTYPE_BITS[dtype] // 8
    weights, size = {name: (weights, size) for name, weights, size in block_sizes().values()}[dtype]
    return prod(shape) // weights * size


def safetensors_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    rows: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape in entries:
        end = start + nbytes(dtype, shape)
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts on a multiple of 8, as the library writes it
    return len(text).to_bytes(8, "little") + text


class ShardWriter:
    """Writes one shard; the data of its entries must come in order, each in one piece or several.

    `done` counts the entries that an earlier, killed writer of the same file has completed: they need not be written
    again, and are ignored if they are.
    """

    def __init__(self, path: Path, header: bytes, entries: Sequence[Entry], alignment: int = 1) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._journal_path = path.with_name(path.name + ".journal.partial")
        self._expected = [(name, nbytes(dtype, shape)) for name, dtype, shape in entries]
        self._alignment = alignment
        self._next, self._given, self._checksum = 0, 0, 0
        self._hash = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1)
        self._hashing: deque[Future[None]] = deque()
        self.size = 0
        self.done = self._resume(header)
        if self.size == 0:
            self._file = self._partial.open("w+b", buffering=0)
            self._put(memoryview(header))
        self._journal = self._journal_path.open("a" if self.done else "w")

    def write(self, name: str, data: memoryview) -> None:
        """Adds the next bytes of a tensor."""
        expected, size = self._expected[self._next]
        if name != expected or self._given + data.nbytes > size:
            raise ValueError(f"{self._path.name}: {data.nbytes} bytes of {name}, but {expected} of {size} comes next")
        self._given += data.nbytes
        if self._next >= self.done:
            self._put(data)
            self._checksum = zlib.crc32(data, self._checksum)
        if self._given == size:
            self._end_of_tensor()

    def skip(self, count: int) -> None:
        """Skips entries that are `done`."""
        self._next += count

    def close(self) -> str:
        """Gives the complete file its final name and returns its SHA-256."""
        if self._next != len(self._expected):
            raise ValueError(f"{self._path.name}: {len(self._expected) - self._next} tensors are missing")
        os.fsync(self._file.fileno())
        self._file.close()
        self._journal.close()
        self._partial.replace(self._path)
        self._journal_path.unlink()
        self._hasher.shutdown()
        return self._hash.hexdigest()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hasher.shutdown()
        self._file.close()
        self._journal.close()

    def _end_of_tensor(self) -> None:
        if self._next >= self.done:
            self._put(memoryview(bytes(-self.size % self._alignment)))
            self._journal.write(f"{self._checksum}\n")
            self._journal.flush()
        self._next, self._given, self._checksum = self._next + 1, 0, 0

    def _resume(self, header: bytes) -> int:
        """Takes over the file of a killed writer as far as journal and bytes agree; returns the number of entries."""
        if not (self._partial.exists() and self._journal_path.exists()):
            return 0
        checksums = self._journal_path.read_text().split("\n")[:-1]  # the last line may be torn
        self._file = self._partial.open("r+b", buffering=0)
        if bytes(self._file.read(len(header))) != header:
            self._file.close()
            return 0
        self._note(memoryview(header))
        whole = 0
        for (_, size), checksum in zip(self._expected, checksums, strict=False):
            if self._checksum_of(size) != checksum:
                break
            for piece in self._reread(size + -(self.size + size) % self._alignment):
                self._note(memoryview(piece))
            whole += 1
        self._file.seek(self.size)
        self._file.truncate()
        self._journal_path.write_text("".join(f"{checksum}\n" for checksum in checksums[:whole]))
        return whole

    def _checksum_of(self, size: int) -> str:
        """Returns the checksum of the next `size` bytes of the file, which may end earlier."""
        checksum = 0
        for piece in self._reread(size):
            checksum = zlib.crc32(piece, checksum)
        return str(checksum)

    def _reread(self, size: int) -> Iterator[bytes]:
        start = self.size
        for begin in range(start, start + size, STEP):
            yield os.pread(self._file.fileno(), min(STEP, start + size - begin), begin)

    def _put(self, view: memoryview) -> None:
        for begin in range(0, view.nbytes, STEP):
            piece = view[begin : begin + STEP]
            written = 0
            while written < piece.nbytes:  # a full disk takes a part, then reports why
                written += self._file.write(piece[written:])
            # a bytearray compares with memcmp at 18 GB/s; bytes and memoryviews item by item at 0.6 GB/s
            if bytearray(os.pread(self._file.fileno(), written, self.size)) != piece:
                raise OutputError(f"{self._path} reads back other bytes than were written", fix="check the disk")
            self._note(piece)

    def _note(self, piece: memoryview) -> None:
        """Counts bytes that are in the file; a second thread hashes them."""
        self.size += piece.nbytes
        self._hashing.append(self._hasher.submit(self._hash.update, piece))
        while len(self._hashing) > 4:
            self._hashing.popleft().result()
