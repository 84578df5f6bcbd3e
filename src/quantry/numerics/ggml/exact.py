"""Float32 arithmetic that rounds exactly as ggml's C code does.

The last bit decides between candidates that nearly tie, so sums run in the order of a plain loop, and code divides
wherever C divides. Tensors are elements first, (elements of a block, blocks): a sum over each block is a sum of rows.
"""

import numpy as np
import torch
from torch import Tensor

TINY = 1e-15  # a block counts as all zero if its largest magnitude is below this
ALIGN = 64  # torch adds the columns after the last whole vector in another order
ORDERED = 16  # rows that torch adds one after another


def add_up(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Sums (..., rows, columns) over the rows, in their order; on the CPU columns are a multiple of `ALIGN`.

    Overwrites its arguments.
    """
    if rows.device.type != "cpu":
        first, *others = rows.unbind(-2)
        total = first.clone() if out is None else out.copy_(first)
        for row in others:
            total += row
        return total
    total = torch.sum(rows[..., :ORDERED, :], dim=-2, out=out)
    for start in range(ORDERED, rows.shape[-2], ORDERED):
        rows[..., start, :] += total
        torch.sum(rows[..., start : start + ORDERED, :], dim=-2, out=total)
    return total


def extreme(x: Tensor) -> Tensor:
    """Returns the number of largest magnitude in each column; if both signs reach it, the first."""
    high, low = x.amax(dim=0), x.amin(dim=0)
    top = torch.where(high >= -low, high, low)
    tied = (high == -low).nonzero().squeeze(1)
    if tied.numel():
        some, order = x[:, tied], torch.arange(x.shape[0], 0, -1, device=x.device)[:, None]
        first_high, first_low = (((some == end[tied]) * order).amax(dim=0) for end in (high, low))
        top[tied] = torch.where(first_low > first_high, low[tied], high[tied])
    return top.add_(0.0)  # no negative zero


def lowest(x: Tensor) -> Tensor:
    """Returns the smallest number of each column; a zero has the sign of the first zero."""
    low = x.amin(dim=0)
    zero = (low == 0).nonzero().squeeze(1)
    if zero.numel():
        some, order = x[:, zero], torch.arange(x.shape[0], device=x.device)[:, None]
        first = torch.where(some == 0, order, x.shape[0]).amin(dim=0)
        low[zero] = some.gather(0, first[None])[0]
    return low


def over(number: float, below: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns number / below, rounded once; torch's own operator multiplies by the reciprocal."""
    return torch.div(torch.tensor(number, dtype=torch.float32), below, out=out)


def divide(above: Tensor, number: float) -> Tensor:
    """Returns above / number, rounded once; on a GPU torch's own operator multiplies by the reciprocal."""
    return above / torch.tensor(number, dtype=torch.float32, device=above.device)


def reciprocal(d: Tensor) -> Tensor:
    """Returns 1 / d, and 0 for 0."""
    return torch.where(d != 0, d.reciprocal(), 0.0)


def root(x: Tensor) -> Tensor:
    """Takes the square root in place, correctly rounded: on a CPU torch's own is an ulp off for one number in five."""
    if x.device.type == "cpu":
        np.sqrt(x.numpy(), out=x.numpy())
        return x
    return x.sqrt_()


def aligned(count: int, device: torch.device) -> int:
    """Returns `count` columns, on the CPU rounded up so that `add_up` adds all of them in order."""
    return count + -count % ALIGN if device.type == "cpu" else count
