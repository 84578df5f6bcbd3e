"""`quantry plan`: which precision, format, engine and flags for a model, hardware and use, at what cost, and why.

request.py reads the question, candidates.py lists what runs and fits, ranking.py gives points by rules.toml, option.py
describes the best in full. Where nothing fits, alternatives.py names what is nearest.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantry.engines.contract.catalogue import engine_facts
from quantry.errors import QuantryError
from quantry.formats.gguf import NAME as GGUF
from quantry.models.attention import context_length
from quantry.planning.alternatives import Near, alternatives
from quantry.planning.candidate import Candidate, Refused
from quantry.planning.candidates import find, planned_engines, planned_presets
from quantry.planning.load import LoadOptions
from quantry.planning.memory.weights import weights_bytes
from quantry.planning.models import open_model
from quantry.planning.option import Option, option
from quantry.planning.ranking import rank
from quantry.planning.request import PlanOptions, Request, read_request
from quantry.planning.wired import raised
from quantry.quantizing.recipe import Recipe
from quantry.report.sizes import human

READY_BITS, ROOM = 4.85, 0.9  # bits of a weight in Q4_K_M files, and the share of memory that one may fill


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of `quantry plan`; the best option comes first. Without options nothing fits."""

    model: dict[str, Any]
    hardware: dict[str, Any]
    use: str
    workload: dict[str, int]
    budget: int | None
    options: tuple[Option, ...]
    refused: tuple[dict[str, Any], ...]
    nearest: tuple[Near, ...]
    notes: tuple[str, ...] = ()
    schema: int = 1

    @property
    def fits(self) -> bool:
        return bool(self.options)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON of the plan."""
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
    prompt: int | None = None,
    answer: int | None = None,
    requests_per_second: float | None = None,
    ttft: float | None = None,
    tpot: float | None = None,
    images: int | None = None,
    shared_prefix: int | None = None,
    trace: str | Path | None = None,
    price: float | None = None,
    max_cost: float | None = None,
) -> Plan:
    """Plans how to quantize `model` and how to serve it on the machine that `gpu` describes, or on this one.

    A model that is quantized already is planned as it is. Raises QuantryError if a name is unknown or the options
    contradict each other.

    Example: `plan("llama-3.1-8b", gpu="RTX 3090", use="rag").options[0].commands["serve"]`.
    """
    checkpoint = open_model(model)
    asked = LoadOptions(
        context, concurrency, prompt, answer, requests_per_second, ttft, tpot, images, shared_prefix, trace, price,
        max_cost,
    )  # fmt: skip
    return decide(read_request(str(model), checkpoint, PlanOptions(gpu, use, engine, budget, asked)))


def decide(request: Request) -> Plan:
    """Returns the plan of a request."""
    candidates, refused = find(request)
    wider = raised(request) if not candidates else None
    if wider:
        candidates, more = find(wider)
        request, refused = (wider, more) if candidates else (request, refused)
    _check_possible(request, candidates, refused)
    ranked, untimed = rank(request, candidates)
    options = tuple(option(row, ranked) for row in ranked)
    return Plan(
        model=_model_facts(request),
        hardware=_hardware_facts(request),
        use=request.use.name,
        workload=asdict(request.workload),
        budget=request.budget,
        options=options,
        refused=_gathered([*refused, *untimed]),
        nearest=() if options else alternatives(request),
        notes=(*request.hardware.notes, *request.notes, *_unmet(request, options), *_ready_files(request, refused)),
    )


def _unmet(request: Request, options: Sequence[Option]) -> list[str]:
    """Says which limits no option holds, and what the nearest takes."""
    notes, goals = [], request.goals
    for name, limit, unit in (("ttft", goals.ttft, "first_token_s"), ("tpot", goals.tpot, None)):
        if limit is None or not options or any(row.load["holds"][name] for row in options):
            continue
        best = min(row.speed[unit] if unit else 1 / row.speed["decode_tokens_per_s_per_user"] for row in options)
        notes.append(f"no option holds the limit of {limit:g} s for --{name}: the fastest takes {best:.2g} s")
    if goals.max_cost is not None and request.price is not None and request.price > goals.max_cost:
        notes.append(f"the machine costs {request.price:g} USD an hour, more than --max-cost {goals.max_cost:g}")
    return notes


def _ready_files(request: Request, refused: Sequence[Refused]) -> list[str]:
    """Says that files of others may run where Quantry cannot write a GGUF of the model, and whether one would fit."""
    engines = [name for name in planned_engines(request) if "gguf" in (engine_facts(name).plan.formats or ())]
    unwritable = any(row.engine in engines and row.preset.startswith("gguf-") and row.short is None for row in refused)
    if request.ready or not engines or not (unwritable or (request.stored and request.stored.format != GGUF)):
        return []
    size = int(request.parameters * READY_BITS / 8)
    room = request.hardware.usable + (request.hardware.host_memory or 0)
    fits = "would fit" if size < ROOM * room else "would not fit"
    return [
        f"Quantry writes no GGUF of {request.model}; a ready Q4_K_M file of others, about {human(size)}, {fits} in "
        f"{' or '.join(engines)}"
    ]


def _check_possible(request: Request, candidates: Sequence[Candidate], refused: Sequence[Refused]) -> None:
    """Raises QuantryError for a contradiction: an engine that cannot run there, a budget below all weights."""
    if candidates:
        return
    if request.engine and refused and all(row.short is None for row in refused):
        raise QuantryError(
            f"--engine {request.engine} cannot serve {request.model} on {request.machine}: {refused[0].why}",
            fix=refused[0].fix,
        )
    if request.budget is not None:
        recipes = (Recipe(preset, preset.formats[0]) for preset in planned_presets(request))
        sizes = {recipe.preset.name: _weights(request, recipe) for recipe in recipes}
        name, least = min(sizes.items(), key=lambda item: item[1])
        if least > request.budget:
            raise QuantryError(
                f"a budget of {human(request.budget)} is impossible: the smallest weights of {request.model} "
                f"take {human(least)} ({name})",
                fix=f"give --budget more than {human(least)}, or plan a smaller model",
            )


def _weights(request: Request, recipe: Recipe) -> float:
    try:
        return weights_bytes(request.checkpoint, recipe, keep_odd=True)
    except QuantryError:
        return float("inf")


def _gathered(refused: Sequence[Refused]) -> tuple[dict[str, Any], ...]:
    """Joins the refusals that one engine gives for the same reason."""
    groups: dict[tuple[str, str], list[Refused]] = {}
    for row in refused:
        groups.setdefault((row.engine, row.fix if row.short is None else row.why), []).append(row)
    return tuple(
        {
            "engine": group[0].engine,
            "presets": [row.preset for row in group],
            "why": group[0].why,
            "fix": group[0].fix,
            "short": group[0].short,
        }
        for group in groups.values()
    )


def _model_facts(request: Request) -> dict[str, Any]:
    checkpoint = request.checkpoint
    names = checkpoint.config.get("architectures")
    model_type = str(checkpoint.config.get("model_type"))
    return {
        "source": checkpoint.source,
        "opened_as": request.model,
        "architecture": str(names[0]) if isinstance(names, list) and names else model_type,
        "parameters": request.parameters,
        "context_length": context_length(checkpoint.config),
        "vision": request.facts["vision"],
        "experts": request.facts["experts"],
        "shape_only": "shape" in checkpoint.metadata,
        "stored": str(checkpoint.metadata.get("stored", "bf16")),
    }


def _hardware_facts(request: Request) -> dict[str, Any]:
    hardware = request.hardware
    return {
        "name": request.machine,
        "device": hardware.device.name,
        **{name: getattr(hardware, name) for name in ("count", "memory", "usable", "price")},
    }
