"""`quantry diff`: two artefacts side by side on the same text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.types import Difference


def command(
    a: Annotated[str, typer.Argument(help="A model: a folder (quantized or not), a .gguf file, a hub id or demo.")],
    b: Annotated[str, typer.Argument(help="Another of the same vocabulary.")],
    text: Annotated[Path | None, typer.Option(help="A text file to compare on; else the stories of the demo.")] = None,
    windows: Annotated[int, typer.Option(help="Pieces of the text to compare on; 0 for all.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a piece.")] = 512,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Compare two artefacts: how far apart they speak, what they weigh, which tensors differ most."""
    from quantry.cli._job import steps
    from quantry.proof.diff import diff

    with steps(quiet=json) as progress:
        found = diff(a, b, text=text, windows=windows, length=length, device=device, progress=progress)
    if json:
        from json import dumps

        typer.echo(dumps(found.to_dict(), indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for item in picture(found):
            console.print(item)


def picture(found: "Difference") -> list["RenderableType"]:
    """The difference as a person would rather see it."""
    from rich.table import Table

    from quantry.report.sizes import human

    sides = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("", "A", "B"):
        sides.add_column(heading, overflow="fold")
    sides.add_row("model", found.a["source"], found.b["source"])
    sides.add_row("stored as", found.a["stored"], found.b["stored"])
    sides.add_row("size", human(found.a["bytes"]), human(found.b["bytes"]))
    sides.add_row("bits a weight", f"{found.a['bits_per_weight']:.2f}", f"{found.b['bits_per_weight']:.2f}")
    sides.add_row("perplexity", f"{found.a['perplexity']:.3f}", f"{found.b['perplexity']:.3f}")

    low, high = found.intervals["kl"]
    speech = (
        f"KL of B from A: mean {found.kl:.3g} ({low:.3g} to {high:.3g}), median {found.kl_median:.3g}, "
        f"99th percentile {found.kl_p99:.3g}; same likeliest token {found.top1:.1%}"
    )
    tensors = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("tensors that differ most", "relative difference"):
        tensors.add_column(heading, justify="left" if heading.startswith("tensors") else "right")
    for row in found.tensors:
        tensors.add_row(row["name"], f"{row['error']:.4f}")
    return [sides, "", speech, "", tensors if found.tensors else "all weights are the same", *found.notes]
