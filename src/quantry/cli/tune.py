"""`quantry tune`: measures an engine's switches under a load, and says what to serve with."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantry.cli._flags import AnswerTokens, Chat, Dataset, GuidellmPython, Json, PromptTokens, Tokenizer
from quantry.cli._options import takes
from quantry.cli._output import print_result, progress_bar, table
from quantry.engines.contract.options import Options
from quantry.report.sizes import counted, percent, short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.jobs.load.choice import Trial
    from quantry.jobs.load.tune import Tuned

GROUP = "serve"
EXAMPLES = (
    "quantry tune out --switches prefix-cache,parallel",
    "quantry tune out --concurrency 8 --prompt-tokens 512",
)
SHARED = (
    "engine", "context", "parallel", "threads", "tensor_parallel", "utilization", "cache_gib", "engine_python",
    "engine_bin", "image", "extra",
)  # fmt: skip


@takes(Options, *SHARED)
def command(
    artefact: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id (owner/name) or demo.")],
    options: dict[str, Any],
    prompt_tokens: PromptTokens = "256",
    answer_tokens: AnswerTokens = "128",
    concurrency: Annotated[int, typer.Option(help="Requests at once, 1 or more.")] = 4,
    shared_prefix: Annotated[
        int, typer.Option(help="Tokens that all prompts begin with, before their own; 0 or more.")
    ] = 0,
    requests: Annotated[
        int | None, typer.Option(help="Requests of each measurement, 1 or more; 8 for each at once if left out.")
    ] = None,
    dataset: Dataset = None,
    tokenizer: Tokenizer = None,
    chat: Chat = False,
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="LIMIT", help="A limit to keep: ttft_p95=500ms, tpot_p95=50ms ... [repeatable]"),
    ] = None,
    switches: Annotated[
        str | None,
        typer.Option(
            help="What to try: kv, prefix-cache, parallel, chunked-prefill, lookup, draft; kv=q8_0,parallel=8 for some "
            "values alone. All that the engine has if left out."
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A smaller model that may guess ahead (speculative decoding).")
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option(metavar="ARTEFACT", help="Another artefact of the same model to try in its place. [repeatable]"),
    ] = None,
    guidellm_python: GuidellmPython = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for tune.json, tune.html and the engines' logs.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what an engine's switches do for a load; exit code 1 if no setting keeps a limit given with --slo."""
    from shlex import join

    from quantry.jobs.load.slo import parse_limits
    from quantry.jobs.load.tune import tune

    with progress_bar(quiet=json) as progress:
        tuned = tune(
            artefact, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, concurrency=concurrency,
            requests=requests, shared_prefix=shared_prefix, dataset=dataset, tokenizer=tokenizer, chat=chat,
            slo=parse_limits(slo or ()),
            switches=None if switches is None else switches.split(","), draft=draft, others=tuple(others or ()),
            output=output, guidellm_python=guidellm_python, progress=progress, **options,
        )  # fmt: skip
    print_result(tuned, picture, json)
    if tuned.command and not json:
        typer.echo(join(tuned.command))  # as one line, to be copied
    if tuned.chosen is None:
        raise typer.Exit(1)


def picture(tuned: "Tuned") -> list["RenderableType"]:
    """Draws the table of settings, what speaks against some, and what is recommended."""
    from rich.text import Text

    load = tuned.load
    shape = f"{load['prompt_tokens']} tokens in, {load['answer_tokens']} out, {load['concurrency'][0]} at once"
    source = f"prompts of {load['dataset']}, " if load["dataset"] else ""
    lines: list[RenderableType] = [
        Text(f"{Path(tuned.artefact).name} on {tuned.engine} {tuned.version}", "bold"),
        *([Text(tuned.hardware, "dim")] if tuned.hardware else []),
        Text(f"{source}{shape}, {counted(load['requests'], 'request')}; context {tuned.context}", "dim"),
        _table(tuned),
    ]
    lines += [Text(f"{trial.name}: {trial.objection}", "yellow") for trial in tuned.trials if trial.objection]
    lines += [Text(note, "dim") for note in tuned.notes]
    if tuned.path:
        lines.append(Text(f"wrote {tuned.path}: tune.json, tune.html"))
    style = "bold green" if tuned.chosen else "bold red"
    return [*lines, Text(f"serve with: {tuned.chosen}, {tuned.why}" if tuned.chosen else tuned.why, style)]


def _table(tuned: "Tuned") -> "RenderableType":
    times = ("TTFT p50 ms", "p95", "token p50 ms", "p95")
    right = ("tok/s", "gain", *times, "errors", "prefix", "accept", "KV MiB")
    drop = ("KV MiB", "accept", "prefix", "p95", "errors", "token p50 ms", "TTFT p50 ms")
    drawn = table(("", "setting", *right, ""), right, drop=drop)
    default, *others = tuned.trials
    for trial in (default, tuned.again, *others):
        drawn.add_row(*_row(trial, chosen=trial.name == tuned.chosen))
    return drawn


def _row(trial: "Trial", *, chosen: bool) -> list[str]:
    mark = "●" if chosen else ""
    if trial.level is None:
        return [mark, trial.name, *[""] * 10, "not measured"]
    level = trial.level
    times = [
        "" if spread is None else short(getattr(spread, name))
        for spread in (level.ttft, level.tpot)
        for name in ("p50", "p95")
    ]
    gain = "" if trial.gain is None or not trial.changes else percent(trial.gain, "+")
    rates = [trial.engine("prefix_hit_rate"), trial.engine("acceptance_rate")]
    size = "" if trial.kv_cache_bytes is None else f"{trial.kv_cache_bytes / 2**20:.1f}"
    shown = ["" if rate is None else percent(rate) for rate in rates]
    verdict = "" if not trial.objection else "not chosen" if trial.keeps_limits else "breaks the limits"
    return [mark, trial.name, f"{trial.speed:.1f}", gain, *times, str(level.errors), *shown, size, verdict]
