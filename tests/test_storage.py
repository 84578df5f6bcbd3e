"""Atomic writing: whole or not at all, through no link, and one writer at a time."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quantry.jobs.output_folder import without_home
from quantry.storage import write_atomically, write_together


@pytest.mark.parametrize("link", ["note.json", "note.json.partial"])
@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_a_link_is_replaced_and_never_followed(tmp_path: Path, link: str, make: Callable[[Path, Path], None]) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.write_text("shared")
    folder.mkdir()
    make(outside, folder / link)
    write_atomically(folder / "note.json", b"new")
    assert outside.read_text() == "shared"
    assert not (folder / "note.json").is_symlink()
    assert (folder / "note.json").read_bytes() == b"new"
    assert [file.name for file in folder.iterdir()] == ["note.json"]


def test_home_is_a_path_and_not_a_part_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    told = {"a": ["/root/m", "x=/root/m", "file:///root/m", "two\n/root/m in /root."], "b": [1, None, True]}
    assert without_home(told) == {"a": ["~/m", "x=~/m", "file://~/m", "two\n~/m in ~."], "b": [1, None, True]}
    other = ["/data/root/m", "/data//root/m", "/root2/m", "/root.d/m", "a~/root/m"]
    assert without_home(other) == other


def test_files_that_belong_together_are_all_written_or_none(tmp_path: Path) -> None:
    first, second = tmp_path / "card.md", tmp_path / "report.html"
    first.write_text("old")
    second.mkdir()
    with pytest.raises(IsADirectoryError):
        write_together({first: b"new", second: b"new"})
    assert first.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["card.md", "report.html"]


def test_what_a_killed_writer_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "note.json.partial").write_text("half of something longer")
    write_atomically(tmp_path / "note.json", b"new")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"new"]


def test_writers_of_one_file_leave_one_of_their_contents_whole(tmp_path: Path) -> None:
    contents = [bytes([number]) * 300_000 for number in range(8)]
    threads = [threading.Thread(target=write_atomically, args=(tmp_path / "note.json", data)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "note.json").read_bytes() in contents
    assert [file.name for file in tmp_path.iterdir()] == ["note.json"]
