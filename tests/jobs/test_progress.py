"""Progress of long jobs: one way, one total, moving from the first part of the work to the last."""

from pathlib import Path
from typing import Any

import pytest

import quantry
from quantry.report.stages import named, of_all, stages
from tiny_models import write_model

TEXT: dict[str, Any] = {"samples": 2, "length": 32}
Steps = list[tuple[int, int, str]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_model(folder, "LlamaForCausalLM", num_hidden_layers=4)
    return folder


@pytest.mark.parametrize(
    ("job", "first"),
    [
        ({"preset": "w4a16-gptq", "group": 32, **TEXT}, "calibrating model.layers.0"),
        ({"preset": "gguf-q4_k_m", "imatrix": "auto", "keep_odd": True, **TEXT}, "calibrating: model.layers.0"),
        ({"preset": "auto", "budget": "9bpw", **TEXT}, "looking where bits matter: "),
    ],
    ids=["calibrated", "importance matrix", "auto"],
)
def test_quantizing_moves_on_while_it_measures(
    job: dict[str, Any], first: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path / "cache"))
    steps: Steps = []
    quantry.quantize(llama, tmp_path / "out", **job, progress=lambda *step: steps.append(step))
    shares = [done / total for done, total, _ in steps]
    assert shares == sorted(shares), steps
    assert shares[-1] == 1
    assert {total for _, total, _ in steps} == {1000}
    measuring = [share for share, step in zip(shares, steps, strict=True) if step[2].startswith(first.split(" ")[0])]
    assert any(step[2].startswith(first) for step in steps)
    assert measuring[-1] - measuring[0] > 0.3, "it stands still while it measures"


def test_a_diff_is_one_piece_of_work(llama: Path, tmp_path: Path) -> None:
    quantry.quantize(llama, tmp_path / "out", preset="gguf-q8_0", keep_odd=True)
    steps: Steps = []
    quantry.diff(tmp_path / "out", llama, windows=2, length=32, progress=lambda *step: steps.append(step))
    shares = [done / total for done, total, _ in steps]
    assert shares == sorted(shares), steps
    assert [label for _, _, label in steps][:5] == [
        *(f"A: model.layers.{index}" for index in range(4)),
        "B: model.layers.0",
    ]
    assert shares[-1] > 0.9


def test_stages_share_one_progress() -> None:
    steps: Steps = []
    shown = stages(lambda *step: steps.append(step), {"none": 0, "first": 1, "second": 3})
    for name, done, total in (("first", 0, 2), ("first", 1, 2), ("first", 2, 2), ("second", 1, 3), ("second", 0, 0)):
        report = shown[name]
        assert report is not None
        report(done, total, name)
    assert [step[0] for step in steps] == [0, 125, 250, 500, 250]
    assert {step[1] for step in steps} == {1000}
    assert stages(None, {"first": 1}) == {"first": None}


def test_parts_count_for_all_or_for_the_time() -> None:
    steps: Steps = []
    used = [0.0]
    report = of_all(named(lambda *step: steps.append(step), "words"), range(2, 4), 8, lambda: used[0])
    assert report is not None
    report(1, 2, "a")
    used[0] = 0.9
    report(2, 2, "b")
    used[0] = 7.0
    report(2, 2, "c")
    assert steps == [(38, 100, "words: a"), (90, 100, "words: b"), (100, 100, "words: c")]
    assert named(None, "words") is None
    assert of_all(None, range(1), 1, lambda: 0.0) is None
