"""The Python file of an engine, imported on demand."""

from collections.abc import Iterable
from typing import Protocol, cast

from quantry import registry
from quantry.engines.contract.boot_log import Facts
from quantry.engines.contract.catalogue import ROOM, engine_facts
from quantry.engines.contract.command import Command, Setting
from quantry.engines.contract.options import Serving


class Adapter(Protocol):
    """What an engine's Python file offers."""

    def settings(self, serving: Serving) -> list[Setting]:
        """Returns every flag with its value and its reason."""

    def command(self, serving: Serving) -> Command:
        """Returns what starts the engine; raises RecipeError for what the engine does not have."""

    def explain(self, serving: Serving) -> list[tuple[str, str]]:
        """Returns the command as rows of (words, reason)."""

    def facts(self, lines: Iterable[str]) -> Facts:
        """Reads the boot log."""


def adapter(name: str) -> Adapter:
    """Imports the file of an engine by the engine's own name, such as llama.cpp."""
    return cast(Adapter, registry.load(ROOM, engine_facts(name).plugin))
