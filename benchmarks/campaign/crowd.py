"""Ten minutes of 64 clients on the embedded server: ordinary ones, slow, vanishing and hostile ones.

An ordinary request is sent all the time by one more client: each must be answered. At the end the server lives,
answers, and its memory has returned.
"""

import http.client
import json
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Semaphore, Thread
from typing import Any

from campaign.jobs import DEMO
from quantry.serving.prepare import serve
from quantry.serving.process import Running

CLIENTS = 64
CLASSES = ("died", "ordinary request failed", "silent at the end", "memory kept", "hostile request hung")
WAIT = 120.0  # seconds for an answer while 64 others ask
KEPT = 1 << 29  # bytes more than before that may be kept: caches of prompts, arenas of 64 threads
LARGE = Semaphore(2)  # bodies of 50 MB at once: llama.cpp takes 3.8 GB for each
STORY = "Once upon a time there was a little girl named Lily. She"
BOMBS = (
    {"grammar": 'root ::= "a"{1,100000}'},
    {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    {"grammar": "\n".join(f"r{n} ::= r{n + 1} r{n + 1} r{n + 1}" for n in range(30)) + '\nr30 ::= "a"\nroot ::= r0'},
    {"grammar": 'root ::= root root | ""'},
    {"json_schema": {"type": "string", "pattern": "^(a+)+$", "maxLength": 10**9}},
    {"json_schema": {"$ref": "#"}},
)
ALONE = (
    {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
)  # each with a server of its own
MEMORY = 8 << 30  # bytes that requests may take here; the machine has other users


def crowd(minutes: float, first: int, intact: Path, folder: Path) -> dict[str, Any]:
    """Keeps a server under load and returns the counts of requests, their answers and faults."""
    file = next((intact / DEMO).glob("*.gguf"))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "engine.log"
    limited = ("--cache-ram", "128")  # MiB of finished prompts, which are no leak
    with serve(file, port=0, threads=1, context=512, parallel=4, extra=limited, log=log) as running:
        _limit(running)
        crowd_of = _Crowd(running, Event(), first)
        _ordinary(running, random.Random(0))
        before = _resident(running.pid)
        threads = [Thread(target=crowd_of.client, args=(number,), daemon=True) for number in range(CLIENTS)]
        threads.append(Thread(target=crowd_of.witness, daemon=True))
        for thread in threads:
            thread.start()
        peak, end = before, time.monotonic() + minutes * 60
        while time.monotonic() < end and running.exit_code is None:
            time.sleep(1)
            peak = max(peak, _resident(running.pid))
        crowd_of.stop.set()
        for thread in threads:
            thread.join(WAIT)
        counts = crowd_of.counts(minutes, before, peak, log)
    for bomb in ALONE:
        with serve(file, port=0, threads=1, context=512, log=log) as running:
            _limit(running)
            with suppress(OSError, http.client.HTTPException):
                _post(running, {"prompt": STORY, "max_tokens": 16, **bomb})
            if running.wait(5) is not None:
                counts["faults"]["died"] += 1
                counts["seen"].append(
                    {"class": "died", "words": f"exit code {running.exit_code} of {json.dumps(bomb)}"}
                )
    return counts


def _limit(running: Running) -> None:
    mapped = int(Path(f"/proc/{running.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(running.pid, resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))


class _Crowd:
    """The clients, and what they count."""

    def __init__(self, running: Running, stop: Event, seed: int) -> None:
        self.running, self.stop, self._seed = running, stop, seed
        self._lock = Lock()
        self._answers: Counter[str] = Counter()
        self._faults = Counter(dict.fromkeys(CLASSES, 0))
        self._seen: list[dict[str, str]] = []

    def client(self, number: int) -> None:
        """Sends requests of every kind until the end."""
        chance = random.Random(f"{self._seed} {number}")
        while not self.stop.is_set() and self.running.exit_code is None:
            name = chance.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
            try:
                answer = KINDS[name][1](self.running, chance)
            except TimeoutError:
                answer = "no answer"
            except (OSError, http.client.HTTPException, ValueError) as error:
                answer = type(error).__name__
            with self._lock:
                self._answers[f"{name}: {answer}"] += 1
                if answer == "no answer":
                    self._note("hostile request hung", name)
            time.sleep(chance.uniform(0, 0.3))

    def witness(self) -> None:
        """Sends ordinary requests, one after the other: each must be answered."""
        while not self.stop.is_set() and self.running.exit_code is None:
            try:
                answer = _ordinary(self.running, random.Random())
            except (OSError, http.client.HTTPException, ValueError) as error:
                answer = f"{type(error).__name__}: {error}"
            with self._lock:
                self._answers[f"witness: {answer}"] += 1
                if answer != "200" and not self.stop.is_set():
                    self._note("ordinary request failed", answer)
            time.sleep(1)

    def counts(self, minutes: float, before: int, peak: int, log: Path) -> dict[str, Any]:
        """Looks at the server when the clients are gone, and returns all counts."""
        after = before
        if self.running.exit_code is not None:
            lines = log.read_text(errors="replace").splitlines()[-5:]
            self._note("died", f"exit code {self.running.exit_code}: {lines}")
        else:
            try:
                answer = _ordinary(self.running, random.Random(1))
            except (OSError, http.client.HTTPException) as error:
                answer = str(error)
            if answer != "200":
                self._note("silent at the end", answer)
            time.sleep(5)
            after = _resident(self.running.pid)
            if after > before + KEPT:
                self._note("memory kept", f"{before:,} before, {after:,} after")
        answers = dict(sorted(self._answers.items()))
        memory = {"memory before, peak": before, "memory, peak": peak, "memory after, peak": after}
        return {"minutes": minutes, "requests": sum(answers.values()), "answers": answers, **memory,
                "faults": dict(self._faults), "seen": self._seen}  # fmt: skip

    def _note(self, kind: str, words: str) -> None:
        self._faults[kind] += 1
        self._seen.append({"class": kind, "words": words[:400]})
        print(self._seen[-1], flush=True)


def _post(running: Running, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None) -> str:
    connection = http.client.HTTPConnection(*running.launch.address, timeout=WAIT)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    finally:
        connection.close()


def _ordinary(running: Running, chance: random.Random) -> str:
    prompt = f"{STORY} had {chance.randrange(1000)}"
    return _post(running, {"prompt": prompt, "max_tokens": 16, "temperature": 0})


def _opened(running: Running) -> socket.socket:
    return socket.create_connection(running.launch.address, timeout=WAIT)


def _stream(running: Running, tokens: int) -> socket.socket:
    body = json.dumps({"prompt": STORY, "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    opened = _opened(running)
    headers = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    opened.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
    return opened


def _slow_reader(running: Running, chance: random.Random) -> str:
    with _stream(running, 64) as opened:
        for _ in range(40):
            if not opened.recv(64):
                break
            time.sleep(0.1)
    return "read"


def _vanishing(running: Running, chance: random.Random) -> str:
    with _stream(running, 400) as opened:
        opened.recv(16)
    return "gone"


def _slow_sender(running: Running, chance: random.Random) -> str:
    with _opened(running) as opened:
        for letter in "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{":
            opened.sendall(letter.encode())
            time.sleep(0.05)
    return "gone"


def _large_body(running: Running, chance: random.Random) -> str:
    with LARGE:
        return _post(running, {"prompt": "a " * (25 << 20), "max_tokens": 1})


def _many_headers(running: Running, chance: random.Random) -> str:
    return _post(running, {"prompt": STORY, "max_tokens": 1}, {f"X-{number}": "y" for number in range(10_000)})


def _many_answers(running: Running, chance: random.Random) -> str:
    return _post(running, {"prompt": STORY, "max_tokens": 4, "n": 1000})


def _bomb(running: Running, chance: random.Random) -> str:
    return _post(running, {"prompt": STORY, "max_tokens": 16, **chance.choice(BOMBS)})


def _nonsense(running: Running, chance: random.Random) -> str:
    with suppress(ConnectionResetError, TimeoutError), _opened(running) as opened:
        opened.sendall(chance.randbytes(2000))
        opened.settimeout(5)
        opened.recv(100)
    return "sent"


KINDS: dict[str, tuple[float, Callable[[Running, random.Random], str]]] = {
    "ordinary": (60, _ordinary),
    "slow reader": (10, _slow_reader),
    "vanishing": (15, _vanishing),
    "slow sender": (5, _slow_sender),
    "body of 50 MB": (0.3, _large_body),
    "10,000 headers": (2, _many_headers),
    "n=1000": (1, _many_answers),
    "grammar bomb": (3, _bomb),
    "nonsense": (4, _nonsense),
}


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0
