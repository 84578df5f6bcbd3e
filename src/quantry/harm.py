"""How much each layer of a model suffers from each way to store it: what a bit budget is spent by.

Every layer is rounded for real onto every grid that its format offers, from statistics of the 16-bit model, and the
error is turned into a predicted Kullback-Leibler divergence by the Fisher information of the layer's outputs
(calibrate/fisher.py). Layers that an engine must store alike (q/k/v in vLLM, all experts of a layer) are one item; in
GGUF every tensor has a type of its own. What is in memory is one block.

Predictions of several layers are added up as if their errors did not meet. They rank layers and grids; they are no
replacement for `quantry verify`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import groupby
from math import prod, sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantry import gguf_file, registry
from quantry.anatomy import sixteen_bit
from quantry.arch.linears import EXPERT, Linear
from quantry.arch.parts import BLOCK, decoder_block
from quantry.budget import Item, Option
from quantry.calibrate.cache import Statistics, default_store, identity, statistics
from quantry.calibrate.data import LENGTH, SAMPLES, Data, load
from quantry.calibrate.doctor import diagnose
from quantry.calibrate.fisher import Fisher, damage, embedding_damage, fisher, input_damage, stored
from quantry.calibrate.statistics import module_names
from quantry.checkpoint.reader import local_folder, open_checkpoint, small_folder
from quantry.checkpoint.weights import DTYPES, MappedWeights, PlainWeights
from quantry.checkpoint.writer import nbytes
from quantry.compute import arithmetic
from quantry.compute import device as computing
from quantry.errors import CheckpointError, UnknownNameError
from quantry.formats import gguf
from quantry.inputs import SEED
from quantry.llamacpp.mixture import BLOCKS
from quantry.llamacpp.targets import EMBEDDING, HEAD, Source, Target
from quantry.makers import Reader, matrix
from quantry.numerics.grids import dequantize
from quantry.pieces import STORED, Assemble, Division, Keep, Quantize, divide
from quantry.recipe import Preset, from_options, preset
from quantry.tokenizing import load_tokenizer
from quantry.types import Anatomy, Checkpoint, Grid, Stats

FORMATS = ("gguf", "compressed-tensors")
GROUPS = (128, 64, 32)
GROUPED = ("w4a16", "w4a16-asym", "w8a16")  # what vLLM (0.32) loads side by side in one model, beside fp8
FP8 = "fp8-dynamic"
# E4M3 has steps of 1/8 of a power of two, so an error of 1/768 of its square; a value between two powers has 2.16 of
# that square in the mean, if its logarithm is spread evenly.
FP8_NOISE = 1 / 768 / 2.16
GRADIENT_TOKENS = 1 << 15  # that gradients are averaged over: one number a row needs fewer than a Gram matrix does
COMPARED = {  # what layers are ranked by: the first that a layer can be stored in
    "gguf": ("Q4_K", "Q4_0"),
    "compressed-tensors": ("w4a16-g128", "w4a16-g64", "w4a16-g32"),
}
KEEP = {"keep": True}  # the rule of 16 bit
Part = Linear | Source
Progress = Callable[[int, int, str], None]
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
    grids: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """The predicted damage of storing each layer of `model` in each way that `format` has.

    Statistics are of `samples` windows of `length` tokens of `data` (128 of 2048, and a text that comes with the
    package), gradients of the first 32768 of these tokens. `grids` names the ways to try beside 16 bit; all if left
    out.
    """
    if format not in FORMATS:
        raise UnknownNameError(f"unknown format {format!r} to mix", fix=registry.suggest(format, FORMATS))
    rounding = registry.load("quantry.rounders", rounder)
    where = computing(device)
    checkpoint = open_checkpoint(model)
    anatomy = sixteen_bit(checkpoint)
    job = (_gguf if format == "gguf" else _folder)(checkpoint, anatomy.blocks, rounding)
    planned = _chosen(job.layers, grids)
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
    matters = _fisher(seen, steps)
    reader = Reader(checkpoint, MappedWeights(folder), where)
    layers = _measured(planned, _Layers(seen, matters, reader, rounding, job.tied), steps)
    return Sensitivity(
        source=str(model),
        format=format,
        rounder=rounder,
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


def unmeasured(checkpoint: Checkpoint, anatomy: Anatomy, format: str) -> Sensitivity:  # noqa: A002 - as above
    """What there is to choose from, by headers alone: no damage is known, and none is told."""
    job = (_gguf if format == "gguf" else _folder)(
        checkpoint, anatomy.blocks, registry.load("quantry.rounders", "nearest")
    )
    layers = [
        Layer(
            one.name, one.part, one.block, one.match, one.parameters, None,
            tuple(Candidate(way.name, way.bytes, 0.0, 0.0, way.rule) for way in one.ways),
        )
        for one in job.layers
    ]  # fmt: skip
    return Sensitivity(str(checkpoint.source), format, "", anatomy.parameters, {}, tuple(layers), job.kept)


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
    """Gradients are small: on a CPU they are computed in float32."""
    dtype = torch.float32 if seen.device.type == "cpu" else torch.bfloat16
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
        self._progress, self._total, self._done = progress, total, 0

    def walked(self, done: int, _: int, label: str) -> None:
        self._done = done
        if self._progress:
            self._progress(done, self._total, label)

    def layer(self, name: str) -> None:
        self.walked(self._done + 1, 0, name)


# ---- what could be stored how ----


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to store a layer, and how its parts are rounded that way."""

    name: str
    bytes: int
    rule: Mapping[str, Any]
    make: Callable[..., Tensor]
    noise: float = 0.0  # of a rounded input


@dataclass(frozen=True, slots=True)
class _Planned:
    name: str
    part: str
    block: int | None
    match: tuple[str, ...]
    parameters: int
    parts: tuple[Part, ...]
    ways: tuple[_Way, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    layers: tuple[_Planned, ...]
    kept: Mapping[str, int]
    tied: bool  # the embedding is the head as well


def _chosen(layers: Sequence[_Planned], grids: Sequence[str] | None) -> list[_Planned]:
    """The layers with the ways that were asked for; 16 bit is always one."""
    if grids is None:
        return list(layers)
    known = {way.name.lower(): way.name for layer in layers for way in layer.ways}
    unknown = next((name for name in grids if name.lower() not in known), None)
    if unknown is not None:
        raise UnknownNameError(
            f"no layer can be stored as {unknown!r}", fix=registry.suggest(unknown, tuple(known.values()))
        )
    wanted = {known[name.lower()] for name in grids}
    return [
        replace(layer, ways=tuple(way for way in layer.ways if way.name in wanted or way.rule == KEEP))
        for layer in layers
    ]


def _gguf(checkpoint: Checkpoint, blocks: int, rounder: ModuleType) -> _Job:
    """Tensors of a GGUF file: those to which llama.cpp's own mixture gives a block type have the choice."""
    recipe = from_options("gguf-q4_k_m", None, None, None, None)
    division = gguf_file.divide(checkpoint, recipe)
    pieces = [piece for piece in division.pieces if isinstance(piece, Assemble)]
    plain, names = STORED[division.dtype], {piece.name for piece in pieces}
    layers, kept = [], {}
    for piece in pieces:
        sources = piece.target.sources
        block = decoder_block(sources[0].name, blocks) if sources else None
        if piece.kind in DTYPES or (block is None and piece.name not in (EMBEDDING, HEAD)):
            kept[piece.name] = _size(piece)
        else:
            ways = tuple(_gguf_ways(piece.target, plain, rounder))
            label = BLOCK.sub("", piece.name).removesuffix(".weight")
            size = prod(piece.target.shape)
            layers.append(_Planned(piece.name, label, block, (piece.name,), size, sources, ways))
    return _Job(tuple(layers), kept, HEAD not in names)


def _gguf_ways(target: Target, plain: str, rounder: ModuleType) -> Iterator[_Way]:
    for kind in (name.upper() for name in gguf.BLOCKS):
        if target.shape[-1] % BLOCKS[kind] == 0:
            make = partial(_rounded_blocks, kind, target, rounder)
            yield _Way(kind, nbytes(kind, target.shape), {"type": kind}, make)
    yield _Way(plain, nbytes(plain, target.shape), KEEP, partial(_cast, DTYPES[plain]))


def _folder(checkpoint: Checkpoint, blocks: int, rounder: ModuleType) -> _Job:
    """Linears of a compressed-tensors folder, in the groups that vLLM runs as one."""
    form = registry.load("quantry.formats", "compressed-tensors")
    recipe = from_options(FP8, None, None, "compressed-tensors", None)  # a grid that every shape fits
    division = divide(checkpoint, recipe, blocks, form, keep_odd=True)
    together: dict[str, list[Linear]] = {}
    for piece in division.pieces:
        if isinstance(piece, Quantize):
            together.setdefault(_kernel(piece.linears[0]), []).extend(piece.linears)
    layers = [_planned(name, linears, division, form, rounder, blocks) for name, linears in together.items()]
    kept = {piece.name: _size(piece) for piece in division.pieces if isinstance(piece, Keep)}
    return _Job(tuple(layers), kept, False)


def _kernel(linear: Linear) -> str:
    """The name of what vLLM runs with one scheme: fused linears, or all experts of a layer."""
    experts = EXPERT.split(linear.module)
    return f"{experts[0]}.experts" if len(experts) > 1 else linear.fused


def _planned(
    name: str, linears: Sequence[Linear], division: Division, form: ModuleType, rounder: ModuleType, blocks: int
) -> _Planned:
    experts = name.endswith(".experts")
    match = (f"{name}.*",) if experts else tuple(linear.module for linear in linears)
    ways = tuple(_folder_ways(linears, division.dtype, form, rounder))
    block, size = decoder_block(linears[0].source, blocks), sum(prod(linear.shape) for linear in linears)
    return _Planned(name, BLOCK.split(name)[-1], block, match, size, tuple(linears), ways)


def _folder_ways(linears: Sequence[Linear], dtype: str, form: ModuleType, rounder: ModuleType) -> Iterator[_Way]:
    choices: list[tuple[str, int | None]] = [(name, group) for name in GROUPED for group in GROUPS]
    for name, group in [*choices, (FP8, None)]:
        if group and any(linear.shape[1] % group for linear in linears):
            continue
        chosen = replace(preset(name, group), rounder=rounder.__name__.rpartition(".")[2])
        grid = form.stored_grid(chosen.scheme.weight, dtype)
        layouts = [form.layout(linear.module, linear.shape, grid) for linear in linears]
        size = sum(nbytes(*entry) for layout in layouts for entry in layout.values())
        rule = {"preset": name, **({"group": group} if group else {})}
        make = partial(_rounded_grid, chosen, grid, rounder)
        yield _Way(f"{name}-g{group}" if group else name, size, rule, make, 0.0 if group else FP8_NOISE)
    size = sum(nbytes(STORED[dtype], linear.shape) for linear in linears)
    yield _Way(dtype, size, KEEP, partial(_cast, DTYPES[STORED[dtype]]))


def _size(piece: Assemble | Keep) -> int:
    return sum(nbytes(dtype, shape) for _, dtype, shape in piece.entries)


# ---- rounding, as the makers do it ----


def _rounded_blocks(
    kind: str, target: Target, rounder: ModuleType, weight: Tensor, stats: Stats | None, prepared: Any
) -> Tensor:
    arranged = gguf.arranged(weight, target)
    data = gguf.encode(arranged, kind, None) if stats is None else rounder.round_blocks(arranged, kind, prepared)
    return gguf.restored(gguf.decode(data, kind, weight.shape[1]), target)


def _rounded_grid(
    chosen: Preset, grid: Grid, rounder: ModuleType, weight: Tensor, stats: Stats | None, prepared: Any
) -> Tensor:
    assert chosen.fit is not None
    fit = registry.load("quantry.fits", chosen.fit).fit
    params = fit(weight, grid, None, stats if chosen.calibrated else None)
    return dequantize(rounder.round_weight(weight, grid, params, prepared))


def _cast(dtype: torch.dtype, weight: Tensor, stats: Stats | None, prepared: Any) -> Tensor:
    return weight.to(dtype).float()


# ---- what it costs ----


class _Layers:
    """The weights, statistics and gradients of one part of a layer after the other."""

    def __init__(self, seen: Statistics, matters: Fisher, reader: Reader, rounder: ModuleType, tied: bool) -> None:
        self._seen, self._matters, self._reader, self._tied = seen, matters, reader, tied
        self._prepare: Callable[[Stats], Any] = getattr(rounder, "prepare", lambda stats: stats)
        self._block: int | None = None
        self._stats: dict[str, Stats] = {}  # by module
        self._prepared: dict[int, Any] = {}  # by the identity of the statistics

    def enter(self, block: int | None) -> None:
        if block is None or block == self._block:
            return
        self._stats, self._prepared = {}, {}  # before others take memory
        observed = self._seen.observed(block)
        covered, _ = observed.covered(self._seen.least)
        self._stats = {module: covered[group] for module, group in observed.groups.items() if group in covered}
        self._block = block

    def weight(self, part: Part) -> Tensor:
        name = _tensor(part)
        return self._reader.upload(matrix(self._reader.get(name), part), name)

    def stats(self, part: Part) -> Stats | None:
        return self._stats.get(module_names(_tensor(part), part.expert)[0])

    def prepared(self, stats: Stats | None) -> Any:
        if stats is not None and id(stats) not in self._prepared:
            self._prepared[id(stats)] = self._prepare(stats)
        return None if stats is None else self._prepared[id(stats)]

    def damage(self, layer: _Planned, part: Part, error: Tensor) -> float:
        """The predicted damage of an error of a part."""
        found, rows = self._matters, slice(*part.rows) if part.rows else slice(None)
        if layer.block is not None:
            stats = self.stats(part)
            return 0.0 if stats is None else damage(error, self._rows(part), stats.gram)
        as_head = damage(error, found.head[rows], found.gram.to(error.device))
        as_embedding = embedding_damage(error, found.frequency[rows], found.embedding)
        return as_head if layer.name == HEAD else as_embedding + (as_head if self._tied else 0.0)

    def input_damage(self, part: Part, weight: Tensor, noise: float) -> float:
        stats = self.stats(part) if noise else None
        return 0.0 if stats is None else input_damage(weight, self._rows(part), stats.gram, noise)

    def release(self, layer: _Planned) -> None:
        self._reader.release({_tensor(part) for part in layer.parts})

    def _rows(self, part: Part) -> Tensor:
        """What is known of the outputs of a part, which may be some rows of a tensor or of an expert in it."""
        names = module_names(_tensor(part), part.expert)
        whole = torch.cat([self._matters.outputs[name] for name in names])
        return whole[slice(*part.rows)] if part.rows else whole


def _tensor(part: Part) -> str:
    return part.source if isinstance(part, Linear) else part.name


def _measured(planned: Sequence[_Planned], given: _Layers, steps: _Steps) -> list[Layer]:
    """All layers, in the order of the blocks, so that one walk serves all."""
    order = sorted(range(len(planned)), key=lambda number: (planned[number].block is not None, planned[number].block))
    found = {}
    for number in order:
        found[number] = _measure(planned[number], given)
        given.release(planned[number])
        steps.layer(planned[number].name)
    return [found[number] for number in range(len(planned))]


def _measure(layer: _Planned, given: _Layers) -> Layer:
    given.enter(layer.block)
    harm, errors = [0.0] * len(layer.ways), [0.0] * len(layer.ways)
    power, peaks = 0.0, {}
    for part in layer.parts:
        weight = given.weight(part)
        stats = given.stats(part) if layer.block is not None else None
        if stats is not None:
            peaks[id(stats)] = _outliers(stats.absmax)
        power += float(weight.float().square().sum(dtype=torch.float64))
        for number, way in enumerate(layer.ways):
            error = way.make(weight, stats, given.prepared(stats)) - weight
            errors[number] += float(error.square().sum(dtype=torch.float64))
            harm[number] += given.damage(layer, part, error) + given.input_damage(part, weight, way.noise)
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
