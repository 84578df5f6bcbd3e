"""An 8B shape to W4A16 with GPTQ and with AWQ on a GPU: seconds, peak memory, and the floor of its arithmetic.

    PYTHONPATH=src python benchmarks/gpu_calibrate.py WORK_FOLDER [SHAPE] [SAMPLES] [LENGTH]

Calibrated on the demo's text. The floor counts the products of the forward pass and of the Gram matrices at the speed
of a large bf16 matrix product of the same run. Statistics are computed anew for the first two presets; the third takes
them from the store.
"""

import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import torch  # noqa: E402

import quantry  # noqa: E402
from measure import keep  # noqa: E402
from shapes import SHAPES, write  # noqa: E402


def main(work: Path, shape: str, samples: int, length: int) -> None:
    model = write(shape, work / shape)
    os.environ["QUANTRY_CACHE"] = str(work / "cache")
    figures: dict[str, Any] = {"shape": shape, "samples": samples, "length": length}
    speed = _product_speed()
    figures["bf16_flops_per_second"] = round(speed)
    figures["floor_seconds"] = round(_operations(shape, samples * length) / speed, 2)
    quantry.quantize("demo", work / "warm-up", preset="w4a16-gptq", device="cuda", samples=4, length=256)
    for preset in ("w4a16-gptq", "w4a16-awq", "w4a16-awq+gptq"):
        out = work / preset
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        quantry.quantize(model, out, preset=preset, device="cuda", samples=samples, length=length)
        figures[preset] = {
            "seconds": round(time.perf_counter() - start, 2),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
            "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "store_bytes": sum(file.stat().st_size for file in (work / "cache").rglob("*.safetensors")),
        }
        print(preset, figures[preset], flush=True)
        shutil.rmtree(out)
        if preset == "w4a16-gptq":
            shutil.rmtree(work / "cache", ignore_errors=True)
    keep("gpu_calibrate", {"device": torch.cuda.get_device_name(), **figures})


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
    main(
        Path(sys.argv[1]),
        given[0] if given else "8b",
        int(given[1]) if len(given) > 1 else 122,
        int(given[2]) if len(given) > 2 else 2048,
    )
