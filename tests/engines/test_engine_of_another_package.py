"""An engine of another package: a real package in a folder, used from the command line, without touching Quantry's files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

FACTS = """
name = "tiny.engine"
about = "repeats what it is asked"
formats = ["safetensors"]
like = "vllm"

[installation]
distributions = ["tiny-engine"]

[server]
port = 8123
health = "/ready"

[lacks]
api_key = "leave it out"

[[versions]]
version = "1.0"
source = "tests"
date = 2026-11-16

[[kernels]]
name = "plain"
when = { format = "safetensors" }
source = "tests"
date = 2026-11-16

[[flags]]
names = ["--model", "--port", "--name"]
source = "tests"
date = 2026-11-16
"""
ENGINE = """
from quantry.engines.contract.boot_log import Facts, last
from quantry.engines.contract.command import Command, Setting, check, checked, explained, maybe


def settings(serving):
    return [
        Setting("--model", serving.model, "the folder"),
        Setting("--port", serving.listening_port, "the port that it listens on"),
        *maybe("--name", serving.name, "what requests call the model"),
    ]


def command(serving):
    check(serving)
    return Command((serving.python, "-m", "tiny_engine.server", *checked(serving, settings(serving))))


def explain(serving):
    return explained(serving, settings(serving))


def facts(lines):
    version = last(r"tiny engine (\\S+)", lines)
    return Facts(version=version.group(1) if version else None)
"""
SERVER = """
import argparse, json
from http.server import BaseHTTPRequestHandler, HTTPServer

options = argparse.ArgumentParser()
for flag in ("--model", "--port", "--name"):
    options.add_argument(flag)
chosen = options.parse_args()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": chosen.name}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = asked["messages"][-1]["content"]
        self.answer({"model": asked["model"], "choices": [{"message": {"role": "assistant", "content": words}}]})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


print("tiny engine 1.0.3", flush=True)
HTTPServer(("127.0.0.1", int(chosen.port)), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is installed."""
    site = tmp_path_factory.mktemp("site")
    files = {
        "tiny_engine/__init__.py": "",
        "tiny_engine/repeating.py": ENGINE,
        "tiny_engine/repeating.toml": FACTS,
        "tiny_engine/server.py": SERVER,
        "tiny_engine-1.0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-engine\nVersion: 1.0.3\n",
        "tiny_engine-1.0.3.dist-info/entry_points.txt": "[quantry.engines]\ntiny = tiny_engine.repeating\n",
    }
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    cache = tmp_path_factory.mktemp("cache")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "QUANTRY_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


COMMANDS = {
    "plan": ("plan", "llama-3.2-1b", "--gpu", "RTX 4090", "--engine", "tiny.engine", "--json"),
    "matrix": ("matrix", "formats", "--json"),
    "dry run": ("serve", "demo", "--engine", "tiny.engine", "--dry-run"),
    "unknown": ("serve", "demo", "--engine", "tinny.engine"),
    "key": ("serve", "demo", "--engine", "tiny.engine", "--api-key", "k"),
    "tune": ("tune", "demo", "--engine", "tiny.engine"),
}
RUN = """
import json, sys
from command import command
for words in json.load(sys.stdin):
    done = command(*words)
    print(json.dumps([done.returncode, done.stdout, done.stderr]))
"""
Done = tuple[int, str, str]  # exit code, output, errors


@pytest.fixture(scope="module")
def done(environment: dict[str, str]) -> dict[str, Done]:
    """What the commands say in a process that has the package: one for all, since imports take most of the time."""
    lines = quantry_process(environment, list(COMMANDS.values()))
    return dict(zip(COMMANDS, lines, strict=True))


def quantry_process(environment: dict[str, str], commands: list[tuple[str, ...]]) -> list[Done]:
    paths = os.pathsep.join([environment["PYTHONPATH"], str(Path(__file__).parents[1])])
    ended = subprocess.run(
        [sys.executable, "-c", RUN], env={**environment, "PYTHONPATH": paths}, input=json.dumps(commands),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [(code, out, error) for code, out, error in map(json.loads, ended.stdout.splitlines())]


def post(url: str, content: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(content).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_it_serves(environment: dict[str, str]) -> None:
    """Started, found healthy, asked and stopped, by its own name with its own words."""
    command = [sys.executable, "-m", "quantry", "serve", "demo", "--engine", "tiny.engine", "--port", "0", "--json"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdout
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(serving.stdout.readline())
            assert lines[-1], serving.stderr and serving.stderr.read()
        told = json.loads("".join(lines))
        question = {"model": told["model"], "messages": [{"role": "user", "content": "Are you there?"}]}
        answer = post(told["url"], question)
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 130
    assert answer["choices"][0]["message"]["content"] == "Are you there?"
    assert (told["engine"], told["version"], told["facts"]["version"]) == ("tiny.engine", "1.0.3", "1.0.3")
    assert told["memory"]["weights"] > 1 << 20  # predicted as vLLM's, which it is like
    assert told["command"][1:3] == ["-m", "tiny_engine.server"]
    assert {"flag": "--name demo", "why": "what requests call the model"} in told["reasons"]
    with pytest.raises(OSError, match="refused|reset"):
        post(told["url"], question)


def test_it_is_planned_when_it_is_asked_for(done: dict[str, Done]) -> None:
    option = json.loads(done["plan"][1])["options"][0]
    assert (option["engine"], option["format"], option["kernel"]) == ("tiny.engine", "safetensors", "plain")
    assert option["commands"]["serve"][:3] == ["python", "-m", "tiny_engine.server"]
    assert list(option["commands"]) == ["serve"]  # 16 bit is served as it is


def test_it_is_in_the_table_of_formats(done: dict[str, Done]) -> None:
    rows = json.loads(done["matrix"][1])[0]["rows"]
    assert "tiny.engine" in rows["bf16"][3]["ours"]
    assert "tiny.engine" not in rows["w4a16"][3]["ours"]


def test_a_dry_run_shows_its_command(done: dict[str, Done]) -> None:
    assert "-m tiny_engine.server --model" in done["dry run"][1]
    assert "--port 8123 --name demo" in done["dry run"][1]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("unknown", "unknown engine 'tinny.engine'; did you mean tiny.engine"),
        ("key", "tiny.engine 1.0.3 has no api key; leave it out"),
        ("tune", "there is nothing to try on tiny.engine"),
    ],
)
def test_what_its_facts_do_not_have_is_refused(done: dict[str, Done], name: str, problem: str) -> None:
    code, _, error = done[name]
    assert code == 2
    assert problem in error


def test_facts_that_cannot_be_read_are_named(environment: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(environment["PYTHONPATH"].partition(os.pathsep)[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tiny_engine" / "repeating.toml"
    file.write_text(FACTS.replace('formats = ["safetensors"]', ""), encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    [(code, _, error)] = quantry_process({**environment, "PYTHONPATH": paths}, [("matrix", "formats")])
    assert code == 2
    assert f"the engine tiny has no valid facts in {file}" in error
    assert "formats" in error
    assert len(error.splitlines()) == 1
