"""What the transforms share: scales on the channels between a producer and everything that reads them.

A consumer computes the same from x / s with its columns times s, and the producer gives x / s. `scale_pair` applies a
scale to the tensors of a block and to the statistics. `losses` predicts what rounding would cost after it, for many
scales at once: tr(dW G dW'), the mean squared error of the outputs on the tokens whose Gram matrix is G, without a
forward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantry.errors import WeightError
from quantry.methods.contract import Transformed
from quantry.models.smoothing import Pair, Slot
from quantry.numerics.blocks import cut, join
from quantry.numerics.grids import GPU_CHUNK
from quantry.numerics.scale_search import diagonal_blocks, error_of, output_error, search
from quantry.types import Scheme, Stats

ROWS = 64  # sampled of all layers that read the same channels: they find the same best scale as 128 do
FEWEST = 16  # sampled of each expert where many share a producer
CHUNK = 1 << 20  # weights rounded at a time: 4 MiB, and as many again for the product


@dataclass(frozen=True, slots=True, eq=False)
class Consumer:
    """Linears that read the same input and get the same scheme, stacked."""

    weight: Tensor  # (rows, columns) float32
    scheme: Scheme
    stats: Stats

    def sample(self, share: float) -> "Consumer":
        """Returns evenly spread rows in whole blocks of the grid; `share` is this consumer's part of all rows."""
        tall = self.scheme.weight.block[0]
        blocks = len(self.weight) // tall if tall else 0
        if blocks == 0:  # one scale for all rows
            return self
        wanted = min(blocks, -(-max(FEWEST, round(ROWS * share)) // tall))
        first = torch.linspace(0, blocks - 1, wanted, device=self.weight.device).round().long() * tall
        rows = (first[:, None] + torch.arange(tall, device=self.weight.device)).flatten()
        return replace(self, weight=self.weight[rows])


def transform(
    block: Mapping[str, Tensor],
    pairs: Sequence[Pair],
    stats: Mapping[str, Stats],
    schemes: Mapping[str, Scheme],
    choose: Callable[[list[Consumer], Pair], Tensor],
) -> Transformed:
    """Divides each pair by the scale (channels of the producer,) that `choose` finds for it.

    A pair stays as it is when no consumer of it is both quantized and calibrated.
    """
    scaled, new_stats = _working_copy(block, pairs), dict(stats)
    scales: dict[str, Tensor] = {}
    for pair in pairs:
        consumers = rounded_consumers(scaled, pair, new_stats, schemes)
        for consumer in consumers:
            _check_finite(consumer.stats, pair)
        if consumers:
            scales[pair.name] = scale_pair(scaled, new_stats, pair, choose(consumers, pair))
    return Transformed(scaled, new_stats, scales)


def _check_finite(stats: Stats, pair: Pair) -> None:
    # the mean squares bound every entry of the Gram matrix
    if not torch.isfinite(stats.absmax + stats.mean_abs + stats.mean_square).all():
        raise WeightError(
            f"the input of {pair.consumers[0].module} has statistics that are NaN or infinite",
            fix="calibrate again in bf16 or float32",
        )


def rounded_consumers(
    block: Mapping[str, Tensor], pair: Pair, stats: Mapping[str, Stats], schemes: Mapping[str, Scheme]
) -> list[Consumer]:
    """Returns the consumers of a pair that are rounded and whose input calibration saw."""
    slots: dict[tuple[int, Scheme], list[Slot]] = {}
    for slot in pair.consumers:
        scheme, seen = schemes.get(slot.module), stats.get(slot.module)
        if scheme is not None and not scheme.weight.is_cast and seen is not None and seen.tokens > 0:
            slots.setdefault((id(seen), scheme), []).append(slot)
    return [
        Consumer(torch.cat([matrix(block, slot).float() for slot in alike]), scheme, stats[alike[0].module])
        for (_, scheme), alike in slots.items()
    ]


def matrix(block: Mapping[str, Tensor], slot: Slot) -> Tensor:
    """Returns a view of the (out, in) matrix, or the vector, of a slot."""
    stack = block[slot.source]
    weight = stack if slot.expert is None else stack[slot.expert]
    upright = weight.mT if slot.flip else weight
    return upright if slot.rows is None else upright[slice(*slot.rows)]


def columns(scale: Tensor, pair: Pair) -> Tensor:
    """Spreads (..., channels of the producer) to (..., columns of a consumer): the readers of a head are neighbours."""
    heads = scale.reshape(*scale.shape[:-1], pair.heads, pair.size // pair.heads)
    return heads.repeat_interleave(pair.repeats, dim=-2).flatten(-2)


def fold(values: Tensor, pair: Pair) -> Tensor:
    """Arranges (columns of a consumer,) as (repeats, channels of the producer)."""
    return values.view(pair.heads, pair.repeats, -1).transpose(0, 1).flatten(1)


def losses(consumers: Sequence[Consumer], scales: Tensor, fractions: Sequence[float] = (1.0,)) -> Tensor:
    """Returns what rounding the weights costs under each of the scales (candidates, columns), from sampled rows.

    Costs are squared errors of outputs, summed over tokens and rows. Every block uses the best of some `fractions` of
    its range, as the fit after the transform does.
    """
    cost = torch.zeros(len(scales), device=scales.device)
    total = sum(len(consumer.weight) for consumer in consumers)
    for consumer in consumers:
        sample = consumer.sample(len(consumer.weight) / total)
        rows, width = sample.weight.shape
        one_by_one = sample.scheme.weight.scale == "e4m3"  # NVFP4 has one more scale for the whole weight
        step = 1 if one_by_one else max(1, (GPU_CHUNK if scales.is_cuda else CHUNK) // (rows * width))
        parts = [loss(sample, scales[start : start + step], fractions) for start in range(0, len(scales), step)]
        cost += torch.cat(parts) * (consumer.stats.tokens * len(consumer.weight) / rows)
    return cost


def loss(consumer: Consumer, scales: Tensor, fractions: Sequence[float]) -> Tensor:
    """Returns tr(dW G dW') for each of the scales."""
    (rows, width), gram = consumer.weight.shape, consumer.stats.gram
    tall, wide = consumer.scheme.weight.block
    grid = replace(consumer.scheme.weight, block=(min(tall or rows, rows), wide or width))
    scaled = (consumer.weight * scales[:, None]).view(-1, width)
    divisor = cut(scales.repeat_interleave(rows, dim=0), grid)
    paid = output_error(diagonal_blocks(gram, grid.block[1]))
    params = search(scaled, grid, None, fractions, lambda error: paid(error.div_(divisor)), scaled.numel())
    blocks = cut(scaled, grid)
    joined = join(error_of(blocks, grid, params, torch.empty_like(blocks)), (len(scaled), width))
    error = joined.view(-1, rows, width).div_(scales[:, None])
    cost: Tensor = torch.linalg.vecdot((error.view(-1, width) @ gram).view(len(scales), -1), error.flatten(1))
    return cost


def _working_copy(block: Mapping[str, Tensor], pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """Copies the tensors of a block, in float32 where a pair scales a matrix."""
    touched = {slot.source for pair in pairs for slot in pair.consumers}
    touched.update(slot.source for pair in pairs if pair.form == "rows" for slot in pair.producers)
    return {name: tensor.to(torch.float32, copy=True) if name in touched else tensor for name, tensor in block.items()}


def scale_pair(block: dict[str, Tensor], stats: dict[str, Stats], pair: Pair, scale: Tensor) -> Tensor:
    """Divides the channels of a pair in a working copy and its statistics; returns the scale that was applied.

    A norm keeps its dtype, so its rounded weight decides: the returned scale is what that weight really divides by, and
    the function stays the same to the last bit of the weights.
    """
    if pair.form == "rows":
        for slot in pair.producers:
            part = matrix(block, slot)
            part.div_(scale[:, None] if part.dim() > 1 else scale)
        applied = scale
    else:
        applied = _divide_norm(block, pair, scale)
    wide = columns(applied, pair)
    for slot in pair.consumers:
        matrix(block, slot).mul_(wide)
    stats.update(_rescaled(stats, pair, wide))
    return applied


def _divide_norm(block: dict[str, Tensor], pair: Pair, scale: Tensor) -> Tensor:
    """Divides the norm of a block; returns the scale that its rounded weight stands for."""
    offset = 1.0 if pair.form == "norm+1" else 0.0
    weight, *biases = pair.producers
    norm = block[weight.source]
    gain = norm.float() + offset
    divided = (gain / scale - offset).to(norm.dtype)
    left = divided.float() + offset
    usable = (left != 0) & torch.isfinite(left)  # a channel that would vanish in the dtype is not scaled
    block[weight.source] = torch.where(usable, divided, norm)
    applied = torch.where(usable, gain / left, 1.0)
    for bias in biases:
        block[bias.source] = block[bias.source].float() / applied
    return applied


def _rescaled(stats: Mapping[str, Stats], pair: Pair, scale: Tensor) -> dict[str, Stats]:
    """Divides the statistics of the consumers' inputs; linears that shared theirs still do."""
    modules = [slot.module for slot in pair.consumers if slot.module in stats]
    before = {id(stats[module]): stats[module] for module in modules}
    after = {
        key: replace(
            seen,
            gram=seen.gram / scale / scale[:, None],
            absmax=seen.absmax / scale,
            mean_abs=seen.mean_abs / scale,
            mean_square=seen.mean_square / scale**2,
            histogram=None,  # it counts over all channels, so it cannot be rescaled by channel
        )
        for key, seen in before.items()
    }
    return {module: after[id(stats[module])] for module in modules}
