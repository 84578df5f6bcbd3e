"""Transforms of whole blocks: which tensors of a model they change, which layers they leave as they are, and why."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from quantry import registry
from quantry.arch.linears import Linear, linears
from quantry.arch.parts import decoder_block
from quantry.arch.smoothing import smoothing
from quantry.types import Checkpoint, Scheme, Stats, TensorInfo


class Transform:
    """A transform of whole blocks by the name of its plug-in; `schemes` are those of the layers that are rounded."""

    def __init__(self, name: str, checkpoint: Checkpoint, blocks: int, schemes: Mapping[str, Scheme]) -> None:
        self._apply = registry.load("quantry.transforms", name).apply
        self._schemes = schemes
        parts = _by_block(checkpoint, blocks)
        self._tensors = {index: [tensor.name for tensor in part.tensors] for index, (part, _) in parts.items()}
        self._found = {index: smoothing(part, inside, index) for index, (part, inside) in parts.items()}

    def apply(
        self, index: int, stats: Mapping[str, Stats], read: Callable[[str], Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Stats]]:
        """The tensors of a block and the statistics by module, both as they are after it."""
        block = {name: read(name) for name in self._tensors[index]}
        made = self._apply(block, self._found[index].pairs, stats, self._schemes)
        return made.block, made.stats

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
