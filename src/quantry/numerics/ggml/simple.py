"""ggml's types with one scale for 32 weights: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1.

Without importance the extremes of a block decide, and every operation is ggml's: the bytes are equal. With importance
ggml searches as for the k-quants: a row of step sizes, each with the best scale (and minimum) for its codes (a minimum
of zero may then differ in its sign, which changes nothing). Tensors are elements first, (32, blocks).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantry.numerics.ggml.exact import ALIGN, add_up, aligned, divide, extreme, lowest, reciprocal, root
from quantry.numerics.ggml.kquants import batched, compiled
from quantry.numerics.ggml.kquants.rules import FINE, SUPER, SearchRule
from quantry.numerics.ggml.layout import Fields
from quantry.numerics.simd import AVAILABLE

TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
SIZE = 32
WHOLE = ALIGN * SUPER  # weights searched with importance are a multiple
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5}
SYMMETRIC = ("Q4_0", "Q5_0")
WITH_MINIMUM = ("Q4_1", "Q5_1")
BELOW_HALF = 0.49999997  # the float32 before 0.5: adding it and cutting off rounds halves away from zero, as C does


def search(type_name: str, weight: Tensor, importance: Tensor | None = None) -> Fields:
    """Returns codes and scales of rows in float32 (rows, columns), given the importance of each column or None."""
    x = weight.view(-1, SIZE).t()
    if type_name == "Q8_0":  # it takes no importance
        return _eight(x)
    if importance is not None:
        return _weighted(type_name, weight, importance)
    return _affine(x, BITS[type_name]) if type_name in WITH_MINIMUM else _symmetric(x, BITS[type_name])


def _eight(x: Tensor) -> Fields:
    d = divide(x.abs().amax(dim=0), 127)
    scaled = x * reciprocal(d)
    scaled += torch.copysign(torch.tensor(BELOW_HALF, device=x.device), scaled)
    return Fields(scaled.int().to(torch.int8).view(torch.uint8).t(), d.half())


def _symmetric(x: Tensor, bits: int) -> Fields:
    half = 1 << (bits - 1)
    d = extreme(x) / -half
    scaled = (x * reciprocal(d)).add_(half + 0.5)
    return Fields(_cut(scaled, bits), d.half())


def _affine(x: Tensor, bits: int) -> Fields:
    low = lowest(x)
    d = divide((x.amax(dim=0) - low).add_(0.0), (1 << bits) - 1)
    scaled = ((x - low) * reciprocal(d)).add_(0.5)
    return Fields(_cut(scaled, bits), d.half(), low.half())


def _cut(scaled: Tensor, bits: int) -> Tensor:
    """Truncates scaled weights (32, n) to codes (n, 32)."""
    return scaled.int().clamp_(max=(1 << bits) - 1).to(torch.uint8).t()


def _weighted(type_name: str, weight: Tensor, importance: Tensor) -> Fields:
    """Searches with importance: blocks are sub-blocks of k-quants, whose codes stay those of the search."""
    errors = root((weight * weight).add_(_power(weight)[:, None])).mul_(importance)
    x, errors = (pad(part.flatten(), (0, -part.numel() % WHOLE)).view(-1, SUPER) for part in (weight, errors))
    top = 1 << BITS[type_name]
    if type_name in WITH_MINIMUM:
        rule = SearchRule(SIZE, top - 1, 0)
        fit = batched.fit_affine(rule, FINE, x, errors)
        codes = batched.round_affine(rule, x, fit, torch.zeros_like(fit.scale), fit.minimum)
        return _fields(weight, codes, fit.scale, -fit.minimum)
    rule = SearchRule(SIZE, top // 2, 0)
    backend = compiled if weight.device.type == "cpu" and AVAILABLE else batched
    fit = backend.fit_symmetric(rule, x, errors)
    return _fields(weight, backend.round_symmetric(rule, x, fit, torch.zeros_like(fit.scale)), fit.scale)


def _fields(weight: Tensor, codes: Tensor, scale: Tensor, low: Tensor | None = None) -> Fields:
    """Returns the fields of blocks, without those that filled up the last super-block; scales are (8, super-blocks)."""
    blocks = weight.numel() // SIZE
    d, dmin = (None if part is None else part.t().flatten()[:blocks].half() for part in (scale, low))
    assert d is not None
    return Fields(codes.view(-1, SIZE)[:blocks], d, dmin)


def _power(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    squares = weight.new_zeros(columns, aligned(rows, weight.device))
    squares[:, :rows] = (weight * weight).t()
    return divide(add_up(squares, weight.new_empty(squares.shape[1]))[:rows], columns)
