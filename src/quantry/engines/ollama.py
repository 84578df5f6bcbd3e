"""Ollama: a Modelfile, its server, and `ollama create` once that answers."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from quantry.engines import llama_cpp
from quantry.engines.contract.boot_log import Facts, last
from quantry.engines.contract.command import Command, Setting, Step, check, checked, environment, explained, maybe
from quantry.engines.contract.options import Serving
from quantry.engines.llama_cpp import HUB_GGUF
from quantry.errors import RecipeError

MODELFILE = "Modelfile"


def settings(serving: Serving) -> list[Setting]:
    """Returns the environment of the server; the model's settings are in its Modelfile."""
    host = f"[{serving.host}]" if serving.host.count(":") > 1 else serving.host  # IPv6
    address = f"{host}:{serving.listening_port}"
    return [
        Setting("OLLAMA_HOST=", address, "where it listens, and where ollama create finds it"),
        *maybe("OLLAMA_CONTEXT_LENGTH=", serving.context, "tokens of one sequence"),
        *maybe("OLLAMA_NUM_PARALLEL=", serving.parallel, "sequences that are answered at once"),
        *maybe("OLLAMA_FLASH_ATTENTION=", 1 if serving.kv else None, "a quantized cache needs it"),
        *maybe("OLLAMA_KV_CACHE_TYPE=", serving.kv, "a smaller KV cache holds more tokens"),
    ]


def command(serving: Serving) -> Command:
    """Returns `ollama serve`; then the model is made from the file, under the name that requests use."""
    check(serving)
    variables = settings(serving)
    create = ("ollama", "create", name(serving), "--file", MODELFILE)
    checked(serving, [*variables, Setting("--file", MODELFILE, "")])
    return Command(
        argv=("ollama", "serve", *serving.extra),
        env=environment(variables),
        files={MODELFILE: modelfile(serving)},
        after=(Step(create, "the model's name, from the file"),),
    )


def explain(serving: Serving) -> list[tuple[str, str]]:
    lines = modelfile(serving).splitlines()
    return [*explained(serving, settings(serving)), *((line, "a line of the Modelfile") for line in lines)]


def facts(lines: Iterable[str]) -> Facts:
    """Reads the server's log, once the model was loaded: it runs llama.cpp, whose lines are in it."""
    log = list(lines)
    version = last(r"Listening on \S+ \(version ([\w.-]+)\)", log)
    inner = llama_cpp.facts(log)
    warned = tuple(dict.fromkeys(line.strip() for line in log if "level=WARN" in line))
    return replace(inner, version=version.group(1) if version else None, warnings=warned)


def name(serving: Serving) -> str:
    """Returns what requests call the model: lower case, as Ollama wants it."""
    path = Path(serving.model)
    own = path.parent.name or path.stem if path.suffix == ".gguf" else path.name
    return (serving.name or own).lower()


def modelfile(serving: Serving) -> str:
    if "\n" in serving.model:
        raise RecipeError(f"the path {serving.model!r} has a line break", fix="rename the folder")
    path = serving.model if Path(serving.model).is_absolute() else f"./{serving.model}"
    if serving.format == "gguf" and HUB_GGUF.fullmatch(serving.model) and not Path(serving.model).exists():
        path = f"hf.co/{serving.model}"
    limits = {"num_ctx": serving.context, "num_thread": serving.threads}
    lines = [f"PARAMETER {name} {value}" for name, value in limits.items() if value]
    return "\n".join([f"FROM {path}", *lines, ""])
