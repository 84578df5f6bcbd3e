"""What a recipe makes of a checkpoint in each container: the tensor plan, the files, and who makes the tensors."""

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from quantry.errors import RecipeError
from quantry.formats.contract import load_format
from quantry.formats.gguf import NAME as GGUF
from quantry.llamacpp import importance
from quantry.llamacpp.families import notes
from quantry.llamacpp.importance import Importance
from quantry.llamacpp.tensor_map import Target
from quantry.methods import contract
from quantry.models.attention import block_count
from quantry.models.linears import check_halves, linears
from quantry.quantizing.containers.folder import SafetensorsFolder, small_files
from quantry.quantizing.containers.gguf_file import GgufFile, describe, plan_gguf
from quantry.quantizing.makers.gguf import GgufMaker
from quantry.quantizing.makers.layers import LayerMaker
from quantry.quantizing.makers.reader import WeightReader
from quantry.quantizing.recipe import CAST, Recipe
from quantry.quantizing.tensor_plan import TensorPlan, by_block, plan_folder
from quantry.types import Checkpoint


class FolderTarget:
    """A Hugging Face folder whose linear layers are quantized. Raises RecipeError if none would be."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, keep_odd: bool = False) -> None:
        check_halves(checkpoint)
        self._checkpoint = checkpoint
        self._codec = None if recipe.format == CAST else load_format(recipe.format)
        plan = plan_folder(checkpoint, recipe, block_count(checkpoint.config), keep_odd)
        if self._codec and not plan.assignment:
            loosen = "loosen its rules, or " if recipe.rules else ""
            raise RecipeError(
                f"no layer of {checkpoint.source} would be quantized with {recipe.preset.name}",
                fix=f"{loosen}use a preset without blocks that divide no layer, such as fp8-dynamic or w8a8",
            )
        _check_rules(checkpoint, recipe, plan)
        cache = replace(recipe.cache, scale=plan.dtype) if recipe.cache else None  # type: ignore[arg-type]
        self._settings = self._codec.config(plan.assignment, plan.kept, cache) if self._codec else None
        self.plan = by_block(plan) if recipe.calibrated else plan

    def container(self, folder: Path) -> SafetensorsFolder:
        """Returns the container, with the small files of the model in `folder`."""
        return SafetensorsFolder(small_files(folder), self._checkpoint.config, self.plan.dtype, self._settings)

    def maker(self, reader: WeightReader) -> LayerMaker:
        return LayerMaker(reader, self._codec, self._settings or {})


def _check_rules(checkpoint: Checkpoint, recipe: Recipe, plan: TensorPlan) -> None:
    """Raises RecipeError for a rule that matches no layer; one that keeps may name what is kept anyway."""
    layers = [linear.module for linear in linears(checkpoint, block_count(checkpoint.config))]
    kept = [*plan.kept, *(tensor.name for tensor in checkpoint.tensors)]
    for rule in () if recipe.budget else recipe.rules:  # those of a budget name layers one by one
        names = layers if rule.preset else [*layers, *kept, *(name.removesuffix(".weight") for name in kept)]
        if not any(fnmatchcase(name, rule.match) for name in names):
            raise RecipeError(
                f"rule {rule.match!r} matches no layer of {checkpoint.source}", fix=f"names are like {layers[0]}"
            )


class GgufTarget:
    """A GGUF file, made with an importance matrix if one is given; `computed` is its file, to be stored beside.

    `small` is the folder of tokenizer and config, if it is not the checkpoint's own.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        importance: Importance | None = None,
        computed: bytes | None = None,
        small: Path | None = None,
    ) -> None:
        self._checkpoint, self._recipe, self._importance = checkpoint, recipe, importance
        self.plan = plan_gguf(checkpoint, recipe)
        self._vectors = self._fitting_vectors()
        self._file = describe(checkpoint, recipe, self.plan, importance, computed, small)

    def tensors(self) -> dict[str, Target]:
        """Returns the tensors of the file by name."""
        return {piece.name: piece.target for piece in self.plan.gguf_tensors()}

    def container(self, folder: Path) -> GgufFile:
        return self._file

    def maker(self, reader: WeightReader) -> GgufMaker:
        rounder = contract.rounder(self._recipe.preset.rounder)
        return GgufMaker(reader, rounder, self._vectors, tuple(notes(self._checkpoint.config)))

    def _fitting_vectors(self) -> dict[str, torch.Tensor]:
        """Returns the importance vectors by tensor. Raises RecipeError if they are of another model."""
        given = importance.fitting(self._importance, self.tensors()) if self._importance else {}
        return {name: torch.from_numpy(vector) for name, vector in given.items()}


def target_of(
    checkpoint: Checkpoint, recipe: Recipe, importance: Importance | None = None, keep_odd: bool = False
) -> FolderTarget | GgufTarget:
    """Returns the target that suits the recipe's format."""
    if recipe.format == GGUF:
        return GgufTarget(checkpoint, recipe, importance)
    return FolderTarget(checkpoint, recipe, keep_odd)
