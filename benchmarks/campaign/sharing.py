"""Jobs that get in each other's way, and engines that die: one output, one store, a changing artefact, signals."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from campaign.jobs import JOBS, Case, Faults, Job
from campaign.workers import Workers
from hostile_inputs import Started
from quantry.serving.prepare import serve

CLASSES = ("lost", "looks whole", "refused", "fault", "orphan", "left behind", "wrong pass")
CALIBRATED = JOBS["quantize calibrated"]


def sharing(rounds: int, first: int, intact: Path, workers: Workers) -> dict[str, Any]:
    """Runs every way of sharing `rounds` times."""
    ways: dict[str, Callable[[random.Random, Path, Path], Faults]] = {
        "two jobs, one output": _one_output,
        "two recipes, one output": _two_recipes,
        "four jobs, one store": _one_store,
        "verify of a changing artefact": _changing,
        "SIGTERM": _terminated,
        "SIGSTOP": _stopped,
    }
    return _rounds(rounds, first, ways, intact, workers)


def engines(rounds: int, first: int, intact: Path, workers: Workers) -> dict[str, Any]:
    """Kills the engine under serve, bench and tune, and the command above it."""
    ways: dict[str, Callable[[random.Random, Path, Path], Faults]] = {
        "serve": lambda chance, intact, place: _engine_dies("serve", chance, intact, place),
        "bench": lambda chance, intact, place: _engine_dies("bench", chance, intact, place),
        "tune": lambda chance, intact, place: _engine_dies("tune", chance, intact, place),
    }
    return _rounds(rounds, first, ways, intact, workers)


def _rounds(rounds: int, first: int, ways: dict[str, Any], intact: Path, workers: Workers) -> dict[str, Any]:
    counts: dict[str, Any] = {"cases": Counter(), "faults": Counter(dict.fromkeys(CLASSES, 0)), "seen": []}

    def go(task: tuple[int, str], place: Path) -> tuple[int, str, Faults]:
        number, name = task
        return number, name, ways[name](random.Random(f"{name} {number}"), intact, place / "case")

    tasks = [(number, name) for number in range(first, first + rounds) for name in ways]
    for number, name, faults in workers.each(tasks, go):
        counts["cases"][name] += 1
        for kind, words in faults:
            counts["faults"][kind] += 1
            counts["seen"].append({"way": name, "seed": number, "class": kind, "words": words[:300]})
            print(counts["seen"][-1], flush=True)
    return counts


def _whole(job: Job, intact: Path, folder: Path) -> dict[str, str]:
    case = Case.fresh(job, intact, folder.with_name("whole"))
    ending = case.run()
    assert ending.code in (0, 1), ending
    return case.written()


def _beside(case: Case, name: str, job: Job | None = None) -> Case:
    """Returns a job that shares the output and has its own cache and temporary files."""
    folder = case.folder / name
    folder.mkdir()
    (folder / "place").symlink_to(case.folder / "place")
    return Case(job or case.job, folder)


def _one_output(chance: random.Random, intact: Path, folder: Path) -> Faults:
    return _two(JOBS["quantize"], JOBS["quantize"], chance, intact, folder)


def _two_recipes(chance: random.Random, intact: Path, folder: Path) -> Faults:
    return _two(JOBS["quantize"], JOBS["quantize to gguf"], chance, intact, folder)


def _two(job: Job, other: Job, chance: random.Random, intact: Path, folder: Path) -> Faults:
    """Starts two jobs of one output shortly after each other: whatever is there at the end is whole."""
    wanted = [_whole(job, intact, folder), _whole(other, intact, folder)]
    case = Case.fresh(job, intact, folder)
    (folder / "place").mkdir()
    started = [_beside(case, "a").start(), None]
    time.sleep(chance.uniform(0, 1.5))
    started[1] = _beside(case, "b", other).start()
    endings = [each.ended(240) for each in started if each]
    faults: Faults = [("fault", ending.fault) for ending in endings if ending.fault]
    if case.written() not in wanted:
        faults.append(("looks whole", str(case.written())))
    if not any(ending.code == 0 for ending in endings):
        faults.append(("lost", str([ending.errors for ending in endings])))
    faults += [("left behind", str(left))] if (left := case.leftovers()) else []
    return faults


def _one_store(chance: random.Random, intact: Path, folder: Path) -> Faults:
    """Runs four calibrated jobs at once with one store of statistics."""
    wanted = _whole(CALIBRATED, intact, folder)
    case = Case.fresh(CALIBRATED, intact, folder)
    (folder / "cache").mkdir()
    cases = []
    for number in range(4):
        (folder / str(number)).mkdir()
        (folder / str(number) / "cache").symlink_to(folder / "cache")
        cases.append(Case(case.job, folder / str(number)))
    started = []
    for each in cases:
        started.append(each.start())
        time.sleep(chance.uniform(0, 0.5))
    endings = [each.ended(240) for each in started]
    faults: Faults = [("fault", ending.fault) for ending in endings if ending.fault]
    faults += [("refused", ending.errors) for ending in endings if ending.code == 2]
    return faults + [("lost", "other bytes than alone") for each in cases if each.written() != wanted]


def _changing(chance: random.Random, intact: Path, folder: Path) -> Faults:
    """Damages the weights at a random moment of verify: no verdict but on what was measured."""
    case = Case.fresh(JOBS["verify"], intact, folder)
    job = case.start()
    time.sleep(chance.uniform(0, 6))
    file = next((folder / "art").glob("*.gguf"))
    data = file.read_bytes()
    at = len(data) // 3
    file.write_bytes(data[:at] + bytes(len(data) - at))
    written = time.monotonic()
    ending = job.ended(240)
    faults: Faults = [("fault", ending.fault)] if ending.fault else []
    if (
        '"verdict": "pass"' in (folder / "art" / "quantry.json").read_text()
        and job.began + ending.seconds - written > 1
    ):
        faults.append(("wrong pass", "recorded after the weights were damaged"))
    return faults


def _terminated(chance: random.Random, intact: Path, folder: Path) -> Faults:
    case, wanted, job = _at_work(chance, intact, folder)
    with suppress(ProcessLookupError):  # it has ended first
        os.kill(job.child.pid, signal.SIGTERM)
    ending = job.ended(60)
    faults: Faults = (
        [] if ending.code in (0, 1, 143, -15) and "Traceback" not in ending.errors else [("fault", str(ending))]
    )
    faults += [("orphan", str(left))] if (left := case.orphans()) else []
    return faults + case.again(wanted)


def _stopped(chance: random.Random, intact: Path, folder: Path) -> Faults:
    case, wanted, job = _at_work(chance, intact, folder)
    with suppress(ProcessLookupError):  # it has ended first
        os.kill(job.child.pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(job.child.pid, signal.SIGCONT)
    ending = job.ended(240)
    faults: Faults = [("fault", ending.fault)] if ending.fault else []
    return faults + ([] if case.written() == wanted else [("lost", "other bytes than alone")])


def _at_work(chance: random.Random, intact: Path, folder: Path) -> tuple[Case, dict[str, str], Started]:
    """Starts one of the jobs with an output and returns it some seconds later, with what it should write."""
    name = chance.choice([name for name, job in JOBS.items() if job.output])
    wanted = _whole(JOBS[name], intact, folder)
    case = Case.fresh(JOBS[name], intact, folder)
    job = case.start()
    time.sleep(chance.uniform(0.3, 4))
    return case, wanted, job


def _engine_dies(name: str, chance: random.Random, intact: Path, folder: Path) -> Faults:
    """Kills the engine below a command: it says so in a line and does not end well, and nothing is left."""
    case = Case.fresh(JOBS["verify"], intact, folder)
    file = str(next((folder / "art").glob("*.gguf")))
    environment = {**os.environ, "QUANTRY_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    load = ["--concurrency", "2", "--prompt-tokens", "16", "--answer-tokens", "64", "--requests", "2000"]
    small = ["--context", "256", "--threads", "1"]
    with serve(file, port=0, threads=1, context=256, parallel=2) as running:
        words = {
            "serve": ["serve", file, "--port", "0", *small],
            "bench": ["bench", running.url, *load],
            "tune": ["tune", file, "--switches", "prefix-cache", *load, *small],
        }[name]
        line = [sys.executable, "-m", "quantry", *words]
        with subprocess.Popen(
            line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as job:
            engine = running.pid if name == "bench" else _engine_of(job, folder)
            time.sleep(chance.uniform(1, 8) if name != "bench" else chance.uniform(8, 14))
            if engine:
                os.kill(engine, signal.SIGKILL)
            try:
                said = job.communicate(timeout=200)[1]
            except subprocess.TimeoutExpired:
                job.kill()
                return [("fault", "it does not end")]
    faults: Faults = [("fault", said[-300:])] if "Traceback" in said else []
    faults += [("wrong pass", f"exit code 0: {said[-200:]}")] if job.returncode == 0 else []
    return faults + ([("orphan", str(left))] if (left := case.orphans()) else [])


def _engine_of(job: "subprocess.Popen[str]", folder: Path) -> int | None:
    """Waits for the embedded engine below a command, and returns its process."""
    end = time.monotonic() + 60
    while time.monotonic() < end and job.poll() is None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    ours = f"{folder}/cache".encode() in (entry / "environ").read_bytes()
                    if ours and b"quantry.serving.embedded" in (entry / "cmdline").read_bytes():
                        return int(entry.name)
                except OSError:
                    continue
        time.sleep(0.1)
    return None
