"""What a sweep has made and measured so far: sweep.json, from which a later run continues."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Required, TypedDict

from quantry.errors import OutputError
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs import artefact_report
from quantry.jobs.output_folder import read_artefact
from quantry.jobs.quantize import quantize
from quantry.jobs.sweep.plan import SweepJob, SweepPlan
from quantry.jobs.sweep.table import Outcome, Sweep, mark_frontier
from quantry.jobs.verify import recorded, verify
from quantry.models.anatomy import dissect
from quantry.models.identity import identity
from quantry.models.reader import open_checkpoint
from quantry.report.stages import named, of_all, stages
from quantry.types import Progress, Proof

FIGURES = tuple(name for key in ("kl", "served_kl", "top1", "perplexity") for name in (key, f"{key}_interval"))
COMMON = ("reference_perplexity", "noise_floor")  # equal in all proofs of a sweep
STEPS = {"quantizing": 1.0, "verifying": 2.0}  # about how the time of a job is divided
SIZES = ("format", "bytes", "bits_per_weight")


class SizesNote(TypedDict):
    """The size of a row."""

    format: str
    bytes: int
    bits_per_weight: float


class RecordedProof(TypedDict):
    """The part of a proof that a row keeps."""

    kl: float | None
    top1: float | None
    perplexity: float | None
    intervals: dict[str, list[float | None]]
    served: dict[str, Any] | None
    verdict: str
    reference_perplexity: float | None
    noise_floor: float | None
    notes: list[str]


class RecordNote(TypedDict, total=False):
    """A job: what was asked, made and measured."""

    spec: str
    asked: dict[str, Any]
    made: str
    sizes: SizesNote
    measure: dict[str, Any]
    proof: RecordedProof


class SweepNote(TypedDict, total=False):
    """What is read back of sweep.json."""

    model: str
    identity: Required[str]
    jobs: Required[dict[str, RecordNote]]


class JobProgress:
    """Reports one job of a sweep: its number, its name, and how far it is."""

    def __init__(
        self, announce: Callable[[str], None] | None, progress: Progress | None, number: int, count: int, name: str
    ) -> None:
        self._announce, self._progress, self._number, self._count = announce, progress, number, count
        self._name = name
        self.announce("")

    def announce(self, words: str) -> None:
        if self._announce:
            self._announce(f"{self._number + 1} of {self._count}: {self._name} {words}".rstrip())

    def of(self, step: str) -> Progress | None:
        """Returns a progress function for a step of the job, which shows its share."""
        report = named(self._progress, f"{self._name}: {step}")
        return stages(of_all(report, range(self._number, self._number + 1), self._count, lambda: 0.0), STEPS)[step]

    def end(self, row: Outcome) -> None:
        if row.problem:
            self.announce(f"is left out: {row.problem}")
        if self._progress:
            self._progress(int(100 * (self._number + 1) / self._count), 100, self._name)


class SweepState:
    """The record of every job by name: `asked` before it starts, then what was `made`, its `sizes` and its `proof`."""

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._records = self._read()
        self._problems: dict[str, str] = {}
        for job in plan.jobs:
            self._check(job)
        self._earlier = tuple(name for name in self._records if self._is_kept(name))

    def _read(self) -> dict[str, dict[str, Any]]:
        content = self._plan.folder.read_note(SweepNote)
        if not content:
            return {}
        if content.get("identity") != self._plan.identity:
            raise OutputError(
                f"{self._plan.folder.path} is a sweep of another model, {str(content.get('model'))[:40]}",
                fix="choose another output",
            )
        return dict(content["jobs"])

    def _check(self, job: SweepJob) -> None:
        """Raises OutputError if the folder of a job holds an artefact of another request."""
        out = Path(job.target)
        present = next((path for path in (out, out.with_name(f"{job.name}.partial")) if path.exists()), None)
        if present is None or job.peer:
            return
        record = self._records.get(job.name, {})
        if record.get("asked") != _as_json(job.request):
            raise OutputError(
                f"{present} was made with {_difference(record.get('asked'), job.request)}",
                fix="choose another output, or remove it to have it made anew",
            )
        if out.exists() and record.get("made", _digest(out)) != _digest(out):
            raise OutputError(f"{out} is not what the sweep wrote", fix="remove it to have it made anew")

    def _is_kept(self, name: str) -> bool:
        """Returns True for an artefact or peer of an earlier sweep that this one does not ask for, if it is there."""
        record = self._records[name]
        if name in {job.name for job in self._plan.jobs} or "sizes" not in record:
            return False
        folder = self._plan.folder.path / name
        if "asked" not in record:  # a peer, which may be anywhere
            return True
        return folder.is_dir() and _digest(folder) == record.get("made")

    def quantize(self, job: SweepJob, shown: JobProgress) -> None:
        """Writes an artefact unless it exists; reads the size and format of another tool's file."""
        if job.peer:
            made, sizes = _peer_sizes(job.target, self._plan.parameters)
        else:
            if not Path(job.target).exists():
                self._records[job.name] = {"asked": _as_json(job.request)}
                self.write(self._plan.empty)
                quantize(self._plan.model, job.target, **job.quantize or {}, progress=shown.of("quantizing"))
            card = read_artefact(Path(job.target))
            made, sizes = _digest(Path(job.target)), {key: card[key] for key in SIZES}
        record = self._records.setdefault(job.name, {})
        if record.get("made", made) != made:
            record.clear()  # another file under a known name
        record |= {"spec": job.text, "made": made, "sizes": sizes}

    def verify(self, job: SweepJob, shown: JobProgress) -> None:
        """Measures an artefact and writes its report, unless it was measured on the same text in the same way."""
        record = self._records[job.name]
        if "proof" in record and record.get("measure") == _as_json(job.measure):
            shown.announce("is made and measured already")
            return
        record.pop("proof", None)
        ours, progress = not job.peer, shown.of("verifying")
        proof = verify(
            job.target, reference=self._plan.model, **job.verify, record=ours, report=ours, progress=progress
        )
        record |= {"measure": _as_json(job.measure), "proof": _kept_proof(recorded(proof) if ours else proof)}
        self.write(self._plan.empty)

    def refuse(self, job: SweepJob, problem: str) -> None:
        """Records why a job failed."""
        self._problems[job.name] = problem
        self._records.setdefault(job.name, {})

    def outcome(self, job: SweepJob) -> Outcome:
        """Returns the row of a job, with the figures that this run has."""
        record = self._records[job.name]
        row = Outcome(job.name, job.text, job.peer, problem=self._problems.get(job.name), **record.get("sizes", {}))
        return _with_figures(row, record.get("proof"))

    def result(self) -> Sweep:
        """Returns the whole table: what was asked for, then what earlier sweeps have left in the folder.

        Rows of earlier sweeps have figures if they were measured as the others now are.
        """
        alike = [name for name in self._earlier if not self._difference(name)]
        names = [*(job.name for job in self._plan.jobs), *alike]
        proofs = [record["proof"] for name in names if "proof" in (record := self._records[name])]
        empty = self._plan.empty
        rows = [*(self.outcome(job) for job in self._plan.jobs), *map(self._earlier_row, self._earlier)]
        notes = (*empty.notes, *(note for proof in proofs for note in proof["notes"]), *self._differences())
        return replace(
            empty,
            rows=mark_frontier(rows),
            notes=tuple(dict.fromkeys(notes)),
            **{key: proofs[0][key] for key in COMMON if proofs},
        )

    def _earlier_row(self, name: str) -> Outcome:
        record = self._records[name]
        row = Outcome(name, record.get("spec", name), "asked" not in record, **record["sizes"])
        return row if self._difference(name) else _with_figures(row, record["proof"])

    def _difference(self, name: str) -> str:
        """Returns how the measurement of an earlier sweep differs from this one's; an empty text if it does not."""
        record = self._records[name]
        now = _as_json(self._plan.measure(record["sizes"]["format"]))
        if "proof" not in record or "measure" not in record:
            return "it was not measured"
        before = record["measure"]
        differing = next((key for key in sorted({*before, *now}) if before.get(key) != now.get(key)), None)
        if differing is None:
            return ""
        if differing == "text":
            return "it was measured on another text"
        return f"it was measured with {differing} {str(before.get(differing))[:20]}, not {str(now.get(differing))[:20]}"

    def _differences(self) -> list[str]:
        reasons = {name: self._difference(name) for name in self._earlier}
        return [
            f"{name} has no figures here, since {reason}: name it among the presets to measure it again"
            for name, reason in reasons.items()
            if reason
        ]

    def provenance(self) -> dict[str, Any]:
        """Returns the request of each artefact, and the hashes of its files."""
        provenance = {}
        for name in (*(job.name for job in self._plan.jobs), *self._earlier):
            record = self._records[name]
            if "asked" in record and "made" in record:
                files = read_artefact(self._plan.folder.path / name)["files"]
                hashes = {file: facts["sha256"] for file, facts in files.items()}
                provenance[name] = {"asked": record["asked"], "files": hashes}
        return provenance

    def write(self, result: Sweep) -> None:
        """Writes sweep.json: the table so far and the records; no paths of this machine."""
        table = {key: value for key, value in result.to_dict().items() if key != "path"}
        self._plan.folder.write_note(**table, identity=self._plan.identity, jobs=self._records)


def _with_figures(row: Outcome, proof: Mapping[str, Any] | None) -> Outcome:
    if row.bytes is None or not proof:
        return row
    measured = artefact_report.measured(row.name, row.bytes, proof)
    figures = {name: getattr(measured, name) for name in FIGURES}
    return replace(row, **figures, engine=(proof["served"] or {}).get("engine"), verdict=proof["verdict"])


def _peer_sizes(target: str | Path, parameters: int) -> tuple[str, dict[str, Any]]:
    """Returns the identity of another tool's file, and its size; bits are per weight of the 16-bit model."""
    checkpoint = open_checkpoint(target)
    anatomy = dissect(checkpoint)
    method = anatomy.quantization.method if anatomy.quantization and anatomy.format != GGUF else anatomy.format
    sizes = {"format": method, "bytes": anatomy.bytes, "bits_per_weight": round(8 * anatomy.bytes / parameters, 4)}
    return identity(checkpoint), sizes


def _digest(artefact: Path) -> str:
    """Returns a hash of what quantry.json says about an artefact, without its proof."""
    card = read_artefact(artefact)
    facts = {key: card[key] for key in ("quantry", "preset", *SIZES, "recipe", "files")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _kept_proof(proof: Proof) -> dict[str, Any]:
    kept = ("kl", "top1", "perplexity", "intervals", "served", "verdict", *COMMON, "notes")
    return {key: value for key, value in proof.to_dict().items() if key in kept}


def _as_json(facts: Mapping[str, Any]) -> Any:
    """Returns facts in the form that they have when they are read from a file."""
    return json.loads(json.dumps(facts, default=str))


def _difference(before: Any, now: Mapping[str, Any]) -> str:
    if not isinstance(before, dict):
        return "another request, which is not noted"
    wanted = _as_json(now)
    nothing = object()
    key = next(key for key in sorted({*before, *wanted}) if before.get(key, nothing) != wanted.get(key, nothing))
    return f"another {key}, {str(before.get(key))[:20]} instead of {str(wanted.get(key))[:20]}"
