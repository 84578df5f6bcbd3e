"""`quantry bench`: how a server does under load, level by level, and whether that keeps what was promised.

The load is guidellm's (see guide.py), the engine's own counters are read around every level (metrics.py). Times are
guidellm's in milliseconds: `ttft` until the first token, `tpot` between tokens after it (each request weighs as many as
it has), `latency` until the last. A limit is held against every level that was asked for; a sweep, which goes on until
the server gives no more, keeps it if its first level does, and says up to where.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from quantry.errors import OutputError, QuantryError, UnknownNameError
from quantry.jobs.load import endpoint, guide
from quantry.jobs.load.metrics import Figures, Watch
from quantry.models.writer import write_atomically
from quantry.registry import suggest
from quantry.types import Progress

SWEEP = "sweep"
STREAMS = (1, 4, 16)
SECONDS = 30.0  # of a level, where nothing is said
GAIN = 1.1  # a sweep ends when twice the requests at once give less than this times the tokens
MOST = 512  # requests at once that a sweep ends with
ERRORS = 50  # of a level, after which it ends
TIMEOUT = 600.0  # seconds for one request
SEED = 42
AHEAD = 64  # prompts that are made ahead: guidellm's 4,096 would take a core from the server
NOTE, PAGE = "bench.json", "bench.html"
STATISTICS = ("mean", "p50", "p95", "p99")
TIMES = {
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "latency": ("request_latency", 1000.0),
}
AT_LEAST = ("output_tokens_per_second", "requests_per_second")
LIMITS = (*(f"{name}_{one}" for name in TIMES for one in STATISTICS), "error_rate", *AT_LEAST)
KINDS = {
    ".jsonl": "json_file",
    ".json": "json_file",
    ".csv": "csv_file",
    ".parquet": "parquet_file",
    ".txt": "text_file",
}
PASS, FAIL = "pass", "fail"
STATUS = re.compile(r"(?:Client|Server) error '([^']+)'")  # in httpx's words, which guidellm passes on

Sweep = Literal["sweep"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts or answers: a normal distribution, cut at both ends; without a deviation all are alike."""

    mean: int
    stdev: int | None = None
    min: int | None = None
    max: int | None = None

    @classmethod
    def of(cls, value: "int | str | Lengths", what: str) -> "Lengths":
        """From a number, or from words such as `256,stdev=64,min=16,max=512`."""
        if isinstance(value, Lengths):
            return value._checked(what)
        first, *rest = str(value).replace(" ", "").split(",")
        pairs = {name: text for name, _, text in (part.partition("=") for part in rest)}
        if set(pairs) - {"stdev", "min", "max"} or not all(text.isdigit() for text in (first, *pairs.values())):
            raise QuantryError(f"{what} is {value!r}", fix="give a number, or 256,stdev=64,min=16,max=512")
        return cls(int(first), **{name: int(text) for name, text in pairs.items()})._checked(what)

    def asked(self, name: str) -> dict[str, int]:
        """In guidellm's words."""
        parts = {name: self.mean, f"{name}_stdev": self.stdev, f"{name}_min": self.min, f"{name}_max": self.max}
        return {key: value for key, value in parts.items() if value is not None}

    def _checked(self, what: str) -> "Lengths":
        if any(value is not None and value < 1 for value in (self.mean, self.stdev, self.min, self.max)):
            raise QuantryError(f"{what} has a number below 1 ({self})", fix="give positive numbers of tokens")
        if not (self.min or 1) <= self.mean <= (self.max or self.mean):
            raise QuantryError(f"{what} of {self.mean} is not between its ends ({self})", fix="move the ends apart")
        return self

    def __str__(self) -> str:
        ends = [f"{name}={value}" for name in ("stdev", "min", "max") if (value := getattr(self, name)) is not None]
        return ",".join([str(self.mean), *ends])


@dataclass(frozen=True, slots=True)
class Spread:
    """A time over the requests of a level, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Level:
    """One load and what came of it; times are None where no request was answered."""

    name: str
    concurrency: int | None  # requests at once
    rate: float | None  # requests that arrive in a second
    seconds: float
    completed: int
    errors: int
    unfinished: int  # when the time was over
    problem: str  # what the server said most often, where there are errors
    ttft: Spread | None
    tpot: Spread | None
    latency: Spread | None
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens: float  # of a request, as the server counts them
    answer_tokens: float
    at_once: float  # requests that were really under way, on average
    engine: Figures | None = None
    warnings: tuple[str, ...] = ()

    @property
    def error_rate(self) -> float:
        done = self.completed + self.errors
        return self.errors / done if done else 1.0

    def figure(self, name: str) -> float | None:
        """By the name that a limit has."""
        if name in (*AT_LEAST, "error_rate"):
            return float(getattr(self, name))
        time, _, statistic = name.rpartition("_")
        spread = getattr(self, time)
        return None if spread is None else float(getattr(spread, statistic))


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure of one level held against its limit; a figure that there is not keeps no limit."""

    level: str
    name: str
    value: float | None
    limit: float
    ok: bool
    words: str


@dataclass(frozen=True, slots=True)
class Bench:
    """What `quantry bench` found. Field names are the JSON names."""

    url: str
    model: str
    date: str
    load: Mapping[str, Any]
    levels: tuple[Level, ...]
    slo: Mapping[str, float]
    findings: tuple[Finding, ...]
    verdict: str  # pass or fail; nothing where no limit was given
    best: str | None  # the level with the most tokens a second that keeps every limit
    notes: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for row, level in zip(found["levels"], self.levels, strict=True):
            row["error_rate"] = level.error_rate
        return {**found, "path": str(self.path) if self.path else None}


@dataclass(frozen=True, slots=True)
class _Load:
    """All that a level's scenario is made of, but for the level."""

    prompt: Lengths
    answer: Lengths
    requests: int | None
    seconds: float | None
    shared_prefix: int
    dataset: str | None
    chat: bool
    timeout: float
    seed: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "prompt": str(self.prompt), "answer": str(self.answer)}

    def data(self) -> dict[str, Any]:
        if self.dataset is None:
            prefix = {"prefix_tokens": self.shared_prefix, "prefix_count": 1} if self.shared_prefix else {}
            lengths = self.prompt.asked("prompt_tokens") | self.answer.asked("output_tokens")
            return {"kind": "synthetic_text", **lengths, **prefix}
        if kind := KINDS.get(Path(self.dataset).suffix.lower()):
            return {"kind": kind, "path": self.dataset}
        return {"kind": "huggingface", "source": self.dataset}

    def limits(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"kind": "max_errors", "count": ERRORS}]
        if self.requests:
            found.append({"kind": "max_requests", "count": self.requests})
        if self.seconds:
            found.append({"kind": "max_duration", "seconds": self.seconds})
        return found

    def spec(self, server: endpoint.Endpoint, tokenizer: str | None, profile: Mapping[str, Any], number: int) -> Any:
        """The scenario of level `number`; each has prompts of its own, which no cache has seen."""
        backend: dict[str, Any] = {
            "kind": "openai_http",
            "target": server.root,
            "model": server.model,
            "request_format": "/v1/chat/completions" if self.chat else "/v1/completions",
            "validate_backend": False,  # it has been asked already, and not every server has /health
            "verify": True,
            "timeout": self.timeout,
        }
        if server.key:
            backend["api_key"] = server.key
        if self.dataset is not None:
            backend["max_tokens"] = self.answer.mean
        return {
            "backend": backend,
            "profile": dict(profile),
            "constraints": self.limits(),
            "data": [self.data()],
            "data_loader": {"kind": "pytorch", "samples": -1, "prefetch_factor": AHEAD},
            "seed": {"kind": "static", "value": self.seed + 1000 * number},
            "metrics": {"kind": "generative", "sample_size": 0},
            **({"tokenizer": {"kind": "huggingface_auto", "model": tokenizer}} if tokenizer else {}),
        }


def bench(
    url: str,
    *,
    model: str | None = None,
    concurrency: Sequence[int] | Sweep | None = None,
    rate: Sequence[float] | float | None = None,
    prompt_tokens: int | str | Lengths = 256,
    answer_tokens: int | str | Lengths = 128,
    requests: int | None = None,
    seconds: float | None = None,
    slo: Mapping[str, float] | None = None,
    shared_prefix: int = 0,
    dataset: str | Path | None = None,
    tokenizer: str | Path | None = None,
    chat: bool = False,
    api_key: str | None = None,
    output: Path | None = None,
    guidellm_python: Path | None = None,
    started: guide.Guide | None = None,
    timeout: float = TIMEOUT,
    seed: int = SEED,
    progress: Progress | None = None,
) -> Bench:
    """Loads an OpenAI endpoint level by level, and holds what was measured against `slo` (see LIMITS; times in ms).

    Levels are numbers of requests at once (`concurrency`, or "sweep" to double them as long as it helps), or requests
    that arrive in a second at random moments (`rate`, Poisson). A level ends after `requests` or `seconds`. Prompts are
    made up in the lengths asked for, `shared_prefix` tokens of each the same, or come from `dataset`, a file or hub id.
    bench.json and bench.html go into the folder `output`. `started` is a guidellm that runs already.
    """
    profiles = _profiles(concurrency, rate)
    limits = _limits(slo or {})
    load = _load(prompt_tokens, answer_tokens, requests, seconds, shared_prefix, dataset, chat, timeout, seed)
    _check_output(output)
    python = None if started else Path(guide.find_python(guidellm_python))
    server = endpoint.find(url, model, api_key)
    with TemporaryDirectory(prefix="quantry-tokenizer-") as spare:
        counted = _tokenizer(server, tokenizer, load, Path(spare))
        server.ask(chat=chat, patience=timeout)
        local = counted is None or Path(counted).is_dir()
        offline = local and load.data()["kind"] != "huggingface"
        with nullcontext(started) if started else guide.started(python, offline=offline) as running:
            levels = tuple(_levels(running, server, load, counted, profiles, progress))
            version = running.version
    _check_answered(server, levels)
    found = _bench(server, load, levels, limits, swept=concurrency == SWEEP, version=version)
    return _written(found, output) if output else found


def limit(words: str) -> tuple[str, float]:
    """A limit from words: ttft_p95=500ms, latency_p99=2s, error_rate=1%, output_tokens_per_second=100."""
    name, _, text = words.partition("=")
    found = re.fullmatch(r"([\d.]+(?:e-?\d+)?)(ms|s|%)?", text.strip())
    if not found or not _number(found[1]):
        raise QuantryError(f"{words!r} is no limit", fix="give one such as ttft_p95=500ms")
    return name.strip(), float(found[1]) * {"s": 1000.0, "%": 0.01}.get(found[2] or "", 1.0)


# ---- what was asked ----


def _profiles(
    concurrency: Sequence[int] | Sweep | None, rate: Sequence[float] | float | None
) -> list[tuple[str, dict[str, Any]]] | None:
    """(name, guidellm's profile) of every level; None for a sweep, whose levels depend on what is found."""
    if rate is not None and concurrency is not None:
        raise QuantryError("a rate and a concurrency are asked for at once", fix="give one of them")
    if rate is not None:
        rates = [float(rate)] if isinstance(rate, int | float) else [float(one) for one in rate]
        if not rates or not all(0 < one < float("inf") for one in rates):
            raise QuantryError(f"the rate is {rate}", fix="give requests a second above 0, such as 2.5")
        return [(f"{one:g} a second", {"kind": "poisson", "rate": [one]}) for one in rates]
    if concurrency == SWEEP:
        return None
    streams: tuple[Any, ...] = STREAMS if concurrency is None else tuple(concurrency)
    if not streams or not all(isinstance(one, int) and one > 0 for one in streams):
        raise QuantryError(
            f"the concurrency is {concurrency!r}", fix=f"give numbers above 0, such as 1,4,16, or {SWEEP}"
        )
    return [_streams(one) for one in streams]


def _streams(number: int) -> tuple[str, dict[str, Any]]:
    return f"{number} at once", {"kind": "concurrent", "streams": [number]}


def _limits(slo: Mapping[str, float]) -> dict[str, float]:
    """The limits as given; where there is one, errors are allowed only if that is said."""
    for name, value in slo.items():
        if name not in LIMITS:
            raise UnknownNameError(f"unknown limit {name!r}", fix=suggest(name, LIMITS))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise QuantryError(f"the limit {name} is {value!r}", fix="give a number of 0 or more")
    return {**slo, **({"error_rate": 0.0} if slo and "error_rate" not in slo else {})}


def _load(
    prompt: int | str | Lengths,
    answer: int | str | Lengths,
    requests: int | None,
    seconds: float | None,
    shared_prefix: int,
    dataset: str | Path | None,
    chat: bool,
    timeout: float,
    seed: int,
) -> _Load:
    for name, value in (("requests", requests), ("seconds", seconds), ("timeout", timeout)):
        if value is not None and not 0 < value < float("inf"):
            raise QuantryError(f"{name} is {value:g}", fix="give a number above 0")
    if shared_prefix < 0:
        raise QuantryError(f"a shared prefix of {shared_prefix} tokens", fix="give 0 or more")
    if dataset is not None and shared_prefix:
        raise QuantryError("a data set and a shared prefix are asked for at once", fix="put the prefix into the data")
    if dataset is not None and Path(dataset).suffix.lower() in KINDS:
        if not Path(dataset).is_file():
            raise QuantryError(f"there is no file {dataset}", fix="give JSON lines with a field `prompt`, or a hub id")
        dataset = Path(dataset).resolve()
    return _Load(
        prompt=Lengths.of(prompt, "--prompt-tokens"),
        answer=Lengths.of(answer, "--answer-tokens"),
        requests=requests,
        seconds=seconds or (None if requests else SECONDS),
        shared_prefix=shared_prefix,
        dataset=None if dataset is None else str(dataset),
        chat=chat,
        timeout=timeout,
        seed=seed,
    )


def _tokenizer(server: endpoint.Endpoint, wanted: str | Path | None, load: _Load, spare: Path) -> str | None:
    """What lengths are counted with; prompts of a data set have the length that they have."""
    if load.dataset is not None and wanted is None:
        return None
    return endpoint.tokenizer(server, None if wanted is None else str(wanted), spare)


# ---- measuring ----


def _levels(
    running: guide.Guide,
    server: endpoint.Endpoint,
    load: _Load,
    tokenizer: str | None,
    profiles: list[tuple[str, dict[str, Any]]] | None,
    progress: Progress | None,
) -> Iterator[Level]:
    """Measures level after level; a server that answers nothing any more is not asked further."""
    before: Level | None = None
    for number, (name, profile) in enumerate(profiles or _doubled()):
        if before and (not before.completed or (profiles is None and before.output_tokens_per_second == 0)):
            return
        if progress:
            progress(number, len(profiles) if profiles else number + 1, name)
        with Watch(server.root, server.key) as watch:
            report = running.run(load.spec(server, tokenizer, profile, number))
        found = level(name, profile, report, watch.figures())
        yield found
        if profiles is None and before and found.output_tokens_per_second < GAIN * before.output_tokens_per_second:
            return
        before = found


def _doubled() -> Iterator[tuple[str, dict[str, Any]]]:
    number = 1
    while number <= MOST:
        yield _streams(number)
        number *= 2


def level(name: str, profile: Mapping[str, Any], report: Mapping[str, Any], figures: Figures | None) -> Level:
    """A level from guidellm's report of it; only requests that were answered in full count, but for the errors."""
    metrics, totals = report["metrics"], report["metrics"]["request_totals"]
    times = {short: _spread(metrics[key]["successful"], scale) for short, (key, scale) in TIMES.items()}
    return Level(
        name=name,
        concurrency=profile["streams"][0] if "streams" in profile else None,
        rate=profile["rate"][0] if "rate" in profile else None,
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
        warnings=tuple(str(one["message"]) for one in report.get("warnings") or ()),
        **times,
    )


def _spread(found: Mapping[str, Any], scale: float) -> Spread | None:
    if not found["count"]:
        return None
    percentiles = found["percentiles"]
    return Spread(scale * found["mean"], *(scale * percentiles[name] for name in STATISTICS[1:]))


def _mean(metrics: Mapping[str, Any], name: str) -> float:
    return float(metrics[name]["successful"]["mean"] or 0.0)


def _problem(report: Mapping[str, Any]) -> str:
    """What was wrong with most of the requests that failed."""
    said = Counter(str((row.get("info") or {}).get("error") or "") for row in report["requests"]["errored"] or ())
    words = said.most_common(1)[0][0].replace("\\n", " ") if said else ""
    status = STATUS.search(words)
    return f"the server answers {status[1]}" if status else " ".join(words.split())[:200]


def _check_answered(server: endpoint.Endpoint, levels: Sequence[Level]) -> None:
    if any(one.completed for one in levels):
        return
    tried, problem = levels[0], levels[0].problem
    words = problem or f"no answer was complete after {tried.seconds:.0f} s"
    raise QuantryError(
        f"{server.root} answered none of {tried.errors + tried.unfinished} requests: {words}",
        fix="see that prompt and answer fit the context, or give it more --seconds",
    )


# ---- judging ----


def judge(levels: Sequence[Level], limits: Mapping[str, float]) -> tuple[Finding, ...]:
    """Every limit against every level."""
    return tuple(_finding(one, name, value) for one in levels for name, value in limits.items())


def _finding(one: Level, name: str, bar: float) -> Finding:
    value = one.figure(name)
    side = "at least" if name in AT_LEAST else "at most"
    ok = value is not None and (value >= bar if name in AT_LEAST else value <= bar)
    shown = (
        "was not measured"
        if value is None
        else f"{_shown(name, value)}, {'' if ok else 'not '}{side} {_shown(name, bar)}"
    )
    return Finding(one.name, name, value, bar, ok, f"{one.name}: {name.replace('_', ' ')} {shown}")


def _shown(name: str, value: float) -> str:
    if name == "error_rate":
        return f"{value:.1%}"
    return f"{value:.4g}" if name in AT_LEAST else f"{value:.4g} ms"


def _bench(
    server: endpoint.Endpoint,
    load: _Load,
    levels: tuple[Level, ...],
    limits: Mapping[str, float],
    *,
    swept: bool,
    version: str,
) -> Bench:
    findings = judge(levels, limits)
    failed = {finding.level for finding in findings if not finding.ok}
    kept = [one for one in levels if one.name not in failed and one.completed]
    best = max(kept, key=lambda one: one.output_tokens_per_second, default=None)
    broken = levels[0].name in failed if swept else bool(failed)
    from quantry import __version__

    return Bench(
        url=server.root,
        model=server.model,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        load=load.to_dict(),
        levels=levels,
        slo=limits,
        findings=findings,
        verdict=(FAIL if broken else PASS) if limits else "",
        best=best.name if best else None,
        notes=tuple(_notes(levels, load)),
        versions={"quantry": __version__, "guidellm": version},
    )


def _notes(levels: Sequence[Level], load: _Load) -> Iterator[str]:
    for one in levels:
        if one.errors:
            yield f"{one.name}: {one.errors} of {one.errors + one.completed} requests failed: {one.problem}"
        if not one.completed and not one.errors:
            yield f"{one.name}: no request was answered in full within {one.seconds:.0f} s"
        yield from (f"{one.name}: {words}" for words in one.warnings)
    if levels and not any(one.engine for one in levels):
        yield "the server has no metrics page that is known: no cache or acceptance rates"
    if load.dataset is not None:
        yield "prompts of a data set come again in every level: a prefix cache may know them"


# ---- writing ----


def _check_output(output: Path | None) -> None:
    """Refused before minutes are spent."""
    if output is None:
        return
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file", fix="give a folder")


def _written(found: Bench, output: Path) -> Bench:
    from dataclasses import replace

    from quantry.jobs.load.page import page

    whole = replace(found, path=output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / NOTE, (json.dumps(whole.to_dict(), indent=2) + "\n").encode())
        write_atomically(output / PAGE, page(whole).encode())
    except OSError as error:
        raise OutputError(f"cannot write to {output}: {error.strerror}", fix="give another folder with -o") from error
    return whole


def _number(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False
