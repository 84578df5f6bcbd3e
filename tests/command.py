"""The command line in this process: what it prints and its exit code, without the seconds that imports take."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from quantry.cli import main


def command(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    argv = ["quantry", *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())
