"""Recipes of a checkpoint from choices for all of its layers, within a budget.

A size is that of the files as written, headers and padding included; bits per weight, and what fits a device, count the
tensors alone.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantry.engines.contract.catalogue import usual
from quantry.errors import RecipeError
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs.auto.choices import KEEP
from quantry.jobs.auto.sensitivity import Sensitivity
from quantry.jobs.auto.solver import ItemOption, Solution, limits, solve
from quantry.planning.budget import Budget, DeviceBudget
from quantry.planning.fits_device import fits, settled
from quantry.quantizing.recipe import Recipe, build, presets
from quantry.quantizing.shards import file_bytes
from quantry.quantizing.targets import target_of
from quantry.types import Checkpoint

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


class Mixer:
    """Turns choices for all layers into recipes of a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, known: Sensitivity, options: AutoOptions, left_out: Collection[str] = ()
    ) -> None:
        self.checkpoint, self.known, self._options = checkpoint, known, options
        self.items = tuple(
            replace(item, options=tuple(option for option in item.options if option.name not in left_out))
            for item in known.items()
        )

    def solve(self, wanted: Budget | DeviceBudget) -> tuple[Recipe, Solution]:
        """Returns the best mixture for a budget. Raises RecipeError if none meets it."""
        return self._within(wanted) if isinstance(wanted, Budget) else self._fitting(wanted)

    def uniform(self, name: str) -> Recipe:
        """Returns a recipe that stores all layers in one way, and those without that choice in 16 bit."""
        return self.recipe(Solution(self.alike(name), 0, 0.0, 0.0), name)

    def alike(self, name: str) -> dict[str, ItemOption]:
        """Returns the same choice for all layers, and 16 bit for those that lack it."""
        return {
            item.name: next((option for option in item.options if option.name == name), item.options[-1])
            for item in self.items
        }

    def meets(self, recipe: Recipe, wanted: Budget | DeviceBudget) -> bool:
        """Says if a recipe is no larger than a budget allows."""
        if isinstance(wanted, Budget):
            return self._bytes(recipe, wanted.files) <= wanted.bytes
        return fits(wanted, self.checkpoint, usual(self.known.format)[0], recipe)

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
        budget, recipe = settled(fit, self.checkpoint, usual(self.known.format)[0], first, make)
        return recipe, solve(self.items, budget.bytes, at_most=True)

    def _bytes(self, recipe: Recipe, files: bool) -> int:
        target = target_of(self.checkpoint, recipe, keep_odd=True)
        return file_bytes(target.container(Path()), target.plan.pieces) if files else target.plan.bytes

    def recipe(self, solution: Solution, words: str) -> Recipe:
        """Returns a rule for every layer; the choice of most weights is the preset for what no rule names."""
        rules: list[Mapping[str, Any]] = []
        weights = Counter[tuple[str, int | None]]()
        for layer in self.known.layers:
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
            "preset": name, "group": group, "format": self.known.format, "rounder": options.rounder,
            "transform": options.transform, "kv": options.kv, "rules": rules,
        }  # fmt: skip
        return build(settings, words)

    def _roomy(self, words: str) -> RecipeError:
        return RecipeError(
            f"a budget of {words} has room for all of the model in 16 bit",
            fix=f"use --preset {UNROUNDED[self.known.format]}",
        )

    def _bits(self, size: int) -> str:
        return f"{8 * size / self.known.parameters:.3f}"


def _preset(rule: Mapping[str, Any]) -> tuple[str, int | None]:
    """Returns the preset and group of a rule; for a ggml type, the plainest file type that mainly uses it."""
    if "type" not in rule:
        return rule["preset"], rule.get("group")
    name = f"gguf-{rule['type'].lower()}"
    return (name if name in presets() else f"{name}_s"), None
