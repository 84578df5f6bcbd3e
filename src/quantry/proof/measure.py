"""The artefact on the reference's windows: decoded from its bytes, and in the engine that serves it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from quantry.blockwise import walk
from quantry.proof import divergence
from quantry.proof.divergence import Array, Divergence, Scores, TopK
from quantry.proof.reference import Reference, shortfall
from quantry.proof.served.contract import Served
from quantry.proof.served.engines import scoring_engine
from quantry.proof.sources import ModelSource
from quantry.types import Progress


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """The scores of an artefact that was run from its bytes, on all windows of a reference."""

    scores: list[Scores]
    shortfall: float  # the share of its divergence that lies outside the reference's top k


@dataclass(frozen=True, slots=True)
class Gap:
    """How far an engine is from the bytes that it loaded."""

    kl: float  # mean, of the engine against the decoded artefact
    top1: float  # share of positions with the same likeliest token


@dataclass(frozen=True)
class Measurements:
    """An artefact against its reference; the first `text_windows` windows are of the text, the others of prompts."""

    reference: Reference
    decoded: Decoded
    served: Served | None
    text_windows: int

    @property
    def _text(self) -> range:
        return range(self.text_windows)

    @cached_property
    def decoded_figures(self) -> Divergence:
        return summarize(self.reference, self.decoded.scores, self._text)

    @cached_property
    def served_figures(self) -> Divergence | None:
        return summarize(self.reference, self.served.scores, self._text) if self.served else None

    @cached_property
    def gap(self) -> Gap | None:
        """The engine against the bytes that it loaded."""
        return gap(self.reference, self.decoded.scores, self.served.scores, self._text) if self.served else None

    @cached_property
    def prompt_figures(self) -> Divergence | None:
        """The decoded artefact on the 16-bit model's answers to prompts."""
        windows = range(self.text_windows, len(self.reference.windows))
        return summarize(self.reference, self.decoded.scores, windows) if windows else None


def decode(
    artefact: ModelSource, reference: Reference, *, device: str = "cpu", progress: Progress | None = None
) -> Decoded:
    """Runs an artefact in float32 on the windows of a reference, with quantized inputs where its scheme has them."""
    tokens = [window.tokens for window in reference.windows]
    sample = reference.sample
    scores, rows = list[Scores](), list[torch.Tensor]()
    for index, logits in walk.run(artefact, tokens, device=device, progress=progress):
        window = reference.windows[index]
        scores.append(divergence.scores_at(logits, window.tokens, window.start, reference.top_k(index).ids))
        rows.append(sample.pick(index, logits, window.start))
    return Decoded(scores, shortfall(reference, torch.cat(rows)) if len(sample.rows) else 0.0)


def serve(
    artefact: ModelSource,
    reference: Reference,
    engine: str,
    *,
    python: Path | None = None,
    progress: Progress | None = None,
) -> Served:
    """Runs an artefact in its engine on the windows of a reference."""
    ids = [reference.top_k(index).ids for index in range(len(reference.windows))]
    return scoring_engine(engine, python).score(artefact.path, reference.windows, ids, progress=progress)


def summarize(reference: Reference, scores: Sequence[Scores], windows: range) -> Divergence:
    """Returns the figures of a range of windows."""
    return divergence.summary(map(reference.top_k, windows), (scores[index] for index in windows))


def gap(reference: Reference, decoded: Sequence[Scores], engine: Sequence[Scores], windows: range) -> Gap:
    """Compares the engine's probabilities with those of the decoded bytes, on the reference's top k and its tail."""
    divergences, same = list[Array](), list[Array]()
    for index in windows:
        as_reference = _as_reference(decoded[index], reference.top_k(index).ids)
        divergences.append(divergence.kl(as_reference, engine[index]))
        same.append(decoded[index].top == engine[index].top)
    return Gap(max(0.0, float(np.concatenate(divergences).mean())), float(np.concatenate(same).mean()))


def _as_reference(scores: Scores, ids: Array) -> TopK:
    rest = 1 - np.exp(scores.logq.astype(np.float64)).sum(1)
    with np.errstate(divide="ignore"):
        tail = np.full(len(rest), -np.inf) if divergence.is_whole(ids) else np.log(np.maximum(rest, 0))
    return TopK(ids, scores.logq, tail.astype(np.float32), scores.next, scores.top)
