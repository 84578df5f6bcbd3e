"""Where a load lies: experts on the host, tokens of a paged cache, sequences of copies, and what they cost; restated."""

from dataclasses import replace
from typing import Any

import pytest

from quantry.devices.catalogue import parse
from quantry.planning.candidates import find
from quantry.planning.deployment import Deployment
from quantry.planning.load import LoadOptions
from quantry.planning.memory.footprint import footprint
from quantry.planning.memory.weights import stored
from quantry.planning.models import open_model
from quantry.planning.option import option
from quantry.planning.ranking import Ranked, rank
from quantry.planning.request import PlanOptions, read_request
from quantry.planning.speed.throughput import speed
from quantry.planning.speed.work import work_of
from quantry.quantizing.recipe import Recipe, preset
from quantry.types import Workload

LOAD = Workload(4096, 1, 512, 256)


def deployed(model: str, gpu: str, engine: str, name: str, **settings: Any) -> Deployment:
    chosen = preset(name)
    recipe = Recipe(chosen, chosen.formats[0])
    return Deployment(open_model(model), recipe, engine, parse(gpu).device, keep_odd=True, **settings)


def weights_of(deployment: Deployment) -> tuple[int, int]:
    """Returns the bytes of weights on the GPUs and on the host."""
    parts = footprint(deployment, LOAD).parts
    sizes = {name: size for name, size in parts.items() if name.startswith("weights:")}
    host = sum(size for name, size in sizes.items() if name.endswith("(host)"))
    return sum(sizes.values()) - host, host


@pytest.mark.parametrize("blocks", [1, 5, 48])
def test_experts_on_the_host_are_those_of_the_first_blocks(blocks: int) -> None:
    plain = deployed("qwen3-30b-a3b", "RTX 4090", "llama.cpp", "gguf-q4_k_m")
    weights = stored(plain.checkpoint, plain.recipe, True)
    moved = sum(
        weights.size(weight) for block in weights.blocks[:blocks] for weight in block if weight.part == "experts"
    )
    gpu, host = weights_of(plain)
    assert weights_of(replace(plain, host_experts=blocks)) == (gpu - moved, host + moved)


def test_steps_with_experts_on_the_host_do_the_work_of_both() -> None:
    """The host reads the experts of its blocks and nothing else; the GPU all the rest, and both take their time."""
    host = parse("RTX 4090 + 64GB RAM").cpu
    plain = deployed("qwen3-30b-a3b", "RTX 4090", "llama.cpp", "gguf-q4_k_m")
    work = work_of(plain.checkpoint, plain.recipe)
    alone = work.experts_alone(0.25)
    assert (alone.experts.bytes, alone.dense.bytes, alone.head.bytes) == (work.experts.bytes / 4, 0, 0)
    times = [speed(replace(plain, host_experts=blocks), LOAD, host).step_s for blocks in (12, 24, 48)]
    bytes_moved = work.experts.bytes * 12 / 48 * 8 / 128
    assert times[0] < times[1] < times[2]
    assert times[2] - times[1] == pytest.approx(2 * (times[1] - times[0]), rel=0.05)  # linear in what is moved
    assert times[1] - times[0] > 0.5 * bytes_moved / host.bandwidth


@pytest.mark.parametrize(
    ("concurrency", "tokens"),
    [
        (1, 4096),  # one sequence may reach its context
        (5, 4096),  # 5 x 768 tokens are fewer than that
        (6, 6 * 768),
        (100, 100 * 768),
    ],
)
def test_a_paged_cache_holds_what_sequences_reach(concurrency: int, tokens: int) -> None:
    """Llama 3.1 8B: 32 layers, 8 heads of 128 for keys and for values, 2 bytes each; blocks of 16 tokens."""
    deployment = deployed("llama-3.1-8b", "H100", "vllm", "bf16")
    needed = footprint(deployment, replace(LOAD, concurrency=concurrency))
    assert needed.kv_cache == tokens * 32 * 2 * 8 * 128 * 2


def test_copies_share_sequences_that_do_not_divide() -> None:
    """5 sequences on 2 copies are 3 and 2: five sixths of what 6 would give, a fifth of it for each."""
    request = read_request("llama-3.1-8b", open_model("llama-3.1-8b"), options("2x RTX 4090", concurrency=5))
    ranked = rank(request, [candidate for candidate in find(request)[0] if candidate.replicas == 2])[0]
    row = ranked[0]
    one = speed(row.candidate.deployment, replace(LOAD, concurrency=3), parse("2x RTX 4090").cpu)
    shown = option(row, ranked).speed
    assert shown["decode_tokens_per_s"] == pytest.approx(2 * one.decode_tokens_per_s * 5 / 6, rel=1e-3)
    assert shown["decode_tokens_per_s_per_user"] == pytest.approx(shown["decode_tokens_per_s"] / 5, rel=0.01)


def test_a_million_tokens_cost_the_hours_that_they_take() -> None:
    ranked = _ranked("llama-3.1-8b", "H100", concurrency=16, price=2.0)
    cost, pace = option(ranked[0], ranked).cost, ranked[0].all_copies
    assert cost["usd_per_million_in"] == pytest.approx(2.0 * 1e6 / pace.prompts_tokens_per_s / 3600, rel=0.02)
    assert cost["usd_per_million_out"] == pytest.approx(2.0 * 1e6 / pace.decode_tokens_per_s / 3600, rel=0.02)
    seconds = 512 / pace.prompts_tokens_per_s + 256 / pace.decode_tokens_per_s
    assert cost["tokens_per_usd"] == pytest.approx(256 / seconds * 1800, rel=0.01)


def _ranked(model: str, gpu: str, **load: Any) -> list[Ranked]:
    request = read_request(model, open_model(model), options(gpu, **load))
    return rank(request, find(request)[0])[0]


def options(gpu: str, **load: Any) -> PlanOptions:
    return PlanOptions(gpu, load=LoadOptions(**load))
