"""Which tensors of a checkpoint make each tensor of its GGUF file.

Names come from the tables of the `gguf` library, what is particular to an architecture from families.toml. All is
decided from headers: every target has its shape, held against what the config says, before a weight is read.
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
    """A matrix out of a source tensor: `stack[expert]`, transposed if `flip`, then `rows`."""

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    flip: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the file: its sources, stacked along a new first dimension if the shape has one more than they."""

    name: str
    shape: tuple[int, ...]  # outermost first
    sources: tuple[TensorSlice, ...]
    heads: int | None = None  # rows go from rotary halves to pairs within each of so many heads
    add: float = 0.0  # to every value
    values: tuple[float, ...] | None = None  # of a tensor that has no sources
    float32: bool = False  # stored as F32 whatever the file type


@dataclass(frozen=True, slots=True)
class _Part:
    """What one source tensor gives to a target."""

    source: TensorSlice
    shape: tuple[int, ...]
    expert: int | None = None


def targets(config: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> tuple[tuple[Target, ...], dict[str, str]]:
    """The tensors of the file in llama.cpp's order, and the fate of the source tensors that none is made of."""
    row, found = family(config), facts(config)
    fates = {tensor.name: fate for tensor in tensors if (fate := _fate(tensor.name, row, found))}
    used = [tensor for tensor in tensors if tensor.name not in fates]
    flip = _is_flipped(used, row, found)
    parts: dict[str, list[_Part]] = defaultdict(list)
    for tensor in used:
        for name, part in _parts(tensor, row, flip):
            if name not in parts and not _expected(name, row, found):
                raise CheckpointError(
                    f"{tensor.name} ({name}) has no place in llama.cpp's {row.architecture}", fix=UNKNOWN
                )
            parts[name].append(part)
    _check_complete(parts, row, found)
    made = [_target(name, parts[name], row, found) for name in parts] + _generated(found)
    if HEAD not in parts and row.head == "required":  # llama.cpp does not look for it elsewhere
        made += [replace(target, name=HEAD) for target in made if target.name == EMBEDDING]
    return tuple(sorted(made, key=lambda target: (_layer(target.name), target.name))), fates


def _fate(name: str, row: Family, found: Facts) -> str | None:
    """Why a source tensor gives no target, or nothing."""
    if part_of(name, found["num_hidden_layers"]) in TOWERS:
        return "dropped: llama.cpp has a file of its own (mmproj) for it"
    if name.endswith("rotary_emb.inv_freq"):
        return "dropped: llama.cpp computes it from the config"
    if _plain(name) != "lm_head.weight":
        return None
    if not found["tie_word_embeddings"] and row.head == "never":
        raise ConfigError(
            f"{row.name} with a head of its own cannot be written as GGUF: llama.cpp's {row.architecture} has none",
            fix="use another format",
        )
    return "tied: the embedding serves as the head" if found["tie_word_embeddings"] else None


def _plain(name: str) -> str:
    """The name that the tensor has in a model that is all language."""
    return name.replace("language_model.", "")


def _layer(name: str) -> int:
    block = BLOCK.fullmatch(name)
    return int(block[1]) if block else -1


def _parts(tensor: TensorInfo, row: Family, flip: bool) -> Iterator[tuple[str, _Part]]:
    """The targets that a source tensor belongs to, and what it gives to each."""
    names = _target_names(tensor.name, row.architecture)
    stacked = len(tensor.shape) == 3
    shape = tensor.shape[1:] if stacked else tensor.shape
    shape = shape[::-1] if stacked and flip else shape
    if not tensor.numel or not shape or shape[0] % len(names):
        held = f" of {len(names)} matrices" if len(names) > 1 else ""
        raise CheckpointError(f"{tensor.name} has a shape{held} that cannot be ({_shown(tensor.shape)})", fix=AGAIN)
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
    """The targets that a source tensor, by its name, holds (parts of)."""
    name = EXPERT.sub(".experts.", _plain(source))
    layer = LAYER.search(name)
    held = _held(LAYER.sub("0", name), architecture)
    if None in held:
        raise CheckpointError(f"{source} has no place in llama.cpp's {architecture}", fix=UNKNOWN)
    number = int(layer[0]) if layer else 0
    return [f"blk.{number}.{one[6:]}" if one.startswith("blk.0.") else one for one in held if one]


@cache
def _held(name: str, architecture: str) -> tuple[str | None, ...]:
    """The targets in layer 0 that a tensor of layer 0 holds; nothing for what is not known."""
    suffix = SUFFIX.search(name)
    stem, ending = (name[: suffix.start()], suffix[0]) if suffix else (name, ".weight")
    prefix, _, rest = stem.rpartition(".layers.0.")
    inside = table()["splits"].get(rest, [rest])
    stems = [f"{prefix}.layers.0.{one}" for one in inside] if prefix else [stem]
    return tuple(_names(architecture).get_name(one + ending, (".weight", ".bias")) for one in stems)


@cache
def _names(architecture: str) -> "TensorNameMap":
    """From Hugging Face's names to GGUF's, for layer 0."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    return get_tensor_name_map(next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture), 1)


def _is_flipped(tensors: Sequence[TensorInfo], row: Family, found: Facts) -> bool:
    """Whether stacks of experts are (experts, in, out): some fit the config only that way round."""
    for tensor in tensors:
        if len(tensor.shape) == 3:
            names = _target_names(tensor.name, row.architecture)
            matrix = _expected(names[0], row, found)[1:]
            straight = (matrix[0] * len(names), *matrix[1:]) if matrix else ()
            if tensor.shape[1:] != straight and tensor.shape[1:] == straight[::-1]:
                return True
    return False


def _expected(name: str, row: Family, found: Facts) -> tuple[int, ...]:
    """The shape that a target must have by the config; none if the architecture has no such tensor."""
    leaf = BLOCK.sub(r"\2", name)
    base = SUFFIX.sub("", leaf)
    if base not in (row.layer if _layer(name) >= 0 else OUTSIDE):
        return ()
    if leaf.endswith(".bias") and base not in row.biases:
        return ()
    shape = tuple(found[size] if isinstance(size, str) else size for size in row.shapes[base])
    return shape[:1] if leaf.endswith(".bias") else shape


def _check_complete(parts: Mapping[str, object], row: Family, found: Facts) -> None:
    """Every tensor that llama.cpp will look for is there, in every layer, and none of other layers."""
    layers = found["num_hidden_layers"]
    deepest = max(parts, key=_layer, default="")
    if _layer(deepest) >= layers:
        raise CheckpointError(
            f"the checkpoint has a layer {_layer(deepest)} ({deepest}), and config.json has {layers} layers",
            fix=RESTORE,
        )
    leaves = {f"{base}.weight" for base in row.layer} | {BLOCK.sub(r"\2", name) for name in parts if _layer(name) >= 0}
    wanted = [EMBEDDING, "output_norm.weight", *([] if found["tie_word_embeddings"] else [HEAD])]
    wanted += [f"blk.{layer}.{leaf}" for layer in range(layers) for leaf in sorted(leaves)]
    missing = [name for name in wanted if name not in parts]
    if missing:
        count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"the checkpoint has nothing for {missing[0]}{count} (config.json: {layers} layers)", fix=AGAIN
        )


def _target(name: str, parts: Sequence[_Part], row: Family, found: Facts) -> Target:
    """A target of source tensors, once their shapes are what the config says."""
    shape, first = _expected(name, row, found), parts[0].source.name
    stacked = len(shape) == 3
    parts = sorted(parts, key=lambda part: part.expert or 0)
    if [part.expert for part in parts] != (list(range(shape[0])) if stacked else [None]):
        count, limit = len(parts), f"{shape[0]} experts" if stacked else "one tensor"
        raise CheckpointError(f"{name} is made of {count} tensors ({first}), and config.json has {limit}", fix=RESTORE)
    base = SUFFIX.sub("", BLOCK.sub(r"\2", name))
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    return Target(
        name=name,
        shape=shape,
        sources=tuple(_fitted(part, shape[1:] if stacked else shape, row) for part in parts),
        heads=found[heads[base]] if row.permute and base in heads else None,
        add=row.norm_offset if base.endswith("norm") else 0.0,
        float32=len(shape) == 1 or name.endswith(FLOAT32),
    )


def _fitted(part: _Part, shape: tuple[int, ...], row: Family) -> TensorSlice:
    """The source of a part that has this shape, without the rows that are to spare."""
    if part.shape == shape:
        return part.source
    if row.spare_rows and len(shape) == 2 and part.shape[0] > shape[0] and part.shape[1:] == shape[1:]:
        return replace(part.source, rows=(0, shape[0]))
    raise CheckpointError(
        f"{part.source.name} is {_shown(part.shape)}, and by config.json it would be {_shown(shape)}", fix=RESTORE
    )


def _shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _generated(found: Facts) -> list[Target]:
    """Rope factors, which checkpoints have in their config."""
    return [
        Target(f"{name}.weight", (len(found[name]),), (), values=found[name], float32=True)
        for name in GENERATED
        if found.get(name)
    ]
