"""Asking servers on this machine, and watching their processes."""

import http.client
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantry.serving.process import Running

STORY = "Once upon a time there was a little girl named Lily. She"


def complete(running: Running, prompt: str = STORY, tokens: int = 24, key: str = "none", **options: Any) -> str:
    """What the model writes, the likeliest token each time."""
    request = {"model": running.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **options}
    status, text, _ = post(running, "/v1/completions", request, Authorization=f"Bearer {key}")
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["text"])


def post(running: Running, path: str, content: object, **headers: str) -> tuple[int, str, dict[str, str]]:
    body = json.dumps(content).encode()
    return send(running, "POST", path, body, **{"Content_Type": "application/json", **headers})


def get(running: Running, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    return send(running, "GET", path, None, **headers)


def send(
    running: Running, method: str, path: str, body: bytes | None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*running.launch.address, timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def metric(running: Running, name: str) -> float:
    lines = get(running, "/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"llamacpp:{name} "))


def until(what: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
