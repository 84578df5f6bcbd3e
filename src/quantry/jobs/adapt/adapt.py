"""`quantry adapt`: everything that can be refused first, then training, then the files; a killed job continues."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from quantry.errors import CheckpointError
from quantry.jobs.adapt.base import AdaptedModel, adapted, adapter_size
from quantry.jobs.adapt.files import RECORD, base_of, finished, identity_of_job, read_adapter, write_adapter
from quantry.jobs.adapt.memory import check_memory, is_expert, needed
from quantry.jobs.adapt.result import Adapter
from quantry.jobs.adapt.rows import Rows, read_rows
from quantry.jobs.adapt.settings import ALL_LINEAR, HELD_BACK, RANK, SEED, Settings, check_installed
from quantry.jobs.adapt.training import Training
from quantry.models.already_quantized import check_sixteen_bit
from quantry.models.anatomy import check_blocks, dissect
from quantry.models.identity import identity
from quantry.models.linears import linears
from quantry.models.reader import local_folder, open_checkpoint, small_folder
from quantry.models.tokenizer import load_tokenizer
from quantry.models.workspace import Workspace, check_room, check_target, recover, workspace
from quantry.numerics.device import device as computing
from quantry.quantizing.calibration.store import load_checked, pack_checked, write_whole
from quantry.report.sizes import counted
from quantry.types import Anatomy, Checkpoint, Progress

STATE = "training.safetensors"  # of an unfinished job: weights, moments, losses
SMALL_FILES = 1 << 20  # bytes of config, record and card
COPIES = 4  # of the adapter on the disk: the result, and weights and moments of a checkpoint


def adapt(
    model: str | Path,
    output: str | Path,
    *,
    data: str | Path,
    rank: int = RANK,
    alpha: int | None = None,
    rslora: bool = False,
    target: str = ALL_LINEAR,
    epochs: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    length: int | None = None,
    seed: int = SEED,
    held_back: float = HELD_BACK,
    qlora: bool = False,
    device: str = "cpu",
    overwrite: bool = False,
    dry_run: bool = False,
    announce: Callable[[Adapter], None] | None = None,
    progress: Progress | None = None,
) -> Adapter:
    """Trains an adapter of `model` on `data` and writes it to the folder `output`, as peft loads it.

    `data` holds chats ("messages"), "prompt" and "completion", or text; the loss is on answers, or on all of a text.
    `qlora` keeps the model in memory as bitsandbytes' NF4. `target` names layers (q_proj,v_proj); all linear layers of
    the blocks if left out. What is left out of `batch` and `rate` depends on the size of the model. An output that the
    same job has finished is returned as it is; a killed job continues; `overwrite` replaces an adapter.

    Raises RecipeError for options out of range, CheckpointError for a model that cannot be adapted, WeightError if the
    loss is not finite, OutputError for an output that cannot be written, QuantryError for data without answers or too
    little memory.
    """
    settings = Settings(
        "qlora" if qlora else "lora", rank, alpha, rslora, target, epochs, steps, batch, rate, length, seed, held_back
    )
    settings.check()
    check_installed(settings.method)
    out = _checked_output(output, overwrite)
    job = AdaptJob(model, out, data, settings, computing(device))
    if not overwrite and (out / RECORD).is_file():
        return job.finished()
    if announce:
        announce(job.planned)
    job.check_room()
    return job.planned if dry_run else job.run(overwrite, progress)


class AdaptJob:
    """A job that was checked against its model and its data: `planned` says what it will write."""

    def __init__(
        self, model: str | Path, out: Path, data: str | Path, settings: Settings, device: torch.device
    ) -> None:
        self._model, self._out, self._device = model, out, device
        self._checkpoint = open_checkpoint(model)
        anatomy = _anatomy(self._checkpoint)
        self._settings = settings.filled(anatomy)
        layers = linears(self._checkpoint, anatomy.blocks)
        size = adapter_size(adapted(layers, settings), settings.rank)
        self._rows = self._read(data)
        memory = needed(self._checkpoint, anatomy, layers, size, self._settings, self._rows.longest, device)
        check_memory(memory, device, settings.method)
        notes = [*_notes(self._rows, self._settings, settings.length)]
        if any(is_expert(layer) for layer in layers):
            notes.append("The experts are left as they are: peft adapts layers, and stacked experts are none.")
        self.planned = Adapter(
            source=str(model),
            path=str(out),
            method=settings.method,
            data=_facts(self._rows),
            settings=asdict(self._settings),
            steps=self._settings.steps_for(len(self._rows.training)),
            parameters=size,
            memory=memory,
            notes=tuple(notes),
        )

    def _read(self, data: str | Path) -> Rows:
        settings = self._settings
        assert settings.length is not None
        with small_folder(self._checkpoint, "tokenizer") as folder:
            return read_rows(data, load_tokenizer(folder), settings.length, settings.held_back, settings.seed)

    def check_room(self) -> None:
        """Raises OutputError if the disk has no room for the adapter and a checkpoint."""
        check_room(self._out, {"the adapter": COPIES * 4 * self.planned.parameters, "the files beside it": SMALL_FILES})

    def _identity(self) -> dict[str, object]:
        checkpoint = open_checkpoint(local_folder(self._model))
        if checkpoint.tensors != self._checkpoint.tensors:
            raise CheckpointError(f"{self._model} changed after its headers were read", fix="run the command again")
        return identity_of_job(self.planned, base_of(self._model, identity(checkpoint)), self._device.type)

    def finished(self) -> Adapter:
        """Returns the adapter that an earlier run has trained."""
        return finished(self._out, self.planned, self._identity())

    def run(self, overwrite: bool, progress: Progress | None) -> Adapter:
        """Downloads the model if needed, trains the adapter and writes it."""
        job = self._identity()
        with workspace(self._out, job, overwrite=overwrite) as space:
            if not (space.folder / RECORD).exists():  # an earlier run was killed after it wrote everything
                self._train(space, job, progress)
            (space.folder / STATE).unlink(missing_ok=True)
        return read_adapter(self._out, self.planned)

    def _train(self, space: Workspace, job: dict[str, object], progress: Progress | None) -> None:
        state, rows = space.folder / STATE, self._rows
        for left in space.folder.glob(f"{STATE}.*.partial"):  # of a run that was killed while it wrote
            left.unlink()
        model = AdaptedModel(local_folder(self._model), self._settings, self._device)
        training = Training(model, rows.training, rows.held_back, self._settings, self.planned.steps)
        losses = training.run(
            load_checked(state), lambda tensors, facts: write_whole(state, pack_checked(tensors, facts)), progress
        )
        write_adapter(space, model, losses, self.planned, job)


def _checked_output(output: str | Path, overwrite: bool) -> Path:
    out = Path(output).expanduser()
    if not overwrite:
        recover(out, RECORD)
    check_target(out, artefact=True, record=RECORD)
    return out


def _anatomy(checkpoint: Checkpoint) -> Anatomy:
    """Returns the anatomy of a model that can be adapted. Raises CheckpointError for a quantized one."""
    try:
        check_sixteen_bit(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(
            error.problem, fix="use the 16-bit original; --qlora holds it in 4 bits while it trains"
        ) from error
    check_blocks(checkpoint)
    return dissect(checkpoint)


def _facts(rows: Rows) -> dict[str, object]:
    return {
        "name": rows.name,
        "sha256": rows.sha256,
        "rows": len(rows.training) + len(rows.held_back),
        "held_back": len(rows.held_back),
        "truncated": rows.truncated,
    }


def _notes(rows: Rows, settings: Settings, asked: int | None) -> list[str]:
    notes = []
    if asked and settings.length and settings.length < asked:
        notes.append(f"Rows have up to {settings.length:,} tokens, not {asked:,}: that is the model's context.")
    if rows.truncated:
        were = "row was" if rows.truncated == 1 else "rows were"
        notes.append(f"{rows.truncated:,} {were} longer than {counted(settings.length or 0, 'token')}, and cut there.")
    return notes
