"""What preset auto measures before it writes, what it says of it, and what it takes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quantry
from demo_artefacts import AUTO_TEXT, measured_demo
from divergences import divergence, logits
from quantry.jobs.auto import rounds as module
from quantry.jobs.auto import trial
from quantry.jobs.auto.calibrated_model import open_calibrated
from quantry.jobs.auto.mixer import AutoOptions
from quantry.jobs.auto.rounds import Rounds
from quantry.jobs.auto.sensitivity import Method, Sensitivity, measure_opened
from quantry.jobs.auto.solver import ItemOption
from quantry.models.reader import demo_folder, local_folder
from quantry.models.tokenizer import load_tokenizer
from quantry.planning.budget import Budget
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.calibration.text import load
from quantry.types import Artefact
from shared import recorded

SIZE = quantry.quantize("demo", "unwritten", preset="gguf-q4_k_m", dry_run=True).bytes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artefact]:
    """A mixture of the demo with the bits of Q4_K_M."""

    def quantized(folder: Path) -> Artefact:
        return quantry.quantize("demo", folder / "out", preset="auto", budget=_bits(), **AUTO_TEXT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(measured_demo(tmp_path_factory)))
        yield recorded(tmp_path_factory, "auto-measured", quantized)


def _bits() -> str:
    return f"{8 * SIZE / quantry.inspect('demo').parameters + 1e-6:.8f}bpw"


def read(artefact: Artefact) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((Path(artefact.path) / "sensitivity.json").read_text())["measured"]
    return measured


def test_the_mixture_and_a_plain_preset_are_measured(made: Artefact) -> None:
    found = read(made)
    losses = {one["name"]: one["kl"] for one in found["candidates"]}
    assert losses.keys() >= {"mixture", "Q4_K_M"}
    assert found["kl"] == min(one["kl"] for one in found["candidates"])
    assert all(one["bytes"] <= SIZE for one in found["candidates"])
    best = next(one["name"] for one in found["candidates"] if one["kl"] == found["kl"])
    assert found["written"] == best
    names = [part["name"] for part in found["parts"]]
    assert {"block 0", "block 7", "attention", "MLP"} <= set(names)
    assert any(name.startswith("token_embd.weight as ") for name in names)
    assert found["unseen"]
    card = (Path(made.path) / "README.md").read_text()
    assert f"nats a token on {found['windows']} held-back windows, " in card
    assert found["words"] in card
    assert f"The predicted divergence is {found['kl']:.3g} nats a token." in made.notes


def test_what_is_said_holds_on_other_text(made: Artefact) -> None:
    demo = local_folder("demo")
    tokens = load(demo_folder() / "held-out.txt", load_tokenizer(demo), samples=16, length=128).tokens
    lost = divergence(logits(demo, tokens), logits(Path(made.path), tokens))
    assert lost == pytest.approx(read(made)["kl"], rel=0.3)


def test_damages_add_up_to_what_was_measured(made: Artefact) -> None:
    content = json.loads((Path(made.path) / "sensitivity.json").read_text())
    found, rules = Sensitivity.from_dict(content), json.loads((Path(made.path) / "quantry.json").read_text())["recipe"]
    kinds = {rule["match"]: rule.get("type") for rule in rules["rules"]}
    total = sum(choice.damage for layer in found.layers if (choice := layer.candidate(kinds[layer.name] or "BF16")))
    assert total == pytest.approx(found.measured["kl"], rel=0.3)


@pytest.mark.usefixtures("made")
def test_a_repeated_job_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial._TrialWalk, "divergences", lambda _: pytest.fail("measured again"))
    told: list[float] = []
    again = quantry.quantize(
        "demo", tmp_path / "out", preset="auto", budget=_bits(), **AUTO_TEXT,
        progress=lambda done, total, _: told.append(done / total),
    )  # fmt: skip
    assert again.bytes <= SIZE
    assert told == sorted(told)


@pytest.mark.usefixtures("made")
def test_a_plain_preset_that_loses_less_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions turned round make a bad mixture, and no measurement mends it."""
    monkeypatch.setattr(module, "MOST", 0)
    method, options = Method("gguf", "gptq", "awq"), AutoOptions()
    model = open_calibrated("demo", CalibrationOptions(None, **AUTO_TEXT), torch.device("cpu"))
    known = measure_opened(model, method)
    worst = [
        replace(layer, candidates=tuple(replace(one, damage=1 / (one.damage + 1e-9)) for one in layer.candidates))
        for layer in known.layers
    ]
    chosen = Rounds(model, method, options, {"fp8-dynamic"}, Budget(SIZE, "that size"), None)
    recipe, found = chosen.choose(replace(known, layers=tuple(worst)))
    assert found.measured["written"] == "Q4_K_M"
    assert found.measured["words"].startswith("Q4_K_M loses ")
    assert ", the mixture " in found.measured["words"]
    assert found.measured["words"].endswith(": its types are written.")
    types = {rule.match: rule.type for rule in recipe.rules}
    assert types["token_embd.weight"] == "Q6_K"
    assert "Q4_K" in types.values()


def test_neighbours_of_a_choice() -> None:
    options = [ItemOption(name, size, damage) for name, size, damage in (
        ("a", 1, 9.0), ("b", 2, 4.0), ("worse", 3, 5.0), ("c", 4, 2.0), ("d", 5, 1.0),
    )]  # fmt: skip
    names = [option.name for option in module._around(options, options[3])]
    assert names == ["b", "c", "d"]
    assert [option.name for option in module._around(options, options[0])] == ["a", "b"]
    assert [option.name for option in module._around(options, options[2])] == ["b", "worse", "c"]
