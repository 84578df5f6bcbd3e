"""A 1B shape to FP8 and W4A16: Quantry against llm-compressor's model-free path, in one run on the same machine.

    python benchmarks/quantize_peers.py WORK_FOLDER PYTHON_WITH_LLMCOMPRESSOR

The peer needs an environment of its own: pip install torch==2.13.0 llmcompressor==0.14.0.1. Both read the same files
from the file cache and write to the same disk; each is run three times, in turns, and the best run counts. For W4A16
Quantry searches each group's scale (fit "mse", the preset's default), the peer takes the maximum; `w4a16, absmax` is
Quantry without the search.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from measure import keep, run
from shapes import write

RUNS = 3
PEER = """
import sys
from llmcompressor import model_free_ptq
model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], scheme=sys.argv[3],
               ignore=["lm_head", "re:.*embed.*"], max_workers=2, device="cpu")
"""
ABSMAX = """
import sys, dataclasses, quantry.quantizing.recipe as recipe
rows = recipe._presets()
rows["w4a16"] = dataclasses.replace(rows["w4a16"], fit="absmax")
import quantry
quantry.quantize(sys.argv[1], sys.argv[2], preset="w4a16")
"""


def main(work: Path, peer: str) -> None:
    model = write("1b", work / "1b")
    out = work / "out"
    ours: list[str | Path] = [sys.executable, "-m", "quantry", "quantize", model, "-o", out, "--preset"]
    commands: dict[str, tuple[list[str | Path], list[str | Path]]] = {
        "fp8": ([*ours, "fp8-dynamic"], [peer, "-c", PEER, model, out, "FP8_DYNAMIC"]),
        "w4a16": ([*ours, "w4a16"], [peer, "-c", PEER, model, out, "W4A16"]),
        "w4a16, absmax": ([sys.executable, "-c", ABSMAX, model, out], [peer, "-c", PEER, model, out, "W4A16"]),
    }
    figures: dict[str, object] = {"peer": _version(peer), "shape": "1b", "runs": RUNS}
    for name, pair in commands.items():
        best: list[dict[str, float]] = [{}, {}]
        for _ in range(RUNS):
            for side, command in enumerate(pair):
                shutil.rmtree(out, ignore_errors=True)
                found = run(command, stderr=subprocess.DEVNULL)
                if not best[side] or found["seconds"] < best[side]["seconds"]:
                    best[side] = found
        ratios = {key: round(best[1][key] / best[0][key], 2) for key in best[0]}
        figures[name] = {"quantry": best[0], "llm-compressor": best[1], "times better": ratios}
        print(name, figures[name], flush=True)
    shutil.rmtree(out, ignore_errors=True)
    keep("quantize_peers", figures)


def _version(python: str) -> str:
    code = "from importlib.metadata import version; print('llmcompressor', version('llmcompressor'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
