"""The reverse question: which well-known models run well on a machine, the most capable first.

A model counts as running well if one of a few usual presets fits without the host's memory, loses little, and answers
at a pace that people read along with. Capability is not measured here: models are ordered by their size, a mixture of
experts by the geometric mean of all its parameters and of those that a token uses, as is customary for comparing them
with dense models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

from quantry.devices.catalogue import parse
from quantry.errors import QuantryError
from quantry.models.attention import text_config
from quantry.models.experts import expert_count, experts_used
from quantry.planning.candidate import Candidate
from quantry.planning.candidates import find, least_bytes
from quantry.planning.models import KnownModel, known_models, open_model
from quantry.planning.ranking import rough_points
from quantry.planning.request import PlanOptions, Request, read_request
from quantry.planning.rules import find_use, quality
from quantry.planning.speed.throughput import speed
from quantry.quantizing.recipe import presets

FEW = ("fp8-dynamic", "w8a8", "w4a16-gptq", "gguf-q8_0", "gguf-q5_k_m", "gguf-q4_k_m")
PACE = 10.0  # tokens a second for one user: a little faster than people read
LEAST_QUALITY = 6.0  # points of rules.toml: "good" and better


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A model that runs well. Field names are the JSON names."""

    model: str
    repo: str
    parameters: float  # 10^9
    preset: str
    engine: str
    quality: str
    per_device: int
    tokens_per_s: float  # of one user
    first_token_s: float


def suggest(gpu: str | None = None, use: str | None = None, most: int = 12) -> tuple[Suggestion, ...]:
    """Returns up to `most` models that run well on the machine that `gpu` describes, or on this one.

    Raises QuantryError if the machine or the use is unknown.

    Example: `suggest("RTX 4090", use="local")[0].model`.
    """
    if gpu is not None:
        parse(gpu)  # raises for an unknown machine
    options = PlanOptions(gpu, use)
    rows = sorted(known_models().values(), key=_capability, reverse=True)
    running: list[Suggestion] = []
    pictures = find_use(use).name == "vlm"
    for row in rows:
        if len(running) == most:
            break
        if row.vision != pictures:
            continue
        best = _best(row, options)
        if best:
            running.append(best)
    return tuple(running)


def _capability(row: KnownModel) -> float:
    text = text_config(row.config)
    experts = expert_count(text)
    used = experts_used(text) / experts if experts else 1.0
    return row.published * sqrt(max(used, 0.05)) if experts else float(row.published)


def _best(row: KnownModel, options: PlanOptions) -> Suggestion | None:
    try:
        request = read_request(row.name, open_model(row.name), options)
    except QuantryError:
        return None  # the use does not suit the model
    names = (request.stored.preset.name,) if request.stored else FEW
    if min(least_bytes(request, presets()[name]) for name in names) > request.hardware.usable:
        return None
    rows = sorted(_paced(request, names), key=lambda pair: -pair[0])
    return rows[0][1] if rows else None


def _paced(request: Request, names: tuple[str, ...]) -> Iterator[tuple[float, Suggestion]]:
    """Yields what runs well with its points: those of the plan, then pace."""
    candidates, _ = find(request, names, offload=False)
    for candidate in candidates:
        facts = {**request.facts, **candidate.facts, "sixteen_fits": False}
        expected = quality(facts)
        try:
            predicted = speed(candidate.deployment, candidate.workload, request.hardware.cpu)
        except QuantryError:
            continue
        pace = predicted.decode_tokens_per_s / candidate.workload.concurrency
        if pace >= PACE and (expected.points >= LEAST_QUALITY or request.stored):
            points = rough_points(request, candidate) + min(pace, 60) / 30
            yield points, _suggestion(request, candidate, expected.name, predicted, pace)


def _suggestion(request: Request, candidate: Candidate, expected: str, predicted: Any, pace: float) -> Suggestion:
    return Suggestion(
        model=request.checkpoint.source,
        repo=request.model,
        parameters=round(request.parameters / 1e9, 2),
        preset="as-is" if request.stored else candidate.preset.name,
        engine=candidate.engine,
        quality="as published" if request.stored else expected,
        per_device=candidate.footprint.per_device,
        tokens_per_s=round(pace, 1),
        first_token_s=round(predicted.first_token_s, 3),
    )
