"""Every scheme of the demo model in a real vLLM on a GPU: does it load, and does it compute what its bytes say?

    PYTHONPATH=src:... python benchmarks/gpu_engines.py WORK_FOLDER      # needs a GPU and vLLM in this environment

Also holds the artefacts made with `device="cuda"` against those made on the CPU, byte for byte.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "engines")]

from transformers import AutoTokenizer  # noqa: E402

import quantry  # noqa: E402
from decoded import divergence, load, log_probabilities  # noqa: E402
from measure import keep  # noqa: E402
from quantry.checkpoint.reader import demo_folder  # noqa: E402

CASES = [
    ("bf16", "safetensors", None), ("w4a16", "compressed-tensors", 128), ("w4a16-asym", "compressed-tensors", 64),
    ("w8a16", "compressed-tensors", 128), ("w3a16", "compressed-tensors", 128), ("w2a16", "compressed-tensors", 32),
    ("w8a8", "compressed-tensors", None), ("fp8-dynamic", "compressed-tensors", None),
    ("fp8-block", "compressed-tensors", None), ("fp8-tensor", "compressed-tensors", None),
    ("nvfp4", "compressed-tensors", None), ("mxfp4", "compressed-tensors", None), ("w4a16", "gptq", 128),
    ("w8a16", "gptq", 128), ("w4a16-asym", "gptq", 128), ("w3a16", "gptq", 128), ("w4a16-asym", "awq", 128),
    ("nf4", "bitsandbytes", None),
]  # fmt: skip
AT_A_TIME = 5


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def score(folder: Path) -> tuple[str, Any]:
    """What vLLM says of one artefact: its scores, or the error it ended with; and how long it took."""
    environment = {
        **os.environ,
        "QUANTRY_VLLM_ARGUMENTS": json.dumps({"gpu_memory_utilization": 0.1, "skip_tokenizer_init": True}),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
    }
    out = folder.with_suffix(".json")
    script, tokens = HERE.parent / "tests/engines/score_vllm.py", folder.parent / "tokens.json"
    command = [sys.executable, *map(str, (script, tokens, out, folder))]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)
    except subprocess.TimeoutExpired:
        return folder.name, ("no answer in 150 s", 150.0, [])
    log = (done.stdout + done.stderr).splitlines()
    kernels = sorted({line.split("] ")[-1] for line in log if "ernel" in line and "Using" in line})
    if not out.exists():
        return folder.name, (" | ".join(log[-3:])[-600:], time.perf_counter() - start, kernels)
    found = json.loads(out.read_text())[str(folder)]
    if isinstance(found, str):
        causes = [line for line in log if "Error" in line and "Traceback" not in line]
        found = (causes[0].split("] ")[-1] if causes else found)[:400]
    return folder.name, (found, time.perf_counter() - start, kernels)


def main(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    texts = (demo_folder() / "held-out.txt").read_text(encoding="utf-8").split("\n\n")
    sequences = [tokenizer(text).input_ids[:200] for text in texts if len(text) > 600][:4]
    (work / "tokens.json").write_text(json.dumps(sequences))
    folders, same = [], {}
    for preset, form, group in CASES:
        folder = work / f"{preset}-{form}"
        quantry.quantize("demo", folder, preset=preset, format=form, group=group, device="cuda")
        quantry.quantize("demo", work / "cpu" / folder.name, preset=preset, format=form, group=group)
        same[folder.name] = contents(folder) == contents(work / "cpu" / folder.name)
        folders.append(folder)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        served = dict(pool.map(score, folders))
    plain = log_probabilities(load(demo_folder()), sequences)
    figures: dict[str, Any] = {}
    for folder in folders:
        found, seconds, kernels = served[folder.name]
        row: dict[str, Any] = {"cuda_equals_cpu": same[folder.name], "seconds": round(seconds, 1), "kernels": kernels}
        if isinstance(found, str):
            row["refused"] = found
        else:
            row["kl_to_decoded"] = divergence(found, log_probabilities(load(folder), sequences))
            row["kl_to_16_bit"] = divergence(found, plain)
        figures[folder.name] = row
        print(folder.name, json.dumps(row)[:300], flush=True)
    keep("gpu_engines", {"schemes": figures})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
