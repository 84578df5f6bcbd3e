"""What calibration knows of one decoder block, handed to whoever makes its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantry.methods.rounding import LayerInput
from quantry.models.linears import module_names
from quantry.quantizing.calibration.statistics import Heads
from quantry.quantizing.slices import Slice, is_whole, tensor_of, view


class StoredBlock:
    """The tensors of a block as they are stored: decoded layers are added one by one.

    `original` returns the unrounded tensor of the checkpoint that a layer is a slice of.
    """

    def __init__(self, original: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device | None) -> None:
        self._original, self._dtype, self._device = original, dtype, device
        self.tensors: dict[str, Tensor] = {}

    def add(self, layer: Slice, weight: Tensor) -> None:
        """Puts a decoded (out, in) weight in its place."""
        name, values = tensor_of(layer), weight.to(self._device or weight.device, self._dtype)
        if is_whole(layer):
            self.tensors[name] = values.t() if layer.flip else values
            return
        if name not in self.tensors:
            self.tensors[name] = self._original(name).to(values.device, self._dtype, copy=True)
        view(self.tensors[name], layer).copy_(values)

    def lighten(self) -> None:
        """Moves all tensors to main memory, also those still to come."""
        self._device = torch.device("cpu")
        self.tensors = {name: tensor.to(self._device) for name, tensor in self.tensors.items()}


@dataclass(frozen=True, slots=True, eq=False)
class BlockInputs:
    """The inputs of a block's layers, and its tensors as a transform or a distillation left them.

    Empty for jobs without data and outside of blocks. `stored` is set in sequential jobs: it wants every layer of the
    block as stored.
    """

    inputs: Mapping[str, LayerInput] = field(default_factory=dict)  # by module
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # of the checkpoint, by name
    heads: Heads | None = None
    stored: StoredBlock | None = None
    scales: Mapping[str, Tensor] = field(default_factory=dict)  # of a transform, by pair

    def input_of(self, name: str, expert: int | None = None) -> LayerInput | None:
        """Returns what is known of the input of a module, or of a tensor or an expert in it."""
        return self.inputs.get(module_names(name, expert)[0])


class NoCalibration:
    """Calibration of a job without data: nothing is known of any block."""

    sequential = False

    def first_block(self, missing: int | None) -> int | None:
        """Returns where the loop has to begin if `missing` is the first block that is not stored."""
        return missing

    def enter(self, index: int | None) -> BlockInputs:
        return BlockInputs()

    def leave(self, index: int | None) -> None:
        pass

    def notes(self) -> tuple[str, ...]:
        return ()

    def expert_tokens(self) -> Mapping[str, tuple[int, ...]]:
        return {}
