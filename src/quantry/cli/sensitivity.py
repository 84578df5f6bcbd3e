"""`quantry sensitivity`: what each layer would lose in each way to store it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.jobs.auto.sensitivity import Sensitivity

BAR = 24  # characters of the longest bar
SHOWN = 20  # layers in the table


def command(
    model: Annotated[str, typer.Argument(help="A folder, a hub id (owner/name) or the word demo.")],
    format: Annotated[str, typer.Option(help="gguf or compressed-tensors.")] = "gguf",  # noqa: A002
    rounder: Annotated[str, typer.Option(help="nearest or gptq.")] = "gptq",
    data: Annotated[
        Path | None,
        typer.Option(help="Text, JSON lines, parquet or a datasets folder to calibrate on; else a built-in text."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Windows to calibrate on; 128 if not given.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a window; 2048 if not given.")] = None,
    transform: Annotated[str | None, typer.Option(help="awq or smoothquant before rounding.")] = None,
    grids: Annotated[
        str | None, typer.Option(help="Only these ways to store a layer beside 16 bit, such as Q4_K,Q6_K.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Predict what each layer would lose in each way to store it, the worst first."""
    from quantry.cli._job import steps
    from quantry.jobs.auto.sensitivity import sensitivity

    with steps(quiet=json) as progress:
        found = sensitivity(
            model,
            format=format,
            data=data,
            samples=samples,
            length=length,
            device=device,
            rounder=rounder,
            transform=transform,
            grids=None if grids is None else [name.strip() for name in grids.split(",")],
            progress=progress,
        )
    if json:
        from json import dumps

        typer.echo(dumps(found.to_dict(), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for item in picture(found):
        console.print(item)


def picture(found: "Sensitivity") -> list["RenderableType"]:
    """The worst layers as a table, and the sums of blocks as bars."""
    from rich.text import Text

    head = Text(found.source, "bold")
    head.append(
        f" as {found.format}, rounded with {found.rounder}: predicted KL in nats a token, one layer at a time",
        "not bold",
    )
    rest = len(found.layers) - SHOWN
    more = [Text(f"and {rest} more layers (--json has all of them)", "dim")] if rest > 0 else []
    return [head, "", _table(found), *more, "", *_blocks(found), *(Text(note, "yellow") for note in found.notes)]


def _table(found: "Sensitivity") -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("layer", "as", "KL", "", "error", "outliers"):
        table.add_column(heading, justify="right" if heading in ("KL", "error", "outliers") else "left", no_wrap=True)
    ranked = found.ranked()
    largest = max((found.compared(layer).damage for layer in ranked), default=0.0)
    for layer in ranked[:SHOWN]:
        one = found.compared(layer)
        outliers = "" if layer.outliers is None else f"{layer.outliers:.1f} x"
        table.add_row(
            layer.name, one.name, f"{one.damage:.2e}", _bar(one.damage, largest), f"{one.error:.1%}", outliers
        )
    return table


def _blocks(found: "Sensitivity") -> list["RenderableType"]:
    """The damage of each block, were all of its layers stored alike, at the grid that layers are ranked by."""
    from rich.table import Table

    sums: dict[int, float] = {}
    for layer in found.layers:
        if layer.block is not None:
            sums[layer.block] = sums.get(layer.block, 0.0) + found.compared(layer).damage
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("block", "KL", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    largest = max(sums.values(), default=0.0)
    for block, harm in sorted(sums.items()):
        table.add_row(str(block), f"{harm:.2e}", _bar(harm, largest))
    return [table]


def _bar(value: float, largest: float) -> str:
    return "█" * round(BAR * value / largest) or "▏" if largest else ""
