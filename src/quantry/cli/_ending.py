"""How a command ends: with its exit code, and one line on standard error if something is wrong.

| exit code | means |
|---|---|
| 0 | done |
| 1 | a gate, a limit or a row failed |
| 2 | an error of the input, the options or the machine, which its line explains |
| 70 | a bug; the line names a file with the traceback, to be reported |
| 130, 141 | interrupted; the reader of the output has gone |
| 129, 143 | ended by SIGHUP or SIGTERM |
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import typer

from quantry.cli._usage import usage_line
from quantry.errors import QuantryError

STOPPED = 1  # a question was answered by the end of the input
ERROR, BUG, INTERRUPTED, NO_READER = QuantryError.exit_code, 70, 130, 141
NO_MEMORY = (  # words of torch, numpy and Python
    "can't allocate memory", "out of memory", "unable to allocate", "cannot allocate memory", "can't start new thread",
)  # fmt: skip


@contextmanager
def ending() -> Iterator[None]:
    """Turns whatever escapes a command into its line and exit code."""
    try:
        yield
        sys.stdout.flush()
    except BaseException as error:
        if isinstance(error, SystemExit | GeneratorExit | typer.Exit):
            raise
        _end(error)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into exceptions, like SIGINT, so that every open `with` stops what it started."""
    if threading.current_thread() is not threading.main_thread():  # of a program that calls us; it has the signals
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    old = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def forgiving_output() -> None:
    """Replaces characters that the encoding of the output lacks, such as the marks of a table in latin-1."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a stream of a program that calls us
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _end(error: BaseException) -> NoReturn:
    if isinstance(error, KeyboardInterrupt):
        _leave("interrupted; started again, a job continues where it stopped", INTERRUPTED)
    if isinstance(error, typer.Abort):
        _leave("stopped", STOPPED)
    if hasattr(error, "format_message"):  # an error of typer
        _leave(f"error: {usage_line(error, sys.argv[1:])}", ERROR)
    if isinstance(error, QuantryError):
        _leave(f"error: {error}", error.exit_code)
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        _leave("", NO_READER)
    if words := _of_the_machine(error):
        _leave(f"error: {words}", ERROR)
    from quantry.cli._bug_report import save

    _leave(f"bug: {save(error)}", BUG)


def _of_the_machine(error: BaseException) -> str:
    """Returns the line of an error that the machine causes, not the program: its disk, memory or permissions."""
    if isinstance(error, OSError) and error.errno is not None:
        what = f"{error.filename}: " if error.filename else ""
        return f"{what}{error.strerror or type(error).__name__}; free space, or check the path and its permissions"
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in NO_MEMORY):
        asked = " ".join(str(error).split())[:160]
        return (
            f"there is not enough memory ({asked or 'no size is known'}); free some, or check the sizes in config.json"
        )
    return ""


def _leave(line: str, code: int) -> NoReturn:
    if line:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr)
    _drop_unwritten()
    raise SystemExit(code)


def _drop_unwritten() -> None:
    """Lets go of output that cannot be written: the interpreter would try again at its end, and exit with 120."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
