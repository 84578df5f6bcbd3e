"""What can be asked of a run."""

from dataclasses import dataclass
from pathlib import Path

QUESTION = "What color is the sky?"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run in addition to its model and folder; None leaves the choice to Quantry."""

    use: str | None = None
    budget: str | None = None  # a size for preset auto
    gpu: str | None = None  # another machine to plan for
    engine: str | None = None
    engine_python: str | Path | None = None
    context: int | None = None
    port: int | None = None  # 0 takes a free one
    text: str | Path | None = None  # to measure on
    windows: int = 16
    question: str = QUESTION
    device: str | None = None  # to compute on; a GPU if there is one

    @property
    def python(self) -> Path | None:
        """The python of the engine."""
        return Path(self.engine_python).expanduser() if self.engine_python else None


class DeclinedError(Exception):
    """The user answered no; nothing was written."""
