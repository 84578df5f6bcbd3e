"""Progress bars on standard error, so that standard output stays free for results."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from quantry.types import Progress

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

# Both bars yield a function to report with, or None if `quiet` or if standard error is no terminal.


def bar(quiet: bool = False) -> AbstractContextManager[Progress | None]:
    """Shows bytes done of bytes in all, with the speed and the time left."""
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    return _shown(quiet, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


def steps(quiet: bool = False) -> AbstractContextManager[Progress | None]:
    """Shows how many of how many steps are done, with the time they took."""
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    return _shown(quiet, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


@contextmanager
def _shown(quiet: bool, *columns: "ProgressColumn") -> Iterator[Progress | None]:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TextColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Bar(*columns, TextColumn("{task.description}"), console=console, transient=True) as shown:
        task = shown.add_task("")

        def report(done: int, total: int, label: str) -> None:
            shown.update(task, completed=done, total=total, description=label)

        yield report
