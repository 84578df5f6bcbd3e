"""Converts a quantized checkpoint: the same codes and scales in another format, or on request another grid.

A conversion is lossless if the target holds the same grid and its stored scales can take the source's values exactly.
Anything else is refused unless `requantize` names a preset; then the added error is measured and reported.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantry import registry
from quantry.errors import RecipeError
from quantry.formats.contract import FORMATS, Format, load_format
from quantry.formats.gguf import NAME as GGUF
from quantry.methods import contract
from quantry.methods.rounding import round_weight
from quantry.models.anatomy import dissect
from quantry.models.identity import identity
from quantry.models.reader import open_checkpoint
from quantry.models.weights import DTYPES
from quantry.models.workspace import check_room, check_target, recover
from quantry.numerics.grids import SCALE_DTYPES, dequantize
from quantry.quantizing import card
from quantry.quantizing.calibration.block_inputs import BlockInputs
from quantry.quantizing.containers.folder import SHARD_BYTES, SafetensorsFolder, files_beside, small_files
from quantry.quantizing.makers.checks import cast, check_decodes
from quantry.quantizing.pipeline import WriteJob, write
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.quantizing.recipe import CAST, Preset, Recipe, preset
from quantry.quantizing.requantize import Requantization, gguf_preset
from quantry.quantizing.restore import Restoration
from quantry.quantizing.tensor_plan import (
    DTYPE_NAMES,
    STORED,
    ConvertedLayer,
    KeptTensor,
    Piece,
    TensorPlan,
    main_dtype,
)
from quantry.storage import ARTEFACT_FILE
from quantry.types import Artefact, Params, Progress, QTensor, Scheme

PLAIN = {"bf16": "bf16", "fp16": "f16"}  # --to names that mean 16-bit weights


def convert(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    requantize: str | None = None,
    dry_run: bool = False,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    announce: Callable[[Artefact], None] | None = None,
    progress: Progress | None = None,
) -> Artefact:
    """Writes the quantized checkpoint or GGUF file `source` in the format `to`, or as `bf16` or `fp16`, to `output`.

    A GGUF file is made with a preset to `requantize` to, such as "Q4_K_M", which rounds a second time. Raises
    RecipeError if a conversion would lose something and `requantize` names no preset. With `dry_run` it only says what
    it would write. An output that the same job has finished is returned as it is; `overwrite` replaces an artefact.
    """
    out = Path(output).expanduser()
    if not overwrite:
        recover(out)
    check_target(out, artefact=True)
    job = _job(source, out, to, _fresh_preset(requantize))
    if not overwrite and (out / ARTEFACT_FILE).is_file():
        return card.finished(job.planned, job.recipe, job.plan, job.source)
    if announce:
        announce(job.planned)
    check_room(out, {"the weights": job.plan.bytes, "the files beside them": files_beside(job.checkpoint)})
    return job.planned if dry_run else job.run(shard_bytes, progress, overwrite=overwrite)


def _job(source: str | Path, out: Path, to: str, fresh: Preset | None) -> "Restoration | Conversion | Requantization":
    """Returns the job, checked. Raises RecipeError for what takes two steps."""
    is_file = open_checkpoint(source).format == GGUF
    if to == GGUF:
        preset = gguf_preset(fresh)
        decoding = Restoration(source, out, "bf16") if is_file else Conversion(source, out, "bf16", None, None)
        return Requantization(source, out, decoding, preset)
    codec = _target(to)
    if is_file and (codec or fresh):
        raise RecipeError(f"a GGUF file cannot become {to} in one step", fix="convert to bf16, then quantize that")
    return Restoration(source, out, PLAIN[to]) if is_file else Conversion(source, out, to, codec, fresh)


class Conversion:
    """A conversion that was checked; `codec` is None for 16-bit weights, `fresh` a preset to round to again."""

    def __init__(self, source: str | Path, out: Path, to: str, codec: Format | None, fresh: Preset | None) -> None:
        model = QuantizedModel(source)
        self.plan = _plan(model, codec, PLAIN.get(to), fresh)
        self.source = identity(open_checkpoint(model.folder))
        self.recipe = Recipe(fresh or _described(model, to, codec), to if codec else CAST)
        self.planned = card.plan(str(source), out, self.recipe, dissect(model.checkpoint), self.plan)
        cache = model.cache if codec and codec.CACHE_SCALES else None
        self._settings = codec.config(self.plan.assignment, self.plan.kept, cache) if codec else None
        self.checkpoint, self.folder = model.checkpoint, model.folder
        self.maker = ConvertedLayerMaker(model, codec, self._settings or {})
        if codec and not fresh:
            self.maker.check_lossless(self.plan)

    def container(self) -> SafetensorsFolder:
        """Returns the folder to write, with the small files of the source."""
        return SafetensorsFolder(small_files(self.folder), self.checkpoint.config, self.plan.dtype, self._settings)

    def run(self, shard_bytes: int | None, progress: Progress | None, *, overwrite: bool = False) -> Artefact:
        """Writes the converted checkpoint."""
        job = WriteJob(
            self.checkpoint, self.folder, self.recipe, self.plan, self.planned, self.container(),
            shard_bytes or SHARD_BYTES, self.source, overwrite=overwrite,
        )  # fmt: skip
        return write(job, self.maker, progress=progress)


class ConvertedLayerMaker:
    """Makes the layers of one format from those of another."""

    def __init__(self, model: QuantizedModel, codec: Format | None, settings: Mapping[str, Any]) -> None:
        self._model, self._codec, self._settings = model, codec, settings
        self._errors: dict[str, float] = {}

    def check_lossless(self, plan: TensorPlan) -> None:
        """Raises RecipeError unless the target can store every scale exactly; runs before anything is written."""
        for piece in plan.pieces:
            if isinstance(piece, ConvertedLayer) and piece.scheme:
                _retyped(self._model.read(piece.name), piece.name, piece.scheme)

    def make(self, piece: Piece, known: BlockInputs | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields the stored tensors of a piece."""
        if isinstance(piece, KeptTensor):
            yield piece.name, cast(self._model.tensor(piece.source), DTYPES[piece.entry[1]], piece.name)
            return
        assert isinstance(piece, ConvertedLayer)
        read = self._model.read(piece.name)
        if piece.scheme is None:
            yield piece.entries[0][0], cast(dequantize(read), DTYPES[piece.entries[0][1]], piece.name)
            return
        assert self._codec is not None
        converted = self._rounded(read, piece) if piece.preset else _retyped(read, piece.name, piece.scheme)
        stored = self._codec.encode(piece.name, converted)
        check_decodes(self._codec.decode(piece.name, stored, piece.scheme, self._settings), converted, piece.name)
        yield from stored.items()

    def release(self, piece: Piece) -> None:
        """Does nothing: a quantized source has few pages, and the kernel drops them when it needs to."""

    def notes(self) -> tuple[str, ...]:
        """Returns a sentence on the error that rounding again has added."""
        if not self._errors:
            return ()
        worst = max(self._errors, key=lambda module: self._errors[module])
        mean = sum(self._errors.values()) / len(self._errors)
        return (
            f"Rounded a second time: the relative error added to the weights is {mean:.4f} on average and "
            f"{self._errors[worst]:.4f} at most, in {worst}.",
        )

    def _rounded(self, read: QTensor, piece: ConvertedLayer) -> QTensor:
        assert piece.preset is not None
        assert piece.preset.fit is not None
        assert piece.scheme is not None
        weight = dequantize(read)
        fit, rounder = contract.fit(piece.preset.fit), contract.rounder(piece.preset.rounder)
        rounded = round_weight(weight, piece.scheme.weight, fit, rounder, None)
        self._errors[piece.name] = float((dequantize(rounded) - weight).norm() / weight.norm().clamp(min=1e-30))
        return rounded


def _retyped(read: QTensor, module: str, scheme: Scheme) -> QTensor:
    """Returns the same values with scales in the target's dtype, and zero points if the target's grid has them."""
    grid, params = scheme.weight, read.params
    scale = params.scale
    if grid.kind not in ("nf4", "fp4"):
        scale = scale.to(SCALE_DTYPES[grid.scale])
        if not torch.equal(scale.float(), params.scale.float()):
            raise RecipeError(
                f"{module} has {read.grid.scale} scales that {grid.scale} cannot hold exactly",
                fix="give --requantize PRESET to accept the loss",
            )
    needs_zero = params.zero is None and not grid.symmetric
    zero = torch.zeros(scale.shape, dtype=torch.int8) if needs_zero else params.zero
    return QTensor(grid, read.codes, Params(scale, zero, params.outer, params.nested), _input_scale(read, module, grid))


def _input_scale(read: QTensor, module: str, grid: Any) -> Tensor | None:
    if read.input_scale is None:
        return None
    scale = read.input_scale.to(torch.float32 if grid.kind == "e2m1" else SCALE_DTYPES[grid.scale])
    if not torch.equal(scale.float(), read.input_scale.float()):
        raise RecipeError(
            f"{module} has an input scale that {grid.scale} cannot hold exactly", fix="quantize the original model"
        )
    return scale


def _target(to: str) -> Format | None:
    """Returns the target format; None for 16-bit weights."""
    if to in PLAIN:
        return None
    registry.check("format", to, (*registry.choices(FORMATS), *PLAIN))
    return load_format(to)


def _fresh_preset(name: str | None) -> Preset | None:
    fresh = preset(name) if name else None
    if fresh and fresh.calibrated:
        raise RecipeError(
            f"{fresh.name} is calibrated on the 16-bit model", fix="quantize that, or requantize to another preset"
        )
    return fresh


def _plan(model: QuantizedModel, codec: Format | None, plain: str | None, fresh: Preset | None) -> TensorPlan:
    """Decides what becomes of every tensor: plain ones are kept, quantized layers are stored in the new format."""
    source_dtype = main_dtype(model.checkpoint)
    dtype = plain or str(codec.model_dtype(DTYPE_NAMES[source_dtype]) if codec else "")
    layers = [_layer(model, module, codec, fresh, dtype) for module in model.schemes]
    fates = {tensor.name: "converted" for module in model.schemes for tensor in model.parts[module]}
    dropped = set() if codec and codec.CACHE_SCALES else {tensor.name for tensor in model.cache_scales}
    kept: list[KeptTensor] = []
    for tensor in model.plain:
        if tensor.name in dropped:
            fates[tensor.name] = "dropped: this format holds no scales of a KV cache"
            continue
        stored = STORED[dtype] if tensor.dtype == source_dtype else tensor.dtype
        fates[tensor.name] = "kept" if stored == tensor.dtype else f"cast: {tensor.dtype} to {stored}"
        kept.append(KeptTensor(tensor.name, tensor.name, (tensor.name, stored, tensor.shape)))
    order = {tensor.name: index for index, tensor in enumerate(model.checkpoint.tensors)}
    first = {module: order[tensors[0].name] for module, tensors in model.parts.items()}
    pieces: list[Piece] = sorted(
        [*layers, *kept],
        key=lambda piece: order[piece.source] if isinstance(piece, KeptTensor) else first[piece.name],
    )
    assignment = {layer.name: layer.scheme for layer in layers if layer.scheme}
    return TensorPlan(dtype, tuple(pieces), fates, assignment, _kept_modules(model))


def _kept_modules(model: QuantizedModel) -> tuple[str, ...]:
    matrices = [t.name.removesuffix(".weight") for t in model.plain if t.name.endswith(".weight") and len(t.shape) == 2]
    return tuple(dict.fromkeys([*(name for name in matrices if "embed" not in name), "lm_head"]))


def _layer(
    model: QuantizedModel, module: str, codec: Format | None, fresh: Preset | None, dtype: str
) -> ConvertedLayer:
    shape = model.shape(module)
    if codec is None:
        return ConvertedLayer(module, None, None, ((f"{module}.weight", STORED[dtype], shape),))
    target = _target_scheme(codec, model.schemes[module], fresh, dtype)
    layout = codec.layout(module, shape, target.weight, target.static)
    return ConvertedLayer(module, target, fresh, tuple((name, *entry) for name, entry in layout.items()))


def _target_scheme(codec: Format, scheme: Scheme, fresh: Preset | None, dtype: str) -> Scheme:
    """Returns the scheme in the target: the preset's, or the source's own if the target can hold it."""
    wanted = fresh.scheme if fresh else scheme
    grid = codec.stored_grid(wanted.weight, dtype)  # type: ignore[arg-type]
    target = Scheme(grid, wanted.activation)
    reason = codec.refusal(target)
    if reason and not fresh and wanted.weight.kind == "int" and wanted.weight.symmetric:
        target = Scheme(replace(grid, symmetric=False), wanted.activation)  # zero points that are all 0 lose nothing
        reason = codec.refusal(target)
    if reason:
        fix = "choose another format or preset" if fresh else "give --requantize PRESET to round onto another grid"
        raise RecipeError(f"{codec.NAME} cannot hold this checkpoint: {reason}", fix=fix)
    return target


def _described(model: QuantizedModel, to: str, codec: Format | None) -> Preset:
    scheme = next(iter(model.schemes.values()))
    loss = "without loss" if codec else "its weights as the engine sees them"
    return Preset(f"{model.codec.NAME}-to-{to}", f"Converted from {model.codec.NAME}, {loss}", scheme, (to,))
