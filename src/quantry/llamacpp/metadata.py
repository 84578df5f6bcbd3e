"""The key-values of a GGUF file that describe the model: `general.*` and those of its architecture.

Which keys an architecture has, and in what order, is a row of families.toml; name, authors, license and sampling
settings come from the model card and generation_config.json, as the `gguf` library reads them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantry.errors import ConfigError
from quantry.llamacpp.families import Facts, facts, family, table
from quantry.llamacpp.tensor_map import Target

if TYPE_CHECKING:
    from gguf import GGUFWriter

POOLING = {  # sentence-transformers' settings, old and new -> gguf's name
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_lasttoken": "LAST",
    "mean": "MEAN",
    "cls": "CLS",
    "lasttoken": "LAST",
}


def describe(
    writer: "GGUFWriter", folder: Path, config: Mapping[str, Any], found: Sequence[Target], name: str, file_type: int
) -> None:
    """Adds all key-values but the tokenizer's, in the order of llama.cpp's converter.

    `folder` holds config.json, and README.md and generation_config.json if there are any; `name` is the model's where
    these and the folder's own name tell none.
    """
    from gguf import GGML_QUANT_VERSION, GGUFType

    row, known = family(config), facts(config)
    known["file_type"] = file_type
    if "pooling_type" in row.keys:
        known["pooling_type"] = _pooling(folder)
    _add(writer, row.early, known)
    writer.add_type(GGUFType.MODEL)
    _add_general(writer, folder, found, name)
    _add(writer, row.keys, known)
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _add(writer: "GGUFWriter", keys: Sequence[str], known: Facts) -> None:
    """Adds the keys that have a value; the writer knows their full names and types."""
    from gguf import PoolingType, RopeScalingType

    kinds = {"rope_scaling_type": RopeScalingType, "pooling_type": PoolingType.__getitem__}
    for key in keys:
        value = known.get(table()["sources"].get(key, key))
        if value is not None:
            getattr(writer, f"add_{key}")(kinds[key](value) if key in kinds else value)


def _add_general(writer: "GGUFWriter", folder: Path, found: Sequence[Target], name: str) -> None:
    """Name, size, license, sampling settings, ... as far as the small files tell."""
    from gguf import Metadata, size_label

    counts = parameters(found)
    try:
        metadata = Metadata.load(None, folder, None, counts[0])
        for one in fields(metadata):
            if not one.name.startswith("sampling_"):
                setattr(metadata, one.name, _text(getattr(metadata, one.name)))
        metadata.name = metadata.name or name
        metadata.size_label = metadata.size_label or size_label(*counts)
        metadata.set_gguf_meta_model(writer)
        for entry in writer.kv_data[0].values():
            writer._pack_val(entry.value, entry.type, add_vtype=True, sub_type=entry.sub_type)
    except Exception as error:  # people write what they like into a card, and the library trips in as many ways
        raise ConfigError(
            f"README.md, generation_config.json or _name_or_path of {name} cannot be put into GGUF"
            f" ({type(error).__name__}: {str(error)[:120]})",
            fix="mend or remove it",
        ) from error


def _text(value: Any) -> Any:
    """YAML's numbers and dates as text, in lists and tables too; GGUF has texts there."""
    if isinstance(value, list):
        return [_text(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _text(item) for key, item in value.items()}
    return value if value is None else str(value)


def parameters(found: Sequence[Target]) -> tuple[int, int, int, int]:
    """How many parameters there are, how many outside of experts and in one expert, and how many experts."""
    stacks = [target.shape for target in found if "_exps." in target.name]
    total = sum(prod(target.shape) for target in found)
    experts = sum(shape[0] for shape in stacks) // len(stacks) if stacks else 0
    return total, total - sum(map(prod, stacks)), sum(prod(shape[1:]) for shape in stacks), experts


def _pooling(folder: Path) -> str | None:
    """How sentence-transformers pools this model's output, where the checkpoint is set up for it."""
    modules = _json(folder / "modules.json")
    paths = [
        str(module.get("path"))
        for module in (modules if isinstance(modules, list) else ())
        if isinstance(module, dict) and str(module.get("type")).endswith("Pooling")
    ]
    if not paths:
        return None
    inside = Path(paths[0]).name == paths[0] != ".."
    settings = _json(folder / paths[0] / "config.json") if inside else None
    if not isinstance(settings, dict):
        raise ConfigError(f"modules.json speaks of {paths[0][:40]}/config.json, which is not there", fix="restore it")
    named = [kind for key, kind in POOLING.items() if settings.get(key)] or [
        POOLING[mode] for mode in [settings.get("pooling_mode")] if isinstance(mode, str) and mode in POOLING
    ]
    if not named:
        raise ConfigError(
            f"{paths[0]}/config.json has a pooling that llama.cpp does not know", fix="use mean, cls or lasttoken"
        )
    return named[0]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path.name} is not JSON ({str(error)[:80]})", fix="copy it from the original model"
        ) from error
