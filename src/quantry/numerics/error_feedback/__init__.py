"""Codes column by column, each column's rounding error taken back by the columns that are still to come.

This is the loop of GPTQ (Frantar et al., 2022) for any grid whose scales are known. With U the upper triangle of which
U'U is the inverse of the Hessian, the error of column j over U[j, j], times row j of U, is taken from later columns.
Within a block of 128 columns that happens at once; what a block owes those behind it is one matrix product.

Rows do not know of each other. They lie last, (columns, rows), so that a column is contiguous, and go through in
chunks, over threads on the CPU. The loop within a block exists three times: in torch (`plain`, any dtype and device),
as machine code for the CPU (`compiled`, 15 times as fast there), and for a GPU (`gpu`, if Triton is there).
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from quantry.numerics.error_feedback import compiled, plain
from quantry.numerics.ladders import Ladder
from quantry.numerics.threads import spread

COLUMNS = 128  # in a block
TILE = 16  # rows are handed out in multiples of this, the lanes of `compiled`
CHUNK = 64  # tiles that a thread takes at most
GPU_CHUNK = 1 << 26  # weights in a chunk on a GPU: 256 MiB in float32, of which three copies are held

Block = Callable[[Ladder, Tensor, Tensor, Tensor | None, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Where the values of each weight lie: level * step - shift. Column j has row `group[j]` of step and shift."""

    ladder: Ladder
    group: Tensor  # (columns,) int64
    step: Tensor  # (groups, rows); where it is 0 the code means nothing
    shift: Tensor | None = None  # (groups, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """U for columns in the order in which they are visited."""

    upper: Tensor  # (columns, columns), in the dtype to compute in
    order: Tensor  # (columns,) int64
    back: Tensor  # (columns,) int64: where each column stands in the order


@dataclass(frozen=True, slots=True)
class Codes:
    """How levels become what is stored."""

    dtype: torch.dtype
    encode: Callable[[Tensor], Tensor]  # may overwrite its argument


def choose(weight: Tensor, lattice: Lattice, factor: Factor, codes: Codes, block: Block | None = None) -> Tensor:
    """The code of each weight of (rows, columns); `block` is the loop within a block, the fastest if not given."""
    rows, columns = weight.shape
    upper, dtype = factor.upper, factor.upper.dtype
    group = lattice.group[factor.order]
    block = block or _fastest(weight.device, dtype)
    found = torch.empty(rows, columns, dtype=codes.dtype, device=weight.device)

    def work(first: int, last: int) -> None:
        part = slice(first * TILE, min(last * TILE, rows))
        working = _tiled(weight[part].t(), dtype)[factor.order]
        step = _tiled(lattice.step[:, part], dtype)
        shift = None if lattice.shift is None else _tiled(lattice.shift[:, part], dtype)
        _through(block, Lattice(lattice.ladder, group, step, shift), upper, working)
        found[part] = codes.encode(working[factor.back].t()[: part.stop - part.start])

    tiles = -(-rows // TILE)
    if weight.device.type == "cpu":
        spread(tiles, CHUNK, work)
    else:
        most = max(1, GPU_CHUNK // (columns * TILE))
        for first in range(0, tiles, most):
            work(first, min(first + most, tiles))
    return found


def _through(block: Block, lattice: Lattice, upper: Tensor, weight: Tensor) -> None:
    """Turns weights (columns, rows) into levels in place, all of them in the order of visit."""
    columns, rows = weight.shape
    errors = torch.empty(min(COLUMNS, columns), rows, dtype=weight.dtype, device=weight.device)
    for start in range(0, columns, COLUMNS):
        stop = min(start + COLUMNS, columns)
        group, error = lattice.group[start:stop], errors[: stop - start]
        step, shift = lattice.step[group], None if lattice.shift is None else lattice.shift[group]
        block(lattice.ladder, weight[start:stop], step, shift, upper[start:stop, start:stop].contiguous(), error)
        weight[stop:].addmm_(upper[start:stop, stop:].t(), error, alpha=-1)


def _tiled(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy whose rows are filled up with ones to whole tiles."""
    height, width = matrix.shape
    tiled = torch.ones(height, width + -width % TILE, dtype=dtype, device=matrix.device)
    tiled[:, :width] = matrix
    return tiled


def _fastest(device: torch.device, dtype: torch.dtype) -> Block:
    if dtype == torch.float32 and device.type == "cpu" and compiled.AVAILABLE:
        return compiled.block
    if dtype == torch.float32 and device.type == "cuda" and find_spec("triton"):
        block: Block = import_module("quantry.numerics.error_feedback.gpu").block  # Triton takes a while to import
        return block
    return plain.block
