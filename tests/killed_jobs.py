"""Jobs that are killed at random moments and taken up again must write what an undisturbed one writes.

They are processes that fork from one which has imported PRELOAD: those imports take seconds. So the functions that they
run are here and not in the tests, whose own imports they would have to make.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quantry

PRELOAD = [
    "gguf",
    "quantry.jobs.quantize",
    "quantry.jobs.sweep.sweep",
    "quantry.jobs.verify",
    "quantry.quantizing.calibration.calibrator",
    "quantry.report.drawing",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]


def started(job: Callable[..., None], *args: Any) -> Any:
    """Starts a job of this module in a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    child = context.Process(target=job, args=args)
    child.start()
    return child


def quantize(model: Path, out: Path, cache: Path, options: dict[str, Any]) -> None:
    """A job of quantize with a cache folder of its own."""
    os.environ["QUANTRY_CACHE"] = str(cache)
    quantry.quantize(model, out, **options)


def merge(base: Path, adapter: Path, out: Path, options: dict[str, Any]) -> None:
    """A job of merge."""
    quantry.merge(base, adapter, out, **options)


def sweep(out: Path, cache: Path, options: dict[str, Any]) -> None:
    """A sweep of the demo with a cache folder of its own."""
    os.environ["QUANTRY_CACHE"] = str(cache)
    quantry.sweep("demo", out, **options)


def kill_and_resume(
    start: Callable[[Path], Any], folder: Path, seed: str, rounds: int, shares: tuple[float, float]
) -> tuple[dict[str, bytes], int]:
    """The files of an undisturbed job, held against those of killed ones, and how many of these were killed in time.

    `start` begins the job for an output and gives its process; `shares` are between how much written it is killed.
    """
    start(folder / "whole").join()
    expected = contents(folder / "whole")
    total = sum(map(len, expected.values()))
    moments, killed = random.Random(seed), 0
    for number in range(rounds):
        out, partial = folder / str(number), folder / f"{number}.partial"
        share = moments.uniform(*shares) * total
        child = start(out)
        while child.is_alive() and written(partial) < share:
            time.sleep(0.0005)
        child.kill()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        if not out.exists():
            start(out).join()
        assert contents(out) == expected
        assert not partial.exists()
    return expected, killed


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def written(folder: Path) -> int:
    """Bytes in a folder that another process is writing to, or is about to rename."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except FileNotFoundError:
        return 0
