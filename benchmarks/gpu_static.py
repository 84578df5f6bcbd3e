"""Static input scales and FP8 KV caches of the demo model in a real vLLM on a GPU: loaded, and used?

    PYTHONPATH=src:... python benchmarks/gpu_static.py WORK_FOLDER      # needs a GPU and vLLM in this environment

Whether the scales of a KV cache are used is seen by spoiling them: a copy whose scales are 64 times too small clips
nearly every key and value, and must lose far more.
"""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

from safetensors.torch import load_file, save_file  # noqa: E402

import quantry  # noqa: E402
from gpu_engines import AT_A_TIME, score  # noqa: E402
from measure import keep  # noqa: E402
from quantry.proof.reference import reference  # noqa: E402
from quantry.proof.text import default_text, windows  # noqa: E402
from quantry.quantizing.sources import open_source, tokenizer  # noqa: E402

TEXT: dict[str, Any] = {"samples": 64, "length": 256}
CASES: dict[str, dict[str, Any]] = {
    "fp8-static": {"preset": "fp8-static"},
    "w8a8-static": {"preset": "w8a8-static"},
    "w8a8-static minmax": {"preset": "w8a8-static", "input_scales": "minmax"},
    "nvfp4-w4a4": {"preset": "nvfp4-w4a4"},
    "w8a8-zeroquant": {"preset": "w8a8-zeroquant"},
    "w4a8-zeroquant": {"preset": "w4a8-zeroquant"},
    "fp8-dynamic": {"preset": "fp8-dynamic"},
    "fp8-dynamic, fp8 cache": {"preset": "fp8-dynamic", "kv": "fp8"},
    "fp8-dynamic, fp8 cache by head": {"preset": "fp8-dynamic", "kv": "fp8-head"},
    "w4a16-gptq, fp8 cache": {"preset": "w4a16-gptq", "kv": "fp8"},
}
SPOILT = "fp8-dynamic, fp8 cache"


def spoil(folder: Path, out: Path) -> Path:
    """A copy whose cache scales are 64 times too small."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    wrong = {name: one / 64 if name.endswith(("k_scale", "v_scale")) else one for name, one in tensors.items()}
    save_file(wrong, out / "model.safetensors", {"format": "pt"})
    return out


def main(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "QUANTRY_CACHE": str(work / "cache")}
    demo = open_source("demo")
    kept = reference(demo, windows(default_text(), tokenizer(demo), 200, 4))
    folders = {}
    for number, (name, options) in enumerate(CASES.items()):
        folders[name] = work / str(number)
        text = {} if options["preset"] == "fp8-dynamic" and "kv" not in options else TEXT
        quantry.quantize("demo", folders[name], device="cuda", **options, **text)
    folders[f"{SPOILT}, scales spoilt"] = spoil(folders[SPOILT], work / "spoilt")
    figures: dict[str, Any] = {}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        rows = pool.map(lambda folder: score(folder, kept), folders.values())
        for name, row in zip(folders, rows, strict=True):
            figures[name] = row
            print(name, row, flush=True)
    keep("gpu_static", {"noise": dict(kept.noise), "schemes": figures})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
