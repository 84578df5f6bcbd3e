"""Windows that nothing was calibrated on."""

from pathlib import Path

import pytest
import torch

from quantry.jobs.auto import damage
from quantry.jobs.auto.calibrated_model import CalibratedModel, open_calibrated
from quantry.jobs.auto.held_back import TOKENS, held_back
from quantry.models.reader import local_folder
from quantry.models.tokenizer import load_tokenizer
from quantry.quantizing.calibration.data import Data
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.calibration.text import load

LENGTH = 64


def opened(data: Data, samples: int) -> CalibratedModel:
    return open_calibrated("demo", CalibrationOptions(data, samples, LENGTH), torch.device("cpu"))


def test_they_follow_those_of_the_job() -> None:
    model = opened(None, 4)
    held = held_back(model)
    more = load(None, load_tokenizer(local_folder("demo")), samples=4 + TOKENS // LENGTH, length=LENGTH).tokens
    assert held.unseen
    assert len(held.windows) == TOKENS // LENGTH
    assert (*model.text.tokens, *held.windows) == more


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text with seven windows of the demo's tokens."""
    tokenizer = load_tokenizer(local_folder("demo"))
    source = load(None, tokenizer, samples=8, length=LENGTH)
    words = str(tokenizer.decode([token for window in source.tokens for token in window if token != source.bos]))
    file = tmp_path / "short.txt"
    file.write_text(words[: len(words) * 15 // 16].replace("\n", " "))
    return file


def test_a_text_that_ends_soon(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are, in halves; then the job's own without gradients, and at last any."""
    some = held_back(opened(text, 5))
    assert some.unseen
    assert len(some.windows) in (1, 2)
    model = opened(text, 7)
    assert held_back(model).windows == model.text.tokens
    assert not held_back(model).unseen
    monkeypatch.setattr(damage, "GRADIENT_TOKENS", 3 * LENGTH)
    assert held_back(model).windows == model.text.tokens[3:]


def test_each_text_of_a_mixture_is_held_back(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that follow in each text; those of the job, some of each, if one text ends."""
    whole = tmp_path / "whole.txt"
    whole.write_text((local_folder("demo") / "calibration.txt").read_text()[:60_000])
    tokenizer = load_tokenizer(local_folder("demo"))
    model = opened({str(whole): 3, str(text): 1}, 8)
    held = held_back(model)
    assert held.unseen
    parts = [load(file, tokenizer, samples=count, length=LENGTH).tokens for file, count in ((whole, 80), (text, 7))]
    found = [[windows.index(window) for window in held.windows if window in windows] for windows in parts]
    assert [places[0] for places in found] == [6, 2]
    assert [len(places) for places in found] == [12, 4]
    assert any(window in parts[1] for window in held.windows[:4])
    model = opened({str(whole): 1, str(text): 1}, 14)
    monkeypatch.setattr(damage, "GRADIENT_TOKENS", 4 * LENGTH)
    held = held_back(model)
    assert not held.unseen
    assert held.windows == model.text.tokens[4:]
