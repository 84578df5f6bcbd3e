"""The command line: in this process, or as a process of its own where that matters (seconds of imports each)."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from quantry.cli import main

Completed = subprocess.CompletedProcess[str]
ENVIRONMENT = {"COLUMNS": "100", "HF_HUB_OFFLINE": "1"}


def command(*words: str | Path, stdin: str = "") -> Completed:
    """Runs `quantry WORDS` in this process."""
    argv = ["quantry", *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", argv),
        patch.object(sys, "stdin", io.StringIO(stdin)),
        patch.dict(os.environ, ENVIRONMENT),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def process(*words: str | Path, env: dict[str, str] | None = None) -> Completed:
    """Runs `quantry WORDS` as a process."""
    return subprocess.run(
        [sys.executable, "-m", "quantry", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ENVIRONMENT, **(env or {})},
    )


def imported(*words: str | Path) -> set[str]:
    """Returns the top-level packages that a run of `quantry WORDS` imports."""
    code = (
        "import sys; from quantry.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('MODULES', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("MODULES ")[2].split())
