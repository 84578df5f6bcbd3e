"""Windows of a calibration text that nothing was calibrated on, to measure mixtures on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantry.errors import QuantryError
from quantry.jobs.auto.calibrated_model import CalibratedModel
from quantry.jobs.auto.damage import gradient_windows
from quantry.quantizing.calibration.calibrator import load_text
from quantry.quantizing.calibration.data import WeightedText, texts_of
from quantry.quantizing.calibration.mixture import divide, spread
from quantry.quantizing.calibration.text import CalibrationText

TOKENS = 1 << 12  # to measure on: the KL of 4,096 tokens is known to about 5 %
FEWEST = 2  # windows

Windows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Windows of one length; `unseen` says that nothing at all was calibrated on them."""

    windows: Windows
    unseen: bool


def held_back(model: CalibratedModel) -> HeldBack:
    """Returns the windows that follow those of the job in its text; in a mixture, in each of its texts.

    A text that ends there gives the last of the job's own windows, if there are some without gradients.
    """
    texts = len(model.text.parts or (model.text,))
    most = count = max(FEWEST, TOKENS // model.text.length, texts)
    while count >= texts:
        new = _following(model, count)
        if new:
            return HeldBack(new, unseen=True)
        count //= 2
    return HeldBack(_last(model.text, most), unseen=False)


def _following(model: CalibratedModel, count: int) -> tuple[tuple[int, ...], ...]:
    """Returns up to `count` windows after the job's own; none if a text is too short for them."""
    parts = model.text.parts or (model.text,)
    shares = divide(model.text.weights or (1.0,), count)
    found = [
        _after(model, text, part.tokens, share)
        for text, part, share in zip(texts_of(model.options.data), parts, shares, strict=True)
    ]
    return spread(found) if all(found) else ()


def _after(model: CalibratedModel, text: WeightedText, own: Windows, count: int) -> Windows:
    """Returns up to `count` windows of one text after the job's own."""
    try:
        longer = load_text(model.checkpoint, replace(model.options, data=text.path, samples=len(own) + count)).tokens
    except QuantryError:
        return ()
    return longer[len(own) :][:count] if _begins_with(longer, own) else ()


def _last(text: CalibrationText, count: int) -> Windows:
    """Returns the last windows of a text, or of each in a mixture; without those of gradients if there are more."""
    labels = text.labels or (0,) * len(text.tokens)
    places = range(len(labels))[gradient_windows(text) :] or range(len(labels))
    own = [[place for place in places if labels[place] == label] for label in range(max(labels) + 1)]
    shares = divide(text.weights or (1.0,), count)
    last = sorted(place for many, share in zip(own, shares, strict=True) for place in many[-share:])
    return tuple(text.tokens[place] for place in last)


def _begins_with(windows: Sequence[Sequence[int]], first: Sequence[Sequence[int]]) -> bool:
    return list(windows[: len(first)]) == list(first)
