"""Results on standard output: JSON for programs, tables for people."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from quantry.types import Artefact

WIDE = 140  # characters of a table in a file or a pipe


def print_json(data: Any) -> None:
    from json import dumps

    typer.echo(dumps(data, indent=2))


def show(items: "Iterable[RenderableType]") -> None:
    """Prints tables and lines; in a file or a pipe a table may be wider than a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(WIDE, console.width))
    for item in items:
        console.print(item)


def announce(artefact: "Artefact") -> None:
    """Prints what is about to be written."""
    typer.echo(
        f"{artefact.source} -> {artefact.preset} as {artefact.format}: {artefact.quantized_layers} layers quantized, "
        f"{artefact.kept_tensors} tensors kept\n"
        f"{artefact.source_bytes:,} -> {artefact.bytes:,} bytes, {artefact.bits_per_weight:.2f} bits a weight"
    )


def write_report(folder: "Path") -> "Path":
    """Writes report.html and report.png into the folder of an artefact and returns the path of the page."""
    from quantry.jobs.artefact_report import content_of, write

    return write(folder, content_of(folder))


def finish(artefact: "Artefact", dry_run: bool, json: bool, page: "Path | None" = None) -> None:
    """Prints what was written: everything as JSON, or notes and paths."""
    if json:
        print_json(artefact.to_dict())
    elif not dry_run:
        for note in artefact.notes:
            typer.echo(note)
        typer.echo(f"wrote {artefact.path}")
        if page:
            typer.echo(f"report: {page}")
