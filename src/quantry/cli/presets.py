"""`quantry presets`: what can be asked for with --preset."""

from typing import Annotated

import typer


def command(json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False) -> None:
    """List the presets and the formats that hold them."""
    from quantry.quantizing.recipe import presets

    if json:
        from dataclasses import asdict
        from json import dumps

        typer.echo(dumps([asdict(preset) for preset in presets().values()], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("preset", "bits", "formats (first is the default)", "what it is"):
        table.add_column(heading)
    for preset in presets().values():
        table.add_row(preset.name, str(preset.scheme.weight.bits), ", ".join(preset.formats), preset.about)
    Console(highlight=False).print(table)
