"""`--distil`: trains the scales of a job's finished shards and writes them into their places.

The shards are read as any engine would read them. What was trained is on the disk as a whole before the first byte of a
shard changes, so that a job that is killed while it writes does the same again.
"""

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from quantry.blockwise.walk import whole
from quantry.devices.host import memory
from quantry.errors import QuantryError, RecipeError
from quantry.models.reader import open_checkpoint
from quantry.models.weights import PlainWeights, as_bytes
from quantry.models.workspace import Finished, Workspace
from quantry.numerics.ggml.layout import BLOCKS
from quantry.quantizing.calibration.store import load_checked, pack_checked, write_whole
from quantry.quantizing.calibration.text import SEED, CalibrationText
from quantry.quantizing.distil.scales import check_grid
from quantry.quantizing.distil.student import Student
from quantry.quantizing.distil.training import Training
from quantry.quantizing.tensor_plan import TensorPlan
from quantry.types import Checkpoint, Progress

TRAINED, STATE = "distilled.partial", "training.partial"  # a workspace removes such files at the end
CHUNK = 1 << 24
BYTES = 24  # a weight, on a CPU: the 16-bit and the stored model in float32, gradients, codes


class Distillation:
    """The training of a job's scales on its text."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        text: CalibrationText,
        device: torch.device,
        steps: int,
        progress: Progress | None,
    ) -> None:
        self._source, self._text, self._device = PlainWeights(checkpoint, folder), text, device
        self._steps, self._progress = steps, progress
        self._notes: tuple[str, ...] = ()

    def tune(self, work: Workspace, files: Mapping[str, Finished]) -> dict[str, Finished]:
        """Trains, or takes what an earlier run has trained, and returns the shards as they are then."""
        known = load_checked(work.folder / TRAINED)
        if known is None:
            known = self._trained(work)
            write_whole(work.folder / TRAINED, pack_checked(*known))
        tensors, facts = known
        self._notes = (_sentence(facts["steps"], facts["before"], facts["after"]),)
        changed = replaced(work.folder, tensors)
        return {name: _rehashed(work, name) if name in changed else done for name, done in files.items()}

    def notes(self) -> tuple[str, ...]:
        """Returns sentences for the model card."""
        return self._notes

    def _trained(self, work: Workspace) -> tuple[dict[str, Tensor], dict[str, float]]:
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        try:
            teacher = whole(self._source, device=self._device, dtype=dtype)
            student = Student(work.folder, self._device, dtype)
            if not student.logs:
                raise QuantryError(
                    "--distil finds no scales to train: all quantized layers are parts of stacks", fix="leave it out"
                )
            training = Training(
                student.logits,
                lambda tokens: teacher(input_ids=tokens, use_cache=False).logits,
                student.logs,
                self._text.tokens,
                SEED,
                self._text.labels,
            )
            steps = training.limited(self._steps)
            state = training.run(
                steps,
                load_checked(work.folder / STATE),
                lambda tensors, facts: write_whole(work.folder / STATE, pack_checked(tensors, facts)),
                self._progress,
            )
        except torch.OutOfMemoryError as error:
            raise QuantryError(
                "the device has no room to distil, which holds the 16-bit and the quantized model at once",
                fix="leave --distil out, or use a larger device",
            ) from error
        improved = state.after < state.before
        stored = {name: tensor.contiguous().cpu() for name, tensor in student.stored().items()} if improved else {}
        return stored, {"steps": steps, "before": state.before, "after": state.after}


def check_distillation(plan: TensorPlan, parameters: int, device: torch.device) -> None:
    """Raises RecipeError if there are no scales that can be trained, QuantryError if there is no room for it."""
    for module, scheme in plan.assignment.items():
        check_grid(module, scheme.weight)
    if not plan.assignment and not any(tensor.kind.upper() in BLOCKS for tensor in plan.gguf_tensors()):
        raise RecipeError("--distil has no use: no layer has scales to train", fix="leave it out")
    needed, free = parameters * BYTES, memory()[1]
    if device.type == "cpu" and needed > free:
        raise QuantryError(
            f"--distil needs about {needed / 2**30:.1f} GiB of memory for {parameters:,} weights, "
            f"and {free / 2**30:.1f} GiB are free",
            fix="leave it out, or use --device cuda",
        )


def replaced(folder: Path, tensors: Mapping[str, Tensor]) -> set[str]:
    """Writes tensors of the same size over those of these names; returns the files that they are in."""
    places = {tensor.name: tensor for tensor in open_checkpoint(folder).tensors}
    for name, tensor in tensors.items():
        place, data = places[name], as_bytes(tensor)
        if len(data) != place.nbytes:
            raise ValueError(f"{name} has {place.nbytes} bytes in {place.file}, and {len(data)} were given")
        with (folder / place.file).open("r+b") as file:
            file.seek(place.start)
            file.write(data)
    return {places[name].file for name in tensors}


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
