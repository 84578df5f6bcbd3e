"""What leaves a machine: no socket but what the user asked for, and no path, name or key in what is passed on."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import quantry
from demo_artefacts import gguf_in, quantized_demo
from depth import deep
from shared import recorded
from socket_guard import guarded

RUN = """
import json, sys
from quantry.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["quantry", *words]
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code)
print("CODES", codes)
"""
BENCH = """
import sys, quantry
with quantry.serve(sys.argv[1], port=0, threads=1, context=256, parallel=2) as running:
    load = dict(concurrency=[1], prompt_tokens=16, answer_tokens=4, requests=2)
    assert quantry.bench(running.url, **load).levels[0].errors == 0
"""
USER = "jane.doe"
KEYS = {"HF_TOKEN": "hf_abcdefghijklmnopqrst", "QUANTRY_API_KEY": "sesame-key-123", "USER": USER, "LOGNAME": USER}
TEXT = ("--windows", "1", "--length", "64")
QUICK = ("--samples", "2", "--length", "64")


@dataclass(frozen=True)
class Watched:
    """What commands did for a user with a name, a home and keys."""

    home: Path
    codes: list[int]
    sockets: str
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    done: Watched = recorded(tmp_path_factory, "watched", watch)
    return done


def watch(folder: Path) -> Watched:
    environment, notes = guarded(folder)
    home = folder / USER
    model = write_model(home / "models" / "tales")
    words = commands(str(model), home / "out")
    said = run(RUN, json.dumps(words), {**environment, **KEYS, "HOME": str(home), "OMP_NUM_THREADS": "1"})
    written = [file for file in (home / "out").rglob("*") if file.is_file()]
    files = {str(file.relative_to(home / "out")): file.read_bytes() for file in written}
    return Watched(home, json.loads(said.rpartition("CODES ")[2]), notes.read_text(), files)


def write_model(folder: Path) -> Path:
    """Links the demo model into a folder."""
    folder.mkdir(parents=True)
    for file in (Path(quantry.__file__).parent / "demo").iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def commands(model: str, out: Path) -> list[list[str]]:
    text = f"{model}/held-out.txt"
    whole = [
        [
            "sweep",
            model,
            "-o",
            f"{out}/sweep",
            "--presets",
            "w8a16,gguf-q4_0",
            "--windows",
            "1",
            "--verify-length",
            "64",
        ],
        ["quantize", model, "-o", f"{out}/auto", "--preset", "auto", "--budget", "5bpw", *QUICK],
        ["convert", f"{out}/gptq", "-o", f"{out}/bf16", "--to", "bf16"],
    ]
    return [
        ["inspect", model],
        ["hardware"],
        ["plan", model, "--gpu", "RTX 3060"],
        ["run", model, "-o", f"{out}/run", "--yes", "--no-serve", "--windows", "1", "--text", text],
        ["quantize", model, "-o", f"{out}/gptq", "--preset", "w4a16", "--rounder", "gptq", "--data", text, *QUICK],
        ["verify", f"{out}/gptq", "--reference", model, "--text", text, *TEXT],
        *whole,
    ]


def run(code: str, argument: str, environment: dict[str, str]) -> str:
    line = [sys.executable, "-c", code, argument]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@deep
def test_jobs_on_local_files_ask_no_other_machine(watched: Watched) -> None:
    assert set(watched.codes) <= {0, 1}, watched.codes  # a gate may fail
    assert watched.sockets == ""


@deep
def test_what_is_written_names_nobody(watched: Watched) -> None:
    """Only the log of an engine has paths: it is its own, and stays on the machine."""
    names = {Path(name).name for name in watched.files}
    assert {"plan.json", "run.json", "quantry.json", "README.md", "report.html", "report.png"} <= names
    for name, data in watched.files.items():
        secrets = [KEYS["HF_TOKEN"], KEYS["QUANTRY_API_KEY"]]
        secrets += [] if name.endswith("engine.log") else [USER, str(watched.home.parent), sys.prefix]
        for secret in secrets:
            assert secret.encode() not in data, (name, secret)


@deep
def test_serving_and_loading_ask_no_other_machine(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    environment, notes = guarded(tmp_path)
    run(BENCH, str(gguf_in(quantized_demo(tmp_path_factory, "gguf-q8_0"))), environment)
    assert notes.read_text() == ""


def test_the_watch_sees_what_a_user_asks_the_hub_for(tmp_path: Path) -> None:
    environment, notes = guarded(tmp_path)
    line = [sys.executable, "-m", "quantry", "inspect", "some/model"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False, timeout=100)
    assert done.returncode == 2, done.stderr
    assert "huggingface.co" in notes.read_text()
