"""Every choice to store a layer that a format offers: its size, the recipe rule that asks for it, and its rounding.

Layers that an engine must store alike (q/k/v in vLLM, all experts of a layer) form one item; in GGUF every tensor has
its own type. Headers determine everything but the rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from quantry import registry
from quantry.errors import UnknownNameError
from quantry.formats import gguf
from quantry.formats.contract import Format, load_format
from quantry.llamacpp.mixture import BLOCKS
from quantry.llamacpp.tensor_map import EMBEDDING, HEAD, Target
from quantry.methods import contract
from quantry.methods.contract import Rounder
from quantry.methods.rounding import LayerInput, round_blocks, round_weight
from quantry.models.attention import block_count
from quantry.models.linears import EXPERT, Linear
from quantry.models.parts import BLOCK, decoder_block
from quantry.models.weights import DTYPES
from quantry.models.writer import nbytes
from quantry.numerics.grids import dequantize
from quantry.quantizing.calibration.transform import even_grids
from quantry.quantizing.containers.gguf_file import plan_gguf
from quantry.quantizing.recipe import Preset, build, preset
from quantry.quantizing.slices import Slice
from quantry.quantizing.tensor_plan import STORED, FusedLayers, KeptTensor, TensorPlan, entry_bytes, plan_folder
from quantry.types import Checkpoint, Grid, Scheme

FORMATS = ("gguf", "compressed-tensors")
GROUPS = (128, 64, 32)
GROUPED = ("w4a16", "w4a16-asym", "w8a16")  # what vLLM (0.32) loads side by side in one model, besides fp8
CLIPPED = {"awq": {"w4a16-asym": "w4a16-awq"}}  # presets that belong to a transform
FP8 = "fp8-dynamic"
# E4M3 has steps of 1/8 of a power of two, so an error of 1/768 of its square; a value between two powers has 2.16 of
# that square on average, if its logarithm is spread evenly.
FP8_NOISE = 1 / 768 / 2.16
NEEDLESS = {"Q4_0": "Q4_K", "IQ4_NL": "Q4_K", "Q5_0": "Q5_K"}  # types that another of the same size replaces if it fits
KEEP = {"keep": True}  # the rule of 16 bit
Round = Callable[[Tensor, LayerInput | None], Tensor]  # from a weight to its decoded, rounded values


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """One way to store a layer; `rule` is the rest of a recipe's rule for it."""

    name: str
    bytes: int
    rule: Mapping[str, Any]
    round: Round
    noise: float = 0.0  # of a rounded input: mean square error relative to the square


@dataclass(frozen=True, slots=True)
class LayerChoices:
    """A layer, or layers that must be stored alike, with its choices; `match` are the patterns of recipe rules."""

    name: str
    part: str  # the same in every block
    block: int | None
    match: tuple[str, ...]
    parameters: int
    slices: tuple[Slice, ...]
    choices: tuple[StorageChoice, ...]


@dataclass(frozen=True, slots=True)
class ModelChoices:
    """What there is to choose in a model, and what is not."""

    layers: tuple[LayerChoices, ...]
    kept: Mapping[str, int]  # tensor -> bytes
    tied: bool  # the embedding is the head as well
    schemes: Mapping[str, Scheme]  # by module, about 4 bits: what a transform is searched for before a choice is made


def model_choices(checkpoint: Checkpoint, format_name: str, rounder: str, transform: str | None) -> ModelChoices:
    """Returns the choices of a model in a format. Raises UnknownNameError for a format that cannot be mixed."""
    if format_name not in FORMATS:
        raise UnknownNameError(f"unknown format {format_name!r} to mix", fix=registry.suggest(format_name, FORMATS))
    if format_name == gguf.NAME:
        return _gguf(checkpoint, rounder)
    return _folder(checkpoint, rounder, transform)


def limited(layers: Sequence[LayerChoices], names: Sequence[str] | None) -> list[LayerChoices]:
    """Returns the layers with the named choices and 16 bit; without names, with all that are not needless.

    Raises UnknownNameError for a name that no layer has.
    """
    if names is None:
        return [replace(layer, choices=tuple(_needed(layer.choices))) for layer in layers]
    known = {choice.name.lower(): choice.name for layer in layers for choice in layer.choices}
    unknown = next((name for name in names if name.lower() not in known), None)
    if unknown is not None:
        raise UnknownNameError(
            f"no layer can be stored as {unknown!r}", fix=registry.suggest(unknown, tuple(known.values()))
        )
    wanted = {known[name.lower()] for name in names}
    return [
        replace(layer, choices=tuple(c for c in layer.choices if c.name in wanted or c.rule == KEEP))
        for layer in layers
    ]


def _needed(choices: Sequence[StorageChoice]) -> Iterator[StorageChoice]:
    names = {choice.name for choice in choices}
    return (choice for choice in choices if NEEDLESS.get(choice.name) not in names)


def _gguf(checkpoint: Checkpoint, rounder: str) -> ModelChoices:
    """Returns the tensors of a GGUF file; those with a block type in llama.cpp's own mixture have a choice."""
    plan = plan_gguf(checkpoint, build({"preset": "gguf-q4_k_m"}))
    plain, names = STORED[plan.dtype], {piece.name for piece in plan.pieces}
    layers, kept = [], {}
    for piece in plan.gguf_tensors():
        block = plan.block_of(piece)
        if piece.kind in DTYPES or (block is None and piece.name not in (EMBEDDING, HEAD)):
            kept[piece.name] = entry_bytes(piece.entries)
        else:
            target = piece.target
            choices = tuple(_gguf_choices(target, plain, contract.rounder(rounder)))
            label = BLOCK.sub("", piece.name).removesuffix(".weight")
            size = prod(target.shape)
            layers.append(LayerChoices(piece.name, label, block, (piece.name,), size, target.sources, choices))
    return ModelChoices(tuple(layers), kept, HEAD not in names, even_grids(plan))


def _gguf_choices(target: Target, plain: str, rounder: Rounder) -> Iterator[StorageChoice]:
    for kind in (name.upper() for name in gguf.BLOCKS):
        if target.shape[-1] % BLOCKS[kind] == 0:
            rounding = partial(_rounded_blocks, kind, rounder)
            yield StorageChoice(kind, nbytes(kind, target.shape), {"type": kind}, rounding)
    yield StorageChoice(plain, nbytes(plain, target.shape), KEEP, partial(_cast, DTYPES[plain]))


def _folder(checkpoint: Checkpoint, rounder: str, transform: str | None) -> ModelChoices:
    """Returns the linears of a compressed-tensors folder, in the groups that vLLM runs as one."""
    recipe = build({"preset": FP8, "format": "compressed-tensors"})  # a grid that suits every shape
    plan = plan_folder(checkpoint, recipe, block_count(checkpoint.config), keep_odd=True)
    groups: dict[str, list[Linear]] = {}
    for piece in plan.pieces:
        if isinstance(piece, FusedLayers):
            groups.setdefault(_kernel(piece.linears[0]), []).extend(piece.linears)
    maker = _FolderChoices(plan, rounder, CLIPPED.get(transform or "", {}))
    layers = [maker.layer(name, linears) for name, linears in groups.items()]
    kept = {piece.name: entry_bytes(piece.entries) for piece in plan.pieces if isinstance(piece, KeptTensor)}
    schemes: dict[str, Scheme] = {}
    for linear in (linear for linears in groups.values() for linear in linears):
        group = next((group for group in GROUPS[1:] if linear.shape[1] % group == 0), None)
        if group:
            schemes[linear.module] = preset("w4a16-asym", group).scheme
    return ModelChoices(tuple(layers), kept, False, schemes)


def _kernel(linear: Linear) -> str:
    """Returns the name of what vLLM runs with one scheme: fused linears, or all experts of a layer."""
    experts = EXPERT.split(linear.module)
    return f"{experts[0]}.experts" if len(experts) > 1 else linear.fused


class _FolderChoices:
    """Makes the choices of linears in a folder; `replacements` are presets that belong to a transform."""

    def __init__(self, plan: TensorPlan, rounder: str, replacements: Mapping[str, str]) -> None:
        self._plan, self._rounder, self._replacements = plan, rounder, replacements
        self._codec: Format = load_format("compressed-tensors")

    def layer(self, name: str, linears: Sequence[Linear]) -> LayerChoices:
        match = (f"{name}.*",) if name.endswith(".experts") else tuple(linear.module for linear in linears)
        block = decoder_block(linears[0].source, self._plan.block_count)
        size = sum(prod(linear.shape) for linear in linears)
        choices = tuple(self._choices(linears))
        return LayerChoices(name, BLOCK.split(name)[-1], block, match, size, tuple(linears), choices)

    def _choices(self, linears: Sequence[Linear]) -> Iterator[StorageChoice]:
        grouped: list[tuple[str, int | None]] = [(name, group) for name in GROUPED for group in GROUPS]
        for name, group in [*grouped, (FP8, None)]:
            if not group or all(linear.shape[1] % group == 0 for linear in linears):
                yield self._choice(name, group, linears)
        stored = STORED[self._plan.dtype]
        size = sum(nbytes(stored, linear.shape) for linear in linears)
        yield StorageChoice(self._plan.dtype, size, KEEP, partial(_cast, DTYPES[stored]))

    def _choice(self, name: str, group: int | None, linears: Sequence[Linear]) -> StorageChoice:
        used = self._replacements.get(name, name)
        chosen = replace(preset(used, group), rounder=self._rounder)
        grid = self._codec.stored_grid(chosen.scheme.weight, self._plan.dtype)  # type: ignore[arg-type]
        layouts = [self._codec.layout(linear.module, linear.shape, grid) for linear in linears]
        size = sum(nbytes(*entry) for layout in layouts for entry in layout.values())
        rule = {"preset": used, **({"group": group} if group else {})}
        rounding = partial(_rounded_grid, chosen, grid)
        return StorageChoice(f"{name}-g{group}" if group else name, size, rule, rounding, 0.0 if group else FP8_NOISE)


# ---- rounding, as the makers do it, of any rows of a layer ----


def _rounded_blocks(kind: str, rounder: Rounder, weight: Tensor, layer_input: LayerInput | None) -> Tensor:
    # rows are rounded one by one, so that their order in the file does not matter
    return gguf.decode(round_blocks(weight, kind, rounder, layer_input), kind, weight.shape[1])


def _rounded_grid(chosen: Preset, grid: Grid, weight: Tensor, layer_input: LayerInput | None) -> Tensor:
    assert chosen.fit is not None
    fit, rounder = contract.fit(chosen.fit), contract.rounder(chosen.rounder)
    return dequantize(round_weight(weight, grid, fit, rounder, layer_input if chosen.calibrated else None))


def _cast(dtype: torch.dtype, weight: Tensor, layer_input: LayerInput | None) -> Tensor:
    return weight.to(dtype).float()
