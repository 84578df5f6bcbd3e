"""A stored model that computes with what is trained, in the memory of the whole model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantry.blockwise.skeleton import Skeleton
from quantry.blockwise.taps import LinearInputs, Place
from quantry.numerics.activations import simulate
from quantry.quantizing.distil.matrices import StoredMatrices
from quantry.quantizing.sources import open_stored
from quantry.types import Activation


class Student:
    """The model in `folder`, whose logits are differentiable with respect to the logarithms in `logs`."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        skeleton, self._dtype = Skeleton(open_stored(folder, str(device)), device, dtype), dtype
        self._matrices = StoredMatrices(folder, skeleton, device).inside()
        self._tied = {key: own for key, own in skeleton.tied.items() if own in self._matrices}
        skeleton.load(skeleton.keys - self._matrices.keys() - self._tied.keys())
        self._run = RoundedInputs(skeleton.model, "", skeleton.activations)
        self.logs = [log for matrix in self._matrices.values() for log in matrix.trained.logs]

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits of (windows, tokens)."""
        weights = {key: matrix.weight(self._dtype) for key, matrix in self._matrices.items()}
        weights |= {key: weights[own] for key, own in self._tied.items()}
        made: Tensor = self._run.with_weights(weights, input_ids=tokens, use_cache=False).logits
        return made

    def stored(self) -> dict[str, Tensor]:
        """Returns the tensors of the file that training has changed, by name."""
        return {name: tensor for matrix in self._matrices.values() for name, tensor in matrix.stored().items()}


class RoundedInputs(nn.Module):
    """A module with quantized inputs, through whose rounding gradients pass unchanged."""

    def __init__(self, model: nn.Module, prefix: str, activations: Mapping[Place, Activation]) -> None:
        super().__init__()
        self.model, self._prefix, self._activations = model, prefix, activations

    def with_weights(self, weights: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Runs the module with some of its parameters replaced."""
        return torch.func.functional_call(self, {f"model.{key}": one for key, one in weights.items()}, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with LinearInputs(self.model, self._prefix, self._rounded):
            return self.model(*args, **kwargs)

    def _rounded(self, name: str, expert: int | None, inputs: Tensor) -> Tensor | None:
        activation = self._activations.get((name, expert))
        if activation is None:
            return None
        rounded = simulate(inputs.detach(), activation).to(inputs.dtype)
        return inputs + (rounded - inputs).detach()
