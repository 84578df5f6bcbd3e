"""The low-memory mode: the same statistics, less held at a time, and the fall-back to it when a GPU has no more room."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from linear_inputs import WINDOWS, Folder
from quantizing.block_jobs import LAYERS, BlockJob, far
from quantizing.calibration_text import same, statistics
from quantry.blockwise.walk import Block, Walk
from quantry.errors import QuantryError
from quantry.methods.rounders import gptq
from quantry.methods.rounding import LayerInput
from quantry.quantizing.calibration import distillation
from quantry.quantizing.calibration import store as store_module
from quantry.quantizing.calibration.observe import collect
from quantry.quantizing.calibration.per_block import BlockCalibration, BlockSteps
from quantry.quantizing.calibration.store import Statistics
from quantry.types import Stats
from tiny_models import write_model

SAID = "The GPU had no room for block"
GPTQ: dict[str, Any] = {"preset": "w4a16-gptq", "group": 32}


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
    """Something that runs out of memory in some of its calls, after its work is half done."""

    def __init__(self, act: Callable[..., Any], *calls: int) -> None:
        self._act, self._calls, self.count = act, calls, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        made = self._act(*args, **kwargs)
        if self.count in self._calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return made


def calibration(seen: Statistics) -> BlockCalibration:
    return BlockCalibration(seen, BlockSteps(), lambda _: torch.empty(0))


def queries(found: BlockCalibration, block: int) -> LayerInput:
    """The input of the queries of a block."""
    known = found.enter(block).input_of(f"model.layers.{block}.self_attn.q_proj")
    assert known is not None
    return known


def test_the_same_statistics_one_window_at_a_time(llama: Path) -> None:
    spare = statistics(Folder(llama), low_memory=True)
    one, four = (statistics(Folder(llama), batch=size) for size in (1, 4))
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


@pytest.mark.parametrize("short", [1, 3, LAYERS])
def test_statistics_go_on_in_less_memory(llama: Path, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states are between two blocks when it happens, so the walk begins again."""
    expected = [statistics(Folder(llama), batch=1).observed(block) for block in range(LAYERS)]
    monkeypatch.setattr(store_module, "collect", Short(collect, short))
    walked: list[int] = []
    found = calibration(statistics(Folder(llama), progress=lambda done, *_: walked.append(done)))
    for block in range(LAYERS):
        stats = queries(found, block).stats
        wanted = expected[block].stats[f"model.layers.{block}.self_attn.k_proj"]
        assert far(stats.gram, wanted.gram) < 1e-5
        if block >= short - 1:
            assert torch.equal(stats.gram, wanted.gram)
    assert walked == [*range(short), *range(LAYERS)]
    (note,) = found.notes()
    assert note.startswith(f"{SAID} {short - 1}: from there on one window was run at a time")


def test_hidden_states_are_not_computed_again(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rounder that finds no room: the walk stands between two blocks and goes on from there."""
    walked: list[int] = []
    found = calibration(statistics(Folder(llama), progress=lambda done, *_: walked.append(done)))
    known = queries(found, 1)
    wanted = gptq.prepare(known.stats).state.importance
    prepare = Short(gptq.prepare, 1)
    monkeypatch.setattr(gptq, "prepare", prepare)
    prepared = known.prepared(gptq)
    assert torch.equal(prepared.state.importance, wanted)
    assert known.prepared(gptq) is prepared
    assert prepare.count == 2
    queries(found, 2)
    assert walked == [0, 1, 2]
    assert found.notes()[0].startswith(f"{SAID} 1:")


def test_no_room_in_the_low_memory_mode_either(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = queries(calibration(statistics(Folder(llama))), 1)
    light = queries(calibration(statistics(Folder(llama), low_memory=True)), 1)
    prepare = gptq.prepare
    monkeypatch.setattr(gptq, "prepare", Short(prepare, 1, 2))
    with pytest.raises(QuantryError, match=r"no room for block 1, in the low-memory mode either; use --device cpu"):
        known.prepared(gptq)
    monkeypatch.setattr(gptq, "prepare", Short(prepare, 1))
    with pytest.raises(QuantryError, match="no room for block 1"):
        light.prepared(gptq)


def test_other_errors_are_not_taken_for_a_lack_of_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibration(statistics(Folder(llama)))
    known = queries(found, 0)

    def broken(_: Stats) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(gptq, "prepare", broken)
    with pytest.raises(RuntimeError, match="something else"):
        known.prepared(gptq)
    assert found.notes() == ()


def decoded(job: BlockJob) -> Tensor:
    return torch.cat([tensor.float().flatten() for _, tensor in sorted(job.spy.tensors.items())])


@pytest.fixture(scope="module")
def light(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> BlockJob:
    """A sequential job in the low-memory mode."""
    job = BlockJob(llama, tmp_path_factory.mktemp("light") / "out", low_memory=True, **GPTQ)
    job.run()
    assert job.notes == ()
    return job


@pytest.mark.parametrize("where", ["collect", "replace", "advance", "half way", "prepare"])
def test_a_sequential_job_goes_on_too(
    where: str, light: BlockJob, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third block; whatever is kept is used, and what it makes then is what the low-memory mode makes."""
    job = BlockJob(llama, tmp_path / "out", **GPTQ)
    if where == "collect":
        monkeypatch.setattr(store_module, "collect", Short(collect, 3))
    elif where == "prepare":
        monkeypatch.setattr(gptq, "prepare", Short(gptq.prepare, 10))  # there are four inputs in each block
    elif where == "half way":  # each block runs twice on three batches: as it was, and as it is stored
        monkeypatch.setattr(Block, "apply", method(Block.apply, 2 * 6 + 3 + 2))
    else:
        monkeypatch.setattr(Block, where, method(getattr(Block, where), 3))
    job.run()
    assert far(decoded(job), decoded(light)) < 0.02
    assert [note for note in job.notes if note.startswith(f"{SAID} 2:")]
    assert job.spy.entered == list(range(LAYERS))
    if where == "half way":  # hidden states are between two blocks: those that were kept are taken
        assert job.walked == [0, 1, 2, 2, 3]


def method(act: Callable[..., Any], call: int) -> Callable[..., Any]:
    short = Short(act, call)
    return lambda self, *args, **kwargs: short(self, *args, **kwargs)


def test_a_resumed_job_remembers_that_there_was_no_room(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = BlockJob(llama, tmp_path / "out", **GPTQ)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "collect", Short(collect, 1))
        first.killed_after(2)
    again = BlockJob(llama, tmp_path / "out", **GPTQ)
    light = BlockJob(llama, tmp_path / "light", low_memory=True, **GPTQ)
    light.run()
    again.run()
    assert torch.equal(decoded(again), decoded(light))
    assert again.notes[0].startswith(f"{SAID} 0:")


def test_a_distilled_job_goes_on_too(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "STEPS", (2, 2))
    monkeypatch.setattr(distillation, "distil", Short(distillation.distil, 2))
    job = BlockJob(llama, tmp_path / "out", preset="w8a8-zeroquant", sequential=False)
    job.run()
    assert job.walked == [0, 1, 1, 2, 3]
    assert len(job.notes) == 2
    assert job.notes[1].startswith(f"{SAID} 1:")
