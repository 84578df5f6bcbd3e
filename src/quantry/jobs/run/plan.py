"""What a run will do, planned before anything is written: everything that can be refused is refused here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from quantry.devices.detect import detect
from quantry.engines.contract.catalogue import engine_facts, usual
from quantry.engines.contract.options import HOST
from quantry.errors import CheckpointError, QuantryError
from quantry.jobs.auto.choices import FORMATS as MIXED_FORMATS
from quantry.jobs.output_folder import OutputFolder, read_card
from quantry.models.reader import open_checkpoint, small_folder
from quantry.planning.budget import parse
from quantry.planning.commands import plain_name
from quantry.planning.option import Option
from quantry.planning.plan import Plan, plan
from quantry.planning.rules import find_use
from quantry.proof.text import TextFile, check_time, fitting_length, load_text
from quantry.proof.text import windows as cut
from quantry.quantizing.recipe import AUTO, presets
from quantry.report.sizes import counted, duration, human
from quantry.serving.process import check_port
from quantry.serving.select import Installed, find_engine
from quantry.storage import ARTEFACT_FILE

LENGTH = 512  # tokens of a window that is measured
PLAN, LOG = "plan.json", "engine.log"
QUESTION = "What color is the sky?"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run in addition to its model and folder; None leaves the choice to Quantry."""

    use: str | None = None
    budget: str | None = None  # a size for preset auto
    gpu: str | None = None  # another machine to plan for
    engine: str | None = None
    engine_python: str | Path | None = None
    context: int | None = None
    port: int | None = None  # 0 takes a free one
    text: str | Path | None = None  # to measure on
    windows: int = 16
    proof_time: float | None = 180.0  # seconds; None: for all windows
    question: str = QUESTION
    device: str | None = None  # to compute on; a GPU if there is one

    @property
    def python(self) -> Path | None:
        """The python of the engine."""
        return Path(self.engine_python).expanduser() if self.engine_python else None


@dataclass(frozen=True, slots=True)
class MeasuredText:
    """The text to measure on, as the model's tokenizer cuts it."""

    digest: str
    windows: int
    length: int  # tokens of a window


class DeclinedError(Exception):
    """The user answered no; nothing was written."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run before its first step."""

    model: str  # as the user wrote it
    source: str  # what can be opened
    folder: OutputFolder
    options: RunOptions
    plan: Plan
    candidate: Option
    installed: Installed | None  # None: the engine is for another machine
    device: str
    text: "MeasuredText"
    notes: tuple[str, ...]
    fallbacks: tuple[Option, ...] = ()  # for the same engine, tried in this order if the gate fails

    @property
    def preset(self) -> str:
        return AUTO if self.options.budget else self.candidate.preset

    @property
    def artefact(self) -> Path:
        """The folder of the artefact, named as `quantry plan` names it."""
        budget, stored = self.options.budget, self.candidate.format
        usual_format = "gguf" if budget else presets()[self.candidate.preset].formats[0]
        size = f"-{re.sub(r'[^A-Za-z0-9.]+', '-', budget).strip('-.')}" if budget else ""
        suffix = "" if stored == usual_format else f"-{stored}"
        return self.folder.path / f"{plain_name(self.source)}-{self.preset}{size}{suffix}"

    @property
    def gate(self) -> str:
        return find_use(self.options.use).gate

    @property
    def measured_in(self) -> str | None:
        """The engine for `verify`, if it is installed and `verify` can score the format in it."""
        facts = engine_facts(self.candidate.engine).verify
        fits = facts is not None and facts.embedded == (self.candidate.format == "gguf")
        return self.candidate.engine if self.installed and fits else None

    @property
    def quantize_options(self) -> dict[str, Any]:
        """The arguments of quantize."""
        common = {"preset": self.preset, "format": self.candidate.format, "device": self.device}
        if self.options.budget:
            return {**common, "budget": self.options.budget}
        return {**common, "group": self.candidate.group, "keep_odd": True}  # as it was planned

    @property
    def verify_options(self) -> dict[str, Any]:
        """The arguments of verify."""
        name = self.measured_in
        facts = engine_facts(name).verify if name else None
        python = self.options.engine_python if facts and not facts.embedded else None
        common = {"gate": self.gate, "windows": self.options.windows, "length": LENGTH, "device": self.device}
        common["proof_time"] = self.options.proof_time
        return {**common, "engine": name, "engine_python": python, "text": self.options.text}

    @property
    def is_quantized(self) -> bool:
        return (self.artefact / ARTEFACT_FILE).is_file()

    @property
    def is_verified(self) -> bool:
        return self.is_quantized and "proof" in read_card(self.artefact)

    def summary(self) -> str:
        """Returns the plan in a line."""
        best = self.candidate
        if self.options.budget:
            return f"{AUTO} for {self.options.budget} as {best.format}, in {best.engine}"
        speed = f"{best.speed['decode_tokens_per_s']:,.0f} tok/s"
        memory = f"{human(best.memory['per_device'])} of {human(best.memory['limit'])}"
        return (
            f"{best.preset} in {best.engine}: {best.quality}, about {speed}, {memory} on {self.plan.hardware['device']}"
        )

    def proof_words(self) -> str:
        """Returns what the proof will measure."""
        served = f", decoded and in {self.measured_in}" if self.measured_in else ""
        words = f"{counted(self.text.windows, 'window')} of {self.text.length} tokens, in 16 bit{served}"
        limit = self.options.proof_time
        return f"measures up to {words}, for at most about {duration(limit)}" if limit else f"measures {words}"

    def fall_back(self, failure: str) -> "RunPlan | None":
        """Returns the plan with the next candidate that should lose less; None if there is none."""
        if not self.fallbacks:
            return None
        first, *rest = self.fallbacks
        note = f"{self.candidate.preset} was tried first, and fails the gate {self.gate}: {failure}"
        return replace(self, candidate=first, fallbacks=tuple(rest), notes=(*self.notes, note))

    def question(self) -> str:
        """Returns the question for the user: what is about to be done."""
        work = []
        if not self.is_quantized:
            work.append(f"quantizes {self.plan.model['parameters'] / 1e9:,.2f} billion parameters")
        if not self.is_verified:
            work.append(f"measures {counted(self.text.windows, 'window')} of {self.text.length} tokens")
        return f"{self.summary()}\nThis {' and '.join(work)}, in {self.folder.path}. Go on?"


def plan_run(model: str, output: str | Path | None, options: RunOptions) -> RunPlan:
    """Plans a run. Raises QuantryError for everything that can be refused without reading weights."""
    text = load_text(options.text)
    if options.windows < 0:
        raise QuantryError(f"--windows is {options.windows}", fix="give 1 or more, or 0 for all of the text")
    check_time(options.proof_time)
    if options.port:
        check_port(HOST, options.port)
    planned = plan(model, gpu=options.gpu, use=options.use, context=options.context, engine=options.engine)
    if planned.model["stored"] != "bf16":
        raise CheckpointError(
            f"{model} is already quantized ({planned.model['stored']})", fix=f"serve it as it is: quantry serve {model}"
        )
    if options.budget:
        parse(options.budget, parameters=planned.model["parameters"])
    choice = _choose(model, options, planned)
    source = planned.model["opened_as"]
    out = Path(output).expanduser() if output else Path(f"{plain_name(source)}-quantry")
    folder = OutputFolder(out, "run", (PLAN, LOG))
    folder.check()
    return RunPlan(
        model=model,
        source=source,
        folder=folder,
        options=options,
        plan=planned,
        candidate=choice.candidate,
        installed=choice.installed,
        device=_device(options.device),
        text=_cut(text, source, options.windows),
        notes=(*planned.notes, *choice.notes),
        fallbacks=fallbacks(choice.candidate, choice.others),
    )


def _cut(text: TextFile, model: str, windows: int) -> MeasuredText:
    """Cuts the windows that will be measured. Raises QuantryError if the text is too short for one."""
    from quantry.models.tokenizer import load_tokenizer  # imports transformers

    checkpoint = open_checkpoint(model)
    length, _ = fitting_length(LENGTH, checkpoint.config)
    with small_folder(checkpoint, plain_name(model)) as folder:
        cuts = cut(text, load_tokenizer(folder), length, windows or None)
    return MeasuredText(text.digest(), len(cuts), length)


class _Choice(NamedTuple):
    """The candidate to make, its engine, and the candidates to fall back to."""

    candidate: Option
    installed: Installed | None
    notes: tuple[str, ...] = ()
    others: Sequence[Option] = ()


def _choose(model: str, options: RunOptions, planned: Plan) -> _Choice:
    """Chooses the best candidate with an installed engine, and notes if it is not the best of all.

    Raises QuantryError if nothing fits or a named engine is missing; for another machine no engine has to be installed.
    """
    candidates = [option for option in planned.options if not options.budget or option.format in MIXED_FORMATS]
    if not candidates:
        raise _nothing_fits(model, planned)
    others = () if options.budget else planned.options
    missing: dict[str, QuantryError] = {}
    for candidate in candidates:
        if candidate.engine in missing:
            continue
        try:
            installed = find_engine(candidate.engine, detect(0), options.python)
            return _Choice(candidate, installed, _second_best(candidates[0], missing), others)
        except QuantryError as error:
            missing[candidate.engine] = error
            if options.gpu:
                return _Choice(candidates[0], None, (f"{candidate.engine} is not here: {error}",))
            if options.engine:
                raise
    return _choose_embedded(model, options, candidates[0], missing)


def _choose_embedded(model: str, options: RunOptions, best: Option, missing: Mapping[str, QuantryError]) -> _Choice:
    """Chooses the best candidate of the engine that comes with Quantry, which is not among the best of all."""
    planned = plan(model, use=options.use, context=options.context, engine=usual("gguf")[0])
    if not planned.options:
        raise next(iter(missing.values()))
    candidate = planned.options[0]
    installed = find_engine(candidate.engine, detect(0), options.python)
    return _Choice(candidate, installed, _second_best(best, missing), () if options.budget else planned.options)


def fallbacks(chosen: Option, options: Sequence[Option]) -> tuple[Option, ...]:
    """Returns the options of the same engine that should lose no more, in the plan's order, the 16-bit model last."""
    others = [option for option in options if option.engine == chosen.engine and option is not chosen]
    better = [option for option in others if option.score["quality"] >= chosen.score["quality"]]
    return tuple(sorted(better, key=lambda option: presets()[option.preset].scheme.weight.bits >= 16))


def _second_best(best: Option, missing: Mapping[str, QuantryError]) -> tuple[str, ...]:
    if best.engine not in missing:
        return ()
    return (f"{best.preset} in {best.engine} would be the best, but {missing[best.engine]}",)


def _nothing_fits(model: str, planned: Plan) -> QuantryError:
    if planned.options:
        engines = ", ".join(dict.fromkeys(option.engine for option in planned.options))
        formats = " or ".join(MIXED_FORMATS)
        return QuantryError(f"--budget needs {formats}, which {engines} does not load", fix="leave --engine out")
    near = "; ".join(f"{row.what}: {row.change} with {row.preset} in {row.engine}" for row in planned.nearest)
    return QuantryError(
        f"nothing of {model} fits {planned.hardware['name']}", fix=near or "quantry plan says why, and what would"
    )


def _device(name: str | None) -> str:
    """Returns the device to compute on: the given one, or a GPU if torch sees one."""
    from quantry.numerics.device import device

    if name is not None:
        return device(name).type
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
