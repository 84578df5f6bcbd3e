"""`quantry presets`: what can be asked for with --preset."""

from typing import Annotated

import typer


def command(json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False) -> None:
    """List the presets, the formats that hold them, and which are still to come."""
    from quantry.recipe import presets

    if json:
        from dataclasses import asdict
        from json import dumps

        rows = [{**asdict(preset), "missing": preset.missing} for preset in presets().values()]
        typer.echo(dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("preset", "bits", "formats (first is the default)", "what it is"):
        table.add_column(heading)
    for preset in presets().values():
        about = (
            f"[dim]{preset.about} (needs the {preset.missing}, not built yet)[/dim]" if preset.missing else preset.about
        )
        table.add_row(preset.name, str(preset.scheme.weight.bits), ", ".join(preset.formats), about)
    Console(highlight=False).print(table)
