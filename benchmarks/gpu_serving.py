"""What Quantry writes, served by a real vLLM through `quantry.serve`: does it load, does it agree, how fast is it?

    PYTHONPATH=src:... python benchmarks/gpu_serving.py MODEL --data CALIBRATION --text TEST --work FOLDER
        [--shape 8b] [--engine-python PYTHON] [--device cuda]          # needs vLLM, and a GPU for figures that matter

Agreement, on MODEL: each artefact is started with Quantry's own command, and the log-probability of every token of some
windows, asked for over HTTP, is held against what the written bytes say in float32. The 16-bit model is the first row:
its difference is what the arithmetic of the engine alone makes.

Speed, on a shape with random weights: so many requests at once, all with prompts of 512 tokens that nothing has seen. A
decode step is the difference between answers of 257 tokens and of 1, divided by 256; the best of three. Beside it is
what `quantry plan` says for the same model, device and number of requests. Servers start side by side and are measured
one after the other.
"""

import argparse
import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import quantry  # noqa: E402
from measure import keep  # noqa: E402
from quantry.errors import QuantryError  # noqa: E402
from quantry.proof.measure import Measurements, Part, decode  # noqa: E402
from quantry.proof.reference import Reference, reference  # noqa: E402
from quantry.proof.text import load_text, windows  # noqa: E402
from quantry.quantizing.sources import open_source, tokenizer  # noqa: E402
from quantry.serving.process import Running  # noqa: E402
from shapes import write  # noqa: E402

GIB = 1 << 30
LENGTH, WINDOWS = 512, 8
PROMPT, ANSWER, REPEATS = 512, 257, 3
BATCHES = (1, 16, 64)
AT_A_TIME = 6
START = 600.0


@dataclass(frozen=True)
class Case:
    """An artefact; a group where the preset's own does not divide the model's sizes."""

    preset: str
    format: str | None = None
    group: int | None = None

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.preset, self.format)))


AGREE = (
    Case("bf16"),
    Case("fp8-dynamic"),
    Case("fp8-static"),
    Case("w8a8-smoothquant+gptq"),
    Case("w4a16-gptq", "gptq", 64),
    Case("w4a16-awq", "awq", 64),
    Case("w4a16-awq+gptq", "compressed-tensors", 64),
    Case("w4a16-gptq", "compressed-tensors", 64),
)
SPEED = (
    Case("bf16"),
    Case("fp8-dynamic"),
    Case("w8a8"),
    Case("w4a16", "compressed-tensors"),
    Case("w4a16", "gptq"),
    Case("w4a16-asym", "awq"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--engine-python", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--part", choices=("agree", "speed", "both"), default="both")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "QUANTRY_CACHE": str(given.work / "cache"),
    }  # fmt: skip
    found: dict[str, Any] = {"device": _device(given.device)}
    if given.part != "speed":
        found["agreement"] = agreement(given)
    if given.part != "agree":
        found["speed"] = speed(given)
    keep("gpu_serving", found)


# ---- agreement ----


def agreement(given: argparse.Namespace) -> dict[str, Any]:
    source = open_source(given.model)
    kept = reference(source, windows(load_text(given.text), tokenizer(source), LENGTH, WINDOWS), device=given.device)
    told = {"data": given.data, "samples": given.samples, "length": LENGTH, "device": given.device}
    folders = {}
    for case in AGREE:
        folders[case] = _made(given.model, given.work / "agree" / case.name, case, **told)
    rows: dict[str, Any] = {}
    with _started(folders, given, 0.1, GIB, context=LENGTH + 16, parallel=16) as servers:
        for case, running in servers.items():
            rows[case.name] = (
                {"refused": running}
                if isinstance(running, str)
                else _agrees(running, folders[case], kept, given.device)
            )
            print(f"{case.name:36} {json.dumps(rows[case.name])}", flush=True)
    return {"model": given.model.name, "windows": WINDOWS, "length": LENGTH, "samples": given.samples, "rows": rows}


def _agrees(running: Running, folder: Path, kept: Reference, device: str) -> dict[str, Any]:
    """Log-probabilities of the tokens of a text, as served and as the bytes say."""
    measured = decode(open_source(folder), kept, device=device)
    decoded = measured.scores
    figures = Measurements((Part(kept, measured, None, len(kept.windows)),)).decoded_figures
    apart, served = [], []
    for window, here in zip(kept.windows, decoded, strict=True):
        there = _log_probabilities(running, window.tokens)[window.start :]
        served += there
        apart += [abs(a - float(b)) for a, b in zip(there, here.next, strict=True)]
    said = [float(value) for one in decoded for value in one.next]
    facts = running.facts()
    return {
        "tokens": len(apart),
        "mean_apart": round(statistics.fmean(apart), 5),
        "p99_apart": round(sorted(apart)[int(0.99 * len(apart))], 4),
        "mean_served": round(statistics.fmean(served), 5),
        "mean_decoded": round(statistics.fmean(said), 5),
        "kl_decoded": round(figures.kl.value, 5),
        "weights_bytes": facts.weights_bytes,
        "kernels": list(facts.kernels),
    }


def _log_probabilities(running: Running, tokens: Sequence[int]) -> list[float]:
    """Of every token after the first; at the place of the first stands a nought."""
    asked = {"model": running.model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
    found = _post(running, asked)["choices"][0]["prompt_logprobs"]
    return [0.0, *(row[str(token)]["logprob"] for row, token in zip(found[1:], tokens[1:], strict=True))]


# ---- speed ----


def speed(given: argparse.Namespace) -> dict[str, Any]:
    model = write(given.shape, given.work / given.shape)
    rows: dict[str, Any] = {}
    folders = {case: _made(model, given.work / "speed" / case.name, case, device=given.device) for case in SPEED}
    with _started(folders, given, 0.2, 8 * GIB, context=1024, parallel=max(BATCHES), prefix_cache=False) as servers:
        for case, running in servers.items():
            if isinstance(running, str):
                rows[case.name] = {"refused": running}
            else:
                facts = running.facts()
                rows[case.name] = {
                    "weights_bytes": facts.weights_bytes,
                    "kernels": list(facts.kernels),
                    "batches": {str(batch): _point(running, batch) for batch in BATCHES},
                }
                running.stop()  # those that are measured later have more room
    for batch in BATCHES:
        planned = _planned(model, batch)
        for case in SPEED:
            point = rows[case.name].get("batches", {}).get(str(batch))
            if point is None:
                continue
            base = rows["bf16"]["batches"][str(batch)]
            point["against_bf16"] = round(point["tokens_per_s"] / base["tokens_per_s"], 3)
            point["planned_tokens_per_s"] = planned.get(case.preset, {}).get("decode_tokens_per_s")
            point["planned_weights_bytes"] = planned.get(case.preset, {}).get("weights")
            print(f"{case.name:28} {batch:3} {json.dumps(point)}", flush=True)
    return {"shape": given.shape, "prompt": PROMPT, "answer": ANSWER, "rows": rows}


def _point(running: Running, batch: int) -> dict[str, float]:
    """The best of some runs; prompts are new every time."""
    _at_once(running, batch, 8)
    first = min(_at_once(running, batch, 1) for _ in range(REPEATS))
    whole = min(_at_once(running, batch, ANSWER) for _ in range(REPEATS))
    step = (whole - first) / (ANSWER - 1)
    return {
        "first_ms": round(first * 1e3, 2),
        "step_ms": round(step * 1e3, 4),
        "tokens_per_s": round(batch / step, 1),
        "with_prompts_tokens_per_s": round(batch * ANSWER / whole, 1),
    }


def _at_once(running: Running, batch: int, answer: int) -> float:
    """Seconds until the last of so many requests is answered."""
    seed = time.monotonic_ns() % 997
    prompts = [[7 + (seed * 31 + 11 * one + 7 * place) % 3000 for place in range(PROMPT)] for one in range(batch)]
    how = {"model": running.model, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(batch) as pool:
        begin = time.perf_counter()
        answers = list(pool.map(lambda prompt: _post(running, {**how, "prompt": prompt}), prompts))
        seconds = time.perf_counter() - begin
    assert all(one["usage"]["completion_tokens"] == answer for one in answers)
    return seconds


def _planned(model: Path, batch: int) -> dict[str, dict[str, float]]:
    """What the plan says of every preset in vLLM on this device."""
    found = quantry.plan(model, gpu="H200", engine="vllm", context=1024, concurrency=batch)
    return {
        one.preset: {"decode_tokens_per_s": one.speed["decode_tokens_per_s"], "weights": one.memory["weights"]}
        for one in found.options
    }


# ---- both ----


@contextmanager
def _started(
    folders: dict[Case, Path], given: argparse.Namespace, share: float, cache: int, **options: Any
) -> Iterator[dict[Case, Running | str]]:
    """Servers of artefacts, started side by side: the running server, or why there is none."""
    on_gpu = given.device != "cpu"
    place = {"utilization": share, "extra": ("--kv-cache-memory-bytes", str(cache))}
    options |= place if on_gpu else {"cache_gib": 1, "eager": True}

    def start(case: Case) -> Running | str:
        begin = time.perf_counter()
        log = given.work / "logs" / f"{folders[case].parent.name}-{case.name}.log"
        try:
            running = quantry.serve(
                folders[case], engine="vllm", port=0, engine_python=given.engine_python, patience=START, log=log,
                **options,
            )  # fmt: skip
        except QuantryError as error:
            print(f"{case.name}: {error}", flush=True)
            return str(error)
        stack.enter_context(running)
        print(f"{case.name}: serves after {time.perf_counter() - begin:.0f} s", flush=True)
        return running

    with ExitStack() as stack:
        with ThreadPoolExecutor(AT_A_TIME if on_gpu else 1) as pool:
            found = dict(zip(folders, pool.map(start, folders), strict=True))
        yield found


def _made(model: Path, folder: Path, case: Case, **told: Any) -> Path:
    begin = time.perf_counter()
    if case.preset == "bf16" or (folder / "quantry.json").exists():
        return model if case.preset == "bf16" else folder
    calibrated = any(word in case.preset for word in ("gptq", "awq+", "-awq", "smooth", "static"))
    kept = told if calibrated else {"device": told["device"]}
    quantry.quantize(model, folder, preset=case.preset, format=case.format, group=case.group, **kept)
    print(f"{case.name}: written in {time.perf_counter() - begin:.1f} s", flush=True)
    return folder


def _post(running: Running, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(*running.launch.address, timeout=START)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        assert answer.status == 200, found
        return found
    finally:
        connection.close()


def _device(name: str) -> str:
    import torch

    return torch.cuda.get_device_name() if name == "cuda" else name


if __name__ == "__main__":
    main()
