"""The files of a folder of ONNX Runtime GenAI that the server reads itself: limits, and tokens around a text."""

from pathlib import Path
from typing import Any, TypedDict

from quantry.errors import QuantryError
from quantry.storage.reading import read_json

BUILD = "build the folder again with python -m onnxruntime_genai.models.builder"
CONFIG = "genai_config.json"


class _Model(TypedDict):
    context_length: int
    vocab_size: int
    eos_token_id: int | list[int]


class _Config(TypedDict):
    model: _Model


def read_limits(folder: Path, wanted: int | None) -> tuple[int, int, frozenset[int]]:
    """Returns the context, the size of the vocabulary, and the tokens that end an answer."""
    if not (folder / CONFIG).exists():
        raise QuantryError(f"{folder} is no folder of ONNX Runtime GenAI: it has no {CONFIG}", fix=BUILD)
    model = read_json(folder / CONFIG, _Config, fix=BUILD)["model"]
    longest, ends = model["context_length"], model["eos_token_id"]
    if wanted is not None and not 2 <= wanted <= longest:
        raise QuantryError(f"--context {wanted} is not 2 to {longest}", fix="leave it out for what the model has")
    return wanted or longest, model["vocab_size"], frozenset(ends if isinstance(ends, list) else [ends])


def read_surroundings(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the tokens that a tokenizer puts before and after a text, by its file; None without such a file.

    The library reads them from other places and was seen to leave them out (0.18.0): texts lacked their first token.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    processor = read_json(file, fix=BUILD).get("post_processor") or {}
    try:
        return _surroundings(processor)
    except (AttributeError, KeyError, TypeError) as error:
        raise QuantryError(f"{file} is damaged: its post_processor is none of a tokenizer", fix=BUILD) from error


def _surroundings(processor: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    steps = processor.get("processors", [processor])
    before: list[int] = []
    after: list[int] = []
    for template in (step for step in steps if step.get("type") == "TemplateProcessing"):
        side = before
        for part in template["single"]:
            if "Sequence" in part:
                side = after
            else:
                side.extend(map(int, template["special_tokens"][part["SpecialToken"]["id"]]["ids"]))
    return tuple(before), tuple(after)
