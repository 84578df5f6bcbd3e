"""What an artefact lost on each of several texts, and if the gate would hold there alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantry.proof import gate as gates
from quantry.proof.divergence import Divergence
from quantry.proof.gate import Finding, Number
from quantry.proof.measure import Measurements

FIGURES = ("kl", "kl_median", "kl_p99", "top1", "perplexity")
GATED = ("kl", "top1", "perplexity_ratio")

Judge = Callable[[Mapping[str, Number]], tuple[Finding, ...]]


@dataclass(frozen=True, slots=True)
class Domains:
    """Several texts of one proof: `labels` has the number of the text of each window. None if there is one text."""

    names: tuple[str, ...]
    labels: tuple[int, ...]

    def judged(self, measured: Measurements, judge: Judge) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the figures of each text as JSON, and a finding on each: worse than the gate is a warning."""
        if len(self.names) == 1:
            return [], []
        domains, findings = [], []
        for number, name in enumerate(self.names):
            decoded, served = measured.figures_of(self.labels, number)
            failed = [row for row in judge(_numbers(measured, decoded, served)) if not (row.ok or row.warning)]
            domains.append(_domain(name, decoded, served, failed))
            findings.append(_finding(name, served or decoded, failed))
        return domains, findings


def gated(figures: Divergence, prefix: str = "") -> dict[str, Number]:
    """Returns the figures that the gate judges."""
    return {f"{prefix}{name}": getattr(figures, name) for name in GATED}


def _numbers(measured: Measurements, decoded: Divergence, served: Divergence | None) -> dict[str, Number]:
    numbers = {**gated(decoded), "noise_floor": measured.reference.noise_floor}
    return numbers | gated(served, gates.SERVED) if served else numbers


def _domain(name: str, decoded: Divergence, served: Divergence | None, failed: Sequence[Finding]) -> dict[str, Any]:
    return {
        "name": name,
        "windows": decoded.windows,
        "positions": decoded.positions,
        "verdict": "fail" if failed else "pass",
        **_figures(decoded),
        "reference_perplexity": decoded.reference_perplexity.value,
        "served": _figures(served) if served else None,
    }


def _figures(figures: Divergence) -> dict[str, Any]:
    return {**figures.values(FIGURES), "intervals": figures.intervals(FIGURES)}


def _finding(name: str, figures: Divergence, failed: Sequence[Finding]) -> dict[str, Any]:
    worse = f"{name} alone is worse than the gate: {'; '.join(row.words for row in failed)}"
    return {
        "name": "domain",
        "rule": name,
        "value": figures.kl.value,
        "ok": not failed,
        "warning": True,
        "words": worse if failed else f"{name} alone keeps the gate: mean KL {figures.kl.value:.4f}",
        "fix": "calibrate on more of this text (--data), or use more bits" if failed else "",
    }
