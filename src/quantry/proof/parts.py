"""The windows of a proof, part by part: all at once, or as many as its time allows and its verdict needs."""

from collections.abc import Callable
from time import monotonic

from quantry.proof.measure import Measurements, Part
from quantry.proof.reference import Reference
from quantry.report.sizes import duration

FIRST = 2  # windows of the first part; every other has as many as there were before it
ENOUGH = 8  # windows before an interval may end the measurement: those of fewer are too narrow as often as not

Measure = Callable[[range, Reference | None], Part]  # takes places of windows, and the reference of the first part


def measure_parts(
    windows: int,
    seconds: float | None,
    measure: Measure,
    is_decided: Callable[[Measurements], bool],
    *,
    first: int = FIRST,
    started: float | None = None,
) -> tuple[Measurements, tuple[str, ...]]:
    """Measures windows, all without a limit of `seconds`; returns a note too if some were left out.

    With a limit, parts are added while the next one should end in time and the verdict is not decided. The first is
    always measured, and has `first` windows: more where an engine has to be started for each part. The time counts from
    `started`, of the clock `monotonic`, or from now.
    """
    if seconds is None:
        return Measurements((measure(range(windows), None),)), ()
    began, done = monotonic() if started is None else started, min(first, windows)
    parts = [measure(range(done), None)]
    while done < windows:
        measured, share = Measurements(tuple(parts)), f"{done} of {windows} windows were measured"
        if done >= ENOUGH and is_decided(measured):
            return measured, (f"{share}: no interval reaches over a limit, so the verdict is clear",)
        left = seconds - (monotonic() - began)
        count = _fitting(min(done, windows - done), _pace(parts[-1]), left)
        if not count:
            return measured, (f"{share} in the {duration(seconds)} of --proof-time",)
        parts.append(measure(range(done, done + count), parts[0].reference))
        done += count
    return Measurements(tuple(parts)), ()


def _pace(part: Part) -> float:
    """Returns the seconds that a window took: its run in the 16-bit model, and in the artefact."""
    return (part.reference.run_seconds + part.seconds) / len(part.reference.windows)


def _fitting(count: int, pace: float, left: float) -> int:
    """Returns how many windows fit into the seconds that are left: `count`, or half of it as often as needed."""
    while count and count * pace > left:
        count //= 2
    return count
