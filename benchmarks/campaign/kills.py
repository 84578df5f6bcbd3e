"""Kills jobs of every kind with signal 9 at random moments, and runs the same command again."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from campaign.jobs import JOBS, Case
from quantry.serving.prepare import serve
from quantry.serving.process import free_port

CLASSES = ("lost", "looks whole", "refused", "fault", "orphan", "left behind")
LOAD = ("--concurrency", "2", "--prompt-tokens", "16", "--answer-tokens", "32", "--requests", "200")


def kills(count: int, first: int, intact: Path, folder: Path) -> dict[str, Any]:
    """Kills `count` jobs, of every kind in turn; returns counts by kind and by class of failure."""
    names = [*JOBS, "serve", "bench"]
    counts: dict[str, Any] = {
        "killed": Counter(),
        "ended first": Counter(),
        "faults": Counter(dict.fromkeys(CLASSES, 0)),
    }
    counts["seen"] = []
    known: dict[str, tuple[dict[str, str], float]] = {}
    for number in range(first, first + count):
        name = names[number % len(names)]
        chance = random.Random(f"kill {number}")
        place = folder / "case"
        if name in JOBS:
            killed, faults = _kill_job(name, chance, known, intact, place)
        else:
            killed, faults = _kill_server(name, chance, intact, place)
        counts["killed" if killed else "ended first"][name] += 1
        for kind, words in faults:
            counts["faults"][kind] += 1
            counts["seen"].append({"job": name, "seed": number, "class": kind, "words": words[:300]})
            print(counts["seen"][-1], flush=True)
    return counts


def _kill_job(
    name: str, chance: random.Random, known: dict[str, tuple[dict[str, str], float]], intact: Path, place: Path
) -> tuple[bool, list[tuple[str, str]]]:
    """Kills one job at a random moment of its time; returns if it was killed in time, and what went wrong."""
    if name not in known:
        whole = Case.fresh(JOBS[name], intact, place)
        ending = whole.run()
        assert not ending.fault, ending
        known[name] = (whole.written(), ending.seconds)
    expected, seconds = known[name]
    case = Case.fresh(JOBS[name], intact, place)
    job = case.start()
    time.sleep(chance.uniform(0, seconds))
    job.child.kill()
    job.child.join()
    killed = job.child.exitcode == -signal.SIGKILL
    faults = [("orphan", str(case.orphans()))] if case.orphans() else []
    out = case.output
    before = case.written()
    if (
        JOBS[name].output == "OUT"
        and "sweep" not in name
        and name != "run"
        and out
        and out.exists()
        and before != expected
    ):
        faults.append(("looks whole", str(before)))
    again = case.run()
    if again.fault:
        faults.append(("fault", again.fault))
    elif again.code == 2:
        faults.append(("refused", again.errors))
    elif case.written() != expected:
        faults.append(("lost", f"{case.written()} instead of {expected}"))
    if left := case.leftovers():
        faults.append(("left behind", str(left)))
    return killed, faults


def _kill_server(name: str, chance: random.Random, intact: Path, place: Path) -> tuple[bool, list[tuple[str, str]]]:
    """Kills `quantry serve`, or a `quantry bench` of a server, which must go on."""
    place.mkdir(parents=True, exist_ok=True)
    file = next((intact / "gguf").glob("*.gguf"))
    environment = {**os.environ, "QUANTRY_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1"}
    case = Case(JOBS["verify"], place)
    if name == "serve":
        port = free_port("127.0.0.1")
        words = ["serve", str(file), "--port", str(port), "--context", "256", "--threads", "1", "--quiet"]
        killed = _kill_after(words, environment, chance.uniform(0.5, 8))
        left = case.orphans()
        return killed, [("orphan", str(left))] if left else []
    with serve(file, port=0, threads=1, context=256, parallel=2) as running:
        killed = _kill_after(["bench", running.url, *LOAD], environment, chance.uniform(0.5, 15))
        left = case.orphans()
        faults = [("orphan", str(left))] if left else []
        if not running.healthy():
            faults.append(("lost", "the server does not answer any more"))
        return killed, faults


def _kill_after(words: list[str], environment: dict[str, str], seconds: float) -> bool:
    """Returns False if the command has ended before."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [sys.executable, "-m", "quantry", *words], env=environment, stdout=quiet, stderr=quiet
    ) as job:
        time.sleep(seconds)
        running = job.poll() is None
        job.kill()
    return running
