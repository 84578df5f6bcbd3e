"""Where bits are spent: is the harm ranked as it happens, and what does `auto` lose at the size of other files?

    python benchmarks/bit_budget.py [NAME=]MODEL ... --data CALIBRATION --text TEST
        [--samples 64 --length 512 --windows 8]
        [--only rank,gguf,folder,sizes] [--peers llamacpp=BIN_FOLDER] [--vllm PYTHON] [--work FOLDER]
        [--pairs 90 --rank-windows 4 --device cpu|cuda] [-o benchmarks/results/bit_budget.json [--resume]]

rank    the damage that `sensitivity` predicts from CALIBRATION against the KL on TEST of the model with that one
        layer rounded, in float32 and over the whole vocabulary. Of all layers in three grids each, some are drawn; an
        embedding or a head outside the blocks is always among them. The rounding is the one that was predicted from,
        without a transform.
gguf    llama.cpp's own Q4_K_M, Q3_K_M and Q2_K with its imatrix of the same text, the same with AWQ and GPTQ, and
        `auto` at the bytes of each file of llama.cpp, with what it said that it would lose.
folder  every W4A16 of groups of 64 in compressed-tensors, and `auto` at their bytes, served by vLLM where it is given.
sizes   the demo model at eight budgets for each format: bytes asked for and bytes of the files.

Every model has a column of its own in the file, by its name or that of its folder. A part that has been measured stays:
--resume goes on with what is not there or has failed, also with another model and other texts. Files are made,
measured and removed one after the other, as in calibrated_quality.py, where it is said how to get llama.cpp's tools.
The rank needs only torch, transformers, numpy and gguf, so it may be run where there is a GPU and little else:
PYTHONPATH=src python benchmarks/bit_budget.py MODEL --only rank --device cuda -o FILE.
"""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import quantry  # noqa: E402
from quantry.blockwise.skeleton import WeightSource  # noqa: E402
from quantry.blockwise.taps import Place  # noqa: E402
from quantry.blockwise.walk import Block, Walk, run  # noqa: E402
from quantry.errors import QuantryError  # noqa: E402
from quantry.jobs.auto import damage, sensitivity  # noqa: E402
from quantry.jobs.auto.choices import FORMATS, LayerChoices, StorageChoice  # noqa: E402
from quantry.models.anatomy import sixteen_bit  # noqa: E402
from quantry.models.reader import local_folder, open_checkpoint  # noqa: E402
from quantry.models.tokenizer import load_tokenizer  # noqa: E402
from quantry.models.weights import PlainWeights  # noqa: E402
from quantry.proof.divergence import full_kl  # noqa: E402
from quantry.proof.text import load_text  # noqa: E402
from quantry.proof.text import windows as cut  # noqa: E402
from quantry.quantizing.recipe import preset  # noqa: E402
from quantry.quantizing.slices import tensor_of, view  # noqa: E402
from quantry.storage import SENSITIVITY_FILE  # noqa: E402
from quantry.types import Activation  # noqa: E402

if TYPE_CHECKING:  # it needs the packages of llama.cpp's peers, which a machine for the rank may lack
    from calibrated_quality import Bench, Row

PARTS = ("rank", "gguf", "folder", "sizes")
LADDER = {  # three grids for every layer: the first of each that it can be stored in
    "gguf": (("Q2_K", "Q4_0"), ("Q4_K", "Q5_0"), ("Q6_K", "Q8_0")),
    "compressed-tensors": (
        ("w4a16-g128", "w4a16-g64", "w4a16-g32"),
        ("fp8-dynamic",),
        ("w8a16-g128", "w8a16-g64", "w8a16-g32"),
    ),
}
SEED = 8
AGREEMENT = 0.02  # of the KL of one pair, measured in two ways
BUDGETS = 8
NEAR = 0.995  # of the bytes asked for
FIGURES = ("kl", "kl_median", "kl_p99", "top1", "perplexity")
UNIFORM = ("w4-g64", "w4-g64-zero")
Figures = dict[str, Any]


def main() -> None:
    options = _options()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    results = Results(options.output, options.resume)
    work = options.work
    for name, model in options.models.items():
        options.name, options.model, options.work = name, model, work / name
        _column(options, results)
    record = results.record()
    print(markdown(record))
    print(json.dumps(record))
    if results.failed:
        sys.exit(1)


def _column(options: argparse.Namespace, results: "Results") -> None:
    """All parts of one model."""
    os.environ["QUANTRY_CACHE"] = str(options.work / "store")
    results.model = options.name
    if "rank" in options.only:
        rank(options, results)
    if {"gguf", "folder"} & set(options.only):
        artefacts = Artefacts(options, results)
        if "gguf" in options.only:
            artefacts.gguf()
        if "folder" in options.only:
            artefacts.folder()
    if "sizes" in options.only:
        sizes(options, results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL")
    parser.add_argument("--data", type=Path, help="text to calibrate on; for the rank the demo's if left out")
    parser.add_argument("--text", type=Path, help="text to measure on; for the rank the demo's if left out")
    for name, default in (
        ("--samples", 64),
        ("--length", 512),
        ("--windows", 8),
        ("--pairs", 90),
        ("--rank-windows", 4),
    ):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--device", default="cpu", help="for the rank")
    parser.add_argument("--peers", nargs="*", default=[], metavar="llamacpp=BIN_FOLDER")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--work", type=Path, default=Path("bit_budget.work"))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    options.only = options.only.split(",")
    options.models = dict(map(_named, options.models))
    options.peers = {name: _absolute(place) for name, _, place in (peer.partition("=") for peer in options.peers)}
    options.data, options.text, options.vllm = map(_absolute, (options.data, options.text, options.vllm))
    _check(options, parser)
    return options


def _named(text: str) -> tuple[str, str]:
    name, sign, place = text.partition("=")
    return (name, place) if sign else (Path(text).name, text)


def _absolute(place: str | Path | None) -> Path | None:
    """Jobs have a working folder of their own. Links stay: a link to Python tells where its packages are."""
    return Path(place).expanduser().absolute() if place else None


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    unknown = [part for part in options.only if part not in PARTS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: known are {', '.join(PARTS)}")
    if {"gguf", "folder"} & set(options.only) and not (options.data and options.text):
        parser.error("gguf and folder need --data and --text")
    if "gguf" in options.only and not Path(options.peers.get("llamacpp") or "/absent", "llama-imatrix").exists():
        parser.error("gguf needs --peers llamacpp=BIN_FOLDER with llama-imatrix and llama-quantize in it")
    if options.vllm and not options.vllm.exists():
        parser.error(f"--vllm {options.vllm}: there is no such program")
    if options.pairs < 3 or options.rank_windows < 1:
        parser.error("--pairs is 3 or more and --rank-windows 1 or more")
    if options.resume and not options.output:
        parser.error("--resume needs -o")


class Results:
    """All that has been measured, by model, part and name, written after every step; `model` is the one in hand."""

    def __init__(self, file: Path | None, resume: bool) -> None:
        self._file, self.model = file, ""
        self._models: dict[str, dict[str, Figures]] = {}
        if file and resume and file.exists():
            self._models = {name: one["parts"] for name, one in json.loads(file.read_text())["models"].items()}

    def done(self, part: str, settings: Figures) -> dict[str, Figures]:
        """The rows of a part that are there, if they were measured with the same settings."""
        parts = self._models.setdefault(self.model, {})
        found = parts.setdefault(part, {"settings": settings, "versions": {}, "rows": {}})
        if found["settings"] != settings:
            sys.exit(f"{self._file} has {part} of other settings: {found['settings']}, not {settings}")
        rows: dict[str, Figures] = found["rows"]
        return {name: row for name, row in rows.items() if "failed" not in row}

    def keep(self, part: str, name: str, row: Figures, versions: Mapping[str, Any] | None = None) -> None:
        here = self._models[self.model][part]
        here["rows"][name] = row
        here["versions"] |= {**_versions(), **(versions or {})}
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial_file = self._file.with_name(f"{self._file.name}.partial")
            partial_file.write_text(json.dumps(self.record(), indent=2) + "\n")
            partial_file.replace(self._file)

    def record(self) -> Figures:
        return {
            "benchmark": "bit_budget",
            "date": datetime.now(UTC).date().isoformat(),
            "models": {name: {"summary": _summary(parts), "parts": parts} for name, parts in self._models.items()},
        }

    @property
    def failed(self) -> bool:
        parts = [part for parts in self._models.values() for part in parts.values()]
        return any("failed" in row for part in parts for row in part["rows"].values())


def _summary(parts: Mapping[str, Figures]) -> Figures:
    rows = {part: found["rows"] for part, found in parts.items()}
    return {
        "rank": {name: _short(row) for name, row in rows.get("rank", {}).items() if "failed" not in row},
        "gguf": beside_llamacpp(rows.get("gguf", {})),
        "gguf_plain": beside_uniform(rows.get("gguf", {})),
        "folder": beside_uniform(rows.get("folder", {})),
        "sizes": _sizes_met(rows.get("sizes", {})),
    }


def _versions() -> Figures:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "quantry": quantry.__version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }


# ---- rank: one layer alone, predicted and measured ----


@dataclass(frozen=True, slots=True)
class Pair:
    """A layer in a grid: the tensors that it is made of with that rounding, and how its inputs are rounded."""

    layer: str
    part: str
    block: int | None
    grid: str
    tensors: Mapping[str, Tensor]
    activation: Activation | None


def rank(options: argparse.Namespace, results: Results) -> None:
    """How well the predicted damage of storing one layer ranks what storing it does."""
    model = local_folder(options.model)
    text = load_text(options.text)
    windows = [window.tokens for window in cut(text, load_tokenizer(model), options.length, options.rank_windows)]
    settings = {
        "model": options.name,
        "data": options.data.name if options.data else None,
        "samples": options.samples,
        "length": options.length,
        "text": text.name,
        "windows": len(windows),
        "pairs": options.pairs,
        "device": options.device,
    }
    done = results.done("rank", settings)
    card = {"device": torch.cuda.get_device_name()} if options.device.startswith("cuda") else {}
    for form in (form for form in FORMATS if form not in done):
        try:
            row = _ranked(model, windows, form, options)
        except (QuantryError, ModuleNotFoundError) as error:  # names of GGUF tensors come from the package gguf
            row = {"failed": str(error)}
        results.keep("rank", form, row, card)
        print(json.dumps({"rank": form, **_short(row)}), flush=True)


def _ranked(model: Path, windows: Sequence[Sequence[int]], form: str, options: argparse.Namespace) -> Figures:
    start = time.perf_counter()
    drawing = Drawing(PlainWeights(open_checkpoint(model), model), LADDER[form], options.pairs)
    predicted = drawing.predicted(model, form, options)
    middle = time.perf_counter()
    print(f"rank, {form}: {len(drawing.pairs)} pairs predicted in {middle - start:.0f} s", flush=True)
    measured = measure(drawing.source, windows, drawing.pairs, options.device)
    return {
        **compared(drawing.pairs, predicted, measured),
        "prediction_seconds": round(middle - start, 1),
        "measuring_seconds": round(time.perf_counter() - middle, 1),
    }


class Drawing:
    """Some of all layers and grids, and what they were rounded to while their damage was predicted."""

    def __init__(self, source: WeightSource, ladder: Sequence[Sequence[str]], count: int) -> None:
        self.source, self._ladder, self._count = source, ladder, count
        self._kept: dict[tuple[str, str], list[Tensor]] = {}
        self._drawn: list[tuple[LayerChoices, StorageChoice]] = []
        self._keeps = True
        self.pairs: list[Pair] = []

    def predicted(self, model: Path, form: str, options: argparse.Namespace) -> list[float]:
        """The damage that `sensitivity` predicts for each pair."""
        how = {"format": form, "data": options.data, "samples": options.samples, "length": options.length}
        anew = patch.object(sensitivity.Sensitivity, "from_dict", _nothing)  # an earlier run has no roundings
        with anew, patch.object(sensitivity, "limited", self._drawn_choices):
            with patch.object(damage, "ROWS", 1 << 60):  # layers are rounded whole, to be measured
                sensitivity.sensitivity(model, device=options.device, **how)
            self._keeps = False
            found = sensitivity.sensitivity(model, device=options.device, **how)
        self.pairs = [self._pair(layer, way) for layer, way in self._drawn]
        damages = {(layer.name, one.name): one.damage for layer in found.layers for one in layer.candidates}
        return [damages[pair.layer, pair.grid] for pair in self.pairs]

    def _drawn_choices(self, layers: Sequence[LayerChoices], _: Sequence[str] | None) -> list[LayerChoices]:
        """In place of what `sensitivity` would try: the drawn choices alone, each with its rounding kept."""
        all_ways = [(layer, way) for layer in layers for way in _rungs(layer, self._ladder)]
        inside = [one for one in all_ways if one[0].block is not None]
        drawn = random.Random(SEED).sample(inside, min(self._count, len(inside)))
        self._drawn = [*drawn, *(one for one in all_ways if one[0].block is None)]
        self._drawn.sort(key=all_ways.index)
        wanted = {(layer.name, way.name) for layer, way in self._drawn}
        cut_down = [
            replace(
                layer,
                choices=tuple(self._noted(layer, way) for way in layer.choices if (layer.name, way.name) in wanted),
            )
            for layer in layers
        ]
        return [layer for layer in cut_down if layer.choices]

    def _noted(self, layer: LayerChoices, way: StorageChoice) -> StorageChoice:
        kept = self._kept.setdefault((layer.name, way.name), [])

        def make(*given: Any) -> Tensor:
            decoded = way.round(*given)
            if self._keeps:
                kept.append(decoded.float().cpu())
            return decoded

        return replace(way, round=make)

    def _pair(self, layer: LayerChoices, way: StorageChoice) -> Pair:
        tensors: dict[str, Tensor] = {}
        for piece, decoded in zip(layer.slices, self._kept[layer.name, way.name], strict=True):
            name = tensor_of(piece)
            if name not in tensors:
                tensors[name] = self.source.read(name).float()
            view(tensors[name], piece).copy_(decoded)
        activation = preset(str(way.rule["preset"])).scheme.activation if way.noise else None
        return Pair(layer.name, layer.part, layer.block, way.name, tensors, activation)


def _rungs(layer: LayerChoices, ladder: Sequence[Sequence[str]]) -> Iterator[StorageChoice]:
    ways = {way.name: way for way in layer.choices}
    for rung in ladder:
        yield from [ways[name] for name in rung if name in ways][:1]


def _nothing(content: Any) -> Any:
    raise ValueError("measured anew")


@torch.no_grad()
def measure(source: WeightSource, windows: Sequence[Sequence[int]], pairs: Sequence[Pair], device: str) -> list[float]:
    """The mean KL in nats of the model with one pair's tensors instead of its own, for each pair.

    One walk serves all: a pair's hidden states part from the model's at its block and go through the blocks behind it
    side by side with the others'. So every block is loaded once, and nothing before a pair's block is computed again.
    """
    walk = Walk(source, device=device)
    apart: dict[int, list[Tensor]] = {}  # pair -> hidden states of each batch
    for block in walk.blocks(windows):
        for states in apart.values():
            states[:] = [block.apply(batch, state) for batch, state in zip(walk.batches, states, strict=True)]
        for number, pair in enumerate(pairs):
            if pair.block == block.index:
                apart[number] = _parted(block, pair)
        print(f"  block {block.index + 1} of {walk.count}, {len(apart)} pairs", flush=True)
    sums = _at_the_end(walk, apart)
    positions = sum(map(len, windows))
    found = {number: total / positions for number, total in sums.items()}
    outside = {number: _alone(source, windows, pair, device) for number, pair in enumerate(pairs) if pair.block is None}
    for number in {pairs[number].grid: number for number in reversed(found)}.values():
        _agree(found[number], _alone(source, windows, pairs[number], device), pairs[number])
    return [{**found, **outside}[number] for number in range(len(pairs))]


def _parted(block: Block, pair: Pair) -> list[Tensor]:
    """What a block gives with a pair's tensors; its own are put back."""
    block.replace(pair.tensors, _places(block, pair))
    outputs = list(block.outputs())
    block.replace({name: block.skeleton.source.read(name) for name in pair.tensors})
    return outputs


def _places(block: Block, pair: Pair) -> dict[Place, Activation]:
    """The linear layers whose input a pair rounds."""
    if pair.activation is None:
        return {}
    state = block.skeleton.model.state_dict()
    found: dict[Place, Activation] = {}
    for key in {key for name in pair.tensors for key in block.skeleton.makes[name]}:
        experts = range(len(state[key])) if state[key].ndim == 3 else [None]
        found |= {(key.removesuffix(".weight"), expert): pair.activation for expert in experts}
    return found


def _at_the_end(walk: Walk, apart: Mapping[int, Sequence[Tensor]]) -> dict[int, float]:
    """The KL of the logits behind the last block, summed over all positions."""
    skeleton, sums = walk.skeleton, dict.fromkeys(apart, 0.0)
    with skeleton.loaded(skeleton.after):
        for place, batch in enumerate(walk.batches):
            for row in range(len(batch.windows)):
                logits = partial(skeleton.tail, batch.tokens[row : row + 1], quantized_inputs=nullcontext())
                plain = logits(batch.hidden[row : row + 1])
                for number, states in apart.items():
                    sums[number] += float(full_kl(plain, logits(states[place][row : row + 1])).sum())
    return sums


@dataclass(frozen=True, slots=True)
class Changed:
    """A model with some other tensors (walk.Source)."""

    source: WeightSource
    tensors: Mapping[str, Tensor]
    activations: Mapping[str, Activation]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.source.config

    @property
    def names(self) -> Sequence[str]:
        return self.source.names

    def read(self, name: str) -> Tensor:
        return self.tensors[name] if name in self.tensors else self.source.read(name)


def _alone(source: WeightSource, windows: Sequence[Sequence[int]], pair: Pair, device: str) -> float:
    """The mean KL of a model that is run from its first token to its logits with a pair's tensors."""
    modules = [name.removesuffix(".weight") for name in pair.tensors]
    rounded = dict.fromkeys(modules, pair.activation) if pair.activation else {}
    both = (source, Changed(source, pair.tensors, rounded))
    plain, other = (run(one, windows, device=device) for one in both)
    total = sum(float(full_kl(p, q).sum()) for (_, p), (_, q) in zip(plain, other, strict=True))
    return total / sum(map(len, windows))


def _agree(parted: float, alone: float, pair: Pair) -> None:
    """The walk that all pairs share must find what a walk of a pair's own finds; tried on the first of each grid."""
    if abs(parted - alone) > AGREEMENT * alone:
        sys.exit(f"{pair.layer} as {pair.grid} has a KL of {parted} in the shared walk and {alone} in one of its own")


def compared(pairs: Sequence[Pair], predicted: Sequence[float], measured: Sequence[float]) -> Figures:
    rows = [
        {"layer": pair.layer, "part": pair.part, "grid": pair.grid, "predicted": one, "measured": other}
        for pair, one, other in zip(pairs, predicted, measured, strict=True)
    ]
    grids = {grid: [row for row in rows if row["grid"] == grid] for grid in dict.fromkeys(row["grid"] for row in rows)}
    return {
        **_correlated(rows),
        "grids": {grid: _correlated(some) for grid, some in grids.items() if len(some) > 2},
        "rows": rows,
    }


def _correlated(rows: Sequence[Figures]) -> Figures:
    """Over some pairs: the correlation of ranks and of logarithms, and how many times the predicted was measured."""
    predicted, measured = (np.array([row[name] for row in rows]) for name in ("predicted", "measured"))
    there = (predicted > 0) & (measured > 0)  # a grid that holds a layer exactly has no logarithm
    logs = np.log(predicted[there]), np.log(measured[there])
    times = np.exp(logs[1] - logs[0])
    return {
        "pairs": len(rows),
        "spearman": round(pearson(ranks(predicted), ranks(measured)), 4),
        "pearson_of_logs": round(pearson(*logs), 4),
        "measured_over_predicted": [round(float(value), 3) for value in np.percentile(times, (5, 50, 95))],
    }


def ranks(values: Any) -> Any:
    """The place of each value among all, equal ones sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def pearson(one: Any, other: Any) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def _short(row: Figures) -> Figures:
    return {name: value for name, value in row.items() if name != "rows"}


# ---- gguf and folder: whole artefacts ----


class Artefacts:
    """Files of others and of ours at the same bytes, made and measured as calibrated_quality.py does it."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        import calibrated_quality as peers

        self._options, self._results, self._peers = options, results, peers
        self._bench: Bench = peers.Bench(options)

    def gguf(self) -> None:
        """llama.cpp's files with an imatrix, and `auto` at their size."""
        made = self._rows("gguf", {"served": "llama.cpp"})
        for kind in self._peers.GGUF:
            theirs = made(self._peers.Row(self._peers.LLAMACPP, kind, "imatrix"), None)
            plain = {"preset": f"gguf-{kind.lower()}", "rounder": "gptq", "transform": "awq"}
            made(self._peers.Row(self._peers.OURS, kind, "awq+gptq", plain), None)
            made(self._auto(kind, theirs, "gguf"), theirs.get("bytes"))

    def folder(self) -> None:
        """All ways to four bits in groups of 64, and `auto` at the size of those with and without zero points."""
        made = self._rows("folder", {"served": "vllm" if self._options.vllm else None})
        uniform = [row for row in self._peers.table(()) if row.kind in UNIFORM]
        sizes: dict[str, Figures] = {}
        for row in uniform:
            done = made(replace(row, cold=False), None)
            sizes.setdefault(row.kind, done)
        for kind, theirs in sizes.items():
            made(self._auto(kind, theirs, "compressed-tensors"), theirs.get("bytes"))

    def _auto(self, kind: str, theirs: Figures, form: str) -> "Row":
        budget = {"preset": "auto", "budget": f"{theirs.get('bytes')}B", "format": form, "sequential": None}
        if form != "gguf":
            budget["gpu"] = "cpu"  # where vLLM serves it here
        row: Row = self._peers.Row(self._peers.OURS, kind, "auto", budget)
        return row

    def _rows(self, part: str, more: Figures) -> Callable[["Row", int | None], Figures]:
        done = self._results.done(part, {**self._bench.settings, "model": self._options.name, **more})

        def made(row: "Row", asked: int | None) -> Figures:
            if row.name not in done:
                done[row.name] = self._row(row, asked, part)
                self._results.keep(part, row.name, done[row.name], self._bench.versions)
                print(_line(row.name, done[row.name]), flush=True)
            return done[row.name]

        return made

    def _row(self, row: "Row", asked: int | None, part: str) -> Figures:
        """Makes an artefact, measures it and removes it; what fails is told and does not end the run."""
        about = {"by": row.by, "kind": row.kind, "method": row.method}
        if row.method == "auto" and asked is None:
            return {**about, "failed": "there is no file whose size it could have"}
        out = self._options.work / "out"
        for place in (out, out.with_name("out.partial")):
            shutil.rmtree(place, ignore_errors=True)
        make = self._bench._make_llamacpp if row.by == self._peers.LLAMACPP else self._bench._make_ours
        try:
            figures = {**about, **make(row, out), **held(out, asked), **_told(out), **self._measured(out, part)}
        except (self._peers.FailedError, QuantryError) as error:
            return {**about, "failed": str(error)}
        shutil.rmtree(out)
        return figures

    def _measured(self, out: Path, part: str) -> Figures:
        given = self._options
        engine = {"engine": "vllm", "engine_python": given.vllm} if part == "folder" and given.vllm else {}
        sizes = {"windows": given.windows, "length": given.length}
        proof = quantry.verify(out, reference=local_folder(given.model), text=given.text, **sizes, **engine)
        served = proof.served
        return {
            **{name: getattr(proof, name) for name in FIGURES},
            "interval": proof.intervals["kl"],
            "noise_floor": proof.noise_floor,
            "engine": f"{served['engine']} {served['version']}" if served else None,
            "served": {name: served[name] for name in FIGURES} if served else None,
        }


def _told(out: Path) -> Figures:
    """What a mixture says that it was measured to lose, and what else was measured for it."""
    file = out / SENSITIVITY_FILE
    measured = json.loads(file.read_text())["measured"] if file.exists() else None
    return {"predicted": measured["kl"], "tried": measured} if measured else {}


def held(out: Path, asked: int | None) -> Figures:
    """The bytes of an artefact's files and of the tensors in them, beside those that were asked for."""
    files = [file for file in (*out.glob("*.gguf"), *out.glob("*.safetensors")) if file.name != "imatrix.gguf"]
    size = sum(file.stat().st_size for file in files)
    opened = open_checkpoint(files[0] if files[0].suffix == ".gguf" else out)
    found = {"bytes": size, "tensor_bytes": sum(tensor.nbytes for tensor in opened.tensors)}
    if asked is None:
        return found
    return {**found, "asked": asked, "share": round(size / asked, 6), "met": NEAR * asked <= size <= asked}


def beside_llamacpp(rows: Mapping[str, Figures]) -> Figures:
    """`auto` through llama.cpp's own file at its size: KL below 1 is better than llama.cpp."""
    pairs = {row["kind"]: (row, rows.get(f"llamacpp/{row['kind']}-imatrix", {})) for row in _autos(rows)}
    return {kind: _ratio(ours, theirs) for kind, (ours, theirs) in pairs.items() if "kl" in theirs}


def beside_uniform(rows: Mapping[str, Figures]) -> Figures:
    """`auto` through the best of all uniform artefacts that are no larger than what it was allowed."""
    found = {}
    for ours in _autos(rows):
        others = [
            row
            for row in rows.values()
            if row["method"] != "auto" and row.get("bytes", ours["asked"] + 1) <= ours["asked"]
        ]
        if others:
            best = min(others, key=_loss)
            found[ours["kind"]] = {"best": f"{best['kind']}-{best['method']}", **_ratio(ours, best)}
    return found


def _autos(rows: Mapping[str, Figures]) -> list[Figures]:
    return [row for row in rows.values() if row["method"] == "auto" and "failed" not in row]


def _loss(row: Figures) -> float:
    """As served where it was served."""
    return float((row["served"] or row)["kl"])


def _ratio(ours: Figures, theirs: Figures) -> Figures:
    served = ours["served"] and theirs["served"]
    return {
        "kl": round(ours["kl"] / theirs["kl"], 4),
        "served_kl": round(ours["served"]["kl"] / theirs["served"]["kl"], 4) if served else None,
        "bytes": round(ours["bytes"] / theirs["bytes"], 6),
        "met": ours["met"],
        **({"measured_over_predicted": round(ours["kl"] / ours["predicted"], 4)} if "predicted" in ours else {}),
    }


# ---- sizes: what is asked for and what is got ----


def sizes(options: argparse.Namespace, results: Results) -> None:
    """The demo model at budgets from near its smallest possible size to near its largest."""
    text: Figures = {"samples": min(options.samples, 16), "length": min(options.length, 512)}
    done = results.done("sizes", {"model": "demo", "budgets": BUDGETS, **text})
    out = options.work / "sized"
    for form in FORMATS:
        names = [f"{form}-{number + 1}" for number in range(BUDGETS)]
        if all(name in done for name in names):
            continue
        for name, asked in zip(names, _budgets(form), strict=True):
            if name in done:
                continue
            shutil.rmtree(out, ignore_errors=True)
            budget: Figures = {"preset": "auto", "budget": f"{asked}B", "format": form}
            start = time.perf_counter()
            try:
                quantry.quantize("demo", out, **budget, **text)
                row = {**held(out, asked), "seconds": round(time.perf_counter() - start, 1)}
            except QuantryError as error:
                row = {"asked": asked, "failed": str(error)}
            results.keep("sizes", name, row)
            print(_line(name, row), flush=True)
    shutil.rmtree(out, ignore_errors=True)


def _budgets(form: str) -> list[int]:
    """The middles of equal parts of what lies between the smallest and the largest choice."""
    checkpoint = open_checkpoint("demo")
    items = sensitivity.unmeasured(checkpoint, sixteen_bit(checkpoint), sensitivity.Method(form, "gptq")).items()
    low, high = (sum(pick(option.bytes for option in item.options) for item in items) for pick in (min, max))
    return [low + (high - low) * (2 * number + 1) // (2 * BUDGETS) for number in range(BUDGETS)]


def _sizes_met(rows: Mapping[str, Figures]) -> Figures:
    good = [row for row in rows.values() if "failed" not in row]
    if not good:
        return {}
    shares = [row["share"] for row in good]
    return {"budgets": len(rows), "met": sum(row["met"] for row in good), "least": min(shares), "most": max(shares)}


# ---- in words ----


def _line(name: str, row: Figures) -> str:
    if "failed" in row:
        return f"{name:32} failed: {row['failed']}"
    words = [f"{name:32} {row['bytes']:,} bytes"]
    words += [f"{row['share']:.4%} of {row['asked']:,}"] if "asked" in row else []
    words += [f"KL {row['kl']:.4f}"] if "kl" in row else []
    words += [f"served {row['served']['kl']:.4f}"] if row.get("served") else []
    return ", ".join([*words, f"{row['seconds']} s"])


def markdown(record: Figures) -> str:
    """What was asked and found, as tables, model by model."""
    return "\n\n".join(f"## {name}\n\n{_tables(one['summary'])}" for name, one in record["models"].items())


def _tables(summary: Figures) -> str:
    lines = []
    if summary["rank"]:
        lines += [
            "| format, grid | pairs | rank correlation | of logs | measured / predicted: 5, 50, 95 % |",
            "|---|---|---|---|---|",
        ]
        for form, row in summary["rank"].items():
            lines += [_cells(form, row), *(_cells(f"{form}, {grid}", one) for grid, one in row["grids"].items())]
    for part in ("gguf", "gguf_plain", "folder"):
        if summary[part]:
            head = f"| {part} | against | KL | KL as served | bytes | met | measured / predicted |"
            lines += ["", head, "|---|---|---|---|---|---|---|"]
            lines += [
                f"| {kind} | {one.get('best', 'llama.cpp')} | {one['kl']} | {one['served_kl']} | {one['bytes']} "
                f"| {one['met']} | {one.get('measured_over_predicted')} |"
                for kind, one in summary[part].items()
            ]
    if summary["sizes"]:
        one = summary["sizes"]
        lines += [
            "",
            f"{one['met']} of {one['budgets']} budgets met: {one['least']:.4%} to {one['most']:.4%} of the bytes",
        ]
    return "\n".join(lines)


def _cells(name: str, row: Figures) -> str:
    times = ", ".join(f"{value:.2f}" for value in row["measured_over_predicted"])
    return f"| {name} | {row['pairs']} | {row['spearman']:.3f} | {row['pearson_of_logs']:.3f} | {times} |"


if __name__ == "__main__":
    main()
