"""ggml's blocks as a lattice, for error feedback: the values of each weight once scales are chosen, and their codes."""

import torch
from torch import Tensor

from quantry.numerics.error_feedback import Codes, Lattice
from quantry.numerics.ggml.layout import BLOCKS, IQ4, Fields, Plane
from quantry.numerics.ladders import Ladder


def lattice(type_name: str, fields: Fields, columns: int) -> Lattice:
    """Returns the lattice of rows of `columns` weights, from the scales and minima of their blocks."""
    block, d = BLOCKS[type_name], fields.d.float()[:, None]
    step = d if fields.scales is None else d * fields.scales.float()
    shift = None
    if fields.dmin is not None:
        low = fields.dmin.float()[:, None]
        shift = -low if fields.mins is None else low * fields.mins.float()
    size = block.size // max(block.subs, 1)
    group = torch.arange(columns, device=d.device) // size
    by_row = [None if part is None else part.reshape(-1, columns // size).t() for part in (step, shift)]
    assert by_row[0] is not None
    return Lattice(ladder(type_name), group, by_row[0], by_row[1])


def ladder(type_name: str) -> Ladder:
    """Returns the values that the codes of a type stand for."""
    if type_name.startswith("IQ4"):
        return Ladder(IQ4[0], IQ4[-1], rungs=IQ4)
    if type_name == "Q8_0":
        return Ladder(-127, 127)  # ggml never writes -128, and its kernels may not expect it
    block = BLOCKS[type_name]
    bits = sum(part.bits for part in block.parts if isinstance(part, Plane) and part.of == "codes")
    return Ladder(-block.zero, (1 << bits) - 1 - block.zero)


def codes(type_name: str) -> Codes:
    """Returns the stored form of a type's levels."""
    zero = 0 if type_name == "Q8_0" else BLOCKS[type_name].zero

    def encode(levels: Tensor) -> Tensor:
        if type_name.startswith("IQ4"):
            rungs = torch.tensor(IQ4, dtype=levels.dtype, device=levels.device)
            return torch.searchsorted(rungs, levels.contiguous(), out_int32=True)
        if type_name == "Q8_0":
            return levels.to(torch.int8).contiguous().view(torch.uint8)
        return levels.add_(zero)

    return Codes(torch.uint8, encode)
