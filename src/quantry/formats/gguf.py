"""GGUF: one file with tensors in ggml's block types, metadata and vocabulary, as llama.cpp and its relatives read it.

Other formats hold layers inside a Hugging Face folder; this one is a container of its own (containers/gguf_file.py)
with its own tensor names and order of weights (llamacpp/tensor_map.py). This file arranges one weight as llama.cpp
expects it, and restores a decoded one.
"""

from typing import TYPE_CHECKING

from quantry.types import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantry.llamacpp.tensor_map import Target

NAME = "gguf"
QUANT_METHODS = ()
CASTS = ("f16", "bf16")
BLOCKS = (
    "q8_0", "q6_k", "q5_k", "q5_0", "q5_1", "q4_k", "q4_0", "q4_1", "q3_k", "q2_k", "iq4_nl", "iq4_xs",
)  # fmt: skip


def refusal(scheme: Scheme) -> str | None:
    """Says why GGUF cannot hold a scheme; None if it can."""
    kind = scheme.weight.kind
    if kind not in CASTS + BLOCKS:
        return f"gguf holds ggml's block types, not {kind}"
    return None if scheme.activation is None else "gguf holds weights only, not quantized activations"


def arranged(weight: "Tensor", target: "Target") -> "Tensor":
    """Arranges a weight as llama.cpp expects it: rotary halves interleaved within each head, 1 added to a norm."""
    if target.heads is not None:
        halves = weight.reshape(target.heads, 2, weight.shape[0] // target.heads // 2, *weight.shape[1:])
        weight = halves.swapaxes(1, 2).reshape(weight.shape)
    return weight.float() + target.add if target.add else weight


def restored(weight: "Tensor", target: "Target") -> "Tensor":
    """Inverts `arranged`."""
    if target.heads is not None:
        pairs = weight.reshape(target.heads, weight.shape[0] // target.heads // 2, 2, *weight.shape[1:])
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    return weight - target.add if target.add else weight


def decode(data: "Tensor", kind: str, columns: int) -> "Tensor":
    """Returns the float32 values of stored bytes."""
    from quantry.numerics import ggml

    return ggml.dequantize(data, kind, columns)
