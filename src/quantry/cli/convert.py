"""`quantry convert`: a quantized checkpoint in another format."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[str, typer.Argument(help="A quantized checkpoint: a folder, a GGUF file or a hub id.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write; new or empty.")],
    to: Annotated[str, typer.Option(help="A format (compressed-tensors, gptq, awq, bitsandbytes), or bf16 or fp16.")],
    requantize: Annotated[
        str | None, typer.Option(help="A preset to round onto when the format cannot hold the grid; adds error.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Write a quantized checkpoint in another format, without loss where the grids agree; or a GGUF file as 16 bit."""
    from quantry.cli._job import announce, bar, finish
    from quantry.quantizing.convert import convert

    with bar(quiet=json) as progress:
        artefact = convert(
            source,
            output,
            to=to,
            requantize=requantize,
            dry_run=dry_run,
            announce=None if json else announce,
            progress=progress,
        )
    finish(artefact, dry_run, json)
