"""Groups of processes end with whoever started them, also after kill -9."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from local_servers import alive, until
from quantry.engines.contract.process_group import Watcher, ended_with_us

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys, time
from quantry.engines.contract.process_group import ended_with_us
line = [sys.executable, "-c", {STUBBORN!r}]
with ended_with_us(subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True)) as process:
    print(process.pid, process.stdout.readline().decode(), flush=True)
    time.sleep(600)
"""


def test_kill_9_of_the_parent_leaves_no_orphan() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.kill()
    until(lambda: not any(map(alive, pids)))


def test_the_block_ends_the_group_and_a_dismissed_watcher_leaves_one_alone() -> None:
    line = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        watcher = Watcher(process.pid)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: watcher.dismiss(), range(8)))
        assert alive(process.pid)
        with pytest.raises(KeyError), ended_with_us(process):
            raise KeyError
        assert process.returncode == -signal.SIGKILL
        until(lambda: not alive(child))
