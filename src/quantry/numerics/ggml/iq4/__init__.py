"""ggml's 4-bit types with uneven levels: IQ4_NL (a scale for 32 weights) and IQ4_XS (sub-block scales within 256).

The search tries 16 scales for each 32 weights, takes for every weight the nearest level and keeps the scale whose
levels fit best. The expensive parts exist twice: in torch (`batched`) and as machine code for the CPU (`compiled`, if
llvmlite is installed).
"""

from typing import Protocol

import torch
from torch import Tensor

from quantry.numerics.ggml.exact import extreme, reciprocal
from quantry.numerics.ggml.iq4 import batched, compiled
from quantry.numerics.ggml.layout import Fields
from quantry.numerics.simd import AVAILABLE

TYPES = ("IQ4_NL", "IQ4_XS")


class IQ4Backend(Protocol):
    """The expensive parts of the search; `batched` documents each."""

    def fit(self, weight: Tensor, importance: Tensor | None) -> Tensor: ...
    def nearest(self, weight: Tensor, inverse: Tensor) -> Tensor: ...


def search(
    type_name: str, weight: Tensor, importance: Tensor | None = None, backend: IQ4Backend | None = None
) -> Fields:
    """Returns codes and scales of blocks (n, 32 or 256) in float32, with importance in the same shape."""
    backend = backend or (compiled if weight.device.type == "cpu" and AVAILABLE else batched)
    scale = backend.fit(weight, importance)
    if type_name == "IQ4_NL":
        return Fields(backend.nearest(weight, reciprocal(scale)), scale[:, 0].half())
    d = extreme(scale.t()) / -32
    multiples = (scale * reciprocal(d)[:, None]).round_().clamp_(-32, 31)
    codes = backend.nearest(weight, reciprocal(multiples * d[:, None]))
    return Fields(codes, d.half(), scales=multiples.to(torch.int8))
