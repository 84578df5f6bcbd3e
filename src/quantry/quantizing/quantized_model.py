"""Reads a quantized checkpoint, ours or another tool's: its layers as QTensors, decoded from the stored bytes."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from quantry import registry
from quantry.errors import CheckpointError
from quantry.formats.contract import FORMATS, Format, recognise
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.weights import MappedWeights
from quantry.types import Checkpoint, Grid, QTensor, Scheme, TensorInfo

CACHE = re.compile(r"\.[qkv]_(scale|zero_point)$")  # scales of the KV cache, and of queries as other tools write them


class QuantizedModel:
    """An open quantized checkpoint: which modules are quantized and how, and the tensors of each.

    Modules are decoded on the device. Raises CheckpointError if it is not a safetensors checkpoint in a known format.
    """

    def __init__(self, model: str | Path, device: str = "cpu") -> None:
        self._device = device
        self.folder = local_folder(model)
        self.checkpoint: Checkpoint = open_checkpoint(self.folder)
        self.settings: dict[str, Any] = dict(self.checkpoint.config.get("quantization_config") or {})
        self.codec: Format = _codec(str(model), self.checkpoint, self.settings)
        self.schemes: dict[str, Scheme] = self.codec.schemes(self.settings, self.checkpoint.tensors)
        self._weights = MappedWeights(self.folder)
        self.parts: dict[str, list[TensorInfo]] = {module: [] for module in self.schemes}
        self.plain: list[TensorInfo] = []
        for tensor in self.checkpoint.tensors:
            module = _owner(tensor.name, self.schemes)
            (self.plain if module is None else self.parts[module]).append(tensor)

    @property
    def cache(self) -> Grid | None:
        """How the KV cache is quantized, if the checkpoint has scales for it."""
        return self.codec.CACHE_SCALES.grid(self.settings) if self.codec.CACHE_SCALES else None

    @property
    def cache_scales(self) -> list[TensorInfo]:
        """The scales of the KV cache."""
        return [tensor for tensor in self.plain if self.cache and CACHE.search(tensor.name)]

    def read(self, module: str) -> QTensor:
        """Decodes the quantized weight of a module."""
        return self.codec.decode(module, self.stored(module), self.schemes[module], self.settings)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as stored."""
        return self._weights.get(next(tensor for tensor in self.checkpoint.tensors if tensor.name == name))

    def shape(self, module: str) -> tuple[int, int]:
        """Returns the (out, in) shape of a module's weight."""
        return self.codec.shape(module, self.stored(module), self.schemes[module])

    def stored(self, module: str) -> dict[str, Tensor]:
        """Returns the stored tensors of a module by name."""
        return {tensor.name: self._weights.get(tensor).to(self._device) for tensor in self.parts[module]}


def _owner(name: str, modules: dict[str, Scheme]) -> str | None:
    """Returns the quantized module that a stored tensor describes; a bias belongs to none."""
    module = name.rpartition(".")[0]
    while module:
        if module in modules:
            return None if name == f"{module}.bias" else module
        module = module.rpartition(".")[0]
    return None


def _codec(model: str, checkpoint: Checkpoint, settings: dict[str, Any]) -> Format:
    method = settings.get("quant_method")
    if checkpoint.format != "safetensors" or method is None:
        raise CheckpointError(f"{model} is not a quantized safetensors checkpoint", fix="use quantry quantize")
    codec = recognise(str(method))
    if codec is None:
        known = ", ".join(registry.choices(FORMATS))
        raise CheckpointError(f"{model} is quantized with {method!r}, which is not read", fix=f"read are: {known}")
    return codec
