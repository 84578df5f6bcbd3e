"""An option of a plan in full: commands, memory, speed, cost, and why."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quantry.engines.contract.catalogue import engine_facts
from quantry.engines.contract.options import Serving
from quantry.formats.gguf import NAME as GGUF
from quantry.planning.candidate import Candidate, is_published, is_ready
from quantry.planning.candidates import slots
from quantry.planning.capacity import capacity
from quantry.planning.commands import PlannedArtefact, commands, serve_words
from quantry.planning.memory.footprint import host_memory
from quantry.planning.memory.job import job_cost
from quantry.planning.ranking import Ranked, is_sixteen_bit
from quantry.planning.request import Request
from quantry.planning.rules import judge
from quantry.planning.speculation import speculations, with_speculation
from quantry.planning.speed.throughput import Prediction, break_even, tokens_per_dollar
from quantry.quantizing.containers import gguf_file
from quantry.quantizing.tensor_plan import shards
from quantry.report.sizes import human, percent

NEARLY_FULL = 0.95
EXPERTS, EXPERT_DEVICES, BUSY = 64, 8, 64  # experts of a layer, devices and sequences from which experts are shared out
AS_IS = "as-is"  # in place of a preset: the checkpoint is quantized already
HOURS = 730  # of a month
PARTS = ("weights", "kv_cache", "activations", "overhead", "total")  # of the memory


@dataclass(frozen=True, slots=True)
class Option:
    """A preset in an engine with everything that is known of it. Field names are the JSON names."""

    preset: str
    format: str
    group: int | None
    scheme: str
    engine: str
    version: str
    kernel: str | None
    kv_cache_type: str
    layout: dict[str, int]
    commands: dict[str, list[str]]
    memory: dict[str, Any]
    speed: dict[str, Any]
    cost: dict[str, float | None]
    load: dict[str, Any]  # what one machine carries, and how many a rate needs
    speculation: tuple[dict[str, Any], ...]  # ways to guess ahead that pay at this load, with the command of each
    quality: str
    job: dict[str, int]
    score: dict[str, float]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


def option(ranked: Ranked, others: Sequence[Ranked]) -> Option:
    """Returns a ranked candidate in full; `others` are all ranked candidates, the best first."""
    request, candidate = ranked.request, ranked.candidate
    grid = candidate.preset.scheme.weight
    job = job_cost(request.checkpoint, candidate.recipe, keep_odd=True)
    return Option(
        preset=AS_IS if is_published(request, candidate) else candidate.preset.name,
        format=candidate.recipe.format,
        group=grid.block[1] if grid.kind == "int" and grid.block[1] else None,
        scheme=ranked.facts["scheme"],
        engine=candidate.engine,
        version=_version(candidate),
        kernel=candidate.verdict.kernel,
        kv_cache_type=candidate.deployment.kv,
        layout=_layout(request, candidate),
        commands=_commands(request, candidate),
        memory=_memory(candidate),
        speed=_speed(ranked),
        cost=_cost(request, ranked.all_copies),
        load=capacity(ranked),
        speculation=_speculation(request, candidate),
        quality=ranked.quality.name,
        job={"ram": job.ram, "vram": job.vram, "disk": job.disk},
        score={"total": round(ranked.total, 2), **ranked.points},
        **_explained(ranked, others),
    )


def _version(candidate: Candidate) -> str:
    assert candidate.deployment.version is not None
    return candidate.deployment.version


def _layout(request: Request, candidate: Candidate) -> dict[str, int]:
    """Returns sequences and devices of all copies, and how each copy is cut."""
    return {
        "concurrency": candidate.sequences,
        "devices": candidate.devices,
        "tensor_parallel": candidate.deployment.tensor_parallel,
        "pipeline_parallel": candidate.deployment.pipeline_parallel,
        "replicas": candidate.replicas,
        "nodes": -(-candidate.devices * request.hardware.nodes // request.hardware.count),
        "expert_parallel": int(_expert_parallel(request, candidate)),
    }


def _expert_parallel(request: Request, candidate: Candidate) -> bool:
    """Returns True if experts are shared out over the devices instead of cut: many small ones, many sequences."""
    facts = engine_facts(candidate.engine).plan
    spread = candidate.deployment.tensor_parallel >= EXPERT_DEVICES
    return facts.expert_parallel and spread and request.facts["experts"] >= EXPERTS and candidate.sequences >= BUSY


def _memory(candidate: Candidate) -> dict[str, Any]:
    """Returns the bytes of all devices and copies by part; `per_device` is the fullest, `limit` what it may fill."""
    needed, times = candidate.footprint, candidate.replicas
    return {
        **{name: getattr(needed, name) * times for name in PARTS},
        "per_device": needed.per_device,
        "limit": candidate.limit,
        "device": candidate.deployment.device.usable,
        "host": host_memory(needed) * times,
        "parts": {name: size * times for name, size in needed.parts.items()},
    }


def _cost(request: Request, speed: Prediction) -> dict[str, float | None]:
    """Returns what an hour, a month and a million tokens cost; None where the machine has no price."""
    hour = request.price
    if hour is None:
        names = ("usd_per_hour", "usd_per_month", "usd_per_million_in", "usd_per_million_out", "tokens_per_usd")
        return dict.fromkeys(names)
    per_second = hour / 3600 * 1e6
    return {
        "usd_per_hour": hour,
        "usd_per_month": round(hour * HOURS, 2),
        "usd_per_million_in": round(per_second / speed.prompts_tokens_per_s, 4),
        "usd_per_million_out": round(per_second / speed.decode_tokens_per_s, 4),
        "tokens_per_usd": round(tokens_per_dollar(speed, hour, request.workload)),
    }


def _speed(ranked: Ranked) -> dict[str, Any]:
    """Returns the speed of all copies; a user's share is that of the copies that the load keeps busy."""
    predicted = ranked.all_copies
    return {
        "decode_tokens_per_s": round(predicted.decode_tokens_per_s, 1),
        "decode_tokens_per_s_per_user": round(predicted.decode_tokens_per_s / ranked.served, 1),
        "prefill_tokens_per_s": round(predicted.prefill_tokens_per_s, 1),
        "first_token_s": round(predicted.first_token_s, 4),
        "bound": predicted.bound,
        "spread": predicted.spread,
        "measured": predicted.measured,
        "basis": predicted.basis,
    }


def _commands(request: Request, candidate: Candidate) -> dict[str, list[str]]:
    artefact = _artefact(request, candidate)
    return commands(artefact, _serving(request, candidate, artefact), request.use.gate)


def _artefact(request: Request, candidate: Candidate) -> PlannedArtefact:
    recipe = candidate.recipe
    served_as_is = candidate.deployment.as_is or (is_sixteen_bit(candidate) and recipe.format != GGUF)
    shards = 1 if served_as_is else _shards(request, candidate)
    return PlannedArtefact(_model(request, candidate), recipe.preset, recipe.format, shards, served_as_is)


def _speculation(request: Request, candidate: Candidate) -> tuple[dict[str, Any], ...]:
    """Returns the ways to guess ahead; a draft for llama.cpp is quantized first."""
    serving = _serving(request, candidate, _artefact(request, candidate))
    ways = speculations(request, candidate)
    return tuple(asdict(way) | {"serve": serve_words(with_speculation(serving, way))} for way in ways)


def _serving(request: Request, candidate: Candidate, artefact: PlannedArtefact) -> Serving:
    deployment, recipe = candidate.deployment, candidate.recipe
    old = request.device.platform == "cuda" and (request.facts["capability"] or 80) < 80
    share = None if request.budget is None else max(0.01, int(100 * candidate.limit / request.device.usable) / 100)
    return Serving(
        model=artefact.served,
        format=recipe.format,
        engine=candidate.engine,
        version=_version(candidate),
        platform=request.device.platform,
        bits=recipe.preset.scheme.weight.bits,
        context=candidate.workload.context,
        parallel=slots(request, deployment, candidate.workload),
        kv=None if deployment.kv == "auto" else deployment.kv,
        tensor_parallel=deployment.tensor_parallel,
        pipeline_parallel=deployment.pipeline_parallel,
        replicas=candidate.replicas,
        expert_parallel=_expert_parallel(request, candidate),
        trust_remote_code=bool(request.facts["remote_code"]) and engine_facts(candidate.engine).plan.remote_code,
        offload_layers=deployment.offload_layers,
        host_experts=deployment.host_experts or None,
        utilization=share,  # of a device, that a budget leaves to the engine
        cache_gib=max(1, -(-candidate.footprint.kv_cache // (1 << 30))),
        prefix_cache=request.use.prefix_cache or None,
        dtype="float16" if old else None,  # Turing and older have no bfloat16
    )


def _model(request: Request, candidate: Candidate) -> str:
    """Returns what is quantized or served: the model itself, or the ready file of others."""
    if is_ready(request, candidate):
        assert request.ready is not None
        return request.ready.served(candidate.recipe)
    return request.model


def _shards(request: Request, candidate: Candidate) -> int:
    """Returns the number of files of a GGUF, which is split where one would grow too large."""
    if candidate.recipe.format != GGUF or candidate.footprint.weights < gguf_file.SHARD_BYTES:
        return 1
    pieces = gguf_file.plan_gguf(request.checkpoint, candidate.recipe).pieces
    return len(shards(pieces, gguf_file.SHARD_BYTES))


# ---- why, and what to be careful with ----


def _explained(ranked: Ranked, others: Sequence[Ranked]) -> dict[str, tuple[str, ...]]:
    """Returns reasons (rules first, then the engine, then how full it gets) and warnings."""
    ruling, candidate = judge(ranked.facts), ranked.candidate
    reasons, warnings = [*_instead(ranked, others), *ruling.reasons], [*ruling.warnings]
    if ranked.facts["scheme"] == "w4a16" and engine_facts(candidate.engine).plan.break_even:
        compared = break_even(replace(candidate.deployment, kv="auto"), candidate.workload)
        (warnings if compared.better else reasons).append(compared.advice)
    return {
        "reasons": (*reasons, *_facts_of(candidate)),
        "warnings": tuple(dict.fromkeys([*warnings, *_doubts(ranked.request, candidate)])),
    }


def _instead(ranked: Ranked, others: Sequence[Ranked]) -> list[str]:
    """Says why the first option is not the one that rules like best: that one holds too few sequences."""
    liked = max(others, key=lambda row: row.points["rules"])
    mine, theirs = ranked.candidate.sequences, liked.candidate.sequences
    if ranked is not others[0] or liked is ranked or 2 * theirs > mine:
        return []
    return [
        f"{liked.candidate.preset.name} would be the choice, but beside its weights it holds "
        f"{theirs} at once, and this {mine}"
    ]


def _facts_of(candidate: Candidate) -> list[str]:
    needed, limit = candidate.footprint.per_device, candidate.limit
    each = " on each device" if candidate.devices > 1 else ""
    as_is = f"serves the checkpoint as it is, with {candidate.verdict.kernel}"
    facts = [
        f"{candidate.engine} {candidate.deployment.version}: "
        f"{as_is if candidate.deployment.as_is else candidate.verdict.reason}",
        f"{human(needed)} of {human(limit)}{each} ({percent(needed / limit)})",
    ]
    if is_sixteen_bit(candidate):
        copied = "the model is 16 bit, and served as it is published"
        converted = "16 bit: nothing is rounded, the file is only converted"
        facts.append(converted if candidate.recipe.format == GGUF else copied)
    return facts


def _doubts(request: Request, candidate: Candidate) -> list[str]:
    verdict, needed, count = candidate.verdict, candidate.footprint.per_device, request.hardware.count
    doubts = []
    if verdict.outcome == "fallback":
        doubts.append(verdict.reason + (f"; {verdict.fix}" if verdict.fix else ""))
    if is_ready(request, candidate):
        doubts.append("a ready file of others, which Quantry neither made nor proved: compare its answers first")
    if candidate.offloaded:
        doubts.append(_offload_words(request, candidate))
    if request.facts["remote_code"] and engine_facts(candidate.engine).plan.remote_code:
        doubts.append(
            "--trust-remote-code runs Python code of the repository on this machine: read it first, pin the revision"
        )
    if candidate.sequences < request.workload.concurrency:
        asked = "asked for" if request.exact else "usual for this use"
        doubts.append(f"{request.workload.concurrency} at once are {asked}, and {candidate.sequences} fit; others wait")
    elif needed > NEARLY_FULL * candidate.limit:
        doubts.append("memory is nearly full: a longer context or one more sequence may not fit")
    if request.device.free is not None and needed > request.device.free:
        doubts.append(f"only {human(request.device.free)} of {request.device.name} are free now")
    if candidate.devices < count:
        doubts.append(f"{count - candidate.devices} of {count} devices stay idle")
    return doubts


def _offload_words(request: Request, candidate: Candidate) -> str:
    experts = candidate.deployment.host_experts
    on_gpu = f"{candidate.deployment.offload_layers} layers fit on the GPU"
    what = f"the experts of {experts} blocks stay on the host, all the rest on the GPU" if experts else on_gpu
    assumed = "" if request.hardware.host_memory else f" (taken to have {human(request.hardware.cpu.memory)})"
    return (
        f"{what}; {human(host_memory(candidate.footprint))} stay "
        f"in the memory of the host{assumed}, which sets the pace"
    )
