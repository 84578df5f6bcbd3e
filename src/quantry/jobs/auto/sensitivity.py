"""`quantry sensitivity`: how much each layer of a model loses in each choice to store it.

Every layer is rounded for real onto every grid that its format offers, with statistics of the 16-bit model, and the
Fisher information of the layer's outputs (calibration/fisher.py) turns the error into a predicted Kullback-Leibler
divergence. Layers that an engine must store alike are one item. One block is in memory at a time.

Predictions of several layers are summed, assuming that their errors are independent. They rank layers and grids; they
do not replace `quantry verify`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from quantry import __version__
from quantry.errors import QuantryError
from quantry.jobs.auto.calibrated_model import CalibratedModel, open_calibrated
from quantry.jobs.auto.choices import LayerChoices, limited, model_choices
from quantry.jobs.auto.damage import GRADIENT_TOKENS, ROWS, DamageMeter, Measured
from quantry.jobs.auto.solver import Item, ItemOption
from quantry.numerics.device import device as computing
from quantry.quantizing.calibration import fisher
from quantry.quantizing.calibration.advice import advise
from quantry.quantizing.calibration.calibrator import calibrated_texts
from quantry.quantizing.calibration.data import Data
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.calibration.store import default_store
from quantry.quantizing.calibration.transform import BlockTransform
from quantry.storage import SENSITIVITY_FILE
from quantry.storage.reading import read_json
from quantry.types import Anatomy, Checkpoint, Progress

COMPARED = {  # the choice that layers are ranked by: the first that a layer has
    "gguf": ("Q4_K", "Q4_0"),
    "compressed-tensors": ("w4a16-g128", "w4a16-g64", "w4a16-g32"),
}


@dataclass(frozen=True, slots=True)
class MeasuredChoice:
    """One way to store a layer; `rule` is the rest of a recipe's rule for it."""

    name: str
    bytes: int
    damage: float  # predicted KL in nats per token
    error: float  # of the weights: root mean square relative to theirs
    rule: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """A tensor, or layers that must be stored alike; `match` are the patterns of recipe rules that name it."""

    name: str
    part: str  # the same in every block
    block: int | None
    match: tuple[str, ...]
    parameters: int
    outliers: float | None  # largest magnitude of an input channel relative to the median channel
    candidates: tuple[MeasuredChoice, ...]

    def candidate(self, name: str) -> MeasuredChoice | None:
        return next((choice for choice in self.candidates if choice.name == name), None)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """All layers with their choices, and what is stored unchanged. Field names are the JSON names."""

    source: str
    format: str
    rounder: str
    transform: str | None
    parameters: int
    text: Mapping[str, Any]  # name, windows, length, tokens, gradient_tokens
    layers: tuple[LayerSensitivity, ...]
    kept: Mapping[str, int]  # tensor -> bytes
    notes: tuple[str, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)  # of mixtures: on what, and what each lost

    def items(self) -> tuple[Item, ...]:
        """Returns what a budget chooses from: every layer with its choices, every kept tensor with one."""
        chosen = [
            Item(layer.name, tuple(ItemOption(choice.name, choice.bytes, choice.damage) for choice in layer.candidates))
            for layer in self.layers
        ]
        return (*chosen, *(Item(name, (ItemOption("kept", size, 0.0),)) for name, size in self.kept.items()))

    def compared(self, layer: LayerSensitivity) -> MeasuredChoice:
        """Returns the choice that layers are ranked by: at about 4 bits, or else the most harmful one."""
        named = (layer.candidate(name) for name in COMPARED[self.format])
        return next((choice for choice in named if choice), None) or max(layer.candidates, key=lambda c: c.damage)

    def ranked(self) -> tuple[LayerSensitivity, ...]:
        """Returns the layers, the most sensitive first."""
        return tuple(sorted(self.layers, key=lambda layer: (-self.compared(layer).damage, layer.name)))

    def blocks(self) -> dict[int, dict[str, float]]:
        """Returns the summed damage of each block for every choice that all of its layers have."""
        inside = sorted((layer for layer in self.layers if layer.block is not None), key=lambda layer: layer.block or 0)
        sums = {}
        for block, group in groupby(inside, key=lambda layer: layer.block):
            tables = [{choice.name: choice.damage for choice in layer.candidates} for layer in group]
            common = [name for name in tables[0] if all(name in table for table in tables)]
            sums[block or 0] = {name: sum(table[name] for table in tables) for name in common}
        return sums

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "blocks": {str(block): sums for block, sums in self.blocks().items()}}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Sensitivity":
        """Inverts `to_dict`."""
        layers = []
        for layer in content["layers"]:
            candidates = tuple(MeasuredChoice(**choice) for choice in layer["candidates"])
            layers.append(LayerSensitivity(**{**layer, "match": tuple(layer["match"]), "candidates": candidates}))
        rest = {key: value for key, value in content.items() if key not in ("layers", "blocks", "notes")}
        return cls(**rest, layers=tuple(layers), notes=tuple(content["notes"]))


def sensitivity(
    model: str | Path,
    *,
    format: str = "gguf",  # noqa: A002 - the flag's name
    data: Data = None,
    samples: int | None = None,
    length: int | None = None,
    device: str = "cpu",
    rounder: str = "gptq",
    transform: str | None = None,
    grids: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Predicts the damage of storing each layer of `model` in each choice that `format` has.

    Statistics come from `samples` windows of `length` tokens of `data` (128 of 2048, and a text that comes with the
    package; several texts have weights, as in `quantize`), gradients from the first 8192 of these tokens. `transform`
    is applied to each block before. `grids` names the choices to try besides 16 bit; by default all, without those that
    another of the same size replaces.
    """
    method = Method(format, rounder, transform)
    return measure(model, method, CalibrationOptions(data, samples, length), computing(device), grids, progress)


@dataclass(frozen=True, slots=True)
class Method:
    """How layers are rounded for the measurement."""

    format: str
    rounder: str
    transform: str | None = None


def measure(
    model: str | Path,
    method: Method,
    options: CalibrationOptions,
    device: torch.device,
    grids: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measures every layer, or returns what an earlier run with the same text and method measured."""
    opened = open_calibrated(model, options, device)
    return replace(measure_opened(opened, method, grids, progress), source=str(model))


def measure_opened(
    model: CalibratedModel, method: Method, grids: Sequence[str] | None = None, progress: Progress | None = None
) -> Sensitivity:
    """Does the same for a model that is open."""
    choices = model_choices(model.checkpoint, method.format, method.rounder, method.transform)
    layers = limited(choices.layers, grids)
    path = measured_folder(model, method, layers) / SENSITIVITY_FILE
    earlier = _load(path)
    if earlier:
        if progress:
            progress(1, 1, "measured before")
        return earlier
    transform, blocks = method.transform, model.anatomy.blocks
    moves = BlockTransform(transform, model.checkpoint, blocks, choices.schemes) if transform else None
    meter = DamageMeter(model.statistics, model.reader(), moves, choices.tied, progress)
    measured = [_sensitivity(layer, result) for layer, result in zip(layers, meter.measure(layers), strict=True)]
    text = model.text
    described = {"name": text.name, "windows": len(text.tokens), "length": text.length, "tokens": text.count}
    described |= {"texts": [asdict(part) for part in calibrated_texts(text)]} if text.parts else {}
    sensitivities = Sensitivity(
        source=model.checkpoint.source,
        format=method.format,
        rounder=method.rounder,
        transform=method.transform,
        parameters=model.anatomy.parameters,
        text={**described, "gradient_tokens": meter.gradients.tokens},
        layers=tuple(measured),
        kept=choices.kept,
        notes=advise(text),
    )
    default_store().put(path, sensitivities.to_json().encode())
    return sensitivities


def unmeasured(checkpoint: Checkpoint, anatomy: Anatomy, method: Method) -> Sensitivity:
    """Returns the choices from headers alone; all damages are 0."""
    choices = model_choices(checkpoint, method.format, "nearest", method.transform)
    layers = tuple(
        _sensitivity(layer, Measured([0.0] * len(layer.choices), [0.0] * len(layer.choices), None))
        for layer in limited(choices.layers, None)
    )
    parameters, kept = anatomy.parameters, choices.kept
    return Sensitivity(checkpoint.source, method.format, "", method.transform, parameters, {}, layers, kept)


def _sensitivity(layer: LayerChoices, measured: Measured) -> LayerSensitivity:
    candidates = tuple(
        MeasuredChoice(choice.name, choice.bytes, damage, error, choice.rule)
        for choice, damage, error in zip(layer.choices, measured.damages, measured.errors, strict=True)
    )
    return LayerSensitivity(
        layer.name, layer.part, layer.block, layer.match, layer.parameters, measured.outliers, candidates
    )


def measured_folder(model: CalibratedModel, method: Method, layers: Sequence[LayerChoices]) -> Path:
    """Returns the folder of the store for what was measured; a hash of all that it depends on is its name."""
    names = [[choice.name for choice in layer.choices] for layer in layers]
    facts = (
        model.statistics.fingerprint, model.device.type, fisher.EDITION, __version__, ROWS, GRADIENT_TOKENS,
        *asdict(method).values(), names,
    )  # fmt: skip
    return default_store().folder / sha256(repr(facts).encode()).hexdigest()[:32]


def _load(path: Path) -> Sensitivity | None:
    """Reads what an earlier run measured: a solver may ask for many sizes, and a killed job resumes."""
    try:
        earlier = Sensitivity.from_dict(read_json(path, Sensitivity, fix="remove it"))
    except (QuantryError, TypeError):
        return None
    return earlier if all(layer.candidates for layer in earlier.layers) else None
