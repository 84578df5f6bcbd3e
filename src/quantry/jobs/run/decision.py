"""What a run will do, decided before anything is written: what can be refused is refused here."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantry.devices.detect import detect
from quantry.engines.contract.catalogue import engine, usual
from quantry.engines.contract.options import HOST
from quantry.errors import QuantryError
from quantry.jobs.auto.choices import FORMATS as MIXED
from quantry.jobs.run.files import CARD, check_place, plain_name, read_object
from quantry.jobs.run.outcome import Asked
from quantry.planning.budget import parse
from quantry.planning.plan import Option, Plan, plan
from quantry.planning.rules import find_use
from quantry.proof.text import default_text, read_text
from quantry.quantizing.recipe import AUTO, presets
from quantry.report.sizes import human
from quantry.serving.process import check_port
from quantry.serving.select import Installed, find_engine

LENGTH = 512  # tokens of a window that is measured
_Choice = tuple[Option, "Installed | None", tuple[str, ...], Sequence[Option]]


@dataclass(frozen=True, slots=True)
class Job:
    """A run before its first step."""

    model: str  # as it was asked for
    source: str  # what can be opened
    out: Path
    asked: Asked
    plan: Plan
    option: Option
    installed: "Installed | None"  # None: the engine is for another machine
    device: str
    text: str  # its digest
    notes: tuple[str, ...]
    gentler: tuple[Option, ...] = ()  # for the same engine, to be tried in this order where the gate is failed

    @property
    def preset(self) -> str:
        return AUTO if self.asked.budget else self.option.preset

    @property
    def folder(self) -> Path:
        """Of the artefact, named as `quantry plan` names it."""
        usual = "gguf" if self.asked.budget else presets()[self.option.preset].formats[0]
        size = f"-{re.sub(r'[^A-Za-z0-9.]+', '-', self.asked.budget).strip('-.')}" if self.asked.budget else ""
        form = "" if self.option.format == usual else f"-{self.option.format}"
        return self.out / f"{plain_name(self.source)}-{self.preset}{size}{form}"

    @property
    def gate(self) -> str:
        return find_use(self.asked.use).gate

    @property
    def measured_in(self) -> str | None:
        """The engine that verify is told; it finds llama.cpp for GGUF by itself."""
        facts = engine(self.option.engine).verify
        fits = facts is not None and facts.embedded == (self.option.format == "gguf")
        return self.option.engine if self.installed and fits else None

    @property
    def making(self) -> dict[str, Any]:
        """The options of quantize."""
        if self.asked.budget:
            return {"preset": AUTO, "budget": self.asked.budget, "format": self.option.format, "device": self.device}
        option = self.option
        chosen = {"preset": option.preset, "format": option.format, "group": option.group, "device": self.device}
        return {**chosen, "keep_odd": True}  # as it was planned

    @property
    def measuring(self) -> dict[str, Any]:
        """The options of verify."""
        name = self.measured_in
        facts = engine(name).verify if name else None
        python = self.asked.engine_python if facts and not facts.embedded else None
        how = {"gate": self.gate, "windows": self.asked.windows, "length": LENGTH, "device": self.device}
        return {**how, "engine": name, "engine_python": python, "text": self.asked.text}

    @property
    def made(self) -> bool:
        return (self.folder / CARD).is_file()

    @property
    def proven(self) -> bool:
        return self.made and "proof" in read_object(self.folder / CARD)

    def words(self) -> str:
        """The plan in a line."""
        one = self.option
        if self.asked.budget:
            return f"{AUTO} for {self.asked.budget} as {one.format}, in {one.engine}"
        speed = f"{one.speed['decode_tokens_per_s']:,.0f} tokens/s"
        where = f"{human(one.memory['per_device'])} of {human(one.memory['limit'])} on {self.plan.hardware['device']}"
        return f"{one.preset} in {one.engine}: {one.quality}, about {speed}, {where}"

    def after(self, failed: str) -> "Job | None":
        """The same job with the next option that loses less; None where there is none."""
        if not self.gentler:
            return None
        first, *rest = self.gentler
        note = f"{self.option.preset} was tried first, and fails the gate {self.gate}: {failed}"
        return replace(self, option=first, gentler=tuple(rest), notes=(*self.notes, note))

    def question(self) -> str:
        """What is about to be done, for whoever has to agree."""
        work = [] if self.made else [f"{self.plan.model['parameters'] / 1e9:,.2f} billion parameters are quantized"]
        work += [] if self.proven else [f"{self.asked.windows} windows of {LENGTH} tokens are measured"]
        return f"{self.words()}\n{' and '.join(work)}, in {self.out}. Go on?"


def decided(model: str, output: str | Path | None, asked: Asked) -> Job:
    """Everything that can be refused without reading weights."""
    text = read_text(Path(asked.text).expanduser())[0] if asked.text else default_text()[0]
    if asked.windows < 1:
        raise QuantryError(f"{asked.windows} windows are nothing to measure on", fix="give --windows 1 or more")
    if asked.port:
        check_port(HOST, asked.port)
    found = plan(model, gpu=asked.gpu, use=asked.use, context=asked.context, engine=asked.engine)
    if asked.budget:
        parse(asked.budget, parameters=found.model["parameters"])
    option, installed, notes, options = _chosen(model, asked, found)
    source = found.model["opened_as"]
    out = Path(output).expanduser() if output else Path(f"{plain_name(source)}-quantry")
    check_place(out)
    digest = hashlib.sha256(text.encode()).hexdigest()
    device = _device(asked.device)
    return Job(
        model,
        source,
        out,
        asked,
        found,
        option,
        installed,
        device,
        digest,
        (*found.notes, *notes),
        _gentler(option, options),
    )


def _chosen(model: str, asked: Asked, found: Plan) -> _Choice:
    """The best option whose engine is here, with what there is to say if that is not the best of all, and the others.

    An engine that was named has to be here; one for another machine has not.
    """
    options = [one for one in found.options if not asked.budget or one.format in MIXED]
    if not options:
        raise _nothing(model, asked, found)
    missing: dict[str, QuantryError] = {}
    for option in options:
        if option.engine not in missing:
            try:
                here = _installed(option.engine, asked)
                return option, here, _instead(option, options[0], missing), () if asked.budget else found.options
            except QuantryError as error:
                missing[option.engine] = error
                if asked.gpu:
                    return options[0], None, (f"{option.engine} is not here: {error}",), ()
                if asked.engine:
                    raise
    return _on_llama(model, asked, options[0], missing)


def _on_llama(model: str, asked: Asked, best: Option, missing: Mapping[str, QuantryError]) -> _Choice:
    """The best option for llama.cpp, which comes with Quantry, where it is not among the best of all."""
    found = plan(model, use=asked.use, context=asked.context, engine=usual("gguf")[0])
    if not found.options:
        raise next(iter(missing.values()))
    option = found.options[0]
    here = _installed(option.engine, asked)
    return option, here, _instead(option, best, missing), () if asked.budget else found.options


def _gentler(chosen: Option, options: Sequence[Option]) -> tuple[Option, ...]:
    """What is expected to lose no more, in the plan's order; the 16-bit model itself comes last."""
    others = [
        one
        for one in options
        if one.engine == chosen.engine and one is not chosen and one.score["quality"] >= chosen.score["quality"]
    ]
    return tuple(sorted(others, key=lambda one: presets()[one.preset].scheme.weight.bits >= 16))


def _instead(option: Option, best: Option, missing: Mapping[str, QuantryError]) -> tuple[str, ...]:
    if best.engine not in missing:
        return ()
    return (f"{best.preset} in {best.engine} would be the best, but {missing[best.engine]}",)


def _installed(engine: str, asked: Asked) -> "Installed":
    python = Path(asked.engine_python).expanduser() if asked.engine_python else None
    return find_engine(engine, detect(0), python)


def _nothing(model: str, asked: Asked, found: Plan) -> QuantryError:
    """What to say where no option is left."""
    if found.options:
        engines = ", ".join(dict.fromkeys(one.engine for one in found.options))
        return QuantryError(
            f"--budget needs {' or '.join(MIXED)}, which {engines} does not load", fix="leave --engine out"
        )
    near = "; ".join(f"{one.what}: {one.change} with {one.preset} in {one.engine}" for one in found.nearest)
    return QuantryError(
        f"nothing of {model} fits {found.hardware['name']}", fix=near or "quantry plan says why, and what would"
    )


def _device(name: str | None) -> str:
    """Where to compute: a GPU where torch sees one."""
    from quantry.numerics.device import device as computing

    if name is not None:
        return computing(name).type
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
