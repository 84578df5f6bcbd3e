"""Limits on the figures of a level (service level objectives): ttft_p95=500ms, error_rate=1%, ..."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantry import registry
from quantry.errors import QuantryError
from quantry.jobs.load.results import RATES, STATISTICS, TIMES, Level
from quantry.report.sizes import short

LIMITS = (*(f"{time}_{statistic}" for time in TIMES for statistic in STATISTICS), "error_rate", *RATES)
UNITS = {"s": 1000.0, "%": 0.01}


@dataclass(frozen=True, slots=True)
class SloFinding:
    """One figure of one level compared with its limit; a missing figure fails the limit. Names are JSON names."""

    level: str
    name: str
    value: float | None
    limit: float
    ok: bool
    words: str


def parse_limits(texts: Iterable[str]) -> dict[str, float]:
    """Reads limits, several of which a text may hold: `ttft_p95=500ms,error_rate=1%`."""
    return dict(parse_limit(limit) for text in texts for limit in text.split(","))


def parse_limit(text: str) -> tuple[str, float]:
    """Returns the name and value of a limit: ttft_p95=500ms, latency_p99=2s, error_rate=1%, requests_per_second=5.

    Raises QuantryError if the text is not of this form.
    """
    name, _, value = text.partition("=")
    parts = re.fullmatch(r"(\d+\.?\d*(?:e-?\d+)?|\.\d+(?:e-?\d+)?)(ms|s|%)?", value.strip())
    if not parts:
        raise QuantryError(f"{text!r} is not a limit", fix="give one such as ttft_p95=500ms")
    return name.strip(), float(parts[1]) * UNITS.get(parts[2] or "", 1.0)


def check_limits(slo: Mapping[str, float]) -> dict[str, float]:
    """Returns the limits; if there are any, no error is allowed unless `error_rate` says otherwise.

    Raises UnknownNameError for an unknown name, and QuantryError for a value that is not a number of 0 or more.
    """
    for name, value in slo.items():
        registry.check("limit", name, LIMITS)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise QuantryError(f"the limit {name} is {value!r}", fix="give a number of 0 or more")
    return {**slo, **({"error_rate": 0.0} if slo and "error_rate" not in slo else {})}


def judge(levels: Sequence[Level], limits: Mapping[str, float]) -> tuple[SloFinding, ...]:
    """Compares every level with every limit."""
    return tuple(_finding(level, name, value) for level in levels for name, value in limits.items())


def _finding(level: Level, name: str, limit: float) -> SloFinding:
    value = level.figure(name)
    at_least = name in RATES
    ok = value is not None and (value >= limit if at_least else value <= limit)
    side = "within" if ok else "under" if at_least else "over"
    words = "was not measured" if value is None else f"{_shown(name, value)}, {side} the limit of {_shown(name, limit)}"
    return SloFinding(level.name, name, value, limit, ok, f"{level.name}: {name.replace('_', ' ')} {words}")


def _shown(name: str, value: float) -> str:
    if name == "error_rate":
        return f"{value:.1%}"
    return short(value) if name in RATES else f"{short(value)} ms"
