"""The jobs of the campaign: a command line each, what it reads, and what it must have written when it is done."""

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from hostile_inputs import Ending, Started, Words, run_words, start_words

MEASURE = ("--windows", "1", "--length", "64")
CALIBRATED = ("--samples", "2", "--length", "64")
GONE = 10.0  # seconds for processes of a killed job to be gone
PATIENCE = 240.0
DEMO = "demo-q8_0"  # the folder of `intact` with an artefact of the demo model
Faults = list[tuple[str, str]]  # class and words of each


@dataclass(frozen=True, slots=True)
class Job:
    """A command; in its words ART and BF16 are artefacts of `intact` that are copied beside it, OUT its output."""

    words: Words
    reads: str = ""  # the folder of `intact` that it gets a copy of
    output: str = "OUT"


JOBS = {
    "quantize": Job(("quantize", "demo", "-o", "OUT", "--preset", "w8a16", "--no-report")),
    "quantize to gguf": Job(("quantize", "demo", "-o", "OUT", "--preset", "gguf-q4_0")),
    "quantize calibrated": Job(
        ("quantize", "demo", "-o", "OUT", "--preset", "w4a16", "--rounder", "gptq", "--no-report", *CALIBRATED)
    ),
    "verify": Job(("verify", "ART", "--reference", "demo", "--gate", "draft", *MEASURE), DEMO, "ART"),
    "convert": Job(("convert", "ART", "-o", "OUT", "--to", "bf16"), DEMO),
    "sweep": Job(
        ("sweep", "demo", "-o", "OUT", "--presets", "w8a16,gguf-q8_0", "--windows", "1", "--verify-length", "64")
    ),
    "sensitivity": Job(("sensitivity", "demo", "--grids", "q4_0,q8_0", *CALIBRATED), output=""),
    "run": Job(("run", "demo", "-o", "OUT", "--yes", "--no-serve", "--windows", "1", "--port", "0")),
}


@dataclass(frozen=True)
class Case:
    """A job in a folder of its own."""

    job: Job
    folder: Path

    @classmethod
    def fresh(cls, job: Job, intact: Path, folder: Path) -> "Case":
        """Lays out a folder with what the job reads."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if job.reads:
            shutil.copytree(intact / job.reads, folder / "art")
        return cls(job, folder)

    @property
    def words(self) -> Words:
        paths = {"OUT": self.folder / "place" / "out", "ART": self.folder / "art"}
        return tuple(str(paths.get(word, word)) for word in self.job.words)

    @property
    def output(self) -> Path | None:
        places = {"OUT": self.folder / "place" / "out", "ART": self.folder / "art"}
        return places.get(self.job.output)

    def start(self, **limits: int) -> Started:
        return start_words(self.words, self.folder, **limits)

    def run(self, **limits: int) -> Ending:
        return run_words(self.words, self.folder, seconds=PATIENCE, **limits)

    def again(self, expected: dict[str, str]) -> "Faults":
        """Runs the same command again, without a limit: it must end well, with the bytes of a job that nothing hit."""
        ending = self.run()
        faults = [("fault", ending.fault)] if ending.fault else []
        if ending.code == 2:
            faults.append(("refused", ending.errors))
        elif not ending.fault and self.written() != expected:
            faults.append(("lost", f"{self.written()} instead of {expected}"))
        if left := self.leftovers():
            faults.append(("left behind", str(left)))
        return faults

    def written(self) -> dict[str, str]:
        """Returns what must be the same whenever the job is done: hashes of weights and configs, and the verdict."""
        out = self.output
        if out is None or not out.is_dir():
            return {}
        found = {}
        for file in sorted(out.rglob("*")):
            name = str(file.relative_to(out))
            if file.suffix in (".safetensors", ".gguf") or file.name in ("config.json", "tokenizer.json"):
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
            elif file.name == "quantry.json":
                found[name] = _verdict(file)
        return found

    def leftovers(self) -> list[str]:
        """Returns temporary files beside and inside the output, and in the temporary folder."""
        place, temporary = self.folder / "place", self.folder / "tmp"
        found = [file for ending in (".partial", ".lock", ".replaced") for file in place.rglob(f"*{ending}")]
        found += list(temporary.glob("*quantry-*")) if temporary.exists() else []
        return [str(file.relative_to(self.folder)) for file in found]

    def orphans(self) -> list[int]:
        """Returns the processes that the job has started and that are still there after some seconds."""
        end = time.monotonic() + GONE
        while (found := _processes_of(self.folder)) and time.monotonic() < end:
            time.sleep(0.1)
        return found


def _verdict(file: Path) -> str:
    content = json.loads(file.read_text())
    proof = content.get("proof") or {}
    return json.dumps([content["files"], content["preset"], proof.get("verdict")], sort_keys=True)


def _processes_of(folder: Path) -> list[int]:
    """Returns processes whose environment names the folder: those that a job in it has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{folder}/cache".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
