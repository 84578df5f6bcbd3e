"""Cutting a matrix into the blocks that share a scale.

A weight of shape (rows, columns) on a grid with block (r, c) is seen as (row blocks, r, column blocks, c), so that a
scale of shape (row blocks, column blocks) is broadcast over the two inner axes. Blocks that stick out (128 x 128 on odd
shapes) are filled with zeros, which change no maximum.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantry.types import Grid

STRIP = 1 << 18  # weights at a time: the copy without signs stays in the cache
MAGNITUDES = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
}


def block_of(grid: Grid, shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the block of a grid on a matrix of this shape, with 0 replaced by the whole dimension."""
    return grid.block[0] or shape[0], grid.block[1] or shape[1]


def scale_shape(grid: Grid, shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the shape of the scales of a matrix of this shape."""
    rows, columns = block_of(grid, shape)
    return -(-shape[0] // rows), -(-shape[1] // columns)


def cut(matrix: Tensor, grid: Grid) -> Tensor:
    """Reshapes (rows, columns) to (row blocks, r, column blocks, c); a view if all blocks are full."""
    shape = (matrix.shape[0], matrix.shape[1])
    rows, columns = block_of(grid, shape)
    high, wide = scale_shape(grid, shape)
    if (high * rows, wide * columns) != shape:
        matrix = pad(matrix, (0, wide * columns - shape[1], 0, high * rows - shape[0]))
    return matrix.view(high, rows, wide, columns)


def join(blocks: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inverts `cut`."""
    high, rows, wide, columns = blocks.shape
    return blocks.reshape(high * rows, wide * columns)[: shape[0], : shape[1]].contiguous()


def spread(scale: Tensor) -> Tensor:
    """Reshapes (row blocks, column blocks) to (row blocks, 1, column blocks, 1), for the result of `cut`."""
    return scale[:, None, :, None]


def absmax(matrix: Tensor, grid: Grid) -> Tensor:
    """Returns the largest magnitude in each block, in float32; NaN or infinity if the block contains one.

    Floats without their sign bit are ordered like the integers of the same bits, NaN above infinity; a CPU compares
    integers several times faster.
    """
    integer, mask = MAGNITUDES[matrix.dtype]
    height, width = matrix.shape
    tall = block_of(grid, (height, width))[0]
    bits = matrix.contiguous().view(integer)
    step = tall * max(1, STRIP // (tall * max(width, 1)))
    tops = [
        cut(bits[start : start + step].bitwise_and(mask), grid).amax(dim=(1, 3)) for start in range(0, height, step)
    ]
    return torch.cat(tops).view(matrix.dtype).float()
