"""One artefact of GPTQModel, in its own environment: PYTHON gptqmodel_job.py JOB.json.

The job gives model, out, windows (a JSON list of token lists), method (gptq, awq), bits, group and symmetric; the
report gets the seconds of each part. Layers are not moved to the disk meanwhile; all else is the tool's own default. Of
Gemma 3 it writes a `rope_theta` that is a table into `rope_parameters`, beside the entries of both kinds of layers:
Quantry refuses to read that, and it is left out.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(os.cpu_count()))  # else it refuses machines with few cores

from gptqmodel import GPTQModel, QuantizeConfig  # type: ignore[import-not-found]


def main(job: dict[str, Any]) -> None:
    start = time.perf_counter()
    method = {} if job["method"] == "gptq" else {"method": job["method"]}
    grid = {"bits": job["bits"], "group_size": job["group"], "sym": job["symmetric"]}
    settings = QuantizeConfig(**grid, **method, device="cpu", offload_to_disk=False)  # it has the memory
    model = GPTQModel.load(job["model"], settings)
    loaded = time.perf_counter()
    windows = json.loads(Path(job["windows"]).read_text())
    rows = [{"input_ids": window, "attention_mask": [1] * len(window)} for window in windows]
    found = model.quantize(rows, batch_size=1)
    made = time.perf_counter()
    model.save(job["out"])
    _mend(Path(job["out"]) / "config.json")
    saved = time.perf_counter()
    rounding = _rounding(found)
    seconds = {"load": loaded - start, "quantize": made - loaded, "save": saved - made}
    if rounding is not None:
        seconds |= {"calibration": made - loaded - rounding, "rounding": rounding}
    report = {
        "parts": {name: round(value, 2) for name, value in seconds.items()},
        "versions": {name: version(name) for name in ("gptqmodel", "transformers", "torch")},
    }
    Path(job["report"]).write_text(json.dumps(report))


def _mend(file: Path) -> None:
    config = json.loads(file.read_text())
    rotary = config.get("rope_parameters") or {}
    if isinstance(rotary.get("rope_theta"), dict) and {"full_attention", "sliding_attention"} <= rotary.keys():
        config["rope_parameters"] = {name: rotary[name] for name in ("full_attention", "sliding_attention")}
        file.write_text(json.dumps(config, indent=2) + "\n")


def _rounding(found: Any) -> float | None:
    """The seconds that its log gives for the rounding of each layer, added up; they may overlap."""
    lines = [line for many in (found or {}).values() for line in many] if isinstance(found, dict) else []
    times = [float(line["time"]) for line in lines if isinstance(line, dict) and "time" in line]
    return sum(times) if times else None


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
