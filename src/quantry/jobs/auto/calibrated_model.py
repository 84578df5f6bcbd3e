"""A model with the text that it is calibrated on: what predicting and measuring the damage of its layers share."""

from dataclasses import dataclass
from pathlib import Path

import torch

from quantry.models.anatomy import sixteen_bit
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.weights import MappedWeights, PlainWeights
from quantry.numerics.device import arithmetic
from quantry.quantizing.calibration.calibrator import load_text
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.calibration.resumable_walk import ResumableWalk
from quantry.quantizing.calibration.store import Statistics, default_store
from quantry.quantizing.calibration.text import CalibrationText
from quantry.quantizing.makers.reader import WeightReader
from quantry.types import Anatomy, Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class CalibratedModel:
    """A checkpoint in a folder, its text, and statistics that are gathered when they are asked for."""

    checkpoint: Checkpoint
    anatomy: Anatomy
    folder: Path
    options: CalibrationOptions
    text: CalibrationText
    statistics: Statistics

    @property
    def device(self) -> torch.device:
        return self.statistics.walk.device

    def reader(self) -> WeightReader:
        """Returns a reader of the weights onto the computing device."""
        return WeightReader(self.checkpoint, MappedWeights(self.folder), self.device)


def open_calibrated(model: str | Path, options: CalibrationOptions, device: torch.device) -> CalibratedModel:
    """Opens a 16-bit model and its text; downloads it if needed. Nothing is run."""
    checkpoint = open_checkpoint(model)
    anatomy = sixteen_bit(checkpoint)
    text = load_text(checkpoint, options)
    folder = local_folder(model)
    walk = ResumableWalk(
        source=PlainWeights(checkpoint, folder), windows=text.tokens, device=device, dtype=arithmetic(device)
    )
    store = default_store() if device.type == "cpu" else None
    statistics = Statistics(walk, text, store, identity(open_checkpoint(folder)))
    return CalibratedModel(checkpoint, anatomy, folder, options, text, statistics)
