"""Which windows training holds out: some of every text, whatever order they come in."""

from collections.abc import Sequence


def held_out(labels: Sequence[int], every: int) -> list[int]:
    """Returns places to hold out: the first of `every` so many of each text; `labels` says whose window each is.

    A text with a single window is trained on, unless all are such.

    >>> held_out([0] * 9, 4), held_out([0, 0, 0, 1] * 3, 4)
    ([0, 4, 8], [0, 3, 5, 10])
    """
    texts = {label: [place for place, own in enumerate(labels) if own == label] for label in dict.fromkeys(labels)}
    several = [places for places in texts.values() if len(places) > 1]
    return sorted(place for places in several for place in places[::every]) or list(range(len(labels)))[::every]
