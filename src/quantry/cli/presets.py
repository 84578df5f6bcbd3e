"""`quantry presets`: what --preset takes."""

from quantry.cli import _flags as flags
from quantry.cli._output import print_json, show, table

GROUP = "choose"
EXAMPLES = (
    "quantry presets",
    "quantry presets --json",
)


def command(json: flags.Json = False) -> None:
    """List the presets and the formats that hold them."""
    from dataclasses import asdict

    from quantry.quantizing.recipe import presets

    if json:
        print_json([asdict(preset) for preset in presets().values()])
        return
    formats = "formats (first is the default)"
    rows = table(
        ("preset", "bits", formats, "what it is"), ("bits",), drop=(formats, "bits"), prose=(formats, "what it is")
    )
    for preset in presets().values():
        rows.add_row(preset.name, str(preset.scheme.weight.bits), ", ".join(preset.formats), preset.about)
    show([rows])
