"""GPTQ: chooses codes column by column, so that later columns make up for the rounding errors of earlier ones.

What counts is the error of a layer's output, tr(dW G dW') with the Gram matrix G of its input. Columns that are not
rounded yet can absorb most of the error of a rounded one, as far as their inputs are correlated; G plus some damping
says by how much (Frantar et al., 2022; `numerics/error_feedback` has the loop).

The parameters of the grid are fitted to the whole weight first and stay fixed. So columns can be visited by falling
power of their input (the "act order": what matters most is rounded while most columns can still compensate), and
nothing has to be reordered when the model runs. ggml's types keep the scales and minima that ggml's search finds.

A channel that calibration never saw has no correlations: its column is rounded to nearest, and its error is not passed
on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantry.errors import RecipeError, WeightError
from quantry.methods.contract import Prepared
from quantry.numerics import error_feedback, ggml, ladders
from quantry.numerics.blocks import block_of
from quantry.numerics.codebooks import nearest_e2m1
from quantry.numerics.error_feedback import Codes, Factor, Lattice
from quantry.numerics.ggml import lattice as blocks
from quantry.numerics.ggml.layout import BLOCKS, pack, unpack
from quantry.numerics.grids import code_dtype, effective_scale
from quantry.types import Grid, Params, QTensor, Stats

NEEDS_STATISTICS = True
GRIDS = (
    "int", "e4m3", "e5m2", "e2m1", "q8_0", "q6_k", "q5_k", "q5_0", "q5_1", "q4_k", "q4_0", "q4_1", "q3_k", "q2_k",
    "iq4_nl", "iq4_xs",
)  # fmt: skip
DAMPING = 0.01  # relative to the mean of the Gram matrix's diagonal
MOST_DAMPING = 1.0
FLAT = frozenset({"int", *ladders.MANTISSA})  # grids whose codes lie on one ladder


@dataclass(frozen=True, slots=True, eq=False)
class Factored:
    """The factor U of the Hessian, the weight of a column's error when scales are searched, and the damping used."""

    factor: Factor
    importance: Tensor  # (channels,) float32
    damping: float


def prepare(stats: Stats, damping: float = DAMPING, order: bool = True, dtype: torch.dtype = torch.float32) -> Prepared:
    """Factorizes the Hessian on the device of the Gram matrix.

    With `order`, columns are visited by falling power of their input. `dtype` is the arithmetic of the codes. The
    report is the damping, if more was needed than asked for. Raises WeightError for a Gram matrix that is not finite
    or cannot be factorized.
    """
    gram = stats.gram
    if not 0 <= damping <= MOST_DAMPING:
        raise RecipeError(f"a damping of {damping:g} is not from 0 to {MOST_DAMPING:g}", fix=f"leave it at {DAMPING:g}")
    if not torch.isfinite(torch.stack(gram.aminmax())).all():  # aminmax propagates NaN
        raise WeightError(
            "the Gram matrix of an input has NaN or infinite entries", fix="calibrate in bfloat16 or float32"
        )
    power = gram.diagonal()
    visit = torch.argsort(power, descending=True, stable=True) if order else torch.arange(len(gram), device=gram.device)
    back = torch.argsort(visit)
    inverse, used = _factorize(gram, visit.flip(0), damping)
    diagonal = inverse.diagonal().double().flip(0)
    lower = inverse.to(dtype)
    del inverse  # it may be 0.8 GB, and `flip` copies once more
    importance = (power.double().clamp(min=0) / diagonal[back].square()).sqrt().float()
    factored = Factored(Factor(lower.flip((0, 1)), visit, back), importance, used)
    return Prepared(factored, None if used == damping else used)


def round_weight(weight: Tensor, grid: Grid, params: Params, prepared: Prepared | None = None) -> QTensor:
    """Returns the codes of a weight (rows, columns) for fitted parameters. Raises RecipeError without statistics."""
    if grid.kind not in FLAT:
        raise RecipeError(f"gptq cannot round onto {grid.kind}", fix="choose the rounder nearest")
    factor = _factored(prepared, weight).factor
    encode = (lambda levels: nearest_e2m1(levels.float())) if grid.kind == "e2m1" else _same
    codes = error_feedback.choose(weight, _lattice(grid, params, weight), factor, Codes(code_dtype(grid), encode))
    return QTensor(grid, codes, params)


def round_blocks(weight: Tensor, kind: str, prepared: Prepared | None) -> Tensor:
    """Returns a weight (rows, columns) in a ggml block type, uint8 (rows, bytes of a row)."""
    factored = _factored(prepared, weight)
    data = ggml.quantize(weight, kind, factored.importance)
    if kind not in BLOCKS:
        return data
    fields = unpack(kind, data.view(-1, BLOCKS[kind].bytes))
    lattice = blocks.lattice(kind, fields, weight.shape[1])
    codes = error_feedback.choose(weight, lattice, factored.factor, blocks.codes(kind))
    return pack(kind, replace(fields, codes=codes.view(-1, BLOCKS[kind].size))).view(data.shape)


def notes(reports: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a sentence on the inputs whose Hessian needed more damping; reports are the dampings."""
    if not reports:
        return ()
    worst = max(sorted(reports), key=lambda name: reports[name])
    return (
        f"GPTQ needed more damping than usual for {len(reports)} inputs, "
        f"the most {reports[worst]:g} for that of {worst}.",
    )


def _factored(prepared: Prepared | None, weight: Tensor) -> Factored:
    if prepared is None:
        raise RecipeError("gptq needs statistics of the inputs", fix="calibrate on data, or choose the rounder nearest")
    factored: Factored = prepared.state
    if factored.importance.shape != (weight.shape[1],):
        raise WeightError(
            f"statistics of {len(factored.importance)} channels for a weight of {weight.shape[1]} columns",
            fix="calibrate with this model",
        )
    return factored


def _factorize(gram: Tensor, order: Tensor, damping: float) -> tuple[Tensor, float]:
    """Returns the inverse of the Cholesky factor of the damped Gram matrix in this order, and the damping used.

    With the order opposite to that of the visits, its reverse is the upper triangle U with U'U the inverse of the
    damped matrix: half the work of the usual three steps, and the inverse itself is never formed. Computes in float64;
    on a GPU, where float64 may be 64 times slower, only if float32 fails. Gram matrices are large (0.8 GB at 14336
    channels), so both steps work in place: there are two copies beside the original.
    """
    mean = float(gram.diagonal()[order.flip(0)].double().mean())
    while True:
        for dtype in (torch.float64,) if gram.device.type == "cpu" else (torch.float32, torch.float64):
            factor = _cholesky(gram, order, dtype, damping * mean if mean > 0 else 1.0)
            if factor is not None:
                inverse = torch.eye(len(gram), dtype=dtype, device=gram.device).mT
                return torch.linalg.solve_triangular(factor, inverse, upper=False, out=inverse), damping
        if damping == MOST_DAMPING:
            break
        damping = min(damping * 10 or DAMPING, MOST_DAMPING)
    raise WeightError(
        f"the Gram matrix of an input is not positive definite, even with {MOST_DAMPING:g} of its mean diagonal added",
        fix="accumulate it in float32 from finite activations",
    )


def _cholesky(gram: Tensor, order: Tensor, dtype: torch.dtype, added: float) -> Tensor | None:
    """Returns the Cholesky factor of the reordered matrix with `added` on its diagonal, None if it has none."""
    # column-major, as LAPACK wants it, and gathered in one copy
    damped = gram[order[None, :], order[:, None]].to(dtype).mT
    damped.diagonal().add_(added)
    failed = torch.empty((), dtype=torch.int32, device=gram.device)
    torch.linalg.cholesky_ex(damped, out=(damped, failed))
    return None if failed else damped


def _lattice(grid: Grid, params: Params, weight: Tensor) -> Lattice:
    """Returns the values that each weight may take, given the parameters of its grid."""
    rows, columns = weight.shape
    tall, wide = block_of(grid, (rows, columns))

    def by_row(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(tall, dim=0)[:rows].t()

    step = by_row(effective_scale(grid, params))
    shift = None if params.zero is None else step * by_row(params.zero.float())
    return Lattice(ladders.of_grid(grid), torch.arange(columns, device=weight.device) // wide, step, shift)


def _same(levels: Tensor) -> Tensor:
    return levels
