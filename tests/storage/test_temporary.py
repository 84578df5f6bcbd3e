"""Temporary folders: gone at the end, and those of killed processes with the next one."""

import subprocess
import sys
from pathlib import Path

import pytest

from quantry.storage.temporary import LOCK, temporary_folder

HOLD = "from quantry.storage.temporary import temporary_folder as t\nimport sys\nwith t() as f:\n (f/'x').write_text('y'); print(f, flush=True); sys.stdin.read()"


def test_a_killed_process_leaves_a_folder_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    other = tmp_path / "quantry-of-the-user"
    other.mkdir()
    (tmp_path / "quantry-link").symlink_to(other)
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"TMPDIR": str(tmp_path)}
        )
        for _ in range(2)
    ]
    folders = [Path(holder.stdout.readline().decode().strip()) for holder in holders if holder.stdout]
    holders[0].kill()
    holders[0].wait()
    with temporary_folder() as own:
        assert own.is_dir()
        assert not list(own.iterdir())
        assert [folder.exists() for folder in folders] == [False, True], "the dead one's alone"
    assert not own.parent.exists()
    assert other.is_dir(), "without a lock it is not ours"
    holders[1].communicate(b"")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["quantry-link", "quantry-of-the-user"]
    assert LOCK
