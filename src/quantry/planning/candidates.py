"""What could be done: presets, formats, engines, layouts over devices and cache types, less what cannot run or fit.

Every preset that can be made today is tried with every engine: the first of its formats that the engine has a kernel
for, with a smaller group where 128 does not divide the layers. Then come all layouts over the devices, and a smaller
cache where the plain one does not fit. Layers stay on the host (llama.cpp) only where nothing fits without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from quantry.engines.contract.catalogue import engine_facts, ranked
from quantry.errors import QuantryError
from quantry.models.attention import block_count
from quantry.models.gguf import block_sizes
from quantry.planning.candidate import Candidate, Refused, outline
from quantry.planning.deployment import Deployment, Settings
from quantry.planning.feasibility import feasible
from quantry.planning.memory.footprint import footprint, host_memory, max_concurrency, most_layers, room
from quantry.planning.request import Request
from quantry.planning.rules import caches, is_spare, left_out, refusal
from quantry.quantizing.recipe import Preset, Recipe, preset, presets
from quantry.quantizing.tensor_plan import main_dtype
from quantry.report.sizes import human
from quantry.types import Verdict, Workload

SMALLER_GROUPS = (64, 32)
THROUGHPUT = ("high-throughput", "high-scale-api")  # uses that a smaller cache is always tried for
LEAST_SLOTS = 8  # sequences at once of a server whose user gave no number
HOST_SHARE = 0.9  # of the host's memory that may be filled


Search = tuple[list[Candidate], list[Refused]]


def planned_engines(request: Request) -> tuple[str, ...]:
    """Returns the engine of the request, or all that are planned without being named."""
    if request.engine:
        return (request.engine,)
    return tuple(
        engine.name for engine in ranked() if engine.plan.asked is None or request.use.name in engine.plan.uses
    )


def planned_presets(request: Request) -> list[Preset]:
    """Returns the presets that can be made today and are not plainly worse than another, or the one that is stored."""
    if request.stored:
        return [request.stored.preset]
    half = main_dtype(request.checkpoint) == "F16" or (request.facts["capability"] or 80) < 80
    unused = "bf16" if half else "fp16"
    return [chosen for chosen in presets().values() if not left_out(chosen) and chosen.name != unused]


def find(request: Request, only: Sequence[str] | None = None, offload: bool = True) -> Search:
    """Returns all candidates that run and fit, and what was refused; `only` limits the presets.

    Spare presets and ready files of others are tried only where nothing fits without them; layers go to the host's
    memory only where nothing fits without that and `offload` allows it.
    """
    planned = [chosen for chosen in planned_presets(request) if only is None or chosen.name in only]
    named = request.engine or request.stored
    first = [chosen for chosen in planned if named or not is_spare(chosen, request.facts)]
    ready = [recipe for recipe in _ready(request) if only is None or recipe.preset.name in only]
    candidates, refused = _search(request, first, ready if _prefers_ready(request) else (), offload=False)
    if not candidates and offload and request.facts["experts"] and request.device.kind == "gpu":
        candidates, refused = _search(request, first, ready, offload=True)  # some experts on the host before 3 bits
    if not candidates and (len(first) < len(planned) or ready):
        candidates, refused = _search(request, planned, ready, offload=False)
    if candidates or not offload or request.device.kind != "gpu":
        return candidates, refused
    offloaded, still_refused = _search(request, planned, ready, offload=True)
    return offloaded, refused if offloaded else still_refused


def _ready(request: Request) -> tuple[Recipe, ...]:
    return request.ready.recipes if request.ready else ()


def _prefers_ready(request: Request) -> bool:
    """Returns True where llama.cpp is the engine of choice; elsewhere ready files are tried if nothing else fits."""
    return request.engine is not None or request.use.name == "local" or request.device.platform in ("metal", "cpu")


def _search(request: Request, tried: Sequence[Preset], ready: Sequence[Recipe], offload: bool) -> Search:
    candidates: list[Candidate] = []
    refused: list[Refused] = []
    recipes = [(chosen, request.stored) for chosen in tried]
    recipes += [(recipe.preset, recipe) for recipe in ready]
    for engine in planned_engines(request):
        for chosen, made in recipes:
            result = _try(request, chosen, made, engine, offload)
            if isinstance(result, Refused):
                refused.append(result)
            else:
                candidates += result
    return candidates, refused


def _try(
    request: Request, chosen: Preset, made: Recipe | None, engine: str, offload: bool
) -> list[Candidate] | Refused:
    """Returns the candidates of one preset in one engine; none where the engine is not planned with its formats.

    `made` is the recipe of files that are there already.
    """
    planned = engine_facts(engine).plan.formats
    formats = (made.format,) if made else chosen.formats
    if planned and not set(planned) & set(formats):
        return []
    if request.unequal and not engine_facts(engine).plan.whole_layers:
        why = f"{engine} cuts every layer into equal parts, and {request.machine} are unequal"
        return Refused(
            chosen.name, engine, why, "plan for the devices of one type, or use llama.cpp, which splits layers"
        )
    deployment, verdict = _deployment(request, chosen, made, engine)
    if deployment is None:
        return Refused(chosen.name, engine, verdict.reason, verdict.fix or "choose another preset")
    rule = refusal({**request.facts, **outline(deployment)})
    if rule:
        return Refused(chosen.name, engine, rule.why, rule.fix)
    least, most = least_bytes(request, chosen), _most_bytes(request, engine, offload)
    if least > most:
        why = f"its weights take {human(least)} at the least, and there are {human(most)}"
        return Refused(chosen.name, engine, why, "use fewer bits, or more or larger devices", int(least - most))
    try:
        return _fitting(request, deployment, verdict, offload)
    except QuantryError as error:
        return Refused(chosen.name, engine, error.problem, error.fix)


def least_bytes(request: Request, chosen: Preset) -> float:
    """Returns a lower bound of the weights' size, which spares the exact count where even that is too much."""
    kind = chosen.scheme.weight.kind.upper()
    sizes = {name: nbytes / weights for name, weights, nbytes in block_sizes().values()} if chosen.file_type else {}
    return request.parameters * sizes.get(kind, chosen.scheme.weight.bits / 8) * 0.98


def _most_bytes(request: Request, engine: str, offload: bool) -> float:
    limit = request.hardware.usable if request.budget is None else min(request.budget, request.hardware.usable)
    host = _offloads(request, engine, offload) and request.budget is None
    return limit + (_host_room(request) if host else 0)


def _offloads(request: Request, engine: str, offload: bool) -> bool:
    facts = engine_facts(engine)
    return offload and facts.plan.whole_layers and "offload_layers" not in facts.lacks and request.device.kind == "gpu"


def _deployment(
    request: Request, chosen: Preset, made: Recipe | None, engine: str
) -> tuple[Deployment | None, Verdict]:
    """Returns the format, and the group where 128 does not divide, that the engine has a kernel for; else why not."""
    verdicts: list[tuple[Deployment, Verdict]] = []
    plain = Deployment(
        request.checkpoint,
        made,
        engine,
        request.device,
        engine_facts(engine).latest,
        keep_odd=True,  # nothing odd is left: feasibility has refused it
        as_is=made is not None,
        features=request.hardware.features,
    )
    if made:
        verdict = feasible(plain)
        return (None if verdict.outcome == "refusal" else plain), verdict
    for grouped in _grouped(chosen):
        for format_name in chosen.formats:
            deployment = replace(plain, recipe=Recipe(grouped, format_name))
            verdict = feasible(deployment)
            if verdict.outcome == "kernel":
                return deployment, verdict
            verdicts.append((deployment, verdict))
        if any(verdict.outcome == "fallback" for _, verdict in verdicts):
            break
    fallback = next((pair for pair in verdicts if pair[1].outcome == "fallback"), None)
    return fallback or (None, verdicts[0][1])


def _grouped(chosen: Preset) -> Iterator[Preset]:
    yield chosen
    grid = chosen.scheme.weight
    if grid.kind == "int" and grid.block[0] == 1 and grid.block[1] > 0:
        yield from (preset(chosen.name, size) for size in SMALLER_GROUPS if size < grid.block[1])


def _fitting(request: Request, deployment: Deployment, verdict: Verdict, offload: bool) -> list[Candidate] | Refused:
    """Returns every layout that fits; what is missing where none does."""
    engine = deployment.engine
    fitting: list[Candidate] = []
    short: list[Candidate] = []
    refusals: list[Verdict] = []
    for tensor, pipeline, replicas in layouts(request, engine):
        cut = replace(deployment, tensor_parallel=tensor, pipeline_parallel=pipeline)
        checked = feasible(cut) if tensor > 1 else verdict
        if checked.outcome == "refusal":
            refusals.append(checked)
            continue
        for kv in ("auto", *caches(engine, request.facts)):
            enough = any(
                (other.deployment.tensor_parallel, other.deployment.pipeline_parallel) == (tensor, pipeline)
                and other.sequences >= request.workload.concurrency
                for other in fitting
            )
            if kv != "auto" and enough and request.use.name not in THROUGHPUT:
                continue
            try:
                candidate = _candidate(request, replace(cut, kv=kv), checked, replicas)
            except QuantryError as error:  # heads or layers that this layout does not divide
                refusals.append(Verdict("refusal", None, error.problem, error.fix, "quantry"))
                break
            (fitting if fits(candidate, request) else short).append(candidate)
    if not fitting and _offloads(request, engine, offload):
        fitting = [moved for candidate in short if (moved := _offloaded(request, candidate))]
    if fitting:
        return fitting
    if short:
        return _too_large(request, min(short, key=lambda row: row.footprint.per_device - row.limit))
    assert deployment.recipe is not None
    first = refusals[0]
    return Refused(deployment.recipe.preset.name, engine, first.reason, first.fix or "choose another layout")


def layouts(request: Request, engine: str) -> list[tuple[int, int, int]]:
    """Returns all layouts over the devices as (tensor parallel, pipeline parallel, copies); some leave devices idle.

    Tensor parallelism stays inside a node. Stages of a pipeline join nodes, and numbers of devices that are no power of
    two.
    """
    count, each = request.hardware.count, request.hardware.count // request.hardware.nodes
    if engine_facts(engine).plan.whole_layers:
        return [(1, size, 1) for size in range(1, count + 1)]
    many = request.workload.concurrency > 1
    rows = []
    for tensor in range(1, each + 1):
        staged = {1, count // tensor} if request.hardware.nodes > 1 or count & (count - 1) else {1}
        rows += [(tensor, stages, count // (tensor * stages) if many else 1) for stages in sorted(staged)]
    return rows


def _candidate(request: Request, deployment: Deployment, verdict: Verdict, replicas: int) -> Candidate:
    """Returns a candidate with its memory, for fewer sequences where all do not fit and the user gave no number."""
    workload = replace(request.workload, concurrency=-(-request.workload.concurrency // replicas))
    settings = Settings() if deployment.whole_layers else Settings(sequences=slots(request, deployment, workload))
    started = replace(deployment, settings=settings)
    limit = room(started)
    if request.budget is not None:
        limit = min(limit, request.budget // request.hardware.count)
    candidate = Candidate(started, verdict, workload, replicas, footprint(started, workload), limit)
    return candidate if workload.concurrency == 1 or fits(candidate, request) else _fewer(request, candidate)


def slots(request: Request, deployment: Deployment, workload: Workload) -> int:
    """Returns the sequences that a server takes at once: with a paged cache never so few that users wait."""
    paged = deployment.terms.cache == "blocks"
    return max(workload.concurrency, LEAST_SLOTS) if paged and not request.exact else workload.concurrency


def _fewer(request: Request, candidate: Candidate) -> Candidate:
    """Returns the same for as many sequences as fit."""
    most = int(max_concurrency(candidate.deployment, candidate.workload.held))
    fewer = _at_once(request, candidate, max(1, min(candidate.workload.concurrency, most)))
    while fewer.workload.concurrency > 1 and not fits(fewer, request):
        fewer = _at_once(request, fewer, max(1, fewer.workload.concurrency * 3 // 4))
    return fewer


def _at_once(request: Request, candidate: Candidate, sequences: int) -> Candidate:
    workload, deployment = replace(candidate.workload, concurrency=sequences), candidate.deployment
    if not deployment.whole_layers:
        settings = replace(deployment.settings, sequences=slots(request, deployment, workload))
        deployment = replace(deployment, settings=settings)
    return replace(candidate, workload=workload, deployment=deployment, footprint=footprint(deployment, workload))


def fits(candidate: Candidate, request: Request) -> bool:
    """Returns True if devices and host hold the candidate."""
    needed = candidate.footprint
    return needed.per_device <= candidate.limit and host_memory(needed) <= _host_room(request)


def _host_room(request: Request) -> int:
    """Returns the host memory that may be filled; of a machine that was only described, what such hosts have."""
    return int((request.hardware.host_memory or request.hardware.cpu.memory) * HOST_SHARE)


def _offloaded(request: Request, candidate: Candidate) -> Candidate | None:
    """Returns the same with as many layers on the GPUs as fit, if the host has room for the rest."""
    deployment = candidate.deployment
    if deployment.kv != "auto" or deployment.devices != request.hardware.count or request.budget is not None:
        return None
    experts = request.facts["experts"] and engine_facts(deployment.engine).plan.host_experts
    split = _with_host_experts(candidate) if experts else None
    if split is None:
        layers = most_layers(deployment, candidate.workload)
        if layers == 0:
            return None
        split = replace(deployment, offload_layers=layers)
    moved = replace(candidate, deployment=split, footprint=footprint(split, candidate.workload))
    return moved if fits(moved, request) else None


def _with_host_experts(candidate: Candidate) -> Deployment | None:
    """Returns the deployment with the experts of as few blocks as possible on the host; None if all are not enough."""
    low, high = 1, block_count(candidate.deployment.checkpoint.config)

    def tried(blocks: int) -> Deployment:
        return replace(candidate.deployment, host_experts=blocks)

    if footprint(tried(high), candidate.workload).per_device > candidate.limit:
        return None
    while low < high:
        middle = (low + high) // 2
        if footprint(tried(middle), candidate.workload).per_device <= candidate.limit:
            high = middle
        else:
            low = middle + 1
    return tried(low)


def _too_large(request: Request, candidate: Candidate) -> Refused:
    needed, limit = candidate.footprint.per_device, candidate.limit
    owner = "budget" if request.budget is not None else request.device.name
    if needed <= limit:
        needed, limit, owner = host_memory(candidate.footprint), _host_room(request), "host"
    alone = candidate.deployment.tensor_parallel * limit < candidate.footprint.weights
    fix = "use fewer bits, more or larger devices" if alone else "use a shorter --context or a lower --concurrency"
    each = " on each device" if request.hardware.count > 1 else ""
    why = f"needs {human(needed)}{each}, and {owner} has {human(limit)} to fill"
    return Refused(candidate.preset.name, candidate.engine, why, fix, needed - limit)
