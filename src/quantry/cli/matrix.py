"""`quantry matrix`: the tables of engines, hardware, formats, methods and memory, computed."""

from typing import TYPE_CHECKING, Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli import _output as output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.planning.matrices import Matrix

GROUP = "choose"
EXAMPLES = (
    "quantry matrix memory",
    "quantry matrix engines",
)
PROSE = 20  # letters of a cell from which on it is a sentence that may wrap
Name = Annotated[str, typer.Argument(help="{matrices}.")]


def command(name: Name, json: flags.Json = False) -> None:
    """Show what runs and fits where, and what each method costs; a star marks where common advice differs."""
    from quantry.planning.matrices import matrix

    tables = matrix(name)
    if json:
        output.print_json([table.to_dict() for table in tables])
    else:
        for table in tables:
            output.show(picture(table))


def picture(matrix: "Matrix") -> list["RenderableType"]:
    """Draws a table, and below it the reasons where it differs from common advice."""
    from rich.text import Text

    columns = zip(*matrix.rows.values(), strict=True)
    longest = [max(len(cell.ours) for cell in column) for column in columns]
    prose = [name for name, letters in zip(matrix.columns, longest, strict=True) if letters > PROSE]
    table = output.table(("", *matrix.columns), prose=prose, title=matrix.title, stacked=True)
    reasons: dict[str, list[str]] = {}
    for label, cells in matrix.rows.items():
        table.add_row(label, *(Text(f"{cell.ours} *" if cell.why else cell.ours) for cell in cells))
        for column, cell in zip(matrix.columns, cells, strict=True):
            if cell.why:
                reasons.setdefault(f"{column}: {cell.why}", []).append(f"{label} ({cell.advice})")
    lines = [Text(f"* {reason}. Common advice: {', '.join(rows)}", "dim") for reason, rows in reasons.items()]
    return [table, *([Text(matrix.note, "dim")] if matrix.note else []), *lines, ""]
