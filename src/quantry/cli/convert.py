"""`quantry convert`: a quantized checkpoint in another format."""

from typing import Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._first import check_present, check_preset
from quantry.cli._output import announce, finish, progress_bar

GROUP = "make"
EXAMPLES = (
    "quantry convert out-w4a16 -o out-gptq --to gptq",
    "quantry convert model-Q8_0.gguf -o out-bf16 --to bf16",
    "quantry convert out-gptq -o out-gguf --to gguf --requantize Q4_K_M",
)
Source = Annotated[str, typer.Argument(help="A quantized checkpoint: a folder, a GGUF file or a hub id.")]
To = Annotated[str, typer.Option(help="A format ({formats}; gguf with --requantize), or bf16 or fp16.")]
Requantize = Annotated[
    str | None,
    typer.Option(help="A preset to round onto if the format cannot hold the grid, as for gguf; adds error."),
]


def command(
    source: Source,
    output: flags.NewFolder,
    to: To,
    requantize: Requantize = None,
    overwrite: flags.Overwrite = False,
    dry_run: flags.DryRun = False,
    json: flags.Json = False,
) -> None:
    """Write a quantized checkpoint in another format, without loss where the grids agree; or a GGUF file as 16 bit."""
    check_present(source)
    check_preset(requantize)
    from quantry.quantizing.convert import convert

    with progress_bar(quiet=json) as progress:
        artefact = convert(
            source,
            output,
            to=to,
            requantize=requantize,
            overwrite=overwrite,
            dry_run=dry_run,
            announce=None if json else announce,
            progress=progress,
        )
    finish(artefact, dry_run, json)
