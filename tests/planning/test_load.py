"""The load of a plan: what is filled in, what is refused, and what a trace stands for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import command
from quantry.errors import QuantryError
from quantry.planning.candidates import find
from quantry.planning.capacity import busy_share, capacity
from quantry.planning.load import LoadOptions, read_load
from quantry.planning.models import open_model
from quantry.planning.plan import plan
from quantry.planning.ranking import rank
from quantry.planning.request import PlanOptions, read_request
from quantry.planning.rules import find_use
from quantry.planning.speed.throughput import speed


def loaded(model: str = "llama-3.1-8b", use: str | None = None, **options: Any) -> Any:
    return read_load(model, open_model(model).config, find_use(use), LoadOptions(**options))


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, (512, 256, 4096)),
        ({"prompt": 1000}, (1000, 256, 4096)),
        ({"prompt": 100_000, "answer": 1000}, (100_000, 1000, 101_376)),  # the context grows in steps of 1,024
        ({"context": 131_072}, (65_536, 256, 131_072)),  # a long context is not asked for with short prompts
        ({"context": 2048}, (512, 256, 2048)),
        ({"context": 100}, (75, 25, 100)),
    ],
)
def test_lengths_that_are_left_open(options: dict[str, Any], lengths: tuple[int, int, int]) -> None:
    load = loaded(**options).workload
    assert (load.prompt, load.answer, load.context) == lengths


def test_a_use_has_lengths_of_its_own() -> None:
    load = loaded(use="rag").workload
    assert (load.prompt, load.answer, load.context, load.concurrency) == (8192, 512, 16_384, 8)


def test_pictures_are_tokens() -> None:
    load = loaded("qwen2.5-vl-7b", images=8)
    assert load.workload.prompt == 512 + 8 * 1280
    assert load.workload.context >= load.workload.prompt + load.workload.answer
    assert "1,280 tokens" in load.notes[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 0}, "--concurrency 0 is not 1 to"),
        ({"prompt": -3}, "--prompt -3"),
        ({"ttft": 0.0}, "--ttft 0 is not above 0"),
        ({"requests_per_second": 1e9}, "--requests-per-second 1e\\+09"),
        ({"price": float("nan")}, "--price nan"),
        ({"prompt": 5000, "answer": 5000, "context": 4096}, "more than the --context of 4096"),
        ({"prompt": 200_000}, "more than the context of 131072"),
        ({"context": 200_000}, "131072 tokens"),
        ({"shared_prefix": 4000, "prompt": 512}, "more than the prompt of 512"),
        ({"images": 2}, "no vision tower"),
    ],
)
def test_numbers_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(QuantryError, match=words):
        loaded(**options)


def trace(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_trace_stands_for_lengths_and_rate(tmp_path: Path) -> None:
    rows = [{"prompt": 100 * n, "answer": 10 * n, "time": 0.5 * n} for n in range(1, 11)]
    load = loaded(trace=trace(tmp_path / "trace.jsonl", rows))
    assert (load.workload.prompt, load.workload.answer) == (900, 90)  # nine in ten are no longer
    assert load.goals.rate == pytest.approx(2.0)
    assert loaded(trace=tmp_path / "trace.jsonl", prompt=7).workload.prompt == 7  # what is given comes first


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty"),
        (["{"], "line 1 of the trace .* is not JSON"),
        ([{"prompt": 3}], "has no lengths"),
        ([{"prompt": 3, "answer": 0}], "has no lengths"),
        ([{"prompt": 3, "answer": 2, "time": "noon"}], "has no lengths"),
        (["[" * 100_000], "is not JSON"),
    ],
)
def test_traces_that_cannot_be_read(rows: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(QuantryError, match=words):
        loaded(trace=trace(tmp_path / "trace.jsonl", rows))


def test_a_rate_says_how_many_machines() -> None:
    one, many = (
        plan("llama-3.1-8b", gpu="L4", concurrency=8, requests_per_second=rate).options[0].load for rate in (0.1, 500.0)
    )
    assert one["machines"] == 1
    assert many["machines"] >= 500 / many["requests_per_s"] > many["machines"] - 1


def test_limits_are_held_or_said_to_fail() -> None:
    easy = plan("llama-3.1-8b", gpu="H100", ttft=5.0, tpot=1.0)
    assert easy.options[0].load["holds"] == {"ttft": True, "tpot": True}
    hard = plan("llama-3.1-8b", gpu="H100", prompt=20_000, ttft=0.001)
    assert hard.options[0].load["holds"] == {"ttft": False}
    assert any("no option holds the limit of 0.001 s for --ttft" in note for note in hard.notes)


def test_the_wait_in_line_is_that_of_a_simulated_queue() -> None:
    """400,000 requests at random times, each served for 0.2 s in turn, wait as long as the formula was asked for."""
    service, wait = 0.2, 0.35
    busy = busy_share(service, wait)
    gaps = np.random.default_rng(3).exponential(service / busy, 400_000)
    late, waits = 0.0, 0.0
    for gap in gaps:
        late = max(0.0, late + service - gap)
        waits += late
    assert waits / len(gaps) == pytest.approx(wait, rel=0.05)
    assert busy_share(service, 0.0) == busy_share(service, -1.0) == 0.0


def test_a_rate_without_a_number_of_sequences_follows_littles_law() -> None:
    load = loaded(requests_per_second=3.0, answer=200)
    assert load.workload.concurrency == 3 * 200 / 30
    assert "keep 20 under way" in load.notes[-1]
    assert loaded(requests_per_second=3.0, answer=200, tpot=0.01).workload.concurrency == 6
    assert loaded(requests_per_second=1000.0).workload.concurrency == 256
    assert loaded(requests_per_second=3.0, concurrency=2).workload.concurrency == 2


def test_loads_at_which_limits_break() -> None:
    """What a limit allows holds it, and one sequence more does not; restated from the speeds themselves."""
    request = read_request("llama-3.1-8b", open_model("llama-3.1-8b"), goals(tpot=0.02, ttft=0.5, concurrency=16))
    ranked = rank(request, find(request)[0])[0][0]
    load, candidate = capacity(ranked), ranked.candidate

    def predicted(sequences: int) -> Any:
        workload = replace(candidate.workload, concurrency=sequences)
        return speed(candidate.deployment, workload, request.hardware.cpu)

    most = load["breaks"]["tpot"]["sequences"]
    assert predicted(most).step_s <= 0.02 < predicted(most + 1).step_s
    for name in ("tpot", "memory"):
        at = load["breaks"][name]["sequences"]
        seconds = at * 512 / predicted(at).prompts_tokens_per_s + 256 * predicted(at).step_s
        assert load["breaks"][name]["requests_per_s"] == pytest.approx(at / seconds, rel=1e-3)
    assert load["requests_per_s"] == min(row["requests_per_s"] for row in load["breaks"].values())


def goals(**options: Any) -> PlanOptions:
    return PlanOptions("H100", load=LoadOptions(**options))


def test_a_limit_that_nothing_holds_breaks_at_once() -> None:
    load = plan("llama-3.1-8b", gpu="H100", ttft=0.001, requests_per_second=5.0).options[0].load
    assert load["breaks"]["ttft"] == {"sequences": 0, "requests_per_s": 0.0}
    assert load["machines"] is None


def test_prices_follow_from_the_hour() -> None:
    option = plan("llama-3.1-8b", gpu="H100", price=3.6).options[0]
    cost, speed = option.cost, option.speed
    assert cost["usd_per_month"] == pytest.approx(3.6 * 730)
    assert cost["usd_per_million_out"] == pytest.approx(1e6 / speed["decode_tokens_per_s"] / 1000, rel=1e-3)
    assert any("more than --max-cost 1" in note for note in plan("llama-3.1-8b", gpu="H100", max_cost=1.0).notes)


def test_the_command_line_takes_them(tmp_path: Path) -> None:
    rows = [{"prompt": 700, "answer": 50, "time": n} for n in range(5)]
    path = trace(tmp_path / "trace.jsonl", rows)
    done = command("plan", "llama-3.1-8b", "--gpu", "H100", "--trace", path, "--json")
    assert json.loads(done.stdout)["workload"]["prompt"] == 700
    assert command("plan", "llama-3.1-8b", "--gpu", "H100", "--trace", tmp_path / "none").returncode == 2
