"""Counts, times and divergences as people read them."""

import pytest

from quantry.report.sizes import counted, duration, nats


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (599, "9 min 59 s"),
        (601, "10 min"), (3599, "59 min"), (3600, "1 h"), (7500, "2 h 5 min"),
    ],
)  # fmt: skip
def test_times(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_counts_have_their_nouns() -> None:
    assert [counted(number, "file") for number in (0, 1, 2, 1024)] == ["0 files", "1 file", "2 files", "1,024 files"]
    assert counted(2, "entry", "entries") == "2 entries"


def test_a_divergence_is_never_negative() -> None:
    assert [nats(value) for value in (-9e-10, 0.0, 0.01234)] == ["0", "0", "0.0123"]
