"""Every weight to the nearest value of its grid, on its own."""

from torch import Tensor

from quantry.numerics import ggml
from quantry.numerics.grids import encode
from quantry.types import Grid, Params, QTensor, Stats


def round_weight(weight: Tensor, grid: Grid, params: Params, stats: Stats | None = None) -> QTensor:
    """Statistics change nothing here: what they can tell has gone into the parameters."""
    return QTensor(grid, encode(weight, grid, params), params)


def round_blocks(weight: Tensor, kind: str, stats: Stats | None = None) -> Tensor:
    """Weights in one of ggml's types, as llama.cpp makes them: uint8 (rows, bytes of a row)."""
    return ggml.quantize(weight, kind, None if stats is None else stats.mean_square)
