"""`quantry matrix`: the tables of engines, hardware, formats, methods and memory, computed."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.planning.matrices import Matrix


def command(
    name: Annotated[str, typer.Argument(help="engines, hardware, formats, methods or memory.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what runs and fits where, and what each method costs; a star marks where the handbook differs."""
    from quantry.planning.matrices import matrix

    tables = matrix(name)
    if json:
        from json import dumps

        typer.echo(dumps([table.to_dict() for table in tables], indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for table in tables:
        for item in picture(table):
            console.print(item)


def picture(matrix: "Matrix") -> list["RenderableType"]:
    """A table as a person would rather see it, with the reasons below it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=matrix.title, box=None, padding=(0, 1), header_style="dim", title_justify="left")
    table.add_column("")
    for column in matrix.columns:
        table.add_column(column)
    reasons: dict[str, list[str]] = {}
    for label, cells in matrix.rows.items():
        table.add_row(label, *(Text(f"{cell.ours} *" if cell.why else cell.ours) for cell in cells))
        for column, cell in zip(matrix.columns, cells, strict=True):
            if cell.why:
                reasons.setdefault(f"{column}: {cell.why}", []).append(f"{label} ({cell.handbook})")
    lines = [Text(f"* {reason}. Handbook: {', '.join(rows)}", "dim") for reason, rows in reasons.items()]
    return [table, *([Text(matrix.note, "dim")] if matrix.note else []), *lines, ""]
