"""What could be done: presets, formats, engines, layouts over devices and cache types, less what cannot run or fit.

Every preset that can be made today is tried with every engine: the first of its formats that the engine has a kernel
for, with a smaller group where 128 does not divide the layers. Then each way to spread it over the devices, and a
smaller cache where the plain one does not fit. Layers stay with the host (llama.cpp) only where nothing fits without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from quantry.devices import Device, Hardware
from quantry.engines.contract import catalogue
from quantry.engines.contract.catalogue import latest
from quantry.errors import QuantryError
from quantry.models.attention import block_count
from quantry.models.experts import expert_count
from quantry.models.gguf import block_sizes
from quantry.planning.feasibility import feasible
from quantry.planning.memory import footprint as memory
from quantry.planning.memory.footprint import Deployment, Settings
from quantry.planning.rules import Facts, Use, caches, capability, is_spare, left_out, refusal, tier
from quantry.quantizing.recipe import Preset, Recipe, preset, presets
from quantry.quantizing.tensor_plan import main_dtype
from quantry.report.sizes import human
from quantry.types import Checkpoint, Footprint, Verdict, Workload

SMALLER_GROUPS = (64, 32)
THROUGHPUT = ("high-throughput", "high-scale-api")  # uses that a smaller cache is always tried for


@dataclass(frozen=True)
class Request:
    """What is asked: a model, devices, a load, and what was said of engine and memory."""

    model: str  # as `quantry quantize` opens it
    checkpoint: Checkpoint
    hardware: Hardware
    use: Use
    workload: Workload
    engine: str | None = None
    budget: int | None = None
    exact: bool = False  # whether the concurrency was asked for, and is not only what the use would like

    @property
    def device(self) -> Device:
        return self.hardware.device

    @property
    def platform(self) -> str:
        return self.device.platform

    @cached_property
    def parameters(self) -> int:
        tied = bool(self.checkpoint.config.get("tie_word_embeddings"))
        heads = ("lm_head.weight",) if tied else ()
        return sum(tensor.numel for tensor in self.checkpoint.tensors if tensor.name not in heads)

    @cached_property
    def facts(self) -> Facts:
        """What rules may ask of the request."""
        text = self.checkpoint.config.get("text_config") or self.checkpoint.config
        return {
            "use": self.use.name,
            "platform": self.platform,
            "family": self.device.family,
            "capability": capability(self.device),
            "tier": tier(self.device),
            "kind": self.device.kind,
            "devices": self.hardware.count,
            "device_gib": self.device.memory / (1 << 30),
            "parameters": self.parameters / 1e9,
            "vision": "vision_config" in self.checkpoint.config,
            "experts": expert_count(text),
            "context": self.workload.context,
            "concurrency": self.workload.concurrency,
        }


@dataclass(frozen=True)
class Candidate:
    """One way to do it that runs and fits."""

    recipe: Recipe
    engine: str
    version: str
    verdict: Verdict
    deployment: Deployment
    workload: Workload  # of one copy
    replicas: int
    footprint: Footprint  # of one copy
    limit: int  # bytes of a device that may be filled

    @property
    def offloaded(self) -> bool:
        return self.deployment.offload_layers is not None

    @property
    def devices(self) -> int:
        """Devices of one copy."""
        return self.deployment.tensor_parallel * self.deployment.pipeline_parallel

    @property
    def facts(self) -> Facts:
        """What rules may ask of an option."""
        chosen, grid = self.recipe.preset, self.recipe.preset.scheme.weight
        activation = chosen.scheme.activation
        return {
            "preset": chosen.name,
            "format": self.recipe.format,
            "scheme": scheme_name(chosen),
            "bits": grid.bits,
            "zero_points": not grid.symmetric,
            "inputs": activation.grid.kind if activation else "none",
            "calibrated": chosen.transform is not None or chosen.rounder != "nearest",
            "engine": self.engine,
            "kernel": self.verdict.outcome,
            "kv": self.deployment.kv,
            "tensor_parallel": self.deployment.tensor_parallel,
            "replicas": self.replicas,
            "offloaded": self.offloaded,
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """What was tried and cannot be; `short` are the bytes a device lacks, where that is the reason."""

    presets: tuple[str, ...]
    engine: str
    why: str
    fix: str
    short: int | None = None


def scheme_name(chosen: Preset) -> str:
    """How rules call what becomes of the weights."""
    grid, activation = chosen.scheme.weight, chosen.scheme.activation
    if grid.is_cast:
        return "16-bit"
    if chosen.file_type:
        return chosen.file_type
    if grid.kind == "int":
        return "llm-int8" if chosen.formats == ("bitsandbytes",) else f"w{grid.bits}a{8 if activation else 16}"
    if grid.kind == "e2m1":
        return "nvfp4" if grid.scale == "e4m3" else "mxfp4"
    return {"e4m3": "fp8", "e5m2": "fp8"}.get(grid.kind, grid.kind)


def planned_engines(request: Request) -> tuple[str, ...]:
    """The engine that was asked for, or all that are planned without."""
    if request.engine:
        return (request.engine,)
    known = catalogue.ranked()
    return tuple(one.name for one in known if one.plan.asked is None or request.use.name in one.plan.uses)


def planned_presets(request: Request) -> list[Preset]:
    """Presets that can be made today and are not plainly worse than another."""
    facts = request.facts
    half = main_dtype(request.checkpoint) == "F16" or (facts["capability"] or 80) < 80
    unused = "bf16" if half else "fp16"
    found = [one for one in presets().values() if not left_out(one)]
    return [one for one in found if one.name != unused]


def find(
    request: Request, only: Sequence[str] | None = None, offload: bool = True
) -> tuple[list[Candidate], list[Refused]]:
    """All that runs and fits, and all that does not; `only` some presets, where that is enough.

    Spare presets are tried only where nothing fits without them, and layers go to the host's memory only where nothing
    fits without that, and `offload` allows it.
    """
    planned = [one for one in planned_presets(request) if only is None or one.name in only]
    first = [one for one in planned if request.engine or not is_spare(one, request.facts)]
    found, refused = _search(request, first, offload=False)
    if not found and len(first) < len(planned):
        found, refused = _search(request, planned, offload=False)
    if not found and offload and request.device.kind == "gpu":
        found, more = _search(request, planned, offload=True)
        refused = refused if found else more
    return found, refused


def _search(request: Request, chosen: Sequence[Preset], offload: bool) -> tuple[list[Candidate], list[Refused]]:
    found: list[Candidate] = []
    refused: list[Refused] = []
    for engine in planned_engines(request):
        for one in chosen:
            fits, refusals = _try(request, one, engine, offload)
            found += fits
            refused += refusals
    return found, refused


def _try(request: Request, chosen: Preset, engine: str, offload: bool) -> tuple[list[Candidate], list[Refused]]:
    """One preset in one engine."""
    version, planned = latest(engine), catalogue.engine(engine).plan.formats
    if planned and not set(planned) & set(chosen.formats):
        return [], []
    recipe, verdict = _recipe(request, chosen, engine, version)
    if recipe is None:
        return [], [Refused((chosen.name,), engine, verdict.reason, verdict.fix or "choose another preset")]
    ruled = refusal({**request.facts, **_outline(recipe, engine)})
    if ruled:
        return [], [Refused((chosen.name,), engine, ruled.why, ruled.fix)]
    least, most = least_bytes(request, chosen), _most_bytes(request, engine, offload)
    if least > most:
        why = f"its weights take {human(least)} at the least, and there are {human(most)}"
        return [], [
            Refused((chosen.name,), engine, why, "use fewer bits, or more or larger devices", int(least - most))
        ]
    try:
        return _fitting(request, recipe, engine, version, verdict, offload)
    except QuantryError as error:
        return [], [Refused((chosen.name,), engine, error.problem, error.fix)]


def least_bytes(request: Request, chosen: Preset) -> float:
    """What the weights take at the very least, to spare the exact count where that is too much already."""
    kind = chosen.scheme.weight.kind.upper()
    sizes = {name: nbytes / weights for name, weights, nbytes in block_sizes().values()} if chosen.file_type else {}
    return request.parameters * sizes.get(kind, chosen.scheme.weight.bits / 8) * 0.98


def _most_bytes(request: Request, engine: str, offload: bool) -> float:
    """What there is for weights at the very most."""
    there = request.hardware.usable if request.budget is None else min(request.budget, request.hardware.usable)
    offloads = offload and catalogue.engine(engine).plan.whole_layers
    host = offloads and request.device.kind == "gpu" and request.budget is None
    return there + (host_room(request) if host else 0)


def _outline(recipe: Recipe, engine: str) -> Facts:
    """What a rule may require of an option before its memory is known."""
    return {
        "preset": recipe.preset.name,
        "format": recipe.format,
        "scheme": scheme_name(recipe.preset),
        "bits": recipe.preset.scheme.weight.bits,
        "engine": engine,
    }


def _recipe(request: Request, chosen: Preset, engine: str, version: str) -> tuple[Recipe | None, Verdict]:
    """The format, and the group size where 128 does not divide, that the engine has a kernel for; else why not."""
    verdicts: list[tuple[Recipe, Verdict]] = []
    for one in _grouped(chosen):
        for form in chosen.formats:
            recipe = Recipe(one, form)
            verdict = feasible(
                request.checkpoint, recipe, engine, version, request.device, features=request.hardware.features
            )
            if verdict.outcome == "kernel":
                return recipe, verdict
            verdicts.append((recipe, verdict))
        if any(verdict.outcome == "fallback" for _, verdict in verdicts):
            break
    fallback = next(((recipe, verdict) for recipe, verdict in verdicts if verdict.outcome == "fallback"), None)
    return fallback or (None, verdicts[0][1])


def _grouped(chosen: Preset) -> Iterator[Preset]:
    """A preset, and the same with smaller groups."""
    yield chosen
    grid = chosen.scheme.weight
    if grid.kind == "int" and grid.block[0] == 1 and grid.block[1] > 0:
        yield from (preset(chosen.name, size) for size in SMALLER_GROUPS if size < grid.block[1])


def _fitting(
    request: Request, recipe: Recipe, engine: str, version: str, verdict: Verdict, offload: bool
) -> tuple[list[Candidate], list[Refused]]:
    """Every layout that fits; what is missing where none does."""
    found: list[Candidate] = []
    short: list[Candidate] = []
    why: Verdict | None = None
    for tensor, pipeline, replicas in layouts(request, engine):
        checked = verdict
        if tensor > 1:
            checked = feasible(
                request.checkpoint, recipe, engine, version, request.device, tensor, features=request.hardware.features
            )
        if checked.outcome == "refusal":
            why = why or checked
            continue
        for kv in ("auto", *caches(engine, request.facts)):
            if (
                kv != "auto"
                and request.use.name not in THROUGHPUT
                and any(one.devices == tensor * pipeline for one in found)
            ):
                continue
            one = _candidate(request, recipe, engine, version, checked, kv, tensor, pipeline, replicas)
            (found if fits(one, request) else short).append(one)
    if not found and offload and catalogue.engine(engine).plan.whole_layers and request.device.kind == "gpu":
        found = [one for one in (_offloaded(request, one) for one in short) if one]
    if found:
        return found, []
    if short:
        return [], [_too_large(request, min(short, key=_excess))]
    assert why is not None
    return [], [Refused((recipe.preset.name,), engine, why.reason, why.fix or "choose another layout")]


def layouts(request: Request, engine: str) -> list[tuple[int, int, int]]:
    """Tensor parallel, pipeline parallel and copies: all ways to spread a model over the devices."""
    count = request.hardware.count
    if catalogue.engine(engine).plan.whole_layers:
        return [(1, size, 1) for size in _divisors(count)]
    many = request.workload.concurrency > 1
    return [(size, 1, count // size if many else 1) for size in _divisors(count)]


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _candidate(
    request: Request,
    recipe: Recipe,
    engine: str,
    version: str,
    verdict: Verdict,
    kv: str,
    tensor: int,
    pipeline: int,
    replicas: int,
) -> Candidate:
    """An option with its memory."""
    workload = replace(request.workload, concurrency=-(-request.workload.concurrency // replicas))
    layered = catalogue.engine(engine).plan.whole_layers
    settings = Settings() if layered else Settings(sequences=workload.concurrency)
    deployment = Deployment(
        request.checkpoint, recipe, engine, request.device, version, kv, tensor, pipeline, None, settings, keep_odd=True
    )  # nothing odd is left: feasibility has refused it
    one = Candidate(
        recipe,
        engine,
        version,
        verdict,
        deployment,
        workload,
        replicas,
        memory.footprint_of(deployment, workload),
        _limit(request, deployment),
    )
    settled = request.exact or workload.concurrency == 1
    return one if settled or fits(one, request) else _fewer(request, one)


def _fewer(request: Request, candidate: Candidate) -> Candidate:
    """The same for as many sequences as fit, where their number was not asked for."""
    many = min(
        candidate.workload.concurrency, int(memory.max_concurrency(candidate.deployment, candidate.workload.context))
    )
    found = _at_once(candidate, max(1, many))
    while found.workload.concurrency > 1 and not fits(found, request):
        found = _at_once(found, max(1, found.workload.concurrency * 3 // 4))
    return found


def _at_once(candidate: Candidate, many: int) -> Candidate:
    """The same with another number of sequences."""
    workload, deployment = replace(candidate.workload, concurrency=many), candidate.deployment
    if not catalogue.engine(candidate.engine).plan.whole_layers:
        deployment = replace(deployment, settings=replace(deployment.settings, sequences=many))
    footprint = memory.footprint_of(deployment, workload)
    return replace(candidate, workload=workload, deployment=deployment, footprint=footprint)


def _limit(request: Request, deployment: Deployment) -> int:
    """Bytes of a device that may be filled: what the engine takes at most, or the budget's share."""
    room = memory.room(deployment)
    return room if request.budget is None else min(room, request.budget // request.hardware.count)


def fits(candidate: Candidate, request: Request) -> bool:
    """Whether devices and host hold it."""
    return candidate.footprint.per_device <= candidate.limit and memory.host_memory(candidate.footprint) <= host_room(
        request
    )


def host_room(request: Request) -> int:
    """Memory of the host that may be filled; of a machine that was only described, what such machines have."""
    memory_ = request.hardware.host_memory or request.hardware.cpu.memory
    return int(memory_ * 0.9)


def _offloaded(request: Request, candidate: Candidate) -> Candidate | None:
    """The same with as many layers on the GPUs as they hold, if the host has room for the rest."""
    if candidate.deployment.kv != "auto" or candidate.devices != request.hardware.count or request.budget is not None:
        return None
    layers = memory.most_layers(candidate.deployment, candidate.workload)
    if layers == 0:
        return None
    deployment = replace(candidate.deployment, offload_layers=layers)
    moved = replace(candidate, deployment=deployment, footprint=memory.footprint_of(deployment, candidate.workload))
    return moved if fits(moved, request) else None


def share_on_device(candidate: Candidate) -> float:
    """The share of the layers that devices hold."""
    layers = candidate.deployment.offload_layers
    blocks = block_count(candidate.deployment.checkpoint.config)
    return 1.0 if layers is None else min(1.0, layers / (blocks + 1))


def _excess(candidate: Candidate) -> int:
    return candidate.footprint.per_device - candidate.limit


def _too_large(request: Request, candidate: Candidate) -> Refused:
    """What a device lacks for an option."""
    needed, there = candidate.footprint.per_device, candidate.limit
    word = "budget" if request.budget is not None else request.device.name
    weights = candidate.footprint.weights
    if needed <= there:
        needed, there, word = memory.host_memory(candidate.footprint), host_room(request), "host"
    alone = candidate.deployment.tensor_parallel * there < weights
    fix = "use fewer bits, more or larger devices" if alone else "use a shorter --context or a lower --concurrency"
    why = f"needs {human(needed)} on each device, and {word} has {human(there)} to fill"
    return Refused((candidate.recipe.preset.name,), candidate.engine, why, fix, needed - there)
