"""Preset auto: the grid of every tensor, chosen so that the predicted damage is smallest within a size.

sensitivity.py measures what each layer would lose in each choice, solver.py finds the smallest sum, and the result is
an ordinary recipe with a rule for every layer. A size is that of the files as written, headers and padding included;
bits per weight, and what fits a device, count the tensors alone.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantry import registry
from quantry.devices import hardware
from quantry.engines.contract.catalogue import usual
from quantry.errors import RecipeError
from quantry.formats.contract import FORMATS as KNOWN
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs.auto.choices import FORMATS, FP8, KEEP
from quantry.jobs.auto.sensitivity import Method, Sensitivity, measure, unmeasured
from quantry.jobs.auto.solver import Solution, limits, solve
from quantry.models.anatomy import sixteen_bit
from quantry.models.reader import open_checkpoint
from quantry.planning.budget import Budget, DeviceBudget, parse
from quantry.planning.deployment import Deployment
from quantry.planning.feasibility import feasible
from quantry.planning.fits_device import settled
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.recipe import Recipe, build, presets
from quantry.quantizing.shards import file_bytes
from quantry.quantizing.targets import target_of
from quantry.types import Checkpoint, Progress

UNROUNDED = {GGUF: "gguf-bf16", "compressed-tensors": "bf16"}
ROUNDS = 16  # headers and padding differ from mixture to mixture: a few attempts are enough


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """What a user may say to preset auto."""

    budget: str | None = None
    format: str = GGUF
    rounder: str = "gptq"
    transform: str | None = "awq"
    kv: str | None = None
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class Mixture:
    """The chosen recipe, what it was chosen from, and the predicted divergence."""

    recipe: Recipe
    sensitivity: Sensitivity
    damage: float  # nats per token, assuming that the errors of layers are independent

    def to_json(self, source: str) -> str:
        """Returns what it was chosen from, under a name that is no path of this machine."""
        return replace(self.sensitivity, source=source).to_json()


def check_options(options: AutoOptions) -> None:
    """Raises RecipeError for a mixture without a budget, or in a format that cannot mix grids."""
    if options.budget is None:
        raise RecipeError("preset auto needs a size to aim at", fix="give --budget, such as 4.5bpw or 6GiB")
    if options.format not in FORMATS:
        known = options.format in registry.choices(KNOWN)
        fix = f"use {' or '.join(FORMATS)}" if known else registry.suggest(options.format, FORMATS)
        raise RecipeError(f"format {options.format} cannot mix grids tensor by tensor", fix=fix)


def choose_mixture(
    model: str | Path,
    options: AutoOptions,
    text: CalibrationOptions,
    device: torch.device,
    progress: Progress | None = None,
) -> Mixture:
    """Chooses the mixture of `model` with the smallest predicted damage within the budget.

    With a device (`gpu`, or the one that it is to fit) it only uses what the format's engine loads there. Raises
    RecipeError for a budget that cannot be met, before anything is measured.
    """
    check_options(options)
    assert options.budget is not None
    checkpoint = open_checkpoint(model)
    anatomy = sixteen_bit(checkpoint)
    wanted = parse(options.budget, parameters=anatomy.parameters)
    if options.gpu and isinstance(wanted, DeviceBudget):
        raise RecipeError(f"--gpu {options.gpu} has no use: the budget names {wanted.device}", fix="leave --gpu out")
    method = Method(options.format, options.rounder, options.transform)
    choices = unmeasured(checkpoint, anatomy, method)
    place = wanted.device if isinstance(wanted, DeviceBudget) else options.gpu
    left_out = {FP8} | (_refused(choices, checkpoint, place) if place else set())  # inputs stay in 16 bit
    Mixer(checkpoint, choices, options, left_out).solve(wanted)  # a budget that cannot be met is refused here
    measured = measure(model, method, text, device, progress=progress)
    recipe, solution = Mixer(checkpoint, measured, options, left_out).solve(wanted)
    return Mixture(recipe, measured, solution.damage)


class Mixer:
    """Turns choices for all layers into recipes of a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, known: Sensitivity, options: AutoOptions, left_out: Collection[str] = ()
    ) -> None:
        self._checkpoint, self._known, self._options = checkpoint, known, options
        self.items = tuple(
            replace(item, options=tuple(option for option in item.options if option.name not in left_out))
            for item in known.items()
        )

    def solve(self, wanted: Budget | DeviceBudget) -> tuple[Recipe, Solution]:
        """Returns the best mixture for a budget. Raises RecipeError if none meets it."""
        return self._within(wanted) if isinstance(wanted, Budget) else self._fitting(wanted)

    def uniform(self, name: str) -> Recipe:
        """Returns a recipe that stores all layers in one way, and those without that choice in 16 bit."""
        chosen = {
            item.name: next((option for option in item.options if option.name == name), item.options[-1])
            for item in self.items
        }
        return self.recipe(Solution(chosen, 0, 0.0, 0.0), name)

    def _within(self, budget: Budget) -> tuple[Recipe, Solution]:
        smallest, largest = limits(self.items)

        def attempt(size: int) -> tuple[Recipe, Solution, int]:
            solution = solve(self.items, size)
            recipe = self.recipe(solution, budget.words)
            return recipe, solution, self._bytes(recipe, budget.files)

        other = attempt(smallest)[2] - smallest  # what is written and not chosen
        if not smallest + other <= budget.bytes <= largest + other:
            raise RecipeError(
                f"a budget of {budget.words} is {budget.bytes} bytes, and the smallest possible is {smallest + other} "
                f"bytes ({self._bits(smallest)} bits a weight), the largest {largest + other} ({self._bits(largest)})",
                fix="ask for a size between them",
            )
        for number in range(ROUNDS):
            recipe, solution, size = attempt(max(smallest, budget.bytes - other))
            if size <= budget.bytes:
                return recipe, solution
            other += max(size - budget.bytes, 16 << number)  # another choice may have other headers
        raise RecipeError(f"no mixture was found for {budget.words}", fix="ask for another size")

    def _fitting(self, fit: DeviceBudget) -> tuple[Recipe, Solution]:
        smallest, largest = limits(self.items)

        def make(budget: Budget) -> Recipe:
            if budget.bytes >= largest:
                raise self._roomy(budget.words)
            return self.recipe(solve(self.items, budget.bytes, at_most=True), budget.words)

        first = make(Budget((smallest + largest) // 2, ""))
        budget, recipe = settled(fit, self._checkpoint, usual(self._known.format)[0], first, make)
        return recipe, solve(self.items, budget.bytes, at_most=True)

    def _bytes(self, recipe: Recipe, files: bool) -> int:
        target = target_of(self._checkpoint, recipe, keep_odd=True)
        return file_bytes(target.container(Path()), target.plan.pieces) if files else target.plan.bytes

    def recipe(self, solution: Solution, words: str) -> Recipe:
        """Returns a rule for every layer; the choice of most weights is the preset for what no rule names."""
        rules: list[Mapping[str, Any]] = []
        weights = Counter[tuple[str, int | None]]()
        for layer in self._known.layers:
            chosen = layer.candidate(solution.chosen[layer.name].name)
            assert chosen is not None
            rules += [{"match": match, **chosen.rule} for match in layer.match]
            if chosen.rule != KEEP:
                weights[_preset(chosen.rule)] += layer.parameters
        if not weights:
            raise self._roomy(words)
        (name, group), _ = weights.most_common(1)[0]
        options = self._options
        settings = {
            "preset": name, "group": group, "format": self._known.format, "rounder": options.rounder,
            "transform": options.transform, "kv": options.kv, "rules": rules,
        }  # fmt: skip
        return build(settings, words)

    def _roomy(self, words: str) -> RecipeError:
        return RecipeError(
            f"a budget of {words} has room for all of the model in 16 bit",
            fix=f"use --preset {UNROUNDED[self._known.format]}",
        )

    def _bits(self, size: int) -> str:
        return f"{8 * size / self._known.parameters:.3f}"


def _refused(choices: Sensitivity, checkpoint: Checkpoint, place: str) -> set[str]:
    """Returns the choices that the format's engine does not load on a device. Raises RecipeError if it loads none."""
    device, engine = hardware(place).device, usual(choices.format)[0]
    names = {choice.name for layer in choices.layers for choice in layer.candidates if choice.rule != KEEP}
    mixer = Mixer(checkpoint, choices, AutoOptions(rounder="nearest", transform=None))
    refused = {
        name
        for name in names
        if feasible(Deployment(checkpoint, mixer.uniform(name), engine, device)).outcome == "refusal"
    }
    if refused == names:
        raise RecipeError(
            f"{engine} loads nothing of {checkpoint.source} as {choices.format} on {device.name}",
            fix="use another format or device; quantry plan says what runs where",
        )
    return refused


def _preset(rule: Mapping[str, Any]) -> tuple[str, int | None]:
    """Returns the preset and group of a rule; for a ggml type, the plainest file type that mainly uses it."""
    if "type" not in rule:
        return rule["preset"], rule.get("group")
    name = f"gguf-{rule['type'].lower()}"
    return (name if name in presets() else f"{name}_s"), None
