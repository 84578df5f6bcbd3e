"""Several texts as one: windows are divided by weight and interleaved, so that the first ones are a mixture too."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from quantry.errors import QuantryError
from quantry.models.reader import DEMO
from quantry.quantizing.calibration.data import Data, WeightedText, texts_of
from quantry.quantizing.calibration.text import LENGTH, SAMPLES, CalibrationText, load


def load_data(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int = SAMPLES,
    length: int = LENGTH,
    seed: int = 0,
    context: int | None = None,
) -> CalibrationText:
    """Cuts windows from one text, or from several in the proportion of their weights.

    Raises QuantryError for texts that cannot be read or are too short for their share, and for fewer samples than
    texts.
    """
    texts = texts_of(data)
    if len(texts) == 1:
        return load(texts[0].path, tokenizer, samples=samples, length=length, seed=seed, context=context)
    if samples < len(texts):
        raise QuantryError(
            f"{samples} samples cannot be divided among {len(texts)} texts",
            fix=f"give --samples of at least {len(texts)}",
        )
    parts = [
        load(text.path, tokenizer, samples=share, length=length, seed=seed, context=context, mixed=samples)
        for text, share in zip(texts, divide([text.weight for text in texts], samples), strict=True)
    ]
    return _mixed([replace(part, name=name) for part, name in zip(parts, _names(texts, parts), strict=True)], texts)


def divide(weights: Sequence[float], count: int) -> list[int]:
    """Divides `count` windows by weight, with the largest remainders rounded up, and at least one for each text.

    >>> divide([3, 1], 128), divide([1000, 1], 16)
    ([96, 32], [15, 1])
    """
    exact = [Fraction(weight) for weight in weights]
    small: set[int] = set()  # texts with less than one window
    while True:
        large = [place for place in range(len(exact)) if place not in small]
        total, left = sum(exact[place] for place in large), count - len(small)
        fair = {place: left * exact[place] / total for place in large}
        below = {place for place in large if fair[place] < 1}
        if not below or len(large) == 1:
            break
        small |= below
    shares = {place: int(share) for place, share in fair.items()}
    ranked = sorted(large, key=lambda place: (shares[place] - fair[place], place))
    for place in ranked[: left - sum(shares.values())]:
        shares[place] += 1
    return [shares.get(place, 1) for place in range(len(exact))]


def interleave(counts: Sequence[int]) -> list[int]:
    """Returns the text of each window: every text is spread evenly over all windows.

    >>> interleave([3, 1, 2])
    [0, 2, 0, 1, 2, 0]
    """
    places = [
        (Fraction(2 * number + 1, 2 * count), text) for text, count in enumerate(counts) for number in range(count)
    ]
    return [text for _, text in sorted(places)]


def spread(texts: Sequence[Sequence[tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Interleaves the windows of several texts."""
    windows = [iter(text) for text in texts]
    return tuple(next(windows[text]) for text in interleave([len(text) for text in texts]))


def _mixed(parts: Sequence[CalibrationText], texts: Sequence[WeightedText]) -> CalibrationText:
    counts = [len(part.tokens) for part in parts]
    return CalibrationText(
        tokens=spread([part.tokens for part in parts]),
        name=",".join(f"{part.name}:{text.weight:g}" for part, text in zip(parts, texts, strict=True)),
        kind="mixture",
        documents=sum(part.documents for part in parts),
        truncated=sum(part.truncated for part in parts),
        template=any(part.template for part in parts),
        bos=parts[0].bos,
        chat=parts[0].chat,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        parts=tuple(parts),
        weights=tuple(text.weight for text in texts),
        labels=tuple(interleave(counts)),
    )


def _names(texts: Sequence[WeightedText], parts: Sequence[CalibrationText]) -> list[str]:
    """Returns the names of the texts; those that occur twice get the name of their folder."""
    alone = Counter(part.name for part in parts)
    return [
        part.name if alone[part.name] == 1 or str(text.path) == DEMO else _with_folder(Path(str(text.path)))
        for text, part in zip(texts, parts, strict=True)
    ]


def _with_folder(path: Path) -> str:
    return f"{path.absolute().parent.name}/{path.name}"
