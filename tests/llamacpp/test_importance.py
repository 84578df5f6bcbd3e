"""Importance matrices that are written: as llama-imatrix has them, and with the values of explicit activations."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from depth import FAMILIES, cases
from linear_inputs import WINDOWS, Folder, candidates, inputs_of
from quantry.blockwise.walk import Walk
from quantry.errors import OutputError
from quantry.llamacpp.importance import fitting, read, write
from quantry.llamacpp.tensor_map import targets
from quantry.quantizing.calibration.importance import sums
from quantry.quantizing.calibration.observe import ObservedBlock, collect
from tiny_models import ARCHITECTURES, write_model

MATRICES = {
    "blk.0.attn_q.weight": (np.array([[4.0, 8.0, 2.0]]), np.array([4])),
    "blk.0.ffn_down_exps.weight": (np.array([[3.0, 6.0], [0.0, 0.0], [5.0, 1.0]]), np.array([3, 0, 1])),
}


def test_the_file_has_what_llama_imatrix_writes(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", dict(reversed(MATRICES.items())), ["text.txt", "more.txt"], 2)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(fields) == ["general.type", "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"]
    assert fields["general.type"].contents() == "imatrix"
    assert fields["imatrix.datasets"].contents() == ["text.txt", "more.txt"]
    for name, value in (("imatrix.chunk_count", 2), ("imatrix.chunk_size", 2)):
        assert fields[name].types == [gguf.GGUFValueType.UINT32]
        assert fields[name].contents() == value
    stored = [
        (tensor.name, tensor.tensor_type.name, tensor.shape.tolist(), tensor.data.flatten().tolist())
        for tensor in reader.tensors
    ]
    assert stored == [  # shapes as ggml has them, innermost first
        ("blk.0.attn_q.weight.in_sum2", "F32", [3, 1], [4.0, 8.0, 2.0]),
        ("blk.0.attn_q.weight.counts", "F32", [1, 1], [4.0]),
        ("blk.0.ffn_down_exps.weight.in_sum2", "F32", [2, 3], [3.0, 6.0, 0.0, 0.0, 5.0, 1.0]),
        ("blk.0.ffn_down_exps.weight.counts", "F32", [1, 3], [3.0, 0.0, 1.0]),
    ]


def test_our_own_reader_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", MATRICES, ["text.txt"], 2)
    found = read(tmp_path / "m.gguf")
    assert (found.chunks, found.dataset) == (2, "text.txt")
    assert found.vectors["blk.0.attn_q.weight"].tolist() == [[1.0, 2.0, 0.5]]
    assert found.vectors["blk.0.ffn_down_exps.weight"].tolist() == [[1.0, 2.0], [1.0, 1.0], [5.0, 1.0]]


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, (*FAMILIES, "GraniteMoeSharedForCausalLM")))
def test_entries_are_those_of_explicit_activations(architecture: str, tmp_path: Path) -> None:
    write_model(tmp_path, architecture)
    source = Folder(tmp_path)
    found, _ = targets(source.config, source.checkpoint.tensors)
    known = {target.name: target for target in found}
    vectors = sums(observed(source), known)
    write(tmp_path / "m.gguf", vectors, ["text.txt"], 48)
    importance = read(tmp_path / "m.gguf")
    kind = getattr(transformers, architecture)
    whole = kind.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="eager").eval()
    rows = inputs_of(whole)
    matrices = {name for name, target in known.items() if name.startswith("blk.") and len(target.shape) > 1}
    assert set(vectors) == matrices == set(importance.vectors)
    for name, fitted in fitting(importance, known).items():
        for number, source_of in enumerate(known[name].sources):
            module = source_of.name.removesuffix(".weight")
            given = explicit(rows, module, source_of.expert)
            assert vectors[name][1][number] == (0 if given is None else len(given))
            expected = np.ones(fitted.shape[1]) if given is None else squares(given)
            np.testing.assert_allclose(fitted[number], expected, rtol=2e-4, atol=1e-7)


def explicit(rows: dict[str, torch.Tensor], module: str, expert: int | None) -> torch.Tensor | None:
    """The inputs of a matrix in a run of the whole model, where there were any."""
    names = [*candidates(module)] if expert is None else [f"{name}.{expert}" for name in candidates(module)]
    return next((rows[name] for name in names if name in rows), None)


def squares(rows: torch.Tensor) -> Any:
    """As llama-imatrix sums them: squares in float32, the sum in double."""
    return np.square(rows.numpy()).sum(0, np.float64) / len(rows)


def observed(source: Folder) -> list[ObservedBlock]:
    return [collect(block) for block in Walk(source, batch=3).blocks(WINDOWS)]


def test_an_expert_without_tokens_has_a_count_of_zero(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3MoeForCausalLM", num_experts=16)
    source = Folder(tmp_path)
    found, _ = targets(source.config, source.checkpoint.tensors)
    blocks = [collect(block) for block in Walk(source).blocks([WINDOWS[0][:4]])]
    values, counts = sums(blocks, {target.name: target for target in found})["blk.0.ffn_up_exps.weight"]
    assert int(counts.sum()) == 8
    assert int((counts == 0).sum()) >= 8
    assert (values[counts == 0] == 0).all()
    assert (values[counts > 0] > 0).any(1).all()


@pytest.mark.parametrize(
    ("vectors", "size", "problem"),
    [
        ({}, 2, "no tensors"),
        (MATRICES, 0, "chunks of 0 tokens"),
        ({"a": (np.array([[1.0, np.inf]]), np.array([1]))}, 2, "a has a negative or infinite importance"),
        ({"a": (np.array([[1.0, -1.0]]), np.array([1]))}, 2, "a has a negative or infinite importance"),
        ({"a": (np.ones((2, 3)), np.ones(3))}, 2, r"a has sums of shape \[2, 3\] and counts of shape \[3\]"),
    ],
)
def test_nothing_is_written_of_what_cannot_be(vectors: Any, size: int, problem: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=problem):
        write(tmp_path / "m.gguf", vectors, [], size)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        write(tmp_path / "missing" / "m.gguf", MATRICES, [], 2)


def test_llama_quantize_takes_it(tmp_path: Path) -> None:
    """Its reader, restated; and the program itself where it is installed."""
    write(tmp_path / "m.gguf", MATRICES, ["text.txt"], 2)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert {"imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"} <= set(reader.fields)
    stored = {tensor.name: tensor.data.flatten() for tensor in reader.tensors}
    entries = {name.removesuffix(".in_sum2"): values for name, values in stored.items() if name.endswith(".in_sum2")}
    for name, values in entries.items():
        counts = stored[f"{name}.counts"]
        means = [value / counts[at // (len(values) // len(counts))] for at, value in enumerate(values) if value]
        expected, tokens = MATRICES[name]
        assert means == [value / count for row, count in zip(expected, tokens, strict=True) for value in row if value]
    program = shutil.which("llama-quantize")
    if program:
        command = [program, "--imatrix", str(tmp_path / "m.gguf"), str(tmp_path / "no-model.gguf"), "q4_0"]
        said = subprocess.run(command, capture_output=True, text=True)
        assert "loaded 2 importance matrix entries" in said.stdout + said.stderr
