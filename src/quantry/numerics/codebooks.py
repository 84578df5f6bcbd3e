"""Four-bit values that are looked up: E2M1, and the NF4 and FP4 books of bitsandbytes with their nested scales.

NF4's sixteen levels are quantiles of a normal distribution, FP4's a tiny float with its own bit order; both scale
blocks of the *flattened* tensor by their absolute maximum. With double quantization those maxima, less their mean, are
stored as indices into a 256-entry table of dynamic 8-bit floats. The tables are the published ones; the choices between
neighbours (strictly greater than the midpoint, multiplication by a float32 reciprocal) are those of bitsandbytes,
checked bit for bit.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantry.types import Grid, Nested

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # twelfths, in the order of the three low bits
FP4 = tuple(sign * value / 12 for sign in (1.0, -1.0) for value in _FP4_MAGNITUDES)
BOOKS = {"nf4": NF4, "fp4": FP4}


def nearest_e2m1(values: Tensor) -> Tensor:
    """Returns the E2M1 codes of scaled values: halves go to the even code, more than 6 to 6, the sign into bit 3.

    A code is a rounded multiple of its step plus the first code with that step (0, 2 or 4). Overwrites its argument.
    """
    sign = torch.signbit(values).to(torch.uint8) << 3
    powers = _e2m1_powers(values.abs_().clamp_(max=6.0))
    begin = torch.where(powers > 1, powers, 0)
    return values.div_(powers.mul_(0.5)).round_().add_(begin).to(torch.uint8).bitwise_or_(sign)


def snap_e2m1(values: Tensor) -> Tensor:
    """Returns the E2M1 values nearest to scaled values; overwrites its argument."""
    steps = _e2m1_powers(values.clamp_(-6.0, 6.0)).mul_(0.5)
    return values.div_(steps).round_().mul_(steps)


def _e2m1_powers(values: Tensor) -> Tensor:
    """Returns twice the step at each value, from its exponent bits: steps are 0.5 up to 2, 1 up to 4 and 2 above."""
    return values.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32).clamp_(1.0, 4.0)


def e2m1_values(codes: Tensor) -> Tensor:
    """Returns the values of E2M1 codes."""
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1), device=codes.device)
    return table[codes.int()]


def encode(weight: Tensor, grid: Grid, scale: Tensor) -> Tensor:
    """Returns indices into the code book, in the shape of the weight."""
    blocks = flat_blocks(weight, grid.block[1])
    edges, order = _edges(grid.kind, weight.device)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    codes = torch.empty(blocks.shape, dtype=torch.uint8, device=weight.device)
    step = max(1, (1 << (26 if weight.is_cuda else 20)) // grid.block[1])
    for start in range(0, blocks.shape[0], step):
        part = slice(start, start + step)
        rank = torch.bucketize(blocks[part].float() * inverse[part, None], edges, out_int32=True)
        codes[part] = order[rank]
    return codes.flatten()[: weight.numel()].view(weight.shape)


def decode(codes: Tensor, grid: Grid, scale: Tensor) -> Tensor:
    """Returns the weights that indices stand for."""
    table = torch.tensor(BOOKS[grid.kind], device=codes.device)
    values = table[flat_blocks(codes, grid.block[1]).int()] * scale[:, None]
    return values.flatten()[: codes.numel()].view(codes.shape)


def flat_blocks(tensor: Tensor, block: int) -> Tensor:
    """Flattens a tensor into rows of one block, and fills the last block with zeros."""
    flat = tensor.reshape(-1)
    rest = -flat.numel() % block
    return (pad(flat, (0, rest)) if rest else flat).view(-1, block)


def nest(absmax: Tensor, block: int = 256) -> tuple[Nested, Tensor]:
    """Quantizes scales to 8-bit indices; returns these and the scales they decode to."""
    offset = absmax.mean()
    shifted = flat_blocks(absmax - offset, block)
    outer = shifted.abs().amax(dim=1)
    inverse = torch.where(outer > 0, 1.0 / outer, 0.0)
    table = dynamic_table().to(absmax.device)
    scaled = (shifted * inverse[:, None]).flatten()[: absmax.numel()]
    nested = Nested(_closest(scaled, table).to(torch.uint8), outer, float(offset), block)
    return nested, unnest(nested)


def unnest(nested: Nested) -> Tensor:
    """Returns the scales that nested indices decode to."""
    values = dynamic_table().to(nested.codes.device)[nested.codes.int()]
    outer = nested.absmax.repeat_interleave(nested.block)[: values.numel()]
    return values * outer + nested.offset


@cache
def dynamic_table() -> Tensor:
    """Returns bitsandbytes' signed dynamic map, ascending: 7 decades, each twice as fine as the one below."""
    values = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, (1 << decade) + 1, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2.0
        scaled = ((10.0 ** (decade - 6)) * means).tolist()
        values += [*scaled, *(-value for value in scaled)]
    return torch.tensor(sorted([*values, 0.0, 1.0]), dtype=torch.float32)


@cache
def _edges(kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    table = torch.tensor(BOOKS[kind])
    values, order = torch.sort(table, stable=True)
    return ((values[:-1] + values[1:]) / 2).to(device), order.to(torch.uint8).to(device)


def _closest(values: Tensor, table: Tensor) -> Tensor:
    above = torch.searchsorted(table, values).clamp(1, table.numel() - 1)
    lower, upper = table[above - 1], table[above]
    return torch.where(values - lower <= upper - values, above - 1, above)
