"""How far is it from the user's command to the codes? Traces one real job and counts calls, files and rooms.

    python benchmarks/call_path.py [--preset w4a16-gptq]

Calls to the codes: the shortest and the longest stack of Quantry's own functions between the command and the function
that chooses codes column by column. Files: those in which some function ran, importing left out. Changes of room: how
often the next file that a function is first called in lies in another room than the one before. Modules directly in
`src/quantry` are rooms of their own, as a reader has to find each of them.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

CHOOSES = ("feedback", "error_feedback")  # the rooms of the function `choose`, under either name


class Trace:
    """Watches the calls of Quantry's own functions."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}{os.sep}"
        self.files: list[str] = []
        self.depths: list[int] = []
        self.stack: list[str] = []  # of the first call that chooses codes

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(self._package):
            return
        file = self._file(frame)
        if file not in self.files and not self._imports(frame):
            self.files.append(file)
        if frame.f_code.co_name == "choose" and any(room in file for room in CHOOSES):
            names = self._calls(frame)
            self.depths.append(len(names) - 1)
            self.stack = self.stack or names

    def _imports(self, frame: FrameType | None) -> bool:
        """Says if a frame belongs to the import of a module of Quantry: class bodies, tables that are read."""
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(self._package):
                return True
            frame = frame.f_back
        return False

    def _file(self, frame: FrameType) -> str:
        return frame.f_code.co_filename.removeprefix(self._package)

    def _calls(self, frame: FrameType | None) -> list[str]:
        """The functions from the command's to this one; comprehensions and lambdas are part of the one they are in."""
        names: list[str] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(self._package) and not code.co_name.startswith("<"):
                names.insert(0, f"{self._file(frame)}:{code.co_name}")
                if self._file(frame) == "cli/quantize.py" and code.co_name == "command":
                    return names
            frame = frame.f_back
        return names


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    options.add_argument("--preset", default="w4a16-gptq")
    asked = options.parse_args()
    import quantry
    from quantry.cli import main as quantry_main

    trace = Trace(Path(quantry.__file__).parent)
    with tempfile.TemporaryDirectory() as folder, suppress(SystemExit):
        os.environ["QUANTRY_CACHE"] = f"{folder}/cache"
        sys.argv = ["quantry", "quantize", "demo", "-o", f"{folder}/out", "--preset", asked.preset]
        sys.argv += ["--samples", "8", "--length", "128"]
        sys.setprofile(trace)
        try:
            quantry_main()
        finally:
            sys.setprofile(None)
    rooms = [file.partition(os.sep)[0] for file in trace.files]
    print("\n".join(f"{number:3d} {call}" for number, call in enumerate(trace.stack)))
    changes = sum(left != right for left, right in pairwise(rooms))
    figures = {
        "preset": asked.preset,
        "calls to the codes": [min(trace.depths), max(trace.depths)],
        "files": len(trace.files),
        "changes of room": changes,
        "rooms": len(set(rooms)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
