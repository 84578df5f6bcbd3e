"""Windows of a calibration text that nothing was calibrated on, to measure mixtures on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantry.errors import QuantryError
from quantry.jobs.auto.calibrated_model import CalibratedModel
from quantry.jobs.auto.damage import gradient_windows
from quantry.quantizing.calibration.calibrator import load_text
from quantry.quantizing.calibration.text import SAMPLES

TOKENS = 1 << 12  # to measure on: the KL of 4,096 tokens is known to about 5 %
FEWEST = 2  # windows


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Windows of one length; `unseen` says that nothing at all was calibrated on them."""

    windows: tuple[tuple[int, ...], ...]
    unseen: bool


def held_back(model: CalibratedModel) -> HeldBack:
    """Returns the windows that follow those of the job in its text.

    A text that ends there gives the last of the job's own windows, if there are some without gradients.
    """
    own = model.text.tokens
    count = max(FEWEST, TOKENS // model.text.length)
    while count:
        new = _following(model, count)
        if new:
            return HeldBack(new, unseen=True)
        count //= 2
    without = own[gradient_windows(model.text) :] or own
    return HeldBack(without[-max(FEWEST, TOKENS // model.text.length) :], unseen=False)


def _following(model: CalibratedModel, count: int) -> tuple[tuple[int, ...], ...]:
    """Returns up to `count` windows after the job's own; none if the text is too short for them."""
    own, asked = model.text.tokens, model.options.samples
    samples = max(SAMPLES if asked is None else asked, len(own)) if len(own) else 0
    try:
        longer = load_text(model.checkpoint, replace(model.options, samples=samples + count)).tokens
    except QuantryError:
        return ()
    return longer[len(own) :][:count] if _begins_with(longer, own) else ()


def _begins_with(windows: Sequence[Sequence[int]], first: Sequence[Sequence[int]]) -> bool:
    return list(windows[: len(first)]) == list(first)
