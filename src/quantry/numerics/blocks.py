"""Cutting a matrix into the blocks that share a scale.

A weight of shape (rows, columns) on a grid with block (r, c) is seen as (row blocks, r, column blocks, c), so that a
scale of shape (row blocks, column blocks) is broadcast over the two inner axes. Blocks that stick out (128 x 128 on odd
shapes) are filled with zeros, which change no maximum.
"""

from torch import Tensor
from torch.nn.functional import pad

from quantry.types import Grid


def block_of(grid: Grid, shape: tuple[int, int]) -> tuple[int, int]:
    """The block of a grid on a matrix of this shape, with 0 replaced by the whole."""
    return grid.block[0] or shape[0], grid.block[1] or shape[1]


def scale_shape(grid: Grid, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of a matrix of this shape."""
    rows, columns = block_of(grid, shape)
    return -(-shape[0] // rows), -(-shape[1] // columns)


def cut(matrix: Tensor, grid: Grid) -> Tensor:
    """(rows, columns) -> (row blocks, r, column blocks, c); a view where nothing sticks out."""
    shape = (matrix.shape[0], matrix.shape[1])
    rows, columns = block_of(grid, shape)
    high, wide = scale_shape(grid, shape)
    if (high * rows, wide * columns) != shape:
        matrix = pad(matrix, (0, wide * columns - shape[1], 0, high * rows - shape[0]))
    return matrix.view(high, rows, wide, columns)


def join(blocks: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse of `cut`."""
    high, rows, wide, columns = blocks.shape
    return blocks.reshape(high * rows, wide * columns)[: shape[0], : shape[1]].contiguous()


def spread(scale: Tensor) -> Tensor:
    """(row blocks, column blocks) -> (row blocks, 1, column blocks, 1), to be broadcast over what `cut` gives."""
    return scale[:, None, :, None]


def absmax(matrix: Tensor, grid: Grid) -> Tensor:
    """The largest magnitude in each block, in float32."""
    return cut(matrix, grid).abs().amax(dim=(1, 3)).float()
