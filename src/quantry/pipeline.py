"""Quantization, the whole of it: open, decide, announce, then piece by piece read, fit, round, encode, write.

Only the piece in hand is in memory, whatever the model's size: weights are mapped from their files and results go
straight into shards whose headers were written first. The result depends on the model, the recipe and the version
alone, never on where or how often the job was interrupted.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from quantry import __version__, card, registry
from quantry.anatomy import dissect
from quantry.arch.linears import Linear
from quantry.checkpoint.reader import local_folder, open_checkpoint
from quantry.checkpoint.safetensors import INDEX_FILE
from quantry.checkpoint.weights import DTYPES, NAMES, MappedWeights, as_bytes
from quantry.checkpoint.workspace import Finished, Workspace, check_room, check_target, workspace
from quantry.checkpoint.writer import Entry, ShardWriter, nbytes
from quantry.errors import CheckpointError, OutputError, RecipeError, WeightError
from quantry.numerics.blocks import absmax
from quantry.pieces import Division, Keep, Piece, Quantize, divide, shards
from quantry.recipe import CAST, Recipe, from_options
from quantry.types import Anatomy, Artefact, Checkpoint, Grid, QTensor

SHARD_BYTES = 4 << 30
COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.py", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*")
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, the piece in hand


def quantize(
    model: str | Path,
    output: str | Path,
    *,
    preset: str | None = None,
    recipe: str | Path | None = None,
    plan: str | Path | None = None,
    format: str | None = None,  # noqa: A002 - the flag's name
    group: int | None = None,
    keep_odd: bool = False,
    dry_run: bool = False,
    device: str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    announce: Callable[[Artefact], None] | None = None,
    progress: Progress | None = None,
) -> Artefact:
    """Writes a quantized checkpoint of `model` to the folder `output`; with `dry_run` only says what it would be."""
    steps = from_options(preset, _path(recipe), _path(plan), format, group)
    out = Path(output).expanduser()
    check_target(out)
    compute = _device(device)
    checkpoint = open_checkpoint(model)
    form = None if steps.format == CAST else registry.load("quantry.formats", steps.format)
    anatomy = _sixteen_bit(checkpoint)
    division = divide(checkpoint, steps, anatomy.blocks, form, keep_odd)
    if form and not division.assignment:
        raise RecipeError(
            f"no layer of {model} would be quantized", fix="loosen the recipe's rules or leave --keep-odd out"
        )
    planned = card.plan(str(model), out, steps, anatomy, division)
    settings = form.config(division.assignment, division.kept) if form else None
    if announce:
        announce(planned)
    check_room(out, division.bytes)
    if dry_run:
        return planned
    folder = local_folder(model)  # everything that can be refused has been, before a model is downloaded
    if open_checkpoint(folder).tensors != checkpoint.tensors:
        raise CheckpointError(f"{model} changed between its headers and its download", fix="run the command again")
    job = Job(checkpoint, folder, steps, division, planned, settings, shard_bytes, compute.type)
    return write(job, Quantizer(checkpoint, MappedWeights(folder), form, settings or {}, compute), progress)


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that is decided before the first weight is read."""

    checkpoint: Checkpoint
    folder: Path
    recipe: Recipe
    division: Division
    planned: Artefact
    settings: Mapping[str, Any] | None  # config.json's quantization_config
    shard_bytes: int
    device: str = "cpu"  # sums are not added up in the same order on every device


class Maker(Protocol):
    """Turns pieces into stored tensors."""

    def make(self, piece: Piece) -> Iterator[tuple[str, Tensor]]: ...

    def release(self, piece: Piece) -> None: ...

    def notes(self) -> tuple[str, ...]: ...


def write(job: Job, maker: Maker, progress: Progress | None) -> Artefact:
    """Writes the shards piece by piece, then all that goes with them, and gives the folder its final name."""
    out = Path(job.planned.path)
    cut = shards(job.division.pieces, job.shard_bytes)
    with workspace(out, _identity(job)) as work:
        files = _write_shards(work, cut, maker, job.division.bytes, progress)
        _write_rest(work, job, cut)
        artefact = card.finish(job.planned, files, maker.notes())
        work.write("quantry.json", card.as_json(artefact, job.recipe, job.division).encode())
        work.write("README.md", card.as_markdown(artefact, job.recipe, job.division).encode())
    return artefact


class Quantizer:
    """Makes quantized layers from 16-bit weights."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: MappedWeights,
        form: ModuleType | None,
        settings: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        self._weights, self._form, self._settings, self._device = weights, form, settings, device
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._wholes: dict[str, Tensor] = {}

    def make(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a piece, in the order of its entries."""
        if isinstance(piece, Keep):
            weight = self._linear(piece.linear) if piece.linear else self._weights.get(self._tensors[piece.source])
            yield piece.name, cast(weight, DTYPES[piece.entry[1]], piece.name)
        elif isinstance(piece, Quantize):
            yield from self._quantize(piece)

    def release(self, piece: Piece) -> None:
        linears = piece.linears if isinstance(piece, Quantize) else ()
        sources = {piece.source} if isinstance(piece, Keep) else {linear.source for linear in linears}
        for source in sources:
            self._weights.release(self._tensors[source])

    def notes(self) -> tuple[str, ...]:
        return ()

    def _quantize(self, piece: Quantize) -> Iterator[tuple[str, Tensor]]:
        assert self._form is not None
        fit = registry.load("quantry.fits", piece.preset.fit).fit
        round_weight = registry.load("quantry.rounders", piece.preset.rounder).round_weight
        whole = self._whole(piece)
        for linear in piece.linears:
            weight = self._upload(self._linear(linear))
            check_finite(weight, linear.source)
            rounded: QTensor = round_weight(weight, piece.grid, fit(weight, piece.grid, whole))
            stored = self._form.encode(linear.module, rounded)
            check_decodes(
                self._form.decode(linear.module, stored, piece.scheme, self._settings), rounded, linear.module
            )
            yield from stored.items()

    def _whole(self, piece: Quantize) -> Tensor | None:
        """The largest magnitude of all linears that share a scale with this piece, where a scale spans them."""
        if not piece.grid.spans_tensor:
            return None
        key, whole = piece.sharers[0].module, Grid(piece.grid.kind, piece.grid.bits, (0, 0))
        if key not in self._wholes:
            peaks = [absmax(self._upload(self._linear(linear)), whole) for linear in piece.sharers]
            self._wholes[key] = torch.stack(peaks).max()
        return self._wholes[key]

    def _upload(self, weight: Tensor) -> Tensor:
        """The weight on the computing device; to a GPU through one pinned buffer, which it can fetch by itself."""
        if self._device.type != "cuda":
            return weight
        torch.cuda.current_stream().synchronize()  # the buffer may still be on its way
        if self._pinned.numel() < weight.numel() * weight.itemsize:
            self._pinned = torch.empty(weight.numel() * weight.itemsize, dtype=torch.uint8, pin_memory=True)
        staged = self._pinned[: weight.numel() * weight.itemsize].view(weight.dtype).view(weight.shape).copy_(weight)
        return staged.to(self._device, non_blocking=True)

    def _linear(self, linear: Linear) -> Tensor:
        """The (out, in) weight of a linear."""
        weight = self._weights.get(self._tensors[linear.source])
        if linear.expert is not None:
            weight = weight[linear.expert]
        weight = weight.t() if linear.flip else weight
        return weight[slice(*linear.rows)].contiguous() if linear.rows else weight


def check_finite(weight: Tensor, name: str) -> None:
    """NaN goes through a minimum, and infinity is one: counting is left for when there is something to count."""
    if weight.numel() and not torch.isfinite(torch.stack(weight.aminmax())).all():
        bad = int((~torch.isfinite(weight)).sum())
        raise WeightError(f"{name} has {bad} weights that are NaN or infinite", fix="repair or retrain the checkpoint")


def cast(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in another float type, refused where it would overflow."""
    if weight.dtype == dtype:
        return weight
    check_finite(weight, name)
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest > torch.finfo(dtype).max:
        raise WeightError(
            f"{name} has a weight of magnitude {largest:g}, more than the {torch.finfo(dtype).max:g} of {NAMES[dtype]}",
            fix="use a preset or format that keeps bf16",
        )
    return weight.to(dtype)


def check_decodes(read: QTensor, made: QTensor, module: str) -> None:
    """What was encoded must decode to the same codes and parameters."""
    pairs = [(read.codes, made.codes), (read.params.scale, made.params.scale), (read.params.zero, made.params.zero)]
    pairs.append((read.params.outer, made.params.outer))
    for one, other in pairs:
        same = (
            one is other
            if one is None or other is None
            else one.dtype == other.dtype and torch.equal(_raw(one), _raw(other))
        )
        if not same:
            raise OutputError(f"{module} does not decode to what was encoded", fix="report this as a bug of Quantry")


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _write_shards(
    work: Workspace, cut: list[list[Piece]], maker: Maker, total: int, progress: Progress | None
) -> dict[str, Finished]:
    """Writes what no earlier run has finished. One thread computes, one writes, reads back and hashes."""
    files: dict[str, Finished] = {}
    done = 0
    with ThreadPoolExecutor(1) as disk:
        for number, pieces in enumerate(cut):
            name = shard_name(number, len(cut))
            entries = [entry for piece in pieces for entry in piece.entries]
            ready = work.finished(name)
            if ready is None:
                with ShardWriter(work.folder / name, entries, {"format": "pt"}) as writer:
                    pending: list[Future[None]] = []
                    for piece in pieces:
                        for stored, tensor in maker.make(piece):
                            pending.append(disk.submit(writer.write, stored, as_bytes(tensor)))
                            while len(pending) > 2:
                                pending.pop(0).result()
                        maker.release(piece)
                        done += _bytes(piece.entries)
                        if progress:
                            progress(done, total, piece.name)
                    for future in pending:
                        future.result()
                    ready = Finished(writer.size, writer.close())
                work.finish(name, ready)
            else:
                done += _bytes(entries)
                if progress:
                    progress(done, total, f"{name} was finished before")
            files[name] = ready
    return files


def _write_rest(work: Workspace, job: Job, cut: list[list[Piece]]) -> None:
    """Config, index, tokenizer, chat template and all other small files."""
    for pattern in COPIED:
        for file in sorted(job.folder.glob(pattern)):
            if file.is_file() and file.name not in ("config.json", "quantry.json", INDEX_FILE):
                work.write(file.name, file.read_bytes())
    if len(cut) > 1:
        places = {
            entry[0]: shard_name(number, len(cut))
            for number, pieces in enumerate(cut)
            for piece in pieces
            for entry in piece.entries
        }
        index = {"metadata": {"total_size": job.division.bytes}, "weight_map": places}
        work.write(INDEX_FILE, json.dumps(index, indent=2).encode())
    config = {key: value for key, value in job.checkpoint.config.items() if key != "quantization_config"}
    for key in [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]:  # the name before 2025
        config[key] = {"bf16": "bfloat16", "f16": "float16"}[job.division.dtype]
    if job.settings is not None:
        config["quantization_config"] = dict(job.settings)
    work.write("config.json", json.dumps(config, indent=2).encode())


def shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _sixteen_bit(checkpoint: Checkpoint) -> Anatomy:
    """The anatomy of a checkpoint that can be quantized."""
    if checkpoint.format == "gguf":
        raise CheckpointError(f"{checkpoint.source} is a GGUF file", fix="quantize the safetensors it was made from")
    anatomy = dissect(checkpoint)
    if anatomy.quantization:
        raise CheckpointError(
            f"{checkpoint.source} is already quantized ({anatomy.quantization.method})",
            fix="quantize the 16-bit original, or use quantry convert",
        )
    return anatomy


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


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(
            f"device {name!r} cannot be used ({reason})", fix="use cpu, or cuda on a machine with a GPU"
        ) from error
    return device


def _bytes(entries: list[Entry] | tuple[Entry, ...]) -> int:
    return sum(nbytes(dtype, shape) for _, dtype, shape in entries)


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value).expanduser()
