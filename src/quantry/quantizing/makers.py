"""Makers turn pieces into stored tensors: quantized layers of a folder, or the tensors of a GGUF file.

They read mapped weights, refuse what is not a finite number, compute on the device they are given, and check that what
they encode decodes to the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quantry import registry
from quantry.errors import OutputError, WeightError
from quantry.formats import gguf
from quantry.llamacpp.tensor_map import TensorSlice
from quantry.models.linears import Linear
from quantry.models.parts import block_of
from quantry.models.weights import DTYPES, NAMES, MappedWeights
from quantry.models.workspace import Workspace
from quantry.numerics.blocks import absmax
from quantry.numerics.grids import dequantize
from quantry.numerics.static import cache_scale, input_scale
from quantry.quantizing.tensor_plan import Assemble, CacheScales, Keep, Piece, Quantize
from quantry.types import Checkpoint, Grid, QTensor, Stats

if TYPE_CHECKING:
    from quantry.quantizing.calibration.observe import Heads


class Maker(Protocol):
    """Turns pieces into stored tensors."""

    def make(self, piece: Piece) -> Iterator[tuple[str, Tensor]]: ...

    def release(self, piece: Piece) -> None: ...

    def notes(self) -> tuple[str, ...]: ...


class Inputs(Protocol):
    """What calibration knows of the layers' inputs (calibration/per_block.py); best asked for block after block."""

    def stats(self, name: str, expert: int | None = None) -> Stats | None:
        """The statistics of what a module, a tensor or an expert in it is given; nothing outside of blocks."""

    def prepared(self, stats: Stats, prepare: Callable[[Stats], Any]) -> Any:
        """What a rounder makes of statistics, made once for all layers of a block that share them."""

    def tensor(self, name: str) -> Tensor | None:
        """A tensor of a block as a transform has left it; nothing where there is none."""

    def heads(self, index: int) -> "Heads | None":
        """The largest magnitudes that a block puts into the KV cache."""

    @property
    def sequential(self) -> bool:
        """Whether a block is calibrated on what the quantized blocks before it give."""

    def made(self, layer: Linear | TensorSlice, weight: Tensor) -> None:
        """Takes note of a quantized layer, decoded, (out, in) as in the checkpoint; where the job is sequential."""

    def resume(self, work: Workspace, remake: Callable[[int], None]) -> None:
        """Takes over what earlier runs of the job have found, and keeps the rest there.

        `remake` makes all layers of a block once more.
        """

    def notes(self) -> tuple[str, ...]:
        """What a person should know of it."""


class Reader:
    """The weights of a checkpoint, on the computing device.

    For the CPU they are mapped. For a GPU each is read into one pinned buffer and sent on a stream of its own, while
    the GPU is still at the weight before.
    """

    def __init__(self, checkpoint: Checkpoint, weights: MappedWeights, device: torch.device) -> None:
        self._tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        self._weights, self.device = weights, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._held = ""  # the tensor that is in the buffer

    def get(self, name: str) -> Tensor:
        """A tensor as it is stored; on its way to a GPU it lasts until the next is asked for."""
        tensor = self._tensors[name]
        if self._copies is None or tensor.nbytes == 0:
            return self._weights.get(tensor)
        if self._pinned.numel() < tensor.nbytes:
            self._held, self._pinned = "", torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        if self._held != name:
            self._weights.read(tensor, self._pinned)
            self._held = name
        return self._pinned[: tensor.nbytes].view(DTYPES[tensor.dtype]).view(tensor.shape)

    def whole(self, name: str) -> Tensor:
        """A tensor on the computing device, refused if it is not all finite."""
        return self.upload(self.get(name), name)

    def lasting(self, weight: Tensor) -> Tensor:
        """A weight that is not sent anywhere, and is still there when the next is read."""
        return weight if self._copies is None else weight.clone()

    def upload(self, weight: Tensor, name: str) -> Tensor:
        """The weight on the computing device, refused if it is not all finite."""
        if self._copies is None:
            check_finite(weight, name)
            return weight
        with torch.cuda.stream(self._copies):
            sent = weight.to(self.device, non_blocking=True)
            check_finite(sent, name)
        self._copies.synchronize()  # from here on the buffer is free, and any stream may read what was sent
        sent.record_stream(torch.cuda.current_stream())
        return sent

    def release(self, names: set[str]) -> None:
        for name in names:
            self._weights.release(self._tensors[name])


class Quantizer:
    """Makes quantized layers from 16-bit weights; `inputs` are for presets that are calibrated."""

    def __init__(
        self, reader: Reader, form: ModuleType | None, settings: Mapping[str, Any], inputs: Inputs | None = None
    ) -> None:
        self._reader, self._form, self._settings, self._inputs = reader, form, settings, inputs
        self._wholes: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}

    def make(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a piece, in the order of its entries."""
        if isinstance(piece, Keep):
            weight = self._linear(piece.linear) if piece.linear else self._tensor(piece.source)
            yield piece.name, cast(self._reader.lasting(weight), DTYPES[piece.entry[1]], piece.name)
        elif isinstance(piece, Quantize):
            yield from self._quantize(piece)
        elif isinstance(piece, CacheScales):
            yield from self._cache_scales(piece)

    def release(self, piece: Piece) -> None:
        linears = piece.linears if isinstance(piece, Quantize) else ()
        self._reader.release({piece.source} if isinstance(piece, Keep) else {linear.source for linear in linears})

    def notes(self) -> tuple[str, ...]:
        return self._inputs.notes() if self._inputs else ()

    def _quantize(self, piece: Quantize) -> Iterator[tuple[str, Tensor]]:
        assert self._form is not None
        assert piece.preset.fit is not None
        fit = registry.load("quantry.methods.fits", piece.preset.fit).fit
        rounder = registry.load("quantry.methods.rounders", piece.preset.rounder)
        whole, inputs = self._whole(piece), self._input_scale(piece)
        given = () if inputs is None else (inputs,)
        for linear in piece.linears:
            weight = self._reader.upload(self._linear(linear), linear.source)
            stats = self._inputs.stats(linear.module) if self._inputs and piece.preset.calibrated else None
            params = fit(weight, piece.grid, whole, stats)
            rounded: QTensor = rounder.round_weight(weight, piece.grid, params, _prepared(stats, rounder, self._inputs))
            stored = self._form.encode(linear.module, rounded, *given)
            check_decodes(
                self._form.decode(linear.module, stored, piece.scheme, self._settings), rounded, linear.module
            )
            if self._inputs and self._inputs.sequential:
                self._inputs.made(linear, dequantize(rounded))
            yield from stored.items()

    def _input_scale(self, piece: Quantize) -> Tensor | None:
        """The static scale of the inputs of all linears that engines fuse or stack with this piece."""
        static, key = piece.preset.scheme.static, piece.sharers[0].module
        if static is None:
            return None
        if key not in self._scales:
            from quantry.quantizing.calibration.observe import merge  # brings transformers along

            assert self._inputs is not None
            seen = [self._inputs.stats(linear.module) for linear in piece.sharers]
            parts = {id(stats): stats for stats in seen if stats is not None}
            stats = merge(parts.values()) if len(parts) > 1 else next(iter(parts.values()))
            grid = replace(static.grid, scale=piece.grid.scale)
            self._scales[key] = input_scale(stats, grid, piece.preset.input_scales)
        return self._scales[key]

    def _cache_scales(self, piece: CacheScales) -> Iterator[tuple[str, Tensor]]:
        assert self._form is not None
        assert self._inputs is not None
        index = block_of(piece.source)
        heads = None if index is None else self._inputs.heads(index)
        if heads is None:
            raise WeightError(f"{piece.name} has put nothing into the KV cache", fix="leave --kv out")
        sides = [cache_scale(heads.keys, piece.grid), cache_scale(heads.values, piece.grid)]
        for (name, tensor), entry in zip(
            self._form.encode_cache(piece.name, *sides).items(), piece.entries, strict=True
        ):
            if tuple(tensor.shape) != entry[2]:
                raise WeightError(
                    f"{piece.name} has {tensor.shape[0]} key-value heads where the config says {entry[2][0]}",
                    fix="use --kv fp8, which needs one scale for all of them",
                )
            yield name, tensor

    def _whole(self, piece: Quantize) -> Tensor | None:
        """The largest magnitude of all linears that share a scale with this piece, where a scale spans them."""
        if not piece.grid.spans_tensor:
            return None
        key, whole = piece.sharers[0].module, Grid(piece.grid.kind, piece.grid.bits, (0, 0))
        if key not in self._wholes:
            peaks = [
                absmax(self._reader.upload(self._linear(linear), linear.source), whole) for linear in piece.sharers
            ]
            self._wholes[key] = torch.stack(peaks).max()
        return self._wholes[key]

    def _linear(self, linear: Linear) -> Tensor:
        """The (out, in) weight of a linear."""
        return matrix(self._tensor(linear.source), linear)

    def _tensor(self, name: str) -> Tensor:
        return tensor_left(name, self._reader, self._inputs)


class BlockMaker:
    """Makes the tensors of a GGUF file; `importance` has a vector for each matrix that it knows, by GGUF name.

    With `inputs`, matrices inside blocks are rounded by `rounder`.
    """

    def __init__(
        self,
        reader: Reader,
        importance: Mapping[str, Tensor],
        notes: tuple[str, ...],
        rounder: ModuleType | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self._reader, self._importance, self._notes = reader, importance, notes
        self._rounder, self._inputs = rounder, inputs

    def make(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """A tensor, or its experts one after the other, in the order in which they are stacked."""
        assert isinstance(piece, Assemble)
        target, kind = piece.target, piece.kind
        if target.values is not None:
            yield target.name, torch.tensor(target.values, dtype=torch.float32)
            return
        vectors = self._importance.get(target.name)
        for index, source in enumerate(target.sources):
            whole = tensor_left(source.name, self._reader, self._inputs)
            weight = self._reader.upload(matrix(whole, source), source.name)
            arranged = gguf.arranged(weight, target)
            stats = self._stats(kind, source)
            if stats is not None and self._rounder is not None:
                stored = self._rounder.round_blocks(arranged, kind, _prepared(stats, self._rounder, self._inputs))
            else:
                stored = _stored(arranged, kind, None if vectors is None else vectors[index], source.name)
            if self._inputs and self._inputs.sequential and kind not in DTYPES:
                self._inputs.made(source, gguf.restored(gguf.decode(stored, kind, weight.shape[1]), target))
            yield target.name, stored

    def release(self, piece: Piece) -> None:
        assert isinstance(piece, Assemble)
        self._reader.release({source.name for source in piece.target.sources})

    def notes(self) -> tuple[str, ...]:
        return (*self._notes, *(self._inputs.notes() if self._inputs else ()))

    def _stats(self, kind: str, source: TensorSlice) -> Stats | None:
        """The statistics of a matrix that is to be rounded by them."""
        if kind in DTYPES or self._inputs is None or self._rounder is None:
            return None
        return self._inputs.stats(source.name, source.expert)


def tensor_left(name: str, reader: Reader, inputs: Inputs | None) -> Tensor:
    """A tensor of the checkpoint, as a transform has left it if there is one."""
    transformed = inputs.tensor(name) if inputs else None
    return reader.get(name) if transformed is None else transformed


def matrix(weight: Tensor, source: Linear | TensorSlice) -> Tensor:
    """A matrix (or vector) out of a tensor that may hold a stack of them."""
    if source.expert is not None:
        weight = weight[source.expert]
    weight = weight.t() if source.flip else weight
    return weight[slice(*source.rows)].contiguous() if source.rows else weight


def _prepared(stats: Stats | None, rounder: ModuleType, inputs: Inputs | None) -> Any:
    """What a rounder is given: the statistics, or what it makes of them where that takes long."""
    if stats is None or inputs is None or not hasattr(rounder, "prepare"):
        return stats
    return inputs.prepared(stats, rounder.prepare)


def _stored(weight: Tensor, kind: str, importance: Tensor | None, name: str) -> Tensor:
    return cast(weight, DTYPES[kind], name) if kind in DTYPES else gguf.encode(weight, kind, importance)


def check_finite(weight: Tensor, name: str) -> None:
    """NaN goes through a minimum, and infinity is one: counting is left for when there is something to count."""
    if weight.numel() and not torch.isfinite(torch.stack(weight.aminmax())).all():
        bad = int((~torch.isfinite(weight)).sum())
        raise WeightError(f"{name} has {bad} weights that are NaN or infinite", fix="repair or retrain the checkpoint")


def cast(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in another float type, refused where it would overflow."""
    if weight.dtype == dtype:
        return weight
    check_finite(weight, name)
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest > torch.finfo(dtype).max:
        raise WeightError(
            f"{name} has a weight of magnitude {largest:g}, more than the {torch.finfo(dtype).max:g} of {NAMES[dtype]}",
            fix="use a preset or format that keeps bf16",
        )
    return weight.to(dtype)


def check_decodes(read: QTensor, made: QTensor, module: str) -> None:
    """What was encoded must decode to the same codes and parameters."""
    pairs = [(read.codes, made.codes), (read.params.scale, made.params.scale), (read.params.zero, made.params.zero)]
    pairs.append((read.params.outer, made.params.outer))
    for one, other in pairs:
        same = (
            one is other
            if one is None or other is None
            else one.dtype == other.dtype and torch.equal(_raw(one), _raw(other))
        )
        if not same:
            raise OutputError(f"{module} does not decode to what was encoded", fix="report this as a bug of Quantry")


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
