"""`quantry serve`: what it prints, and how it ends with its engine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from command import command
from depth import cases
from local_servers import alive, until

SMALL = ("--port", "0", "--context", "256", "--threads", "1")
ENDS = [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, ""), (signal.SIGKILL, -9, "")]


@contextmanager
def cli(*words: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """`quantry serve --json` and what it says once it serves."""
    line = [sys.executable, "-m", "quantry", "serve", *words, "--json", *SMALL]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        try:
            assert done.stdout is not None
            text = ""
            for row in done.stdout:
                text += row
                if row == "}\n":
                    break
            yield done, json.loads(text)
        finally:
            done.kill()


@pytest.mark.parametrize(("number", "code", "words"), cases(ENDS, [ENDS[2]]))
def test_signals_end_both(q8: Path, number: int, code: int, words: str) -> None:
    with cli(str(q8)) as (done, told):
        assert alive(told["pid"])
        done.send_signal(number)
        _, said = done.communicate(timeout=60)
        assert done.returncode == code
        assert said.strip().endswith(words)
        assert "Traceback" not in said
    until(lambda: not alive(told["pid"]))


def test_the_command_reports_the_death_of_its_engine(q8: Path) -> None:
    with cli(str(q8)) as (done, told):
        os.kill(told["pid"], signal.SIGKILL)
        _, said = done.communicate(timeout=60)
    assert done.returncode == 137
    first, line, end = said.split("\n")
    assert first.startswith("starting llama.cpp b")
    assert line.startswith(f"error: llama.cpp (process {told['pid']}) was killed by SIGKILL")
    assert not end


@pytest.mark.parametrize("shown", [False, True])
def test_what_is_printed(q8: Path, shown: bool) -> None:
    line = [sys.executable, "-m", "quantry", "serve", str(q8), *SMALL, *(["--show-log"] if shown else [])]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        rows = [done.stdout.readline() for _ in range(7)]
        curl = rows[-1].partition("curl ")[2]
        answer = subprocess.run(f"curl -s {curl}", shell=True, capture_output=True, text=True, check=True).stdout
        with urlopen(Request(rows[2].split()[1], headers={"Accept-Encoding": "gzip"})) as page:
            assert (page.status, page.headers.get_content_type()) == (200, "text/html")
        done.terminate()
        said = done.communicate(timeout=60)[1]
    assert done.returncode == 143
    assert [row.split()[0] for row in rows] == ["URL", "model", "page", "engine", "context", "log", "try"]
    assert json.loads(answer)["choices"][0]["message"]["content"]
    assert ("listening on" in said) == shown, "the engine's log is passed through if that is asked for"
    assert shown or said.count("\n") <= 2


def test_a_dry_run_shows_the_command_without_the_key(q8: Path) -> None:
    flags = ("--dry-run", "--api-key", "open sesame", "--host", "0.0.0.0", "--kv", "q8_0")
    done = command("serve", q8, *flags, "--", "--no-warmup")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert "quantry.serving.embedded" in words
    assert words[words.index("--host") + 1] == "0.0.0.0"
    assert words[words.index("--cache-type-v") + 1] == "q8_0"
    assert "--no-warmup" in words
    assert "sesame" not in done.stdout + done.stderr


def test_explain_gives_reasons(q8: Path) -> None:
    done = command("serve", str(q8), "--explain")
    assert "--ctx-size" in done.stdout
    assert "what older texts say" in done.stdout
    assert "./server" in done.stdout
    told = json.loads(command("serve", str(q8), "--explain", "--json").stdout)
    assert {"model", "engine", "version", "url", "context", "command", "reasons", "outdated", "memory"} <= told.keys()


def test_bad_input_is_one_line(q8: Path) -> None:
    done = command("serve", str(q8), "--host", "0.0.0.0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 0.0.0.0 can be reached by other machines")
    assert "--api-key" in done.stderr
    assert done.stderr.count("\n") == 1
