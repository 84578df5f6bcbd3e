"""The choice of grids that spends a budget best: the least predicted damage within the bytes (knapsack.py searches)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite

from quantry.errors import RecipeError


@dataclass(frozen=True, slots=True)
class ItemOption:
    """One grid for an item."""

    name: str
    bytes: int
    damage: float


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor, or tensors that engines fuse, which get one of the options."""

    name: str
    options: tuple[ItemOption, ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """An option for every item; no choice within the budget has less damage than `bound`."""

    chosen: Mapping[str, ItemOption]
    bytes: int
    damage: float
    bound: float


def solve(items: Sequence[Item], budget: int, *, at_most: bool = False) -> Solution:
    """Chooses the options with the smallest damage within `budget` bytes.

    Raises RecipeError for a budget that is too small, or larger than all options can use unless `at_most`.
    """
    _check(items)
    _check_budget(items, budget, at_most)
    from quantry.jobs.auto import knapsack  # with numpy, which reading a budget does not need

    tables = [[(option.bytes, option.damage) for option in item.options] for item in items]
    places, bound = knapsack.least(tables, budget)
    chosen = {item.name: item.options[place] for item, place in zip(items, places, strict=True)}
    damage = fsum(option.damage for option in chosen.values())
    return Solution(chosen, sum(option.bytes for option in chosen.values()), damage, min(bound, damage))


def _check(items: Sequence[Item]) -> None:
    if not items:
        raise ValueError("there is no item to choose an option for")
    if len({item.name for item in items}) < len(items):
        raise ValueError("two items have the same name")
    for item in items:
        if not item.options:
            raise ValueError(f"{item.name} has no option")
        for option in item.options:
            if not isfinite(option.damage) or option.damage < 0 or option.bytes < 0:
                raise RecipeError(
                    f"{item.name} as {option.name} has a predicted damage of {option.damage} and {option.bytes} bytes, "
                    "which must be finite and not negative",
                    fix="calibrate on other text, or leave that type out",
                )


def limits(items: Sequence[Item]) -> tuple[int, int]:
    """Returns the fewest and the most bytes that the options allow."""
    sizes = [[option.bytes for option in item.options] for item in items]
    return sum(map(min, sizes)), sum(map(max, sizes))


def _check_budget(items: Sequence[Item], budget: int, at_most: bool) -> None:
    smallest, largest = limits(items)
    words = f"the smallest possible is {smallest} bytes and the largest {largest}"
    if budget < smallest:
        raise RecipeError(f"a budget of {budget} bytes is too small: {words}", fix=f"allow {smallest} bytes or more")
    if budget > largest and not at_most:
        raise RecipeError(f"a budget of {budget} bytes is too large: {words}", fix=f"ask for {largest} bytes or less")
