"""`quantry.diff`: two models side by side on the same text, and the tensors in which they differ most."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import tee
from pathlib import Path
from typing import Any

from quantry.blockwise.walk import Walk
from quantry.errors import QuantryError
from quantry.models.anatomy import dissect
from quantry.proof import divergence, tensor_errors
from quantry.proof.divergence import Scores, TopK
from quantry.proof.reference import HEAD_COST
from quantry.proof.text import Window, fitting_length, load_text
from quantry.proof.text import windows as cut
from quantry.quantizing.origin import origin_of
from quantry.quantizing.sources import ModelSource, open_source, tokenizer
from quantry.report.stages import named, stages
from quantry.types import Difference, Progress

FIGURES = ("kl", "kl_median", "kl_p99", "top1")
SHOWN = 10


def diff(
    a: str | Path,
    b: str | Path | None = None,
    *,
    text: str | Path | None = None,
    windows: int = 16,
    length: int = 512,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Difference:
    """Compares two artefacts, or an artefact and its original, both decoded from their bytes; KL is of B against A.

    One artefact alone is B, and A the 16-bit model that its quantry.json names.

    Raises QuantryError if the vocabularies differ in size or the text is too short for a window.
    """
    content = load_text(text)
    first, second = (origin_of(a, "as a second model"), a) if b is None else (a, b)
    sources = open_source(first, device), open_source(second, device)
    _check_vocabularies(*sources)
    length, notes = fitting_length(length, *(source.config for source in sources))
    cuts, cuts_of_b = (cut(content, tokenizer(source), length, windows or None) for source in sources)
    if cuts != cuts_of_b:
        notes += ("the two tokenize the text differently; both were given the tokens of A",)
    shown = stages(progress, {"A": 1, "B": 1, "head": 2 * HEAD_COST, "weights": tensor_errors.COST})
    walk_a, walk_b = (
        _finished_walk(source, cuts, device, named(shown[letter], letter))
        for source, letter in zip(sources, "AB", strict=True)
    )
    pairs, again = tee(_pairs(walk_a, walk_b, cuts, shown["head"]))  # in step, so that one window is in memory
    figures = divergence.summary((pair[0] for pair in pairs), (pair[1] for pair in again))
    errors = sorted(tensor_errors.errors(*sources, shown["weights"], device=device), key=lambda tensor: -tensor.error)
    return Difference(
        a=_side(str(first), sources[0], figures.reference_perplexity.value),
        b=_side(str(second), sources[1], figures.perplexity.value),
        **figures.values(FIGURES),
        intervals=figures.intervals(FIGURES),
        text={"name": content.name, "windows": len(cuts), "length": length, "positions": figures.positions},
        tensors=tuple(asdict(tensor) for tensor in errors[:SHOWN] if tensor.error > 0),
        notes=notes,
    )


def _finished_walk(source: ModelSource, cuts: Sequence[Window], device: str, progress: Progress | None) -> Walk:
    walk = Walk(source, device=device)
    for block in walk.blocks([window.tokens for window in cuts]):
        if progress:
            progress(block.index, walk.count, block.name)
    return walk


def _pairs(
    walk_a: Walk, walk_b: Walk, cuts: Sequence[Window], progress: Progress | None
) -> Iterator[tuple[TopK, Scores]]:
    for (index, logits_a), (_, logits_b) in zip(walk_a.logits(), walk_b.logits(), strict=True):
        if progress:
            progress(index, len(cuts), "the probabilities")
        tokens, start = cuts[index].tokens, cuts[index].start
        reference = divergence.top_k(logits_a, tokens, start, logits_a.shape[1])
        yield reference, divergence.scores_at(logits_b, tokens, start, reference.ids)


def _check_vocabularies(a: ModelSource, b: ModelSource) -> None:
    sizes = [source.config.get("vocab_size") for source in (a, b)]
    if sizes[0] != sizes[1]:
        raise QuantryError(
            f"A has a vocabulary of {sizes[0]} tokens and B one of {sizes[1]}", fix="compare models of one family"
        )


def _side(name: str, source: ModelSource, perplexity: float) -> dict[str, Any]:
    anatomy = dissect(source.checkpoint)
    stored = f"{anatomy.quantization.method} in {anatomy.format}" if anatomy.quantization else anatomy.format
    return {
        "source": name,
        "stored": stored,
        "bytes": anatomy.bytes,
        "bits_per_weight": anatomy.bits_per_weight,
        "perplexity": perplexity,
    }
