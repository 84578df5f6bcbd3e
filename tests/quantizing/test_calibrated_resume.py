"""Calibrated jobs that are killed: what the next run finishes is byte for byte what an undisturbed one writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from depth import DEEP, cases
from killed_jobs import kill_and_resume, quantize, started
from tiny_models import write_model

MOE = "Qwen3MoeForCausalLM"
TEXT: dict[str, Any] = {"samples": 16, "length": 64}
KILLED: dict[str, dict[str, Any]] = {
    "w4a16-awq+gptq": {"preset": "w4a16-awq+gptq", "group": 32, "format": "compressed-tensors"},
    "gguf": {"preset": "gguf-q4_0", "rounder": "gptq", "imatrix": "auto"},
    "sequential": {"preset": "w8a8-smoothquant+gptq", "sequential": True, "kv": "fp8"},
    "sequential gguf": {"preset": "gguf-q4_0", "rounder": "gptq", "sequential": True},
    "zeroquant": {"preset": "w8a8-zeroquant"},
}


@pytest.mark.parametrize("name", cases(KILLED, ["sequential gguf"]))
def test_kill_9_at_random_moments(name: str, tmp_path: Path) -> None:
    """A job without a store of statistics, so that each run walks anew; what it noted of experts survives too."""
    source = tmp_path / "model"
    source.mkdir()
    write_model(source, MOE, num_hidden_layers=3, num_experts=8)
    (tmp_path / "no store").write_text("in the way")

    def start(out: Path) -> Any:
        options = {"shard_bytes": 30_000, **KILLED[name], **TEXT}
        return started(quantize, source, out, tmp_path / "no store", options)

    expected, killed = kill_and_resume(start, tmp_path, name, rounds=4 if DEEP else 2, shares=(0.02, 0.9))
    words = "Distillation lowered" if name == "zeroquant" else "have fewer than 256 tokens"
    assert any(words in note for note in json.loads(expected["quantry.json"])["notes"])
    assert killed >= 1
