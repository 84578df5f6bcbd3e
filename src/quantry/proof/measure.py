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
from quantry.proof.reference import HEAD_COST, Reference, shortfall
from quantry.proof.served.contract import Served
from quantry.proof.served.engines import scoring_engine
from quantry.quantizing.sources import ModelSource
from quantry.report.stages import stages
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


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """An artefact against its reference on some windows; those of prompts come after the `text_windows`."""

    reference: Reference
    decoded: Decoded
    served: Served | None
    text_windows: int
    seconds: float = 0.0  # that the artefact took, decoded and in its engine

    @property
    def text(self) -> range:
        return range(self.text_windows)


@dataclass(frozen=True)
class Measurements:
    """An artefact against its reference, on one part of the windows after the other; the first has the prompts."""

    parts: tuple[Part, ...]

    @property
    def reference(self) -> Reference:
        """The first part's: k, the noise floor and the notes are those of all."""
        return self.parts[0].reference

    @property
    def served(self) -> Served | None:
        """The first part's: the engine, its version, its memory and its notes are those of all."""
        return self.parts[0].served

    @property
    def text_windows(self) -> int:
        return sum(part.text_windows for part in self.parts)

    @property
    def shortfall(self) -> float:
        """The largest share of the divergence that lies outside the reference's top k."""
        return max(part.decoded.shortfall for part in self.parts)

    @cached_property
    def decoded_figures(self) -> Divergence:
        return _summarize([(part.reference, part.decoded.scores, part.text) for part in self.parts])

    @cached_property
    def served_figures(self) -> Divergence | None:
        known = [(part.reference, part.served.scores, part.text) for part in self.parts if part.served]
        return _summarize(known) if known else None

    def figures_of(self, labels: Sequence[int], label: int) -> tuple[Divergence, Divergence | None]:
        """Returns the figures of the windows with one of the `labels` of all: decoded, and served if they were."""
        places, chosen = iter(labels), list[tuple[Part, list[int]]]()
        for part in self.parts:
            chosen.append((part, [index for index in part.text if next(places) == label]))
        decoded = _summarize([(part.reference, part.decoded.scores, windows) for part, windows in chosen])
        known = [(part.reference, part.served.scores, windows) for part, windows in chosen if part.served]
        return decoded, _summarize(known) if known else None

    @cached_property
    def gap(self) -> Gap | None:
        """The engine against the bytes that it loaded."""
        served = [part for part in self.parts if part.served]
        return _gap(served) if served else None

    @cached_property
    def prompt_figures(self) -> Divergence | None:
        """The decoded artefact on the 16-bit model's answers to prompts."""
        first = self.parts[0]
        windows = range(first.text_windows, len(first.reference.windows))
        return _summarize([(first.reference, first.decoded.scores, windows)]) if windows else None


def decode(
    artefact: ModelSource, reference: Reference, *, device: str = "cpu", progress: Progress | None = None
) -> Decoded:
    """Runs an artefact in float32 on the windows of a reference, with quantized inputs where its scheme has them."""
    tokens = [window.tokens for window in reference.windows]
    sample = reference.sample
    scores, rows = list[Scores](), list[torch.Tensor]()
    shown = stages(progress, {"blocks": 1, "head": HEAD_COST})
    tell = shown["head"] or (lambda *_: None)
    for index, logits in walk.run(artefact, tokens, device=device, progress=shown["blocks"]):
        tell(index, len(tokens), "the probabilities")
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


def _summarize(measured: Sequence[tuple[Reference, Sequence[Scores], Sequence[int]]]) -> Divergence:
    """Returns the figures of some windows of each reference."""
    return divergence.summary(
        (reference.top_k(index) for reference, _, windows in measured for index in windows),
        (scores[index] for _, scores, windows in measured for index in windows),
    )


def _gap(parts: Sequence[Part]) -> Gap:
    """Compares the engine's probabilities with those of the decoded bytes, on the reference's top k and its tail."""
    divergences, same = list[Array](), list[Array]()
    for part in parts:
        assert part.served is not None
        for index in part.text:
            decoded, engine = part.decoded.scores[index], part.served.scores[index]
            as_reference = _as_reference(decoded, part.reference.top_k(index).ids)
            divergences.append(divergence.kl(as_reference, engine))
            same.append(decoded.top == engine.top)
    return Gap(max(0.0, float(np.concatenate(divergences).mean())), float(np.concatenate(same).mean()))


def _as_reference(scores: Scores, ids: Array) -> TopK:
    rest = 1 - np.exp(scores.logq.astype(np.float64)).sum(1)
    with np.errstate(divide="ignore"):
        tail = np.full(len(rest), -np.inf) if divergence.is_whole(ids) else np.log(np.maximum(rest, 0))
    return TopK(ids, scores.logq, tail.astype(np.float32), scores.next, scores.top)
