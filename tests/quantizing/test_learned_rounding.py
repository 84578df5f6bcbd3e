"""`--learn-rounding`: codes move where gradients point, blocks come nearer to the 16-bit ones, a killed job goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import quantry
from depth import cases
from killed_jobs import contents
from quantry.blockwise.walk import Walk
from quantry.errors import QuantryError, RecipeError
from quantry.models.reader import open_checkpoint
from quantry.numerics.grids import effective_scale
from quantry.quantizing.calibration.calibrator import load_text
from quantry.quantizing.calibration.distillation import drawn
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.distil import rounding
from quantry.quantizing.distil.in_place import replaced
from quantry.quantizing.distil.rounding import Rounding, scaled_like, sentence
from quantry.quantizing.distil.trained import INSIDE, Levels
from quantry.quantizing.distil.training import cut
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.quantizing.sources import open_source
from tiny_models import write_model

TEXT: dict[str, Any] = {"samples": 12, "length": 64}
LEARN: dict[str, Any] = {**TEXT, "learn_rounding": True, "rounding_steps": 8}


class KilledError(Exception):
    """Stands for a kill."""


@pytest.fixture(autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(rounding, "RATE", 0.02)  # a few steps that can be seen


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_model(folder, "LlamaForCausalLM", num_hidden_layers=2, hidden_size=256, intermediate_size=256)
    return folder


def windows(model: Path) -> list[Any]:
    return list(load_text(open_checkpoint(model), CalibrationOptions(None, **TEXT)).tokens)


def block_errors(model: Path, artefact: Path) -> list[float]:
    """The squared error of each block's output relative to the 16-bit model's, both from the start of the model."""
    walks = [Walk(open_source(path)) for path in (model, artefact)]
    text, errors = windows(model), []
    for blocks in zip(*(walk.blocks(text) for walk in walks), strict=True):
        outputs = [torch.cat([output.flatten(0, 1) for output in block.outputs()]).double() for block in blocks]
        errors.append(float((outputs[1] - outputs[0]).square().sum() / outputs[0].square().sum()))
    return errors


HOW: tuple[dict[str, Any], ...] = (
    {"preset": "w4a16", "group": 32},
    {"preset": "w4a16-awq", "group": 32},
    {"preset": "Q3_K_M"},
    {"preset": "w2a16", "format": "gptq"},
    {"preset": "nvfp4a16"},
    {"preset": "gguf-iq4_nl"},
)


@pytest.mark.parametrize("how", cases(HOW, HOW[1:3]), ids=str)
def test_blocks_come_nearer_and_no_byte_is_added(how: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    quantry.quantize(llama, tmp_path / "plain", **how, **(TEXT if "awq" in how["preset"] else {}))
    made = quantry.quantize(llama, tmp_path / "learned", **how, **LEARN)
    plain, learned = (open_checkpoint(tmp_path / name).tensors for name in ("plain", "learned"))
    assert [(tensor.name, tensor.shape, tensor.dtype) for tensor in plain] == [
        (tensor.name, tensor.shape, tensor.dtype) for tensor in learned
    ]
    before, after = (block_errors(llama, tmp_path / name) for name in ("plain", "learned"))
    assert after[-1] < before[-1]
    assert any("codes of" in note and "of 2 blocks were trained" in note for note in made.notes)


def test_one_step_is_that_of_plain_arithmetic(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales of the first block after one long step, against a restatement in float64."""
    monkeypatch.setattr(rounding, "RATE", 0.3)
    monkeypatch.setattr(Rounding, "_better", staticmethod(lambda before, after: True))
    quantry.quantize(llama, tmp_path / "plain", preset="w4a16", group=32)
    quantry.quantize(llama, tmp_path / "learned", preset="w4a16", group=32, **{**LEARN, "rounding_steps": 1})
    plain, learned = (QuantizedModel(tmp_path / name) for name in ("plain", "learned"))
    expected = _one_step(llama, tmp_path / "plain", plain)
    moved = 0
    for module, (codes, logs) in expected.items():
        before, after = plain.read(module), learned.read(module)
        moved += int((before.codes != after.codes).sum())
        assert (after.codes.float() == codes).float().mean() > 0.99, module
        scale = (effective_scale(before.grid, before.params).double() * logs.exp()).to(before.params.scale.dtype)
        assert (after.params.scale == scale).float().mean() > 0.99, module
    assert moved > 1000


def _one_step(model: Path, artefact: Path, stored: QuantizedModel) -> dict[str, tuple[Tensor, Tensor]]:
    teacher, student = (Walk(open_source(path), dtype=torch.float64) for path in (model, artefact))
    pieces = cut(windows(model))
    walks = teacher.blocks(pieces), student.blocks(pieces)  # they free their block when they end
    taught, block = next(walks[0]), next(walks[1])
    lessons = [place for place in range(len(student.batches)) if place % rounding.HELD]
    chosen = lessons[next(iter(drawn(len(lessons), 1, 0)))]
    target, batch = list(taught.outputs())[chosen], student.batches[chosen]
    names = [name for name in stored.schemes if name.startswith(f"{block.name}.")]
    weights = [block.module.get_parameter(name.removeprefix(f"{block.name}.") + ".weight") for name in names]
    for weight in weights:
        weight.requires_grad_(True)
    loss = (block.apply(batch, batch.hidden) - target).square().sum()
    gradients = torch.autograd.grad(loss, weights)
    found = {}
    for name, weight, gradient in zip(names, weights, gradients, strict=True):
        original = taught.module.get_parameter(name.removeprefix(f"{block.name}.") + ".weight").detach()
        tensor = stored.read(name)
        scale = effective_scale(tensor.grid, tensor.params).double()
        codes = tensor.codes.double()
        wide = scale.repeat_interleave(32, 1)
        place = torch.maximum(torch.minimum(original / wide, codes + INSIDE / 2), codes - INSIDE / 2)
        place = place - 0.3 * gradient.sign()
        logs = -0.3 * (gradient * weight.detach()).view(*scale.shape, 32).sum(-1).sign()
        found[name] = place.round().clamp(-8, 7).float(), logs
    return found


@pytest.mark.parametrize("where", cases(["training", "writing"], ["training"]))
def test_a_killed_job_ends_with_the_same_bytes(
    where: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"preset": "w4a16", "group": 32, **LEARN, "distil": True, "distil_steps": 2}
    quantry.quantize(llama, tmp_path / "whole", **how)
    trained, begun = Rounding._trained, []

    def noted(self: Rounding, block: Any) -> Any:
        begun.append(block.index)
        if where == "training" and begun == [0, 1]:
            raise KilledError
        return trained(self, block)

    def half(folder: Path, tensors: Mapping[str, Tensor]) -> set[str]:
        replaced(folder, dict(list(tensors.items())[: len(tensors) // 2]))
        raise KilledError

    monkeypatch.setattr(Rounding, "_trained", noted)
    with monkeypatch.context() as patched:
        if where == "writing":
            patched.setattr("quantry.quantizing.distil.rounding.replaced", half)
        with pytest.raises(KilledError):
            quantry.quantize(llama, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
    begun.append(-1)
    quantry.quantize(llama, tmp_path / "out", **how)
    assert begun[begun.index(-1) + 1 :] == [1]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_block_that_gains_nothing_stays_as_stored(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "RATE", 3.0)  # far too long a step
    quantry.quantize(llama, tmp_path / "plain", preset="w4a16", group=32)
    made = quantry.quantize(llama, tmp_path / "out", preset="w4a16", group=32, **{**LEARN, "rounding_steps": 2})
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "out")]
    assert files[0] == files[1]
    assert any("gained nothing" in note and "codes" in note for note in made.notes)


@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=16, unique=True),
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30),
    st.integers(0, 15),
)
def test_levels_against_plain_search(values: list[int], places: list[float], chosen: int) -> None:
    table = sorted(map(float, values))
    levels, given = Levels(torch.tensor(table)), torch.tensor(places)
    for place, value in zip(places, levels.nearest(given).tolist(), strict=True):
        assert abs(place - value) == min(abs(place - other) for other in table)
    value = table[chosen % len(table)]
    held = levels.held(torch.full_like(given, value), given)
    assert torch.equal(levels.nearest(held), torch.full_like(given, value))
    near = (levels.nearest(given) == value) & ((given - value).abs() <= 0.4)
    assert torch.equal(held[near], given[near])


def test_the_scales_of_a_transform_are_found_again() -> None:
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(96, 64, generator=generator)
    rows, columns = (torch.exp(torch.randn(size, generator=generator)) for size in ((96, 1), (1, 64)))
    scaled = original * rows * columns
    torch.testing.assert_close(scaled_like(original, scaled), scaled, rtol=1e-3, atol=1e-3)
    original[3], original[:, 5] = 0, 0
    assert scaled_like(original, scaled * 0).isfinite().all()


def test_the_sentence_counts_blocks() -> None:
    facts = [{"before": 0.4, "after": 0.2}, {"before": 0.1, "after": 0.1}, {"before": 0.2, "after": 0.1}]
    assert "codes of 2 of 3 blocks" in sentence(facts)
    assert "from 0.3 to 0.15" in sentence(facts)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"preset": "fp8-dynamic"}, "no use for .* as e4m3"),
        ({"preset": "nf4"}, "--learn-rounding cannot train"),
        ({"preset": "gguf-bf16"}, "no layer has codes"),
        ({"preset": "w4a16", "rounding_steps": 0}, "0 steps train nothing; give --rounding-steps"),
        ({"preset": "w4a16", "learn_rounding": False}, "--rounding-steps 8 has no use without --learn-rounding"),
    ],
)
def test_what_has_no_use_is_refused_first(how: dict[str, Any], words: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=words):
        quantry.quantize(llama, tmp_path / "out", **{**LEARN, **how})
    assert not list(tmp_path.iterdir())


def test_one_sample_is_refused_and_two_hold_one_out(llama: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {**LEARN, "preset": "w4a16", "group": 32, "rounding_steps": 1}
    with pytest.raises(QuantryError, match="1 sample is too few to train on"):
        quantry.quantize(llama, tmp_path / "one", **{**how, "samples": 1})
    assert not list(tmp_path.iterdir())
    assert quantry.quantize(llama, tmp_path / "two", **{**how, "samples": 2}).files


def test_a_model_of_stacks_alone_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "moe", "Qwen3MoeForCausalLM")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('preset = "w4a16"\ngroup = 32\n[[rules]]\nmatch = "*self_attn*"\nkeep = true\n')
    with pytest.raises(QuantryError, match="all quantized layers are parts of stacks"):
        quantry.quantize(tmp_path / "moe", tmp_path / "out", recipe=recipe, **LEARN)
    assert not (tmp_path / "out").exists()
