"""How commands end: errors in one line with exit code 2, bugs with a redacted file and 70, output of any encoding."""

import getpass
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command import ENVIRONMENT, command
from quantry.cli._bug_report import redacted


class PanicException(BaseException):
    """What a panic of a Rust library becomes in Python."""


@contextmanager
def raising(error: BaseException, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The function below `quantry inspect` raises this."""

    def broken(_: object) -> None:
        raise error

    with patch.context() as inner:
        inner.setattr("quantry.models.anatomy.inspect", broken)
        yield


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [
        (KeyError("rope"), 70, "bug: KeyError: 'rope'; please report it with "),
        (PanicException("index out of bounds"), 70, "bug: PanicException: index out of bounds; "),
        (EOFError("Ran out of input"), 70, "bug: EOFError: Ran out of input; "),
        (AssertionError(), 70, "bug: AssertionError"),
        (RecursionError("too deep"), 70, "bug: RecursionError"),
        (MemoryError(), 2, "error: there is not enough memory"),
        (RuntimeError("can't start new thread"), 2, "error: there is not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
            2,
            "error: there is not enough memory",
        ),
        (OSError(28, "No space left on device", "/x/y"), 2, "error: /x/y: No space left on device; "),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: /x: Permission denied; "),
        (KeyboardInterrupt(), 130, "interrupted; "),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value)[:10],
)
def test_whatever_escapes_is_one_line(
    error: BaseException, code: int, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path))
    with raising(error, monkeypatch):
        done = command("inspect", "demo")
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(start)
    assert len(done.stderr.splitlines()) == (1 if start else 0)
    reports = list((tmp_path / "bugs").glob("*")) if code == 70 else []
    assert len(reports) == (code == 70)
    for report in reports:
        assert str(report) in done.stderr
        assert "Traceback" in report.read_text()


def test_the_report_of_a_bug_names_nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setenv("MY_SECRET", "correct-horse")
    monkeypatch.setenv("HOME", "/home/jane.doe")
    monkeypatch.setenv("USER", "jane.doe")
    words = "in /home/jane.doe/models/secret-model/config.json with hf_qrstuvwxyzabcd, correct-horse of jane.doe, api_key=abc123"
    with raising(ValueError(words), monkeypatch):
        done = command("inspect", "/home/jane.doe/models/secret-model")
    (report,) = (tmp_path / "bugs").iterdir()
    text = report.read_text()
    for secret in (
        "jane",
        "hf_",
        "correct-horse",
        "abc123",
        "/home",
        "models/secret-model",
        str(Path(__file__).parent),
    ):
        assert secret not in text, secret
    assert "jane" not in done.stderr.replace(str(report), "")
    for kept in ("quantry/cli/inspect.py", "ValueError", "config.json", "command: inspect", "torch "):
        assert kept in text, kept


def test_redaction_keeps_what_is_no_path() -> None:
    assert redacted("a/b of shape 3/4, model.layers.0") == "a/b of shape 3/4, model.layers.0"
    assert redacted('File "/opt/x/lib/site-packages/torch/nn.py", line 3') == 'File "site-packages/torch/nn.py", line 3'
    assert getpass.getuser() in ("root", "user") or getpass.getuser() not in redacted(f"by {getpass.getuser()} here")


def run(*words: str, stdout: int, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "quantry", *words], stdout=stdout, stderr=subprocess.PIPE, check=False,
        env={**os.environ, **ENVIRONMENT, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_tables_in_any_encoding(encoding: str) -> None:
    done = run("inspect", "demo", stdout=subprocess.PIPE, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "?" in done.stdout.decode(encoding), "a bar, which the encoding lacks"


def test_a_full_device_is_no_failed_gate() -> None:
    with Path("/dev/full").open("wb") as full:
        done = run("presets", stdout=full.fileno())
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")
    assert b"No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1
