"""AWQ: gives finer steps to channels with large inputs, by scaling their weights up before rounding.

The scales of a pair are s = x^a, or x^a / w^(1-a) ("duo scaling"), where x is the mean magnitude of a channel and w the
mean of its weights relative to the largest of their group, normalized so that the largest and the smallest are inverse
to each other. `a` is searched in 20 steps for both forms; a = 0 of the first form is no scaling, so no pair gets worse.
The published method runs the block for each `a`; here the Gram matrix gives the same error. Clipping is part of the
search: the best scales for unclipped weights are not the best for clipped ones.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization", and its implementations (2023 to 2025).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantry.methods.contract import Transformed
from quantry.methods.transforms._scaling import Consumer, columns, fold, losses, transform
from quantry.models.smoothing import Pair
from quantry.numerics.blocks import absmax, cut, spread
from quantry.types import Scheme, Stats

NEEDS_QUANTIZED_INPUTS = False
STEPS = 20
COARSE = 4
FRACTIONS = (1.0, 0.85, 0.7, 0.55)  # of its range that the fit after the transform may clip a block to
SMALLEST = 1e-4  # of a scale, and of its divisor


def apply(
    block: Mapping[str, Tensor], pairs: Sequence[Pair], stats: Mapping[str, Stats], schemes: Mapping[str, Scheme]
) -> Transformed:
    """Scales the pairs of a block; `stats` and `schemes` are by module, linears without a scheme stay 16-bit."""
    return transform(block, pairs, stats, schemes, best_scale)


def best_scale(consumers: Sequence[Consumer], pair: Pair) -> Tensor:
    """Returns the scale of a pair that makes rounding cheapest: tries every fourth step, then those around the best."""
    trials = candidates(consumers, pair)
    costs = torch.full((len(trials),), float("inf"), device=trials.device)
    tried = torch.arange(0, len(trials), COARSE, device=trials.device)
    costs[tried] = losses(consumers, columns(trials[tried], pair), FRACTIONS)
    best = int(costs.argmin())
    first = best // STEPS * STEPS  # of the same form
    around = [
        step for step in range(best - COARSE + 1, best + COARSE) if first <= step < first + STEPS and step != best
    ]
    costs[around] = losses(consumers, columns(trials[around], pair), FRACTIONS)
    return trials[costs.argmin()]


def candidates(consumers: Sequence[Consumer], pair: Pair) -> Tensor:
    """Returns the scales to try, (2 * STEPS, channels)."""
    inputs = fold(_mean_inputs(consumers), pair).mean(dim=0)
    weights = fold(_mean_weights(consumers), pair).mean(dim=0)
    alpha = torch.arange(STEPS, device=inputs.device)[:, None] / STEPS
    plain = inputs**alpha
    duo = plain / (weights ** (1 - alpha) + SMALLEST)
    both = torch.cat([plain, duo]).clamp(min=SMALLEST)
    return both / (both.amax(dim=1, keepdim=True) * both.amin(dim=1, keepdim=True)).sqrt()


def _mean_inputs(consumers: Sequence[Consumer]) -> Tensor:
    """Returns the mean magnitude of each channel over all tokens that some consumer saw."""
    seen = {id(consumer.stats): consumer.stats for consumer in consumers}.values()
    return torch.stack([stats.mean_abs * stats.tokens for stats in seen]).sum(dim=0) / sum(s.tokens for s in seen)


def _mean_weights(consumers: Sequence[Consumer]) -> Tensor:
    """Returns the mean magnitude of each column, relative to the largest weight of its group."""
    total = torch.zeros(consumers[0].weight.shape[1], device=consumers[0].weight.device)
    for consumer in consumers:
        grid = consumer.scheme.weight
        top = absmax(consumer.weight, grid).clamp(min=torch.finfo(torch.float32).tiny)
        relative = cut(consumer.weight, grid).abs() / spread(top)
        total += relative.sum(dim=(0, 1)).flatten()[: len(total)]
    return total / sum(len(consumer.weight) for consumer in consumers)
