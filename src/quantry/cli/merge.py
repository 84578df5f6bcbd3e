"""`quantry merge`: a base and an adapter as one 16-bit checkpoint."""

from typing import Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._first import check_present
from quantry.cli._output import announce, finish, progress_bar

GROUP = "make"
EXAMPLES = (
    "quantry merge owner/name ./my-adapter -o merged",
    "quantry merge demo ./my-adapter -o merged --dry-run",
)
Base = Annotated[str, typer.Argument(help="The 16-bit model that the adapter was trained on: folder, hub id or demo.")]
AdapterFolder = Annotated[str, typer.Argument(help="A LoRA adapter: a folder that peft wrote.")]


def command(
    base: Base,
    adapter: AdapterFolder,
    output: flags.NewFolder,
    overwrite: flags.Overwrite = False,
    dry_run: flags.DryRun = False,
    json: flags.Json = False,
) -> None:
    """Merge a LoRA adapter into the 16-bit model it was trained on, ready to be quantized."""
    check_present(base)
    from quantry.quantizing.merge import merge

    with progress_bar(quiet=json) as progress:
        artefact = merge(
            base,
            adapter,
            output,
            overwrite=overwrite,
            dry_run=dry_run,
            announce=None if json else announce,
            progress=progress,
        )
    finish(artefact, dry_run, json)
