"""`quantry inspect`: a picture of a model, read from its headers."""

from typing import TYPE_CHECKING, Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._output import facts, print_result, table
from quantry.report.sizes import human, percent

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from quantry.types import Anatomy, KVLayers, Part

GROUP = "choose"
EXAMPLES = (
    "quantry inspect demo",
    "quantry inspect owner/name --json",
    "quantry inspect ./model-Q4_K_M.gguf",
)
BAR = 16  # characters of the longest bar


Model = Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id (owner/name) or the word demo.")]


def command(model: Model, json: flags.Json = False) -> None:
    """Show what a model is made of, from its headers alone."""
    from quantry.models.anatomy import inspect

    print_result(inspect(model), lambda anatomy: [*picture(anatomy), *_chain(model)], json)


def _chain(model: str) -> list["RenderableType"]:
    """Lists the steps that an artefact of Quantry was made in; nothing for another model."""
    from pathlib import Path

    from rich.text import Text

    from quantry.quantizing.lineage import lineage_of, lines

    steps = lines(lineage_of(Path(model).expanduser()))
    return ["", Text("made in these steps", "bold"), *steps] if steps else []


def picture(anatomy: "Anatomy") -> list["RenderableType"]:
    """Draws the facts of a model and a table of its parts, the largest first."""
    from rich.text import Text

    figures = ("tensors", "parameters", "bytes")
    parts = table(
        ("part", *figures, "share", "stored as"), figures, drop=("share", "tensors", "parameters"), prose=("stored as",)
    )
    largest = max((part.bytes for part in anatomy.parts), default=1) or 1
    for part in sorted(anatomy.parts, key=lambda part: -part.bytes):
        bar = "█" * round(BAR * part.bytes / largest) or "▏"
        size = human(part.bytes)
        parts.add_row(part.name, f"{part.tensors:,}", f"{part.parameters:,}", size, bar, _dtypes(part))
    return [Text(anatomy.source, "bold"), facts(_facts(anatomy)), "", parts]


def _facts(anatomy: "Anatomy") -> "list[tuple[str, str | Text]]":
    from rich.text import Text

    missing = Text("missing", "yellow")
    quantized = anatomy.quantization
    group = f", groups of {quantized.group_size}" if quantized and quantized.group_size else ""
    return [
        ("architecture", f"{anatomy.architecture}, {anatomy.blocks} blocks ({anatomy.format})"),
        ("parameters", f"{anatomy.parameters:,}"),
        ("size", f"{human(anatomy.bytes)} in {anatomy.tensors:,} tensors"),
        ("bits a weight", f"{anatomy.bits_per_weight:.2f}"),
        ("quantization", f"{quantized.method}, {quantized.bits:g} bits{group}" if quantized else "none"),
        ("head", "tied to the embedding" if anatomy.tied_head else "own weights"),
        ("context", f"{anatomy.context_length:,} tokens" if anatomy.context_length else "not stated"),
        ("KV cache", f"{anatomy.kv_bytes_per_token:,} bytes a token in 16 bit"),
        *(("", _kv_line(layers)) for layers in anatomy.kv_layers),
        ("tokenizer", anatomy.tokenizer or missing),
        ("chat template", "present" if anatomy.chat_template else missing),
    ]


def _kv_line(layers: "KVLayers") -> str:
    line = f"{layers.layers} {layers.kind} layers: {layers.bytes_per_token:,} bytes a token"
    if layers.window:
        line += f", at most {layers.window:,} tokens"
    if layers.kind == "recurrent":
        line += f", constant state of {human(layers.state_bytes) if layers.state_bytes else 'unknown size'}"
    return line


def _dtypes(part: "Part") -> str:
    """Names the dtype of a part, or all of them with their shares, the largest first."""
    if len(part.dtypes) == 1:
        return next(iter(part.dtypes))
    by_size = sorted(part.dtypes.items(), key=lambda item: -item[1])
    return ", ".join(f"{dtype} {percent(nbytes / part.bytes)}" for dtype, nbytes in by_size)
