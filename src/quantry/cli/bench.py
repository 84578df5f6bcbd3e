"""`quantry bench`: loads an OpenAI endpoint, level by level, and holds it to limits."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantry.cli._flags import AnswerTokens, Chat, Dataset, GuidellmPython, Json, PromptTokens, Tokenizer
from quantry.cli._output import print_result, progress_bar, table
from quantry.engines.contract.options import API_KEY
from quantry.report.sizes import percent, short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.jobs.load.bench import Bench
    from quantry.jobs.load.compare import Comparison
    from quantry.jobs.load.results import Level, Spread

INTERRUPTED = 130
GROUP = "serve"
EXAMPLES = (
    "quantry bench http://127.0.0.1:8080 --concurrency 1,4,16",
    "quantry bench http://127.0.0.1:8080 --slo ttft_p95=500ms",
)


def command(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8080 (with or without /v1).")],
    model: Annotated[str | None, typer.Option(help="Name of the model, where it serves several.")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests at once, 1 or more, level by level (1,4,16), or sweep to double them while it helps."
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Instead: requests that arrive in a second at random moments (Poisson), above 0: 0.5,2."),
    ] = None,
    prompt_tokens: PromptTokens = "256",
    answer_tokens: AnswerTokens = "128",
    requests: Annotated[int | None, typer.Option(help="Requests of a level, 1 or more.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds of a level, above 0; 30 where no requests are given.")
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT",
            help="A limit: ttft_p95=500ms, tpot_p95=50ms, latency_p99=5s, error_rate=1% ... [repeatable]",
        ),
    ] = None,
    shared_prefix: Annotated[int, typer.Option(help="Tokens that all prompts of a level begin with, 0 or more.")] = 0,
    dataset: Dataset = None,
    tokenizer: Tokenizer = None,
    chat: Chat = False,
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY, help="Key of the server; better in the environment.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for bench.json and bench.html.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="The folder or bench.json of another run, to compare with.")
    ] = None,
    guidellm_python: GuidellmPython = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take, above 0.")] = 600.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Repeats the prompts of a run that had it, 0 or more; a new one for every run if left out."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure a server under load; exit code 1 if requests fail or it does not keep a limit given with --slo."""
    from quantry.jobs.load.bench import bench
    from quantry.jobs.load.slo import parse_limits

    with progress_bar(quiet=json) as progress:
        result = bench(
            url, model=model, concurrency=_streams(concurrency), rate=_rates(rate), prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens, requests=requests, seconds=seconds,
            slo=parse_limits(slo or ()), shared_prefix=shared_prefix,
            dataset=dataset, tokenizer=tokenizer, chat=chat, api_key=api_key, output=output, against=against,
            guidellm_python=guidellm_python, timeout=timeout, seed=seed, progress=progress,
        )  # fmt: skip
    print_result(result, picture, json)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if result.verdict == "fail":
        raise typer.Exit(1)


def _streams(words: str | None) -> "list[int] | Literal['sweep'] | None":
    from quantry.errors import QuantryError

    if words is None or words == "sweep":
        return "sweep" if words else None
    parts = words.replace(" ", "").split(",")
    if not all(part.isdigit() for part in parts):
        raise QuantryError(f"--concurrency is {words!r}", fix="give numbers such as 1,4,16, or sweep")
    return [int(part) for part in parts]


def _rates(words: str | None) -> list[float] | None:
    from quantry.errors import QuantryError

    if words is None:
        return None
    try:
        return [float(part) for part in words.split(",")]
    except ValueError:
        raise QuantryError(f"--rate is {words!r}", fix="give numbers such as 0.5,2") from None


def _server(result: "Bench") -> list["RenderableType"]:
    from rich.text import Text

    words = [result.server[name] for name in ("engine", "version", "hardware") if name in result.server]
    return [Text(", ".join(words), "dim")] if words else []


def picture(result: "Bench") -> list["RenderableType"]:
    """Draws the table of levels, the limits, and where the rest is."""
    from rich.text import Text

    lines: list[RenderableType] = [Text(f"{result.model} at {result.url}", "bold"), *_server(result), _table(result)]
    for finding in result.findings:
        mark = ("✓ ", "green") if finding.ok else ("✗ ", "red")
        lines.append(Text.assemble(mark, finding.words))
    if result.verdict:
        lines.append(Text(result.verdict_words, "bold"))
    if result.best:
        limits = " that keeps the limits" if result.slo else ""
        lines.append(Text(f"fastest level{limits}: {result.best}"))
    lines += [Text(note, "dim") for note in result.notes]
    lines += _against(result.against) if result.against else []
    return [*lines, *([Text(f"wrote {result.path}: bench.json, bench.html")] if result.path else [])]


def _against(other: "Comparison") -> list["RenderableType"]:
    """Draws how many times the figures of the other run these are."""
    from rich.text import Text

    right = ("tok/s", "TTFT p50", "token p50")
    ratios = table(("", *right), right)
    for change in other.changes:
        figures = (change.tokens_per_second, change.ttft_p50, change.tpot_p50)
        ratios.add_row(change.level, *("" if figure is None else f"{figure:.2f}x" for figure in figures))
    title = Text(f"against {other.model} of {other.date}", "bold")
    rows = [ratios] if other.changes else [Text("no level has the same name", "dim")]
    return [title, *rows, *(Text(words, "dim") for words in other.differences)]


def _table(result: "Bench") -> "RenderableType":
    engine = any(level.engine for level in result.levels)
    headings = ["answered", "errors", "req/s", "tok/s", "TTFT p50 ms", "p95", "p99", "token p50 ms", "p95", "p99"]
    right = (*headings, *(("prefix", "accept", "KV") if engine else ()))
    levels = table(("", *right), right, drop=("KV", "accept", "prefix", "p99", "answered", "p95", "req/s"))
    for level in result.levels:
        levels.add_row(level.name, *_cells(level), *(_engine(level) if engine else ()))
    return levels


def _cells(level: "Level") -> list[str]:
    return [
        str(level.completed),
        str(level.errors),
        f"{level.requests_per_second:.2f}",
        f"{level.output_tokens_per_second:.1f}",
        *_times(level.ttft),
        *_times(level.tpot),
    ]


def _times(spread: "Spread | None") -> list[str]:
    return [""] * 3 if spread is None else [short(value) for value in (spread.p50, spread.p95, spread.p99)]


def _engine(level: "Level") -> list[str]:
    if level.engine is None:
        return [""] * 3
    rates = (level.engine.prefix_hit_rate, level.engine.acceptance_rate, level.engine.kv_usage)
    return ["" if rate is None else percent(rate) for rate in rates]
