"""What a size budget means: "4.5bpw", "6GiB", "fits RTX 3060 at 8k" as bytes."""

import re
from dataclasses import dataclass
from fractions import Fraction

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
