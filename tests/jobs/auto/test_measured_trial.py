"""What mixtures and their parts lose, held against written files and a plain model in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import quantry
from depth import cases
from quantry.blockwise.walk import run
from quantry.jobs.auto import trial as module
from quantry.jobs.auto.calibrated_model import CalibratedModel, open_calibrated
from quantry.jobs.auto.trial import Trial, Variant
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.recipe import Recipe, build
from quantry.quantizing.sources import open_source
from tiny_models import write_model

TEXT: dict[str, Any] = {"samples": 8, "length": 64}
CPU = torch.device("cpu")
KINDS = ("LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM", "Qwen3ForCausalLM")


class Tried:
    """A tiny model, and windows to measure on."""

    def __init__(self, folder: Path, kind: str) -> None:
        write_model(folder / "model", kind)
        self.folder, self.kind = folder, kind
        self.model: CalibratedModel = open_calibrated(folder / "model", CalibrationOptions(**TEXT), CPU)
        self.windows = self.model.text.tokens[:3]
        self.trial = Trial(self.model, self.windows, folder / "cache" / "statistics" / "trials")

    def written(self, **options: Any) -> Path:
        out = self.folder / "out"
        quantry.quantize(self.folder / "model", out, **options, **TEXT)
        return out

    def plainly(self, tensors: dict[str, Tensor]) -> float:
        """The divergence of the whole model with some tensors replaced, in float64."""
        model = getattr(transformers, self.kind).from_pretrained(self.folder / "model", dtype=torch.float64).eval()
        wanted = [_predicted(model, window) for window in self.windows]
        model.load_state_dict({name: tensor.double() for name, tensor in tensors.items()}, strict=False)
        model.tie_weights()
        found = [_predicted(model, window) for window in self.windows]
        return float(
            torch.stack([(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(wanted, found, strict=True)]).mean()
        )


@torch.no_grad()
def _predicted(model: Any, window: tuple[int, ...]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([window]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1)


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Tried]:
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path / "cache"))
    return lambda kind: Tried(tmp_path, kind)


RECIPES: dict[str, dict[str, Any]] = {
    "gguf": {"preset": "gguf-q4_0", "rounder": "gptq", "transform": "awq"},
    "compressed-tensors": {"preset": "w4a16", "group": 32, "rounder": "gptq", "transform": "awq"},
}


@pytest.mark.parametrize("form", RECIPES)
@pytest.mark.parametrize("kind", cases(KINDS, KINDS[1:3]))
def test_a_mixture_loses_what_the_written_file_loses(kind: str, form: str, tried: Callable[[str], Tried]) -> None:
    """The same rounding, whatever the family: the file is made, read back and run."""
    made = tried(kind)
    (found,) = made.trial.measure([Variant(build(RECIPES[form]))])
    out = made.written(**RECIPES[form])
    plain = run(made.model.statistics.walk.source, made.windows)
    stored = run(open_source(out), made.windows)
    expected = torch.stack([_kl(p, q) for (_, p), (_, q) in zip(plain, stored, strict=True)]).mean()
    assert float(expected) > 1e-3
    assert found == pytest.approx(float(expected), rel=5e-3 if form == "gguf" else 0.05)  # a folder has 16-bit norms


def _kl(p: Tensor, q: Tensor) -> Tensor:
    logp, logq = p[:-1].double().log_softmax(-1), q[:-1].double().log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum(-1).mean()


PARTS: dict[str, tuple[str, ...]] = {
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
    "attention": ("self_attn",),
    "last block": ("layers.1.",),
    "ends": ("embed_tokens", "lm_head", "layers.0."),
}


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_parts_against_a_plain_model(kind: str, tried: Callable[[str], Tried]) -> None:
    """Each with an embedding of its own and a tied one; a part that lacks one of its tensors is told apart."""
    made, options = tried(kind), {"preset": "gguf-q4_0", "rounder": "gptq"}
    recipe, source = build(options), open_source(made.written(**options))
    plain = made.model.statistics.walk.source
    rounded = {name: source.read(name) for name in plain.names if "norm" not in name}
    parts = {
        name: frozenset(tensor for tensor in rounded if any(word in tensor for word in words))
        for name, words in PARTS.items()
    }
    there = {name: tensors for name, tensors in parts.items() if tensors}
    assert len(there) == (5 if kind == "LlamaForCausalLM" else 4)
    found = made.trial.measure([Variant(recipe, tensors) for tensors in there.values()])
    for (name, tensors), value in zip(there.items(), found, strict=True):
        expected = made.plainly({tensor: rounded[tensor] for tensor in tensors})
        assert value == pytest.approx(expected, rel=5e-4), name
        fewer = sorted(tensors)[:-1]
        if fewer:
            assert value != pytest.approx(made.plainly({tensor: rounded[tensor] for tensor in fewer}), rel=5e-4), name


def test_a_part_that_is_not_replaced_is_seen(tried: Callable[[str], Tried], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that the oracle is there for, planted."""
    made, options = tried("LlamaForCausalLM"), {"preset": "gguf-q4_0", "rounder": "gptq"}
    recipe, source = build(options), open_source(made.written(**options))
    names = frozenset(name for name in made.model.statistics.walk.source.names if "layers" in name and "proj" in name)
    expected = made.plainly({name: source.read(name) for name in names})
    rounded = module._State.rounded

    def forgetful(state: Any, block: int | None) -> dict[str, str]:
        return {name: how for name, how in rounded(state, block).items() if "v_proj" not in name}

    monkeypatch.setattr(module._State, "rounded", forgetful)
    (found,) = made.trial.measure([Variant(recipe, names)])
    assert found != pytest.approx(expected, rel=5e-4)


def test_variants_side_by_side(tried: Callable[[str], Tried], tmp_path: Path) -> None:
    """Each has what it has alone, on as many windows; all tensors are the whole, and none is nothing."""
    made = tried("Gemma3ForCausalLM")
    first, second = (
        build({"preset": f"gguf-{kind}", "rounder": "gptq", "transform": "awq"}) for kind in ("q4_0", "q8_0")
    )
    names = frozenset(made.model.statistics.walk.source.names)
    some = frozenset(name for name in names if "mlp" in name)
    variants = [
        Variant(first), Variant(first, names), Variant(first, frozenset()), Variant(first, some), Variant(second),
        Variant(first, some, windows=1), Variant(second, some, windows=2),
    ]  # fmt: skip
    together = made.trial.measure(variants)
    assert together[0] == together[1]
    assert together[2] == 0
    assert together[4] < 0.1 * together[0]
    alone = Trial(made.model, made.windows, tmp_path / "other")
    assert together == pytest.approx([alone.measure([variant])[0] for variant in variants], rel=1e-4)
    fewer = Trial(made.model, made.windows[:1], tmp_path / "fewer")
    assert together[5] == pytest.approx(fewer.measure([Variant(first, some)])[0], rel=1e-4)


def test_nothing_is_measured_twice(tried: Callable[[str], Tried], monkeypatch: pytest.MonkeyPatch) -> None:
    made = tried("LlamaForCausalLM")
    recipes = [build({"preset": f"gguf-{kind}", "rounder": "gptq"}) for kind in ("q4_0", "q8_0")]
    told: list[tuple[int, int]] = []
    first = made.trial.measure([Variant(recipes[0])], lambda done, total, _: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    seen: list[int] = []
    walked = module._TrialWalk.__init__

    def counted(walk: Any, model: Any, windows: Any, variants: list[Variant], progress: Any) -> None:
        seen.append(len(variants))
        walked(walk, model, windows, variants, progress)

    monkeypatch.setattr(module._TrialWalk, "__init__", counted)
    budgeted = build({"preset": "gguf-q4_0", "rounder": "gptq"}, "a size in words")
    both = made.trial.measure([Variant(budgeted), Variant(recipes[1])])
    assert seen == [1]
    assert both[0] == first[0]
    for file in (made.folder / "cache" / "statistics" / "trials").iterdir():
        file.write_text('{"kl": NaN}')
    assert made.trial.measure([Variant(recipe) for recipe in recipes]) == both
    assert seen == [1, 2]


def test_rounding_without_a_text(tried: Callable[[str], Tried]) -> None:
    """A recipe that needs no statistics gathers none."""
    made = tried("LlamaForCausalLM")
    recipe: Recipe = build({"preset": "gguf-q8_0"})
    (found,) = made.trial.measure([Variant(recipe)])
    assert 0 < found < 0.01
    assert made.model.statistics.walked == 0
