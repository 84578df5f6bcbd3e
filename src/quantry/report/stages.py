"""One progress for work in stages."""

from collections.abc import Callable, Mapping

from quantry.types import Progress


def stages(progress: Progress | None, costs: Mapping[str, float]) -> dict[str, Progress | None]:
    """Returns a progress for each of some stages that follow each other; together they make one from 0 to 1000."""
    names, total = list(costs), sum(costs.values())
    before = {name: sum(costs[earlier] for earlier in names[:place]) for place, name in enumerate(names)}
    return {name: _stage(progress, before[name] / total, costs[name] / total) for name in names}


def named(progress: Progress | None, words: str) -> Progress | None:
    """Returns a progress that says more."""
    return None if progress is None else lambda done, total, label: progress(done, total, f"{words}: {label}")


def of_all(progress: Progress | None, places: range, count: int, used: Callable[[], float]) -> Progress | None:
    """Returns a progress for some places that shows how far all are, or the share of the time `used` if that is more.

    It counts to 100.
    """
    if progress is None:
        return None
    return lambda done, total, label: progress(
        round(100 * min(1, max(used(), (places.start + len(places) * done / total) / count))), 100, label
    )


def _stage(progress: Progress | None, before: float, share: float) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total, label: progress(round(1000 * (before + share * done / max(1, total))), 1000, label)
