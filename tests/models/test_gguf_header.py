"""GGUF headers: equal to the gguf library's reading of the same file, and mutations end in one clear error."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from memory_file import MemoryFile
from quantry.errors import CheckpointError, ConfigError, QuantryError
from quantry.models.files import LocalFiles
from quantry.models.gguf import Skipped, config_of, read_header, read_shards


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def raw(keys: bytes = b"", key_count: int = 0, table: bytes = b"", tensor_count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + keys + table


def row(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def test_equal_to_the_library(gguf_file: Path) -> None:
    header = read_header(LocalFiles(gguf_file.parent), gguf_file.name)
    reader = gguf.GGUFReader(gguf_file)
    expected = {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(map(int, reversed(tensor.shape))),
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in reader.tensors
    }
    assert {t.name: (t.dtype, t.shape, t.start, t.nbytes) for t in header.tensors} == expected
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            ours = header.metadata[key]
            theirs = field.contents()
            assert ours == (
                Skipped(len(theirs))
                if isinstance(ours, Skipped)
                else tuple(theirs)
                if isinstance(theirs, list)
                else theirs
            )
    assert header.metadata["tokenizer.ggml.tokens"] == Skipped(3000)


def test_config_of_metadata(gguf_file: Path) -> None:
    config = config_of(read_header(LocalFiles(gguf_file.parent), gguf_file.name).metadata)
    assert config["num_hidden_layers"] == 1
    assert config["num_key_value_heads"] == 2
    assert (
        config_of({"general.architecture": "glm4moe", "glm4moe.block_count": 47, "glm4moe.nextn_predict_layers": 1})[
            "num_hidden_layers"
        ]
        == 46
    )
    with pytest.raises(ConfigError, match="general.architecture is None"):
        config_of({})


def test_every_ggml_type_has_the_librarys_size(tmp_path: Path) -> None:
    for kind, (weights, nbytes) in gguf.GGML_QUANT_SIZES.items():
        table = row("t", (3 * weights, 2)[::1], int(kind))
        header = raw(table=table, tensor_count=1)
        data = header.ljust(-(-len(header) // 32) * 32, b"\0") + bytes(6 * nbytes)
        (tensor,) = read_header(MemoryFile(data), "f").tensors
        assert (tensor.dtype, tensor.nbytes, tensor.shape) == (kind.name, 6 * nbytes, (2, 3 * weights))


ALIGN_KEY = text("general.alignment") + struct.pack("<II", 4, 7)
BAD = {
    "fewer than the 24": b"GGUF",
    "starts with b'GGML'": b"GGML" + raw()[4:],
    "GGUF version 1,": raw(version=1),
    "a big-endian file?": raw(version=3 << 24),
    "claims 1099511627776 key-values": raw(key_count=1 << 40),
    "claims 1099511627776 tensors": raw(tensor_count=1 << 40),
    "a string of 9223372036854775807 bytes": raw(struct.pack("<Q", (1 << 63) - 1) + bytes(20), 1),
    "an unknown value type 99": raw(text("key") + struct.pack("<I", 99) + bytes(16), 1),
    "an array of 1152921504606846976 items": raw(text("key") + struct.pack("<IIQ", 9, 4, 1 << 60) + bytes(16), 1),
    "nested deeper": raw(text("key") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(16), 1),
    "has the key 'a' twice": raw((text("a") + struct.pack("<IB", 0, 1)) * 2, 2),
    "general.alignment 7": raw(ALIGN_KEY, 1),
    "5 dimensions, more than 4": raw(table=text("t") + struct.pack("<I", 5) + bytes(60), tensor_count=1),
    "ggml type 77": raw(table=row("t", (8,), 77), tensor_count=1),
    "rows of 40, not a multiple of 32": raw(table=row("t", (40,), 8), tensor_count=1),
    "ends at": raw(table=row("t", (8,)), tensor_count=1),
    "t ends at 36893488147419103328": raw(table=row("t", (1 << 63, 1)), tensor_count=1),
    "two tensors named 't'": raw(table=row("t", (0,)) * 2, tensor_count=2),
    "at offset 3, not on 32": raw(table=row("t", (0,), 0, 3), tensor_count=1) + bytes(64),
    "overlaps": raw(table=row("t", (64,)) + row("u", (8,), 0, 32), tensor_count=2) + bytes(512),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_headers_are_named(message: str) -> None:
    memory = MemoryFile(BAD[message])
    with pytest.raises(CheckpointError) as caught:
        read_header(memory, "f")
    assert message in str(caught.value)
    assert memory.total <= memory.sizes["f"]


def test_truncation_anywhere_in_the_header_is_refused(gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    end = min(tensor.start for tensor in read_header(MemoryFile(data), "f").tensors)
    for length in [*range(0, end, 97), len(data) - 65]:
        with pytest.raises(CheckpointError):
            read_header(MemoryFile(data[:length]), "f")


def small_file() -> bytes:
    keys = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    keys += text("general.alignment") + struct.pack("<II", 4, 32)
    keys += text("list") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yy")
    header = raw(keys, 3, row("a", (32, 2), 8) + row("b", (5,), 0, 96), 2)
    return header.ljust(-(-len(header) // 32) * 32, b"\0") + np.zeros(32 * 4, np.uint8).tobytes()


GOOD = small_file()


@examples(4000)
@given(st.lists(st.tuples(st.integers(0, 320), st.integers(0, 255)), min_size=1, max_size=4), st.integers(-160, 8))
def test_mutated_bytes(changes: list[tuple[int, int]], growth: int) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position % len(data)] = value
    mutated = bytes(data[:growth]) if growth < 0 else bytes(data) + b"\0" * growth
    memory = MemoryFile(mutated)
    try:
        for tensor in read_header(memory, "f").tensors:
            assert 0 < tensor.start <= tensor.start + tensor.nbytes <= len(mutated)
    except QuantryError as error:
        assert len(str(error)) < 600
    assert memory.total <= 2 * len(mutated)


def test_a_file_of_zeros_does_not_fill_the_memory() -> None:
    """2 TiB of zeros would be 80 billion valid empty rows."""
    memory = MemoryFile(raw(tensor_count=1 << 36), size=1 << 41)
    with pytest.raises(CheckpointError, match="claims"):
        read_header(memory, "f")
    assert memory.total < 1 << 20


def test_split_file(tmp_path: Path, gguf_file: Path) -> None:
    first, second = (tmp_path / f"big-{number:05d}-of-00002.gguf" for number in (1, 2))
    gguf_file.rename(first)
    with pytest.raises(CheckpointError, match="first big-00002-of-00002.gguf"):
        read_shards(LocalFiles(tmp_path), first.name)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="repeats tensor"):
        read_shards(LocalFiles(tmp_path), first.name)
    second.write_bytes(GOOD)
    assert len(read_shards(LocalFiles(tmp_path), first.name).tensors) == 5
