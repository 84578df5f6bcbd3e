"""`quantry serve`: starts the engine that suits a model, with the flags of its version, and stays until it ends."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantry.cli._flags import CacheGib, Context, EngineBin, EnginePython, Extra, Image, Json, Threads, Utilization

if TYPE_CHECKING:
    from quantry.serving.prepare import ServerPlan
    from quantry.serving.process import Running

INTERRUPTED = 130
KEY = "QUANTRY_API_KEY"


def command(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id (owner/name) or demo.")],
    extra: Extra = None,
    engine: Annotated[
        str | None, typer.Option(help="llama.cpp, vllm, transformers, ...; the one that suits the model if left out.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's need a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port; the engine's usual one if left out, 0 for a free one.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEY, help="Key that requests must bring; better in the environment.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None,
    context: Context = None,
    parallel: Annotated[int | None, typer.Option(help="Sequences at the same time.")] = None,
    kv: Annotated[
        str | None, typer.Option(help="Type of the KV cache: q8_0, q4_0 (llama.cpp), fp8 (vllm), ...")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A smaller model that guesses ahead (speculative decoding).")
    ] = None,
    lookup: Annotated[bool, typer.Option("--lookup", help="Guess ahead by copying from the prompt.")] = False,
    draft_tokens: Annotated[int | None, typer.Option(help="Guesses at a time.")] = None,
    prefix_cache: Annotated[
        bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="Keep the beginnings of prompts.")
    ] = None,
    chunked_prefill: Annotated[
        bool | None, typer.Option("--chunked-prefill/--no-chunked-prefill", help="Read long prompts in pieces.")
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of one step.")] = None,
    threads: Threads = None,
    offload_layers: Annotated[int | None, typer.Option(help="Layers on the GPU; all if left out (llama.cpp).")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share every layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(help="Groups of devices, each with a part of the layers.")] = 1,
    nodes: Annotated[int, typer.Option(help="Machines, joined by Ray (vllm).")] = 1,
    head: Annotated[str | None, typer.Option(help="Address of the first machine, where there are several.")] = None,
    utilization: Utilization = None,
    cache_gib: CacheGib = None,
    dtype: Annotated[str | None, typer.Option(help="Type to compute in; the model's own if left out.")] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="16-bit weights are quantized as they are loaded (vllm: fp8) or built (onnxruntime: int4)."),
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Start sooner, answer slower: nothing is compiled.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the checkpoint's own Python code run.")
    ] = False,
    engine_python: EnginePython = None,
    engine_bin: EngineBin = None,
    engine_version: Annotated[
        str | None, typer.Option(help="Version to write flags for; else the installed one.")
    ] = None,
    image: Image = None,
    log: Annotated[Path | None, typer.Option(help="File for the engine's log.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds until it must answer.")] = 1800.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show the engine's log.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each flag is given, and what is outdated.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
    json: Json = False,
) -> None:
    """Start the engine that suits a model, with the right flags for its version; Ctrl-C stops it."""
    from quantry.serving.options import Options
    from quantry.serving.prepare import prepare

    prepared = prepare(
        model,
        Options(
            engine=engine, host=host, port=port, api_key=api_key, name=name, context=context, parallel=parallel, kv=kv,
            draft=draft, lookup=lookup, draft_tokens=draft_tokens, prefix_cache=prefix_cache,
            chunked_prefill=chunked_prefill, batch_tokens=batch_tokens, threads=threads, offload_layers=offload_layers,
            tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, nodes=nodes, head=head,
            utilization=utilization, cache_gib=cache_gib, dtype=dtype, quantization=quantization, eager=eager,
            trust_remote_code=trust_remote_code, engine_python=engine_python, engine_bin=engine_bin,
            engine_version=engine_version, image=image, extra=tuple(extra or ()),
        ),
    )  # fmt: skip
    if explain and not json:
        _explain(prepared)
    if dry_run or (explain and json):
        typer.echo(_json(prepared.to_dict()) if json else _shown(prepared))
    elif not explain:
        _run(prepared, log, patience, quiet=quiet, json=json)


def _run(prepared: "ServerPlan", log: Path | None, patience: float, *, quiet: bool, json: bool) -> None:
    """Serves until the engine ends or a signal comes; an end of its own is an error with its exit code."""
    from quantry.serving.process import ended_by_signals, start

    try:
        with ended_by_signals():
            for where, why, words in prepared.elsewhere:
                typer.echo(f"on {where}: {words}  # {why}", err=True)
            stream = None if quiet else sys.stderr
            with start(prepared.launch, log=log, stream=stream, patience=patience, tell=_tell) as running:
                typer.echo(_json(_facts(prepared, running)) if json else _ready(prepared, running))
                sys.stdout.flush()
                code = running.wait()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if code:
        raise running.death()


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _facts(prepared: "ServerPlan", running: "Running") -> dict[str, Any]:
    from dataclasses import asdict

    return {**prepared.to_dict(), "pid": running.pid, "log": str(running.log), "facts": asdict(running.facts())}


def _ready(prepared: "ServerPlan", running: "Running") -> str:
    """What a person needs once it serves."""
    from json import dumps
    from shlex import quote

    body = dumps({"model": running.model, "messages": [{"role": "user", "content": "Hello!"}]})
    key = f' -H "Authorization: Bearer ${KEY}"' if prepared.serving.api_key else ""
    ask = f"curl {running.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {quote(body)}"
    rows = {
        "URL": f"{running.url}/v1",
        "model": running.model,
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
    """Every flag with its reason, then the forms that older texts give."""
    from rich.console import Console
    from rich.table import Table

    serving = prepared.serving
    console = Console(highlight=False)
    console.print(f"{serving.engine} {serving.version} on {serving.platform} for {prepared.model.format}", style="bold")
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("flag", "why"):
        table.add_column(heading, overflow="fold")
    for flag, why in prepared.reasons:
        table.add_row(flag, why)
    console.print(table)
    if prepared.outdated:
        older = Table(box=None, padding=(0, 1), header_style="dim", title="what older texts say", title_justify="left")
        for heading in ("written there", "written now", "because"):
            older.add_column(heading, overflow="fold")
        for row in prepared.outdated:
            older.add_row(row.old, row.new, f"{row.reason}{f' (since {row.since})' if row.since else ''}")
        console.print(older)


def _json(data: dict[str, Any]) -> str:
    from json import dumps

    return dumps(data, indent=2, default=str)
