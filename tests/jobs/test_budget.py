"""The bit budget: what people write, and the solver against brute force and against a table of every size."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from math import inf

import numpy as np
import pytest

from quantry.errors import QuantryError
from quantry.jobs.auto import knapsack
from quantry.jobs.auto.solver import Item, ItemOption, Solution, solve
from quantry.planning.budget import Budget, DeviceBudget, parse

WITHIN = 0.005
Rows = list[tuple[int, float]]


def made(tables: Sequence[Rows]) -> list[Item]:
    return [
        Item(f"t{number}", tuple(ItemOption(f"o{place}", *row) for place, row in enumerate(table)))
        for number, table in enumerate(tables)
    ]


def limits(items: Sequence[Item]) -> tuple[int, int]:
    sizes = [[option.bytes for option in item.options] for item in items]
    return sum(map(min, sizes)), sum(map(max, sizes))


def between(items: Sequence[Item], share: float) -> int:
    low, high = limits(items)
    return int(low + share * (high - low))


def brute_force(items: Sequence[Item], budget: int) -> float:
    choices = product(*(item.options for item in items))
    return min(sum(one.damage for one in choice) for choice in choices if sum(one.bytes for one in choice) <= budget)


def every_size(items: Sequence[Item], budget: int) -> float:
    """The optimum by a table of the least damage for each number of bytes; sizes must be small."""
    best = [0.0] * (budget + 1)
    for item in items:
        options = [(one.bytes, one.damage) for one in item.options]
        best = [
            min((best[size - nbytes] + damage for nbytes, damage in options if nbytes <= size), default=inf)
            for size in range(budget + 1)
        ]
    return best[budget]


def held(items: Sequence[Item], budget: int, found: Solution) -> None:
    """What is true of every solution."""
    assert list(found.chosen) == [item.name for item in items]
    for item in items:
        assert found.chosen[item.name] in item.options
    assert found.bytes == sum(one.bytes for one in found.chosen.values()) <= budget
    assert found.damage == pytest.approx(sum(one.damage for one in found.chosen.values()), rel=1e-12)
    assert found.bound <= found.damage
    left = budget - found.bytes
    for item in items:  # nothing that helps would still fit
        now = found.chosen[item.name]
        assert not any(one.damage < now.damage and one.bytes - now.bytes <= left for one in item.options)


# ---- instances: each takes a source of chance, a number of items and one of options ----


def like_a_model(chance: random.Random, items: int, options: int) -> list[Rows]:
    """Tensors of some sizes, and damage that falls by about four with each bit."""
    tables = []
    for _ in range(items):
        weights, scale = chance.choice((1, 1, 4, 11)) * chance.randint(10**3, 10**7), 10 ** chance.uniform(-6, -2)
        bits = [2 + 0.5 * place + chance.uniform(-0.1, 0.1) for place in range(options)]
        tables.append([(int(weights * one / 8), scale * 4**-one * chance.uniform(0.8, 1.2)) for one in bits])
    return tables


def by_chance(chance: random.Random, items: int, options: int) -> list[Rows]:
    """No order at all, so that most options are beaten by another."""
    return [[(chance.randint(1, 10**6), chance.random()) for _ in range(options)] for _ in range(items)]


def by_the_byte(chance: random.Random, items: int, options: int) -> list[Rows]:
    """Every byte buys the same, so that only how the sizes add up matters."""
    sizes = [[chance.randint(1, 10**6) for _ in range(options)] for _ in range(items)]
    return [[(size, (10**6 - size) * 1e-7) for size in row] for row in sizes]


def equal_damages(chance: random.Random, items: int, options: int) -> list[Rows]:
    return [
        [(chance.randint(1, 99) * 7919, float(chance.choice((0, 1, 1, 2)))) for _ in range(options)]
        for _ in range(items)
    ]


def equal_items(chance: random.Random, items: int, options: int) -> list[Rows]:
    row = [(1009 * (place + 1), 3.0**-place) for place in range(options)]
    return [row] * items


def one_huge(chance: random.Random, items: int, options: int) -> list[Rows]:
    """Almost all bytes and damage are in one item, whose steps no budget divides."""
    huge = [(10**11 * (place + 1) + chance.randint(0, 999), 1e4 * (options - place)) for place in range(options)]
    return [huge, *like_a_model(chance, items - 1, options)]


def bending_out(chance: random.Random, items: int, options: int) -> list[Rows]:
    """Damage falls faster the more is spent: between its ends no option is on the convex curve."""
    return [
        [(place * 10**5 + chance.randint(0, 10**4), 1 - (place / options) ** 2) for place in range(options)]
        for _ in range(items)
    ]


KINDS: list[Callable[[random.Random, int, int], list[Rows]]] = [
    like_a_model, by_chance, by_the_byte, equal_damages, equal_items, one_huge, bending_out,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_against_brute_force(kind: Callable[..., list[Rows]], seed: int) -> None:
    chance = random.Random(seed)
    count, options = chance.choice(((1, 15), (2, 15), (3, 9), (4, 6), (5, 4), (6, 4), (9, 2)))
    items = made(kind(chance, count, options))
    for share in (0.0, chance.random(), chance.random(), 1.0):
        budget = between(items, share)
        found, optimum = solve(items, budget), brute_force(items, budget)
        held(items, budget, found)
        assert found.damage <= optimum * (1 + knapsack.TOLERANCE) + 1e-15
        assert found.bound <= optimum * (1 + 1e-12) + 1e-15


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [knapsack.STATES, 40])
def test_against_a_table_of_every_size(seed: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More items than brute force can do, also with so few states that they must be merged."""
    monkeypatch.setattr(knapsack, "STATES", most)
    monkeypatch.setattr(knapsack, "FEWEST", min(most, knapsack.FEWEST))
    chance = random.Random(seed)
    tables = [[(chance.randint(1, 60), chance.random() ** 3) for _ in range(6)] for _ in range(25)]
    if seed % 2:  # nothing but how the sizes add up
        tables = [[(size, (60 - size) / 60) for size, _ in table] for table in tables]
    items = made(tables)
    budget = between(items, chance.uniform(0.05, 0.7))
    found, optimum = solve(items, budget), every_size(items, budget)
    held(items, budget, found)
    assert optimum * (1 - 1e-12) <= found.damage <= optimum * (1 + WITHIN)
    assert found.bound <= optimum * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_size_is_met_and_the_bound_is_near_with_many_items(kind: Callable[..., list[Rows]]) -> None:
    items = made(kind(random.Random(7), 300, 12))
    for share in (0.02, 0.3, 0.7):
        budget = between(items, share)
        found = solve(items, budget)
        held(items, budget, found)
        assert found.damage <= found.bound * (1 + WITHIN) + 1e-9
        if kind is like_a_model:  # of the others some have nothing to spend on
            assert found.bytes >= budget * (1 - WITHIN)


@pytest.mark.parametrize("kind", [like_a_model, one_huge, bending_out])
def test_two_thousand_items_are_no_trouble(kind: Callable[..., list[Rows]]) -> None:
    items = made(kind(random.Random(1), 2000, 15))
    for share in (0.1, 0.61):
        found = solve(items, between(items, share))
        assert found.damage <= found.bound * (1 + WITHIN)


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_of_the_search_has_the_damage_it_was_taken_for(seed: int) -> None:
    """Before what is left is spent, which would hide a wrong option."""
    chance = random.Random(seed)
    tables = [sorted(table) for table in bending_out(chance, 12, 6)]
    smallest, largest = (sum(table[place][0] for table in tables) for place in (0, -1))
    problem = knapsack.Problem(tables, int(smallest + chance.random() * (largest - smallest)))
    search = knapsack.Search(problem, inf, inf)
    found = search.run()
    assert found is not None
    assert problem.damage(found) == pytest.approx(search.best, rel=1e-12)
    assert problem.left(found) >= 0


def test_merged_states_lose_no_more_than_a_range() -> None:
    """Of every state that is dropped there is one left that is not larger and has hardly more damage."""
    chance = random.Random(2)
    damage = np.array(sorted((chance.random() for _ in range(5000)), reverse=True))  # by size, so damage falls
    kept = knapsack.thinned(np.arange(5000), damage, 100)
    assert len(kept) <= 100
    for index in range(5000):
        smaller = kept[kept <= index]
        assert damage[smaller].min() - damage[index] <= (damage[0] - damage[-1]) / 100 + 1e-12


def test_the_last_byte_is_spent() -> None:
    assert knapsack.Problem([[(10, 1.0), (20, 0.5)], [(5, 1.0), (15, 0.2)]], 25).filled([0, 0]) == [0, 1]


def test_work_is_limited_and_the_bound_stays_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that has to stop hands back what it has."""
    items = made(bending_out(random.Random(5), 5, 6))
    budget = between(items, 0.43)
    monkeypatch.setattr(knapsack, "WORK", 1)
    found, optimum = solve(items, budget), brute_force(items, budget)
    held(items, budget, found)
    assert found.bound <= optimum < found.damage * (1 + 1e-12)
    assert found.bound < optimum * (1 - knapsack.TOLERANCE)  # it did stop


def test_same_items_and_budget_give_the_same_choice() -> None:
    """In another process too, whose hashes differ."""
    code = (
        "import random, test_budget as t; items = t.made(t.by_chance(random.Random(3), 60, 9));"
        "print([o.name for o in t.solve(items, t.between(items, 0.2)).chosen.values()])"
    )
    folder = __file__.rpartition("/")[0]
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1
    assert "o" in runs.pop()


def test_sizes_of_a_trillion_bytes_are_exact() -> None:
    items = made([[(10**12 + place, 1.0 - 0.1 * place) for place in range(3)] for _ in range(9)])
    found = solve(items, 9 * 10**12 + 11)
    assert found.bytes == 9 * 10**12 + 11
    assert found.damage == pytest.approx(9 - 1.1)


def test_limits_are_told() -> None:
    items = made([[(100, 1.0), (300, 0.5)], [(50, 2.0), (70, 0.1)]])
    for budget, word in ((149, "small"), (371, "large")):
        with pytest.raises(
            QuantryError, match=f"{budget} bytes is too {word}.* 150 bytes and the largest 370"
        ) as error:
            solve(items, budget)
        assert "\n" not in str(error.value)
        assert error.value.exit_code == 2
    assert solve(items, 150).bytes == 150
    assert solve(items, 370).bytes == 370
    assert solve(items, 10**15, at_most=True).bytes == 370


@pytest.mark.parametrize("row", [(10, float("nan")), (10, inf), (10, -1e-9), (-1, 0.5)])
def test_damage_that_is_no_figure_is_refused(row: tuple[int, float]) -> None:
    with pytest.raises(QuantryError, match="t1 as o0 has a predicted damage of"):
        solve(made([[(1, 0.1)], [row]]), 11)


@pytest.mark.parametrize("items", [[], made([[]]), [*made([[(1, 0.1)]]), *made([[(1, 0.1)]])]])
def test_items_that_make_no_sense_are_a_bug_of_the_caller(items: list[Item]) -> None:
    with pytest.raises(ValueError, match="no item|no option|same name"):
        solve(items, 10)


# ---- what people write ----


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        ("4.5bpw", 562_500_000, "4.5 bits a weight"),
        (" 4.5 BPW ", 562_500_000, "4.5 bits a weight"),
        ("6GiB", 6 << 30, "6 GiB"),
        ("6gib", 6 << 30, "6 GiB"),
        ("5.5 GB", 5_500_000_000, "5.5 GB"),
        ("700MB", 700_000_000, "700 MB"),
        ("1.5TiB", 3 << 39, "1.5 TiB"),
        ("105453920B", 105_453_920, "105453920 B"),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int, words: str) -> None:
    assert parse(text, parameters=10**9) == Budget(size, words, files="bits" not in words)


def test_bits_are_rounded_down_without_floats() -> None:
    assert parse("4.3bpw", parameters=10**18 // 8 + 1).bytes == (43 * (10**18 // 8 + 1)) // 80  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "device", "context"),
    [
        ("fits RTX 3060 at 8k", "RTX 3060", 8192),
        ("Fits  2x RTX 3090 AT 128K tokens", "2x RTX 3090", 131072),
        ("fits M2 16GB at 4000", "M2 16GB", 4000),
        ("fits H100 at 1m", "H100", 1 << 20),
    ],
)
def test_devices_as_people_write_them(text: str, device: str, context: int) -> None:
    assert parse(text, parameters=1) == DeviceBudget(device, context)


@pytest.mark.parametrize(
    "text",
    [
        "", "much", "6", "6G", "6 parsecs", "-4bpw", "0bpw", "0.0GiB", "4,5bpw", "4.5.1bpw", "nanbpw", "1e9B", "4.5B",
        "fits", "fits RTX 3060", "fits at 8k", "fits RTX 3060 at", "fits RTX 3060 at 0", "fits RTX 3060 at 9999999m",
        "999999999TiB", "9" * 5000, "6GiB\n6GiB", "٤bpw",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_one_line_with_a_fix(text: str) -> None:
    with pytest.raises(QuantryError, match="write ") as error:
        parse(text, parameters=10**9)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250
    assert error.value.exit_code == 2


def test_reading_a_budget_needs_no_numpy() -> None:
    code = "import sys, quantry.planning.budget; print('numpy' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
