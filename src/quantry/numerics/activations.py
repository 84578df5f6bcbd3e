"""The inputs of a layer as an engine with quantized activations sees them: rounded to their grid and back.

A dynamic scale comes from the largest magnitude of each token (or each group of a token), as in the engines' kernels:
absmax / 127 for int8 (not 127.5, which is for weights), absmax / 448 for E4M3. Static scales come with the artefact.
NVFP4 has both: each group has a dynamic scale in E4M3, in units of the artefact's scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantry.numerics.blocks import absmax
from quantry.numerics.grids import LARGEST, decode, encode
from quantry.numerics.scales import symmetric
from quantry.numerics.static import largest_code
from quantry.types import Activation, Params


@dataclass(frozen=True, slots=True, kw_only=True)
class Static(Activation):
    """An activation with the scale that the artefact stores: the factor of a code, or NVFP4's divisor."""

    scale: float


def simulate(inputs: Tensor, activation: Activation) -> Tensor:
    """Rounds inputs (..., channels) to the activation's grid; returns them in float32."""
    tokens = inputs.reshape(-1, inputs.shape[-1]).float()
    params = _params(tokens, activation)
    return decode(encode(tokens, activation.grid, params), activation.grid, params).view(inputs.shape)


def _params(tokens: Tensor, activation: Activation) -> Params:
    grid = activation.grid
    if isinstance(activation, Static):
        scale = torch.full((1, 1), activation.scale, device=tokens.device)
        return _local(absmax(tokens, grid), scale.view(1)) if grid.scale == "e4m3" else Params(scale)
    if not activation.dynamic or grid.scale == "e4m3":
        raise ValueError("a static activation needs the scale of its artefact: pass a Static")
    if grid.scale == "e8m0":
        return symmetric(absmax(tokens, grid), grid, tokens.new_zeros(()))
    return Params((absmax(tokens, grid) / largest_code(grid)).clamp(min=torch.finfo(torch.float32).tiny))


def _local(top: Tensor, divisor: Tensor) -> Params:
    """Returns NVFP4's scales of groups; a group too small for E4M3 gets 1, which rounds it to zeros."""
    scale = (divisor * (top / LARGEST["e2m1"])).clamp(max=LARGEST["e4m3"]).to(torch.float8_e4m3fn)
    scale = torch.where(scale.float() > 0, scale.float(), 1.0).to(torch.float8_e4m3fn)
    return Params(scale, outer=divisor)
