"""The weights of a model as they will be stored.

Sizes are those of the quantization itself: `plan_folder` and `plan_gguf` list the tensors. Blocks that
differ only in their number are divided once, and so are the experts of a block.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from quantry.formats.contract import Format, load_format
from quantry.formats.gguf import NAME as GGUF
from quantry.llamacpp import ready
from quantry.models.attention import block_count
from quantry.models.caching import per_checkpoint
from quantry.models.linears import EXPERT
from quantry.models.parts import BLOCK, TOWERS, block_of, part_of
from quantry.models.writer import Entry, nbytes
from quantry.quantizing import tensor_plan
from quantry.quantizing.containers import gguf_file
from quantry.quantizing.recipe import Recipe
from quantry.types import Activation, Checkpoint, Grid, TensorInfo

FLOATS = frozenset({"F32", "F16", "BF16"})
SUFFIX = re.compile(r"\.(weight|bias|qweight|qzeros|scales|g_idx|SCB|weight_\w+)$")


@dataclass(frozen=True, slots=True)
class Weight:
    """A linear layer with its scales, or a tensor that is kept; `count` equal ones together."""

    name: str
    part: str
    dtype: str  # of a tensor that is kept
    shape: tuple[int, ...]
    grid: Grid | None = None
    inputs: Activation | None = None  # where the scale of its input is stored too
    count: int = 1

    @property
    def quantized(self) -> bool:
        return self.grid is not None or self.dtype not in FLOATS


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

    def inside(self, blocks: range) -> Counter[Weight]:
        """Returns how often each distinct weight occurs in some blocks; equal blocks are looked at once."""
        distinct = {id(self.blocks[index]): self.blocks[index] for index in blocks}
        times = Counter(id(self.blocks[index]) for index in blocks)
        counts: Counter[Weight] = Counter()
        for key, block in distinct.items():
            for weight in block:
                counts[weight] += times[key]
        return counts

    @property
    def counts(self) -> Counter[Weight]:
        """How often each distinct weight occurs."""
        return Counter(self.outside) + self.inside(range(len(self.blocks)))

    @property
    def bytes(self) -> int:
        return sum(self.size(weight) * times for weight, times in self.counts.items())

    def entries(self, weight: Weight, shape: tuple[int, ...] | None = None) -> list[Entry]:
        """Returns the stored tensors of one weight, or of a part of it with a smaller shape."""
        shape = weight.shape if shape is None else shape
        if weight.grid is None:
            return [(weight.name, weight.dtype, shape)]
        rows, columns = shape
        layout = _codec(self.format).layout(weight.name, (rows, columns), weight.grid, weight.inputs)
        return [(name, *tensor) for name, tensor in layout.items()]

    def size(self, weight: Weight) -> int:
        return weight.count * sum(tensor_bytes(dtype, shape) for _, dtype, shape in self.entries(weight))


@cache
def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a stored tensor; cached, since a model has many tensors of few shapes."""
    return nbytes(dtype, shape)


@cache
def _codec(name: str) -> Format:
    return load_format(name)


def module_of(name: str) -> str:
    """Returns the module that a tensor belongs to."""
    return SUFFIX.sub("", name)


def weights_bytes(checkpoint: Checkpoint, recipe: Recipe | None, keep_odd: bool = False) -> int:
    """Returns the bytes of all tensors of a checkpoint after a recipe, as they will be stored."""
    return stored(checkpoint, recipe, keep_odd).bytes


@per_checkpoint(64)
def stored(checkpoint: Checkpoint, recipe: Recipe | None, keep_odd: bool = False) -> Stored:
    """Returns the weights of a checkpoint after a recipe; without a recipe, those in its files.

    Raises QuantryError if the recipe's format cannot hold a layer, unless `keep_odd` leaves such layers in 16 bit.
    """
    blocks = block_count(checkpoint.config)
    whole = recipe is not None and (recipe.numbered or recipe.format == GGUF)  # where names and numbers matter
    sample = ReducedCheckpoint(checkpoint, {}, {}) if whole else _reduced(checkpoint)
    if recipe is None:
        weights, dtype = _unchanged(sample.checkpoint, blocks)
    else:
        weights, dtype = _divided(sample.checkpoint, recipe, blocks, keep_odd)
    inside, outside = _by_block(weights, blocks, sample)
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    if checkpoint.format == GGUF:
        tied = all(tensor.name != "output.weight" for tensor in checkpoint.tensors)
    return Stored(recipe.format if recipe else checkpoint.format, dtype, outside, inside, tied)


def _divided(checkpoint: Checkpoint, recipe: Recipe, blocks: int, keep_odd: bool) -> tuple[list[Weight], str]:
    if recipe.format == GGUF and ready.architecture(checkpoint.config):
        tensors = ready.ready_tensors(checkpoint.config, checkpoint.tensors, recipe.preset.file_type or ready.MXFP4)
        return [Weight(name, part_of(name, blocks), dtype, shape) for name, dtype, shape in tensors], "f16"
    if recipe.format == GGUF:
        plan = gguf_file.plan_gguf(checkpoint, recipe)
    else:
        plan = tensor_plan.plan_folder(checkpoint, recipe, blocks, keep_odd)
    return [weight for piece in plan.pieces for weight in _weights(piece, blocks)], plan.dtype


def _weights(piece: tensor_plan.Piece, blocks: int) -> list[Weight]:
    if isinstance(piece, tensor_plan.FusedLayers):
        return [
            Weight(linear.module, part_of(linear.source, blocks), "", linear.shape, piece.grid, piece.scheme.static)
            for linear in piece.linears
        ]
    return [Weight(name, part_of(name, blocks), dtype, shape) for name, dtype, shape in piece.entries]


def _unchanged(checkpoint: Checkpoint, blocks: int) -> tuple[list[Weight], str]:
    """Returns the tensors of the files and the 16-bit type that most of their numbers have."""
    numbers = Counter({"bf16": 0})
    for tensor in checkpoint.tensors:
        if tensor.dtype in tensor_plan.DTYPE_NAMES:
            numbers[tensor_plan.DTYPE_NAMES[tensor.dtype]] += tensor.numel
    weights = [
        Weight(tensor.name, part_of(tensor.name, blocks), tensor.dtype, tensor.shape) for tensor in checkpoint.tensors
    ]
    return weights, numbers.most_common(1)[0][0]


# ---- equal blocks and experts, once each ----


@dataclass(frozen=True, slots=True)
class ReducedCheckpoint:
    """A checkpoint with one of each group of equal blocks and experts, and how many each stands for."""

    checkpoint: Checkpoint
    alike: Mapping[int, int]  # block -> the first block with the same tensors, numbers in names aside
    experts: Mapping[str, int]  # module of the expert that was kept -> how many there are of it


@per_checkpoint(8)
def _reduced(checkpoint: Checkpoint) -> ReducedCheckpoint:
    blocks: dict[int | None, list[TensorInfo]] = {}
    outlines: dict[int, list[tuple[str, tuple[int, ...], str]]] = {}
    for tensor in checkpoint.tensors:
        match = BLOCK.search(tensor.name)
        index = int(match[1]) if match and len(match[1]) < 6 else None
        blocks.setdefault(index, []).append(tensor)
        if index is not None and match:
            name = tensor.name[: match.start(1)] + tensor.name[match.end(1) :]
            outlines.setdefault(index, []).append((name, tensor.shape, tensor.dtype))
    first: dict[object, int] = {}
    alike = {index: first.setdefault(frozenset(outline), index) for index, outline in sorted(outlines.items())}
    kept = [tensor for index in (None, *sorted(set(alike.values()))) for tensor in blocks.get(index, ())]
    tensors, experts = _one_expert(kept)
    return ReducedCheckpoint(replace(checkpoint, tensors=tensors), alike, experts)


def _one_expert(tensors: Sequence[TensorInfo]) -> tuple[tuple[TensorInfo, ...], dict[str, int]]:
    """Returns the tensors with one of each group of equal experts, and the size of each group."""
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault(EXPERT.sub(".experts.0.", tensor.name), []).append(tensor)
    equal = {name for name, group in groups.items() if len({(expert.shape, expert.dtype) for expert in group}) == 1}
    kept = tuple(tensor for name, group in groups.items() for tensor in (group[:1] if name in equal else group))
    return kept, {module_of(name): len(group) for name, group in groups.items() if name in equal and len(group) > 1}


def _by_block(
    weights: Sequence[Weight], blocks: int, sample: ReducedCheckpoint
) -> tuple[tuple[tuple[Weight, ...], ...], tuple[Weight, ...]]:
    """Returns the weights of each block and those outside of blocks, equal ones counted."""
    inside: dict[int, Counter[Weight]] = {}
    outside: Counter[Weight] = Counter()
    times = Counter(sample.alike.values())
    for weight in weights:
        index, name = block_of(weight.name), EXPERT.sub(".experts.0.", weight.name)
        count = sample.experts.get(module_of(name), 1)
        if index is None or weight.part in TOWERS or weight.part == "MTP heads":
            outside[weight] += count * (times.get(index, 1) if index is not None else 1)
        else:
            inside.setdefault(index, Counter())[replace(weight, name=name)] += count
    counted = {index: _counted(block) for index, block in inside.items()}
    return tuple(counted.get(sample.alike.get(index, index), ()) for index in range(blocks)), _counted(outside)


def _counted(weights: Mapping[Weight, int]) -> tuple[Weight, ...]:
    return tuple(replace(weight, count=count) for weight, count in weights.items())
