"""Chat templates: rendered in another process with limits, since a template is a program that came with a model.

One such process renders for as long as this one runs; it is started when the first chat is rendered.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from quantry.errors import QuantryError

SCRIPT = Path(__file__).parent / "inside" / "render_chats.py"
SECONDS = 5  # of processor time for one chat; templates that people use take milliseconds
PATIENCE = 120  # seconds for the same on a machine that is busy, and for the start of the process
MEMORY = 1 << 30  # bytes, of which Python and the library take a fifth
ROOM, SHARE = 100_000, 4  # characters of a text: a fixed number, and so many for each character of the messages
REPLACE = "replace the model's chat template with that of a model you trust"

Messages = Sequence[Mapping[str, Any]]


class TemplateRefusalError(QuantryError):
    """A chat template raises an error; `reason` is its first line."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"the model's chat template rejects the messages: {reason}",
            fix='alternate the roles user and assistant, each with its content, or give plain "text"',
        )


class TemplateLimitError(QuantryError):
    """A chat template takes more time or memory, or gives a longer text, than any honest one."""


def render(template: str, messages: Messages, variables: Mapping[str, str], *, generation: bool = False) -> str:
    """Renders messages with a chat template; with `generation` up to where the answer begins.

    `variables` are the texts of special tokens, such as bos_token. Raises TemplateRefusalError if the template raises
    an error, and TemplateLimitError if it goes beyond a limit.
    """
    return _renderer(os.getpid()).render(template, messages, variables, generation=generation)


@cache
def _renderer(_pid: int) -> "Renderer":
    """Returns the renderer of a process; a forked one has its own."""
    renderer = Renderer()
    atexit.register(renderer.close)
    return renderer


class Renderer:
    """A process that renders chats, each within `seconds` of processor time and `memory` bytes in all.

    A new one is started after one has died. With a `folder` of ONNX Runtime GenAI that library renders, with the
    folder's own template.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY, folder: Path | None = None) -> None:
        self._seconds, self._memory = seconds, memory
        self._words = [str(SCRIPT), str(memory), str(seconds), *([str(folder)] if folder else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def render(self, template: str, messages: Messages, variables: Mapping[str, str], *, generation: bool) -> str:
        """Renders messages, as the function `render` does."""
        turns = [dict(message) for message in messages]
        most = ROOM + SHARE * len(json.dumps(turns, ensure_ascii=False))
        request = {"template": template, "messages": turns, "variables": dict(variables), "generation": generation}
        answer = self._ask({**request, "most": most})
        if "refused" in answer:
            raise TemplateRefusalError(answer["refused"])
        if "limit" in answer:
            beyond = {
                "text": f"gives more than {most:,} characters",
                "memory": f"needs more than {self._memory >> 20:,} MiB of memory",
                "time": f"takes more than {self._seconds:g} s",
            }.get(answer["limit"], answer["limit"])
            raise TemplateLimitError(f"the model's chat template {beyond} for one chat", fix=REPLACE)
        return answer["text"]

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # nothing happens to one that has ended
            process.communicate()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Returns the answer of the process, or the limit that ended it."""
        with self._lock:
            process = self._started()
            line = _exchange(process, json.dumps(request).encode() + b"\n")
            answer: dict[str, str] = json.loads(line) if line else {}
            if not line or answer.get("limit") == "memory":
                self.close()
            if line:
                return answer
            ended = {-signal.SIGPROF: "time", -signal.SIGKILL: "time"}
            return {"limit": ended.get(process.returncode, f"ends its process (exit code {process.returncode})")}

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, *self._words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return self._process


def _exchange(process: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    """Returns the line that answers a request; nothing if the process has died or is silent."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except OSError:
        return b""
    ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
    return process.stdout.readline() if ready else b""
