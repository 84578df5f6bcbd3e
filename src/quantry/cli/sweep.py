"""`quantry sweep`: one model quantized with many presets, each measured, in one table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._first import (
    check_calibration,
    check_data,
    check_gate,
    check_given,
    check_models,
    check_presets,
    check_scoring_engine,
    check_windows,
)
from quantry.cli._next import tell_next
from quantry.cli._output import print_result, progress_bar, table
from quantry.report.sizes import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.jobs.sweep.table import Outcome, Sweep

GROUP = "make"
EXAMPLES = ("quantry sweep demo -o sweep --presets Q4_K_M,awq,fp8 --windows 4",)
Presets = Annotated[
    str,
    typer.Option(help="Presets with commas between, with options: w4a16:group=64,gguf-q4_k_m,auto:budget=4.5bpw."),
]
Output = Annotated[
    Path, typer.Option("-o", "--output", help="The folder to write: new, or that of a sweep to continue.")
]
Peers = Annotated[str, typer.Option(help="GGUF files and folders of other tools to measure too, with commas between.")]
Rounder = Annotated[str | None, typer.Option(help="{rounders}, for all presets that do not name one.")]
Group = Annotated[
    int | None, typer.Option(help="The group size of all presets that do not name one: a multiple of 8, 8 to 1024.")
]
Engine = Annotated[
    str | None, typer.Option(help="Measure folders as served too: {verifying}; GGUF always is, in llama.cpp.")
]


def command(
    model: flags.Checkpoint,
    presets: Presets,
    output: Output,
    peers: Peers = "",
    text: flags.Text = None,
    windows: flags.Windows = 16,
    verify_length: flags.WindowLength = 512,
    gate: flags.Gate = "general",
    data: flags.Data = None,
    samples: flags.Samples = None,
    length: flags.SampleLength = None,
    rounder: Rounder = None,
    group: Group = None,
    device: flags.Device = "cpu",
    engine: Engine = None,
    engine_python: flags.EnginePython = None,
    json: flags.Json = False,
) -> None:
    """Quantize a model with many presets, measure and compare them; exit code 1 if one cannot be made or measured."""
    check_presets(presets)
    check_gate(gate)
    check_scoring_engine(engine)
    check_calibration(samples, length)
    check_windows(windows, verify_length=verify_length)
    check_given(text)
    check_data(data)
    check_models(model)
    from quantry.jobs.sweep.sweep import sweep

    with progress_bar(quiet=json) as progress:
        done = sweep(
            model, output, presets=presets, peers=peers, text=text, windows=windows, verify_length=verify_length,
            gate=gate, data=data, samples=samples, length=length, rounder=rounder, group=group, device=device,
            engine=engine, engine_python=engine_python, progress=progress,
            announce=None if json else lambda line: typer.echo(line, err=True),
        )  # fmt: skip
    print_result(done, picture, json)
    if not json and (best := _smallest_that_passes(done)):
        tell_next(best)
    if not done.complete:
        raise typer.Exit(1)


def _smallest_that_passes(done: "Sweep") -> Path | None:
    passing = [row for row in done.rows if row.verdict == "pass" and not row.peer and row.bytes]
    return Path(done.path) / min(passing, key=lambda row: row.bytes or 0).name if passing else None


def picture(done: "Sweep") -> list["RenderableType"]:
    """Draws the table from worst to best, the artefacts that failed, and where the files are."""
    from rich.text import Text

    head = Text(f"{done.model} in {counted(len(done.rows), 'way')}", "bold")
    measured = f"{done.text['name']}: {counted(done.text['windows'], 'window')} of {done.text['length']} tokens"
    if done.reference_perplexity is not None:
        measured += f"; perplexity {done.reference_perplexity:.3f} in 16 bit; noise floor of KL {done.noise_floor:.2g}"
    problems = [Text.assemble((f"✗ {row.name}: ", "red"), row.problem) for row in done.rows if row.problem]
    peer = " · peer: another tool's file" if any(row.peer for row in done.rows) else ""
    return [
        head,
        Text(measured, "dim"),
        _table(done.ranked()),
        Text(f"● none of the others is as small and as good{peer}", "dim"),
        *problems,
        *(Text(note, "dim") for note in done.notes),
        Text(f"wrote {done.path}: sweep.json, report.html, report.png"),
    ]


def _table(rows: "tuple[Outcome, ...]") -> "RenderableType":
    figures = ("MiB", "bits", "KL", "95 % interval", "served", "same 1st", "perplexity", "gate")
    drop = ("95 % interval", "perplexity", "bits", "served", "same 1st", "gate")
    drawn = table(("", *figures), figures, drop=drop)
    for row in rows:
        name = f"{row.name} (peer)" if row.peer else row.name
        drawn.add_row(f"{'●' if row.frontier else ' '} {name}", *_cells(row))
    return drawn


def _cells(row: "Outcome") -> list[str]:
    low, high = row.kl_interval or (None, None)
    return [
        _number(row.bytes and row.bytes / (1 << 20), ".2f"),
        _number(row.bits_per_weight, ".2f"),
        _number(row.kl, ".4f"),
        "" if low is None else f"{low:.4f}-{high:.4f}",
        _number(row.served_kl, ".4f"),
        _number(row.top1, ".1%"),
        _number(row.perplexity, ".3f"),
        row.verdict or "",
    ]


def _number(value: float | None, style: str) -> str:
    return "" if value is None else f"{value:{style}}"
