"""Parts of a mixture that are measured alone, and predicted damages corrected by what was measured.

The prediction errs by a factor that depends on the depth (in SmolLM2-135M, without a transform, from 1.4 in the middle
to 10 in the first blocks) and less on the kind of a layer. So the blocks are cut twice, by depth and by kind. Each
layer's factor is a product of one for its depth and one for its kind, such that the sums of all cuts are those measured
(raking, as for tables of which only the margins are known). An embedding, or a head of its own, is measured by itself
in several types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np
from numpy.typing import NDArray

from quantry.jobs.auto.sensitivity import LayerSensitivity, MeasuredChoice, Sensitivity
from quantry.models.parts import part_of

ALONE = 2  # blocks at the front that are measured one by one; at the back it is one
SEGMENTS = 6  # of the blocks between
ATTENTION, OTHERS = "attention", "MLP"
MIXING = frozenset({"attention", "recurrent"})  # parts that mix tokens
STEPS = 200  # of raking; it converges in a few
LEAST = 1e-3  # of all damage: a margin of less says nothing of its factor, since arithmetic costs as much
Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Margins:
    """What was measured of one mixture, in nats a token."""

    depths: tuple[float, ...]  # of each segment of blocks
    kinds: Mapping[str, float]
    outside: Mapping[str, Mapping[str, float]]  # layer outside the blocks -> choice
    whole: float


def segments(blocks: int) -> list[range]:
    """Cuts the blocks by depth: the first two and the last alone, those between in equal parts."""
    front = [range(index, index + 1) for index in range(min(ALONE, blocks))]
    back = [range(blocks - 1, blocks)] if blocks > ALONE else []
    between = np.array_split(np.arange(len(front), blocks - len(back)), SEGMENTS)
    return [*front, *(range(int(part[0]), int(part[-1]) + 1) for part in between if len(part)), *back]


def kind_of(layer: LayerSensitivity) -> str:
    """Returns whether a layer of a block belongs to its attention."""
    return ATTENTION if part_of(layer.name, 1 << 20) in MIXING else OTHERS


def corrected(known: Sensitivity, chosen: Mapping[str, str], margins: Margins) -> Sensitivity:
    """Returns the damages multiplied so that those of the `chosen` types add up to what was measured."""
    factors = block_factors(known, chosen, margins)
    layers = [
        _scaled(layer, [factors[layer.name]] * len(layer.candidates))
        if layer.block is not None
        else _scaled(layer, outside_factors(layer.candidates, margins.outside.get(layer.name, {})))
        for layer in known.layers
    ]
    total = fsum(_damage(layer, chosen) for layer in layers)
    together = margins.whole / total if total > 0 and margins.whole > 0 else 1.0  # errors are not independent
    return replace(known, layers=tuple(_scaled(layer, [together] * len(layer.candidates)) for layer in layers))


def figures(known: Sensitivity, chosen: Mapping[str, str], margins: Margins) -> list[dict[str, str | float]]:
    """Returns predicted and measured damage of each part, as plain JSON."""
    inside = [layer for layer in known.layers if layer.block is not None]
    cuts = segments(1 + max((layer.block or 0 for layer in inside), default=-1))
    parts = [(_blocks(cut), [layer for layer in inside if layer.block in cut]) for cut in cuts]
    parts += [(kind, [layer for layer in inside if kind_of(layer) == kind]) for kind in margins.kinds]
    sums = [(name, fsum(_damage(layer, chosen) for layer in layers)) for name, layers in parts]
    measured = (*margins.depths, *margins.kinds.values())
    rows = [(name, predicted, found) for (name, predicted), found in zip(sums, measured, strict=True)]
    for layer in known.layers:
        for choice, found in margins.outside.get(layer.name, {}).items():
            candidate = layer.candidate(choice)
            rows += [(f"{layer.name} as {choice}", candidate.damage, found)] if candidate else []
    return [{"name": name, "predicted": predicted, "measured": found} for name, predicted, found in rows]


def _blocks(cut: range) -> str:
    return f"block {cut[0]}" if len(cut) == 1 else f"blocks {cut[0]} to {cut[-1]}"


def block_factors(known: Sensitivity, chosen: Mapping[str, str], margins: Margins) -> dict[str, float]:
    """Returns the factor of every layer inside the blocks."""
    inside = [layer for layer in known.layers if layer.block is not None]
    cuts = segments(max((layer.block or 0 for layer in inside), default=-1) + 1)
    depth = {block: number for number, cut in enumerate(cuts) for block in cut}
    kinds = list(margins.kinds)
    table = np.zeros((len(kinds), len(cuts)))
    for layer in inside:
        table[kinds.index(kind_of(layer)), depth[layer.block or 0]] += _damage(layer, chosen)
    factors = raked(table, np.array([margins.kinds[kind] for kind in kinds]), np.array(margins.depths))
    return {layer.name: float(factors[kinds.index(kind_of(layer)), depth[layer.block or 0]]) for layer in inside}


def raked(table: Table, rows: Table, columns: Table) -> Table:
    """Returns factors r_i c_j for a table, such that its rows and columns have sums in proportion to those given.

    Both are made to have the same total, the mean of theirs. A row or column that is next to nothing keeps the factor
    of all.
    """
    total, wanted = table.sum(), (rows.sum() + columns.sum()) / 2
    if not total > 0 or not wanted > 0:
        return np.ones_like(table)
    row, column = np.full(len(rows), wanted / total), np.ones(len(columns))
    goals = [goal * (wanted / goal.sum()) if goal.sum() > 0 else goal for goal in (rows, columns)]
    known = [
        (sums > LEAST * total) & (goal > LEAST * wanted)
        for sums, goal in zip((table.sum(1), table.sum(0)), goals, strict=True)
    ]
    for _ in range(STEPS):
        row[known[0]] = goals[0][known[0]] / (table @ column)[known[0]]
        column[known[1]] = goals[1][known[1]] / (row @ table)[known[1]]
    return np.outer(row, column)


def outside_factors(candidates: Sequence[MeasuredChoice], measured: Mapping[str, float]) -> list[float]:
    """Returns the factor of each choice: measured by predicted, between those measured along the logarithms."""
    points = sorted(
        (np.log(choice.damage), np.log(measured[choice.name] / choice.damage))
        for choice in candidates
        if choice.damage > 0 and measured.get(choice.name, 0.0) > 0
    )
    if not points:
        return [1.0] * len(candidates)
    places, logs = zip(*points, strict=True)
    return [
        float(np.exp(np.interp(np.log(choice.damage), places, logs))) if choice.damage > 0 else 1.0
        for choice in candidates
    ]


def _damage(layer: LayerSensitivity, chosen: Mapping[str, str]) -> float:
    choice = layer.candidate(chosen[layer.name])
    assert choice is not None
    return choice.damage


def _scaled(layer: LayerSensitivity, factors: Sequence[float]) -> LayerSensitivity:
    pairs = zip(layer.candidates, factors, strict=True)
    return replace(layer, candidates=tuple(replace(choice, damage=choice.damage * factor) for choice, factor in pairs))
