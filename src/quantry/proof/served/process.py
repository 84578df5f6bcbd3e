"""An engine in its own process: the request goes through a folder, its messages come back line by line."""

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import IO, Any

import numpy as np

from quantry.engines.contract.catalogue import VerifyFacts
from quantry.engines.contract.process_group import ended_with_us
from quantry.errors import ModelNotFoundError, QuantryError
from quantry.proof.divergence import Array, Positions, Scores, TopK, compare, is_whole
from quantry.proof.served.contract import Served, ServedCaches
from quantry.proof.text import Window
from quantry.report.stages import stages
from quantry.storage.temporary import temporary_folder
from quantry.types import Progress

SCRIPT = Path(__file__).parent / "inside" / "script.py"
MARK = "@quantry "
FIND = "import sys; from importlib.util import find_spec; sys.exit(find_spec(sys.argv[1]) is None)"
PATIENCE = 900.0  # seconds without a line: a large checkpoint may load from a slow disk for minutes between two
ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\b")  # how the last line of a Python traceback starts
MESSAGE = 400  # characters of an engine's message that are shown
KEPT = 256  # likeliest tokens of a position that caches are compared on; 32k positions take 64 MB
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class EngineProcess:
    """A `ScoringEngine` that is installed in some python; each request runs in a new process."""

    facts: VerifyFacts
    scorer: Path  # the file with the engine's class `Scorer`
    python: Path | None = None  # None: this python
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine's loader
    patience: float = PATIENCE

    def score(
        self, artefact: Path, windows: Sequence[Window], ids: Sequence[Array], *, progress: Progress | None = None
    ) -> Served:
        if not windows:
            raise QuantryError("there is no window to score", fix="give at least one")
        longest = max(len(window.tokens) for window in windows)
        result = self._run(ScoringRequest(artefact, longest, windows, ids, options=self.options), progress)
        return Served(self.facts.label, result.version, result.scores, result.memory, result.notes)

    def compare_caches(
        self,
        artefact: Path,
        windows: Sequence[Window],
        base: str,
        caches: Sequence[str],
        *,
        progress: Progress | None = None,
    ) -> ServedCaches:
        """Starts the engine once for each cache: a cache is chosen when it starts."""
        longest = max(len(window.tokens) for window in windows)
        shown = stages(progress, dict.fromkeys(("", *caches), 1.0))
        asked = ScoringRequest(artefact, longest, windows, options=self.options, cache=base, kept=KEPT)
        first = self._run(asked, shown[""])
        ids = [top.ids for top in first.tops]
        compared: dict[str, list[Positions]] = {}
        for cache in caches:
            request = ScoringRequest(artefact, longest, windows, ids, options=self.options, cache=cache)
            scores = self._run(request, shown[cache]).scores
            compared[cache] = [compare(top, found) for top, found in zip(first.tops, scores, strict=True)]
        note = f"of each position the {ids[0].shape[1]} likeliest tokens are compared, and the others as one"
        return ServedCaches(self.facts.label, first.version, compared, (note,))

    def generate(self, artefact: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        if not prompts or max_tokens < 1:
            return [[] for _ in prompts]
        longest = max(len(prompt) for prompt in prompts) + max_tokens
        request = ScoringRequest(artefact, longest, prompts=prompts, max_tokens=max_tokens, options=self.options)
        return self._run(request, None).answers

    def check(self) -> None:
        """Raises QuantryError if the python does not have the engine."""
        program = self.program()
        if self.python is not None and subprocess.run([program, "-c", FIND, self.facts.module], check=False).returncode:
            raise self.not_installed(program)

    def not_installed(self, python: str) -> QuantryError:
        return QuantryError(
            f"{self.facts.label} is not installed for {python}",
            fix=f"{self.facts.install}; if it is in another environment, name its python with --engine-python",
        )

    def program(self) -> str:
        """Returns the python that has the engine. Raises QuantryError if there is none."""
        if self.python is None:
            if find_spec(self.facts.module) is None:
                raise self.not_installed(sys.executable)
            return sys.executable
        program = shutil.which(self.python)
        if program is None:
            raise QuantryError(
                f"{self.python} is not a program that can be run", fix=f"name the python that has {self.facts.label}"
            )
        return os.path.abspath(program)  # noqa: PTH100  not resolved: the python of an environment is a link

    def _run(self, request: "ScoringRequest", progress: Progress | None) -> "ScoringResult":
        """Starts the engine on a request, and waits as long as it sends lines."""
        if not request.artefact.is_dir():
            raise ModelNotFoundError(
                f"{request.artefact} is not a folder", fix=f"{self.facts.label} loads one with config.json"
            )
        listener = _Listener(self, self.program(), request, progress)
        with temporary_folder() as folder:
            request.write(folder)
            command = [listener.program, str(SCRIPT), self.facts.module, str(self.scorer), str(folder)]
            with _started(command, folder, {**self.facts.environment, **os.environ, **ENVIRONMENT}) as process:
                _listen(process, listener, self.patience)
            if not (folder / "result.json").exists():
                raise listener.failure(f"it ends without a result: {listener.last_line()}")
            return request.read(folder, listener.kernels)


@dataclass(frozen=True)
class ScoringRequest:
    """The request to an engine: windows to score, prompts to answer, or both."""

    artefact: Path
    length: int
    windows: Sequence[Window] = ()
    ids: Sequence[Array] = ()
    prompts: Sequence[Sequence[int]] = ()
    max_tokens: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None  # the type of the KV cache; None: the engine's choice
    kept: int = 0  # without `ids`: the likeliest tokens of a position that the engine keeps

    def write(self, folder: Path) -> None:
        """Writes the files that the script reads."""
        request = {
            "model": str(self.artefact.resolve()), "length": self.length, "windows": len(self.windows),
            "prompts": [list(map(int, prompt)) for prompt in self.prompts], "max_tokens": self.max_tokens,
            "options": dict(self.options), "cache": self.cache,
        }  # fmt: skip
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        for number, window in enumerate(self.windows):
            wanted: dict[str, Any] = {"kept": np.array(self.kept)} if self.kept else {"ids": _one_row(self.ids[number])}
            np.savez(folder / f"window-{number}.npz", tokens=window.tokens, start=window.start, **wanted)

    def read(self, folder: Path, notes: Iterable[str]) -> "ScoringResult":
        """Reads the files that the script wrote."""
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        scores, tops = list[Scores](), list[TopK]()
        for number in range(len(self.windows)):
            with np.load(folder / f"scored-{number}.npz") as stored:
                if self.kept:
                    names = ("ids", "logq", "tail", "next", "top")
                    tops.append(TopK(*(stored[name] for name in names)))
                else:
                    scores.append(Scores(logq=stored["logq"], next=stored["next"], top=stored["top"]))
        told = (*result["notes"], *notes)
        return ScoringResult(result["version"], result["memory"], told, scores, tops, result["answers"])


def _one_row(ids: Array) -> Array:
    """Returns ids as they are stored: one row where it stands for all."""
    return ids[:1] if is_whole(ids) else ids


@dataclass(frozen=True)
class ScoringResult:
    """What the script wrote."""

    version: str
    memory: dict[str, int]
    notes: tuple[str, ...]
    scores: list[Scores]
    tops: list[TopK]  # in place of scores where the engine kept its own likeliest tokens
    answers: list[list[int]]


class _Listener:
    """Keeps what a process has printed: messages of the script, lines of the engine."""

    def __init__(self, engine: EngineProcess, program: str, request: ScoringRequest, progress: Progress | None) -> None:
        self.engine, self.program, self.progress = engine, program, progress
        self.ends = np.cumsum([0, *(len(window.tokens) for window in request.windows)]).tolist()
        self.lines: deque[str] = deque(maxlen=400)
        self.kernels: dict[str, None] = {}  # in the order of the log
        self.error: QuantryError | None = None

    def hear(self, line: str) -> None:
        if line.startswith(MARK):
            self._take(json.loads(line.removeprefix(MARK)))
        elif line.strip():
            self.lines.append(line.strip())
            self.kernels |= dict.fromkeys(re.findall(self.engine.facts.kernels, line))

    def _take(self, message: Mapping[str, Any]) -> None:
        if "error" in message:
            missing = message["missing"] == self.engine.facts.module
            self.error = self.engine.not_installed(self.program) if missing else self.failure(message["error"])
        elif self.progress:
            self.progress(self.ends[message["windows"]], self.ends[-1], self.engine.facts.label)

    def failure(self, reason: str) -> QuantryError:
        text, label = " ".join(reason.split()), self.engine.facts.label
        short = text if len(text) <= MESSAGE else text[: MESSAGE - 3] + "..."
        return QuantryError(f"{label} fails: {short}", fix=f"try the model in {label} alone, with {self.program}")

    def last_line(self) -> str:
        """Returns the last error of the log, or its last line."""
        errors = [line for line in self.lines if ERROR_LINE.match(line)]
        return (errors or list(self.lines) or ["it says nothing"])[-1]


@contextmanager
def _started(command: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """Starts a process in a new group, and kills the group at the end of the block.

    Its standard input stays open and empty: the script ends when that closes, even if this process is killed.
    """
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8", errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    with process.stdin, ended_with_us(process):  # with children that the engine left behind
        yield process


def _listen(process: "subprocess.Popen[str]", listener: _Listener, patience: float) -> None:
    """Reads the lines of a process to its end. Raises QuantryError if it fails, or is silent for too long."""
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    Thread(target=_pass_on, args=(process.stdout, lines), daemon=True).start()
    heard = time.monotonic()
    while True:
        try:
            listener.hear(lines.get(timeout=min(0.5, patience)))
            heard = time.monotonic()
        except queue.Empty:
            if process.poll() is not None:
                break
            if time.monotonic() - heard > patience:
                raise listener.failure(
                    f"no output for {patience:.0f} s, the last was: {listener.last_line()}"
                ) from None
    if listener.error:
        raise listener.error
    if code := process.returncode:
        ending = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise listener.failure(f"{ending}: {listener.last_line()}")


def _pass_on(stream: IO[str], lines: "queue.Queue[str]") -> None:
    """Moves lines from a pipe, which has no timeout, to a queue, until the last process closes the pipe."""
    with stream:
        for line in stream:
            lines.put(line)
