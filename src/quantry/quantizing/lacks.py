"""What a checkpoint lacks that its artefact will be served with: a warning before hours are spent."""

from collections.abc import Iterator

from quantry.llamacpp.families import known
from quantry.types import Checkpoint


def lacks(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields a sentence for a missing tokenizer, and for an architecture that neither engine nor library here knows.

    Of a config without weights only the architecture counts.
    """
    if checkpoint.tokenizer is None and "shape" not in checkpoint.metadata:
        yield f"{checkpoint.source} has no tokenizer, so engines will not serve the artefact until one is added."
    names = checkpoint.config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture not in known() and not _in_transformers(checkpoint, architecture):
        shown = architecture[:60] or "The config"
        what = "is an architecture" if architecture else "names no architecture"
        known_by = " that neither transformers nor llama.cpp knows" if architecture else ""
        yield f"{shown} {what}{known_by}: only an engine with code of its own will serve the artefact."


def _in_transformers(checkpoint: Checkpoint, architecture: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

    return bool(architecture) and checkpoint.config.get("model_type") in CONFIG_MAPPING_NAMES
