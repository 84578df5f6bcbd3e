"""The head of a model card as the hub reads it: library, base model, licence, tags.

huggingface.co/docs/hub/model-cards names the fields, and huggingface.co/docs/hub/gguf the library of GGUF files.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantry.formats.gguf import NAME as GGUF
from quantry.models.hub import cached_snapshot
from quantry.quantizing.recipe import CAST, Recipe
from quantry.types import Artefact

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CARD_BYTES = 1 << 20  # a longer card of the base is not read
TAGS = {"compressed-tensors": ("compressed-tensors", "vllm"), "bitsandbytes": ("bitsandbytes",)}
LICENCE = ("license", "license_name", "license_link")
TASK = "text-generation"


def card_head(artefact: Artefact, recipe: Recipe, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Returns the YAML between the lines `---`, and sentences on what the author has to add; `folder` is the source's.

    The licence is that of the source's own card.
    """
    from huggingface_hub import ModelCardData

    known = _head_of(folder / "README.md")
    base = _hub_id(artefact.source, folder) or _base_of(known)
    is_cast = recipe.format == CAST or recipe.preset.scheme.weight.is_cast
    fields: dict[str, Any] = {
        "base_model": base,
        "base_model_relation": "quantized" if base and not is_cast else None,
        **{name: _word(known, name) for name in LICENCE},
        "library_name": GGUF if recipe.format == GGUF else "transformers",
        "pipeline_tag": _word(known, "pipeline_tag") or TASK,
        "tags": _tags(artefact, is_cast),
    }
    head = ModelCardData(**{name: value for name, value in fields.items() if value})
    return head.to_yaml(), tuple(_missing(fields))


def _tags(artefact: Artefact, is_cast: bool) -> list[str]:
    stored = TAGS.get(artefact.format, (artefact.format,))
    return list(dict.fromkeys([*([] if is_cast else ["quantized"]), "quantry", artefact.preset, *stored]))


def _missing(fields: Mapping[str, Any]) -> list[str]:
    missing = []
    if not fields["license"]:
        missing.append("The source has no card that names a licence: add `license:` of the base model above.")
    if not fields["base_model"]:
        missing.append("The source is no model of the hub: add `base_model: OWNER/NAME` above if it is there.")
    return missing


def _hub_id(source: str, folder: Path) -> str | None:
    """Returns OWNER/NAME of a model that comes from the hub, or lies in its cache."""
    name = source.partition("@")[0]
    if snapshot := cached_snapshot(folder):
        return snapshot.partition("/")[0].replace("--", "/", 1)
    return name if HUB_ID.fullmatch(name) and not Path(source).expanduser().exists() else None


def _base_of(head: Mapping[str, Any]) -> str | None:
    """Returns the base model of a source that is itself quantized, which is that of its conversion too."""
    base = _word(head, "base_model")
    return base if base and HUB_ID.fullmatch(base) and head.get("base_model_relation") == "quantized" else None


def _head_of(card: Path) -> Mapping[str, Any]:
    """Reads the head of a card; one that cannot be read says nothing."""
    from huggingface_hub import metadata_load

    try:
        head = metadata_load(card) if card.stat().st_size <= CARD_BYTES else None
    except Exception:  # a card may hold anything, and YAML fails in as many ways
        return {}
    return head if isinstance(head, Mapping) else {}


def _word(head: Mapping[str, Any], name: str) -> str | None:
    value = head.get(name)
    return value if isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable() else None
