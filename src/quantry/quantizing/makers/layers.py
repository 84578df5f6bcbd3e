"""Makes the quantized layers of a Hugging Face folder, its kept tensors and the scales of its KV cache."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantry.errors import WeightError
from quantry.formats.contract import Format
from quantry.methods import contract
from quantry.methods.rounding import round_weight
from quantry.models.linears import Linear
from quantry.models.weights import DTYPES
from quantry.numerics.blocks import absmax
from quantry.numerics.grids import dequantize
from quantry.numerics.static import cache_scale, input_scale
from quantry.quantizing.calibration.block_inputs import BlockInputs
from quantry.quantizing.calibration.statistics import merge
from quantry.quantizing.makers.checks import cast, check_decodes
from quantry.quantizing.makers.reader import WeightReader
from quantry.quantizing.slices import matrix
from quantry.quantizing.tensor_plan import CacheScales, FusedLayers, KeptTensor, Piece
from quantry.types import Grid


class LayerMaker:
    """Makes the pieces of a folder; `settings` is the quantization_config that layers are read back with."""

    def __init__(self, reader: WeightReader, codec: Format | None, settings: Mapping[str, Any]) -> None:
        self._reader, self._codec, self._settings = reader, codec, settings
        self._largest: dict[str, Tensor] = {}  # by the first of the layers that share a scale
        self._input_scales: dict[str, Tensor] = {}

    def make(self, piece: Piece, known: BlockInputs) -> Iterator[tuple[str, Tensor]]:
        """Yields the stored tensors of a piece in the order of its entries."""
        if isinstance(piece, KeptTensor):
            tensor = self._tensor(piece.source, known)
            weight = matrix(tensor, piece.linear) if piece.linear else tensor
            yield piece.name, cast(self._reader.lasting(weight), DTYPES[piece.entry[1]], piece.name)
            return
        assert self._codec is not None
        if isinstance(piece, CacheScales):
            yield from self._cache_scales(piece, known)
            return
        assert isinstance(piece, FusedLayers)
        assert piece.preset.fit is not None
        fit, rounder = contract.fit(piece.preset.fit), contract.rounder(piece.preset.rounder)
        largest, static = self._shared_largest(piece, known), self._shared_input_scale(piece, known)
        for linear in piece.linears:
            weight = self._reader.upload(self._matrix(linear, known), linear.source)
            layer_input = known.input_of(linear.module) if piece.preset.calibrated else None
            rounded = replace(round_weight(weight, piece.grid, fit, rounder, layer_input, largest), input_scale=static)
            stored = self._codec.encode(linear.module, rounded)
            check_decodes(
                self._codec.decode(linear.module, stored, piece.scheme, self._settings), rounded, linear.module
            )
            if known.stored is not None:
                known.stored.add(linear, dequantize(rounded))
            yield from stored.items()

    def release(self, piece: Piece) -> None:
        """Lets go of the source tensors of a piece."""
        sources = [linear.source for linear in piece.linears] if isinstance(piece, FusedLayers) else [piece.source]
        self._reader.release({source for source in sources if source and not isinstance(piece, CacheScales)})

    def notes(self) -> tuple[str, ...]:
        return ()

    def _shared_input_scale(self, piece: FusedLayers, known: BlockInputs) -> Tensor | None:
        """Returns the static input scale of all linears that engines fuse or stack with this piece."""
        static, key = piece.preset.scheme.static, piece.sharers[0].module
        if static is None:
            return None
        if key not in self._input_scales:
            inputs = dict.fromkeys(known.input_of(linear.module) for linear in piece.sharers)
            stats = [layer_input.stats for layer_input in inputs if layer_input]
            grid = replace(static.grid, scale=piece.grid.scale)
            merged = merge(stats) if len(stats) > 1 else stats[0]
            self._input_scales[key] = input_scale(merged, grid, piece.preset.input_scales)
        return self._input_scales[key]

    def _cache_scales(self, piece: CacheScales, known: BlockInputs) -> Iterator[tuple[str, Tensor]]:
        assert self._codec is not None
        assert self._codec.CACHE_SCALES is not None
        if known.heads is None:
            raise WeightError(f"{piece.name} has put nothing into the KV cache", fix="leave --kv out")
        keys, values = (cache_scale(side, piece.grid) for side in (known.heads.keys, known.heads.values))
        stored = self._codec.CACHE_SCALES.encode(piece.name, keys, values)
        for (name, tensor), entry in zip(stored.items(), piece.entries, strict=True):
            if tuple(tensor.shape) != entry[2]:
                raise WeightError(
                    f"{piece.name} has {tensor.shape[0]} key-value heads where the config says {entry[2][0]}",
                    fix="use --kv fp8, which needs one scale for all of them",
                )
            yield name, tensor

    def _shared_largest(self, piece: FusedLayers, known: BlockInputs) -> Tensor | None:
        """Returns the largest magnitude of all linears that share a per-tensor scale with this piece."""
        if not piece.grid.spans_tensor:
            return None
        key, whole = piece.sharers[0].module, Grid(piece.grid.kind, piece.grid.bits, (0, 0))
        if key not in self._largest:
            peaks = [
                absmax(self._reader.upload(self._matrix(linear, known), linear.source), whole)
                for linear in piece.sharers
            ]
            self._largest[key] = torch.stack(peaks).max()
        return self._largest[key]

    def _matrix(self, linear: Linear, known: BlockInputs) -> Tensor:
        return matrix(self._tensor(linear.source, known), linear)

    def _tensor(self, name: str, known: BlockInputs) -> Tensor:
        """Returns a tensor of the checkpoint, as a transform or a distillation left it."""
        return known.tensors[name] if name in known.tensors else self._reader.get(name)
