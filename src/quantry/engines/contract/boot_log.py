"""What an engine's boot log says, and how engine files read it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine says of itself as it starts; None where it does not."""

    version: str | None = None
    weights_bytes: int | None = None
    kv_cache_tokens: int | None = None
    kv_cache_bytes: int | None = None
    max_concurrency: float | None = None  # sequences of the full context that the cache holds
    quantization: str | None = None
    kernels: tuple[str, ...] = ()
    context: int | None = None
    warnings: tuple[str, ...] = ()


def size(number: str, unit: str) -> int:
    """Returns the bytes of a number with its unit, as logs write them."""
    return round(float(number.replace(",", "")) * UNITS[unit.upper()])


def last(pattern: str, lines: Iterable[str]) -> re.Match[str] | None:
    """Returns the last match of a pattern in a log: later lines replace earlier ones."""
    matches = [match for line in lines if (match := re.search(pattern, line))]
    return matches[-1] if matches else None


def until(pattern: str, lines: Iterable[str]) -> list[str]:
    """Returns a log up to the line that says that it serves: later lines are about requests."""
    kept = list(lines)
    end = next((place for place, line in enumerate(kept) if re.search(pattern, line)), len(kept))
    return kept[: end + 1]
