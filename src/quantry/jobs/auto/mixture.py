"""Preset auto: the grid of every tensor, chosen so that the least is lost within a size.

sensitivity.py predicts what each layer would lose in each choice, and the solver finds the smallest sum. Then it is
measured: what parts of that mixture lose on held-back windows corrects the predictions (parts.py), the solver chooses
again, and the best of all mixtures and plain presets that were measured is written. The result is an ordinary recipe
with a rule for every layer.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantry import registry
from quantry.devices import hardware
from quantry.engines.contract.catalogue import usual
from quantry.errors import RecipeError
from quantry.formats.contract import FORMATS as KNOWN
from quantry.jobs.auto.calibrated_model import open_calibrated
from quantry.jobs.auto.choices import FORMATS, FP8, KEEP
from quantry.jobs.auto.mixer import AutoOptions, Mixer
from quantry.jobs.auto.rounds import Rounds
from quantry.jobs.auto.sensitivity import Method, Sensitivity, measure_opened, unmeasured
from quantry.models.anatomy import sixteen_bit
from quantry.models.reader import open_checkpoint
from quantry.planning.budget import DeviceBudget, parse
from quantry.planning.deployment import Deployment
from quantry.planning.feasibility import feasible
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.recipe import Recipe
from quantry.report.stages import named, stages
from quantry.types import Checkpoint, Progress

PREDICTING, MEASURING = 2, 1  # shares of the time


@dataclass(frozen=True, slots=True)
class Mixture:
    """The chosen recipe, what it was chosen from, and the divergence that it is expected to have."""

    recipe: Recipe
    sensitivity: Sensitivity
    damage: float  # nats per token, measured on held-back windows

    def to_json(self, source: str) -> str:
        """Returns what it was chosen from, under a name that is no path of this machine."""
        return replace(self.sensitivity, source=source).to_json()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the card: what is expected, and what else was measured."""
        measured = self.sensitivity.measured
        expected = f"The predicted divergence is {self.damage:.3g} nats a token."
        return (expected, measured["words"]) if measured else (expected,)


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
    """Chooses the mixture of `model` that loses least within the budget.

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
    shown = stages(progress, {"predicting": PREDICTING, "measuring": MEASURING})
    opened = open_calibrated(model, text, device)
    predicted = measure_opened(opened, method, progress=named(shown["predicting"], "looking where bits matter"))
    rounds = Rounds(opened, method, options, left_out, wanted, named(shown["measuring"], "trying mixtures"))
    recipe, measured = rounds.choose(predicted)
    return Mixture(recipe, measured, measured.measured["kl"])


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
