"""`quantry plan`: which precision, format, engine and flags for a model, hardware and use, at what cost, and why.

What could be done is in candidates.py, the rules in rules.toml. Here options get their points, and the best come first.
Where nothing fits, the plan names what is nearest: more devices, another device, a smaller model.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2
from pathlib import Path
from typing import Any

from quantry import devices
from quantry.devices import Device, Hardware
from quantry.devices.catalogue import catalogue
from quantry.engines.contract.catalogue import engine as engine_data
from quantry.errors import QuantryError
from quantry.formats.gguf import NAME as GGUF
from quantry.models.already_quantized import check_sixteen_bit
from quantry.models.attention import context_length
from quantry.planning.candidates import (
    Candidate,
    Refused,
    Request,
    find,
    least_bytes,
    planned_presets,
    share_on_device,
)
from quantry.planning.commands import Planned, commands
from quantry.planning.memory import footprint as memory
from quantry.planning.models import find_model, from_config, known_models, open_model
from quantry.planning.rules import Facts, Quality, capability, find_use, judge, quality
from quantry.planning.speed import throughput
from quantry.planning.speed.throughput import Prediction
from quantry.quantizing.containers import gguf_file
from quantry.quantizing.recipe import Recipe, presets
from quantry.quantizing.tensor_plan import shards
from quantry.report.sizes import human
from quantry.types import Checkpoint, Workload

SHOWN = 12  # options of a plan
HALVING = 3.0  # points for half the speed
AMPLE = 0.25  # share of the memory that is room enough
SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
FEW = ("bf16", "fp8-dynamic", "w8a8", "w4a16", "gguf-q8_0", "gguf-q4_k_m")  # to look for what is nearest
COUNTS = (1, 2, 4, 8)
OLDEST = 75  # compute capability that is still suggested


@dataclass(frozen=True, slots=True)
class Option:
    """One way to do it, with all that is known of it. Field names are the JSON names."""

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
    quality: str
    job: dict[str, int]
    score: dict[str, float]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Near:
    """Something that does fit, where what was asked for does not."""

    what: str  # "more of the same", "another device", "a smaller model"
    change: str
    preset: str
    engine: str
    per_device: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of `quantry plan`; options are ranked, the best first. Empty options: nothing fits."""

    model: dict[str, Any]
    hardware: dict[str, Any]
    use: str
    workload: dict[str, int]
    budget: int | None
    options: tuple[Option, ...]
    refused: tuple[dict[str, Any], ...]
    nearest: tuple[Near, ...]
    notes: tuple[str, ...] = ()
    schema: int = field(default=1)

    @property
    def fits(self) -> bool:
        return bool(self.options)

    def to_dict(self) -> dict[str, Any]:
        from dataclasses import asdict

        return {"schema": self.schema, **{key: value for key, value in asdict(self).items() if key != "schema"}}


def plan(
    model: str | Path,
    *,
    gpu: str | None = None,
    use: str | None = None,
    context: int | None = None,
    concurrency: int | None = None,
    engine: str | None = None,
    budget: str | int | None = None,
) -> Plan:
    """What to make of `model` and how to serve it on the machine that `gpu` describes, or on this one."""
    checkpoint = open_model(model)
    check_sixteen_bit(checkpoint)
    return decide(_request(str(model), checkpoint, gpu, use, context, concurrency, engine, budget))


def decide(request: Request) -> Plan:
    """The plan of a request."""
    found, refused = find(request)
    _check_possible(request, found, refused)
    timed = [_timed(request, one) for one in found]
    refused += [one for one in timed if isinstance(one, Refused)]
    options = _ranked(request, [one for one in timed if not isinstance(one, Refused)])
    return Plan(
        model=_model_facts(request),
        hardware=_hardware_facts(request.hardware),
        use=request.use.name,
        workload={"context": request.workload.context, "concurrency": request.workload.concurrency,
                  "prompt": request.workload.prompt, "answer": request.workload.answer},
        budget=request.budget,
        options=options,
        refused=_gathered(refused),
        nearest=() if options else _nearest(request),
        notes=request.hardware.notes,
    )  # fmt: skip


# ---- what is asked ----


def _request(
    model: str,
    checkpoint: Checkpoint,
    gpu: str | None,
    use_name: str | None,
    context: int | None,
    concurrency: int | None,
    engine: str | None,
    budget: str | int | None,
) -> Request:
    chosen = find_use(use_name)
    if engine is not None:
        engine_data(engine)
    hardware = _machine(gpu)
    longest = context_length(checkpoint.config)
    if chosen.name == "vlm" and "vision_config" not in checkpoint.config:
        raise QuantryError(f"--for {use_name} is asked, and {model} has no vision tower", fix="leave --for out")
    workload = _workload(chosen.context, chosen.concurrency, chosen.prompt, longest, context, concurrency, model)
    return Request(
        _opened_as(model, checkpoint),
        checkpoint,
        hardware,
        chosen,
        workload,
        engine,
        _budget(budget, hardware),
        exact=concurrency is not None,
    )


def _machine(gpu: str | None) -> Hardware:
    if gpu is not None:
        return devices.hardware(gpu)
    from quantry.devices.detect import detect

    return detect(0)


def _workload(
    usual: int,
    sequences: int,
    prompt: int,
    longest: int | None,
    context: int | None,
    concurrency: int | None,
    model: str,
) -> Workload:
    """The load, within what the model was made for."""
    for name, value, most in (("context", context, 1 << 30), ("concurrency", concurrency, 1 << 20)):
        if value is not None and not 1 <= value <= most:
            raise QuantryError(f"--{name} {value} is not 1 to {most}", fix=f"give --{name} a positive number")
    if context is not None and longest is not None and context > longest:
        raise QuantryError(
            f"--context {context} is more than the {longest} tokens that {model} was made for",
            fix=f"use --context {longest} or less",
        )
    tokens = context or min(usual, longest or usual)
    answer = max(1, min(256, tokens // 4))
    return Workload(tokens, concurrency or sequences, max(1, min(prompt, tokens - answer)), answer)


def _budget(text: str | int | None, hardware: Hardware) -> int | None:
    """Bytes of a budget such as 8GiB; GB is read as GiB, which is what people mean by the memory of a machine."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*(?:([kmgt])?i?b?)", str(text).strip().lower())
    size = int(float(found[1]) * SIZES[found[2] or ""]) if found else 0
    if size <= 0:
        raise QuantryError(f"a budget of {str(text)[:40]!r} is no size", fix="write --budget 8GiB")
    if size > hardware.usable:
        raise QuantryError(
            f"a budget of {human(size)} is more than the {human(hardware.usable)} of {_name(hardware)}",
            fix="leave --budget out, or plan for a larger machine with --gpu",
        )
    return size


def _opened_as(model: str, checkpoint: Checkpoint) -> str:
    """What `quantry quantize` can open: of a model that is known by its shape, the hub id of its weights."""
    return str(checkpoint.metadata.get("repo", model))


def _check_possible(request: Request, found: Sequence[Candidate], refused: Sequence[Refused]) -> None:
    """Refuses what contradicts itself: an engine that cannot run there, a budget below all weights."""
    if found:
        return
    if request.engine and refused and all(one.short is None for one in refused):
        first = refused[0]
        raise QuantryError(
            f"--engine {request.engine} cannot serve {request.model} on {_name(request.hardware)}: {first.why}",
            fix=first.fix,
        )
    if request.budget is not None:
        sizes = {one.name: _weights(request, Recipe(one, one.formats[0])) for one in planned_presets(request)}
        name, least = min(sizes.items(), key=lambda item: item[1])
        if least > request.budget:
            raise QuantryError(
                f"a budget of {human(request.budget)} is impossible: the smallest weights of {request.model} "
                f"take {human(least)} ({name})",
                fix=f"give --budget more than {human(least)}, or plan a smaller model",
            )


def _weights(request: Request, recipe: Recipe) -> float:
    try:
        return memory.weights_bytes(request.checkpoint, recipe, keep_odd=True)
    except QuantryError:
        return float("inf")


# ---- points ----


def _timed(request: Request, candidate: Candidate) -> "tuple[Candidate, Prediction] | Refused":
    """A candidate with its speed; where nothing is known of that, it is refused."""
    try:
        return candidate, _speed(request, candidate)
    except QuantryError as error:
        return Refused((candidate.recipe.preset.name,), candidate.engine, error.problem, error.fix)


def _ranked(request: Request, found: Sequence[tuple[Candidate, Prediction]]) -> tuple[Option, ...]:
    """Options by their points; of each preset and engine the best layout."""
    whole = any(_is_sixteen(one) and not one.offloaded for one, _ in found)
    best = max((_pace(request, one, speed) for one, speed in found), default=1.0)
    scored = []
    for one, speed in found:
        facts = {**request.facts, **one.facts, "sixteen_fits": whole}
        scored.append(_Scored(one, facts, speed, quality(facts), _pace(request, one, speed) / best, request))
    ordered = sorted(scored, key=lambda one: one.total)
    distinct = {(one.candidate.recipe.preset.name, one.candidate.engine): one for one in ordered}  # the last is best
    kept = sorted(distinct.values(), key=lambda one: -one.total)[:SHOWN]
    return tuple(_option(request, one, _instead(one, kept)) for one in kept)


def _advice(request: Request, scored: "_Scored") -> tuple[str, bool] | None:
    """Whether 4-bit weights pay at this many sequences, for options that have them."""
    one = scored.candidate
    if scored.facts["scheme"] != "w4a16" or not engine_data(one.engine).plan.break_even:
        return None
    found = throughput.break_even(
        request.checkpoint, one.recipe, one.engine, request.hardware, one.workload, one.workload.concurrency,
        one.deployment.tensor_parallel,
    )  # fmt: skip
    return found.advice, any(at is not None and at <= found.batch for at in found.overtaken.values())


def _instead(scored: "_Scored", ranked: Sequence["_Scored"]) -> str | None:
    """Why the option that rules like best is not the first: beside its weights it holds too few sequences."""
    liked = max(ranked, key=lambda one: one.points["rules"])
    mine, theirs = scored.sequences, liked.sequences
    if scored is not ranked[0] or liked is scored or 2 * theirs > mine:
        return None
    return (
        f"{liked.candidate.recipe.preset.name} would be the choice, but beside its weights it holds "
        f"{theirs} at once, and this {mine}"
    )


def _is_sixteen(candidate: Candidate) -> bool:
    return candidate.recipe.preset.scheme.weight.is_cast


@dataclass(frozen=True)
class _Scored:
    """A candidate and its points."""

    candidate: Candidate
    facts: Facts
    speed: Prediction
    quality: Quality
    pace: float  # against the fastest, 1 at most
    request: Request

    @property
    def sequences(self) -> int:
        return self.candidate.workload.concurrency * self.candidate.replicas

    @cached_property
    def points(self) -> dict[str, float]:
        use, one = self.request.use, self.candidate
        free = 1 - one.footprint.per_device / one.limit
        parts = {
            "quality": use.quality * self.quality.points,
            "speed": use.speed * max(0.0, 10 + HALVING * log2(self.pace)),
            "room": use.room * 10 * min(1.0, free / AMPLE),
            "engine": engine_data(one.engine).plan.points,
            "rules": judge(self.facts).points,
        }
        return {name: round(value, 2) for name, value in parts.items()}

    @property
    def total(self) -> float:
        return sum(self.points.values())


def _speed(request: Request, candidate: Candidate) -> Prediction:
    """The speed of one copy."""
    hardware = request.hardware
    layered = candidate.deployment.pipeline_parallel
    return throughput.speed(
        request.checkpoint,
        candidate.recipe,
        candidate.engine,
        hardware,
        candidate.workload,
        candidate.workload.concurrency,
        max(candidate.deployment.tensor_parallel, layered),
        share_on_device(candidate),
        kv=candidate.deployment.kv,
    )


def _pace(request: Request, candidate: Candidate, speed: Prediction) -> float:
    """What counts as speed for the use."""
    if request.use.measure == "first":
        return 1 / speed.first_token_s
    return speed.decode_tokens_per_s * candidate.replicas


# ---- an option in full ----


def _option(request: Request, scored: _Scored, instead: str | None) -> Option:
    one, speed = scored.candidate, scored.speed
    ruling, advice = judge(scored.facts), _advice(request, scored)
    grid = one.recipe.preset.scheme.weight
    points = scored.points
    cost = memory.job_cost(request.checkpoint, one.recipe, keep_odd=True)
    dollars = throughput.tokens_per_dollar(_of_all(one, speed), request.hardware, request.workload)
    return Option(
        preset=one.recipe.preset.name,
        format=one.recipe.format,
        group=grid.block[1] if grid.kind == "int" and grid.block[1] else None,
        scheme=scored.facts["scheme"],
        engine=one.engine,
        version=one.version,
        kernel=one.verdict.kernel,
        kv_cache_type=one.deployment.kv,
        layout=_layout(one),
        commands=commands(_serving(request, one)),
        memory=_memory(one),
        speed=_speed_facts(one, speed),
        cost={"usd_per_hour": request.hardware.price, "tokens_per_usd": dollars and round(dollars)},
        quality=scored.quality.name,
        job={"ram": cost.ram, "vram": cost.vram, "disk": cost.disk},
        score={"total": round(sum(points.values()), 2), **points},
        reasons=_reasons(scored, [*([instead] if instead else []), *ruling.reasons, *_said(advice, False)]),
        warnings=_warnings(request, scored, [*ruling.warnings, *_said(advice, True)]),
    )  # fmt: skip


def _said(advice: tuple[str, bool] | None, warns: bool) -> list[str]:
    return [advice[0]] if advice and advice[1] == warns else []


def _layout(one: Candidate) -> dict[str, int]:
    """How it is spread: sequences and devices of all copies, and how each copy is cut."""
    return {
        "concurrency": one.workload.concurrency * one.replicas,
        "devices": one.devices * one.replicas,
        "tensor_parallel": one.deployment.tensor_parallel,
        "pipeline_parallel": one.deployment.pipeline_parallel,
        "replicas": one.replicas,
    }


def _of_all(candidate: Candidate, speed: Prediction) -> Prediction:
    """The speed of all copies together."""
    return replace(
        speed,
        decode_tokens_per_s=speed.decode_tokens_per_s * candidate.replicas,
        prompts_tokens_per_s=speed.prompts_tokens_per_s * candidate.replicas,
    )


def _memory(candidate: Candidate) -> dict[str, Any]:
    """Bytes of all devices and copies, by part; `per_device` of the fullest, of which `limit` may be filled."""
    found, times = candidate.footprint, candidate.replicas
    return {
        "weights": found.weights * times,
        "kv_cache": found.kv_cache * times,
        "activations": found.activations * times,
        "overhead": found.overhead * times,
        "total": found.total * times,
        "per_device": found.per_device,
        "limit": candidate.limit,
        "host": memory.host_memory(found) * times,
        "parts": {name: size * times for name, size in found.parts.items()},
    }


def _speed_facts(candidate: Candidate, speed: Prediction) -> dict[str, Any]:
    return {
        "decode_tokens_per_s": round(speed.decode_tokens_per_s * candidate.replicas, 1),
        "prefill_tokens_per_s": round(speed.prefill_tokens_per_s, 1),
        "first_token_s": round(speed.first_token_s, 4),
        "bound": speed.bound,
        "spread": speed.spread,
        "measured": speed.measured,
    }


def _serving(request: Request, one: Candidate) -> Planned:
    facts = request.facts
    turing = request.platform == "cuda" and (facts["capability"] or 80) < 80
    return Planned(
        model=request.model,
        preset=one.recipe.preset,
        format=one.recipe.format,
        engine=one.engine,
        version=one.version,
        context=one.workload.context,
        concurrency=one.workload.concurrency,
        platform=request.platform,
        gate=request.use.gate,
        kv=one.deployment.kv,
        tensor_parallel=one.deployment.tensor_parallel,
        pipeline_parallel=one.deployment.pipeline_parallel,
        replicas=one.replicas,
        offload_layers=one.deployment.offload_layers,
        utilization=_utilization(request, one),
        cache_gib=max(1, -(-one.footprint.kv_cache // (1 << 30))),
        prefix_cache=request.use.prefix_cache,
        dtype="float16" if turing else None,
        shards=_shards(request, one),
    )


def _utilization(request: Request, candidate: Candidate) -> float | None:
    """The share of a device that a budget leaves to the engine; without one the engine's own."""
    if request.budget is None:
        return None
    return max(0.01, int(100 * candidate.limit / request.device.usable) / 100)


def _shards(request: Request, candidate: Candidate) -> int:
    """Files of a GGUF: it is cut where one would grow too large."""
    if candidate.recipe.format != GGUF or candidate.footprint.weights < gguf_file.SHARD_BYTES:
        return 1
    division = gguf_file.plan_gguf(request.checkpoint, candidate.recipe)
    return len(shards(division.pieces, gguf_file.SHARD_BYTES))


def _reasons(scored: _Scored, ruled: Sequence[str]) -> tuple[str, ...]:
    """Why this option: rules first, then what the engine does, and how full it gets."""
    one = scored.candidate
    found = [*ruled, f"{one.engine} {one.version}: {one.verdict.reason}"]
    share = one.footprint.per_device / one.limit
    found.append(f"{human(one.footprint.per_device)} of {human(one.limit)} on each device ({share:.0%})")
    if _is_sixteen(one):
        copied = "the model is 16 bit: quantize only copies it, and can be left out"
        found.append("16 bit: nothing is rounded, the file is only converted" if one.recipe.format == GGUF else copied)
    return tuple(found)


def _warnings(request: Request, scored: _Scored, ruled: Sequence[str]) -> tuple[str, ...]:
    one, found = scored.candidate, list(ruled)
    if one.verdict.outcome == "fallback":
        found.append(one.verdict.reason + (f"; {one.verdict.fix}" if one.verdict.fix else ""))
    if one.offloaded:
        found.append(_offload_words(request, one))
    if scored.sequences < request.workload.concurrency:
        found.append(f"{request.workload.concurrency} at once are usual for this use, and {scored.sequences} fit")
    elif one.footprint.per_device > 0.95 * one.limit:
        found.append("memory is nearly full: a longer context or one more sequence may not fit")
    free = request.device.free
    if free is not None and one.footprint.per_device > free:
        found.append(f"only {human(free)} of {request.device.name} are free now")
    if one.devices * one.replicas < request.hardware.count:
        found.append(
            f"{request.hardware.count - one.devices * one.replicas} of {request.hardware.count} devices stay idle"
        )
    return tuple(dict.fromkeys(found))


def _offload_words(request: Request, one: Candidate) -> str:
    assert one.deployment.offload_layers is not None
    assumed = "" if request.hardware.host_memory else f" (taken to have {human(request.hardware.cpu.memory)})"
    return (
        f"{one.deployment.offload_layers} layers fit on the GPU; {human(memory.host_memory(one.footprint))} stay "
        f"in the memory of the host{assumed}, which sets the pace"
    )


def _gathered(refused: Sequence[Refused]) -> tuple[dict[str, Any], ...]:
    """Refusals of one engine for the same reason are one."""
    groups: dict[tuple[str, str], list[Refused]] = {}
    for one in refused:
        groups.setdefault((one.engine, one.fix if one.short is None else one.why), []).append(one)
    return tuple(
        {
            "engine": group[0].engine,
            "presets": [name for one in group for name in one.presets],
            "why": group[0].why,
            "fix": group[0].fix,
            "short": group[0].short,
        }
        for group in groups.values()
    )


def _model_facts(request: Request) -> dict[str, Any]:
    found = request.checkpoint
    names = found.config.get("architectures")
    return {
        "source": found.source,
        "opened_as": request.model,
        "architecture": str(names[0]) if isinstance(names, list) and names else str(found.config.get("model_type")),
        "parameters": request.parameters,
        "context_length": context_length(found.config),
        "vision": request.facts["vision"],
        "experts": request.facts["experts"],
        "shape_only": "shape" in found.metadata,
    }


def _hardware_facts(hardware: Hardware) -> dict[str, Any]:
    return {
        "name": _name(hardware),
        "device": hardware.device.name,
        "count": hardware.count,
        "memory": hardware.memory,
        "usable": hardware.usable,
        "price": hardware.price,
    }


def _name(hardware: Hardware) -> str:
    return f"{hardware.count} x {hardware.device.name}" if hardware.count > 1 else hardware.device.name


# ---- what is nearest, where nothing fits ----


def _nearest(request: Request) -> tuple[Near, ...]:
    """More of the same device, the smallest other machine, the largest smaller model of the family."""
    found = [_more(request), _other(request), _smaller(request)]
    return tuple(one for one in found if one)


def _more(request: Request) -> Near | None:
    """More devices of the same kind; of those that share the host's memory, one of the family that has more of it."""
    device = request.device
    machines = [(device, count) for count in COUNTS if count > request.hardware.count and device.kind == "gpu"]
    if device.kind == "unified":
        rows = sorted(catalogue(), key=lambda one: one.memory)
        machines = [(one, 1) for one in rows if one.family == device.family and one.memory > device.memory]
    return _first(request, "more of the same", machines)


def _first(request: Request, what: str, machines: Sequence[tuple[Device, int]]) -> Near | None:
    """The first machine that holds it."""
    for device, count in machines:
        near = _fit(request, _several(device, count, request.hardware))
        if near:
            return Near(what, f"{count} x {device.name}" if count > 1 else device.name, *near)
    return None


def _other(request: Request) -> Near | None:
    """The cheapest machine of the catalogue that holds it, of those that all engines run on."""
    machines = [
        (device.price * count, device, count)
        for device in catalogue()
        for count in (COUNTS if device.kind == "gpu" else (1,))
        if device.price and device.name != request.device.name and (capability(device) or OLDEST) >= OLDEST
    ]
    ordered = sorted(machines, key=lambda one: one[0])
    return _first(request, "another device", [(device, count) for _, device, count in ordered])


def _several(device: Device, count: int, like: Hardware) -> Hardware:
    return replace(like, devices=(device,) * count, notes=())


def _smaller(request: Request) -> Near | None:
    """The largest smaller model of the same family in the catalogue."""
    known = find_model(request.checkpoint.source)
    name = known.name if known else str(request.checkpoint.config.get("model_type"))
    family = name.partition("-")[0]
    rows = [one for one in known_models().values() if one.name.partition("-")[0] == family]
    rows = [one for one in rows if one.published < request.parameters and not one.vision]
    nearest = sorted(rows, key=lambda one: (-_alike(one.name, name), -one.published))
    for row in nearest:
        near = _fit(replace(request, model=row.repo, checkpoint=from_config(row.config, row.name)), request.hardware)
        if near:
            return Near("a smaller model", row.name, *near)
    return None


def _alike(name: str, other: str) -> int:
    """How many letters two names begin with together."""
    return next((at for at, (left, right) in enumerate(zip(name, other, strict=False)) if left != right), len(name))


def _fit(request: Request, hardware: Hardware) -> tuple[str, str, int] | None:
    """The first option that fits there without the host's memory, by a few presets."""
    tried = replace(request, hardware=hardware)
    if min(least_bytes(tried, presets()[name]) for name in FEW) > hardware.usable:
        return None
    found, _ = find(tried, FEW, offload=False)
    if not found:
        return None
    best = max(found, key=lambda one: _rough_points(tried, one))
    return best.recipe.preset.name, best.engine, best.footprint.per_device


def _rough_points(request: Request, candidate: Candidate) -> float:
    """Points without speed."""
    facts = {**request.facts, **candidate.facts, "sixteen_fits": False}
    return quality(facts).points + engine_data(candidate.engine).plan.points + judge(facts).points
