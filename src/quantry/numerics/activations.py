"""Inputs of a layer as an engine with quantized activations sees them: rounded to their grid and back.

Dynamic scales are found for each token (or each group of a token) from its largest magnitude, as the engines' kernels
do: absmax / 127 for int8 (not 127.5, which is for weights), absmax / 448 for E4M3.
"""

import torch
from torch import Tensor

from quantry.numerics.blocks import absmax
from quantry.numerics.grids import LARGEST, decode, encode
from quantry.types import Activation, Params


def simulate(inputs: Tensor, activation: Activation) -> Tensor:
    """The inputs (..., channels) after dynamic quantization, in float32."""
    if not activation.dynamic:
        raise ValueError("static activation scales come with the artefact and are not found here")
    grid = activation.grid
    tokens = inputs.reshape(-1, inputs.shape[-1]).float()
    largest = LARGEST[grid.kind] if grid.kind in LARGEST else float(2 ** (grid.bits - 1) - 1)
    scale = (absmax(tokens, grid) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    exact = Params(scale)
    return decode(encode(tokens, grid, exact), grid, exact).view(inputs.shape)
