"""Fit, then round: the one place where a weight is put onto a grid, with or without statistics of its input."""

from collections.abc import Callable

from torch import Tensor

from quantry.methods.contract import Fit, Prepared, Rounder
from quantry.numerics import ggml
from quantry.types import Grid, QTensor, Stats

Prepare = Callable[[Rounder, Stats], Prepared]


class LayerInput:
    """What calibration knows of an input that some layers of a block share.

    A rounder's `prepare` runs once for all of them. `prepare` may be replaced by a function that guards that call.
    """

    def __init__(self, stats: Stats, prepare: Prepare = lambda rounder, stats: rounder.prepare(stats)) -> None:
        self.stats = stats
        self._prepare = prepare
        self._prepared: dict[int, Prepared] = {}

    def prepared(self, rounder: Rounder) -> Prepared:
        """Returns what `rounder` made of the statistics."""
        if id(rounder) not in self._prepared:
            self._prepared[id(rounder)] = self._prepare(rounder, self.stats)
        return self._prepared[id(rounder)]

    def forget(self) -> None:
        """Frees what rounders prepared."""
        self._prepared.clear()


def round_weight(
    weight: Tensor, grid: Grid, fit: Fit, rounder: Rounder, layer_input: LayerInput | None, whole: Tensor | None = None
) -> QTensor:
    """Fits the parameters of `grid` to a weight (rows, columns) and rounds it.

    Without a `layer_input` neither step knows the statistics. `whole` is the largest magnitude of all weights that
    share a per-tensor scale with this one.
    """
    params = fit.fit(weight, grid, whole, layer_input.stats if layer_input else None)
    return rounder.round_weight(weight, grid, params, layer_input.prepared(rounder) if layer_input else None)


def round_blocks(
    weight: Tensor, kind: str, rounder: Rounder, layer_input: LayerInput | None, importance: Tensor | None = None
) -> Tensor:
    """Returns a weight in a ggml block type, uint8 (rows, bytes of a row).

    Without a `layer_input` it is ggml's own search, weighted by `importance` (columns,) if that is given.
    """
    if layer_input is None:
        return ggml.quantize(weight, kind, importance)
    return rounder.round_blocks(weight, kind, layer_input.prepared(rounder))
