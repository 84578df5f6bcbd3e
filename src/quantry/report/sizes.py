"""Sizes and counts for people, the same everywhere: reports, plans, errors and the command line."""

from collections.abc import Iterable, Mapping

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def unit_of(most: float) -> tuple[int, str]:
    """Returns the unit of an axis that goes up to `most` bytes."""
    return next((size, unit) for size, unit in UNITS if most >= size or size == 1)


def human(count: float) -> str:
    """Formats bytes for people, in the largest unit of which they are at least a tenth: 1536 is '1.5 KiB'."""
    for size, unit in UNITS[:-1]:
        if count >= size / 10:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"


def alike(count: float, others: Iterable[float]) -> str:
    """Formats one of several sizes in the unit of the largest: 512 MiB are "0.50 GiB" beside "16.00 GiB"."""
    known = [count, *others]
    size, unit = unit_of(max(known))
    return f"{count / size:,.{1 if min(known) >= 10 * size else 2 if size > 1 else 0}f} {unit}"


def counted(number: int, what: str, several: str | None = None) -> str:
    """Writes a number with its noun: '1 file', '1,024 files', '2 passes' where `several` is 'passes'."""
    return f"{number:,} {what if number == 1 else several or what + 's'}"


def position_range(row: Mapping[str, int]) -> str:
    """Returns a bin of positions as people write it: 512-1k; `row` has its `begin` and its `end`."""
    return f"{_thousands(row['begin'])}-{_thousands(row['end'])}"


def _thousands(tokens: int) -> str:
    return f"{tokens >> 10}k" if tokens and tokens % 1024 == 0 else str(tokens)


def nats(value: float) -> str:
    """Formats a divergence; one that rounding errors have made negative is none."""
    return "0" if value < 1e-7 else f"{value:.3g}"


def short(value: float) -> str:
    """Formats a figure in four digits, and a large one without a power of ten: '12.35', '12,346'."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def percent(share: float, style: str = "") -> str:
    """Formats a share in whole percents: '42%'. One that is not quite nothing or all says so: '0.3%', '99.7%'.

    `style` is '+' for a sign.
    """
    if 0 < abs(share) < 0.01:
        return f"{100 * share:{style}.1g}%" if abs(share) >= 1e-6 else "0%"
    if 0.99 < share < 1:
        return f"{min(share, 0.999):{style}.1%}"
    return f"{share:{style}.0%}"


def duration(seconds: float) -> str:
    """Formats a time for people: '8 s', '3 min 20 s', '2 h 5 min'."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
