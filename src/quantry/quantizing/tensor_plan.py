"""What becomes of every tensor of a checkpoint, decided from headers before any weight is read.

A *piece* is what is read, computed and written together: a tensor that is kept, or the linears that an engine fuses.
Each piece knows the tensors it will store (names, dtypes, shapes), so sizes are exact and shards can be planned. Every
source tensor has a *fate*: quantized, kept, cast, tied or dropped, with the reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from quantry.errors import QuantryError, RecipeError, WeightError
from quantry.formats.contract import CacheFormat, Format, load_format
from quantry.formats.gguf import NAME as GGUF
from quantry.llamacpp.tensor_map import Target
from quantry.models.attention import block_count, text_config
from quantry.models.caching import per_checkpoint
from quantry.models.linears import FLOATS, Linear, linears
from quantry.models.parts import decoder_block, part_of
from quantry.models.writer import Entry, nbytes
from quantry.quantizing.recipe import CAST, Preset, Recipe
from quantry.types import Checkpoint, Grid, Scheme, TensorInfo

STORED = {"bf16": "BF16", "f16": "F16"}
DTYPE_NAMES = {"BF16": "bf16", "F16": "f16", "F32": "bf16"}  # what a checkpoint of this dtype becomes
GROUPS = (128, 64, 32, 16, 8)


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor, or a linear cut out of a stack of experts, that is stored unchanged or cast to another float."""

    name: str
    source: str  # the checkpoint's tensor
    entry: Entry
    linear: Linear | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """Linears that an engine fuses: one preset, one grid, and one scale with all `sharers` if it spans tensors."""

    name: str
    linears: tuple[Linear, ...]
    sharers: tuple[Linear, ...]
    preset: Preset
    grid: Grid
    entries: tuple[Entry, ...]

    @property
    def source(self) -> str:
        return self.linears[0].source

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.grid, self.preset.scheme.activation)


@dataclass(frozen=True, slots=True)
class CacheScales:
    """The scales of what an attention module puts into the KV cache."""

    name: str  # of the module
    source: str  # a tensor of the module
    grid: Grid
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file, made of source tensors and stored as a ggml type."""

    target: Target
    kind: str

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def source(self) -> str | None:
        return self.target.sources[0].name if self.target.sources else None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return ((self.target.name, self.kind, self.target.shape),)


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """A layer that is already quantized and changes its format; without a scheme it becomes 16 bit."""

    name: str  # of the module
    scheme: Scheme | None
    preset: Preset | None  # set if the layer is rounded again onto another grid
    entries: tuple[Entry, ...]
    source: None = None


@dataclass(frozen=True, slots=True)
class RestoredTensor:
    """A tensor of an ordinary checkpoint, made of parts of a GGUF file: (target, which of its sources)."""

    name: str
    parts: tuple[tuple[Target, int], ...]
    entry: Entry
    source: None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)


Piece = KeptTensor | FusedLayers | CacheScales | GgufTensor | ConvertedLayer | RestoredTensor


@dataclass(frozen=True, slots=True)
class BlockPieces:
    """Pieces that follow each other and belong to one decoder block; `index` is None outside of blocks."""

    index: int | None
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """All pieces of a job in the order of writing, and the fate of every source tensor."""

    dtype: str  # of what stays in 16 bit: "bf16" or "f16"
    pieces: tuple[Piece, ...]
    fates: Mapping[str, str]
    assignment: Mapping[str, Scheme]  # quantized module -> scheme
    kept: tuple[str, ...]  # linear modules left in 16 bit, the head among them
    block_count: int = 0  # decoder blocks of the model

    @property
    def bytes(self) -> int:
        return sum(entry_bytes(piece.entries) for piece in self.pieces)

    def blocks(self) -> list[BlockPieces]:
        """Groups consecutive pieces of one decoder block."""
        return [BlockPieces(index, tuple(pieces)) for index, pieces in groupby(self.pieces, key=self.block_of)]

    def block_of(self, piece: Piece) -> int | None:
        """Returns the decoder block that a piece belongs to."""
        return None if piece.source is None else decoder_block(piece.source, self.block_count)

    def gguf_tensors(self) -> Iterator[GgufTensor]:
        """Iterates over the tensors of a GGUF file."""
        return (piece for piece in self.pieces if isinstance(piece, GgufTensor))


def entry_bytes(entries: Sequence[Entry]) -> int:
    """Returns the bytes of stored tensors."""
    return sum(nbytes(dtype, shape) for _, dtype, shape in entries)


def plan_folder(checkpoint: Checkpoint, recipe: Recipe, blocks: int, keep_odd: bool = False) -> TensorPlan:
    """Decides for each tensor of the checkpoint what a Hugging Face folder will hold of it.

    Layers whose shape does not suit their grid are left in 16 bit with `keep_odd`; otherwise they raise WeightError.
    """
    codec = None if recipe.format == CAST else load_format(recipe.format)
    source_dtype = main_dtype(checkpoint)
    dtype = codec.model_dtype(DTYPE_NAMES[source_dtype]) if codec else recipe.preset.scheme.weight.kind
    layers = linears(checkpoint, blocks) if codec else ()
    fused = _fused_layers(layers, recipe, codec, dtype, keep_odd) if codec else {}
    by_source: dict[str, list[Linear]] = {}
    for linear in layers:
        by_source.setdefault(linear.source, []).append(linear)
    pieces: list[Piece] = []
    fates: dict[str, str] = {}
    placed: set[str] = set()
    for tensor in checkpoint.tensors:
        stored = STORED[dtype] if tensor.dtype == source_dtype else tensor.dtype
        inside = by_source.get(tensor.name, [])
        if not any(linear.fused in fused for linear in inside):
            fates[tensor.name], kept = _keep(tensor, checkpoint, blocks, stored)
            pieces += kept
            continue
        fates[tensor.name] = "quantized"
        for linear in inside:
            if linear.fused not in fused:
                name = f"{linear.module}.weight"
                pieces.append(KeptTensor(name, linear.source, (name, stored, linear.shape), linear))
            elif linear.fused not in placed:
                placed.add(linear.fused)
                pieces.append(fused[linear.fused])
    if recipe.cache and codec and codec.CACHE_SCALES:
        grid = replace(recipe.cache, scale=dtype)  # type: ignore[arg-type]
        pieces += _cache_scales(checkpoint, layers, codec.CACHE_SCALES, grid)
    assignment = {linear.module: piece.scheme for piece in fused.values() for linear in piece.linears}
    return TensorPlan(dtype, tuple(pieces), fates, assignment, _kept_modules(checkpoint, layers, assignment), blocks)


@per_checkpoint(8)
def main_dtype(checkpoint: Checkpoint) -> str:
    """Returns the dtype of most float weights of a checkpoint. Raises WeightError if it has none."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors:
        if tensor.dtype in FLOATS:
            sizes[tensor.dtype] += tensor.numel
    if not sizes:
        raise WeightError(f"{checkpoint.source} has no 16-bit or 32-bit weights", fix="give the original model")
    return sizes.most_common(1)[0][0]


def _fused_layers(
    layers: Sequence[Linear], recipe: Recipe, codec: Format, dtype: str, keep_odd: bool
) -> dict[str, FusedLayers]:
    """Returns the pieces to quantize, by the name that fused linears share."""
    pieces: dict[str, FusedLayers] = {}
    for name, members in groupby(sorted(layers, key=lambda linear: linear.fused), key=lambda linear: linear.fused):
        group = tuple(members)
        preset = _shared_preset(group, recipe)
        if preset is None:
            continue
        grid = codec.stored_grid(preset.scheme.weight, dtype)  # type: ignore[arg-type]
        try:
            for linear in group:
                _check_shape(linear, grid, layers)
            entries = tuple(
                (stored, *entry)
                for linear in group
                for stored, entry in codec.layout(linear.module, linear.shape, grid, preset.scheme.static).items()
            )
        except QuantryError:
            if not keep_odd:
                raise
            continue
        pieces[name] = FusedLayers(name, group, group, preset, grid, entries)
    sharing: dict[tuple[str, Grid], list[Linear]] = {}
    for piece in pieces.values():
        sharing.setdefault((piece.linears[0].shared, piece.grid), []).extend(piece.linears)
    return {
        name: replace(piece, sharers=tuple(sharing[piece.linears[0].shared, piece.grid]))
        for name, piece in pieces.items()
    }


def _shared_preset(group: Sequence[Linear], recipe: Recipe) -> Preset | None:
    """Returns the preset of linears that engines fuse. Raises RecipeError if they get different ones."""
    presets = {recipe.preset_for(linear.module) for linear in group}
    if len(presets) > 1:
        raise RecipeError(
            f"{' and '.join(linear.module for linear in group)} are fused by engines but get different presets",
            fix="match all of them with one rule",
        )
    return presets.pop()


def _cache_scales(
    checkpoint: Checkpoint, layers: Sequence[Linear], cache: CacheFormat, grid: Grid
) -> list[CacheScales]:
    text = text_config(checkpoint.config)
    heads = text.get("num_key_value_heads")
    heads = text.get("num_attention_heads") if heads is None else heads
    modules = cache.modules(linear.module for linear in layers)
    if not modules or type(heads) is not int:
        raise RecipeError(
            f"{checkpoint.source} keeps no keys and values by head, so engines read no scales for its cache",
            fix="leave --kv out",
        )
    sources = {linear.module.rpartition(".")[0]: linear.source for linear in layers}
    return [
        CacheScales(
            module,
            sources[module],
            grid,
            tuple((name, *entry) for name, entry in cache.layout(module, heads, grid).items()),
        )
        for module in modules
    ]


def dividing_group(checkpoint: Checkpoint, recipe: Recipe) -> tuple[int, Linear] | None:
    """Returns the largest group that divides every layer, and the layer that the recipe's own group does not divide.

    None if its own divides all, if none does, or if the recipe has no groups of integers.
    """
    grid = recipe.preset.scheme.weight
    if grid.kind != "int" or grid.block[0] != 1 or recipe.format in (CAST, GGUF):
        return None
    layers = [
        linear
        for linear in linears(checkpoint, block_count(checkpoint.config))
        if recipe.preset_for(linear.module) == recipe.preset
    ]
    odd = next((linear for linear in layers if not _divides(grid, linear)), None)
    group = next((size for size in GROUPS if all(layer.shape[1] % size == 0 for layer in layers)), None)
    return None if odd is None or group is None else (group, odd)


def _check_shape(linear: Linear, grid: Grid, layers: Sequence[Linear]) -> None:
    """Raises WeightError if blocks do not divide the weight, and offers a group that does."""
    rows, columns = grid.block
    if grid.kind in ("nf4", "fp4") or _divides(grid, linear):
        return
    fitting = [group for group in GROUPS if all(layer.shape[1] % group == 0 for layer in layers)]
    offers = [f"use --group {fitting[0]}"] if rows == 1 and grid.kind == "int" and fitting else []
    if any(_divides(grid, layer) for layer in layers):
        offers.append("leave such layers in 16 bit with --keep-odd")
    raise WeightError(
        f"{linear.module}.weight ({linear.shape[0]} x {linear.shape[1]}) is not divided by {rows} x {columns} blocks",
        fix=", or ".join(offers) or "no layer is: use a preset without such blocks, as fp8-dynamic or w8a8",
    )


def _divides(grid: Grid, linear: Linear) -> bool:
    rows, columns = grid.block
    return linear.shape[1] % (columns or 1) == 0 and linear.shape[0] % (rows or 1) == 0


def _keep(tensor: TensorInfo, checkpoint: Checkpoint, blocks: int, stored: str) -> tuple[str, list[KeptTensor]]:
    """Returns the fate of a tensor that is not quantized, and its piece if it is stored."""
    part = part_of(tensor.name, blocks)
    if part == "buffers" and tensor.name.endswith("inv_freq"):
        return "dropped: engines compute it from the config", []
    if part == "head" and checkpoint.config.get("tie_word_embeddings"):
        return "tied: the embedding serves as the head", []
    fate = "kept" if stored == tensor.dtype else f"cast: {tensor.dtype} to {stored}"
    return fate, [KeptTensor(tensor.name, tensor.name, (tensor.name, stored, tensor.shape))]


def _kept_modules(checkpoint: Checkpoint, layers: Sequence[Linear], quantized: Mapping[str, Scheme]) -> tuple[str, ...]:
    """Lists modules with a matrix weight that stays in 16 bit; a tied head is a module too, without a tensor."""
    modules = [linear.module for linear in layers if linear.module not in quantized]
    sources = {linear.source for linear in layers}
    modules += [
        tensor.name.removesuffix(".weight")
        for tensor in checkpoint.tensors
        if tensor.name.endswith(".weight") and len(tensor.shape) == 2 and tensor.name not in sources
    ]
    return tuple(dict.fromkeys([*(name for name in modules if "embed" not in name), "lm_head"]))


def by_block(plan: TensorPlan) -> TensorPlan:
    """Orders the pieces by block, between those that the checkpoint has before and after all blocks."""
    places = [plan.block_of(piece) for piece in plan.pieces]
    first = next((number for number, place in enumerate(places) if place is not None), 0)

    def key(number: int) -> int:
        place = places[number]
        return (-1 if number < first else plan.block_count) if place is None else place

    ordered = sorted(range(len(places)), key=key)
    return replace(plan, pieces=tuple(plan.pieces[number] for number in ordered))


def shards(pieces: Sequence[Piece], limit: int) -> list[list[Piece]]:
    """Cuts the pieces, in order, where a shard would grow over `limit` bytes."""
    cut: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        more = entry_bytes(piece.entries)
        if cut[-1] and size + more > limit:
            cut.append([])
            size = 0
        cut[-1].append(piece)
        size += more
    return cut
