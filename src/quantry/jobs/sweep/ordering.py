"""What is to be done, item by item, and all that can be refused before the first job begins."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantry import __version__
from quantry.engines.contract.catalogue import verifying
from quantry.errors import QuantryError, RecipeError, UnknownNameError
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs.quantize import CALIBRATED
from quantry.jobs.sweep.place import check_place
from quantry.jobs.sweep.specs import Kind, Spec, kind_of
from quantry.jobs.sweep.table import Sweep
from quantry.models.anatomy import sixteen_bit
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.tokenizer import load_tokenizer
from quantry.numerics.device import device as computing
from quantry.proof import gate as gates
from quantry.proof.sources import open_source, tokenizer
from quantry.proof.text import default_text, read_text
from quantry.proof.text import windows as cut
from quantry.quantizing.calibration.per_block import SEED
from quantry.quantizing.calibration.text import LENGTH, SAMPLES, load
from quantry.registry import suggest
from quantry.types import Anatomy


@dataclass(frozen=True, slots=True)
class Measured:
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
        facts = verifying()[self.engine] if self.engine else None
        return self.engine if facts and facts.embedded == (form == GGUF) else None

    def options(self, form: str) -> dict[str, Any]:
        chosen = self.engine_for(form)
        return {**asdict(self), "engine": chosen, "engine_python": self.engine_python if chosen else None}

    def check(self, formats: set[str]) -> None:
        gates.check_use(self.gate)
        name, python = self.engine, self.engine_python
        if name is not None and name not in verifying():
            raise UnknownNameError(f"unknown engine {name!r}", fix=suggest(name, tuple(verifying())))
        if name and not any(self.engine_for(form) for form in formats):
            raise QuantryError(f"--engine {name} has no use: it serves none of these formats", fix="leave --engine out")
        if python is not None and (name is None or not Path(python).expanduser().is_file()):
            problem = "is no file" if name else "has no use without an engine"
            raise QuantryError(f"--engine-python {python} {problem}", fix="give --engine and the python that it is in")


@dataclass(frozen=True, slots=True)
class Item:
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
class Order:
    """A sweep before its first job."""

    model: str | Path
    identity: str
    parameters: int
    items: tuple[Item, ...]
    begun: Sweep


def order_of(
    model: str | Path,
    out: Path,
    specs: Sequence[Spec],
    peers: str | Sequence[str | Path],
    calibration: Mapping[str, Any],
    measured: Measured,
) -> Order:
    """Checks everything that does not take the artefacts themselves to be seen."""
    where = computing(measured.device)
    anatomy = sixteen_bit(open_checkpoint(model))
    kinds = [kind_of(spec, anatomy) for spec in specs]
    others = read_peers(peers, specs)
    measured.check({*(kind.format for kind in kinds), *(form for _, _, form in others)})
    text = Path(measured.text).expanduser() if measured.text else None
    content, name = read_text(text) if text else default_text()
    check_place(out)
    folder = local_folder(model)
    pieces = cut(content, tokenizer(open_source(model)), measured.length, measured.windows or None)
    read = _calibration(calibration, folder, anatomy, kinds)
    digest = hashlib.sha256(content.encode()).hexdigest()

    def item(name: str, told: str, target: str | Path, form: str, **made: Any) -> Item:
        verify = {**measured.options(form), "text": text}
        measure = {**verify, "text": digest, "engine_python": None, "quantry": __version__}
        return Item(name, told, target, verify=verify, measure=measure, **made)

    def ours(spec: Spec, kind: Kind) -> Item:
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
    return Order(model, identity(open_checkpoint(folder)), anatomy.parameters, tuple(items), begun)


def read_peers(given: str | Sequence[str | Path], specs: Sequence[Spec]) -> list[tuple[str, str, str]]:
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


def _calibration(given: Mapping[str, Any], folder: Path, anatomy: Anatomy, kinds: Sequence[Kind]) -> str | None:
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
