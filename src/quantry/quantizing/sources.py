"""Opens models of any format as a `WeightSource`: tensors are decoded from the bytes on the disk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantry.errors import CheckpointError
from quantry.formats.gguf import BLOCKS
from quantry.llamacpp import to_tokenizer
from quantry.models.already_quantized import quantization
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.tokenizer import load_tokenizer
from quantry.models.weights import MappedWeights, PlainWeights
from quantry.models.workspace import check_finished
from quantry.numerics.activations import Static
from quantry.numerics.grids import dequantize
from quantry.quantizing import restore
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.storage.temporary import temporary_folder
from quantry.types import Activation, Checkpoint, Grid, Scheme


@dataclass(frozen=True)
class ModelSource:
    """An open model: the names and decoded values of its tensors, and their quantization schemes."""

    path: Path  # the folder of safetensors, or the (first) GGUF file
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    names: Sequence[str]
    schemes: Mapping[str, Scheme]  # quantized modules, named as in transformers' checkpoints
    _read: Callable[[str], Tensor] = field(repr=False)
    _input_scale: Callable[[str], float] | None = field(default=None, repr=False)  # the stored scale, by module
    cache: Grid | None = None  # of the KV cache, if the artefact has scales for it
    _metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of a GGUF file, with its long arrays

    @property
    def format(self) -> str:
        """The container: safetensors or gguf."""
        return self.checkpoint.format

    @cached_property
    def activations(self) -> Mapping[str, Activation]:
        """How the engine quantizes the inputs of modules, by module; with the scale if the artefact stores one."""
        return {
            module: self._with_scale(module, scheme.activation)
            for module, scheme in self.schemes.items()
            if scheme.activation
        }

    def _with_scale(self, module: str, activation: Activation) -> Activation:
        if activation.dynamic:
            return activation
        assert self._input_scale is not None
        if not activation.grid.symmetric:
            raise CheckpointError(
                f"{module} has a static zero point for its input, which is not simulated",
                fix="quantize the model with symmetric inputs, as the presets do",
            )
        return Static(activation.grid, dynamic=False, scale=self._input_scale(module))

    def read(self, name: str) -> Tensor:
        """Returns the values of a tensor: in its stored float type, or in float32 if it was decoded."""
        return self._read(name)

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Returns the tokenizer of a GGUF file as the files that transformers reads."""
        return to_tokenizer.tokenizer(self._metadata)


def open_source(model: str | Path, device: str = "cpu") -> ModelSource:
    """Opens a 16-bit checkpoint, a quantized one, a GGUF file, or a folder with a GGUF file.

    Quantized layers of a checkpoint are decoded on the device, and stay there; all else is on the CPU.
    Raises QuantryError if a job has not finished writing the model, or if it cannot be read.
    """
    check_finished(Path(model).expanduser())
    return open_stored(model, device)


def open_stored(model: str | Path, device: str = "cpu") -> ModelSource:
    """Opens what `open_source` opens, also in the folder of a job that has not finished."""
    checkpoint = open_checkpoint(model)
    if checkpoint.format == "gguf":
        return _gguf(model)
    return _plain(model) if quantization(checkpoint) is None else _quantized(model, device)


def tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model: from its tokenizer.json, or from its GGUF file."""
    if source.format == "safetensors":
        return load_tokenizer(source.path)
    with temporary_folder() as folder:
        for name, data in source.tokenizer_files().items():
            (folder / name).write_bytes(data)
        return load_tokenizer(folder)


def _plain(model: str | Path) -> ModelSource:
    folder = local_folder(model)
    checkpoint = open_checkpoint(folder)
    plain = PlainWeights(checkpoint, folder)
    return ModelSource(folder, checkpoint, plain.config, plain.names, {}, plain.read)


def _quantized(model: str | Path, device: str) -> ModelSource:
    artefact = QuantizedModel(model, device)
    weights = MappedWeights(artefact.folder)
    scales = {tensor.name for tensor in artefact.cache_scales}
    plain = {tensor.name: tensor for tensor in artefact.plain if tensor.name not in scales}
    modules = {f"{module}.weight": module for module in artefact.schemes}

    def read(name: str) -> Tensor:
        return dequantize(artefact.read(modules[name])) if name in modules else weights.copy(plain[name])

    def input_scale(module: str) -> float:
        scale = artefact.read(module).input_scale
        assert scale is not None
        return float(scale)

    config = {key: value for key, value in artefact.checkpoint.config.items() if key != "quantization_config"}
    names = (*plain, *modules)
    return ModelSource(
        artefact.folder, artefact.checkpoint, config, names, artefact.schemes, read, input_scale, artefact.cache
    )


def _gguf(model: str | Path) -> ModelSource:
    file = restore.open_file(model)
    pieces = {piece.name: piece for piece in restore.originals(file, "f32")}
    restorer = restore.RestoredTensorMaker(file)
    stored = {target.name: tensor.dtype.lower() for tensor, target in file.pairs}
    dtypes = {name: stored[piece.parts[0][0].name] for name, piece in pieces.items()}
    return ModelSource(
        file.folder / min(file.checkpoint.files),
        file.checkpoint,
        file.config,
        tuple(pieces),
        {name.removesuffix(".weight"): Scheme(_grid(dtype)) for name, dtype in dtypes.items() if dtype in BLOCKS},
        lambda name: torch.cat([part for _, part in restorer.make(pieces[name])]),
        _metadata=file.metadata,
    )


def _grid(dtype: str) -> Grid:
    """Returns the grid of a ggml block type; the bits are the first digit of its name: q4_k, iq4_nl."""
    return Grid(dtype, int(dtype.lstrip("iq")[0]))  # type: ignore[arg-type]
