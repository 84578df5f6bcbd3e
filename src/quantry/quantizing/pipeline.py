"""Quantization, the whole of it: open, decide, announce, then piece by piece read, fit, round, encode, write.

Only the piece in hand is in memory, whatever the model's size: weights are mapped from their files and results go
straight into shards whose headers were written first. The result depends on the model, the recipe and the version
alone, never on where or how often the job was interrupted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quantry import __version__
from quantry.errors import QuantryError
from quantry.models.weights import as_bytes
from quantry.models.workspace import Finished, Workspace, workspace
from quantry.models.writer import Entry, ShardWriter, nbytes
from quantry.quantizing import card
from quantry.quantizing.makers import Inputs, Maker
from quantry.quantizing.recipe import Recipe
from quantry.quantizing.tensor_plan import Piece, TensorPlan, block_of, shards
from quantry.storage import ARTEFACT_FILE
from quantry.types import Artefact, Checkpoint, Progress

if TYPE_CHECKING:
    pass

MIXED_BY = ("gptq", "awq")  # the rounder and the transform of mixtures where nothing is said
SEQUENTIAL = False  # whether blocks are calibrated one after the other's quantization where nothing is said
SENSITIVITY = "sensitivity.json"  # what a mixture was chosen by
CALIBRATED = "leave it out, use a calibrated preset, or --rounder gptq"


class Container(Protocol):
    """How tensors lie in files, and what lies beside them."""

    alignment: int
    shard_bytes: int

    def shard_name(self, number: int, count: int) -> str: ...

    def header(self, number: int, cut: Sequence[Sequence[Entry]]) -> bytes: ...

    def companions(self, cut: Sequence[Sequence[Entry]]) -> Iterator[tuple[str, bytes]]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that is decided before the first weight is read."""

    checkpoint: Checkpoint
    folder: Path
    recipe: Recipe
    division: TensorPlan
    planned: Artefact
    container: Container
    shard_bytes: int
    device: str = "cpu"  # sums are not added up in the same order on every device
    inputs: Inputs | None = None
    blocks: int = 0  # of the model
    beside: Mapping[str, bytes] = field(default_factory=dict)  # files that go along


def write(job: Job, maker: Maker, progress: Progress | None) -> Artefact:
    """Writes the shards piece by piece, then all that goes with them, and gives the folder its final name."""
    out = Path(job.planned.path)
    cut = shards(job.division.pieces, job.shard_bytes)
    with workspace(out, _identity(job)) as work:
        if job.inputs:
            job.inputs.resume(work, partial(_remake, job, maker))
        files = _write_shards(work, job, cut, maker, progress)
        for name, data in job.container.companions([_entries(pieces) for pieces in cut]):
            work.write(name, data)
        for name, data in job.beside.items():
            work.write(name, data)
        artefact = card.finish(job.planned, files, (*job.planned.notes, *maker.notes()))
        work.write(ARTEFACT_FILE, card.as_json(artefact, job.recipe, job.division).encode())
        work.write("README.md", card.as_markdown(artefact, job.recipe, job.division).encode())
    return artefact


def _remake(job: Job, maker: Maker, block: int) -> None:
    """Makes the layers of a block that an earlier run has written already; what comes of it is on the disk."""
    for piece in job.division.pieces:
        if block_of(piece, job.blocks) == block:
            for _ in maker.make(piece):
                pass


def _write_shards(
    work: Workspace, job: Job, cut: list[list[Piece]], maker: Maker, progress: Progress | None
) -> dict[str, Finished]:
    """Writes what no earlier run has finished. One thread computes, one writes, reads back and hashes."""
    files: dict[str, Finished] = {}
    entries = [_entries(pieces) for pieces in cut]
    done = 0
    for number, pieces in enumerate(cut):
        name = job.container.shard_name(number, len(cut))
        ready = work.finished(name)
        if ready is None:
            header = job.container.header(number, entries)
            with ShardWriter(work.folder / name, header, entries[number], job.container.alignment) as writer:
                for piece in _write_pieces(writer, pieces, maker):
                    done += _bytes(piece.entries)
                    if progress:
                        progress(done, job.division.bytes, piece.name)
                ready = Finished(writer.size, writer.close())
            work.finish(name, ready)
        else:
            done += _bytes(entries[number])
            if progress:
                progress(done, job.division.bytes, f"{name} was finished before")
        files[name] = ready
    return files


def _write_pieces(writer: ShardWriter, pieces: list[Piece], maker: Maker) -> Iterator[Piece]:
    """Makes and writes the pieces of a shard but those that a killed run has left whole."""
    pending: list[Future[None]] = []
    whole = writer.done
    with ThreadPoolExecutor(1) as disk:
        for piece in pieces:
            whole -= len(piece.entries)
            if whole >= 0:
                writer.skip(len(piece.entries))
            else:
                for stored, tensor in _made(maker, piece):
                    pending.append(disk.submit(_write, writer, stored, tensor))
                    while len(pending) > 2:
                        pending.pop(0).result()
                maker.release(piece)
            yield piece
        for future in pending:
            future.result()


def _made(maker: Maker, piece: Piece) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a piece, or a word on what a device has no room for; what is written so far stays."""
    try:
        yield from maker.make(piece)
    except torch.OutOfMemoryError as error:
        raise QuantryError(
            f"the device has no room for {piece.name}", fix="use --low-memory if it is calibrated, or --device cpu"
        ) from error


def _write(writer: ShardWriter, name: str, tensor: Tensor) -> None:
    """Fetches a tensor from the device that made it and writes it; the device may already be at the next."""
    writer.write(name, as_bytes(tensor))


def _identity(job: Job) -> dict[str, Any]:
    """What makes two runs the same job."""
    sources = sorted({tensor.file for tensor in job.checkpoint.tensors})
    stamps = {name: [(job.folder / name).stat().st_size, (job.folder / name).stat().st_mtime_ns] for name in sources}
    return {
        "version": __version__,
        "files": stamps,
        "recipe": json.loads(json.dumps(job.recipe.to_dict())),
        "shard_bytes": job.shard_bytes,
        "device": job.device,
        "tensors": [list(entry[:2]) for piece in job.division.pieces for entry in piece.entries],
    }


def _entries(pieces: list[Piece]) -> list[Entry]:
    return [entry for piece in pieces for entry in piece.entries]


def _bytes(entries: list[Entry] | tuple[Entry, ...]) -> int:
    return sum(nbytes(dtype, shape) for _, dtype, shape in entries)
