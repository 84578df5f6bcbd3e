"""A stored model that computes with trainable scales, in the memory of the whole model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantry.blockwise.skeleton import Skeleton
from quantry.blockwise.taps import LinearInputs, Place
from quantry.formats.gguf import restored
from quantry.models.weights import MappedWeights, as_bytes
from quantry.numerics.activations import simulate
from quantry.numerics.ggml.layout import BLOCKS
from quantry.quantizing import restore
from quantry.quantizing.distil.scales import BlockScales, GridScales, TrainedScales
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.quantizing.sources import open_stored
from quantry.types import Activation, TensorInfo


@dataclass(frozen=True, slots=True, eq=False)
class TrainedMatrix:
    """A matrix of the checkpoint with trainable scales."""

    name: str  # in the checkpoint
    scales: TrainedScales
    arrange: Callable[[Tensor], Tensor]  # from the order of the file into that of the checkpoint
    stored: Callable[[], Mapping[str, Tensor]]  # the tensors of the file with the trained scales


class Student:
    """The model in `folder`, whose logits are differentiable with respect to the logarithms in `logs`."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        source = open_stored(folder, str(device))
        self._skeleton, self._dtype = Skeleton(source, device, dtype), dtype
        single = _single(self._skeleton)
        matrices = _gguf(folder, device) if source.format == "gguf" else _folder(folder, device)
        self._matrices = {single[matrix.name]: matrix for matrix in matrices if matrix.name in single}
        skeleton = self._skeleton
        tied = {key: own for key, own in skeleton.tied.items() if own in self._matrices}
        self._tied = tied
        skeleton.load(skeleton.keys - self._matrices.keys() - tied.keys())
        self._run = _Run(skeleton.model, skeleton.activations)
        self.logs = [log for matrix in self._matrices.values() for log in matrix.scales.logs]

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits of (windows, tokens)."""
        weights = {key: matrix.arrange(matrix.scales.weight(self._dtype)) for key, matrix in self._matrices.items()}
        weights |= {key: weights[own] for key, own in self._tied.items()}
        named = {f"model.{key}": weight for key, weight in weights.items()}
        made: Tensor = torch.func.functional_call(self._run, named, (tokens,))
        return made

    def stored(self) -> dict[str, Tensor]:
        """Returns the tensors of the file that training has changed, by name."""
        return {name: tensor for matrix in self._matrices.values() for name, tensor in matrix.stored().items()}


class _Run(nn.Module):
    """The model with quantized inputs, through whose rounding gradients pass unchanged."""

    def __init__(self, model: nn.Module, activations: Mapping[Place, Activation]) -> None:
        super().__init__()
        self.model, self._activations = model, activations

    def forward(self, tokens: Tensor) -> Any:
        with LinearInputs(self.model, "", self._rounded):
            return self.model(input_ids=tokens, use_cache=False).logits

    def _rounded(self, name: str, expert: int | None, inputs: Tensor) -> Tensor | None:
        activation = self._activations.get((name, expert))
        if activation is None:
            return None
        rounded = simulate(inputs.detach(), activation).to(inputs.dtype)
        return inputs + (rounded - inputs).detach()


def _single(skeleton: Skeleton) -> dict[str, str]:
    """Returns the tensors of the checkpoint that are a parameter of the model by themselves, and which."""
    makers: dict[str, list[str]] = {}
    for name, keys in skeleton.makes.items():
        for key in keys:
            makers.setdefault(key, []).append(name)
    return {
        name: keys[0] for name, keys in skeleton.makes.items() if len(keys) == 1 and makers[keys[0]] == [name]
    }  # others are parts of a stack of experts


def _folder(folder: Path, device: torch.device) -> Iterator[TrainedMatrix]:
    model = QuantizedModel(folder, str(device))
    for module in model.schemes:
        scales = GridScales(model.read(module))

        def stored(module: str = module, scales: GridScales = scales) -> Mapping[str, Tensor]:
            before, after = model.stored(module), model.codec.encode(module, scales.tensor())
            return {name: tensor for name, tensor in after.items() if as_bytes(tensor) != as_bytes(before[name])}

        yield TrainedMatrix(f"{module}.weight", scales, _as_it_is, stored)


def _gguf(folder: Path, device: torch.device) -> Iterator[TrainedMatrix]:
    file = restore.open_file(folder)
    weights = MappedWeights(file.folder)
    for tensor, target in file.pairs:
        whole = len(target.sources) == 1 and len(tensor.shape) == 2 and not target.sources[0].flip
        if tensor.dtype not in BLOCKS or not whole or target.sources[0].rows:
            continue
        scales = BlockScales(_raw(weights, tensor).to(device), tensor.dtype, tensor.shape[1])

        yield TrainedMatrix(
            target.sources[0].name,
            scales,
            partial(restored, target=target),
            lambda name=tensor.name, scales=scales: {name: scales.data()},  # type: ignore[misc]
        )


def _raw(weights: MappedWeights, tensor: TensorInfo) -> Tensor:
    """Returns the bytes of a tensor, by row."""
    return weights.get(replace(tensor, dtype="U8", shape=(tensor.shape[0], tensor.nbytes // tensor.shape[0])))


def _as_it_is(weight: Tensor) -> Tensor:
    return weight
