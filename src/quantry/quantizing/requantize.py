"""Rounds a quantized checkpoint again, as a GGUF file: each tensor is decoded to bf16 when it is needed, and rounded.

The result has the bytes that the 16-bit conversion would give when quantized, without that conversion on the disk.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantry.errors import RecipeError
from quantry.formats.gguf import NAME as GGUF
from quantry.models.already_quantized import quantization
from quantry.models.anatomy import dissect
from quantry.models.reader import local_folder
from quantry.models.writer import nbytes
from quantry.quantizing import card
from quantry.quantizing.makers.reader import WeightReader
from quantry.quantizing.pipeline import WriteJob, write
from quantry.quantizing.recipe import Preset, Recipe
from quantry.quantizing.shards import Container
from quantry.quantizing.targets import GgufTarget
from quantry.quantizing.tensor_plan import Piece, TensorPlan
from quantry.storage.temporary import temporary_folder
from quantry.types import Artefact, Checkpoint, Progress, TensorInfo

TYPE = re.compile(r"[-.](i?q\d\w*|bf16|f16|f32|\d{5}-of-\d{5})$", re.IGNORECASE)  # after the name of a GGUF file


class Decoding(Protocol):
    """A conversion to 16 bit that was checked."""

    plan: TensorPlan
    source: str

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def folder(self) -> Path: ...

    @property
    def maker(self) -> "PieceMaker": ...

    def container(self) -> Container: ...


class PieceMaker(Protocol):
    """Decodes a piece."""

    def make(self, piece: Piece) -> Iterable[tuple[str, Tensor]]: ...

    def release(self, piece: Piece) -> None: ...


class Requantization:
    """A quantized checkpoint on its way into a GGUF file."""

    def __init__(self, source: str | Path, out: Path, decoding: Decoding, preset: Preset) -> None:
        self._decoding, self._weights = decoding, DecodedWeights(decoding)
        self.source, self.checkpoint = decoding.source, decoding.checkpoint
        self.recipe = Recipe(preset, GGUF)
        small = _small_files(decoding)
        name = _name(source)
        self._checkpoint = _sixteen_bit(name, decoding, small)
        with temporary_folder() as parent:
            folder = parent / name
            folder.mkdir()
            for file, data in small.items():
                (folder / file).write_bytes(data)
            self._target = GgufTarget(self._checkpoint, self.recipe, small=folder)
        self.plan = self._target.plan
        planned = card.plan(str(source), out, self.recipe, dissect(decoding.checkpoint), self.plan)
        self.planned = card.finish(planned, {}, _notes(decoding.checkpoint, self.recipe))

    def run(self, shard_bytes: int | None, progress: Progress | None, *, overwrite: bool = False) -> Artefact:
        """Writes the GGUF file."""
        decoding, container = self._decoding, self._target.container(self._decoding.folder)
        job = WriteJob(
            decoding.checkpoint, decoding.folder, self.recipe, self.plan, self.planned, container,
            shard_bytes or container.shard_bytes, self.source, overwrite=overwrite,
        )  # fmt: skip
        reader = WeightReader(self._checkpoint, self._weights, torch.device("cpu"))
        return write(job, self._target.maker(reader), progress=progress)


class DecodedWeights:
    """The 16-bit tensors of a conversion, decoded when asked for; the last one stays in memory."""

    def __init__(self, decoding: Decoding) -> None:
        self._maker = decoding.maker
        self._pieces = {entry[0]: piece for piece in decoding.plan.pieces for entry in piece.entries}
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def get(self, tensor: TensorInfo) -> Tensor:
        if self._last[0] != tensor.name:
            self._last = ("", torch.empty(0))  # before another tensor takes memory
            rows = [part for _, part in self._maker.make(self._pieces[tensor.name])]
            self._last = (tensor.name, rows[0] if len(rows) == 1 else torch.cat(rows))
        return self._last[1].view(tensor.shape)

    def read(self, tensor: TensorInfo, buffer: Tensor) -> Tensor:
        """Copies the tensor into the first bytes of a buffer."""
        weight = self.get(tensor)
        return buffer[: tensor.nbytes].view(weight.dtype).view(tensor.shape).copy_(weight)

    def release(self, tensor: TensorInfo) -> None:
        self._maker.release(self._pieces[tensor.name])


def gguf_preset(fresh: Preset | None) -> Preset:
    """Returns the preset to round to. Raises RecipeError if none of GGUF is given."""
    if fresh is None:
        raise RecipeError("GGUF has grids of its own", fix="give --requantize Q4_K_M to round a second time")
    if GGUF not in fresh.formats:
        raise RecipeError(f"GGUF does not hold {fresh.name}", fix="use a gguf preset, such as Q4_K_M or Q8_0")
    return fresh


def _small_files(decoding: Decoding) -> dict[str, bytes]:
    """Returns config, tokenizer and the model card, whose licence and base a GGUF file repeats."""
    small = dict(decoding.container().companions([[]]))
    about = decoding.folder / "README.md"
    if decoding.checkpoint.format != GGUF and about.is_file():  # beside a GGUF file it may tell of anything
        small[about.name] = about.read_bytes()
    return small


def _sixteen_bit(name: str, decoding: Decoding, small: dict[str, bytes]) -> Checkpoint:
    """Returns the checkpoint that the conversion would write, by its headers and small files."""
    config: dict[str, Any] = json.loads(small["config.json"])
    tensors = tuple(
        TensorInfo(tensor, dtype, shape, "", 0, nbytes(dtype, shape))
        for piece in decoding.plan.pieces
        for tensor, dtype, shape in piece.entries
    )
    old, files = decoding.checkpoint, {file: len(data) for file, data in small.items()}
    return Checkpoint(
        name, "safetensors", files, tensors, config, old.tokenizer, old.chat_template,
        lambda file, start, length: small[file][start : start + length],
    )  # fmt: skip


def _name(source: str | Path) -> str:
    """Returns the name of the model: that of its folder or on the hub, or of a GGUF file without its type."""
    place = local_folder(source)
    if place.is_dir():
        path = Path(source).expanduser()
        return path.resolve().name if path.exists() else path.name.partition("@")[0]
    return TYPE.sub("", TYPE.sub("", place.stem)) or place.stem


def _notes(checkpoint: Checkpoint, recipe: Recipe) -> tuple[str, ...]:
    known = quantization(checkpoint)
    if known is None:
        return ()
    return (
        f"Rounded twice: as {known.method} with {known.bits:g} bits, and now as {recipe.preset.name}; both losses add "
        "up. Measure them against the 16-bit original: quantry verify OUT --reference ORIGINAL.",
    )
