"""What a size budget means, and the choice of grids that spends it best.

`parse` reads what a person asks for, `solve` gives every item one of its options so that the sum of the predicted
damages is least within the bytes (knapsack.py is the search). What fits a device is worked out in planning/room.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import fsum, isfinite

from quantry.errors import RecipeError

LARGEST = 1 << 60  # bytes
UNITS = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
SPELLED = {unit.lower(): unit for unit in UNITS}
TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}
SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)")
FITS = re.compile(r"fits (.+) at ([0-9]{1,9})([km]?)(?: tokens)?", re.IGNORECASE)
EXAMPLES = 'write 4.5bpw, 6GiB, 5.5GB, 105453920B or "fits RTX 3060 at 8k"'


# ---- what a budget means ----


@dataclass(frozen=True, slots=True)
class Budget:
    """The bytes that may be taken by the `files` with weights, or by the tensors in them, and what was asked for."""

    bytes: int
    words: str
    files: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """A budget that a device sets: what it has left beside all that is not weights, for one sequence of `context`."""

    device: str
    context: int


def parse(text: str, *, parameters: int) -> Budget | Fit:
    """A budget as people write it. GB is 10^9 bytes and GiB 2^30 of files; bpw, bits for each of the `parameters`."""
    plain = " ".join(text.lower().split())
    if plain.startswith("fit"):
        return _fit(text)
    found = SIZE.fullmatch(plain)
    if found is None:
        raise RecipeError(f"a budget of {text[:60]!r} is not understood", fix=EXAMPLES)
    number, unit = Fraction(found[1]), found[2]
    if unit == "bpw":
        return Budget(_size(number * parameters / 8, text), f"{found[1]} bits a weight")
    if unit not in SPELLED:
        raise RecipeError(
            f"a budget of {text[:60]!r} has {f'the unknown unit {unit}' if unit else 'no unit'}", fix=EXAMPLES
        )
    if unit == "b" and number.denominator != 1:
        raise RecipeError(f"a budget of {text[:60]!r} is no whole number of bytes", fix=f"write {found[1]}bpw for bits")
    return Budget(_size(number * UNITS[SPELLED[unit]], text), f"{found[1]} {SPELLED[unit]}", files=True)


def _size(size: Fraction, text: str) -> int:
    if not 1 <= size <= LARGEST:
        raise RecipeError(f"a budget of {text[:60]!r} is not 1 byte to {LARGEST} bytes", fix=EXAMPLES)
    return int(size)  # rounded down: a budget is never exceeded


def _fit(text: str) -> Fit:
    words = " ".join(text.split())
    found = FITS.fullmatch(words)
    if found is None:
        raise RecipeError(f"a budget of {text[:60]!r} names no device and context", fix='write "fits RTX 3060 at 8k"')
    tokens = int(found[2]) * TOKENS[found[3].lower()]
    if not 1 <= tokens <= 1 << 30:
        raise RecipeError(f"a context of {tokens} tokens is not 1 to {1 << 30}", fix='write "fits RTX 3060 at 8k"')
    return Fit(words[found.start(1) : found.end(1)], tokens)


# ---- the solver ----


@dataclass(frozen=True, slots=True)
class Option:
    """One grid for a tensor, or for the tensors that engines fuse."""

    name: str
    bytes: int
    damage: float


@dataclass(frozen=True, slots=True)
class Item:
    """What gets one of its options."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """An option for every item. No choice within the budget has less damage than `bound`."""

    chosen: Mapping[str, Option]
    bytes: int
    damage: float
    bound: float


def solve(items: Sequence[Item], budget: int, *, at_most: bool = False) -> Solution:
    """The options with the least damage within `budget` bytes; `at_most` allows one that is more than all can use."""
    _check(items)
    _check_budget(items, budget, at_most)
    from quantry import knapsack  # with numpy, which reading a budget does not need

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
    """The fewest and the most bytes that the options allow."""
    sizes = [[option.bytes for option in item.options] for item in items]
    return sum(map(min, sizes)), sum(map(max, sizes))


def _check_budget(items: Sequence[Item], budget: int, at_most: bool) -> None:
    smallest, largest = limits(items)
    words = f"the smallest possible is {smallest} bytes and the largest {largest}"
    if budget < smallest:
        raise RecipeError(f"a budget of {budget} bytes is too small: {words}", fix=f"allow {smallest} bytes or more")
    if budget > largest and not at_most:
        raise RecipeError(f"a budget of {budget} bytes is too large: {words}", fix=f"ask for {largest} bytes or less")
