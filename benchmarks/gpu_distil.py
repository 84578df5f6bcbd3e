"""What training codes and scales gains, beside AutoRound on the same windows.

    PYTHONPATH=src:... python benchmarks/gpu_distil.py MODEL --data CALIBRATION --text TEST [--work FOLDER]
        [--kinds w4,w4-zero,w3,w2,Q4_K_M,Q3_K_M,Q2_K] [--by quantry,autoround,autoround-best]
        [--ways plain,rounding,distil,both]
        [--samples 64 --length 512 --windows 8 --steps N] [--group 64] [--device cuda] [-o FILE]

Every artefact is decoded from its bytes and compared with the 16-bit model over the whole vocabulary. AutoRound runs in
this environment, which must have it, through peers/autoround_job.py. A line of JSON for each artefact; all in the last.
"""

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quantry
from quantry.blockwise.walk import run
from quantry.models.reader import open_checkpoint
from quantry.models.tokenizer import load_tokenizer
from quantry.proof.divergence import full_kl
from quantry.proof.text import load_text, windows
from quantry.quantizing.calibration.calibrator import load_text as load_calibration
from quantry.quantizing.calibration.options import CalibrationOptions
from quantry.quantizing.sources import open_source

PRESETS: dict[str, dict[str, Any]] = {
    "w4": {"preset": "w4a16", "rounder": "gptq", "transform": "awq"},
    "w4-zero": {"preset": "w4a16-awq+gptq"},
    "w3": {"preset": "w3a16", "rounder": "gptq", "transform": "awq"},
    "w2": {"preset": "w2a16", "rounder": "gptq", "transform": "awq"},
}
FILE_TYPES = ("Q4_K_M", "Q3_K_M", "Q2_K")
BITS = {"w4": (4, True), "w4-zero": (4, False), "w3": (3, True), "w2": (2, False)}
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (), "rounding": ("learn_rounding",), "distil": ("distil",), "both": ("learn_rounding", "distil")
}  # fmt: skip
STEPS = {"learn_rounding": "rounding_steps", "distil": "distil_steps"}
METHODS = {"autoround": "signround", "autoround-best": "signround-best"}


def main() -> None:
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    judge = Judge(options)
    rows = []
    for kind in options.kinds:
        for by in options.by:
            if by != "quantry" and kind not in BITS:
                continue
            for way in options.ways if by == "quantry" else ("plain",):
                rows.append(_row(options, judge, kind, by, way))
                print(json.dumps(rows[-1]), flush=True)
    record = {
        "benchmark": "gpu_distil",
        "date": datetime.now(UTC).date().isoformat(),
        "model": Path(options.model).name,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"quantry": quantry.__version__},
        "settings": {name: getattr(options, name) for name in ("samples", "length", "windows", "group", "steps")},
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("gpu_distil.work"))
    parser.add_argument("--kinds", default=",".join((*PRESETS, *FILE_TYPES)))
    parser.add_argument("--by", default="quantry")
    parser.add_argument("--ways", default=",".join(WAYS))
    for name, default in (("--samples", 64), ("--length", 512), ("--windows", 8), ("--group", 64), ("--steps", None)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    options.kinds, options.by, options.ways = (getattr(options, name).split(",") for name in ("kinds", "by", "ways"))
    return options


class Judge:
    """The 16-bit model's probabilities on the test text."""

    def __init__(self, options: argparse.Namespace) -> None:
        folder = Path(options.model)
        cut = windows(load_text(options.text), load_tokenizer(folder), options.length, options.windows)
        self._windows, self._device = [window.tokens for window in cut], options.device
        self._reference = dict(run(open_source(folder), self._windows, device=self._device))

    def figures(self, artefact: Path) -> dict[str, Any]:
        """Returns the mean KL and its 95 % interval over windows."""
        source = open_source(artefact, self._device)
        means = []
        for number, logits in run(source, self._windows, device=self._device):
            means.append(float(np.mean(full_kl(self._reference[number][:-1], logits[:-1]))))
        draws = np.random.default_rng(0).choice(means, (2000, len(means))).mean(1)
        return {"kl": float(np.mean(means)), "interval": [float(edge) for edge in np.quantile(draws, (0.025, 0.975))]}


def _row(options: argparse.Namespace, judge: Judge, kind: str, by: str, way: str) -> dict[str, Any]:
    out = options.work / f"{kind}-{by}-{way}"
    row: dict[str, Any] = {"model": Path(options.model).name, "kind": kind, "by": by, "way": way}
    start = time.perf_counter()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        if by == "quantry":
            artefact = _ours(options, kind, out, way)
            row["notes"] = [note for note in artefact.notes if "held out" in note]
        else:
            _autoround(options, kind, METHODS[by], out)
        row["seconds"] = round(time.perf_counter() - start, 1)
        if options.device == "cuda":
            row["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
        row["bytes"] = sum(file.stat().st_size for file in out.iterdir() if file.suffix in (".safetensors", ".gguf"))
        row |= judge.figures(out)
    except (quantry.QuantryError, subprocess.CalledProcessError, OSError, RuntimeError) as error:
        row["failed"] = str(error)[-300:]
    return row


def _ours(options: argparse.Namespace, kind: str, out: Path, way: str) -> quantry.Artefact:
    if kind in FILE_TYPES:
        how: dict[str, Any] = {"preset": kind, "rounder": "gptq", "transform": "awq"}
    else:
        how = {**PRESETS[kind], "group": options.group}
    how |= dict.fromkeys(WAYS[way], True)
    if options.steps:
        how |= {name: options.steps for stage, name in STEPS.items() if stage in WAYS[way]}
    text = {"data": options.data, "samples": options.samples, "length": options.length}
    return quantry.quantize(options.model, out, device=options.device, overwrite=True, **how, **text)


def _autoround(options: argparse.Namespace, kind: str, method: str, out: Path) -> None:
    text = load_calibration(
        open_checkpoint(options.model), CalibrationOptions(options.data, options.samples, options.length)
    )
    listed, job = out.with_suffix(".windows.json"), out.with_suffix(".job.json")
    listed.write_text(json.dumps([list(window) for window in text.tokens]))
    bits, symmetric = BITS[kind]
    content = {
        "model": str(options.model), "out": str(out), "windows": str(listed), "method": method, "bits": bits,
        "group": options.group, "symmetric": symmetric, "device": options.device, "report": str(out) + ".report.json",
    }  # fmt: skip
    job.write_text(json.dumps(content))
    script = Path(__file__).parent / "peers" / "autoround_job.py"
    done = subprocess.run([sys.executable, str(script), str(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr[-300:])
    if not any(out.glob("*.safetensors")):  # the tool may add a folder of its own
        inner = next(out.rglob("*.safetensors")).parent
        inner.rename(out.with_name(out.name + ".inner"))
        out.rmdir()
        out.with_name(out.name + ".inner").rename(out)


if __name__ == "__main__":
    main()
