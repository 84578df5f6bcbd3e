"""Safetensors headers, checked as strictly as the safetensors library does, with better error messages.

A file is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, and the data.
Tensors must fill the data without gap or overlap, and every size must agree with its dtype and shape. Only the header
is read, so an inconsistent file costs no memory.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from quantry.errors import CheckpointError
from quantry.models.files import CheckpointFiles, read_small
from quantry.types import TensorInfo

HEADER_LIMIT = 100_000_000  # bytes; the safetensors library's own limit
INDEX_FILE = "model.safetensors.index.json"
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


def read_tensors(files: CheckpointFiles) -> tuple[TensorInfo, ...]:
    """Returns all tensors of a checkpoint: of the shards in its index, or of its only file(s)."""
    index = _read_index(files) if INDEX_FILE in files.sizes else None
    names = sorted(set(index.values())) if index is not None else _unindexed(files)
    missing = [name for name in names if name not in files.sizes]
    if missing:
        raise CheckpointError(
            f"{INDEX_FILE} names {len(missing)} of {len(names)} shards that are missing, first {missing[0]}",
            fix="download the missing files",
        )
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        for tensor in read_header(files, name):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"tensor {tensor.name} is in both {tensors[tensor.name].file} and {name}",
                    fix="remove the file that does not belong to this checkpoint",
                )
            tensors[tensor.name] = tensor
    if index is not None:
        _check_index(index, tensors)
    return tuple(tensors.values())


def read_header(files: CheckpointFiles, name: str) -> tuple[TensorInfo, ...]:
    """Returns the tensors of one safetensors file."""
    size = files.sizes[name]
    if size < 8:
        raise _damaged(name, f"has {size} bytes, fewer than the 8 of the header length")
    length = int.from_bytes(files.read(name, 0, 8), "little")
    if length > HEADER_LIMIT:
        raise _damaged(name, f"claims a header of {length} bytes, more than the limit of {HEADER_LIMIT}")
    if 8 + length > size:
        raise _damaged(name, f"claims a header of {length} bytes but has only {size - 8} after the length")
    return parse_header(files.read(name, 8, length), name, size)


def parse_header(header: bytes, name: str, size: int) -> tuple[TensorInfo, ...]:
    """Returns the tensors described by the JSON `header` of a file of `size` bytes."""
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(name, f"has a header that is not JSON ({str(error)[:80]})") from error
    if not isinstance(entries, dict):
        raise _damaged(name, f"has a header that is a JSON {type(entries).__name__}, not an object")
    data_start = 8 + len(header)
    tensors = [_tensor(name, key, entry, data_start) for key, entry in entries.items() if key != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    end = data_start
    for tensor in tensors:
        if tensor.start != end:
            fault = "overlaps the one before it" if tensor.start < end else "leaves a gap before it"
            raise _damaged(name, f"has a tensor {tensor.name} at byte {tensor.start} that {fault} (expected {end})")
        end += tensor.nbytes
    if end != size:
        raise _damaged(name, f"has {size} bytes but its header describes {end}")
    return tuple(tensors)


def _tensor(file: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _damaged(file, f"has an entry {name[:80]!r} that is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _damaged(file, f"has a tensor {name[:80]} of unknown dtype {str(dtype)[:40]!r}")
    if not _is_counts(shape):
        raise _damaged(file, f"has a tensor {name[:80]} of shape {str(shape)[:80]}, not a list of sizes")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(file, f"has a tensor {name[:80]} with data_offsets {str(offsets)[:80]}, not [begin, end]")
    tensor = TensorInfo(name, dtype, tuple(shape), file, data_start + offsets[0], offsets[1] - offsets[0])
    bits = tensor.numel * DTYPE_BITS[dtype]
    if bits != 8 * tensor.nbytes:
        raise _damaged(file, f"gives {name[:80]} {tensor.nbytes} bytes where {dtype} {shape} needs {bits / 8:.16g}")
    return tensor


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    """Accepts a list of integers that fit in 63 bits (JSON true and 1.0 are not integers)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key occurs twice")
    return entries


def _read_index(files: CheckpointFiles) -> Mapping[str, str]:
    try:
        weight_map = json.loads(read_small(files, INDEX_FILE))["weight_map"]
        if not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("weight_map is empty or names no files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(INDEX_FILE, f"is not an index of shards ({str(error)[:80]})") from error
    return dict(weight_map)


def _check_index(index: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    absent = [name for name, file in index.items() if name not in tensors or tensors[name].file != file]
    if absent:
        raise CheckpointError(
            f"{INDEX_FILE} places {len(absent)} tensors wrongly, first {absent[0]} in {index[absent[0]]}",
            fix="download the index and the shards of the same revision",
        )


def _unindexed(files: CheckpointFiles) -> list[str]:
    """Returns the files without an index: model.safetensors if it exists (others are adapters or copies), else all."""
    names = sorted(name for name in files.sizes if name.endswith(".safetensors"))
    return ["model.safetensors"] if "model.safetensors" in names else names


def _damaged(name: str, fault: str) -> CheckpointError:
    return CheckpointError(f"{name} {fault}", fix="the file is damaged or not safetensors: download or write it again")
