"""Speculative decoding beside an option: what could guess ahead, how much faster that is, and what it takes.

`guesses` tokens are guessed, then the model checks them all in one step. If each guess is right with probability
`right` as long as those before it were, a step yields `1 + right + right^2 + ...` tokens. Checking costs more the more
sequences share a step, so the gain is that of the planned load; a way that gains less than 5 % there is not named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quantry.engines.contract.catalogue import engine_facts
from quantry.engines.contract.options import EAGLE, MTP, Serving
from quantry.formats.gguf import NAME as GGUF
from quantry.models.attention import text_config
from quantry.models.parts import part_of
from quantry.planning.candidate import Candidate
from quantry.planning.commands import PlannedArtefact
from quantry.planning.memory.footprint import footprint
from quantry.planning.memory.weights import stored
from quantry.planning.models import KnownModel, find_model, known_models, open_model
from quantry.planning.request import Request
from quantry.planning.speed.throughput import checking_seconds, one_layer_seconds, speed
from quantry.quantizing.recipe import Recipe, preset
from quantry.storage import read_data

PAYS = 1.05  # times the speed from which a way is named
SMALLER = 8  # times fewer parameters that a draft has at the least
HALF = 2  # bytes of a 16-bit weight
EAGLE_VOCABULARY = 32_000  # tokens that such a head guesses among


@dataclass(frozen=True, slots=True)
class Speculation:
    """A way to guess ahead; `times` is the speed of answers relative to none, at the planned load."""

    method: str
    model: str | None  # that guesses; None if the model itself or its prompt does
    guesses: int
    right: float  # share of the guesses, as assumed
    times: float
    bytes: int  # more memory, on all devices of a copy
    only: str  # the texts for which that holds


def tokens_of_a_step(guesses: int, right: float) -> float:
    """Returns the mean number of tokens that a checked step yields."""
    return sum(right**number for number in range(guesses + 1))


def speculations(request: Request, candidate: Candidate) -> tuple[Speculation, ...]:
    """Returns the ways that pay for a candidate and still fit, the fastest first; lookup, for few texts, last."""
    deployment = candidate.deployment
    if candidate.offloaded or deployment.pipeline_parallel > 1:
        return ()
    known = find_model(str(request.checkpoint.metadata.get("shape", request.model)))
    ways = engine_facts(candidate.engine).plan.speculation
    tried = (way for name in ways for way in _tried(name, request, candidate, known))
    room = (candidate.limit - candidate.footprint.per_device) * deployment.devices
    paying = [way for way in tried if way.times >= PAYS and way.bytes <= room]
    return tuple(sorted(paying, key=lambda way: (way.method == "lookup", -way.times)))


def with_speculation(serving: Serving, way: Speculation) -> Serving:
    """Returns the serving with the options of a way."""
    if way.method == "lookup":
        return replace(serving, lookup=True, draft_tokens=way.guesses)
    drafter = way.method if way.method in (MTP, EAGLE) else serving.drafter
    draft = (
        PlannedArtefact(way.model, preset("gguf-q8_0"), GGUF).served if way.model and serving.format == GGUF else None
    )
    return replace(serving, drafter=drafter, draft=draft or way.model, draft_tokens=way.guesses)


def _tried(name: str, request: Request, candidate: Candidate, known: KnownModel | None) -> Iterator[Speculation]:
    if name == "lookup":
        yield _way(name, candidate, None, 0.0, 0)
    elif name == MTP:
        heads = _mtp_bytes(request, candidate)
        if heads:
            yield _way(name, candidate, None, one_layer_seconds(candidate.deployment, candidate.workload), heads)
    elif name == EAGLE and (head := _table()["heads"].get(request.model.rpartition("/")[2])):
        each = one_layer_seconds(candidate.deployment, candidate.workload)
        yield _way(name, candidate, head, each, _eagle_bytes(request))
    elif name == "draft" and known:
        yield from _draft(request, candidate, known)


def _draft(request: Request, candidate: Candidate, known: KnownModel) -> Iterator[Speculation]:
    """Yields the smallest model of the family, by the same publisher, that has the same tokens."""
    spare = engine_facts(candidate.engine).plan.spare_vocabulary
    alike = [model for model in known_models().values() if _drafts_for(model, known, spare)]
    if not alike:
        return
    small = min(alike, key=lambda model: model.published)
    chosen = preset("gguf-q8_0" if candidate.recipe.format == GGUF else "bf16")
    deployment = replace(
        candidate.deployment,
        checkpoint=open_model(small.name),
        recipe=Recipe(chosen, chosen.formats[0]),
        kv="auto",
        as_is=False,
        tensor_parallel=1,
    )
    each = speed(deployment, candidate.workload, request.hardware.cpu).step_s
    needed = footprint(deployment, candidate.workload)
    yield _way("draft", candidate, small.repo, each, needed.weights + needed.kv_cache)


def _drafts_for(model: KnownModel, known: KnownModel, spare: int) -> bool:
    mine, theirs = text_config(model.config), text_config(known.config)
    rows = abs(mine.get("vocab_size", 0) - theirs.get("vocab_size", 0))
    owners = {repo.partition("/")[0] for repo in (model.repo, known.repo)}
    plain = not model.vision and model.stored == "bf16" and _is_dense(model)
    return (
        plain
        and rows <= spare
        and len(owners) == 1
        and _family(mine) == _family(theirs)
        and model.published * SMALLER <= known.published
    )


def _family(text: Mapping[str, Any]) -> str:
    return str(text.get("model_type")).removesuffix("_moe")


def _is_dense(model: KnownModel) -> bool:
    return not any("expert" in key for key in text_config(model.config))


def _way(name: str, candidate: Candidate, model: str | None, each: float, more: int) -> Speculation:
    row = _table()[name]
    guesses, right = row["guesses"], row["right"]
    plain = checking_seconds(candidate.deployment, candidate.workload, 1)
    checked = checking_seconds(candidate.deployment, candidate.workload, guesses + 1) + guesses * each
    times = tokens_of_a_step(guesses, right) * plain / checked
    return Speculation(name, model, guesses, right, round(times, 2), more, row["only"])


def _mtp_bytes(request: Request, candidate: Candidate) -> int:
    """Returns the bytes of a model's own heads that guess ahead, quantized if their makers did; 0 if it has none."""
    weights = stored(request.checkpoint, candidate.recipe, True)
    heads = {weight: times for weight, times in weights.counts.items() if weight.part == "MTP heads"}
    size = sum(weights.size(weight) * times for weight, times in heads.items())
    return int(size * candidate.preset.scheme.weight.bits / 16) if candidate.deployment.as_is else size


def _eagle_bytes(request: Request) -> int:
    """Returns the bytes of a head in 16 bit: embedding, a block, what joins three hidden states, a small vocabulary."""
    text = text_config(request.checkpoint.config)
    hidden = text.get("hidden_size", 0)
    first = [tensor for tensor in request.checkpoint.tensors if ".layers.0." in tensor.name]
    attention = sum(tensor.numel for tensor in first if part_of(tensor.name, 1) == "attention")
    dense = 3 * hidden * max(text.get("intermediate_size", 0), 3 * hidden)  # a dense MLP, also beside experts
    tokens = text.get("vocab_size", 0) + EAGLE_VOCABULARY
    return int(HALF * (attention + dense + 3 * hidden * hidden + tokens * hidden))


@cache
def _table() -> dict[str, Any]:
    return read_data("quantry.planning", "speculation.toml")
