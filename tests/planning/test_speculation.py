"""Speculative decoding beside the options of a plan: what is expected of it, and where it is named."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quantry.planning.candidate import Candidate
from quantry.planning.candidates import find
from quantry.planning.load import LoadOptions
from quantry.planning.models import open_model
from quantry.planning.plan import plan
from quantry.planning.request import PlanOptions, Request, read_request
from quantry.planning.speculation import Speculation, speculations, tokens_of_a_step
from quantry.planning.speed.throughput import checking_seconds, speed
from quantry.quantizing.recipe import Recipe, preset


def tried(model: str, gpu: str, engine: str, name: str, **load: Any) -> tuple[Request, Candidate]:
    request = read_request(model, open_model(model), PlanOptions(gpu, engine=engine, load=LoadOptions(**load)))
    candidates = find(request, only=(name,))[0]
    layouts = {row.deployment.tensor_parallel: row for row in candidates if row.deployment.pipeline_parallel == 1}
    return request, layouts[max(layouts)]


def ways(*asked: str, **load: Any) -> dict[str, Speculation]:
    return {way.method: way for way in speculations(*tried(*asked, **load))}


@pytest.mark.parametrize(("guesses", "right"), [(1, 0.85), (4, 0.6), (5, 0.0), (3, 1.0)])
def test_tokens_of_a_step_are_those_of_thrown_dice(guesses: int, right: float) -> None:
    """Guesses count up to the first wrong one; the model adds a token of its own."""
    thrown = np.random.default_rng(5).random((200_000, guesses)) < right
    counted = 1 + np.cumprod(thrown, axis=1).sum(axis=1)
    assert tokens_of_a_step(guesses, right) == pytest.approx(counted.mean(), rel=0.01)


def test_a_step_that_checks_one_token_is_a_plain_one() -> None:
    request, candidate = tried("llama-3.1-70b", "2x H100", "vllm", "fp8-dynamic", concurrency=4)
    plain = speed(candidate.deployment, candidate.workload, request.hardware.cpu).step_s
    assert checking_seconds(candidate.deployment, candidate.workload, 1) == pytest.approx(plain)
    assert plain < checking_seconds(candidate.deployment, candidate.workload, 5) < 5 * plain


def test_the_gain_falls_with_the_load() -> None:
    few, some, many = (
        ways("meta-llama/Llama-3.3-70B-Instruct", "8x H100", "vllm", "fp8-dynamic", concurrency=count)
        for count in (1, 64, 2048)
    )
    assert few["eagle3"].times > some["eagle3"].times
    assert few["lookup"].times > some["lookup"].times
    assert "draft" not in many
    assert all(way.times >= 1.05 for found in (few, some, many) for way in found.values())


def test_heads_that_the_model_brings() -> None:
    """DeepSeek measured 1.8 times the tokens with one guess; the heads have 14 billion weights in FP8."""
    found = ways("deepseek-v3", "8x H200", "vllm", "fp8-block")
    assert found["mtp"].times == pytest.approx(1.8, rel=0.05)
    assert found["mtp"].bytes == pytest.approx(14e9, rel=0.06)
    assert "mtp" not in ways("llama-3.1-8b", "H100", "vllm", "fp8-dynamic")


@pytest.mark.parametrize(
    ("model", "size"), [("qwen3-8b", 2_044_116_968), ("qwen3-14b", 2_775_244_776), ("qwen3-32b", 3_121_274_856)]
)
def test_heads_of_eagle_have_the_size_of_published_ones(model: str, size: int) -> None:
    assert ways(model, "H100", "vllm", "fp8-dynamic")["eagle3"].bytes == pytest.approx(size, rel=0.05)


def test_a_draft_has_the_tokens_of_its_model() -> None:
    """Qwen2.5 pads the vocabulary of its larger models by 128 rows, which llama.cpp takes and vLLM does not."""
    assert "draft" not in ways("qwen2.5-32b", "H100", "vllm", "fp8-dynamic")
    assert ways("qwen2.5-32b", "RTX 4090", "llama.cpp", "gguf-q4_k_m")["draft"].model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert ways("qwen3-32b", "H100", "vllm", "fp8-dynamic")["draft"].model == "Qwen/Qwen3-0.6B"
    assert "draft" not in ways("mistral-7b", "H100", "vllm", "fp8-dynamic")


def test_nothing_is_named_that_does_not_fit() -> None:
    roomy = ways("llama-3.1-70b", "H200", "vllm", "fp8-dynamic")
    assert "draft" in roomy
    request, candidate = tried("llama-3.1-70b", "H200", "vllm", "fp8-dynamic")
    needed = candidate.footprint.per_device + roomy["draft"].bytes
    full = replace(candidate, limit=needed - 1)
    assert all(way.method != "draft" for way in speculations(request, full))


def test_commands_have_the_words_of_the_engine() -> None:
    option = plan("deepseek-v3", gpu="8x H200").options[0]
    rows = {row["method"]: row["serve"] for row in option.speculation}
    words = rows["mtp"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"method": "mtp", "num_speculative_tokens": 1}
    assert rows["mtp"][: len(option.commands["serve"])] != rows["mtp"]
    head = plan("qwen3-32b", gpu="H100").options[0].speculation[0]
    told = json.loads(head["serve"][head["serve"].index("--speculative-config") + 1])
    assert told == {"method": "eagle3", "model": "RedHatAI/Qwen3-32B-speculator.eagle3", "num_speculative_tokens": 3}


def test_the_gain_of_a_draft_is_restated() -> None:
    request, candidate = tried("llama-3.1-70b", "H200", "vllm", "fp8-dynamic")
    small, bf16 = open_model("llama-3.2-1b"), preset("bf16")
    drafting = replace(candidate.deployment, checkpoint=small, recipe=Recipe(bf16, bf16.formats[0]))
    each = speed(drafting, candidate.workload, request.hardware.cpu).step_s
    plain, checked = (checking_seconds(candidate.deployment, candidate.workload, tokens) for tokens in (1, 5))
    wanted = (1 - 0.6**5) / (1 - 0.6) * plain / (checked + 4 * each)
    found = {way.method: way for way in speculations(request, candidate)}["draft"]
    assert found.times == pytest.approx(wanted, abs=0.006)
