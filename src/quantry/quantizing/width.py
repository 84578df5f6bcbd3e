"""Why an artefact has more bits a weight than its preset's name says: the part that takes most of them."""

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from quantry.models.gguf import block_sizes
from quantry.models.parts import part_of
from quantry.quantizing.recipe import Recipe
from quantry.quantizing.tensor_plan import FusedLayers, GgufTensor, KeptTensor, Piece, TensorPlan, entry_bytes
from quantry.types import Artefact

LIMIT = 1.25  # times the bits of the name; up to there scales and a few larger tensors explain it
NAMES = {"embedding": "the embedding", "head": "the head", "attention": "some of attention", "MLP": "some of the MLP"}


@dataclass(slots=True)
class _Stored:
    """Weights of one part that are stored alike."""

    weights: int = 0
    bytes: int = 0
    columns: int = 0


def wider_than_named(planned: Artefact, recipe: Recipe, plan: TensorPlan) -> tuple[str, ...]:
    """Returns a sentence that names the part and its share; nothing for a width near the preset's own."""
    bits = recipe.preset.scheme.weight.bits
    if recipe.budget or recipe.rules or planned.bits_per_weight <= LIMIT * bits:
        return ()
    groups: dict[tuple[str, str], _Stored] = defaultdict(_Stored)
    for piece in plan.pieces:
        _add(groups, piece, plan.block_count)
    usual = min(group.bytes / group.weights for group in groups.values())
    (part, kind), most = max(groups.items(), key=lambda item: item[1].bytes - usual * item[1].weights)
    share = most.weights / sum(group.weights for group in groups.values())
    name = NAMES.get(part, f"some of the {part}")
    return (
        f"{planned.bits_per_weight:.2f} bits a weight rather than {bits}: {name}, {share:.0%} of the weights, "
        f"{_words(kind, most, recipe)}.",
    )


def _add(groups: dict[tuple[str, str], _Stored], piece: Piece, blocks: int) -> None:
    if isinstance(piece, FusedLayers):
        weights, kind, columns = sum(prod(linear.shape) for linear in piece.linears), "", piece.linears[0].shape[-1]
    elif isinstance(piece, GgufTensor | KeptTensor):
        _, kind, shape = piece.entries[0]
        weights, columns = prod(shape), shape[-1] if shape else 1
    else:
        return
    if not weights:
        return
    group = groups[part_of(piece.source or piece.name, blocks), kind]
    group.weights += weights
    group.bytes += entry_bytes(piece.entries)
    group.columns = columns


def _words(kind: str, stored: _Stored, recipe: Recipe) -> str:
    """Says how a part is stored, and why if its rows do not fit."""
    width = f"{8 * stored.bytes / stored.weights:.3g} bits"
    if not kind:
        return f"takes {width} with its scales"
    block = recipe.preset.scheme.weight.block[1]
    size = next((weights for name, weights, _ in block_sizes().values() if name == kind), 1)
    if block and stored.columns % block and size < block:
        return f"takes {width} as {kind}, because blocks of {block} do not divide its rows of {stored.columns:,}"
    return f"takes {width} as {kind}" if size > 1 else f"stays in {width}"
