"""Statistics of several inputs as one: plain arithmetic on `Stats`, without a model."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantry.types import Stats

BINS = 2048  # of a finished histogram


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The largest magnitudes in the KV cache, float32 by key-value head: keys after rotation, and values."""

    keys: Tensor
    values: Tensor


def merge(parts: Iterable[Stats]) -> Stats:
    """Returns the statistics of several inputs as if they were one."""
    parts = list(parts)
    tokens = sum(part.tokens for part in parts)
    weights = [part.tokens / tokens for part in parts]
    absmax = torch.stack([part.absmax for part in parts]).amax(0)
    gram = torch.zeros_like(parts[0].gram)
    for part, weight in zip(parts, weights, strict=True):
        gram.add_(part.gram, alpha=weight)
    means = torch.stack([part.mean_abs * weight for part, weight in zip(parts, weights, strict=True)])
    return Stats(tokens, gram, absmax, means.sum(0), gram.diagonal().clone(), _merged_histogram(parts, absmax))


def _merged_histogram(parts: list[Stats], absmax: Tensor) -> Tensor | None:
    """Returns the summed histogram; None unless every part has one."""
    counts = [(part.histogram, float(part.absmax.max())) for part in parts]
    top = float(absmax.max())
    merged = [rebin(count, own, top, BINS) for count, own in counts if count is not None]
    return torch.stack(merged).sum(0) if len(merged) == len(parts) else None


def rebin(counts: Tensor, old: float, new: float, bins: int) -> Tensor:
    """Returns counts over [0, new] from finer ones over [0, old]; the middle of each bin decides its place."""
    middles = (torch.arange(len(counts), device=counts.device, dtype=torch.float64) + 0.5) * (old / len(counts))
    places = (middles * (bins / new)).long().clamp_(max=bins - 1) if new else torch.zeros_like(counts)
    return torch.zeros(bins, dtype=torch.int64, device=counts.device).index_add_(0, places, counts)
