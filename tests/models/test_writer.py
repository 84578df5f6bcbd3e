"""Shards: the library reads what is written, and a killed writer's file is taken up where its bytes still agree."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from quantry.models.writer import Entry, ShardWriter, safetensors_header

ENTRIES: list[Entry] = [("a", "F32", (5,)), ("b", "U8", (0,)), ("c", "F16", (3, 7)), ("d", "U8", (11,))]
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "a": np.arange(5, dtype=np.float32),
    "b": np.zeros(0, np.uint8),
    "c": np.arange(21, dtype=np.float16).reshape(3, 7),
    "d": np.arange(11, dtype=np.uint8),
}
HEADER = safetensors_header(ENTRIES, {})


def data(name: str) -> memoryview:
    return memoryview(ARRAYS[name].tobytes())


def start(path: Path, names: str, alignment: int = 1) -> ShardWriter:
    """A writer that got some tensors, and then was killed: its file is never completed."""
    writer = ShardWriter(path, HEADER, ENTRIES, alignment)
    for name in names:
        writer.write(name, data(name))
    return writer


def finish(path: Path, alignment: int = 1) -> tuple[int, str]:
    with ShardWriter(path, HEADER, ENTRIES, alignment) as writer:
        writer.skip(writer.done)
        for name, _, _ in ENTRIES[writer.done :]:
            writer.write(name, data(name))
        return writer.done, writer.close()


def test_the_library_reads_it(tmp_path: Path) -> None:
    done, digest = finish(tmp_path / "f.safetensors")
    assert done == 0
    assert digest == hashlib.sha256((tmp_path / "f.safetensors").read_bytes()).hexdigest()
    read = load_file(tmp_path / "f.safetensors")
    assert read.keys() == ARRAYS.keys()
    assert all(np.array_equal(read[name], array) for name, array in ARRAYS.items())
    assert [file.name for file in tmp_path.iterdir()] == ["f.safetensors"]


@pytest.mark.parametrize("alignment", [1, 32])
@pytest.mark.parametrize("names", ["", "a", "ab", "abc", "abcd"])
def test_a_killed_writer_is_taken_up(tmp_path: Path, names: str, alignment: int) -> None:
    finish(tmp_path / "whole", alignment)
    start(tmp_path / "f", names, alignment)
    done, digest = finish(tmp_path / "f", alignment)
    assert done == len(names)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "whole").read_bytes()
    assert digest == hashlib.sha256((tmp_path / "whole").read_bytes()).hexdigest()


def test_tensors_start_on_the_alignment(tmp_path: Path) -> None:
    header = HEADER + bytes(-len(HEADER) % 32)
    with ShardWriter(tmp_path / "f", header, ENTRIES, 32) as writer:
        for name, _, _ in ENTRIES:
            writer.write(name, data(name))
        writer.close()
    content, position = (tmp_path / "f").read_bytes(), len(header)
    for name, _, _ in ENTRIES:
        size = len(data(name))
        assert content[position : position + size] == bytes(data(name))
        assert not any(content[position + size : position + -(-size // 32) * 32])
        position += -(-size // 32) * 32
    assert position == len(content)


def test_half_a_tensor_is_written_again(tmp_path: Path) -> None:
    writer = start(tmp_path / "f", "ab")
    writer.write("c", data("c")[:20])
    done, _ = finish(tmp_path / "f")
    assert done == 2
    finish(tmp_path / "whole")
    assert (tmp_path / "f").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(("fault", "kept"), [("flip", 0), ("shorten", 2), ("tear", 2), ("header", 0), ("journal", 0)])
def test_only_what_agrees_is_taken_over(tmp_path: Path, fault: str, kept: int) -> None:
    """The bytes of a file are trusted as far as its journal's checksums hold."""
    start(tmp_path / "f", "abc")
    partial, journal = tmp_path / "f.partial", tmp_path / "f.journal.partial"
    content = bytearray(partial.read_bytes())
    if fault == "flip":
        content[len(HEADER) + 2] ^= 1
    elif fault == "shorten":
        content = content[:-1]
    elif fault == "header":
        content[12] ^= 1
    partial.write_bytes(content)
    if fault == "tear":
        journal.write_text(journal.read_text()[:-1])
    elif fault == "journal":
        journal.unlink()
    done, _ = finish(tmp_path / "f")
    assert done == kept
    finish(tmp_path / "whole")
    assert (tmp_path / "f").read_bytes() == (tmp_path / "whole").read_bytes()


def test_data_comes_in_order_and_in_full(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "f", HEADER, ENTRIES) as writer:
        with pytest.raises(ValueError, match="44 bytes of c, but a of 20 comes next"):
            writer.write("c", memoryview(bytes(44)))
        with pytest.raises(ValueError, match="21 bytes of a"):
            writer.write("a", memoryview(bytes(21)))
        writer.write("a", memoryview(bytes(8)))
        writer.write("a", memoryview(bytes(12)))
        with pytest.raises(ValueError, match="3 tensors are missing"):
            writer.close()
