"""`--distil`: training lowers the divergence, changes scales alone, and goes on after a kill where it was."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import quantry
from depth import cases
from killed_jobs import contents
from quantry.blockwise.walk import run
from quantry.errors import QuantryError, RecipeError
from quantry.models.reader import open_checkpoint
from quantry.proof.divergence import full_kl
from quantry.quantizing.calibration.calibrator import load_text
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.distil import training
from quantry.quantizing.distil.in_place import replaced
from quantry.quantizing.distil.training import Training, batches, cut
from quantry.quantizing.sources import open_source
from tiny_models import write_model

SHORT: dict[str, Any] = {"samples": 24, "length": 64, "distil": True, "distil_steps": 6}
SCALES = (".weight_scale", ".scales")


class KilledError(Exception):
    """Stands for a kill."""


@pytest.fixture(autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(training, "RATE", 0.004)  # a few steps that can be seen


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_model(folder, "LlamaForCausalLM", num_hidden_layers=2, hidden_size=256, intermediate_size=256)
    return folder


def divergence(model: Path, artefact: Path) -> float:
    """The KL of an artefact on the text that it was trained on, by the walk that `verify` uses."""
    windows = load_text(open_checkpoint(model), CalibrationOptions(None, SHORT["samples"], SHORT["length"])).tokens
    logits = dict(run(open_source(model), windows))
    means = [float(full_kl(logits[number], made).mean()) for number, made in run(open_source(artefact), windows)]
    return sum(means) / len(means)


HOW: tuple[dict[str, Any], ...] = (
    {"preset": "w4a16-gptq", "group": 32},
    {"preset": "fp8-dynamic"},
    {"preset": "w4a16-awq", "group": 32},
    {"preset": "w2a16", "format": "gptq"},
    {"preset": "w8a8"},
)


@pytest.mark.parametrize("how", cases(HOW, HOW[:2]), ids=str)
def test_only_scales_change(how: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    calibrated = "gptq" in how["preset"] or "awq" in how["preset"]
    text = {name: SHORT[name] for name in ("samples", "length")} if calibrated else {}
    quantry.quantize(llama, tmp_path / "plain", **how, **text)
    made = quantry.quantize(llama, tmp_path / "trained", **how, **SHORT)
    plain, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "trained"))
    assert list(plain) == list(trained)
    changed = {name for name in plain if plain[name].view(torch.uint8).ne(trained[name].view(torch.uint8)).any()}
    assert changed
    assert {name for name in changed if not name.endswith(SCALES)} == set()
    assert any("scales were trained" in note for note in made.notes)
    assert divergence(llama, tmp_path / "trained") < divergence(llama, tmp_path / "plain")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is its embedding."""
    folder: Path = tmp_path_factory.mktemp("gemma")
    write_model(folder, "Gemma2ForCausalLM", num_hidden_layers=2, hidden_size=256, intermediate_size=256)
    return folder


@pytest.mark.parametrize(
    ("family", "preset"),
    cases(
        [("llama", "Q4_K_M"), ("llama", "Q3_K_M"), ("gemma", "Q2_K"), ("llama", "gguf-iq4_xs"), ("llama", "gguf-q5_1")],
        [("gemma", "Q2_K")],
    ),
)
def test_a_gguf_file_keeps_its_size_and_codes(
    family: str, preset: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    llama: Path = request.getfixturevalue(family)
    quantry.quantize(llama, tmp_path / "plain", preset=preset)
    made = quantry.quantize(llama, tmp_path / "trained", preset=preset, **SHORT)
    files = [next((tmp_path / name).glob("*.gguf")) for name in ("plain", "trained")]
    assert files[0].stat().st_size == files[1].stat().st_size
    assert made.files[files[1].name]["sha256"] != ""
    assert open_checkpoint(files[0]).tensors == open_checkpoint(files[1]).tensors
    assert files[0].read_bytes() != files[1].read_bytes()
    assert divergence(llama, files[1]) < divergence(llama, files[0])


@pytest.mark.parametrize("where", ["training", "writing"])
def test_a_killed_job_ends_with_the_same_bytes(
    where: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"preset": "w4a16", "group": 32, **SHORT}
    quantry.quantize(llama, tmp_path / "whole", **how)
    learn = Training._learn

    def dying(self: Training, pieces: Any, step: int, count: int) -> None:
        if step == 4:
            raise KilledError
        learn(self, pieces, step, count)

    with monkeypatch.context() as patched:
        if where == "training":
            patched.setattr(Training, "_learn", dying)
        else:
            patched.setattr("quantry.quantizing.distil.tuning.replaced", _half)
        with pytest.raises(KilledError):
            quantry.quantize(llama, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
    again: list[int] = []

    def noted(self: Training, pieces: Any, step: int, count: int) -> None:
        again.append(step)
        learn(self, pieces, step, count)

    monkeypatch.setattr(Training, "_learn", noted)
    quantry.quantize(llama, tmp_path / "out", **how)
    assert again == ([4, 5] if where == "training" else [])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def _half(folder: Path, tensors: Mapping[str, Tensor]) -> set[str]:
    replaced(folder, dict(list(tensors.items())[: len(tensors) // 2]))
    raise KilledError


def test_the_divergence_is_that_of_plain_arithmetic() -> None:
    generator = torch.Generator().manual_seed(0)
    tables = torch.randn(2, 50, 40, generator=generator, dtype=torch.float64)
    log = torch.zeros(1, requires_grad=True)
    windows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9]]
    trained = Training(
        lambda tokens: tables[0][tokens].float() * log.exp(),
        lambda tokens: tables[1][tokens].float(),
        [log],
        windows,
        0,
    )
    expected = []
    for token in (token for window in windows for token in window):
        p, q = (torch.softmax(table[token], -1) for table in (tables[1], tables[0]))
        expected.append(float((p * (p / q).log()).sum()))
    assert trained.divergence(windows) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_what_gains_nothing_on_held_out_text_is_not_kept() -> None:
    """The lessons ask for another scale than the pieces that are held out."""
    log = torch.zeros(1, requires_grad=True)
    base = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    windows = [[0, 0, 0] if place % 8 == 0 else [1, 1, 1] for place in range(32)]

    def teacher(tokens: Tensor) -> Tensor:
        return base[tokens] * torch.where(tokens == 0, 1.0, 2.0)[..., None]

    trained = Training(lambda tokens: base[tokens] * log.exp(), teacher, [log], windows, 0)
    state = trained.run(20, None, lambda tensors, facts: None, None)
    assert state.after == state.before == pytest.approx(0, abs=1e-7)
    assert float(log.detach()) == 0


def test_pieces_and_batches_have_every_token_once() -> None:
    windows = [list(range(1300)), list(range(7)), [1], list(range(512))]
    pieces = cut(windows)
    assert [len(piece) for piece in pieces] == [512, 512, 276, 7, 512]
    assert sorted(token for batch in batches(pieces) for token in batch.flatten().tolist()) == sorted(
        token for piece in pieces for token in piece
    )
    assert all(batch.numel() <= training.AT_ONCE for batch in batches(pieces))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"preset": "nf4"}, "rounded together"),
        ({"preset": "fp8-tensor"}, "shared with other layers"),
        ({"preset": "bf16"}, "no layer has scales"),
        ({"preset": "gguf-bf16"}, "no layer has scales"),
        ({"preset": "w4a16", "distil_steps": 0}, "0 steps"),
        ({"preset": "w4a16", "distil": False}, "--distil-steps 6 has no use"),
    ],
    ids=str,
)
def test_what_cannot_be_distilled_is_refused(how: dict[str, Any], words: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=words):
        quantry.quantize(llama, tmp_path / "out", **{"group": 32 if how["preset"] == "w4a16" else None, **SHORT, **how})
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_said_first(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantry.quantizing.distil.tuning.memory", lambda: (1 << 20, 1 << 20))
    with pytest.raises(QuantryError, match="needs about .* of memory"):
        quantry.quantize(llama, tmp_path / "out", preset="w4a16", group=32, **SHORT)
