"""`quantry.sweep`: many artefacts of one model, each proven on the same text, and one table of them.

Every artefact is what `quantry quantize` writes into a folder of its own, every figure what `quantry verify` measures.
Jobs share what they can: the statistics of calibration are in their store, what the 16-bit model says in its cache.

DIR/sweep.json has the table, and notes on each job: what was asked for, before it begins, and what was measured. So a
sweep that was killed goes on: what is there for the same request is taken as it is, and anything else in its place is
refused before the first job begins.
"""

import fcntl
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantry import __version__, reporting
from quantry.anatomy import dissect, sixteen_bit
from quantry.budget import parse
from quantry.calibrate.cache import identity
from quantry.calibrate.data import LENGTH, SAMPLES, load
from quantry.checkpoint.reader import local_folder, open_checkpoint
from quantry.checkpoint.workspace import check_target
from quantry.checkpoint.writer import write_atomically
from quantry.compute import device as computing
from quantry.errors import HubError, OutputError, QuantryError, RecipeError, UnknownNameError
from quantry.formats.gguf import NAME as GGUF
from quantry.inputs import SEED
from quantry.llamacpp import importance
from quantry.pipeline import CALIBRATED, quantize
from quantry.proof import gate as gates
from quantry.proof.sources import open_source, tokenizer
from quantry.proof.text import default_text, read_text
from quantry.proof.text import windows as cut
from quantry.proof.verification import ENGINES, verify
from quantry.recipe import AUTO, from_options
from quantry.registry import suggest
from quantry.report import Content, Row
from quantry.tokenizing import load_tokenizer
from quantry.types import Anatomy, Proof

OPTIONS = ("format", "group", "rounder", "imatrix", "kv", "budget")  # of quantize, that may stand after a preset
NOTE, LOCK = "sweep.json", "sweep.lock"
OURS = frozenset({NOTE, NOTE + ".partial", LOCK})  # files that a sweep may have left before its first artefact
SIZES = ("format", "bytes", "bits_per_weight")
FIGURES = tuple(name for key in ("kl", "served_kl", "top1", "perplexity") for name in (key, f"{key}_interval"))
COMMON = ("reference_perplexity", "noise_floor")  # what all proofs of a sweep share
EXAMPLE = "write it as w4a16:group=64,format=compressed-tensors"
ENDING = (OutputError, HubError)  # the disk or the network: the next artefact would meet the same
Progress = Callable[[int, int, str], None]  # artefacts done, artefacts in all, the one in hand


@dataclass(frozen=True, slots=True)
class Spec:
    """An artefact that is asked for: a preset, and options of quantize."""

    text: str
    preset: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of its folder: the preset and the options in a fixed order, in characters that every disk takes."""
        parts = [f"{key}-{_plain(key, self.options[key])}" for key in OPTIONS if key in self.options]
        return "_".join([self.preset, *parts])


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the table: an artefact, or another tool's file. Names are the JSON names.

    `kl` is of the decoded bytes, and so are the figures after it unless an engine was asked; `problem` says why some
    are not there.
    """

    name: str
    spec: str  # as it was asked for
    peer: bool = False
    format: str | None = None
    bytes: int | None = None
    bits_per_weight: float | None = None
    kl: float | None = None
    kl_interval: tuple[float, float] | None = None
    engine: str | None = None
    served_kl: float | None = None
    served_kl_interval: tuple[float, float] | None = None
    top1: float | None = None
    top1_interval: tuple[float, float] | None = None
    perplexity: float | None = None
    perplexity_interval: tuple[float, float] | None = None
    verdict: str | None = None
    frontier: bool = False  # no other one is smaller or as small, and better
    problem: str | None = None

    @property
    def judged(self) -> float | None:
        """The KL that counts: as served, where an engine was asked."""
        return self.kl if self.served_kl is None else self.served_kl


@dataclass(frozen=True, slots=True)
class Sweep:
    """What came of a sweep, in the order in which it was asked for. Names are the JSON names."""

    model: str
    path: str
    gate: str
    text: Mapping[str, Any]  # name, windows, length
    rows: tuple[Outcome, ...]
    reference_perplexity: float | None = None
    noise_floor: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every artefact and every peer could be made and measured."""
        return all(row.problem is None for row in self.rows)

    def ranked(self) -> tuple[Outcome, ...]:
        """The rows from the worst KL to the best; those without one come last."""
        return tuple(sorted(self.rows, key=lambda row: (row.judged is None, -(row.judged or 0.0), row.name)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep(
    model: str | Path,
    output: str | Path,
    *,
    presets: str | Sequence[str],
    peers: str | Sequence[str | Path] = (),
    text: str | Path | None = None,
    windows: int = 16,
    verify_length: int = 512,
    gate: str = "general",
    data: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    rounder: str | None = None,
    group: int | None = None,
    device: str = "cpu",
    engine: str | None = None,
    engine_python: str | Path | None = None,
    announce: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Quantizes `model` in many ways into folders of `output`, proves each of them, and writes the table and a report.

    `presets` are names with options of quantize after a colon, such as `w4a16:group=64,format=compressed-tensors`; in
    one text commas stand between them. `rounder` and `group` are for all presets that do not give their own. `peers`
    are files of other tools, which are measured in the same way. An artefact that is refused is a row with the reason.
    """
    out = Path(output).expanduser()
    shared = {key: value for key, value in {"rounder": rounder, "group": group}.items() if value is not None}
    specs = read_specs(presets, shared)
    calibration = {"data": data, "samples": samples, "length": length}
    measured = _Measured(text, windows, verify_length, gate, device, engine, engine_python)
    order = _order(model, out, specs, peers, calibration, measured)  # all that can be refused is, before a job begins
    with _alone(out):
        jobs = _Jobs(out, order)
        for number, item in enumerate(order.items):
            tell = _Telling(announce, progress, number, len(order.items), item.name)
            try:
                jobs.make(item, tell)
                jobs.prove(item, tell)
            except ENDING:
                raise
            except QuantryError as error:
                jobs.refuse(item, str(error))
            tell.end(jobs.outcome(item))
        done = jobs.result()
        jobs.write(done)
        reporting.write(out, page(done, jobs.provenance()))
    return done


# ---- what is asked for ----


def read_specs(presets: str | Sequence[str], shared: Mapping[str, Any]) -> tuple[Spec, ...]:
    """Presets with their options; those in `shared` are for all that do not say otherwise."""
    texts = _split(presets) if isinstance(presets, str) else tuple(presets)
    if not texts:
        raise RecipeError("no preset is given", fix="give --presets, such as w4a16,gguf-q4_k_m")
    found = tuple(_spec(text, shared) for text in texts)
    by_name: dict[str, Spec] = {}
    for spec in found:
        first = by_name.setdefault(spec.name.casefold(), spec)
        if first is not spec:
            raise RecipeError(
                f"{first.text!r} and {spec.text!r} would both be written to {spec.name}", fix="leave one of them out"
            )
    return found


def _split(text: str) -> tuple[str, ...]:
    """Presets with commas between them; an option after a comma (`group=64`) still belongs to the preset before it."""
    found: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if found and "=" in piece.partition(":")[0]:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return tuple(found) if text.strip() else ()


def _spec(text: str, shared: Mapping[str, Any]) -> Spec:
    preset, colon, rest = text.strip().partition(":")
    if not preset or "," in preset or "=" in preset or (colon and not rest):
        raise RecipeError(f"{text[:60]!r} is not a preset with options", fix=EXAMPLE)
    options: dict[str, Any] = {}
    for pair in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value or key in options:
            raise RecipeError(f"{pair.strip()[:60]!r} of {text[:60]!r} is not one option with a value", fix=EXAMPLE)
        if key not in OPTIONS:
            raise UnknownNameError(f"unknown option {key[:40]!r} of {text[:60]!r}", fix=suggest(key, OPTIONS))
        options[key] = _count(value, text) if key == "group" else value
    return Spec(text.strip(), preset.strip(), {**shared, **options})


def _count(value: str, text: str) -> int:
    if not value.isdecimal() or len(value) > 9:
        raise RecipeError(f"the group {value[:40]!r} of {text[:60]!r} is not a number", fix="use 32, 64 or 128")
    return int(value)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of an artefact before it is made."""

    format: str
    calibrated: bool = False
    imatrix: str | None = None  # SHA-256 of the file, or auto


def _kind(spec: Spec, anatomy: Anatomy) -> _Kind:
    """Refuses what no model could be given; the message names the preset among many."""
    try:
        return _mixture(spec, anatomy) if spec.preset == AUTO else _uniform(spec)
    except QuantryError as error:
        raise type(error)(f"{spec.text}: {error.problem}", fix=error.fix) from error


def _mixture(spec: Spec, anatomy: Anatomy) -> _Kind:
    from quantry import mixing  # only a mixture needs it

    options = spec.options
    unused = {name: options.get(name) for name in ("group", "imatrix")}
    form = mixing.check(options.get("budget"), options.get("format"), unused)
    parse(options["budget"], parameters=anatomy.parameters)
    return _Kind(form, calibrated=True)


def _uniform(spec: Spec) -> _Kind:
    options = spec.options
    if "budget" in options:
        raise RecipeError("a budget has no use without preset auto", fix=f"write auto:budget={options['budget'][:40]}")
    names = ("format", "group", "rounder", "input_scales", "kv")
    steps = from_options(spec.preset, None, None, *(options.get(name) for name in names))
    given = options.get("imatrix")
    if given in (None, "none"):
        return _Kind(steps.format, steps.calibrated)
    if steps.format != GGUF:
        raise RecipeError(f"imatrix has no use in format {steps.format}", fix="leave it out, or use a gguf preset")
    if given == AUTO:
        return _Kind(steps.format, True, AUTO)
    return _Kind(steps.format, steps.calibrated, importance.read(Path(given).expanduser()).sha256)


def _plain(key: str, value: Any) -> str:
    """A value as a part of a file's name; a path by what it ends in."""
    words = Path(value).stem.replace(".", "-") if key == "imatrix" else str(value)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", words).strip("-.")


# ---- what is to be done ----


@dataclass(frozen=True, slots=True)
class _Measured:
    """How every row is measured: the options of verify."""

    text: str | Path | None
    windows: int
    length: int
    gate: str
    device: str
    engine: str | None
    engine_python: str | Path | None

    def engine_for(self, form: str) -> str | None:
        """The engine to ask for: llama.cpp has GGUF files to itself, and needs no word for them."""
        return self.engine if self.engine and (self.engine == "llama.cpp") == (form == GGUF) else None

    def options(self, form: str) -> dict[str, Any]:
        chosen = self.engine_for(form)
        return {**asdict(self), "engine": chosen, "engine_python": self.engine_python if chosen else None}

    def check(self, formats: set[str]) -> None:
        gates.check_use(self.gate)
        name, python = self.engine, self.engine_python
        if name is not None and name not in ENGINES:
            raise UnknownNameError(f"unknown engine {name!r}", fix=suggest(name, ENGINES))
        if name and not any(self.engine_for(form) for form in formats):
            raise QuantryError(f"--engine {name} has no use: it serves none of these formats", fix="leave --engine out")
        if python is not None and (name is None or not Path(python).expanduser().is_file()):
            problem = "is no file" if name else "has no use without an engine"
            raise QuantryError(f"--engine-python {python} {problem}", fix="give --engine and the python that it is in")


@dataclass(frozen=True, slots=True)
class _Item:
    """A row to be: what makes it, which is nothing for another tool's file, and what it is measured with."""

    name: str
    text: str
    target: str | Path
    quantize: Mapping[str, Any] | None  # its options
    request: Mapping[str, Any]  # what tells one job from another
    verify: Mapping[str, Any]
    measure: Mapping[str, Any]  # what tells one measurement from another

    @property
    def peer(self) -> bool:
        return self.quantize is None


@dataclass(frozen=True, slots=True)
class _Order:
    """A sweep before its first job."""

    model: str | Path
    identity: str
    parameters: int
    items: tuple[_Item, ...]
    begun: Sweep


def _order(
    model: str | Path,
    out: Path,
    specs: Sequence[Spec],
    peers: str | Sequence[str | Path],
    calibration: Mapping[str, Any],
    measured: _Measured,
) -> _Order:
    """Checks everything that does not take the artefacts themselves to be seen."""
    where = computing(measured.device)
    anatomy = sixteen_bit(open_checkpoint(model))
    kinds = [_kind(spec, anatomy) for spec in specs]
    others = _peers(peers, specs)
    measured.check({*(kind.format for kind in kinds), *(form for _, _, form in others)})
    text = Path(measured.text).expanduser() if measured.text else None
    content, name = read_text(text) if text else default_text()
    check_place(out)
    folder = local_folder(model)
    pieces = cut(content, tokenizer(open_source(model)), measured.length, measured.windows or None)
    read = _calibration(calibration, folder, anatomy, kinds)
    digest = hashlib.sha256(content.encode()).hexdigest()

    def item(name: str, told: str, target: str | Path, form: str, **made: Any) -> _Item:
        verify = {**measured.options(form), "text": text}
        measure = {**verify, "text": digest, "engine_python": None, "quantry": __version__}
        return _Item(name, told, target, verify=verify, measure=measure, **made)

    def ours(spec: Spec, kind: _Kind) -> _Item:
        request = {"quantry": __version__, "device": measured.device, "preset": spec.preset, **spec.options}
        request |= {"imatrix": kind.imatrix, "calibration": read if kind.calibrated else None}
        options = {"preset": spec.preset, "device": measured.device, **spec.options}
        options |= calibration if kind.calibrated else {}
        return item(spec.name, spec.text, out / spec.name, kind.format, quantize=options, request=request)

    items = [ours(spec, kind) for spec, kind in zip(specs, kinds, strict=True)]
    items += [item(name, name, target, form, quantize=None, request={}) for name, target, form in others]
    begun = Sweep(
        model=Path(str(model)).name,
        path=str(out),
        gate=measured.gate,
        text={"name": name, "windows": len(pieces), "length": measured.length},
        rows=(),
        notes=_notes(where.type, sum(kind.calibrated for kind in kinds)),
    )
    return _Order(model, identity(open_checkpoint(folder)), anatomy.parameters, tuple(items), begun)


def _peers(given: str | Sequence[str | Path], specs: Sequence[Spec]) -> list[tuple[str, str, str]]:
    """Name, place and format of files to measure beside ours; where names are alike, with its folder."""
    parts = given.split(",") if isinstance(given, str) else [str(one) for one in given]
    targets = {part.strip(): Path(part.strip()).expanduser().absolute() for part in parts if part.strip()}
    alone = Counter(end.name for end in targets.values())
    found: list[tuple[str, str, str]] = [
        (end.name if alone[end.name] == 1 else f"{end.parent.name}/{end.name}", target, open_checkpoint(target).format)
        for target, end in targets.items()
    ]
    names = Counter([*(name for name, _, _ in found), *(spec.name for spec in specs)])
    name, count = names.most_common(1)[0]
    if count > 1:
        raise RecipeError(f"{count} files of the table would be called {name}", fix="rename the peer, or leave it out")
    return found


def _calibration(given: Mapping[str, Any], folder: Path, anatomy: Anatomy, kinds: Sequence[_Kind]) -> str | None:
    """The fingerprint of the text that all calibrated jobs read; it is read and checked before the first of them."""
    options = {name: value for name, value in given.items() if value is not None}
    if not any(kind.calibrated for kind in kinds):
        if options:
            raise RecipeError(f"--{next(iter(options))} has no use: no preset is calibrated", fix=CALIBRATED)
        return None
    how = {"samples": SAMPLES, "length": LENGTH, **options, "seed": SEED, "context": anatomy.context_length}
    return load(how.pop("data", None), load_tokenizer(folder), **how).fingerprint


def _notes(device: str, calibrated: int) -> tuple[str, ...]:
    words = f"on {device} each of the {calibrated} calibrated jobs runs the model anew: statistics are not kept"
    return (words,) if calibrated > 1 and device != "cpu" else ()


# ---- the place, and what earlier runs left there ----


def check_place(out: Path) -> None:
    """A sweep goes into a new or empty folder, or goes on in its own."""
    left = {file.name for file in out.iterdir()} if out.is_dir() else set()
    if NOTE not in left and not left <= OURS:
        raise OutputError(
            f"{out} is not empty and holds no {NOTE}",
            fix="choose another output, or the folder of a sweep",
        )
    if not left:
        check_target(out)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keeps two sweeps apart; what the disk says is one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise OutputError(
                    f"another sweep is writing {out}", fix="wait for it or choose another output"
                ) from error
            try:
                yield
            finally:
                (out / LOCK).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {error.filename or out}: {error.strerror}", fix="mend that and run the same command again"
        ) from error


class _Jobs:
    """The jobs of a sweep by name: `asked` before one begins, what was `made` and its `proof` after; in sweep.json."""

    def __init__(self, folder: Path, order: _Order) -> None:
        self._folder, self._order = folder, order
        self._jobs: dict[str, dict[str, Any]] = self._read() if (folder / NOTE).exists() else {}
        self._problems: dict[str, str] = {}
        for item in order.items:
            self._check(item)

    def _read(self) -> dict[str, dict[str, Any]]:
        content = _object(self._folder / NOTE)
        if content.get("identity") != self._order.identity:
            raise OutputError(
                f"{self._folder} is a sweep of another model, {str(content.get('model'))[:40]}",
                fix="choose another output",
            )
        jobs = content.get("jobs")
        if not isinstance(jobs, dict) or not all(isinstance(job, dict) for job in jobs.values()):
            raise _damaged(self._folder / NOTE)
        return jobs

    def _check(self, item: _Item) -> None:
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
        if out.exists() and job.get("made", _digest(out)) != _digest(out):
            raise OutputError(f"{out} is not what the sweep wrote", fix="remove it to have it made anew")

    def make(self, item: _Item, tell: "_Telling") -> None:
        """Writes an artefact unless it is there; of another tool's file looks at what it is."""
        if item.peer:
            made, sizes = _looked(item.target, self._order.parameters)
        else:
            if not Path(item.target).exists():
                self._jobs[item.name] = {"asked": _stored(item.request)}
                self.write(self._order.begun)
                quantize(self._order.model, item.target, **item.quantize or {}, progress=tell.inner("quantizing"))
            content = _object(Path(item.target) / "quantry.json")
            made, sizes = _digest(Path(item.target)), {key: content[key] for key in SIZES}
        job = self._jobs.setdefault(item.name, {})
        if job.get("made", made) != made:
            job.clear()  # another file under a known name
        job |= {"made": made, "sizes": sizes}

    def prove(self, item: _Item, tell: "_Telling") -> None:
        """Measures an artefact, unless that was done on the same text in the same way."""
        job = self._jobs[item.name]
        if "proof" in job and job.get("measure") == _stored(item.measure):
            tell.say("is made and measured already")
            return
        job.pop("proof", None)
        proof = verify(item.target, reference=self._order.model, **item.verify, progress=tell.inner("verifying"))
        job |= {"measure": _stored(item.measure), "proof": _proven(proof)}
        self.write(self._order.begun)

    def refuse(self, item: _Item, problem: str) -> None:
        self._problems[item.name] = problem
        self._jobs.setdefault(item.name, {})

    def outcome(self, item: _Item) -> Outcome:
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
        return {item.name: {"asked": dict(item.request), "files": _hashes(self._folder / item.name)} for item in made}

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


def _digest(artefact: Path) -> str:
    """Of what an artefact says of itself, the proof left out; its files must be there in the sizes that it tells."""
    content = _object(artefact / "quantry.json")
    try:
        facts = {key: content[key] for key in ("quantry", "preset", *SIZES, "recipe", "files")}
        whole = all((artefact / name).stat().st_size == told["bytes"] for name, told in facts["files"].items())
    except (KeyError, TypeError, AttributeError, OSError) as error:
        raise _damaged(artefact) from error
    if not whole:
        raise _damaged(artefact)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _hashes(artefact: Path) -> dict[str, str]:
    return {name: told["sha256"] for name, told in _object(artefact / "quantry.json")["files"].items()}


def _object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise OutputError(f"{file.parent} has no {file.name}", fix="remove it or choose another output") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file) from error
    if not isinstance(content, dict):
        raise _damaged(file)
    return content


def _damaged(path: Path) -> OutputError:
    return OutputError(f"{path} is damaged", fix="remove it to have it made anew")


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


# ---- what is shown ----


class _Telling:
    """Which artefact of how many, and how far it is."""

    def __init__(
        self, announce: Callable[[str], None] | None, progress: Progress | None, number: int, count: int, name: str
    ) -> None:
        self._announce, self._progress, self._number, self._count = announce, progress, number, count
        self._name = name
        self.say("")

    def say(self, words: str) -> None:
        if self._announce:
            self._announce(f"{self._number + 1} of {self._count}: {self._name} {words}".rstrip())

    def inner(self, what: str) -> Progress | None:
        """Progress of one job, as a share of it."""
        if self._progress is None:
            return None
        report = self._progress

        def tell(done: int, total: int, label: str) -> None:
            report(self._number, self._count, f"{self._name}: {what}, {done / total if total else 0:.0%}, {label}")

        return tell

    def end(self, row: Outcome) -> None:
        if row.problem:
            self.say(f"is left out: {row.problem}")
        if self._progress:
            self._progress(self._number + 1, self._count, self._name)


def marked(rows: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The rows, with those marked that no other one beats: as small or smaller, and with as low a KL or a lower one."""
    spots = {(row.bytes, row.judged) for row in rows if row.bytes is not None and row.judged is not None}

    def best(own: tuple[int | None, float | None]) -> bool:
        """Equals do not beat each other."""
        return own in spots and not any(one != own and one[0] <= own[0] and one[1] <= own[1] for one in spots)

    return tuple(replace(row, frontier=best((row.bytes, row.judged))) for row in rows)


def page(done: Sweep, provenance: Mapping[str, Any]) -> Content:
    """The report of a sweep."""
    problems = tuple(f"{row.name}: {row.problem}" for row in done.rows if row.problem)
    return Content(
        title=f"{done.model} in {len(done.rows)} ways",
        model=done.model,
        rows=tuple(_row(row) for row in done.ranked() if row.bytes is not None),
        noise_floor=done.noise_floor,
        reference_perplexity=done.reference_perplexity,
        gate=done.gate,
        notes=(*problems, *done.notes),
        versions={"quantry": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        provenance={"text": dict(done.text), "artefacts": provenance},
    )


def _row(one: Outcome) -> Row:
    names = {each.name for each in fields(Row)} & {each.name for each in fields(Outcome)}
    return Row(**{name: getattr(one, name) for name in names})
