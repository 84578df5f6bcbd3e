"""Which of the measured settings to serve with: pure judgement, on figures that were measured.

A setting may be chosen if it keeps the limits, if no more requests fail than without it, and if it does not cost what
nobody has checked: a rounded KV cache and another artefact need the verdict of `quantry verify`, speculation an
acceptance of 0.6. Of those that may be chosen the fastest is, in tokens a second; but where fewer changes come as close
as two runs of one setting come to each other, fewer changes are better. What is chosen for its speed is measured once
more, and has to be faster than the default both times.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantry.jobs.load.bench import Finding, Level, Spread
from quantry.jobs.load.switches import ARTEFACT, GUESSING, KV, PREFIX, Change

PAYS = 0.6  # acceptance from which speculation pays: below, checking wrong guesses takes what right ones gave
LEAST = 0.03  # a gain under this is none, however alike two runs were
EXACT = ("auto", "f32", "f16", "bf16", "float16", "bfloat16")  # types of the KV cache that round nothing away
CLOSE = 8  # bits of a KV cache that costs under 0.3 % of perplexity (the limit in proof/gates.toml)
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Proof:
    """What quantry.json says of an artefact: the verdict of `quantry verify`, the KV cache it was made for."""

    verdict: str | None = None
    gate: str | None = None
    kv: str | None = None

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting and what came of it. `objection` says why it may not be chosen; nothing if it may."""

    name: str
    changes: tuple[Change, ...]
    proof: Proof
    level: Level | None = None
    findings: tuple[Finding, ...] = ()
    kv_cache_bytes: int | None = None
    problem: str = ""  # why there are no figures
    gain: float | None = None  # of tokens a second, against the default
    second: float | None = None  # tokens a second of a second run, where it was to be chosen
    objection: str = ""
    command: tuple[str, ...] = ()

    @property
    def speed(self) -> float:
        return self.level.output_tokens_per_second if self.level else 0.0

    @property
    def keeps_limits(self) -> bool:
        return self.level is not None and all(finding.ok for finding in self.findings)

    def engine(self, name: str) -> float | None:
        """A figure of the engine's own: prefix_hit_rate, acceptance_rate, kv_usage."""
        return getattr(self.level.engine, name) if self.level and self.level.engine else None


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting to serve with, why, and all trials with gains and objections; None where none keeps the limits."""

    trials: tuple[Trial, ...]
    chosen: str | None
    why: str
    notes: tuple[str, ...] = ()


def noise(runs: Sequence[Trial]) -> float:
    """How far runs of one setting were apart, as a share of their mean; what counts as a gain is above it."""
    speeds = [run.speed for run in runs if run.level]
    mean = sum(speeds) / len(speeds) if speeds else 0.0
    return (max(speeds) - min(speeds)) / mean if mean else 0.0


def judged(trials: Sequence[Trial], runs: Sequence[Trial]) -> tuple[Trial, ...]:
    """Every trial with its gain against the mean of the default's `runs`, and what speaks against it."""
    speeds = [run.speed for run in runs if run.level]
    usual = sum(speeds) / len(speeds)
    failed = max(run.level.error_rate for run in runs if run.level)
    rows = (_judged(trial, usual, failed) for trial in trials)
    broken = next((words for run in runs if (words := _broken(run))), "")
    return tuple(row if row.changes else replace(row, objection=broken) for row in rows)


def confirmed(trial: Trial, second: Trial, runs: Sequence[Trial]) -> Trial:
    """A trial that was to be chosen, after a second run of it; with an objection if that does not bear it out."""
    if second.level is None:
        return replace(trial, objection=f"it could not be measured a second time: {second.problem}")
    failed = max(run.level.error_rate for run in runs if run.level)
    objection = _unchecked(second) or _failing(second.level, failed) or _broken(second)
    usual = max(run.speed for run in runs)
    fine = not any(_broken(run) for run in runs)  # otherwise it is not chosen for its speed
    if not objection and fine and min(trial.speed, second.speed) <= usual:
        speeds = f"{trial.speed:.1f} and {second.speed:.1f} tokens a second"
        objection = f"two runs gave {speeds}, the default up to {usual:.1f}: not faster for certain"
    return replace(trial, second=second.speed, objection=objection)


def winners(trials: Sequence[Trial], bar: float) -> list[Change]:
    """The changes to make together: of each switch the fastest that gains more than `bar` and costs nothing unchecked.

    The limits are not asked here: two changes may keep together what neither keeps alone.
    """
    best: dict[str, Trial] = {}
    for trial in trials:
        if len(trial.changes) != 1 or not trial.level or (trial.gain or 0.0) <= bar or _unchecked(trial):
            continue
        group = trial.changes[0].group
        if group not in best or trial.speed > best[group].speed:
            best[group] = trial
    return [trial.changes[0] for trial in best.values()]


def choose(trials: Sequence[Trial], runs: Sequence[Trial]) -> Choice:
    """The setting to serve with, of trials that were judged; `runs` are those of the default."""
    bar = max(LEAST, noise(runs))
    fine = [trial for trial in trials if trial.level and not trial.objection]
    if not fine:
        return Choice(tuple(trials), None, _none(trials), tuple(_notes(trials, runs)))
    best = max(fine, key=lambda trial: trial.speed)
    close = [trial for trial in fine if trial.speed * (1 + bar) >= best.speed]
    chosen = min(close, key=lambda trial: (len(trial.changes), -trial.speed))
    return Choice(tuple(trials), chosen.name, _why(chosen, best, bar), tuple(_notes(trials, runs)))


def _judged(trial: Trial, usual: float, failed: float) -> Trial:
    if trial.level is None:
        return replace(trial, objection=trial.problem)
    gain = trial.speed / usual - 1 if usual else None
    objection = _unchecked(trial) or _failing(trial.level, failed) or _broken(trial)
    return replace(trial, gain=gain, objection=objection)


def _failing(level: Level, usual: float) -> str:
    if level.error_rate <= usual:
        return ""
    return f"{level.errors} of {level.errors + level.completed} requests failed: {level.problem}"


def _broken(trial: Trial) -> str:
    return "; ".join(finding.words for finding in trial.findings if not finding.ok)


def _unchecked(trial: Trial) -> str:
    """What a trial costs that nobody has checked."""
    return next((words for change in trial.changes if (words := _objection(change, trial))), "")


def _objection(change: Change, trial: Trial) -> str:
    if change.switch == KV:
        return _rounding(change.value, trial.proof)
    if change.switch == ARTEFACT and not trial.proof.passed:
        return f"{change.value} {verdict(trial.proof)}"
    if change.switch in GUESSING:
        return _guessing(trial.engine("acceptance_rate"))
    return ""


def _rounding(kind: str, proof: Proof) -> str:
    """Against a KV cache that rounds: an artefact without a passed proof, and few bits that it was not made for."""
    if kind in EXACT or (proof.passed and proof.kv is not None and kind.startswith(proof.kv.partition("-")[0])):
        return ""
    if not proof.passed:
        return f"a {kind} cache rounds keys and values, and the artefact {verdict(proof)}"
    if _bits(kind) < CLOSE:
        return (
            f"a {kind} cache has {_bits(kind)} bits, and from {CLOSE} on it costs next to nothing: test your own task"
        )
    return ""


def verdict(proof: Proof) -> str:
    if proof.verdict is None:
        return "has no proof: quantry verify gives it one"
    return f"does not pass the gate {proof.gate}"


def _bits(kind: str) -> int:
    found = re.search(r"(\d+)", kind)
    return int(found[1]) if found else 0


def _guessing(acceptance: float | None) -> str:
    if acceptance is None:
        return "nothing was guessed, or the engine does not tell: speculation has to show an acceptance"
    if acceptance < PAYS:
        return f"{acceptance:.0%} of the guesses were right, and speculation pays from {PAYS:.0%}"
    return ""


def _why(chosen: Trial, best: Trial, bar: float) -> str:
    assert chosen.level
    figures = f"{chosen.speed:.1f} tokens a second"
    times = [f"{words} {spread.p95:.4g} ms" for words, spread in _times(chosen.level)]
    shown = f"{figures}, p95 of {' and '.join(times)}" if times else figures
    if chosen.gain is None or not chosen.changes:
        if best is chosen:
            return f"no change is faster than the default: {shown}"
        return f"no change is faster by more than {bar:.0%}, which two runs can differ by: {shown}"
    return f"{chosen.gain:+.0%} against the default: {shown}"


def _times(level: Level) -> list[tuple[str, Spread]]:
    named = (("the first token", level.ttft), ("each token after", level.tpot))
    return [(words, spread) for words, spread in named if spread]


def _none(trials: Sequence[Trial]) -> str:
    best = max(trials, key=lambda trial: (trial.level is not None, trial.speed))
    return f"no setting keeps the limits; the fastest, {best.name}: {best.objection}"


def _notes(trials: Sequence[Trial], runs: Sequence[Trial]) -> list[str]:
    spread = noise(runs)
    found = [f"two runs of the default differ by {spread:.0%}: measure more requests"] if spread > 2 * LEAST else []
    return [*found, *(words for trial in trials if (words := _note(trial, runs[0])))]


def _note(trial: Trial, usual: Trial) -> str | None:
    """What a change shows beyond its row."""
    if len(trial.changes) != 1 or not trial.level or not usual.level:
        return None
    change, acceptance = trial.changes[0], trial.engine("acceptance_rate")
    if change.switch == PREFIX and trial.speed:
        hits = usual.engine("prefix_hit_rate")
        rate = "" if hits is None else f" (hit rate {hits:.0%})"
        return f"the prefix cache{rate} gives {usual.speed / trial.speed:.2f} times the tokens a second"
    if change.switch in GUESSING and acceptance is not None:
        times = trial.speed / usual.speed
        return f"{trial.name}: {acceptance:.0%} of the guesses were right, {times:.2f} times the tokens a second"
    if change.switch == KV and not trial.objection and change.value not in EXACT and trial.proof.kv is None:
        bits = _bits(change.value)
        usual_cost = f"one of {bits} bits costs under 0.3 % of perplexity as a rule"
        return f"{trial.name}: the proof is of a 16-bit cache; {usual_cost}"
    return None
