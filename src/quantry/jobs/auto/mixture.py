"""A mixture for a size: the grid of every tensor, chosen so that the predicted damage is least within the bytes.

sensitivity.py says what each layer would lose in each way to store it, solver.py finds the least sum, and what comes of
it is an ordinary recipe with a rule for every layer. A size is that of the files as they are written, headers and
padding included; bits a weight, and what fits a device, are about the tensors alone.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantry import registry
from quantry.devices import hardware
from quantry.engines.contract.catalogue import usual
from quantry.errors import RecipeError
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs.auto.choices import FORMATS, FP8, KEEP
from quantry.jobs.auto.sensitivity import Sensitivity, sensitivity, unmeasured
from quantry.jobs.auto.solver import Solution, limits, solve
from quantry.planning.budget import Budget, Fit, parse
from quantry.planning.feasibility import feasible
from quantry.planning.fits_device import settled
from quantry.quantizing import recipe as recipes
from quantry.quantizing.recipe import Recipe
from quantry.types import Anatomy, Checkpoint, Progress

UNROUNDED = {GGUF: "gguf-bf16", "compressed-tensors": "bf16"}
ROUNDS = 16  # headers and padding differ from mixture to mixture: a few are enough
Size = Callable[[Recipe], tuple[int, int]]  # bytes of the files, and of their tensors


@dataclass(frozen=True, slots=True)
class Mixture:
    """The recipe that was chosen, what it was chosen from, and the divergence that is predicted for it."""

    recipe: Recipe
    sensitivity: Sensitivity
    damage: float  # nats a token, as if the errors of layers did not meet

    def told(self, source: str) -> str:
        """What it was chosen from, as JSON, under a name that is no path of this machine."""
        return replace(self.sensitivity, source=source).to_json()


def check(budget: str | None, form: str | None, unused: Mapping[str, Any]) -> str:
    """The format of a mixture; refuses what goes without one, or has no use with one."""
    if budget is None:
        raise RecipeError("preset auto needs a size to aim at", fix="give --budget, such as 4.5bpw or 6GiB")
    for name, value in unused.items():
        if value is not None:
            raise RecipeError(
                f"--{name.replace('_', '-')} has no use with preset auto, which chooses for each tensor",
                fix="leave it out",
            )
    chosen = form or GGUF
    if chosen not in FORMATS:
        known = registry.choices("quantry.formats")
        fix = f"use {' or '.join(FORMATS)}" if chosen in known else registry.suggest(chosen, FORMATS)
        raise RecipeError(f"format {chosen} cannot mix grids tensor by tensor", fix=fix)
    return chosen


def mixed(
    model: str | Path,
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    budget: str,
    form: str,
    size: Size,
    *,
    rounder: str,
    transform: str,
    kv: str | None,
    gpu: str | None = None,
    progress: Progress | None = None,
    **text: Any,
) -> Mixture:
    """The mixture of `model` for a budget in words; `size` tells what a recipe takes, `text` what to measure on.

    With a device (`gpu`, or the one that it is to fit) only what the format's engine loads there is chosen from.
    """
    wanted = parse(budget, parameters=anatomy.parameters)
    if gpu and isinstance(wanted, Fit):
        raise RecipeError(f"--gpu {gpu} has no use: the budget names {wanted.device}", fix="leave --gpu out")
    ways = (rounder, transform, kv)
    choice = unmeasured(checkpoint, anatomy, form, transform)
    place = wanted.device if isinstance(wanted, Fit) else gpu
    left_out = {FP8} | (_refused(choice, checkpoint, place) if place else set())  # inputs stay in 16 bit
    blank = _Mixer(choice, *ways, left_out)
    if isinstance(wanted, Budget):  # refused before minutes are spent on it
        blank.within(wanted, size)
    else:
        blank.fitting(wanted, checkpoint)
    found = sensitivity(model, format=form, rounder=rounder, transform=transform, progress=progress, **text)
    mixer = _Mixer(found, *ways, left_out)
    chosen, solution = mixer.within(wanted, size) if isinstance(wanted, Budget) else mixer.fitting(wanted, checkpoint)
    return Mixture(chosen, found, solution.damage)


class _Mixer:
    """Recipes from what is known of the layers."""

    def __init__(
        self, found: Sensitivity, rounder: str, transform: str | None, kv: str | None, left_out: Collection[str] = ()
    ) -> None:
        self._found, self._rounder, self._transform, self._kv = found, rounder, transform, kv
        self._items = tuple(
            replace(item, options=tuple(one for one in item.options if one.name not in left_out))
            for item in found.items()
        )

    def within(self, budget: Budget, size: Size) -> tuple[Recipe, Solution]:
        """The best mixture that is not larger than the budget."""
        smallest, largest = limits(self._items)

        def taken(solution: Solution) -> tuple[Recipe, int]:
            made = self._recipe(solution, budget.words)
            return made, size(made)[0 if budget.files else 1]

        beside = taken(solve(self._items, smallest))[1] - smallest  # what is written and not chosen for
        if not smallest + beside <= budget.bytes <= largest + beside:
            raise RecipeError(
                f"a budget of {budget.words} is {budget.bytes} bytes, and the smallest possible is {smallest + beside} "
                f"bytes ({self._bits(smallest)} bits a weight), the largest {largest + beside} ({self._bits(largest)})",
                fix="ask for a size between them",
            )
        for number in range(ROUNDS):
            solution = solve(self._items, max(smallest, budget.bytes - beside))
            made, found = taken(solution)
            if found <= budget.bytes:
                return made, solution
            beside += max(found - budget.bytes, 16 << number)  # another choice may have other headers
        raise RecipeError(f"no mixture was found for {budget.words}", fix="ask for another size")

    def fitting(self, fit: Fit, checkpoint: Checkpoint) -> tuple[Recipe, Solution]:
        """The best mixture that a device has room for."""

        smallest, largest = limits(self._items)

        def make(budget: Budget) -> Recipe:
            if budget.bytes >= largest:
                raise self._roomy(budget.words)
            return self._recipe(solve(self._items, budget.bytes, at_most=True), budget.words)

        first = make(Budget((smallest + largest) // 2, ""))
        budget, made = settled(fit, checkpoint, usual(self._found.format)[0], first, make)
        return made, solve(self._items, budget.bytes, at_most=True)

    def _roomy(self, words: str) -> RecipeError:
        return RecipeError(
            f"a budget of {words} has room for all of the model in 16 bit",
            fix=f"use --preset {UNROUNDED[self._found.format]}",
        )

    def uniform(self, name: str) -> Recipe:
        """All layers stored in one way, but those that cannot be: in 16 bit."""
        chosen = {
            item.name: next((one for one in item.options if one.name == name), item.options[-1]) for item in self._items
        }
        return self._recipe(Solution(chosen, 0, 0.0, 0.0), name)

    def _recipe(self, solution: Solution, words: str) -> Recipe:
        """A rule for every layer; what most weights get is also the preset for what no rule names."""
        rules: list[Mapping[str, Any]] = []
        weights = Counter[tuple[str, int | None]]()
        for layer in self._found.layers:
            chosen = layer.candidate(solution.chosen[layer.name].name)
            assert chosen is not None
            rules += [{"match": match, **chosen.rule} for match in layer.match]
            if chosen.rule != KEEP:
                weights[_preset(chosen.rule)] += layer.parameters
        form = self._found.format
        if not weights:
            raise self._roomy(words)
        (name, group), _ = weights.most_common(1)[0]
        return recipes.mixed(name, group, form, self._rounder, self._transform, rules, self._kv, words)

    def _bits(self, size: int) -> str:
        return f"{8 * size / self._found.parameters:.3f}"


def _refused(found: Sensitivity, checkpoint: Checkpoint, place: str) -> set[str]:
    """The ways to store a layer that the format's engine does not load on a device."""
    device, engine = hardware(place).device, usual(found.format)[0]
    names = {one.name for layer in found.layers for one in layer.candidates if one.rule != KEEP}
    mixer = _Mixer(found, "nearest", None, None)
    refused = {
        name for name in names if feasible(checkpoint, mixer.uniform(name), engine, None, device).outcome == "refusal"
    }
    if refused == names:
        raise RecipeError(
            f"{engine} loads nothing of {checkpoint.source} as {found.format} on {device.name}",
            fix="use another format or device; quantry plan says what runs where",
        )
    return refused


def _preset(rule: Mapping[str, Any]) -> tuple[str, int | None]:
    """The preset and the group of a rule; of a ggml type, the plainest file type that it is the main one of."""
    if "type" not in rule:
        return rule["preset"], rule.get("group")
    name = f"gguf-{rule['type'].lower()}"
    return (name if name in recipes.presets() else f"{name}_s"), None
