"""A proof within a time: how many windows it measures, and that its figures are those of the same windows at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantry
from command import command
from demo_artefacts import quantized_demo
from depth import cases, deep
from quantry.errors import QuantryError
from quantry.proof import parts, text
from quantry.proof.measure import Decoded, Measurements, Part
from quantry.proof.reference import Reference
from quantry.types import Proof
from shared import shared

FIGURES = ("kl", "kl_median", "kl_p99", "top1", "perplexity", "reference_perplexity")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_demo(tmp_path_factory, "gguf-q4_k_m")


@pytest.fixture(scope="module")
def prove(tmp_path_factory: pytest.TempPathFactory, gguf: Path) -> Any:
    """Verifies short windows without recording; references are kept apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(shared(tmp_path_factory, "parts-cache", lambda folder: None)))
        yield lambda **options: quantry.verify(gguf, reference="demo", length=48, record=False, **options)


def test_parts_have_the_figures_of_the_whole(prove: Callable[..., Proof]) -> None:
    whole, cut = prove(windows=6), prove(windows=6, proof_time=1e6)
    assert cut.text == whole.text
    assert cut.text["windows"] == cut.text["asked"] == 6
    assert whole.served is not None
    assert cut.served is not None
    for name in FIGURES:
        assert getattr(cut, name) == pytest.approx(getattr(whole, name), rel=1e-4)
        if name in whole.served:
            assert cut.served[name] == pytest.approx(whole.served[name], rel=1e-4)
    for name, interval in whole.intervals.items():
        assert cut.intervals[name] == pytest.approx(interval, rel=1e-4)
    assert cut.served["gap"] == pytest.approx(whole.served["gap"], rel=1e-3, abs=1e-6)
    assert (cut.verdict, len(cut.findings)) == (whole.verdict, len(whole.findings))


@deep
def test_a_clear_verdict_ends_the_measurement(prove: Callable[..., Proof]) -> None:
    clear = prove(windows=10, proof_time=1e6, max_kl=10.0, min_top1=0.01, max_perplexity_ratio=10.0)
    assert (clear.text["windows"], clear.text["asked"]) == (8, 10)
    assert clear.notes[0].startswith("8 of 10 windows were measured: no interval")
    doubtful = prove(windows=10, proof_time=1e6, max_kl=clear.kl, min_top1=0.01, max_perplexity_ratio=10.0)
    assert doubtful.text["windows"] == 10, "the interval of KL reaches over its own value"


def test_a_short_time_still_measures_the_first_part(prove: Callable[..., Proof]) -> None:
    short = prove(windows=6, proof_time=1e-3)
    assert (short.text["windows"], short.text["asked"]) == (parts.FIRST, 6)
    assert short.notes[0] == "2 of 6 windows were measured in the 0 s of --proof-time"
    assert short.text["positions"] == 2 * 47


@pytest.mark.parametrize("limit", cases([None, 1e6], [1e6]))
def test_progress_goes_one_way(limit: float | None, prove: Callable[..., Proof]) -> None:
    steps: list[tuple[int, int, str]] = []
    prove(windows=4, proof_time=limit, progress=lambda *step: steps.append(step))
    assert [step[0] for step in steps] == sorted(step[0] for step in steps)
    assert {step[1] for step in steps} == {1000}
    assert {step[2].split(": ")[0] for step in steps} == {"weights", "4 windows of 48 tokens"}
    assert steps[-1][0] == 1000


class Clock:
    """A time that passes only when windows are measured."""

    def __init__(self, pace: float, fixed: float = 0.0) -> None:
        self.now, self.pace, self.fixed = 1000.0, pace, fixed
        self.cuts: list[tuple[int, int]] = []

    def measure(self, places: range, like: Reference | None) -> Part:
        self.now += len(places) * self.pace + (0 if like else self.fixed)
        self.cuts.append((places.start, places.stop))
        kept = Reference((text.Window((1, 2)),) * len(places), 8, 8, None, {}, (), 0.0, len(places) * 1.0, Path())
        return Part(kept, Decoded([], 0.0), None, len(places), len(places) * (self.pace - 1.0))


@pytest.mark.parametrize(
    ("seconds", "pace", "fixed", "cuts"),
    [
        (1000, 2.0, 0.0, [(0, 2), (2, 4), (4, 8), (8, 16)]),  # all
        (33, 2.0, 0.0, [(0, 2), (2, 4), (4, 8), (8, 16)]),  # just
        (31, 2.0, 0.0, [(0, 2), (2, 4), (4, 8), (8, 12), (12, 14), (14, 15)]),  # the last parts are halved
        (10, 2.0, 4.0, [(0, 2), (2, 3)]),  # what is done once counts as time, but not as pace
        (3, 2.0, 0.0, [(0, 2)]),
    ],
)
def test_parts_fill_the_time(
    seconds: float, pace: float, fixed: float, cuts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(pace, fixed)
    monkeypatch.setattr(parts, "monotonic", lambda: clock.now)
    measured, notes = parts.measure_parts(16, seconds, clock.measure, lambda _: False)
    assert clock.cuts == cuts
    assert measured.text_windows == cuts[-1][1]
    assert bool(notes) == (cuts[-1][1] < 16)
    assert clock.now - 1000 <= max(seconds, 2 * pace + fixed)


def test_a_part_for_an_engine_that_starts_slowly() -> None:
    clock = Clock(1.0)
    measured, _ = parts.measure_parts(32, 1e6, clock.measure, lambda found: found.text_windows > 8, first=parts.ENOUGH)
    assert clock.cuts == [(0, 8), (8, 16)]
    assert measured.text_windows == 16


def test_the_time_before_the_windows_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2.0)
    monkeypatch.setattr(parts, "monotonic", lambda: clock.now)
    parts.measure_parts(16, 30, clock.measure, lambda _: False, started=clock.now - 21)
    assert clock.cuts == [(0, 2), (2, 4)]


def test_fewer_windows_than_a_part_and_no_limit() -> None:
    clock = Clock(1.0)
    one, notes = parts.measure_parts(1, 5.0, clock.measure, lambda _: False)
    assert (one.text_windows, notes) == (1, ())
    every, notes = parts.measure_parts(7, None, clock.measure, lambda _: True)
    assert (every.text_windows, notes, clock.cuts) == (7, (), [(0, 1), (0, 7)])


def test_nothing_is_decided_by_few_windows() -> None:
    clock, asked = Clock(1.0), list[int]()

    def decided(measured: Measurements) -> bool:
        asked.append(measured.text_windows)
        return True

    measured, _ = parts.measure_parts(64, 1e6, clock.measure, decided)
    assert (measured.text_windows, asked) == (parts.ENOUGH, [parts.ENOUGH])


@pytest.mark.parametrize("seconds", [0.0, -3.0, float("nan"), float("inf")])
def test_no_time_is_refused(seconds: float, gguf: Path) -> None:
    with pytest.raises(QuantryError, match="proof cannot be made in .*--proof-time 3m"):
        quantry.verify(gguf, reference="demo", proof_time=seconds)
    with pytest.raises(QuantryError, match="not a number of seconds"):
        quantry.verify(gguf, reference="demo", proof_time="3m")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "line"), [("soon", "no time, such as 90s"), ("0", "cannot be made"), ("-1m", "cannot be made")]
)
def test_a_wrong_time_is_one_line(words: str, line: str, gguf: Path) -> None:
    done = command("verify", gguf, "--proof-time", words)
    assert done.returncode == 2
    assert line in " ".join(done.stderr.split())
