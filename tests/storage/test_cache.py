"""`quantry cache`: lists Quantry's own entries, clears those that nobody holds, follows no link out of the cache."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quantry
from command import command
from quantry.errors import QuantryError
from quantry.storage import write_atomically
from quantry.storage.cache import KINDS
from quantry.storage.holding import Holder, hold

NAMES = ("a" * 32, "b" * 32)
DAY = 24 * 3600


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two sets of statistics, one of them 40 days old, a place of a model and a log."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("QUANTRY_CACHE", str(folder))
    for name in NAMES:
        entry(folder / "statistics" / name / "block-00000.safetensors", 1000)
    for path in ((folder / "statistics" / NAMES[1]).iterdir(), [folder / "statistics" / NAMES[1]]):
        for file in path:
            os.utime(file, (time.time() - 40 * DAY,) * 2)
    entry(folder / "origins" / ("c" * 64), 10)
    entry(folder / "serving" / "llama.cpp-8080" / "engine.log", 100)
    return folder


def entry(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, bytes(size))


def test_it_lists_kinds_with_number_size_and_age(root: Path) -> None:
    listed = json.loads(command("cache", "--json").stdout)
    assert listed["bytes"] == 2110
    assert listed["removed"] == []
    rows = {(row["kind"], row["name"]): row for row in listed["entries"]}
    assert rows["statistics", NAMES[0]] == {
        "kind": "statistics", "name": NAMES[0], "bytes": 1000, "held": False,
        "age_seconds": rows["statistics", NAMES[0]]["age_seconds"],
    }  # fmt: skip
    assert 39 * DAY < rows["statistics", NAMES[1]]["age_seconds"] < 41 * DAY
    shown = command("cache").stdout
    assert "40 days ago" in shown
    assert "2.1 KiB in all" in shown
    assert str(root) in shown


def test_every_folder_that_the_package_makes_in_its_cache_is_a_kind() -> None:
    import re

    source = Path(quantry.__file__).parent
    found = {
        name
        for file in source.rglob("*.py")
        for name in re.findall(r'home\(\) / "(\w+)"', file.read_text(encoding="utf-8"))
    }
    assert {*found, "origins"} == set(KINDS)


def test_clear_removes_what_can_be_made_again_and_the_rest_when_named(root: Path) -> None:
    assert command("cache", "--clear").returncode == 2  # there is nobody to ask
    assert len(quantry.cache().entries) == 4
    done = command("cache", "--clear", "--older-than", "30d", "--yes")
    assert done.stdout == "removed 1 entry, 1.0 KiB\n"
    assert [path.name for path in (root / "statistics").iterdir()] == [NAMES[0]]
    assert command("cache", "--clear", "-y").returncode == 0
    assert [(left.kind, left.bytes) for left in quantry.cache().entries] == [("origins", 10)]
    assert command("cache", "origins", "--clear", "--yes").returncode == 0
    assert quantry.cache().entries == ()


def test_a_declined_question_removes_nothing(root: Path) -> None:
    assert quantry.cache(clear=True, confirm=lambda entries: False).removed == ()
    assert len(quantry.cache().entries) == 4


def test_what_a_job_holds_stays(root: Path) -> None:
    """A folder that this process uses, a lock file in a folder that another one has, and both free again."""
    owner = Holder()
    hold(root / "statistics" / NAMES[0], owner)
    lock = root / "references" / NAMES[0] / "lock"
    lock.parent.mkdir(parents=True)
    code = f"import fcntl, sys; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    done = command("cache", "--clear", "--yes").stdout
    assert "2 in use by running jobs were left" in done
    assert {(left.kind, left.name) for left in quantry.cache().entries if left.held} == {
        ("statistics", NAMES[0]), ("references", NAMES[0])
    }  # fmt: skip
    other.kill()
    other.communicate()
    del owner
    assert len(quantry.cache(clear=True).removed) == 2


def test_no_link_is_followed_out_of_the_cache(root: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / ("d" * 32)
    entry(mine / "thesis.txt", 5)
    (root / "references").symlink_to(mine.parent)
    (root / "statistics" / mine.name).symlink_to(mine)
    (root / "statistics" / NAMES[0] / "link").symlink_to(mine)
    entry(root / "statistics" / "my-notes" / "a.txt", 5)
    quantry.cache(clear=True)
    quantry.cache("references", clear=True)
    assert (mine / "thesis.txt").is_file()
    assert (root / "statistics" / "my-notes" / "a.txt").is_file()
    assert not (root / "statistics" / NAMES[0]).exists()


def test_a_folder_that_is_not_quantrys_own_is_refused(root: Path) -> None:
    entry(root / "Documents" / "letter.txt", 5)
    done = command("cache", "--clear", "--yes")
    assert done.returncode == 2
    assert "'Documents', which is not Quantry's" in done.stderr
    assert quantry.cache().other_bytes == 5
    assert len(quantry.cache().entries) == 4


def test_wrong_kinds_and_ages_are_refused(root: Path) -> None:
    with pytest.raises(QuantryError, match="use statistics, references"):
        quantry.cache("stats")
    with pytest.raises(QuantryError, match="'soon' is no age"):
        quantry.cache(older_than="soon")
    shutil.rmtree(root)
    assert quantry.cache(clear=True).entries == ()
    assert "nothing" in command("cache").stdout


def test_an_entry_that_is_cleared_while_a_job_waits_for_it_is_made_again(root: Path) -> None:
    folder = root / "references" / NAMES[1]
    owner = Holder()
    hold(folder, owner)
    shutil.rmtree(folder)  # as an older Quantry would
    again = Holder()
    hold(folder, again)
    assert folder.is_dir()
