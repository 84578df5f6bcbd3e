"""Loads a GGUF file in a process of its own first: where llama.cpp finds a contradiction it aborts the process.

Its checks (GGML_ASSERT) and C++ exceptions that no C function catches end the process with signal 6, often in one of
its threads, and nothing in Python can catch that. So a file that was never loaded is tried where only the trial is
lost.

    python -m quantry.llamacpp.trial LIBRARY FILE
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from quantry.errors import CheckpointError, QuantryError

TOKENS = (0, 1, 2, 3)  # enough for every operation of the graph


def check_loads(file: Path) -> None:
    """Raises CheckpointError if llama.cpp ends the process that loads a file and reads a few tokens.

    What llama.cpp refuses in words is left to whoever loads the file.
    """
    facts = file.stat()
    if problem := _problem(file, facts.st_size, facts.st_mtime_ns):
        raise CheckpointError(
            f"llama.cpp aborts when it loads {file}: {problem}", fix="check config.json, and write the file again"
        )


@cache
def _problem(file: Path, size: int, modified: int) -> str:
    """Returns the last words of a process that a signal ended; empty if none did. Size and date name the version."""
    from quantry.numerics.ggml.native import library

    done = subprocess.run(
        [sys.executable, "-P", "-m", "quantry.llamacpp.trial", library()._name, str(file)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )  # fmt: skip
    if done.returncode >= 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in lines if "ASSERT" in line or "what()" in line), lines[-1] if lines else "")
    return f"signal {-done.returncode}" + (f", {reason[-160:]}" if reason else "")


def main(words: Sequence[str]) -> int:
    """Loads the file and reads the tokens; the result is that this process still lives."""
    from quantry.llamacpp.model import LlamaModel, declared

    path, file = words
    try:
        with LlamaModel(file, context=64, threads=1, library=declared(ctypes.CDLL(path))) as model:
            model.logits(TOKENS)
    except QuantryError:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
