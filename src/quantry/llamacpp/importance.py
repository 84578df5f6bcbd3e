"""Importance matrices: the mean square of each matrix's inputs, as llama-imatrix stores them.

Two forms are read: GGUF (`NAME.in_sum2` and `NAME.counts`, one count for each expert), which is also written, and the
older binary one (sums times the number of calls). An expert that no token reached weighs all inputs equally, as in
llama.cpp.
"""

import hashlib
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantry.errors import CheckpointError, OutputError, RecipeError
from quantry.llamacpp.tensor_map import Target
from quantry.models.files import LocalFiles
from quantry.models.gguf import MAGIC, read_header

Vectors = NDArray[np.float32]  # (matrices, columns)
Sums = tuple[NDArray[Any], NDArray[Any]]  # sums of squares (matrices, columns), and the tokens of each matrix


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """The vectors of a file by GGUF tensor name, and their origin."""

    file: str
    sha256: str
    vectors: Mapping[str, Vectors]
    chunks: int = 0
    dataset: str | None = None


def read(path: Path) -> Importance:
    """Reads and checks a file of importance vectors.

    Raises RecipeError if it cannot be read, CheckpointError if it is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}", fix="check the path after --imatrix") from error
    importance = _read_gguf(path) if data[:4] == MAGIC else _read_binary(path, data)
    for name, vectors in importance.vectors.items():
        if not np.isfinite(vectors).all() or (vectors < 0).any():
            raise CheckpointError(
                f"{path.name} has a negative or infinite importance for {name}", fix="compute the matrix again"
            )
    return importance


def write(path: Path, vectors: Mapping[str, Sums], datasets: Sequence[str], chunk_size: int) -> None:
    """Writes a file as llama-imatrix does: sums of squares and tokens by GGUF tensor name, one row for each expert.

    `chunk_size` is the number of tokens in a window; the tensor with the most tokens gives the number of windows.
    Raises OutputError if the sums are not finite or the file cannot be written.
    """
    from gguf import GGUFWriter

    if not vectors or chunk_size < 1:
        what = f"chunks of {chunk_size} tokens" if vectors else "no tensors"
        raise OutputError(f"an importance matrix with {what} is useless", fix="calibrate on some text first")
    rows = {name: _checked(name, *vectors[name]) for name in sorted(vectors)}
    writer = GGUFWriter(path=None, arch="")
    writer.kv_data = [{}]  # llama-imatrix writes no architecture
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", list(datasets))
    writer.add_uint32("imatrix.chunk_count", int(max(counts.max() for _, counts in rows.values())) // chunk_size)
    writer.add_uint32("imatrix.chunk_size", chunk_size)
    for name, (sums, counts) in rows.items():
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", counts)
    _save(writer, path)


def importance_bytes(targets: Mapping[str, Target]) -> int:
    """Returns the most bytes that the sums of these tensors take in a file."""
    matrices = [target.shape for target in targets.values() if len(target.shape) > 1]
    return sum(4 * prod(shape[:-2]) * (shape[-1] + 1) for shape in matrices)


def _checked(name: str, sums: NDArray[Any], counts: NDArray[Any]) -> tuple[Vectors, Vectors]:
    """Returns the two arrays of a tensor as float32."""
    if sums.ndim != 2 or counts.shape != sums.shape[:1]:
        raise OutputError(
            f"{name} has sums of shape {list(sums.shape)} and counts of shape {list(counts.shape)}",
            fix="give (matrices, columns) and (matrices,)",
        )
    stored = np.ascontiguousarray(sums, np.float32)
    if not np.isfinite(stored).all() or (stored < 0).any() or (counts < 0).any():
        raise OutputError(f"{name} has a negative or infinite importance", fix="calibrate again, in float32")
    return stored, np.ascontiguousarray(counts[:, None], np.float32)


def _save(writer: Any, path: Path) -> None:
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", fix="check the folder") from error
    try:
        os.close(descriptor)
        writer.write_header_to_file(Path(partial))
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except OSError as error:
        Path(partial).unlink(missing_ok=True)
        raise OutputError(
            f"cannot write {path}: {error.strerror}", fix="free some space or check the folder"
        ) from error


def fitting(importance: Importance, targets: Mapping[str, Target]) -> dict[str, Vectors]:
    """Returns the vectors of the tensors of a model; raises RecipeError if they do not fit its shapes."""
    fitted = {}
    for name, vectors in importance.vectors.items():
        if name not in targets:
            continue
        shape = targets[name].shape
        matrices = shape[0] if len(shape) == 3 else 1
        if vectors.size != matrices * shape[-1]:
            raise RecipeError(
                f"{importance.file} has {vectors.size} values for {name}, which needs {matrices * shape[-1]}",
                fix="compute the matrix from this model",
            )
        fitted[name] = vectors.reshape(matrices, shape[-1])
    if not fitted:
        raise RecipeError(
            f"{importance.file} has no tensor of this model", fix="give a matrix that was computed from this model"
        )
    return fitted


def _read_gguf(path: Path) -> Importance:
    files = LocalFiles(path.parent)
    header = read_header(files, path.name)
    arrays = {}
    for tensor in header.tensors:
        if tensor.dtype != "F32":
            raise _damaged(path, f"stores {tensor.name[:80]} as {tensor.dtype}, not F32")
        arrays[tensor.name] = np.frombuffer(files.read(path.name, tensor.start, tensor.nbytes), np.float32)
    vectors = {}
    for name, sums in arrays.items():
        if name.endswith(".in_sum2"):
            matrix = name.removesuffix(".in_sum2")
            counts = arrays.get(f"{matrix}.counts")
            if counts is None or not counts.size or sums.size % counts.size:
                raise _damaged(path, f"has no fitting counts for {matrix[:80]}")
            rows = sums.reshape(counts.size, -1)
            with np.errstate(divide="ignore", invalid="ignore"):
                vectors[matrix] = np.where(counts[:, None] > 0, rows / counts[:, None], np.float32(1))
    if not vectors:
        raise _damaged(path, "has no tensor NAME.in_sum2")
    chunks, datasets = header.metadata.get("imatrix.chunk_count", 0), header.metadata.get("imatrix.datasets")
    dataset = str(datasets[0]) if isinstance(datasets, tuple) and datasets else None
    return Importance(path.name, _digest(path), vectors, chunks if type(chunks) is int else 0, dataset)


def _read_binary(path: Path, data: bytes) -> Importance:
    reader = _Binary(path, data)
    count = reader.number()
    if not 0 < count < 1 << 20:
        raise _damaged(path, f"claims {count} entries")
    vectors = dict(reader.entry() for _ in range(count))
    chunks = reader.number() if reader.left else 0
    dataset = reader.text() if reader.left else None
    return Importance(path.name, _digest(path), vectors, chunks, dataset)


class _Binary:
    """Reads the older form from front to back."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data, self._position = path, data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def number(self) -> int:
        return int(struct.unpack("<i", self._take(4))[0])

    def text(self) -> str:
        return self._take(self.number()).decode("utf-8", errors="replace")

    def entry(self) -> tuple[str, Vectors]:
        name, calls, size = self.text(), self.number(), self.number()
        sums = np.frombuffer(self._take(4 * size), np.float32)
        return name, (sums / np.float32(calls) if calls > 0 else sums)[None]

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= self.left:
            raise _damaged(self._path, f"needs {count} bytes at byte {self._position} and has {self.left} left")
        self._position += count
        return self._data[self._position - count : self._position]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _damaged(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"{path.name} {fault}", fix="it is damaged or no importance matrix: compute it again")
