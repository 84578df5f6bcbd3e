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

from campaign.jobs import DEMO, JOBS, Case, Faults, Job
from campaign.workers import Once, Workers
from quantry.serving.prepare import serve
from quantry.serving.process import free_port

CLASSES = ("lost", "looks whole", "refused", "fault", "orphan", "left behind")
LOAD = ("--concurrency", "2", "--prompt-tokens", "16", "--answer-tokens", "32", "--requests", "200")


def kills(count: int, first: int, intact: Path, workers: Workers) -> dict[str, Any]:
    """Kills `count` jobs, of every kind in turn; returns counts by kind and by class of failure."""
    names = [*JOBS, "serve", "bench"]
    counts: dict[str, Any] = {
        "killed": Counter(),
        "ended first": Counter(),
        "faults": Counter(dict.fromkeys(CLASSES, 0)),
    }
    counts["seen"] = []
    known = Once()

    def kill(number: int, place: Path) -> tuple[int, bool, Faults]:
        name, chance = names[number % len(names)], random.Random(f"kill {number}")
        if name in JOBS:
            return number, *_kill_job(name, chance, known, intact, place)
        return number, *_kill_server(name, chance, intact, place)

    for number, killed, faults in workers.each(range(first, first + count), kill):
        name = names[number % len(names)]
        counts["killed" if killed else "ended first"][name] += 1
        for kind, words in faults:
            counts["faults"][kind] += 1
            counts["seen"].append({"job": name, "seed": number, "class": kind, "words": words[:300]})
            print(counts["seen"][-1], flush=True)
    return counts


def _kill_job(name: str, chance: random.Random, known: Once, intact: Path, place: Path) -> tuple[bool, Faults]:
    """Kills one job at a random moment of its time; returns if it was killed in time, and what went wrong."""
    expected, seconds = known.get(name, lambda: _whole(JOBS[name], intact, place))
    case = Case.fresh(JOBS[name], intact, place)
    job = case.start()
    time.sleep(chance.uniform(0, seconds))
    job.child.kill()
    job.child.join()
    killed = job.child.exitcode == -signal.SIGKILL
    faults = [("orphan", str(left))] if (left := case.orphans()) else []
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
    faults += case.again(expected)
    return killed, faults


def _whole(job: Job, intact: Path, place: Path) -> tuple[dict[str, str], float]:
    """Returns what a job writes that nothing hits, and its seconds."""
    case = Case.fresh(job, intact, place)
    ending = case.run()
    assert not ending.fault, ending
    return case.written(), ending.seconds


def _kill_server(name: str, chance: random.Random, intact: Path, place: Path) -> tuple[bool, Faults]:
    """Kills `quantry serve`, or a `quantry bench` of a server, which must go on."""
    place.mkdir(parents=True, exist_ok=True)
    file = next((intact / DEMO).glob("*.gguf"))
    environment = {**os.environ, "QUANTRY_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1"}
    case = Case(JOBS["verify"], place)
    if name == "serve":
        port = free_port("127.0.0.1")
        words = ["serve", str(file), "--port", str(port), "--context", "256", "--threads", "1"]
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
