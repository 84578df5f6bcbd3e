"""Engines as processes: what they leave behind, steps around them, and the line that says what went wrong."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from local_servers import alive, until
from quantry.engines.contract.command import Command, Step
from quantry.engines.contract.options import Options
from quantry.errors import QuantryError
from quantry.serving import process
from quantry.serving.prepare import prepare, serve
from quantry.serving.process import EngineError, Launch

SLEEPER = """
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
if sys.argv[2] == "200":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2])); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def stubborn(status: int = 200, **more: Any) -> Launch:
    """An engine that does not end when it is asked to once it serves (status 200), and has a process of its own."""
    port = process.free_port("127.0.0.1")
    return Launch(
        "llama.cpp", Command((sys.executable, "-c", SLEEPER, str(port), str(status)), **more), "127.0.0.1", port, "/"
    )


def test_a_stubborn_engine_is_ended_with_all_it_started(tmp_path: Path) -> None:
    with process.start(stubborn(), log=tmp_path / "log") as running:
        child = int(running.lines()[0].split()[1])
        assert alive(child)
        began = time.monotonic()
        assert running.stop(grace=0.5) == 128 + signal.SIGKILL
        assert 0.5 <= time.monotonic() - began < 10
    until(lambda: not alive(child))
    assert not alive(running.pid)


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_logs_and_files_are_written_through_no_link(tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    shared = tmp_path / "shared"
    shared.write_text("of another")
    for name in ("engine.log", "settings"):
        make(shared, tmp_path / name)
    command = Command((sys.executable, "-c", "print('words')"), files={"settings": "a = 1"})
    launch = Launch("llama.cpp", command, "127.0.0.1", process.free_port("127.0.0.1"), "/")
    with pytest.raises(EngineError):
        process.start(launch, log=tmp_path / "engine.log")
    assert shared.read_text() == "of another"
    assert (tmp_path / "engine.log").read_text() == "words\n"
    assert (tmp_path / "settings").read_text() == "a = 1"


def test_patience_ends(tmp_path: Path) -> None:
    shown = StringIO()
    with pytest.raises(EngineError, match="does not answer at http://127.0.0.1") as caught:
        process.start(stubborn(503), log=tmp_path / "log", patience=3, stream=shown)
    child = int((tmp_path / "log").read_text().split()[1])
    until(lambda: not alive(child))
    assert caught.value.exit_code == 2
    assert shown.getvalue().startswith("child")


def test_kill_9_is_reported(tmp_path: Path) -> None:
    with process.start(stubborn(), log=tmp_path / "log") as running:
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait(20) == 137
        assert not running.healthy()
        error = running.death()
    assert f"(process {running.pid}) was killed by SIGKILL after" in str(error)
    assert (error.exit_code, error.log) == (137, running.log)


def test_an_engine_that_dies_at_the_start_is_noticed_at_once(q8: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(q8.read_bytes()[:-1000])
    with pytest.raises(QuantryError):  # its header says more than the file has, so nothing is even started
        serve(broken, port=0)
    began = time.monotonic()
    with pytest.raises(
        EngineError, match="ended with exit code 2 after .* s: error: invalid argument: --nonsense"
    ) as caught:
        serve(q8, extra=("--nonsense",), port=0, threads=1)
    assert time.monotonic() - began < 30
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_port_in_use(q8: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(
            QuantryError, match=rf"port {port} of 127.0.0.1 cannot be used: .*in use; use --port \d+"
        ) as caught:
            prepare(q8, Options(port=port))
    other = int(str(caught.value).split()[-1])
    assert other > port
    process.check_port("127.0.0.1", other)
    process.check_port("127.0.0.1", port)  # free again


def test_steps_run_around_the_server(tmp_path: Path) -> None:
    def note(word: str) -> tuple[str, ...]:
        return (sys.executable, "-c", f"open('steps', 'a').write('{word} ')")

    told: list[str] = []
    launch = stubborn(
        files={"Modelfile": "FROM here"},
        steps=(Step(note("before"), "prepares"), Step(("false",), "on another machine", "worker")),
        after=(Step(note("after"), "finishes"),),
    )
    with process.start(launch, log=tmp_path / "log", tell=told.append) as running:
        running.stop(grace=0)
    assert (tmp_path / "steps").read_text() == "before after "
    assert (tmp_path / "Modelfile").read_text() == "FROM here"
    assert told == ["prepares", "finishes"]
    failing = replace(launch, command=replace(launch.command, steps=(Step(("false",), "prepares"),)))
    with pytest.raises(EngineError, match=r"false ended with exit code 1 \(prepares\)"):
        process.start(failing, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            ["INFO fine", "(EngineCore pid=7) ValueError: no room", "RuntimeError: it failed. See above"],
            "ValueError: no room",
        ),
        (["0.1 I loading", "0.2 E gguf_init: bad magic", "0.3 E failed to load"], "gguf_init: bad magic"),
        (["WARNING this can cause OSError: 24", "OSError: 5", "and so on"], "OSError: 5"),
        (["starting", "error: invalid argument: --x", "usage: 0 errors"], "error: invalid argument: --x"),
        (["only this", ""], "only this"),
        ([], ""),
    ],
)
def test_the_line_that_tells_what_went_wrong(lines: list[str], found: str) -> None:
    assert process.reason(lines).endswith(found)
    assert bool(process.reason(lines, guess=False)) == (len(lines) > 2)
