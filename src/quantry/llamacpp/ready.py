"""The tensors of a GGUF file that others made of a model which Quantry does not write itself.

Names come from the tables of the `gguf` library, types from the mixture of llama-quantize. Towers are a file of their
own (mmproj) in 16 bit. The file of a model that its makers publish in MXFP4 keeps that for the experts, with Q8_0 for
the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

from quantry.llamacpp.mixture import MixedModel, fitting, types
from quantry.llamacpp.tensor_map import EXPERT, FLOAT32, target_names
from quantry.models.attention import block_count, text_config
from quantry.models.experts import expert_count
from quantry.models.parts import TOWERS, part_of
from quantry.models.writer import Entry
from quantry.storage import read_data
from quantry.types import TensorInfo

MXFP4 = "mxfp4"
NOT_STORED = frozenset({"MTP heads", "buffers"})
Shape = tuple[int, ...]


def architecture(config: Mapping[str, Any]) -> str | None:
    """Returns llama.cpp's name of an architecture that only others write, None if there is none."""
    names = config.get("architectures")
    return _table().get(names[0]) if isinstance(names, list) and names else None


def ready_tensors(config: Mapping[str, Any], tensors: Sequence[TensorInfo], file_type: str) -> list[Entry]:
    """Returns the tensors of a ready file, and of its mmproj, as (name, type, shape)."""
    known = architecture(config)
    assert known is not None, "ask architecture() first"
    layers, tied = block_count(config), bool(config.get("tie_word_embeddings"))
    towers, shapes = [], dict[str, Shape]()
    for tensor in tensors:
        part = part_of(tensor.name, layers)
        if part in TOWERS:
            towers.append((tensor.name, "F16" if len(tensor.shape) > 1 else "F32", tensor.shape))
        elif part not in NOT_STORED and not (tied and part == "head"):
            for name, shape in _targets(tensor, known):
                shapes[name] = (*_added(shapes.get(name), shape),)
    kinds = _types(config, known, shapes, file_type)
    return [*towers, *((name, kinds[name], shape) for name, shape in shapes.items())]


def _targets(tensor: TensorInfo, known: str) -> Iterator[tuple[str, Shape]]:
    """Yields the tensors of the file that a tensor is a part of; one that has no name there keeps its own."""
    names = target_names(tensor.name, known)
    if None in names:
        yield f"{tensor.name}.weight" if len(tensor.shape) == 3 else tensor.name, tensor.shape
        return
    shape = (1, *tensor.shape) if EXPERT.search(tensor.name) else tensor.shape
    rows = 1 if len(shape) == 3 else 0
    for name in filter(None, names):
        yield name, (*shape[:rows], shape[rows] // len(names), *shape[rows + 1 :])


def _added(stack: Shape | None, shape: Shape) -> Shape:
    """Returns the shape of a stack of experts with one more."""
    return shape if stack is None else (stack[0] + shape[0], *shape[1:])


def _types(config: Mapping[str, Any], known: str, shapes: Mapping[str, Shape], file_type: str) -> dict[str, str]:
    text = text_config(config)
    heads = text.get("num_attention_heads") or 1
    if file_type == MXFP4:
        return {name: _published(name, shape) for name, shape in shapes.items()}
    model = MixedModel(
        architecture=known,
        layers=block_count(config),
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        experts=expert_count(text),
        importance=False,
    )
    keep = {name for name in shapes if name.endswith(FLOAT32)}
    return {name: choice.stored for name, choice in types(file_type, model, shapes, keep=keep).items()}


def _published(name: str, shape: Shape) -> str:
    """Returns the type of a tensor where experts keep the MXFP4 of their makers."""
    if len(shape) == 3:
        return "MXFP4"
    small = len(shape) < 2 or name.endswith(FLOAT32) or min(shape) == 1 or prod(shape) < 1 << 16
    return "F32" if small else fitting(name, "Q8_0", shape[-1])


@cache
def _table() -> dict[str, str]:
    return read_data("quantry.llamacpp", "ready.toml")
