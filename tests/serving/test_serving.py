"""Serving: the embedded llama.cpp for real, under all that clients and the machine do to it, and every refusal before it."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import openai
import pytest

import quantry
from quantry import devices
from quantry.engines.contract.command import Command, Step
from quantry.engines.contract.options import Options, Serving
from quantry.errors import QuantryError
from quantry.planning.deployment import Deployment, Settings
from quantry.planning.memory.footprint import footprint
from quantry.planning.models import find_model
from quantry.planning.models import open_model as planned_model
from quantry.report.sizes import human
from quantry.serving import container, embedded, process, select
from quantry.serving.cores import physical_cores
from quantry.serving.fit import CONTEXT, fitted
from quantry.serving.prepare import prepare, serve
from quantry.serving.process import EngineError, Launch, Running
from quantry.types import Workload
from tiny_files import LLAMA, MakeFolder

STORY = "Once upon a time there was a little girl named Lily. She"
SMALL: dict[str, Any] = {"port": 0, "threads": 1}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Logs apart from the user's."""
    folder: Path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def q8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "q8"
    quantry.quantize("demo", folder, preset="gguf-q8_0")
    return next(folder.glob("*.gguf"))


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "q4"
    quantry.quantize("demo", folder, preset="gguf-q4_0")
    return next(folder.glob("*.gguf"))


@pytest.fixture(scope="module")
def server(q8: Path) -> Iterator[Running]:
    """One that most tests share, with a context of 256 tokens in each of four slots."""
    with serve(q8, context=256, parallel=4, **SMALL) as running:
        yield running


def client(running: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=60)


def complete(running: Running, prompt: str = STORY, tokens: int = 24) -> str:
    """What the model writes, the likeliest token each time."""
    found = client(running).completions.create(model=running.model, prompt=prompt, max_tokens=tokens, temperature=0)
    return found.choices[0].text


def get(running: Running, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    return send(running, "GET", path, None, **headers)


def send(
    running: Running, method: str, path: str, body: bytes | None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*running.launch.address, timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def metric(running: Running, name: str) -> float:
    lines = get(running, "/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"llamacpp:{name} "))


def until(what: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# ---- the embedded engine ----


def test_streaming_through_the_openai_client(server: Running) -> None:
    asked: list[Any] = [{"role": "user", "content": "What color is the sky?"}]
    chat = client(server).chat.completions
    whole = chat.create(model=server.model, messages=asked, max_tokens=12, temperature=0).choices[0].message.content
    pieces = [
        piece.choices[0].delta.content or ""
        for piece in chat.create(model=server.model, messages=asked, max_tokens=12, temperature=0, stream=True)
        if piece.choices
    ]
    assert whole
    assert "".join(pieces) == whole
    assert sum(bool(piece) for piece in pieces) > 3, "it came in one piece"


def test_the_model_has_its_name_and_facts(server: Running, q8: Path) -> None:
    assert [one.id for one in client(server).models.list()] == ["demo-Q8_0"]
    facts = server.facts()
    assert (server.model, facts.context, facts.max_concurrency) == ("demo-Q8_0", 256, 4)
    assert facts.kv_cache_tokens == 4 * 256
    assert facts.weights_bytes == pytest.approx(quantry.inspect(q8).bytes, rel=0.01)
    assert facts.kv_cache_bytes == 4 * 256 * quantry.inspect(q8).kv_bytes_per_token


def test_64_clients_at_once(server: Running) -> None:
    before = metric(server, "tokens_predicted_total")
    with ThreadPoolExecutor(64) as pool:
        answers = list(
            pool.map(lambda number: complete(server, f"Once upon a time there were {number} little", 6), range(64))
        )
    assert all(answers)
    assert metric(server, "tokens_predicted_total") - before >= 64
    assert server.healthy()


def test_a_client_that_goes_away_frees_its_slot(server: Running) -> None:
    body = json.dumps({"prompt": STORY, "max_tokens": 100_000, "ignore_eos": True, "stream": True, "n_predict": -1})
    link = socket.create_connection(server.launch.address, timeout=30)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    link.sendall(f"{head}\r\n\r\n{body}".encode())
    assert b"data:" in link.recv(65536) + link.recv(65536)
    link.close()
    until(lambda: not any(slot["is_processing"] for slot in json.loads(get(server, "/slots")[1])))
    assert complete(server)


def test_a_prompt_over_the_context_is_refused(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        complete(server, "word " * 400)
    assert caught.value.status_code == 400
    assert complete(server)


@pytest.mark.parametrize("body", [b"{", b"", b"[1, 2", b"\xff\xfe", b'{"messages": 7}', b"null"])
def test_malformed_requests_are_answered(server: Running, body: bytes) -> None:
    status, text, _ = send(server, "POST", "/v1/chat/completions", body, Content_Type="application/json")
    assert 400 <= status < 600
    assert "error" in json.loads(text)
    assert server.healthy()


def test_pages_of_other_sites_may_not_ask(server: Running) -> None:
    theirs = get(server, "/health", Origin="https://example.com")[2].get("access-control-allow-origin")
    ours = get(server, "/health", Origin="http://localhost:3000")[2].get("access-control-allow-origin")
    assert (theirs, ours) == (None, "http://localhost:3000")


def test_a_shared_beginning_is_read_once(server: Running) -> None:
    long = "The old lighthouse keeper told the children a long story about the sea. " * 6
    complete(server, long + "Then", 2)
    before = metric(server, "prompt_tokens_cached_total"), metric(server, "prompt_tokens_total")
    complete(server, long + "But", 2)
    cached, read = (
        metric(server, "prompt_tokens_cached_total") - before[0],
        metric(server, "prompt_tokens_total") - before[1],
    )
    assert cached > 50 > 10 > read


def test_two_servers_side_by_side(server: Running, q4: Path) -> None:
    with serve(q4, context=256, **SMALL) as other:
        assert other.url != server.url
        assert [one.id for one in client(other).models.list()] == ["demo-Q4_0"]
        assert complete(other)
        assert complete(server)
    assert not other.healthy()
    assert server.healthy()


def test_a_key_is_asked_for(q8: Path) -> None:
    with serve(q8, context=256, api_key="open sesame", **SMALL) as running:
        with pytest.raises(openai.AuthenticationError):
            complete(running)
        assert client(running, "open sesame").models.list().data
        found = client(running, "open sesame").completions.create(model=running.model, prompt=STORY, max_tokens=2)
        assert found.choices[0].text
        assert "sesame" not in Path(f"/proc/{running.pid}/cmdline").read_text()


@pytest.mark.parametrize(("kv", "bits"), [("q8_0", 8.5), ("q4_0", 4.5)])
def test_smaller_caches(q8: Path, kv: str, bits: float) -> None:
    with serve(q8, context=512, kv=kv, **SMALL) as running:
        whole = 512 * quantry.inspect(q8).kv_bytes_per_token
        assert running.facts().kv_cache_bytes == pytest.approx(whole * bits / 16, rel=0.01)
        assert complete(running)


def test_a_draft_model_changes_nothing_but_speed(server: Running, q8: Path, q4: Path) -> None:
    plain = complete(server, tokens=60)
    with serve(q8, context=256, draft=q4, **SMALL) as running:
        assert complete(running, tokens=60) == plain
        drafted = metric(running, "spec_decode_num_draft_tokens_total")
        accepted = metric(running, "spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= drafted
    assert accepted / drafted > 0.5, "it is the same model at fewer bits"


def test_lookup_changes_nothing_but_speed(q8: Path) -> None:
    """The demo model falls into a loop here, which is text that repeats itself."""
    tokens = 200
    asked: dict[str, Any] = {"prompt": "the cat sat. " * 20, "max_tokens": tokens, "temperature": 0}

    def written(**options: Any) -> tuple[str, float, float]:
        with serve(q8, context=1024, **options, **SMALL) as running:
            found = client(running).completions.create(model=running.model, extra_body={"ignore_eos": True}, **asked)
            counts = [metric(running, f"spec_decode_num_{name}_total") for name in ("accepted_tokens", "draft_tokens")]
        return found.choices[0].text, counts[0], counts[1]

    plain, *_ = written()
    for guesses in (None, 2):
        text, accepted, drafted = written(lookup=True, draft_tokens=guesses)
        assert text == plain
        assert tokens / 10 < accepted <= drafted, guesses


# ---- its flags ----


def test_flags_are_read_by_llama_cpp_itself() -> None:
    words = "--model m.gguf --port 8123 --ctx-size 640 --parallel 3 --threads 5 --cache-type-k q8_0 --cache-type-v q4_0"
    found = embedded.parse(
        [*words.split(), "--flash-attn", "on", "--metrics", "--spec-type", "ngram-simple", "--alias", "it"]
    )
    assert (found.model.path, found.port, found.n_ctx, found.n_parallel) == ("m.gguf", 8123, 640, 3)
    assert (found.cpuparams.n_threads, found.endpoint_metrics, found.model_alias) == (5, True, {"it"})
    assert (found.cache_type_k.name, found.cache_type_v.name) == ("GGML_TYPE_Q8_0", "GGML_TYPE_Q4_0")
    assert [kind.name for kind in found.speculative.types][-1] == "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE"
    assert found.n_predict == -1, "the mark by which the structure is found is left behind"


def test_what_llama_cpp_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QuantryError, match="does not take these flags"):
        embedded.parse(["--model", "m.gguf", "--no-such-flag"])
    assert "--no-such-flag" in capfd.readouterr().err


# ---- the process ----


SLEEPER = """
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
if sys.argv[2] == "200":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2])); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def stubborn(status: int = 200, **more: Any) -> Launch:
    """An engine that does not end when it is asked to once it serves (status 200), and has a process of its own."""
    port = process.free_port("127.0.0.1")
    return Launch(
        "llama.cpp", Command((sys.executable, "-c", SLEEPER, str(port), str(status)), **more), "127.0.0.1", port, "/"
    )


def test_a_stubborn_engine_is_ended_with_all_it_started(tmp_path: Path) -> None:
    with process.start(stubborn(), log=tmp_path / "log") as running:
        child = int(running.lines()[0].split()[1])
        assert alive(child)
        began = time.monotonic()
        assert running.stop(grace=0.5) == 128 + signal.SIGKILL
        assert 0.5 <= time.monotonic() - began < 10
    until(lambda: not alive(child))
    assert not alive(running.pid)


def test_patience_ends(tmp_path: Path) -> None:
    shown = StringIO()
    with pytest.raises(EngineError, match="does not answer at http://127.0.0.1") as caught:
        process.start(stubborn(503), log=tmp_path / "log", patience=3, stream=shown)
    child = int((tmp_path / "log").read_text().split()[1])
    until(lambda: not alive(child))
    assert caught.value.exit_code == 2
    assert shown.getvalue().startswith("child")


def test_kill_9_is_reported(q8: Path) -> None:
    with serve(q8, context=256, **SMALL) as running:
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait(20) == 137
        assert not running.healthy()
        error = running.death()
    assert f"(process {running.pid}) was killed by SIGKILL after" in str(error)
    assert (error.exit_code, error.log) == (137, running.log)


def test_an_engine_that_dies_at_the_start_is_noticed_at_once(q8: Path) -> None:
    broken = q8.parent / "broken.gguf"
    broken.write_bytes(q8.read_bytes()[:-1000])
    with pytest.raises(QuantryError):  # its header says more than the file has, so nothing is even started
        serve(broken, **SMALL)
    began = time.monotonic()
    with pytest.raises(
        EngineError, match="ended with exit code 2 after .* s: error: invalid argument: --nonsense"
    ) as caught:
        serve(q8, extra=("--nonsense",), **SMALL)
    assert time.monotonic() - began < 30
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    broken.unlink()


def test_a_port_in_use(q8: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(
            QuantryError, match=rf"port {port} of 127.0.0.1 cannot be used: .*in use; use --port \d+"
        ) as caught:
            prepare(q8, Options(port=port))
    other = int(str(caught.value).split()[-1])
    assert other > port
    process.check_port("127.0.0.1", other)
    process.check_port("127.0.0.1", port)  # free again


def test_steps_run_around_the_server(tmp_path: Path) -> None:
    def note(word: str) -> tuple[str, ...]:
        return (sys.executable, "-c", f"open('steps', 'a').write('{word} ')")

    told: list[str] = []
    launch = stubborn(
        files={"Modelfile": "FROM here"},
        steps=(Step(note("before"), "prepares"), Step(("false",), "on another machine", "worker")),
        after=(Step(note("after"), "finishes"),),
    )
    with process.start(launch, log=tmp_path / "log", tell=told.append) as running:
        running.stop(grace=0)
    assert (tmp_path / "steps").read_text() == "before after "
    assert (tmp_path / "Modelfile").read_text() == "FROM here"
    assert told == ["prepares", "finishes"]
    failing = replace(launch, command=replace(launch.command, steps=(Step(("false",), "prepares"),)))
    with pytest.raises(EngineError, match=r"false ended with exit code 1 \(prepares\)"):
        process.start(failing, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            ["INFO fine", "(EngineCore pid=7) ValueError: no room", "RuntimeError: it failed. See above"],
            "ValueError: no room",
        ),
        (["0.1 I loading", "0.2 E gguf_init: bad magic", "0.3 E failed to load"], "gguf_init: bad magic"),
        (["WARNING this can cause OSError: 24", "OSError: 5", "and so on"], "OSError: 5"),
        (["starting", "error: invalid argument: --x", "usage: 0 errors"], "error: invalid argument: --x"),
        (["only this", ""], "only this"),
        ([], ""),
    ],
)
def test_the_line_that_tells_what_went_wrong(lines: list[str], found: str) -> None:
    assert process.reason(lines).endswith(found)
    assert bool(process.reason(lines, guess=False)) == (len(lines) > 2)


# ---- the command line ----


@contextmanager
def cli(*words: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """`quantry serve --json` and what it says once it serves."""
    line = [
        sys.executable,
        "-m",
        "quantry",
        "serve",
        *words,
        "--json",
        "--port",
        "0",
        "--context",
        "256",
        "--threads",
        "1",
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        try:
            assert done.stdout is not None
            text = ""
            for row in done.stdout:
                text += row
                if row == "}\n":
                    break
            yield done, json.loads(text)
        finally:
            done.kill()


@pytest.mark.parametrize(
    ("number", "code", "words"), [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, ""), (signal.SIGKILL, -9, "")]
)
def test_signals_end_both(q8: Path, number: int, code: int, words: str) -> None:
    with cli(str(q8)) as (done, told):
        assert alive(told["pid"])
        done.send_signal(number)
        _, said = done.communicate(timeout=60)
        assert done.returncode == code
        assert said.strip().endswith(words)
        assert "Traceback" not in said
    until(lambda: not alive(told["pid"]))


def test_the_command_reports_the_death_of_its_engine(q8: Path) -> None:
    with cli(str(q8), "--quiet") as (done, told):
        os.kill(told["pid"], signal.SIGKILL)
        _, said = done.communicate(timeout=60)
    assert done.returncode == 137
    assert said.startswith(f"error: llama.cpp (process {told['pid']}) was killed by SIGKILL")
    assert said.count("\n") == 1


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, "-m", "quantry", "serve", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, env=env)


def test_what_is_printed(q8: Path) -> None:
    line = [sys.executable, "-m", "quantry", "serve", str(q8), "--port", "0", "--threads", "1", "--context", "256"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        rows = [done.stdout.readline() for _ in range(6)]
        curl = rows[-1].partition("curl ")[2]
        answer = subprocess.run(f"curl -s {curl}", shell=True, capture_output=True, text=True, check=True).stdout
        done.terminate()
        said = done.communicate(timeout=60)[1]
    assert [row.split()[0] for row in rows] == ["URL", "model", "engine", "context", "log", "try"]
    assert json.loads(answer)["choices"][0]["message"]["content"]
    assert "listening on" in said, "the engine's log is passed through"


def test_a_dry_run_shows_the_command_without_the_key(q8: Path) -> None:
    done = run(
        str(q8), "--dry-run", "--api-key", "open sesame", "--host", "0.0.0.0", "--kv", "q8_0", "--", "--no-warmup"
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert "quantry.serving.embedded" in words
    assert words[words.index("--host") + 1] == "0.0.0.0"
    assert words[words.index("--cache-type-v") + 1] == "q8_0"
    assert "--no-warmup" in words
    assert "sesame" not in done.stdout + done.stderr


def test_explain_gives_reasons(q8: Path) -> None:
    done = run(str(q8), "--explain")
    assert "--ctx-size" in done.stdout
    assert "what older texts say" in done.stdout
    assert "./server" in done.stdout
    told = json.loads(run(str(q8), "--explain", "--json").stdout)
    assert {"model", "engine", "version", "url", "context", "command", "reasons", "outdated", "memory"} <= told.keys()


def test_bad_input_is_one_line(q8: Path) -> None:
    done = run(str(q8), "--host", "0.0.0.0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 0.0.0.0 can be reached by other machines")
    assert "--api-key" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "vlm"}, "did you mean vllm"),
        ({"draft": "demo", "lookup": True}, "give one of them"),
        ({"draft": "demo"}, "use a draft of one format"),
        ({"context": 999999}, "use --context 1024 or less"),
        ({"context": -1}, "must be 1 or more"),
        ({"parallel": 0}, "must be 1 or more"),
        ({"port": 70000}, "65535"),
        ({"kv": "q9"}, "q9"),
        ({"trust_remote_code": True}, "holds no code"),
        ({"engine_bin": Path("no-such-server")}, "is not a program that can be run"),
        ({"host": "nowhere.invalid", "api_key": "k"}, "use 127.0.0.1"),
        ({"host": "nowhere.invalid", "api_key": "k", "port": 0}, "use 127.0.0.1"),
        ({"image": "an-image", "engine_bin": Path("a-program")}, "give one of them"),
        ({"extra": ("--draft-max", "4")}, "--spec-draft-n-max"),
    ],
)
def test_what_cannot_work_is_an_error_before_anything_starts(q8: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(QuantryError) as caught:
        prepare(q8, Options(**options))
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


# ---- which engine ----


def test_an_artefact_for_another_engine(make_folder: MakeFolder) -> None:
    folder = make_folder()
    with pytest.raises(
        QuantryError, match=r"llama.cpp does not load .*safetensors.*use --engine .*vllm.*quantry quantize"
    ):
        prepare(folder, Options(engine="llama.cpp"))
    packed = make_folder(
        {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}, name="packed"
    )
    with pytest.raises(
        QuantryError, match="llama.cpp does not load .*gptq.*quantry quantize MODEL --preset gguf-q4_k_m -o OUT"
    ):
        prepare(packed, Options(engine="llama.cpp"))
    odd = make_folder({**LLAMA, "quantization_config": {"quant_method": "quip", "bits": 2}}, name="odd")
    with pytest.raises(QuantryError, match="'quip', which no engine here loads"):
        prepare(odd)


def test_the_usual_engine_of_a_format(make_folder: MakeFolder, gguf_file: Path) -> None:
    def usual(method: str | None, **more: Any) -> str:
        settings = {"quantization_config": {"quant_method": method, **more}} if method else {}
        return select.select(select.open_model(make_folder({**LLAMA, **settings}, name=method or "plain")), None, None)

    assert select.select(select.open_model(gguf_file), None, None) == "llama.cpp"
    assert usual("awq", bits=4, group_size=64) == "vllm"
    assert usual("bitsandbytes", load_in_4bit=True) == "transformers"
    assert usual(None) == "transformers", "vllm is not installed beside these tests"


def test_an_engine_that_is_not_installed(make_folder: MakeFolder) -> None:
    folder = make_folder({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}})
    with pytest.raises(QuantryError, match="vllm is not installed for .*; pip install vllm.*--engine-python"):
        prepare(folder)
    with pytest.raises(QuantryError, match="is not a program that can be run; name the python"):
        prepare(folder, Options(engine_python=Path("/no/such/python")))
    with pytest.raises(QuantryError, match=f"{sys.executable[:5]}|true"):
        prepare(folder, Options(engine_python=Path("/bin/true")))


def test_an_onnx_folder(tmp_path: Path) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "genai_config.json").write_text(json.dumps({"model": {"context_length": 2048}}))
    found = select.open_model(folder)
    assert (found.format, found.context, found.name) == ("onnx", 2048, "built")
    assert select.select(found, None, None) == "onnxruntime"


# ---- memory and cores ----


def large(**more: Any) -> tuple[select.ServedModel, Serving]:
    """Llama 3.1 8B in 16 bit: 15 GiB of weights and 128 KiB a token."""
    checkpoint = planned_model("llama-3.1-8b")
    model = select.ServedModel("llama-3.1-8b", Path("m"), "safetensors", "m", checkpoint)
    return model, Serving(model="m", format="safetensors", engine="vllm", version="0.32.0", platform="cuda", **more)


def test_memory_that_is_not_there() -> None:
    assert find_model("llama-3.1-8b")
    machine = devices.hardware("RTX 4090")
    model, serving = large(context=65536, parallel=4)
    planned = Deployment(
        planned_model("llama-3.1-8b"), None, "vllm", machine.device, "0.32.0", settings=Settings(sequences=4)
    )
    needed = footprint(planned, Workload(65536, 4))
    with pytest.raises(QuantryError) as caught:
        fitted(serving, model, machine)
    for part in (needed.weights, needed.kv_cache, needed.per_device):
        assert human(part) in str(caught.value)
    words = str(caught.value).partition("this would fit: ")[2].split()
    names = {"--context": "context", "--parallel": "parallel", "--kv": "kv"}
    change: dict[str, Any] = {
        names[flag]: value if flag == "--kv" else int(value)
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    assert change
    fitted(replace(serving, **change), model, machine)  # what is named does fit
    with pytest.raises(QuantryError, match="quantize it to fewer bits"):
        fitted(serving, model, devices.hardware("RTX 3060"))


def test_a_context_is_chosen_that_fits() -> None:
    model, serving = large(parallel=32)
    roomy, _ = fitted(serving, model, devices.hardware("H100"))
    tight, needed = fitted(serving, model, devices.hardware("RTX 4090"))
    assert roomy.context == CONTEXT
    assert tight.context is not None
    assert tight.context < CONTEXT
    assert needed is not None
    with pytest.raises(QuantryError, match="does not fit"):
        fitted(replace(serving, context=2 * tight.context), model, devices.hardware("RTX 4090"))


def test_finished_prompts_get_half_of_the_room_that_is_left() -> None:
    """llama.cpp would keep 8 GiB of them; where there is more than twice that, it is left alone."""
    model = select.ServedModel("llama-3.1-8b", Path("m"), "gguf", "m", planned_model("llama-3.1-8b"))
    serving = Serving(model="m", format="gguf", engine="llama.cpp", version="b11549", context=8192, parallel=1)
    machine = devices.hardware("cpu")

    def kept(gib_free: int) -> int | None:
        place = replace(machine.cpu, usable=gib_free << 30, free=None)
        return fitted(serving, model, replace(machine, cpu=place))[0].prompt_cache_mib

    _, needed = fitted(serving, model, replace(machine, cpu=replace(machine.cpu, usable=64 << 30, free=None)))
    assert needed is not None
    assert kept(64) is None
    assert kept(24) == ((24 << 30) - needed.per_device) // 2 >> 20
    assert embedded.parse(["--model", "m", "--cache-ram", "77"]).cache_ram_mib == 77


def test_physical_cores(tmp_path: Path) -> None:
    for number in range(8):  # four cores of two threads
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    assert physical_cores(tmp_path, range(8)) == 4
    assert physical_cores(tmp_path, [0, 4]) == 1
    assert physical_cores(tmp_path, [0, 1, 5]) == 2
    assert physical_cores(tmp_path, [20, 21]) == 2  # nothing is known of these
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("250000 100000\n")
    assert physical_cores(tmp_path, range(8)) == 2
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))


def test_a_container_runs_the_same_command() -> None:
    command = Command(("vllm", "serve", "/m/x", "--port", "8000"), env={"VLLM_API_KEY": "sesame"})
    found = container.contained(
        command,
        "vllm/vllm-openai:v0.32.0",
        program="podman",
        name="quantry-8000",
        platform="cuda",
        mounts=[Path("/m/x")],
    )
    words = list(found.argv)
    assert words[:2] == ["podman", "run"]
    assert words[words.index("--entrypoint") :] == [
        "--entrypoint",
        "vllm",
        "vllm/vllm-openai:v0.32.0",
        *command.argv[1:],
    ]
    assert words[words.index("--volume") + 1] == "/m/x:/m/x:ro"
    assert words[words.index("--gpus") + 1] == "all"
    assert words[words.index("--env") + 1] == "VLLM_API_KEY"
    assert "sesame" not in " ".join(words)
    assert asdict(found)["env"] == {"VLLM_API_KEY": "sesame"}
    with pytest.raises(QuantryError, match="cannot be run from an image"):
        container.contained(
            replace(command, files={"a": "b"}), "i", program="docker", name="n", platform="cpu", mounts=[]
        )
