"""The jobs of a sweep, and every check that is possible before the first one starts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantry import __version__
from quantry.engines.contract.catalogue import verifying
from quantry.errors import QuantryError, RecipeError
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs.output_folder import OutputFolder
from quantry.jobs.quantize import NOT_CALIBRATED
from quantry.jobs.sweep.specs import ArtefactFacts, ArtefactSpec, facts_of
from quantry.jobs.sweep.table import Sweep
from quantry.models.anatomy import check_blocks, sixteen_bit
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.tokenizer import load_tokenizer
from quantry.numerics.device import device as computing
from quantry.proof import gate as gates
from quantry.proof.served.engines import scoring_engine
from quantry.proof.text import fitting_length, load_text
from quantry.proof.text import windows as cut
from quantry.quantizing.calibration.mixture import load_data
from quantry.quantizing.calibration.text import LENGTH, SAMPLES, SEED
from quantry.quantizing.sources import open_source, tokenizer
from quantry.types import Anatomy


@dataclass(frozen=True, slots=True)
class Measurement:
    """How every row is measured: options of verify."""

    text: str | Path | None
    windows: int
    length: int
    gate: str
    device: str
    engine: str | None
    engine_python: str | Path | None

    def engine_for(self, format_: str) -> str | None:
        """Returns the engine for a format; None for GGUF, which verify measures in llama.cpp anyway."""
        facts = verifying()[self.engine] if self.engine else None
        return self.engine if facts and facts.embedded == (format_ == GGUF) else None

    def options(self, format_: str) -> dict[str, Any]:
        """Returns the arguments of verify for an artefact of a format."""
        engine = self.engine_for(format_)
        return {**asdict(self), "engine": engine, "engine_python": self.engine_python if engine else None}

    def check(self, formats: set[str]) -> None:
        """Raises QuantryError if the gate or engine is unknown, or if the engine loads none of the formats."""
        gates.check_use(self.gate)
        name, python = self.engine, self.engine_python
        if name and not any(self.engine_for(format_) for format_ in formats):
            raise QuantryError(f"--engine {name} has no use: it serves none of these formats", fix="leave --engine out")
        if python is not None and (name is None or not Path(python).expanduser().is_file()):
            problem = "is not a file" if name else "has no use without an engine"
            raise QuantryError(f"--engine-python {python} {problem}", fix="give --engine and the python that it is in")
        if name is not None:
            scoring_engine(name, Path(python).expanduser() if python else None).check()


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One row to make: the arguments of quantize (None for another tool's file) and of verify."""

    name: str
    text: str  # the spec as the user wrote it
    target: str | Path
    quantize: Mapping[str, Any] | None
    request: Mapping[str, Any]  # what distinguishes one artefact from another
    verify: Mapping[str, Any]
    measure: Mapping[str, Any]  # what distinguishes one measurement from another

    @property
    def peer(self) -> bool:
        return self.quantize is None


@dataclass(frozen=True, slots=True)
class Peer:
    """A file of another tool, to be measured too."""

    name: str
    target: str
    format: str


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep before its first job."""

    model: str | Path
    identity: str
    parameters: int
    folder: OutputFolder
    jobs: tuple[SweepJob, ...]
    empty: Sweep  # the result, without rows
    measure: Callable[[str], Mapping[str, Any]]  # what distinguishes the measurement of a format from others


def plan_sweep(
    model: str | Path,
    out: Path,
    specs: Sequence[ArtefactSpec],
    peers: str | Sequence[str | Path],
    calibration: Mapping[str, Any],
    measurement: Measurement,
) -> SweepPlan:
    """Plans a sweep. Raises QuantryError for everything that can be refused without making an artefact."""
    device = computing(measurement.device)
    anatomy = sixteen_bit(opened := open_checkpoint(model))
    check_blocks(opened)
    facts = [facts_of(spec, anatomy) for spec in specs]
    others = read_peers(peers, specs)
    measurement.check({*(each.format for each in facts), *(peer.format for peer in others)})
    text = load_text(measurement.text)
    folder = OutputFolder(out, "sweep")
    folder.check()
    checkpoint = local_folder(model)
    source = open_source(model)
    length, clipped = fitting_length(measurement.length, source.config)
    cuts = cut(text, tokenizer(source), length, measurement.windows or None)
    fingerprint = _calibration(calibration, checkpoint, anatomy, facts)
    jobs = _Jobs(measurement, text.digest(), calibration, fingerprint)
    empty = Sweep(
        model=Path(str(model)).name,
        path=str(out),
        gate=measurement.gate,
        text={"name": text.name, "windows": len(cuts), "length": length},
        rows=(),
        notes=(*clipped, *_notes(device.type, sum(each.calibrated for each in facts))),
    )
    made = [jobs.artefact(spec, each, out / spec.name) for spec, each in zip(specs, facts, strict=True)]
    rows = (*made, *map(jobs.peer, others))
    return SweepPlan(
        model, identity(open_checkpoint(checkpoint)), anatomy.parameters, folder, rows, empty, jobs.measure
    )


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Makes the jobs of a sweep; all are measured alike, and all calibrated ones read the same text."""

    measurement: Measurement
    text: str  # hash of the text that artefacts are measured on
    calibration: Mapping[str, Any]  # arguments of quantize
    fingerprint: str | None  # of the text that artefacts are calibrated on

    def artefact(self, spec: ArtefactSpec, facts: ArtefactFacts, target: Path) -> SweepJob:
        common = {"device": self.measurement.device, "preset": spec.preset, **spec.options}
        calibration = self.fingerprint if facts.calibrated else None
        request = {"quantry": __version__, **common, "imatrix": facts.imatrix, "calibration": calibration}
        options = {**common, **(self.calibration if facts.calibrated else {})}
        return SweepJob(spec.name, spec.text, target, options, request, *self._measured(facts.format))

    def peer(self, peer: Peer) -> SweepJob:
        return SweepJob(peer.name, peer.name, peer.target, None, {}, *self._measured(peer.format))

    def measure(self, format_: str) -> dict[str, Any]:
        """Returns what distinguishes the measurement of a format from others."""
        options = self.measurement.options(format_)
        return {**options, "text": self.text, "engine_python": None, "quantry": __version__}

    def _measured(self, format_: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the arguments of verify, and what distinguishes the measurement from others."""
        return self.measurement.options(format_), self.measure(format_)


def read_peers(peers: str | Sequence[str | Path], specs: Sequence[ArtefactSpec]) -> list[Peer]:
    """Returns the files of other tools to measure; a name that occurs twice gets the name of its folder.

    Raises RecipeError if two rows of the table would have the same name.
    """
    parts = peers.split(",") if isinstance(peers, str) else [str(peer) for peer in peers]
    paths = {part.strip(): Path(part.strip()).expanduser().absolute() for part in parts if part.strip()}
    alone = Counter(path.name for path in paths.values())
    files = []
    for target, path in paths.items():
        name = path.name if alone[path.name] == 1 else f"{path.parent.name}/{path.name}"
        files.append(Peer(name, target, open_checkpoint(target).format))
    names = Counter([*(file.name for file in files), *(spec.name for spec in specs)])
    name, count = names.most_common(1)[0]
    if count > 1:
        raise RecipeError(f"{count} files of the table would be called {name}", fix="rename the peer, or leave it out")
    return files


def _calibration(
    arguments: Mapping[str, Any], folder: Path, anatomy: Anatomy, facts: Sequence[ArtefactFacts]
) -> str | None:
    """Returns the fingerprint of the text of all calibrated jobs. Raises RecipeError if no job uses it."""
    options = {name: value for name, value in arguments.items() if value is not None}
    if not any(each.calibrated for each in facts):
        if options:
            raise RecipeError(f"--{next(iter(options))} has no use: no preset is calibrated", fix=NOT_CALIBRATED)
        return None
    how = {"samples": SAMPLES, "length": LENGTH, **options, "seed": SEED, "context": anatomy.context_length}
    return load_data(how.pop("data", None), load_tokenizer(folder), **how).fingerprint


def _notes(device: str, calibrated: int) -> tuple[str, ...]:
    words = f"on {device} each of the {calibrated} calibrated jobs runs the model anew: statistics are not kept"
    return (words,) if calibrated > 1 and device != "cpu" else ()
