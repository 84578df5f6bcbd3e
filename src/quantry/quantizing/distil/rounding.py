"""Learned rounding: trains the codes and scales of one block after the other to give what the 16-bit block gives.

As in SignRound, every step moves each code's place, and the logarithm of each scale, by the same small amount against
the sign of its gradient; the amount falls to 0 along a line. A block sees what the trained blocks before it give, and
aims at the output of the 16-bit model. Part of the text is held out: a block that gains nothing there stays as stored.

Training begins with the codes of the file, which GPTQ may have chosen, at the places where the 16-bit weights lie. A
transform has scaled rows and columns of these; the scales are found again by least squares.

The weights of a block of each model are in memory. What was trained of a block is on the disk as a whole before the
first byte of a shard changes, so that a killed job goes on with the next block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantry.blockwise.walk import Batch, Block, Walk
from quantry.errors import QuantryError
from quantry.quantizing.calibration.distillation import drawn
from quantry.quantizing.calibration.store import load_checked, pack_checked, write_whole
from quantry.quantizing.distil.in_place import replaced
from quantry.quantizing.distil.lessons import Lessons
from quantry.quantizing.distil.matrices import StoredMatrices, TrainedMatrix
from quantry.quantizing.distil.student import RoundedInputs
from quantry.quantizing.distil.training import cut
from quantry.quantizing.sources import open_stored
from quantry.types import Progress

RATE = 0.005  # steps of the grid that a place moves at first, and the same for the logarithm of a scale
AT_ONCE = 4  # pieces of a step, at most
HELD = 8  # one batch in so many is held out
FITTED = 16  # rounds of least squares


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the codes of a stored model are trained, in `steps` for each block."""

    lessons: Lessons
    steps: int
    transformed: bool  # the stored weights are scaled ones of the source
    progress: Progress | None = None

    def run(self, folder: Path) -> tuple[set[str], str]:
        """Trains all blocks that no earlier run has trained; returns the files that changed, and a sentence."""
        pieces = cut(self.lessons.windows)
        batch = max(1, min(AT_ONCE, len(pieces) // 2))  # of two or more pieces one batch can be held out
        device, dtype = self.lessons.device, self.lessons.dtype
        student = Walk(open_stored(folder, str(device)), device=device, dtype=dtype, batch=batch)
        known = self._known(folder, student.count)
        changed: set[str] = set()
        for tensors, _ in known:
            changed |= replaced(folder, tensors)
        if len(known) < student.count:
            teacher = Walk(self.lessons.source, device=device, dtype=dtype, batch=batch)
            matrices = StoredMatrices(folder, student.skeleton, device)
            if not matrices.any_inside(f"{student.skeleton.stack}."):
                raise QuantryError(
                    "--learn-rounding finds no codes to train: all quantized layers are parts of stacks",
                    fix="leave it out",
                )
            for taught, block in zip(teacher.blocks(pieces), student.blocks(pieces), strict=True):
                if block.index >= len(known):
                    known.append(self._trained(_Block(taught, block, teacher, student, matrices)))
                    write_whole(folder / _file(block.index), pack_checked(*known[-1]))
                    changed |= replaced(folder, known[-1][0])
                if self.progress:
                    self.progress(block.index + 1, student.count, f"training codes, block {block.index}")
        return changed, sentence([facts for _, facts in known])

    def _known(self, folder: Path, count: int) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        """Returns what earlier runs have trained, without gaps."""
        known = []
        for index in range(count):
            found = load_checked(folder / _file(index))
            if found is None:
                break
            known.append(found)
        return known

    def _trained(self, block: "_Block") -> tuple[dict[str, Tensor], dict[str, float]]:
        """Trains a block and leaves the better state in its place."""
        if not block.matrices:
            return {}, {"before": 0.0, "after": 0.0}
        lessons, held = block.lessons()
        before = block.error(held)
        places, logs = block.learn(self.transformed)
        for step, lesson in enumerate(drawn(len(lessons), self.steps, self.lessons.seed + block.index)):
            gradients = torch.autograd.grad(block.loss(lessons[lesson]), (*places, *logs))
            rate = RATE * (1 - step / self.steps)
            with torch.no_grad():
                for parameter, gradient in zip((*places, *logs), gradients, strict=True):
                    parameter -= rate * gradient.sign()
        after = block.error(held)
        facts = {"before": before, "after": after}
        if not self._better(before, after):
            return {}, facts
        block.settle()
        return block.stored(), facts

    @staticmethod
    def _better(before: float, after: float) -> bool:
        return after < before


class _Block:
    """A block of both models: its 16-bit outputs, and what is trained of it."""

    def __init__(self, taught: Block, block: Block, teacher: Walk, student: Walk, matrices: StoredMatrices) -> None:
        self.index, self._taught, self._block, self._student = block.index, taught, block, student
        self._teacher, prefix = teacher, f"{block.name}."
        found = matrices.inside(prefix)
        self.matrices: dict[str, TrainedMatrix] = {key.removeprefix(prefix): one for key, one in found.items()}
        self._run = RoundedInputs(block.module, block.name, student.skeleton.activations)

    def lessons(self) -> tuple[list[tuple[Batch, Tensor]], list[tuple[Batch, Tensor]]]:
        """Returns batches with the outputs that they should have, and those that are held out."""
        outputs = [
            output.to(batch.hidden.device)
            for batch, output in zip(self._teacher.batches, self._taught.outputs(), strict=True)
        ]
        pairs = list(zip(self._student.batches, outputs, strict=True))
        return [pair for place, pair in enumerate(pairs) if place % HELD], pairs[::HELD]

    def learn(self, transformed: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Returns what is to be trained: places of codes and logarithms of scales."""
        places = []
        for key, matrix in self.matrices.items():
            original = self._taught.module.get_parameter(key).detach().float()
            with torch.no_grad():
                scaled = scaled_like(original, matrix.weight(torch.float32)) if transformed else original
            places.append(matrix.trained.learn_codes(matrix.original(scaled)))
        return places, [log for matrix in self.matrices.values() for log in matrix.trained.logs]

    def loss(self, lesson: tuple[Batch, Tensor]) -> Tensor:
        """Returns the squared error of a batch, relative to the square of what it should be."""
        batch, target = lesson
        skeleton = self._student.skeleton
        call, hidden = batch.calls[self.index], batch.hidden.to(skeleton.device)
        weights = {key: matrix.weight(skeleton.dtype) for key, matrix in self.matrices.items()}
        given = self._run.with_weights(weights, hidden, *call.args, **call.kwargs)
        output: Tensor = given[0] if isinstance(given, tuple) else given
        target = target.to(skeleton.device).float()
        return (output.float() - target).square().sum() / target.square().sum()

    @torch.no_grad()
    def error(self, lessons: Sequence[tuple[Batch, Tensor]]) -> float:
        """Returns the mean loss of some batches."""
        return sum(float(self.loss(lesson)) for lesson in lessons) / len(lessons)

    @torch.no_grad()
    def settle(self) -> None:
        """Gives the block its trained weights, with which it hands its outputs on."""
        for key, matrix in self.matrices.items():
            parameter = self._block.module.get_parameter(key)
            parameter.copy_(matrix.weight(parameter.dtype))

    def stored(self) -> dict[str, Tensor]:
        """Returns the tensors of the file that training has changed."""
        found = {name: one for matrix in self.matrices.values() for name, one in matrix.stored().items()}
        return {name: tensor.contiguous().cpu() for name, tensor in found.items()}


def scaled_like(original: Tensor, stored: Tensor) -> Tensor:
    """Scales the rows and columns of a matrix so that it is as near as can be to what is stored of it."""
    rows, columns = torch.ones_like(original[:, :1]), torch.ones_like(original[:1])
    for _ in range(FITTED):
        columns = _fitted(original * rows, stored, 0)
        rows = _fitted(original * columns, stored, 1)
    return original * rows * columns


def _fitted(matrix: Tensor, wanted: Tensor, dim: int) -> Tensor:
    power = matrix.square().sum(dim, keepdim=True)
    return torch.where(power > 0, (matrix * wanted).sum(dim, keepdim=True) / power, 1.0)


def sentence(facts: Sequence[Mapping[str, float]]) -> str:
    """Returns what the model card says of the training."""
    gained = [one for one in facts if one["after"] < one["before"]]
    if not gained:
        return "Training the codes gained nothing on text that was held out: they are unchanged."
    before, after = (sum(one[name] for one in gained) / len(gained) for name in ("before", "after"))
    return (
        f"The codes of {len(gained)} of {len(facts)} blocks were trained against the 16-bit ones; on text that was "
        f"held out their squared error went from {before:.3g} to {after:.3g} of the output's square."
    )


def _file(index: int) -> str:
    return f"rounded-{index}.partial"  # a workspace removes such files at the end
