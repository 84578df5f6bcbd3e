"""The quantized matrices of a stored model as something to train, each with its place in the model and in the file."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantry.blockwise.skeleton import Skeleton
from quantry.formats.gguf import arranged, restored
from quantry.models.reader import open_checkpoint
from quantry.models.weights import MappedWeights, as_bytes
from quantry.numerics.ggml.layout import BLOCKS
from quantry.quantizing import restore
from quantry.quantizing.distil.trained import TrainedBlocks, TrainedGrid, TrainedWeight
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.types import TensorInfo


@dataclass(frozen=True, slots=True, eq=False)
class TrainedMatrix:
    """A matrix of the checkpoint that is trained as the file holds it."""

    name: str  # in the checkpoint
    trained: TrainedWeight
    arrange: Callable[[Tensor], Tensor]  # from the order of the file into that of the checkpoint
    original: Callable[[Tensor], Tensor]  # and back
    stored: Callable[[], Mapping[str, Tensor]]  # the tensors of the file as trained

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix in the order of the checkpoint, differentiable."""
        return self.arrange(self.trained.weight(dtype))


class StoredMatrices:
    """The quantized matrices of the model in `folder` that are a parameter of `skeleton` by themselves."""

    def __init__(self, folder: Path, skeleton: Skeleton, device: torch.device) -> None:
        self._device, self._keys = device, _single(skeleton)
        self._file: restore.GGUFFile | QuantizedModel = (
            restore.open_file(folder)
            if open_checkpoint(folder).format == "gguf"
            else QuantizedModel(folder, str(device))
        )

    def inside(self, prefix: str = "") -> dict[str, TrainedMatrix]:
        """Reads those whose parameter begins with `prefix`; returns them by parameter."""
        return {self._keys[matrix.name]: matrix for matrix in self._read(prefix)}

    def any_inside(self, prefix: str) -> bool:
        """Says if there are such matrices; reads one at most."""
        return next(self._read(prefix), None) is not None

    def _read(self, prefix: str) -> Iterator[TrainedMatrix]:
        def wanted(name: str) -> bool:
            return name in self._keys and self._keys[name].startswith(prefix)

        if isinstance(self._file, QuantizedModel):
            yield from _folder(self._file, wanted)
        else:
            yield from _gguf(self._file, self._device, wanted)


def _single(skeleton: Skeleton) -> dict[str, str]:
    """Returns the tensors of the checkpoint that are a parameter of the model by themselves, and which."""
    makers: dict[str, list[str]] = {}
    for name, keys in skeleton.makes.items():
        for key in keys:
            makers.setdefault(key, []).append(name)
    return {
        name: keys[0] for name, keys in skeleton.makes.items() if len(keys) == 1 and makers[keys[0]] == [name]
    }  # others are parts of a stack of experts


def _folder(model: QuantizedModel, wanted: Callable[[str], bool]) -> Iterator[TrainedMatrix]:
    for module in model.schemes:
        if not wanted(f"{module}.weight"):
            continue
        trained = TrainedGrid(model.read(module))

        def stored(module: str = module, trained: TrainedGrid = trained) -> Mapping[str, Tensor]:
            before, after = model.stored(module), model.codec.encode(module, trained.tensor())
            return {name: tensor for name, tensor in after.items() if as_bytes(tensor) != as_bytes(before[name])}

        yield TrainedMatrix(f"{module}.weight", trained, _as_it_is, _as_it_is, stored)


def _gguf(file: restore.GGUFFile, device: torch.device, wanted: Callable[[str], bool]) -> Iterator[TrainedMatrix]:
    weights = MappedWeights(file.folder)
    for tensor, target in file.pairs:
        whole = len(target.sources) == 1 and len(tensor.shape) == 2 and not target.sources[0].flip
        if tensor.dtype not in BLOCKS or not whole or target.sources[0].rows or not wanted(target.sources[0].name):
            continue
        trained = TrainedBlocks(_raw(weights, tensor).to(device), tensor.dtype, tensor.shape[1])
        yield TrainedMatrix(
            target.sources[0].name,
            trained,
            partial(restored, target=target),
            partial(arranged, target=target),
            lambda name=tensor.name, trained=trained: {name: trained.data()},  # type: ignore[misc]
        )


def _raw(weights: MappedWeights, tensor: TensorInfo) -> Tensor:
    """Returns the bytes of a tensor, by row."""
    return weights.get(replace(tensor, dtype="U8", shape=(tensor.shape[0], tensor.nbytes // tensor.shape[0])))


def _as_it_is(weight: Tensor) -> Tensor:
    return weight
