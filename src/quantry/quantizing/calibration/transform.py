"""A transform of whole blocks: which tensors of a model it changes, which layers it leaves alone, and why."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantry.methods import contract
from quantry.methods.contract import Transformed
from quantry.methods.transforms._scaling import matrix
from quantry.models.linears import Linear, linears, module_names
from quantry.models.parts import decoder_block
from quantry.models.smoothing import smoothing
from quantry.quantizing.containers.gguf_file import FLOATS, bits_of
from quantry.quantizing.tensor_plan import TensorPlan
from quantry.types import Checkpoint, Grid, Scheme, Stats, TensorInfo

STEPS = dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), 16)  # weights that share a scale in ggml's types, where not 32
MINIMA = frozenset({"Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"})  # types with a minimum beside the scale


class BlockTransform:
    """The transform of that name; `schemes` are those of the layers that are rounded."""

    def __init__(self, name: str, checkpoint: Checkpoint, blocks: int, schemes: Mapping[str, Scheme]) -> None:
        self._transform = contract.transform(name)
        self._schemes = schemes
        parts = _by_block(checkpoint, blocks)
        self._tensors = {index: [tensor.name for tensor in part.tensors] for index, (part, _) in parts.items()}
        self._smoothing = {index: smoothing(part, inside, index) for index, (part, inside) in parts.items()}

    def apply(self, index: int, stats: Mapping[str, Stats], read: Callable[[str], Tensor]) -> Transformed:
        """Transforms a block; `stats` are by module, `read` returns a tensor of the checkpoint."""
        block = {name: read(name) for name in self._tensors[index]}
        return self._transform.apply(block, self._smoothing[index].pairs, stats, self._schemes)

    def divisors(
        self, index: int, tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor]
    ) -> dict[tuple[str, int | None], Tensor]:
        """Returns what each row of a tensor, or of an expert in it, was divided by; `scales` are by pair."""
        divisors: dict[tuple[str, int | None], Tensor] = {}
        for pair in self._smoothing[index].pairs:
            for slot in pair.producers if pair.form == "rows" and pair.name in scales else ():
                scale, place = scales[pair.name], (slot.source, slot.expert)
                rows = len(matrix(tensors, replace(slot, rows=None)))
                divisors.setdefault(place, torch.ones(rows, device=scale.device))
                divisors[place][slice(*slot.rows) if slot.rows else slice(None)] *= scale
        return divisors

    def scaled(self) -> set[str]:
        """Returns the tensors that the transform changes."""
        pairs = [pair for block in self._smoothing.values() for pair in block.pairs]
        used = [pair for pair in pairs if any(slot.module in self._schemes for slot in pair.consumers)]
        return {slot.source for pair in used for slot in (*pair.producers, *pair.consumers)}

    def notes(self) -> tuple[str, ...]:
        """Returns sentences on the layers that are not scaled, grouped by reason."""
        left: dict[str, dict[str, set[int]]] = {}
        for index, block in self._smoothing.items():
            for module, reason in block.left_out.items():
                if module in self._schemes:
                    leaf = _numberless(module.rpartition(f".{index}.")[2])
                    left.setdefault(reason, {}).setdefault(leaf, set()).add(index)
        return tuple(
            f"In {len(set.union(*leaves.values()))} of {len(self._smoothing)} blocks the inputs of "
            f"{', '.join(sorted(leaves))} are not scaled: {reason}."
            for reason, leaves in left.items()
        )


def even_grids(plan: TensorPlan) -> dict[str, Scheme]:
    """Returns a scheme with even steps in place of each linear layer's ggml type, by module.

    A transform searches with them: blocks within blocks and code books hardly change what is best.
    """
    schemes: dict[str, Scheme] = {}
    for piece in plan.gguf_tensors():
        if piece.kind not in FLOATS:
            grid = Grid("int", bits_of(piece.kind), (1, STEPS.get(piece.kind, 32)), symmetric=piece.kind not in MINIMA)
            for source in piece.target.sources:
                schemes |= dict.fromkeys(module_names(source.name, source.expert), Scheme(grid))
    return schemes


def _by_block(checkpoint: Checkpoint, blocks: int) -> dict[int, tuple[Checkpoint, list[Linear]]]:
    """Returns the tensors and linears of each block; searching all of them per block is slow with many experts."""
    parts: dict[int, list[TensorInfo]] = {}
    for tensor in checkpoint.tensors:
        index = decoder_block(tensor.name, blocks)
        if index is not None:
            parts.setdefault(index, []).append(tensor)
    layers: dict[int, list[Linear]] = {index: [] for index in parts}
    for linear in linears(checkpoint, blocks):
        index = decoder_block(linear.source, blocks)
        if index is not None:
            layers[index].append(linear)
    return {index: (replace(checkpoint, tensors=tuple(parts[index])), layers[index]) for index in sorted(parts)}


def _numberless(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
