"""What every engine that scores an artefact offers, and what it returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from quantry.proof.divergence import Array, Scores
from quantry.proof.text import Window
from quantry.types import Progress


@dataclass(frozen=True, slots=True)
class Served:
    """An engine's scores of all windows, in their order, and the bytes that it reports."""

    engine: str
    version: str
    scores: list[Scores]
    memory: Mapping[str, int] = field(default_factory=dict)  # weights, kv_cache, compute, as far as it reports them
    notes: tuple[str, ...] = ()


class ScoringEngine(Protocol):
    """An engine that scores windows and answers prompts."""

    def check(self) -> None:
        """Raises QuantryError if the engine is not installed; loads nothing."""

    def score(
        self, artefact: Path, windows: Sequence[Window], ids: Sequence[Array], *, progress: Progress | None = None
    ) -> Served:
        """Returns, for every scored position, the log-probabilities of `ids` and of the next token, and the top one.

        Raises QuantryError if the engine is not installed, cannot load the artefact or fails.
        """

    def generate(self, artefact: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Returns the greedy answer to every prompt, without the end token."""
