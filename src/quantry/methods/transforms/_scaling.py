"""What the transforms share: scales on the channels between a producer and all that read them.

A consumer computes the same from x / s with its columns times s, and the producer gives x / s. `scale_pair` does that
to the tensors of a block and to the statistics; `losses` says what rounding would then cost, for many scales at once:
tr(dW G dW'), the mean squared error of the outputs on the tokens whose Gram matrix is G, without a forward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantry.errors import WeightError
from quantry.models.smoothing import Pair, Slot
from quantry.numerics.blocks import cut, join
from quantry.numerics.grids import GPU_CHUNK
from quantry.numerics.scale_search import diagonal_blocks, error_of, output_error, search
from quantry.types import Scheme, Stats

ROWS = 64  # of all that read the same channels, looked at in a search: they tell the best scale as well as 128 do
FEWEST = 16  # the same where many experts share a producer
CHUNK = 1 << 20  # weights rounded at a time: 4 MiB, and as many again for the product


@dataclass(frozen=True, slots=True, eq=False)
class Transformed:
    """A block that computes the same in other numbers, and the statistics of its inputs.

    Norms keep their dtype, matrices that were touched are float32. `scales` has the divisor of each channel by the name
    of its pair; `notes` say what was left alone and why.
    """

    block: dict[str, Tensor]
    stats: dict[str, Stats]
    scales: dict[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Linears that read the same input and are rounded in the same way, one above the other."""

    weight: Tensor  # (rows, columns) float32
    scheme: Scheme
    stats: Stats

    def sample(self, share: float) -> "Reader":
        """Rows spread evenly over all, in whole blocks of the grid; `share` is this reader's part of all rows."""
        tall = self.scheme.weight.block[0]
        blocks = len(self.weight) // tall if tall else 0
        if blocks == 0:  # one scale for all of them
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
    choose: Callable[[list[Reader], Pair], Tensor],
) -> Transformed:
    """The block with each pair divided by the scale (channels of the producer,) that is chosen for it."""
    made, seen = _working_copy(block, pairs), dict(stats)
    scales: dict[str, Tensor] = {}
    notes = []
    for pair in pairs:
        found = readers(made, pair, seen, schemes)
        if not found:
            notes.append(f"{pair.name}: not scaled, since nothing that reads it is both quantized and calibrated")
            continue
        for reader in found:
            _check_finite(reader.stats, pair)
        scales[pair.name] = scale_pair(made, seen, pair, choose(found, pair))
    return Transformed(made, seen, scales, tuple(notes))


def _check_finite(stats: Stats, pair: Pair) -> None:
    """The mean squares bound every entry of the Gram matrix."""
    if not torch.isfinite(stats.absmax + stats.mean_abs + stats.mean_square).all():
        raise WeightError(
            f"what {pair.consumers[0].module} reads has statistics that are NaN or infinite",
            fix="calibrate again in bf16 or float32",
        )


def readers(
    block: Mapping[str, Tensor], pair: Pair, stats: Mapping[str, Stats], schemes: Mapping[str, Scheme]
) -> list[Reader]:
    """The consumers of a pair that are rounded and whose input was seen."""
    found: dict[tuple[int, Scheme], list[Slot]] = {}
    for slot in pair.consumers:
        scheme, seen = schemes.get(slot.module), stats.get(slot.module)
        if scheme is not None and not scheme.weight.is_cast and seen is not None and seen.tokens > 0:
            found.setdefault((id(seen), scheme), []).append(slot)
    return [
        Reader(torch.cat([matrix(block, slot).float() for slot in slots]), scheme, stats[slots[0].module])
        for (_, scheme), slots in found.items()
    ]


def matrix(block: Mapping[str, Tensor], slot: Slot) -> Tensor:
    """The (out, in) matrix, or vector, of a slot: a view."""
    weight = block[slot.source]
    weight = weight if slot.expert is None else weight[slot.expert]
    weight = weight.mT if slot.flip else weight
    return weight if slot.rows is None else weight[slice(*slot.rows)]


def columns(scale: Tensor, pair: Pair) -> Tensor:
    """(..., channels of the producer) -> (..., columns of a consumer): the readers of one head follow each other."""
    heads = scale.reshape(*scale.shape[:-1], pair.heads, pair.size // pair.heads)
    return heads.repeat_interleave(pair.repeats, dim=-2).flatten(-2)


def fold(values: Tensor, pair: Pair) -> Tensor:
    """(columns of a consumer,) -> (repeats, channels of the producer): all that one channel is read as."""
    return values.view(pair.heads, pair.repeats, -1).transpose(0, 1).flatten(1)


def losses(found: Sequence[Reader], scales: Tensor, fractions: Sequence[float] = (1.0,)) -> Tensor:
    """What rounding the weights costs under each of the scales (candidates, columns), by a sample of their rows.

    Costs are squared errors of outputs, summed over tokens and rows. Every block takes the best of some `fractions` of
    its range, as the fit will that comes after.
    """
    cost = torch.zeros(len(scales), device=scales.device)
    total = sum(len(reader.weight) for reader in found)
    for reader in found:
        sample = reader.sample(len(reader.weight) / total)
        rows, width = sample.weight.shape
        step = max(1, (GPU_CHUNK if scales.is_cuda else CHUNK) // (rows * width))
        step = 1 if sample.scheme.weight.scale == "e4m3" else step  # NVFP4 has one more scale for all of a weight
        parts = [_loss(sample, scales[start : start + step], fractions) for start in range(0, len(scales), step)]
        cost += torch.cat(parts) * (reader.stats.tokens * len(reader.weight) / rows)
    return cost


def _loss(reader: Reader, scales: Tensor, fractions: Sequence[float]) -> Tensor:
    """tr(dW G dW') for each of the scales."""
    (rows, width), gram = reader.weight.shape, reader.stats.gram
    grid = reader.scheme.weight
    grid = replace(grid, block=(min(grid.block[0] or rows, rows), grid.block[1] or width))
    scaled = (reader.weight * scales[:, None]).view(-1, width)
    divisor = cut(scales.repeat_interleave(rows, dim=0), grid)
    paid = output_error(diagonal_blocks(gram, grid.block[1]))
    params = search(scaled, grid, None, fractions, lambda error: paid(error.div_(divisor)), scaled.numel())
    blocks = cut(scaled, grid)
    error = join(error_of(blocks, grid, params, torch.empty_like(blocks)), (len(scaled), width))
    error = error.view(-1, rows, width).div_(scales[:, None])
    loss: Tensor = torch.linalg.vecdot((error.view(-1, width) @ gram).view(len(scales), -1), error.flatten(1))
    return loss


def _working_copy(block: Mapping[str, Tensor], pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """The tensors of a block, with float32 copies of all matrices that the pairs touch."""
    touched = {slot.source for pair in pairs for slot in pair.consumers}
    touched.update(slot.source for pair in pairs if pair.form == "rows" for slot in pair.producers)
    return {name: tensor.to(torch.float32, copy=True) if name in touched else tensor for name, tensor in block.items()}


def scale_pair(block: dict[str, Tensor], stats: dict[str, Stats], pair: Pair, scale: Tensor) -> Tensor:
    """Divides the channels of a pair by a scale, in a working copy and its statistics: the scale as it became.

    A norm is kept in its dtype, so it is the scale that gives way: it becomes what the rounded norm really divides by,
    and the function stays the same to the last bit of the weights.
    """
    if pair.form == "rows":
        for slot in pair.producers:
            part = matrix(block, slot)
            part.div_(scale[:, None] if part.dim() > 1 else scale)
    else:
        scale = _divide_norm(block, pair, scale)
    wide = columns(scale, pair)
    for slot in pair.consumers:
        matrix(block, slot).mul_(wide)
    stats.update(_rescaled(stats, pair, wide))
    return scale


def _divide_norm(block: dict[str, Tensor], pair: Pair, scale: Tensor) -> Tensor:
    """Replaces the norm of a block by one that is divided: the scale that its rounded weight stands for."""
    offset = 1.0 if pair.form == "norm+1" else 0.0
    weight, *biases = pair.producers
    norm = block[weight.source]
    gain = norm.float() + offset
    divided = (gain / scale - offset).to(norm.dtype)
    left = divided.float() + offset
    usable = (left != 0) & torch.isfinite(left)  # a channel that would vanish in the dtype stays as it is
    block[weight.source] = torch.where(usable, divided, norm)
    scale = torch.where(usable, gain / left, 1.0)
    for bias in biases:
        block[bias.source] = block[bias.source].float() / scale
    return scale


def _rescaled(stats: Mapping[str, Stats], pair: Pair, scale: Tensor) -> dict[str, Stats]:
    """The statistics of the consumers' inputs, divided; linears that shared theirs still do."""
    read = [slot.module for slot in pair.consumers if slot.module in stats]
    seen = {id(stats[module]): stats[module] for module in read}
    divided = {
        key: replace(
            one,
            gram=one.gram / scale / scale[:, None],
            absmax=one.absmax / scale,
            mean_abs=one.mean_abs / scale,
            mean_square=one.mean_square / scale**2,
            histogram=None,  # counts over all channels do not tell which they were
        )
        for key, one in seen.items()
    }
    return {module: divided[id(stats[module])] for module in read}
