"""The loop of quantization: block by block, enter it, make its tensors, write them, leave it.

Only the piece in hand is in memory, whatever the model's size: weights are mapped from their files, and results go
straight into shards whose headers were written first. The result depends on the model, the recipe and the version
alone, never on where or how often the job was interrupted.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quantry import __version__
from quantry.errors import QuantryError
from quantry.models.workspace import Finished, Workspace, workspace
from quantry.quantizing import card
from quantry.quantizing.calibration.block_inputs import BlockInputs, NoCalibration
from quantry.quantizing.lineage import lineage_of, lines
from quantry.quantizing.origin import remember
from quantry.quantizing.recipe import Recipe
from quantry.quantizing.shards import Container, ShardedWriter, entries_of
from quantry.quantizing.tensor_plan import BlockPieces, Piece, TensorPlan, entry_bytes, shards
from quantry.storage import ARTEFACT_FILE
from quantry.types import Artefact, Checkpoint, Progress

if TYPE_CHECKING:
    from quantry.quantizing.calibration.per_block import BlockCalibration

CALIBRATED = 20  # times the work of a byte that is only rounded


class Maker(Protocol):
    """Turns pieces into stored tensors."""

    def make(self, piece: Piece, known: BlockInputs) -> Iterable[tuple[str, Tensor]]: ...

    def release(self, piece: Piece) -> None: ...

    def notes(self) -> tuple[str, ...]: ...


class Tuning(Protocol):
    """Changes tensors of finished shards in their places."""

    def tune(self, work: Workspace, files: Mapping[str, Finished]) -> dict[str, Finished]: ...

    def notes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Everything that is decided before the first weight is read."""

    checkpoint: Checkpoint
    folder: Path
    recipe: Recipe
    plan: TensorPlan
    planned: Artefact
    container: Container
    shard_bytes: int
    source: str  # identity of the checkpoint
    device: str = "cpu"  # devices sum in different orders
    extra_files: Mapping[str, bytes] = field(default_factory=dict)
    overwrite: bool = False
    adapter: Mapping[str, Any] | None = None  # that is merged in: name, hash, settings, data

    def identity(self) -> dict[str, Any]:
        """Returns what makes two runs the same job."""
        sources = sorted({tensor.file for tensor in self.checkpoint.tensors})
        stats = {name: (self.folder / name).stat() for name in sources}
        return {
            "version": __version__,
            "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
            "recipe": json.loads(json.dumps(self.recipe.to_dict())),
            "shard_bytes": self.shard_bytes,
            "device": self.device,
            "tensors": [list(entry[:2]) for piece in self.plan.pieces for entry in piece.entries],
        }


def write(
    job: WriteJob,
    maker: Maker,
    calibration: "BlockCalibration | None" = None,
    progress: Progress | None = None,
    tuning: Tuning | None = None,
) -> Artefact:
    """Makes and stores every tensor of the plan, then the files beside them, and gives the folder its final name.

    `progress` counts bytes; those of calibrated blocks count for more. `tuning` works on the whole model before it gets
    its name. Raises OutputError if the folder cannot be written; what is stored so far is kept.
    """
    known_blocks = calibration or NoCalibration()
    steps = lineage_of(job.folder)  # a damaged quantry.json of the source is refused before the work
    with workspace(Path(job.planned.path), job.identity(), overwrite=job.overwrite) as work:
        if calibration:
            calibration.resume(work)
        with ShardedWriter(work, job.container, job.plan.pieces, job.shard_bytes) as writer:
            work_done = _WorkDone(job.plan, writer, progress, is_calibrated=calibration is not None)
            for block in _blocks_to_make(job.plan, writer, known_blocks):
                known = known_blocks.enter(block.index)
                for piece in block.pieces:
                    if known_blocks.sequential or not writer.has(piece):
                        with _device_memory(piece):
                            writer.store(piece, maker.make(piece, known))
                        maker.release(piece)
                    work_done.add(piece)
                known_blocks.leave(block.index)
        for name, data in job.container.companions(entries_of(shards(job.plan.pieces, job.shard_bytes))):
            work.write(name, data)
        files = tuning.tune(work, writer.files) if tuning else writer.files
        tuned = tuning.notes() if tuning else ()
        notes = (*job.planned.notes, *maker.notes(), *known_blocks.notes(), *tuned)
        experts = job.planned.expert_tokens or known_blocks.expert_tokens()
        return _finish(work, replace(job, planned=replace(job.planned, expert_tokens=experts)), files, notes, steps)


class _WorkDone:
    """Reports how much of the work is done: bytes, and CALIBRATED times as much for those of calibrated blocks."""

    def __init__(
        self, plan: TensorPlan, writer: ShardedWriter, progress: Progress | None, *, is_calibrated: bool
    ) -> None:
        self._costs = {
            id(piece): entry_bytes(piece.entries) * (CALIBRATED if is_calibrated and block.index is not None else 1)
            for block in plan.blocks()
            for piece in block.pieces
        }
        self._progress, self._total = progress, sum(self._costs.values())
        self._done = sum(self._costs.pop(id(piece)) for piece in plan.pieces if writer.has(piece))

    def add(self, piece: Piece) -> None:
        """Counts a stored piece, the first time, and reports it."""
        self._done += self._costs.pop(id(piece), 0)
        if self._progress:
            self._progress(self._done, self._total, piece.name)


def _blocks_to_make(
    plan: TensorPlan, writer: ShardedWriter, calibration: "BlockCalibration | NoCalibration"
) -> list[BlockPieces]:
    """Returns the blocks from the first that is not completely stored, or from where calibration has to begin."""
    blocks = plan.blocks()
    missing = next((n for n, block in enumerate(blocks) if not all(map(writer.has, block.pieces))), len(blocks))
    inside = [n for n, block in enumerate(blocks) if block.index is not None]
    needed = next((n for n in inside if n >= missing), None)
    if needed is None:
        return blocks[missing:]
    start = calibration.first_block(blocks[needed].index)
    return blocks[min(missing, next(n for n in inside if blocks[n].index == start)) :]


@contextmanager
def _device_memory(piece: Piece) -> Iterator[None]:
    """Raises QuantryError if the device runs out of memory inside a `with`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise QuantryError(
            f"the device has no room for {piece.name}", fix="use --low-memory if it is calibrated, or --device cpu"
        ) from error


def _finish(
    work: Workspace, job: WriteJob, files: Mapping[str, Finished], notes: tuple[str, ...], steps: list[dict[str, Any]]
) -> Artefact:
    for name, data in job.extra_files.items():
        work.write(name, data)
    artefact = card.finish(job.planned, files, notes)
    facts = {"adapter": job.adapter, "lineage": steps}
    said = {key: value for key, value in facts.items() if value}
    work.write(ARTEFACT_FILE, card.as_json(artefact, job.recipe, job.plan, job.source, said).encode())
    work.write("README.md", card.as_markdown(artefact, job.recipe, job.plan, job.folder, lines(steps)).encode())
    remember(job.folder, job.source)
    return artefact
