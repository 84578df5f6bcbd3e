"""Both models on the same windows: the reference from its cache, the artefact from its bytes and in its engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quantry.blockwise import walk
from quantry.proof import divergence, served
from quantry.proof.divergence import Array, Compact, Divergence, Observed
from quantry.proof.reference import Reference, shortfall
from quantry.proof.served import Served
from quantry.proof.sources import ModelSource
from quantry.types import Progress


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """An artefact run from its bytes, on all windows of a reference."""

    observed: list[Observed]
    shortfall: float  # the share of its divergence that the reference's tokens miss


@dataclass(frozen=True, slots=True)
class Gap:
    """How far an engine is from the bytes it was given."""

    kl: float  # mean, of the engine against the decoded artefact
    top1: float  # share of positions with the same likeliest token


def decode(
    artefact: ModelSource, reference: Reference, *, device: str = "cpu", progress: Progress | None = None
) -> Decoded:
    """Runs an artefact in float32 on the windows of a reference, inputs quantized where its scheme has it."""
    tokens = [window.tokens for window in reference.windows]
    observed: list[Observed] = []
    sample, rows = reference.sample, list[torch.Tensor]()
    for index, logits in walk.run(artefact, tokens, device=device, progress=progress):
        window = reference.windows[index]
        observed.append(divergence.observe(logits, window.tokens, window.start, reference.compact(index).ids))
        rows.append(sample.pick(index, logits, window.start))
    lacking = shortfall(reference, torch.cat(rows)) if len(sample.rows) else 0.0
    return Decoded(observed, lacking)


def serve(
    artefact: ModelSource,
    reference: Reference,
    engine: str,
    *,
    python: Path | None = None,
    progress: Progress | None = None,
) -> Served:
    """Runs an artefact in its engine on the windows of a reference."""
    ids = [reference.compact(index).ids for index in range(len(reference.windows))]
    return served.engine(engine).score(artefact.path, reference.windows, ids, python=python, progress=progress)


def summarize(reference: Reference, observed: Sequence[Observed], chosen: range) -> Divergence:
    """The windows of a range taken together."""
    compacts = (reference.compact(index) for index in chosen)
    return divergence.summary(compacts, (observed[index] for index in chosen))


def gap(reference: Reference, decoded: Sequence[Observed], engine: Sequence[Observed], chosen: range) -> Gap:
    """The engine's probabilities against those of the decoded bytes, on the reference's tokens and the rest as one."""
    apart, same = list[Array](), list[Array]()
    for index in chosen:
        ours = decoded[index]
        apart.append(divergence.kl(_as_reference(ours, reference.compact(index).ids), engine[index]))
        same.append(ours.top == engine[index].top)
    return Gap(max(0.0, float(np.concatenate(apart).mean())), float(np.concatenate(same).mean()))


def _as_reference(seen: Observed, ids: Array) -> Compact:
    """What was observed, as something to hold another against."""
    rest = 1 - np.exp(seen.logq.astype(np.float64)).sum(1)
    with np.errstate(divide="ignore"):
        tail = np.log(np.maximum(rest, 0)) if ids.strides[0] else np.full(len(rest), -np.inf)
    return Compact(ids, seen.logq, tail.astype(np.float32), seen.next, seen.top)
