"""The low-memory mode: the same statistics, less held at a time, and the way into it when a GPU has no more room."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantry.blockwise.walk import Block, Walk
from quantry.errors import QuantryError
from quantry.methods.rounders import gptq
from quantry.quantizing.calibration import distillation
from quantry.quantizing.calibration import per_block as inputs_module
from quantry.quantizing.calibration import store as cache
from quantry.quantizing.calibration.observe import collect
from quantry.quantizing.calibration.store import statistics
from quantry.types import Stats
from test_calibration_store import data, same
from test_observe import WINDOWS, Folder
from test_sequential import LAYERS, Job, far
from tiny_models import write_model

SAID = "The GPU had no room for block"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_model(folder, "LlamaForCausalLM", num_hidden_layers=LAYERS)
    return folder


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of these tests, apart from the user's."""
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path / "cache"))


class Short:
    """Something that runs out of memory in one of its calls, after its work is half done."""

    def __init__(self, act: Callable[..., Any], *calls: int) -> None:
        self._act, self._calls, self.count = act, calls, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        made = self._act(*args, **kwargs)
        if self.count in self._calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return made


def test_the_same_statistics_one_window_at_a_time(llama: Path) -> None:
    spare = statistics(Folder(llama), data(), low_memory=True)
    one, four = (statistics(Folder(llama), data(), batch=size) for size in (1, 4))
    for block in range(LAYERS):
        assert same(spare.observed(block), one.observed(block))
        for group, stats in spare.observed(block).stats.items():
            assert far(stats.gram, four.observed(block).stats[group].gram) < 1e-5
            assert torch.allclose(stats.absmax, four.observed(block).stats[group].absmax, rtol=1e-4)


def test_hidden_states_stay_in_main_memory(llama: Path) -> None:
    walk = Walk(Folder(llama), batch=1, sparing=True)
    for block in walk.blocks(WINDOWS):
        assert {state.device.type for state in walk.hidden()} == {"cpu"}
        assert len(list(block.outputs())) == len(WINDOWS)


@pytest.mark.parametrize("short", range(1, LAYERS + 1))
def test_statistics_go_on_in_less_memory(llama: Path, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states are between two blocks when it happens, so the walk begins again."""
    expected = [statistics(Folder(llama), data(), batch=1).observed(block) for block in range(LAYERS)]
    monkeypatch.setattr(cache, "collect", Short(collect, short))
    told: list[int] = []
    found = statistics(Folder(llama), data(), progress=lambda done, *_: told.append(done))
    inputs = inputs_module.Inputs(found, None, lambda _: torch.empty(0))
    for block in range(LAYERS):
        stats = inputs.stats(f"model.layers.{block}.self_attn.q_proj")
        wanted = expected[block].stats[f"model.layers.{block}.self_attn.k_proj"]
        assert stats is not None
        assert far(stats.gram, wanted.gram) < 1e-5
        if block >= short - 1:
            assert torch.equal(stats.gram, wanted.gram)
    assert told == [*range(short), *range(LAYERS)]
    (note,) = inputs.notes()
    assert note.startswith(f"{SAID} {short - 1}: from there on one window was run at a time")


def test_what_has_come_to_a_block_is_not_computed_again(llama: Path) -> None:
    """A rounder that finds no room: the walk stands between two blocks and goes on from there."""
    told: list[int] = []
    found = statistics(Folder(llama), data(), progress=lambda done, *_: told.append(done))
    inputs = inputs_module.Inputs(found, None, lambda _: torch.empty(0))
    stats = inputs.stats("model.layers.1.self_attn.q_proj")
    assert stats is not None
    prepare = Short(gptq.prepare, 1)
    made = inputs.prepared(stats, prepare)
    assert torch.equal(made.importance, gptq.prepare(stats).importance)
    assert inputs.prepared(stats, prepare) is made
    assert prepare.count == 2
    assert inputs.stats("model.layers.2.self_attn.q_proj") is not None
    assert told == [0, 1, 2]
    assert inputs.notes()[0].startswith(f"{SAID} 1:")


def test_no_room_in_the_low_memory_mode_either(llama: Path, tmp_path: Path) -> None:
    inputs = inputs_module.Inputs(statistics(Folder(llama), data()), None, lambda _: torch.empty(0))
    stats = inputs.stats("model.layers.1.self_attn.q_proj")
    assert stats is not None
    with pytest.raises(QuantryError, match=r"no room for block 1, in the low-memory mode either; use --device cpu"):
        inputs.prepared(stats, Short(gptq.prepare, 1, 2))
    asked = inputs_module.Inputs(statistics(Folder(llama), data(), low_memory=True), None, lambda _: torch.empty(0))
    stats = asked.stats("model.layers.1.self_attn.q_proj")
    assert stats is not None
    with pytest.raises(QuantryError, match="no room for block 1"):
        asked.prepared(stats, Short(gptq.prepare, 1))


def test_other_errors_are_not_taken_for_a_lack_of_memory(llama: Path) -> None:
    inputs = inputs_module.Inputs(statistics(Folder(llama), data()), None, lambda _: torch.empty(0))
    stats = inputs.stats("model.layers.0.self_attn.q_proj")
    assert stats is not None

    def broken(_: Stats) -> Any:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        inputs.prepared(stats, broken)
    assert inputs.notes() == ()


def close(one: dict[str, list[bytes]], other: dict[str, list[bytes]]) -> float:
    """The share of pieces that are the same."""
    assert one.keys() == other.keys()
    return sum(one[name] == other[name] for name in one) / len(one)


@pytest.mark.parametrize("where", ["collect", "replace", "advance", "half way", "prepare"])
def test_a_sequential_job_goes_on_too(
    where: str,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the third block; whatever is kept is used, and what it makes then is what the low-memory mode makes."""
    light = Job(llama, tmp_path / "light", "w4a16-gptq", group=32, low_memory=True)
    expected = light.run()
    assert light.inputs.notes() == ()
    job = Job(llama, tmp_path / "work", "w4a16-gptq", group=32)
    if where == "collect":
        monkeypatch.setattr(inputs_module, "collect", Short(collect, 3))
    elif where == "prepare":
        monkeypatch.setattr(gptq, "prepare", Short(gptq.prepare, 10))  # there are four inputs in each block
    elif where == "half way":  # each block runs twice on three batches
        monkeypatch.setattr(Block, "_output", method(Block._output, 2 * 6 + 3 + 2))
    else:
        monkeypatch.setattr(Block, where, method(getattr(Block, where), 3))
    made = job.run()
    assert close(made, expected) > 0.6  # a code may fall the other way where sums are added in another order
    assert far(decoded(job), decoded(light)) < 0.02
    block = 2 if where in ("collect", "prepare") else 3
    assert [note for note in job.inputs.notes() if note.startswith(f"{SAID} {block}:")]
    if where == "half way":  # hidden states are between two blocks: those that were kept are taken
        assert job.walked == [0, 1, 2, 2, 3]
        assert job.made_again == [2]
    elif where == "advance":  # all have come to the next block
        assert job.walked == [0, 1, 2, 3]
        assert job.made_again == []


def method(act: Callable[..., Any], call: int) -> Callable[..., Any]:
    short = Short(act, call)
    return lambda self, *args, **kwargs: short(self, *args, **kwargs)


def decoded(job: Job) -> Tensor:
    return torch.cat(
        [weight.flatten() for _, (_, weight) in sorted(job.inputs.heard.items(), key=lambda one: str(one[0]))]
    )


def test_a_resumed_job_remembers_that_there_was_no_room(llama: Path, tmp_path: Path) -> None:
    first = Job(llama, tmp_path / "work", "w4a16-gptq", group=32)
    first.inputs._find(inputs_module.LOW, 1)
    again = Job(llama, tmp_path / "work", "w4a16-gptq", group=32)
    assert again.inputs._low_memory
    expected = Job(llama, tmp_path / "light", "w4a16-gptq", group=32, low_memory=True).run()
    assert again.run() == expected
    assert again.inputs.notes()[0].startswith(f"{SAID} 1:")


def test_a_distilled_job_goes_on_too(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "STEPS", (2, 2))
    monkeypatch.setattr(distillation, "distil", Short(distillation.distil, 2))
    job = Job(llama, tmp_path / "work", "w8a8-zeroquant", sequential=False)
    job.run()
    assert job.walked == [0, 1, 1, 2, 3]
    assert len(job.inputs.notes()) == 2
    assert job.inputs.notes()[1].startswith(f"{SAID} 1:")
