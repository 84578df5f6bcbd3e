"""Codes column by column: later columns compensate the rounding error of earlier ones.

This is the loop of GPTQ (Frantar et al., 2022) for any grid whose scales are known. Let U be upper triangular, with U'U
the inverse of the Hessian. The loop subtracts the error of column j over U[j, j], times row j of U, from later columns:
within a block of 128 columns at once, from the columns behind the block by one matrix product.

Rows are independent. They come last, (columns, rows), so that a column is contiguous, and are processed in chunks, over
threads on the CPU. The loop within a block exists three times: in torch (`plain`, any dtype and device), as machine
code for the CPU (`compiled`, 15 times as fast there), and for a GPU (`gpu`, if Triton is installed).
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from quantry.numerics.error_feedback import compiled, plain
from quantry.numerics.ladders import Ladder
from quantry.numerics.simd import AVAILABLE
from quantry.numerics.threads import spread

COLUMNS = 128  # in a block
TILE = 16  # rows come in multiples of this, the lanes of `compiled`
CHUNK = 64  # tiles that a thread takes at a time
GPU_CHUNK = 1 << 26  # weights in a chunk on a GPU: 256 MiB in float32, in three copies

BlockLoop = Callable[[Ladder, Tensor, Tensor, Tensor | None, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """The values of each weight: level * step - shift. Column j uses row `group[j]` of step and shift."""

    ladder: Ladder
    group: Tensor  # (columns,) int64
    step: Tensor  # (groups, rows); where it is 0, any code will do
    shift: Tensor | None = None  # (groups, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """U, for columns in the order of visit."""

    upper: Tensor  # (columns, columns), in the dtype to compute in
    order: Tensor  # (columns,) int64
    back: Tensor  # (columns,) int64: the position of each column in the order


@dataclass(frozen=True, slots=True)
class Codes:
    """The stored form of levels."""

    dtype: torch.dtype
    encode: Callable[[Tensor], Tensor]  # may overwrite its argument


def choose(weight: Tensor, lattice: Lattice, factor: Factor, codes: Codes, loop: BlockLoop | None = None) -> Tensor:
    """Returns the code of each weight of (rows, columns); `loop` is the loop within a block, by default the fastest."""
    rows, columns = weight.shape
    upper, dtype = factor.upper, factor.upper.dtype
    groups = lattice.group[factor.order]
    block = loop or _fastest(weight.device, dtype)
    result = torch.empty(rows, columns, dtype=codes.dtype, device=weight.device)

    def work(first: int, last: int) -> None:
        part = slice(first * TILE, min(last * TILE, rows))
        working = _tiled(weight[part].t(), dtype)[factor.order]
        steps = _tiled(lattice.step[:, part], dtype)
        shifts = None if lattice.shift is None else _tiled(lattice.shift[:, part], dtype)
        errors = torch.empty(min(COLUMNS, columns), working.shape[1], dtype=dtype, device=weight.device)
        for start in range(0, columns, COLUMNS):
            stop = min(start + COLUMNS, columns)
            group, error = groups[start:stop], errors[: stop - start]
            step, shift = steps[group], None if shifts is None else shifts[group]
            block(lattice.ladder, working[start:stop], step, shift, upper[start:stop, start:stop].contiguous(), error)
            working[stop:].addmm_(upper[start:stop, stop:].t(), error, alpha=-1)
        result[part] = codes.encode(working[factor.back].t()[: part.stop - part.start])

    most = CHUNK if weight.device.type == "cpu" else max(1, GPU_CHUNK // (columns * TILE))
    spread(-(-rows // TILE), most, work, weight.device)
    return result


def _tiled(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a contiguous copy, its rows filled up with ones to whole tiles."""
    height, width = matrix.shape
    tiled = torch.ones(height, width + -width % TILE, dtype=dtype, device=matrix.device)
    tiled[:, :width] = matrix
    return tiled


def _fastest(device: torch.device, dtype: torch.dtype) -> BlockLoop:
    if dtype == torch.float32 and device.type == "cpu" and AVAILABLE:
        return compiled.block
    if dtype == torch.float32 and device.type == "cuda" and find_spec("triton"):
        block: BlockLoop = import_module("quantry.numerics.error_feedback.gpu").block  # Triton takes a while to import
        return block
    return plain.block
