"""SIGTERM, SIGSTOP and kill -9 of commands: what they leave, and that the same command then ends well."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import ENVIRONMENT, process
from demo_artefacts import gguf_in, quantized_demo
from depth import cases, deep
from killed_jobs import contents, written
from local_servers import alive, descendants, metric, until
from quantry.serving.prepare import serve

WORDS = ("--preset", "w8a16", "--no-report")


def started(*words: str | Path) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "quantry", *map(str, words)]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def until_writing(job: "subprocess.Popen[str]", out: Path) -> None:
    until(lambda: written(out.with_name(out.name + ".partial")) > 0 or job.poll() is not None, 60)


def group_of_guidellm(pids: list[int]) -> int:
    return os.getpgid(next(pid for pid in pids if b"guidellm_script" in Path(f"/proc/{pid}/cmdline").read_bytes()))


@pytest.mark.parametrize("number", cases([signal.SIGTERM, signal.SIGHUP], [signal.SIGTERM]))
def test_a_signal_ends_a_job_that_then_goes_on(number: int, tmp_path: Path) -> None:
    """The first bytes are written when the signal comes, unless the job is faster: then it has ended well."""
    out = tmp_path / "out"
    with started("quantize", "demo", "-o", out, *WORDS) as job:
        until_writing(job, out)
        job.send_signal(number)
        said = job.communicate(timeout=60)[1]
    assert job.returncode in (128 + number, 0)
    assert "Traceback" not in said
    assert out.exists() == (job.returncode == 0)
    assert process("quantize", "demo", "-o", out, *WORDS).returncode == 0
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@deep
def test_a_stopped_job_keeps_its_output_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started("quantize", "demo", "-o", out, *WORDS) as job:
        until_writing(job, out)
        job.send_signal(signal.SIGSTOP)
        refused = process("quantize", "demo", "-o", out, *WORDS)
        job.send_signal(signal.SIGCONT)
        job.communicate(timeout=60)
    assert job.returncode == 0
    assert refused.returncode == 2
    assert "another job is writing" in refused.stderr
    assert process("quantize", "demo", "-o", tmp_path / "whole", *WORDS).returncode == 0
    assert contents(out) == contents(tmp_path / "whole")


@deep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_bench_leaves_no_guidellm(number: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = gguf_in(quantized_demo(tmp_path_factory, "gguf-q8_0"))
    load = ("--concurrency", "2", "--prompt-tokens", "16", "--answer-tokens", "64", "--requests", "2000")
    with serve(file, port=0, threads=1, context=256, parallel=2) as running:
        with started("bench", running.url, *load) as job:
            until(lambda: len(descendants(job.pid)) > 2, 60)
            time.sleep(2)  # for its workers; there may be more of them later, which end as well
            below = descendants(job.pid)
            os.killpg(group_of_guidellm(below), signal.SIGSTOP)  # it would end by itself with its standard input
            job.send_signal(number)
            job.communicate(timeout=60)
        assert job.returncode in (-signal.SIGKILL, 128 + signal.SIGTERM)
        until(lambda: not any(map(alive, below)))
        assert running.healthy()


@deep
def test_the_engine_of_a_load_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = gguf_in(quantized_demo(tmp_path_factory, "gguf-q8_0"))
    load = ("--concurrency", "2", "--prompt-tokens", "16", "--answer-tokens", "64", "--requests", "400")
    with (
        serve(file, port=0, threads=1, context=256, parallel=2) as running,
        started("bench", running.url, *load) as job,
    ):
        until(lambda: len(descendants(job.pid)) > 2, 60)
        until(lambda: metric(running, "tokens_predicted_total") > 100, 60)
        os.kill(running.pid, signal.SIGKILL)
        said = job.communicate(timeout=120)
    assert job.returncode in (1, 2), said
    assert "Traceback" not in said[1]
