"""Scales from ranges: the parameters with which a grid just covers a block, rounded to their stored dtype.

Rounding a scale comes before choosing codes, never after: the codes are chosen for the scale that the file will hold.
"""

import torch
from torch import Tensor

from quantry.numerics import codebooks
from quantry.numerics.blocks import cut
from quantry.numerics.grids import LARGEST, SCALE_DTYPES, code_range
from quantry.types import Grid, Params

SMALLEST_E4M3 = 2.0**-9  # the smallest scale an NVFP4 block can have
NVFP4_OUTER = 448.0 * 6.0  # largest scale times largest code: the tensor's maximum lands on both


def symmetric(top: Tensor, grid: Grid, whole: Tensor) -> Params:
    """Returns parameters with which each block reaches `top`; `whole` is the largest under one outer scale."""
    if grid.kind in codebooks.BOOKS:
        if not grid.nested:
            return Params(top)
        nested, scale = codebooks.nest(top)
        return Params(scale, nested=nested)
    if grid.scale == "e8m0":
        return Params(_exponents(top))
    if grid.scale == "e4m3":
        outer = torch.where(whole > 0, NVFP4_OUTER / whole, 1.0).float().reshape(1)
        scale = (top * (outer / LARGEST[grid.kind])).clamp(SMALLEST_E4M3, 448.0)
        return Params(scale.to(torch.float8_e4m3fn), outer=outer)
    largest = LARGEST[grid.kind] if grid.kind in LARGEST else (2**grid.bits - 1) / 2
    return Params(stored(top / largest, grid))


def affine(low: Tensor, high: Tensor, grid: Grid) -> Params:
    """Returns scale and zero point of an integer grid that spans `low` to `high` and contains 0."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = stored((high - low) / (2**grid.bits - 1), grid)
    smallest, largest = code_range(grid)
    zero = (smallest - low / scale.float()).round().clamp(smallest, largest)
    return Params(scale, zero=zero.to(torch.int8))


def stored(scale: Tensor, grid: Grid) -> Tensor:
    """Returns a scale in its stored dtype: 1 for a block of zeros, the smallest normal value for a tiny one."""
    dtype = SCALE_DTYPES[grid.scale]
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return scale.clamp(torch.finfo(dtype).tiny, torch.finfo(dtype).max).to(dtype)


def extremes(matrix: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest value of each block, in float32."""
    low, high = cut(matrix, grid).transpose(1, 2).flatten(2).aminmax(dim=2)
    return low.float(), high.float()


def _exponents(top: Tensor) -> Tensor:
    """Returns E8M0 exponents as the MX tools choose them: maxima from 1.75 * 2**n on take the next power of two."""
    mantissa, exponent = torch.frexp(top)  # top = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.875).int()
    return torch.where(top > 0, exponent - 2 + 127, 127).clamp(0, 254).to(torch.uint8)
