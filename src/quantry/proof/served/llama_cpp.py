"""llama.cpp, embedded: the library inside xllamacpp runs the GGUF file in this process."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from quantry.errors import CheckpointError, ModelNotFoundError, QuantryError, WeightError
from quantry.llamacpp.model import Model
from quantry.models.reader import open_checkpoint
from quantry.proof.divergence import Array, Scores, scores_at
from quantry.proof.served import Served
from quantry.proof.text import Window
from quantry.types import Progress

NAME = "llama.cpp"


def score(
    artefact: Path,
    windows: Sequence[Window],
    ids: Sequence[Array],
    *,
    python: Path | None = None,
    length: int | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Served:
    """What llama.cpp says of every window; it is always the one of this python. No threads: as many as cores."""
    _own(python)
    if not windows:
        raise QuantryError("there is no window to score", fix="give at least one")
    longest, total = max(len(window.tokens) for window in windows), sum(len(window.tokens) for window in windows)
    scores, done = list[Scores](), 0
    with Model(gguf_file(artefact), context=max(longest, length or 0), threads=threads) as model:
        for window, places in zip(windows, ids, strict=True):
            scores.append(_observed(model, window, places))
            done += len(window.tokens)
            if progress:
                progress(done, total, NAME)
        return Served(NAME, f"xllamacpp {version('xllamacpp')}", scores, model.memory)


def generate(
    artefact: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    python: Path | None = None,
    threads: int | None = None,
) -> list[list[int]]:
    """What llama.cpp writes after every prompt."""
    _own(python)
    longest = max((len(prompt) for prompt in prompts), default=0)
    with Model(gguf_file(artefact), context=longest + max_tokens, threads=threads) as model:
        return [model.generate(prompt, max_tokens) for prompt in prompts]


def tokenize(artefact: Path, texts: Sequence[str], special: bool = True) -> list[list[int]]:
    """Token ids as llama.cpp makes them from the file's own vocabulary."""
    with Model(gguf_file(artefact)) as model:
        return [model.tokenize(text, special) for text in texts]


def chat_template(artefact: Path) -> str | None:
    """The template that llama.cpp finds in the file."""
    with Model(gguf_file(artefact)) as model:
        return model.chat_template


def gguf_file(artefact: Path) -> Path:
    """The GGUF file itself, or the one that a folder holds; of a file in parts the first, which names the others."""
    path = Path(artefact)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} does not exist", fix="give a GGUF file or the folder it is in")
    checkpoint = open_checkpoint(path)
    if checkpoint.format != "gguf":
        raise CheckpointError(
            f"{path} holds no GGUF file, and llama.cpp loads nothing else", fix="choose another engine"
        )
    return path / min(checkpoint.files)


def _observed(model: Model, window: Window, places: Array) -> Scores:
    strange = int(np.max(places, initial=0))
    if strange >= model.vocabulary:
        raise QuantryError(
            f"the reference has a token {strange}, {model.path.name} a vocabulary of {model.vocabulary}",
            fix="compare models that share a tokenizer",
        )
    logits = model.logits(window.tokens)
    if not np.isfinite(logits).all():
        raise WeightError(
            f"llama.cpp computes logits of {model.path.name} that are not finite", fix="quantize the model again"
        )
    return scores_at(torch.from_numpy(logits), window.tokens, window.start, places)


def _own(python: Path | None) -> None:
    if python is not None:
        raise QuantryError(
            f"llama.cpp is embedded, so that {python} cannot be its python", fix="leave --engine-python out"
        )
