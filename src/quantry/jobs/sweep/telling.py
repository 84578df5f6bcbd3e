"""What is shown while a sweep goes on."""

from collections.abc import Callable

from quantry.jobs.sweep.table import Outcome
from quantry.types import Progress


class Telling:
    """Which artefact of how many, and how far it is."""

    def __init__(
        self, announce: Callable[[str], None] | None, progress: Progress | None, number: int, count: int, name: str
    ) -> None:
        self._announce, self._progress, self._number, self._count = announce, progress, number, count
        self._name = name
        self.say("")

    def say(self, words: str) -> None:
        if self._announce:
            self._announce(f"{self._number + 1} of {self._count}: {self._name} {words}".rstrip())

    def inner(self, what: str) -> Progress | None:
        """Progress of one job, as a share of it."""
        if self._progress is None:
            return None
        report = self._progress

        def tell(done: int, total: int, label: str) -> None:
            report(self._number, self._count, f"{self._name}: {what}, {done / total if total else 0:.0%}, {label}")

        return tell

    def end(self, row: Outcome) -> None:
        if row.problem:
            self.say(f"is left out: {row.problem}")
        if self._progress:
            self._progress(self._number + 1, self._count, self._name)
