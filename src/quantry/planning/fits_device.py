"""What a device has left for weights: "fits RTX 3060 at 8k" as a size that a quantization job can aim at.

A budget is the bytes of all stored tensors, while a device holds what the engine loads of them: llama.cpp leaves the
embedding on the host, drafts are not loaded, a vocabulary is padded, scales change their type. All of that follows
from a recipe, so `allowed` takes the intended one and adds what it stores but does not load to what is free. A
mixture made for that size differs in this (its embedding may be larger, at no cost to the device), so another size
holds for it; `settled` makes mixtures until size and mixture agree.
"""

from collections.abc import Callable
from dataclasses import replace

from quantry.devices.catalogue import parse
from quantry.engines.contract.catalogue import engine_facts
from quantry.errors import QuantryError
from quantry.models.attention import context_length
from quantry.planning.budget import LARGEST, Budget, DeviceBudget
from quantry.planning.deployment import Deployment, Settings
from quantry.planning.feasibility import feasible
from quantry.planning.memory.footprint import HOST, footprint, room
from quantry.planning.memory.weights import weights_bytes
from quantry.quantizing.recipe import Recipe
from quantry.report.sizes import human
from quantry.types import Checkpoint, Footprint, Workload

ROUNDS = 12  # on one device two or three are enough
NEAR = 500  # 1/500 of a size is not worth another round


def allowed(wanted: DeviceBudget, checkpoint: Checkpoint, engine: str, recipe: Recipe) -> Budget:
    """Returns the bytes that stored weights may take so that `engine` serves one sequence on the device.

    Of several devices the fullest decides, assuming that weights grow alike on all. Raises QuantryError if the engine
    cannot serve the recipe there, or if nothing is left for weights.
    """
    deployment = _deployment(wanted, checkpoint, engine, recipe)
    _check_served(deployment)
    needed, limit = footprint(deployment, _load(wanted, checkpoint)), room(deployment)
    other = _on_devices(needed, weights=False) // deployment.devices
    fullest = needed.per_device - other
    more = (limit - needed.per_device) * _on_devices(needed, weights=True) // fullest
    size = weights_bytes(checkpoint, recipe, keep_odd=True) + more
    if limit <= other or size <= 0:
        raise QuantryError(
            f"nothing is left for weights on {wanted.device} at {wanted.context} tokens: {engine} may fill "
            f"{human(limit)} of a device and takes {human(other)} without them",
            fix="use a shorter context or a larger device",
        )
    count = f"{deployment.devices}x " if deployment.devices > 1 else ""
    name = f"{count}{deployment.device.name}"
    return Budget(size, f"fits {name} at {wanted.context} tokens with {engine}")


def settled(
    wanted: DeviceBudget, checkpoint: Checkpoint, engine: str, first: Recipe, make: Callable[[Budget], Recipe]
) -> tuple[Budget, Recipe]:
    """Returns the largest mixture of those that `make` gives which fits the device, and the budget it was made for.

    The next size is what the last mixture leaves room for, or the middle between what fits and what does not: over
    several devices it matters which layers got more, and sizes may leap. Raises QuantryError if no mixture fits.
    """
    best: tuple[Budget, Recipe, int] | None = None
    budget, low, high = allowed(wanted, checkpoint, engine, first), 0, LARGEST
    for _ in range(ROUNDS):
        recipe = make(budget)
        size = weights_bytes(checkpoint, recipe, keep_odd=True)
        limit = allowed(wanted, checkpoint, engine, recipe).bytes
        if size > limit:
            high = min(high, budget.bytes)
        else:
            low = max(low, budget.bytes)
            best = (budget, recipe, size) if best is None or size > best[2] else best
        if size <= limit <= budget.bytes or high - low <= low // NEAR:
            break
        between = (low + high) // 2 if best else high * 99 // 100
        budget = replace(budget, bytes=limit if low < limit < high else between)
    if best is None:
        raise QuantryError(
            f"no mixture was found that {budget.words}", fix="use a shorter context, a larger device or a size in GiB"
        )
    return best[0], best[1]


def fits(wanted: DeviceBudget, checkpoint: Checkpoint, engine: str, recipe: Recipe) -> bool:
    """Returns True if the weights of a recipe leave the device enough for the rest."""
    deployment = _deployment(wanted, checkpoint, engine, recipe)
    return footprint(deployment, _load(wanted, checkpoint)).per_device <= room(deployment)


def _deployment(wanted: DeviceBudget, checkpoint: Checkpoint, engine: str, recipe: Recipe) -> Deployment:
    """Returns what the planner would start: all devices share one copy, and the engine expects one sequence."""
    hardware = parse(wanted.device)
    layered = engine_facts(engine).plan.whole_layers
    return Deployment(
        checkpoint,
        recipe,
        engine,
        hardware.device,
        tensor_parallel=1 if layered else hardware.count,
        pipeline_parallel=hardware.count if layered else 1,
        settings=Settings() if layered else Settings(sequences=1),
        keep_odd=True,
    )


def _check_served(deployment: Deployment) -> None:
    verdict = feasible(deployment)
    if verdict.outcome == "refusal":
        assert deployment.recipe is not None
        raise QuantryError(
            f"{deployment.engine} cannot serve {deployment.recipe.preset.name} on {deployment.device.name}: "
            f"{verdict.reason}",
            fix=verdict.fix or "choose another engine or device",
        )


def _load(wanted: DeviceBudget, checkpoint: Checkpoint) -> Workload:
    context, longest = wanted.context, context_length(checkpoint.config)
    if longest is not None and context > longest:
        raise QuantryError(
            f"a context of {context} is more than the {longest} tokens that {checkpoint.source} was made for",
            fix=f'write "fits {wanted.device} at {longest}" or less',
        )
    answer = max(1, min(256, context // 4))
    return Workload(context, prompt=max(1, min(512, context - answer)), answer=answer)


def _on_devices(needed: Footprint, *, weights: bool) -> int:
    """Returns the bytes of weights, or of everything else, that are not on the host."""
    parts = {name: size for name, size in needed.parts.items() if not name.endswith(HOST)}
    return sum(size for name, size in parts.items() if name.startswith("weights:") == weights)
