"""An engine as a child process: started, watched until it answers, and stopped with every process it started.

Clients talk to the engine directly. It writes its log into a file itself, so that nothing is lost when it dies and it
never waits for a reader; the log is shown from that file. It has its own process group, which ends with it.
"""

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import BinaryIO, Self, TextIO

from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.boot_log import Facts
from quantry.engines.contract.command import HERE, Command, Step
from quantry.engines.contract.process_group import Watcher, ended_with_us, kill_group
from quantry.errors import QuantryError
from quantry.storage import VARIABLE, home, write_atomically, write_named
from quantry.storage.holding import hold

PORTS = range(1, 65536)
GRACE = 15.0  # seconds between asking an engine to end and ending it
PATIENCE = 1800.0  # seconds until it answers: a large model comes from a slow disk
SHORT, LONG = 0.02, 0.5  # between two looks at it
LAST = 5.0  # seconds for killed processes to be gone
ANSWER = 5.0  # seconds for it to say that it is well
MESSAGE = 400  # characters of its message that are passed on
NO_REASON = re.compile(r"\b(?:INFO|WARNING|DEBUG)\b|^\S+ [IWD] (?=\S)")
REASON = re.compile(r"(?:^|[\s)])(?:[A-Z]\w*(?:Error|Exception)|error|Error|ERROR): |^\S+ E (?=\S)")


class EngineError(QuantryError):
    """An engine does not start, or ends by itself; `log` is the file of its output."""

    def __init__(self, problem: str, *, fix: str, log: Path | None = None, exit_code: int = 2) -> None:
        super().__init__(problem, fix=fix)
        self.log, self.exit_code = log, exit_code


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started, and the address at which it will answer."""

    engine: str
    command: Command
    host: str
    port: int
    health: str  # the path that answers 200 once it serves
    model: str = ""  # the name that requests ask for
    context: int | None = None
    removal: tuple[str, ...] = ()  # a command that ends what outlives its process: a container
    ends_with: tuple[str, ...] = ()  # the word that lets it watch its standard input, and not outlive this process

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which a client on this machine finds it."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else "::1" if self.host == "::" else self.host
        return host.strip("[]"), self.port

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Running:
    """A started engine. It ends with the `with` block, or with `stop`."""

    def __init__(self, launch: Launch, process: "subprocess.Popen[bytes]", log: Path, stream: TextIO | None) -> None:
        self.launch, self.log = launch, log
        self.started = time.monotonic()
        self._process = process
        self._watcher = Watcher(process.pid, launch.removal)
        self._done = Event()
        self._reader = Thread(target=self._pass_on, args=(stream,), daemon=True) if stream else None
        if self._reader:
            self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        """The address before the paths of the API, such as http://127.0.0.1:8080."""
        return self.launch.url

    @property
    def engine(self) -> str:
        return self.launch.engine

    @property
    def model(self) -> str:
        """The name that requests ask for."""
        return self.launch.model

    @property
    def context(self) -> int | None:
        """Tokens of one sequence: as chosen, or as the engine reports."""
        return self.launch.context or self.facts().context

    @property
    def argv(self) -> tuple[str, ...]:
        return self.launch.command.argv

    @property
    def exit_code(self) -> int | None:
        """None while it runs; otherwise its code, 128 and the signal's number if a signal ended it."""
        code = self._poll()
        return code if code is None or code >= 0 else 128 - code

    def healthy(self) -> bool:
        """Returns True if it reports that it is ready."""
        if self._poll() is not None:
            return False
        connection = http.client.HTTPConnection(*self.launch.address, timeout=ANSWER)
        try:
            connection.request("GET", self.launch.health)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for its end and returns the exit code; None if it still runs after `timeout` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
            self._finish()
        return self.exit_code

    def stop(self, grace: float = GRACE) -> int:
        """Asks it to end, kills it with all its processes after `grace` seconds, and returns the exit code."""
        try:
            if self._poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace)
        finally:
            self._finish()
        code = self.exit_code
        assert code is not None
        return code

    def facts(self) -> Facts:
        """Reads the facts from its log so far."""
        return adapter(self.engine).facts(self.lines())

    def lines(self) -> list[str]:
        """Returns its log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []

    def death(self) -> EngineError:
        """Returns the error for an engine that has ended by itself."""
        code = self._process.returncode
        ending = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        after = time.monotonic() - self.started
        words = reason(self.lines(), guess=code > 0)
        return EngineError(
            f"{self.engine} (process {self.pid}) {ending} after {after:.1f} s{': ' + words if words else ''}",
            fix=f"its log is {self.log}",
            log=self.log,
            exit_code=self.exit_code or 1,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _poll(self) -> int | None:
        """Returns its code once it has ended; then ends what it started, before the group's number can be reused."""
        code = self._process.poll()
        if code is not None:
            self._finish()
        return code

    def _finish(self) -> None:
        """Ends what is left of its group and shows the rest of the log; does so once."""
        if self._done.is_set():
            return
        kill_group(self._process.pid)
        self._process.wait()
        self._watcher.dismiss()
        _await_empty(self._process.pid)
        if self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
        self._done.set()
        if self._reader:
            self._reader.join(LONG * 4)
        if self.launch.removal:
            quiet = subprocess.DEVNULL
            subprocess.run(self.launch.removal, stdin=quiet, stdout=quiet, stderr=quiet, check=False)

    def _pass_on(self, stream: TextIO) -> None:
        with self.log.open(encoding="utf-8", errors="replace") as file, suppress(OSError, ValueError):
            while True:
                ended = self._done.is_set()  # asked before the read: what was written until then is still shown
                if text := file.read():
                    stream.write(text)
                    stream.flush()
                elif ended:
                    return
                else:
                    self._done.wait(SHORT * 5)


def start(
    launch: Launch,
    *,
    log: Path | None = None,
    stream: TextIO | None = None,
    patience: float = PATIENCE,
    tell: Callable[[str], None] | None = None,
) -> Running:
    """Starts an engine and waits until it answers; its log goes to the file `log`, and to `stream` if one is given.

    Runs the steps before and after it on this machine as well; `tell` gets a line before each. Raises EngineError if
    the engine or a step ends with an error, or the engine does not answer in `patience` seconds.
    """
    check_patience(patience)
    check_port(launch.host, launch.port)
    folder = _folder(log, launch)
    file = log or folder / "engine.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **launch.command.env}
    place = _with_files(launch.command, folder)
    with _log(file) as output:
        for step in launch.command.steps:
            _run_step(step, environment, place, file, output, tell)
        stdin = subprocess.PIPE if launch.ends_with else subprocess.DEVNULL
        process = _popen((*launch.command.argv, *launch.ends_with), environment, place, output, stdin)
        running = Running(launch, process, file, stream)
        _hold(running, folder)
    try:
        _await(running, patience)
        with file.open("ab") as output:
            for step in launch.command.after:
                _run_step(step, environment, place, file, output, tell)
    except BaseException:
        running.stop()
        raise
    return running


def check_patience(seconds: float) -> None:
    """Raises QuantryError for a patience that no engine can meet."""
    if not 0 < seconds < float("inf"):
        raise QuantryError(f"a patience of {seconds:g} seconds", fix="give seconds above 0, such as 600")


def check_port(host: str, port: int) -> None:
    """Raises QuantryError, with the next free port, if something listens on the port already."""
    if port not in PORTS:
        raise QuantryError(f"port {port} is not one of 1 to 65535", fix="leave --port out for the engine's usual one")
    if why := _taken(host, port):
        other = next((number for number in range(port + 1, PORTS.stop) if not _taken(host, number)), None)
        fix = f"use --port {other}" if other else "stop what listens there"
        raise QuantryError(f"port {port} of {host} cannot be used: {why}", fix=fix)


def free_port(host: str) -> int:
    """Returns a port that nothing listens on."""
    with _bound(host, 0) as probe:
        return int(probe.getsockname()[1])


def reason(lines: Sequence[str], guess: bool = True) -> str:
    """Returns the line of a log that says what went wrong: the first error, since later ones follow from it.

    A log without errors gives its last line if `guess` is set, else an empty text.
    """
    stripped = [line.strip() for line in lines if line.strip()]
    errors = (line for line in stripped if REASON.search(line) and not NO_REASON.search(line))
    line = next(errors, stripped[-1] if stripped and guess else "")
    return line if len(line) <= MESSAGE else line[: MESSAGE - 3] + "..."


def _taken(host: str, port: int) -> str | None:
    """Returns why a server could not listen there, None if it could."""
    try:
        with _bound(host, port):
            return None
    except OSError as error:
        return (error.strerror or str(error)).lower()


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: only listeners are in the way
        try:
            probe.bind((host.strip("[]"), port))
        except socket.gaierror as error:
            raise QuantryError(f"{host} is no address: {error.strerror}", fix="use 127.0.0.1") from error
        yield probe


def _folder(log: Path | None, launch: Launch) -> Path:
    """Creates the folder of the log and the files: one for each engine and port, reused by the next start."""
    folder = log.parent if log else home() / "serving" / f"{launch.engine}-{launch.port}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantryError(f"cannot write to {folder}: {error.strerror}", fix=f"set {VARIABLE} to a folder") from error
    return folder


def _hold(running: Running, folder: Path) -> None:
    """Keeps what the engine uses in the cache from being cleared: its folder, and a model that it has built there."""
    for path in (folder, *map(Path, running.argv)):
        if home() in path.parents and path.is_dir():
            hold(path, running)


@contextmanager
def _log(file: Path) -> Iterator[BinaryIO]:
    try:
        write_named(file, b"")  # a new file: another may have put a link there
        output = file.open("ab")
    except OSError as error:
        raise QuantryError(f"cannot write {file}: {error.strerror}", fix="give --log another file") from error
    with output:
        yield output


def _with_files(command: Command, folder: Path) -> Path | None:
    """Writes the files of a command and returns the folder to start it in; None (the current one) without files."""
    for name, text in command.files.items():
        write_atomically(folder / name, text.encode())
    return folder if command.files else None


def _run_step(
    step: Step,
    environment: dict[str, str],
    place: Path | None,
    file: Path,
    output: BinaryIO,
    tell: Callable[[str], None] | None,
) -> None:
    """Runs a step of this machine in its own process group; steps elsewhere are left to the user."""
    if step.where != HERE:
        return
    if tell:
        tell(step.why)
    with ended_with_us(_popen(step.argv, environment, place, output, subprocess.DEVNULL)) as process:
        code = process.wait()
    if code:
        words = reason(file.read_text(encoding="utf-8", errors="replace").splitlines())
        raise EngineError(
            f"{step.argv[0]} ended with exit code {code} ({step.why}): {words}", fix=f"its log is {file}", log=file
        )


def _popen(
    argv: Sequence[str], environment: dict[str, str], place: Path | None, output: BinaryIO, stdin: int
) -> "subprocess.Popen[bytes]":
    if shutil.which(argv[0], path=environment.get("PATH")) is None:
        raise EngineError(f"{argv[0]} is not a program that can be run", fix="install it, or name it by its path")
    return subprocess.Popen(
        argv, env=environment, cwd=place, stdin=stdin, stdout=output, stderr=output, start_new_session=True
    )


def _await(running: Running, patience: float) -> None:
    """Waits until it is healthy; looks often at first, since a small model loads at once."""
    pause = SHORT
    while not running.healthy():
        if running.exit_code is not None:
            error = running.death()
            error.exit_code = EngineError.exit_code  # it never served: what was asked for cannot be done
            raise error
        if time.monotonic() - running.started > patience:
            raise EngineError(
                f"{running.engine} does not answer at {running.url}{running.launch.health} after {patience:.0f} s: "
                f"{reason(running.lines())}",
                fix=f"give it longer with --patience; its log is {running.log}",
                log=running.log,
            )
        running.wait(pause)  # its death ends the pause
        pause = min(pause * 1.3, LONG)


def _await_empty(group: int) -> None:
    """Waits until the last of a killed group is gone, and with it its memory and ports; that takes a moment."""
    end = time.monotonic() + LAST
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(SHORT)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
