"""Small jobs through the real loop, with a calibration that records what it says and hears, and kills in the middle."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from killed_jobs import contents
from quantry.models.anatomy import dissect
from quantry.models.reader import open_checkpoint
from quantry.models.weights import MappedWeights
from quantry.quantizing import card, pipeline
from quantry.quantizing.calibration import calibrator
from quantry.quantizing.calibration.block_inputs import BlockInputs
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.calibration.per_block import BlockCalibration
from quantry.quantizing.calibration.statistics import Heads
from quantry.quantizing.makers.reader import WeightReader
from quantry.quantizing.recipe import build
from quantry.quantizing.recipe_file import read_recipe
from quantry.quantizing.shards import ShardedWriter
from quantry.quantizing.targets import target_of
from quantry.quantizing.tensor_plan import KeptTensor, Piece
from quantry.types import Stats

CPU = torch.device("cpu")
LAYERS = 4


class KilledError(Exception):
    """Stands for a kill."""


class Spy(BlockCalibration):
    """Calibration that records what it returns for each block, and the tensors of blocks as they are stored."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.entered: list[int] = []
        self.stats: dict[str, Stats] = {}  # by module
        self.tensors: dict[str, Tensor] = {}
        self.heads: dict[int, Heads | None] = {}
        self._here = BlockInputs()

    def enter(self, index: int | None) -> BlockInputs:
        self._here = super().enter(index)
        if index is not None:
            self.entered.append(index)
            self.stats |= {module: known.stats for module, known in self._here.inputs.items()}
            self.heads[index] = self._here.heads
        return self._here

    def leave(self, index: int | None) -> None:
        stored = self._here.stored.tensors if self._here.stored else {}
        self.tensors |= {name: tensor.clone() for name, tensor in {**self._here.tensors, **stored}.items()}
        super().leave(index)


class Killing(ShardedWriter):
    """A writer that kills the job when it should store piece `stop`, whose tensors are made by then."""

    stop: int | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._count = 0

    def store(self, piece: Piece, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if not self.has(piece):
            self._count += 1
            if self._count - 1 == self.stop:
                list(tensors)
                raise KilledError
        super().store(piece, tensors)


class BlockJob:
    """A job on a tiny model; `settings` are those of a recipe."""

    def __init__(self, folder: Path, out: Path, *, sequential: bool = True, low_memory: bool = False, **settings: Any):
        file = settings.pop("recipe", None)
        options = CalibrationOptions(None, settings.pop("samples", 12), settings.pop("length", 32), low_memory)
        recipe = replace(build(read_recipe(file) if file else settings), sequential=sequential)
        self.folder, self.out, checkpoint = folder, out, open_checkpoint(folder)
        target = target_of(checkpoint, recipe)
        prepared = calibrator.prepare_calibration(checkpoint, recipe, target.plan, CPU, options)
        self.kept_bytes, self.schemes, self.plan = prepared.kept_bytes, target.plan.assignment, target.plan
        reader = WeightReader(checkpoint, MappedWeights(folder), CPU)
        self.walked: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calibrator, "BlockCalibration", Spy)
            spy = prepared.start(folder, reader.whole, lambda done, *_: self.walked.append(done))
        assert isinstance(spy, Spy)
        self.spy, self._maker, self._container = spy, target.maker(reader), target.container(folder)
        recorded = replace(recipe, calibration=prepared.record)
        planned = card.plan(str(folder), out, recorded, dissect(checkpoint), target.plan)
        self._job = pipeline.WriteJob(
            checkpoint, folder, recorded, target.plan, planned, self._container, 30_000, "tiny"
        )
        self.notes: tuple[str, ...] = ()
        self._checkpoint, self._options = checkpoint, options

    @cached_property
    def windows(self) -> list[list[int]]:
        """The windows of tokens that the job is calibrated on."""
        return [list(window) for window in calibrator.load_text(self._checkpoint, self._options).tokens]

    @property
    def partial(self) -> Path:
        """The folder of a job that is not finished."""
        return self.out.with_name(f"{self.out.name}.partial")

    def run(self) -> dict[str, bytes]:
        """Runs the job to its end: the files it wrote."""
        self.notes = pipeline.write(self._job, self._maker, self.spy).notes
        return contents(self.out)

    def killed_after(self, pieces: int) -> None:
        """Runs the job until so many pieces are stored and the next is made."""
        with pytest.MonkeyPatch.context() as patch, suppress(KilledError):
            patch.setattr(Killing, "stop", pieces)
            patch.setattr(pipeline, "ShardedWriter", Killing)
            self.run()

    def first_pieces(self) -> dict[int, int]:
        """The number of the first piece of each block."""
        first: dict[int, int] = {}
        for number, piece in enumerate(self.plan.pieces):
            block = self.plan.block_of(piece)
            if block is not None:
                first.setdefault(block, number)
        return first

    def stored(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint as the finished job has stored them."""
        tensors = {name: tensor.float() for name, tensor in load_file(self.folder / "model.safetensors").items()}
        kept = {piece.name for piece in self.plan.pieces if isinstance(piece, KeptTensor) and piece.linear is None}
        written = [load_file(file) for file in self.out.glob("*.safetensors")]
        tensors |= {name: t.float() for part in written for name, t in part.items() if name in kept}
        return {**tensors, **{name: tensor.float() for name, tensor in self.spy.tensors.items() if name not in kept}}


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())
