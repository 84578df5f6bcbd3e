"""Codes from weights and weights from codes, for every grid, in chunks of rows that stay in the cache.

`encode` picks the nearest grid value for each weight, given the scales; `decode` returns the weights that the file will
give. Both compute in float32 and round halves to even. Weights are divided by their scale (with bitsandbytes' code
books multiplied by its reciprocal, as there), so that the codes equal those of the formats' own libraries.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quantry.numerics import codebooks
from quantry.numerics.blocks import block_of, cut, join, spread
from quantry.types import Grid, Params, QTensor

CHUNK = 1 << 18  # weights worked on at a time: 1 MiB of float32, in one buffer that stays in the cache
GPU_CHUNK = 1 << 26  # enough to fill a GPU
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALE_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
CASTS = {"bf16": torch.bfloat16, "f16": torch.float16}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}  # the largest finite magnitude of each float grid


def encode(weight: Tensor, grid: Grid, params: Params) -> Tensor:
    """Returns the code of the nearest grid value for each weight of a matrix."""
    if grid.kind in codebooks.BOOKS:
        return codebooks.encode(weight, grid, params.scale)
    codes = torch.empty(weight.shape, dtype=code_dtype(grid), device=weight.device)
    buffer = torch.empty(0, device=weight.device)
    for rows, scale, zero in _chunks(weight, grid, params):
        part = weight[rows]
        if buffer.numel() < part.numel():
            buffer = torch.empty(part.numel(), device=weight.device)
        blocks = cut(buffer[: part.numel()].view(part.shape).copy_(part), grid).div_(spread(scale))
        if zero is not None:
            blocks += spread(zero)
        codes[rows] = join(_nearest(grid)(blocks), (part.shape[0], part.shape[1]))
    return codes


def decode(codes: Tensor, grid: Grid, params: Params, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the weights that codes stand for, computed in float32, as `dtype`."""
    if grid.kind in codebooks.BOOKS:
        return codebooks.decode(codes, grid, params.scale).to(dtype)
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for rows, scale, zero in _chunks(codes, grid, params):
        values = _value(grid)(codes[rows])
        blocks = cut(values, grid)
        if zero is not None:
            blocks -= spread(zero)
        weight[rows] = join(blocks.mul_(spread(scale)), (values.shape[0], values.shape[1]))
    return weight


def dequantize(tensor: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the weights that the file will give."""
    return decode(tensor.codes, tensor.grid, tensor.params, dtype)


def code_dtype(grid: Grid) -> torch.dtype:
    """Returns the dtype of the codes of a grid."""
    return torch.int8 if grid.kind == "int" else FLOAT8.get(grid.kind, torch.uint8)


def code_range(grid: Grid) -> tuple[int, int]:
    """Returns the smallest and largest code of an integer grid."""
    return -(1 << (grid.bits - 1)), (1 << (grid.bits - 1)) - 1


def effective_scale(grid: Grid, params: Params) -> Tensor:
    """Returns the float32 factor of a code, whatever the stored form of the scale."""
    if grid.scale == "e8m0":
        exponents = params.scale.int()  # the bits of a float32 power of two are its exponent alone
        return torch.where(exponents > 0, (exponents << 23).view(torch.float32), 2.0**-127)
    scale = params.scale.float()
    return scale if params.outer is None else scale / params.outer


def _chunks(matrix: Tensor, grid: Grid, params: Params) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yields slices of rows, each with its float32 scales and zeros."""
    height, width = matrix.shape
    chunk = GPU_CHUNK if matrix.is_cuda else CHUNK
    tall = block_of(grid, (height, width))[0]
    scale = effective_scale(grid, params)
    zero = None if params.zero is None else params.zero.float()
    if grid.block[0] == 0:  # one block of all rows: any slice of it has the same scale
        step = max(1, chunk // max(width, 1))
        for start in range(0, height, step):
            yield slice(start, start + step), scale, zero
        return
    step = tall * max(1, chunk // max(width * tall, 1))
    for start in range(0, height, step):
        blocks = slice(start // tall, (start + step) // tall)
        yield slice(start, start + step), scale[blocks], None if zero is None else zero[blocks]


def snap(grid: Grid) -> Callable[[Tensor], Tensor]:
    """Returns a function that rounds scaled values to the grid's own values; it may overwrite its argument."""
    if grid.kind == "int":
        low, high = code_range(grid)
        return lambda values: values.round_().clamp_(low, high)
    if grid.kind == "e2m1":
        return codebooks.snap_e2m1
    largest = LARGEST[grid.kind]
    return lambda values: values.clamp_(-largest, largest).to(FLOAT8[grid.kind]).float()


def _nearest(grid: Grid) -> Callable[[Tensor], Tensor]:
    """Returns a function that rounds scaled values to what becomes a code when copied; it overwrites its argument."""
    if grid.kind == "int":
        return snap(grid)
    if grid.kind in FLOAT8:
        largest = LARGEST[grid.kind]
        return lambda values: values.clamp_(-largest, largest)
    if grid.kind == "e2m1":
        return codebooks.nearest_e2m1
    raise ValueError(f"a {grid.kind} grid has no codes")


def _value(grid: Grid) -> Callable[[Tensor], Tensor]:
    return codebooks.e2m1_values if grid.kind == "e2m1" else Tensor.float
