"""Reading a quantized checkpoint, ours or another tool's: its layers as QTensors, decoded from the bytes it holds."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from quantry import registry
from quantry.errors import CheckpointError
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.weights import MappedWeights
from quantry.types import Checkpoint, Grid, QTensor, Scheme, TensorInfo

CACHE = re.compile(r"\.[qkv]_(scale|zero_point)$")  # scales of the KV cache, and of queries where others write them


class QuantizedModel:
    """An open quantized checkpoint: which modules are quantized and how, and the tensors of each."""

    def __init__(self, model: str | Path) -> None:
        self.folder = local_folder(model)
        self.checkpoint: Checkpoint = open_checkpoint(self.folder)
        self.settings: dict[str, Any] = dict(self.checkpoint.config.get("quantization_config") or {})
        self.form: ModuleType = _format(str(model), self.checkpoint, self.settings)
        self.schemes: dict[str, Scheme] = self.form.schemes(self.settings, self.checkpoint.tensors)
        self._weights = MappedWeights(self.folder)
        self.parts: dict[str, list[TensorInfo]] = {module: [] for module in self.schemes}
        self.plain: list[TensorInfo] = []
        for tensor in self.checkpoint.tensors:
            module = _owner(tensor.name, self.schemes)
            (self.plain if module is None else self.parts[module]).append(tensor)

    @property
    def cache(self) -> Grid | None:
        """How the KV cache is quantized, where the checkpoint has scales for it."""
        grid: Grid | None = self.form.cache_grid(self.settings) if hasattr(self.form, "cache_grid") else None
        return grid

    @property
    def cache_scales(self) -> list[TensorInfo]:
        """The scales of the KV cache."""
        return [tensor for tensor in self.plain if self.cache and CACHE.search(tensor.name)]

    def input_scale(self, module: str) -> Tensor | None:
        """The static scale of a module's input, if it has one."""
        if not hasattr(self.form, "input_scale"):
            return None
        scale: Tensor | None = self.form.input_scale(module, self._stored(module), self.schemes[module])
        return scale

    def read(self, module: str) -> QTensor:
        """The quantized weight of a module."""
        decoded: QTensor = self.form.decode(module, self._stored(module), self.schemes[module], self.settings)
        return decoded

    def tensor(self, name: str) -> Tensor:
        """A stored tensor as it is."""
        return self._weights.get(next(tensor for tensor in self.checkpoint.tensors if tensor.name == name))

    def shape(self, module: str) -> tuple[int, int]:
        """The (out, in) shape of a module's weight."""
        rows, columns = self.form.shape(module, self._stored(module), self.schemes[module])
        return rows, columns

    def _stored(self, module: str) -> dict[str, Tensor]:
        """The tensors of a module as they are stored, mapped and not yet read."""
        return {tensor.name: self._weights.get(tensor) for tensor in self.parts[module]}


def _owner(name: str, modules: dict[str, Scheme]) -> str | None:
    """The quantized module that a stored tensor describes; its bias is a tensor of its own."""
    module = name.rpartition(".")[0]
    while module:
        if module in modules:
            return None if name == f"{module}.bias" else module
        module = module.rpartition(".")[0]
    return None


def _format(model: str, checkpoint: Checkpoint, settings: dict[str, Any]) -> ModuleType:
    method = settings.get("quant_method")
    if checkpoint.format != "safetensors" or method is None:
        raise CheckpointError(f"{model} is not a quantized safetensors checkpoint", fix="use quantry quantize")
    if method not in registry.choices("quantry.formats"):
        known = ", ".join(registry.choices("quantry.formats"))
        raise CheckpointError(f"{model} is quantized with {method!r}, which is not read", fix=f"read are: {known}")
    return registry.load("quantry.formats", str(method))
