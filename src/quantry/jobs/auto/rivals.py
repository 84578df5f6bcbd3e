"""Plain presets that a mixture has to beat: the largest that meet the same budget."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantry.formats.gguf import NAME as GGUF
from quantry.jobs.auto.choices import KEEP
from quantry.jobs.auto.mixer import Mixer
from quantry.jobs.auto.solver import ItemOption, Solution
from quantry.planning.budget import Budget, DeviceBudget
from quantry.quantizing.containers.gguf_file import plan_gguf
from quantry.quantizing.recipe import Recipe, build, presets

MOST = 2  # that are measured
NEAR = 0.97  # of the bytes of the largest: a smaller one is not measured


@dataclass(frozen=True, slots=True)
class Rival:
    """A plain preset, as a choice for every layer."""

    name: str
    recipe: Recipe
    solution: Solution


def rivals(mixer: Mixer, wanted: Budget | DeviceBudget, words: str) -> list[Rival]:
    """Returns the plain presets with the mixture's rounder and transform that come closest to a budget from below."""
    plain = _file_types(mixer) if mixer.known.format == GGUF else _uniform(mixer)
    solutions = [(name, Solution(chosen, _bytes(chosen), 0.0, 0.0)) for name, chosen in plain]
    found: list[Rival] = []
    for name, solution in sorted(solutions, key=lambda one: -one[1].bytes):
        if len(found) == MOST or (found and solution.bytes < NEAR * found[0].solution.bytes):
            break
        known = any(solution.chosen == rival.solution.chosen for rival in found)
        if known or (isinstance(wanted, Budget) and solution.bytes > wanted.bytes):
            continue
        recipe = mixer.recipe(solution, words)
        if mixer.meets(recipe, wanted):
            found.append(Rival(name, recipe, solution))
    return found


def _bytes(chosen: Mapping[str, ItemOption]) -> int:
    return sum(option.bytes for option in chosen.values())


def _file_types(mixer: Mixer) -> Iterator[tuple[str, Mapping[str, ItemOption]]]:
    """Yields llama.cpp's file types; one with a type that is not chosen from for some tensor has a better rival."""
    for preset in presets().values():
        if GGUF not in preset.formats or preset.scheme.weight.is_cast:
            continue
        plan = plan_gguf(mixer.checkpoint, build({"preset": preset.name}))
        kinds = {piece.name: piece.kind for piece in plan.gguf_tensors()}
        chosen = {
            item.name: option
            for item in mixer.items
            for option in item.options
            if option.name == kinds.get(item.name) or len(item.options) == 1
        }
        if len(chosen) == len(mixer.items):
            yield preset.name.removeprefix(f"{GGUF}-").upper(), chosen


def _uniform(mixer: Mixer) -> Iterator[tuple[str, Mapping[str, ItemOption]]]:
    """Yields every choice for all layers that have it; others stay in 16 bit."""
    rules = {choice.name: choice.rule for layer in mixer.known.layers for choice in layer.candidates}
    offered = {option.name for item in mixer.items for option in item.options}
    for name in (name for name, rule in rules.items() if rule != KEEP and name in offered):
        yield name, mixer.alike(name)
