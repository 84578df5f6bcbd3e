"""What a quantized KV cache loses at length, by position, beside llama.cpp's own measurement in the same run.

    python benchmarks/kv_length.py WORK_FOLDER TEXT MODEL... [--contexts 4096,8192] [--caches q8_0,q4_0] [--windows 1]
        [--llama-perplexity PATH]

Each model is stored as Q8_0. `llama-perplexity --kl-divergence` scores the second half of its windows, which is our
last bin but for its first token; its base log-probabilities are rounded to 16 bits. A model whose context is shorter is
measured at that; one whose heads no quantized cache can hold is listed with the refusal.
"""

import argparse
import re
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
from quantry.jobs import verify_cache  # noqa: E402
from quantry.models.attention import context_length  # noqa: E402
from quantry.models.reader import open_checkpoint  # noqa: E402
from quantry.proof.prove import VerifyOptions  # noqa: E402

PEER = {
    "kl": r"Mean\s+KLD:\s+([-\d.]+)",
    "kl_median": r"Median\s+KLD:\s+([-\d.]+)",
    "top1": r"Same top p:\s+([\d.]+)",
    "perplexity": r"Mean PPL\(Q\)\s*:\s+([\d.]+)",
    "base_perplexity": r"Mean PPL\(base\)\s*:\s+([\d.]+)",
}


def main() -> None:
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        longest = context_length(open_checkpoint(model).config) or max(options.contexts)
        for context in dict.fromkeys(min(context, longest) for context in options.contexts):  # kept after each
            rows.append(_row(model, context, options))
            print(_lines(rows[-1]), flush=True)
            keep("kv_length", {"text": options.text.name, "stored": "Q8_0", "peer": _version(options), "rows": rows})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--contexts", type=lambda text: [int(part) for part in text.split(",")], default=[4096, 8192])
    parser.add_argument("--caches", default="q8_0,q4_0")
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--llama-perplexity", type=Path)
    return parser.parse_args()


def _row(model: Path, context: int, options: argparse.Namespace) -> dict[str, Any]:
    out = options.work / f"{model.name}-q8_0"
    if not out.exists():
        quantry.quantize(model, out, preset="gguf-q8_0")
    common = {"model": model.name, "context": context, "windows": options.windows}
    asked = VerifyOptions(
        options.text, None, None, None, None, None, None, "general", options.windows, context, 1, "cpu"
    )  # fmt: skip
    start = time.perf_counter()
    try:
        job = verify_cache.prepare(str(out), str(model), asked, options.caches, context)
        assert job is not None
        found = verify_cache.measure(job)
    except QuantryError as error:
        return {**common, "refused": str(error.problem).replace(str(out), model.name)}
    row = {**common, "seconds": round(time.perf_counter() - start, 1), **found}
    return {**row, "llama_perplexity": _peer(next(out.glob("*.gguf")), context, options)}


def _peer(file: Path, context: int, options: argparse.Namespace) -> dict[str, Any] | None:
    if options.llama_perplexity is None:
        return None
    base = options.work / "base.kld"
    common = ["-m", file, "-c", context, "-t", 2, "--kl-divergence-base", base]
    start = time.perf_counter()
    _run(options.llama_perplexity, *common, "-f", options.text, "--chunks", options.windows, "-fa", "on")
    found: dict[str, Any] = {}
    for cache in options.caches.split(","):
        said = _run(
            options.llama_perplexity, *common, "--kl-divergence", "-ctk", cache, "-ctv", cache, "-fa", "on"
        )  # fmt: skip
        figures = {name: float(match[1]) for name, pattern in PEER.items() if (match := re.search(pattern, said))}
        found[cache] = {**figures, "top1": figures["top1"] / 100}
    base.unlink()
    return {"seconds": round(time.perf_counter() - start, 1), "caches": found}


def _run(*words: object) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed: {done.stderr[-400:]}")
    return done.stdout + done.stderr


def _version(options: argparse.Namespace) -> str | None:
    if options.llama_perplexity is None:
        return None
    return "llama-perplexity, " + _run(options.llama_perplexity, "--version").splitlines()[0]


def _lines(row: dict[str, Any]) -> str:
    head = f"{row['model']}, {row['windows']} x {row['context']}"
    if "refused" in row:
        return f"{head}: {row['refused']}"
    lines = [f"{head}: {row['seconds']} s"]
    for cache, found in row["caches"].items():
        bins = ", ".join(f"{part['end']}: {part['kl']:.6f}" for part in found["bins"])
        peer = ((row["llama_perplexity"] or {}).get("caches") or {}).get(cache)
        theirs = f"; llama-perplexity {peer['kl']:.6f} in the last bin" if peer else ""
        lines.append(f"  {cache}: KL {found['kl']:.6f}, same first token {found['top1']:.2%}; to {bins}{theirs}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
