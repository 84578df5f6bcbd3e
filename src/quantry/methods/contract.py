"""What a method's file offers. Facts are literal constants, so that they can be read without importing torch.

| room | constants | functions |
|---|---|---|
| `transforms` | `NEEDS_QUANTIZED_INPUTS`: it only helps layers whose inputs are quantized | `apply` |
| `fits` | `NEEDS_STATISTICS`: it cannot work without the statistics of the inputs | `fit` |
| `rounders` | `NEEDS_STATISTICS`, `GRIDS`: the kinds of grids it rounds onto, None for all | `prepare`, `round_weight`, `round_blocks`, `notes` |

All are plain functions of weights and statistics. A file named `stochastic.py` is the method `stochastic`; another
package adds one through an entry point (registry.py).
"""  # noqa: E501

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from quantry import registry
from quantry.models.smoothing import Pair
from quantry.types import Grid, Params, QTensor, Scheme, Stats

if TYPE_CHECKING:
    from torch import Tensor

TRANSFORMS, FITS, ROUNDERS = "quantry.methods.transforms", "quantry.methods.fits", "quantry.methods.rounders"


@dataclass(frozen=True, slots=True, eq=False)
class Transformed:
    """A block that computes the same function in other numbers, and the statistics of its new inputs.

    Norms keep their dtype; scaled matrices are float32. `scales` holds the divisor of each channel by pair name.
    """

    block: "dict[str, Tensor]"
    stats: dict[str, Stats]  # by module
    scales: "dict[str, Tensor]"


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What a rounder makes of one input's statistics, shared by all layers that read this input.

    `report` says what was unusual, as a JSON value. The job keeps it even when it is killed and passes the reports of
    all inputs to the rounder's `notes`.
    """

    state: Any
    report: Any = None


class Transform(Protocol):
    """A file in `transforms`."""

    def apply(
        self,
        block: "Mapping[str, Tensor]",
        pairs: Sequence[Pair],
        stats: Mapping[str, Stats],
        schemes: Mapping[str, Scheme],
    ) -> Transformed:
        """Returns the block with its pairs scaled; `stats` and `schemes` are by module."""


class Fit(Protocol):
    """A file in `fits`."""

    def fit(self, weight: "Tensor", grid: Grid, whole: "Tensor | None" = None, stats: Stats | None = None) -> Params:
        """Returns the grid's parameters for a weight (rows, columns), scales rounded to their stored dtype.

        `whole` is the largest magnitude of all weights that share a per-tensor scale with this one.
        """


class Rounder(Protocol):
    """A file in `rounders`."""

    __name__: str  # of the module

    def prepare(self, stats: Stats) -> Prepared:
        """Does the work that all layers with the same input share."""

    def round_weight(self, weight: "Tensor", grid: Grid, params: Params, prepared: Prepared | None) -> QTensor:
        """Returns the codes of a weight (rows, columns) for fitted parameters."""

    def round_blocks(self, weight: "Tensor", kind: str, prepared: Prepared) -> "Tensor":
        """Returns the bytes of a weight in a ggml block type, uint8 (rows, bytes of a row)."""

    def notes(self, reports: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns sentences for the model card from the reports by input."""


def transform(name: str) -> Transform:
    """Imports the transform of that name. Raises UnknownNameError."""
    return cast(Transform, registry.load(TRANSFORMS, name))


def fit(name: str) -> Fit:
    """Imports the fit of that name. Raises UnknownNameError."""
    return cast(Fit, registry.load(FITS, name))


def rounder(name: str) -> Rounder:
    """Imports the rounder of that name. Raises UnknownNameError."""
    return cast(Rounder, registry.load(ROUNDERS, name))
