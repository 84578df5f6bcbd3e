"""The figures of a level of load, from guidellm's report of it.

Times are in milliseconds: `ttft` until the first token, `tpot` between tokens after it (each request counts as often as
it has tokens), `latency` until the last. Only requests that were answered in full count, except in the errors.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantry.jobs.load.metrics import Figures
from quantry.jobs.load.scenario import Profile

STATISTICS = ("mean", "p50", "p95", "p99")
TIMES = {  # guidellm's name, and the factor to milliseconds
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "latency": ("request_latency", 1000.0),
}
RATES = ("output_tokens_per_second", "requests_per_second")
STATUS = re.compile(r"(?:Client|Server) error '([^']+)'")  # the text of httpx, which guidellm passes on


@dataclass(frozen=True, slots=True)
class Spread:
    """A time over the requests of a level, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Level:
    """The figures of one level; times are None if no request was answered. Field names are the JSON names."""

    name: str
    concurrency: int | None  # requests at once
    rate: float | None  # requests that arrive per second
    seconds: float
    completed: int
    errors: int
    unfinished: int  # at the end of the level
    problem: str  # the server's most frequent error
    ttft: Spread | None
    tpot: Spread | None
    latency: Spread | None
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens: float  # of a request, as the server counts them
    answer_tokens: float
    at_once: float  # requests that ran at the same time, on average
    engine: Figures | None = None
    warnings: tuple[str, ...] = ()

    @property
    def error_rate(self) -> float:
        ended = self.completed + self.errors
        return self.errors / ended if ended else 1.0

    def figure(self, name: str) -> float | None:
        """Returns the figure that a limit of this name is compared with."""
        if name in (*RATES, "error_rate"):
            return float(getattr(self, name))
        time, _, statistic = name.rpartition("_")
        spread = getattr(self, time)
        return None if spread is None else float(getattr(spread, statistic))


def level_of(profile: Profile, report: Mapping[str, Any], figures: Figures | None) -> Level:
    """Returns the figures of guidellm's report of a level, and those that the engine counted."""
    metrics, totals = report["metrics"], report["metrics"]["request_totals"]
    times = {name: _spread(metrics[key]["successful"], scale) for name, (key, scale) in TIMES.items()}
    return Level(
        name=profile.name,
        concurrency=profile.concurrency,
        rate=profile.rate,
        seconds=float(report["duration"]),
        completed=int(totals["successful"]),
        errors=int(totals["errored"]),
        unfinished=int(totals["incomplete"]),
        problem=_problem(report),
        requests_per_second=_mean(metrics, "requests_per_second"),
        output_tokens_per_second=_mean(metrics, "output_tokens_per_second"),
        prompt_tokens=_mean(metrics, "prompt_token_count"),
        answer_tokens=_mean(metrics, "output_token_count"),
        at_once=_mean(metrics, "request_concurrency"),
        engine=figures,
        warnings=tuple(str(warning["message"]) for warning in report.get("warnings") or ()),
        **times,
    )


def _spread(times: Mapping[str, Any], scale: float) -> Spread | None:
    if not times["count"]:
        return None
    percentiles = times["percentiles"]
    return Spread(scale * times["mean"], *(scale * percentiles[name] for name in STATISTICS[1:]))


def _mean(metrics: Mapping[str, Any], name: str) -> float:
    return float(metrics[name]["successful"]["mean"] or 0.0)


def _problem(report: Mapping[str, Any]) -> str:
    errors = Counter(str((row.get("info") or {}).get("error") or "") for row in report["requests"]["errored"] or ())
    text = errors.most_common(1)[0][0].replace("\\n", " ") if errors else ""
    status = STATUS.search(text)
    return f"the server answers {status[1]}" if status else " ".join(text.split())[:200]
