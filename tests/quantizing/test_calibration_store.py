"""The store of statistics: the same numbers from it as from a walk, no walk when all is there, nothing half-written."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from depth import deep
from linear_inputs import WINDOWS, Folder
from quantizing.calibration_text import same, statistics
from quantry.blockwise.walk import Walk
from quantry.errors import OutputError, QuantryError
from quantry.models.identity import identity
from quantry.models.reader import open_checkpoint
from quantry.quantizing.calibration.observe import collect
from quantry.quantizing.calibration.store import Statistics, Store, default_store
from quantry.storage.holding import unused
from tiny_files import LLAMA
from tiny_models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    write_model(path, "Qwen3MoeForCausalLM", num_hidden_layers=3)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "statistics")


class Closed(Folder):
    """A model that can be told from others but not run."""

    def read(self, name: str) -> Tensor:
        raise AssertionError("a weight was read")


def files(store: Store) -> list[Path]:
    return sorted(path for path in store.folder.glob("*/*") if path.is_file())


@pytest.mark.parametrize("histogram", [False, True])
def test_what_is_stored_is_what_was_seen(folder: Path, store: Store, histogram: bool) -> None:
    expected = [collect(block, histogram=histogram) for block in Walk(Folder(folder)).blocks(WINDOWS)]
    known = identity(open_checkpoint(folder))
    first = statistics(Folder(folder), store=store, histogram=histogram, identity=known)
    assert [same(first.observed(index), expected[index]) for index in range(3)] == [True] * 3
    assert first.walked == 3
    again = statistics(Closed(folder), store=store, histogram=histogram, identity=known)
    assert [same(again.observed(index), expected[index]) for index in (2, 0, 1)] == [True] * 3
    assert again.walked == 0
    assert [path.name for path in files(store)] == [f"block-{index:05d}.safetensors" for index in range(3)]


def test_statistics_by_module(folder: Path, store: Store) -> None:
    seen = statistics(Folder(folder), store=store)
    stats, starved = seen.observed(1).by_module(least=0)
    attention, expert = "model.layers.1.self_attn", "model.layers.1.mlp.experts.2.up_proj"
    assert stats[f"{attention}.q_proj"] is stats[f"{attention}.v_proj"]
    assert stats[f"{attention}.o_proj"].tokens == sum(map(len, WINDOWS))
    assert expert in stats
    assert starved == ()
    with pytest.raises(QuantryError, match=r"there is no block 3; blocks go from 0 to 2"):
        seen.observed(3)


def test_starved_experts_are_covered(folder: Path) -> None:
    observed = statistics(Folder(folder)).observed(0)
    stats, starved = observed.by_module(least=10**6)
    experts = {module for module, group in observed.groups.items() if group in observed.pools}
    assert {stats[module].tokens for module in experts} == {2 * sum(map(len, WINDOWS))}
    assert set(starved) == set(observed.pools)


def test_a_missing_block_is_walked_to_without_collecting_the_others(folder: Path, store: Store) -> None:
    first = statistics(Folder(folder), store=store)
    expected = [first.observed(index) for index in range(3)]
    files(store)[1].unlink()
    second = statistics(Folder(folder), store=store)
    assert [same(second.observed(index), expected[index]) for index in range(3)] == [True] * 3
    assert second.walked == 1


def test_blocks_on_the_way_are_stored_too(folder: Path, store: Store) -> None:
    first = statistics(Folder(folder), store=store)
    first.observed(2)
    assert first.walked == 3
    assert len(files(store)) == 3


def test_without_a_store_a_block_that_was_passed_is_walked_to_again(folder: Path) -> None:
    found = statistics(Folder(folder))
    last, first, last_again = found.observed(2), found.observed(0), found.observed(2)
    assert found.walked == 3
    assert same(last, last_again)
    assert not first.groups.keys() & last.groups.keys()


def test_progress_tells_every_block(folder: Path) -> None:
    told: list[tuple[int, int, str]] = []
    statistics(Folder(folder), progress=lambda *now: told.append(now)).observed(2)
    assert told == [(index, 3, f"model.layers.{index}") for index in range(3)]


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "text", "tokens"])
def test_a_damaged_file_is_computed_again(folder: Path, store: Store, harm: str) -> None:
    first = statistics(Folder(folder), store=store)
    expected = first.observed(0)
    (path,) = files(store)
    content = path.read_bytes()
    changed = bytearray(content)
    changed[-100] ^= 1
    path.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "flip": bytes(changed),
            "empty": b"",
            "text": b"{}" * 100,
            "tokens": content.replace(b'checksum\\": ', b'checksum\\":1'),
        }[harm]
    )
    assert path.read_bytes() != content
    second = statistics(Folder(folder), store=store)
    assert same(second.observed(0), expected)
    assert second.walked == 1
    assert path.read_bytes() == content


def test_everything_the_numbers_depend_on_is_in_the_fingerprint(folder: Path, store: Store, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_model(other, "Qwen3MoeForCausalLM", seed=1, num_hidden_layers=3)
    prints = [
        statistics(Folder(path), windows, store=store, **how).fingerprint
        for path, windows, how in (
            (folder, WINDOWS, {}),
            (other, WINDOWS, {}),
            (folder, WINDOWS[:5], {}),
            (folder, WINDOWS, {"dtype": torch.bfloat16}),
            (folder, WINDOWS, {"device": torch.device("cuda")}),
            (folder, WINDOWS, {"histogram": True}),
            (folder, WINDOWS, {"identity": "known"}),
        )
    ]
    assert len(set(prints)) == len(prints)
    assert statistics(Folder(folder), batch=2).fingerprint == prints[0]


class Changed(Folder):
    """A model with one tensor that differs."""

    def read(self, name: str) -> Tensor:
        found = super().read(name)
        return found + 1 if name == "model.layers.2.input_layernorm.weight" else found


def test_one_changed_tensor_makes_another_model(folder: Path, tmp_path: Path) -> None:
    assert statistics(Changed(folder)).fingerprint != statistics(Folder(folder)).fingerprint
    twin = tmp_path / "twin"
    twin.mkdir()
    for file in folder.iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    assert identity(open_checkpoint(twin)) == identity(open_checkpoint(folder))
    tensor = open_checkpoint(twin).tensors[-1]
    content = bytearray((twin / tensor.file).read_bytes())
    content[tensor.start] ^= 1
    (twin / tensor.file).write_bytes(content)
    assert identity(open_checkpoint(twin)) != identity(open_checkpoint(folder))


def test_a_full_store_stays_within_its_budget(folder: Path, store: Store) -> None:
    statistics(Folder(folder), store=store).observed(0)
    size = files(store)[0].stat().st_size
    tight = Store(store.folder.parent / "tight", 2 * size + size // 2)
    found = statistics(Folder(folder), store=tight)
    expected = [collect(block) for block in Walk(Folder(folder)).blocks(WINDOWS)]
    assert [same(found.observed(index), expected[index]) for index in range(3)] == [True] * 3
    assert sum(path.stat().st_size for path in files(tight)) <= tight.budget
    assert len(files(tight)) == 2
    again = statistics(Folder(folder), store=tight)
    assert all(same(again.observed(index), expected[index]) for index in range(3))
    assert again.walked == 1
    none = Store(store.folder.parent / "none", size // 2)
    assert same(statistics(Folder(folder), store=none).observed(0), expected[0])
    assert files(none) == []


def test_the_store_that_was_not_used_for_longest_makes_way(folder: Path, store: Store) -> None:
    makers = [statistics(Folder(folder), WINDOWS[start:], store=store) for start in range(3)]
    for maker in makers:
        maker.observed(0)
    size = files(store)[0].stat().st_size
    names = [maker.fingerprint for maker in makers]
    for age, name in enumerate(names):
        os.utime(store.folder / name, (1000 + age, 1000 + age))
    del makers, maker  # what is in use stays
    statistics(Folder(folder), store=store).observed(0)  # read: the oldest has been used just now
    room = Store(store.folder, 3 * size + size // 2)
    statistics(Folder(folder), WINDOWS[:2], store=room).observed(0)
    left = {path.parent.name for path in files(store)}
    assert [name in left for name in names] == [True, False, True]


HOLDS = """
import sys
from pathlib import Path
from quantry.storage.holding import Holder, hold
owner = Holder()
hold(Path(sys.argv[1]), owner)
print(flush=True)
sys.stdin.read()
"""


def test_what_another_process_uses_is_not_evicted(tmp_path: Path) -> None:
    """The oldest is held: the next oldest makes way, and where all are held there is no room; a kill ends that."""
    store = Store(tmp_path / "statistics", 250)
    oldest, older = (store.folder / name for name in ("oldest", "older"))
    for age, place in enumerate((oldest, older)):
        assert store.put(place / "block", bytes(100))
        os.utime(place, (1000 + age, 1000 + age))
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(oldest)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    assert store.put(store.folder / "new" / "block", bytes(100))
    assert [place.exists() for place in (oldest, older)] == [True, False]
    assert not store.put(store.folder / "large" / "block", bytes(200)), "only what is held would make way"
    assert oldest.exists()
    other.kill()
    other.communicate()
    assert store.put(store.folder / "large" / "block", bytes(200))
    assert not oldest.exists()


def test_a_place_that_cannot_be_written_to_only_costs_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = statistics(Folder(folder), store=Store(tmp_path / "file" / "statistics"))
    assert found.observed(0).stats
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_killed_writer_leaves_no_file_under_the_name(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)  # the last thing before the name
    with pytest.raises(KeyboardInterrupt):
        statistics(Folder(folder), store=store).observed(0)
    assert files(store) == []


def worker(folder: str, store: str) -> list[float]:
    torch.set_num_threads(1)
    found = statistics(Folder(Path(folder)), store=Store(Path(store)))
    return [float(stats.gram.sum()) for index in range(3) for stats in found.observed(index).stats.values()]


@deep
def test_several_at_once_agree(folder: Path, store: Store) -> None:
    """Another process and two threads of this one: all get the same numbers, and whole files are left."""
    with get_context("spawn").Pool(1) as pool, ThreadPoolExecutor(2) as threads:
        job = pool.apply_async(worker, (str(folder), str(store.folder)))
        near = [threads.submit(worker, str(folder), str(store.folder)) for _ in range(2)]
        results = [job.get(timeout=120), *(thread.result() for thread in near)]
    assert all(result == results[0] for result in results)
    assert len(files(store)) == 3
    assert statistics(Folder(folder), store=store).walked == 0
    assert worker(str(folder), str(store.folder)) == results[0]


def test_hidden_states_in_a_file_give_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    size = sum(map(len, WINDOWS)) * 64 * 4
    windows = [*WINDOWS[:3], *(window[:20] for window in WINDOWS[3:])]  # of two lengths
    expected = [collect(block) for block in Walk(Folder(folder)).blocks(windows)]
    for memory in (0, size):  # too little, and just enough
        walk = Walk(Folder(folder), memory=memory, scratch=tmp_path / "scratch")
        found = [collect(block) for block in walk.blocks(windows)]
        assert all(map(same, found, expected))
        assert {batch.spilled for batch in walk.batches} == {memory == 0}
    assert list((tmp_path / "scratch").iterdir()) == []
    with pytest.raises(OutputError, match="no room for .* in .*missing"):
        statistics(Folder(folder), memory=0, scratch=tmp_path / "missing").observed(0)


def test_the_place_of_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path / "here"))
    assert default_store(5) == Store(tmp_path / "here" / "statistics", 5)
    monkeypatch.delenv("QUANTRY_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_store().folder == tmp_path / ".cache" / "quantry" / "statistics"


def test_nothing_is_run_before_a_block_is_asked_for(folder: Path) -> None:
    assert isinstance(statistics(Closed(folder)), Statistics)


def test_a_byte_in_the_middle_of_a_tensor_makes_another_model(tmp_path: Path) -> None:
    """Of a large tensor samples are read, all over it."""
    weight = np.zeros((64, 1024), np.float32)  # 64 samples of 4 KiB would be all of it
    names = []
    for place in (None, 0, weight.size // 2, weight.size // 8 * 7):
        changed = weight.copy()
        if place is not None:
            changed.reshape(-1)[place] = 1
        folder = tmp_path / str(place)
        folder.mkdir()
        save_file({"model.embed_tokens.weight": changed}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(LLAMA))
        names.append(identity(open_checkpoint(folder)))
    assert len(set(names)) == 4


def test_statistics_are_held_as_long_as_they_are_used(folder: Path, store: Store) -> None:
    """Clearing the cache takes no statistics from the job that reads them."""
    found = statistics(Folder(folder), store=store)
    found.observed(0)
    place = files(store)[0].parent
    with unused(place) as free:
        assert not free
    del found
    with unused(place) as free:
        assert free
