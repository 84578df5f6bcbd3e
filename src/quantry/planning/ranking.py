"""The points of candidates, and their order: quality, speed and room by the weights of the use, engine and rules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2

from quantry.engines.contract.catalogue import engine_facts
from quantry.errors import QuantryError
from quantry.planning.candidate import Candidate, Refused, is_published
from quantry.planning.facts import Facts
from quantry.planning.request import Request
from quantry.planning.rules import Quality, judge, quality
from quantry.planning.speed.throughput import Prediction, speed

SHOWN = 12  # options of a plan
HALVING = 3.0  # points for half the speed
AS_PUBLISHED = Quality("as published", 10.0)  # of a model that its makers quantized
FASTER = 1.02  # times the speed that counts as faster
SAME_QUALITY = 0.05  # points
GOOD = 7.0  # points of quality below which holding more sequences is no reason
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
    def holds_limits(self) -> bool:
        """True if the limits of the request hold at the planned load."""
        goals = self.request.goals
        late = goals.ttft is not None and self.speed.first_token_s > goals.ttft
        return not late and (goals.tpot is None or self.speed.step_s <= goals.tpot)

    @property
    def carries(self) -> bool:
        """True if as many sequences are served as the user asked for, without a poor quality."""
        return not self.request.exact or (
            self.candidate.sequences >= self.request.workload.concurrency and self.quality.points >= GOOD
        )

    def beats(self, other: "Ranked") -> bool:
        """Returns True if this has the same quality class or a better one, and is faster in both phases."""
        mine, theirs = self.all_copies, other.all_copies
        return (
            self.quality.points >= other.quality.points - SAME_QUALITY
            and mine.decode_tokens_per_s > FASTER * theirs.decode_tokens_per_s
            and mine.first_token_s <= theirs.first_token_s
            and self.served >= other.served
        )

    @property
    def served(self) -> int:
        """Sequences at once, of those that are asked for."""
        return min(self.candidate.sequences, self.request.workload.concurrency)

    @property
    def all_copies(self) -> Prediction:
        """The speed of all copies together."""
        return replace(
            self.speed,
            decode_tokens_per_s=self.speed.decode_tokens_per_s * _busy_copies(self.request, self.candidate),
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
        expected = AS_PUBLISHED if is_published(request, candidate) else quality(facts)
        ranked.append(Ranked(candidate, facts, predicted, expected, pace, request))
    distinct: dict[tuple[str, str], Ranked] = {}
    for row in sorted(_fastest_layouts(ranked), key=lambda row: (row.holds_limits, row.carries, row.total)):
        distinct[row.candidate.preset.name, row.candidate.engine] = row  # the last is the best
    ordered = sorted(distinct.values(), key=lambda row: (not row.holds_limits, not row.carries, -row.total))
    return _shown(_undominated_first(ordered)), refused


def _shown(ordered: list[Ranked]) -> list[Ranked]:
    """Returns the first rows; the fastest of all is always among them."""
    fastest = max(ordered, key=lambda row: row.all_copies.decode_tokens_per_s, default=None)
    shown = ordered[:SHOWN]
    return shown if fastest is None or fastest in shown else [*shown[:-1], fastest]


def _fastest_layouts(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Returns the fastest layout of each preset, engine and cache."""
    best: dict[tuple[str, str, str], Ranked] = {}
    for row in ranked:
        key = (row.candidate.preset.name, row.candidate.engine, row.candidate.deployment.kv)
        if key not in best or _rank_of(row) > _rank_of(best[key]):
            best[key] = row
    return list(best.values())


def _rank_of(row: Ranked) -> tuple[bool, float, int, int]:
    return row.holds_limits, row.pace, row.served, -row.candidate.devices


def _undominated_first(ordered: list[Ranked]) -> list[Ranked]:
    """Puts the first row that no other beats before those that one does."""
    first = next((row for row in ordered if not any(other.beats(row) for other in ordered)), None)
    return ordered if first is None else [first, *(row for row in ordered if row is not first)]


def is_sixteen_bit(candidate: Candidate) -> bool:
    """Returns True if the candidate rounds nothing."""
    return candidate.preset.scheme.weight.is_cast


def _pace(request: Request, candidate: Candidate, predicted: Prediction) -> float:
    if request.use.measure == "answer":
        return 1 / (predicted.first_token_s + request.workload.answer * predicted.step_s)
    return predicted.decode_tokens_per_s * _busy_copies(request, candidate)


def _busy_copies(request: Request, candidate: Candidate) -> float:
    """Returns the copies that the load keeps busy: the last has fewer sequences where these are not divided evenly."""
    return candidate.replicas * min(1.0, request.workload.concurrency / candidate.sequences)


def rough_points(request: Request, candidate: Candidate) -> float:
    """Returns the points of a candidate without its speed."""
    facts = {**request.facts, **candidate.facts, "sixteen_fits": False}
    return quality(facts).points + engine_facts(candidate.engine).plan.points + judge(facts).points
