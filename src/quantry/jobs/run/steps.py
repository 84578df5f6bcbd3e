"""The steps of a run, and what each leaves in run.json."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Any, TypedDict

from quantry import __version__
from quantry.devices.detect import detect
from quantry.errors import OutputError
from quantry.jobs.output_folder import read_artefact, read_card, without_home, write_json
from quantry.jobs.run.plan import LOG, PLAN, RunPlan
from quantry.jobs.run.result import Run, RunStep, figures_of
from quantry.jobs.run.server import first_answer, measured_memory, server_options
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint
from quantry.planning.commands import plain_name
from quantry.quantizing.artefact_file import Finding
from quantry.report.sizes import counted, human
from quantry.serving.client import Answer
from quantry.serving.prepare import ServerPlan, prepare
from quantry.serving.process import Running, start
from quantry.storage.shape import fault
from quantry.types import Progress

Showing = Callable[[str, str], AbstractContextManager[Progress | None]]  # takes the name of a step and what it will do
MEMORY = ("weights", "kv_cache", "activations", "overhead", "total")


class RunNote(TypedDict, total=False):
    """What is read back of run.json."""

    jobs: dict[str, dict[str, Any]] | None


class RunProof(TypedDict):
    """The part of a proof that a run shows."""

    verdict: str
    gate: str
    kl: float
    top1: float
    perplexity: float
    reference_perplexity: float
    served: dict[str, Any] | None
    intervals: dict[str, Any]
    findings: list[Finding]
    text: dict[str, Any]
    notes: list[str]


class RunSteps:
    """Makes the steps of a run one after the other; run.json keeps the request and measurement of every artefact."""

    def __init__(self, plan: RunPlan, tell: Callable[[RunStep], None] | None, showing: Showing) -> None:
        self._plan = plan
        self._tell, self._showing = tell, showing
        self._steps: list[RunStep] = []
        self._records: dict[str, Any] = plan.folder.read_note(RunNote).get("jobs") or {}
        self._card: dict[str, Any] = {}
        self._server_plan: ServerPlan | None = None
        self._running: Running | None = None
        self._answer: Answer | None = None
        self._tokens_per_s: float | None = None
        self._memory: dict[str, int] = {}

    @property
    def passed(self) -> bool:
        """Says if nothing speaks against serving it: the gate is passed, or nothing was proven."""
        return bool((self._card.get("proof") or {}).get("verdict", "pass") == "pass")

    @property
    def _record(self) -> dict[str, Any]:
        record: dict[str, Any] = self._records.setdefault(self._plan.artefact.name, {})
        return record

    def write_plan(self) -> None:
        """Writes plan.json and run.json."""
        file = self._plan.folder.path / PLAN
        write_json(file, without_home(self._plan.plan.to_dict()))
        self._write()
        self._done(RunStep("plan", self._plan.summary(), str(file)))

    def fall_back(self) -> bool:
        """Continues with the next candidate that should lose less; returns False if there is none."""
        wrong = figures_of(self._card["proof"])["wrong"]
        following = self._plan.fall_back(wrong[0].partition(";")[0] if wrong else self._proof_summary())
        if following is None:
            return False
        self.stop()
        self._plan = following
        self._done(RunStep("instead", following.summary()))
        return True

    def attempt(self, *, keep_serving: bool, proving: bool) -> None:
        """Writes the artefact, gets a first answer and proves what was lost; a proof of before comes first.

        An engine on a GPU makes room for the proof.
        """
        self.quantize()
        if known := proving and self._is_measured():
            self.verify()
        if self._plan.installed and (self.passed or not known):
            self.serve()
            self.ask()
            if not keep_serving or self._plan.installed.platform != "cpu":
                self.stop()
        if proving and not known:
            self.verify()

    def end(self, *, keep_serving: bool) -> None:
        """Leaves the engine running if that is asked for and the gate is passed."""
        if not keep_serving or not self.passed:
            self.stop()
        elif self._plan.installed and self._running is None:
            self.serve()

    def quantize(self) -> None:
        """Writes the artefact, unless it exists for the same request."""
        from quantry.jobs.quantize import quantize

        plan, started = self._plan, perf_counter()
        model = identity(open_checkpoint(local_folder(plan.source)))
        request = {"quantry": __version__, "model": model, **plan.quantize_options}
        exists = plan.artefact.exists() and any(plan.artefact.iterdir())
        if exists:
            self._check_request(request)
            read_artefact(plan.artefact)
        else:
            self._records[plan.artefact.name] = {"asked": request}
            self._write()
            with self._showing("quantize", f"writes {plan.artefact}") as progress:
                quantize(plan.source, plan.artefact, **plan.quantize_options, progress=progress)
        self._card = read_card(plan.artefact)
        before, after = human(self._card["source_bytes"]), human(self._card["bytes"])
        words = f"{before} -> {after}, {self._card['bits_per_weight']:.2f} bits a weight"
        self._done(RunStep("quantize", words, str(self._weights()), exists, perf_counter() - started))

    def verify(self) -> None:
        """Measures the artefact, unless it was measured in the same way."""
        from quantry.jobs.verify import recorded, verify

        plan, started = self._plan, perf_counter()
        measure, exists = self._measurement(), self._is_measured()
        if not exists:
            self._record.pop("measure", None)
            with self._showing("verify", plan.proof_words()) as progress:
                options = {**plan.verify_options, "report": True, "progress": progress}
                recorded(verify(plan.artefact, reference=plan.source, **options))
            self._record["measure"] = measure
            self._card = read_card(plan.artefact)
            self._write()
        card = str(plan.artefact / "README.md")
        self._done(RunStep("verify", self._proof_summary(), card, exists, perf_counter() - started))

    def serve(self) -> None:
        """Starts the engine and waits until it answers."""
        started = perf_counter()
        self._server_plan = prepare(self._plan.artefact, server_options(self._plan))
        running = self._running = start(self._server_plan.launch, log=self._plan.folder.path / LOG)
        words = f"{running.engine} at {running.url}/v1, model {running.model}"
        self._done(RunStep("serve", words, str(running.log), seconds=perf_counter() - started))

    def ask(self) -> None:
        """Asks the first question."""
        assert self._running is not None
        assert self._server_plan is not None
        started = perf_counter()
        question = self._plan.options.question
        answer, self._tokens_per_s = first_answer(self._running, self._server_plan, question)
        self._answer = answer
        self._memory = measured_memory(self._running, self._server_plan)
        speed = "" if self._tokens_per_s is None else f"; {self._tokens_per_s:,.4g} tok/s"
        words = f"{answer.tokens} tokens, the first after {answer.first_s:.2g} s{speed}"
        said = f"> {question}\n{answer.text.strip() or '(it says nothing)'}"
        self._done(RunStep("answer", words, seconds=perf_counter() - started, said=said))

    def stop(self) -> None:
        """Stops the engine, if it runs."""
        if self._running:
            self._running.stop()
        self._running = None

    def result(self) -> Run:
        """Returns the result, and writes it into run.json."""
        plan, card = self._plan, self._card
        footprint = self._server_plan.footprint if self._server_plan else None
        predicted = {name: getattr(footprint, name) for name in MEMORY} if footprint else {}
        result = Run(
            model=plan.model, path=str(plan.folder.path), use=plan.plan.use, preset=plan.preset,
            format=plan.candidate.format, engine=plan.candidate.engine, artefact=str(plan.artefact),
            source_bytes=card["source_bytes"], bytes=card["bytes"], bits_per_weight=card["bits_per_weight"],
            proof=figures_of(card["proof"]) if "proof" in card else None,
            memory={"predicted": predicted, "measured": self._memory},
            speed=self._speed(), question=plan.options.question if self._answer else None,
            answer=self._answer.text if self._answer else None, url=self._running.url if self._running else None,
            commands=self._commands(), steps=tuple(self._steps),
            notes=tuple(dict.fromkeys(self._notes())), running=self._running,
        )  # fmt: skip
        self._write(summary=without_home(result.to_dict()))
        return result

    def _notes(self) -> Iterator[str]:
        yield from self._plan.notes
        yield from self._card["notes"]
        yield from (self._card.get("proof") or {}).get("notes", ())
        if self._server_plan is not None:
            yield from self._server_plan.warnings

    def _check_request(self, request: Mapping[str, Any]) -> None:
        before = self._record.get("asked")
        if before == request:
            return
        known = before if isinstance(before, dict) else {}
        changed = next((key for key in request if known.get(key) != request[key]), "request")
        made = f"another {changed[:40]}: {str(known.get(changed))[:40]}, not {str(request.get(changed))[:40]}"
        raise OutputError(
            f"{self._plan.artefact} {f'was made with {made}' if known else 'exists, and no run has noted its request'}",
            fix="choose another -o, or remove it to have it made anew",
        )

    def _is_measured(self) -> bool:
        """Says if the artefact was measured in the same way before."""
        return self._record.get("measure") == self._measurement() and self._is_same_proof(self._card.get("proof"))

    def _measurement(self) -> Any:
        """Returns what distinguishes one measurement from another, as JSON stores it."""
        files = {name: file["sha256"] for name, file in self._card["files"].items()}
        options = {**self._plan.verify_options, "text": self._plan.text.digest}
        del options["engine_python"]
        return json.loads(json.dumps({"quantry": __version__, **options, "files": files}))

    def _is_same_proof(self, proof: Any) -> bool:
        """Returns True if the recorded proof has this gate and text: the user may have verified the artefact since."""
        if fault(proof, RunProof):
            return False
        text = proof.get("text") or {}
        wanted = (self._plan.gate, self._plan.text.windows, self._plan.text.length)
        return (proof.get("gate"), text.get("asked", text.get("windows")), text.get("length")) == wanted

    def _proof_summary(self) -> str:
        proof = figures_of(self._card["proof"])
        engine = f" in {proof['engine']}" if proof["engine"] else ""
        kl = proof["kl"] if proof["served_kl"] is None else proof["served_kl"]
        low, high = proof["kl_interval"]
        certain = f"{low:.4f} to {high:.4f}, {counted(proof['windows'], 'window')}"
        words = f"KL {kl:.4f}{engine} ({certain}), {proof['top1']:.1%} same first token"
        return f"{words}; gate {proof['gate']}: {proof['verdict']}"

    def _weights(self) -> Path:
        """Returns what an engine is given: a folder, or the GGUF file in it."""
        names = sorted(self._card["files"])
        is_gguf = self._plan.candidate.format == "gguf"
        return self._plan.artefact / names[0] if is_gguf else self._plan.artefact

    def _speed(self) -> dict[str, float | None]:
        plan, answer = self._plan, self._answer
        is_here = plan.installed and plan.installed.platform == detect(0).device.platform
        is_planned = is_here and not plan.options.budget and not plan.options.gpu
        return {
            "tokens_per_s": self._tokens_per_s,
            "predicted_tokens_per_s": plan.candidate.speed["decode_tokens_per_s"] if is_planned else None,
            "first_token_s": answer.first_s if answer else None,
        }

    def _commands(self) -> dict[str, str]:
        plan, artefact = self._plan, str(self._plan.artefact)
        python = ["--engine-python", str(plan.options.engine_python)] if plan.options.engine_python else []
        serve = ["quantry", "serve", artefact, "--engine", plan.candidate.engine, *python]
        verify = ["quantry", "verify", artefact, "--reference", plan.model, "--gate", plan.gate, "--text", "FILE"]
        chat = {"talk to it": ["quantry", "chat", self._running.url]} if self._running else {}
        commands = {**chat, "serve it": serve, "prove it on your text": verify}
        if not plan.options.budget:
            out = str(plan.folder.path)
            commands["try another size"] = ["quantry", "run", plan.model, "--budget", "4.5bpw", "-o", out]
        return {name: shlex.join(words) for name, words in commands.items()}

    def _done(self, step: RunStep) -> None:
        self._steps.append(step)
        if self._tell:
            self._tell(step)

    def _write(self, **summary: Any) -> None:
        """Writes run.json: the record of every artefact in this folder, and the summary at the end."""
        self._plan.folder.write_note(model=plain_name(self._plan.source), jobs=self._records, **summary)
