"""Measures the predicted damage of every choice of every layer, block by block."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import sqrt

import torch
from torch import Tensor

from quantry.blockwise.walk import Walk
from quantry.jobs.auto.choices import LayerChoices
from quantry.llamacpp.tensor_map import HEAD
from quantry.methods.rounding import LayerInput
from quantry.models.linears import module_names
from quantry.quantizing.calibration import fisher
from quantry.quantizing.calibration.block_inputs import BlockInputs
from quantry.quantizing.calibration.fisher import Fisher
from quantry.quantizing.calibration.per_block import BlockCalibration, BlockSteps
from quantry.quantizing.calibration.store import Statistics
from quantry.quantizing.calibration.text import SEED, CalibrationText
from quantry.quantizing.calibration.transform import BlockTransform
from quantry.quantizing.makers.reader import WeightReader
from quantry.quantizing.slices import Slice, matrix, tensor_of
from quantry.types import Progress

GRADIENT_TOKENS = 1 << 13  # that gradients are averaged over: one number per row needs fewer than a Gram matrix
ROWS = 256  # of a layer that are rounded in every choice


@dataclass(frozen=True, slots=True)
class Measured:
    """The predicted damage and the relative weight error of each choice of a layer, and the outliers of its input."""

    damages: list[float]
    errors: list[float]
    outliers: float | None


class DamageMeter:
    """Weights, statistics and gradients of a model; `tied` says that its embedding is the head as well."""

    def __init__(
        self,
        statistics: Statistics,
        reader: WeightReader,
        transform: BlockTransform | None,
        tied: bool,
        progress: Progress | None,
    ) -> None:
        self._statistics, self._reader, self._transform, self._tied = statistics, reader, transform, tied
        self._progress, self._total = progress, 0
        self._calibration = BlockCalibration(statistics, BlockSteps(transform=transform), reader.whole)
        self._block: int | None = None
        self._known = BlockInputs()
        self._divisors: dict[tuple[str, int | None], Tensor] = {}  # of rows that a transform divided

    def measure(self, layers: Sequence[LayerChoices]) -> list[Measured]:
        """Measures all layers in the order of the blocks, so that one walk serves all."""
        steps = 2 * self._statistics.count + 1
        self._total = steps + len(layers)
        self._report(steps, f"{self.gradients.tokens} tokens of gradients")
        order = sorted(range(len(layers)), key=lambda number: (layers[number].block is not None, layers[number].block))
        measured = {}
        for done, number in enumerate(order, steps + 1):
            measured[number] = self._measure(layers[number])
            self._reader.release({tensor_of(part) for part in layers[number].slices})
            self._report(done, layers[number].name)
        return [measured[number] for number in range(len(layers))]

    def _measure(self, layer: LayerChoices) -> Measured:
        self.enter(layer.block)
        damages, squares = [0.0] * len(layer.choices), [0.0] * len(layer.choices)
        power, outliers = 0.0, {}
        for part in layer.slices:
            layer_input = self._input(part) if layer.block is not None else None
            weight, rows, share = self._sampled_rows(part, layer_input)
            if layer_input is not None:
                outliers[id(layer_input)] = _outliers(layer_input.stats.absmax)
            power += float(weight.float().square().sum(dtype=torch.float64))
            for number, choice in enumerate(layer.choices):
                error = choice.round(weight, layer_input) - weight
                squares[number] += float(error.square().sum(dtype=torch.float64))
                damages[number] += share * (
                    self.damage(layer, part, error, rows) + self._input_damage(part, weight, choice.noise, rows)
                )
        errors = [sqrt(square / power) if power else 0.0 for square in squares]
        return Measured(damages, errors, max((peak for peak in outliers.values() if peak is not None), default=None))

    def enter(self, block: int | None) -> None:
        """Goes to a block; outside of blocks nothing is known."""
        if block is None or block == self._block:
            return
        self._known, self._divisors = BlockInputs(), {}  # before another block takes memory
        self._known, self._block = self._calibration.enter(block), block
        if self._transform:
            self._divisors = self._transform.divisors(block, self._known.tensors, self._known.scales)

    def weight(self, part: Slice) -> Tensor:
        """Returns the weight of a layer, as a transform left it."""
        name = tensor_of(part)
        tensor = self._known.tensors[name] if name in self._known.tensors else self._reader.get(name)
        return self._reader.upload(matrix(tensor, part), name)

    def _sampled_rows(self, part: Slice, layer_input: LayerInput | None) -> tuple[Tensor, slice | Tensor, float]:
        """Returns some rows of a layer, which they are, and the factor by which their damage stands for all rows.

        Rows are rounded independently, and the damage of a row is in proportion to the damage of losing it.
        """
        weight = self.weight(part)
        if layer_input is None or len(weight) <= ROWS:
            return weight, slice(None), 1.0
        chosen = torch.linspace(0, len(weight) - 1, ROWS).round().long()
        some, fisher_rows, gram = weight[chosen.to(weight.device)], self._fisher_rows(part), layer_input.stats.gram
        lost = fisher.damage(some, fisher_rows[chosen], gram)
        return some, chosen, fisher.damage(weight, fisher_rows, gram) / lost if lost else len(weight) / ROWS

    def damage(self, layer: LayerChoices, part: Slice, error: Tensor, rows: slice | Tensor) -> float:
        """Predicts the damage of an error of some rows of a layer."""
        gradients = self.gradients
        if layer.block is not None:
            layer_input = self._input(part)
            if layer_input is None:
                return 0.0
            return fisher.damage(error, self._fisher_rows(part)[rows], layer_input.stats.gram)
        own = slice(*part.rows) if part.rows else slice(None)
        as_head = fisher.damage(error, gradients.head[own], gradients.gram.to(error.device))
        as_embedding = fisher.embedding_damage(error, gradients.seen, gradients.embedding)
        return as_head if layer.name == HEAD else as_embedding + (as_head if self._tied else 0.0)

    def _input_damage(self, part: Slice, weight: Tensor, noise: float, rows: slice | Tensor) -> float:
        layer_input = self._input(part) if noise else None
        if layer_input is None:
            return 0.0
        return fisher.input_damage(weight, self._fisher_rows(part)[rows], layer_input.stats.gram, noise)

    def _input(self, part: Slice) -> LayerInput | None:
        return self._known.input_of(tensor_of(part), part.expert)

    def _fisher_rows(self, part: Slice) -> Tensor:
        name = tensor_of(part)
        outputs = torch.cat([self.gradients.outputs[module] for module in module_names(name, part.expert)])
        divisor = self._divisors.get((name, part.expert))
        scaled = outputs if divisor is None else outputs * divisor.to(outputs.device).square()
        return scaled[slice(*part.rows)] if part.rows else scaled

    @cached_property
    def gradients(self) -> Fisher:
        """The Fisher information of the model's outputs."""
        statistics, walk = self._statistics, self._statistics.walk
        windows = statistics.text.tokens[: gradient_windows(statistics.text)]
        key = f"fisher {fisher.EDITION} {statistics.fingerprint} {walk.dtype} {len(windows)} {SEED}"

        def compute() -> Fisher:
            gradients = Walk(walk.source, device=walk.device, dtype=walk.dtype, memory=walk.memory)
            report = self._report
            return fisher.fisher(gradients, windows, seed=SEED, progress=lambda done, _, label: report(done, label))

        return fisher.load_or_compute(statistics.store, sha256(key.encode()).hexdigest()[:32], compute)

    def _report(self, done: int, label: str) -> None:
        if self._progress:
            self._progress(done, self._total, label)


def gradient_windows(text: CalibrationText) -> int:
    """Returns how many windows of a text, from the first, gradients are averaged over."""
    return max(1, GRADIENT_TOKENS // text.length)


def _outliers(absmax: Tensor) -> float | None:
    """Returns how far the largest channel stands out; None if most channels are silent."""
    middle = float(absmax.median())
    return float(absmax.max()) / middle if middle > 0 else None
