"""The tables: engines, hardware, formats, methods and memory, each cell our answer, computed, beside the handbook's.

Where the two differ the cell says why. Rows and the handbook's cells are in handbook.toml; answers come from
feasibility, the memory and the speed model, and from `quantry plan` itself.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from quantry import registry
from quantry.devices import Device, Hardware
from quantry.devices.catalogue import catalogue, parse
from quantry.engines.contract.catalogue import engine as engine_facts
from quantry.engines.contract.catalogue import engines, ranked, usual
from quantry.errors import QuantryError, UnknownNameError
from quantry.planning.candidates import scheme_name
from quantry.planning.deployment import Deployment, Settings
from quantry.planning.facts import capability
from quantry.planning.feasibility import feasible
from quantry.planning.memory.footprint import footprint, room
from quantry.planning.memory.weights import weights_bytes
from quantry.planning.models import open_model
from quantry.planning.plan import plan
from quantry.planning.rules import left_out, quality
from quantry.planning.speed.throughput import speed
from quantry.quantizing.recipe import Preset, Recipe, presets
from quantry.types import Checkpoint, Workload

MODEL = "llama-3.1-8b"
DEVICES = ("H100 SXM", "A100 80GB", "RTX 3090", "cpu", "M2 16GB")
RANK = {"kernel": 2, "fallback": 1, "refusal": 0}
WORDS = ("no", "partial", "yes")
COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {  # presets and formats that a column of the handbook means
    "FP32": (),
    "FP16/BF16": (("bf16", "safetensors"), ("gguf-bf16", "gguf")),
    "INT8": (("w8a8", "compressed-tensors"), ("w8a16", "compressed-tensors"), ("w8a16", "gptq"),
             ("llm-int8", "bitsandbytes"), ("gguf-q8_0", "gguf")),
    "INT4": (("w4a16", "compressed-tensors"), ("w4a16", "gptq"), ("w4a16-asym", "awq"), ("gguf-q4_k_m", "gguf")),
    "FP8": (("fp8-dynamic", "compressed-tensors"), ("fp8-block", "compressed-tensors")),
    "GPTQ": (("w4a16", "gptq"),),
    "AWQ": (("w4a16-asym", "awq"),),
    "GGUF": (("gguf-q4_k_m", "gguf"),),
    "NF4": (("nf4", "bitsandbytes"),),
}  # fmt: skip
NATIVE = {"FP8": "fp8"}  # columns of hardware that a device must have arithmetic for
GPUS = (1, 2, 4, 8)
LOAD = Workload(4096, 1, 512, 256)
CLOSE = 0.05  # sizes within so much of each other are the same


@dataclass(frozen=True, slots=True)
class Cell:
    """Our answer, the handbook's, and why they differ."""

    ours: str
    handbook: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A table with a row for each label."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Cell, ...]]
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@cache
def matrix(name: str) -> tuple[Matrix, ...]:
    """The tables of a name: engines, hardware, formats, methods or memory."""
    if name not in MAKERS:
        raise UnknownNameError(f"unknown matrix {name[:40]!r}", fix=registry.suggest(name, tuple(MAKERS)))
    return MAKERS[name]()


def markdown(name: str) -> str:
    """The tables of a name for the documentation."""
    return "\n".join(_markdown(one) for one in matrix(name))


def _markdown(one: Matrix) -> str:
    lines = [f"### {one.title}", "", *([one.note, ""] if one.note else [])]
    lines += [f"| | {' | '.join(one.columns)} |", "|---" * (len(one.columns) + 1) + "|"]
    lines += [f"| {label} | {' | '.join(_spelled(cell) for cell in cells)} |" for label, cells in one.rows.items()]
    reasons = [
        f"- {label}, {column}: {cell.why} (handbook: {cell.handbook})"
        for label, cells in one.rows.items()
        for column, cell in zip(one.columns, cells, strict=True)
        if cell.why
    ]
    return "\n".join([*lines, "", *(["Where it differs from the handbook:", "", *reasons, ""] if reasons else [])])


def _spelled(cell: Cell) -> str:
    return f"{cell.ours} *" if cell.why else cell.ours


def _cell(ours: str, said: str, same: bool, *whys: str | None) -> Cell:
    why = "" if same else next((one for one in whys if one), "")
    return Cell(ours, said, why)


def _table(name: str, fill: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterable[Cell]]) -> Matrix:
    """A table of the handbook with our answers."""
    data = _data()["tables"][name]
    rows = {row["label"]: tuple(fill(row, data)) for row in data["rows"]}
    return Matrix(name, data["title"], tuple(data["columns"]), rows, data.get("note", ""))


def _why(row: Mapping[str, Any], data: Mapping[str, Any], column: str) -> str:
    own = row.get("why", {})
    return str(own.get(column) or own.get("default") or data["why"].get(column, ""))


def cases() -> list[dict[str, Any]]:
    """The recommendations of the handbook that the decision is held against."""
    return list(_data()["cases"])


# ---- memory: section 3 ----


def memory_matrix() -> Matrix:
    return _table("memory", _sizes)


def _sizes(row: Mapping[str, Any], data: Mapping[str, Any]) -> Iterable[Cell]:
    checkpoint = open_model(row["model"])
    for column, name, said in zip(data["columns"], ("bf16", "w8a8", "w4a16"), row["handbook"], strict=False):
        size = weights_bytes(checkpoint, _recipe(name)) / 1e9
        close = abs(size / float(said.split()[0]) - 1) <= CLOSE
        yield _cell(f"{size:,.1f} GB", said, close, _why(row, data, column))
    found, said = smallest(checkpoint), row["handbook"][-1]
    yield _cell(found, said, found == said, _why(row, data, data["columns"][-1]))


def smallest(checkpoint: Checkpoint) -> str:
    """The machine of the catalogue with the least memory that serves a model in 4 bits with vLLM."""
    devices = [device for device in catalogue() if device.kind == "gpu" and (capability(device) or 0) >= 75]
    machines = sorted((one.memory * count, count, one.price or 99.0, one.name) for one in devices for count in GPUS)
    found = {device.name: device for device in devices}
    return next(_spell(name, count) for _, count, _, name in machines if _serves(checkpoint, found[name], count))


def _spell(name: str, count: int) -> str:
    return f"{count} x {name}" if count > 1 else name


def _serves(checkpoint: Checkpoint, device: Device, count: int) -> bool:
    recipe = _recipe("w4a16")
    engine = usual(recipe.format)[0]
    if count * device.usable < weights_bytes(checkpoint, recipe, True):
        return False
    place = Deployment(
        checkpoint, recipe, engine, device, tensor_parallel=count, settings=Settings(sequences=1), keep_odd=True
    )
    try:
        verdict = feasible(place)
        fits = footprint(place, LOAD).per_device <= room(place)
    except QuantryError:
        return False
    return fits and verdict.outcome == "kernel"


def _recipe(name: str, form: str | None = None) -> Recipe:
    chosen = presets()[name]
    return Recipe(chosen, form or chosen.formats[0])


# ---- hardware: section 4 ----


def hardware_matrix() -> Matrix:
    return _table("hardware", _hardware)


def _hardware(row: Mapping[str, Any], data: Mapping[str, Any]) -> Iterable[Cell]:
    first, *rest = data["columns"]
    best = plan(MODEL, gpu=row["gpu"]).options[0]
    device = parse(row["gpu"]).device
    yield _cell(
        f"{best.preset} ({best.engine})", row["handbook"][0], best.scheme in row["best"], _why(row, data, first)
    )
    for column, said in zip(rest, row["handbook"][1:], strict=True):
        ours = _runs(column, device)
        yield _cell(ours, said, ours == said, _why(row, data, column))


def _runs(column: str, device: Device) -> str:
    """Whether some engine runs a precision on a device."""
    recommended = (engine.name for engine in ranked() if engine.plan.asked is None and engine.plan.points > 0)
    best = max(_outcome(name, column, device) for name in recommended)
    native = column not in NATIVE or NATIVE[column] in device.tflops
    return WORDS[best if native else min(best, 1)]


def _outcome(engine: str, column: str, device: Device) -> int:
    """The best verdict of an engine for what a column means."""
    ranks = (_rank(_recipe(name, form), engine, device) for name, form in COLUMNS[column])
    return max(ranks, default=0)


def _rank(recipe: Recipe, engine: str, device: Device) -> int:
    return RANK[feasible(Deployment(_model(), recipe, engine, device)).outcome]


# ---- engines: sections 7 and 15 ----


def engines_matrix() -> Matrix:
    return _table("engines", _engine)


def _engine(row: Mapping[str, Any], data: Mapping[str, Any]) -> Iterable[Cell]:
    places = [parse(name).device for name in DEVICES]
    for column, said in zip(data["columns"], row["handbook"], strict=True):
        ours = WORDS[max(_outcome(row["engine"], column, device) for device in places)]
        yield _cell(ours, said, ours == said, _why(row, data, column), _reason(row["engine"], column, places[0]))


def _reason(engine: str, column: str, device: Device) -> str:
    """What feasibility says of a column, for cells that no one has written a reason for."""
    if not COLUMNS[column]:
        return ""
    name, form = COLUMNS[column][0]
    return feasible(Deployment(_model(), _recipe(name, form), engine, device)).reason


def stack_engines_matrix() -> Matrix:
    return _table("stack_engines", _stack_engine)


def _stack_engine(row: Mapping[str, Any], data: Mapping[str, Any]) -> Iterable[Cell]:
    engine = row["engine"]
    cpu = max(_outcome(engine, column, parse("cpu").device) for column in COLUMNS) > 0
    answers = (
        engine_facts(engine).about,
        _throughput(engine),
        row["ease"],
        "optional" if cpu else "yes",
        WORDS[2 * cpu],
    )
    for column, ours, said in zip(data["columns"], answers, row["handbook"], strict=True):
        yield _cell(ours, said, ours == said, _why(row, data, column))


def _throughput(engine: str) -> str:
    """Tokens a second of the best option, 32 at once on an H100."""
    try:
        found = plan(MODEL, gpu="H100 SXM", engine=engine, concurrency=32).options
    except QuantryError:
        found = ()
    if not found:
        return "not known"
    predicted = found[0].speed
    spread = "" if predicted["measured"] else f" ± {predicted['spread']:.0%}"
    return f"{predicted['decode_tokens_per_s']:,.0f} tokens/s{spread} ({found[0].preset})"


def stack_matrix() -> Matrix:
    """The recommended stacks: what the handbook says, and the first option of the plan."""
    data = _data()["tables"]["stack"]
    rows = {}
    for case in cases():
        if case["id"].startswith("stack: "):
            rows[case["id"].removeprefix("stack: ")] = tuple(_stack(case))
    return Matrix("stack", data["title"], tuple(data["columns"]), rows, data["note"])


def _stack(case: Mapping[str, Any]) -> Iterable[Cell]:
    ask = case["ask"]
    best = plan(**ask).options[0]
    expect, why = case["expect"], case.get("overridden")
    answers = (ask["model"], f"{best.preset}, {best.quality}", best.engine, ask["gpu"])
    for ours, key in zip(answers, ("", "scheme", "engine", ""), strict=True):
        wanted = expect.get(key)
        value = best.scheme if key == "scheme" else best.engine
        same = not wanted or value in ([wanted] if isinstance(wanted, str) else wanted)
        yield _cell(ours, case["says"], same, why)


# ---- methods: section 15 ----


def methods_matrix() -> Matrix:
    return _table("methods", _method)


def _method(row: Mapping[str, Any], data: Mapping[str, Any]) -> Iterable[Cell]:
    recipe = _recipe(*row["recipe"])
    device = parse("cpu").device
    on_cpu = max(_rank(recipe, engine, device) for engine in engines()) > 0
    answers = (
        _bits(recipe),
        _class(recipe),
        _faster(recipe),
        WORDS[2 * on_cpu],
        row["use"],
        f"--preset {recipe.preset.name}",
    )
    for column, ours, said in zip(data["columns"], answers, row["handbook"], strict=True):
        yield _cell(ours, said, ours == said, _why(row, data, column))


def _bits(recipe: Recipe) -> str:
    checkpoint = _model()
    count = sum(tensor.numel for tensor in checkpoint.tensors)
    return f"{8 * weights_bytes(checkpoint, recipe) / count:.2f}".removesuffix(".00")


def _class(recipe: Recipe) -> str:
    grid = recipe.preset.scheme.weight
    facts = {"scheme": scheme_name(recipe.preset), "calibrated": False, "zero_points": not grid.symmetric}
    return quality({**facts, "bits": grid.bits, "parameters": 8.0}).name


def _faster(recipe: Recipe) -> str:
    """Decoding against 16 bit in the same engine, alone and with 64 at once."""
    if recipe.preset.scheme.weight.is_cast:
        return "1"
    gguf = recipe.format == "gguf"
    plain, hardware = _recipe("gguf-bf16" if gguf else "bf16"), parse("x86 server DDR5" if gguf else "H100 SXM")
    engine = usual(plain.format)[0]
    ratios = [_pace(recipe, engine, hardware, many) / _pace(plain, engine, hardware, many) for many in (1, 64)]
    return " / ".join(f"{ratio:.2f}" for ratio in ratios)


def _pace(recipe: Recipe, engine: str, hardware: Hardware, many: int) -> float:
    deployment = Deployment(_model(), recipe, engine, hardware.device)
    return speed(deployment, replace(LOAD, concurrency=many), hardware.cpu).decode_tokens_per_s


# ---- formats: what holds what, and who loads it ----


def formats_matrix() -> Matrix:
    """Every preset with its formats, size and the engines that load it on an H100, and whether it is planned."""
    columns = ("formats", "bits a weight", "expected", "engines on an H100", "planned")
    rows = {one.name: tuple(map(Cell, _format(one))) for one in presets().values()}
    return Matrix("formats", "Presets, formats and engines", columns, rows, "Sizes and verdicts for Llama-3.1-8B.")


def _format(chosen: Preset) -> Sequence[str]:
    recipe = Recipe(chosen, chosen.formats[0])
    device = parse("H100 SXM").device
    loading = [
        f"{name} ({form})" if len(chosen.formats) > 1 else name
        for name in (engine.name for engine in ranked())
        for form in chosen.formats
        if _rank(Recipe(chosen, form), name, device) == RANK["kernel"]
    ]
    planned = left_out(chosen) or "yes"
    return ", ".join(chosen.formats), _bits(recipe), _class(recipe), ", ".join(loading) or "none", planned


@cache
def _model() -> Checkpoint:
    return open_model(MODEL)


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files("quantry.planning").joinpath("handbook.toml").read_text(encoding="utf-8"))


MAKERS: dict[str, Callable[[], tuple[Matrix, ...]]] = {
    "engines": lambda: (engines_matrix(), stack_engines_matrix()),
    "hardware": lambda: (hardware_matrix(), stack_matrix()),
    "formats": lambda: (formats_matrix(),),
    "methods": lambda: (methods_matrix(),),
    "memory": lambda: (memory_matrix(),),
}
