"""Trains a job's finished shards and writes what was trained into their places: `--learn-rounding`, then `--distil`.

The shards are read as any engine would read them. What was trained is on the disk as a whole before the first byte of a
shard changes, so that a job that is killed while it writes does the same again.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quantry.blockwise.walk import whole
from quantry.devices.host import memory
from quantry.errors import QuantryError, RecipeError
from quantry.models.workspace import Finished, Workspace
from quantry.numerics.ggml.layout import BLOCKS
from quantry.quantizing.calibration.store import load_checked, pack_checked, write_whole
from quantry.quantizing.distil.in_place import replaced
from quantry.quantizing.distil.lessons import Lessons
from quantry.quantizing.distil.student import Student
from quantry.quantizing.distil.trained import LEARNED, check_grid
from quantry.quantizing.distil.training import Training
from quantry.quantizing.tensor_plan import TensorPlan
from quantry.types import Progress

TRAINED, STATE = "distilled.partial", "training.partial"  # a workspace removes such files at the end
CHUNK = 1 << 24
BYTES = 24  # a weight, on a CPU: the 16-bit and the stored model in float32, gradients, codes


class Stage(Protocol):
    """A way to train a stored model in its folder."""

    def run(self, folder: Path) -> tuple[set[str], str]:
        """Trains what no earlier run has trained; returns the files that changed, and a sentence for the card."""


class InTurn:
    """Stages of training, one after the other, on the finished shards of a job."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._notes: tuple[str, ...] = ()

    def tune(self, work: Workspace, files: Mapping[str, Finished]) -> dict[str, Finished]:
        """Trains, or takes what an earlier run has trained, and returns the shards as they are then."""
        try:
            done = [stage.run(work.folder) for stage in self._stages]
        except torch.OutOfMemoryError as error:
            raise QuantryError(
                "the device has no room to train on, which holds 16-bit and quantized weights at once",
                fix="leave --distil and --learn-rounding out, or use a larger device",
            ) from error
        self._notes = tuple(note for _, note in done)
        changed = {name for names, _ in done for name in names}
        return {name: _rehashed(work, name) if name in changed else known for name, known in files.items()}

    def notes(self) -> tuple[str, ...]:
        """Returns sentences for the model card."""
        return self._notes


@dataclass(frozen=True, slots=True)
class Distillation:
    """The training of all scales, end to end."""

    lessons: Lessons
    steps: int
    progress: Progress | None = None

    def run(self, folder: Path) -> tuple[set[str], str]:
        """Trains, or takes what an earlier run has trained; returns the files that changed, and a sentence."""
        known = load_checked(folder / TRAINED)
        if known is None:
            known = self._trained(folder)
            write_whole(folder / TRAINED, pack_checked(*known))
        tensors, facts = known
        return replaced(folder, tensors), _sentence(facts["steps"], facts["before"], facts["after"])

    def _trained(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
        lessons = self.lessons
        teacher = whole(lessons.source, device=lessons.device, dtype=lessons.dtype)
        student = Student(folder, lessons.device, lessons.dtype)
        if not student.logs:
            raise QuantryError(
                "--distil finds no scales to train: all quantized layers are parts of stacks", fix="leave it out"
            )
        training = Training(
            student.logits,
            lambda tokens: teacher(input_ids=tokens, use_cache=False).logits,
            student.logs,
            lessons.windows,
            lessons.seed,
            lessons.labels,
        )
        steps = training.limited(self.steps)
        state = training.run(
            steps,
            load_checked(folder / STATE),
            lambda tensors, facts: write_whole(folder / STATE, pack_checked(tensors, facts)),
            self.progress,
        )
        improved = state.after < state.before
        stored = {name: tensor.contiguous().cpu() for name, tensor in student.stored().items()} if improved else {}
        return stored, {"steps": steps, "before": state.before, "after": state.after}


def check_rounding(plan: TensorPlan) -> None:
    """Raises RecipeError if there are no codes that can be trained."""
    for module, scheme in plan.assignment.items():
        check_grid(module, scheme.weight, "--learn-rounding")
        if scheme.weight.kind not in LEARNED and scheme.weight.kind.upper() not in BLOCKS:
            raise RecipeError(
                f"--learn-rounding has no use for {module} as {scheme.weight.kind}",
                fix="leave it out, or use 2 to 8 bits",
            )
    if not plan.assignment and not any(tensor.kind.upper() in BLOCKS for tensor in plan.gguf_tensors()):
        raise RecipeError("--learn-rounding has no use: no layer has codes to train", fix="leave it out")


def check_distillation(plan: TensorPlan, parameters: int, device: torch.device) -> None:
    """Raises RecipeError if there are no scales that can be trained, QuantryError if there is no room for it."""
    for module, scheme in plan.assignment.items():
        check_grid(module, scheme.weight, "--distil")
    if not plan.assignment and not any(tensor.kind.upper() in BLOCKS for tensor in plan.gguf_tensors()):
        raise RecipeError("--distil has no use: no layer has scales to train", fix="leave it out")
    needed, free = parameters * BYTES, memory()[1]
    if device.type == "cpu" and needed > free:
        raise QuantryError(
            f"--distil needs about {needed / 2**30:.1f} GiB of memory for {parameters:,} weights, "
            f"and {free / 2**30:.1f} GiB are free",
            fix="leave it out, or use --device cuda",
        )


def _rehashed(work: Workspace, name: str) -> Finished:
    digest, path = sha256(), work.folder / name
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while data := file.read(CHUNK):
            digest.update(data)
    done = Finished(path.stat().st_size, digest.hexdigest())
    work.finish(name, done)
    return done


def _sentence(steps: float, before: float, after: float) -> str:
    if after >= before:
        return (
            f"Training the scales for {steps:.0f} steps gained nothing on text that was held out: they are unchanged."
        )
    return (
        f"The scales were trained against the 16-bit model for {steps:.0f} steps; on text that was held out the KL "
        f"went from {before:.4g} to {after:.4g} nats a token."
    )
