"""The key-values of a GGUF file that describe the model: `general.*` and those of its architecture.

families.toml lists the keys of an architecture in order; name, authors, license and sampling settings come from the
model card and generation_config.json, as the `gguf` library reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantry.errors import ConfigError
from quantry.llamacpp.families import Facts, facts, family, table
from quantry.llamacpp.tensor_map import Target
from quantry.storage.reading import read_json, read_list

if TYPE_CHECKING:
    from gguf import GGUFWriter

COPY = "copy it from the original model"
POOLING = {  # sentence-transformers' settings, old and new -> gguf's name
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_lasttoken": "LAST",
    "mean": "MEAN",
    "cls": "CLS",
    "lasttoken": "LAST",
}


def describe(
    writer: "GGUFWriter", folder: Path, config: Mapping[str, Any], tensors: Sequence[Target], name: str, file_type: int
) -> None:
    """Adds all key-values except the tokenizer's, in the order of llama.cpp's converter.

    `folder` holds config.json, and README.md and generation_config.json if there are any; `name` is used if neither
    they nor the folder's name give one. Raises ConfigError if one of these files cannot be put into GGUF.
    """
    from gguf import GGML_QUANT_VERSION, GGUFType

    row, model = family(config), facts(config)
    model["file_type"] = file_type
    if "pooling_type" in row.keys:
        model["pooling_type"] = _pooling(folder)
    _add(writer, row.early, model)
    writer.add_type(GGUFType.MODEL)
    _add_general(writer, folder, tensors, name)
    _add(writer, row.keys, model)
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _add(writer: "GGUFWriter", keys: Sequence[str], model: Facts) -> None:
    """Adds the keys that have a value; the writer knows their full names and types."""
    from gguf import PoolingType, RopeScalingType

    enums = {"rope_scaling_type": RopeScalingType, "pooling_type": PoolingType.__getitem__}
    for key in keys:
        value = model.get(table()["sources"].get(key, key))
        if value is not None:
            getattr(writer, f"add_{key}")(enums[key](value) if key in enums else value)


def _add_general(writer: "GGUFWriter", folder: Path, tensors: Sequence[Target], name: str) -> None:
    """Adds name, size, license, sampling settings, ... as far as the small files give them."""
    from gguf import Metadata, size_label

    counts = parameters(tensors)
    try:
        metadata = Metadata.load(None, folder, None, counts[0])
        for field in fields(metadata):
            if not field.name.startswith("sampling_"):
                setattr(metadata, field.name, _text(getattr(metadata, field.name)))
        metadata.name = metadata.name or name
        metadata.size_label = metadata.size_label or size_label(*counts)
        metadata.set_gguf_meta_model(writer)
        for entry in writer.kv_data[0].values():
            writer._pack_val(entry.value, entry.type, add_vtype=True, sub_type=entry.sub_type)
    except Exception as error:  # a card may hold anything, and the library fails in as many ways
        raise ConfigError(
            f"README.md, generation_config.json or _name_or_path of {name} cannot be put into GGUF"
            f" ({type(error).__name__}: {str(error)[:120]})",
            fix="correct or remove it",
        ) from error


def _text(value: Any) -> Any:
    """Turns YAML's numbers and dates into the texts that GGUF wants, in lists and tables too."""
    if isinstance(value, list):
        return [_text(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _text(item) for key, item in value.items()}
    return value if value is None else str(value)


def parameters(tensors: Sequence[Target]) -> tuple[int, int, int, int]:
    """Counts all parameters, those outside of experts, those of one expert, and the experts."""
    stacks = [tensor.shape for tensor in tensors if "_exps." in tensor.name]
    total = sum(prod(tensor.shape) for tensor in tensors)
    experts = sum(shape[0] for shape in stacks) // len(stacks) if stacks else 0
    return total, total - sum(map(prod, stacks)), sum(prod(shape[1:]) for shape in stacks), experts


def _pooling(folder: Path) -> str | None:
    """Returns how sentence-transformers pools this model's output; None for a checkpoint without modules.json."""
    file = folder / "modules.json"
    paths = [
        str(module.get("path"))
        for module in (read_list(file, fix=COPY, error=ConfigError) if file.is_file() else ())
        if isinstance(module, dict) and str(module.get("type")).endswith("Pooling")
    ]
    if not paths:
        return None
    inside, file = Path(paths[0]).name == paths[0] != "..", folder / paths[0] / "config.json"
    if not inside or not file.is_file():
        raise ConfigError(f"modules.json names {paths[0][:40]}/config.json, which is missing", fix="restore it")
    settings = read_json(file, fix=COPY, error=ConfigError)
    named = [name for key, name in POOLING.items() if settings.get(key)] or [
        POOLING[mode] for mode in [settings.get("pooling_mode")] if isinstance(mode, str) and mode in POOLING
    ]
    if not named:
        raise ConfigError(
            f"{paths[0]}/config.json has a pooling that llama.cpp does not know", fix="use mean, cls or lasttoken"
        )
    return named[0]
