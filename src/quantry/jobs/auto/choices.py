"""Every way to store a layer that a format offers: what it takes, the rule of a recipe that asks for it, its rounding.

Layers that an engine must store alike (q/k/v in vLLM, all experts of a layer) are one; in GGUF every tensor has a type
of its own. All but the rounding is known from headers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantry import registry
from quantry.errors import UnknownNameError
from quantry.formats import gguf
from quantry.llamacpp.mixture import BLOCKS
from quantry.llamacpp.tensor_map import EMBEDDING, HEAD, Target, TensorSlice
from quantry.models.linears import EXPERT, Linear
from quantry.models.parts import BLOCK, decoder_block
from quantry.models.weights import DTYPES
from quantry.models.writer import nbytes
from quantry.numerics.grids import dequantize
from quantry.quantizing.calibration.transform import grids as grids_of
from quantry.quantizing.containers import gguf_file
from quantry.quantizing.recipe import Preset, from_options, preset
from quantry.quantizing.tensor_plan import STORED, Assemble, Keep, Quantize, TensorPlan, divide
from quantry.types import Checkpoint, Grid, Scheme, Stats

FORMATS = ("gguf", "compressed-tensors")
GROUPS = (128, 64, 32)
GROUPED = ("w4a16", "w4a16-asym", "w8a16")  # what vLLM (0.32) loads side by side in one model, beside fp8
CLIPPED = {"awq": {"w4a16-asym": "w4a16-awq"}}  # presets that belong to a transform
FP8 = "fp8-dynamic"
# E4M3 has steps of 1/8 of a power of two, so an error of 1/768 of its square; a value between two powers has 2.16 of
# that square in the mean, if its logarithm is spread evenly.
FP8_NOISE = 1 / 768 / 2.16
NEEDLESS = {"Q4_0": "Q4_K", "IQ4_NL": "Q4_K", "Q5_0": "Q5_K"}  # where the other, of the same size, fits as well
KEEP = {"keep": True}  # the rule of 16 bit
Part = Linear | TensorSlice


@dataclass(frozen=True, slots=True)
class Way:
    """One way to store a layer, and how its parts are rounded that way."""

    name: str
    bytes: int
    rule: Mapping[str, Any]
    make: Callable[..., Tensor]
    noise: float = 0.0  # of a rounded input


@dataclass(frozen=True, slots=True)
class Planned:
    """A layer with its ways."""

    name: str
    part: str
    block: int | None
    match: tuple[str, ...]
    parameters: int
    parts: tuple[Part, ...]
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """All that is to choose of a model, and all that is not."""

    layers: tuple[Planned, ...]
    kept: Mapping[str, int]  # tensor -> bytes
    tied: bool  # the embedding is the head as well
    schemes: Mapping[str, Scheme]  # by module: about 4 bits, what a transform is searched for before a way is chosen


def choices(checkpoint: Checkpoint, blocks: int, form: str, rounder: ModuleType, transform: str | None) -> Job:
    """What there is to choose from in a format."""
    return _gguf(checkpoint, blocks, rounder) if form == "gguf" else _folder(checkpoint, blocks, rounder, transform)


def among(layers: Sequence[Planned], grids: Sequence[str] | None) -> list[Planned]:
    """The layers with the ways that were asked for; 16 bit is always one. Without, all that are not needless."""
    if grids is None:
        return [replace(layer, ways=tuple(_needed(layer.ways))) for layer in layers]
    known = {way.name.lower(): way.name for layer in layers for way in layer.ways}
    unknown = next((name for name in grids if name.lower() not in known), None)
    if unknown is not None:
        raise UnknownNameError(
            f"no layer can be stored as {unknown!r}", fix=registry.suggest(unknown, tuple(known.values()))
        )
    wanted = {known[name.lower()] for name in grids}
    return [
        replace(layer, ways=tuple(way for way in layer.ways if way.name in wanted or way.rule == KEEP))
        for layer in layers
    ]


def _needed(ways: Sequence[Way]) -> Iterator[Way]:
    names = {way.name for way in ways}
    return (way for way in ways if NEEDLESS.get(way.name) not in names)


def _gguf(checkpoint: Checkpoint, blocks: int, rounder: ModuleType) -> Job:
    """Tensors of a GGUF file: those to which llama.cpp's own mixture gives a block type have the choice."""
    recipe = from_options("gguf-q4_k_m", None, None, None, None)
    division = gguf_file.divide(checkpoint, recipe)
    pieces = [piece for piece in division.pieces if isinstance(piece, Assemble)]
    plain, names = STORED[division.dtype], {piece.name for piece in pieces}
    layers, kept = [], {}
    for piece in pieces:
        sources = piece.target.sources
        block = decoder_block(sources[0].name, blocks) if sources else None
        if piece.kind in DTYPES or (block is None and piece.name not in (EMBEDDING, HEAD)):
            kept[piece.name] = _size(piece)
        else:
            ways = tuple(_gguf_ways(piece.target, plain, rounder))
            label = BLOCK.sub("", piece.name).removesuffix(".weight")
            size = prod(piece.target.shape)
            layers.append(Planned(piece.name, label, block, (piece.name,), size, sources, ways))
    return Job(tuple(layers), kept, HEAD not in names, grids_of(division))


def _gguf_ways(target: Target, plain: str, rounder: ModuleType) -> Iterator[Way]:
    for kind in (name.upper() for name in gguf.BLOCKS):
        if target.shape[-1] % BLOCKS[kind] == 0:
            make = partial(_rounded_blocks, kind, rounder)
            yield Way(kind, nbytes(kind, target.shape), {"type": kind}, make)
    yield Way(plain, nbytes(plain, target.shape), KEEP, partial(_cast, DTYPES[plain]))


def _folder(checkpoint: Checkpoint, blocks: int, rounder: ModuleType, transform: str | None) -> Job:
    """Linears of a compressed-tensors folder, in the groups that vLLM runs as one."""
    form = registry.load("quantry.formats", "compressed-tensors")
    recipe = from_options(FP8, None, None, "compressed-tensors", None)  # a grid that every shape fits
    division = divide(checkpoint, recipe, blocks, form, keep_odd=True)
    together: dict[str, list[Linear]] = {}
    for piece in division.pieces:
        if isinstance(piece, Quantize):
            together.setdefault(_kernel(piece.linears[0]), []).extend(piece.linears)
    instead = CLIPPED.get(transform or "", {})
    layers = [_planned(name, linears, division, form, rounder, blocks, instead) for name, linears in together.items()]
    kept = {piece.name: _size(piece) for piece in division.pieces if isinstance(piece, Keep)}
    schemes: dict[str, Scheme] = {}
    for linear in (linear for linears in together.values() for linear in linears):
        group = next((group for group in GROUPS[1:] if linear.shape[1] % group == 0), None)
        schemes |= {linear.module: preset("w4a16-asym", group).scheme} if group else {}
    return Job(tuple(layers), kept, False, schemes)


def _kernel(linear: Linear) -> str:
    """The name of what vLLM runs with one scheme: fused linears, or all experts of a layer."""
    experts = EXPERT.split(linear.module)
    return f"{experts[0]}.experts" if len(experts) > 1 else linear.fused


def _planned(
    name: str,
    linears: Sequence[Linear],
    division: TensorPlan,
    form: ModuleType,
    rounder: ModuleType,
    blocks: int,
    instead: Mapping[str, str],
) -> Planned:
    experts = name.endswith(".experts")
    match = (f"{name}.*",) if experts else tuple(linear.module for linear in linears)
    ways = tuple(_folder_ways(linears, division.dtype, form, rounder, instead))
    block, size = decoder_block(linears[0].source, blocks), sum(prod(linear.shape) for linear in linears)
    return Planned(name, BLOCK.split(name)[-1], block, match, size, tuple(linears), ways)


def _folder_ways(
    linears: Sequence[Linear], dtype: str, form: ModuleType, rounder: ModuleType, instead: Mapping[str, str]
) -> Iterator[Way]:
    grouped: list[tuple[str, int | None]] = [(name, group) for name in GROUPED for group in GROUPS]
    for name, group in [*grouped, (FP8, None)]:
        if group and any(linear.shape[1] % group for linear in linears):
            continue
        used = instead.get(name, name)
        chosen = replace(preset(used, group), rounder=rounder.__name__.rpartition(".")[2])
        grid = form.stored_grid(chosen.scheme.weight, dtype)
        layouts = [form.layout(linear.module, linear.shape, grid) for linear in linears]
        size = sum(nbytes(*entry) for layout in layouts for entry in layout.values())
        rule = {"preset": used, **({"group": group} if group else {})}
        make = partial(_rounded_grid, chosen, grid, rounder)
        yield Way(f"{name}-g{group}" if group else name, size, rule, make, 0.0 if group else FP8_NOISE)
    size = sum(nbytes(STORED[dtype], linear.shape) for linear in linears)
    yield Way(dtype, size, KEEP, partial(_cast, DTYPES[STORED[dtype]]))


def _size(piece: Assemble | Keep) -> int:
    return sum(nbytes(dtype, shape) for _, dtype, shape in piece.entries)


# ---- rounding, as the makers do it, of any rows of a layer ----


def _rounded_blocks(kind: str, rounder: ModuleType, weight: Tensor, stats: Stats | None, prepared: Any) -> Tensor:
    """Rows are rounded one by one, so that their order in the file does not matter."""
    data = gguf.encode(weight, kind, None) if stats is None else rounder.round_blocks(weight, kind, prepared)
    return gguf.decode(data, kind, weight.shape[1])


def _rounded_grid(
    chosen: Preset, grid: Grid, rounder: ModuleType, weight: Tensor, stats: Stats | None, prepared: Any
) -> Tensor:
    assert chosen.fit is not None
    fit = registry.load("quantry.methods.fits", chosen.fit).fit
    params = fit(weight, grid, None, stats if chosen.calibrated else None)
    return dequantize(rounder.round_weight(weight, grid, params, prepared))


def _cast(dtype: torch.dtype, weight: Tensor, stats: Stats | None, prepared: Any) -> Tensor:
    return weight.to(dtype).float()
