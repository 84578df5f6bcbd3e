"""From one format to another: the same codes and scales in other bytes, or, when asked for, another grid.

A conversion is lossless where the target holds the same grid and its stored scales can take the source's values
exactly; anything else is refused unless `requantize` names a preset, and then the added error is measured and reported.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantry import registry
from quantry.errors import RecipeError, UnknownNameError
from quantry.models.anatomy import dissect
from quantry.models.reader import open_checkpoint
from quantry.models.weights import DTYPES
from quantry.models.workspace import check_room, check_target
from quantry.numerics.grids import SCALE_DTYPES, dequantize
from quantry.quantizing import card
from quantry.quantizing.containers.folder import SHARD_BYTES, SafetensorsFolder, small_files
from quantry.quantizing.makers import cast, check_decodes
from quantry.quantizing.pipeline import Job, write
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.quantizing.recipe import CAST, Preset, Recipe, preset
from quantry.quantizing.restore import restore
from quantry.quantizing.tensor_plan import DTYPE_NAMES, STORED, Keep, Piece, Recode, TensorPlan, main_dtype
from quantry.types import Artefact, Params, Progress, QTensor, Scheme

PLAIN = {"bf16": "bf16", "fp16": "f16"}  # --to names that mean 16-bit weights


def convert(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    requantize: str | None = None,
    dry_run: bool = False,
    shard_bytes: int = SHARD_BYTES,
    announce: Callable[[Artefact], None] | None = None,
    progress: Progress | None = None,
) -> Artefact:
    """Writes the quantized checkpoint or GGUF file `source` in the format `to` (or as `bf16` or `fp16`) to `output`."""
    out = Path(output).expanduser()
    check_target(out)
    form = _target(to)
    fresh = preset(requantize) if requantize else None
    if fresh and fresh.calibrated:
        raise RecipeError(
            f"{fresh.name} is calibrated on the 16-bit model", fix="quantize that, or requantize to another preset"
        )
    if open_checkpoint(source).format == "gguf":
        if form or fresh:
            raise RecipeError(f"a GGUF file cannot become {to} in one step", fix="convert to bf16, then quantize that")
        return restore(source, out, PLAIN[to], dry_run, shard_bytes, announce, progress)
    if form and form.NAME == "gguf":
        raise RecipeError("GGUF is made of 16-bit weights", fix="convert to bf16, then quantize that to a gguf preset")
    model = QuantizedModel(source)
    division = _divide(model, form, PLAIN.get(to), fresh)
    recipe = Recipe(fresh or _as_it_was(model, to, form), to if form else CAST)
    planned = card.plan(str(source), out, recipe, dissect(model.checkpoint), division)
    cache = [model.cache] if model.cache and _keeps_cache(form) else []
    settings = form.config(division.assignment, division.kept, *cache) if form else None
    converter = Converter(model, form, settings or {})
    if form and not fresh:
        converter.check_lossless(division)
    if announce:
        announce(planned)
    check_room(out, division.bytes)
    if dry_run:
        return planned
    container = SafetensorsFolder(small_files(model.folder), model.checkpoint.config, division.dtype, settings)
    return write(
        Job(model.checkpoint, model.folder, recipe, division, planned, container, shard_bytes), converter, progress
    )


class Converter:
    """Makes the layers of one format from those of another."""

    def __init__(self, model: QuantizedModel, form: ModuleType | None, settings: Mapping[str, Any]) -> None:
        self._model, self._form, self._settings = model, form, settings
        self._errors: dict[str, float] = {}

    def check_lossless(self, division: TensorPlan) -> None:
        """Every scale must be exactly what the target stores; nothing is written before all of them are."""
        for piece in division.pieces:
            if isinstance(piece, Recode) and piece.scheme:
                self._restored(self._model.read(piece.name), piece.name, piece.scheme)
                self._input_scale(piece.name, piece.scheme)

    def make(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        if isinstance(piece, Keep):
            yield piece.name, cast(self._model.tensor(piece.source), DTYPES[piece.entry[1]], piece.name)
        elif isinstance(piece, Recode):
            read = self._model.read(piece.name)
            if piece.scheme is None:
                yield piece.entries[0][0], cast(dequantize(read), DTYPES[piece.entries[0][1]], piece.name)
                return
            assert self._form is not None
            made = self._rounded(read, piece) if piece.preset else self._restored(read, piece.name, piece.scheme)
            stored = self._form.encode(piece.name, made, *self._input_scale(piece.name, piece.scheme))
            check_decodes(self._form.decode(piece.name, stored, piece.scheme, self._settings), made, piece.name)
            yield from stored.items()

    def release(self, piece: Piece) -> None:
        """The pages of a quantized source are few; the kernel takes them when it needs them."""

    def notes(self) -> tuple[str, ...]:
        if not self._errors:
            return ()
        worst = max(self._errors, key=lambda module: self._errors[module])
        mean = sum(self._errors.values()) / len(self._errors)
        return (
            f"Rounded a second time: the relative error added to the weights is {mean:.4f} on average and "
            f"{self._errors[worst]:.4f} at most, in {worst}.",
        )

    def _input_scale(self, module: str, scheme: Scheme) -> tuple[Tensor, ...]:
        """The static scale of a layer's input, if it has one."""
        if scheme.static is None:
            return ()
        read, grid = self._model.input_scale(module), scheme.weight
        assert read is not None
        scale = read.to(torch.float32 if grid.kind == "e2m1" else SCALE_DTYPES[grid.scale])
        if not torch.equal(scale.float(), read.float()):
            raise RecipeError(
                f"{module} has an input scale that {grid.scale} cannot hold exactly", fix="quantize the original model"
            )
        return (scale,)

    def _restored(self, read: QTensor, module: str, scheme: Scheme) -> QTensor:
        """The same values with scales in the target's dtype and zero points where the target's grid has them."""
        scale = read.params.scale
        if scheme.weight.kind not in ("nf4", "fp4"):
            scale = scale.to(SCALE_DTYPES[scheme.weight.scale])
            if not torch.equal(scale.float(), read.params.scale.float()):
                raise RecipeError(
                    f"{module} has {read.grid.scale} scales that {scheme.weight.scale} cannot hold exactly",
                    fix="give --requantize PRESET to accept the loss",
                )
        zero = read.params.zero
        if zero is None and not scheme.weight.symmetric:
            zero = torch.zeros(scale.shape, dtype=torch.int8)
        return QTensor(scheme.weight, read.codes, Params(scale, zero, read.params.outer, read.params.nested))

    def _rounded(self, read: QTensor, piece: Recode) -> QTensor:
        assert piece.preset is not None
        assert piece.preset.fit is not None
        assert piece.scheme is not None
        weight = dequantize(read)
        params = registry.load("quantry.methods.fits", piece.preset.fit).fit(weight, piece.scheme.weight, None)
        made: QTensor = registry.load("quantry.methods.rounders", piece.preset.rounder).round_weight(
            weight, piece.scheme.weight, params
        )
        self._errors[piece.name] = float((dequantize(made) - weight).norm() / weight.norm().clamp(min=1e-30))
        return made


def _target(to: str) -> ModuleType | None:
    if to in PLAIN:
        return None
    known = registry.choices("quantry.formats")
    if to not in known:
        raise UnknownNameError(f"unknown format {to!r}", fix=registry.suggest(to, (*known, *PLAIN)))
    return registry.load("quantry.formats", to)


def _divide(model: QuantizedModel, form: ModuleType | None, plain: str | None, fresh: Preset | None) -> TensorPlan:
    """What becomes of every tensor: plain ones are kept, those of quantized layers written in the new way."""
    source_dtype = main_dtype(model.checkpoint)
    dtype = plain or str(form.model_dtype(DTYPE_NAMES[source_dtype]) if form else "")
    pieces: list[Piece] = []
    fates: dict[str, str] = {}
    assignment: dict[str, Scheme] = {}
    for module, scheme in model.schemes.items():
        shape = model.shape(module)
        if form is None:
            piece = Recode(module, None, None, ((f"{module}.weight", STORED[dtype], shape),))
        else:
            target = _target_scheme(form, scheme, fresh, dtype)
            layout = form.layout(module, shape, target.weight, *([target.static] if target.static else []))
            entries = tuple((name, *kind) for name, kind in layout.items())
            piece = Recode(module, target, fresh, entries)
            assignment[module] = target
        pieces.append(piece)
        fates.update(dict.fromkeys((tensor.name for tensor in model.parts[module]), "converted"))
    scales = {tensor.name for tensor in model.cache_scales}
    for tensor in model.plain:
        if tensor.name in scales and not _keeps_cache(form):
            fates[tensor.name] = "dropped: this format holds no scales of a KV cache"
            continue
        stored = STORED[dtype] if tensor.dtype == source_dtype else tensor.dtype
        fates[tensor.name] = "kept" if stored == tensor.dtype else f"cast: {tensor.dtype} to {stored}"
        pieces.append(Keep(tensor.name, tensor.name, (tensor.name, stored, tensor.shape)))
    matrices = [t.name.removesuffix(".weight") for t in model.plain if t.name.endswith(".weight") and len(t.shape) == 2]
    kept = tuple(dict.fromkeys([*(name for name in matrices if "embed" not in name), "lm_head"]))
    order = {tensor.name: index for index, tensor in enumerate(model.checkpoint.tensors)}
    pieces.sort(
        key=lambda piece: order[piece.source] if isinstance(piece, Keep) else order[model.parts[piece.name][0].name]
    )
    return TensorPlan(dtype, tuple(pieces), fates, assignment, kept)


def _keeps_cache(form: ModuleType | None) -> bool:
    """Whether a format holds scales of a KV cache."""
    return hasattr(form, "cache_layout")


def _target_scheme(form: ModuleType, scheme: Scheme, fresh: Preset | None, dtype: str) -> Scheme:
    """The scheme in the target: the preset's, or the source's own where the target can hold it."""
    wanted = fresh.scheme if fresh else scheme
    grid = form.stored_grid(wanted.weight, dtype)
    target = Scheme(grid, wanted.activation)
    reason = form.refusal(target)
    if reason and not fresh and wanted.weight.kind == "int" and wanted.weight.symmetric:
        target = Scheme(replace(grid, symmetric=False), wanted.activation)  # zero points that are all 0 lose nothing
        reason = form.refusal(target)
    if reason:
        fix = "choose another format or preset" if fresh else "give --requantize PRESET to round onto another grid"
        raise RecipeError(f"{form.NAME} cannot hold this checkpoint: {reason}", fix=fix)
    return target


def _as_it_was(model: QuantizedModel, to: str, form: ModuleType | None) -> Preset:
    """A description of a conversion in place of a preset."""
    scheme = next(iter(model.schemes.values()))
    loss = "without loss" if form else "its weights as the engine sees them"
    return Preset(f"{model.form.NAME}-to-{to}", f"Converted from {model.form.NAME}, {loss}", scheme, (to,))
