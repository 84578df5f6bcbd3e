"""Predicted damages corrected by what was measured: plain restatements and what must hold."""

import random
from dataclasses import replace
from math import fsum, log

import numpy as np
import pytest

from quantry.jobs.auto.parts import Margins, corrected, figures, outside_factors, raked, segments
from quantry.jobs.auto.sensitivity import LayerSensitivity, MeasuredChoice, Sensitivity

CHOICES = (("Q2_K", 1.0), ("Q4_K", 0.1), ("Q6_K", 0.01), ("BF16", 0.0))


def layer(name: str, block: int | None, size: float) -> LayerSensitivity:
    choices = tuple(MeasuredChoice(kind, 1, size * damage, 0.0, {"type": kind}) for kind, damage in CHOICES)
    return LayerSensitivity(name, name, block, (name,), 1, None, choices)


def sensitivity(blocks: int) -> Sensitivity:
    draw = random.Random(0)
    inside = [
        layer(f"blk.{block}.{part}.weight", block, draw.uniform(0.5, 2))
        for block in range(blocks)
        for part in ("attn_q", "attn_v", "ffn_up", "ffn_down")
    ]
    ends = [layer("token_embd.weight", None, 3.0)]
    return Sensitivity("", "gguf", "gptq", None, 1, {}, (*inside, *ends), {})


def plainly(table: list[list[float]], rows: list[float], columns: list[float]) -> list[list[float]]:
    """Iterative proportional fitting, cell by cell."""
    wanted = (sum(rows) + sum(columns)) / 2
    cells = [list(row) for row in table]
    for _ in range(300):
        for i, goal in enumerate(rows):
            have = sum(cells[i])
            cells[i] = [cell * goal * wanted / sum(rows) / have for cell in cells[i]]
        for j, goal in enumerate(columns):
            have = sum(row[j] for row in cells)
            for row in cells:
                row[j] *= goal * wanted / sum(columns) / have
    return [[cell / old for cell, old in zip(*pair, strict=True)] for pair in zip(cells, table, strict=True)]


def test_raking_against_a_plain_restatement() -> None:
    draw = random.Random(1)
    for rows, columns in ((2, 5), (1, 3), (2, 1), (3, 9)):
        table = [[draw.uniform(0.1, 3) for _ in range(columns)] for _ in range(rows)]
        sides = [[draw.uniform(0.5, 5) for _ in range(count)] for count in (rows, columns)]
        found = raked(np.array(table), np.array(sides[0]), np.array(sides[1]))
        np.testing.assert_allclose(found, plainly(table, *sides), rtol=1e-6)


def test_raking_finds_factors_that_are_products() -> None:
    table = np.array([[1.0, 2.0, 3.0], [4.0, 1.0, 0.5]])
    factors = np.outer([1.5, 0.8], [10.0, 1.0, 2.0])
    real = table * factors
    np.testing.assert_allclose(raked(table, real.sum(1), real.sum(0)), factors, rtol=1e-9)


def test_a_margin_that_is_nothing_keeps_the_factor_of_all() -> None:
    """A segment in 16 bit has no damage to learn from; nothing becomes infinite."""
    found = raked(np.array([[1.0, 0.0], [1.0, 1e-9]]), np.array([3.0, 3.0]), np.array([6.0, 1e-6]))
    assert np.isfinite(found).all()
    assert found[0, 0] == pytest.approx(3)
    assert found[0, 1] == pytest.approx(3, rel=0.1)
    for table, side in ((np.zeros((2, 2)), np.ones(2)), (np.ones((2, 2)), np.zeros(2))):
        np.testing.assert_array_equal(raked(table, side, side), 1.0)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 6, 9, 30, 80])
def test_every_block_is_in_one_segment(blocks: int) -> None:
    cuts = segments(blocks)
    assert [block for cut in cuts for block in cut] == list(range(blocks))
    assert len(cuts) <= 9
    assert len(cuts[0]) == len(cuts[-1]) == 1


def test_an_embedding_between_measured_types() -> None:
    candidates = layer("token_embd.weight", None, 1.0).candidates
    found = outside_factors(candidates, {"Q2_K": 3.0, "Q6_K": 0.01})
    assert found == pytest.approx([3.0, 3**0.5, 1.0, 1.0])
    assert log(found[1]) == pytest.approx((log(found[0]) + log(found[2])) / 2)
    assert outside_factors(candidates, {"Q4_K": 0.2}) == pytest.approx([2.0, 2.0, 2.0, 1.0])
    assert outside_factors(candidates, {}) == outside_factors(candidates, {"BF16": 0.0}) == [1.0] * 4


def test_corrected_damages_add_up_to_what_was_measured() -> None:
    known = sensitivity(12)
    truth = {
        one.name: (
            3.0 if one.block is None else (8.0 if one.block == 0 else 1.5) * (2.0 if "attn" in one.name else 1.0)
        )
        for one in known.layers
    }
    chosen = {one.name: random.Random(one.name).choice(("Q2_K", "Q4_K", "Q6_K")) for one in known.layers}
    real = {one.name: truth[one.name] * _damage(one, chosen) for one in known.layers}
    inside = [one for one in known.layers if one.block is not None]
    depths = tuple(fsum(real[one.name] for one in inside if one.block in cut) for cut in segments(12))
    kinds = {
        kind: fsum(real[one.name] for one in inside if ("attn" in one.name) == (kind == "attention"))
        for kind in ("attention", "MLP")
    }
    ends = {"token_embd.weight": {chosen["token_embd.weight"]: real["token_embd.weight"]}}
    whole = 1.2 * fsum(real.values())  # together they cost more than alone
    margins = Margins(depths, kinds, ends, whole)
    found = corrected(known, chosen, margins)
    assert fsum(_damage(one, chosen) for one in found.layers) == pytest.approx(whole)
    for one, other in zip(known.layers, found.layers, strict=True):
        for before, after in zip(one.candidates, other.candidates, strict=True):
            assert after.damage == pytest.approx(1.2 * truth[one.name] * before.damage, rel=1e-6)
            assert replace(after, damage=before.damage) == before
    rows = {row["name"]: row for row in figures(known, chosen, margins)}
    assert rows["block 0"]["measured"] == pytest.approx(depths[0])
    assert rows["attention"]["measured"] == kinds["attention"]
    assert float(rows["attention"]["predicted"]) == pytest.approx(kinds["attention"] / 3, rel=0.5)
    assert rows[f"token_embd.weight as {chosen['token_embd.weight']}"]["measured"] == real["token_embd.weight"]


def _damage(one: LayerSensitivity, chosen: dict[str, str]) -> float:
    choice = one.candidate(chosen[one.name])
    assert choice is not None
    return choice.damage
