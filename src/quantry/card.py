"""What a finished job says of itself: quantry.json for programs, the model card for people. No clock, no host: the same
job gives the same bytes.
"""

import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from quantry import __version__
from quantry.checkpoint.workspace import Finished
from quantry.pieces import Division
from quantry.recipe import Recipe
from quantry.types import Anatomy, Artefact


def plan(source: str, out: Path, recipe: Recipe, anatomy: Anatomy, division: Division) -> Artefact:
    """What a job will give, known before it starts."""
    return Artefact(
        source=source,
        path=str(out),
        preset=recipe.preset.name,
        format=recipe.format,
        parameters=anatomy.parameters,
        source_bytes=anatomy.bytes,
        bytes=division.bytes,
        bits_per_weight=round(8 * division.bytes / anatomy.parameters, 4),
        quantized_layers=len(division.assignment),
        kept_tensors=sum(fate == "kept" or fate.startswith("cast") for fate in division.fates.values()),
    )


def finish(planned: Artefact, files: Mapping[str, Finished], notes: tuple[str, ...]) -> Artefact:
    return replace(planned, files={name: asdict(done) for name, done in files.items()}, notes=notes)


def as_json(artefact: Artefact, recipe: Recipe, division: Division) -> str:
    """quantry.json: recipe, versions, hashes, sizes, and the fate of every source tensor."""
    content = {
        "quantry": __version__,
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        **{key: value for key, value in artefact.to_dict().items() if key not in ("path", "source")},
        "source": Path(artefact.source).name,
        "recipe": recipe.to_dict(),
        "fates": _fates(division),
    }
    return json.dumps(content, indent=2) + "\n"


def _fates(division: Division) -> dict[str, list[str]]:
    fates: dict[str, list[str]] = {}
    for name, fate in division.fates.items():
        fates.setdefault(fate, []).append(name)
    return fates


def as_markdown(artefact: Artefact, recipe: Recipe, division: Division) -> str:
    """The model card."""
    counts = Counter(fate.partition(":")[0] for fate in division.fates.values())
    rules = "".join(f"| `{rule.match}` | {rule.preset.name if rule.preset else '16 bit'} |\n" for rule in recipe.rules)
    name = Path(artefact.source).name
    return f"""---
base_model: {name}
library_name: transformers
tags: [quantized, quantry, {artefact.preset}]
---
# {name}, {artefact.preset}

{recipe.preset.about}. Made with Quantry {__version__} from the 16-bit model; stored as {artefact.format}.

| | |
|---|---|
| parameters | {artefact.parameters:,} |
| size | {artefact.bytes:,} bytes, {artefact.bytes / artefact.source_bytes:.1%} of the original |
| bits a weight | {artefact.bits_per_weight:.3f}, scales and unquantized parts included |
| linear layers quantized | {artefact.quantized_layers} |
| source tensors | {", ".join(f"{count} {fate}" for fate, count in counts.items())} |
{rules}
{"".join(f"{note}{chr(10)}" for note in artefact.notes)}
`quantry.json` has the recipe, the versions, the SHA-256 of each shard and the fate of every tensor.
"""
