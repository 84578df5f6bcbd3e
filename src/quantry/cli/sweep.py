"""`quantry sweep`: one model in many ways, each measured, in one table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.jobs.sweep import Outcome, Sweep


def command(
    model: Annotated[str, typer.Argument(help="A folder, a hub id (owner/name) or the word demo.")],
    presets: Annotated[
        str,
        typer.Option(help="Presets with commas between, with options: w4a16:group=64,gguf-q4_k_m,auto:budget=4.5bpw."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The folder to write: new, or of a sweep to go on with.")
    ],
    peers: Annotated[
        str, typer.Option(help="GGUF files and folders of other tools to measure too, with commas between.")
    ] = "",
    text: Annotated[Path | None, typer.Option(help="A text file to measure on; else the stories of the demo.")] = None,
    windows: Annotated[int, typer.Option(help="Pieces of the text to measure on; 0 for all.")] = 16,
    verify_length: Annotated[int, typer.Option(help="Tokens of a piece.")] = 512,
    gate: Annotated[str, typer.Option(help="What the model is for: general, accuracy-critical or draft.")] = "general",
    data: Annotated[
        Path | None,
        typer.Option(help="Text, JSON lines, parquet or a datasets folder to calibrate on; else a built-in text."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Windows to calibrate on; 128 if not given.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a window to calibrate on; 2048 if not given.")] = None,
    rounder: Annotated[str | None, typer.Option(help="nearest or gptq, for all presets that do not say it.")] = None,
    group: Annotated[int | None, typer.Option(help="The group size of all presets that do not say it.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    engine: Annotated[
        str | None, typer.Option(help="Measure folders as served too: vllm or transformers. GGUF always is.")
    ] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="The python of the environment that the engine is installed in.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Quantize a model in many ways, measure each and compare them; exit code 1 if one cannot be made or measured."""
    from quantry.cli._job import show, steps
    from quantry.jobs.sweep import sweep

    with steps(quiet=json) as progress:
        done = sweep(
            model,
            output,
            presets=presets,
            peers=peers,
            text=text,
            windows=windows,
            verify_length=verify_length,
            gate=gate,
            data=data,
            samples=samples,
            length=length,
            rounder=rounder,
            group=group,
            device=device,
            engine=engine,
            engine_python=engine_python,
            announce=None if json else lambda line: typer.echo(line, err=True),
            progress=progress,
        )
    if json:
        from json import dumps

        typer.echo(dumps(done.to_dict(), indent=2))
    else:
        show(picture(done))
    if not done.complete:
        raise typer.Exit(1)


def picture(done: "Sweep") -> list["RenderableType"]:
    """The table from worst to best, what is missing in it, and where the rest is."""
    from rich.text import Text

    head = Text(f"{done.model} in {len(done.rows)} ways", "bold")
    measured = f"{done.text['name']}: {done.text['windows']} windows of {done.text['length']} tokens"
    if done.reference_perplexity is not None:
        measured += f"; perplexity {done.reference_perplexity:.3f} in 16 bit; noise floor of KL {done.noise_floor:.2g}"
    problems = [Text.assemble((f"✗ {row.name}: ", "red"), row.problem) for row in done.rows if row.problem]
    words = "● none of the others is as small and as good · peer: another tool's file"
    legend = words if any(row.peer for row in done.rows) else words.partition(" · ")[0]
    return [
        head,
        Text(measured, "dim"),
        _table(done.ranked()),
        Text(legend, "dim"),
        *problems,
        *(Text(note, "dim") for note in done.notes),
        Text(f"wrote {done.path}: sweep.json, report.html, report.png"),
    ]


def _table(rows: "tuple[Outcome, ...]") -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("", overflow="fold", min_width=16)
    for heading in ("MiB", "bits", "KL", "95 % interval", "served", "same 1st", "perplexity", "gate"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row("●" if row.frontier else "", f"{row.name} (peer)" if row.peer else row.name, *_cells(row))
    return table


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
