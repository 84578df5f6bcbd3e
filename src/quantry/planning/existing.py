"""A checkpoint that is quantized already is planned as it is: the recipe that describes its stored scheme.

The scheme is read from the checkpoint, or known by name where only the shape is known (metadata "stored"). rules.toml
(`stored`) says which preset and format stand for it, and which layers such checkpoints leave in 16 bit.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from quantry.errors import CheckpointError, QuantryError
from quantry.formats.contract import recognise
from quantry.llamacpp.mixture import FILE_TYPES
from quantry.models.already_quantized import quantization
from quantry.planning.models import from_config
from quantry.quantizing.recipe import Recipe, Rule, preset, presets
from quantry.storage import read_data
from quantry.types import Checkpoint, Scheme

SIXTEEN = frozenset({"bf16", "f16", "fp16", "bfloat16", "float16"})
GGUF = "gguf:"  # before the file type of a GGUF file


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
        wanted = f"gguf-{name.removeprefix(GGUF).lower()}"
        if wanted not in presets():
            raise CheckpointError(f"{source} is a GGUF file of type {name[5:]}, which is not planned", fix="use Q4_K_M")
        return Recipe(preset(wanted), "gguf")
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


def _group(checkpoint: Checkpoint) -> int | None:
    quantized = quantization(checkpoint)
    size = quantized.group_size if quantized else None
    return size if size and size > 0 else None


def _stored_name(checkpoint: Checkpoint) -> str:
    """Returns the name of a checkpoint's scheme from its config and its tensors."""
    quantized = quantization(checkpoint)
    if quantized is None:
        return "bf16"
    if checkpoint.format == "gguf":
        number = checkpoint.metadata.get("general.file_type")
        return GGUF + next((name.upper() for name, row in FILE_TYPES.items() if row.number == number), "unknown")
    settings = checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config") or {}
    if quantized.method == "gptq":
        return f"gptq-int{quantized.bits:.0f}"
    if quantized.method == "fp8":
        return "fp8-block" if settings.get("weight_block_size") else "fp8"
    if quantized.method == "bitsandbytes":
        return "bnb-4bit" if settings.get("load_in_4bit") or settings.get("_load_in_4bit") else "bnb-8bit"
    if quantized.method == "modelopt":
        return "nvfp4" if "FP4" in str(settings.get("quant_algo", "")).upper() else "fp8"
    if quantized.method == "compressed-tensors":
        return _compressed(checkpoint, settings)
    return quantized.method


def _compressed(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> str:
    """Returns the row of `stored` whose preset has the scheme of most layers."""
    codec = recognise("compressed-tensors")
    assert codec is not None
    try:
        counts = Counter(codec.schemes(settings, checkpoint.tensors).values())
    except QuantryError:
        return "compressed-tensors"
    scheme = counts.most_common(1)[0][0]
    rows: Mapping[str, Any] = read_data("quantry.planning", "rules.toml")["stored"]
    own = {name: row for name, row in rows.items() if row["format"] == "compressed-tensors"}
    alike = (name for name, row in own.items() if _outline(preset(row["preset"]).scheme) == _outline(scheme))
    return next(alike, "compressed-tensors")


def _outline(scheme: Scheme) -> tuple[str, int, str | None]:
    """Returns what kernels tell apart: kind and bits of the weights, kind of the inputs."""
    return scheme.weight.kind, scheme.weight.bits, scheme.activation.grid.kind if scheme.activation else None
