"""Runs guidellm in a separate process, since it pins other versions of packages that Quantry uses too.

One process runs all levels, one scenario each: a scenario of several levels would send the same prompts to every level,
and the engine's prefix cache would answer all but the first. Scenarios go to guidellm over its standard input, so that
an API key appears in no list of processes and in no file.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantry.engines.contract.process_group import ended_with_us
from quantry.errors import QuantryError
from quantry.storage.temporary import temporary_folder

INSTALL = "pip install 'quantry[bench]'"
OWN = "if it is in another environment, name its python with --guidellm-python"
SUPPORTED = ((0, 8), (1, 0))  # the first supported version, and the first unsupported one
SCRIPT = Path(__file__).with_name("guidellm_script.py")
MESSAGE = 300  # characters of its errors that are shown
ENVIRONMENT = {
    "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "WARNING",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # the cores belong to the server
}


class GuidellmProcess:
    """A running guidellm."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process, self.folder = process, folder
        first = self._reply()
        if "missing" in first:
            raise QuantryError(f"guidellm cannot be imported ({first['missing']})", fix=f"{INSTALL}; {OWN}")
        self.version = str(first["version"])
        check_version(self.version)

    def run(self, scenario: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a scenario of one level and returns guidellm's report. Raises QuantryError if guidellm fails or ends."""
        file = self.folder / "report.json"
        file.unlink(missing_ok=True)
        request = {"spec": {**scenario, "outputs": [{"kind": "json", "path": str(file)}]}}
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the process has ended; reading its reply says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        reply = self._reply()
        if "error" in reply:
            raise self._failure(str(reply["error"]))
        benchmarks = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
        if not benchmarks:
            raise self._failure("it measured nothing")
        return dict(benchmarks[-1])

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise self._failure(f"it ended with exit code {self._process.wait()}: {self._last_line()}")
        return dict(json.loads(line))

    def _last_line(self) -> str:
        lines = (self.folder / "log").read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def _failure(self, problem: str) -> QuantryError:
        short = " ".join(problem.split())[:MESSAGE]
        return QuantryError(f"guidellm could not run the load: {short}", fix="fix that, or measure a smaller load")


@contextmanager
def started(python: Path | None, *, offline: bool) -> Iterator[GuidellmProcess]:
    """Starts guidellm and ends it with all its children; `offline` if everything it reads is on this machine.

    Raises QuantryError if guidellm is not installed or not supported.
    """
    program = find_python(python)
    with temporary_folder() as folder:
        environment = {**os.environ, **ENVIRONMENT, "HF_DATASETS_CACHE": str(folder), "PYTHONUNBUFFERED": "1"}
        if offline:
            environment["HF_HUB_OFFLINE"] = "1"
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [program, str(SCRIPT)], env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, encoding="utf-8", start_new_session=True,
            )  # fmt: skip
        with ended_with_us(process), _closed(process):
            yield GuidellmProcess(process, folder)


def find_python(wanted: Path | None) -> str:
    """Returns the python that has guidellm: the given one, or this one. Raises QuantryError if there is none."""
    if wanted is None:
        if find_spec("guidellm") is None:
            raise QuantryError("guidellm, which generates the load, is not installed", fix=f"{INSTALL}; {OWN}")
        return sys.executable
    program = shutil.which(wanted)
    if program is None:
        raise QuantryError(f"{wanted} is not a program that can be run", fix="name the python that has guidellm")
    return os.path.abspath(program)  # noqa: PTH100  not resolved: the python of an environment is a link


def check_version(version: str) -> None:
    """Raises QuantryError if this version of guidellm is not supported."""
    low, high = SUPPORTED
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not low <= numbers < high:
        first, last = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise QuantryError(
            f"guidellm {version} is installed, and Quantry needs {first} or newer, below {last}", fix=INSTALL
        )


@contextmanager
def _closed(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Closes the pipes of a process at the end."""
    try:
        yield
    finally:
        for stream in (process.stdin, process.stdout):
            if stream:
                with suppress(OSError):
                    stream.close()
