"""The points of candidates, and their order: quality, speed and room by the weights of the use, engine and rules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2

from quantry.engines.contract.catalogue import engine_facts
from quantry.errors import QuantryError
from quantry.planning.candidates import Candidate, Refused
from quantry.planning.facts import Facts
from quantry.planning.request import Request
from quantry.planning.rules import Quality, judge, quality
from quantry.planning.speed.throughput import Prediction, speed

SHOWN = 12  # options of a plan
HALVING = 3.0  # points for half the speed
AMPLE = 0.25  # share of the memory that is room enough


@dataclass(frozen=True)
class Ranked:
    """A candidate with its speed and its points."""

    candidate: Candidate
    facts: Facts
    speed: Prediction  # of one copy
    quality: Quality
    pace: float  # relative to the fastest candidate, at most 1
    request: Request

    @cached_property
    def points(self) -> dict[str, float]:
        use, candidate = self.request.use, self.candidate
        free = 1 - candidate.footprint.per_device / candidate.limit
        parts = {
            "quality": use.quality * self.quality.points,
            "speed": use.speed * max(0.0, 10 + HALVING * log2(self.pace)),
            "room": use.room * 10 * min(1.0, free / AMPLE),
            "engine": engine_facts(candidate.engine).plan.points,
            "rules": judge(self.facts).points,
        }
        return {name: round(value, 2) for name, value in parts.items()}

    @property
    def total(self) -> float:
        return sum(self.points.values())

    @property
    def all_copies(self) -> Prediction:
        """The speed of all copies together."""
        return replace(
            self.speed,
            decode_tokens_per_s=self.speed.decode_tokens_per_s * self.candidate.replicas,
            prompts_tokens_per_s=self.speed.prompts_tokens_per_s * self.candidate.replicas,
        )


def rank(request: Request, candidates: Sequence[Candidate]) -> tuple[list[Ranked], list[Refused]]:
    """Returns candidates by their points, the best layout of each preset and engine, and those of unknown speed."""
    timed: list[tuple[Candidate, Prediction]] = []
    refused: list[Refused] = []
    for candidate in candidates:
        try:
            timed.append((candidate, speed(candidate.deployment, candidate.workload, request.hardware.cpu)))
        except QuantryError as error:
            refused.append(Refused(candidate.preset.name, candidate.engine, error.problem, error.fix))
    sixteen_fits = any(is_sixteen_bit(candidate) and not candidate.offloaded for candidate, _ in timed)
    fastest = max((_pace(request, *pair) for pair in timed), default=1.0)
    ranked = []
    for candidate, predicted in timed:
        facts = {**request.facts, **candidate.facts, "sixteen_fits": sixteen_fits}
        pace = _pace(request, candidate, predicted) / fastest
        ranked.append(Ranked(candidate, facts, predicted, quality(facts), pace, request))
    worst_first = sorted(ranked, key=lambda row: row.total)
    distinct = {(row.candidate.preset.name, row.candidate.engine): row for row in worst_first}  # the last is the best
    return sorted(distinct.values(), key=lambda row: -row.total)[:SHOWN], refused


def is_sixteen_bit(candidate: Candidate) -> bool:
    """Returns True if the candidate rounds nothing."""
    return candidate.preset.scheme.weight.is_cast


def _pace(request: Request, candidate: Candidate, predicted: Prediction) -> float:
    if request.use.measure == "first":
        return 1 / predicted.first_token_s
    return predicted.decode_tokens_per_s * candidate.replicas


def rough_points(request: Request, candidate: Candidate) -> float:
    """Returns the points of a candidate without its speed."""
    facts = {**request.facts, **candidate.facts, "sixteen_fits": False}
    return quality(facts).points + engine_facts(candidate.engine).plan.points + judge(facts).points
