"""What a stored model is trained on, the same for every stage of training."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantry.blockwise.skeleton import WeightSource


@dataclass(frozen=True, slots=True)
class Lessons:
    """The 16-bit model that teaches, the text, and how it is computed."""

    source: WeightSource
    windows: Sequence[Sequence[int]]
    labels: Sequence[int]  # which of several texts each window is from; none for one text
    device: torch.device
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        """The type that training computes in: gradients are too small for a CPU's bfloat16."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32
