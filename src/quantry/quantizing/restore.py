"""Restores an ordinary checkpoint from a GGUF file: decoded weights in their original order, config and tokenizer.

The header says where each tensor goes (llamacpp/to_checkpoint.py), and the loop is that of quantizing: piece by piece,
in the memory of one tensor, resumable.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantry.errors import CheckpointError
from quantry.formats import gguf
from quantry.llamacpp import to_checkpoint, to_tokenizer
from quantry.llamacpp.tensor_map import Target
from quantry.models import gguf as header
from quantry.models.anatomy import dissect
from quantry.models.files import LocalFiles
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.weights import DTYPES, MappedWeights
from quantry.models.writer import Entry, nbytes
from quantry.quantizing import card
from quantry.quantizing.calibration.block_inputs import BlockInputs
from quantry.quantizing.containers.folder import SHARD_BYTES, SafetensorsFolder
from quantry.quantizing.makers.checks import cast
from quantry.quantizing.pipeline import WriteJob, write
from quantry.quantizing.recipe import CAST, Preset, Recipe
from quantry.quantizing.slices import view
from quantry.quantizing.tensor_plan import STORED, Piece, RestoredTensor, TensorPlan
from quantry.types import Artefact, Checkpoint, Grid, Progress, Scheme, TensorInfo

CHUNK = 1 << 24  # weights decoded at a time: 64 MB in float32


class Restoration:
    """A GGUF file on its way back into the 16-bit checkpoint `out`; `dtype` is bf16 or f16."""

    def __init__(self, source: str | Path, out: Path, dtype: str) -> None:
        self._file = file = open_file(source)
        self._small = to_tokenizer.tokenizer(file.metadata)
        self.checkpoint, self.folder = file.checkpoint, file.folder
        self.maker = RestoredTensorMaker(file)
        self.plan = _plan(file, dtype)
        self.recipe = _recipe(dtype)
        self.source = identity(file.checkpoint)
        self.planned = card.plan(str(source), out, self.recipe, dissect(file.checkpoint), self.plan)

    def container(self) -> SafetensorsFolder:
        """Returns the folder to write, with a tokenizer from the file's key-values."""
        return SafetensorsFolder(self._small.items(), self._file.config, self.plan.dtype)

    def run(self, shard_bytes: int | None, progress: Progress | None, *, overwrite: bool = False) -> Artefact:
        """Writes the checkpoint."""
        job = WriteJob(
            self.checkpoint, self.folder, self.recipe, self.plan, self.planned, self.container(),
            shard_bytes or SHARD_BYTES, self.source, overwrite=overwrite,
        )  # fmt: skip
        return write(job, self.maker, progress=progress)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open GGUF file, with all parts of a split one, as the checkpoint that it was made from."""

    checkpoint: Checkpoint
    folder: Path
    config: dict[str, Any]  # config.json without the dtype
    metadata: Mapping[str, Any]
    pairs: list[tuple[TensorInfo, Target]]


def open_file(source: str | Path) -> GGUFFile:
    """Opens a GGUF file or the folder that holds one. Raises CheckpointError if it changes meanwhile."""
    checkpoint = open_checkpoint(source)
    place = local_folder(source)
    folder = place if place.is_dir() else place.parent
    name, files = place.name if place.is_file() else min(checkpoint.files), LocalFiles(folder)
    if any(files.sizes.get(file) != size for file, size in checkpoint.files.items()):
        raise CheckpointError(f"{source} changed between its header and its download", fix="run the command again")
    whole = header.read_shards(files, name, whole=True)
    config = to_checkpoint.config(whole.metadata, whole.tensors, lambda name: _values(checkpoint, name))
    return GGUFFile(checkpoint, folder, config, whole.metadata, to_checkpoint.originals(config, whole.tensors))


class RestoredTensorMaker:
    """Makes checkpoint tensors from those of a GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        self._tensors = {target.name: tensor for tensor, target in file.pairs}
        self._weights = MappedWeights(file.folder)

    def make(self, piece: Piece, known: BlockInputs | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields a tensor of the checkpoint, in chunks of rows if it has one source."""
        assert isinstance(piece, RestoredTensor)
        dtype = DTYPES[piece.entry[1]]
        (target, index), *others = piece.parts
        if not others and target.sources[index].expert is None and target.heads is None:
            for rows in self._chunks(target, index):
                yield piece.name, cast(gguf.restored(rows, target), dtype, piece.name)
            return
        made = torch.empty(piece.entry[2], dtype=dtype)
        for target, index in piece.parts:
            weight = gguf.restored(torch.cat(list(self._chunks(target, index))), target)
            view(made, target.sources[index]).copy_(cast(weight, dtype, piece.name))
        yield piece.name, made

    def release(self, piece: Piece) -> None:
        """Lets go of the last source of a tensor."""
        assert isinstance(piece, RestoredTensor)
        target, _ = piece.parts[-1]
        self._weights.release(self._tensors[target.name])

    def notes(self) -> tuple[str, ...]:
        return ()

    def _chunks(self, target: Target, index: int) -> Iterator[Tensor]:
        """Yields the decoded rows of one source of a tensor, or of one expert of a stack, some at a time."""
        tensor = self._tensors[target.name]
        shape = tensor.shape[1:] if len(tensor.shape) == 3 else tensor.shape
        columns = shape[-1]
        count = prod(shape[:-1])
        width = nbytes(tensor.dtype, (columns,))
        raw = self._weights.get(replace(tensor, dtype="U8", shape=(tensor.nbytes // width, width)))
        rows = raw[index * count : (index + 1) * count]
        step = max(1, CHUNK // columns)
        for start in range(0, count, step):
            decoded = gguf.decode(rows[start : start + step], tensor.dtype, columns)
            yield decoded if len(shape) > 1 else decoded[0]


def originals(file: GGUFFile, dtype: str) -> tuple[RestoredTensor, ...]:
    """Returns the checkpoint's tensors, each with the parts it is made of; dtype is bf16, f16 or f32."""
    parts: dict[str, list[tuple[Target, int]]] = {}
    for _, target in file.pairs:
        for index, source in enumerate(target.sources):
            parts.setdefault(source.name, []).append((target, index))
    return tuple(RestoredTensor(name, tuple(made), _entry(name, made, dtype)) for name, made in parts.items())


def _plan(file: GGUFFile, dtype: str) -> TensorPlan:
    fates = {
        tensor.name: "decoded" if target.sources else "dropped: config.json has it" for tensor, target in file.pairs
    }
    return TensorPlan(dtype, originals(file, dtype), fates, {}, ())


def _entry(name: str, parts: list[tuple[Target, int]], dtype: str) -> Entry:
    """Returns the entry of a checkpoint's tensor, whose shape follows from its parts."""
    target = parts[0][0]
    shape = target.shape[1:] if len(target.shape) == 3 else target.shape
    sources = [target.sources[index] for target, index in parts]
    if sources[0].rows:
        shape = (max(source.rows[1] for source in sources if source.rows), *shape[1:])
    if sources[0].flip:
        shape = shape[::-1]
    if sources[0].expert is not None:
        shape = (max(source.expert for source in sources if source.expert is not None) + 1, *shape)
    return name, STORED.get(dtype, dtype.upper()), shape


def _values(checkpoint: Checkpoint, name: str) -> tuple[float, ...]:
    """Reads the values of a small float32 tensor."""
    from numpy import frombuffer

    tensor = next(tensor for tensor in checkpoint.tensors if tensor.name == name)
    return tuple(frombuffer(checkpoint.read(tensor.file, tensor.start, tensor.nbytes), "<f4").tolist())


def _recipe(dtype: str) -> Recipe:
    scheme = Scheme(Grid("bf16" if dtype == "bf16" else "f16", 16))
    return Recipe(
        Preset(f"gguf-to-{dtype}", "Decoded from GGUF, its weights as llama.cpp sees them", scheme, (CAST,)), CAST
    )
