"""The steps of a run, and what they leave in its folder."""

import json
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Any

from quantry import __version__
from quantry.devices.detect import detect
from quantry.errors import OutputError
from quantry.jobs.run.answering import first_answer, measured_memory, server_options
from quantry.jobs.run.decision import LENGTH, Job
from quantry.jobs.run.files import CARD, LOG, NOTE, PLAN, plain_name, read_object
from quantry.jobs.run.outcome import Run, Step, figures_of
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.writer import write_atomically
from quantry.report.sizes import human
from quantry.serving.client import Answer
from quantry.serving.prepare import ServerPlan, prepare
from quantry.serving.process import Running, start
from quantry.types import Progress

Showing = Callable[[str], AbstractContextManager[Progress | None]]  # of a step by its name


class Doing:
    """The steps of a run, one after the other, and what they leave in run.json."""

    def __init__(self, job: Job, tell: Callable[[Step], None] | None, showing: Showing) -> None:
        self.job = job
        self._tell, self._showing = tell, showing
        self._steps: list[Step] = []
        self._kept: dict[str, Any] = read_object(job.out / NOTE) if (job.out / NOTE).is_file() else {}
        self._jobs: dict[str, Any] = self._kept.get("jobs") or {}
        self._card: dict[str, Any] = {}
        self._prepared: ServerPlan | None = None
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

    def make(self) -> None:
        """An artefact, measured."""
        self.quantize()
        self.verify()

    def gentler(self) -> bool:
        """Goes on with the next option that should lose less; False if there is none."""
        wrong = figures_of(self._card["proof"])["wrong"]
        following = self.job.after(wrong[0].partition(";")[0] if wrong else self._proof_words())
        if following is None:
            return False
        self.job = following
        self._step(Step("instead", self.job.words()))
        return True

    def quantize(self) -> None:
        """Writes the artefact, unless it is there for the same request."""
        from quantry.jobs.quantize import quantize

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
        self._card = read_object(job.folder / CARD)
        size, was = self._card["bytes"], self._card["source_bytes"]
        words = f"{human(was)} -> {human(size)}, {self._card['bits_per_weight']:.2f} bits a weight"
        self._step(Step("quantize", words, str(self._weights()), taken, perf_counter() - begun))

    def verify(self) -> None:
        """Measures the artefact, unless that was done in the same way."""
        from quantry.proof.verify import verify

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
            self._card = read_object(job.folder / CARD)
            self._write()
        self._step(Step("verify", self._proof_words(), str(job.folder / "README.md"), taken, perf_counter() - begun))

    def serve(self) -> None:
        """Starts the engine and waits until it answers."""
        begun = perf_counter()
        self._prepared = prepare(self.job.folder, server_options(self.job))
        self._running = start(self._prepared.launch, log=self.job.out / LOG)
        words = f"{self._running.engine} at {self._running.url}/v1, model {self._running.model}"
        self._step(Step("serve", words, str(self._running.log), seconds=perf_counter() - begun))

    def ask(self, *, stay: bool) -> None:
        """Asks the first question; the engine is stopped unless it is to stay."""
        assert self._running is not None
        assert self._prepared is not None
        begun = perf_counter()
        self._answer, self._pace = first_answer(self._running, self._prepared, self.job.asked.question)
        self._measured = measured_memory(self._running, self._prepared)
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
            bytes=card["bytes"], bits_per_weight=card["bits_per_weight"], proof=figures_of(card["proof"]),
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
            files = read_object(folder / CARD)["files"]
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
        proof = figures_of(self._card["proof"])
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
        here = job.installed and job.installed.platform == detect(0).device.platform
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
        self._kept = {"quantry": __version__, "model": plain_name(self.job.source), "jobs": self._jobs, **last}
        write_atomically(self.job.out / NOTE, (json.dumps(self._kept, indent=2) + "\n").encode())
