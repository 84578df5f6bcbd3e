"""The gate: compares measured numbers with the limits of gates.toml. Plain numbers in, findings out; no model needed.

The measured value itself decides. Where its confidence interval straddles the limit the finding says so: the verdict
stands, but more text could change it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import inf, isfinite
from typing import Any, Literal

from quantry import registry
from quantry.errors import QuantryError
from quantry.proof.interval import Interval
from quantry.storage import read_data

_table = partial(read_data, "quantry.proof", "gates.toml")
SERVED = "served."
ENGINE = "served_gap"
OWN = "your limit"
EXAMPLES = {"max_kl": 0.05, "min_top1": 0.95, "max_perplexity_ratio": 1.05}
OWN_LIMITS = {"max_kl": "kl", "min_top1": "top1", "max_perplexity_ratio": "perplexity_ratio"}  # options: measures
Number = float | Interval


@dataclass(frozen=True, slots=True)
class Finding:
    """One number compared with one limit. Field names are the JSON names."""

    name: str  # of the measure
    rule: str  # the source of the limit: a use, a class of presets, the engine
    value: float
    limit: float
    ok: bool
    warning: bool  # a failed limit that does not fail the gate
    straddles: bool  # the confidence interval lies on both sides of the limit
    words: str
    fix: str
    source: str


@dataclass(frozen=True, slots=True)
class _Limit:
    rule: str
    limit: float
    fix: str
    source: str
    warning: bool = False
    exact: bool = False  # no noise is added


def judge(
    measured: Mapping[str, Number], use: str, preset: str | None, own: Mapping[str, float] | None = None
) -> tuple[Finding, ...]:
    """Compares measured numbers with the limits of a use, and with those of a preset that gates.toml knows.

    Limits of one's `own` replace those of the use, and are kept to the digit: no noise is added to them.

    Names are those of `measures` in gates.toml, prefixed with `served.` for the numbers of an engine; other numbers are
    ignored. `noise_floor` is what the 16-bit model itself loses in 16-bit arithmetic; it is added to every KL limit.
    Raises UnknownNameError for an unknown use, and QuantryError if a number is missing or not finite.
    """
    row = _use(use)
    own = own or {}
    _check(measured, (*row["limits"], *own), use)
    noise = _value(measured.get("noise_floor", 0.0))
    findings = [
        _finding(name, number, limit, noise)
        for name, number in measured.items()
        for limit in _limits(name.removeprefix(SERVED), use, preset, own)
    ]
    if "kl" in measured and f"{SERVED}kl" in measured:
        findings.append(_engine(_value(measured["kl"]), _value(measured[f"{SERVED}kl"]), noise))
    return tuple(findings)


def verdict(findings: Iterable[Mapping[str, Any]]) -> Literal["pass", "fail"]:
    """Returns `pass`, or `fail` if a finding (as JSON) is neither ok nor only a warning."""
    return "pass" if all(finding["ok"] or finding["warning"] for finding in findings) else "fail"


def uses() -> dict[str, str]:
    """Returns the available gates, and what each is for."""
    return {name: row["about"] for name, row in _table()["uses"].items()}


def own_limits(**options: float | None) -> dict[str, float]:
    """Returns limits by measure. Raises QuantryError for one that is no number of its measure."""
    for name, limit in options.items():
        most, words = (1.0, "from 0 to 1") if name.startswith("min_") else (inf, "a number of 0 or more")
        if limit is not None and not (isfinite(limit) and 0 <= limit <= most):
            flag = f"--{name.replace('_', '-')}"
            raise QuantryError(f"{flag} {limit} is not {words}", fix=f"write {flag} {EXAMPLES[name]}")
    return {OWN_LIMITS[name]: limit for name, limit in options.items() if limit is not None}


def check_use(name: str) -> None:
    """Raises UnknownNameError if there is no gate of this name."""
    _use(name)


def _use(name: str) -> dict[str, Any]:
    registry.check("gate", name, _table()["uses"])
    row: dict[str, Any] = _table()["uses"][name]
    return row


def _check(measured: Mapping[str, Number], wanted: Sequence[str], use: str) -> None:
    """Raises QuantryError if a number is not finite, or if a limit of the use has no number."""
    odd = next((name for name, number in measured.items() if not all(map(isfinite, _bounds(number)))), None)
    if odd is not None:
        raise QuantryError(
            f"{odd} is {_value(measured[odd])}, not a finite number", fix="look for broken weights: quantry diff"
        )
    missing = [name for name in wanted if name not in measured and SERVED + name not in measured]
    if missing:
        raise QuantryError(
            f"the gate {use} needs {', '.join(missing)}, which was not measured", fix="run quantry verify with a text"
        )


def _limits(name: str, use: str, preset: str | None, own: Mapping[str, float]) -> Iterator[_Limit]:
    table, row = _table(), _use(use)
    if name in own:
        yield _Limit(OWN, own[name], row["fix"], "the command line", exact=True)
    elif name in row["limits"]:
        yield _Limit(f"use {use}", fix=row["fix"], **row["limits"][name])
    for always in table["always"]:
        if always["measure"] == name:
            yield _Limit("every use", **{key: value for key, value in always.items() if key != "measure"})
    rows = (other for other in table["presets"] if any(fnmatchcase(preset or "", match) for match in other["match"]))
    known: dict[str, Any] = next(rows, {}) if preset else {}
    if name in known:
        fix = "it loses too much for its bits: quantize again from the 16-bit model, and look at the tensors named"
        yield _Limit(f"{known['class']} preset", fix=fix, **known[name])


def _finding(name: str, number: Number, limit: _Limit, noise: float) -> Finding:
    measure = _table()["measures"][name.removeprefix(SERVED)]
    value, low, high = _bounds(number)
    bar = limit.limit + (noise if name.removeprefix(SERVED) == "kl" and not limit.exact else 0.0)
    ok = value <= bar if measure["best"] == "low" else value >= bar
    straddles = low <= bar <= high and low < high
    where = "as served, " if name.startswith(SERVED) else ""
    side = f"{'' if ok else 'not '}{'at most' if measure['best'] == 'low' else 'at least'}"
    doubt = "; the confidence interval reaches over the limit: use more text to be sure" if straddles else ""
    shown, shown_bar = (f"{number:.{measure['digits']}f}" for number in (value, bar))
    return Finding(
        name=name,
        rule=limit.rule,
        value=value,
        limit=bar,
        ok=ok,
        warning=limit.warning,
        straddles=straddles,
        words=f"{where}{measure['words']}: {shown}, {side} {shown_bar} ({limit.rule}){doubt}",
        fix="" if ok else limit.fix,
        source=limit.source,
    )


def _engine(decoded: float, served: float, noise: float) -> Finding:
    """Compares the engine with the bytes that it loaded: it must lose neither more nor less than they do."""
    row = _table()["served"]
    bar = row["share"] * decoded + row["plus"]
    return _finding(ENGINE, abs(served - decoded), _Limit("engine", bar + noise, row["fix"], row["source"]), noise)


def _bounds(number: Number) -> tuple[float, float, float]:
    if isinstance(number, int | float):
        return number, number, number
    return number.value, number.low, number.high


def _value(number: Number) -> float:
    return _bounds(number)[0]
