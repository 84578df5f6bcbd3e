"""An engine in a process of its own: the request goes through a folder, its words come back line by line."""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, Any

import numpy as np

from quantry.errors import ModelNotFoundError, QuantryError
from quantry.proof.divergence import Array, Scores
from quantry.proof.served import Served
from quantry.proof.text import Window
from quantry.types import Progress

SCRIPT = Path(__file__).parent / "inside" / "engines.py"
MARK = "@quantry "
PATIENCE = 900.0  # seconds without a line: a large checkpoint may load from a slow disk for minutes between two
KERNEL = re.compile(r"\b(?:Using|Selected) \w*Kernel\w* for [A-Z]\w+")  # as vLLM tells what it computes with
TELLING = re.compile(r"[\w.]*(Error|Exception)\b")  # how the last line of Python begins
MESSAGE = 400  # characters of an engine's message that are passed on
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Engine:
    """An engine that is installed in some python: how it is found, and what to do if it is not."""

    name: str
    module: str
    install: str
    environment: Mapping[str, str] = field(default_factory=dict)  # where the user's has nothing to say

    def score(
        self,
        artefact: Path,
        windows: Sequence[Window],
        ids: Sequence[Array],
        *,
        python: Path | None = None,
        length: int | None = None,
        progress: Progress | None = None,
        options: Mapping[str, Any] | None = None,
        patience: float = PATIENCE,
    ) -> Served:
        """What the engine says of every window; `options` are arguments of its own loader."""
        if not windows:
            raise QuantryError("there is no window to score", fix="give at least one")
        longest = max(length or 0, *(len(window.tokens) for window in windows))
        work = Work(Path(artefact), longest, windows, ids, options=options or {})
        found = self._run(work, python, progress, patience)
        return Served(self.name, found.version, found.scores, found.memory, found.notes)

    def generate(
        self,
        artefact: Path,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        python: Path | None = None,
        options: Mapping[str, Any] | None = None,
        patience: float = PATIENCE,
    ) -> list[list[int]]:
        """What the engine writes after every prompt."""
        if not prompts or max_tokens < 1:
            return [[] for _ in prompts]
        longest = max(len(prompt) for prompt in prompts) + max_tokens
        work = Work(Path(artefact), longest, prompts=prompts, max_tokens=max_tokens, options=options or {})
        return self._run(work, python, None, patience).answers

    def missing(self, python: str) -> QuantryError:
        return QuantryError(
            f"{self.name} is not installed for {python}",
            fix=f"{self.install}; if it has an environment of its own, name its python with --engine-python",
        )

    def python(self, wanted: Path | None) -> str:
        """The program that has the engine: the one that is wanted, or this one."""
        if wanted is None:
            if find_spec(self.module) is None:
                raise self.missing(sys.executable)
            return sys.executable
        found = shutil.which(wanted)
        if found is None:
            raise QuantryError(
                f"{wanted} is not a program that can be run", fix=f"name the python that has {self.name}"
            )
        return os.path.abspath(found)  # noqa: PTH100  not resolved: the python of an environment is a link

    def _run(self, work: "Work", python: Path | None, progress: Progress | None, patience: float) -> "Result":
        """Starts the engine on the work, and waits for it as long as it says something."""
        if not work.artefact.is_dir():
            raise ModelNotFoundError(f"{work.artefact} is not a folder", fix=f"{self.name} loads one with config.json")
        listener = _Listener(self, self.python(python), work, progress)
        with TemporaryDirectory(prefix="quantry-served-") as name:
            folder = Path(name)
            work.write(folder)
            command = [listener.program, str(SCRIPT), self.module, str(folder)]
            with _started(command, folder, {**self.environment, **os.environ, **ENVIRONMENT}) as process:
                _follow(process, listener, patience)
            if not (folder / "result.json").exists():
                raise listener.failure(f"it ends without a result: {listener.last()}")
            return work.read(folder, listener.kernels)


@dataclass(frozen=True)
class Work:
    """What is asked of an engine: windows to score, prompts to answer, or both."""

    artefact: Path
    length: int
    windows: Sequence[Window] = ()
    ids: Sequence[Array] = ()
    prompts: Sequence[Sequence[int]] = ()
    max_tokens: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        request = {
            "model": str(self.artefact.resolve()), "length": self.length, "windows": len(self.windows),
            "prompts": [list(map(int, prompt)) for prompt in self.prompts], "max_tokens": self.max_tokens,
            "options": dict(self.options),
        }  # fmt: skip
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        for number, (window, ids) in enumerate(zip(self.windows, self.ids, strict=True)):
            places = ids if ids.strides[0] else ids[:1]  # one row that stands for all
            np.savez(folder / f"window-{number}.npz", tokens=window.tokens, start=window.start, ids=places)

    def read(self, folder: Path, notes: Iterable[str]) -> "Result":
        told = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        scores = []
        for number in range(len(self.windows)):
            with np.load(folder / f"scored-{number}.npz") as stored:
                scores.append(Scores(logq=stored["logq"], next=stored["next"], top=stored["top"]))
        return Result(told["version"], told["memory"], (*told["notes"], *notes), scores, told["answers"])


@dataclass(frozen=True)
class Result:
    """What came back."""

    version: str
    memory: dict[str, int]
    notes: tuple[str, ...]
    scores: list[Scores]
    answers: list[list[int]]


class _Listener:
    """What a process has said so far."""

    def __init__(self, engine: Engine, program: str, work: Work, progress: Progress | None) -> None:
        self.engine, self.program, self.progress = engine, program, progress
        self.ends = np.cumsum([0, *(len(window.tokens) for window in work.windows)]).tolist()
        self.lines: deque[str] = deque(maxlen=400)
        self.kernels: dict[str, None] = {}  # in the order they were told of
        self.error: QuantryError | None = None

    def hear(self, line: str) -> None:
        if line.startswith(MARK):
            self._told(json.loads(line.removeprefix(MARK)))
        elif line.strip():
            self.lines.append(line.strip())
            self.kernels |= dict.fromkeys(KERNEL.findall(line))

    def _told(self, words: Mapping[str, Any]) -> None:
        if "error" in words:
            gone = words["missing"] == self.engine.module
            self.error = self.engine.missing(self.program) if gone else self.failure(words["error"])
        elif self.progress:
            self.progress(self.ends[words["windows"]], self.ends[-1], self.engine.name)

    def failure(self, reason: str) -> QuantryError:
        reason = " ".join(reason.split())
        cut = reason if len(reason) <= MESSAGE else reason[: MESSAGE - 3] + "..."
        return QuantryError(
            f"{self.engine.name} fails: {cut}", fix=f"try the model in {self.engine.name} alone, with {self.program}"
        )

    def last(self) -> str:
        """The last line that tells something."""
        errors = [line for line in self.lines if TELLING.match(line)]
        return (errors or list(self.lines) or ["it says nothing"])[-1]


@contextmanager
def _started(command: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """The process, in a group of its own that ends with the block, whatever happens in it.

    Its standard input stays open and empty: the script ends when that does, should this process be killed.
    """
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8", errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also those that the engine started and left behind
        process.wait()
        if process.stdin:
            process.stdin.close()


def _follow(process: "subprocess.Popen[str]", listener: _Listener, patience: float) -> None:
    """Hears the process out; an error if it fails, or is silent for too long."""
    assert process.stdout is not None
    said: queue.Queue[str] = queue.Queue()
    Thread(target=_pass_on, args=(process.stdout, said), daemon=True).start()
    heard = time.monotonic()
    while True:
        try:
            listener.hear(said.get(timeout=min(0.5, patience)))
            heard = time.monotonic()
        except queue.Empty:
            if process.poll() is not None:
                break
            if time.monotonic() - heard > patience:
                raise listener.failure(f"no word for {patience:.0f} s, the last was: {listener.last()}") from None
    if listener.error:
        raise listener.error
    if process.returncode:
        raise listener.failure(f"{_ending(process.returncode)}: {listener.last()}")


def _pass_on(stream: IO[str], said: "queue.Queue[str]") -> None:
    """A pipe cannot be read with a time limit, a queue can; it ends when the last process lets go of the pipe."""
    with stream:
        for line in stream:
            said.put(line)


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
