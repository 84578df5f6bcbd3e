"""Sizes in words."""

UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def unit_of(most: float) -> tuple[int, str]:
    return next((size, unit) for size, unit in UNITS if most >= size or size == 1)


def human(count: float) -> str:
    """Bytes for people."""
    size, unit = unit_of(count)
    return f"{count:,.0f} bytes" if size == 1 else f"{count / size:,.{1 if count >= 100 * size else 2}f} {unit}"
