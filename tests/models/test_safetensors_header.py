"""Safetensors headers: equal to the library's own reading, and no bad header gets through or blows up."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save

from depth import examples
from memory_file import MemoryFile
from quantry.errors import CheckpointError, QuantryError
from quantry.models.files import LocalFiles
from quantry.models.safetensors import read_header, read_tensors
from tiny_files import SHAPES, MakeFolder


def write(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> LocalFiles:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    (folder / "model.safetensors").write_bytes(size + text + data)
    return LocalFiles(folder)


def entry(dtype: str = "F16", shape: Any = (2,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("shards", [1, 3])
def test_equal_to_the_library(make_folder: MakeFolder, shards: int) -> None:
    folder = make_folder(shards=shards)
    tensors = read_tensors(LocalFiles(folder))
    assert {tensor.name: tensor.shape for tensor in tensors} == SHAPES
    for tensor in tensors:
        with safetensors.safe_open(folder / tensor.file, framework="np") as file:
            stored = file.get_tensor(tensor.name)
        raw = (folder / tensor.file).read_bytes()[tensor.start : tensor.start + tensor.nbytes]
        assert raw == stored.tobytes()
        assert tensor.dtype == "F16"


BAD = {
    "fewer than the 8": (b"", b"", -1),
    "claims a header of 1152921504606846976 bytes, more than the limit": ({}, b"", 1 << 60),
    "has only 2 after the length": ({}, b"", 1000),
    "not JSON": (b"{nonsense", b"", None),
    "not JSON (maximum recursion": (b"[" * 200_000, b"", None),
    "a JSON list, not an object": ([], b"", None),
    "a key occurs twice": (b'{"a": 1, "a": 2}', b"", None),
    "not an object": ({"a": 5}, b"", None),
    "unknown dtype 'F128'": ({"a": entry("F128")}, b"1234", None),
    "unknown dtype 'None'": ({"a": {"shape": [2], "data_offsets": [0, 4]}}, b"1234", None),
    "not a list of sizes": ({"a": entry(shape=(-2,))}, b"1234", None),
    "of shape [9223372036854775808, 0], not a list": ({"a": entry(shape=(1 << 63, 0), offsets=(0, 0))}, b"", None),
    "[true], not a list": ({"a": {**entry(), "shape": [True]}}, b"1234", None),
    "not [begin, end]": ({"a": entry(offsets=(4, 0))}, b"1234", None),
    "gives a 4 bytes where F16 [3] needs 6": ({"a": entry(shape=(3,))}, b"1234", None),
    "overlaps": ({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456", None),
    "leaves a gap": ({"a": entry(), "b": entry(offsets=(8, 12))}, b"123456789012", None),
    "but its header describes": ({"a": entry()}, b"12", None),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_headers_are_named(tmp_path: Path, message: str) -> None:
    header, data, length = BAD[message]
    if length == -1:
        (tmp_path / "model.safetensors").write_bytes(b"123")
        files = LocalFiles(tmp_path)
    else:
        files = write(tmp_path, header, data, length)
    with pytest.raises(CheckpointError) as caught:
        read_header(files, "model.safetensors")
    expected = message.replace("[true]", "[True]")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_index_faults(make_folder: MakeFolder) -> None:
    folder = make_folder(shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    cases: dict[str, Any] = {
        "not an index": [],
        "is empty": {"weight_map": {}},
        "are missing, first gone.safetensors": {"weight_map": {**good["weight_map"], "x": "gone.safetensors"}},
        "tensors wrongly, first ghost": {
            "weight_map": {**good["weight_map"], "ghost": "model-00001-of-00002.safetensors"}
        },
    }
    for message, content in cases.items():
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            read_tensors(LocalFiles(folder))


def test_tensor_in_two_shards(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="is in both"):
        read_tensors(LocalFiles(folder))


GOOD = save({"a": np.ones((4, 8), np.float16), "b": np.zeros(3, np.float32), "c": np.zeros((0, 2), np.int8)})
HEADER_END = 8 + struct.unpack("<Q", GOOD[:8])[0]
NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.floats() | st.booleans() | st.none() | st.just(10**400)
JSON = st.recursive(
    NUMBERS | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
)


def library_accepts(data: bytes) -> bool:
    try:
        safetensors.deserialize(data)
    except Exception:
        return False
    return True


def ours_accepts(data: bytes) -> bool:
    try:
        read_header(MemoryFile(data), "f")
    except QuantryError as error:
        assert len(str(error)) < 600
        return False
    return True


@examples(3000)
@given(
    st.lists(st.tuples(st.integers(0, HEADER_END + 4), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(-8, 8),
)
def test_mutated_bytes(changes: list[tuple[int, int]], growth: int) -> None:
    """Whatever the library refuses we refuse too, with an error of ours and no other exception."""
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    mutated = bytes(data[:growth]) if growth < 0 else bytes(data) + b"\0" * growth
    if ours_accepts(mutated):
        assert library_accepts(mutated)


@examples(2000)
@given(
    st.dictionaries(
        st.text(max_size=4),
        st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["F16", "I8", "F4", "X"]) | JSON,
                "shape": st.lists(NUMBERS, max_size=3) | JSON,
                "data_offsets": st.lists(st.integers(0, 8), min_size=2, max_size=2)
                | st.lists(NUMBERS, max_size=3)
                | JSON,
            },
        )
        | JSON,
        max_size=4,
    )
)
@example({"a": {"dtype": "F16", "shape": [1 << 62, 1 << 62, 0], "data_offsets": [0, 0]}})
def test_inconsistent_entries(header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    memory = MemoryFile(struct.pack("<Q", len(text)) + text + b"12345678")
    try:
        for tensor in read_header(memory, "f"):
            assert 8 + len(text) <= tensor.start <= tensor.start + tensor.nbytes <= memory.sizes["f"]
    except QuantryError:
        pass
    assert memory.total <= memory.sizes["f"]


def test_a_huge_claimed_header_is_not_read() -> None:
    memory = MemoryFile(struct.pack("<Q", 99_999_999), size=50_000_000)
    with pytest.raises(CheckpointError, match="claims a header"):
        read_header(memory, "f")
    assert memory.total == 8
