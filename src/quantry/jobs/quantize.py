"""`quantry quantize`: from options to a recipe, then everything that can be refused, then the loop (pipeline.py)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantry.errors import CheckpointError, OutputError, RecipeError
from quantry.formats.gguf import NAME as GGUF
from quantry.llamacpp.importance import Importance, importance_bytes
from quantry.llamacpp.importance import read as read_importance
from quantry.models.anatomy import check_blocks, sixteen_bit
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.weights import MappedWeights, PlainWeights
from quantry.models.workspace import check_room, check_target, recover
from quantry.numerics.device import device as computing
from quantry.quantizing import card
from quantry.quantizing.calibration.data import Data
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.containers.folder import files_beside
from quantry.quantizing.lacks import lacks
from quantry.quantizing.makers.reader import WeightReader
from quantry.quantizing.pipeline import WriteJob, write
from quantry.quantizing.recipe import AUTO, KEYS, Recipe, build, preset_name
from quantry.quantizing.recipe_file import read_plan, read_recipe
from quantry.quantizing.targets import GgufTarget, target_of
from quantry.quantizing.tensor_plan import dividing_group
from quantry.quantizing.width import wider_than_named
from quantry.report.stages import named, stages
from quantry.storage import ARTEFACT_FILE, SENSITIVITY_FILE
from quantry.types import Artefact, Checkpoint, Progress

if TYPE_CHECKING:
    from quantry.jobs.auto.mixture import Mixture
    from quantry.quantizing.calibration.calibrator import Calibrator
    from quantry.quantizing.distil.tuning import InTurn

REPORT_BYTES = 2 << 20  # of report.html and report.png, which grow with the layers
SEQUENTIAL = False  # calibrate each block on the output of quantized ones by default; it gained nothing for AWQ + GPTQ
CHOOSING, MEASURING = 4, 3  # the work of preset auto and of an importance matrix, against that of writing
ROUNDING, DISTILLING = 10, 5  # that of training codes and scales
ROUNDING_STEPS = DISTIL_STEPS = 200
TRAINING_BYTES = 2  # a weight, on the disk: factors of scales with two moments each, and what was trained
NOT_CALIBRATED = "leave it out, use a calibrated preset, or --rounder gptq"


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
    data: Data = None,
    samples: int | None = None,
    length: int | None = None,
    sequential: bool | None = None,
    learn_rounding: bool = False,
    rounding_steps: int | None = None,
    distil: bool = False,
    distil_steps: int | None = None,
    low_memory: bool = False,
    keep_odd: bool = False,
    dry_run: bool = False,
    device: str = "cpu",
    shard_bytes: int | None = None,
    overwrite: bool = False,
    announce: Callable[[Artefact], None] | None = None,
    progress: Progress | None = None,
) -> Artefact:
    """Writes a quantized checkpoint of `model` to the folder `output`; with `dry_run` only says what it would be.

    Exactly one of `preset`, `recipe` and `plan` (files) says what to do; docs/reference/quantize.md explains the rest.
    Preset "auto" chooses for each tensor, so that the least is lost within a `budget`: "4.5bpw", "6GiB", "105453920B"
    or "fits RTX 3060 at 8k"; with `gpu`, a name of the catalogue or "cpu", from what its engine loads there. `data` is
    a path, or several with weights: "chat.jsonl:3,code.txt:1", a list of these or {"chat.jsonl": 3}. `learn_rounding`
    trains the codes of each block against the 16-bit block, `distil` then the scales of the whole model. An output that
    the same job has finished is returned as it is; `overwrite` replaces an artefact.

    Raises RecipeError for options that cannot be carried out, CheckpointError and WeightError for a model that cannot
    be read, OutputError for an output that cannot be written.
    """
    preset = preset_name(preset) if preset else None
    out = _checked_output(output, overwrite)
    settings = {
        "preset": preset, "recipe": recipe, "plan": plan, "format": format, "group": group, "rounder": rounder,
        "transform": transform, "input_scales": input_scales, "kv": kv, "imatrix": imatrix, "budget": budget,
        "gpu": gpu,
    }  # fmt: skip
    text = CalibrationOptions(data, samples, length, low_memory)
    options = JobOptions(computing(device), text, keep_odd, overwrite=overwrite)
    shown = stages(progress, {"choosing": CHOOSING if preset == AUTO else 0, "writing": 1})
    chosen, options = (_mixture if preset == AUTO else _recipe)(model, settings, options, shown["choosing"])
    chosen = replace(
        _in_sequence(chosen, sequential),
        rounding=_steps("learn-rounding", learn_rounding, "rounding-steps", rounding_steps, ROUNDING_STEPS),
        distil=_steps("distil", distil, "distil-steps", distil_steps, DISTIL_STEPS),
    )
    job = QuantizeJob(model, out, chosen, options)
    if not overwrite and (out / ARTEFACT_FILE).is_file():
        return job.finished()
    if announce:
        announce(job.planned)
    job.check_room()
    return job.planned if dry_run else job.run(shard_bytes, shown["writing"])


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job is carried out, beside its recipe."""

    device: torch.device
    text: CalibrationOptions
    keep_odd: bool = False
    importance: Importance | None = None  # read from a file
    mixture: "Mixture | None" = None
    overwrite: bool = False
    notes: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None  # that is open already


class QuantizeJob:
    """A job that was checked against its model: `planned` says what it will write."""

    def __init__(self, model: str | Path, out: Path, recipe: Recipe, options: JobOptions) -> None:
        self._model, self._out, self._options = model, out, options
        self._checkpoint = options.checkpoint or open_checkpoint(model)
        anatomy = sixteen_bit(self._checkpoint)
        self._target = target_of(self._checkpoint, recipe, options.importance, options.keep_odd)
        check_blocks(self._checkpoint)
        self._calibrator = self._prepared_calibration(recipe)
        self._plan = self._target.plan
        self._recipe = recipe
        if self._calibrator:
            self._recipe = replace(recipe, calibration=self._calibrator.record)
            self._plan = self._calibrator.marked(self._plan)
        planned = card.plan(str(model), out, self._recipe, anatomy, self._plan)
        wider = wider_than_named(planned, self._recipe, self._plan)
        self.planned = replace(planned, notes=(*self._notes(), *wider))

    def check_room(self) -> None:
        """Raises OutputError if the disk has no room for the output."""
        vectors = (
            self._target.tensors() if isinstance(self._target, GgufTarget) and self._recipe.imatrix == AUTO else {}
        )
        parts = {
            "the weights": self._plan.bytes,
            "hidden states of the calibration": self._calibrator.kept_bytes if self._calibrator else 0,
            "the importance matrix": importance_bytes(vectors),
            "the state of training": TRAINING_BYTES * self.planned.parameters if self._recipe.trained else 0,
            "the files beside them": files_beside(self._checkpoint),
            "the report": REPORT_BYTES,
        }
        check_room(self._out, parts)

    def finished(self) -> Artefact:
        """Returns the artefact that an earlier run has made. Raises OutputError if it is that of another job."""
        source = identity(open_checkpoint(local_folder(self._model)))
        return card.finished(self.planned, self._recipe, self._plan, source)

    def run(self, shard_bytes: int | None, progress: Progress | None) -> Artefact:
        """Downloads the model if needed, and writes the artefact."""
        options, checkpoint = self._options, self._checkpoint
        folder = local_folder(self._model)
        if open_checkpoint(folder).tensors != checkpoint.tensors:
            raise CheckpointError(f"{self._model} changed after its headers were read", fix="run the command again")
        reader = WeightReader(checkpoint, MappedWeights(folder), options.device)
        recipe, target, plan = self._recipe, self._target, self._plan
        measures_first = self._calibrator is not None and recipe.imatrix == AUTO
        shown = stages(
            progress,
            {
                "text": MEASURING if measures_first else 0,
                "weights": 1,
                "codes": ROUNDING if recipe.rounding else 0,
                "scales": DISTILLING if recipe.distil else 0,
            },
        )
        both = _Progress(shown["weights"])
        walked = named(shown["text"], "calibrating") if measures_first else both.blocks
        calibration = self._calibrator.start(folder, reader.whole, walked) if self._calibrator else None
        if calibration and recipe.stretches and not recipe.dynamic and (dynamic := calibration.outlying()):
            found = replace(recipe, dynamic=dynamic, calibration=None)
            noted = replace(options, notes=(*options.notes, _outliers(dynamic)))
            return QuantizeJob(self._model, self._out, found, noted).run(shard_bytes, progress)
        if calibration and measures_first:
            assert isinstance(target, GgufTarget)
            vectors, file = calibration.importance(target.tensors())
            recipe = replace(recipe, imatrix=vectors.sha256)
            target = GgufTarget(checkpoint, recipe, vectors, file)
            plan = target.plan
        container = target.container(folder)
        needs_blocks = recipe.needs_statistics or recipe.distilled or recipe.cache is not None
        planned = self.planned
        if calibration and measures_first and not needs_blocks:
            notes, experts = calibration.notes(), calibration.expert_tokens()
            planned = replace(planned, notes=(*planned.notes, *notes), expert_tokens=experts)
        job = WriteJob(
            checkpoint, folder, recipe, plan, planned, container, shard_bytes or container.shard_bytes,
            identity(open_checkpoint(folder)), options.device.type, self._extra_files(), options.overwrite,
        )  # fmt: skip
        tuning = self._tuning(folder, shown["codes"], shown["scales"]) if recipe.trained else None
        return write(job, target.maker(reader), calibration if needs_blocks else None, both.bytes, tuning)

    def _tuning(self, folder: Path, codes: Progress | None, scales: Progress | None) -> "InTurn":
        """Returns what trains the finished shards."""
        from quantry.quantizing.calibration.text import SEED
        from quantry.quantizing.distil.lessons import Lessons  # imports transformers
        from quantry.quantizing.distil.rounding import Rounding
        from quantry.quantizing.distil.tuning import Distillation, InTurn, Stage

        assert self._calibrator is not None
        recipe, text = self._recipe, self._calibrator.text
        source, device = PlainWeights(self._checkpoint, folder), self._options.device
        lessons = Lessons(source, text.tokens, text.labels, device, SEED)
        stages: list[Stage] = []
        if recipe.rounding:
            stages.append(Rounding(lessons, recipe.rounding, recipe.transform is not None, codes))
        if recipe.distil:
            stages.append(Distillation(lessons, recipe.distil, scales))
        return InTurn(stages)

    def _prepared_calibration(self, recipe: Recipe) -> "Calibrator | None":
        """Loads the text of a calibrated job; others load no model and refuse the options of calibration."""
        flags, options = self._options.text.flags(), self._options
        if recipe.calibrated:
            from quantry.quantizing.calibration.calibrator import prepare_calibration  # imports transformers

            if recipe.trained:
                from quantry.quantizing.distil.tuning import check_distillation, check_rounding  # imports transformers

                if recipe.rounding:
                    check_rounding(self._target.plan)
                if recipe.distil:
                    check_distillation(self._target.plan, sixteen_bit(self._checkpoint).parameters, options.device)
            return prepare_calibration(self._checkpoint, recipe, self._target.plan, options.device, options.text)
        if flags:
            raise RecipeError(f"{flags[0]} has no use: {recipe.preset.name} is not calibrated", fix=NOT_CALIBRATED)
        return None

    def _notes(self) -> list[str]:
        mixture = self._options.mixture
        predicted = mixture.notes if mixture else ()
        calibrated = self._calibrator.notes if self._calibrator else ()
        return [*self._options.notes, *predicted, *calibrated, *_cache_notes(self._recipe), *lacks(self._checkpoint)]

    def _extra_files(self) -> dict[str, bytes]:
        mixture = self._options.mixture
        return {SENSITIVITY_FILE: mixture.to_json(Path(self._model).name).encode()} if mixture else {}


class _Progress:
    """Progress of a job that walks through a model between the pieces it writes."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._done, self._total = progress, 0, 1

    def bytes(self, done: int, total: int, label: str) -> None:
        self._done, self._total = done, total
        if self._progress:
            self._progress(done, total, label)

    def blocks(self, done: int, count: int, name: str) -> None:
        self.bytes(self._done, self._total, f"calibrating {name}, {done} of {count} done")


def _checked_output(output: str | Path, overwrite: bool) -> Path:
    out = Path(output).expanduser()
    if not overwrite:
        recover(out)
    check_target(out, artefact=True)
    if out.suffix == ".gguf":
        raise OutputError(
            f"{out} ends in .gguf, and the output is a folder",
            fix="give a folder; the file in it is named by the model",
        )
    return out


def _mixture(
    model: str | Path, settings: Mapping[str, Any], options: JobOptions, progress: Progress | None
) -> tuple[Recipe, JobOptions]:
    from quantry.jobs.auto.mixer import AutoOptions
    from quantry.jobs.auto.mixture import choose_mixture

    unused = ("recipe", "plan", "group", "imatrix", "input_scales")
    _refuse(settings, unused, "with preset auto, which chooses for each tensor", "leave it out")
    used = ("budget", "format", "rounder", "transform", "kv", "gpu")
    auto = AutoOptions(**{key: settings[key] for key in used if settings[key] is not None})
    mixture = choose_mixture(model, auto, options.text, options.device, progress)
    return mixture.recipe, replace(options, keep_odd=True, mixture=mixture)


def _recipe(
    model: str | Path, settings: Mapping[str, Any], options: JobOptions, progress: Progress | None
) -> tuple[Recipe, JobOptions]:
    """Returns the recipe of a preset, a recipe file or a plan, with the other settings on top."""
    _refuse(settings, ("budget", "gpu"), "without --preset auto", "add it, or leave this out")
    given = [key for key in ("preset", "recipe", "plan") if settings[key] is not None]
    if len(given) != 1:
        problem = f"{' and '.join(f'--{key}' for key in given)} say different things" if given else "no preset is given"
        raise RecipeError(problem, fix="give one of --preset (such as Q4_K_M, awq or fp8), --recipe and --plan")
    written = _written(model, given[0], settings[given[0]])
    wanted = {**written, **{key: settings[key] for key in KEYS & settings.keys() if settings[key] is not None}}
    recipe, options = _with_dividing_group(model, wanted, build(wanted), options)
    imatrix = settings["imatrix"]
    vectors = importance_of(imatrix, recipe)
    known = vectors.sha256 if vectors else AUTO if str(imatrix) == AUTO else None
    return replace(recipe, imatrix=known), replace(options, importance=vectors)


def _with_dividing_group(
    model: str | Path, settings: Mapping[str, Any], recipe: Recipe, options: JobOptions
) -> tuple[Recipe, JobOptions]:
    """Takes smaller groups where those of the preset do not divide some layer, unless a size was asked for."""
    if settings.get("group") is not None or options.keep_odd:
        return recipe, options
    checkpoint = open_checkpoint(model)
    sixteen_bit(checkpoint)
    options = replace(options, checkpoint=checkpoint)
    found = dividing_group(checkpoint, recipe)
    if found is None:
        return recipe, options
    group, odd = found
    usual = recipe.preset.scheme.weight.block[1]
    note = (
        f"Groups of {group} weights: {usual} do not divide the {odd.shape[1]:,} columns of {odd.module}; "
        "--keep-odd would leave such layers in 16 bit."
    )
    return build({**settings, "group": group}), replace(options, notes=(*options.notes, note))


def _written(model: str | Path, option: str, value: str | Path) -> Mapping[str, Any]:
    """Returns the settings of a recipe file or of a plan for this model."""
    file = Path(value).expanduser()
    if option == "plan":
        return read_plan(file, sixteen_bit(open_checkpoint(model)))
    return read_recipe(file) if option == "recipe" else {}


def _refuse(settings: Mapping[str, Any], unused: tuple[str, ...], why: str, fix: str) -> None:
    """Raises RecipeError for the first setting that is given though it has no use."""
    for name in unused:
        if settings[name] is not None:
            raise RecipeError(f"--{name.replace('_', '-')} has no use {why}", fix=fix)


def importance_of(path: str | Path | None, recipe: Recipe) -> Importance | None:
    """Reads a file of importance vectors; None for "none" and "auto". Raises RecipeError if the recipe has no use."""
    if path is None or str(path) == "none":
        return None
    if recipe.format != GGUF:
        raise RecipeError(f"--imatrix has no use in format {recipe.format}", fix="leave it out, or use a gguf preset")
    if recipe.preset.scheme.weight.is_cast and not recipe.rules:
        raise RecipeError(f"--imatrix has no use with {recipe.preset.name}, which rounds nothing", fix="leave it out")
    if recipe.transform:
        raise RecipeError(
            f"--imatrix has no use with {recipe.transform}, which scales the inputs that it describes",
            fix="leave it out",
        )
    return None if str(path) == AUTO else read_importance(Path(path).expanduser())


def _in_sequence(recipe: Recipe, sequential: bool | None) -> Recipe:
    """Sets whether blocks are calibrated one after the other's quantization. Raises RecipeError if they cannot be."""
    reasons = {
        f"{recipe.preset.name} is not calibrated": not recipe.calibrated,
        "--imatrix auto is computed before the first block is quantized": recipe.imatrix == AUTO,
        f"{recipe.preset.name} trains each block on what the 16-bit ones give": recipe.distilled,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if sequential and reason:
        raise RecipeError(f"--sequential has no use: {reason}", fix="leave it out")
    return replace(recipe, sequential=SEQUENTIAL and reason is None if sequential is None else sequential)


def _steps(flag: str, wanted: bool, option: str, steps: int | None, usual: int) -> int | None:
    """Returns in how many steps something is trained. Raises RecipeError for steps without training, or too few."""
    if steps is not None and steps < 1:
        raise RecipeError(f"{steps} steps train nothing", fix=f"give --{option} of 1 or more")
    if steps is not None and not wanted:
        raise RecipeError(f"--{option} {steps} has no use without --{flag}", fix="add it, or leave this out")
    return None if not wanted else usual if steps is None else steps


def _outliers(modules: tuple[str, ...]) -> str:
    """Returns what the card says of layers whose inputs keep dynamic scales."""
    shown = ", ".join(modules[:4]) + (f" and {len(modules) - 4} more" if len(modules) > 4 else "")
    layers = "1 layer scales its input" if len(modules) == 1 else f"{len(modules)} layers scale their inputs"
    return f"{layers} by token while the engine runs, since outliers would stretch a stored scale: {shown}."


def _cache_notes(recipe: Recipe) -> tuple[str, ...]:
    if recipe.kv is None:
        return ()
    if recipe.format == GGUF:
        return ("Serve it with llama.cpp's --flash-attn on --cache-type-k q8_0 --cache-type-v q8_0.",)
    word = "fp8" if recipe.cache else "int8_per_token_head"
    return (f"Serve it with vLLM's --kv-cache-dtype {word}.",)
