"""Ready GGUF files: of a well-known model that Quantry cannot write as GGUF, the repository that others made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantry.formats.gguf import NAME as GGUF
from quantry.llamacpp.ready import MXFP4, architecture
from quantry.planning.models import find_model, is_original
from quantry.quantizing.recipe import Recipe, preset
from quantry.storage import read_data
from quantry.types import Checkpoint


@dataclass(frozen=True, slots=True)
class ReadyFiles:
    """A repository of GGUF files, and the recipes that describe them."""

    repo: str
    recipes: tuple[Recipe, ...]

    def served(self, recipe: Recipe) -> str:
        """Returns what llama.cpp downloads: the repository and the type of the file."""
        return f"{self.repo}:{recipe.preset.file_type.upper()}" if recipe.preset.file_type else self.repo


def ready_files(model: str, checkpoint: Checkpoint) -> ReadyFiles | None:
    """Returns the ready files of a model by its hub id; None if none are known.

    Only of repositories of the catalogue: a model that somebody tuned or quantized has other weights than those files.
    Untuned variants are seldom published as GGUF.
    """
    known = find_model(model)
    row = _publishers().get(known.name) if known and is_original(known, model) else None
    if row is None or architecture(checkpoint.config) is None:
        return None
    recipes = (Recipe(preset("mxfp4" if name == MXFP4 else f"gguf-{name}"), GGUF) for name in row["types"])
    return ReadyFiles(f"{row['owner']}/{model.rpartition('/')[2]}-GGUF", tuple(recipes))


@cache
def _publishers() -> dict[str, Mapping[str, Any]]:
    rows = read_data("quantry.planning", "ready.toml")["publishers"]
    return {name: row for row in rows for name in row["models"]}
