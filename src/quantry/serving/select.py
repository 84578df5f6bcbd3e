"""Which engine serves a model, and where that engine is installed; both are decided before anything is started."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quantry import registry
from quantry.devices import Hardware
from quantry.engines.contract.catalogue import OwnFormat, engine_facts, engine_name, engines, known_version, usual
from quantry.errors import ConfigError, ModelNotFoundError, QuantryError
from quantry.models.already_quantized import quantization
from quantry.models.attention import context_length
from quantry.models.reader import IMPORTANCE, local_folder, open_checkpoint
from quantry.storage.reading import read_json
from quantry.types import Checkpoint

PROBE = """
import importlib.metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""
BUILD = "build the folder again"
PATIENCE = 60.0  # seconds for a program to say its version


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to serve: the path that an engine is given, and what is known of it."""

    source: str
    path: Path
    format: str
    name: str
    checkpoint: Checkpoint | None = None  # None in a format that only one engine has
    bits: int | None = None

    @property
    def context(self) -> int | None:
        """The longest sequence it was made for, in tokens."""
        return context_length(self.checkpoint.config) if self.checkpoint else _own_context(self.path, self.format)


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed engine: its version, the platform it is built for, and the program that has it."""

    engine: str
    version: str
    platform: str
    python: str = "python"
    program: str | None = None  # its executable, if it has one


def open_model(model: str | Path) -> ServedModel:
    """Opens the model of a folder, a .gguf file, a hub id (which is downloaded) or the word demo."""
    given = Path(model).expanduser()
    for own in _own_formats():
        if given.is_dir() and (given / own.file).is_file():
            return ServedModel(str(model), given.resolve(), own.name, given.resolve().name)
    checkpoint = open_checkpoint(model)  # from headers first: what cannot be served is not downloaded
    quantized = quantization(checkpoint)
    path = local_folder(model).resolve()
    if checkpoint.format == "gguf":
        file = path if path.is_file() else _first_file(path)
        return ServedModel(str(model), file, "gguf", re.sub(r"-\d{5}-of-\d{5}$", "", file.stem), checkpoint)
    stored, bits = (quantized.method, round(quantized.bits)) if quantized else ("safetensors", None)
    name = str(model) if str(model) == "demo" else Path(str(model).partition("@")[0]).expanduser().name
    return ServedModel(str(model), path, stored, name or path.name, checkpoint, bits)


def select(model: ServedModel, engine: str | None, python: Path | None) -> str:
    """Returns the engine that is asked for if it loads the model, otherwise the usual one for its format."""
    fitting = [name for name, facts in engines().items() if model.format in facts.formats]
    if not fitting:
        known = sorted({stored for facts in engines().values() for stored in facts.formats})
        raise QuantryError(
            f"{model.source} is quantized with {model.format!r}, which no engine here loads",
            fix=f"quantize the 16-bit model again, as one of: {', '.join(known)}",
        )
    if engine is None:
        return _usual(model, python)
    engine = engine_name(engine)
    if engine not in fitting:
        loads = ", ".join(engine_facts(engine).formats)
        raise QuantryError(
            f"{engine} does not load {model.source}, which is {model.format} (it loads {loads})",
            fix=f"use --engine {' or '.join(fitting)}{_conversion(model, engine)}",
        )
    return engine


def find_engine(
    engine: str, hardware: Hardware, python: Path | None = None, program: Path | None = None, wanted: str | None = None
) -> Installed:
    """Finds an installed engine; raises QuantryError with the command that installs it if there is none."""
    facts = engine_facts(engine).installation
    if program is not None or facts.program:
        return _program(engine, hardware, python, program, wanted)
    if facts.embedded:
        return _embedded(engine, hardware, wanted)
    name = _python(engine, python)
    packages = _packages(name, facts.distributions)
    if not packages:
        raise _missing(engine, hardware, f"{engine} is not installed for {name}")
    package, number = next(iter(packages.items()))
    cpu = "+cpu" in number or package == facts.cpu_distribution
    return Installed(engine, wanted or number, "cpu" if cpu else hardware.device.platform, name)


def lacking(python: str, names: tuple[str, ...]) -> list[str]:
    """Returns those of the packages that a python does not have."""
    present = _packages(python, names) if names else {}
    return [name for name in names if name not in present]


def in_image(engine: str, hardware: Hardware, wanted: str | None = None) -> Installed:
    """Returns an engine in a container image: of the named version, or else the newest known one."""
    return Installed(engine, wanted or engine_facts(engine).latest, hardware.device.platform)


def _usual(model: ServedModel, python: Path | None) -> str:
    """Returns the first usual engine of the format that is installed, or the first of them if none is."""
    candidates = usual(model.format)
    if len(candidates) == 1:
        return candidates[0]
    program = _python(candidates[0], python)
    installed = (name for name in candidates if _packages(program, engine_facts(name).installation.distributions))
    return next(installed, candidates[0])


def _conversion(model: ServedModel, engine: str) -> str:
    """Returns a command that makes the model loadable in this engine all the same; empty if none does."""
    formats = engine_facts(engine).formats
    preset = " --preset gguf-q4_k_m" if formats == ("gguf",) else ""
    if model.format == "safetensors":
        return f", or quantize it for {engine}: quantry quantize {model.source}{preset} -o OUT"
    if model.checkpoint is None:
        return ""
    if model.format == "gguf":
        return f", or quantry convert {model.source} --to bf16 -o OUT" if "safetensors" in formats else ""
    if preset:
        return f", or make a GGUF file of the 16-bit model: quantry quantize MODEL{preset} -o OUT"
    writable = [stored for stored in formats if stored in registry.choices("quantry.formats") and stored != "gguf"]
    return f", or quantry convert {model.source} --to {writable[0]} -o OUT" if writable else ""


def _embedded(engine: str, hardware: Hardware, wanted: str | None) -> Installed:
    """Finds an engine in a package of Quantry's own python; only the engine itself knows if it was built for GPUs."""
    facts = engine_facts(engine).installation
    packages = _packages(sys.executable, facts.distributions)
    if not packages:
        problem = f"{engine} is embedded through {facts.distributions[0]}, which {sys.executable} does not have"
        raise _missing(engine, hardware, problem)
    number = wanted or _version_in(next(iter(packages.values())), engine)
    platform = hardware.device.platform
    on_gpu = platform != "cpu" and _output([sys.executable, "-c", facts.gpu_probe]).strip().endswith("True")
    return Installed(engine, number, platform if on_gpu else "cpu", sys.executable)


def _program(
    engine: str, hardware: Hardware, python: Path | None, program: Path | None, wanted: str | None
) -> Installed:
    """Finds an engine with its own program, in the folder of the named python or on the search path."""
    name = str(program or engine_facts(engine).installation.program)
    sibling = str(python.parent / name) if python and not program else None
    path = (shutil.which(sibling) if sibling else None) or shutil.which(name)
    if path is None:
        raise _missing(engine, hardware, f"{name} is not a program that can be run")
    number = wanted or _version_in(_output([path, "--version"]), engine)
    return Installed(engine, number, hardware.device.platform, _python(engine, python), path)


def _version_in(text: str, engine: str) -> str:
    """Returns the version that a text names, such as the output of a program; the newest known one if it names none."""
    facts = engine_facts(engine)
    match = re.search(facts.installation.version_pattern, text)
    if match is None:
        return facts.latest
    number = next(group for group in match.groups() if group)
    return known_version(engine, f"{facts.installation.version_prefix}{number}")


def _missing(engine: str, hardware: Hardware, problem: str) -> QuantryError:
    facts = engine_facts(engine)
    where = "if it has its own environment, name its python with --engine-python"
    if facts.installation.program or facts.installation.embedded:
        where = "if it is elsewhere, name it with --engine-bin"
    return QuantryError(problem, fix=f"{facts.installed_by(hardware.device.platform)}; {where}")


def _python(engine: str, wanted: Path | None) -> str:
    """Returns the python that has the engine: the named one, or this one."""
    if wanted is None:
        return sys.executable
    path = shutil.which(wanted)
    if path is None:
        raise QuantryError(f"{wanted} is not a program that can be run", fix=f"name the python that has {engine}")
    return str(Path(path).absolute())  # not resolved: the python of an environment is a link


@cache
def _packages(python: str, names: tuple[str, ...]) -> dict[str, str]:
    """Returns the versions of those packages that a python has, in their order."""
    if python == sys.executable:
        return {name: version(name) for name in names if _has(name)}
    output = _output([python, "-c", PROBE, *names]).strip()
    try:
        return dict(json.loads(output.splitlines()[-1]))
    except (IndexError, ValueError) as error:
        raise QuantryError(
            f"{python} does not run: {output[-200:] or 'it says nothing'}", fix="name a python"
        ) from error


def _has(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _output(argv: list[str]) -> str:
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


def _own_formats() -> list[OwnFormat]:
    return [facts.own_format for facts in engines().values() if facts.own_format]


def _own_context(folder: Path, stored: str) -> int | None:
    """Returns the longest sequence of a model in a format that only one engine has."""
    own = next(own for own in _own_formats() if own.name == stored)
    if not own.context:
        return None
    value: Any = read_json(folder / own.file, fix=BUILD, error=ConfigError)
    for key in own.context:
        value = value.get(key) if isinstance(value, dict) else None
    if type(value) is not int:
        raise ConfigError(f"{folder / own.file} is damaged: {'.'.join(own.context)} is not a whole number", fix=BUILD)
    return value
