"""Calibrated jobs: the text they are calibrated on, checked before anything is written.

`begin` refuses everything that can be refused: data, tokenizer, a model that cannot be run. What the text then tells of
the layers, block after block, is in quantizing/calibration/per_block.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantry.blockwise.walk import Walk
from quantry.errors import CheckpointError, QuantryError, RecipeError
from quantry.formats.gguf import NAME as GGUF
from quantry.llamacpp.tensor_map import TensorSlice
from quantry.models.attention import text_config
from quantry.models.identity import identity
from quantry.models.linears import Linear
from quantry.models.parts import decoder_block
from quantry.models.reader import open_checkpoint, small_folder
from quantry.models.tokenizer import load_tokenizer
from quantry.models.weights import DTYPES as STORED
from quantry.models.weights import PlainWeights
from quantry.numerics.device import arithmetic
from quantry.quantizing.calibration.advice import diagnose
from quantry.quantizing.calibration.per_block import SEED, Inputs, Layer, tensor_of
from quantry.quantizing.calibration.store import default_store, statistics
from quantry.quantizing.calibration.text import LENGTH, SAMPLES, Data, load
from quantry.quantizing.calibration.transform import Transform, grids
from quantry.quantizing.recipe import STATISTICS, Calibration, Recipe
from quantry.quantizing.tensor_plan import Assemble, Quantize, TensorPlan
from quantry.types import Anatomy, Checkpoint, Progress

SCALED = "scaled with the layers around it"


class Calibrated:
    """What a job is calibrated on, checked against the model that will read it, and what is done with its blocks."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        data: Data,
        recipe: Recipe,
        division: TensorPlan,
        blocks: int,
        *,
        low_memory: bool = False,
    ) -> None:
        self._checkpoint, self._device, self._data = checkpoint, device, data
        self._recipe, self._division, self._low_memory = recipe, division, low_memory
        on_cpu = device.type == "cpu"
        self._arithmetic = torch.float32 if recipe.distilled and on_cpu else arithmetic(device)  # gradients are small
        self._blocks, name = blocks, recipe.transform
        schemes = grids(division) if recipe.format == GGUF else division.assignment
        self._transform = Transform(name, checkpoint, blocks, schemes) if name else None

    @property
    def record(self) -> Calibration:
        """What the recipe says of the text."""
        data = self._data
        run_in = str(self._arithmetic).removeprefix("torch.")
        return Calibration(data.name, data.fingerprint, len(data.tokens), data.length, SEED, data.count, run_in)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know before the job begins."""
        return (*diagnose(self._data), *(self._transform.notes() if self._transform else ()))

    @property
    def kept_bytes(self) -> int:
        """The room that the job takes on the disk while it runs: what comes to the last two blocks, if sequential."""
        channels = int(text_config(self._checkpoint.config)["hidden_size"])
        return 2 * self._data.count * channels * self._arithmetic.itemsize if self._recipe.sequential else 0

    def marked(self, division: TensorPlan) -> TensorPlan:
        """The division, with the fates of tensors that are kept but scaled."""
        scaled = self._transform.scaled() if self._transform else set()
        fates = {
            name: f"{fate}{',' if ':' in fate else ':'} {SCALED}" if name in scaled and fate != "quantized" else fate
            for name, fate in division.fates.items()
        }
        return replace(division, fates=fates)

    def inputs(self, folder: Path, read: Callable[[str], Tensor], progress: Progress | None = None) -> Inputs:
        """What the layers are given on this text, walked or from the store when a block is asked for.

        `read` gives the tensors of the checkpoint on the computing device, `progress` is told of blocks.
        """
        found = statistics(
            PlainWeights(self._checkpoint, folder),
            self._data,
            device=self._device,
            dtype=self._arithmetic,
            cache=default_store() if self._device.type == "cpu" else None,  # a GPU walks faster than a disk writes
            identity=identity(open_checkpoint(folder)),
            progress=progress,
            histogram=self._recipe.histogram,
            low_memory=self._low_memory,
            **({"batch": 1} if self._recipe.distilled else {}),  # a batch is a step, and more of them do more
        )
        return Inputs(
            found,
            self._transform,
            read,
            schemes=self._division.assignment,
            collects=not self._recipe.distilled or _needs_statistics(self._recipe),
            distilled=self._recipe.distilled,
            layers=_layers(self._division, self._blocks) if self._recipe.sequential else None,
        )


def begin(
    checkpoint: Checkpoint,
    recipe: Recipe,
    anatomy: Anatomy,
    division: TensorPlan,
    device: torch.device,
    *,
    data: str | Path | None,
    samples: int | None,
    length: int | None,
    low_memory: bool = False,
) -> Calibrated:
    """Everything that can be refused before a weight is read."""
    if recipe.distilled and recipe.transform:
        raise RecipeError(
            f"the recipe both distils blocks and transforms them with {recipe.transform}", fix="use one of the two"
        )
    if checkpoint.tokenizer is None:
        raise CheckpointError(
            f"{checkpoint.source} has no tokenizer, without which it cannot be calibrated on text",
            fix="copy its files from the original model",
        )
    walk = Walk(PlainWeights(checkpoint, Path()), device=device, dtype=arithmetic(device))  # by its headers alone
    with small_folder(checkpoint, "model") as folder:
        tokenizer = load_tokenizer(folder)
    found = load(
        data,
        tokenizer,
        samples=SAMPLES if samples is None else samples,
        length=LENGTH if length is None else length,
        seed=SEED,
        context=anatomy.context_length,
    )
    if recipe.distilled and len(found.tokens) < 2:
        raise QuantryError(
            "1 sample is too few to distil on, since one is held out", fix="give --samples of at least 2"
        )
    largest, rows = max(map(max, found.tokens)), walk.skeleton.rows
    if largest >= rows:
        raise CheckpointError(
            f"the tokenizer gives a token {largest} where the embedding has {rows} rows",
            fix="use the tokenizer that belongs to the model",
        )
    return Calibrated(checkpoint, device, found, recipe, division, anatomy.blocks, low_memory=low_memory)


def _needs_statistics(recipe: Recipe) -> bool:
    """Whether some preset needs more than the blocks themselves."""
    return any(
        one.transform or one.scheme.static or not STATISTICS.isdisjoint((one.fit, one.rounder))
        for one in recipe.presets
    )


def _layers(division: TensorPlan, blocks: int) -> dict[int, frozenset[Layer]]:
    """The matrices of each block that are quantized."""
    found: dict[int, set[Layer]] = {}
    for piece in division.pieces:
        parts: tuple[Linear | TensorSlice, ...] = ()
        if isinstance(piece, Quantize):
            parts = piece.linears
        elif isinstance(piece, Assemble) and piece.kind not in STORED:
            parts = piece.target.sources
        for part in parts:
            index = decoder_block(tensor_of(part), blocks)
            if index is not None:
                found.setdefault(index, set()).add((tensor_of(part), part.expert, part.rows))
    return {index: frozenset(layers) for index, layers in found.items()}
