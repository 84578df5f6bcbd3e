"""`quantry diff`: two artefacts side by side on the same text."""

from typing import TYPE_CHECKING, Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._first import check_given, check_origin, check_present, check_windows
from quantry.cli._output import print_result, progress_bar, table
from quantry.report.sizes import human, nats

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.types import Difference

GROUP = "prove"
EXAMPLES = (
    "quantry diff out",
    "quantry diff out-q4_k_m out-awq --windows 4",
)
First = Annotated[str, typer.Argument(help="A model: a folder (quantized or not), a .gguf file, a hub id or demo.")]
Second = Annotated[
    str | None,
    typer.Argument(help="Another model with the same vocabulary; else the 16-bit model that the first was made from."),
]


def command(
    a: First,
    b: Second = None,
    text: flags.Text = None,
    windows: flags.Windows = 16,
    length: flags.WindowLength = 512,
    device: flags.Device = "cpu",
    json: flags.Json = False,
) -> None:
    """Compare two artefacts: how far their predictions are apart, their sizes, and which tensors differ most."""
    check_present(a, b)
    check_origin(a, b, "as a second model")
    check_given(text)
    check_windows(windows, length=length)
    from quantry.proof.diff import diff

    with progress_bar(quiet=json) as progress:
        difference = diff(a, b, text=text, windows=windows, length=length, device=device, progress=progress)
    print_result(difference, picture, json)


def picture(difference: "Difference") -> list["RenderableType"]:
    """Draws both models side by side, how far apart they are, and the tensors that differ most."""
    low, high = difference.intervals["kl"]
    speech = (
        f"KL of B from A: mean {nats(difference.kl)} ({nats(low)} to {nats(high)}), "
        f"median {nats(difference.kl_median)}, 99th percentile {nats(difference.kl_p99)}; "
        f"same likeliest token {difference.top1:.1%}"
    )
    tensors = table(("tensors that differ most", "relative difference"), ("relative difference",))
    for row in difference.tensors:
        tensors.add_row(row["name"], f"{row['error']:.4f}")
    same = "all weights are the same"
    models = (f"A: {difference.a['source']}", f"B: {difference.b['source']}")
    return [*models, "", _sides(difference), "", speech, "", tensors if difference.tensors else same, *difference.notes]


def _sides(difference: "Difference") -> "RenderableType":
    a, b = difference.a, difference.b
    sides = table(("", "A", "B"))
    sides.add_row("stored as", a["stored"], b["stored"])
    sides.add_row("size", human(a["bytes"]), human(b["bytes"]))
    sides.add_row("bits a weight", f"{a['bits_per_weight']:.2f}", f"{b['bits_per_weight']:.2f}")
    sides.add_row("perplexity", f"{a['perplexity']:.3f}", f"{b['perplexity']:.3f}")
    return sides
