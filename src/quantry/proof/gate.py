"""The gate: measured numbers against the limits of gates.toml. Plain numbers in, findings out; no model is needed.

A limit is held against the measured value itself. Where the confidence interval reaches over the limit the finding says
so: the verdict stands, but more text could turn it.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import Any, Protocol

from quantry.errors import QuantryError, UnknownNameError
from quantry.registry import suggest

SERVED = "served."
ENGINE = "served_gap"
PASS, FAIL = "pass", "fail"


class Interval(Protocol):
    """A measured number with its confidence interval."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


Number = float | Interval


@dataclass(frozen=True, slots=True)
class Finding:
    """One number held against one limit. Field names are the JSON names."""

    name: str  # of the measure
    rule: str  # whose limit it is: a use, a class of presets, the engine
    value: float
    limit: float
    ok: bool
    warning: bool  # it does not fail the gate
    straddles: bool  # the confidence interval lies on both sides of the limit
    words: str
    fix: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Limit:
    rule: str
    limit: float
    fix: str
    source: str
    warning: bool = False


def judge(measured: Mapping[str, Number], use: str, preset: str | None) -> tuple[Finding, ...]:
    """Holds what was measured against the limits of a use and of a preset, if it is one that is known.

    Names are those of `measures` in gates.toml, and the same with `served.` before them for the numbers of an engine;
    other numbers are passed over. `noise_floor` is what the 16-bit model itself loses in another arithmetic, and is
    allowed on top of every limit of KL.
    """
    row = _use(use)
    _check(measured, tuple(row["limits"]), use)
    noise = _value(measured.get("noise_floor", 0.0))
    found = [
        _finding(name, number, limit, noise)
        for name, number in measured.items()
        for limit in _limits(name.removeprefix(SERVED), use, preset)
    ]
    if "kl" in measured and f"{SERVED}kl" in measured:
        found.append(_engine(_value(measured["kl"]), _value(measured[f"{SERVED}kl"]), noise))
    return tuple(found)


def verdict(findings: Sequence[Finding]) -> str:
    """`pass` or `fail`."""
    return PASS if all(finding.ok or finding.warning for finding in findings) else FAIL


def uses() -> dict[str, str]:
    """The gates to choose from, and what each is for."""
    return {name: row["about"] for name, row in _table()["uses"].items()}


def check_use(name: str) -> None:
    """Refuses a gate that there is not."""
    _use(name)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("quantry.proof").joinpath("gates.toml").read_text(encoding="utf-8"))


def _use(name: str) -> dict[str, Any]:
    known = _table()["uses"]
    if name not in known:
        raise UnknownNameError(f"unknown gate {name!r}", fix=suggest(name, tuple(known)))
    row: dict[str, Any] = known[name]
    return row


def _check(measured: Mapping[str, Number], wanted: Sequence[str], use: str) -> None:
    """A gate that nothing was held against must not pass, nor one with numbers that are none."""
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


def _limits(name: str, use: str, preset: str | None) -> Iterator[_Limit]:
    table, row = _table(), _use(use)
    if name in row["limits"]:
        yield _Limit(f"use {use}", fix=row["fix"], **row["limits"][name])
    for always in table["always"]:
        if always["measure"] == name:
            yield _Limit("every use", **{key: value for key, value in always.items() if key != "measure"})
    known: dict[str, Any] = next((other for other in table["presets"] if _matches(preset, other["match"])), {})
    if name in known:
        fix = "it loses too much for its bits: quantize again from the 16-bit model, and look at the tensors named"
        yield _Limit(f"{known['class']} preset", fix=fix, **known[name])


def _matches(preset: str | None, patterns: Sequence[str]) -> bool:
    return preset is not None and any(fnmatchcase(preset, pattern) for pattern in patterns)


def _finding(name: str, number: Number, limit: _Limit, noise: float) -> Finding:
    measure = _table()["measures"][name.removeprefix(SERVED)]
    value, low, high = _bounds(number)
    bar = limit.limit + (noise if name.removeprefix(SERVED) == "kl" else 0.0)
    ok = value <= bar if measure["best"] == "low" else value >= bar
    straddles = low <= bar <= high and low < high
    return Finding(
        name=name,
        rule=limit.rule,
        value=value,
        limit=bar,
        ok=ok,
        warning=limit.warning,
        straddles=straddles,
        words=_words(name, measure, value, bar, limit.rule, ok, straddles),
        fix="" if ok else limit.fix,
        source=limit.source,
    )


def _engine(decoded: float, served: float, noise: float) -> Finding:
    """The engine against the bytes: it must lose neither more nor less than they do."""
    row = _table()["served"]
    bar = row["share"] * decoded + row["plus"]
    return _finding(ENGINE, abs(served - decoded), _Limit("engine", bar + noise, row["fix"], row["source"]), noise)


def _words(name: str, measure: Mapping[str, Any], value: float, bar: float, rule: str, ok: bool, unsure: bool) -> str:
    where = "as served, " if name.startswith(SERVED) else ""
    side = "at most" if measure["best"] == "low" else "at least"
    digits = measure["digits"]
    doubt = "; the confidence interval reaches over the limit: use more text to be sure" if unsure else ""
    word = "" if ok else "not "
    return f"{where}{measure['words']}: {value:.{digits}f}, {word}{side} {bar:.{digits}f} ({rule}){doubt}"


def _bounds(number: Number) -> tuple[float, float, float]:
    if isinstance(number, int | float):
        return number, number, number
    return number.value, number.low, number.high


def _value(number: Number) -> float:
    return _bounds(number)[0]
