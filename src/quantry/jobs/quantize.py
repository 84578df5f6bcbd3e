"""Quantization, the whole of it: open, decide, announce, then piece by piece read, fit, round, encode, write.

Only the piece in hand is in memory, whatever the model's size: weights are mapped from their files and results go
straight into shards whose headers were written first. The result depends on the model, the recipe and the version
alone, never on where or how often the job was interrupted.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quantry import registry
from quantry.errors import CheckpointError, OutputError, RecipeError
from quantry.formats.gguf import NAME as GGUF
from quantry.llamacpp import importance
from quantry.llamacpp.families import notes
from quantry.llamacpp.tensor_map import Target
from quantry.models.anatomy import sixteen_bit
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.weights import MappedWeights
from quantry.models.workspace import check_room, check_target
from quantry.models.writer import nbytes
from quantry.numerics.device import device as computing
from quantry.quantizing import card
from quantry.quantizing.containers import gguf_file
from quantry.quantizing.containers.folder import SafetensorsFolder, small_files
from quantry.quantizing.makers import BlockMaker, Inputs, Maker, Quantizer, Reader
from quantry.quantizing.pipeline import Container, Job, write
from quantry.quantizing.recipe import AUTO, CAST, Recipe, from_options
from quantry.quantizing.tensor_plan import Assemble, TensorPlan, by_block, divide, shards
from quantry.types import Anatomy, Artefact, Checkpoint, Progress

if TYPE_CHECKING:
    from quantry.jobs.auto.mixture import Mixture
    from quantry.quantizing.calibration.calibrator import Calibrated

MIXED_BY = ("gptq", "awq")  # the rounder and the transform of mixtures where nothing is said
SEQUENTIAL = False  # whether blocks are calibrated one after the other's quantization where nothing is said
SENSITIVITY = "sensitivity.json"  # what a mixture was chosen by
CALIBRATED = "leave it out, use a calibrated preset, or --rounder gptq"


def quantize(
    model: str | Path,
    output: str | Path,
    *,
    preset: str | None = None,
    recipe: str | Path | None = None,
    plan: str | Path | None = None,
    format: str | None = None,  # noqa: A002 - the flag's name
    group: int | None = None,
    budget: str | None = None,
    gpu: str | None = None,
    rounder: str | None = None,
    transform: str | None = None,
    imatrix: str | Path | None = None,
    input_scales: str | None = None,
    kv: str | None = None,
    data: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    sequential: bool | None = None,
    low_memory: bool = False,
    keep_odd: bool = False,
    dry_run: bool = False,
    device: str = "cpu",
    shard_bytes: int | None = None,
    announce: Callable[[Artefact], None] | None = None,
    progress: Progress | None = None,
) -> Artefact:
    """Writes a quantized checkpoint of `model` to the folder `output`; with `dry_run` only says what it would be.

    Presets that are calibrated read `samples` windows of `length` tokens of `data` (128 of 2048, and a text that comes
    with the package). `imatrix` is a file of importance vectors, or "auto": then they are computed from the same text.
    With `sequential` each block is calibrated on what the quantized blocks before it give, instead of the 16-bit ones;
    `low_memory` keeps less of the calibration on a GPU, which takes longer. `kv` is what the KV cache is served in:
    for fp8 and fp8-head scales are stored, one a layer or one a head; int8 finds its own.

    Preset "auto" chooses for each tensor, so that the least is lost within a `budget`: "4.5bpw", "6GiB", "105453920B"
    or "fits RTX 3060 at 8k"; with `gpu`, a name of the catalogue or "cpu", from what its engine loads there.
    """
    out = Path(output).expanduser()
    check_target(out)
    if out.suffix == ".gguf":
        raise OutputError(
            f"{out} ends in .gguf, and the output is a folder",
            fix="give a folder; the file in it is named by the model",
        )
    where = computing(device)
    text = {"data": data, "samples": samples, "length": length}
    if preset == AUTO:
        unused = {"recipe": recipe, "plan": plan, "group": group, "imatrix": imatrix, "input_scales": input_scales}
        ways = {"rounder": rounder or MIXED_BY[0], "transform": transform or MIXED_BY[1], "kv": kv, "gpu": gpu}
        mixture = _mixed(model, budget, format, ways, unused, {**text, "device": device}, progress)
        steps = mixture.recipe
    elif budget is None and gpu is None:
        mixture = None
        steps = from_options(preset, _path(recipe), _path(plan), format, group, rounder, input_scales, kv, transform)
    else:
        name = "gpu" if budget is None else "budget"
        raise RecipeError(f"--{name} has no use without --preset auto", fix=f"add it, or leave --{name} out")
    checkpoint = open_checkpoint(model)
    anatomy = sixteen_bit(checkpoint)
    weights = _importance(imatrix, steps)
    steps = replace(steps, imatrix=weights.sha256 if weights else AUTO if str(imatrix) == AUTO else None)
    steps = _in_sequence(steps, sequential)
    order = _order(checkpoint, steps, anatomy.blocks, weights, keep_odd or mixture is not None)
    options = {**text, "low_memory": low_memory or None}
    calibrated = _calibrated(checkpoint, steps, anatomy, order.division, where, options)
    if calibrated:
        steps = replace(steps, calibration=calibrated.record)
        order = order._replace(division=calibrated.marked(order.division))
    planned = card.plan(str(model), out, steps, anatomy, order.division)
    told = [f"The predicted divergence is {mixture.damage:.3g} nats a token."] if mixture else []
    planned = replace(planned, notes=(*told, *(calibrated.notes if calibrated else ()), *_cache_notes(steps)))
    if announce:
        announce(planned)
    check_room(out, order.division.bytes + (calibrated.kept_bytes if calibrated else 0))
    if dry_run:
        return planned
    folder = local_folder(model)  # everything that can be refused has been, before a model is downloaded
    if open_checkpoint(folder).tensors != checkpoint.tensors:
        raise CheckpointError(f"{model} changed between its headers and its download", fix="run the command again")
    reader = Reader(checkpoint, MappedWeights(folder), where)
    walking = _Walking(progress, order.division.bytes)
    inputs = calibrated.inputs(folder, reader.whole, walking.blocks) if calibrated else None
    if inputs and steps.imatrix == AUTO:
        weights, file = inputs.importance(_targets(order.division))
        steps = replace(steps, imatrix=weights.sha256)
        order = _gguf(checkpoint, steps, weights, file)
    container = order.container(folder)
    size = shard_bytes or container.shard_bytes
    beside = {} if mixture is None else {SENSITIVITY: mixture.told(Path(model).name).encode()}
    job = Job(
        checkpoint, folder, steps, order.division, planned, container, size, where.type, inputs, anatomy.blocks, beside
    )
    return write(job, order.maker(reader, inputs), walking.bytes if progress else None)


class Order(NamedTuple):
    """What a format makes of a checkpoint: the pieces, and who makes them and into what, once the weights are here."""

    division: TensorPlan
    container: Callable[[Path], Container]
    maker: Callable[[Reader, Inputs | None], Maker]


def _order(
    checkpoint: Checkpoint, steps: Recipe, blocks: int, weights: importance.Importance | None, keep_odd: bool
) -> Order:
    if steps.format == GGUF:
        return _gguf(checkpoint, steps, weights)
    return _layers(checkpoint, steps, blocks, keep_odd)


def _layers(checkpoint: Checkpoint, steps: Recipe, blocks: int, keep_odd: bool) -> Order:
    """A Hugging Face folder whose linear layers are quantized."""
    form = None if steps.format == CAST else registry.load("quantry.formats", steps.format)
    division = divide(checkpoint, steps, blocks, form, keep_odd)
    if form and not division.assignment:
        raise RecipeError(
            f"no layer of {checkpoint.source} would be quantized",
            fix="loosen the recipe's rules or leave --keep-odd out",
        )
    cache = [replace(steps.cache, scale=division.dtype)] if steps.cache else []  # type: ignore[arg-type]
    settings = form.config(division.assignment, division.kept, *cache) if form else None
    return Order(
        by_block(division, blocks) if steps.calibrated else division,
        lambda folder: SafetensorsFolder(small_files(folder), checkpoint.config, division.dtype, settings),
        lambda reader, inputs: Quantizer(reader, form, settings or {}, inputs),
    )


def _gguf(
    checkpoint: Checkpoint, steps: Recipe, weights: importance.Importance | None, computed: bytes | None = None
) -> Order:
    """A GGUF file; `computed` is the file of an importance matrix that goes along with it."""
    division = gguf_file.divide(checkpoint, steps)
    given = importance.fitting(weights, _targets(division)) if weights else {}
    vectors = {name: torch.from_numpy(vector) for name, vector in given.items()}
    file = gguf_file.describe(checkpoint, steps, division, weights, computed)
    rounder = registry.load("quantry.methods.rounders", steps.preset.rounder) if steps.preset.calibrated else None
    return Order(
        division,
        lambda folder: file,
        lambda reader, inputs: BlockMaker(reader, vectors, tuple(notes(checkpoint.config)), rounder, inputs),
    )


def _mixed(
    model: str | Path,
    budget: str | None,
    form: str | None,
    ways: Mapping[str, Any],
    unused: Mapping[str, Any],
    text: Mapping[str, Any],
    progress: Progress | None,
) -> "Mixture":
    """What preset auto chooses for each tensor of a model."""
    from quantry.jobs.auto import mixture as mixing

    form = mixing.check(budget, form, unused)
    assert budget is not None
    checkpoint = open_checkpoint(model)
    anatomy = sixteen_bit(checkpoint)

    def tell(done: int, total: int, label: str) -> None:
        if progress:
            progress(0, 1, f"looking where bits matter, {done} of {total} steps: {label}")

    return mixing.mixed(
        model,
        checkpoint,
        anatomy,
        budget,
        form,
        lambda steps: _sizes(_order(checkpoint, steps, anatomy.blocks, None, keep_odd=True)),
        progress=tell,
        **ways,
        **text,
    )


def _sizes(order: Order) -> tuple[int, int]:
    """The bytes of the files with weights, and of the tensors in them."""
    container = order.container(Path())
    parts = shards(order.division.pieces, container.shard_bytes)
    cut = [[entry for piece in pieces for entry in piece.entries] for pieces in parts]
    padded = sum(-(-nbytes(*entry[1:]) // container.alignment) * container.alignment for part in cut for entry in part)
    return padded + sum(len(container.header(number, cut)) for number in range(len(cut))), order.division.bytes


def _targets(division: TensorPlan) -> dict[str, Target]:
    return {piece.name: piece.target for piece in division.pieces if isinstance(piece, Assemble)}


def _calibrated(
    checkpoint: Checkpoint,
    steps: Recipe,
    anatomy: Anatomy,
    division: TensorPlan,
    device: torch.device,
    options: Mapping[str, Any],
) -> "Calibrated | None":
    """What a calibrated job reads; other jobs load no model and no text."""
    if steps.calibrated:
        from quantry.quantizing.calibration.calibrator import begin  # brings transformers along

        return begin(
            checkpoint, steps, anatomy, division, device, **{**options, "low_memory": bool(options["low_memory"])}
        )
    unused = next((name for name, value in options.items() if value is not None), None)
    if unused:
        raise RecipeError(
            f"--{unused.replace('_', '-')} has no use: {steps.preset.name} is not calibrated", fix=CALIBRATED
        )
    return None


def _in_sequence(steps: Recipe, sequential: bool | None) -> Recipe:
    """The recipe, calibrated block after quantized block if that is wanted."""
    reasons = {
        f"{steps.preset.name} is not calibrated": not steps.calibrated,
        "--imatrix auto is computed before the first block is quantized": steps.imatrix == AUTO,
        f"{steps.preset.name} trains each block on what the 16-bit ones give": steps.distilled,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if sequential and reason:
        raise RecipeError(f"--sequential has no use: {reason}", fix="leave it out")
    return replace(steps, sequential=SEQUENTIAL and reason is None if sequential is None else sequential)


def _cache_notes(steps: Recipe) -> tuple[str, ...]:
    """How an engine is told what the KV cache is in."""
    if steps.kv is None:
        return ()
    if steps.format == GGUF:
        return ("Serve it with llama.cpp's --flash-attn on --cache-type-k q8_0 --cache-type-v q8_0.",)
    word = "fp8" if steps.cache else "int8_per_token_head"
    return (f"Serve it with vLLM's --kv-cache-dtype {word}.",)


class _Walking:
    """Progress of a job that walks through a model between the pieces it writes."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def bytes(self, done: int, total: int, label: str) -> None:
        self._done = done
        if self._progress:
            self._progress(done, total, label)

    def blocks(self, done: int, count: int, name: str) -> None:
        self.bytes(self._done, self._total, f"calibrating {name}, {done} of {count} done")


def _importance(path: str | Path | None, steps: Recipe) -> importance.Importance | None:
    if path is None or str(path) == "none":
        return None
    if steps.format != GGUF:
        raise RecipeError(f"--imatrix has no use in format {steps.format}", fix="leave it out, or use a gguf preset")
    if steps.preset.scheme.weight.is_cast and not steps.rules:
        raise RecipeError(f"--imatrix has no use with {steps.preset.name}, which rounds nothing", fix="leave it out")
    if steps.transform:
        raise RecipeError(
            f"--imatrix has no use with {steps.transform}, which scales the inputs that it is of", fix="leave it out"
        )
    return None if str(path) == AUTO else importance.read(Path(path).expanduser())


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value).expanduser()
