"""transformers' own models, run plainly: what walks and decoded artefacts are compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

LENGTHS = (70, 33, 70, 5, 70, 70, 300)  # longer than Gemma's sliding window of 64 and Phi's of 256


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a folder, with experts one by one."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def windows(vocabulary: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def plain_int8(inputs: Tensor) -> Tensor:
    """Inputs rounded token by token to 8-bit integers and back."""
    scale = inputs.abs().amax(-1, keepdim=True) / 127
    return (inputs / scale).round() * scale


def quantizing_experts(experts: Any) -> Any:
    """The forward of a stack of experts with quantized inputs; sums are those of transformers, as rounding is steep."""

    def forward(hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        made = torch.zeros_like(hidden)
        for expert in range(experts.num_experts):
            rank, token = torch.where((chosen == expert).T)
            gate, up = (plain_int8(hidden[token]) @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
            inner = plain_int8(torch.nn.functional.silu(gate) * up)
            made.index_add_(0, token, inner @ experts.down_proj[expert].T * shares[token, rank, None])
        return made

    return forward
