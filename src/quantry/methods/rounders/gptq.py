"""GPTQ: codes chosen column by column, so that later columns make up for the rounding errors of earlier ones.

What counts is the error of a layer's output, tr(dW G dW') with the Gram matrix G of its input. Columns that have not
been rounded yet can take back most of what a rounded one did wrong, as far as their inputs are correlated; G plus some
damping says by how much (Frantar et al., 2022; `numerics/feedback` has the loop).

The parameters of the grid are fitted to the whole weight before, and stay. So columns can be visited by falling power
of their input (the "act order": what matters most is rounded while most can still be made up for), and nothing has to
be reordered when the model runs. ggml's types keep the scales and minima that its search finds.

A channel that calibration never saw has no correlations: it is rounded to nearest, and its error goes nowhere.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantry.errors import RecipeError, WeightError
from quantry.numerics import error_feedback as feedback
from quantry.numerics import ggml, ladders
from quantry.numerics.blocks import block_of
from quantry.numerics.codebooks import nearest_e2m1
from quantry.numerics.error_feedback import Codes, Factor, Lattice
from quantry.numerics.ggml import lattice as blocks
from quantry.numerics.ggml.layout import BLOCKS, pack, unpack
from quantry.numerics.grids import code_dtype, effective_scale
from quantry.types import Grid, Params, QTensor, Stats

DAMPING = 0.01  # of the mean of the Gram matrix's diagonal
MOST_DAMPING = 1.0
KINDS = ("int", *ladders.MANTISSA)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What all linears that share an input share: U, and what an error in each column counts when scales are fitted.

    `damping` is what was used in the end, `note` says so if it is more than was asked for.
    """

    factor: Factor
    importance: Tensor  # (channels,) float32
    damping: float
    note: str | None = None


def prepare(stats: Stats, damping: float = DAMPING, order: bool = True, dtype: torch.dtype = torch.float32) -> Prepared:
    """Factorizes the Hessian, on the device of the Gram matrix; worth keeping for all linears that read this input.

    With `order` columns are visited by falling power of their input. `dtype` is what codes will be computed in.
    """
    gram = stats.gram
    if not 0 <= damping <= MOST_DAMPING:
        raise RecipeError(f"a damping of {damping:g} is not from 0 to {MOST_DAMPING:g}", fix=f"leave it at {DAMPING:g}")
    if not torch.isfinite(torch.stack(gram.aminmax())).all():  # NaN goes through both
        raise WeightError(
            "the Gram matrix of an input has NaN or infinite entries", fix="calibrate in bfloat16 or float32"
        )
    power = gram.diagonal()
    visit = torch.argsort(power, descending=True, stable=True) if order else torch.arange(len(gram), device=gram.device)
    back = torch.argsort(visit)
    lower, used = _factorize(gram, visit.flip(0), damping)
    diagonal = lower.diagonal().double().flip(0)
    lower = lower.to(dtype)  # before it is copied once more
    upper = lower.flip((0, 1))
    raised = f"the Gram matrix of an input needed a damping of {used:g} instead of {damping:g}"
    importance = (power.double().clamp(min=0) / diagonal[back].square()).sqrt().float()
    return Prepared(Factor(upper, visit, back), importance, used, None if used == damping else raised)


def round_weight(weight: Tensor, grid: Grid, params: Params, stats: Stats | Prepared | None = None) -> QTensor:
    """Codes of a weight (rows, columns) for parameters that are fitted; `stats` may have been prepared before."""
    if grid.kind not in KINDS:
        raise RecipeError(f"gptq cannot round onto {grid.kind}", fix="choose the rounder nearest")
    prepared = _prepared(stats, weight)
    codes = Codes(code_dtype(grid), (lambda levels: nearest_e2m1(levels.float())) if grid.kind == "e2m1" else _same)
    return QTensor(grid, feedback.choose(weight, _lattice(grid, params, weight), prepared.factor, codes), params)


def round_blocks(weight: Tensor, kind: str, stats: Stats | Prepared | None = None) -> Tensor:
    """Weights (rows, columns) in one of ggml's types: uint8 (rows, bytes of a row)."""
    prepared = _prepared(stats, weight)
    data = ggml.quantize(weight, kind, prepared.importance)
    if kind not in BLOCKS:
        return data
    fields = unpack(kind, data.view(-1, BLOCKS[kind].bytes))
    lattice = blocks.lattice(kind, fields, weight.shape[1])
    codes = feedback.choose(weight, lattice, prepared.factor, blocks.codes(kind))
    return pack(kind, replace(fields, codes=codes.view(-1, BLOCKS[kind].size))).view(data.shape)


def _prepared(stats: Stats | Prepared | None, weight: Tensor) -> Prepared:
    if stats is None:
        raise RecipeError("gptq needs statistics of the inputs", fix="calibrate on data, or choose the rounder nearest")
    prepared = stats if isinstance(stats, Prepared) else prepare(stats)
    if prepared.importance.shape != (weight.shape[1],):
        raise WeightError(
            f"statistics of {len(prepared.importance)} channels for a weight of {weight.shape[1]} columns",
            fix="calibrate with this model",
        )
    return prepared


def _factorize(gram: Tensor, order: Tensor, damping: float) -> tuple[Tensor, float]:
    """The inverse of the Cholesky factor of the damped Gram matrix in this order, and the damping that it took.

    In the order opposite to that of the visits, its reverse is the upper triangle U with U'U the inverse of the damped
    matrix: half the work of the three steps that are usual, and the inverse itself is never formed. It is done in
    float64; on a GPU, where float64 may be 64 times as slow, only where float32 fails. Gram matrices are large (0.8 GB
    at 14336 channels), so both steps work in place: beside the one that is given there are two.
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
    """The Cholesky factor of the matrix in this order with something added to its diagonal; none if there is none."""
    # column by column, as LAPACK has matrices, and gathered without a copy of only the rows
    damped = gram[order[None, :], order[:, None]].to(dtype).mT
    damped.diagonal().add_(added)
    failed = torch.empty((), dtype=torch.int32, device=gram.device)
    torch.linalg.cholesky_ex(damped, out=(damped, failed))
    return None if failed else damped


def _lattice(grid: Grid, params: Params, weight: Tensor) -> Lattice:
    """Where the values of a weight lie, given the parameters of its grid."""
    rows, columns = weight.shape
    tall, wide = block_of(grid, (rows, columns))

    def by_row(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(tall, dim=0)[:rows].t()

    step = by_row(effective_scale(grid, params))
    shift = None if params.zero is None else step * by_row(params.zero.float())
    return Lattice(ladders.of_grid(grid), torch.arange(columns, device=weight.device) // wide, step, shift)


def _same(levels: Tensor) -> Tensor:
    """Levels that become codes when they are copied."""
    return levels
