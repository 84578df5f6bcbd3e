"""What a KV cache loses against the 16-bit one, by position: figures of all positions, and of bins of them.

A bin is named by the tokens in the cache: from 512 to before 1024 are the positions whose next token is predicted from
as many before it. Bins double, as the distance over which attention reads the cache does.

A long text has few windows, and tokens far apart in one window depend on each other little. So where there are fewer
than PIECES windows, the bootstrap draws pieces of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from quantry.proof.divergence import PIECES, Positions, figures

FIRST, SHARE = 512, 16  # tokens of the first bin: at most so many, and at most this share of the context
FIGURES = ("kl", "kl_median", "kl_p99", "top1", "perplexity", "perplexity_ratio")
BINNED = ("kl", "top1", "perplexity", "perplexity_ratio")


def edges(context: int) -> list[int]:
    """Returns where bins begin, powers of two from the first on, and where the last one ends."""
    first = min(FIRST, max(2, 1 << max(0, (context // SHARE).bit_length() - 1)))
    found = [0]
    while (edge := first << (len(found) - 1)) < context:
        found.append(edge)
    return [*found, context]


def cache_loss(windows: Sequence[Positions], start: int, context: int) -> dict[str, Any]:
    """Returns the figures of one type of cache: of all positions, and by bin.

    Every window has `context` tokens, of which those from `start` on are scored.
    """
    bins = []
    for begin, end in pairwise(edges(context)):
        parts = [window.part(max(begin, start) - start, end - start) for window in windows if end > start]
        if parts:
            bins.append({"begin": begin, "end": end, **_figures(parts, BINNED)})
    return {**_figures(windows, FIGURES), "bins": bins}


def base_perplexity(windows: Sequence[Positions]) -> float:
    """Returns the perplexity with the 16-bit cache."""
    return figures(_units(windows)).reference_perplexity.value


def _figures(windows: Sequence[Positions], names: Sequence[str]) -> dict[str, Any]:
    """Returns figures and their intervals; rounding may take the KL of equal caches below zero."""
    found = figures(_units(windows))
    values = {name: max(0.0, value) for name, value in found.values(names).items()}
    spans = {name: (max(0.0, low), max(0.0, high)) for name, (low, high) in found.intervals(names).items()}
    return {"positions": found.positions, **values, "intervals": spans}


def _units(windows: Sequence[Positions]) -> list[Positions]:
    """Returns what the bootstrap draws: windows, or pieces where there are few."""
    return [piece for window in windows for piece in window.pieces(-(-PIECES // len(windows)))]
