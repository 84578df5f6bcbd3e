"""ggml's blocks as a lattice: where the values of each weight lie once scales and minima are chosen, and its codes."""

import torch
from torch import Tensor

from quantry.numerics.error_feedback import Codes, Lattice
from quantry.numerics.ggml.layout import BLOCKS, IQ4, Fields, Plane
from quantry.numerics.ladders import Ladder


def lattice(kind: str, fields: Fields, columns: int) -> Lattice:
    """The lattice of rows of so many weights, from the scales and minima of their blocks."""
    block, d = BLOCKS[kind], fields.d.float()[:, None]
    step = d if fields.scales is None else d * fields.scales.float()
    shift = None
    if fields.dmin is not None:
        low = fields.dmin.float()[:, None]
        shift = -low if fields.mins is None else low * fields.mins.float()
    size = block.size // max(block.subs, 1)
    group = torch.arange(columns, device=d.device) // size
    by_row = [None if part is None else part.reshape(-1, columns // size).t() for part in (step, shift)]
    assert by_row[0] is not None
    return Lattice(ladder(kind), group, by_row[0], by_row[1])


def ladder(kind: str) -> Ladder:
    """What the codes of a type stand for."""
    if kind.startswith("IQ4"):
        return Ladder(IQ4[0], IQ4[-1], rungs=IQ4)
    if kind == "Q8_0":
        return Ladder(-127, 127)  # ggml never writes -128, so its kernels may not expect it
    block = BLOCKS[kind]
    bits = sum(part.bits for part in block.parts if isinstance(part, Plane) and part.of == "codes")
    return Ladder(-block.zero, (1 << bits) - 1 - block.zero)


def codes(kind: str) -> Codes:
    """How the levels of a type are stored."""
    zero = 0 if kind == "Q8_0" else BLOCKS[kind].zero

    def encode(levels: Tensor) -> Tensor:
        if kind.startswith("IQ4"):
            rungs = torch.tensor(IQ4, dtype=levels.dtype, device=levels.device)
            return torch.searchsorted(rungs, levels.contiguous(), out_int32=True)
        if kind == "Q8_0":
            return levels.to(torch.int8).contiguous().view(torch.uint8)
        return levels.add_(zero)

    return Codes(torch.uint8, encode)
