"""Calibrated jobs on every architecture and on mixtures of experts, layer by layer."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import quantry
from depth import FAMILIES, cases
from divergences import divergence, logits, windows
from linear_inputs import inputs_of
from quantizing.calibration_text import statistics
from quantry.llamacpp import importance
from quantry.methods.rounders import gptq
from quantry.models.reader import open_checkpoint
from quantry.models.tokenizer import load_tokenizer
from quantry.models.weights import PlainWeights
from quantry.numerics import ggml
from quantry.quantizing.calibration.text import load
from quantry.quantizing.sources import open_source
from shared import TinyModel
from tiny_models import ARCHITECTURES, write_model

pytestmark = pytest.mark.usefixtures("exact_store")
TEXT: dict[str, Any] = {"samples": 16, "length": 64}
POST_NORM = "Olmo2ForCausalLM"
MOE = "Qwen3MoeForCausalLM"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, which is written once."""

    @cache
    def folder(architecture: str) -> Path:
        path: Path = tmp_path_factory.mktemp(architecture)
        write_model(path, architecture)
        return path

    return folder


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, FAMILIES))
def test_every_architecture(architecture: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    """A scale that some reader of a channel does not take up, or a Gram matrix of another input, costs far more."""
    source = model(architecture)
    tokens = windows(source, **TEXT)
    wanted = logits(source, tokens)
    lost = {}
    for preset in ("w4a16", "w4a16-gptq", "w4a16-asym", "w4a16-awq"):
        how = TEXT if preset in ("w4a16-gptq", "w4a16-awq") else {}
        artefact = quantry.quantize(
            source, tmp_path / preset, preset=preset, group=16, format="compressed-tensors", **how
        )
        assert artefact.quantized_layers > 6
        lost[preset] = divergence(wanted, logits(tmp_path / preset, tokens))
        told = any("are not scaled" in note for note in artefact.notes)
        assert not told or preset == "w4a16-awq"
        if architecture == POST_NORM and preset == "w4a16-awq":
            assert told
    assert lost["w4a16-gptq"] < lost["w4a16"], lost
    assert lost["w4a16-awq"] < 1.15 * lost["w4a16-asym"], lost


def test_transformers_loads_what_is_written(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Its logits are those of the weights that we decode, scaled norms and all."""
    from transformers import AutoModelForCausalLM

    for preset in ("w4a16-gptq", "w4a16-awq"):
        out = tmp_path / preset
        quantry.quantize(model("LlamaForCausalLM"), out, preset=preset, group=32, format="compressed-tensors", **TEXT)
        served = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        tokens = windows(model("LlamaForCausalLM"), samples=4, length=64)
        with torch.no_grad():
            found = served(torch.tensor(tokens)).logits.log_softmax(-1)
        assert torch.allclose(found, logits(out, tokens), atol=2e-2)
        assert not torch.allclose(found, logits(model("LlamaForCausalLM"), tokens), atol=2e-2)


def test_gguf_of_experts_by_hand(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Every expert by the tokens that came to it; those that few came to by what all of them saw."""
    source = model(MOE)
    how: dict[str, Any] = {"samples": 40, "length": 64}
    artefact = quantry.quantize(source, tmp_path / "out", preset="gguf-q4_0", rounder="gptq", **how)
    checkpoint = open_checkpoint(source)
    data = load(None, load_tokenizer(source), context=512, **how)
    seen = statistics(PlainWeights(checkpoint, source), data)
    plain, found = open_source(source), open_source(tmp_path / "out")
    for layer in range(2):
        stats, _ = seen.observed(layer).by_module()
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            for expert in range(4):
                module = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
                weight = plain.read(f"{module}.weight")
                wanted = ggml.dequantize(
                    gptq.round_blocks(weight, "Q4_0", gptq.prepare(stats[module])), "Q4_0", weight.shape[1]
                )
                assert torch.equal(found.read(f"{module}.weight"), wanted), module
    quantry.quantize(source, tmp_path / "plain", preset="gguf-q4_0")
    right, ours, nearest = (logits(folder, data.tokens) for folder in (source, tmp_path / "out", tmp_path / "plain"))
    assert divergence(right, ours) < divergence(right, nearest)
    short = [group for layer in range(2) for group in seen.observed(layer).by_module()[1]]
    assert len(short) == sum(int(note.split()[0]) for note in artefact.notes if "have fewer than 256 tokens" in note)


@pytest.mark.parametrize("how", [{"rounder": "gptq"}, {"imatrix": "auto"}, {"rounder": "gptq", "sequential": True}])
def test_tokens_of_every_expert_by_its_router(
    how: dict[str, Any], model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A token counts for each of the two experts with the largest logits of the router."""
    from transformers import Qwen3MoeForCausalLM

    source = model(MOE)
    artefact = quantry.quantize(source, tmp_path / "out", preset="gguf-q4_0", **how, **TEXT)
    loaded = Qwen3MoeForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager").eval()
    seen = inputs_of(loaded, [list(window) for window in windows(source, **TEXT)])
    tokens = TEXT["samples"] * TEXT["length"]
    wanted = {}
    for layer, block in enumerate(loaded.model.layers):
        logits = seen[f"model.layers.{layer}.mlp.gate"] @ block.mlp.gate.weight.detach().double().T
        wanted[str(layer)] = tuple(logits.topk(2).indices.flatten().bincount(minlength=4).tolist())
    assert [sum(counts) for counts in artefact.expert_tokens.values()] == [2 * tokens, 2 * tokens]
    if "sequential" in how:  # the second block reads what the first one gives as stored
        assert artefact.expert_tokens["0"] == wanted["0"]
        return
    assert artefact.expert_tokens == wanted
    content = json.loads((tmp_path / "out" / "quantry.json").read_text())
    assert content["expert_tokens"] == {block: list(counts) for block, counts in wanted.items()}
    ranges = [f"{block}: {min(c)} / {median(c):.0f} / {max(c)}" for block, c in wanted.items()]
    said = f"Tokens per expert (fewest / median / most) by block: {'; '.join(ranges)}."
    assert said in artefact.notes
    assert said in (tmp_path / "out" / "README.md").read_text()
    again = quantry.quantize(source, tmp_path / "out", preset="gguf-q4_0", **how, **TEXT)
    assert again.expert_tokens == artefact.expert_tokens


def test_experts_without_a_token_are_counted(tiny: TinyModel, tmp_path: Path) -> None:
    source = tiny(MOE, num_experts=32)
    few: dict[str, Any] = {"samples": 1, "length": 16}
    artefact = quantry.quantize(source, tmp_path / "out", preset="gguf-q4_0", rounder="gptq", **few)
    without = sum(counts.count(0) for counts in artefact.expert_tokens.values())
    assert without > 0
    assert any(note.startswith(f"{without} of 64 experts got no token: ") for note in artefact.notes)
    dense = quantry.quantize(tiny("LlamaForCausalLM"), tmp_path / "dense", preset="gguf-q4_0", rounder="gptq", **few)
    assert not dense.expert_tokens
    assert "expert_tokens" not in json.loads((tmp_path / "dense" / "quantry.json").read_text())


def test_importance_of_experts_by_plain_loops(model: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    source = model(MOE)
    quantry.quantize(source, tmp_path / "out", preset="gguf-q4_0", imatrix="auto", **TEXT)
    data = load(None, load_tokenizer(source), context=512, **TEXT)
    loaded = Qwen3MoeForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager").eval()
    seen = inputs_of(loaded, [list(window) for window in data.tokens])
    vectors = importance.read(tmp_path / "out" / "calibration" / "imatrix.gguf").vectors
    compared = 0
    for layer in range(2):
        for expert in range(4):
            rows = seen.get(f"model.layers.{layer}.mlp.experts.gate_up_proj.{expert}")
            if rows is not None:
                total = torch.zeros(rows.shape[1], dtype=torch.float64)
                for row in rows:
                    total += row * row
                found = torch.from_numpy(vectors[f"blk.{layer}.ffn_gate_exps.weight"][expert]).double()
                assert torch.allclose(found, total / len(rows), rtol=1e-3)
                compared += 1
    assert compared > 4
