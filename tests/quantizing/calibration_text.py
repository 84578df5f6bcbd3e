"""A text for calibration, and statistics of a model on it."""

from typing import Any

import torch

from linear_inputs import WINDOWS
from quantry.quantizing.calibration.observe import ObservedBlock
from quantry.quantizing.calibration.resumable_walk import ResumableWalk
from quantry.quantizing.calibration.store import Statistics, Store
from quantry.quantizing.calibration.text import CalibrationText


def text(windows: Any = WINDOWS) -> CalibrationText:
    return CalibrationText(tuple(map(tuple, windows)), "text.txt", "text", 6, 0, False, None, False)


def statistics(
    source: Any,
    windows: Any = WINDOWS,
    *,
    store: Store | None = None,
    identity: str | None = None,
    histogram: bool = False,
    **walk: Any,
) -> Statistics:
    """Statistics of a source of weights; `walk` has other fields of its walk."""
    walked = text(windows) if not isinstance(windows, CalibrationText) else windows
    way = ResumableWalk(source=source, windows=walked.tokens, **{"device": torch.device("cpu"), **walk})
    return Statistics(way, walked, store, identity, histogram)


def same(one: ObservedBlock, other: ObservedBlock) -> bool:
    """Whether two blocks were seen bit for bit alike."""
    assert one.groups == other.groups
    assert one.pools == other.pools
    assert list(one.stats) == list(other.stats)
    assert one.heads is not None
    assert other.heads is not None
    pairs = [(one.heads.keys, other.heads.keys), (one.heads.values, other.heads.values)]
    for group, stats in one.stats.items():
        twin = other.stats[group]
        assert stats.tokens == twin.tokens
        for part in ("gram", "absmax", "mean_abs", "mean_square", "histogram"):
            mine, others = getattr(stats, part), getattr(twin, part)
            assert (mine is None) == (others is None)
            pairs += [(mine, others)] if mine is not None else []
    return all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in pairs)
