"""Recommends one of the measured settings: pure decisions on figures, without servers.

A setting qualifies if it keeps the limits, if no more requests fail than by default, and if its quality was checked: a
rounded KV cache and another artefact need the verdict of `quantry verify`, speculation an acceptance of 0.6. The
fastest in tok/s is recommended; but a setting with fewer changes is preferred if the difference is within
that of two runs of one setting. A setting recommended for its speed is measured once more, and must be faster than the
default both times.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantry.jobs.load.results import Level
from quantry.jobs.load.slo import SloFinding
from quantry.jobs.load.switches import ARTEFACT, KV, PREFIX, SPECULATION, Change
from quantry.report.sizes import percent, short

PAYS = 0.6  # acceptance from which speculation pays: below, checking wrong guesses costs what right ones gain
LEAST = 0.03  # a smaller gain counts as none, however close two runs were
EXACT = ("auto", "f32", "f16", "bf16", "float16", "bfloat16")  # types of the KV cache without rounding
CLOSE = 8  # bits of a KV cache that costs under 0.3 % of perplexity (the limit in proof/gates.toml)
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ArtefactProof:
    """What quantry.json says about an artefact: the verdict of `quantry verify`, and the KV cache of its recipe."""

    verdict: str | None = None
    gate: str | None = None
    kv: str | None = None

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting and its figures. `objection` says why it does not qualify; it is empty if it does."""

    name: str
    changes: tuple[Change, ...]
    proof: ArtefactProof
    level: Level | None = None
    findings: tuple[SloFinding, ...] = ()
    kv_cache_bytes: int | None = None
    problem: str = ""  # why there are no figures
    gain: float | None = None  # in tok/s, relative to the default
    second: float | None = None  # tok/s of a second run, if it was recommended
    objection: str = ""
    command: tuple[str, ...] = ()

    @property
    def speed(self) -> float:
        return self.level.output_tokens_per_second if self.level else 0.0

    @property
    def keeps_limits(self) -> bool:
        return self.level is not None and all(finding.ok for finding in self.findings)

    def engine(self, name: str) -> float | None:
        """Returns a figure that the engine counts: prefix_hit_rate, acceptance_rate, kv_usage."""
        return getattr(self.level.engine, name) if self.level and self.level.engine else None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended setting, the reason, and all trials with gains and objections; `chosen` is None if none does."""

    trials: tuple[Trial, ...]
    chosen: str | None
    why: str
    notes: tuple[str, ...] = ()


def noise(runs: Sequence[Trial]) -> float:
    """Returns the difference between runs of one setting, as a share of their mean; a gain has to exceed it."""
    speeds = [run.speed for run in runs if run.level]
    mean = sum(speeds) / len(speeds) if speeds else 0.0
    return (max(speeds) - min(speeds)) / mean if mean else 0.0


def judge_trials(trials: Sequence[Trial], runs: Sequence[Trial]) -> tuple[Trial, ...]:
    """Returns every trial with its gain over the mean of the default's `runs`, and its objection."""
    speeds = [run.speed for run in runs if run.level]
    usual = sum(speeds) / len(speeds)
    failed = max(run.level.error_rate for run in runs if run.level)
    rows = (_judged(trial, usual, failed) for trial in trials)
    broken = next((words for run in runs if (words := _broken(run))), "")
    return tuple(row if row.changes else replace(row, objection=broken) for row in rows)


def confirm(trial: Trial, second: Trial, runs: Sequence[Trial]) -> Trial:
    """Returns a recommended trial after its second run, with an objection if that does not confirm it."""
    if second.level is None:
        return replace(trial, objection=f"it could not be measured a second time: {second.problem}")
    failed = max(run.level.error_rate for run in runs if run.level)
    objection = _objection(second, second.level, failed)
    usual = max(run.speed for run in runs)
    default_qualifies = not any(_broken(run) for run in runs)  # otherwise the trial is not recommended for its speed
    if not objection and default_qualifies and min(trial.speed, second.speed) <= usual:
        speeds = f"{short(trial.speed)} and {short(second.speed)} tok/s"
        objection = f"two runs gave {speeds}, and the default up to {short(usual)}: it may not be faster"
    return replace(trial, second=second.speed, objection=objection)


def faster_changes(trials: Sequence[Trial], bar: float) -> list[Change]:
    """Returns the changes to try together: of each switch the fastest that gains more than `bar` in checked quality.

    It ignores the limits: two changes may keep a limit together that neither keeps alone.
    """
    best: dict[str, Trial] = {}
    for trial in trials:
        if len(trial.changes) != 1 or not trial.level or (trial.gain or 0.0) <= bar or _unchecked(trial):
            continue
        group = trial.changes[0].group
        if group not in best or trial.speed > best[group].speed:
            best[group] = trial
    return [trial.changes[0] for trial in best.values()]


def choose(trials: Sequence[Trial], runs: Sequence[Trial]) -> Recommendation:
    """Recommends one of the judged trials; `runs` are those of the default."""
    bar = max(LEAST, noise(runs))
    qualified = [trial for trial in trials if trial.level and not trial.objection]
    notes = tuple(_notes(trials, runs))
    if not qualified:
        fastest = max(trials, key=lambda trial: (trial.level is not None, trial.speed))
        why = f"no setting keeps the limits; the fastest is {fastest.name}: {fastest.objection}"
        return Recommendation(tuple(trials), None, why, notes)
    best = max(qualified, key=lambda trial: trial.speed)
    close = [trial for trial in qualified if trial.speed * (1 + bar) >= best.speed]
    chosen = min(close, key=lambda trial: (len(trial.changes), -trial.speed))
    return Recommendation(tuple(trials), chosen.name, _why(chosen, best, bar), notes)


def _judged(trial: Trial, usual: float, failed: float) -> Trial:
    if trial.level is None:
        return replace(trial, objection=trial.problem)
    gain = trial.speed / usual - 1 if usual else None
    return replace(trial, gain=gain, objection=_objection(trial, trial.level, failed))


def _objection(trial: Trial, level: Level, usual_error_rate: float) -> str:
    failed = f"{level.errors} of {level.errors + level.completed} requests failed: {level.problem}"
    return _unchecked(trial) or (failed if level.error_rate > usual_error_rate else "") or _broken(trial)


def _broken(trial: Trial) -> str:
    return "; ".join(finding.words for finding in trial.findings if not finding.ok)


def _unchecked(trial: Trial) -> str:
    """Says which change of a trial may cost quality that was not checked; returns an empty text if none does."""
    return next((words for change in trial.changes if (words := _unchecked_change(change, trial))), "")


def _unchecked_change(change: Change, trial: Trial) -> str:
    if change.switch == KV:
        return _rounding(change.value, trial.proof)
    if change.switch == ARTEFACT and not trial.proof.passed:
        return f"{change.value} {verdict(trial.proof)}"
    if change.switch in SPECULATION:
        return _low_acceptance(trial.engine("acceptance_rate"))
    return ""


def _rounding(dtype: str, proof: ArtefactProof) -> str:
    """Objects to a rounded KV cache without a passed proof, or with few bits that the artefact was not made for."""
    if dtype in EXACT or (proof.passed and proof.kv is not None and dtype.startswith(proof.kv.partition("-")[0])):
        return ""
    if not proof.passed:
        return f"a {dtype} cache rounds keys and values, and the artefact {verdict(proof)}"
    if _bits(dtype) < CLOSE:
        bits = f"a {dtype} cache has {_bits(dtype)} bits"
        return f"{bits}, and only {CLOSE} or more cost next to nothing: test it on your own task"
    return ""


def verdict(proof: ArtefactProof) -> str:
    """Says what is missing of an artefact's proof."""
    if proof.verdict is None:
        return "has no proof: quantry verify gives it one"
    return f"does not pass the gate {proof.gate}"


def _bits(dtype: str) -> int:
    digits = re.search(r"(\d+)", dtype)
    return int(digits[1]) if digits else 0


def _low_acceptance(acceptance: float | None) -> str:
    if acceptance is None:
        return "the engine does not report how many guesses were right, so speculation cannot be judged"
    if acceptance < PAYS:
        return f"{percent(acceptance)} of the guesses were right, and speculation pays from {percent(PAYS)}"
    return ""


def _why(chosen: Trial, best: Trial, bar: float) -> str:
    assert chosen.level
    figures = f"{short(chosen.speed)} tok/s"
    named = (("the first token", chosen.level.ttft), ("each token after", chosen.level.tpot))
    times = [f"{words} {short(spread.p95)} ms" for words, spread in named if spread]
    shown = f"{figures}, p95 of {' and '.join(times)}" if times else figures
    if chosen.gain is None or not chosen.changes:
        if best is chosen:
            return f"no change is faster than the default: {shown}"
        return f"no change is faster by more than {percent(bar)}, as much as two runs may differ: {shown}"
    return f"{percent(chosen.gain, '+')} against the default: {shown}"


def _notes(trials: Sequence[Trial], runs: Sequence[Trial]) -> list[str]:
    spread = noise(runs)
    noisy = f"two runs of the default differ by {percent(spread)}: measure with more --requests"
    return [*([noisy] if spread > 2 * LEAST else []), *(words for trial in trials if (words := _note(trial, runs[0])))]


def _note(trial: Trial, usual: Trial) -> str | None:
    """Says what a change shows beyond the row of its figures."""
    if len(trial.changes) != 1 or not trial.level or not usual.level:
        return None
    change, acceptance = trial.changes[0], trial.engine("acceptance_rate")
    if change.switch == PREFIX and trial.speed:
        hits = usual.engine("prefix_hit_rate")
        rate = "" if hits is None else f" (hit rate {percent(hits)})"
        return f"the prefix cache{rate} gives {usual.speed / trial.speed:.2f} times the tok/s"
    if change.switch in SPECULATION and acceptance is not None:
        times = trial.speed / usual.speed
        return f"{trial.name}: {percent(acceptance)} of the guesses were right, {times:.2f} times the tok/s"
    if change.switch == KV and not trial.objection and change.value not in EXACT and trial.proof.kv is None:
        bits = _bits(change.value)
        return f"{trial.name}: the proof used a 16-bit cache; {bits} bits usually cost less than 0.3% of perplexity"
    return None
