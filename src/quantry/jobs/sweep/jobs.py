"""The jobs of a sweep, and the notes on them that a later run goes on with."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantry import __version__
from quantry.errors import OutputError
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs import artefact_report as reporting
from quantry.jobs.quantize import quantize
from quantry.jobs.sweep.ordering import Item, Order
from quantry.jobs.sweep.place import NOTE, SIZES, damaged, digest, hashes, read_object
from quantry.jobs.sweep.table import Outcome, Sweep, marked
from quantry.jobs.sweep.telling import Telling
from quantry.models.anatomy import dissect
from quantry.models.identity import identity
from quantry.models.reader import open_checkpoint
from quantry.models.writer import write_atomically
from quantry.proof.verify import verify
from quantry.storage import ARTEFACT_FILE
from quantry.types import Proof

FIGURES = tuple(name for key in ("kl", "served_kl", "top1", "perplexity") for name in (key, f"{key}_interval"))
COMMON = ("reference_perplexity", "noise_floor")  # what all proofs of a sweep share


class Jobs:
    """The jobs of a sweep by name: `asked` before one begins, what was `made` and its `proof` after; in sweep.json."""

    def __init__(self, folder: Path, order: Order) -> None:
        self._folder, self._order = folder, order
        self._jobs: dict[str, dict[str, Any]] = self._read() if (folder / NOTE).exists() else {}
        self._problems: dict[str, str] = {}
        for item in order.items:
            self._check(item)

    def _read(self) -> dict[str, dict[str, Any]]:
        content = read_object(self._folder / NOTE)
        if content.get("identity") != self._order.identity:
            raise OutputError(
                f"{self._folder} is a sweep of another model, {str(content.get('model'))[:40]}",
                fix="choose another output",
            )
        jobs = content.get("jobs")
        if not isinstance(jobs, dict) or not all(isinstance(job, dict) for job in jobs.values()):
            raise damaged(self._folder / NOTE)
        return jobs

    def _check(self, item: Item) -> None:
        """What is there under this name must have been made for the same request."""
        out = self._folder / item.name
        there = next((one for one in (out, out.with_name(f"{item.name}.partial")) if one.exists()), None)
        if there is None or item.peer:
            return
        job = self._jobs.get(item.name, {})
        if job.get("asked") != _stored(item.request):
            raise OutputError(
                f"{there} was made with {_difference(job.get('asked'), item.request)}",
                fix="choose another output, or remove it to have it made anew",
            )
        if out.exists() and job.get("made", digest(out)) != digest(out):
            raise OutputError(f"{out} is not what the sweep wrote", fix="remove it to have it made anew")

    def make(self, item: Item, tell: Telling) -> None:
        """Writes an artefact unless it is there; of another tool's file looks at what it is."""
        if item.peer:
            made, sizes = _looked(item.target, self._order.parameters)
        else:
            if not Path(item.target).exists():
                self._jobs[item.name] = {"asked": _stored(item.request)}
                self.write(self._order.begun)
                quantize(self._order.model, item.target, **item.quantize or {}, progress=tell.inner("quantizing"))
            content = read_object(Path(item.target) / ARTEFACT_FILE)
            made, sizes = digest(Path(item.target)), {key: content[key] for key in SIZES}
        job = self._jobs.setdefault(item.name, {})
        if job.get("made", made) != made:
            job.clear()  # another file under a known name
        job |= {"made": made, "sizes": sizes}

    def prove(self, item: Item, tell: Telling) -> None:
        """Measures an artefact and writes its report, unless that was done on the same text in the same way."""
        job = self._jobs[item.name]
        if "proof" in job and job.get("measure") == _stored(item.measure):
            tell.say("is made and measured already")
            return
        job.pop("proof", None)
        proof = verify(item.target, reference=self._order.model, **item.verify, progress=tell.inner("verifying"))
        job |= {"measure": _stored(item.measure), "proof": _proven(proof)}
        if not item.peer:  # before the note, so that what is noted as measured has its report
            reporting.write(Path(item.target), reporting.content_of(Path(item.target)))
        self.write(self._order.begun)

    def refuse(self, item: Item, problem: str) -> None:
        self._problems[item.name] = problem
        self._jobs.setdefault(item.name, {})

    def outcome(self, item: Item) -> Outcome:
        """The row of a job, as far as it got in this run."""
        job = self._jobs[item.name]
        sizes, proof = job.get("sizes", {}), job.get("proof", {})
        made = Outcome(item.name, item.text, item.peer, problem=self._problems.get(item.name), **sizes)
        if made.bytes is None or not proof:
            return made
        found = reporting.measured(item.name, made.bytes, proof)
        told = {name: getattr(found, name) for name in FIGURES}
        return replace(made, **told, engine=(proof["served"] or {}).get("engine"), verdict=proof["verdict"])

    def result(self) -> Sweep:
        """The whole table."""
        proofs = [self._jobs[item.name]["proof"] for item in self._order.items if "proof" in self._jobs[item.name]]
        begun = self._order.begun
        return replace(
            begun,
            rows=marked([self.outcome(item) for item in self._order.items]),
            notes=tuple(dict.fromkeys([*begun.notes, *(note for proof in proofs for note in proof["notes"])])),
            **{key: proofs[0][key] for key in COMMON if proofs},
        )

    def provenance(self) -> dict[str, Any]:
        """What each artefact was asked for, and the hashes of its files."""
        made = [item for item in self._order.items if not item.peer and "made" in self._jobs[item.name]]
        return {item.name: {"asked": dict(item.request), "files": hashes(self._folder / item.name)} for item in made}

    def write(self, done: Sweep) -> None:
        """sweep.json: the table as far as it is, and the notes; no paths of this machine."""
        told = {key: value for key, value in done.to_dict().items() if key != "path"}
        content = {"quantry": __version__, **told, "identity": self._order.identity, "jobs": self._jobs}
        write_atomically(self._folder / NOTE, (json.dumps(content, indent=2) + "\n").encode())


def _looked(target: str | Path, parameters: int) -> tuple[str, dict[str, Any]]:
    """What tells another tool's file from others, and its size; bits are for each weight of the 16-bit model."""
    checkpoint = open_checkpoint(target)
    found = dissect(checkpoint)
    method = found.quantization.method if found.quantization and found.format != GGUF else found.format
    sizes = {"format": method, "bytes": found.bytes, "bits_per_weight": round(8 * found.bytes / parameters, 4)}
    return identity(checkpoint), sizes


def _proven(proof: Proof) -> dict[str, Any]:
    """What is kept of a proof, in its own words."""
    kept = ("kl", "top1", "perplexity", "intervals", "served", "verdict", *COMMON, "notes")
    return {key: value for key, value in proof.to_dict().items() if key in kept}


def _stored(facts: Mapping[str, Any]) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(facts, default=str))


def _difference(before: Any, now: Mapping[str, Any]) -> str:
    """The first thing that is not as it was."""
    if not isinstance(before, dict):
        return "another request, which is not noted"
    wanted = _stored(now)
    key = next(key for key in sorted({*before, *wanted}) if before.get(key) != wanted.get(key))
    return f"another {key}, {str(before.get(key))[:20]} instead of {str(wanted.get(key))[:20]}"
