"""An 8B shape to FP8, W4A16 and GGUF Q4_K_M with the arithmetic on a GPU: seconds, and ratio to the disk's own speed.

PYTHONPATH=src python benchmarks/gpu_quantize.py WORK_FOLDER [SHAPE]
"""

import os
import shutil
import sys
import time
from pathlib import Path

import torch

import quantry
from measure import disk_speed, keep
from shapes import write


def main(work: Path, shape: str) -> None:
    model = write(shape, work / shape)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    os.sync()  # what was just written must not compete with what is measured
    speed = disk_speed(work)
    figures: dict[str, object] = {"shape": shape, "source_bytes": size, "disk_write_bytes_per_second": round(speed)}
    quantry.quantize("demo", work / "warm-up", preset="w4a16", device="cuda")
    for preset in ("fp8-dynamic", "w4a16", "gguf-q4_k_m"):
        out = work / preset
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        artefact = quantry.quantize(model, out, preset=preset, device="cuda")
        seconds = time.perf_counter() - start
        figures[preset] = {
            "seconds": round(seconds, 2),
            "source_bytes_per_second": round(size / seconds),
            "written_bytes_per_second": round(artefact.bytes / seconds),
            "share_of_disk_speed": round(artefact.bytes / seconds / speed, 3),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        }
        print(preset, figures[preset], flush=True)
        shutil.rmtree(out)
    keep("gpu_quantize", {"device": torch.cuda.get_device_name(), **figures})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "8b")
