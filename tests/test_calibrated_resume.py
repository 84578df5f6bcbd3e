"""Calibrated jobs that are killed: what the next run finishes is byte for byte what an undisturbed one writes."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import quantry
from test_quantize import contents, written
from tiny_models import write_model

MOE = "Qwen3MoeForCausalLM"
TEXT: dict[str, Any] = {"samples": 16, "length": 64}
KILLED: dict[str, dict[str, Any]] = {
    "w4a16-awq+gptq": {"preset": "w4a16-awq+gptq", "group": 32, "format": "compressed-tensors"},
    "gguf": {"preset": "gguf-q4_0", "rounder": "gptq", "imatrix": "auto"},
}


def job(source: Path, out: Path, cache_folder: str, how: dict[str, Any]) -> None:
    os.environ["QUANTRY_CACHE"] = cache_folder
    torch.set_num_threads(1)
    quantry.quantize(source, out, shard_bytes=30_000, **how, **TEXT)


@pytest.mark.parametrize("name", KILLED)
def test_kill_9_at_random_moments(name: str, tmp_path: Path) -> None:
    """A job without a store of statistics, so that each run walks anew; what it noted of experts survives too."""
    source = tmp_path / "model"
    source.mkdir()
    write_model(source, MOE, num_hidden_layers=3, num_experts=8)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["quantry.pipeline", "quantry.calibrated"])
    (tmp_path / "no store").write_text("in the way")

    def start(out: Path) -> Any:
        child = context.Process(target=job, args=(source, out, str(tmp_path / "no store"), KILLED[name]))
        child.start()
        return child

    start(tmp_path / "whole").join()
    expected = contents(tmp_path / "whole")
    assert any("have fewer than 256 tokens" in note for note in json.loads(expected["quantry.json"])["notes"])
    total = sum(map(len, expected.values()))
    moments, killed = random.Random(name), 0
    for number in range(3):
        out, partial = tmp_path / str(number), tmp_path / f"{number}.partial"
        share = moments.uniform(0.02, 0.9) * total
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
    assert killed >= 2
