"""What the weights of a model take: as they are stored, and on each device once an engine has loaded them.

Sizes are those of the quantization itself: `plan_folder` and `plan_gguf` say which tensors there will be.
Blocks that differ in nothing but their number are divided once, and so are the experts of a block. A weight that is cut
over devices is laid out by its format like any other, in its smaller shape; so scales and zero points come out right.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, Literal

from quantry import registry
from quantry.errors import QuantryError, WeightError
from quantry.formats.gguf import NAME as GGUF
from quantry.models.attention import block_count, text_config
from quantry.models.linears import EXPERT
from quantry.models.parts import BLOCK, TOWERS, block_of, part_of
from quantry.models.writer import Entry, nbytes
from quantry.planning.feasibility import INPUTS_CUT, KEYS_VALUES, UNCUT
from quantry.quantizing import tensor_plan as pieces
from quantry.quantizing.containers import gguf_file
from quantry.quantizing.recipe import Recipe
from quantry.types import Activation, Checkpoint, Grid, TensorInfo

Cut = Literal["outputs", "inputs", "keys", "vocabulary", "none"]
CUT_PARTS = frozenset({"attention", "MLP", "experts", "recurrent"})
VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head|embed_out|wte|word_embeddings|token_embd|output)(\.weight)?$")
GGUF_INPUTS = re.compile(r"\.(attn_output|ffn_down\w*|ssm_out)\.")
GGUF_KEYS = re.compile(r"\.attn_(k|v)\.")
NOT_LOADED = frozenset({"MTP heads", "buffers"})  # drafts for speculation are loaded only when asked for


@dataclass(frozen=True, slots=True)
class Weight:
    """A layer with its scales, or a tensor that is kept; `count` equal ones together."""

    name: str
    part: str
    dtype: str  # of a tensor that is kept
    shape: tuple[int, ...]
    grid: Grid | None = None
    inputs: Activation | None = None  # where the scale of its input is stored too
    count: int = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """All weights of a model as they will be stored; equal blocks share one tuple."""

    format: str
    dtype: str  # of what stays in 16 bit
    outside: tuple[Weight, ...]
    blocks: tuple[tuple[Weight, ...], ...]
    tied: bool

    def __iter__(self) -> Iterator[Weight]:
        yield from self.outside
        for block in self.blocks:
            yield from block

    @property
    def bytes(self) -> int:
        sizes = {id(block): sum(self.size(weight) for weight in block) for block in self.blocks}
        return sum(map(self.size, self.outside)) + sum(sizes[id(block)] for block in self.blocks)

    def entries(self, weight: Weight, shape: tuple[int, ...] | None = None) -> list[Entry]:
        """The stored tensors of one weight, or of a part of it with a smaller shape."""
        shape = weight.shape if shape is None else shape
        if weight.grid is None:
            return [(weight.name, weight.dtype, shape)]
        rows, columns = shape
        layout = _format(self.format).layout(weight.name, (rows, columns), weight.grid, weight.inputs)
        return [(name, *kind) for name, kind in layout.items()]

    def size(self, weight: Weight) -> int:
        return weight.count * sum(tensor_bytes(dtype, shape) for _, dtype, shape in self.entries(weight))


@cache
def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes of a stored tensor; a model has many of few kinds."""
    return nbytes(dtype, shape)


@cache
def _format(name: str) -> ModuleType:
    return registry.load("quantry.formats", name)


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A checkpoint as a key of a cache: the same object, since configs cannot be hashed."""

    checkpoint: Checkpoint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.checkpoint is other.checkpoint

    def __hash__(self) -> int:
        return id(self.checkpoint)


def stored(checkpoint: Checkpoint, recipe: Recipe | None, keep_odd: bool = False) -> Stored:
    """The weights of a checkpoint after a recipe; without one, as they are."""
    return _stored(Same(checkpoint), recipe, keep_odd)


@lru_cache(maxsize=64)
def _stored(same: Same, recipe: Recipe | None, keep_odd: bool) -> Stored:
    checkpoint = same.checkpoint
    blocks = block_count(checkpoint.config)
    whole = recipe is not None and (bool(recipe.rules) or recipe.format == GGUF)  # where names and numbers matter
    sample = Sample(checkpoint, {}, {}) if whole else _sample(same)
    if recipe is None:
        found, dtype = _as_is(sample.checkpoint, blocks)
    else:
        found, dtype = _divided(sample.checkpoint, recipe, blocks, keep_odd)
    return _gathered(found, blocks, sample, recipe.format if recipe else checkpoint.format, dtype)


def _divided(checkpoint: Checkpoint, recipe: Recipe, blocks: int, keep_odd: bool) -> tuple[list[Weight], str]:
    if recipe.format == GGUF:
        division = gguf_file.plan_gguf(checkpoint, recipe)
    else:
        division = pieces.plan_folder(checkpoint, recipe, blocks, keep_odd)
    found = [weight for piece in division.pieces for weight in _weights(piece, blocks)]
    return found, division.dtype


def _weights(piece: pieces.Piece, blocks: int) -> list[Weight]:
    if isinstance(piece, pieces.FusedLayers):
        return [
            Weight(linear.module, part_of(linear.source, blocks), "", linear.shape, piece.grid, piece.scheme.static)
            for linear in piece.linears
        ]
    return [Weight(name, part_of(name, blocks), dtype, shape) for name, dtype, shape in piece.entries]


def _as_is(checkpoint: Checkpoint, blocks: int) -> tuple[list[Weight], str]:
    """The tensors of the files; their sizes are what the headers say, which `nbytes` gives again."""
    tensors = checkpoint.tensors
    found = [Weight(one.name, part_of(one.name, blocks), one.dtype, one.shape) for one in tensors]
    floats = Counter({"bf16": 0})
    for one in tensors:
        if one.dtype in pieces.DTYPE_NAMES:
            floats[pieces.DTYPE_NAMES[one.dtype]] += one.numel
    return found, floats.most_common(1)[0][0]


def _gathered(found: Sequence[Weight], blocks: int, sample: "Sample", form: str, dtype: str) -> Stored:
    """Weights by block, equal ones counted; blocks that were left out are those they are alike."""
    inside: dict[int, Counter[Weight]] = {}
    outside: Counter[Weight] = Counter()
    times = Counter(sample.alike.values())
    for weight in found:
        index, key = block_of(weight.name), EXPERT.sub(".experts.0.", weight.name)
        count = sample.experts.get(_module(key), 1)
        if index is None or weight.part in TOWERS or weight.part == "MTP heads":
            outside[weight] += count * (times.get(index, 1) if index is not None else 1)
        else:
            inside.setdefault(index, Counter())[replace(weight, name=key)] += count
    made = {index: _counted(weights) for index, weights in inside.items()}
    each = tuple(made.get(sample.alike.get(index, index), ()) for index in range(blocks))
    return Stored(form, dtype, _counted(outside), each, _tied(sample.checkpoint))


def _counted(weights: Mapping[Weight, int]) -> tuple[Weight, ...]:
    return tuple(replace(weight, count=count) for weight, count in weights.items())


def _tied(checkpoint: Checkpoint) -> bool:
    if checkpoint.format == GGUF:
        return not any(tensor.name == "output.weight" for tensor in checkpoint.tensors)
    return bool(checkpoint.config.get("tie_word_embeddings"))


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint with one of each kind of block and one expert of those that are equal, and what was left out."""

    checkpoint: Checkpoint
    alike: Mapping[int, int]  # block -> the first that has the same tensors, their numbers aside
    experts: Mapping[str, int]  # module of the expert that was kept -> how many there are of it


@lru_cache(maxsize=8)
def _sample(same: Same) -> Sample:
    blocks: dict[int | None, list[TensorInfo]] = {}
    looks: dict[int, list[tuple[str, tuple[int, ...], str]]] = {}
    for tensor in same.checkpoint.tensors:
        found = BLOCK.search(tensor.name)
        index = int(found[1]) if found and len(found[1]) < 6 else None
        blocks.setdefault(index, []).append(tensor)
        if index is not None and found:
            look = tensor.name[: found.start(1)] + tensor.name[found.end(1) :]
            looks.setdefault(index, []).append((look, tensor.shape, tensor.dtype))
    first: dict[frozenset[Any], int] = {}
    alike = {index: first.setdefault(frozenset(look), index) for index, look in sorted(looks.items())}
    kept = [tensor for index in (None, *sorted(set(alike.values()))) for tensor in blocks.get(index, ())]
    few, experts = _one_expert(kept)
    return Sample(replace(same.checkpoint, tensors=few), alike, experts)


def _one_expert(tensors: Sequence[TensorInfo]) -> tuple[tuple[TensorInfo, ...], dict[str, int]]:
    """The tensors without experts that are like the first; experts that differ all stay."""
    seen: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        seen.setdefault(EXPERT.sub(".experts.0.", tensor.name), []).append(tensor)
    equal = {name for name, group in seen.items() if len({(one.shape, one.dtype) for one in group}) == 1}
    few = tuple(one for name, group in seen.items() for one in (group[:1] if name in equal else group))
    return few, {_module(name): len(group) for name, group in seen.items() if name in equal and len(group) > 1}


# ---- cut over devices ----


def cut_of(weight: Weight) -> Cut:
    """How a weight is cut when a model is spread over devices, as vLLM's models do it."""
    if len(weight.shape) < 2:
        return "none"
    if weight.part in ("embedding", "head"):
        return "vocabulary" if VOCABULARY.search(weight.name) else "none"
    if weight.part not in CUT_PARTS:
        return "none"
    leaf = _module(weight.name).rpartition(".")[2]
    if leaf in UNCUT or (weight.part == "recurrent" and not leaf.startswith(("in_proj", "out_proj", "ssm_"))):
        return "none"
    if leaf in INPUTS_CUT or GGUF_INPUTS.search(weight.name):
        return "inputs"
    return "keys" if leaf in KEYS_VALUES or GGUF_KEYS.search(weight.name) else "outputs"


def _module(name: str) -> str:
    return re.sub(r"\.(weight|bias|qweight|qzeros|scales|g_idx|SCB|weight_\w+)$", "", name)


def shard(weight: Weight, devices: int, kv_heads: int, vocabulary_step: int) -> tuple[int, ...]:
    """The shape of one device's part; KV heads are repeated where there are fewer of them than devices."""
    cut, shape = cut_of(weight), weight.shape
    if cut == "vocabulary":
        rows = -(-shape[0] // vocabulary_step) * vocabulary_step
        return (_divide(rows, devices, weight, "rows"), *shape[1:])
    if cut == "none" or devices == 1:
        return shape
    if cut == "inputs":
        return (*shape[:-1], _in_groups(_divide(shape[-1], devices, weight, "inputs"), devices, weight))
    parts = min(devices, kv_heads) if cut == "keys" else devices
    if len(shape) == 3:  # experts in one stack, (experts, out, in) or the other way round: only the size matters
        return (shape[0], shape[1], _divide(shape[2], parts, weight, "outputs"))
    return (_divide(shape[0], parts, weight, "outputs"), *shape[1:])


def _divide(size: int, parts: int, weight: Weight, side: str) -> int:
    if size % parts:
        raise WeightError(
            f"{weight.name} has {size} {side}, which {parts} devices do not divide",
            fix="use a tensor parallel size that divides it, or pipeline parallel",
        )
    return size // parts


def _in_groups(columns: int, devices: int, weight: Weight) -> int:
    """Columns of one device, if groups that share a scale are not cut."""
    group = weight.grid.block[1] if weight.grid else 0
    if group and columns % group:
        raise WeightError(
            f"{weight.name} has {columns} inputs on each of {devices} devices, which groups of {group} do not divide",
            fix="use a smaller group, fewer devices for each layer, or pipeline parallel",
        )
    return columns


def check_heads(config: Mapping[str, Any], devices: int) -> None:
    """Refuses a number of devices that attention heads cannot be shared among."""
    if type(devices) is not int or not 1 <= devices <= 1024:
        raise QuantryError(f"tensor parallel size {devices} is not 1 to 1024", fix="use 1, 2, 4 or 8")
    heads, kv_heads = head_counts(config)
    if heads % devices:
        raise WeightError(f"{heads} attention heads are not divided by {devices} devices", fix=_fitting(heads))
    if max(kv_heads, devices) % min(kv_heads, devices):
        raise WeightError(
            f"{kv_heads} KV heads can be neither divided nor repeated over {devices} devices", fix=_fitting(kv_heads)
        )


def _fitting(count: int) -> str:
    sizes = [size for size in (1, 2, 4, 8, 16) if count % size == 0]
    return f"use a tensor parallel size of {' or '.join(map(str, sizes))}, or pipeline parallel"


def head_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Query heads and KV heads; of models that vary them, those of the narrowest layer."""
    text = text_config(config)
    heads = _least(text.get("num_attention_heads"), 1)
    return heads, _least(text.get("num_key_value_heads"), heads)


def _least(value: Any, default: int) -> int:
    counts = [one for one in (value if isinstance(value, list | tuple) else [value]) if type(one) is int and one > 0]
    return min(counts, default=default)
