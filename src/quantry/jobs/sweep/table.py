"""The table of a sweep: a row for each artefact, which of them no other one beats, and the report of all."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from typing import Any

from quantry import __version__
from quantry.report import Content, Row


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the table: an artefact, or another tool's file. Names are the JSON names.

    `kl` is of the decoded bytes, and so are the figures after it unless an engine was asked; `problem` says why some
    are not there.
    """

    name: str
    spec: str  # as it was asked for
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
    frontier: bool = False  # no other one is smaller or as small, and better
    problem: str | None = None

    @property
    def judged(self) -> float | None:
        """The KL that counts: as served, where an engine was asked."""
        return self.kl if self.served_kl is None else self.served_kl


@dataclass(frozen=True, slots=True)
class Sweep:
    """What came of a sweep, in the order in which it was asked for. Names are the JSON names."""

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
        """Whether every artefact and every peer could be made and measured."""
        return all(row.problem is None for row in self.rows)

    def ranked(self) -> tuple[Outcome, ...]:
        """The rows from the worst KL to the best; those without one come last."""
        return tuple(sorted(self.rows, key=lambda row: (row.judged is None, -(row.judged or 0.0), row.name)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def marked(rows: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The rows, with those marked that no other one beats: as small or smaller, and with as low a KL or a lower one."""
    spots = {(row.bytes, row.judged) for row in rows if row.bytes is not None and row.judged is not None}

    def best(own: tuple[int | None, float | None]) -> bool:
        """Equals do not beat each other."""
        return own in spots and not any(one != own and one[0] <= own[0] and one[1] <= own[1] for one in spots)

    return tuple(replace(row, frontier=best((row.bytes, row.judged))) for row in rows)


def page(done: Sweep, provenance: Mapping[str, Any]) -> Content:
    """The report of a sweep."""
    problems = tuple(f"{row.name}: {row.problem}" for row in done.rows if row.problem)
    return Content(
        title=f"{done.model} in {len(done.rows)} ways",
        model=done.model,
        rows=tuple(_row(row) for row in done.ranked() if row.bytes is not None),
        noise_floor=done.noise_floor,
        reference_perplexity=done.reference_perplexity,
        gate=done.gate,
        notes=(*problems, *done.notes),
        versions={"quantry": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        provenance={"text": dict(done.text), "artefacts": provenance},
    )


def _row(one: Outcome) -> Row:
    names = {each.name for each in fields(Row)} & {each.name for each in fields(Outcome)}
    return Row(**{name: getattr(one, name) for name in names})
