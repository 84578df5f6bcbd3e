"""Falls back to less memory when a GPU runs out, and remembers where that happened."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from quantry.errors import QuantryError

T = TypeVar("T")


class LowMemory:
    """Runs actions; after the first one that runs out of memory it calls `lighten` and tries again, `on` from then."""

    def __init__(self, on: bool, lighten: Callable[[int], None]) -> None:
        self.on, self._lighten = on, lighten

    def run(self, block: int, action: Callable[[], T]) -> T:
        """Returns the action's result. Raises QuantryError if block `block` does not fit in less memory either."""
        if not self.on:
            with suppress(torch.OutOfMemoryError):  # what the action held is freed with it
                return action()
            self.switch_on(block)
        try:
            return action()
        except torch.OutOfMemoryError as error:
            raise QuantryError(
                f"the device has no room for block {block}, in the low-memory mode either",
                fix="use --device cpu, a larger GPU, or a shorter --length",
            ) from error

    def switch_on(self, block: int) -> None:
        """Goes on in less memory from block `block`."""
        self.on = True
        self._lighten(block)
