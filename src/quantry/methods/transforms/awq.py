"""AWQ: channels whose inputs are large are given finer steps, by scaling their weights up before they are rounded.

The scales of a pair are s = x^a, or x^a / w^(1-a) ("duo scaling"), where x is the mean magnitude of a channel and w the
mean of its weights relative to their group's largest, normalized so that the largest and the smallest are inverse to
each other. `a` is searched in 20 steps for both forms; a = 0 of the first is no scaling, so no pair is worse off.
The published method runs the block for each `a`; here the Gram matrix tells the same error, and clipping is part of the
search: scales that are best for unclipped weights are not for clipped ones.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization", and its implementations (2023 to 2025).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantry.methods.transforms._scaling import Reader, Transformed, columns, fold, losses, transform
from quantry.models.smoothing import Pair
from quantry.numerics.blocks import absmax, cut, spread
from quantry.types import Scheme, Stats

STEPS = 20
COARSE = 4
FRACTIONS = (1.0, 0.85, 0.7, 0.55)  # of their range that blocks may be clipped to, as the fit after it will
SMALLEST = 1e-4  # of a scale, and of what it is divided by


def apply(
    block: Mapping[str, Tensor], pairs: Sequence[Pair], stats: Mapping[str, Stats], schemes: Mapping[str, Scheme]
) -> Transformed:
    """The block with its pairs scaled; `stats` and `schemes` are by module, linears without a scheme stay 16-bit."""
    return transform(block, pairs, stats, schemes, best_scale)


def best_scale(found: Sequence[Reader], pair: Pair) -> Tensor:
    """The scale of a pair under which rounding costs least: every fourth step is tried, then those around the best."""
    trials = candidates(found, pair)
    costs = torch.full((len(trials),), float("inf"), device=trials.device)
    tried = torch.arange(0, len(trials), COARSE, device=trials.device)
    costs[tried] = losses(found, columns(trials[tried], pair), FRACTIONS)
    best = int(costs.argmin())
    first = best // STEPS * STEPS  # of the same form
    around = [
        step for step in range(best - COARSE + 1, best + COARSE) if first <= step < first + STEPS and step != best
    ]
    costs[around] = losses(found, columns(trials[around], pair), FRACTIONS)
    return trials[costs.argmin()]


def candidates(found: Sequence[Reader], pair: Pair) -> Tensor:
    """The scales that are tried, (2 * STEPS, channels)."""
    inputs = fold(_mean_inputs(found), pair).mean(dim=0)
    weights = fold(_mean_weights(found), pair).mean(dim=0)
    alpha = torch.arange(STEPS, device=inputs.device)[:, None] / STEPS
    plain = inputs**alpha
    duo = plain / (weights ** (1 - alpha) + SMALLEST)
    both = torch.cat([plain, duo]).clamp(min=SMALLEST)
    return both / (both.amax(dim=1, keepdim=True) * both.amin(dim=1, keepdim=True)).sqrt()


def _mean_inputs(found: Sequence[Reader]) -> Tensor:
    """The mean magnitude of each channel over all tokens that some reader saw."""
    seen = {id(reader.stats): reader.stats for reader in found}.values()
    return torch.stack([one.mean_abs * one.tokens for one in seen]).sum(dim=0) / sum(one.tokens for one in seen)


def _mean_weights(found: Sequence[Reader]) -> Tensor:
    """The mean magnitude of each column, relative to the largest weight of its group."""
    total = torch.zeros(found[0].weight.shape[1], device=found[0].weight.device)
    for reader in found:
        grid = reader.scheme.weight
        top = absmax(reader.weight, grid).clamp(min=torch.finfo(torch.float32).tiny)
        relative = cut(reader.weight, grid).abs() / spread(top)
        total += relative.sum(dim=(0, 1)).flatten()[: len(total)]
    return total / sum(len(reader.weight) for reader in found)
