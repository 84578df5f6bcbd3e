"""llama.cpp, embedded: the library inside xllamacpp runs the GGUF file in this process."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from quantry.errors import CheckpointError, ModelNotFoundError, QuantryError, WeightError
from quantry.llamacpp.model import LlamaModel
from quantry.llamacpp.trial import check_loads
from quantry.models.reader import open_checkpoint
from quantry.proof.divergence import Array, Scores, scores_at
from quantry.proof.served.contract import Served
from quantry.proof.text import Window
from quantry.types import Progress

NAME = "llama.cpp"


@dataclass(frozen=True, slots=True)
class EmbeddedLlama:
    """A `ScoringEngine`; without a number of threads it takes one per core."""

    threads: int | None = None

    def check(self) -> None:
        """Does nothing: it comes with Quantry."""

    def score(
        self, artefact: Path, windows: Sequence[Window], ids: Sequence[Array], *, progress: Progress | None = None
    ) -> Served:
        if not windows:
            raise QuantryError("there is no window to score", fix="give at least one")
        lengths = [len(window.tokens) for window in windows]
        scores, done = list[Scores](), 0
        file = gguf_file(artefact)
        check_loads(file)
        with LlamaModel(file, context=max(lengths), threads=self.threads) as model:
            for window, places in zip(windows, ids, strict=True):
                scores.append(_scores(model, window, places))
                done += len(window.tokens)
                if progress:
                    progress(done, sum(lengths), NAME)
            return Served(NAME, f"xllamacpp {version('xllamacpp')}", scores, model.memory)

    def generate(self, artefact: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        longest = max((len(prompt) for prompt in prompts), default=0)
        file = gguf_file(artefact)
        check_loads(file)
        with LlamaModel(file, context=longest + max_tokens, threads=self.threads) as model:
            return [model.generate(prompt, max_tokens) for prompt in prompts]


def gguf_file(artefact: Path) -> Path:
    """Returns the GGUF file of a path or folder; of a file in parts the first, which names the others.

    Raises ModelNotFoundError if the path does not exist, and CheckpointError if a folder has no GGUF file.
    """
    if artefact.is_file():
        return artefact
    if not artefact.is_dir():
        raise ModelNotFoundError(f"{artefact} does not exist", fix="give a GGUF file or the folder it is in")
    checkpoint = open_checkpoint(artefact)
    if checkpoint.format != "gguf":
        raise CheckpointError(
            f"{artefact} holds no GGUF file, and llama.cpp loads nothing else", fix="choose another engine"
        )
    return artefact / min(checkpoint.files)


def _scores(model: LlamaModel, window: Window, ids: Array) -> Scores:
    largest = int(np.max(ids, initial=0))
    if largest >= model.vocabulary:
        raise QuantryError(
            f"the reference has a token {largest}, {model.path.name} a vocabulary of {model.vocabulary}",
            fix="compare models that share a tokenizer",
        )
    logits = model.logits(window.tokens)
    if not np.isfinite(logits).all():
        raise WeightError(
            f"llama.cpp computes logits of {model.path.name} that are not finite", fix="quantize the model again"
        )
    return scores_at(torch.from_numpy(logits), window.tokens, window.start, ids)
