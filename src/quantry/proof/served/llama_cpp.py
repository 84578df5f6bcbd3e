"""llama.cpp, embedded: the library inside xllamacpp runs the GGUF file in this process."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from quantry.errors import CheckpointError, ModelNotFoundError, QuantryError, WeightError
from quantry.llamacpp.model import LlamaModel
from quantry.llamacpp.trial import check_loads
from quantry.models.reader import open_checkpoint
from quantry.proof.divergence import Array, Positions, Scores, compare_logits, scores_at
from quantry.proof.served.contract import Served, ServedCaches
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
            return Served(NAME, _version(), scores, model.memory)

    def compare_caches(
        self,
        artefact: Path,
        windows: Sequence[Window],
        base: str,
        caches: Sequence[str],
        *,
        progress: Progress | None = None,
    ) -> ServedCaches:
        """Runs one context for each cache over the same weights, all a piece of the tokens at a time, in step.

        So the logits of one piece are all that is kept, however long the windows are.
        """
        lengths = [len(window.tokens) for window in windows]
        file, done = gguf_file(artefact), 0
        check_loads(file)
        compared: dict[str, list[Positions]] = {cache: [] for cache in caches}
        with ExitStack() as opened:
            first = opened.enter_context(LlamaModel(file, max(lengths), self.threads, cache=base))
            others = [opened.enter_context(first.beside(cache)) for cache in caches]
            for window in windows:
                parts: list[list[Positions]] = [[] for _ in caches]
                for (start, rows), *rest in zip(
                    *(model.logits_by_piece(window.tokens) for model in (first, *others)), strict=True
                ):
                    for part, (_, other) in zip(parts, rest, strict=True):
                        part += _compared(window, start, rows, other)
                    done += len(rows)
                    if progress:
                        progress(done, sum(lengths), NAME)
                for cache, part in zip(caches, parts, strict=True):
                    compared[cache].append(Positions.joined(part))
        return ServedCaches(NAME, _version(), compared)

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


def _version() -> str:
    return f"xllamacpp {version('xllamacpp')}"


def _compared(window: Window, start: int, rows: Array, other: Array) -> list[Positions]:
    """Compares the logits after the tokens from `start` on where a scored token comes next; none if none does."""
    first, last = max(start, window.start - 1), min(start + len(rows), len(window.tokens) - 1)
    if first >= last:
        return []
    here = slice(first - start, last - start)
    p_logits, q_logits = torch.from_numpy(rows[here]), torch.from_numpy(other[here])
    return [compare_logits(p_logits, q_logits, window.tokens[first + 1 : last + 1])]


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
