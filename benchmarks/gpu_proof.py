"""An 8B shape on a GPU: what `verify`, `sensitivity` and `auto` take in time and memory.

    PYTHONPATH=src python benchmarks/gpu_proof.py WORK_FOLDER [SHAPE]

`verify` measures a W4A16 artefact against its 16-bit model, on 16 windows of 512 tokens and within a minute.
`sensitivity` measures every layer in two grids, and `auto` spends 4.5 bits a weight with what was measured. Weights are
random, so figures of quality say nothing.
"""

import json
import os
import resource
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
from shapes import write  # noqa: E402

TEXT: dict[str, Any] = {"samples": 32, "length": 512}
FORMAT = "compressed-tensors"
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "quantize w4a16": ("quantize", {"preset": "w4a16"}),
    "verify, 16 x 512": ("verify", {}),
    "verify again": ("verify", {}),
    "verify within a minute": ("verify", {"proof_time": 60.0, "length": 511}),
    "sensitivity": ("sensitivity", {"format": FORMAT, **TEXT}),
    "auto, 4.5 bits": ("quantize", {"preset": "auto", "budget": "4.5bpw", "format": FORMAT, **TEXT}),
}


def main(work: Path, shape: str) -> None:
    model = write(shape, work / shape)
    os.environ["QUANTRY_CACHE"] = str(work / "cache")
    figures: dict[str, Any] = {"shape": shape, **TEXT}
    for name, (job, options) in JOBS.items():  # each in a process of its own, so that peaks are its own
        words = [sys.executable, __file__, "--job", job, str(model), str(work), json.dumps(options)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        last = done.stdout.splitlines()[-1] if done.stdout else "{}"
        figures[name] = json.loads(last) if done.returncode == 0 else {"exit_code": done.returncode}
        print(name, figures[name], flush=True)
        keep("gpu_proof", {"device": torch.cuda.get_device_name(), **figures})  # what is done counts if it is stopped


def one(job: str, model: str, work: Path, options: dict[str, Any]) -> None:
    """One job, after a small one that loads what is loaded but once."""
    with TemporaryDirectory() as folder:
        quantry.quantize("demo", Path(folder) / "out", preset="w4a16-gptq", device="cuda", samples=4, length=256)
    torch.cuda.reset_peak_memory_stats()
    start, found = time.perf_counter(), {}
    if job == "verify":
        proof = quantry.verify(work / "w4a16", reference=model, device="cuda", record=False, **options)
        found = {"windows": proof.text["windows"], "kl": proof.kl, "notes": list(proof.notes[:1])}
    elif job == "sensitivity":
        quantry.sensitivity(model, device="cuda", **options)
    else:
        out = work / options["preset"]
        made = quantry.quantize(model, out, device="cuda", **options)
        found = {"bits_per_weight": made.bits_per_weight}
    figures = {
        "seconds": round(time.perf_counter() - start, 2),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **found,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        one(sys.argv[2], sys.argv[3], Path(sys.argv[4]), json.loads(sys.argv[5]))
    else:
        main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "8b")
