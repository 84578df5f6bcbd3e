"""Prefill and decode of vLLM on a GPU by scheme, shape and batch, with weights that are made up on the device.

    PYTHONPATH=src:... python benchmarks/vllm_speed.py WORK_FOLDER [WAVE ...]     # needs a GPU and vLLM

The engines of a wave start side by side and then measure one after the other, so that none disturbs another. Each time
is the best of several. Prefill is the time to the end of the first token of all prompts; a decode step is the
difference between answers of 1 and of 1 + STEPS tokens, divided by STEPS. measurements.toml holds what was kept.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from measure import keep  # noqa: E402
from quantry.planning.models import from_config, known_models  # noqa: E402
from quantry.quantizing.recipe import build  # noqa: E402
from quantry.quantizing.targets import FolderTarget  # noqa: E402

STEPS = 64
GIB = 1 << 30
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # a model of the catalogue with other fields
    "8b": ("llama-3.1-8b", {}),
    "1b": (
        "llama-3.1-8b",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    ),
    "70b-8": (
        "llama-3.1-8b",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8, "num_attention_heads": 64},
    ),
    "1.5b": ("qwen2.5-1.5b", {}),
    "32b": ("qwen3-32b", {}),
    "30b-a3b": ("qwen3-30b-a3b", {}),
    "8x7b": ("mixtral-8x7b", {}),
    "oss-20b": ("gpt-oss-20b", {}),
}
STORED: dict[str, dict[str, Any]] = {  # quantization_config of models that are published quantized
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
SETUPS: dict[str, dict[str, Any]] = {"graphs": {"compilation_config": GRAPHS}, "compiled": {}}
Case = tuple[str, str, str | None, str]
WAVES: dict[str, tuple[Case, ...]] = {  # shape, preset, format, set-up; a wave fits into the device together
    "schemes": (
        ("8b", "bf16", None, "graphs"),
        ("8b", "fp8-dynamic", None, "graphs"),
        ("8b", "w8a8", None, "graphs"),
        ("8b", "w4a16", None, "graphs"),
        ("8b", "w4a16-asym", "awq", "graphs"),
        ("8b", "w8a16", None, "graphs"),
    ),
    "sizes": (
        ("8b", "bf16", None, "compiled"),
        ("8b", "w4a16", None, "compiled"),
        ("1b", "bf16", None, "graphs"),
        ("1b", "w4a16", None, "graphs"),
        ("70b-8", "bf16", None, "graphs"),
        ("70b-8", "w4a16", None, "graphs"),
    ),
    "small": (
        ("1.5b", "bf16", None, "graphs"),
        ("1.5b", "fp8-dynamic", None, "graphs"),
        ("1.5b", "w4a16", None, "graphs"),
        ("oss-20b", "mxfp4", None, "graphs"),
        ("30b-a3b", "bf16", None, "graphs"),
    ),
    "middle": (
        ("30b-a3b", "fp8-dynamic", None, "graphs"),
        ("30b-a3b", "w4a16", None, "graphs"),
        ("32b", "w4a16", None, "graphs"),
    ),
    "experts": (("8x7b", "w4a16", None, "graphs"),),
    "eight": (
        ("8x7b", "fp8-dynamic", None, "graphs"),
        ("32b", "fp8-dynamic", None, "graphs"),
        ("oss-20b", "mxfp4", None, "graphs"),
    ),
    "dense-16": (("32b", "bf16", None, "graphs"),),
    "experts-16": (("8x7b", "bf16", None, "graphs"),),
}
SHORT = (  # batch, prompt
    *((batch, 512) for batch in (1, 2, 4, 8, 16, 32, 64, 128)),
    (1, 128),
    (1, 2048),
    (16, 2048),
)  # fmt: skip
LONG = (*((batch, 512) for batch in (1, 4, 16, 64)), (1, 4096), (8, 4096), (1, 32000))
LONG_SHAPES = frozenset({"1.5b", "32b", "30b-a3b", "8x7b", "oss-20b"})


def folder_of(work: Path, shape: str, preset: str, format_name: str | None, setup: str) -> Path:
    """Makes a folder with no more than the config.json of a quantized model."""
    base, changes = SHAPES[shape]
    config = {**known_models()[base].config, **changes}
    folder = work / "-".join(filter(None, (shape, preset, format_name, setup)))
    folder.mkdir(parents=True, exist_ok=True)
    if preset in STORED:
        text = json.dumps({**config, "torch_dtype": "bfloat16", "quantization_config": STORED[preset]}).encode()
    else:
        target = FolderTarget(from_config(config, shape), build({"preset": preset, "format": format_name}))
        text = dict(target.container(Path("nowhere")).companions([[]]))["config.json"]
    (folder / "config.json").write_bytes(text)
    return folder


def measure(folder: Path, setup: str) -> None:
    """Runs in a process of its own: starts an engine, waits for its turn, measures, writes beside the folder."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    start = time.perf_counter()
    long = folder.name.startswith(tuple(f"{shape}-" for shape in LONG_SHAPES))
    config = json.loads((folder / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    engine = LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=128,
        max_model_len=32640 if long else 4096,
        kv_cache_memory_bytes=40_000 * token if long else int(9.4 * GIB),
        gpu_memory_utilization=0.1, enable_prefix_caching=False, seed=0,
        **SETUPS[setup],
    )  # fmt: skip
    (folder / "ready").write_text(str(round(time.perf_counter() - start, 1)))
    while not (folder / "go").exists():
        time.sleep(0.05)

    def seconds(batch: int, prompt: int, answer: int) -> float:
        wanted = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": [7 + (11 * n + m) % 9000 for m in range(prompt)]} for n in range(batch)]
        begin = time.perf_counter()
        engine.generate(inputs, wanted, use_tqdm=False)
        return time.perf_counter() - begin

    seconds(8, 512, 8)
    rows = []
    for batch, prompt in LONG if long else SHORT:
        small = batch * prompt < 8192
        seconds(batch, prompt, 1 + STEPS)  # kernels of mixtures are compiled at the first use of a shape
        first = sorted(seconds(batch, prompt, 1) for _ in range(5 if small else 2))
        whole = sorted(seconds(batch, prompt, 1 + STEPS) for _ in range(2))
        steps = [(each - first[0]) / STEPS for each in whole]
        rows.append(
            {
                "batch": batch, "prompt": prompt, "context": prompt + STEPS // 2,
                "prefill_ms": round(first[0] * 1e3, 3), "prefill_median_ms": round(first[len(first) // 2] * 1e3, 3),
                "step_ms": round(steps[0] * 1e3, 4), "step_worst_ms": round(steps[-1] * 1e3, 4),
            }
        )  # fmt: skip
        (folder / "points.json").write_text(json.dumps(rows))
    (folder / "done").write_text("")


def run_wave(work: Path, cases: tuple[Case, ...], results: dict[str, Any]) -> None:
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    running = {}
    for case in cases:
        folder = folder_of(work, *case)
        log = (folder / "log").open("w")
        command = [sys.executable, __file__, "--measure", str(folder), case[-1]]
        running[folder] = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    while any(not (folder / "ready").exists() and process.poll() is None for folder, process in running.items()):
        time.sleep(0.2)
    for folder, process in running.items():
        (folder / "go").write_text("")
        while not (folder / "done").exists() and process.poll() is None:
            time.sleep(0.05)
        points = folder / "points.json"
        lines = (folder / "log").read_text().splitlines()
        results[folder.name] = {
            "started_s": (folder / "ready").read_text() if (folder / "ready").exists() else None,
            "said": [line.split("] ")[-1] for line in lines if re.search("took.*GiB|ernel for|MoE backend", line)],
            "points": json.loads(points.read_text()) if points.exists() else [],
            **({} if points.exists() else {"failed": " | ".join(lines[-4:])[-800:]}),
        }
        print(folder.name, json.dumps(results[folder.name]), flush=True)
    for process in running.values():
        process.terminate()
    for process in running.values():
        process.wait()
    time.sleep(3)


def main(work: Path, waves: list[str]) -> None:
    results: dict[str, Any] = {}
    for name in waves or list(WAVES):
        run_wave(work, WAVES[name], results)
        (work / "vllm_speed.json").write_text(json.dumps(results))
    keep("vllm_speed", {"cases": results})


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(Path(sys.argv[2]), sys.argv[3])
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
