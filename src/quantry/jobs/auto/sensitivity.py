"""How much each layer of a model suffers from each way to store it: what a bit budget is spent by.

Every layer is rounded for real onto every grid that its format offers, from statistics of the 16-bit model, and the
error is turned into a predicted Kullback-Leibler divergence by the Fisher information of the layer's outputs
(calibration/fisher.py). Layers that an engine must store alike (q/k/v in vLLM, all experts of a layer) are one item; in
GGUF every tensor has a type of its own. What is in memory is one block.

Predictions of several layers are added up as if their errors did not meet. They rank layers and grids; they are no
replacement for `quantry verify`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import groupby
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantry import __version__, registry
from quantry.errors import CheckpointError, UnknownNameError
from quantry.jobs.auto.choices import FORMATS, Part, Planned, among, choices
from quantry.jobs.auto.solver import Item, Option
from quantry.llamacpp.tensor_map import HEAD
from quantry.models.anatomy import sixteen_bit
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint, small_folder
from quantry.models.tokenizer import load_tokenizer
from quantry.models.weights import MappedWeights, PlainWeights
from quantry.numerics.device import arithmetic
from quantry.numerics.device import device as computing
from quantry.quantizing.calibration.advice import diagnose
from quantry.quantizing.calibration.fisher import Fisher, damage, embedding_damage, fisher, input_damage, stored
from quantry.quantizing.calibration.observe import module_names
from quantry.quantizing.calibration.per_block import SEED, tensor_of
from quantry.quantizing.calibration.store import Statistics, default_store, put, statistics
from quantry.quantizing.calibration.text import LENGTH, SAMPLES, Data, load
from quantry.quantizing.calibration.transform import Transform
from quantry.quantizing.makers import Reader, matrix
from quantry.types import Anatomy, Checkpoint, Progress, Stats

FILE = "sensitivity.json"
GRADIENT_TOKENS = 1 << 13  # that gradients are averaged over: one number a row needs fewer than a Gram matrix does
ROWS = 256  # of a layer that are rounded in every way
COMPARED = {  # what layers are ranked by: the first that a layer can be stored in
    "gguf": ("Q4_K", "Q4_0"),
    "compressed-tensors": ("w4a16-g128", "w4a16-g64", "w4a16-g32"),
}
Make = Callable[[Tensor, Stats | None, Any], Tensor]  # weight, statistics, what the rounder made of them -> decoded


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store a layer; `rule` is the rest of a recipe's rule for it."""

    name: str
    bytes: int
    damage: float  # predicted KL in nats a token
    error: float  # of the weights: root mean square, relative to theirs
    rule: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """A tensor, or the layers that must be stored alike; `match` are the patterns of recipe rules that name it."""

    name: str
    part: str  # the same in every block
    block: int | None
    match: tuple[str, ...]
    parameters: int
    outliers: float | None  # largest magnitude of an input channel, relative to the median channel
    candidates: tuple[Candidate, ...]

    def candidate(self, name: str) -> Candidate | None:
        return next((one for one in self.candidates if one.name == name), None)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """All layers with all their candidates, and what is stored as it is. Field names are the JSON names."""

    source: str
    format: str
    rounder: str
    transform: str | None
    parameters: int
    text: Mapping[str, Any]  # name, windows, length, tokens, gradient_tokens
    layers: tuple[Layer, ...]
    kept: Mapping[str, int]  # tensor -> bytes
    notes: tuple[str, ...] = ()

    def items(self) -> tuple[Item, ...]:
        """What a budget chooses from: every layer with its candidates, every kept tensor with one."""
        chosen = [
            Item(layer.name, tuple(Option(one.name, one.bytes, one.damage) for one in layer.candidates))
            for layer in self.layers
        ]
        return (*chosen, *(Item(name, (Option("kept", size, 0.0),)) for name, size in self.kept.items()))

    def compared(self, layer: Layer) -> Candidate:
        """The candidate that layers are ranked by: at about 4 bits, or else its most harmful one."""
        found = (layer.candidate(name) for name in COMPARED[self.format])
        return next((one for one in found if one), None) or max(layer.candidates, key=lambda one: one.damage)

    def ranked(self) -> tuple[Layer, ...]:
        """The layers, the worst first."""
        return tuple(sorted(self.layers, key=lambda layer: (-self.compared(layer).damage, layer.name)))

    def blocks(self) -> dict[int, dict[str, float]]:
        """The summed damage of each block for every way in which all of its layers can be stored."""
        inside = sorted((layer for layer in self.layers if layer.block is not None), key=lambda layer: layer.block or 0)
        found = {}
        for block, group in groupby(inside, key=lambda layer: layer.block):
            tables = [{one.name: one.damage for one in layer.candidates} for layer in group]
            common = [name for name in tables[0] if all(name in table for table in tables)]
            found[block or 0] = {name: sum(table[name] for table in tables) for name in common}
        return found

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "blocks": {str(block): sums for block, sums in self.blocks().items()}}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Sensitivity":
        """The inverse of `to_dict`."""
        layers = tuple(
            Layer(
                **{
                    **layer,
                    "match": tuple(layer["match"]),
                    "candidates": tuple(Candidate(**one) for one in layer["candidates"]),
                }
            )
            for layer in content["layers"]
        )
        rest = {key: value for key, value in content.items() if key not in ("layers", "blocks", "notes")}
        return cls(**rest, layers=layers, notes=tuple(content["notes"]))


def sensitivity(
    model: str | Path,
    *,
    format: str = "gguf",  # noqa: A002 - the flag's name
    data: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    device: str = "cpu",
    rounder: str = "gptq",
    transform: str | None = None,
    grids: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """The predicted damage of storing each layer of `model` in each way that `format` has.

    Statistics are of `samples` windows of `length` tokens of `data` (128 of 2048, and a text that comes with the
    package), gradients of the first 8192 of these tokens. `transform` is done to each block before. `grids` names the
    ways to try beside 16 bit; all if left out, but those that another of the same size makes needless.
    """
    if format not in FORMATS:
        raise UnknownNameError(f"unknown format {format!r} to mix", fix=registry.suggest(format, FORMATS))
    rounding = registry.load("quantry.methods.rounders", rounder)
    where = computing(device)
    checkpoint = open_checkpoint(model)
    anatomy = sixteen_bit(checkpoint)
    job = choices(checkpoint, anatomy.blocks, format, rounding, transform)
    planned = among(job.layers, grids)
    text = _text(checkpoint, anatomy, data, samples, length)
    folder = local_folder(model)
    steps = _Steps(progress, 2 * anatomy.blocks + 1 + len(planned))
    seen = statistics(
        PlainWeights(checkpoint, folder),
        text,
        device=where,
        dtype=arithmetic(where),
        cache=default_store() if where.type == "cpu" else None,
        identity=identity(open_checkpoint(folder)),
    )
    path = default_store().folder / _key(seen, format, rounder, transform, planned) / FILE
    earlier = _stored(path)
    if earlier:
        steps.walked(steps.total, 0, "measured before")
        return replace(earlier, source=str(model))
    matters = _fisher(seen, steps)
    reader = Reader(checkpoint, MappedWeights(folder), where)
    moves = Transform(transform, checkpoint, anatomy.blocks, job.schemes) if transform else None
    layers = _measured(planned, _Layers(seen, matters, reader, rounding, job.tied, moves), steps)
    found = Sensitivity(
        source=str(model),
        format=format,
        rounder=rounder,
        transform=transform,
        parameters=anatomy.parameters,
        text={
            "name": text.name,
            "windows": len(text.tokens),
            "length": text.length,
            "tokens": text.count,
            "gradient_tokens": matters.tokens,
        },
        layers=tuple(layers),
        kept=job.kept,
        notes=diagnose(text),
    )
    put(default_store(), path, found.to_json().encode())
    return found


def _key(seen: Statistics, form: str, rounder: str, transform: str | None, planned: Sequence[Planned]) -> str:
    """A name for all that the figures depend on."""
    ways = [[way.name for way in one.ways] for one in planned]
    told = (seen.fingerprint, seen.device.type, __version__, ROWS, GRADIENT_TOKENS, form, rounder, transform, ways)
    return sha256(repr(told).encode()).hexdigest()[:32]


def _stored(path: Path) -> Sensitivity | None:
    """What an earlier run has measured: a solver may ask for many sizes, and a killed job goes on."""
    try:
        return Sensitivity.from_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def unmeasured(checkpoint: Checkpoint, anatomy: Anatomy, form: str, transform: str | None) -> Sensitivity:
    """What there is to choose from, by headers alone: no damage is known, and none is told."""
    job = choices(checkpoint, anatomy.blocks, form, registry.load("quantry.methods.rounders", "nearest"), transform)
    layers = [
        Layer(
            one.name, one.part, one.block, one.match, one.parameters, None,
            tuple(Candidate(way.name, way.bytes, 0.0, 0.0, way.rule) for way in one.ways),
        )
        for one in among(job.layers, None)
    ]  # fmt: skip
    return Sensitivity(checkpoint.source, form, "", transform, anatomy.parameters, {}, tuple(layers), job.kept)


def _text(
    checkpoint: Checkpoint, anatomy: Anatomy, data: str | Path | None, samples: int | None, length: int | None
) -> Data:
    """The same text that a calibrated job would read, so that stored statistics serve both."""
    if checkpoint.tokenizer is None:
        raise CheckpointError(
            f"{checkpoint.source} has no tokenizer, without which it cannot be run on text",
            fix="copy its files from the original model",
        )
    with small_folder(checkpoint, "model") as folder:
        tokenizer = load_tokenizer(folder)
    return load(
        data,
        tokenizer,
        samples=SAMPLES if samples is None else samples,
        length=LENGTH if length is None else length,
        seed=SEED,
        context=anatomy.context_length,
    )


def _fisher(seen: Statistics, steps: "_Steps") -> Fisher:
    dtype = arithmetic(seen.device)
    windows = seen.data.tokens[: max(1, GRADIENT_TOKENS // seen.data.length)]
    key = sha256(f"fisher {seen.fingerprint} {dtype} {len(windows)} {SEED}".encode()).hexdigest()[:32]
    found = stored(
        seen.cache,
        key,
        lambda: fisher(
            seen.source, windows, device=seen.device, dtype=dtype, seed=SEED, memory=seen.memory, progress=steps.walked
        ),
    )
    steps.walked(2 * seen.count + 1, 0, "statistics")
    return found


class _Steps:
    """Progress over the gradients of all blocks and then all layers."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self.total, self._done = progress, total, 0

    def walked(self, done: int, _: int, label: str) -> None:
        self._done = done
        if self._progress:
            self._progress(done, self.total, label)

    def layer(self, name: str) -> None:
        self.walked(self._done + 1, 0, name)


class _Layers:
    """The weights, statistics and gradients of one part of a layer after the other."""

    def __init__(
        self,
        seen: Statistics,
        matters: Fisher,
        reader: Reader,
        rounder: ModuleType,
        tied: bool,
        transform: Transform | None = None,
    ) -> None:
        self._seen, self._matters, self._reader, self._tied, self._transform = seen, matters, reader, tied, transform
        self._prepare: Callable[[Stats], Any] = getattr(rounder, "prepare", lambda stats: stats)
        self._block: int | None = None
        self._stats: dict[str, Stats] = {}  # by module
        self._tensors: dict[str, Tensor] = {}  # that a transform has changed
        self._divided: dict[tuple[str, int | None], Tensor] = {}  # and by what it has divided the rows of some
        self._prepared: dict[int, Any] = {}  # by the identity of the statistics

    def enter(self, block: int | None) -> None:
        if block is None or block == self._block:
            return
        self._stats, self._tensors, self._divided, self._prepared = {}, {}, {}, {}  # before others take memory
        observed = self._seen.observed(block)
        covered, _ = observed.covered(self._seen.least)
        self._stats = {module: covered[group] for module, group in observed.groups.items() if group in covered}
        if self._transform:
            made = self._transform.apply(block, self._stats, self._reader.whole)
            self._stats, self._tensors, self._divided = made.stats, made.block, self._transform.divided(block, made)
        self._block = block

    def weight(self, part: Part) -> Tensor:
        name = tensor_of(part)
        whole = self._tensors[name] if name in self._tensors else self._reader.get(name)
        return self._reader.upload(matrix(whole, part), name)

    def stats(self, part: Part) -> Stats | None:
        return self._stats.get(module_names(tensor_of(part), part.expert)[0])

    def prepared(self, stats: Stats | None) -> Any:
        if stats is not None and id(stats) not in self._prepared:
            self._prepared[id(stats)] = self._prepare(stats)
        return None if stats is None else self._prepared[id(stats)]

    def sampled(self, part: Part, stats: Stats | None) -> tuple[Tensor, slice | Tensor, float]:
        """Some rows of a part, which they are, and by what their damage is multiplied to stand for that of all.

        Rows are rounded on their own, and what a row costs goes with what it would cost to lose it.
        """
        weight = self.weight(part)
        if stats is None or len(weight) <= ROWS:
            return weight, slice(None), 1.0
        chosen = torch.linspace(0, len(weight) - 1, ROWS).round().long()
        some, rows = weight[chosen.to(weight.device)], self._rows(part)
        known = damage(some, rows[chosen], stats.gram)
        return some, chosen, damage(weight, rows, stats.gram) / known if known else len(weight) / ROWS

    def damage(self, layer: Planned, part: Part, error: Tensor, chosen: slice | Tensor) -> float:
        """The predicted damage of an error of the chosen rows of a part."""
        found, rows = self._matters, slice(*part.rows) if part.rows else slice(None)
        if layer.block is not None:
            stats = self.stats(part)
            return 0.0 if stats is None else damage(error, self._rows(part)[chosen], stats.gram)
        as_head = damage(error, found.head[rows], found.gram.to(error.device))
        as_embedding = embedding_damage(error, found.frequency[rows], found.embedding)
        return as_head if layer.name == HEAD else as_embedding + (as_head if self._tied else 0.0)

    def input_damage(self, part: Part, weight: Tensor, noise: float, chosen: slice | Tensor) -> float:
        stats = self.stats(part) if noise else None
        return 0.0 if stats is None else input_damage(weight, self._rows(part)[chosen], stats.gram, noise)

    def release(self, layer: Planned) -> None:
        self._reader.release({tensor_of(part) for part in layer.parts})

    def _rows(self, part: Part) -> Tensor:
        """What is known of the outputs of a part, which may be some rows of a tensor or of an expert in it."""
        names = module_names(tensor_of(part), part.expert)
        whole = torch.cat([self._matters.outputs[name] for name in names])
        divisor = self._divided.get((tensor_of(part), part.expert))
        whole = whole if divisor is None else whole * divisor.to(whole.device).square()  # of smaller outputs more
        return whole[slice(*part.rows)] if part.rows else whole


def _measured(planned: Sequence[Planned], given: _Layers, steps: _Steps) -> list[Layer]:
    """All layers, in the order of the blocks, so that one walk serves all."""
    order = sorted(range(len(planned)), key=lambda number: (planned[number].block is not None, planned[number].block))
    found = {}
    for number in order:
        found[number] = _measure(planned[number], given)
        given.release(planned[number])
        steps.layer(planned[number].name)
    return [found[number] for number in range(len(planned))]


def _measure(layer: Planned, given: _Layers) -> Layer:
    given.enter(layer.block)
    harm, errors = [0.0] * len(layer.ways), [0.0] * len(layer.ways)
    power, peaks = 0.0, {}
    for part in layer.parts:
        stats = given.stats(part) if layer.block is not None else None
        weight, chosen, share = given.sampled(part, stats)
        if stats is not None:
            peaks[id(stats)] = _outliers(stats.absmax)
        power += float(weight.float().square().sum(dtype=torch.float64))
        for number, way in enumerate(layer.ways):
            error = way.make(weight, stats, given.prepared(stats)) - weight
            errors[number] += float(error.square().sum(dtype=torch.float64))
            paid = given.damage(layer, part, error, chosen) + given.input_damage(part, weight, way.noise, chosen)
            harm[number] += share * paid
    candidates = tuple(
        Candidate(way.name, way.bytes, cost, sqrt(squares / power) if power else 0.0, way.rule)
        for way, cost, squares in zip(layer.ways, harm, errors, strict=True)
    )
    known = [peak for peak in peaks.values() if peak is not None]
    return Layer(
        layer.name, layer.part, layer.block, layer.match, layer.parameters, max(known) if known else None, candidates
    )


def _outliers(absmax: Tensor) -> float | None:
    """How far the largest channel stands out; nothing where most channels are silent."""
    middle = float(absmax.median())
    return float(absmax.max()) / middle if middle > 0 else None
