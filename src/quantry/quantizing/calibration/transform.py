"""Transforms of whole blocks: which tensors of a model they change, which layers they leave as they are, and why."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantry import registry
from quantry.methods.transforms._scaling import Transformed, matrix
from quantry.models.linears import Linear, linears
from quantry.models.parts import decoder_block
from quantry.models.smoothing import smoothing
from quantry.quantizing.calibration.observe import module_names
from quantry.quantizing.containers.gguf_file import FLOATS, bits_of
from quantry.quantizing.tensor_plan import Assemble, TensorPlan
from quantry.types import Checkpoint, Grid, Scheme, Stats, TensorInfo

STEPS = dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), 16)  # weights that share a scale in ggml's types, where not 32
MINIMA = frozenset({"Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"})  # types with a minimum beside the scale


class Transform:
    """A transform of whole blocks by the name of its plug-in; `schemes` are those of the layers that are rounded."""

    def __init__(self, name: str, checkpoint: Checkpoint, blocks: int, schemes: Mapping[str, Scheme]) -> None:
        self._apply = registry.load("quantry.methods.transforms", name).apply
        self._schemes = schemes
        parts = _by_block(checkpoint, blocks)
        self._tensors = {index: [tensor.name for tensor in part.tensors] for index, (part, _) in parts.items()}
        self._found = {index: smoothing(part, inside, index) for index, (part, inside) in parts.items()}

    def apply(self, index: int, stats: Mapping[str, Stats], read: Callable[[str], Tensor]) -> Transformed:
        """A block with its statistics by module, as they are after it."""
        block = {name: read(name) for name in self._tensors[index]}
        made: Transformed = self._apply(block, self._found[index].pairs, stats, self._schemes)
        return made

    def divided(self, index: int, made: Transformed) -> dict[tuple[str, int | None], Tensor]:
        """What each row of a tensor, or of an expert in it, was divided by, where outputs were scaled."""
        found: dict[tuple[str, int | None], Tensor] = {}
        for pair in self._found[index].pairs:
            for slot in pair.producers if pair.form == "rows" and pair.name in made.scales else ():
                scale, whole = made.scales[pair.name], replace(slot, rows=None)
                place = (slot.source, slot.expert)
                found.setdefault(place, torch.ones(len(matrix(made.block, whole)), device=scale.device))
                found[place][slice(*slot.rows) if slot.rows else slice(None)] *= scale
        return found

    def scaled(self) -> set[str]:
        """The tensors that are changed."""
        pairs = [pair for found in self._found.values() for pair in found.pairs]
        used = [pair for pair in pairs if any(slot.module in self._schemes for slot in pair.consumers)]
        return {slot.source for pair in used for slot in (*pair.producers, *pair.consumers)}

    def notes(self) -> tuple[str, ...]:
        """The layers that are rounded as they are, grouped by the reason."""
        left: dict[str, dict[str, set[int]]] = {}
        for index, found in self._found.items():
            for module, reason in found.left_out.items():
                if module in self._schemes:
                    leaf = _numberless(module.rpartition(f".{index}.")[2])
                    left.setdefault(reason, {}).setdefault(leaf, set()).add(index)
        return tuple(
            f"In {len(set.union(*leaves.values()))} of {len(self._found)} blocks the inputs of "
            f"{', '.join(sorted(leaves))} are not scaled: {reason}."
            for reason, leaves in left.items()
        )


def grids(division: TensorPlan) -> dict[str, Scheme]:
    """What each linear layer is about to be rounded to, by module: even steps in place of ggml's types.

    A transform is searched with them; blocks within blocks and code books make little difference to what is best.
    """
    found: dict[str, Scheme] = {}
    for piece in division.pieces:
        if isinstance(piece, Assemble) and piece.kind not in FLOATS:
            grid = Grid("int", bits_of(piece.kind), (1, STEPS.get(piece.kind, 32)), symmetric=piece.kind not in MINIMA)
            for source in piece.target.sources:
                found |= dict.fromkeys(module_names(source.name, source.expert), Scheme(grid))
    return found


def _by_block(checkpoint: Checkpoint, blocks: int) -> dict[int, tuple[Checkpoint, list[Linear]]]:
    """The tensors and linears of each block: to go through all of them for each takes long with many experts."""
    parts: dict[int, list[TensorInfo]] = {}
    for tensor in checkpoint.tensors:
        index = decoder_block(tensor.name, blocks)
        if index is not None:
            parts.setdefault(index, []).append(tensor)
    found: dict[int, list[Linear]] = {index: [] for index in parts}
    for linear in linears(checkpoint, blocks):
        index = decoder_block(linear.source, blocks)
        if index is not None:
            found[index].append(linear)
    return {index: (replace(checkpoint, tensors=tuple(parts[index])), found[index]) for index in sorted(parts)}


def _numberless(name: str) -> str:
    """A name for all experts of a layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
