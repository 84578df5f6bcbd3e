"""`quantry sensitivity`: what each layer would lose in each type it can be stored in."""

from typing import TYPE_CHECKING, Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._first import check_calibration, check_data, check_models
from quantry.cli._output import print_result, progress_bar, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.jobs.auto.sensitivity import Sensitivity

GROUP = "make"
EXAMPLES = ("quantry sensitivity demo --grids Q4_K,Q6_K --samples 16 --length 128",)
BAR = 24  # characters of the longest bar
SHOWN = 20  # layers in the table


Format = Annotated[str, typer.Option(help="gguf or compressed-tensors.")]
Rounder = Annotated[str, typer.Option(help="{rounders}.")]
Transform = Annotated[str | None, typer.Option(help="{transforms} before rounding.")]
Grids = Annotated[str | None, typer.Option(help="Only these types beside 16 bit, such as Q4_K,Q6_K.")]


def command(
    model: flags.Checkpoint,
    format: Format = "gguf",  # noqa: A002
    rounder: Rounder = "gptq",
    data: flags.Data = None,
    samples: flags.Samples = None,
    length: flags.SampleLength = None,
    transform: Transform = None,
    grids: Grids = None,
    device: flags.Device = "cpu",
    json: flags.Json = False,
) -> None:
    """Predict what each layer would lose in each type it can be stored in, the worst first."""
    check_calibration(samples, length)
    check_data(data)
    check_models(model)
    from quantry.jobs.auto.sensitivity import sensitivity

    with progress_bar(quiet=json) as progress:
        losses = sensitivity(
            model, format=format, data=data, samples=samples, length=length, device=device, rounder=rounder,
            transform=transform, grids=None if grids is None else [name.strip() for name in grids.split(",")],
            progress=progress,
        )  # fmt: skip
    print_result(losses, picture, json)


def picture(losses: "Sensitivity") -> list["RenderableType"]:
    """Draws the worst layers as a table, and the sums of blocks as bars."""
    from rich.text import Text

    head = Text(losses.source, "bold")
    head.append(
        f" as {losses.format}, rounded with {losses.rounder}: predicted KL in nats a token, one layer at a time",
        "not bold",
    )
    rest = len(losses.layers) - SHOWN
    more = [Text(f"and {rest} more layers (--json has all of them)", "dim")] if rest > 0 else []
    return [head, "", _table(losses), *more, "", *_blocks(losses), *(Text(note, "yellow") for note in losses.notes)]


def _table(losses: "Sensitivity") -> "RenderableType":
    rows = table(
        ("layer", "as", "KL", "", "error", "outliers"), ("KL", "error", "outliers"), drop=("", "outliers", "error")
    )
    ranked = losses.ranked()
    largest = max((losses.compared(layer).damage for layer in ranked), default=0.0)
    for layer in ranked[:SHOWN]:
        stored = losses.compared(layer)
        outliers = "" if layer.outliers is None else f"{layer.outliers:.1f} x"
        figures = f"{stored.damage:.2e}", _bar(stored.damage, largest), f"{stored.error:.1%}"
        rows.add_row(layer.name, stored.name, *figures, outliers)
    return rows


def _blocks(losses: "Sensitivity") -> list["RenderableType"]:
    """Draws the damage of each block if all its layers were stored in the type that ranks them."""

    sums: dict[int, float] = {}
    for layer in losses.layers:
        if layer.block is not None:
            sums[layer.block] = sums.get(layer.block, 0.0) + losses.compared(layer).damage
    rows = table(("block", "KL", ""), ("block", "KL"))
    largest = max(sums.values(), default=0.0)
    for block, damage in sorted(sums.items()):
        rows.add_row(str(block), f"{damage:.2e}", _bar(damage, largest))
    return [rows]


def _bar(value: float, largest: float) -> str:
    return "█" * round(BAR * value / largest) or "▏" if largest else ""
