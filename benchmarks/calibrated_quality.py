"""Calibrated methods against llm-compressor, GPTQModel, AutoRound and llama.cpp: what is lost, how long it takes.

    python benchmarks/calibrated_quality.py MODEL --data CALIBRATION --text TEST [--samples 64 --length 512 --windows 8]
        [--only PATTERN,...] [--peers llmcompressor=PYTHON gptqmodel=PYTHON autoround=PYTHON llamacpp=BIN_FOLDER]
        [--name NAME] [--device cuda] [--busy] [--work FOLDER]
        [-o benchmarks/results/calibrated_quality.json [--resume] [--add FILE]]

A file holds several models: a run replaces the part of its own (--name, or the folder's name), and with --resume only
the rows that it makes. --add takes the rows of another machine's file, if they are of the same windows and sizes.

Every artefact is made by a process of its own, one after the other, from the same windows of tokens (llama.cpp reads
their text), and measured by the same `quantry.verify`. Rows with the same name after the slash are the same method at
the same bits; rows of the same kind take the same bits. Quantry gathers statistics once for all methods: the rows that
are timed against others begin without any, the rest with those that are stored. llama.cpp starts from Quantry's float16
GGUF, whose making is not counted. Rows whose groups do not divide every width of the model are left out. --device is
AutoRound's alone. Seconds of rows made with --busy count for nothing.

The floor counts multiplications and additions of the walk, the Gram matrices, their factors and GPTQ's updates, each
product that is symmetric or triangular once, at the speed of a large float32 product of the same run. It is for dense
models whose layers are named as Llama's.

Peers, each in an environment of its own: pip install torch==2.13.0 llmcompressor==0.14.0.1; pip install torch==2.13.0
transformers==5.22.2 accelerate datasets optimum defuser device-smi logbar pypcre threadpoolctl tokenicer pillow
requests and, with --no-deps, torchao and gptqmodel==7.7.0; pip install torch==2.13.0 compressed-tensors==0.19.0
auto-round==0.16.1; cmake --build B --target llama-quantize llama-imatrix.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import torch  # noqa: E402

import quantry  # noqa: E402
from calibrated_report import OURS as OURS  # noqa: E402
from calibrated_report import Figures, against, best, line, markdown, merged, part  # noqa: E402
from measure import _family  # noqa: E402
from quantry.errors import QuantryError  # noqa: E402
from quantry.models.anatomy import dissect  # noqa: E402
from quantry.models.parts import block_of  # noqa: E402
from quantry.models.reader import local_folder, open_checkpoint  # noqa: E402
from quantry.models.tokenizer import load_tokenizer  # noqa: E402
from quantry.quantizing.calibration.text import CalibrationText, load  # noqa: E402
from verify_presets import FIGURES  # noqa: E402

PEERS = LLMC, GPTQMODEL, AUTOROUND, LLAMACPP = "llmcompressor", "gptqmodel", "autoround", "llamacpp"
GGUF = ("Q4_K_M", "Q3_K_M", "Q2_K")
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # layers that are given the same input
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LIMIT = 3 * 3600  # seconds after which a job counts as failed
LOW_GROUPS = 64, 32  # of 3 and 2 bits: the first that divides


@dataclass(frozen=True, slots=True)
class Row:
    """One artefact: who makes it, by which method, and what it is called by others that do the same."""

    by: str
    kind: str  # rows of one kind take the same bits
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    calibrated: bool = True
    cold: bool = False  # begins without stored statistics, so that its time may be held against others

    @property
    def group(self) -> int:
        """How many weights share a scale, where that number is part of the kind."""
        return next((int(part[1:]) for part in self.kind.split("-") if part[0] == "g" and part[1:].isdigit()), 1)

    @property
    def same(self) -> str:
        """The name that rows share which should be compared."""
        return f"{self.kind}-{self.method}"

    @property
    def name(self) -> str:
        return self.same if self.by == OURS else f"{self.by}/{self.same}"


def table(peers: Iterable[str]) -> list[Row]:
    """All rows, those of the same kind together."""
    rows = [*_ours(), *(row for row in _peers() if row.by in peers)]
    kinds = list(dict.fromkeys(row.kind for row in rows))
    return sorted(rows, key=lambda row: kinds.index(row.kind))


def _ours() -> Iterator[Row]:
    for group in (128, 64, 32):
        for zero in (False, True) if group < 128 else (False,):
            yield from _four_bits(group, zero)
    for group in LOW_GROUPS:
        yield from _low_bits(group)
    yield Row(OURS, "w8a8", "nearest", {"preset": "w8a8"}, calibrated=False)
    yield Row(OURS, "w8a8", "gptq", {"preset": "w8a8", "rounder": "gptq"})
    for method in ("smoothquant", "smoothquant+gptq", "zeroquant"):
        yield Row(OURS, "w8a8", method, {"preset": f"w8a8-{method}"})
    yield Row(OURS, "w4a8-g64", "zeroquant", {"preset": "w4a8-zeroquant", "group": 64})
    yield Row(OURS, "fp8-dynamic", "nearest", {"preset": "fp8-dynamic"}, calibrated=False)
    yield Row(OURS, "fp8-static", "nearest", {"preset": "fp8-static"})
    for way in ("minmax", "percentile", "mse"):
        yield Row(OURS, "w8a8-static", way, {"preset": "w8a8-static", "input_scales": way})
    yield Row(OURS, "nvfp4", "nearest", {"preset": "nvfp4"}, calibrated=False)
    yield Row(OURS, "nvfp4", "gptq", {"preset": "nvfp4", "rounder": "gptq"})
    yield Row(OURS, "nvfp4-w4a4", "nearest", {"preset": "nvfp4-w4a4"})
    yield Row(OURS, "nvfp4-w4a4", "gptq", {"preset": "nvfp4-w4a4", "rounder": "gptq"})
    for kind in GGUF:
        preset = {"preset": f"gguf-{kind.lower()}"}
        yield Row(OURS, kind, "nearest", preset, calibrated=False)
        yield Row(OURS, kind, "imatrix", {**preset, "imatrix": "auto"}, cold=kind == GGUF[0])
        yield Row(OURS, kind, "gptq", {**preset, "rounder": "gptq"}, cold=kind == GGUF[0])
        yield Row(OURS, kind, "awq+gptq", {**preset, "rounder": "gptq", "transform": "awq"})
        if kind == GGUF[0]:
            yield Row(OURS, kind, "gptq-sequential", {**preset, "rounder": "gptq", "sequential": True})


def _four_bits(group: int, zero: bool) -> Iterator[Row]:
    kind = f"w4-g{group}{'-zero' if zero else ''}"
    shape = {"group": group, "format": "compressed-tensors"}
    plain = {"preset": "w4a16-asym" if zero else "w4a16", **shape}
    awq = {**shape} if zero else {**shape, "symmetric": True}
    yield Row(OURS, kind, "nearest", plain, calibrated=False)
    yield Row(OURS, kind, "gptq", {**plain, "rounder": "gptq"}, cold=kind == "w4-g64")
    if kind == "w4-g64":
        yield Row(OURS, kind, "gptq-sequential", {**plain, "rounder": "gptq", "sequential": True})
    yield Row(OURS, kind, "awq", {"preset": "w4a16-awq", **awq}, cold=kind == "w4-g64-zero")
    yield Row(OURS, kind, "awq+gptq", {"preset": "w4a16-awq+gptq", **awq})
    if kind == "w4-g64-zero":
        yield Row(OURS, kind, "awq+gptq-sequential", {"preset": "w4a16-awq+gptq", **awq, "sequential": True})


def _low_bits(group: int) -> Iterator[Row]:
    shape = {"group": group, "format": "compressed-tensors"}
    three, two = {"preset": "w3a16", **shape}, {"preset": "w2a16", **shape}
    for kind, plain in (
        (f"w3-g{group}", three),
        (f"w2-g{group}", {**two, "symmetric": True}),
        (f"w2-g{group}-zero", two),
    ):
        yield Row(OURS, kind, "nearest", plain, calibrated=False)
        yield Row(OURS, kind, "gptq", {**plain, "rounder": "gptq"})
        yield Row(OURS, kind, "awq+gptq", {**plain, "rounder": "gptq", "transform": "awq"})


def _peers() -> Iterator[Row]:
    yield from _llmcompressor()
    for kind, method in (
        ("w4-g128", "gptq"),
        ("w4-g64", "gptq"),
        ("w4-g32", "gptq"),
        ("w4-g64-zero", "gptq"),
        ("w4-g64-zero", "awq"),
        *((f"{kind}-g{group}", "gptq") for group in LOW_GROUPS for kind in ("w3", "w2")),
        *((f"w2-g{group}-zero", "gptq") for group in LOW_GROUPS),
    ):
        yield Row(GPTQMODEL, kind, method, _grid(kind))
    for kind in ("w4-g128", "w4-g64", "w4-g64-zero", "w4-g32", "w4-g32-zero", *_low_kinds()):
        for method in ("signround", "signround-best"):
            yield Row(AUTOROUND, kind, method, _grid(kind))
    for kind in GGUF:
        yield Row(LLAMACPP, kind, "nearest", calibrated=False)
        yield Row(LLAMACPP, kind, "imatrix")


def _low_kinds() -> list[str]:
    return [
        f"{bits}-g{group}{zero}" for group in LOW_GROUPS for bits, zero in (("w3", ""), ("w2", ""), ("w2", "-zero"))
    ]


def _llmcompressor() -> Iterator[Row]:
    for kind, methods in (
        ("w4-g128", ("nearest", "gptq")),
        ("w4-g64", ("nearest", "gptq")),
        ("w4-g32", ("nearest", "gptq")),
        ("w4-g64-zero", ("nearest", "gptq", "awq", "awq+gptq")),
        ("w4-g32-zero", ("nearest", "gptq", "awq")),
        *((kind, ("nearest", "gptq")) for kind in _low_kinds()),
    ):
        for method in methods:
            yield Row(LLMC, kind, method, _grid(kind) | {"scheme": "int"}, method != "nearest")
    for method in ("nearest", "gptq", "smoothquant", "smoothquant+gptq"):
        yield Row(LLMC, "w8a8", method, {"scheme": "w8a8"}, method != "nearest")
    yield Row(LLMC, "fp8-dynamic", "nearest", {"scheme": "fp8-dynamic"}, calibrated=False)
    yield Row(LLMC, "fp8-static", "nearest", {"scheme": "fp8-static"})
    for kind in ("nvfp4", "nvfp4-w4a4"):
        for method in ("nearest", "gptq"):
            yield Row(LLMC, kind, method, {"scheme": kind}, calibrated=(kind, method) != ("nvfp4", "nearest"))


def _grid(kind: str) -> dict[str, Any]:
    return {"bits": int(kind[1]), "group": int(kind.split("-")[1][1:]), "symmetric": not kind.endswith("-zero")}


def fitting(rows: Iterable[Row], widths: Iterable[int]) -> list[Row]:
    """The rows whose groups divide all widths; of three and two bits those of the largest group that does."""
    possible = [row for row in rows if all(width % row.group == 0 for width in widths)]
    low = next((group for group in LOW_GROUPS if all(width % group == 0 for width in widths)), 0)
    return [row for row in possible if row.kind[:2] not in ("w2", "w3") or row.group == low]


def main() -> None:
    options = _options()
    bench = Bench(options)
    name = options.name or bench.settings["model"]
    rows = [row for row in fitting(table(options.peers), bench.widths) if _wanted(row, options.only)]
    if options.only and not rows:
        sys.exit(f"no row is named {options.only}, or its groups do not divide the widths {bench.widths}")
    done = bench.rows_of(options.output, name) if options.resume or options.add else {}
    if options.add:
        done |= bench.rows_of(options.add, name)
        rows = []
    left = [row for row in rows if "failed" in done.get(row.name, {"failed": ""})]
    print(f"{name}: {len(rows)} rows, {len(left)} to be made", flush=True)
    for row in left:
        done[row.name] = bench.row(row) | ({"busy": True, "floor": None} if options.busy else {})
        print(line(done[row.name]), flush=True)
        _save(options.output, name, _record(bench, done))
    record = _record(bench, done)
    _save(options.output, name, record)
    print(markdown(record))
    print(json.dumps(record))
    if any("failed" in row for row in done.values()):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    for name, default in (("--samples", 64), ("--length", 512), ("--windows", 8)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--only", default="", help="names or patterns, with commas between")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument("--work", type=Path, default=Path("calibrated_quality.work"))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--add", type=Path, metavar="FILE", help="adds the rows of this file, and makes none")
    parser.add_argument("--name", help="of the model in the file; the folder's without")
    parser.add_argument("--device", default="cpu", help="AutoRound's")
    parser.add_argument("--busy", action="store_true", help="the machine has other work: no time is compared")
    options = parser.parse_args()
    options.peers = dict(peer.split("=", 1) if "=" in peer else (peer, "") for peer in options.peers)
    for name, place in options.peers.items():
        if name not in PEERS or not Path(place).exists():
            parser.error(f"--peers {name}={place}: known are {', '.join(PEERS)}, and the path must be there")
    if (options.resume or options.add) and not options.output:
        parser.error("--resume and --add need -o")
    return options


def _wanted(row: Row, only: str) -> bool:
    return not only or any(fnmatch(row.name, pattern) for pattern in only.split(","))


def _save(file: Path | None, name: str, record: Figures) -> None:
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(json.dumps(merged(file, name, record), indent=2) + "\n")
        partial.replace(file)


class Bench:
    """What all rows have in common: the model, the windows, and a folder to work in."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._work = options, options.work.resolve()
        self._work.mkdir(parents=True, exist_ok=True)
        os.environ["QUANTRY_CACHE"] = str(self._work / "proof")  # of the measuring process alone
        self._model = local_folder(options.model)
        checkpoint = open_checkpoint(self._model)
        self._parameters = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors)
        tokenizer = load_tokenizer(self._model)
        context = dissect(checkpoint).context_length
        self.data: CalibrationText = load(
            options.data, tokenizer, samples=options.samples, length=options.length, context=context
        )
        self._windows, self._text = self._work / "windows.json", self._work / "windows.txt"
        self._windows.write_text(json.dumps(self.data.tokens))
        skipped = int(self.data.bos is not None)
        stream = [token for window in self.data.tokens for token in window[skipped:]]
        self._text.write_text(tokenizer.decode(stream), encoding="utf-8")
        again = tokenizer(self._text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        self.same_tokens = sum(map(int.__eq__, stream, again)) / len(stream)
        self.speed = _product_speed()
        self.work_counts = _operations(self._model, self.data)
        self.versions: dict[str, Any] = {}
        self.notes = ""

    @property
    def widths(self) -> list[int]:
        """The inputs of each layer, once each."""
        shapes = [tensor.shape for tensor in open_checkpoint(self._model).tensors if _linear(tensor.name)]
        return sorted({shape[1] for shape in shapes})

    def rows_of(self, file: Path, name: str) -> dict[str, Figures]:
        """The rows of a file, if they are of the same model, text and sizes; its versions count as well."""
        found = part(file, name)
        if not found:
            return {}
        theirs, ours = ({**settings, "model": name} for settings in (found["settings"], self.settings))
        if theirs != ours:
            sys.exit(f"{file} is of other settings: {theirs}, not {ours}")
        self.versions |= {peer: found["versions"][peer] for peer in (OURS, *PEERS) if peer in found["versions"]}
        self.notes = found.get("note", self.notes)
        if self._options.busy:
            self.speed = found["fp32_flops_per_second"]
        return {row["name"]: row for row in found["rows"]}

    @property
    def settings(self) -> Figures:
        given = self._options
        return {
            "model": self._model.name,
            "parameters": self._parameters,
            "data": given.data.name,
            "fingerprint": self.data.fingerprint,
            "samples": len(self.data.tokens),
            "length": self.data.length,
            "text": given.text.name,
            "windows": given.windows,
        }

    def row(self, row: Row) -> Figures:
        """Makes an artefact, measures it and removes it; what fails is told and does not end the run."""
        out = self._work / "out"
        _remove(out, out.with_name("out.partial"))
        about = {"name": row.name, "by": row.by, "kind": row.kind, "method": row.method, "calibrated": row.calibrated}
        make = {OURS: self._make_ours, LLAMACPP: self._make_llamacpp}.get(row.by, self._make_other)
        try:
            figures = {**about, **make(row, out), **self._size(out), **self._measured(out)}
        except (FailedError, QuantryError) as error:
            return {**about, "failed": str(error)}
        figures["floor"] = _floor(row, figures, self.work_counts, self.speed) if row.by == OURS else None
        _remove(out)
        return figures

    def _make_ours(self, row: Row, out: Path) -> Figures:
        store = self._work / "store"
        if row.cold:
            _remove(store)
        cold = not store.exists() or bool(row.options.get("sequential"))
        options = dict(row.options)
        if row.calibrated:
            sizes = {"samples": self._options.samples, "length": self._options.length}
            options = {"sequential": False, **options, "data": str(self._options.data), **sizes}
        job = {"model": str(self._model), "options": options}
        found = self._job(sys.executable, "quantry_job.py", job, out, {"QUANTRY_CACHE": str(store)})
        windows = found.pop("windows")
        if row.calibrated and windows != self.data.fingerprint:
            raise FailedError("it was calibrated on other windows")
        return {**found, "cold": cold}

    def _make_other(self, row: Row, out: Path) -> Figures:
        job = {"model": str(self._model), "windows": str(self._windows), "method": row.method, **row.options}
        if row.by == AUTOROUND:
            job["device"] = self._options.device
        return self._job(self._options.peers[row.by], f"{row.by}_job.py", job, out, {})

    def _job(self, python: str, script: str, job: Figures, out: Path, environment: Mapping[str, str]) -> Figures:
        """A script of peers/ run with a job; what it reports, beside what is seen from outside."""
        file, report = self._work / "job.json", self._work / "report.json"
        report.unlink(missing_ok=True)
        file.write_text(json.dumps({**job, "out": str(out), "report": str(report)}))
        seen = timed([python, str(HERE / "peers" / script), str(file)], self._work / "log", environment)
        found = json.loads(report.read_text())
        self.versions[script.removesuffix("_job.py")] = found.pop("versions")
        return {**seen, **found}

    def _make_llamacpp(self, row: Row, out: Path) -> Figures:
        from gguf_peers import _version as llamacpp_version

        tools, source = Path(self._options.peers[LLAMACPP]), self._work / "f16"
        if not source.exists():
            quantry.quantize(self._model, source, preset="gguf-f16")
        plain, log, matrix = next(source.glob("*.gguf")), self._work / "log", self._work / "imatrix.gguf"
        self.versions.setdefault(LLAMACPP, llamacpp_version(tools / "llama-quantize", plain))
        cores = str(os.cpu_count())
        out.mkdir()
        steps: dict[str, Figures] = {}
        use: list[str] = []
        if row.calibrated:
            windows = ["-c", str(self.data.length), "--chunks", str(len(self.data.tokens)), "--no-ppl", "-t", cores]
            command = [tools / "llama-imatrix", "-m", plain, "-f", self._text, "-o", matrix, *windows]
            steps["calibration"] = timed(command, log)
            use = ["--imatrix", str(matrix)]
        command = [tools / "llama-quantize", *use, plain, out / "model.gguf", row.kind, cores]
        steps["rounding"] = timed(command, log)
        return {
            "seconds": round(sum(step["seconds"] for step in steps.values()), 2),
            "peak_resident_bytes": max(step["peak_resident_bytes"] for step in steps.values()),
            "parts": {name: step["seconds"] for name, step in steps.items()},
        }

    def _size(self, out: Path) -> Figures:
        files = [*out.glob("*.gguf"), *out.glob("*.safetensors")]
        size = sum(file.stat().st_size for file in files if file.name != "imatrix.gguf")
        return {"bytes": size, "bits_per_weight": round(8 * size / self._parameters, 4)}

    def _measured(self, out: Path) -> Figures:
        """What `quantry.verify` says: of the bytes, and for GGUF as llama.cpp serves it."""
        proof = quantry.verify(
            out,
            reference=self._model,
            text=self._options.text,
            windows=self._options.windows,
            length=self._options.length,
        )
        served = proof.served
        return {
            **{name: getattr(proof, name) for name in FIGURES},
            "interval": proof.intervals["kl"],
            "reference_perplexity": proof.reference_perplexity,
            "served": {name: served[name] for name in FIGURES} if served else None,
        }


class FailedError(Exception):
    """An artefact that could not be made."""


def timed(command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> Figures:
    """Seconds of a command, and the most memory that it, or the largest process under it, has had resident."""
    words = [str(word) for word in command]
    start, peak = time.perf_counter(), 0
    with log.open("wb") as file:
        process = subprocess.Popen(
            words,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            cwd=log.parent,  # some leave logs where they are
        )
        while process.poll() is None:
            peak = max(peak, *(_peak(pid) for pid in _family(process.pid)), 0)
            if time.perf_counter() - start > LIMIT:
                process.kill()
            time.sleep(0.02)
    seconds = round(time.perf_counter() - start, 2)
    if process.returncode:
        lines = log.read_text(errors="replace").replace("\r", "\n").strip().splitlines() or ["no output"]
        raise FailedError(f"{Path(words[0]).name} ended with {process.returncode}: {lines[-1].strip()[:300]}")
    return {"seconds": seconds, "peak_resident_bytes": peak}


def _peak(pid: int) -> int:
    """The kernel's high-water mark since the program began; what wait4 tells counts the process that started it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _remove(*places: Path) -> None:
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


def _product_speed(size: int = 3072) -> float:
    """Operations a second of a large float32 product, the best of five."""
    a, best = torch.randn(size, size), math.inf
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _operations(model: Path, data: CalibrationText) -> dict[str, float]:
    """Multiplications and additions: of the walk, the Gram matrices, their factors, and GPTQ's updates."""
    tokens, count = data.count, dict.fromkeys(("walk", "gram", "factor", "gptq"), 0.0)
    for tensor in open_checkpoint(model).tensors:
        leaf = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if not _linear(tensor.name):
            continue
        rows, columns = tensor.shape
        count["walk"] += 2 * tokens * rows * columns
        count["gptq"] += rows * columns**2  # a column's error goes to those behind it
        if leaf == "q_proj":
            count["walk"] += 2 * tokens * data.length * rows  # scores and values of the causal half
        if leaf not in SHARED:
            count["gram"] += tokens * columns**2  # one triangle
            count["factor"] += 2 / 3 * columns**3  # Cholesky, and the inverse of a triangle
    return count


def _linear(name: str) -> bool:
    return block_of(name) is not None and name.removesuffix(".weight").rpartition(".")[2] in LINEARS


def _floor(row: Row, figures: Figures, count: Mapping[str, float], speed: float) -> Figures | None:
    """The seconds that the arithmetic of a row takes at the speed of a product, and how many times that it took."""
    if not row.calibrated or not figures["cold"] or "zeroquant" in row.method:
        return None
    walks = 2 if row.options.get("sequential") else 1
    calibration = (walks * count["walk"] + count["gram"]) / speed
    rounding = (count["factor"] + count["gptq"]) / speed if "gptq" in row.method else 0.0
    return {
        "seconds": round(calibration + rounding, 2),
        "times": round(figures["seconds"] / (calibration + rounding), 2),
        "calibration_times": round(figures["parts"]["calibration"] / calibration, 2),
        "rounding_times": round(figures["parts"]["rounding"] / rounding, 2) if rounding else None,
    }


def _record(bench: Bench, done: Mapping[str, Figures]) -> Figures:
    """Everything that is known so far, in the order of the table."""
    order = {row.name: number for number, row in enumerate(table(PEERS))}
    rows = sorted(done.values(), key=lambda row: order.get(row["name"], len(order)))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            **{name: version(name) for name in ("torch", "transformers")},
            **bench.versions,
        },
        "settings": bench.settings,
        "fp32_flops_per_second": round(bench.speed),
        "operations": {name: round(value) for name, value in bench.work_counts.items()},
        "llamacpp_same_tokens": round(bench.same_tokens, 5),
        "rows": rows,
        "against": against(rows),
        "best": best(rows),
        **({"note": bench.notes} if bench.notes else {}),
    }


if __name__ == "__main__":
    main()
