"""Which tensors of a checkpoint make each tensor of its GGUF file.

Names come from the tables of the `gguf` library, the rest from families.toml. Headers decide everything: the shape of
every target is compared with the config before a weight is read.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from quantry.errors import CheckpointError, ConfigError
from quantry.llamacpp.families import RESTORE, Facts, Family, facts, family, table
from quantry.models.parts import TOWERS, part_of
from quantry.types import TensorInfo

if TYPE_CHECKING:
    from gguf import TensorNameMap

__all__ = ["Family", "Target", "TensorSlice", "family", "targets"]

LAYER = re.compile(r"(?<=\.layers\.)[0-9]{1,6}(?=\.)")
EXPERT = re.compile(r"\.experts\.([0-9]{1,6})\.")
BLOCK = re.compile(r"blk\.([0-9]+)\.(.+)")
SUFFIX = re.compile(r"\.(weight|bias)$")
FLOAT32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")  # routers, kept in F32 as norms and vectors are
GENERATED = ("rope_freqs", "rope_factors_long", "rope_factors_short")
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
OUTSIDE = ("token_embd", "output_norm", "output")  # of any layer
AGAIN = "download the checkpoint again"
UNKNOWN = "remove it from the checkpoint if the model does not need it"


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A matrix taken from a tensor of the checkpoint: `tensor[expert]`, transposed if `flip`, then its `rows`."""

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    flip: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the file; sources are stacked along a new first dimension if its shape has one more than theirs."""

    name: str
    shape: tuple[int, ...]  # outermost first
    sources: tuple[TensorSlice, ...]
    heads: int | None = None  # reorders rows from rotary halves to pairs within each of this many heads
    add: float = 0.0  # added to every value
    values: tuple[float, ...] | None = None  # of a tensor without sources
    float32: bool = False  # stored as F32 whatever the file type


@dataclass(frozen=True, slots=True)
class _Part:
    """What one tensor of the checkpoint contributes to a target."""

    source: TensorSlice
    shape: tuple[int, ...]
    expert: int | None = None


def targets(config: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> tuple[tuple[Target, ...], dict[str, str]]:
    """Returns the tensors of the file in llama.cpp's order, and the fates of the source tensors that no target uses.

    Raises CheckpointError if a tensor is missing, unknown or has another shape than config.json says.
    """
    row, model = family(config), facts(config)
    fates = {tensor.name: fate for tensor in tensors if (fate := _fate(tensor.name, row, model))}
    used = [tensor for tensor in tensors if tensor.name not in fates]
    flip = _is_flipped(used, row, model)
    parts: dict[str, list[_Part]] = defaultdict(list)
    for tensor in used:
        for name, part in _parts(tensor, row, flip):
            if name not in parts and not _expected(name, row, model):
                raise CheckpointError(
                    f"{tensor.name} ({name}) has no place in llama.cpp's {row.architecture}", fix=UNKNOWN
                )
            parts[name].append(part)
    _check_complete(parts, row, model)
    made = [_target(name, parts[name], row, model) for name in parts] + _generated(model)
    if HEAD not in parts and row.head == "required":  # llama.cpp does not look for it elsewhere
        made += [replace(target, name=HEAD) for target in made if target.name == EMBEDDING]
    return tuple(sorted(made, key=lambda target: (_layer(target.name), target.name))), fates


def _fate(name: str, row: Family, model: Facts) -> str | None:
    """Says why no target is made of a tensor; None if one is."""
    if part_of(name, model["num_hidden_layers"]) in TOWERS:
        return "dropped: llama.cpp has a file of its own (mmproj) for it"
    if name.endswith("rotary_emb.inv_freq"):
        return "dropped: llama.cpp computes it from the config"
    if _plain(name) != "lm_head.weight":
        return None
    if not model["tie_word_embeddings"] and row.head == "never":
        raise ConfigError(
            f"{row.name} with a head of its own cannot be written as GGUF: llama.cpp's {row.architecture} has none",
            fix="use another format",
        )
    return "tied: the embedding serves as the head" if model["tie_word_embeddings"] else None


def _plain(name: str) -> str:
    """Returns the name that the tensor would have in a model of language only."""
    return name.replace("language_model.", "")


def _layer(name: str) -> int:
    block = BLOCK.fullmatch(name)
    return int(block[1]) if block else -1


def _parts(tensor: TensorInfo, row: Family, flip: bool) -> Iterator[tuple[str, _Part]]:
    """Yields the targets that a tensor belongs to, and what it contributes to each."""
    names = _target_names(tensor.name, row.architecture)
    stacked = len(tensor.shape) == 3
    shape = tensor.shape[1:] if stacked else tensor.shape
    shape = shape[::-1] if stacked and flip else shape
    if not tensor.numel or not shape or shape[0] % len(names):
        held = f" for {len(names)} matrices" if len(names) > 1 else ""
        raise CheckpointError(f"{tensor.name} has an impossible shape{held}: {shown(tensor.shape)}", fix=AGAIN)
    size = shape[0] // len(names)
    numbered = EXPERT.search(tensor.name)
    for index, name in enumerate(names):
        rows = (index * size, (index + 1) * size) if len(names) > 1 else None
        if stacked:
            for expert in range(tensor.shape[0]):
                yield name, _Part(TensorSlice(tensor.name, expert, rows, flip), (size, *shape[1:]), expert)
        else:
            expert_of = int(numbered[1]) if numbered else None
            yield name, _Part(TensorSlice(tensor.name, rows=rows), (size, *shape[1:]), expert_of)


def _target_names(source: str, architecture: str) -> list[str]:
    names = target_names(source, architecture)
    if None in names:
        raise CheckpointError(f"{source} has no place in llama.cpp's {architecture}", fix=UNKNOWN)
    return [name for name in names if name]


def target_names(source: str, architecture: str) -> list[str | None]:
    """Returns the targets that a tensor of the checkpoint contributes to; None stands for an unknown one."""
    plain = EXPERT.sub(".experts.", _plain(source))
    layer = LAYER.search(plain)
    number = int(layer[0]) if layer else 0
    names = _names_in_layer_0(LAYER.sub("0", plain), architecture)
    return [f"blk.{number}.{name[6:]}" if name and name.startswith("blk.0.") else name for name in names]


@cache
def _names_in_layer_0(name: str, architecture: str) -> tuple[str | None, ...]:
    """Returns the targets that a tensor of layer 0 contributes to; None stands for an unknown one."""
    suffix = SUFFIX.search(name)
    stem, ending = (name[: suffix.start()], suffix[0]) if suffix else (name, ".weight")
    prefix, _, rest = stem.rpartition(".layers.0.")
    parts = table()["splits"].get(rest, [rest])
    stems = [f"{prefix}.layers.0.{part}" for part in parts] if prefix else [stem]
    names = _name_map(architecture)
    return tuple(names.get_name(stem + ending, (".weight", ".bias")) for stem in stems)


@cache
def _name_map(architecture: str) -> "TensorNameMap":
    """Maps Hugging Face's names of layer 0 to GGUF's."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    return get_tensor_name_map(next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture), 1)


def _is_flipped(tensors: Sequence[TensorInfo], row: Family, model: Facts) -> bool:
    """Returns True if stacks of experts are (experts, in, out): some shape fits the config only that way round."""
    for tensor in tensors:
        if len(tensor.shape) == 3:
            names = _target_names(tensor.name, row.architecture)
            matrix = _expected(names[0], row, model)[1:]
            straight = (matrix[0] * len(names), *matrix[1:]) if matrix else ()
            if tensor.shape[1:] != straight and tensor.shape[1:] == straight[::-1]:
                return True
    return False


def _expected(name: str, row: Family, model: Facts) -> tuple[int, ...]:
    """Returns the shape of a target by the config, or () if the architecture has no such tensor."""
    leaf = BLOCK.sub(r"\2", name)
    base = SUFFIX.sub("", leaf)
    if base not in (row.layer if _layer(name) >= 0 else OUTSIDE):
        return ()
    if leaf.endswith(".bias") and base not in row.biases:
        return ()
    shape = tuple(model[size] if isinstance(size, str) else size for size in row.shapes[base])
    return shape[:1] if leaf.endswith(".bias") else shape


def _check_complete(parts: Mapping[str, object], row: Family, model: Facts) -> None:
    """Raises CheckpointError if a tensor that llama.cpp looks for is missing, or belongs to no layer of the config."""
    layers = model["num_hidden_layers"]
    deepest = max(parts, key=_layer, default="")
    if _layer(deepest) >= layers:
        raise CheckpointError(
            f"the checkpoint has a layer {_layer(deepest)} ({deepest}), and config.json has {layers} layers",
            fix=RESTORE,
        )
    leaves = {f"{base}.weight" for base in row.layer} | {BLOCK.sub(r"\2", name) for name in parts if _layer(name) >= 0}
    wanted = [EMBEDDING, "output_norm.weight", *([] if model["tie_word_embeddings"] else [HEAD])]
    wanted += [f"blk.{layer}.{leaf}" for layer in range(layers) for leaf in sorted(leaves)]
    missing = [name for name in wanted if name not in parts]
    if missing:
        count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"the checkpoint has nothing for {missing[0]}{count} (config.json: {layers} layers)", fix=AGAIN
        )


def _target(name: str, parts: Sequence[_Part], row: Family, model: Facts) -> Target:
    shape, first = _expected(name, row, model), parts[0].source.name
    stacked = len(shape) == 3
    ordered = sorted(parts, key=lambda part: part.expert or 0)
    if [part.expert for part in ordered] != (list(range(shape[0])) if stacked else [None]):
        count, limit = len(parts), f"{shape[0]} experts" if stacked else "one tensor"
        raise CheckpointError(f"{name} is made of {count} tensors ({first}), and config.json has {limit}", fix=RESTORE)
    base = SUFFIX.sub("", BLOCK.sub(r"\2", name))
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    return Target(
        name=name,
        shape=shape,
        sources=tuple(_fitted(part, shape[1:] if stacked else shape, row) for part in ordered),
        heads=model[heads[base]] if row.permute and base in heads else None,
        add=row.norm_offset if base.endswith("norm") else 0.0,
        float32=len(shape) == 1 or name.endswith(FLOAT32),
    )


def _fitted(part: _Part, shape: tuple[int, ...], row: Family) -> TensorSlice:
    """Returns the source of a part, without spare rows; raises CheckpointError if its shape does not fit."""
    if part.shape == shape:
        return part.source
    if row.spare_rows and len(shape) == 2 and part.shape[0] > shape[0] and part.shape[1:] == shape[1:]:
        return replace(part.source, rows=(0, shape[0]))
    raise CheckpointError(
        f"{part.source.name} is {shown(part.shape)}, and by config.json it would be {shown(shape)}", fix=RESTORE
    )


def shown(shape: Sequence[int]) -> str:
    """Spells a shape for an error: 64 x 32."""
    return " x ".join(map(str, shape)) or "a single number"


def _generated(model: Facts) -> list[Target]:
    """Returns the tensors of rope factors, which checkpoints have in their config."""
    return [
        Target(f"{name}.weight", (len(model[name]),), (), values=model[name], float32=True)
        for name in GENERATED
        if model.get(name)
    ]
