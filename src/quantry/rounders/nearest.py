"""Every weight to the nearest value of its grid, on its own."""

from torch import Tensor

from quantry.numerics.grids import encode
from quantry.types import Grid, Params, QTensor


def round_weight(weight: Tensor, grid: Grid, params: Params) -> QTensor:
    return QTensor(grid, encode(weight, grid, params), params)
