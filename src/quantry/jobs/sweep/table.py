"""The table of a sweep: one row per artefact, the frontier of the best ones, and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from typing import Any

from quantry import __version__
from quantry.report import Content, FileRow
from quantry.report.sizes import counted


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table: an artefact, or another tool's file. Field names are the JSON names.

    `kl` is of the decoded bytes; so are the figures after it, unless an engine was measured. `problem` says why figures
    are missing.
    """

    name: str
    spec: str  # as the user wrote it
    peer: bool = False
    format: str | None = None
    bytes: int | None = None
    bits_per_weight: float | None = None
    kl: float | None = None
    kl_interval: tuple[float, float] | None = None
    engine: str | None = None
    served_kl: float | None = None
    served_kl_interval: tuple[float, float] | None = None
    top1: float | None = None
    top1_interval: tuple[float, float] | None = None
    perplexity: float | None = None
    perplexity_interval: tuple[float, float] | None = None
    verdict: str | None = None
    frontier: bool = False  # no other row is as small and as good
    problem: str | None = None

    @property
    def judged(self) -> float | None:
        """The KL that counts: as served if an engine was measured, else of the decoded bytes."""
        return self.kl if self.served_kl is None else self.served_kl


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of a sweep, in the order of the request. Field names are the JSON names."""

    model: str
    path: str
    gate: str
    text: Mapping[str, Any]  # name, windows, length
    rows: tuple[Outcome, ...]
    reference_perplexity: float | None = None
    noise_floor: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if every artefact and every peer was made and measured."""
        return all(row.problem is None for row in self.rows)

    def ranked(self) -> tuple[Outcome, ...]:
        """Returns the rows from the worst KL to the best; those without one come last."""
        return tuple(sorted(self.rows, key=lambda row: (row.judged is None, -(row.judged or 0.0), row.name)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def mark_frontier(rows: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Marks the rows that no other row beats in size or KL without being worse in the other; equals do not beat."""
    points = {(row.bytes, row.judged) for row in rows if row.bytes is not None and row.judged is not None}

    def is_best(point: tuple[int | None, float | None]) -> bool:
        others = (other for other in points if other != point)
        return point in points and not any(other[0] <= point[0] and other[1] <= point[1] for other in others)

    return tuple(replace(row, frontier=is_best((row.bytes, row.judged))) for row in rows)


def report_content(result: Sweep, provenance: Mapping[str, Any]) -> Content:
    """Returns the content of the report."""
    problems = tuple(f"{row.name}: {row.problem}" for row in result.rows if row.problem)
    return Content(
        title=f"{result.model} in {counted(len(result.rows), 'way')}",
        model=result.model,
        rows=tuple(_report_row(row) for row in result.ranked() if row.bytes is not None),
        noise_floor=result.noise_floor,
        reference_perplexity=result.reference_perplexity,
        gate=result.gate,
        notes=(*problems, *result.notes),
        versions={"quantry": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        provenance={"text": dict(result.text), "artefacts": provenance},
    )


def _report_row(row: Outcome) -> FileRow:
    names = {field.name for field in fields(FileRow)} & {field.name for field in fields(Outcome)}
    return FileRow(**{name: getattr(row, name) for name in names})
