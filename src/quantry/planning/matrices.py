"""The tables of `quantry matrix`: engines, hardware, formats, methods and memory.

Each cell has our computed answer and that of common advice; where the two differ it says why. Rows and the cells of
published guides are in common_advice.toml; answers come from feasibility, the memory and the speed model, and from
`quantry plan` itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from quantry import registry
from quantry.devices import Device, Hardware
from quantry.devices.catalogue import catalogue, parse
from quantry.engines.contract.catalogue import engine_facts, engines, ranked, usual
from quantry.errors import QuantryError
from quantry.planning.candidate import scheme_name
from quantry.planning.deployment import Deployment, Settings
from quantry.planning.facts import capability
from quantry.planning.feasibility import feasible
from quantry.planning.memory.footprint import footprint, room
from quantry.planning.memory.weights import weights_bytes
from quantry.planning.models import open_model
from quantry.planning.plan import plan
from quantry.planning.request import machine_name
from quantry.planning.rules import left_out, quality
from quantry.planning.speed.throughput import speed
from quantry.quantizing.recipe import Preset, Recipe, presets
from quantry.storage import read_data
from quantry.types import Checkpoint, Workload

_data = partial(read_data, "quantry.planning", "common_advice.toml")
MODEL = "llama-3.1-8b"
DEVICES = ("H100 SXM", "A100 80GB", "RTX 3090", "cpu", "M2 16GB")
RANK = {"kernel": 2, "fallback": 1, "refusal": 0}
WORDS = ("no", "partial", "yes")
COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {  # presets and formats that a column of the guides means
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
AdviceRow = Mapping[str, Any]  # of common_advice.toml


@dataclass(frozen=True, slots=True)
class Cell:
    """Our answer, that of common advice, and why they differ."""

    ours: str
    advice: str = ""
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


@dataclass(frozen=True, slots=True)
class CellAnswer:
    """Our answer for a cell; `same` is None where equal texts agree with the advice, `reason` is for others."""

    ours: str
    same: bool | None = None
    reason: str = ""


@cache
def matrix(name: str) -> tuple[Matrix, ...]:
    """Returns the tables of a name: engines, hardware, formats, methods or memory. Raises UnknownNameError."""
    registry.check("matrix", name, MAKERS)
    return MAKERS[name]()


def markdown(name: str) -> str:
    """Returns the tables of a name for the documentation."""
    return "\n".join(_markdown(table) for table in matrix(name))


def _markdown(table: Matrix) -> str:
    lines = [f"### {table.title}", "", *([table.note, ""] if table.note else [])]
    lines += [f"| | {' | '.join(table.columns)} |", "|---" * (len(table.columns) + 1) + "|"]
    for label, cells in table.rows.items():
        lines.append(
            " | ".join([f"| {label}", *(f"{cell.ours} *" if cell.why else cell.ours for cell in cells)]) + " |"
        )
    reasons = [
        f"- {label}, {column}: {cell.why} (common advice: {cell.advice})"
        for label, cells in table.rows.items()
        for column, cell in zip(table.columns, cells, strict=True)
        if cell.why
    ]
    return "\n".join([*lines, "", *(["Where it differs from common advice:", "", *reasons, ""] if reasons else [])])


def cases() -> list[dict[str, Any]]:
    """Returns the recommendations of the guides, which tests compare with the plan."""
    return list(_data()["cases"])


def _table(name: str, answers: Callable[[AdviceRow, Sequence[str]], Iterable[CellAnswer]]) -> Matrix:
    """Returns a table of the guides with our answers, which are given for a row and its columns."""
    data = _data()["tables"][name]
    columns = tuple(data["columns"])
    rows = {}
    for row in data["rows"]:
        cells = zip(columns, answers(row, columns), row["advice"], strict=True)
        rows[row["label"]] = tuple(_cell(answer, said, _why(row, data, column)) for column, answer, said in cells)
    return Matrix(name, data["title"], columns, rows, data.get("note", ""))


def _cell(answer: CellAnswer, said: str, why: str) -> Cell:
    same = answer.ours == said if answer.same is None else answer.same
    return Cell(answer.ours, said, "" if same else why or answer.reason)


def _why(row: AdviceRow, data: AdviceRow, column: str) -> str:
    own = row.get("why", {})
    return str(own.get(column) or own.get("default") or data["why"].get(column, ""))


# ---- memory: section 3 ----


def _sizes(row: AdviceRow, columns: Sequence[str]) -> Iterable[CellAnswer]:
    checkpoint = open_model(row["model"])
    for name, said in zip(("bf16", "w8a8", "w4a16"), row["advice"], strict=False):
        size = weights_bytes(checkpoint, _recipe(name)) / 1e9
        yield CellAnswer(f"{size:,.1f} GB", abs(size / float(said.split()[0]) - 1) <= CLOSE)
    yield CellAnswer(smallest(checkpoint))


def smallest(checkpoint: Checkpoint) -> str:
    """Returns the machine of the catalogue with the least memory that serves a model in 4 bits."""
    devices = {
        device.name: device
        for device in catalogue()
        if device.kind == "gpu" and (capability(device) or 0) >= 75
    }  # fmt: skip
    machines = sorted(
        (device.memory * count, count, device.price or 99.0, name) for name, device in devices.items() for count in GPUS
    )
    return next(
        machine_name(devices[name], count)
        for _, count, _, name in machines
        if _serves(checkpoint, devices[name], count)
    )


def _serves(checkpoint: Checkpoint, device: Device, count: int) -> bool:
    recipe = _recipe("w4a16")
    if count * device.usable < weights_bytes(checkpoint, recipe, True):
        return False
    engine, settings = usual(recipe.format)[0], Settings(sequences=1)
    place = Deployment(checkpoint, recipe, engine, device, tensor_parallel=count, settings=settings, keep_odd=True)
    try:
        return feasible(place).outcome == "kernel" and footprint(place, LOAD).per_device <= room(place)
    except QuantryError:
        return False


def _recipe(name: str, format_name: str | None = None) -> Recipe:
    chosen = presets()[name]
    return Recipe(chosen, format_name or chosen.formats[0])


# ---- hardware: section 4 ----


def _hardware(row: AdviceRow, columns: Sequence[str]) -> Iterable[CellAnswer]:
    best = plan(MODEL, gpu=row["gpu"]).options[0]
    yield CellAnswer(f"{best.preset} ({best.engine})", best.scheme in row["best"])
    yield from (CellAnswer(_runs(column, parse(row["gpu"]).device)) for column in columns[1:])


def _runs(column: str, device: Device) -> str:
    """Says if some recommended engine runs a precision on a device."""
    recommended = (engine.name for engine in ranked() if engine.plan.asked is None and engine.plan.points > 0)
    best = max(_outcome(name, column, device) for name in recommended)
    native = column not in NATIVE or NATIVE[column] in device.tflops
    return WORDS[best if native else min(best, 1)]


def _outcome(engine: str, column: str, device: Device) -> int:
    """Returns the best verdict of an engine for what a column means."""
    return max((_rank(_recipe(*pair), engine, device) for pair in COLUMNS[column]), default=0)


def _rank(recipe: Recipe, engine: str, device: Device) -> int:
    return RANK[feasible(Deployment(_model(), recipe, engine, device)).outcome]


# ---- engines: sections 7 and 15 ----


def _engine(row: AdviceRow, columns: Sequence[str]) -> Iterable[CellAnswer]:
    places = [parse(name).device for name in DEVICES]
    for column in columns:
        best = max(_outcome(row["engine"], column, device) for device in places)
        yield CellAnswer(WORDS[best], reason=_reason(row["engine"], column, places[0]))


def _reason(engine: str, column: str, device: Device) -> str:
    """Returns what feasibility says of a column, for cells without a written reason."""
    if not COLUMNS[column]:
        return ""
    return feasible(Deployment(_model(), _recipe(*COLUMNS[column][0]), engine, device)).reason


def _stack_engine(row: AdviceRow, columns: Sequence[str]) -> Iterable[CellAnswer]:
    engine = row["engine"]
    cpu = max(_outcome(engine, column, parse("cpu").device) for column in COLUMNS) > 0
    needs_gpu = "optional" if cpu else "yes"
    return map(CellAnswer, (engine_facts(engine).about, _throughput(engine), row["ease"], needs_gpu, WORDS[2 * cpu]))


def _throughput(engine: str) -> str:
    """Returns the tokens per second of the best option, 32 at once on an H100."""
    try:
        options = plan(MODEL, gpu="H100 SXM", engine=engine, concurrency=32).options
    except QuantryError:
        return "not known"
    if not options:
        return "not known"
    predicted = options[0].speed
    spread = "" if predicted["measured"] else f" ± {predicted['spread']:.0%}"
    return f"{predicted['decode_tokens_per_s']:,.0f} tok/s{spread} ({options[0].preset})"


def _stacks() -> Matrix:
    data, prefix = _data()["tables"]["stack"], "stack: "
    rows = {case["id"].removeprefix(prefix): _stack(case) for case in cases() if case["id"].startswith(prefix)}
    return Matrix("stack", data["title"], tuple(data["columns"]), rows, data["note"])


def _stack(case: AdviceRow) -> tuple[Cell, ...]:
    request, expected = case["ask"], case["expect"]
    best = plan(**request).options[0]
    answers = (
        CellAnswer(request["model"], True),
        CellAnswer(f"{best.preset}, {best.quality}", _expected(best.scheme, expected.get("scheme"))),
        CellAnswer(best.engine, _expected(best.engine, expected.get("engine"))),
        CellAnswer(request["gpu"], True),
    )
    return tuple(_cell(answer, case["says"], case.get("overridden", "")) for answer in answers)


def _expected(value: str, wanted: str | list[str] | None) -> bool:
    return not wanted or value in ([wanted] if isinstance(wanted, str) else wanted)


# ---- methods: section 15 ----


def _method(row: AdviceRow, columns: Sequence[str]) -> Iterable[CellAnswer]:
    recipe = _recipe(*row["recipe"])
    on_cpu = max(_rank(recipe, engine, parse("cpu").device) for engine in engines()) > 0
    answers = (_bits(recipe), _class(recipe), _faster(recipe), WORDS[2 * on_cpu], row["use"])
    return map(CellAnswer, (*answers, f"--preset {recipe.preset.name}"))


def _bits(recipe: Recipe) -> str:
    checkpoint = _model()
    count = sum(tensor.numel for tensor in checkpoint.tensors)
    return f"{8 * weights_bytes(checkpoint, recipe) / count:.2f}".removesuffix(".00")


def _class(recipe: Recipe) -> str:
    grid = recipe.preset.scheme.weight
    facts = {"scheme": scheme_name(recipe.preset), "calibrated": False, "zero_points": not grid.symmetric}
    return quality({**facts, "bits": grid.bits, "parameters": 8.0}).name


def _faster(recipe: Recipe) -> str:
    """Returns how much faster than 16 bit it decodes in the same engine, alone and with 64 at once."""
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


def _formats() -> Matrix:
    columns = ("formats", "bits a weight", "expected", "engines on an H100", "planned")
    rows = {preset.name: tuple(map(Cell, _format(preset))) for preset in presets().values()}
    return Matrix("formats", "Presets, formats and engines", columns, rows, "Sizes and verdicts for Llama-3.1-8B.")


def _format(preset: Preset) -> Sequence[str]:
    recipe, device = Recipe(preset, preset.formats[0]), parse("H100 SXM").device
    loading = [
        f"{engine.name} ({format_name})" if len(preset.formats) > 1 else engine.name
        for engine in ranked()
        for format_name in preset.formats
        if _rank(Recipe(preset, format_name), engine.name, device) == RANK["kernel"]
    ]
    planned = left_out(preset) or "yes"
    return ", ".join(preset.formats), _bits(recipe), _class(recipe), ", ".join(loading) or "none", planned


@cache
def _model() -> Checkpoint:
    return open_model(MODEL)


MAKERS: dict[str, Callable[[], tuple[Matrix, ...]]] = {
    "engines": lambda: (_table("engines", _engine), _table("stack_engines", _stack_engine)),
    "hardware": lambda: (_table("hardware", _hardware), _stacks()),
    "formats": lambda: (_formats(),),
    "methods": lambda: (_table("methods", _method),),
    "memory": lambda: (_table("memory", _sizes),),
}
