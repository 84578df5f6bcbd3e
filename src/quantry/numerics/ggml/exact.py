"""Float32 arithmetic that rounds as ggml's C does.

Candidates that nearly tie are decided by the last bit, so sums run in the order of a plain loop, and nothing is
multiplied with a reciprocal where C divides. Numbers lie elements first, (elements of a block, blocks): a sum over each
block is then a sum of rows.
"""

import numpy as np
import torch
from torch import Tensor

TINY = 1e-15  # a block whose largest magnitude is below counts as all zero
ALIGN = 64  # torch adds the columns of a rest, after the last whole vector, in another order
ORDERED = 16  # rows that torch adds one after another


def add_up(rows: Tensor, out: Tensor) -> Tensor:
    """The sum of all rows in their order; on the CPU columns are a multiple of `ALIGN`. Overwrites its arguments."""
    if rows.device.type != "cpu":
        out.copy_(rows[0])
        for row in rows.unbind()[1:]:
            out += row
        return out
    torch.sum(rows[:ORDERED], dim=0, out=out)
    for start in range(ORDERED, rows.shape[0], ORDERED):
        rows[start] += out
        torch.sum(rows[start : start + ORDERED], dim=0, out=out)
    return out


def extreme(x: Tensor) -> Tensor:
    """The number of largest magnitude in each column; where both signs reach it, the first."""
    high, low = x.amax(dim=0), x.amin(dim=0)
    top = torch.where(high >= -low, high, low)
    tied = (high == -low).nonzero().squeeze(1)
    if tied.numel():
        some, order = x[:, tied], torch.arange(x.shape[0], 0, -1, device=x.device)[:, None]
        first_high, first_low = (((some == end[tied]) * order).amax(dim=0) for end in (high, low))
        top[tied] = torch.where(first_low > first_high, low[tied], high[tied])
    return top.add_(0.0)  # no negative zero


def lowest(x: Tensor) -> Tensor:
    """The smallest number of each column; where it is zero, with the sign of the first one."""
    low = x.amin(dim=0)
    zero = (low == 0).nonzero().squeeze(1)
    if zero.numel():
        some, order = x[:, zero], torch.arange(x.shape[0], device=x.device)[:, None]
        first = torch.where(some == 0, order, x.shape[0]).amin(dim=0)
        low[zero] = some.gather(0, first[None])[0]
    return low


def over(number: float, below: Tensor) -> Tensor:
    """number / below, rounded once; torch's own operator multiplies with the reciprocal."""
    return torch.tensor(number, dtype=torch.float32, device=below.device) / below


def divide(above: Tensor, number: float) -> Tensor:
    """above / number, rounded once; on a GPU torch's own operator multiplies with the reciprocal."""
    return above / torch.tensor(number, dtype=torch.float32, device=above.device)


def reciprocal(d: Tensor) -> Tensor:
    """1 / d, and 0 for 0."""
    return torch.where(d != 0, d.reciprocal(), 0.0)


def root(x: Tensor) -> Tensor:
    """The square root in place, correctly rounded: on a CPU torch's own is an ulp off for one number in five."""
    if x.device.type == "cpu":
        np.sqrt(x.numpy(), out=x.numpy())
        return x
    return x.sqrt_()


def aligned(count: int, device: torch.device) -> int:
    """So many columns, or on the CPU a few more, that `add_up` adds all of them in order."""
    return count + -count % ALIGN if device.type == "cpu" else count
