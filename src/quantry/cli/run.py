"""`quantry run`: quantizes a model, checks it and starts a server you can chat with."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantry.cli import _flags as flags
from quantry.cli._first import check_engine, check_given, check_plannable, check_use
from quantry.cli._output import print_json, progress_bar, show, to_copy
from quantry.report.sizes import counted, human, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from quantry.jobs.run.result import Run, RunStep

GROUP = "choose"
EXAMPLES = (
    "quantry run demo --yes --port 8080",
    "quantry run Qwen/Qwen3-0.6B --for rag",
    "quantry run ./my-model --budget 4.5bpw --no-serve -o ./out",
)
INTERRUPTED = 130


Model = Annotated[str, typer.Argument(help="A folder, a hub id (owner/name), a well-known name or demo.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="The folder for all files; MODEL-quantry if left out.")
]
Budget = Annotated[
    str | None, typer.Option(help='A size, spent tensor by tensor: 4.5bpw, 6GiB or "fits RTX 3060 at 8k".')
]
Gpu = Annotated[str | None, typer.Option("--gpu", help='Plan for another machine: "2x RTX 3090", "M2 16GB", "cpu".')]
Engine = Annotated[str | None, typer.Option(help="The engine to serve with; the best if left out: {engines}.")]
Port = Annotated[
    int | None,
    typer.Option(help="Port to serve on; the engine's usual one if left out, or a free one; 0 for a free one."),
]
Ask = Annotated[str | None, typer.Option(help="The first question.")]
Device = Annotated[str | None, typer.Option(help="Where to compute: cpu or cuda; a GPU if there is one.")]
Serve = Annotated[bool, typer.Option("--serve/--no-serve", help="Keep serving after the first answer, or stop there.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Prove what was lost after the first answer.")]
ProofTime = Annotated[
    float,
    typer.Option(
        help="Time for the proof, such as 90s or 10m; 0 for all windows, however long.", show_default="3m", **flags.TIME
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the work begins.")]


def command(
    model: Model,
    output: Output = None,
    use: flags.Use = None,
    budget: Budget = None,
    gpu: Gpu = None,
    engine: Engine = None,
    engine_python: flags.EnginePython = None,
    context: flags.Context = None,
    port: Port = None,
    text: flags.Text = None,
    windows: flags.Windows = 16,
    proof_time: ProofTime = 180.0,
    ask: Ask = None,
    device: Device = None,
    serve: Serve = True,
    verify: Verify = True,
    yes: Yes = False,
    json: flags.Json = False,
) -> None:
    """Plan, quantize and serve a model, get a first answer, and prove what was lost; started again, it continues.

    Exit code 1 if the gate fails: then nothing is served.
    """
    check_engine(engine)
    check_use(use)
    check_plannable(model)
    check_given(text)
    from quantry.jobs.run.plan import QUESTION, DeclinedError
    from quantry.jobs.run.run import run

    asks = not (yes or json) and sys.stdin.isatty()
    try:
        done = run(
            model, output, use=use, budget=budget, gpu=gpu, engine=engine, engine_python=engine_python,
            context=context, port=port, text=text, windows=windows, proof_time=proof_time or None,
            question=QUESTION if ask is None else ask, device=device, serve=serve, verify=verify,
            tell=None if json else _tell,
            confirm=(lambda words: typer.confirm(words, default=True, err=True)) if asks else None,
            showing=lambda name, words: progress_bar(json, title=f"{name:<9} {words}"),
        )  # fmt: skip
        with done:
            _report(done, json=json)
            code = _wait(done)
    except DeclinedError:
        typer.echo("nothing was written", err=True)
        raise typer.Exit(1) from None
    if code and done.running:
        raise done.running.death()
    if not done.passed:
        raise typer.Exit(1)


def _wait(done: "Run") -> int:
    """Waits until the engine ends and returns its exit code; returns 0 at once if none is running."""
    if not done.running:
        return 0
    try:
        return done.running.wait() or 0
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _tell(step: "RunStep") -> None:
    """Prints a step as soon as it is done: its result, and the file that holds it."""
    took = "taken over" if step.taken_over else f"{step.seconds:.1f} s"
    typer.echo(f"{step.name:<9} {step.words}{'' if step.name == 'plan' else f' ({took})'}")
    if step.file:
        typer.echo(f"{'':<9} {step.file}")
    if step.said:
        typer.echo(f"\n{step.said}\n")
    sys.stdout.flush()


def _report(done: "Run", json: bool) -> None:
    if json:
        print_json(done.to_dict())
    else:
        show(picture(done))
    sys.stdout.flush()


def picture(done: "Run") -> list["RenderableType"]:
    """Draws the closing summary: what was lost, where the files are, and the next commands."""
    from rich.text import Text

    rows = [Text.assemble((f"{name:<12} ", "dim"), words) for name, words in _rows(done).items()]
    wrong = [Text(f"✗ {words}", "red") for words in (done.proof or {}).get("wrong", ())]
    notes = [Text(note, "dim") for note in done.notes]
    commands = [to_copy(words, f"{name}: ", "") for name, words in done.commands.items()]
    last = f"serving at {done.url}/v1; Ctrl-C ends it" if done.url else "done"
    if done.proof and not done.passed:
        last = f"the gate {done.proof['gate']} failed, so the model is not served"
    style = "bold green" if done.passed else "bold red"
    return ["", *rows, *wrong, *notes, "", *commands, "", Text(last, style)]


def _lost(proof: "Mapping[str, Any]") -> str:
    served = "" if proof["served_kl"] is None else f", {proof['served_kl']:.4f} as served"
    low, high = proof["kl_interval"]
    certain = f"{low:.4f} to {high:.4f}, {counted(proof['windows'], 'window')}"
    return (
        f"KL {proof['kl']:.4f}{served} ({certain}); same first token {proof['top1']:.1%}; perplexity "
        f"{proof['reference_perplexity']:.3f} -> {proof['perplexity']:.3f}"
    )


def _rows(done: "Run") -> dict[str, str]:
    proof, speed = done.proof, done.speed
    rows = {
        "model": f"{done.model} as {done.preset} ({done.format}) in {done.engine}",
        "size": f"{done.source_bytes:,} -> {done.bytes:,} bytes ({percent(done.bytes / done.source_bytes)}), "
        f"{done.bits_per_weight:.2f} bits a weight",
        "lost": _lost(proof) if proof else "not measured",
    }
    if speed["tokens_per_s"]:
        planned = speed["predicted_tokens_per_s"]
        rows["speed"] = f"{speed['tokens_per_s']:,.4g} tok/s{f' (predicted {planned:,.0f})' if planned else ''}, "
        rows["speed"] += f"first token after {speed['first_token_s']:.2g} s"
    predicted, measured = done.memory["predicted"], done.memory["measured"]
    if names := [name for name in predicted if name in measured]:
        parts = (f"{name.replace('_', ' ')} {human(measured[name])} ({human(predicted[name])})" for name in names)
        rows["memory"] = f"{', '.join(parts)}; predicted in brackets"
    return {**rows, "files": f"{done.artefact}: README.md is its card, quantry.json has recipe, hashes and proof"}
