"""`quantry presets`: what --preset takes."""

from quantry.cli import _flags as flags


def command(json: flags.Json = False) -> None:
    """List the presets and the formats that hold them."""
    from dataclasses import asdict

    from quantry.cli._output import print_json, show
    from quantry.quantizing.recipe import presets

    if json:
        print_json([asdict(preset) for preset in presets().values()])
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("preset", "bits", "formats (first is the default)", "what it is"):
        table.add_column(heading)
    for preset in presets().values():
        table.add_row(preset.name, str(preset.scheme.weight.bits), ", ".join(preset.formats), preset.about)
    show([table])
