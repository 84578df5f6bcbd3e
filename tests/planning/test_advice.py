"""Answers that an engineer would accept: advice.toml row by row, and what must hold for every request of a grid."""

from itertools import product
from typing import Any

import pytest

from depth import cases
from planning.advice import faults, requests
from quantry.errors import QuantryError
from quantry.planning.candidate import is_ready
from quantry.planning.candidates import find
from quantry.planning.models import open_model
from quantry.planning.option import Option
from quantry.planning.plan import Plan, plan
from quantry.planning.request import PlanOptions, read_request
from quantry.planning.rules import is_spare

ROWS = {row["ask"]: row for row in requests()}
MODELS = (
    "llama-3.2-1b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b", "qwen3-30b-a3b", "mixtral-8x7b",
    "gemma-3-27b", "qwen2.5-vl-7b", "gpt-oss-20b", "phi-4", "mistral-nemo-12b",
)  # fmt: skip
DEVICES = ("RTX 3060 12GB", "RTX 4090", "L4", "L40S", "A100 80GB", "H100", "MI300X", "T4")
COUNTS = (1, 2, 4)
USES = ("general", "team-api", "rag", "latency-critical", "high-throughput", "local", "accuracy-critical")
GRID = tuple(product(MODELS, DEVICES, COUNTS, USES))  # 2,016 requests
POOR = ("fair", "poor")
FASTER = 1.02  # times the speed that counts as faster


def answered(model: str, device: str, count: int, use: str, **load: Any) -> Plan | None:
    try:
        return plan(model, gpu=f"{count}x {device}", use=use, **load)
    except QuantryError:
        return None


def best(found: Plan | None) -> float:
    """Returns the throughput of the fastest option of good quality that leaves nothing to the host.

    Presets of 3 bits and less are tried only where nothing else fits, and the host's speed is another matter.
    """
    options = [one for one in found.options if one.quality not in POOR and not offloads(one)] if found else []
    return max((option.speed["decode_tokens_per_s"] for option in options), default=0.0)


def offloads(option: Option) -> bool:
    return {"--n-cpu-moe", "--n-gpu-layers"} <= set(option.commands["serve"]) or option.memory["host"] > 1 << 30


@pytest.mark.parametrize("ask", cases(tuple(ROWS), tuple(ROWS)[::6]))
def test_advice(ask: str) -> None:
    row = ROWS[ask]
    if "open" in row:
        assert faults(row), "it holds now: take `open` out"
    else:
        assert faults(row) == [], row["why"]


@pytest.mark.parametrize(("model", "device", "count", "use"), cases(GRID, GRID[::67]))
def test_no_first_option_is_beaten_and_every_command_names_the_model(
    model: str, device: str, count: int, use: str
) -> None:
    found = answered(model, device, count, use)
    if found is None or not found.options:
        return
    first = found.options[0]
    for other in found.options[1:]:
        beaten = (
            other.score["quality"] >= first.score["quality"]
            and other.speed["decode_tokens_per_s"] > FASTER * first.speed["decode_tokens_per_s"]
            and other.speed["first_token_s"] < first.speed["first_token_s"]
            and other.layout["concurrency"] >= first.layout["concurrency"]
        )
        assert not beaten, (other.preset, other.engine)
    for option in found.options:
        words = option.commands.get("quantize", option.commands["serve"])
        ready = f"/{found.model['opened_as'].rpartition('/')[2]}-GGUF"
        assert found.model["opened_as"] in words or any(ready in word for word in words)
        assert option.memory["per_device"] <= option.memory["limit"]


@pytest.mark.parametrize(("model", "device", "count", "use"), cases(GRID[::4], GRID[:: 4 * 97]))
def test_one_more_device_is_never_slower_and_a_longer_prompt_never_sooner(
    model: str, device: str, count: int, use: str
) -> None:
    found = answered(model, device, count, use)
    more = answered(model, device, count + 1, use)
    assert best(more) >= 0.999 * best(found)
    if found and found.options:
        longer = answered(model, device, count, use, prompt=found.workload["prompt"] * 2)
        if longer and longer.options:
            key = (found.options[0].preset, found.options[0].engine)
            same = [option for option in longer.options if (option.preset, option.engine) == key]
            for option in same:
                assert option.speed["first_token_s"] >= 0.999 * found.options[0].speed["first_token_s"]


@pytest.mark.parametrize("model", cases(MODELS, MODELS[1:8:5]))
def test_less_memory_never_adds_options(model: str) -> None:
    small, large = plan_names(model, "12GB"), plan_names(model, "20GB")
    assert small <= large


def plan_names(model: str, budget: str) -> set[tuple[str, str]]:
    """Returns what fits, but for spare presets and ready files, which are tried only where nothing else fits."""
    options = PlanOptions("RTX 4090", budget=budget)
    request = read_request(model, open_model(model), options)
    found, _ = find(request, offload=False)
    candidates = [candidate for candidate in found if not is_ready(request, candidate)]
    spare = {candidate.preset.name for candidate in candidates if is_spare(candidate.preset, request.facts)}
    return {(row.preset.name, row.engine) for row in candidates if row.preset.name not in spare}
