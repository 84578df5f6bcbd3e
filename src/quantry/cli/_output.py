"""Results on standard output: JSON for programs, tables for people. Progress is shown on standard error."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

import typer

from quantry.cli._next import tell_next
from quantry.report.sizes import counted, duration, percent

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType
    from rich.text import Text

    from quantry.cli._table import Fitted
    from quantry.types import Artefact, Progress

FIRST_LINE, LINES = 10.0, 30.0  # seconds until a line of progress, and between two
SPEED = 600.0  # seconds that the time left is estimated from
WIDE = 140  # characters of a table in a file or a pipe


def print_result(result: Any, picture: "Callable[[Any], Iterable[RenderableType]]", json: bool) -> None:
    """Prints the dictionary of a result as JSON, or the tables and lines that `picture` makes of it."""
    if json:
        print_json(result.to_dict())
    else:
        show(picture(result))


def print_json(data: Any) -> None:
    from json import dumps

    typer.echo(dumps(data, indent=2, default=str))


def show(items: "Iterable[RenderableType]") -> None:
    """Prints tables and lines. Lines wrap between words in a terminal, and nowhere in a file or a pipe."""
    from rich.text import Text

    from quantry.cli._table import wrapped

    shown = console()
    for item in items:
        if isinstance(item, (str, Text)):
            text = Text(item) if isinstance(item, str) else item
            lines = wrapped(text, shown.width) if shown.is_terminal and not text.no_wrap else [text]
            for line in lines:
                shown.print(line, soft_wrap=True)
        else:
            shown.print(item, crop=False)


def console(*, stderr: bool = False) -> "Console":
    """Returns the console of all output: no escape codes with NO_COLOR, in a dumb terminal, a file or a pipe."""
    from shutil import get_terminal_size

    from rich.console import Console

    size = get_terminal_size()
    made = Console(highlight=False, stderr=stderr, width=size.columns, height=size.lines)
    if made.no_color or made.is_dumb_terminal or not made.is_terminal:
        wide = size.columns if made.is_terminal else max(WIDE, size.columns)
        made = Console(highlight=False, stderr=stderr, width=wide, height=size.lines, color_system=None)
    return made


def to_copy(words: str, label: str = "", style: str = "bold") -> "Text":
    """Returns a command as one line that is never broken, behind its label."""
    from rich.text import Text

    return Text.assemble((label, "dim"), (words, style), no_wrap=True, overflow="ignore")


def table(
    headings: Iterable[str],
    right: Collection[str] = (),
    *,
    drop: Sequence[str] = (),
    prose: Collection[str] = (),
    title: str | None = None,
    stacked: bool = False,
) -> "Fitted":
    """Returns an empty table without lines; the headings in `right` are of columns with figures.

    In a narrow terminal it loses the columns of `drop`, the first first; cells of `prose` wrap between words.
    """
    from quantry.cli._table import Fitted

    return Fitted(tuple(headings), right, drop, prose, title, stacked=stacked)


def facts(rows: "Iterable[tuple[str, str | Text]]") -> "Fitted":
    """Returns a table of names and values, without headings."""
    from quantry.cli._table import Fitted

    grid = Fitted(("name", "value"), prose=("value",), header=False)
    for row in rows:
        grid.add_row(*row)
    return grid


def announce(artefact: "Artefact") -> None:
    """Prints what is about to be written."""
    typer.echo(
        f"{artefact.source} -> {artefact.preset} as {artefact.format}: {_content(artefact)}\n"
        f"{artefact.source_bytes:,} -> {artefact.bytes:,} bytes, {artefact.bits_per_weight:.2f} bits a weight"
    )


def _content(artefact: "Artefact") -> str:
    if not artefact.quantized_layers:
        return "all weights in 16 bit"
    return f"{counted(artefact.quantized_layers, 'layer')} quantized, {counted(artefact.kept_tensors, 'tensor')} kept"


def write_report(folder: "Path", *, missing: bool = False) -> "Path":
    """Writes report.html and report.png into a folder, with `missing` only if one is not there; returns the page."""
    from quantry.jobs.artefact_report import PAGE, PICTURE, content_of, write

    if missing and all((folder / name).is_file() for name in (PAGE, PICTURE)):
        return folder / PAGE
    return write(folder, content_of(folder))


def check_files(files: "Iterable[Path]") -> None:
    """Raises OutputError for a file that cannot be written, before the work that it is to hold."""
    from os import W_OK, access

    from quantry.errors import OutputError

    for file in files:
        if file.expanduser().is_dir():
            raise OutputError(f"{file} is a folder", fix="name a file in it")
        above = next(folder for folder in file.expanduser().absolute().parents if folder.exists())
        if not above.is_dir() or not access(above, W_OK):
            raise OutputError(f"{file} cannot be written: {above} is no folder to write in", fix="name another file")


def write_file(file: "Path", content: str | bytes) -> None:
    """Writes a file of results, whole or not at all, and through no link."""
    from quantry.storage import write_named

    file.expanduser().parent.mkdir(parents=True, exist_ok=True)
    write_named(file.expanduser(), content.encode() if isinstance(content, str) else content)


def finish(artefact: "Artefact", dry_run: bool, json: bool, page: "Path | None" = None) -> None:
    """Prints what was written: everything as JSON, or notes and paths."""
    from quantry.quantizing.card import FINISHED

    if json:
        print_json(artefact.to_dict())
    elif not dry_run:
        for note in artefact.notes:
            typer.echo(note)
        if FINISHED not in artefact.notes:
            typer.echo(f"wrote {artefact.path}")
        if page:
            typer.echo(f"report: {page}")
        tell_next(artefact.path, verify=True)


@contextmanager
def progress_bar(quiet: bool = False, title: str = "") -> "Iterator[Progress | None]":
    """Shows how much is done, how long it took, how long it will take, and what is being done.

    Yields a function to report with, or None if `quiet`. Without a terminal it writes a line now and then.
    """
    if quiet:
        yield None
        return
    if title:
        typer.echo(title, err=True)
    terminal = console(stderr=True)
    if not terminal.is_terminal or terminal.is_dumb_terminal:
        yield _Lines().tell
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    words = TextColumn("{task.description}")
    with Bar(*columns, words, console=terminal, transient=True, speed_estimate_period=SPEED) as shown:
        task = shown.add_task("")
        yield lambda done, total, label: shown.update(task, completed=done, total=total, description=label)


class _Lines:
    """Progress where there is no terminal: a line after some seconds, then one every half minute."""

    def __init__(self) -> None:
        self._began = self._told = monotonic()
        self._pause = FIRST_LINE

    def tell(self, done: int, total: int, label: str) -> None:
        """Writes how far a job is, if it is time for it."""
        now = monotonic()
        if now - self._told < self._pause:
            return
        self._told, self._pause = now, LINES
        spent = now - self._began
        left = f", about {duration(spent * (total - done) / done)} left" if 0 < done <= total else ""
        share = f"{percent(done / total)} done" if total else "at work"
        typer.echo(f"{share} after {duration(spent)}{left}: {label}", err=True)
