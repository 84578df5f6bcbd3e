"""Scales of stored weights as something to train: the codes stay, and so does every byte that is no scale.

A factor of each scale is trained as its logarithm, 0 at first. `weight` is computed with scales as the file would hold
them, and gradients pass through that rounding as if it were not there; with all factors 1 it is, bit for bit, what the
file gives. Sub-block scales of ggml's types are small whole numbers and are trained in the same way.
"""

from dataclasses import replace
from math import log
from typing import Any, Protocol

import torch
from torch import Tensor

from quantry.errors import RecipeError
from quantry.numerics.blocks import cut, join, spread
from quantry.numerics.codebooks import BOOKS, e2m1_values
from quantry.numerics.ggml import layout
from quantry.numerics.grids import effective_scale
from quantry.numerics.scales import SMALLEST_E4M3, stored
from quantry.types import Grid, Params, QTensor

LARGEST_E4M3 = 448.0
SUB_SCALES = {  # the smallest and largest of a type's sub-block scales; mins begin at 0
    "Q2_K": (0, 15), "Q3_K": (-32, 31), "Q4_K": (0, 63), "Q5_K": (0, 63), "Q6_K": (-128, 127), "IQ4_XS": (-32, 31),
}  # fmt: skip


class TrainedScales(Protocol):
    """The scales of one stored matrix."""

    logs: list[Tensor]  # what is trained: logarithms of factors

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix, differentiable with respect to `logs`."""


class GridScales:
    """The scales of a QTensor. Raises RecipeError for a grid whose scales cannot be trained one by one."""

    def __init__(self, tensor: QTensor) -> None:
        self._tensor, self._grid = tensor, tensor.grid
        self._units = _units(tensor)
        self.logs = [_zeros(effective_scale(self._grid, tensor.params))]

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix, differentiable with respect to `logs`."""
        scale = _Straight.apply(self._scaled(), effective_scale(self._grid, self._params()))  # type: ignore[no-untyped-call]
        made: Tensor = _Scaled.apply(self._units, scale, self._grid, dtype)  # type: ignore[no-untyped-call]
        return made

    def tensor(self) -> QTensor:
        """Returns the QTensor with the trained scales."""
        return replace(self._tensor, params=self._params())

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


def check_grid(name: str, grid: Grid) -> None:
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
        f"--distil cannot train {name} as {grid.kind}, {reason}", fix="leave --distil out, or use another preset"
    )


class BlockScales:
    """The scales of ggml blocks, from their bytes (rows, bytes of a row)."""

    def __init__(self, data: Tensor, kind: str, columns: int) -> None:
        self._kind, self._columns, self._shape = kind, columns, data.shape
        self._type = layout.BLOCKS[kind]
        self._fields = layout.unpack(kind, data.reshape(-1, self._type.bytes))
        self._levels = layout.levels(kind, self._fields.codes).to(torch.int8)
        named = {name: getattr(self._fields, name) for name in ("d", "dmin", "scales", "mins")}
        self._parts: dict[str, Tensor] = {name: part for name, part in named.items() if part is not None}
        self._places = {name: place for place, name in enumerate(self._parts)}
        self.logs = [_zeros(part) for part in self._parts.values()]

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix, differentiable with respect to `logs`."""
        part = {name: self._trained(name) for name in self._parts}
        size = self._type.size // (self._type.subs or 1)
        scale = part["d"][:, None] * part["scales"] if "scales" in part else part["d"][:, None]
        grid = Grid("int", 8, (1, 0))
        units = self._levels.view(-1, size)
        made = _Scaled.apply(units, scale.reshape(-1, 1), grid, torch.float32)  # type: ignore[no-untyped-call]
        if "mins" in part:
            made = made - (part["dmin"][:, None] * part["mins"]).reshape(-1, 1)
        elif "dmin" in part:
            made = made + part["dmin"][:, None]
        matrix: Tensor = made.reshape(-1, self._columns).to(dtype)
        return matrix

    @torch.no_grad()
    def data(self) -> Tensor:
        """Returns the bytes with the trained scales, in the shape they were given in."""
        parts = {name: self._rounded(name).to(part.dtype) for name, part in self._parts.items()}
        return layout.pack(self._kind, replace(self._fields, **parts)).reshape(self._shape)

    def _trained(self, name: str) -> Tensor:
        made: Tensor = _Straight.apply(self._scaled(name), self._rounded(name))  # type: ignore[no-untyped-call]
        return made

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


def _zeros(scale: Tensor) -> Tensor:
    return torch.zeros_like(scale, dtype=torch.float32).requires_grad_()


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
        ctx.save_for_backward(units)
        ctx.grid = grid
        blocks = cut(units.float(), grid) * spread(scale)
        return join(blocks, (units.shape[0], units.shape[1])).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        (units,) = ctx.saved_tensors
        return None, cut(gradient.float() * units.float(), ctx.grid).sum((1, 3)), None, None
