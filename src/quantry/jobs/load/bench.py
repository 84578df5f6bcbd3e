"""`quantry bench`: measures a server under load, level by level, and compares the figures with limits.

guidellm generates the load (guidellm_process.py); the engine's own counters are read around every level (metrics.py). A
limit applies to every level that was asked for, and requests that fail fail their level unless a limit allows them. A
sweep, which goes on until the server gives no more, passes if its first level does, and names the fastest level that
passes. A level without answers and a server that is gone at the end always fail.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantry import __version__
from quantry.errors import OutputError, QuantryError
from quantry.jobs.load import endpoint, guidellm_process, scenario
from quantry.jobs.load.compare import Comparison, compare, read_earlier
from quantry.jobs.load.endpoint import Endpoint
from quantry.jobs.load.guidellm_process import GuidellmProcess
from quantry.jobs.load.metrics import Watch
from quantry.jobs.load.results import Level, level_of
from quantry.jobs.load.scenario import Concurrency, Lengths, Load, Profile
from quantry.jobs.load.server_facts import server_facts
from quantry.jobs.load.slo import SloFinding, check_limits, judge
from quantry.jobs.output_folder import write_json, writing
from quantry.report.sizes import counted
from quantry.storage import write_atomically
from quantry.storage.temporary import temporary_folder
from quantry.types import Progress

GAIN = 1.1  # a sweep ends when twice the requests at once give less than this times the tokens
NOTE, PAGE = "bench.json", "bench.html"
PASS, FAIL = "pass", "fail"


@dataclass(frozen=True, slots=True)
class Bench:
    """The result of `quantry bench`. Field names are the JSON names."""

    url: str
    model: str
    date: str
    load: Mapping[str, Any]
    levels: tuple[Level, ...]
    slo: Mapping[str, float]
    findings: tuple[SloFinding, ...]
    verdict: str  # pass or fail; empty without limits and failures
    best: str | None  # the level with the most tok/s that passes every limit and failed no request
    notes: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    server: Mapping[str, str] = field(default_factory=dict)  # engine, version and hardware, as far as they are known
    interrupted: bool = False  # levels are missing
    against: Comparison | None = None  # with an earlier load test
    path: Path | None = None

    @property
    def verdict_words(self) -> str:
        if self.verdict == FAIL and all(finding.ok for finding in self.findings):
            return "requests failed"
        return {PASS: "keeps the limits", FAIL: "does not keep the limits"}.get(self.verdict, "")

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self)
        for row, level in zip(content["levels"], self.levels, strict=True):
            row["error_rate"] = level.error_rate
        return {**content, "path": str(self.path) if self.path else None}


def bench(
    url: str,
    *,
    model: str | None = None,
    concurrency: Concurrency = None,
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
    against: Path | None = None,
    guidellm_python: Path | None = None,
    started: GuidellmProcess | None = None,
    timeout: float = scenario.TIMEOUT,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Loads an OpenAI endpoint level by level, and compares the figures with `slo` (see slo.LIMITS; times in ms).

    A level is a number of requests at once (`concurrency`, or "sweep" to double it while that helps), or of requests
    that arrive per second at random moments (`rate`, Poisson). A level ends after `requests` or `seconds`. Prompts are
    generated in the given lengths and share their first `shared_prefix` tokens, or come from `dataset`, a file or hub
    id. Each run has new prompts unless `seed` repeats those of another, which the server's cache may know. bench.json
    and bench.html go into the folder `output`. `against` is the bench.json of another run, to
    compare with. `started` is a guidellm that is running already.

    Raises QuantryError if an option is wrong, guidellm is missing, or the server answers no request. Example:

        bench("http://127.0.0.1:8080", concurrency=[1, 8], slo={"ttft_p95": 500})
    """
    profiles = scenario.profiles_of(concurrency, rate)
    limits = check_limits(slo or {})
    load = Load(
        prompt=Lengths.of(prompt_tokens, "--prompt-tokens"), answer=Lengths.of(answer_tokens, "--answer-tokens"),
        requests=requests, seconds=scenario.SECONDS if seconds is None and requests is None else seconds,
        shared_prefix=shared_prefix, dataset=None if dataset is None else str(dataset), chat=chat, timeout=timeout,
        seed=scenario.new_seed() if seed is None else seed,
    ).checked()  # fmt: skip
    check_output(output)
    earlier = read_earlier(against) if against else None
    guidellm = started or Path(guidellm_process.find_python(guidellm_python))
    server = endpoint.find(url, model, api_key)
    known = server_facts(server)
    levels, version, interrupted = _measured(server, load, profiles, tokenizer, guidellm, progress)
    _check_answered(server, levels)
    finished = _result(server, load, levels, limits, swept=concurrency == scenario.SWEEP, repeated=seed is not None)
    finished = replace(finished, versions={"quantry": __version__, "guidellm": version}, server=known)
    if interrupted:
        notes = (*finished.notes, f"interrupted after {counted(len(levels), 'level')}: the others were not measured")
        verdict = "" if finished.verdict == PASS else finished.verdict
        finished = replace(finished, interrupted=True, notes=notes, verdict=verdict)
    if earlier:
        finished = replace(finished, against=compare(finished, earlier))
    return _written(finished, output) if output else finished


def check_output(output: Path | None) -> None:
    """Raises OutputError if the output is a file: before minutes are spent."""
    if output is not None and output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file", fix="give a folder")


def _measured(
    server: Endpoint,
    load: Load,
    profiles: list[Profile] | None,
    tokenizer: str | Path | None,
    guidellm: GuidellmProcess | Path,
    progress: Progress | None,
) -> tuple[tuple[Level, ...], str, bool]:
    """Measures all levels with a running guidellm, or with one that it starts.

    Returns those that are finished, its version, and if Ctrl-C ended it before the last.
    """
    with temporary_folder() as spare:
        counted_with = None
        if tokenizer is not None or load.dataset is None:  # prompts of a data set have their own lengths
            counted_with = endpoint.tokenizer(server, None if tokenizer is None else str(tokenizer), spare)
        server.ask(chat=load.chat, patience=load.timeout)
        offline = not load.is_on_hub and (counted_with is None or Path(counted_with).is_dir())
        started = guidellm_process.started
        with started(guidellm, offline=offline) if isinstance(guidellm, Path) else nullcontext(guidellm) as running:
            levels: list[Level] = []
            try:
                levels.extend(_levels(running, server, load, counted_with, profiles, progress))
            except KeyboardInterrupt:
                if not levels:
                    raise
                return tuple(levels), running.version, True
            return tuple(levels), running.version, False


def _levels(
    guidellm: GuidellmProcess,
    server: Endpoint,
    load: Load,
    tokenizer: str | None,
    profiles: list[Profile] | None,
    progress: Progress | None,
) -> Iterator[Level]:
    """Measures level after level, until the server answers nothing or a sweep gains nothing."""
    before: Level | None = None
    for number, profile in enumerate(profiles or scenario.doubling_profiles()):
        if before and (not before.completed or (profiles is None and before.output_tokens_per_second == 0)):
            return
        if progress:
            progress(number, len(profiles) if profiles else number + 1, profile.name)
        with Watch(server.root, server.key) as watch:
            report = guidellm.run(load.scenario(server, tokenizer, profile, number))
        level = level_of(profile, report, watch.figures())
        yield level
        if profiles is None and before and level.output_tokens_per_second < GAIN * before.output_tokens_per_second:
            return
        before = level


def _check_answered(server: Endpoint, levels: Sequence[Level]) -> None:
    if any(level.completed for level in levels):
        return
    first = levels[0]
    problem = first.problem or f"no answer was complete after {first.seconds:.0f} s"
    raise QuantryError(
        f"{server.root} answered none of {counted(first.errors + first.unfinished, 'request')}: {problem}",
        fix="check that prompt and answer fit the context, or allow more --seconds",
    )


def _result(
    server: Endpoint, load: Load, levels: tuple[Level, ...], limits: Mapping[str, float], *, swept: bool, repeated: bool
) -> Bench:
    gone = endpoint.problem_of(server) if any(level.errors for level in levels) else ""
    findings = judge(levels, limits)
    failed = _failed(levels, findings, gone, swept=swept)
    return Bench(
        url=server.root,
        model=server.model,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        load=load.to_dict(),
        levels=levels,
        slo=limits,
        findings=findings,
        verdict=FAIL if failed else PASS if limits else "",
        best=_best(levels, findings),
        notes=(*_notes(levels, load, repeated=repeated), *([gone] if gone else ())),
    )


def _best(levels: Sequence[Level], findings: Sequence[SloFinding]) -> str | None:
    passed = [level for level in levels if level.name not in _failing(levels, findings)]
    best = max(passed, key=lambda level: level.output_tokens_per_second, default=None)
    return best.name if best else None


def _failing(levels: Sequence[Level], findings: Sequence[SloFinding]) -> set[str]:
    """Returns the levels that break a limit, have no answer, or failed a request that no limit allows."""
    allowed = {finding.level for finding in findings if finding.name == "error_rate"}
    broken = {level.name for level in levels if not level.completed or (level.errors and level.name not in allowed)}
    return broken | {finding.level for finding in findings if not finding.ok}


def _failed(levels: Sequence[Level], findings: Sequence[SloFinding], gone: str, *, swept: bool) -> bool:
    failing = _failing(levels, findings)
    if gone or not all(level.completed for level in levels):
        return True
    return levels[0].name in failing if swept else bool(failing)


def _notes(levels: Sequence[Level], load: Load, *, repeated: bool) -> Iterator[str]:
    for level in levels:
        if level.errors:
            yield f"{level.name}: {level.errors} of {level.errors + level.completed} requests failed: {level.problem}"
        if not level.completed and not level.errors:
            yield f"{level.name}: no request was answered in full within {level.seconds:.0f} s"
        yield from (f"{level.name}: {warning}" for warning in level.warnings)
    if levels and not any(level.engine for level in levels):
        yield "the server has no metrics page that Quantry can read, so cache and acceptance rates are missing"
    if load.dataset is not None:
        yield "every level sends the same prompts of the data set, which a prefix cache may hold already"
    elif repeated:
        yield f"the prompts are those of seed {load.seed}: a server that has seen them answers from its cache"


def _written(result: Bench, output: Path) -> Bench:
    from quantry.jobs.load.page import page  # matplotlib

    whole = replace(result, path=output)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / NOTE, whole.to_dict())
        write_atomically(output / PAGE, page(whole).encode())
    return whole
