"""An 8B shape to W4A16 with GPTQ and with AWQ on a GPU: seconds, peak memory, and the floor of its arithmetic.

    PYTHONPATH=src python benchmarks/gpu_calibrate.py WORK_FOLDER [SHAPE] [SAMPLES] [LENGTH]

Calibrated on the demo's text, whose paragraphs come a second time in another order to have enough of them. The floor
counts the products of the forward pass and of the Gram matrices at the speed of a large bf16 matrix product of the same
run. A job on a GPU keeps no statistics: each preset walks the model anew.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import torch  # noqa: E402

import quantry  # noqa: E402
from measure import keep  # noqa: E402
from quantry.models.reader import demo_folder  # noqa: E402
from shapes import SHAPES, write  # noqa: E402

JOBS: dict[str, dict[str, Any]] = {
    "w4a16-gptq, low memory": {"preset": "w4a16-gptq", "low_memory": True},
    "w4a16-awq+gptq, low memory": {"preset": "w4a16-awq+gptq", "low_memory": True},
    "w4a16-gptq": {"preset": "w4a16-gptq"},
    "w4a16-awq": {"preset": "w4a16-awq"},
    "w4a16-awq+gptq": {"preset": "w4a16-awq+gptq"},
    "w4a16-gptq, sequential": {"preset": "w4a16-gptq", "sequential": True},
}


def main(work: Path, shape: str, samples: int, length: int) -> None:
    model = write(shape, work / shape)
    os.environ["QUANTRY_CACHE"] = str(work / "cache")
    figures: dict[str, Any] = {"shape": shape, "samples": samples, "length": length}
    speed = _product_speed()
    figures["bf16_flops_per_second"] = round(speed)
    figures["floor_seconds"] = round(_operations(shape, samples * length) / speed, 2)
    how = {"device": "cuda", "samples": samples, "length": length, "data": str(_text(work / "text.txt"))}
    for name, options in JOBS.items():  # each in a process of its own, so that peaks are its own
        job = {"model": str(model), "output": str(work / "out"), **how, **options}
        done = subprocess.run(
            [sys.executable, __file__, "--job", json.dumps(job)], stdout=subprocess.PIPE, text=True, check=True
        )
        figures[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, figures[name], flush=True)
        shutil.rmtree(work / "out")
    keep("gpu_calibrate", {"device": torch.cuda.get_device_name(), **figures})


def one(job: dict[str, Any]) -> None:
    """One job, after a small one that loads what is loaded but once."""
    with TemporaryDirectory() as folder:
        quantry.quantize("demo", Path(folder) / "out", preset="w4a16-gptq", device="cuda", samples=4, length=256)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    made = quantry.quantize(**job)
    figures = {
        "seconds": round(time.perf_counter() - start, 2),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        "peak_gpu_reserved_bytes": torch.cuda.max_memory_reserved(),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "notes": [note for note in made.notes if "GPU" in note],
    }
    print(json.dumps(figures))


def _text(path: Path) -> Path:
    """The demo's text, and once more in another order."""
    parts = (demo_folder() / "calibration.txt").read_text().split("\n\n")
    path.write_text("\n\n".join([*parts, *reversed(parts)]))
    return path


def _product_speed() -> float:
    """Operations a second of a large product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        a @ a
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - start)


def _operations(shape: str, tokens: int) -> float:
    """Multiplications and additions of the blocks' linears and of half of each Gram matrix."""
    hidden, inner, layers, heads, kv_heads, _ = SHAPES[shape]
    head = hidden // heads
    linears = hidden * (2 * hidden + 2 * kv_heads * head) + 3 * hidden * inner
    grams = (3 * hidden**2 + inner**2) / 2
    return float(2 * tokens * layers * (linears + grams))


if __name__ == "__main__":
    given = sys.argv[2:]
    if sys.argv[1] == "--job":
        one(json.loads(given[0]))
        sys.exit()
    main(
        Path(sys.argv[1]),
        given[0] if given else "8b",
        int(given[1]) if len(given) > 1 else 128,
        int(given[2]) if len(given) > 2 else 2048,
    )
