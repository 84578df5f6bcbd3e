"""guidellm in a process of its own: it pins other versions than ours, and what it spends is not the server's.

One process runs all levels, one scenario each: a scenario of several levels would send every level the same prompts,
and the engine's prefix cache would answer all but the first. guidellm is told everything over its standard input, so
that a key is in no list of processes and in no file.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quantry.errors import QuantryError

INSTALL = "pip install 'quantry[bench]'"
OWN = "if it has an environment of its own, name its python with --guidellm-python"
SUPPORTED = ((0, 8), (1, 0))  # from, and before
SCRIPT = Path(__file__).with_name("inside.py")
MESSAGE = 300  # characters of its words that are passed on
ENVIRONMENT = {
    "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "WARNING",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # cores are for the server
}


class Guide:
    """A started guidellm."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process, self.folder = process, folder
        hello = self._answer()
        if "missing" in hello:
            raise QuantryError(f"guidellm cannot be imported ({hello['missing']})", fix=f"{INSTALL}; {OWN}")
        self.version = str(hello["version"])
        _check_version(self.version)

    def run(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """The one benchmark of a scenario, as guidellm's report has it."""
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        asked = {"spec": {**spec, "outputs": [{"kind": "json", "path": str(report)}]}}
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it has ended, which its answer tells
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        said = self._answer()
        if "error" in said:
            raise self._failure(str(said["error"]))
        found = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
        if not found:
            raise self._failure("it made no measurement")
        return dict(found[-1])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise self._failure(f"it ended with exit code {self._process.wait()}: {self._last()}")
        return dict(json.loads(line))

    def _last(self) -> str:
        lines = (self.folder / "log").read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")

    def _failure(self, words: str) -> QuantryError:
        short = " ".join(words.split())[:MESSAGE]
        return QuantryError(f"guidellm could not run the load: {short}", fix="mend that, or measure a smaller load")


@contextmanager
def started(python: Path | None, *, offline: bool) -> Iterator[Guide]:
    """guidellm's process, which ends with all that it started; `offline` where all it reads is on this machine."""
    program = find_python(python)
    with TemporaryDirectory(prefix="quantry-bench-") as name:
        folder = Path(name)
        environment = {**os.environ, **ENVIRONMENT, "HF_DATASETS_CACHE": name, "PYTHONUNBUFFERED": "1"}
        if offline:
            environment["HF_HUB_OFFLINE"] = "1"
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [program, str(SCRIPT)], env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, encoding="utf-8", start_new_session=True,
            )  # fmt: skip
        try:
            yield Guide(process, folder)
        finally:
            _end(process)


def find_python(wanted: Path | None) -> str:
    """The python that has guidellm: the one that is named, or this one."""
    if wanted is None:
        if find_spec("guidellm") is None:
            raise QuantryError("guidellm, which makes the load, is not installed", fix=f"{INSTALL}; {OWN}")
        return sys.executable
    found = shutil.which(wanted)
    if found is None:
        raise QuantryError(f"{wanted} is not a program that can be run", fix="name the python that has guidellm")
    return os.path.abspath(found)  # noqa: PTH100  not resolved: the python of an environment is a link


def _check_version(found: str) -> None:
    low, high = SUPPORTED
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not low <= numbers < high:
        shown = [".".join(map(str, each)) for each in SUPPORTED]
        raise QuantryError(f"guidellm {found} is not {shown[0]} or newer, before {shown[1]}", fix=INSTALL)


def _end(process: "subprocess.Popen[str]") -> None:
    for stream in (process.stdin, process.stdout):
        if stream:
            with suppress(OSError):
                stream.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
