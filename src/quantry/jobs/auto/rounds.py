"""Rounds of measuring a mixture and its parts, correcting the predictions and choosing again."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from quantry.jobs.auto.calibrated_model import CalibratedModel
from quantry.jobs.auto.choices import KEEP, limited, model_choices
from quantry.jobs.auto.held_back import held_back
from quantry.jobs.auto.mixer import AutoOptions, Mixer
from quantry.jobs.auto.parts import Margins, corrected, figures, kind_of, segments
from quantry.jobs.auto.rivals import Rival, rivals
from quantry.jobs.auto.sensitivity import LayerSensitivity, Method, Sensitivity, measured_folder
from quantry.jobs.auto.solver import ItemOption, Solution
from quantry.jobs.auto.trial import Trial, Variant
from quantry.planning.budget import Budget, DeviceBudget
from quantry.quantizing.recipe import Recipe
from quantry.quantizing.slices import tensor_of
from quantry.report.stages import stages
from quantry.types import Progress

MOST = 1  # rounds with parts; the mixture that the last gives is measured as well, and a third gained nothing
MIXTURE = "mixture"
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe that meets the budget, and what it loses on the held-back windows."""

    name: str  # of a plain preset, or MIXTURE
    recipe: Recipe
    solution: Solution
    kl: float


class Rounds:
    """Chooses the recipe of a model for a budget by measurements."""

    def __init__(
        self,
        model: CalibratedModel,
        method: Method,
        options: AutoOptions,
        left_out: Collection[str],
        wanted: Budget | DeviceBudget,
        progress: Progress | None,
    ) -> None:
        choices = model_choices(model.checkpoint, method.format, method.rounder, method.transform)
        layers = limited(choices.layers, None)
        self._model, self._options, self._left_out, self._wanted = model, options, left_out, wanted
        self._tensors = {layer.name: frozenset(map(tensor_of, layer.slices)) for layer in layers}
        self._held = held_back(model)
        self._trial = Trial(model, self._held.windows, measured_folder(model, method, layers))
        self._few = (len(self._held.windows) + 1) // 2  # windows that parts are measured on
        self._progress = stages(progress, {str(number): 1 + (not number) for number in range(MOST + 1)})
        self._outside: dict[str, dict[str, float]] = {}  # layer -> choice -> measured
        self._parts: list[Figures] = []

    def choose(self, predicted: Sensitivity) -> tuple[Recipe, Sensitivity]:
        """Returns the recipe that loses least, and the corrected predictions with all that was measured."""
        known, tried = predicted, list[Candidate]()
        for number in range(MOST + 1):
            mixer = self._mixer(known)
            recipe, solution = mixer.solve(self._wanted)
            if any(_same(solution, earlier.solution) for earlier in tried):
                break
            others = [] if tried else rivals(mixer, self._wanted, recipe.budget or "")
            candidates, margins = self._measured(mixer, recipe, solution, others, number)
            tried += candidates
            if margins:
                self._parts = figures(predicted, _names(solution), margins)
                known = corrected(predicted, _names(solution), margins)
        best = min(tried, key=lambda one: one.kl)
        return best.recipe, replace(known, measured=self._record(tried, best))

    def _mixer(self, known: Sensitivity) -> Mixer:
        return Mixer(self._model.checkpoint, known, self._options, self._left_out)

    def _measured(
        self, mixer: Mixer, recipe: Recipe, solution: Solution, others: list[Rival], number: int
    ) -> tuple[list[Candidate], Margins | None]:
        """Measures a mixture, plain presets beside it and, unless it is the last, its parts, in one walk."""
        last = number == MOST
        parts = {} if last else self._depths(mixer.known, recipe) | self._kinds(mixer.known, recipe)
        ends = {} if last else self._ends(mixer, solution)
        wholes = [Variant(recipe), *(Variant(rival.recipe) for rival in others)]
        variants = [*wholes, *parts.values(), *ends.values()]
        found = self._trial.measure(variants, self._progress[str(number)])
        values = dict(zip(variants, found, strict=True))
        for (layer, choice), variant in ends.items():
            self._outside.setdefault(layer, {})[choice] = values[variant]
        named = [(MIXTURE, recipe, solution), *((rival.name, rival.recipe, rival.solution) for rival in others)]
        candidates = [Candidate(*one, kl) for one, kl in zip(named, found, strict=False)]
        if not parts:
            return candidates, None
        depths = tuple(values[variant] for name, variant in parts.items() if isinstance(name, range))
        kinds = {name: values[variant] for name, variant in parts.items() if isinstance(name, str)}
        return candidates, Margins(depths, kinds, self._outside, candidates[0].kl)

    def _depths(self, known: Sensitivity, recipe: Recipe) -> dict[range | str, Variant]:
        inside = [layer for layer in known.layers if layer.block is not None]
        blocks = 1 + max((layer.block or 0 for layer in inside), default=-1)
        return {
            cut: self._variant(recipe, [layer for layer in inside if layer.block in cut]) for cut in segments(blocks)
        }

    def _kinds(self, known: Sensitivity, recipe: Recipe) -> dict[range | str, Variant]:
        kinds: dict[str, list[LayerSensitivity]] = {}
        for layer in known.layers:
            if layer.block is not None:
                kinds.setdefault(kind_of(layer), []).append(layer)
        return {kind: self._variant(recipe, layers) for kind, layers in kinds.items()}

    def _variant(self, recipe: Recipe, layers: Collection[LayerSensitivity]) -> Variant:
        return Variant(recipe, frozenset().union(*(self._tensors[layer.name] for layer in layers)), self._few)

    def _ends(self, mixer: Mixer, solution: Solution) -> dict[tuple[str, str], Variant]:
        """Returns what is outside the blocks in the chosen type and in the next smaller and larger ones."""
        variants = {}
        plain = {item.name: item.options[0] for item in mixer.items}  # the same whatever is chosen elsewhere
        for layer in (layer for layer in mixer.known.layers if layer.block is None):
            options = next(item.options for item in mixer.items if item.name == layer.name)
            for option in _around(options, solution.chosen[layer.name]):
                choice = layer.candidate(option.name)
                if choice and choice.rule != KEEP and option.name not in self._outside.get(layer.name, {}):
                    recipe = mixer.recipe(Solution({**plain, layer.name: option}, 0, 0.0, 0.0), "")
                    variants[layer.name, option.name] = self._variant(recipe, [layer])
        return variants

    def _record(self, tried: list[Candidate], best: Candidate) -> Figures:
        """Returns what was measured, as plain JSON."""
        length = len(self._held.windows[0])
        mixtures = [one for one in tried if one.name == MIXTURE]
        shown = [min(mixtures, key=lambda one: one.kl), *(one for one in tried if one.name != MIXTURE)]
        return {
            "windows": len(self._held.windows),
            "length": length,
            "unseen": self._held.unseen,
            "written": best.name,
            "kl": best.kl,
            "candidates": [{"name": one.name, "bytes": one.solution.bytes, "kl": one.kl} for one in tried],
            "parts": self._parts,
            "words": _words(sorted(shown, key=lambda one: one.kl), len(self._held.windows)),
        }


def _names(solution: Solution) -> dict[str, str]:
    return {name: option.name for name, option in solution.chosen.items()}


def _same(one: Solution, other: Solution) -> bool:
    return _names(one) == _names(other)


def _around(options: Collection[ItemOption], chosen: ItemOption) -> list[ItemOption]:
    """Returns an option with its neighbours in size, of those that no smaller one betters."""
    ordered, best = [], float("inf")
    for option in sorted(options, key=lambda one: (one.bytes, one.damage)):
        if option.damage < best or option == chosen:
            ordered.append(option)
            best = min(best, option.damage)
    place = ordered.index(chosen)
    return ordered[max(0, place - 1) : place + 2]


def _words(ordered: list[Candidate], windows: int) -> str:
    """Returns one sentence on all that was measured, the best first."""
    (best, *others) = [("the mixture" if one.name == MIXTURE else one.name, f"{one.kl:.3g}") for one in ordered]
    first = f"{best[0][:1].upper()}{best[0][1:]} loses {best[1]} nats a token on {windows} held-back windows"
    rest = [f"{name} {loss}" for name, loss in others]
    plain = "" if ordered[0].name == MIXTURE else ": its types are written"
    return ", ".join([first, *rest]) + f"{plain}."
