"""The main job end to end on the demo model, how it goes on and what it refuses; and the conversation in a terminal."""

import http.client
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

from command import command
from depth import deep
from local_servers import until
from quantry import devices
from quantry.engines.contract.catalogue import engine_facts
from quantry.errors import OutputError, QuantryError
from quantry.jobs.output_folder import OutputFolder
from quantry.jobs.run import server as serving
from quantry.jobs.run.plan import QUESTION, DeclinedError, RunOptions, fallbacks, plan_run
from quantry.jobs.run.result import Run, RunStep
from quantry.jobs.run.run import run
from quantry.jobs.run.steps import RunSteps
from quantry.models.reader import demo_folder
from quantry.planning.plan import plan
from quantry.serving import client as talking
from quantry.serving.client import Server, ServerError
from shared import recorded, shared

FLAGS = ("--windows", "1", "--device", "cpu")
QUICK: dict[str, Any] = {"windows": 1, "device": "cpu", "port": 0}
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """References and logs apart from the user's; a text of a few pages."""
    folder = shared(tmp_path_factory, "run-cache", write_text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(folder))
        patch.setitem(QUICK, "text", folder / "held-out.txt")
        yield


def write_text(folder: Path) -> None:
    (folder / "held-out.txt").write_text((demo_folder() / "held-out.txt").read_text()[:8000])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[RunStep]]:
    """An undisturbed run, whose engine is stopped after the first answer, and the steps that it told."""

    def make(folder: Path) -> tuple[Run, list[RunStep]]:
        told: list[RunStep] = []
        return run("demo", folder / "out", serve=False, tell=told.append, **QUICK), told

    made: tuple[Run, list[RunStep]] = recorded(tmp_path_factory, "first-run", make)
    return made


@pytest.fixture(scope="module")
def finished(first: tuple[Run, list[RunStep]]) -> Run:
    return first[0]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, first: tuple[Run, list[RunStep]]) -> Iterator[Run]:
    """A run that goes on in a copy of the first one's folder, and whose engine goes on serving."""
    out = tmp_path_factory.mktemp("runs") / "out"
    shutil.copytree(first[0].path, out)
    with run("demo", out, **QUICK) as finished:
        yield finished


def ask(url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A request without our client."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def files(folder: Path) -> dict[str, int]:
    """Every file under a folder, with when it was written."""
    return {
        str(file.relative_to(folder)): file.stat().st_mtime_ns for file in sorted(folder.rglob("*")) if file.is_file()
    }


# ---- from the model to an answer ----


def test_a_model_without_a_chat_template_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_folder(), tmp_path / "tales")
    (folder / "chat_template.jinja").unlink()
    done = run(folder, tmp_path / "out", serve=False, **QUICK)
    (warning,) = [note for note in done.notes if "chat template" in note]
    assert warning.endswith(
        "has no chat template: the engine puts chats into a form of its own; ask for completions, or "
        "give --chat-template FILE"
    )


def test_every_step_says_what_it_did_and_where_the_file_is(first: tuple[Run, list[RunStep]]) -> None:
    done, told = first
    assert [step.name for step in told] == ["plan", "quantize", "serve", "answer", "verify"]
    assert all(Path(step.file).exists() for step in told if step.file)
    assert [Path(step.file or "").name for step in told] == [
        "plan.json",
        "demo-Q8_0.gguf",
        "engine.log",
        "",
        "README.md",
    ]
    assert told[3].said == f"> {QUESTION}\n{(done.answer or '').strip()}", "an answer before the proof"
    assert (Path(done.artefact) / "report.html").is_file()
    assert not any(step.taken_over for step in told)
    assert done.steps == tuple(told)


def test_the_first_answer_is_the_engines_own(done: Run) -> None:
    assert done.running
    chat = [{"role": "user", "content": QUESTION}]
    body = {"model": done.running.model, "messages": chat, "temperature": 0, "max_tokens": serving.ANSWER}
    found = ask(done.running.url, "/v1/chat/completions", body)
    assert done.answer == found["choices"][0]["message"]["content"]
    assert done.answer
    assert "blue" in done.answer


def test_the_summary_is_what_the_files_say(first: tuple[Run, list[RunStep]]) -> None:
    done = first[0]
    folder = Path(done.artefact)
    card = json.loads((folder / "quantry.json").read_text())
    stored = folder / "demo-Q8_0.gguf"
    header = stored.stat().st_size - done.bytes
    assert done.bytes == card["bytes"]
    assert 0 < header < 1 << 20
    assert done.bits_per_weight == pytest.approx(8 * done.bytes / card["parameters"], abs=1e-4)
    assert done.proof
    assert (done.proof["kl"], done.proof["served_kl"]) == (card["proof"]["kl"], card["proof"]["served"]["kl"])
    assert done.proof["verdict"] == "pass"
    assert (done.preset, done.engine, done.passed) == ("gguf-q8_0", "llama.cpp", True)
    note = json.loads((Path(done.path) / "run.json").read_text())
    assert note["summary"] == json.loads(json.dumps(done.to_dict()))


def test_memory_and_speed_are_measured(done: Run) -> None:
    predicted, measured = done.memory["predicted"], done.memory["measured"]
    assert measured["weights"] == pytest.approx(predicted["weights"], rel=0.01)
    assert measured["kv_cache"] == predicted["kv_cache"]
    assert done.running
    assert measured["total"] == pytest.approx(resident(done.running.pid), rel=0.5)
    assert done.speed["tokens_per_s"]
    assert done.speed["first_token_s"]
    options = json.loads((Path(done.path) / "plan.json").read_text())["options"]
    assert done.speed["predicted_tokens_per_s"] == options[0]["speed"]["decode_tokens_per_s"]


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_it_is_served_as_it_was_planned(done: Run) -> None:
    assert done.running
    argv = done.running.argv
    plan = json.loads((Path(done.path) / "plan.json").read_text())
    assert argv[argv.index("--ctx-size") + 1] == str(plan["workload"]["context"])
    assert argv[argv.index("--parallel") + 1] == str(plan["options"][0]["layout"]["concurrency"])
    assert done.url == done.running.url
    assert done.commands["talk to it"] == f"quantry chat {done.url}"


# ---- going on ----


def test_what_is_finished_is_taken_over(done: Run) -> None:
    """Through the command line, which prints JSON and nothing else."""
    before = files(Path(done.artefact))
    assert plan_run("demo", done.path, RunOptions(**QUICK)).is_verified, "nobody is asked with nothing left to do"
    words = ("run", "demo", "-o", done.path, *FLAGS, "--text", QUICK["text"], "--port", "0", "--no-serve", "--json")
    shown = command(*words)
    assert shown.returncode == 0, shown.stderr
    again = json.loads(shown.stdout)
    assert set(again) == {
        "model", "path", "use", "preset", "format", "engine", "artefact", "source_bytes", "bytes", "bits_per_weight",
        "proof", "memory", "speed", "question", "answer", "url", "commands", "steps", "notes", "running",
    }  # fmt: skip
    assert [(step["name"], step["taken_over"]) for step in again["steps"]] == [
        ("plan", False), ("quantize", True), ("verify", True), ("serve", False), ("answer", False),
    ]  # fmt: skip
    assert files(Path(done.artefact)) == before
    assert (again["answer"], again["proof"], again["bytes"]) == (done.answer, done.proof, done.bytes)
    assert (again["running"], again["url"]) == (False, None)
    assert done.running
    assert done.running.healthy(), "the server of the first run"


def test_without_a_proof_the_answer_is_all(finished: Run, tmp_path: Path) -> None:
    out = copied(finished, tmp_path)
    card = out / "demo-gguf-q8_0" / "quantry.json"
    card.write_text(
        json.dumps({name: value for name, value in json.loads(card.read_text()).items() if name != "proof"})
    )
    words = ("run", "demo", "-o", out, *FLAGS, "--text", QUICK["text"], "--port", "0", "--no-serve", "--no-verify")
    shown = command(*words)
    assert shown.returncode == 0, shown.stderr
    assert f"> {QUESTION}" in shown.stdout
    assert "not measured" in shown.stdout
    assert json.loads((out / "run.json").read_text())["summary"]["proof"] is None


def test_another_measurement_is_made_anew_and_the_artefact_is_kept(finished: Run, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("The cat sat on the mat and the dog ran to the park. " * 100)
    out = copied(finished, tmp_path)
    assert measured_again(out, text) == [True, False]
    card = out / "demo-gguf-q8_0" / "quantry.json"
    proof = json.loads(card.read_text())["proof"]
    assert proof["text"]["name"] == "own.txt"
    assert finished.proof
    assert proof["kl"] != finished.proof["kl"]
    by_hand = json.loads(card.read_text())
    by_hand["proof"]["gate"] = "draft"
    card.write_text(json.dumps(by_hand))
    assert measured_again(out, text) == [True, False], "a proof of another gate"
    assert measured_again(out, text) == [True, True]


def measured_again(out: Path, text: Path) -> list[bool]:
    """Which of the steps up to the proof are taken over."""
    told: list[RunStep] = []
    steps = RunSteps(
        plan_run("demo", out, RunOptions(**{**QUICK, "text": text})), told.append, lambda *_: nullcontext()
    )
    steps.quantize()
    steps.verify()
    return [step.taken_over for step in told]


def copied(done: Run, folder: Path) -> Path:
    """The folder of a run, to do things to."""
    return Path(shutil.copytree(done.path, folder / "copy"))


def spoil(card: Path) -> None:
    """A proof that says that too much is lost; it is taken over, as any that was measured in the same way."""
    content = json.loads(card.read_text())
    content["proof"]["verdict"] = "fail"
    content["proof"]["findings"][0] |= {"ok": False, "words": "too much is lost"}
    card.write_text(json.dumps(content))


def test_what_fails_the_gate_is_followed_by_what_loses_less(finished: Run, tmp_path: Path) -> None:
    """And where that fails too, nothing is served."""
    out = copied(finished, tmp_path)
    spoil(out / "demo-gguf-q8_0" / "quantry.json")
    with run("demo", out, **QUICK) as found:
        assert [step.name for step in found.steps] == [
            "plan", "quantize", "verify", "instead", "quantize", "serve", "answer", "verify",
        ]  # fmt: skip
        assert (found.passed, found.preset, Path(found.artefact).name) == (True, "gguf-bf16", "demo-gguf-bf16")
        assert found.answer
        assert found.proof
        assert found.proof["kl"] < 1e-6
        first = "gguf-q8_0 was tried first, and fails the gate general: too much is lost"
        assert any(first in note for note in found.notes)
    spoil(out / "demo-gguf-bf16" / "quantry.json")
    found = run("demo", out, **QUICK)
    assert [step.name for step in found.steps] == ["plan", "quantize", "verify", "instead", "quantize", "verify"]
    assert all(step.taken_over for step in found.steps if step.name in ("quantize", "verify"))
    assert (found.passed, found.running, found.answer) == (False, None, None)
    assert found.proof
    assert "too much is lost" in found.proof["wrong"][0]
    shown = command("run", "demo", "-o", out, *FLAGS, "--text", QUICK["text"])
    assert shown.returncode == 1, shown.stderr
    assert "too much is lost" in shown.stdout
    assert "the gate general failed, so the model is not served" in shown.stdout


def test_what_is_tried_after_a_failure(tmp_path: Path) -> None:
    """Only what should lose no more, for the same engine, the 16-bit model last; a size that was asked for is kept."""
    here = plan_run("demo", tmp_path / "out", RunOptions(**QUICK))
    assert [one.preset for one in here.fallbacks] == ["gguf-bf16"]
    options = plan("demo", gpu="H200", engine="vllm").options
    assert [one.preset for one in fallbacks(options[0], options)] == ["w8a16", "bf16"]
    assert plan_run("demo", tmp_path / "out", RunOptions(budget="5bpw", **QUICK)).fallbacks == ()


# ---- what is refused, and what is asked ----


def spoil_weights(out: Path) -> None:
    file = out / "demo-gguf-q8_0" / "demo-Q8_0.gguf"
    file.write_bytes(file.read_bytes()[:-32])


def spoil_card(out: Path) -> None:
    (out / "demo-gguf-q8_0" / "quantry.json").write_text("{")


def another_model(out: Path) -> None:
    note = json.loads((out / "run.json").read_text())
    note["jobs"]["demo-gguf-q8_0"]["asked"]["model"] = "0" * 64
    (out / "run.json").write_text(json.dumps(note))


def another_option(out: Path) -> None:
    note = json.loads((out / "run.json").read_text())
    note["jobs"]["demo-gguf-q8_0"]["asked"]["odd"] = None
    (out / "run.json").write_text(json.dumps(note))


def unnoted(out: Path) -> None:
    (out / "run.json").write_text("{}")


def spoil_note(out: Path) -> None:
    (out / "run.json").write_text("[]")


LEFT = {
    spoil_weights: "is damaged; remove .*demo-gguf-q8_0 to write it again",
    spoil_card: "quantry.json is damaged",
    another_model: "was made with another model: 0000",
    another_option: "was made with another request",
    unnoted: "no run has noted its request",
    spoil_note: "run.json is damaged",
}


@pytest.mark.parametrize("spoil", LEFT, ids=lambda spoil: spoil.__name__)
def test_what_is_not_ours_or_not_whole_is_refused(finished: Run, tmp_path: Path, spoil: Any) -> None:
    out = copied(finished, tmp_path)
    spoil(out)
    with pytest.raises(OutputError, match=LEFT[spoil]):
        run("demo", out, serve=False, **QUICK)


def test_two_runs_do_not_meet(finished: Run, tmp_path: Path) -> None:
    out = copied(finished, tmp_path)
    with OutputFolder(out, "run").locked(), pytest.raises(OutputError, match="another run is writing"):
        run("demo", out, serve=False, **QUICK)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "use": ({"use": "hihg-throughput"}, "did you mean high-throughput"),
    "budget": ({"budget": "a lot"}, "a budget of 'a lot' is not understood"),
    "text": ({"text": "no-such.txt"}, "cannot read no-such.txt"),
    "windows": ({"windows": -1}, "--windows is -1"),
    "proof time": ({"proof_time": 0}, "cannot be made in 0 s"),
    "device": ({"device": "abacus"}, "device 'abacus' cannot be used"),
    "engine": ({"engine": "tgi"}, "tgi"),
    "context": ({"context": 4096}, "more than the 1024 tokens"),
    "python": ({"engine": "vllm", "engine_python": "/no/python"}, "/no/python is not a program"),
    "fits": ({"gpu": "cpu 1GB", "context": 1 << 20}, "more than the 1024 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    asked, words = WRONG[name]
    with pytest.raises(QuantryError, match=words) as caught:
        run("demo", tmp_path / "out", **{**QUICK, **asked})
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"), [("\n \n", "has no text"), ("Once upon a time.", "has 5 tokens and one")]
)
def test_a_text_without_a_window_is_refused_before_anything_is_written(
    tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "own.txt").write_text(content)
    with pytest.raises(QuantryError, match=words):
        run("demo", tmp_path / "out", **{**QUICK, "text": tmp_path / "own.txt"})
    assert not (tmp_path / "out").exists()


def test_a_port_in_use_is_refused_first_and_the_usual_one_is_not_insisted_on(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(QuantryError, match=f"port {port} of 127.0.0.1 cannot be used.*use --port"):
            run("demo", tmp_path / "out", **{**QUICK, "port": port})
        decided = plan_run("demo", tmp_path / "out", RunOptions(**{**QUICK, "port": None}))
        with pytest.MonkeyPatch.context() as patch:
            facts = engine_facts("llama.cpp")
            patch.setattr(serving, "engine_facts", lambda _: replace(facts, server=replace(facts.server, port=port)))
            assert serving.port_of(decided) not in (0, port)
    assert not (tmp_path / "out").exists()


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="is not empty and holds no run.json"):
        run("demo", tmp_path, **QUICK)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_whoever_says_no_has_nothing_written(tmp_path: Path) -> None:
    asked: list[str] = []

    def no(words: str) -> bool:
        asked.append(words)
        return False

    with pytest.raises(DeclinedError):
        run("demo", tmp_path / "out", confirm=no, **QUICK)
    assert not (tmp_path / "out").exists()
    assert "gguf-q8_0 in llama.cpp" in asked[0]
    assert "This quantizes 0.01 billion parameters and measures 1 window of 512 tokens" in asked[0]


# ---- what is chosen ----


def test_a_budget_is_spent_by_preset_auto(tmp_path: Path) -> None:
    found = plan_run("demo", tmp_path / "out", RunOptions(budget="4.5bpw", **QUICK))
    assert found.quantize_options == {"preset": "auto", "budget": "4.5bpw", "format": "gguf", "device": "cpu"}
    assert found.artefact.name == "demo-auto-4.5bpw"
    there = plan_run("demo", tmp_path / "out", RunOptions(budget="6 MiB", gpu="RTX 4090", engine="vllm", **QUICK))
    assert (there.quantize_options["format"], there.artefact.name) == (
        "compressed-tensors",
        "demo-auto-6-MiB-compressed-tensors",
    )


def test_another_machines_engine_need_not_be_here(tmp_path: Path) -> None:
    found = plan_run("demo", tmp_path / "out", RunOptions(gpu="RTX 4090", engine="vllm", **QUICK))
    assert (found.candidate.engine, found.installed, found.measured_in) == ("vllm", None, None)
    assert any("pip install" in note for note in found.notes)


def test_an_engine_that_was_named_has_to_be_here(tmp_path: Path) -> None:
    with pytest.raises(QuantryError, match="vllm is not installed for .*--engine-python"):
        run("demo", tmp_path / "out", engine="vllm", **QUICK)


def test_without_the_best_engine_the_best_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = devices.hardware("RTX 4090")
    for home in ("quantry.devices.detect", "quantry.jobs.run.plan"):
        monkeypatch.setattr(f"{home}.detect", lambda seconds=0.2: machine)
    best = plan("demo", gpu="RTX 4090").options[0]
    assert best.engine == "vllm"
    found = plan_run("demo", tmp_path / "out", RunOptions(**QUICK))
    assert found.candidate.engine == "llama.cpp"
    assert any(note.startswith(f"{best.preset} in vllm would be the best, but") for note in found.notes)


# ---- the command ----


def test_the_command_serves_until_ctrl_c(done: Run) -> None:
    words = [
        "run",
        "demo",
        "-o",
        done.path,
        *FLAGS,
        "--text",
        str(QUICK["text"]),
        "--port",
        "0",
        "--ask",
        "Who is Lily?",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "quantry", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stderr
        shown = []
        for line in process.stdout:
            shown.append(line)
            if line.startswith("serving at "):
                break
        text = "".join(shown)
        url = shown[-1].split()[2].removesuffix("/v1;") if shown and shown[-1].startswith("serving") else ""
        assert url, text + process.stderr.read()
        said = command("chat", url, "--temperature", "0", "--max-tokens", "8", stdin="What color is the sky?\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert (said.returncode, said.stdout.strip()) == (0, "The sky is blue."), said.stderr
    for words_shown in (
        "taken over",
        "> Who is Lily?",
        "bits a weight",
        "as served",
        "predicted in brackets",
        "quantry chat",
    ):
        assert words_shown in text, text
    with pytest.raises(ServerError, match="no server answers"):
        Server(url)


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._main, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quantry", *words],
            stdin=side,
            stdout=side,
            stderr=side,
            env={**ENVIRONMENT, "TERM": "dumb"},
        )
        os.close(side)
        self.shown, self._seen = "", 0

    def until(self, words: str, seconds: float = 100.0) -> None:
        """Reads until some words are shown after those that were waited for before."""
        begun = time.monotonic()
        while words not in self.shown[self._seen :]:
            assert time.monotonic() - begun < seconds, self.shown
            assert select.select([self._main], [], [], seconds)[0], self.shown
            self.shown += os.read(self._main, 4096).decode(errors="replace")
        self._seen = self.shown.index(words, self._seen) + len(words)

    def type(self, words: str) -> None:
        os.write(self._main, words.encode())

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self._main)


@deep
def test_a_terminal_is_asked(tmp_path: Path) -> None:
    terminal = Terminal("run", "demo", "-o", str(tmp_path / "out"), "--windows", "1")
    terminal.until("Go on? [Y/n]: ")
    terminal.type("n\n")
    terminal.until("nothing was written")
    assert terminal.end() == 1
    assert not (tmp_path / "out").exists()


# ---- chat ----


@pytest.mark.parametrize("ending", ["\x04", "\x03", "/bye\n"])
def test_a_chat_in_a_terminal_ends_cleanly(done: Run, ending: str) -> None:
    assert done.url
    terminal = Terminal("chat", done.url, "--temperature", "0", "--max-tokens", "12")
    terminal.until("> ")
    terminal.type("What color is the sky?\n")
    terminal.until("The sky is blue.")
    terminal.until("> ")
    if ending == "\x03":
        until(lambda: _ended_by_interrupt(terminal))
    else:
        terminal.type(ending)
    assert terminal.end() == 0, terminal.shown
    assert "Traceback" not in terminal.shown


def _ended_by_interrupt(terminal: Terminal) -> bool:
    """Presses Ctrl-C: one that comes while the prompt is being shown waits for the next key, in any Python program."""
    terminal.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    return terminal.process.poll() is not None


def test_an_answer_is_stopped_without_leaving(server: "FakeServer") -> None:
    server.pieces = [{"delta": {"content": f"word{n} "}} for n in range(600)]
    server.pause = 0.1  # a minute, unless it is stopped
    terminal = Terminal("chat", server.url)
    terminal.until("> ")
    terminal.type("Count.\n")
    terminal.until("word3 ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("[stopped]")
    terminal.until("> ")
    server.pieces = [{"delta": {"content": "done"}}]
    terminal.type("Thanks.\n")
    terminal.until("done")
    terminal.until("> ")
    terminal.type("/bye\n")
    assert terminal.end() == 0, terminal.shown
    kept = server.bodies[1]["messages"]
    assert [one["role"] for one in kept] == ["user", "assistant", "user"]
    assert kept[1]["content"].startswith("word0 word1 word2 word3")


def test_what_can_be_typed_in_a_chat(server: "FakeServer", tmp_path: Path) -> None:
    server.pieces = [{"delta": {"content": "yes"}}]
    file = tmp_path / "chats.jsonl"
    lines = ["/help", '"""one', "  two", 'three"""', "/save", f"/save {file}", "/nwe", "/bye", "never sent"]
    done = command("chat", server.url, "--model", "second", stdin="\n".join(lines) + "\n")
    assert (done.returncode, done.stdout) == (0, "yes\n"), done.stderr
    for words in ("/save FILE", "/save needs the name of a file", f"added to {file}", "there is no /nwe"):
        assert words in done.stderr
    messages = [{"role": "user", "content": "one\n  two\nthree"}, {"role": "assistant", "content": "yes"}]
    assert json.loads(file.read_text()) == {"messages": messages}
    assert [body["model"] for body in server.bodies] == ["second"]


def test_a_model_that_the_server_does_not_have_is_refused(server: "FakeServer") -> None:
    done = command("chat", server.url, "--model", "secnd", stdin="hello\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown model 'secnd'; did you mean second?" in done.stderr
    assert not server.bodies


def test_a_chat_remembers_and_begins_anew(server: "FakeServer") -> None:
    server.pieces = [{"delta": {"reasoning_content": "hm "}}, {"delta": {"content": "yes"}}]
    done = command("chat", server.url, "--system", "Be brief.", stdin="one\n\ntwo\n/new\nthree\n")
    assert (done.returncode, done.stdout) == (0, "hm yes\nhm yes\nhm yes\n"), done.stderr
    said = [[(one["role"], one["content"]) for one in body["messages"]] for body in server.bodies]
    first = ("system", "Be brief.")
    assert said == [
        [first, ("user", "one")],
        [first, ("user", "one"), ("assistant", "yes"), ("user", "two")],
        [first, ("user", "three")],
    ]


def test_an_unreachable_server_is_one_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = command("chat", f"127.0.0.1:{port}/v1")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"no server answers at http://127.0.0.1:{port}" in done.stderr


# ---- the client ----


class FakeServer(ThreadingHTTPServer):
    """Sends what it is told to, as an OpenAI server would or would not."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict[str, Any]] = []
        self.pieces: list[dict[str, Any]] = []
        self.usage: int | None = None
        self.pause = 0.0
        self.raw: bytes | None = None
        self.status = 200
        self.models: Any = {"data": [{"id": "first"}, {"id": "second"}]}


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its own name
        pass

    def do_GET(self) -> None:
        self._send(json.dumps(self.server.models).encode())

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.raw is not None:
            self._send(self.server.raw)
            return
        self.send_response(200)
        self.end_headers()
        for piece in self.server.pieces:
            self._event({"choices": [piece]})
            time.sleep(self.server.pause)
        if self.server.usage is not None:
            self._event({"choices": [], "usage": {"completion_tokens": self.server.usage}})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def _event(self, content: Mapping[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def _send(self, content: bytes) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = Thread(target=fake.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def test_the_pace_is_the_servers_own_if_it_gives_one(server: FakeServer) -> None:
    """Pieces that arrive together would give any pace."""
    server.raw = b"".join(
        f"data: {json.dumps(row)}\n\n".encode()
        for row in (
            {"choices": [{"text": "a "}]},
            {"choices": [{"text": "b"}], "timings": {"predicted_per_second": 42.5}},
        )
    )
    with Server(server.url) as client:
        assert client.complete("go").whole().tokens_per_s == 42.5
        server.raw = server.raw.replace(b"42.5", b"1e300")
        assert client.complete("go").whole().tokens_per_s != 1e300


def test_pieces_times_and_tokens(server: FakeServer) -> None:
    server.pieces = [
        {"delta": {"role": "assistant", "content": None}},
        *({"delta": {"content": f"{n} "}} for n in range(5)),
    ]
    server.pause = 0.2
    with Server(server.url) as client:
        stream = client.chat([{"role": "user", "content": "count"}], max_tokens=7)
        assert [piece.text for piece in stream] == ["0 ", "1 ", "2 ", "3 ", "4 "]
        found = stream.answer
        server.usage = 9
        counted = client.chat([]).whole()
    assert (found.text, found.tokens, counted.tokens) == ("0 1 2 3 4 ", 5, 9)
    assert 0.2 <= found.first_s < found.seconds - 0.75
    assert found.tokens_per_s == pytest.approx(4 / (found.seconds - found.first_s))
    assert 2.5 < (found.tokens_per_s or 0) < 5.3
    body = server.bodies[0]
    assert (body["model"], body["stream"], body["max_tokens"]) == ("first", True, 7)


def test_a_completion_is_its_text(server: FakeServer) -> None:
    server.pieces = [{"text": "upon "}, {"text": "a time"}]
    with Server(server.url, model="mine") as client:
        found = client.complete("Once").whole()
    assert (found.text, found.tokens, server.bodies[0]["prompt"], server.bodies[0]["model"]) == (
        "upon a time",
        2,
        "Once",
        "mine",
    )


def test_one_token_has_no_pace() -> None:
    assert talking.Answer("a", 1, 0.1, 0.1).tokens_per_s is None


ODD: dict[str, tuple[int, bytes, str]] = {
    "key": (401, b'{"error": {"message": "no"}}', r"asks for a key \(401\); give --api-key"),
    "long": (400, b'{"error": {"message": "exceeds the\\n context"}}', r"refuses \(400\): exceeds the context"),
    "plain": (500, b"<html>oh</html>", r"refuses \(500\): <html>oh</html>"),
    "inside": (200, b'data: {"error": {"message": "slot died"}}\n\n', "breaks off: slot died"),
    "old": (200, b'error: {"code": 500, "message": "slot died"}\n\n', "breaks off: slot died"),
    "no JSON": (200, b"data: {oh\n\n", "sends '{oh' in a stream"),
    "no object": (200, b"data: 7\n\n", "sends '7' in a stream"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_a_server_refuses_is_one_line(server: FakeServer, name: str) -> None:
    with Server(server.url) as client:
        server.status, server.raw, words = ODD[name]
        with pytest.raises(ServerError, match=words) as caught:
            client.chat([]).whole()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("models", [{}, {"data": []}, [], {"data": [7]}, "text"])
def test_a_server_without_models_needs_a_name(server: FakeServer, models: Any) -> None:
    server.models = models
    with pytest.raises(ServerError, match="names no model at /v1/models; give --model"):
        Server(server.url)


@pytest.mark.parametrize("url", ["", "ftp://a/b", "http://", "http://a:99999", "http://a b", "http://[::1"])
def test_no_address(url: str) -> None:
    with pytest.raises(ServerError, match="is not the address of a server; give one such as"):
        Server(url)


def test_addresses_of_one_server(server: FakeServer) -> None:
    for url in (server.url, f"{server.url}/v1", f"{server.url}/v1/", server.url.removeprefix("http://")):
        with Server(url) as client:
            assert (client.model, client.url) == ("first", server.url)


def test_the_proxy_of_the_environment_is_for_others(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Server(server.url) as client:
        assert client.model == "first"
    with pytest.raises(ServerError, match="no server answers at http://elsewhere.invalid"):
        Server("http://elsewhere.invalid")
