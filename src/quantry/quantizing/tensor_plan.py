"""What becomes of every tensor of a checkpoint, decided from headers before any weight is read.

A *piece* is what is read, worked on and written together: a tensor that is kept, or the linears that an engine fuses.
Each piece knows the stored tensors it will give (names, dtypes, shapes), so that sizes are exact and shards can be
planned; and every source tensor has a *fate*: quantized, kept, cast, tied or dropped, with the reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import ModuleType

from quantry.errors import QuantryError, RecipeError, WeightError
from quantry.llamacpp.tensor_map import Target
from quantry.models.attention import text_config
from quantry.models.linears import FLOATS, Linear, linears
from quantry.models.parts import decoder_block, part_of
from quantry.models.writer import Entry, nbytes
from quantry.quantizing.recipe import CAST, Preset, Recipe
from quantry.types import Checkpoint, Grid, Scheme, TensorInfo

STORED = {"bf16": "BF16", "f16": "F16"}
DTYPE_NAMES = {"BF16": "bf16", "F16": "f16", "F32": "bf16"}  # what a checkpoint of this dtype becomes
GROUPS = (128, 64, 32, 16, 8)


@dataclass(frozen=True, slots=True)
class Keep:
    """A tensor (or a linear cut out of a stack of experts) that is written as it is, or cast to another float."""

    name: str
    source: str
    entry: Entry
    linear: Linear | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)


@dataclass(frozen=True, slots=True)
class Quantize:
    """Linears that an engine fuses: one preset, one grid, and one scale with all `sharers` where it spans tensors."""

    name: str
    linears: tuple[Linear, ...]
    sharers: tuple[Linear, ...]
    preset: Preset
    grid: Grid
    entries: tuple[Entry, ...]

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.grid, self.preset.scheme.activation)


@dataclass(frozen=True, slots=True)
class Recode:
    """A layer that is quantized already and is written in another way; no scheme means in 16 bit."""

    name: str  # of the module
    scheme: Scheme | None
    preset: Preset | None  # set when the layer is rounded anew onto another grid
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Assemble:
    """A tensor of a GGUF file, made of source tensors and stored as a ggml type."""

    target: Target
    kind: str

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def entries(self) -> tuple[Entry, ...]:
        return ((self.target.name, self.kind, self.target.shape),)


@dataclass(frozen=True, slots=True)
class Restore:
    """A tensor of an ordinary checkpoint, made of the tensors of a GGUF file: (target, which of its sources)."""

    name: str
    parts: tuple[tuple[Target, int], ...]
    entry: Entry

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)


@dataclass(frozen=True, slots=True)
class CacheScales:
    """The scales of what an attention module puts into the KV cache."""

    name: str  # of the module
    source: str  # a tensor of it
    grid: Grid
    entries: tuple[Entry, ...]


Piece = Keep | Quantize | Recode | Assemble | Restore | CacheScales


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """All pieces of a job in the order of writing, and the fate of every source tensor."""

    dtype: str  # of what stays in 16 bit: "bf16" or "f16"
    pieces: tuple[Piece, ...]
    fates: Mapping[str, str]
    assignment: Mapping[str, Scheme]  # quantized module -> scheme
    kept: tuple[str, ...]  # linear modules left in 16 bit, the head among them

    @property
    def bytes(self) -> int:
        return sum(nbytes(dtype, shape) for piece in self.pieces for _, dtype, shape in piece.entries)


def divide(checkpoint: Checkpoint, recipe: Recipe, blocks: int, form: ModuleType | None, keep_odd: bool) -> TensorPlan:
    """Decides for each tensor of the checkpoint; `form` is the format's module, None for 16-bit presets."""
    source_dtype = main_dtype(checkpoint)
    dtype = _target_dtype(recipe, form, source_dtype)
    found = linears(checkpoint, blocks) if form else ()
    chosen = _choose(found, recipe, form, dtype, keep_odd)
    by_source: dict[str, list[Linear]] = {}
    for linear in found:
        by_source.setdefault(linear.source, []).append(linear)
    pieces: list[Piece] = []
    fates: dict[str, str] = {}
    done: set[str] = set()
    for tensor in checkpoint.tensors:
        mine = by_source.get(tensor.name, [])
        if any(linear.fused in chosen for linear in mine):
            fates[tensor.name] = "quantized"
            for linear in mine:
                if linear.fused not in chosen:
                    pieces.append(_keep_linear(linear, tensor, source_dtype, dtype))
                elif linear.fused not in done:
                    done.add(linear.fused)
                    pieces.append(chosen[linear.fused])
            continue
        fates[tensor.name], piece = _keep(tensor, checkpoint, blocks, source_dtype, dtype)
        pieces += [piece] if piece else []
    if recipe.cache and form:
        pieces += _cache_scales(checkpoint, found, form, replace(recipe.cache, scale=dtype))  # type: ignore[arg-type]
    quantized = {linear.module: piece.scheme for piece in chosen.values() for linear in piece.linears}
    return TensorPlan(dtype, tuple(pieces), fates, quantized, _kept_modules(checkpoint, found, quantized))


def main_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of most of a checkpoint's float weights."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors:
        if tensor.dtype in FLOATS:
            sizes[tensor.dtype] += tensor.numel
    if not sizes:
        raise WeightError(f"{checkpoint.source} has no 16-bit or 32-bit weights", fix="give the original model")
    return sizes.most_common(1)[0][0]


def _target_dtype(recipe: Recipe, form: ModuleType | None, source: str) -> str:
    if recipe.format == CAST:
        return recipe.preset.scheme.weight.kind
    assert form is not None
    return str(form.model_dtype(DTYPE_NAMES[source]))


def _choose(
    found: Sequence[Linear], recipe: Recipe, form: ModuleType | None, dtype: str, keep_odd: bool
) -> dict[str, Quantize]:
    """The pieces to quantize, by the name that fused linears share."""
    chosen: dict[str, Quantize] = {}
    for name, members in groupby(sorted(found, key=lambda linear: linear.fused), key=lambda linear: linear.fused):
        group = tuple(members)
        presets = {recipe.preset_for(linear.module) for linear in group}
        if len(presets) > 1:
            raise RecipeError(
                f"{' and '.join(linear.module for linear in group)} are fused by engines but get different presets",
                fix="match all of them with one rule",
            )
        preset = presets.pop()
        if preset is None or form is None:
            continue
        grid = form.stored_grid(preset.scheme.weight, dtype)
        static = [preset.scheme.static] if preset.scheme.static else []
        try:
            for linear in group:
                _check_shape(linear, grid, found)
            entries = [
                (stored, *kind)
                for linear in group
                for stored, kind in form.layout(linear.module, linear.shape, grid, *static).items()
            ]
        except QuantryError:
            if not keep_odd:
                raise
            continue
        chosen[name] = Quantize(name, group, group, preset, grid, tuple(entries))
    together: dict[tuple[str, Grid], list[Linear]] = {}
    for piece in chosen.values():
        together.setdefault((piece.linears[0].shared, piece.grid), []).extend(piece.linears)
    return {
        name: replace(piece, sharers=tuple(together[piece.linears[0].shared, piece.grid]))
        for name, piece in chosen.items()
    }


def _cache_scales(checkpoint: Checkpoint, found: Sequence[Linear], form: ModuleType, grid: Grid) -> list[CacheScales]:
    """The scales of each attention module that keeps keys and values."""
    heads = text_config(checkpoint.config).get("num_key_value_heads")
    heads = text_config(checkpoint.config).get("num_attention_heads") if heads is None else heads
    modules = form.cache_modules(linear.module for linear in found)
    if not modules or type(heads) is not int:
        raise RecipeError(
            f"{checkpoint.source} keeps no keys and values by head, so engines read no scales for its cache",
            fix="leave --kv out",
        )
    sources = {linear.module.rpartition(".")[0]: linear.source for linear in found}
    return [
        CacheScales(
            module,
            sources[module],
            grid,
            tuple((name, *kind) for name, kind in form.cache_layout(module, heads, grid).items()),
        )
        for module in modules
    ]


def _check_shape(linear: Linear, grid: Grid, found: Sequence[Linear]) -> None:
    """Blocks must divide the weight; where they do not, the group that would is offered."""
    rows, columns = grid.block
    if grid.kind in ("nf4", "fp4") or (linear.shape[1] % (columns or 1) == 0 and linear.shape[0] % (rows or 1) == 0):
        return
    fitting = [group for group in GROUPS if all(one.shape[1] % group == 0 for one in found)]
    offer = f"use --group {fitting[0]}, or " if rows == 1 and grid.kind == "int" and fitting else ""
    raise WeightError(
        f"{linear.module}.weight ({linear.shape[0]} x {linear.shape[1]}) is not divided by {rows} x {columns} blocks",
        fix=f"{offer}leave such layers in 16 bit with --keep-odd",
    )


def _keep(
    tensor: TensorInfo, checkpoint: Checkpoint, blocks: int, source_dtype: str, dtype: str
) -> tuple[str, Keep | None]:
    """The fate of a tensor that is not quantized."""
    part = part_of(tensor.name, blocks)
    if part == "buffers" and tensor.name.endswith("inv_freq"):
        return "dropped: engines compute it from the config", None
    if part == "head" and checkpoint.config.get("tie_word_embeddings"):
        return "tied: the embedding serves as the head", None
    stored = STORED[dtype] if tensor.dtype == source_dtype else tensor.dtype
    fate = "kept" if stored == tensor.dtype else f"cast: {tensor.dtype} to {stored}"
    return fate, Keep(tensor.name, tensor.name, (tensor.name, stored, tensor.shape))


def _keep_linear(linear: Linear, tensor: TensorInfo, source_dtype: str, dtype: str) -> Keep:
    stored = STORED[dtype] if tensor.dtype == source_dtype else tensor.dtype
    name = f"{linear.module}.weight"
    return Keep(name, linear.source, (name, stored, linear.shape), linear)


def _kept_modules(checkpoint: Checkpoint, found: Sequence[Linear], quantized: Mapping[str, Scheme]) -> tuple[str, ...]:
    """Modules with a matrix weight that stays in 16 bit. A tied head is a module too, though it has no tensor."""
    modules = [linear.module for linear in found if linear.module not in quantized]
    sources = {linear.source for linear in found}
    modules += [
        tensor.name.removesuffix(".weight")
        for tensor in checkpoint.tensors
        if tensor.name.endswith(".weight") and len(tensor.shape) == 2 and tensor.name not in sources
    ]
    return tuple(dict.fromkeys([*(name for name in modules if "embed" not in name), "lm_head"]))


def by_block(division: TensorPlan, blocks: int) -> TensorPlan:
    """The pieces block after block, between those that the checkpoint has before and after all blocks."""
    places = [block_of(piece, blocks) for piece in division.pieces]
    first = next((number for number, place in enumerate(places) if place is not None), 0)

    def key(number: int) -> int:
        place = places[number]
        return (-1 if number < first else blocks) if place is None else place

    ordered = sorted(range(len(places)), key=key)
    return replace(division, pieces=tuple(division.pieces[number] for number in ordered))


def block_of(piece: Piece, blocks: int) -> int | None:
    """The block that a piece of a quantized model belongs to."""
    if isinstance(piece, Keep | CacheScales):
        return decoder_block(piece.source, blocks)
    if isinstance(piece, Assemble):
        return decoder_block(piece.target.sources[0].name, blocks) if piece.target.sources else None
    return decoder_block(piece.linears[0].source, blocks) if isinstance(piece, Quantize) else None


def shards(pieces: Sequence[Piece], limit: int) -> list[list[Piece]]:
    """Pieces in order, cut where a shard would grow over `limit` bytes."""
    cut: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        more = sum(nbytes(dtype, shape) for _, dtype, shape in piece.entries)
        if cut[-1] and size + more > limit:
            cut.append([])
            size = 0
        cut[-1].append(piece)
        size += more
    return cut
