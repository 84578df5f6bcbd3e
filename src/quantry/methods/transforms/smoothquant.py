"""SmoothQuant: moves what makes inputs hard to round into the weights, which round easily.

The scales of a pair are s = max|x|^a / max|w|^(1-a) for each channel: inputs are divided and weights multiplied. `a` is
fixed, or searched for each pair: the cost is that of rounding the weights, tr(dW G dW'), and that of rounding the
inputs, whose noise the weights multiply.

Source: Xiao et al., "SmoothQuant" (2022).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from quantry.errors import RecipeError
from quantry.methods.contract import Transformed
from quantry.methods.transforms._scaling import Consumer, columns, fold, losses, transform
from quantry.models.smoothing import Pair
from quantry.numerics.blocks import cut
from quantry.types import Activation, Grid, Scheme, Stats

NEEDS_QUANTIZED_INPUTS = True
ALPHA = 0.5
STEPS = 20
SMALLEST = 1e-5  # of a scale, and of a maximum
INTEGRATED = 64  # thresholds of the largest square of a token


def apply(
    block: Mapping[str, Tensor],
    pairs: Sequence[Pair],
    stats: Mapping[str, Stats],
    schemes: Mapping[str, Scheme],
    alpha: float | None = ALPHA,
) -> Transformed:
    """Smooths the pairs of a block; `stats` and `schemes` are by module. An alpha of None is searched for each pair.

    Raises RecipeError for an alpha outside 0 to 1.
    """
    if alpha is not None and not 0 <= alpha <= 1:
        raise RecipeError(f"SmoothQuant's alpha is {alpha:g}, not from 0 to 1", fix="use 0.5, or leave it out")
    return transform(block, pairs, stats, schemes, best_scale if alpha is None else partial(fixed_scale, alpha=alpha))


def fixed_scale(consumers: Sequence[Consumer], pair: Pair, alpha: float) -> Tensor:
    """Returns the scale of a pair for one alpha."""
    return candidates(consumers, pair, torch.tensor([alpha]))[0]


def best_scale(consumers: Sequence[Consumer], pair: Pair) -> Tensor:
    """Returns the scale of a pair that makes rounding weights and inputs cheapest; all ones leaves the pair alone."""
    trials = candidates(consumers, pair, torch.linspace(0, 1, STEPS + 1))
    trials = torch.cat([torch.ones_like(trials[:1]), trials])
    wide = columns(trials, pair)
    return trials[(losses(consumers, wide) + noise(consumers, wide)).argmin()]


def candidates(consumers: Sequence[Consumer], pair: Pair, alpha: Tensor) -> Tensor:
    """Returns the scales for some alphas, (alphas, channels)."""
    inputs = torch.stack([consumer.stats.absmax for consumer in consumers]).amax(dim=0)
    weights = torch.stack([consumer.weight.abs().amax(dim=0) for consumer in consumers]).amax(dim=0)
    x, w = (fold(peak, pair).amax(dim=0).clamp(min=SMALLEST) for peak in (inputs, weights))
    a = alpha.to(x)[:, None]
    return (x**a / w ** (1 - a)).clamp(min=SMALLEST)


def noise(consumers: Sequence[Consumer], scales: Tensor) -> Tensor:
    """Returns what rounding the inputs costs under each of the scales (candidates, columns), in the unit of `losses`.

    Rounding to steps of d adds noise of variance d^2 / 12 to each channel, or removes a channel that is smaller. Floats
    have steps in proportion to each value, which no scale changes.
    """
    cost = torch.zeros(len(scales), device=scales.device)
    for consumer in consumers:
        activation = consumer.scheme.activation
        if activation is not None and activation.grid.kind == "int":
            there = consumer.stats.mean_square / scales.square()
            added = torch.minimum(_square_steps(consumer.stats, scales, activation) / 12, there)
            power = consumer.weight.square().sum(dim=0) * scales.square()
            cost += (power * added).sum(dim=1) * consumer.stats.tokens
    return cost


def _square_steps(stats: Stats, scales: Tensor, activation: Activation) -> Tensor:
    """Returns the mean square of each channel's rounding step under each of the scales."""
    grid = activation.grid
    largest = 2 ** (grid.bits - 1) - 1
    if activation.dynamic:
        top = _largest_squares(stats.mean_square / scales.square(), grid)
    else:
        top = (stats.absmax / scales).square().amax(dim=1, keepdim=True)
    square: Tensor = top / largest**2
    return square


def _largest_squares(variances: Tensor, grid: Grid) -> Tensor:
    """Returns, for each channel, the mean over tokens of the largest square among the channels that share its scale.

    Assumes independent normal channels: the largest square exceeds u unless all stay below, so its mean is the
    integral of 1 - prod erf(sqrt(u / 2v)) over u, here by trapezoids.
    """
    groups = cut(variances, Grid("int", 8, (1, grid.block[1]))).squeeze(1)
    widest = groups.amax(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    relative = (groups / widest).clamp(min=1e-12)
    at = torch.cat([torch.zeros(1), torch.logspace(-2, 2, INTEGRATED)]).to(variances)
    above = [1 - torch.erf((u / 2 / relative).sqrt()).log().sum(dim=2).exp() for u in at]
    mean = torch.trapezoid(torch.stack(above, dim=-1), at) * widest[..., 0]
    return mean.repeat_interleave(groups.shape[2], dim=1)[:, : variances.shape[1]]
