"""A proof: checks, weights, text, engine, prompts and tasks, and the verdict on all of them.

The cheapest comes first: files, vocabulary, tokenizer and template, then the weights tensor by tensor, then the text
in the 16-bit model (once, it is cached), in the artefact decoded from its bytes, and in the engine that serves it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from quantry.devices.catalogue import parse
from quantry.engines.contract.catalogue import verifying
from quantry.errors import CheckpointError, QuantryError
from quantry.models.attention import context_length
from quantry.models.reader import open_checkpoint
from quantry.planning.deployment import Deployment
from quantry.planning.memory.footprint import footprint
from quantry.proof import gate as gates
from quantry.proof import measure, tensor_errors
from quantry.proof.checks import START, Check, checks
from quantry.proof.domains import FIGURES, Domains, Judge, gated
from quantry.proof.gate import Number
from quantry.proof.measure import Decoded, Measurements, Part
from quantry.proof.parts import ENOUGH, FIRST, Measure, measure_parts
from quantry.proof.questions import (
    Answered,
    Questions,
    ask,
    compare_prompts,
    compare_tasks,
    decoded_model,
    read_questions,
    served_model,
)  # fmt: skip
from quantry.proof.reference import Reference
from quantry.proof.reference import reference as make_reference
from quantry.proof.served.contract import Served
from quantry.proof.served.engines import scoring_engine
from quantry.proof.tasks.judge import JudgeEndpoint
from quantry.proof.tensor_errors import TensorError
from quantry.proof.text import TextFile, Texts, Window, fitting_length, load_texts, names_of
from quantry.proof.text import windows as cut
from quantry.proof.unchanged import unchanged
from quantry.quantizing.artefact_file import read_artefact_file
from quantry.quantizing.recipe_file import from_card
from quantry.quantizing.sources import ModelSource, open_source, tokenizer
from quantry.report.sizes import counted
from quantry.report.stages import named, of_all, stages
from quantry.storage import ARTEFACT_FILE
from quantry.types import Progress, Proof, Workload

FATAL = ("finished", "vocabulary")  # checks without which nothing can be measured
LAST = "chat-template"  # of the checks, if all could be made
SHOWN = 5  # tensors with the largest error
COSTS, ENGINE_COST = {"reference": 5.0, "decoded": 4.0}, 2.0  # about how the time is divided among the passes


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `verify`."""

    text: Texts
    prompts: Path | None
    tasks: str | None
    limit: int | None
    judge: JudgeEndpoint | None
    engine: str | None
    engine_python: Path | None
    gate: str
    windows: int
    length: int
    max_tokens: int
    device: str
    limits: Mapping[str, float] = field(default_factory=dict)  # one's own, by measure
    seconds: float | None = None  # for the windows of the text; None: for all of them

    def questions(self) -> Questions:
        return read_questions(self.prompts, self.tasks, self.limit, self.max_tokens, self.judge)

    def check_engine(self, artefact: str) -> None:
        """Raises QuantryError if the given engine is unknown, is not installed or does not load the artefact."""
        if self.engine is not None:
            engine = scoring_engine(self.engine, self.engine_python)
            self.engine_for(open_checkpoint(artefact).format)
            engine.check()

    def engine_for(self, container: str) -> str | None:
        """Returns the engine to measure in: the given one, or for GGUF files the embedded one, which is always there.

        Raises QuantryError if the given one does not load such files.
        """
        known, is_gguf, name = verifying(), container == "gguf", self.engine
        if name is None:
            return next((engine for engine, facts in known.items() if facts.embedded), None) if is_gguf else None
        if known[name].embedded != is_gguf:
            wanted, given = "a GGUF file", "a folder of safetensors"
            wanted, given = (wanted, given) if known[name].embedded else (given, wanted)
            raise QuantryError(f"{name} is measured on {wanted}, not on {given}", fix="leave --engine out")
        return name


def prove(artefact: str, reference: str, options: VerifyOptions, progress: Progress | None = None) -> Proof:
    """Measures what `artefact` lost compared with `reference`, and judges it.

    Raises QuantryError if an option is wrong, the artefact is unfinished or changes, or the engine fails.
    """
    with unchanged(artefact, reference):
        return _prove(artefact, reference, options, progress)


def _prove(artefact: str, reference: str, options: VerifyOptions, progress: Progress | None) -> Proof:
    started, questions = monotonic(), options.questions()
    gates.check_use(options.gate)
    texts = load_texts(options.text)
    options.check_engine(artefact)
    original = open_source(reference)
    cuts = _Cuts.of(texts, options, original)
    checked = _check_measurable(reference, artefact, "".join(text.start(START // len(texts)) for text in texts))
    quantized = open_source(artefact, options.device)
    if (context_length(quantized.config) or cuts.length) < cuts.length:
        cuts = _Cuts.of(texts, options, original, quantized)
    shown = stages(progress, {"weights": tensor_errors.COST, "windows": 1})
    models = _Models(original, quantized, options.engine_for(quantized.format), options, progress, shown["windows"])

    base = models.ask_original(questions)
    errors = tensor_errors.errors(original, quantized, named(shown["weights"], "weights"), device=options.device)
    recorded = _recorded(quantized)
    judge = partial(gates.judge, use=options.gate, preset=recorded.get("preset"), own=options.limits)
    measured, left_out = measure_parts(
        len(cuts.windows),
        options.seconds,
        models.measuring(cuts, base.windows, started),
        lambda parts: _is_decided(judge, parts),
        first=max(len(texts), ENOUGH if models.starts_engine else FIRST),  # a window of each text
        started=started,
    )
    answered = models.ask_quantized(questions, chats=base.chats)
    prompts = _prompt_report(questions, base, answered, measured, progress)

    judged = map(asdict, judge(_numbers(measured, prompts)))
    domains, told = cuts.domains.judged(measured, judge)
    findings = [*({**asdict(check), "warning": False} for check in checked), *_suspects(errors), *judged, *told]
    return Proof(
        artefact=artefact,
        reference=reference,
        gate=options.gate,
        verdict=gates.verdict(findings),
        **_figures(measured),
        findings=tuple(findings),
        text=cuts.facts(measured),
        domains=tuple(domains),
        worst_tensors=tuple(asdict(tensor) for tensor in sorted(errors, key=lambda tensor: -tensor.error)[:SHOWN]),
        memory=_memory(original, recorded, models.engine, measured),
        prompts=prompts,
        tasks=compare_tasks(base, answered),
        notes=(*cuts.notes, *left_out, *_notes(measured, quantized, default_text=options.text is None)),
    )


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The windows that are measured, of one text or of several in turn."""

    domains: Domains
    length: int
    windows: list[Window]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, texts: Sequence[TextFile], options: VerifyOptions, original: ModelSource, *others: ModelSource
    ) -> "_Cuts":
        """Cuts texts with the original's tokenizer into windows that fit the context of all models."""
        length, notes = fitting_length(options.length, *(source.config for source in (original, *others)))
        words = tokenizer(original)
        each = [cut(text, words, length, options.windows or None) for text in texts]
        order = sorted((place, text) for text, own in enumerate(each) for place in range(len(own)))
        domains = Domains(names_of(texts), tuple(text for _, text in order))
        return cls(domains, length, [each[text][place] for place, text in order], notes)

    def facts(self, measured: Measurements) -> dict[str, Any]:
        """Returns what was measured of the text."""
        counts = {"windows": measured.text_windows, "asked": len(self.windows), "length": self.length}
        return {"name": ", ".join(self.domains.names), **counts, "positions": measured.decoded_figures.positions}


@dataclass(frozen=True, slots=True)
class _Models:
    """Both models; each is loaded when it runs, one at a time."""

    original: ModelSource
    quantized: ModelSource
    engine: str | None  # that serves the quantized one
    options: VerifyOptions
    progress: Progress | None
    measuring_progress: Progress | None

    @property
    def starts_engine(self) -> bool:
        """Says if an engine that takes its time to start measures each part."""
        return self.engine is not None and not verifying()[self.engine].embedded

    def ask_original(self, questions: Questions) -> Answered:
        return ask(questions, decoded_model(self.original, self.options.device), progress=self.progress)

    def ask_quantized(self, questions: Questions, *, chats: bool) -> Answered:
        """Asks the artefact in its engine, or decoded from its bytes."""
        python, device = self.options.engine_python, self.options.device
        decoded = decoded_model(self.quantized, device)
        model = served_model(self.quantized, self.engine, python, device) if self.engine else decoded
        return ask(questions, model, chats=chats, progress=self.progress)

    def measuring(self, cuts: _Cuts, others: Sequence[Window], started: float) -> Measure:
        """Returns a function that runs both models on windows of a text, and first on `others` too."""
        limit = self.options.seconds

        def used() -> float:
            return (monotonic() - started) / limit if limit else 0.0

        def measure_part(places: range, like: Reference | None) -> Part:
            costs = {**COSTS, self.engine: ENGINE_COST} if self.engine else COSTS
            report = named(self.measuring_progress, f"{counted(len(cuts.windows), 'window')} of {cuts.length} tokens")
            shown = stages(of_all(report, places, len(cuts.windows), used), costs)
            windows = [*cuts.windows[places.start : places.stop], *(() if like else others)]
            reference = make_reference(
                self.original,
                windows,
                like=like,
                device=self.options.device,
                progress=named(shown["reference"], "reference"),
            )
            began = monotonic()
            decoded, served = self._run(reference, shown)
            return Part(reference, decoded, served, len(places), monotonic() - began)

        return measure_part

    def _run(self, reference: Reference, shown: Mapping[str, Progress | None]) -> tuple[Decoded, Served | None]:
        """Runs the artefact, decoded and in its engine."""
        engine, python = self.engine, self.options.engine_python
        progress = named(shown["decoded"], "decoded")
        decoded = measure.decode(self.quantized, reference, device=self.options.device, progress=progress)
        if engine is None:
            return decoded, None
        return decoded, measure.serve(self.quantized, reference, engine, python=python, progress=shown[engine])


def _check_measurable(reference: str | Path, artefact: str | Path, content: str) -> tuple[Check, ...]:
    """Makes all checks. Raises CheckpointError if a failed one leaves nothing to measure."""
    checked = checks(reference, artefact, content)
    for check in checked:
        if not check.ok and (check.name in FATAL or (check is checked[-1] and check.name != LAST)):
            raise CheckpointError(f"{artefact}: {check.words}", fix=check.fix)
    return checked


def _prompt_report(
    questions: Questions, base: Answered, answered: Answered, measured: Measurements, progress: Progress | None
) -> dict[str, Any] | None:
    report = compare_prompts(questions, base, answered, progress)
    if report and measured.prompt_figures:
        report["decoded"] = measured.prompt_figures.values(FIGURES)
    return report


def _suspects(errors: Sequence[TensorError]) -> list[dict[str, Any]]:
    common = {"name": "weights", "ok": False, "fix": "quantize again from the 16-bit model", "warning": False}
    return [
        {**common, "words": f"{suspect.name}: {suspect.words}", "value": suspect.error}
        for suspect in tensor_errors.suspects(errors)
    ]


def _numbers(measured: Measurements, prompt_report: Mapping[str, Any] | None) -> dict[str, Number]:
    """Returns the numbers that the gate judges: those of the decoded bytes, and those of the engine if there is one."""
    numbers = {**gated(measured.decoded_figures), "noise_floor": measured.reference.noise_floor}
    if measured.served_figures and measured.gap:
        numbers |= gated(measured.served_figures, gates.SERVED)
        numbers["served_top1"] = measured.gap.top1
    if prompt_report:
        numbers["agreement"] = prompt_report["agreement"]["value"]
    return numbers


def _is_decided(judge: Judge, measured: Measurements) -> bool:
    """Says if every interval lies on one side of its limit."""
    return not any(finding.straddles for finding in judge(_numbers(measured, None)))


def _figures(measured: Measurements) -> dict[str, Any]:
    figures, reference = measured.decoded_figures, measured.reference
    return {
        **figures.values(FIGURES),
        "reference_perplexity": figures.reference_perplexity.value,
        "noise_floor": reference.noise_floor,
        "intervals": figures.intervals(FIGURES),
        "compact": {"k": reference.k, "vocabulary": reference.vocabulary, "shortfall": measured.shortfall},
        "served": _served(measured),
    }


def _served(measured: Measurements) -> dict[str, Any] | None:
    served, figures, gap = measured.served, measured.served_figures, measured.gap
    if served is None or figures is None or gap is None:
        return None
    return {
        "engine": served.engine,
        "version": served.version,
        **figures.values(FIGURES),
        "intervals": figures.intervals(FIGURES),
        "gap": asdict(gap),
    }


def _memory(
    original: ModelSource, recorded: Mapping[str, Any], engine: str | None, measured: Measurements
) -> dict[str, Any] | None:
    """Returns the memory that the engine reported, and what the plan predicts for the same load."""
    if engine is None or measured.served is None or not measured.served.memory:
        return None
    longest = max(len(window.tokens) for window in measured.reference.windows)
    predicted: dict[str, int] = {}
    if recorded:
        try:
            deployment = Deployment(open_checkpoint(original.path), from_card(recorded), engine, parse("cpu").device)
            needed = footprint(deployment, Workload(longest, prompt=longest))
            predicted = {"weights": needed.weights}
            if verifying()[engine].embedded:  # others take as much for a cache as they are given
                predicted |= {"kv_cache": needed.kv_cache, "compute": needed.activations}
        except QuantryError:  # a shape the plan does not know is still measured
            predicted = {}
    return {"predicted": predicted, "measured": dict(measured.served.memory)}


def _notes(measured: Measurements, artefact: ModelSource, *, default_text: bool) -> tuple[str, ...]:
    reference, served, lacking = measured.reference, measured.served, measured.shortfall
    notes = [*reference.notes, *(served.notes if served else ())]
    if lacking > 0.01:
        kept = f"the {reference.k} tokens kept of the reference"
        notes.append(f"{kept} miss {lacking:.1%} of the divergence, more than 1 %")
    if default_text:
        notes.append("measured on simple stories; give --text FILE with text of your own kind")
    if served is None and artefact.schemes:
        notes.append("not measured in an engine: give --engine vllm or transformers to prove it as served")
    if artefact.cache:
        notes.append("the decoded figures are with a 16-bit KV cache; those of the engine with the one it uses")
    return tuple(notes)


def _recorded(artefact: ModelSource) -> dict[str, Any]:
    """Returns the content of quantry.json; empty for another tool's artefact."""
    folder = _folder(artefact)
    return read_artefact_file(folder) if (folder / ARTEFACT_FILE).is_file() else {}


def _folder(artefact: ModelSource) -> Path:
    return artefact.path if artefact.path.is_dir() else artefact.path.parent
