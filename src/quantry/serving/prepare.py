"""Decides how a model is served, before anything starts: engine, version, flags, port and memory."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from quantry.devices.detect import detect
from quantry.devices.host import physical_cores
from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.catalogue import Engine, Outdated, engine_facts
from quantry.engines.contract.command import HERE, Command, check
from quantry.engines.contract.options import Options, Serving
from quantry.errors import QuantryError
from quantry.llamacpp.families import known
from quantry.models.identity import identity
from quantry.serving import container
from quantry.serving.embedded import END
from quantry.serving.fit import fitted
from quantry.serving.process import PATIENCE, Launch, Running, check_patience, check_port, free_port, start
from quantry.serving.select import Installed, ServedModel, find_engine, in_image, lacking, open_model, select
from quantry.serving.vocabulary import check_draft
from quantry.storage import home
from quantry.types import Footprint


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server that could be started now."""

    model: ServedModel
    serving: Serving
    launch: Launch
    reasons: tuple[tuple[str, str], ...]  # (flag, why)
    outdated: tuple[Outdated, ...]
    footprint: Footprint | None

    @property
    def elsewhere(self) -> tuple[tuple[str, str, str], ...]:
        """(machine, why, command) of the steps that the user has to run on other machines."""
        steps = (*self.launch.command.steps, *self.launch.command.after)
        return tuple((step.where, step.why, shlex.join(step.argv)) for step in steps if step.where != HERE)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know before the first request."""
        checkpoint = self.model.checkpoint
        if (
            checkpoint is None
            or checkpoint.chat_template
            or any("chat-template" in word for word in self.serving.extra)
        ):
            return ()
        theirs = "the engine puts chats into a form of its own" if self.model.format == "gguf" else "it takes no chats"
        return (f"{self.model.name} has no chat template: {theirs}; ask for completions, or give --chat-template FILE",)

    def check_installed(self) -> None:
        """Raises QuantryError if the engine is there and its server is not: before it is started, and fails."""
        facts = engine_facts(self.serving.engine)
        if self.launch.removal:  # in an image
            return
        if missing := lacking(self.serving.python, facts.installation.needs):
            raise QuantryError(
                f"{facts.name} is installed for {self.serving.python} without its server, which needs"
                f" {' and '.join(missing)}",
                fix=f"{self._as_gguf()}{facts.installed_by(self.serving.platform)}",
            )

    def _as_gguf(self) -> str:
        """Returns the commands that serve a 16-bit model in the engine that comes with Quantry; else nothing."""
        names = self.model.checkpoint.config.get("architectures") if self.model.checkpoint else None
        if self.model.format != "safetensors" or not isinstance(names, list) or not {*map(str, names)} & {*known()}:
            return ""
        source, out = shlex.quote(self.model.source), shlex.quote(f"{self.model.name}-gguf-bf16")
        made = f"quantry quantize {source} --preset gguf-bf16 -o {out}"
        return f"serve it as a GGUF file, which needs no more: {made} && quantry serve {out}; or "

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON of `quantry serve --json`; keys and other secrets are hidden."""
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
            "warnings": list(self.warnings),
        }


def serve(
    model: str | Path,
    *,
    log: Path | None = None,
    stream: TextIO | None = None,
    patience: float = PATIENCE,
    tell: Callable[[str], None] | None = None,
    **options: Any,
) -> Running:
    """Starts the engine that suits `model` and waits until it answers; `options` are the fields of `Options`.

    The engine's log goes to the file `log` and to `stream`; `tell` is given a line before each step that takes long.
    Raises QuantryError for what cannot work, EngineError if the engine ends or does not answer in `patience` seconds.

        with quantry.serve("demo", port=0) as server:
            print(server.url, server.model)
    """
    check_patience(patience)
    prepared = prepare(model, Options(**options))
    prepared.check_installed()
    return start(prepared.launch, log=log, stream=stream, patience=patience, tell=tell)


def prepare(model: str | Path, options: Options | None = None) -> ServerPlan:
    """Decides on engine, version, flags and port, and starts nothing; raises QuantryError for what cannot work."""
    chosen = options or Options()
    _check(chosen)
    opened = open_model(model)
    facts = engine_facts(select(opened, chosen.engine, chosen.engine_python))
    hardware = detect(0)
    if chosen.image and facts.server.script:
        raise QuantryError(
            f"the server in front of {facts.name} is Quantry's own, and in no image", fix="leave --image out"
        )
    if chosen.image:
        installed = in_image(facts.name, hardware, chosen.engine_version)
    else:
        python, program = chosen.engine_python, chosen.engine_bin
        installed = find_engine(facts.name, hardware, python, program, chosen.engine_version)
    port = free_port(chosen.host) if chosen.port == 0 else chosen.port or facts.server.port
    wanted = _serving(chosen, opened, installed, port)
    check(wanted)
    serving, footprint = fitted(wanted, opened, hardware)
    check_port(chosen.host, port)
    launch = _launch(chosen, opened, installed, serving, port)
    return ServerPlan(opened, serving, launch, tuple(adapter(facts.name).explain(serving)), facts.outdated, footprint)


def _check(options: Options) -> None:
    """Raises an error for options that contradict each other, before a model is opened."""
    if options.draft is not None and options.lookup:
        raise QuantryError("--draft and --lookup are two ways to guess", fix="give one of them")
    if options.image and (options.engine_python or options.engine_bin):
        raise QuantryError("--image and an engine that is installed here are asked for at once", fix="give one of them")
    if options.port is not None and not 0 <= options.port <= 65535:
        raise QuantryError(f"--port {options.port} is not 0 to 65535", fix="use 0 for one that is free")


def _serving(options: Options, model: ServedModel, installed: Installed, port: int) -> Serving:
    """Returns the options with everything decided that they leave open."""
    facts = engine_facts(installed.engine).server
    threads = physical_cores() if installed.platform == "cpu" and facts.threads else None
    built = None
    if facts.keeps_builds and model.checkpoint is not None:
        built = str(home() / "built" / f"{model.name}-{identity(model.checkpoint)[:12]}")
    decided: dict[str, Any] = {
        "engine": installed.engine,
        "port": port,
        "name": options.name or (None if facts.model_name == "path" else model.name),
        "kv": None if options.kv == "auto" else options.kv,
        "draft": _draft(options, model),
        "threads": threads if options.threads is None else options.threads,
    }
    return Serving(
        **{item.name: getattr(options, item.name) for item in fields(options)} | decided,
        version=installed.version,
        model=str(model.path),
        format=model.format,
        platform=installed.platform,
        bits=model.bits,
        built=built,
        python=installed.python,
    )


def _draft(options: Options, model: ServedModel) -> Path | None:
    """Returns the path of the draft model. Raises QuantryError if only one of the two is a GGUF file."""
    if options.draft is None:
        return None
    draft = open_model(options.draft)
    if draft.format != model.format and "gguf" in (draft.format, model.format):
        raise QuantryError(
            f"the draft {draft.source} is {draft.format} and the model {model.format}", fix="use a draft of one format"
        )
    check_draft(model, draft)
    return draft.path


def _launch(options: Options, model: ServedModel, installed: Installed, serving: Serving, port: int) -> Launch:
    facts = engine_facts(serving.engine)
    embedded = bool(facts.installation.embedded) and options.engine_bin is None and not options.image
    command = adapter(serving.engine).command(serving)
    steps = tuple(step for step in command.steps if step.makes is None or not Path(step.makes).is_file())
    name = serving.name or serving.model
    return Launch(
        engine=serving.engine,
        command=_local(replace(command, steps=steps), facts, installed, embedded)
        if options.image is None
        else _contained(command, options.image, model, serving),
        host=options.host,
        port=port,
        health=facts.server.health,
        model=name.lower() if facts.server.model_name == "lower" else name,
        context=serving.context,
        removal=(container.runtime(), "rm", "--force", _container(serving)) if options.image else (),
        ends_with=(END,) if embedded else (),
    )


def _local(command: Command, facts: Engine, installed: Installed, embedded: bool) -> Command:
    """Returns the engine's command with the installed program in place of the usual one."""
    if embedded:
        return replace(command, argv=(sys.executable, "-m", str(facts.installation.embedded), *command.argv[1:]))
    if facts.server.script:  # by its path, since the engine's environment need not have Quantry
        spec = find_spec(f"{facts.server.script}.__main__")
        assert spec is not None
        return replace(command, argv=(command.argv[0], "-P", str(spec.origin), *command.argv[3:]))
    return replace(command, argv=(installed.program, *command.argv[1:])) if installed.program else command


def _contained(command: Command, image: str, model: ServedModel, serving: Serving) -> Command:
    """Returns the engine's command in a container that sees the model and its draft."""
    drafts = [] if serving.draft is None else [Path(serving.draft)]
    return container.contained(
        command, image, program=container.runtime(), name=_container(serving), platform=serving.platform,
        mounts=[path.parent if path.is_file() else path for path in (model.path, *drafts)],
    )  # fmt: skip


def _container(serving: Serving) -> str:
    return f"quantry-{serving.port}"
