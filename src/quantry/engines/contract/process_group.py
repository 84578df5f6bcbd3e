"""Processes in a group of their own, which ends with the process that started it, even if that one is killed.

A shell reads a pipe that only this process holds: where it ends without a word, this process is gone, and the shell
kills the group. That holds whatever the group's programs do with their input, and while they load a model.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import AnyStr

WATCH = 'read -r _ || { kill -s KILL -- "-$1"; shift; [ $# -eq 0 ] || "$@"; }'


class Watcher:
    """Ends a process group when this process ends; `removal` is a command that ends what outlives the group."""

    def __init__(self, group: int, removal: Sequence[str] = ()) -> None:
        self._lock, quiet = Lock(), subprocess.DEVNULL
        line = ["/bin/sh", "-c", WATCH, "sh", str(group), *removal]
        self._shell = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)

    def dismiss(self) -> None:
        """Stops watching; the group is left alone. Several threads may ask for it."""
        with self._lock, suppress(OSError):
            if self._shell.poll() is None:
                self._shell.communicate(b"\n")


def kill_group(group: int) -> None:
    """Kills every process of a group; macOS refuses that for a group of zombies."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@contextmanager
def ended_with_us(process: "subprocess.Popen[AnyStr]") -> Iterator["subprocess.Popen[AnyStr]"]:
    """Kills the group of a process at the end of the block, or when this process ends before."""
    watcher = Watcher(process.pid)
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait()
        watcher.dismiss()
