"""What the quantization job holds at its peak, by preset and size of the largest layer (memory/terms.toml).

python benchmarks/job_memory.py WORK_FOLDER        # needs about 5 GB of disk
"""

import shutil
import sys
from pathlib import Path

import shapes
from measure import keep, run

SHAPES = {  # hidden, MLP, layers, query heads, KV heads, vocabulary
    "2048 x 8192": (2048, 8192, 2, 32, 8, 4096),
    "4096 x 14336": (4096, 14336, 2, 32, 8, 4096),
    "8192 x 28672": (8192, 28672, 1, 64, 8, 4096),
    "2048 x 8192, vocabulary 65536": (2048, 8192, 2, 32, 8, 65536),
}
PRESETS = ("fp8-dynamic", "w4a16", "nf4", "gguf-q8_0", "gguf-q4_k_m", "bf16", "fp16", "nvfp4")


def main(work: Path) -> None:
    figures: dict[str, dict[str, float]] = {}
    for name, shape in SHAPES.items():
        shapes.SHAPES["job"] = shape
        model = shapes.write("job", work / "model")
        rows = figures.setdefault(name, {})
        for preset in PRESETS:
            out = work / "out"
            shutil.rmtree(out, ignore_errors=True)
            found = run([sys.executable, "-m", "quantry", "quantize", model, "-o", out, "--preset", preset])
            rows[preset] = found["peak_anonymous_bytes"]
            print(f"{name}, {preset}: {rows[preset] / 1e6:.0f} MB", flush=True)
        shutil.rmtree(model)
        shutil.rmtree(out)
    keep("job_memory", {"peak_anonymous_bytes": figures})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
