"""What an artefact tells of itself, as a report: quantry.json, sensitivity.json and the headers of its files.

There is no clock in it and no path: the same folder gives the same bytes. Only the memory that is predicted before a
proof, and the command, are for the machine at hand. Neither torch nor matplotlib is imported before it is needed.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path
from typing import Any

from quantry.devices import Device
from quantry.devices.catalogue import parse
from quantry.devices.detect import detect
from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.catalogue import engine as engine_facts
from quantry.engines.contract.catalogue import usual
from quantry.engines.contract.options import Serving
from quantry.errors import CheckpointError, OutputError, QuantryError
from quantry.models.already_quantized import weights_of
from quantry.models.attention import block_count, context_length
from quantry.models.linears import EXPERT
from quantry.models.parts import BLOCK, decoder_block, part_of
from quantry.models.reader import open_checkpoint
from quantry.models.writer import write_atomically
from quantry.planning.memory.footprint import footprint
from quantry.quantizing.recipe import presets
from quantry.report import Content, FileRow, Memory, picture, render
from quantry.report.content import BlockMap, Interval
from quantry.report.sizes import human
from quantry.storage import ARTEFACT_FILE
from quantry.types import Checkpoint, TensorInfo, Workload

CARD, SENSITIVITY = ARTEFACT_FILE, "sensitivity.json"
PAGE, PICTURE = "report.html", "report.png"
CONTEXT = 4096  # tokens that memory is predicted for, if the model takes as many
MAPPED = frozenset({"attention", "MLP", "experts", "recurrent", "embedding", "head"})
ENDS = "ends"  # in maps: what is before the first block and after the last
VISIBLE = 0.05  # of a device: a smaller model would be a hair beside its capacity
MANY = 12  # rules of a recipe; beyond, they are counted
SERVED = "what a proof has of the engine"
AGAIN = "write the artefact again with quantry quantize"
Maps = dict[str, dict[str, float]]


def row(content: Mapping[str, Any]) -> FileRow:
    """The row of an artefact, from what its quantry.json holds; with figures if it was proved."""
    bits = content.get("bits_per_weight")
    return measured(_name(content), _size(content), content.get("proof"), bits=bits)


def measured(
    name: str, size: int, proof: Mapping[str, Any] | None, *, bits: float | None = None, peer: bool = False
) -> FileRow:
    """The row of a file, with what a proof (`types.Proof` as a dict) found of it.

    Perplexity and same first token are the engine's where one was asked, as the gate has them. A figure that is no
    finite number, of a model that broke, is left out.
    """
    found = _object(proof or {}, "the proof")
    served = _object(found.get("served") or {}, SERVED)
    judged = served or found
    kl, served_kl = (_figure(side, "kl") for side in (found, served))
    top1, perplexity = (_figure(judged, name) for name in ("top1", "perplexity"))
    return FileRow(
        name, size, bits, *kl, *served_kl, *top1, *perplexity, peer=peer
    )  # fmt: skip


def content_of(folder: Path, device: Device | None = None) -> Content:
    """Everything that an artefact tells; memory is predicted for a device, else for this machine."""
    told = _card(folder)
    checkpoint = open_checkpoint(folder)
    proof = _object(told.get("proof") or {}, f"the proof in {CARD}")
    sensitivity = _Sensitivity.read(folder / SENSITIVITY)
    engine = _engine(told, proof)
    machine = device or _this_machine()
    memory, words = _memory(checkpoint, engine, proof, machine)
    about = row(told)
    return Content(
        title=f"{_text(told, 'source')}, {about.name}",
        model=f"{_count(told, 'parameters'):,} parameters, {human(_count(told, 'source_bytes'))} in 16 bit, stored as"
        f" {_text(told, 'format')}",
        rows=(replace(about, chosen=True),),
        noise_floor=_finite(proof.get("noise_floor")),
        reference_perplexity=_finite(proof.get("reference_perplexity")),
        gate=str(proof.get("gate", "")),
        verdict=proof.get("verdict", ""),
        findings=tuple(_objects(proof.get("findings", ()), "the findings of the proof")),
        sensitivity=sensitivity.damage,
        outliers=sensitivity.outliers,
        bits=bits_map(checkpoint, sensitivity.names),
        memory=memory,
        serve=_command(folder, checkpoint, told, engine, machine),
        notes=tuple(dict.fromkeys([*words, *_notes(told), *_notes(proof)])),
        versions=_versions(told, proof),
        provenance=_provenance(told, proof),
    )


def write(folder: Path, content: Content) -> Path:
    """Writes report.html and report.png into a folder, each whole or not at all; the path of the page."""
    page, image = render(content).encode(), picture(content)
    try:
        write_atomically(folder / PICTURE, image)
        write_atomically(folder / PAGE, page)
    except OSError as error:
        raise OutputError(
            f"cannot write the report in {folder}: {error.strerror}", fix="mend that, or go on with --no-report"
        ) from error
    return folder / PAGE


def bits_map(checkpoint: Checkpoint, names: Iterable[tuple[str, str, str]] = ()) -> Maps:
    """Bits a weight of every matrix as it is stored, scales included: block -> module -> bits.

    `names` are (pattern, block, module): what they match goes by that name, so that layers that are stored alike are
    one cell of this map as they are of the others.
    """
    known = list(names)
    blocks = block_count(checkpoint.config)
    stored: Counter[tuple[str, str]] = Counter()
    weights: Counter[tuple[str, str]] = Counter()
    for module, tensors in _matrices(checkpoint, blocks).items():
        cell = next((cell for match, *cell in known if fnmatchcase(module, match)), None)
        spot = (cell[0], cell[1]) if cell else _spot(module, blocks)
        stored[spot] += 8 * sum(tensor.nbytes for tensor in tensors)
        weights[spot] += sum(weights_of(checkpoint, tensor) for tensor in tensors)
    return _map((block, module, stored[block, module] / weights[block, module]) for block, module in stored)


# ---- what is stored ----


def _matrices(checkpoint: Checkpoint, blocks: int) -> dict[str, list[TensorInfo]]:
    """The stored tensors of each matrix: its codes and what describes them. GGUF names matrices with `.weight`."""
    gguf = checkpoint.format == "gguf"
    found: dict[str, list[TensorInfo]] = {}
    described = []
    for tensor in checkpoint.tensors:
        if part_of(tensor.name, blocks) not in MAPPED or _outside(tensor.name, blocks):
            continue
        if len(tensor.shape) > 1 and weights_of(checkpoint, tensor):
            found.setdefault(tensor.name if gguf else tensor.name.rpartition(".")[0], []).append(tensor)
        elif not tensor.name.endswith(".bias"):
            described.append(tensor)
    for tensor in described:
        owner = next((name for name in _parents(tensor.name) if name in found), None)
        if owner is not None:
            found[owner].append(tensor)
    return found


def _outside(name: str, blocks: int) -> bool:
    """Whether a tensor is neither in a block nor an embedding or head: towers and drafts."""
    return decoder_block(name, blocks) is None and part_of(name, blocks) not in ("embedding", "head")


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _spot(module: str, blocks: int) -> tuple[str, str]:
    """Where a matrix stands in a map; the experts of a block are one."""
    block = decoder_block(f"{module}.", blocks)
    short = EXPERT.sub(".experts.", BLOCK.split(f"{module}.")[-1]).strip(".").removesuffix(".weight")
    return (ENDS, short.rpartition(".")[2]) if block is None else (str(block), short)


def _map(cells: Iterable[tuple[str, str, float]]) -> Maps:
    """The ends first, then the blocks in their order; modules in the order of the file."""
    found: Maps = {}
    for block, module, value in cells:
        found.setdefault(block, {})[module] = value
    return dict(sorted(found.items(), key=lambda pair: -1 if pair[0] == ENDS else int(pair[0])))


# ---- sensitivity.json ----


@dataclass(frozen=True, slots=True)
class _Sensitivity:
    """The maps that were measured for a mixture, and how its layers are called there."""

    damage: BlockMap
    outliers: BlockMap
    names: tuple[tuple[str, str, str], ...]

    @classmethod
    def read(cls, file: Path) -> "_Sensitivity":
        """What the file holds; nothing, if there is none."""
        if not file.is_file():
            return cls({}, {}, ())
        from quantry.jobs.auto.sensitivity import Sensitivity

        wrong = CheckpointError(f"{file} is no sensitivity that Quantry wrote", fix=AGAIN)
        try:
            found = Sensitivity.from_dict(_json(file))
            cells = [(ENDS if layer.block is None else str(layer.block), layer.part, layer) for layer in found.layers]
            return cls(
                _map((block, part, found.compared(layer).damage) for block, part, layer in cells),
                _map((block, part, layer.outliers) for block, part, layer in cells if layer.outliers is not None),
                tuple((match, block, part) for block, part, layer in cells for match in layer.match),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise wrong from error


# ---- memory and the command ----


def _engine(told: Mapping[str, Any], proof: Mapping[str, Any]) -> str:
    """The engine that it was proved in, or the usual one of its format."""
    served = _object(proof.get("served") or {}, SERVED)
    return str(served.get("engine") or usual(_text(told, "format"))[0])


def _this_machine() -> Device:
    """The device that sets the limit here; a usual processor where the machine cannot be read."""
    try:
        return detect(0).device
    except QuantryError:
        return parse("cpu").device


def _context(checkpoint: Checkpoint) -> int:
    return min(CONTEXT, context_length(checkpoint.config) or CONTEXT)


def _memory(
    checkpoint: Checkpoint, engine: str, proof: Mapping[str, Any], device: Device
) -> tuple[Memory | None, list[str]]:
    """What an engine reported beside what was predicted of it; before a proof, what is predicted here. And a note."""
    found = _object(proof.get("memory") or {}, "memory of the proof")
    if found.get("measured"):
        length = _object(proof.get("text") or {}, "the text of the proof").get("length")
        words = f"Memory is that of {engine} while it read windows of {length} tokens."
        return Memory(found.get("predicted") or {}, found["measured"]), [words]
    tokens = _context(checkpoint)
    try:
        needed = footprint(checkpoint, None, engine, Workload(tokens), device=device)
    except QuantryError:  # a shape that the plan does not know
        return None, []
    parts = {name: getattr(needed, name) for name in ("weights", "kv_cache", "activations", "overhead")}
    fits = f"Memory is predicted for {engine} with one sequence of {tokens:,} tokens"
    shown = device.usable if needed.total >= VISIBLE * device.usable else None
    words = f"{fits} on {device.name}, which has {human(device.usable)}."
    return Memory(parts, {}, shown, device.name), [words]


def _command(folder: Path, checkpoint: Checkpoint, told: Mapping[str, Any], engine: str, device: Device) -> str:
    """How it is served, as seen from the folder that it is in; nothing for what no command is known for."""
    known = presets().get(_preset(told))
    if known is None:
        return ""
    ggufs = sorted(name for name in checkpoint.files if name.endswith(".gguf"))
    facts = engine_facts(engine)
    kv = facts.kv_cache.recipes.get(str(_recipe(told).get("kv")))
    platform = device.platform
    name = folder.resolve().name
    asked = Serving(
        model=f"{name}/{ggufs[0]}" if ggufs else name,
        format=_text(told, "format"),
        engine=engine,
        version=facts.latest,
        platform=platform,
        context=_context(checkpoint),
        parallel=1,
        kv=kv,
        cache_gib=1 if platform == "cpu" and "cache_gib" in facts.plan.options else None,
        bits=known.scheme.weight.bits,
    )
    return shlex.join(adapter(engine).command(asked).shown())


# ---- quantry.json ----


def _card(folder: Path) -> dict[str, Any]:
    file = folder / CARD
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no {CARD}, so nothing is known of how it was made",
            fix="give a folder that quantry quantize wrote",
        )
    return _json(file)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}", fix="check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON ({str(error)[:80]})", fix=AGAIN) from error
    return dict(_object(found, str(file)))


def _name(told: Mapping[str, Any]) -> str:
    """The preset, and what was asked for beside it: rows that differ have other names."""
    recipe, known = _recipe(told), presets().get(_preset(told))
    main = _object(recipe.get("preset"), f"recipe.preset of {CARD}")
    words = [_text(told, "preset")]
    if budget := recipe.get("budget"):
        return f"{words[0]} {budget}" + (f" {_text(told, 'format')}" if told["format"] != "gguf" else "")
    if known is None:
        return words[0]
    block = tuple(_object(_object(main.get("scheme"), "its scheme").get("weight"), "its grid").get("block", ()))
    words += [f"g{block[-1]}"] if block and block != known.scheme.weight.block else []
    words += [str(main["rounder"])] if main.get("rounder", known.rounder) != known.rounder else []
    words += [_text(told, "format")] if told.get("format") != known.formats[0] else []
    words += ["imatrix"] if recipe.get("imatrix") else []
    words += [f"kv {recipe['kv']}"] if recipe.get("kv") else []
    return " ".join([*words, *(["with rules"] if recipe.get("rules") else [])])


def _preset(told: Mapping[str, Any]) -> str:
    """The preset of what no rule names."""
    return _text(_object(_recipe(told).get("preset"), f"recipe.preset of {CARD}"), "name")


def _recipe(told: Mapping[str, Any]) -> Mapping[str, Any]:
    return _object(told.get("recipe"), f"the recipe in {CARD}")


def _size(told: Mapping[str, Any]) -> int:
    """The bytes of the files with weights; of their tensors, where no files are told."""
    files = _object(told.get("files") or {}, f"files of {CARD}")
    return sum(_count(_object(file, "a file"), "bytes") for file in files.values()) if files else _count(told, "bytes")


def _versions(told: Mapping[str, Any], proof: Mapping[str, Any]) -> dict[str, str]:
    found = {"quantry": told.get("quantry", ""), **_object(told.get("versions") or {}, f"versions of {CARD}")}
    served = _object(proof.get("served") or {}, SERVED)
    return {name: str(words) for name, words in found.items()} | (
        {str(served.get("engine")): str(served.get("version", ""))} if served else {}
    )


def _provenance(told: Mapping[str, Any], proof: Mapping[str, Any]) -> dict[str, Any]:
    """Of what, how and by which text it was made and proved; the whole recipe is in quantry.json."""
    recipe = _recipe(told)
    files = _object(told.get("files") or {}, f"files of {CARD}")
    found = {
        "source": _text(told, "source"),
        "recipe": _told_recipe(told, recipe),
        "calibration text": recipe.get("calibration"),
        "proof": {"reference": proof.get("reference"), "text": proof.get("text")} if proof else None,
        "files": {
            name: f"{_count(file, 'bytes'):,} bytes, SHA-256 {file.get('sha256')}" for name, file in files.items()
        },
    }
    return {name: value for name, value in found.items() if value}


def _stored(file: Mapping[str, Any]) -> str:
    return f"{_count(file, 'bytes'):,} bytes, SHA-256 {file.get('sha256')}"


def _told_recipe(told: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    main = _object(recipe.get("preset"), f"recipe.preset of {CARD}")
    ways = {name: main.get(name) for name in ("transform", "fit", "rounder")}
    rest = {name: recipe.get(name) for name in ("format", "budget", "kv", "imatrix")}
    found = {"preset": _text(told, "preset"), **ways, **rest, "rules": _rules(recipe.get("rules") or ())}
    return {name: value for name, value in found.items() if value}


def _rules(rules: Any) -> dict[str, str]:
    """Each rule; of many, how often each thing is ruled."""
    told = [(str(rule.get("match")), _ruled(rule)) for rule in _objects(rules, f"rules of {CARD}")]
    if len(told) <= MANY:
        return dict(told)
    return {what: f"{count} layers" for what, count in Counter(what for _, what in told).most_common()}


def _ruled(rule: Mapping[str, Any]) -> str:
    if rule.get("type"):
        return str(rule["type"])
    if not rule.get("preset"):
        return "16 bit"
    preset = _object(rule["preset"], "the preset of a rule")
    block = _object(_object(preset.get("scheme") or {}, "its scheme").get("weight") or {}, "its grid").get("block")
    group = f", groups of {block[1]}" if block and block[0] == 1 and block[1] else ""
    return f"{preset.get('name')}{group}"


# ---- checks ----


def _figure(side: Mapping[str, Any], name: str) -> tuple[float | None, Interval | None]:
    """A figure of a proof with its interval."""
    value = _finite(side.get(name))
    bounds = _items(_object(side.get("intervals") or {}, "intervals of the proof").get(name) or (), f"that of {name}")
    if value is None or len(bounds) != 2:
        return value, None
    low, high = map(_finite, bounds)
    return value, None if low is None or high is None else (low, high)


def _finite(value: Any) -> float | None:
    """A number that can be shown; a model that broke has others."""
    return value if isinstance(value, (int, float)) and isfinite(value) else None


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where} is {_kind(value)}, not an object", fix=AGAIN)
    return value


def _objects(values: Any, where: str) -> list[Mapping[str, Any]]:
    return [_object(value, f"one of {where}") for value in _items(values, where)]


def _items(values: Any, where: str) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)):
        raise CheckpointError(f"{where} is {_kind(values)}, not a list", fix=AGAIN)
    return values


def _notes(told: Mapping[str, Any]) -> list[str]:
    return [str(note) for note in _items(told.get("notes", ()), "notes")]


def _text(told: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := told.get(name), str):
        raise CheckpointError(f"{name} in {CARD} is {_kind(value)}, not text", fix=AGAIN)
    return value


def _count(told: Mapping[str, Any], name: str) -> int:
    if isinstance(value := told.get(name), bool) or not isinstance(value, int):
        raise CheckpointError(f"{name} in {CARD} is {_kind(value)}, not a number", fix=AGAIN)
    return value


def _kind(value: Any) -> str:
    return "missing" if value is None else re.sub(r"\s+", " ", repr(value))[:40]
