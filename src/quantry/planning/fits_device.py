"""What a device has left for weights: "fits RTX 3060 at 8k" as a size that a quantization job can aim at.

A budget is the bytes of all stored tensors, while a device holds what the engine loads of them: llama.cpp leaves the
embedding with the host, drafts are not loaded, a vocabulary is padded, scales change their type. All of that follows
from a recipe, so `allowed` takes the one that is meant: what it stores and does not load is added to what is free. A
mixture that is made for that size differs in this (its embedding may be larger, at no cost to the device), and has
another size that holds for it; `settled` makes mixtures until size and mixture agree.
"""

from collections.abc import Callable
from dataclasses import replace

from quantry import devices
from quantry.devices import Hardware
from quantry.engines.contract import catalogue
from quantry.errors import QuantryError
from quantry.models.attention import context_length
from quantry.planning.budget import LARGEST, Budget, Fit
from quantry.planning.feasibility import feasible
from quantry.planning.memory.footprint import Deployment, Settings, footprint_of, room, weights_bytes
from quantry.quantizing.recipe import Recipe
from quantry.report.sizes import human
from quantry.types import Checkpoint, Footprint, Workload

HOST = "(host)"
ROUNDS = 12  # on one device two or three are enough
NEAR = 500  # the part of a size that is not worth another round


def allowed(
    fit: Fit, checkpoint: Checkpoint, engine: str, recipe: Recipe, *, version: str | None = None, kv: str = "auto"
) -> Budget:
    """The bytes that the stored weights of `checkpoint` may take so that `engine` serves one sequence on the device.

    Where there are several devices, the fullest decides; weights are taken to grow alike on all.
    """
    deployment = _deployment(fit, checkpoint, engine, recipe, version, kv)
    _check_served(deployment, recipe)
    needed, limit = footprint_of(deployment, _load(fit, checkpoint)), room(deployment)
    count = deployment.tensor_parallel * deployment.pipeline_parallel
    other = _on_devices(needed, weights=False) // count
    fullest = needed.per_device - other
    more = (limit - needed.per_device) * _on_devices(needed, weights=True) // fullest
    size = weights_bytes(checkpoint, recipe, keep_odd=True) + more
    if limit <= other or size <= 0:
        raise QuantryError(
            f"nothing is left for weights on {fit.device} at {fit.context} tokens: {engine} may fill "
            f"{human(limit)} of a device and takes {human(other)} without them",
            fix="use a shorter context or a larger device",
        )
    name = deployment.device.name if count == 1 else f"{count}x {deployment.device.name}"
    return Budget(size, f"fits {name} at {fit.context} tokens with {engine}")


def settled(
    fit: Fit,
    checkpoint: Checkpoint,
    engine: str,
    first: Recipe,
    make: Callable[[Budget], Recipe],
    *,
    version: str | None = None,
    kv: str = "auto",
) -> tuple[Budget, Recipe]:
    """The largest of the mixtures that `make` gives which fits the device, and the budget it was made for.

    The next size is what the last mixture leaves room for, or the middle between what fits and what does not: over
    several devices it matters which layers got more, and sizes may leap.
    """
    best: tuple[Budget, Recipe, int] | None = None
    budget, low, high = allowed(fit, checkpoint, engine, first, version=version, kv=kv), 0, LARGEST
    for _ in range(ROUNDS):
        recipe = make(budget)
        size = weights_bytes(checkpoint, recipe, keep_odd=True)
        holds = allowed(fit, checkpoint, engine, recipe, version=version, kv=kv).bytes
        if size > holds:
            high = min(high, budget.bytes)
        else:
            low = max(low, budget.bytes)
            best = (budget, recipe, size) if best is None or size > best[2] else best
        if size <= holds <= budget.bytes or high - low <= low // NEAR:
            break
        between = (low + high) // 2 if best else high * 99 // 100
        budget = replace(budget, bytes=holds if low < holds < high else between)
    if best is None:
        raise QuantryError(
            f"no mixture was found that {budget.words}", fix="use a shorter context, a larger device or a size in GiB"
        )
    return best[0], best[1]


def fits(
    fit: Fit, checkpoint: Checkpoint, engine: str, recipe: Recipe, *, version: str | None = None, kv: str = "auto"
) -> bool:
    """Whether the weights of a recipe leave the device enough for the rest, by the planner's own figures."""
    deployment = _deployment(fit, checkpoint, engine, recipe, version, kv)
    return footprint_of(deployment, _load(fit, checkpoint)).per_device <= room(deployment)


def _deployment(
    fit: Fit, checkpoint: Checkpoint, engine: str, recipe: Recipe, version: str | None, kv: str
) -> Deployment:
    """As the planner would start it: all devices share one copy, and an engine is told that one sequence comes."""
    hardware: Hardware = devices.hardware(fit.device)
    layered = catalogue.engine(engine).plan.whole_layers
    tensor, pipeline = (1, hardware.count) if layered else (hardware.count, 1)
    settings = Settings() if layered else Settings(sequences=1)
    return Deployment(
        checkpoint, recipe, engine, hardware.device, version, kv, tensor, pipeline, None, settings, keep_odd=True
    )


def _check_served(one: Deployment, recipe: Recipe) -> None:
    found = feasible(one.checkpoint, recipe, one.engine, one.version, one.device, one.tensor_parallel)
    if found.outcome == "refusal":
        raise QuantryError(
            f"{one.engine} cannot serve {recipe.preset.name} on {one.device.name}: {found.reason}",
            fix=found.fix or "choose another engine or device",
        )


def _load(fit: Fit, checkpoint: Checkpoint) -> Workload:
    longest = context_length(checkpoint.config)
    if longest is not None and fit.context > longest:
        raise QuantryError(
            f"a context of {fit.context} is more than the {longest} tokens that {checkpoint.source} was made for",
            fix=f'write "fits {fit.device} at {longest}" or less',
        )
    answer = max(1, min(256, fit.context // 4))
    return Workload(fit.context, prompt=max(1, min(512, fit.context - answer)), answer=answer)


def _on_devices(needed: Footprint, *, weights: bool) -> int:
    """The bytes of weights, or of all else, that are not with the host."""
    return sum(
        size
        for name, size in needed.parts.items()
        if not name.endswith(HOST) and name.startswith("weights:") == weights
    )
