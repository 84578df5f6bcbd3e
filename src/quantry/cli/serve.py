"""`quantry serve`: starts the engine that suits a model, with the flags of its version, and stays until it ends."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantry.cli._flags import Json
from quantry.cli._options import takes
from quantry.cli._output import print_json, show, table
from quantry.engines.contract.options import API_KEY, Options

if TYPE_CHECKING:
    from quantry.serving.prepare import ServerPlan
    from quantry.serving.process import Running

GROUP = "serve"
EXAMPLES = (
    "quantry serve out --port 8080",
    "quantry serve out --engine vllm --context 8k --parallel 16",
    "quantry serve out --dry-run",
)
INTERRUPTED = 130


@takes(Options)
def command(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id (owner/name) or demo.")],
    options: dict[str, Any],
    log: Annotated[Path | None, typer.Option(help="File for the engine's log.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds until it must answer, above 0.")] = 1800.0,
    show_log: Annotated[bool, typer.Option("--show-log", help="Show the engine's log as it is written.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each flag is given, and what is outdated.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
    json: Json = False,
) -> None:
    """Start the engine that suits a model, with the right flags for its version; Ctrl-C stops it."""
    from quantry.serving.prepare import prepare
    from quantry.serving.process import check_patience

    check_patience(patience)
    prepared = prepare(model, Options(**options))
    if explain and not json:
        _explain(prepared)
    if json and (dry_run or explain):
        print_json(prepared.to_dict())
    elif dry_run:
        typer.echo(_shown(prepared))
    elif not explain:
        _run(prepared, log, patience, show_log=show_log, json=json)


def _run(prepared: "ServerPlan", log: Path | None, patience: float, *, show_log: bool, json: bool) -> None:
    """Serves until the engine ends or a signal comes; if it ends by itself, that is an error with its exit code."""
    from quantry.serving.process import start

    prepared.check_installed()
    for warning in prepared.warnings:
        typer.echo(f"warning: {warning}", err=True)
    try:
        for where, why, words in prepared.elsewhere:
            typer.echo(f"on {where}: {words}  # {why}", err=True)
        stream = sys.stderr if show_log else None
        tell = partial(typer.echo, err=True)
        tell(f"starting {prepared.serving.engine} {prepared.serving.version}")
        with start(prepared.launch, log=log, stream=stream, patience=patience, tell=tell) as running:
            if json:
                print_json(_facts(prepared, running))
            else:
                typer.echo(_ready(prepared, running))
            sys.stdout.flush()
            code = running.wait()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if code:
        raise running.death()


def _facts(prepared: "ServerPlan", running: "Running") -> dict[str, Any]:
    from dataclasses import asdict

    return {**prepared.to_dict(), "pid": running.pid, "log": str(running.log), "facts": asdict(running.facts())}


def _ready(prepared: "ServerPlan", running: "Running") -> str:
    """Returns what a person needs once it serves."""
    from json import dumps
    from shlex import quote

    from quantry.engines.contract.catalogue import engine_facts

    chats = not prepared.warnings
    asked = {"messages": [{"role": "user", "content": "Hello!"}]} if chats else {"prompt": "Once upon a time"}
    body, path = dumps({"model": running.model, **asked}), "chat/completions" if chats else "completions"
    key = f' -H "Authorization: Bearer ${API_KEY}"' if prepared.serving.api_key else ""
    ask = f"curl {running.url}/v1/{path} -H 'Content-Type: application/json'{key} -d {quote(body)}"
    page = engine_facts(running.engine).server.page
    rows = {
        "URL": f"{running.url}/v1",
        "model": running.model,
        **({"page": f"{running.url}{page}"} if page else {}),
        "engine": f"{running.engine} {prepared.serving.version}, process {running.pid}",
        "context": f"{running.context:,} tokens" if running.context else "as the engine has it",
        "log": str(running.log),
        "try it": ask,
    }
    return "\n".join(f"{name:<8} {text}" for name, text in rows.items())


def _shown(prepared: "ServerPlan") -> str:
    from shlex import join

    others = [f"# on {where}: {why}\n{words}" for where, why, words in prepared.elsewhere]
    return "\n".join([*others, join(prepared.launch.command.shown())])


def _explain(prepared: "ServerPlan") -> None:
    """Prints every flag with its reason, then the forms that older texts give."""
    from rich.text import Text

    serving = prepared.serving
    head = Text(f"{serving.engine} {serving.version} on {serving.platform} for {prepared.model.format}", "bold")
    flags = table(("flag", "why"), prose=("why",))
    for flag, why in prepared.reasons:
        flags.add_row(flag, why)
    show([head, flags])
    if prepared.outdated:
        headings = ("written there", "written now", "because")
        older = table(headings, title="what older texts say", drop=("because",), prose=headings)
        for row in prepared.outdated:
            older.add_row(row.old, row.new, f"{row.reason}{f' (since {row.since})' if row.since else ''}")
        show([older])
