"""Rounds every weight on its own to the nearest value of its grid."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantry.methods.contract import Prepared
from quantry.numerics import ggml
from quantry.numerics.grids import encode
from quantry.types import Grid, Params, QTensor, Stats

NEEDS_STATISTICS = False
GRIDS = None  # all


def prepare(stats: Stats) -> Prepared:
    """Keeps the statistics as they are."""
    return Prepared(stats)


def round_weight(weight: Tensor, grid: Grid, params: Params, prepared: Prepared | None = None) -> QTensor:
    """Returns the nearest codes. Statistics already shaped the parameters and change nothing here."""
    return QTensor(grid, encode(weight, grid, params), params)


def round_blocks(weight: Tensor, kind: str, prepared: Prepared) -> Tensor:
    """Returns a ggml block type as llama.cpp makes it with an importance matrix."""
    return ggml.quantize(weight, kind, prepared.state.mean_square)


def notes(reports: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns nothing: nothing unusual can happen."""
    return ()
