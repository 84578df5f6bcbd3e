"""Stored weights as something to train: their scales, and their codes if that is asked for.

A factor of each scale is trained as its logarithm, 0 at first. `weight` is computed with scales as the file would hold
them, and gradients pass through that rounding as if it were not there; with all factors 1 it is, bit for bit, what the
file gives. Sub-block scales of ggml's types are small whole numbers and are trained in the same way.

Codes are trained as `places` between the values of the grid: where the 16-bit weights lie, as far as the stored code is
the nearest. Gradients pass through this rounding too.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any, Protocol

import torch
from torch import Tensor

from quantry.errors import RecipeError
from quantry.numerics.blocks import cut, join, spread
from quantry.numerics.codebooks import BOOKS, e2m1_values
from quantry.numerics.ggml import layout
from quantry.numerics.grids import code_range, effective_scale, encode
from quantry.numerics.scales import SMALLEST_E4M3, stored
from quantry.types import Grid, Params, QTensor

LARGEST_E4M3 = 448.0
INSIDE = 0.98  # of the way to the border of a code, at most, at first
LEARNED = ("int", "e2m1")  # the kinds of grids whose codes are trained
SUB_SCALES = {  # the smallest and largest of a type's sub-block scales; mins begin at 0
    "Q2_K": (0, 15), "Q3_K": (-32, 31), "Q4_K": (0, 63), "Q5_K": (0, 63), "Q6_K": (-128, 127), "IQ4_XS": (-32, 31),
}  # fmt: skip


class TrainedWeight(Protocol):
    """One stored matrix."""

    logs: list[Tensor]  # what is trained: logarithms of factors
    places: Tensor | None  # what is trained of codes: values before the scale, between those of the grid

    def learn_codes(self, original: Tensor) -> Tensor:
        """Makes the codes something to train from now on, near an unrounded matrix; returns `places`."""

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix, differentiable with respect to `logs` and `places`."""


class TrainedGrid:
    """A QTensor."""

    places: Tensor | None = None

    def __init__(self, tensor: QTensor) -> None:
        self._tensor, self._grid = tensor, tensor.grid
        self._units = _units(tensor)
        self.logs = [_zeros(effective_scale(self._grid, tensor.params))]

    @torch.no_grad()
    def learn_codes(self, original: Tensor) -> Tensor:
        """Makes the codes something to train from now on, near an unrounded matrix; returns `places`."""
        shape, scale = (original.shape[0], original.shape[1]), effective_scale(self._grid, self._tensor.params)
        wished = join(cut(original.float(), self._grid) / spread(scale), shape)
        self._levels, self._zero = Levels(_values(self._grid).to(original.device)), _zero(self._tensor)
        self.places = (self._levels.held(self._units + self._zero, wished + self._zero) - self._zero).requires_grad_()
        return self.places

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix, differentiable with respect to `logs` and `places`."""
        scale = _straight(self._scaled(), effective_scale(self._grid, self._params()))
        units = self._units if self.places is None else _straight(self.places, self._snapped(self.places))
        made: Tensor = _Scaled.apply(units, scale, self._grid, dtype)  # type: ignore[no-untyped-call]
        return made

    @torch.no_grad()
    def tensor(self) -> QTensor:
        """Returns the QTensor with the trained scales and codes."""
        params = self._params()
        codes = self._tensor.codes if self.places is None else encode(self.weight(torch.float32), self._grid, params)
        return replace(self._tensor, codes=codes, params=params)

    @torch.no_grad()
    def _snapped(self, places: Tensor) -> Tensor:
        """Returns the nearest values of the grid."""
        return self._levels.nearest(places + self._zero) - self._zero

    def _scaled(self) -> Tensor:
        return effective_scale(self._grid, self._tensor.params) * self.logs[0].exp()

    @torch.no_grad()
    def _params(self) -> Params:
        params, factor = self._tensor.params, self.logs[0].exp()
        if self._grid.scale == "e8m0":
            steps = (self.logs[0] / log(2)).round().int()
            return replace(params, scale=(params.scale.int() + steps).clamp(0, 254).to(torch.uint8))
        if self._grid.scale == "e4m3":
            scale = (params.scale.float() * factor).clamp(SMALLEST_E4M3, LARGEST_E4M3)
            return replace(params, scale=scale.to(params.scale.dtype))
        return replace(params, scale=stored(params.scale.float() * factor, self._grid))


def check_grid(name: str, grid: Grid, option: str) -> None:
    """Raises RecipeError unless each scale of a grid is stored as it is and belongs to one layer."""
    if grid.kind in BOOKS or grid.nested:
        reason = "whose scales are rounded together"
    elif grid.block == (0, 0):
        reason = "whose one scale is shared with other layers"
    elif grid.is_cast:
        reason = "which has no scales"
    else:
        return
    raise RecipeError(
        f"{option} cannot train {name} as {grid.kind}, {reason}", fix=f"leave {option} out, or use another preset"
    )


class TrainedBlocks:
    """ggml blocks, from their bytes (rows, bytes of a row)."""

    places: Tensor | None = None

    def __init__(self, data: Tensor, kind: str, columns: int) -> None:
        self._kind, self._columns, self._shape = kind, columns, data.shape
        self._type = layout.BLOCKS[kind]
        self._fields = layout.unpack(kind, data.reshape(-1, self._type.bytes))
        self._levels = layout.levels(kind, self._fields.codes).to(torch.int8)
        self._size = self._type.size // (self._type.subs or 1)
        named = {name: getattr(self._fields, name) for name in ("d", "dmin", "scales", "mins")}
        self._parts: dict[str, Tensor] = {name: part for name, part in named.items() if part is not None}
        self._places = {name: place for place, name in enumerate(self._parts)}
        self.logs = [_zeros(part) for part in self._parts.values()]

    @torch.no_grad()
    def learn_codes(self, original: Tensor) -> Tensor:
        """Makes the codes something to train from now on, near an unrounded matrix; returns `places`."""
        codes = torch.arange(1 << self._type.code_bits, dtype=torch.uint8, device=original.device)
        values, order = layout.levels(self._kind, codes).sort()
        self._values, self._codes = Levels(values), codes[order]
        scale, least = self._scale_and_least({name: part.float() for name, part in self._parts.items()})
        wished = (original.float().reshape(-1, self._size) - least) / torch.where(scale == 0, 1.0, scale)
        self.places = self._values.held(self._levels.float(), wished.view(self._levels.shape)).requires_grad_()
        return self.places

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix, differentiable with respect to `logs` and `places`."""
        scale, least = self._scale_and_least({name: self._trained(name) for name in self._parts})
        levels = self._levels if self.places is None else _straight(self.places, self._values.nearest(self.places))
        made = _Scaled.apply(levels.view(-1, self._size), scale, Grid("int", 8, (1, 0)), torch.float32)  # type: ignore[no-untyped-call]
        matrix: Tensor = (made + least).reshape(-1, self._columns).to(dtype)
        return matrix

    @torch.no_grad()
    def data(self) -> Tensor:
        """Returns the bytes with the trained scales and codes, in the shape they were given in."""
        parts = {name: self._rounded(name).to(part.dtype) for name, part in self._parts.items()}
        codes = self._fields.codes
        if self.places is not None:
            codes = self._codes[self._values.index(self.places)].to(codes.dtype)
        return layout.pack(self._kind, replace(self._fields, codes=codes, **parts)).reshape(self._shape)

    def _scale_and_least(self, part: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float]:
        """Returns the scale of each sub-block and what is added to it, (sub-blocks, 1)."""
        scale = part["d"][:, None] * part["scales"] if "scales" in part else part["d"][:, None]
        least: Tensor | float = 0.0
        if "mins" in part:
            least = -(part["dmin"][:, None] * part["mins"]).reshape(-1, 1)
        elif "dmin" in part:
            least = part["dmin"][:, None]
        return scale.reshape(-1, 1), least

    def _trained(self, name: str) -> Tensor:
        return _straight(self._scaled(name), self._rounded(name))

    def _scaled(self, name: str) -> Tensor:
        return self._parts[name].float() * self.logs[self._places[name]].exp()

    @torch.no_grad()
    def _rounded(self, name: str) -> Tensor:
        """Returns the values of a part that the bytes can hold, in float32."""
        scaled = self._scaled(name)
        if name in ("d", "dmin"):
            return scaled.to(torch.float16).float()
        low, high = SUB_SCALES[self._kind]
        return scaled.round().clamp(0 if name == "mins" else low, high)


class Levels:
    """The values of a grid in ascending order."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._borders = values, (values[1:] + values[:-1]) / 2
        steps = values.diff()
        self._below, self._above = steps[:1], steps[-1:]

    def index(self, places: Tensor) -> Tensor:
        """Returns the number of the value that is nearest to each place."""
        return torch.bucketize(places, self._borders)

    def nearest(self, places: Tensor) -> Tensor:
        """Returns the value that is nearest to each place."""
        return self._values[self.index(places)]

    def held(self, values: Tensor, wished: Tensor) -> Tensor:
        """Returns what is nearest to a wished place among those from which a value of the grid is the nearest."""
        first, last = self._values[:1] - self._below / 2, self._values[-1:] + self._above / 2
        borders, index = torch.cat((first, self._borders, last)), self.index(values)
        low, high = (values + INSIDE * (borders[index + side] - values) for side in (0, 1))
        return torch.maximum(torch.minimum(wished, high), low)


def _values(grid: Grid) -> Tensor:
    if grid.kind == "int":
        low, high = code_range(grid)
        return torch.arange(low, high + 1, dtype=torch.float32)
    values: Tensor = torch.unique(e2m1_values(torch.arange(16, dtype=torch.uint8)))
    return values


def _zeros(scale: Tensor) -> Tensor:
    return torch.zeros_like(scale, dtype=torch.float32).requires_grad_()


def _straight(exact: Tensor, rounded: Tensor) -> Tensor:
    made: Tensor = _Straight.apply(exact, rounded)  # type: ignore[no-untyped-call]
    return made


def _zero(tensor: QTensor) -> Tensor | float:
    """Returns the zero point of each code."""
    if tensor.params.zero is None:
        return 0.0
    shape = (tensor.shape[0], tensor.shape[1])
    return join(cut(torch.zeros(shape, device=tensor.codes.device), tensor.grid) + spread(tensor.params.zero), shape)


def _units(tensor: QTensor) -> Tensor:
    """Returns the values of codes before the scale, in as few bytes as hold them."""
    grid, zero = tensor.grid, tensor.params.zero
    if grid.kind == "e2m1":
        return e2m1_values(tensor.codes).to(torch.bfloat16)  # twice each is a whole number up to 12: nothing is lost
    if zero is None:
        return tensor.codes
    wide = torch.int8 if grid.bits < 8 else torch.int16
    return join(cut(tensor.codes.to(wide), grid) - spread(zero.to(wide)), (tensor.shape[0], tensor.shape[1]))


class _Straight(torch.autograd.Function):
    """Puts a rounded value in the place of the exact one; gradients go to the exact one unchanged."""

    @staticmethod
    def forward(_: Any, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Scaled(torch.autograd.Function):
    """Units times their scales. Keeps the units in their few bytes, where plain operations would keep floats."""

    @staticmethod
    def forward(ctx: Any, units: Tensor, scale: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(units, scale)
        ctx.grid = grid
        blocks = cut(units.float(), grid) * spread(scale)
        return join(blocks, (units.shape[0], units.shape[1])).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        units, scale = ctx.saved_tensors
        gradient, shape, of_units = gradient.float(), (units.shape[0], units.shape[1]), None
        if ctx.needs_input_grad[0]:
            of_units = join(cut(gradient, ctx.grid) * spread(scale), shape)
        return of_units, cut(gradient * units.float(), ctx.grid).sum((1, 3)), None, None
