"""The loop within a block in torch, for any dtype and device: the reference for the faster versions."""

import torch
from torch import Tensor

from quantry.numerics.ladders import Ladder


def block(ladder: Ladder, weight: Tensor, step: Tensor, shift: Tensor | None, upper: Tensor, error: Tensor) -> None:
    """Turns weights (columns, rows) into levels in place; leaves in `error` what later blocks must compensate.

    `step` and `shift` are those of each weight, `upper` the part of U that belongs to these columns.
    """
    divisor = torch.where(step == 0, torch.ones_like(step), step)
    for j in range(weight.shape[0]):
        column = weight[j]
        moved = column.clone() if shift is None else column + shift[j]
        level = ladder.nearest(moved.div_(divisor[j]))
        value = level * step[j]
        if shift is not None:
            value -= shift[j]
        torch.sub(column, value, out=error[j]).div_(upper[j, j])
        weight[j + 1 :].addr_(upper[j, j + 1 :], error[j], alpha=-1)
        column.copy_(level)
