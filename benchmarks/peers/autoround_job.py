"""One artefact of AutoRound, in its own environment: PYTHON autoround_job.py JOB.json.

The job gives model, out, windows (a JSON list of token lists), method (signround, or signround-best with 1000 steps a
block in place of 200 and, at 2 bits, the extension that the tool's README advises), bits, group and symmetric, and may
give a device and other iterations; the report gets the seconds of each part. The windows are taken as they are, all of
them; everything else is the tool's own default.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

ITERATIONS = {"signround": 200, "signround-best": 1000}  # its recipes default and best


def main(job: dict[str, Any]) -> None:
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    loaded = time.perf_counter()
    windows = json.loads(Path(job["windows"]).read_text())
    tool = AutoRound(
        model,
        tokenizer=tokenizer,
        bits=job["bits"],
        group_size=job["group"],
        sym=job["symmetric"],
        dataset=[torch.tensor([window]) for window in windows],
        nsamples=len(windows),
        seqlen=len(windows[0]),
        batch_size=8,
        enable_alg_ext=job["method"] == "signround-best" and job["bits"] == 2,
        iters=job.get("iterations") or ITERATIONS[job["method"]],
        device_map=job.get("device", "cpu"),
    )
    tool.quantize()
    made = time.perf_counter()
    tool.save_quantized(job["out"], format="llm_compressor")
    saved = time.perf_counter()
    seconds = {"load": loaded - start, "quantize": made - loaded, "save": saved - made}
    report = {
        "parts": {name: round(value, 2) for name, value in seconds.items()},
        "device": torch.cuda.get_device_name() if str(job.get("device")).startswith("cuda") else "cpu",
        "versions": {name: version(name) for name in ("auto-round", "transformers", "torch")},
    }
    Path(job["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
