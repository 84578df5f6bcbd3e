"""`quantry.run`, the main job in one call: plan, quantize, verify, serve, a first answer, and what it cost.

Everything is in one folder: plan.json, the artefact with its card and proof in a folder of its own, the log of the
engine, and run.json with the summary and with notes on what each artefact was asked for. A run that was ended goes on
where it was: an artefact that is finished for the same request is taken over, and so is a proof that was measured in
the same way. What can be refused is refused before anything is written.
"""

import fcntl
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from quantry import __version__
from quantry.budget import parse
from quantry.checkpoint.reader import local_folder, open_checkpoint
from quantry.checkpoint.workspace import check_target
from quantry.checkpoint.writer import write_atomically
from quantry.devices.detect import detect
from quantry.engines.contract import adapter
from quantry.errors import OutputError, QuantryError
from quantry.planning.candidates import gib
from quantry.planning.commands import SHARES
from quantry.planning.decision import Option, Plan, plan
from quantry.planning.rules import find_use
from quantry.proof.text import default_text, read_text
from quantry.recipe import AUTO, presets
from quantry.report.sizes import human
from quantry.serving import HOST, Options, Prepared, begin, choose, prepare
from quantry.serving.process import check_port, free_port
from quantry.talking import Answer, Server
from quantry.ways import FORMATS as MIXED

if TYPE_CHECKING:
    from quantry.serving.process import Running

NOTE, PLAN, CARD, LOG, LOCK = "run.json", "plan.json", "quantry.json", "engine.log", "run.lock"
OURS = frozenset({NOTE, PLAN, LOG, LOCK, f"{NOTE}.partial", f"{PLAN}.partial"})
QUESTION = "What color is the sky?"
ANSWER = 64  # tokens of the first answer at most, and of the text that the pace is measured on
PACED = ("llama.cpp", "vllm")  # engines that go on past the end of an answer if they are asked to
LENGTH = 512  # tokens of a window that is measured
ELSEWHERE = ("vllm", "transformers")  # engines of `verify` that may be installed for another python
ALL_LAYERS = 999  # what a plan says for all of them

Progress = Callable[[int, int, str], None]  # done, in all, what is in hand
Showing = Callable[[str], AbstractContextManager[Progress | None]]  # of a step by its name


@dataclass(frozen=True, slots=True)
class Step:
    """Something that was done, and the file that came of it."""

    name: str  # plan, quantize, verify, serve, answer
    words: str
    file: str | None = None
    taken_over: bool = False  # by an earlier run
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it all, and what it cost. Names are the JSON names; `running` is the engine if it still serves."""

    model: str
    path: str
    use: str
    preset: str
    format: str
    engine: str
    artefact: str
    source_bytes: int
    bytes: int
    bits_per_weight: float
    proof: Mapping[str, Any]  # verdict, gate, kl, served_kl, top1, perplexity, reference_perplexity
    memory: Mapping[str, Mapping[str, int]]  # predicted and measured, by part
    speed: Mapping[str, float | None]  # tokens_per_s, predicted_tokens_per_s, first_token_s
    question: str | None
    answer: str | None
    url: str | None
    commands: Mapping[str, str]  # to go on with
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    running: "Running | None" = field(default=None, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        return bool(self.proof["verdict"] == "pass")

    def stop(self) -> None:
        """Stops the engine, if it still serves."""
        if self.running:
            self.running.stop()

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `quantry run --json`."""
        return asdict(replace(self, running=None)) | {"running": self.running is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class Asked:
    """All that can be asked of a run beside its model and folder; None leaves a thing to Quantry."""

    use: str | None = None
    budget: str | None = None  # a size for preset auto
    gpu: str | None = None  # another machine to plan for
    engine: str | None = None
    engine_python: str | Path | None = None
    context: int | None = None
    port: int | None = None
    text: str | Path | None = None  # to measure on
    windows: int = 16
    question: str = QUESTION
    device: str | None = None  # to compute on; a GPU if there is one


class DeclinedError(Exception):
    """The question whether to go on was answered with no; nothing was written."""


def run(
    model: str | Path,
    output: str | Path | None = None,
    *,
    serve: bool = True,
    tell: Callable[[Step], None] | None = None,
    confirm: Callable[[str], bool] | None = None,
    showing: Showing | None = None,
    **asked: Any,
) -> Run:
    """Plans, quantizes, verifies and serves `model`, and asks it a first question; `asked` are the fields of `Asked`.

    With `serve` the engine goes on serving: use what comes back in a `with` statement, or `stop` it. Where the gate is
    failed nothing is served. `confirm` is asked with a sentence before anything is written; `tell` is given each step
    that is done, and `showing` gives a context with a progress function for a step.
    """
    job = _decided(str(model), output, Asked(**asked))
    if confirm and not (job.made and job.proven) and not confirm(job.question()):
        raise DeclinedError
    with _alone(job.out):
        done = _Doing(job, tell, showing or (lambda _: nullcontext()))
        try:
            done.plan()
            done.quantize()
            done.verify()
            if done.passed and job.installed:
                done.serve()
                done.ask(stay=serve)
            return done.result()
        except BaseException:
            done.stop()
            raise


# ---- what is decided before anything is written ----


@dataclass(frozen=True, slots=True)
class _Job:
    """A run before its first step."""

    model: str  # as it was asked for
    source: str  # what can be opened
    out: Path
    asked: Asked
    plan: Plan
    option: Option
    installed: "choose.Installed | None"  # None: the engine is for another machine
    device: str
    text: str  # its digest
    notes: tuple[str, ...]

    @property
    def preset(self) -> str:
        return AUTO if self.asked.budget else self.option.preset

    @property
    def folder(self) -> Path:
        """Of the artefact, named as `quantry plan` names it."""
        usual = "gguf" if self.asked.budget else presets()[self.option.preset].formats[0]
        size = f"-{re.sub(r'[^A-Za-z0-9.]+', '-', self.asked.budget).strip('-.')}" if self.asked.budget else ""
        form = "" if self.option.format == usual else f"-{self.option.format}"
        return self.out / f"{_plain(self.source)}-{self.preset}{size}{form}"

    @property
    def gate(self) -> str:
        return find_use(self.asked.use).gate

    @property
    def measured_in(self) -> str | None:
        """The engine that verify is told; it finds llama.cpp for GGUF by itself."""
        from quantry.proof.verification import ENGINES

        name = self.option.engine
        gguf = self.option.format == "gguf"
        return name if self.installed and name in ENGINES and (name == "llama.cpp") == gguf else None

    @property
    def making(self) -> dict[str, Any]:
        """The options of quantize."""
        if self.asked.budget:
            return {"preset": AUTO, "budget": self.asked.budget, "format": self.option.format, "device": self.device}
        option = self.option
        chosen = {"preset": option.preset, "format": option.format, "group": option.group, "device": self.device}
        return {**chosen, "keep_odd": True}  # as it was planned

    @property
    def measuring(self) -> dict[str, Any]:
        """The options of verify."""
        python = self.asked.engine_python if self.measured_in in ELSEWHERE else None
        how = {"gate": self.gate, "windows": self.asked.windows, "length": LENGTH, "device": self.device}
        return {**how, "engine": self.measured_in, "engine_python": python, "text": self.asked.text}

    @property
    def made(self) -> bool:
        return (self.folder / CARD).is_file()

    @property
    def proven(self) -> bool:
        return self.made and "proof" in _object(self.folder / CARD)

    def words(self) -> str:
        """The plan in a line."""
        one = self.option
        if self.asked.budget:
            return f"{AUTO} for {self.asked.budget} as {one.format}, in {one.engine}"
        speed = f"{one.speed['decode_tokens_per_s']:,.0f} tokens/s"
        where = f"{human(one.memory['per_device'])} of {gib(one.memory['limit'])} on {self.plan.hardware['device']}"
        return f"{one.preset} in {one.engine}: {one.quality}, about {speed}, {where}"

    def question(self) -> str:
        """What is about to be done, for whoever has to agree."""
        work = [] if self.made else [f"{self.plan.model['parameters'] / 1e9:,.2f} billion parameters are quantized"]
        work += [] if self.proven else [f"{self.asked.windows} windows of {LENGTH} tokens are measured"]
        return f"{self.words()}\n{' and '.join(work)}, in {self.out}. Go on?"


def _decided(model: str, output: str | Path | None, asked: Asked) -> _Job:
    """Everything that can be refused without reading weights."""
    text = read_text(Path(asked.text).expanduser())[0] if asked.text else default_text()[0]
    if asked.windows < 1:
        raise QuantryError(f"{asked.windows} windows are nothing to measure on", fix="give --windows 1 or more")
    if asked.port:
        check_port(HOST, asked.port)
    found = plan(model, gpu=asked.gpu, use=asked.use, context=asked.context, engine=asked.engine)
    if asked.budget:
        parse(asked.budget, parameters=found.model["parameters"])
    option, installed, notes = _chosen(model, asked, found)
    source = found.model["opened_as"]
    out = Path(output).expanduser() if output else Path(f"{_plain(source)}-quantry")
    _check_place(out)
    digest = hashlib.sha256(text.encode()).hexdigest()
    device = _device(asked.device)
    return _Job(model, source, out, asked, found, option, installed, device, digest, (*found.notes, *notes))


def _chosen(model: str, asked: Asked, found: Plan) -> "tuple[Option, choose.Installed | None, tuple[str, ...]]":
    """The best option whose engine is here, with what there is to say if that is not the best of all.

    An engine that was named has to be here; one for another machine has not.
    """
    options = [one for one in found.options if not asked.budget or one.format in MIXED]
    if not options:
        raise _nothing(model, asked, found)
    missing: dict[str, QuantryError] = {}
    for option in options:
        if option.engine not in missing:
            try:
                return option, _installed(option.engine, asked), _instead(option, options[0], missing)
            except QuantryError as error:
                missing[option.engine] = error
                if asked.gpu:
                    return options[0], None, (f"{option.engine} is not here: {error}",)
                if asked.engine:
                    raise
    return _on_llama(model, asked, options[0], missing)


def _on_llama(
    model: str, asked: Asked, best: Option, missing: Mapping[str, QuantryError]
) -> "tuple[Option, choose.Installed | None, tuple[str, ...]]":
    """The best option for llama.cpp, which comes with Quantry, where it is not among the best of all."""
    found = plan(model, use=asked.use, context=asked.context, engine=choose.LLAMA)
    if not found.options:
        raise next(iter(missing.values()))
    option = found.options[0]
    return option, _installed(option.engine, asked), _instead(option, best, missing)


def _instead(option: Option, best: Option, missing: Mapping[str, QuantryError]) -> tuple[str, ...]:
    if best.engine not in missing:
        return ()
    return (f"{best.preset} in {best.engine} would be the best, but {missing[best.engine]}",)


def _installed(engine: str, asked: Asked) -> "choose.Installed":
    python = Path(asked.engine_python).expanduser() if asked.engine_python else None
    return choose.find_engine(engine, detect(0), python)


def _nothing(model: str, asked: Asked, found: Plan) -> QuantryError:
    """What to say where no option is left."""
    if found.options:
        engines = ", ".join(dict.fromkeys(one.engine for one in found.options))
        return QuantryError(
            f"--budget needs {' or '.join(MIXED)}, which {engines} does not load", fix="leave --engine out"
        )
    near = "; ".join(f"{one.what}: {one.change} with {one.preset} in {one.engine}" for one in found.nearest)
    return QuantryError(
        f"nothing of {model} fits {found.hardware['name']}", fix=near or "quantry plan says why, and what would"
    )


def _device(name: str | None) -> str:
    """Where to compute: a GPU where torch sees one."""
    from quantry.compute import device as computing

    if name is not None:
        return computing(name).type
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_place(out: Path) -> None:
    """A run goes into a new or empty folder, or goes on in its own."""
    left = {file.name for file in out.iterdir()} if out.is_dir() else set()
    if NOTE not in left and not left <= OURS:
        raise OutputError(
            f"{out} is not empty and holds no {NOTE}", fix="choose another output, or the folder of a run"
        )
    if not left:
        check_target(out)


def _plain(model: str) -> str:
    """The model's own name."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else path.name.partition("@")[0]


# ---- the steps ----


class _Doing:
    """The steps of a run, one after the other, and what they leave in run.json."""

    def __init__(self, job: _Job, tell: Callable[[Step], None] | None, showing: Showing) -> None:
        self.job = job
        self._tell, self._showing = tell, showing
        self._steps: list[Step] = []
        self._kept: dict[str, Any] = _object(job.out / NOTE) if (job.out / NOTE).is_file() else {}
        self._jobs: dict[str, Any] = self._kept.get("jobs") or {}
        self._card: dict[str, Any] = {}
        self._prepared: Prepared | None = None
        self._running: Running | None = None
        self._answer: Answer | None = None
        self._pace: float | None = None
        self._measured: dict[str, int] = {}

    @property
    def passed(self) -> bool:
        return bool(self._card["proof"]["verdict"] == "pass")

    @property
    def _mine(self) -> dict[str, Any]:
        """The notes on this artefact."""
        notes: dict[str, Any] = self._jobs.setdefault(self.job.folder.name, {})
        return notes

    def plan(self) -> None:
        """Writes what was decided."""
        file = self.job.out / PLAN
        write_atomically(file, (json.dumps(self.job.plan.to_dict(), indent=2) + "\n").encode())
        self._write()
        self._step(Step("plan", self.job.words(), str(file)))

    def quantize(self) -> None:
        """Writes the artefact, unless it is there for the same request."""
        from quantry.checkpoint.identity import identity
        from quantry.pipeline import quantize

        job, begun = self.job, perf_counter()
        folder = local_folder(job.source)
        request = {"quantry": __version__, "model": identity(open_checkpoint(folder)), **job.making}
        taken = job.folder.exists() and any(job.folder.iterdir())
        if taken:
            self._check(request)
        else:
            self._jobs[job.folder.name] = {"asked": request}
            self._write()
            with self._showing("quantize") as progress:
                quantize(job.source, job.folder, **job.making, progress=progress)
        self._card = _object(job.folder / CARD)
        size, was = self._card["bytes"], self._card["source_bytes"]
        words = f"{human(was)} -> {human(size)}, {self._card['bits_per_weight']:.2f} bits a weight"
        self._step(Step("quantize", words, str(self._weights()), taken, perf_counter() - begun))

    def verify(self) -> None:
        """Measures the artefact, unless that was done in the same way."""
        from quantry.proof.verification import verify

        job, begun = self.job, perf_counter()
        files = {name: told["sha256"] for name, told in self._card["files"].items()}
        how = {key: value for key, value in job.measuring.items() if key not in ("text", "engine_python")}
        measure = json.loads(json.dumps({"quantry": __version__, **how, "text": job.text, "files": files}))
        taken = self._mine.get("measure") == measure and self._is_of(self._card.get("proof"))
        if not taken:
            self._mine.pop("measure", None)
            with self._showing("verify") as progress:
                verify(job.folder, reference=job.source, **job.measuring, progress=progress)
            self._mine["measure"] = measure
            self._card = _object(job.folder / CARD)
            self._write()
        self._step(Step("verify", self._proof_words(), str(job.folder / "README.md"), taken, perf_counter() - begun))

    def serve(self) -> None:
        """Starts the engine and waits until it answers."""
        begun = perf_counter()
        self._prepared = prepare(self.job.folder, _options(self.job))
        self._running = begin(self._prepared, log=self.job.out / LOG)
        words = f"{self._running.engine} at {self._running.url}/v1, model {self._running.model}"
        self._step(Step("serve", words, str(self._running.log), seconds=perf_counter() - begun))

    def ask(self, *, stay: bool) -> None:
        """Asks the first question; the engine is stopped unless it is to stay."""
        assert self._running is not None
        assert self._prepared is not None
        begun = perf_counter()
        self._answer, self._pace = _first_answer(self._running, self._prepared, self.job.asked.question)
        self._measured = _memory(self._running, self._prepared)
        if not stay:
            self.stop()
        pace = "" if self._pace is None else f"; {self._pace:,.4g} tokens/s"
        words = f"{self._answer.tokens} tokens, the first after {self._answer.first_s:.2g} s{pace}"
        self._step(Step("answer", words, seconds=perf_counter() - begun))

    def stop(self) -> None:
        """Ends the engine, if there is one."""
        if self._running:
            self._running.stop()
        self._running = None

    def result(self) -> Run:
        """The whole of it, in run.json too."""
        job, card = self.job, self._card
        footprint = self._prepared.footprint if self._prepared else None
        parts = ("weights", "kv_cache", "activations", "overhead", "total")
        notes = [*job.notes, *card["notes"], *card["proof"]["notes"]]
        done = Run(
            model=job.model, path=str(job.out), use=job.plan.use, preset=job.preset, format=job.option.format,
            engine=job.option.engine, artefact=str(job.folder), source_bytes=card["source_bytes"],
            bytes=card["bytes"], bits_per_weight=card["bits_per_weight"], proof=_figures(card["proof"]),
            memory={
                "predicted": {name: getattr(footprint, name) for name in parts} if footprint else {},
                "measured": self._measured,
            },
            speed=self._speed(), question=job.asked.question if self._answer else None,
            answer=self._answer.text if self._answer else None, url=self._running.url if self._running else None,
            commands=self._commands(), steps=tuple(self._steps), notes=tuple(dict.fromkeys(notes)),
            running=self._running,
        )  # fmt: skip
        self._write(done.to_dict())
        return done

    def _check(self, request: Mapping[str, Any]) -> None:
        """What is there under the artefact's name must be whole, and made for the same request."""
        folder, before = self.job.folder, self._mine.get("asked")
        if before != request:
            known = before if isinstance(before, dict) else {}
            other = next((key for key in request if known.get(key) != request[key]), "request")
            raise OutputError(
                f"{folder} was made with another {other}: {str(known.get(other))[:40]}, not {str(request[other])[:40]}"
                if known
                else f"{folder} is in the way, and no run has noted how it was made",
                fix="choose another -o, or remove it to have it made anew",
            )
        try:
            files = _object(folder / CARD)["files"]
            whole = all((folder / name).stat().st_size == told["bytes"] for name, told in files.items())
        except (OSError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise OutputError(f"{folder} is damaged", fix="remove it to have it made anew")

    def _is_of(self, proof: Any) -> bool:
        """Whether a recorded proof is one of this gate, engine and text: verify may have been run by hand since."""
        if not isinstance(proof, dict):
            return False
        text = proof.get("text") or {}
        wanted = (self.job.gate, self.job.asked.windows, LENGTH)
        return (proof.get("gate"), text.get("windows"), text.get("length")) == wanted

    def _proof_words(self) -> str:
        proof = _figures(self._card["proof"])
        where = f" in {proof['engine']}" if proof["engine"] else ""
        kl = proof["kl"] if proof["served_kl"] is None else proof["served_kl"]
        words = f"KL {kl:.4f}{where}, {proof['top1']:.1%} same first token"
        return f"{words}; gate {proof['gate']}: {proof['verdict']}"

    def _weights(self) -> Path:
        """What an engine is given: a folder, or the GGUF file in it."""
        names = sorted(self._card["files"])
        return self.job.folder / names[0] if self.job.option.format == "gguf" else self.job.folder

    def _speed(self) -> dict[str, float | None]:
        job, answer = self.job, self._answer
        here = job.installed and job.installed.platform == choose.platform_of(detect(0).device)
        planned = here and not job.asked.budget and not job.asked.gpu
        return {
            "tokens_per_s": self._pace,
            "predicted_tokens_per_s": job.option.speed["decode_tokens_per_s"] if planned else None,
            "first_token_s": answer.first_s if answer else None,
        }

    def _commands(self) -> dict[str, str]:
        """What to do next."""
        job = self.job
        python = ["--engine-python", str(job.asked.engine_python)] if job.asked.engine_python else []
        serve = ["quantry", "serve", str(job.folder), "--engine", job.option.engine, *python]
        proof = ["quantry", "verify", str(job.folder), "--reference", job.model, "--gate", job.gate, "--text", "FILE"]
        chat = {"talk to it": ["quantry", "chat", self._running.url]} if self._running else {}
        found = {**chat, "serve it": serve, "prove it on your text": proof}
        if not job.asked.budget:
            found["try another size"] = ["quantry", "run", job.model, "--budget", "4.5bpw", "-o", str(job.out)]
        return {name: shlex.join(words) for name, words in found.items()}

    def _step(self, step: Step) -> None:
        self._steps.append(step)
        if self._tell:
            self._tell(step)

    def _write(self, summary: Mapping[str, Any] | None = None) -> None:
        """run.json: notes on every artefact of this folder, and the summary once there is one."""
        last = {"summary": summary} if summary else {}
        self._kept = {"quantry": __version__, "model": _plain(self.job.source), "jobs": self._jobs, **last}
        write_atomically(self.job.out / NOTE, (json.dumps(self._kept, indent=2) + "\n").encode())


# ---- serving ----


def _options(job: _Job) -> Options:
    """The server as it was planned; on another machine than the one of the plan only with the context asked for."""
    assert job.installed is not None
    option, layout = job.option, job.option.layout
    python = Path(job.asked.engine_python).expanduser() if job.asked.engine_python else None
    first = Options(engine=option.engine, port=_port(job), engine_python=python, context=job.asked.context)
    if job.asked.gpu:
        return first
    on_gpu = job.installed.platform != "cpu"
    cuts = option.engine not in SHARES and on_gpu
    layers, dtype = (_flag(option, name) for name in ("--n-gpu-layers", "--dtype"))
    return replace(
        first,
        context=job.plan.workload["context"],
        parallel=max(1, layout["concurrency"] // layout["replicas"]),
        kv=None if option.kv_cache_type == "auto" else option.kv_cache_type,
        tensor_parallel=layout["tensor_parallel"] if cuts else 1,
        pipeline_parallel=layout["pipeline_parallel"] if cuts else 1,
        offload_layers=int(layers) if layers and on_gpu and int(layers) < ALL_LAYERS else None,
        cache_gib=max(1, -(-option.memory["kv_cache"] // (1 << 30)))
        if option.engine == "vllm" and not on_gpu
        else None,
        dtype=dtype if option.engine == "vllm" else None,
    )


def _port(job: _Job) -> int:
    """The one that was asked for, the engine's usual one, or one that is free where that is taken."""
    if job.asked.port:
        return job.asked.port
    usual = adapter(job.option.engine).PORT
    try:
        check_port(HOST, usual)
    except QuantryError:
        return free_port(HOST)
    return usual


def _flag(option: Option, name: str) -> str | None:
    """What the planned command gives for a flag."""
    words = option.commands["serve"]
    return words[words.index(name) + 1] if name in words[:-1] else None


def _first_answer(running: "Running", prepared: Prepared, question: str) -> tuple[Answer, float | None]:
    """Through the API: as a chat if the model has a template for one, else as a text to go on with; and the pace.

    A short answer is over before its pace can be told, so where the engine can it is measured on one that does not end.
    """
    checkpoint = prepared.model.checkpoint
    chats = checkpoint is None or checkpoint.chat_template
    how = {"max_tokens": ANSWER, "temperature": 0}
    with Server(running.url, model=running.model) as server:
        chat = [{"role": "user", "content": question}]
        answer = (server.chat(chat, **how) if chats else server.complete(question, **how)).whole()
        if running.engine not in PACED:
            return answer, answer.tokens_per_s
        return answer, server.complete(question, **how, ignore_eos=True).whole().tokens_per_s


def _memory(running: "Running", prepared: Prepared) -> dict[str, int]:
    """What the engine says that it took, and of one that computes in its own process all that the process holds."""
    facts = running.facts()
    alone = running.engine == choose.LLAMA and prepared.serving.platform == "cpu"
    found = {
        "weights": facts.weights_bytes,
        "kv_cache": facts.kv_cache_bytes,
        "total": _resident(running.pid) if alone else None,
    }
    return {name: size for name, size in found.items() if size}


def _resident(pid: int) -> int | None:
    """Bytes of memory that a process holds; None where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) << 10 if found else None


# ---- files ----


def _figures(proof: Mapping[str, Any]) -> dict[str, Any]:
    """Of a proof what a summary needs; same first token and perplexity are the engine's, where one was asked."""
    served = proof.get("served") or {}
    judged = served or proof
    return {
        "verdict": proof["verdict"],
        "gate": proof["gate"],
        "engine": served.get("engine"),
        "kl": proof["kl"],
        "served_kl": served.get("kl"),
        "top1": judged["top1"],
        "perplexity": judged["perplexity"],
        "reference_perplexity": proof["reference_perplexity"],
        "wrong": [f"{one['words']}; {one.get('fix') or ''}".strip("; ") for one in proof["findings"] if not one["ok"]],
    }


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keeps two runs apart; what the disk says is one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise OutputError(f"another run works in {out}", fix="wait for it or choose another output") from error
            try:
                yield
            finally:
                (out / LOCK).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {error.filename or out}: {error.strerror}", fix="mend that and run the same command again"
        ) from error


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise OutputError(f"{file} is damaged or missing", fix=f"remove {file.parent} to have it made anew")
    return found
