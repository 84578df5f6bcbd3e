"""Cases side by side: each worker is a thread with a folder of its own, which starts the processes of its cases."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workers:
    """`count` workers below `folder`, which begin no case after `seconds`."""

    folder: Path
    count: int = 1
    seconds: float = float("inf")
    began: float = field(default_factory=time.monotonic)

    def each(self, tasks: Iterable[Task], work: Callable[[Task, Path], Result]) -> Iterator[Result]:
        """Yields what `work` returns for each task and a folder, in the order in which the cases end."""
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(self.count):
            free.put(self.folder / str(number))

        def one(task: Task) -> list[Result]:
            if time.monotonic() - self.began > self.seconds:
                return []
            place = free.get()
            try:
                return [work(task, place)]
            finally:
                free.put(place)

        with ThreadPoolExecutor(self.count) as pool:
            for done in as_completed([pool.submit(one, task) for task in tasks]):
                yield from done.result()


class Once:
    """Remembers what was computed for a name, and computes it once though many ask."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._known: dict[str, object] = {}
        self._guard = threading.Lock()

    def get(self, name: str, compute: Callable[[], Result]) -> Result:
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._known:
                self._known[name] = compute()
            return self._known[name]  # type: ignore[return-value]
