"""What the commands that write checkpoints show: what is about to be written, how far it is, and what came of it.

The progress bar is on standard error, so that standard output stays for results.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from quantry.types import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from quantry.types import Artefact

WIDE = 140  # characters of a table that goes into a file


@contextmanager
def bar(quiet: bool = False) -> Iterator[Progress | None]:
    """Gives a function to report bytes done, bytes in all and what is in hand; None when there is nothing to show."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def report(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=label)

        yield report


@contextmanager
def steps(quiet: bool = False) -> Iterator[Progress | None]:
    """Gives a function to report how many of how many are done, and of what; None when there is nothing to show."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def report(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=label)

        yield report


def announce(artefact: "Artefact") -> None:
    """What is about to be written."""
    typer.echo(
        f"{artefact.source} -> {artefact.preset} as {artefact.format}: {artefact.quantized_layers} layers quantized, "
        f"{artefact.kept_tensors} tensors kept\n"
        f"{artefact.source_bytes:,} -> {artefact.bytes:,} bytes, {artefact.bits_per_weight:.2f} bits a weight"
    )


def write_report(folder: "Path") -> "Path":
    """Writes the report of an artefact beside it."""
    from quantry.jobs.artefact_report import content_of, write

    return write(folder, content_of(folder))


def finish(artefact: "Artefact", dry_run: bool, json: bool, page: "Path | None" = None) -> None:
    """What was written."""
    if json:
        from json import dumps

        typer.echo(dumps(artefact.to_dict(), indent=2))
    elif not dry_run:
        for line in (*artefact.notes, f"wrote {artefact.path}", *([f"report: {page}"] if page else [])):
            typer.echo(line)


def show(items: "Iterable[RenderableType]") -> None:
    """Prints what is drawn; a table that goes into a file is not cut to the width of a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(WIDE, console.width))
    for item in items:
        console.print(item)
