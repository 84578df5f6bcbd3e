"""What every data-free preset loses on a real model and text, decoded and as served, beside llama.cpp's own files.

    python benchmarks/verify_presets.py WORK_FOLDER MODEL TEXT [--windows 8] [--llama-quantize PATH] [--vllm PYTHON]
        [--transformers PYTHON] [--only PRESET,...]

GGUF is served by the embedded llama.cpp, what vLLM's CPU build has kernels for by vLLM, the rest by transformers, where
their pythons are given. llama-quantize makes its files from Quantry's BF16 file; where both make the same bytes, both
must lose the same.
"""

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import quantry  # noqa: E402
from measure import keep  # noqa: E402
from quantry.errors import QuantryError  # noqa: E402
from quantry.quantizing.recipe import Preset, presets  # noqa: E402

VLLM = {"w4a16", "w4a16-asym", "w8a8", "fp8-dynamic", "fp8-tensor", "bf16"}  # that its CPU build has kernels for
LLAMA = {"gguf-q8_0", "gguf-q6_k", "gguf-q5_k_m", "gguf-q4_k_m", "gguf-q4_0", "gguf-q3_k_m", "gguf-q2_k", "gguf-iq4_xs"}
FIGURES = ("kl", "kl_median", "kl_p99", "top1", "perplexity")


def main() -> None:
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for preset in presets().values():
        wanted = not options.only or preset.name in options.only.split(",")
        if not preset.calibrated and wanted:
            rows += _rows(preset, options)
            print(_line(rows[-1]), flush=True)
    result = {
        "model": options.model.name,
        "text": options.text.name,
        "windows": options.windows,
        "length": options.length,
        "rows": rows,
    }
    keep("verify_presets", result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("work", "model", "text"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--only", default="")
    for name in ("--llama-quantize", "--vllm", "--transformers"):
        parser.add_argument(name, type=Path)
    return parser.parse_args()


def _rows(preset: Preset, options: argparse.Namespace) -> list[dict[str, Any]]:
    out = options.work / preset.name
    grouped = preset.scheme.weight.kind == "int" and preset.scheme.weight.block[1] > options.group
    try:
        if not out.exists():
            quantry.quantize(options.model, out, preset=preset.name, group=options.group if grouped else None)
    except QuantryError as error:
        return [{"preset": preset.name, "by": "quantry", "refused": error.problem}]
    rows = [_measured(preset.name, "quantry", out, options)]
    if preset.name in LLAMA and options.llama_quantize:
        rows.append(_measured(preset.name, "llama.cpp", _theirs(preset, options), options))
        rows[-1]["same_bytes"] = _tensors(next(out.glob("*.gguf"))) == _tensors(_theirs(preset, options))
    return rows


def _measured(preset: str, by: str, artefact: Path, options: argparse.Namespace) -> dict[str, Any]:
    engine, python = _engine(preset, options)
    start = time.perf_counter()
    try:
        proof = quantry.verify(
            artefact,
            reference=options.model,
            text=options.text,
            engine=engine,
            engine_python=python,
            windows=options.windows,
            length=options.length,
        )
    except QuantryError as error:
        return {"preset": preset, "by": by, "refused": error.problem}
    served = proof.served or {}
    return {
        "preset": preset,
        "by": by,
        "bytes": _size(artefact),
        **{name: getattr(proof, name) for name in FIGURES},
        "reference_perplexity": proof.reference_perplexity,
        "noise_floor": proof.noise_floor,
        "k": proof.compact["k"],
        "shortfall": proof.compact["shortfall"],
        "interval": proof.intervals["kl"],
        "engine": served.get("engine"),
        "engine_version": served.get("version"),
        "served": {name: served[name] for name in FIGURES} if served else None,
        "gap": served.get("gap"),
        "verdict": proof.verdict,
        "failed": [finding["words"] for finding in proof.findings if not finding["ok"]],
        "seconds": round(time.perf_counter() - start, 1),
    }


def _engine(preset: str, options: argparse.Namespace) -> tuple[str | None, Path | None]:
    if preset.startswith("gguf"):
        return "llama.cpp", None
    if preset in VLLM and options.vllm:
        return "vllm", options.vllm
    return ("transformers", options.transformers) if options.transformers else (None, None)


def _theirs(preset: Preset, options: argparse.Namespace) -> Path:
    """llama-quantize's file of the same type, from our 16-bit one."""
    source = options.work / "gguf-bf16"
    if not source.exists():
        quantry.quantize(options.model, source, preset="gguf-bf16")
    file: Path = options.work / f"llama-{preset.file_type}.gguf"
    if not file.exists():
        words = [options.llama_quantize, next(source.glob("*.gguf")), file, str(preset.file_type).upper()]
        subprocess.run([str(word) for word in words], check=True, capture_output=True)
    return file


def _tensors(file: Path) -> dict[str, str]:
    import gguf

    return {tensor.name: hashlib.sha256(tensor.data.tobytes()).hexdigest() for tensor in gguf.GGUFReader(file).tensors}


def _size(artefact: Path) -> int:
    files = [artefact] if artefact.is_file() else [*artefact.glob("*.gguf"), *artefact.glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


def _line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"{row['preset']:14} {row['by']:10} refused: {row['refused']}"
    served = f"{row['engine']} {row['served']['kl']:.4f}" if row["served"] else "-"
    return (
        f"{row['preset']:14} {row['by']:10} KL {row['kl']:.4f} top1 {row['top1']:.3f} ppl {row['perplexity']:.2f} "
        f"served {served} {row['verdict']} {row['seconds']} s"
    )


if __name__ == "__main__":
    main()
