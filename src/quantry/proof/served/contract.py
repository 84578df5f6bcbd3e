"""What every engine that scores an artefact offers, and what it returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from quantry.proof.divergence import Array, Positions, Scores
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


@dataclass(frozen=True, slots=True)
class ServedCaches:
    """An engine with some types of KV cache, each compared with its own 16-bit cache, window by window."""

    engine: str
    version: str
    positions: Mapping[str, list[Positions]]  # by type; the windows in their order
    notes: tuple[str, ...] = ()


class ScoringEngine(Protocol):
    """An engine that scores windows, compares caches and answers prompts."""

    def check(self) -> None:
        """Raises QuantryError if the engine is not installed; loads nothing."""

    def score(
        self, artefact: Path, windows: Sequence[Window], ids: Sequence[Array], *, progress: Progress | None = None
    ) -> Served:
        """Returns, for every scored position, the log-probabilities of `ids` and of the next token, and the top one.

        Raises QuantryError if the engine is not installed, cannot load the artefact or fails.
        """

    def compare_caches(
        self,
        artefact: Path,
        windows: Sequence[Window],
        base: str,
        caches: Sequence[str],
        *,
        progress: Progress | None = None,
    ) -> ServedCaches:
        """Compares the artefact with each of some types of KV cache to itself with the type `base`.

        Raises QuantryError as `score` does, and if the engine has no such cache for the model.
        """

    def generate(self, artefact: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Returns the greedy answer to every prompt, without the end token."""
