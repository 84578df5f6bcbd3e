"""A measured number with its confidence interval."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float
