"""GGUF headers: magic, key-values, tensor table. Only the header is read, in growing chunks, from disk or by range.

Every count and length is checked against the remaining bytes before anything is allocated. Long arrays (a vocabulary
has hundreds of thousands of entries) are skipped and kept as `Skipped`.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from quantry.errors import CheckpointError, ConfigError
from quantry.models.files import CheckpointFiles
from quantry.types import TensorInfo

MAGIC = b"GGUF"
KEPT_ITEMS = 1024  # arrays up to this length are kept: per-layer head counts, not vocabularies
NESTING_LIMIT = 4
COUNT_LIMIT = 1 << 20  # tensors or key-values in one file
ARRAY_LIMIT = 1 << 26  # items of one array
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9

# GGUF key without its architecture prefix -> its name in Hugging Face's config.json
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.dimension_count": "rope_dimension_count",
    "expert_count": "num_experts",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "full_attention_interval": "full_attention_interval",
    "ssm.state_size": "state_size",
    "ssm.inner_size": "mamba_inner_size",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "time_step_rank",
}


@dataclass(frozen=True, slots=True)
class Skipped:
    """An array that was not kept."""

    count: int


@dataclass(frozen=True, slots=True)
class Header:
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_shards(files: CheckpointFiles, name: str, whole: bool = False) -> Header:
    """Reads the header of a GGUF file, or of all parts of a split one; `whole` keeps long arrays too."""
    names = _parts(files, name)
    headers = [read_header(files, part, whole) for part in names]
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise _damaged(tensor.file, f"repeats tensor {tensor.name} of {tensors[tensor.name].file}")
            tensors[tensor.name] = tensor
    return Header(headers[0].metadata, tuple(tensors.values()))


def read_header(files: CheckpointFiles, name: str, whole: bool = False) -> Header:
    """Parses and checks the header of one file; `whole` keeps long arrays too."""
    cursor = _Cursor(files, name, ARRAY_LIMIT if whole else KEPT_ITEMS)
    if files.sizes[name] < 24:
        raise _damaged(name, f"has {files.sizes[name]} bytes, fewer than the 24 of a GGUF header")
    magic, version, tensor_count, item_count = struct.unpack("<4sIQQ", cursor.take(24))
    if magic != MAGIC:
        raise _damaged(name, f"starts with {magic!r}, not {MAGIC!r}")
    if version not in (2, 3):
        hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(
            f"{name} is GGUF version {version}{hint}, but only versions 2 and 3 are supported",
            fix="convert it again with a current llama.cpp",
        )
    metadata = _read_metadata(cursor, item_count)
    tensors = _read_tensor_table(cursor, tensor_count, _alignment(name, metadata))
    return Header(metadata, tensors)


def config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata under the keys of config.json."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError(
            f"general.architecture is {architecture!r}, not a name", fix="convert the model to GGUF again"
        )
    config: dict[str, Any] = {"model_type": architecture, "architectures": [architecture]}
    for key, name in CONFIG_KEYS.items():
        value = metadata.get(f"{architecture}.{key}")
        if value is not None and not isinstance(value, Skipped):
            config[name] = value
    blocks, heads = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if type(blocks) is int and type(heads) is int and 0 < heads < blocks:
        config["num_hidden_layers"] = blocks - heads  # GGUF counts multi-token-prediction heads as blocks
    return config


class _Cursor:
    """Reads a file front to back in chunks that double, so that a header costs few requests and little memory."""

    def __init__(self, files: CheckpointFiles, name: str, kept: int) -> None:
        self._files, self.name, self.size = files, name, files.sizes[name]
        self.kept = kept  # items of the longest array that is kept
        self._buffer, self._start, self._chunk = b"", 0, 1 << 16
        self.position = 0

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise _damaged(self.name, f"needs {count} bytes at byte {self.position} but has {self.left} left")
        begin = self.position - self._start
        if begin + count > len(self._buffer):
            self._chunk = min(self._chunk * 2, 8 << 20)
            self._start = self.position
            self._buffer = self._files.read(self.name, self.position, min(self.left, max(count, self._chunk)))
            begin = 0
        self.position += count
        return self._buffer[begin : begin + count]

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.number("<Q")
        if length > self.left:
            raise _damaged(self.name, f"has a string of {length} bytes at byte {self.position} with {self.left} left")
        return self.take(length).decode("utf-8", errors="replace")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    if count > COUNT_LIMIT or count * 13 > cursor.left:  # at least an empty key, a type and one byte
        raise _damaged(cursor.name, f"claims {count} key-values in {cursor.left} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise _damaged(cursor.name, f"has the key {key[:80]!r} twice")
        metadata[key] = _read_value(cursor, cursor.number("<I"), 0)
    return metadata


def _read_value(cursor: _Cursor, type_number: int, depth: int) -> Any:
    if type_number in SCALARS:
        return cursor.number(SCALARS[type_number])
    if type_number == STRING:
        return cursor.string()
    if type_number == ARRAY and depth < NESTING_LIMIT:
        return _read_array(cursor, depth)
    nested = f"arrays nested deeper than {NESTING_LIMIT}"
    fault = nested if type_number == ARRAY else f"an unknown value type {type_number}"
    raise _damaged(cursor.name, f"has {fault} at byte {cursor.position}")


def _read_array(cursor: _Cursor, depth: int) -> tuple[Any, ...] | Skipped:
    type_number, count = struct.unpack("<IQ", cursor.take(12))
    smallest = struct.calcsize(SCALARS[type_number]) if type_number in SCALARS else 8
    if count > ARRAY_LIMIT or count * smallest > cursor.left:
        raise _damaged(cursor.name, f"claims an array of {count} items with {cursor.left} bytes left")
    if count <= cursor.kept:
        return tuple(_read_value(cursor, type_number, depth + 1) for _ in range(count))
    if type_number in SCALARS:
        for begin in range(0, count * smallest, 1 << 20):
            cursor.take(min(1 << 20, count * smallest - begin))
        return Skipped(count)
    for _ in range(count):
        if type_number == STRING:
            cursor.take(cursor.number("<Q"))
        else:
            _read_value(cursor, type_number, depth + 1)
    return Skipped(count)


def _read_tensor_table(cursor: _Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    name = cursor.name
    if count > COUNT_LIMIT or count * 24 > cursor.left:  # name length, dimension count, type, offset
        raise _damaged(name, f"claims {count} tensors in {cursor.left} bytes")
    rows: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        key, row = _read_tensor_row(cursor)
        if key in rows:
            raise _damaged(name, f"has two tensors named {key[:80]!r}")
        rows[key] = row
    data_start = -(-cursor.position // alignment) * alignment
    tensors = [_tensor(name, key, shape, number, data_start + at) for key, (shape, number, at) in rows.items()]
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if (tensor.start - data_start) % alignment:
            raise _damaged(name, f"has {tensor.name[:80]} at offset {tensor.start - data_start}, not on {alignment}")
        if tensor.start < end:
            raise _damaged(name, f"has a tensor {tensor.name[:80]} that overlaps the one before it")
        end = tensor.start + tensor.nbytes
        if end > cursor.size:
            raise _damaged(name, f"has {cursor.size} bytes but {tensor.name[:80]} ends at {end}")
    return tuple(tensors)


def _read_tensor_row(cursor: _Cursor) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    tensor = cursor.string()
    dimensions = cursor.number("<I")
    if dimensions > 4:
        raise _damaged(cursor.name, f"gives {tensor[:80]!r} {dimensions} dimensions, more than 4")
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))
    type_number, offset = struct.unpack("<IQ", cursor.take(12))
    return tensor, (tuple(reversed(shape)), type_number, offset)


@cache
def block_sizes() -> dict[int, tuple[str, int, int]]:
    """Maps a ggml type number to its name, the weights in a block and the bytes of a block."""
    from gguf import GGML_QUANT_SIZES

    return {int(number): (number.name, weights, nbytes) for number, (weights, nbytes) in GGML_QUANT_SIZES.items()}


def _tensor(file: str, name: str, shape: tuple[int, ...], type_number: int, start: int) -> TensorInfo:
    if type_number not in block_sizes():
        raise CheckpointError(
            f"{file} stores {name[:80]} as the unknown ggml type {type_number}", fix="update the gguf package"
        )
    dtype, weights, nbytes = block_sizes()[type_number]
    row = shape[-1] if shape else 1
    if row % weights:
        raise _damaged(file, f"has a {dtype} tensor {name[:80]} with rows of {row}, not a multiple of {weights}")
    return TensorInfo(name, dtype, shape, file, start, prod(shape) // weights * nbytes)


def _alignment(name: str, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value < 8 or value % 8 or value > 1 << 20:
        raise _damaged(name, f"has general.alignment {str(value)[:40]}, not a multiple of 8 up to {1 << 20}")
    return value


def _parts(files: CheckpointFiles, name: str) -> list[str]:
    match = SHARD.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    missing = [part for part in names if part not in files.sizes]
    if missing or name not in names:
        raise CheckpointError(
            f"{name} is one of {count} parts and {len(missing)} are missing, first {(missing or [name])[0]}",
            fix="download the missing parts into the same folder",
        )
    return names


def _damaged(name: str, fault: str) -> CheckpointError:
    return CheckpointError(f"{name} {fault}", fix="the file is damaged or not GGUF: download or write it again")
