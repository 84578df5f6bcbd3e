"""One artefact of llm-compressor, in its own environment: PYTHON llmcompressor_job.py JOB.json.

The job gives model, out, windows (a JSON list of token lists), method (nearest, gptq, awq, awq+gptq, smoothquant,
smoothquant+gptq), scheme (int, or a key of NAMED), bits, group and symmetric; the report gets the seconds of each part.
Everything else is the tool's own default.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot  # type: ignore[import-not-found]
from llmcompressor.modifiers.gptq import GPTQModifier, base  # type: ignore[import-not-found]
from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]
from llmcompressor.modifiers.transform.awq import AWQModifier  # type: ignore[import-not-found]
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMED = {
    "w8a8": "W8A8",
    "fp8-dynamic": "FP8_DYNAMIC",
    "fp8-static": "FP8",
    "nvfp4": "NVFP4A16",
    "nvfp4-w4a4": "NVFP4",
}
STATIC = ("fp8-static", "nvfp4-w4a4")  # scales of the inputs are of the text
KEPT = ["lm_head"]


def main(job: dict[str, Any]) -> None:
    if not torch.accelerator.is_available():
        setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010 - its AWQ pins, which needs a GPU
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    loaded = time.perf_counter()
    rounding = _watch_rounding()
    windows = json.loads(Path(job["windows"]).read_text())
    needs_text = job["method"] != "nearest" or job["scheme"] in STATIC
    how = _text(windows) if needs_text else {}
    oneshot(model=model, recipe=_recipe(job), **how)
    made = time.perf_counter()
    model.save_pretrained(job["out"], save_compressed=True)
    AutoTokenizer.from_pretrained(job["model"]).save_pretrained(job["out"])
    saved = time.perf_counter()
    seconds = {"load": loaded - start, "calibration": made - loaded - sum(rounding), "rounding": sum(rounding)}
    packages = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    report = {
        "parts": {name: round(value, 2) for name, value in {**seconds, "save": saved - made}.items()},
        "versions": {name: version(name) for name in packages},
    }
    Path(job["report"]).write_text(json.dumps(report))


def _recipe(job: dict[str, Any]) -> list[Any]:
    steps: list[Any] = []
    if "awq" in job["method"]:
        steps.append(AWQModifier())
    if "smoothquant" in job["method"]:
        steps.append(SmoothQuantModifier())
    last = GPTQModifier if "gptq" in job["method"] else QuantizationModifier
    if job["scheme"] == "int":
        return [*steps, last(config_groups={"group_0": _group(job)}, ignore=KEPT)]
    return [*steps, last(targets="Linear", scheme=NAMED[job["scheme"]], ignore=KEPT)]


def _group(job: dict[str, Any]) -> dict[str, Any]:
    weights = {
        "num_bits": job["bits"],
        "type": "int",
        "symmetric": job["symmetric"],
        "strategy": "group",
        "group_size": job["group"],
    }
    return {"targets": ["Linear"], "weights": weights}


def _text(windows: list[list[int]]) -> dict[str, Any]:
    rows = [{"input_ids": window, "attention_mask": [1] * len(window)} for window in windows]
    return {
        "dataset": Dataset.from_list(rows),
        "num_calibration_samples": len(windows),
        "max_seq_length": len(windows[0]),
        "shuffle_calibration_samples": False,
    }


def _watch_rounding() -> list[float]:
    """The seconds of each call of GPTQ's column loop."""
    found: list[float] = []
    inner = base.quantize_weight

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            found.append(time.perf_counter() - start)

    base.quantize_weight = timed
    return found


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
