"""Prepares the calibration of a job: loads its text and refuses everything that can be refused before it starts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantry.blockwise.walk import Walk
from quantry.errors import CheckpointError, QuantryError, RecipeError
from quantry.formats.gguf import NAME as GGUF
from quantry.models.attention import context_length, text_config
from quantry.models.identity import identity
from quantry.models.reader import open_checkpoint, small_folder
from quantry.models.tokenizer import load_tokenizer
from quantry.models.weights import PlainWeights
from quantry.numerics.device import arithmetic
from quantry.quantizing.calibration.advice import advise
from quantry.quantizing.calibration.mixture import load_data
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.calibration.per_block import BlockCalibration, BlockSteps
from quantry.quantizing.calibration.record import CalibratedText, Calibration
from quantry.quantizing.calibration.resumable_walk import ResumableWalk
from quantry.quantizing.calibration.store import Statistics, default_store
from quantry.quantizing.calibration.text import LENGTH, SAMPLES, SEED, CalibrationText
from quantry.quantizing.calibration.transform import BlockTransform, even_grids
from quantry.quantizing.recipe import Recipe
from quantry.quantizing.tensor_plan import TensorPlan
from quantry.types import Checkpoint, Progress

SCALED = "scaled with the layers around it"


class Calibrator:
    """The text of a job, checked against its model, and what is done with each block."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        plan: TensorPlan,
        text: CalibrationText,
        device: torch.device,
        low_memory: bool = False,
    ) -> None:
        self._checkpoint, self._recipe, self._plan, self.text = checkpoint, recipe, plan, text
        self._device, self._low_memory = device, low_memory
        trains_on_cpu = recipe.distilled and device.type == "cpu"  # gradients are too small for bfloat16
        self._arithmetic = torch.float32 if trains_on_cpu else arithmetic(device)
        schemes = even_grids(plan) if recipe.format == GGUF else plan.assignment
        name = recipe.transform
        self._transform = BlockTransform(name, checkpoint, plan.block_count, schemes) if name else None

    @property
    def record(self) -> Calibration:
        """What the recipe records of the text."""
        text, run_in = self.text, str(self._arithmetic).removeprefix("torch.")
        counts = len(text.tokens), text.length, SEED, text.count
        return Calibration(text.name, text.fingerprint, *counts, run_in, calibrated_texts(text))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know before the job begins."""
        return (*advise(self.text), *(self._transform.notes() if self._transform else ()))

    @property
    def kept_bytes(self) -> int:
        """The room on the disk that a sequential job needs for the hidden states before two blocks."""
        channels = int(text_config(self._checkpoint.config)["hidden_size"])
        return 2 * self.text.count * channels * self._arithmetic.itemsize if self._recipe.sequential else 0

    def marked(self, plan: TensorPlan) -> TensorPlan:
        """Adds to the fates of kept tensors that a transform scales them."""
        scaled = self._transform.scaled() if self._transform else set()
        fates = {
            name: f"{fate}{',' if ':' in fate else ':'} {SCALED}" if name in scaled and fate != "quantized" else fate
            for name, fate in plan.fates.items()
        }
        return replace(plan, fates=fates)

    def start(self, folder: Path, read: Callable[[str], Tensor], progress: Progress | None = None) -> BlockCalibration:
        """Returns the calibration of a model in `folder`; nothing runs before a block is entered.

        `read` returns a tensor of the checkpoint on the computing device; `progress` counts blocks.
        """
        recipe = self._recipe
        walk = ResumableWalk(
            source=PlainWeights(self._checkpoint, folder),
            windows=self.text.tokens,
            device=self._device,
            dtype=self._arithmetic,
            batch=1 if recipe.distilled else 4,  # a batch is a training step, and more steps do more
            low_memory=self._low_memory,
            progress=progress,
        )
        store = default_store() if self._device.type == "cpu" else None  # a GPU walks faster than a disk writes
        statistics = Statistics(walk, self.text, store, identity(open_checkpoint(folder)), recipe.histogram)
        steps = BlockSteps(
            transform=self._transform,
            sequential=recipe.sequential,
            distilled=recipe.distilled,
            collects=not recipe.distilled or recipe.needs_statistics,
            heads=recipe.cache is not None,
            schemes=self._plan.assignment,
        )
        return BlockCalibration(statistics, steps, read)


def prepare_calibration(
    checkpoint: Checkpoint, recipe: Recipe, plan: TensorPlan, device: torch.device, options: CalibrationOptions
) -> Calibrator:
    """Loads the text and checks it against the model, by headers alone.

    Raises RecipeError for a recipe that distils and transforms, CheckpointError for a model that cannot be run on text.
    """
    if recipe.distilled and recipe.transform:
        raise RecipeError(
            f"the recipe both distils blocks and transforms them with {recipe.transform}", fix="use one of the two"
        )
    walk = Walk(PlainWeights(checkpoint, Path()), device=device, dtype=arithmetic(device))
    text = load_text(checkpoint, options)
    if (recipe.distilled or recipe.trained) and len(text.tokens) < 2:
        raise QuantryError("1 sample is too few to train on, since one is held out", fix="give --samples of at least 2")
    largest, rows = max(map(max, text.tokens)), walk.skeleton.rows
    if largest >= rows:
        raise CheckpointError(
            f"the tokenizer gives a token {largest} where the embedding has {rows} rows",
            fix="use the tokenizer that belongs to the model",
        )
    return Calibrator(checkpoint, recipe, plan, text, device, options.low_memory)


def calibrated_texts(text: CalibrationText) -> tuple[CalibratedText, ...]:
    """Returns what is recorded of each text of a mixture; nothing of a single one."""
    return tuple(
        CalibratedText(part.name, weight, part.fingerprint, len(part.tokens), part.count, part.template)
        for part, weight in zip(text.parts, text.weights, strict=True)
    )


def load_text(checkpoint: Checkpoint, options: CalibrationOptions) -> CalibrationText:
    """Loads the windows of a job. Raises CheckpointError if the model has no tokenizer."""
    if checkpoint.tokenizer is None:
        raise CheckpointError(
            f"{checkpoint.source} has no tokenizer, without which it cannot be run on text",
            fix="copy its files from the original model",
        )
    with small_folder(checkpoint, "model") as folder:
        tokenizer = load_tokenizer(folder)
    return load_data(
        options.data,
        tokenizer,
        samples=SAMPLES if options.samples is None else options.samples,
        length=LENGTH if options.length is None else options.length,
        seed=SEED,
        context=context_length(checkpoint.config),
    )
