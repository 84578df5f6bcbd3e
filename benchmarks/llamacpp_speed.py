"""The embedded llama.cpp on this processor: prefill and decode by type, threads, sequences at once and context.

    python benchmarks/llamacpp_speed.py WORK_FOLDER MODEL [MODEL ...] [--seconds 1.5] [--presets gguf-f16,gguf-q8_0]

Every llama_decode is timed alone and the fastest counts: on a machine that is shared a mean says more of its other
users. One thread is timed by its own clock, which stands still while others have the core. Memory bandwidth is measured
beside, with the same cores and clock. Models are quantized first if need be; a name such as 1b is one of shapes.py.
"""

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from ctypes import POINTER, c_int8, c_int32, c_void_p
from importlib.metadata import version
from mmap import mmap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import shapes
from measure import keep
from quantry.devices.detect import detect, measure_bandwidth
from quantry.llamacpp.model import LlamaBatch, api

PRESETS = ("gguf-f16", "gguf-q8_0", "gguf-q4_k_m", "gguf-q4_0")
POINTS = ((1, 64), (2, 64), (4, 64), (8, 64), (16, 64), (1, 512), (4, 512))  # sequences, tokens before
PROMPTS = (32, 128, 512)
LEADING = {"context": 0, "batch": 1, "micro_batch": 2, "sequences": 3}  # words of llama_context_params


class Engine:
    """One loaded file and a context for several sequences."""

    def __init__(self, path: Path, context: int, sequences: int, threads: int) -> None:
        self.api = api()
        self.model = self.api.llama_model_load_from_file(os.fsencode(path), self.api.llama_model_default_params())
        params = self.api.llama_context_default_params()
        words = {"context": context * sequences, "batch": 2048, "micro_batch": 512, "sequences": sequences}
        for name, value in words.items():
            params.words[LEADING[name]] = value
        self.context = self.api.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            sys.exit(f"{path} does not load")
        self.api.llama_set_n_threads(self.context, threads, threads)
        self.threads = threads

    def decode(self, tokens: list[tuple[int, int, int]]) -> float:
        """Seconds for tokens given as (id, position, sequence); logits are made for the last of each sequence."""
        count = len(tokens)
        last = {sequence: index for index, (_, _, sequence) in enumerate(tokens)}
        ids = [(c_int32 * 1)(sequence) for _, _, sequence in tokens]
        batch = LlamaBatch(
            count=count,
            tokens=(c_int32 * count)(*(token for token, _, _ in tokens)),
            positions=ctypes.cast((c_int32 * count)(*(position for _, position, _ in tokens)), c_void_p),
            sequence_counts=ctypes.cast((c_int32 * count)(*[1] * count), c_void_p),
            sequences=ctypes.cast(
                (POINTER(c_int32) * count)(*(ctypes.cast(one, POINTER(c_int32)) for one in ids)), c_void_p
            ),
            wanted=(c_int8 * count)(*(index in last.values() for index in range(count))),
        )
        clock = time.thread_time if self.threads == 1 else time.perf_counter
        start = clock()
        if self.api.llama_decode(self.context, batch):
            sys.exit("llama_decode failed")
        self.api.llama_get_logits(self.context)  # waits for the result
        return clock() - start

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def copy_rate(size: int = 64 << 20) -> float:
    """Bytes a second that one thread copies, read and written both counted, by its own clock."""
    source, target = ((ctypes.c_char * size).from_buffer(mmap(-1, size)) for _ in range(2))
    times = []
    for value in range(30):
        ctypes.memset(source, value, size)
        start = time.thread_time()
        ctypes.memmove(target, source, size)
        times.append(time.thread_time() - start)
    return 2 * size / min(times)


def steps(path: Path, sequences: int, before: int, threads: int, seconds: float) -> list[float]:
    """Times of decode steps of all sequences, each with about `before` tokens."""
    engine = Engine(path, before + 256, sequences, threads)
    for sequence in range(sequences):
        engine.decode([(5 + (7 * n + sequence) % 3000, n, sequence) for n in range(before)])
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 250 and (len(found) < 10 or time.perf_counter() < end):
        position = before + len(found)
        found.append(engine.decode([(9 + len(found), position, sequence) for sequence in range(sequences)]))
    engine.close()
    return found


def prompts(path: Path, tokens: int, threads: int, seconds: float) -> list[float]:
    """Times of one prompt, from an empty context."""
    engine = Engine(path, max(tokens, 64), 1, threads)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 2 or (time.perf_counter() < end and len(found) < 200):
        engine.clear()
        found.append(engine.decode([(5 + 7 * n % 3000, n, 0) for n in range(tokens)]))
    engine.close()
    return found


def measure(path: Path, threads: int, seconds: float) -> Iterator[dict[str, Any]]:
    for sequences, before in POINTS:
        times = sorted(steps(path, sequences, before, threads, seconds))
        yield {
            "phase": "decode", "threads": threads, "batch": sequences, "context": before + len(times) // 2,
            "ms": round(times[0] * 1e3, 4), "median_ms": round(times[len(times) // 2] * 1e3, 4),
        }  # fmt: skip
    for tokens in PROMPTS:
        times = sorted(prompts(path, tokens, threads, seconds))
        yield {
            "phase": "prefill", "threads": threads, "batch": 1, "prompt": tokens,
            "ms": round(times[0] * 1e3, 4), "median_ms": round(times[len(times) // 2] * 1e3, 4),
        }  # fmt: skip


def made(work: Path, model: str, preset: str) -> Path:
    """The GGUF file of a model, quantized if it is not there yet."""
    folder = work / f"{Path(model).name}-{preset}"
    if not folder.exists():
        from quantry import quantize

        quantize(shapes.write(model, work / model) if model in shapes.SHAPES else model, folder, preset=preset)
    return next(folder.glob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--threads", default="1,2")
    options = parser.parse_args()
    everywhere = sorted(os.sched_getaffinity(0))
    cases: dict[str, Any] = {}
    devices = {}
    for threads in map(int, options.threads.split(",")):
        os.sched_setaffinity(0, everywhere[:threads])
        device = detect(0).cpu
        rate = copy_rate() if threads == 1 else max(measure_bandwidth(0.5) for _ in range(4))
        devices[threads] = {"bandwidth": rate, "tflops": dict(device.tflops)}
        print(f"{threads} threads: {rate / 1e9:.1f} GB/s, {dict(device.tflops)}", flush=True)
        for model in options.models:
            for preset in options.presets.split(","):
                rows = cases.setdefault(f"{Path(model).name} {preset}", [])
                for row in measure(made(options.work, model, preset), threads, options.seconds):
                    rows.append(row)
                    print(Path(model).name, preset, row, flush=True)
    os.sched_setaffinity(0, everywhere)
    engine = f"xllamacpp {version('xllamacpp')}"
    keep("llamacpp_speed", {"engine": engine, "device": device.name, "devices": devices, "cases": cases})


if __name__ == "__main__":
    main()
