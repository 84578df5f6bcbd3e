"""`quantry.verify`: checks, weights, text, engine, prompts and tasks, and the verdict on all of them.

The cheapest comes first: files, vocabulary, tokenizer and template, then the weights tensor by tensor, then the text
through the 16-bit model (once, it is cached), through the artefact decoded from its bytes, and through the engine.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantry.devices.catalogue import parse
from quantry.engines.contract.catalogue import verifying
from quantry.errors import CheckpointError, QuantryError, UnknownNameError
from quantry.models.reader import open_checkpoint
from quantry.planning.memory.footprint import footprint
from quantry.proof import gate as gates
from quantry.proof import measure as measuring
from quantry.proof import questions
from quantry.proof import tensor_errors as weights
from quantry.proof.checks import Check, checks
from quantry.proof.divergence import Divergence
from quantry.proof.gate import Number
from quantry.proof.reference import Reference
from quantry.proof.reference import reference as make_reference
from quantry.proof.served import Served
from quantry.proof.sources import ModelSource, open_source, tokenizer
from quantry.proof.tasks.judge import JudgeEndpoint
from quantry.proof.text import default_text, read_text
from quantry.proof.text import windows as cut
from quantry.quantizing import card
from quantry.quantizing.recipe_file import from_card
from quantry.registry import suggest
from quantry.storage import ARTEFACT_FILE
from quantry.types import Progress, Proof, Workload

FIGURES = ("kl", "kl_median", "kl_p99", "top1", "perplexity")
GATED = ("kl", "top1", "perplexity_ratio")
REFUSED = ("finished", "vocabulary")  # without them there is nothing to measure
LAST = "chat-template"  # of the checks, if all could be made
SHOWN = 5  # tensors with the largest error


def verify(
    artefact: str | Path,
    *,
    reference: str | Path,
    text: str | Path | None = None,
    prompts: str | Path | None = None,
    tasks: str | None = None,
    limit: int | None = None,
    judge: str | None = None,
    judge_model: str | None = None,
    judge_key: str = "OPENAI_API_KEY",
    engine: str | None = None,
    engine_python: str | Path | None = None,
    gate: str = "general",
    windows: int = 16,
    length: int = 512,
    max_tokens: int = 64,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Proof:
    """Measures what `artefact` lost against `reference`; the verdict goes into its quantry.json and its card."""
    asked = questions.questions(_path(prompts), tasks, limit, max_tokens, _endpoint(judge, judge_model, judge_key))
    gates.check_use(gate)
    content, name = default_text() if text is None else read_text(Path(text).expanduser())
    looked = _looked(reference, artefact, content)
    original, ours = open_source(reference), open_source(artefact)
    chosen = _engine(engine, ours)
    python = _path(engine_python)
    pieces = cut(content, tokenizer(original), length, windows or None)

    errors = weights.errors(original, ours)
    first = questions.put(asked, questions.decoded(original, device), progress)
    kept = make_reference(original, [*pieces, *first.windows], device=device, progress=_named(progress, "reference"))
    decoded = measuring.decode(ours, kept, device=device, progress=_named(progress, "decoded"))
    served = measuring.serve(ours, kept, chosen, python=python, progress=progress) if chosen else None
    answers = questions.in_engine(ours, chosen, python, device) if chosen else questions.decoded(ours, device)
    told, results = questions.compare(asked, first, questions.put(asked, answers, progress), progress)

    plain, on_prompts = range(len(pieces)), range(len(pieces), len(kept.windows))
    figures = measuring.summarize(kept, decoded.scores, plain)
    seen = measuring.summarize(kept, served.scores, plain) if served else None
    gap = measuring.gap(kept, decoded.scores, served.scores, plain) if served else None
    if told and on_prompts:
        told["decoded"] = _figures(measuring.summarize(kept, decoded.scores, on_prompts))
    numbers = _numbers(figures, seen, gap, kept, told)
    recorded = _recorded(ours)
    findings = [
        *(_of_check(check) for check in looked),
        *(_of_suspect(suspect) for suspect in weights.suspects(errors)),
        *(finding.to_dict() for finding in gates.judge(numbers, gate, recorded.get("preset"))),
    ]
    proof = Proof(
        artefact=str(artefact),
        reference=str(reference),
        gate=gate,
        verdict=gates.verdict(findings),
        **_figures(figures),
        reference_perplexity=figures.reference_perplexity.value,
        noise_floor=kept.noise_floor,
        served=_served(served, seen, gap),
        intervals=_intervals(figures),
        findings=tuple(findings),
        text={"name": name, "windows": len(pieces), "length": length, "positions": figures.positions},
        compact={"k": kept.k, "vocabulary": kept.vocabulary, "shortfall": decoded.shortfall},
        worst_tensors=tuple(asdict(one) for one in sorted(errors, key=lambda one: -one.error)[:SHOWN]),
        memory=_memory(original, recorded, chosen, served, kept),
        prompts=told,
        tasks=results,
        notes=_notes(kept, served, decoded.shortfall, text is None, ours, chosen),
    )
    if recorded:
        card.record_proof(_folder(ours), _for_card(proof))
    return proof


def _looked(reference: str | Path, artefact: str | Path, content: str) -> tuple[Check, ...]:
    """What can be seen before anything runs; what leaves nothing to measure is an error."""
    looked = checks(reference, artefact, content)
    for check in looked:
        if not check.ok and (check.name in REFUSED or (check is looked[-1] and check.name != LAST)):
            raise CheckpointError(f"{artefact}: {check.words}", fix=check.fix)
    return looked


def _engine(name: str | None, artefact: ModelSource) -> str | None:
    """The engine to measure in: the one asked for, or the embedded one, which is always there, for its own files."""
    known = verifying()
    if name is None:
        embedded = (name for name, facts in known.items() if facts.embedded)
        return next(embedded, None) if artefact.format == "gguf" else None
    if name not in known:
        raise UnknownNameError(f"unknown engine {name!r}", fix=suggest(name, tuple(known)))
    if known[name].embedded != (artefact.format == "gguf"):
        wanted = "a GGUF file" if known[name].embedded else "a folder of safetensors"
        raise QuantryError(f"{name} is measured on {wanted}, not on {artefact.path.name}", fix="leave --engine out")
    return name


def _numbers(
    figures: Divergence, seen: Divergence | None, gap: measuring.Gap | None, kept: Reference, told: Any
) -> dict[str, Number]:
    """What the gate is held against: the engine's figures where there are some, besides those of the bytes."""
    numbers: dict[str, Number] = {name: getattr(figures, name) for name in GATED}
    numbers["noise_floor"] = kept.noise_floor
    if seen and gap:
        numbers |= {f"served.{name}": getattr(seen, name) for name in GATED}
        numbers["served_top1"] = gap.top1
    if told:
        numbers["agreement"] = told["agreement"]["value"]
    return numbers


def _figures(found: Divergence) -> dict[str, float]:
    return {name: getattr(found, name).value for name in FIGURES}


def _intervals(found: Divergence) -> dict[str, tuple[float, float]]:
    return {name: (getattr(found, name).low, getattr(found, name).high) for name in FIGURES}


def _served(served: Served | None, seen: Divergence | None, gap: measuring.Gap | None) -> dict[str, Any] | None:
    if served is None or seen is None or gap is None:
        return None
    return {
        "engine": served.engine,
        "version": served.version,
        **_figures(seen),
        "intervals": _intervals(seen),
        "gap": asdict(gap),
    }


def _of_check(check: Check) -> dict[str, Any]:
    """A check as a finding; it has no number."""
    return {**check.to_dict(), "warning": False}


def _of_suspect(suspect: weights.Suspect) -> dict[str, Any]:
    words = f"{suspect.name}: {suspect.words}"
    fix = "quantize again from the 16-bit model"
    return {"name": "weights", "ok": False, "words": words, "fix": fix, "warning": False, "value": suspect.error}


def _memory(
    original: ModelSource, recorded: Mapping[str, Any], engine: str | None, served: Served | None, kept: Reference
) -> dict[str, Any] | None:
    """What the engine reported, beside what the plan would have said of the same load."""
    if engine is None or served is None or not served.memory:
        return None
    longest = max(len(window.tokens) for window in kept.windows)
    predicted: dict[str, int] = {}
    if recorded:
        try:
            found = footprint(
                open_checkpoint(original.path), from_card(recorded), engine, Workload(longest),
                device=parse("cpu").device,
            )  # fmt: skip
            predicted = {"weights": found.weights}
            if verifying()[engine].embedded:  # others take as much for a cache as they are given
                predicted |= {"kv_cache": found.kv_cache, "compute": found.activations}
        except QuantryError:  # a shape the plan does not know is still measured
            predicted = {}
    return {"predicted": predicted, "measured": dict(served.memory)}


def _notes(
    kept: Reference, served: Served | None, lacking: float, own: bool, artefact: ModelSource, engine: str | None
) -> tuple[str, ...]:
    notes = [*kept.notes, *(served.notes if served else ())]
    if lacking > 0.01:
        notes.append(f"the {kept.k} tokens kept of the reference miss {lacking:.1%} of the divergence, more than 1 %")
    if own:
        notes.append("measured on simple stories; give --text FILE with text of your own kind")
    if engine is None and artefact.schemes:
        notes.append("not measured in an engine: give --engine vllm or transformers to prove it as served")
    if artefact.cache:
        notes.append("the decoded figures are with a 16-bit KV cache; those of the engine with the one it uses")
    return tuple(notes)


def _recorded(artefact: ModelSource) -> dict[str, Any]:
    """quantry.json, where there is one; another tool's artefact has none."""
    file = _folder(artefact) / ARTEFACT_FILE
    content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return content


def _for_card(proof: Proof) -> dict[str, Any]:
    """What is kept with the artefact: no paths, and not what was said to prompts."""
    content = proof.to_dict()
    content["artefact"], content["reference"] = Path(proof.artefact).name, Path(proof.reference).name
    if proof.prompts:
        content["prompts"] = {key: value for key, value in proof.prompts.items() if key != "records"}
    return content


def _folder(artefact: ModelSource) -> Path:
    return artefact.path if artefact.path.is_dir() else artefact.path.parent


def _endpoint(url: str | None, model: str | None, key: str) -> JudgeEndpoint | None:
    if url is None:
        return None
    if not model:
        raise QuantryError("a judge needs the name of its model", fix="give --judge-model")
    return JudgeEndpoint(url, model, key)


def _named(progress: Progress | None, what: str) -> Progress | None:
    if progress is None:
        return None
    report = progress
    return lambda done, total, label: report(done, total, f"{what}: {label}")


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value).expanduser()
