"""Which models run well on a machine: every suggestion is an option of the plan for that model."""

import json

import pytest

from command import command
from depth import cases
from quantry.errors import QuantryError
from quantry.planning.plan import plan
from quantry.planning.suggest import PACE, suggest


@pytest.mark.parametrize("gpu", cases(["RTX 4090", "M2 16GB"], ["RTX 4090"]))
def test_suggestions_are_what_plans_say(gpu: str) -> None:
    rows = suggest(gpu, "local", most=4)
    assert len(rows) == 4
    for row in rows:
        assert row.tokens_per_s >= PACE
        options = plan(row.model, gpu=gpu, use="local", engine=row.engine).options
        same = [option for option in options if option.preset == row.preset]
        assert same, row
        assert any(option.memory["per_device"] == row.per_device for option in same)


@pytest.mark.parametrize("gpu", ["M3 Max 64GB", "RTX 4090"])
def test_one_person_is_told_of_the_engine_that_the_plan_names(gpu: str) -> None:
    for row in suggest(gpu, "local", most=3):
        assert (row.engine, plan(row.model, gpu=gpu, use="local").options[0].engine) == ("llama.cpp", "llama.cpp"), row


def test_the_largest_come_first_and_more_memory_gives_larger_ones() -> None:
    small, large = suggest("RTX 3060 12GB", most=3), suggest("H100", most=3)
    assert [row.parameters for row in small] == sorted((row.parameters for row in small), reverse=True)
    assert large[0].parameters > small[0].parameters


def test_the_command_line() -> None:
    done = command("plan", "--suggest", "--gpu", "RTX 4090", "--for", "local", "--json")
    assert json.loads(done.stdout)["suggestions"][0]["engine"]
    assert command("plan", "--suggest", "llama-3.1-8b").returncode == 2
    assert command("plan").returncode == 2
    with pytest.raises(QuantryError, match="unknown device"):
        suggest("abacus")
