"""The report of an artefact: quantry.json, sensitivity.json and the headers of its files as content of a page.

It contains no time and no path: the same folder gives the same bytes. Only the memory that is predicted before a proof
and the command depend on the machine. Neither torch nor matplotlib is imported before it is needed.
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantry import __version__
from quantry.devices import Device
from quantry.devices.detect import device_here
from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.catalogue import engine_facts, usual, verifying
from quantry.engines.contract.options import Serving
from quantry.errors import QuantryError
from quantry.jobs.artefact_caches import cache_fields
from quantry.jobs.artefact_card import (
    ArtefactCard,
    count,
    figure,
    finite,
    items,
    mapping,
    mappings,
    notes_of,
    read_card,
)
from quantry.jobs.artefact_maps import bits_map, read_sensitivity
from quantry.jobs.output_folder import writing
from quantry.models.anatomy import dissect
from quantry.models.attention import context_length
from quantry.models.reader import open_checkpoint
from quantry.planning.deployment import Deployment
from quantry.planning.memory.footprint import footprint
from quantry.quantizing.artefact_file import AGAIN
from quantry.quantizing.recipe import presets
from quantry.report import Content, FileRow, Memory, picture, render
from quantry.report.ci import answered
from quantry.report.sizes import human
from quantry.storage import ARTEFACT_FILE, SENSITIVITY_FILE, write_together
from quantry.types import Checkpoint, Workload

PAGE, PICTURE = "report.html", "report.png"
CONTEXT = 4096  # tokens that memory is predicted for, if the model allows as many
VISIBLE = 0.05  # of a device's memory: a smaller model would be a hair in the picture of its capacity


def content_of(folder: Path, device: Device | None = None, proof: Mapping[str, Any] | None = None) -> Content:
    """Returns the report of an artefact; memory is predicted for a device, else for this machine.

    A `proof` takes the place of the one in quantry.json. Raises CheckpointError if quantry.json or sensitivity.json is
    missing or damaged.
    """
    card = read_card(folder)
    if proof is not None:
        card = ArtefactCard({**card.content, "proof": proof})
    checkpoint = open_checkpoint(folder)
    proof = card.proof
    sensitivity = read_sensitivity(folder / SENSITIVITY_FILE)
    engine, served = _engine(card), _served(proof)
    engine_version = {str(served.get("engine")): str(served.get("version", ""))} if served else {}
    machine = device or device_here()
    memory, memory_notes = _memory(checkpoint, engine, proof, machine)
    return Content(
        title=f"{card.text('source')}, {card.name()}",
        model=f"{card.count('parameters'):,} parameters, {human(card.count('source_bytes'))} in 16 bit, stored as"
        f" {card.text('format')}",
        rows=(replace(row(card), chosen=True),),
        noise_floor=finite(proof.get("noise_floor")),
        reference_perplexity=finite(proof.get("reference_perplexity")),
        gate=str(proof.get("gate", "")),
        verdict=proof.get("verdict", ""),
        findings=tuple(mappings(proof.get("findings", ()), "the findings of the proof")),
        domains=tuple(mappings(proof.get("domains") or (), "the domains of the proof")),
        **_prompts(proof),
        **cache_fields(proof),
        sensitivity=sensitivity.damage,
        outliers=sensitivity.outliers,
        bits=bits_map(checkpoint, sensitivity.names),
        memory=memory,
        serve=shlex.join(["quantry", "serve", folder.resolve().name, "--engine", engine]),
        engine_command=_engine_command(folder, checkpoint, card, engine, machine),
        notes=tuple(dict.fromkeys([*memory_notes, *notes_of(card.content), *notes_of(proof)])),
        versions=card.versions | engine_version,
        provenance=card.provenance(),
    )


def content_of_proof(artefact: Path, proof: Mapping[str, Any]) -> Content:
    """Returns the report of an artefact that another tool made: what its proof and its headers say."""
    anatomy, served = dissect(open_checkpoint(artefact)), _served(proof)
    size = measured(artefact.name, anatomy.bytes, proof, bits=anatomy.bits_per_weight)
    return Content(
        title=artefact.name,
        model=f"{anatomy.parameters:,} parameters, stored as {anatomy.format}",
        rows=(replace(size, chosen=True),),
        noise_floor=finite(proof.get("noise_floor")),
        reference_perplexity=finite(proof.get("reference_perplexity")),
        gate=str(proof.get("gate", "")),
        verdict=proof.get("verdict", ""),
        findings=tuple(mappings(proof.get("findings", ()), "the findings of the proof")),
        domains=tuple(mappings(proof.get("domains") or (), "the domains of the proof")),
        **_prompts(proof),
        **cache_fields(proof),
        notes=tuple(notes_of(proof)),
        versions={"quantry": __version__, **({str(served["engine"]): str(served["version"])} if served else {})},
        provenance={"proof": {"reference": proof.get("reference"), "text": proof.get("text")}},
    )


def files(folder: Path, content: Content) -> dict[Path, bytes]:
    """Returns report.html and report.png."""
    return {folder / PICTURE: picture(content), folder / PAGE: render(content).encode()}


def write(folder: Path, content: Content) -> Path:
    """Writes report.html and report.png into a folder, both or neither; returns the path of the page.

    Raises OutputError if the folder cannot be written.
    """
    drawn = files(folder, content)
    with writing(folder, "fix that, or continue with --no-report"):
        write_together(drawn)
    return folder / PAGE


def row(card: ArtefactCard) -> FileRow:
    """Returns the row of an artefact, with figures if it was verified."""
    return measured(card.name(), card.size, card.proof, bits=card.content.get("bits_per_weight"))


def measured(name: str, size: int, proof: Mapping[str, Any], *, bits: float | None = None) -> FileRow:
    """Returns the row of a file with the figures of a proof (`types.Proof` as a dict).

    Perplexity and top-1 are the engine's if one was measured, as in the gate. Figures of a broken model that are not
    finite are left out.
    """
    served = _served(proof)
    kl, served_kl = figure(proof, "kl"), figure(served, "kl")
    top1, perplexity = (figure(served or proof, key) for key in ("top1", "perplexity"))
    return FileRow(name, size, bits, *kl, *served_kl, *top1, *perplexity, verdict=proof.get("verdict"))


def _prompts(proof: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a proof has of the user's prompts, as fields of the content."""
    prompts = mapping(proof.get("prompts") or {}, "prompts of the proof")
    if not prompts:
        return {}
    agreement = mapping(prompts.get("agreement"), "their agreement")
    if finite(agreement.get("value")) is None or count(prompts, "prompts") < 1:
        return {}
    lines = items(prompts.get("differing", ()), "the prompts that differ")
    return {"answered": answered(prompts), "differing": tuple(map(str, lines))}


def _served(proof: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(proof.get("served") or {}, "what a proof has of the engine")


def _engine(card: ArtefactCard) -> str:
    """Returns the engine that the artefact was verified in, or the usual one of its format."""
    engines = usual(stored := card.text("format"))
    if not engines:
        raise QuantryError(f"{ARTEFACT_FILE} has the format {stored[:40]!r}, which no engine loads", fix=AGAIN)
    label = str(_served(card.proof).get("engine") or engines[0])
    return next((name for name, facts in verifying().items() if facts.label == label), label)


def _context(checkpoint: Checkpoint) -> int:
    return min(CONTEXT, context_length(checkpoint.config) or CONTEXT)


def _memory(
    checkpoint: Checkpoint, engine: str, proof: Mapping[str, Any], device: Device
) -> tuple[Memory | None, list[str]]:
    """Returns the memory that the engine reported, or before a proof what is predicted here; and a note on it."""
    reported = mapping(proof.get("memory") or {}, "memory of the proof")
    if reported.get("measured"):
        length = mapping(proof.get("text") or {}, "the text of the proof").get("length")
        note = f"Memory is that of {engine} while it read windows of {length} tokens."
        return Memory(reported.get("predicted") or {}, reported["measured"]), [note]
    tokens = _context(checkpoint)
    try:
        needed = footprint(Deployment(checkpoint, None, engine, device), Workload(tokens, prompt=tokens))
    except QuantryError:  # a shape that the plan does not know
        return None, []
    parts = {name: getattr(needed, name) for name in ("weights", "kv_cache", "activations", "overhead")}
    capacity = device.usable if needed.total >= VISIBLE * device.usable else None
    predicted = f"Memory is predicted for {engine} with one sequence of {tokens:,} tokens"
    note = f"{predicted} on {device.name}, which has {human(device.usable)}."
    return Memory(parts, {}, capacity, device.name), [note]


def _engine_command(folder: Path, checkpoint: Checkpoint, card: ArtefactCard, engine: str, device: Device) -> str:
    """Returns the engine's command that serves it, run in the parent folder; empty for an unknown preset."""
    preset = presets().get(card.main_preset_name)
    if preset is None:
        return ""
    ggufs = sorted(name for name in checkpoint.files if name.endswith(".gguf"))
    facts, name = engine_facts(engine), folder.resolve().name
    serving = Serving(
        model=f"{name}/{ggufs[0]}" if ggufs else name,
        format=card.text("format"),
        engine=engine,
        version=facts.latest,
        platform=device.platform,
        context=_context(checkpoint),
        parallel=1,
        kv=facts.kv_cache.recipes.get(str(card.recipe.get("kv"))),
        cache_gib=1 if device.platform == "cpu" and "cache_gib" in facts.plan.options else None,
        bits=preset.scheme.weight.bits,
    )
    return shlex.join(adapter(engine).command(serving).shown())
