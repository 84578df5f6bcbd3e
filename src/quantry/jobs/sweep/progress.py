"""What a sweep shows while it runs."""

from collections.abc import Callable

from quantry.jobs.sweep.table import Outcome
from quantry.types import Progress


class JobProgress:
    """Reports one job of a sweep: its number, its name, and how far it is."""

    def __init__(
        self, announce: Callable[[str], None] | None, progress: Progress | None, number: int, count: int, name: str
    ) -> None:
        self._announce, self._progress, self._number, self._count = announce, progress, number, count
        self._name = name
        self.announce("")

    def announce(self, words: str) -> None:
        if self._announce:
            self._announce(f"{self._number + 1} of {self._count}: {self._name} {words}".rstrip())

    def of(self, step: str) -> Progress | None:
        """Returns a progress function for a step of the job, which shows its share."""
        report = self._progress
        if report is None:
            return None
        return lambda done, total, label: report(
            self._number, self._count, f"{self._name}: {step}, {done / total if total else 0:.0%}, {label}"
        )

    def end(self, row: Outcome) -> None:
        if row.problem:
            self.announce(f"is left out: {row.problem}")
        if self._progress:
            self._progress(self._number + 1, self._count, self._name)
