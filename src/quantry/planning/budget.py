"""What a size budget means: "4.5bpw", "6GiB", "fits RTX 3060 at 8k" for weights, "8GiB" for memory."""

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
SHORT = {"": "B"} | {f"{letter}{i}": f"{letter.upper()}iB" for letter in "kmgt" for i in ("", "i")}  # of memory
TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}
SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)")
FITS = re.compile(r"fits (.+) at ([0-9]{1,9})([km]?)(?: tokens)?", re.IGNORECASE)
EXAMPLES = 'write 4.5bpw, 6GiB, 5.5GB, 105453920B or "fits RTX 3060 at 8k"'
MEMORY_EXAMPLES = "write 8GiB, 8GB (8 x 10^9 bytes), 8G (8 GiB) or a number of bytes"


@dataclass(frozen=True, slots=True)
class Budget:
    """The bytes that weights may take, and how the user wrote it; `files` counts whole files, else their tensors."""

    bytes: int
    words: str
    files: bool = False


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """A budget that a device sets: what it has left for weights while it serves one sequence of `context` tokens."""

    device: str
    context: int


def parse(text: str, *, parameters: int) -> Budget | DeviceBudget:
    """Reads a budget for weights. GB is 10^9 bytes of files, GiB 2^30; bpw is bits for each of the `parameters`.

    Raises RecipeError if the text is no budget.
    """
    plain = " ".join(text.lower().split())
    if plain.startswith("fit"):
        return _device_budget(text)
    match = SIZE.fullmatch(plain)
    if match is None:
        raise RecipeError(f"a budget of {text[:60]!r} is not understood", fix=EXAMPLES)
    number, unit = Fraction(match[1]), match[2]
    if unit == "bpw":
        return Budget(_size(number * parameters / 8, text), f"{match[1]} bits a weight")
    if unit not in SPELLED:
        raise RecipeError(
            f"a budget of {text[:60]!r} has {f'the unknown unit {unit}' if unit else 'no unit'}", fix=EXAMPLES
        )
    if unit == "b" and number.denominator != 1:
        raise RecipeError(f"a budget of {text[:60]!r} is no whole number of bytes", fix=f"write {match[1]}bpw for bits")
    return Budget(_size(number * UNITS[SPELLED[unit]], text), f"{match[1]} {SPELLED[unit]}", files=True)


def memory_bytes(text: str | int) -> int:
    """Reads a budget of memory: a size such as 8GiB or 8GB; 8G is 8 GiB, and a bare number counts bytes.

    Raises RecipeError if the text is no size above 0.
    """
    match = SIZE.fullmatch(" ".join(str(text).lower().split()))
    unit = match and (SPELLED.get(match[2]) or SHORT.get(match[2]))
    if not match or not unit or not Fraction(match[1]):
        raise RecipeError(f"a budget of {str(text)[:40]!r} is no size of memory", fix=MEMORY_EXAMPLES)
    return int(Fraction(match[1]) * UNITS[unit])


def _size(size: Fraction, text: str) -> int:
    if not 1 <= size <= LARGEST:
        raise RecipeError(f"a budget of {text[:60]!r} is not 1 byte to {LARGEST} bytes", fix=EXAMPLES)
    return int(size)  # rounded down: a budget is never exceeded


def _device_budget(text: str) -> DeviceBudget:
    words = " ".join(text.split())
    match = FITS.fullmatch(words)
    if match is None:
        raise RecipeError(f"a budget of {text[:60]!r} names no device and context", fix='write "fits RTX 3060 at 8k"')
    tokens = int(match[2]) * TOKENS[match[3].lower()]
    if not 1 <= tokens <= 1 << 30:
        raise RecipeError(f"a context of {tokens} tokens is not 1 to {1 << 30}", fix='write "fits RTX 3060 at 8k"')
    return DeviceBudget(match[1], tokens)
