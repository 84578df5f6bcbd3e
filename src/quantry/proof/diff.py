"""`quantry.diff`: two models side by side on the same text, and the tensors in which they differ most."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import tee
from pathlib import Path
from typing import Any

from quantry.blockwise.walk import Walk
from quantry.errors import QuantryError
from quantry.models.anatomy import dissect
from quantry.proof import divergence
from quantry.proof import tensor_errors as weights
from quantry.proof.divergence import Compact, Observed
from quantry.proof.sources import ModelSource, open_source, tokenizer
from quantry.proof.text import Window, default_text, read_text
from quantry.proof.text import windows as cut
from quantry.types import Difference, Progress

FIGURES = ("kl", "kl_median", "kl_p99", "top1")
SHOWN = 10


def diff(
    a: str | Path,
    b: str | Path,
    *,
    text: str | Path | None = None,
    windows: int = 16,
    length: int = 512,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Difference:
    """Compares two artefacts (or an artefact and its original) decoded from their bytes; KL is of B against A."""
    content, name = default_text() if text is None else read_text(Path(text).expanduser())
    sources = open_source(a), open_source(b)
    _check_vocabularies(*sources)
    ours, theirs = (tokenizer(source) for source in sources)
    pieces = cut(content, ours, length, windows or None)
    alike = pieces == cut(content, theirs, length, windows or None)
    one, other = (
        _walked(source, pieces, device, letter, progress) for source, letter in zip(sources, "AB", strict=True)
    )
    first, second = tee(_pairs(one, other, pieces))  # gone through side by side, so that one window is held at a time
    found = divergence.summary((pair[0] for pair in first), (pair[1] for pair in second))
    errors = sorted(weights.errors(*sources), key=lambda tensor: -tensor.error)
    return Difference(
        a=_side(sources[0], found.reference_perplexity.value),
        b=_side(sources[1], found.perplexity.value),
        **{figure: getattr(found, figure).value for figure in FIGURES},
        intervals={figure: (getattr(found, figure).low, getattr(found, figure).high) for figure in FIGURES},
        text={"name": name, "windows": len(pieces), "length": length, "positions": found.positions},
        tensors=tuple(asdict(tensor) for tensor in errors[:SHOWN] if tensor.error > 0),
        notes=() if alike else ("the two tokenize the text differently; both were given the tokens of A",),
    )


def _walked(source: ModelSource, pieces: Sequence[Window], device: str, letter: str, progress: Progress | None) -> Walk:
    """A model that has gone through all its blocks."""
    walk = Walk(source, device=device)
    for block in walk.blocks([window.tokens for window in pieces]):
        if progress:
            progress(block.index, walk.count, f"{letter}: {block.name}")
    return walk


def _pairs(one: Walk, other: Walk, pieces: Sequence[Window]) -> Iterator[tuple[Compact, Observed]]:
    """What both say of each window."""
    for (index, logits), (_, others) in zip(one.logits(), other.logits(), strict=True):
        tokens, start = pieces[index].tokens, pieces[index].start
        kept = divergence.compact(logits, tokens, start, logits.shape[1])
        yield kept, divergence.observe(others, tokens, start, kept.ids)


def _check_vocabularies(a: ModelSource, b: ModelSource) -> None:
    sizes = [source.config.get("vocab_size") for source in (a, b)]
    if sizes[0] != sizes[1]:
        raise QuantryError(
            f"A has a vocabulary of {sizes[0]} tokens and B one of {sizes[1]}", fix="compare models of one family"
        )


def _side(source: ModelSource, perplexity: float) -> dict[str, Any]:
    anatomy = dissect(source.checkpoint)
    stored = f"{anatomy.quantization.method} in {anatomy.format}" if anatomy.quantization else anatomy.format
    return {
        "source": anatomy.source,
        "stored": stored,
        "bytes": anatomy.bytes,
        "bits_per_weight": anatomy.bits_per_weight,
        "perplexity": perplexity,
    }
