"""Serving: the right engine for an artefact, with the right flags for its version, as a process of its own.

`prepare` decides everything and starts nothing; `serve` starts what was decided and waits until it answers. Which
engine, where it is installed and whether it fits is choose.py, the flags are engines/*.py, the process is process.py;
llama.cpp needs nothing installed: embedded.py runs it.
"""

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from quantry.errors import QuantryError

if TYPE_CHECKING:
    from quantry.engines.contract import Command, Outdated, Serving
    from quantry.serving.choose import Installed, Model
    from quantry.serving.process import Launch, Running
    from quantry.types import Footprint

HOST = "127.0.0.1"
ONNX = "onnxruntime"
EMBEDDED = "quantry.serving.embedded"
UNTHREADED = ("tensorrt-llm", "tgi", "deepspeed")  # compute on GPUs only
UNNAMED = ("transformers", "tgi")  # their requests name a model by its path
PATIENCE = 1800.0


@dataclass(frozen=True, slots=True)
class Options:
    """All that can be asked of a server beside its model; None leaves a thing to Quantry or to the engine."""

    engine: str | None = None
    host: str = HOST
    port: int | None = None  # 0 takes one that is free
    api_key: str | None = None
    name: str | None = None  # that requests ask for
    context: int | None = None  # tokens of one sequence
    parallel: int | None = None  # sequences at once
    kv: str | None = None  # type of the KV cache
    draft: str | Path | None = None  # a smaller model that guesses
    lookup: bool = False  # guesses are copied from the prompt
    draft_tokens: int | None = None  # guesses at a time
    prefix_cache: bool | None = None
    chunked_prefill: bool | None = None
    batch_tokens: int | None = None
    threads: int | None = None
    offload_layers: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    nodes: int = 1
    head: str | None = None
    utilization: float | None = None
    cache_gib: int | None = None
    dtype: str | None = None
    quantization: str | None = None  # of 16-bit weights as the engine loads or exports them
    eager: bool = False
    trust_remote_code: bool = False
    engine_python: Path | None = None
    engine_bin: Path | None = None
    engine_version: str | None = None
    image: str | None = None
    extra: tuple[str, ...] = ()  # words for the engine itself


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server that could be started now."""

    model: "Model"
    serving: "Serving"
    launch: "Launch"
    reasons: tuple[tuple[str, str], ...]  # (flag, why)
    outdated: tuple["Outdated", ...]
    footprint: "Footprint | None"

    @property
    def elsewhere(self) -> tuple[tuple[str, str, str], ...]:
        """(machine, why, command) of the steps that are for the user to run on other machines."""
        from quantry.engines.contract import HERE

        steps = (*self.launch.command.steps, *self.launch.command.after)
        return tuple((one.where, one.why, shlex.join(one.argv)) for one in steps if one.where != HERE)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `quantry serve --json`; keys and other secrets are hidden."""
        return {
            "model": self.launch.model,
            "path": str(self.model.path),
            "format": self.model.format,
            "engine": self.serving.engine,
            "version": self.serving.version,
            "platform": self.serving.platform,
            "url": self.launch.url,
            "context": self.launch.context,
            "command": self.launch.command.shown(),
            "elsewhere": [{"where": where, "why": why, "command": words} for where, why, words in self.elsewhere],
            "reasons": [{"flag": flag, "why": why} for flag, why in self.reasons],
            "outdated": [asdict(row) for row in self.outdated],
            "memory": asdict(self.footprint) if self.footprint else None,
        }


def serve(
    model: str | Path,
    *,
    log: Path | None = None,
    stream: TextIO | None = None,
    patience: float = PATIENCE,
    tell: Callable[[str], None] | None = None,
    **options: Any,
) -> "Running":
    """Starts the engine that suits `model` and waits until it answers; `options` are the fields of `Options`.

    The engine's log goes to the file `log` and to `stream`. Use what comes back in a `with` statement, or `stop` it.
    """
    return begin(prepare(model, Options(**options)), log=log, stream=stream, patience=patience, tell=tell)


def begin(
    prepared: Prepared,
    *,
    log: Path | None = None,
    stream: TextIO | None = None,
    patience: float = PATIENCE,
    tell: Callable[[str], None] | None = None,
) -> "Running":
    """Starts what was prepared."""
    from quantry.serving.process import start

    return start(prepared.launch, log=log, stream=stream, patience=patience, tell=tell)


def prepare(model: str | Path, options: Options | None = None) -> Prepared:
    """Decides on engine, version, flags and port, and starts nothing; what cannot work is an error."""
    from quantry.devices.detect import detect
    from quantry.engines.contract import adapter, check
    from quantry.serving import choose, container
    from quantry.serving.process import Launch, check_port, free_port

    asked = options or Options()
    _check(asked)
    found = choose.open_model(model)
    name = choose.choose(found, asked.engine, asked.engine_python)
    engine, hardware = adapter(name), detect(0)
    if asked.image and name == ONNX:
        raise QuantryError(f"the server in front of {ONNX} is Quantry's own, and in no image", fix="leave --image out")
    if asked.image:
        installed = choose.in_image(name, hardware, asked.engine_version)
    else:
        installed = choose.find_engine(name, hardware, asked.engine_python, asked.engine_bin, asked.engine_version)
    port = free_port(asked.host) if asked.port == 0 else asked.port or engine.PORT
    wanted = _serving(asked, found, installed, port)
    check(wanted, engine.FORMATS)
    serving, footprint = choose.fitted(wanted, found, hardware)
    check_port(asked.host, port)
    embedded = name == choose.LLAMA and asked.engine_bin is None and not asked.image
    launch = Launch(
        engine=name,
        command=_command(asked, found, installed, serving, embedded=embedded),
        host=asked.host,
        port=port,
        health=engine.HEALTH,
        model=_requested(serving),
        context=serving.context,
        removal=container.removal(container.runtime(), _container(serving)) if asked.image else (),
        ends_with_stdin=embedded,
    )
    return Prepared(found, serving, launch, tuple(engine.explain(serving)), engine.OUTDATED, footprint)


def _check(asked: Options) -> None:
    """What contradicts itself, before a model is opened."""
    if asked.draft is not None and asked.lookup:
        raise QuantryError("--draft and --lookup are two ways to guess", fix="give one of them")
    if asked.image and (asked.engine_python or asked.engine_bin):
        raise QuantryError("--image and an engine that is installed here are asked for at once", fix="give one of them")
    if asked.port is not None and not 0 <= asked.port <= 65535:
        raise QuantryError(f"--port {asked.port} is not 0 to 65535", fix="use 0 for one that is free")


def _serving(asked: Options, model: "Model", installed: "Installed", port: int) -> "Serving":
    from quantry.engines.contract import LOOKUP, Serving
    from quantry.models.identity import identity
    from quantry.serving.choose import open_model
    from quantry.serving.cores import physical_cores
    from quantry.storage import home

    draft = open_model(asked.draft) if asked.draft is not None else None
    if draft is not None and draft.format != model.format and "gguf" in (draft.format, model.format):
        raise QuantryError(
            f"the draft {draft.source} is {draft.format} and the model {model.format}", fix="use a draft of one format"
        )
    builds = model.checkpoint if installed.engine == ONNX else None
    kept = home() / "built" / f"{model.name}-{identity(builds)[:12]}" if builds else None
    usual = physical_cores() if installed.platform == "cpu" and installed.engine not in UNTHREADED else None
    return Serving(
        model=str(model.path), format=model.format, engine=installed.engine, version=installed.version,
        platform=installed.platform, host=asked.host, port=port, api_key=asked.api_key,
        name=asked.name or (None if installed.engine in UNNAMED else model.name), context=asked.context,
        concurrency=asked.parallel, kv=asked.kv or "auto",
        prefix_cache=asked.prefix_cache, chunked_prefill=asked.chunked_prefill, batch_tokens=asked.batch_tokens,
        speculative=str(draft.path) if draft else LOOKUP if asked.lookup else None, draft_tokens=asked.draft_tokens,
        tensor_parallel=asked.tensor_parallel, pipeline_parallel=asked.pipeline_parallel, nodes=asked.nodes,
        head=asked.head, offload_layers=asked.offload_layers, utilization=asked.utilization,
        threads=usual if asked.threads is None else asked.threads,
        cache_gib=asked.cache_gib, dtype=asked.dtype, quantization=asked.quantization, bits=model.bits,
        eager=asked.eager, trust_remote_code=asked.trust_remote_code, built=str(kept) if kept else None,
        python=installed.python, extra=asked.extra,
    )  # fmt: skip


def _command(
    asked: Options, model: "Model", installed: "Installed", serving: "Serving", *, embedded: bool
) -> "Command":
    """The engine's command, with the program that is really there in place of the usual one."""
    from quantry.engines.contract import adapter
    from quantry.serving import container

    engine = adapter(serving.engine)
    if not asked.image:
        command = engine.command(serving)
        if embedded:
            from quantry.serving.embedded import END

            words = (sys.executable, "-m", EMBEDDED, *command.argv[1:], END)
            return replace(command, argv=words)
        if serving.engine == ONNX:
            return _own_server(command, serving)
        program = installed.program
        return replace(command, argv=(program, *command.argv[1:])) if program else command
    paths = [model.path, *([Path(serving.speculative)] if asked.draft is not None and serving.speculative else [])]
    return container.contained(
        engine.command(serving), asked.image, program=container.runtime(), name=_container(serving),
        platform=serving.platform, mounts=[path.parent if path.is_file() else path for path in paths],
    )  # fmt: skip


def _own_server(command: "Command", serving: "Serving") -> "Command":
    """Quantry's server by its path, since the engine's environment need not have Quantry; what is built stays."""
    from quantry.engines.onnxruntime import folder
    from quantry.serving.choose import GENAI

    file = str(Path(__file__).with_name("onnx_server.py"))
    built = (Path(folder(serving)) / GENAI).is_file()  # the last file that the builder writes
    return replace(command, argv=(command.argv[0], "-P", file, *command.argv[3:]), steps=() if built else command.steps)


def _requested(serving: "Serving") -> str:
    """What requests call the model; Ollama has names in lower case only."""
    name = serving.name or serving.model
    return name.lower() if serving.engine == "ollama" else name


def _container(serving: "Serving") -> str:
    return f"quantry-{serving.port}"
