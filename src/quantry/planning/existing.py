"""A checkpoint that is quantized already is planned as it is: the recipe that describes its stored scheme.

The scheme is read from the checkpoint, or known by name where only the shape is known (metadata "stored"). rules.toml
(`stored`) says which preset and format stand for it, and which layers such checkpoints leave in 16 bit.
"""

from collections.abc import Mapping
from typing import Any

from quantry.errors import CheckpointError
from quantry.formats.gguf import NAME as CONTAINER
from quantry.llamacpp.mixture import FILE_TYPES
from quantry.models.already_quantized import quantization
from quantry.planning.models import from_config
from quantry.planning.stored import config_scheme
from quantry.quantizing.recipe import Recipe, Rule, preset, presets
from quantry.storage import read_data
from quantry.types import Checkpoint

SIXTEEN = frozenset({"bf16", "f16", "fp16", "bfloat16", "float16"})
GGUF = "gguf:"  # before the file type of a GGUF file
MXFP4_FILE = 38  # general.file_type of a GGUF file in MXFP4


def existing(checkpoint: Checkpoint) -> tuple[Checkpoint, Recipe] | None:
    """Returns the 16-bit shape of a quantized checkpoint and the recipe of its stored scheme; None for 16 bit.

    Raises CheckpointError if the scheme is none that engines are known to serve.
    """
    shape_only = "shape" in checkpoint.metadata
    name = str(checkpoint.metadata["stored"]) if shape_only else _stored_name(checkpoint)
    if name in SIXTEEN:
        return None
    recipe = _recipe(checkpoint.source, name, None if shape_only else _group(checkpoint))
    return (checkpoint if shape_only else from_config(checkpoint.config, checkpoint.source, stored=name)), recipe


def _recipe(source: str, name: str, group: int | None) -> Recipe:
    if name.startswith(GGUF):
        return _gguf_recipe(source, name.removeprefix(GGUF))
    rows: Mapping[str, Any] = read_data("quantry.planning", "rules.toml")["stored"]
    if name not in rows:
        raise CheckpointError(
            f"{source} is quantized as {name}, and no engine is known to serve that", fix="plan the 16-bit original"
        )
    row = rows[name]
    plain = preset(row["preset"])
    grouped = group and plain.scheme.weight.kind == "int" and plain.scheme.weight.block[1]
    chosen = preset(plain.name, group) if grouped else plain
    return Recipe(chosen, row["format"], tuple(Rule(match, None) for match in row.get("keep", ())))


def _gguf_recipe(source: str, kind: str) -> Recipe:
    """Returns the recipe of a file type: the preset of that mixture, or of the MXFP4 that a model is published in."""
    name = next((name for name in (f"gguf-{kind.lower()}", kind.lower()) if name in presets()), None)
    if name is None:
        known = sorted(name.removeprefix("gguf-").upper() for name in presets() if name.startswith("gguf-"))
        raise CheckpointError(
            f"{source} is a GGUF file of type {kind}, whose size is not known", fix=f"known are {', '.join(known)}"
        )
    return Recipe(preset(name), CONTAINER)


def _group(checkpoint: Checkpoint) -> int | None:
    quantized = quantization(checkpoint)
    size = quantized.group_size if quantized else None
    return size if size and size > 0 else None


def _stored_name(checkpoint: Checkpoint) -> str:
    """Returns the name of a checkpoint's scheme from its config, or from the file type of a GGUF."""
    if checkpoint.format != CONTAINER:
        return config_scheme(checkpoint.config)
    number = checkpoint.metadata.get("general.file_type", -1)
    names = {**{row.number: name for name, row in FILE_TYPES.items()}, MXFP4_FILE: "mxfp4"}
    return GGUF + names.get(number, f"type {number}").upper()
