"""ONNX Runtime GenAI for real: the demo built as 32, 8 and 4 bit by its own builder, and served by Quantry's server.

What the server says is held against the demo's 16-bit bytes run in float32 by Quantry: as 32-bit ONNX it must be the same
but for rounding, and 8 and 4 bits must be as close as those are. The rest is what clients do to a server.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from local_servers import until
from quantry.blockwise import walk
from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.options import Options, Serving
from quantry.errors import QuantryError
from quantry.models.reader import local_folder
from quantry.quantizing import sources
from quantry.serving import onnx_server, process
from quantry.serving.onnx_server.handler import BODY
from quantry.serving.onnx_server.model import PREFILL, StopFilter, TurnQueue
from quantry.serving.prepare import prepare, serve
from quantry.serving.process import Launch, Running
from real_engines.environment import CACHE, ensure

pytestmark = pytest.mark.engines

SERVER = Path(onnx_server.__file__).with_name("__main__.py")
STORY = "Once upon a time there was a little girl named Lily. She"
PASSAGE = (
    "Once upon a time there was a little boy named Tim. He had a red ball. One day he went to the park with his mom. "
    "He saw a big dog. The dog wanted to play with the ball too, and Tim was happy."
)
CONTEXT = 1024
LONG = 8  # answers of 1,000 tokens that a client asks for and does not wait for
KEY = "sesame"
BY_ID: dict[str, Any] = {"return_tokens_as_token_ids": True}
PRECISIONS = ("fp32", "int8", "int4")


def serving(folder: Path, **more: Any) -> Serving:
    usual: dict[str, Any] = {"version": "0.18.0", "platform": "cpu", "threads": 1, "python": str(ensure("onnxruntime"))}
    return Serving(model=str(folder), engine="onnxruntime", **{"format": "onnx", **usual, **more})


@contextmanager
def started(folder: Path, **more: Any) -> Iterator[Running]:
    """The engine's own command, with the server by its file: its python does not have Quantry."""
    wanted = serving(folder, **{"port": process.free_port("127.0.0.1"), **more})
    command = adapter("onnxruntime").command(wanted)
    argv = (command.argv[0], "-P", str(SERVER), *command.argv[3:])
    launch = Launch("onnxruntime", replace(command, argv=argv), wanted.host, wanted.port or 0, "/health", folder.name)
    with process.start(launch, patience=120) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs apart from the user's; the environment and the models stay where they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """The demo in every precision, by the step that stands before the server; made once per machine."""
    demo, python = local_folder("demo"), ensure("onnxruntime")
    key = hashlib.sha256((demo / "model.safetensors").read_bytes()).hexdigest()[:12]
    home = CACHE.parent / "onnx" / f"{python.parents[1].name}-{key}"
    return {precision: _built(demo, home / precision, precision) for precision in PRECISIONS}


def _built(demo: Path, home: Path, precision: str) -> Path:
    model = home / "demo"
    command = adapter("onnxruntime").command(serving(model, format="safetensors", quantization=precision))
    (step,) = command.steps
    done, folder = home / ".done", Path(command.argv[command.argv.index("--model") + 1])
    if not (done.exists() and folder.is_dir()):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        model.symlink_to(demo, target_is_directory=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(step.argv, check=True, capture_output=True, env=environment, cwd=home)
        done.touch()
    return folder


@pytest.fixture(scope="module")
def exact(built: dict[str, Path]) -> Iterator[Running]:
    """The 32-bit one, that most tests share."""
    with started(built["fp32"], name="demo") as running:
        yield running


def client(running: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(running: Running, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{running.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def complete(running: Running, prompt: Any = STORY, tokens: int = 24, **more: Any) -> str:
    found = ask(running, prompt=prompt, max_tokens=tokens, **{"temperature": 0, **more})
    return str(found["choices"][0]["text"])


def metrics(running: Running) -> dict[str, float]:
    lines = httpx.get(f"{running.url}/metrics", timeout=60).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


# ---- what it says, against the 16-bit bytes ----


@cache
def tokenizer() -> Any:
    return sources.tokenizer(sources.open_source("demo"))


@cache
def truth(tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Log-probabilities after each token, from the 16-bit bytes in float32."""
    ((_, logits),) = walk.run(sources.open_source("demo"), [tokens])
    return torch.log_softmax(logits.double(), -1).numpy()


def told(running: Running, tokens: Sequence[int]) -> list[dict[int, float]]:
    """The likeliest tokens after each beginning of a text, as the server tells them: every one is a prompt of its own."""
    prompts = [list(tokens[:size]) for size in range(1, len(tokens) + 1)]
    asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "logprobs": 20, "return_tokens_as_token_ids": True}
    choices = ask(running, prompt=prompts, **asked)["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    return [
        {int(name.removeprefix("token_id:")): value for name, value in choice["logprobs"]["top_logprobs"][0].items()}
        for choice in choices
    ]


def compared(running: Running) -> tuple[float, float, float]:
    """Mean KL, all but the 20 likeliest as one event; share of equal first tokens; the largest difference of a logprob."""
    tokens = tuple(tokenizer()(PASSAGE)["input_ids"])
    kls, same, worst = [], [], 0.0
    for logp, row in zip(truth(tokens), told(running, tokens), strict=True):
        ids, logq = list(row), np.array(list(row.values()))
        p, q = np.append(np.exp(logp[ids]), 0), np.append(np.exp(logq), 0)
        p[-1], q[-1] = max(1e-12, 1 - p.sum()), max(1e-12, 1 - q.sum())
        kls.append(float((p * np.log(p / q)).sum()))
        same.append(int(logp.argmax()) == ids[int(logq.argmax())])
        worst = max(worst, float(np.abs(logp[ids] - logq).max()))
    return float(np.mean(kls)), float(np.mean(same)), worst


def test_32_bit_is_the_model_itself(exact: Running) -> None:
    kl, same, worst = compared(exact)
    assert kl < 1e-6
    assert same == 1
    assert worst < 2e-3


def test_a_long_prompt_is_read_in_pieces(exact: Running) -> None:
    ids = tuple(tokenizer()(PASSAGE * 11)["input_ids"])
    assert len(ids) > 2 * PREFILL
    asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "logprobs": 5, **BY_ID}
    (choice,) = ask(exact, prompt=list(ids), **asked)["choices"]
    for name, value in choice["logprobs"]["top_logprobs"][0].items():
        assert value == pytest.approx(truth(ids)[-1, int(name.removeprefix("token_id:"))], abs=2e-3)


@pytest.mark.parametrize(("precision", "most", "least"), [("int8", 2e-3, 0.95), ("int4", 0.1, 0.8)])
def test_quantized_is_close(built: dict[str, Path], precision: str, most: float, least: float) -> None:
    with started(built[precision]) as running:
        kl, same, _ = compared(running)
        assert 1e-8 < kl < most, f"{precision} is nothing like that"
        assert same >= least
        assert complete(running)
        facts = running.facts()
        assert (facts.version, facts.context) == ("0.18.0", CONTEXT)


def test_texts_become_the_tokens_that_the_model_knows(exact: Running) -> None:
    """With the token that stands in front of every text, which the library leaves out by itself."""
    for text in (STORY, "  two spaces\n\nand é, 🙂", "<|eos|>"):
        ids = tokenizer()(text)["input_ids"]
        by_text, by_ids = (ask(exact, prompt=one, max_tokens=4, temperature=0, logprobs=1) for one in (text, ids))
        assert by_text["usage"]["prompt_tokens"] == len(ids)
        assert by_text["choices"] == by_ids["choices"]


def test_a_chat_is_in_the_models_own_form(exact: Running) -> None:
    parts = [{"type": "text", "text": "What color "}, {"type": "text", "text": "is the sky?"}]
    messages = [{"role": "system", "content": 'Be "brief" é.'}, {"role": "user", "content": parts}]
    plain = [messages[0], {"role": "user", "content": "What color is the sky?"}]
    ids = list(tokenizer().apply_chat_template(plain, add_generation_prompt=True, return_dict=True)["input_ids"])
    chat = ask(exact, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=12)
    assert chat["usage"]["prompt_tokens"] == len(ids)
    assert chat["choices"][0]["message"]["content"] == complete(exact, ids, 12)


def test_a_text_that_the_model_ends(exact: Running) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "What color is the sky?"}], "temperature": 0}
    found = ask(exact, "/v1/chat/completions", **asked)
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "stop"
    assert "<|" not in choice["message"]["content"]
    assert found["usage"]["completion_tokens"] < 100
    longer = ask(exact, "/v1/chat/completions", max_tokens=100, ignore_eos=True, **asked)
    assert longer["usage"]["completion_tokens"] == 100
    assert longer["choices"][0]["finish_reason"] == "length"


def test_samples_have_the_models_probabilities(exact: Running) -> None:
    """400 draws of one token: each likely one comes as often as its probability says, within 4 standard deviations."""
    ids, draws = tokenizer()(STORY)["input_ids"], 400
    row = truth(tuple(ids))[-1]
    for temperature in (1.0, 0.5):
        found = ask(exact, prompt=[ids] * draws, max_tokens=1, temperature=temperature, logprobs=0, **BY_ID)["choices"]
        drawn = [int(one["logprobs"]["tokens"][0].removeprefix("token_id:")) for one in found]
        share = np.exp(row / temperature) / np.exp(row / temperature).sum()
        for token in np.argsort(-share)[:4]:
            wanted, deviation = draws * share[token], np.sqrt(draws * share[token] * (1 - share[token]))
            assert abs(drawn.count(int(token)) - wanted) < 4 * deviation + 1, (temperature, token)


def test_seeds_and_the_narrowing_of_choices(exact: Running) -> None:
    first, again, other = (complete(exact, temperature=1, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert complete(exact, temperature=1, top_k=1) == complete(exact) == complete(exact, temperature=1, top_p=1e-6)


def test_whole_and_in_pieces_the_same(exact: Running) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 20, "temperature": 0}
    api = client(exact)
    whole = api.completions.create(prompt=STORY, **asked)
    pieces = list(api.completions.create(prompt=STORY, stream=True, stream_options={"include_usage": True}, **asked))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    assert len(pieces) > 15
    assert pieces[-1].usage == whole.usage
    assert whole.usage
    assert whole.usage.completion_tokens == 20
    messages: list[Any] = [{"role": "user", "content": "What color is the sky?"}]
    chat = api.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **asked)
    parts = list(api.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, stream=True, **asked))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.choices[0].message.content
    assert [part.choices[0].delta.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
    scores = [row for part in parts for row in (part.choices[0].logprobs.content if part.choices[0].logprobs else [])]
    assert chat.choices[0].logprobs
    assert chat.choices[0].logprobs.content == scores
    assert parts[-1].choices[0].finish_reason == chat.choices[0].finish_reason
    assert [one.id for one in api.models.list()] == ["demo"] == [api.models.retrieve("demo").id]


def test_stop_words(exact: Running) -> None:
    whole = complete(exact)
    stop = whole[10:14]
    found = ask(exact, prompt=STORY, max_tokens=24, temperature=0, stop=["never this", stop])
    assert found["choices"][0]["text"] == whole[: whole.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] < 24


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 4))
def test_a_text_is_shown_up_to_the_first_stop_word(text: str, stops: list[str], size: int) -> None:
    shown, given_out = StopFilter(stops), ""
    for start in range(0, len(text), size):
        given_out += shown.add(text[start : start + size])
        seen = text[: start + size]
        if found := [seen.index(stop) for stop in stops if stop in seen]:
            assert shown.stopped
            assert given_out + shown.rest() == text[: min(found)]
            return
        assert seen.startswith(given_out)
    assert not shown.stopped
    assert given_out + shown.rest() == text


# ---- what clients do ----
WRONG: list[tuple[bytes | dict[str, Any], int, str]] = [
    (b"{", 400, "no JSON"),
    (b"[1]", 400, "no JSON object"),
    (b"\xff", 400, "no JSON"),
    (b"[" * 100_000, 400, "no JSON"),
    ({}, 400, "prompt is not"),
    ({"prompt": []}, 400, "empty"),
    ({"prompt": {"a": 1}}, 400, "prompt is not"),
    ({"prompt": [[1, "a"]]}, 400, "prompt is not"),
    ({"prompt": [4096]}, 400, "tokens are 0 to 4095"),
    ({"prompt": [-1]}, 400, "tokens are 0 to 4095"),
    ({"prompt": "a\0b"}, 400, "NUL"),
    ({"prompt": "\ud800"}, 400, "surrogate"),
    ({"prompt": [5] * 1024}, 400, "the prompt has 1024 tokens"),
    ({"prompt": "a " * 3000}, 400, "the context is 1024"),
    ({"prompt": "a", "max_tokens": 5000}, 400, "more than the context of 1024: ask for"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens is not"),
    ({"prompt": "a", "max_tokens": True}, 400, "max_tokens is not"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature is not"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature is not"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p is not"),
    ({"prompt": "a", "stop": [""]}, 400, "stop is not"),
    ({"prompt": "a", "stream": "yes"}, 400, "stream is not"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs is not"),
    ({"prompt": "a", "n": 2}, 400, "n is not supported"),
    ({"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty is not supported"),
    ({"prompt": "a", "model": "other"}, 404, "only 'demo'"),
]


@pytest.mark.parametrize(("body", "status", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said(exact: Running, body: bytes | dict[str, Any], status: int, words: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{exact.url}/v1/completions", content=content, timeout=60)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        ["a"],
        [{"content": "a"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_wrong_chats(exact: Running, messages: Any) -> None:
    answer = httpx.post(f"{exact.url}/v1/chat/completions", json={"messages": messages}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_prompt_over_the_context_has_openais_code(exact: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client(exact).completions.create(model="demo", prompt=[5] * 2000)
    assert caught.value.code == "context_length_exceeded"


def test_other_paths_methods_and_sizes(exact: Running) -> None:
    with httpx.Client(base_url=exact.url, timeout=60) as http:  # one connection: every answer leaves it usable
        assert http.get("/v1/nothing").status_code == 404
        assert http.post("/v1/nothing", json={"a": 1}).json()["error"]["message"].startswith("there is no /v1/nothing")
        wrong = http.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert http.put("/v1/completions").json()["error"]["type"] == "server_error"
        assert http.get("/health?x=1").json() == {"status": "ok"}
        assert http.post("/v1/completions", content=iter([b"{}"])).status_code == 411
        assert http.post("/v1/completions", content=b" " * (BODY + 1)).status_code == 413
    assert exact.healthy()


def test_pages_of_other_sites_may_not_ask(exact: Running) -> None:
    for origin, status in (("https://example.com", 403), ("null", 403), ("http://localhost:3000", 200)):
        assert httpx.get(f"{exact.url}/v1/models", headers={"Origin": origin}).status_code == status


def test_a_key(built: dict[str, Path]) -> None:
    with started(built["int4"], api_key=KEY) as running:
        assert KEY not in " ".join(running.argv)
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY + "x"}):
                answer = httpx.get(running.url + path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            client(running, "wrong").completions.create(model="demo-onnx-int4", prompt="a")
        assert client(running, KEY).completions.create(model="demo-onnx-int4", prompt="a", max_tokens=2).choices
        assert running.healthy(), "health needs no key"
        assert KEY not in "\n".join(running.lines())


def test_many_at_once_get_what_they_get_alone(exact: Running) -> None:
    prompts = [f"Once upon a time there were {number} little" for number in range(24)]
    alone = [complete(exact, prompt, 8) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: complete(exact, prompt, 8), prompts)) == alone


def test_counts(exact: Running) -> None:
    before = metrics(exact)
    ids = tokenizer()(STORY)["input_ids"]
    complete(exact, [ids, ids], 7, ignore_eos=True)
    httpx.post(f"{exact.url}/v1/completions", content=b"{")
    after = metrics(exact)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["onnxruntime_prompt_tokens_total"] == 2 * len(ids)
    assert grown["onnxruntime_generated_tokens_total"] == 14
    assert grown['onnxruntime_requests_total{path="/v1/completions",status="200"}'] == 1
    assert grown['onnxruntime_requests_total{path="/v1/completions",status="400"}'] == 1
    assert after["onnxruntime_requests_running"] == after["onnxruntime_requests_waiting"] == 0


def long(running: Running, *, stream: bool) -> socket.socket:
    """A client that asks for all that the context holds, several times, and has read nothing yet."""
    asked = {"prompt": [STORY] * LONG, "max_tokens": 1000, "ignore_eos": True, "temperature": 0, "stream": stream}
    body = json.dumps(asked)
    link = socket.create_connection(running.launch.address, timeout=60)
    link.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return link


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_generation(exact: Running, stream: bool) -> None:
    before = metrics(exact)
    tokens, left = "onnxruntime_generated_tokens_total", "onnxruntime_requests_abandoned_total"
    link = long(exact, stream=stream)
    until(lambda: metrics(exact)[tokens] > before[tokens] + 3)
    waiting = long(exact, stream=stream)
    until(lambda: metrics(exact)["onnxruntime_requests_waiting"] == 1)
    waiting.close()
    until(lambda: metrics(exact)[left] == before[left] + 1)
    link.close()
    until(lambda: metrics(exact)[left] == before[left] + 2)
    after = metrics(exact)
    assert after["onnxruntime_requests_running"] == 0
    assert after[tokens] - before[tokens] < LONG * 1000
    assert metrics(exact)[tokens] == after[tokens]
    assert complete(exact, tokens=2)


def test_first_come_first_served() -> None:
    line, order = TurnQueue(), []

    def wait(number: int) -> None:
        with line.turn(lambda: False):
            order.append(number)

    def joined(size: int) -> bool:
        return len(line) == size

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(20)]
    with line.turn(lambda: False):
        for size, thread in enumerate(threads, 2):
            thread.start()
            until(partial(joined, size))
    for thread in threads:
        thread.join()
    assert order == list(range(20))


# ---- the process ----


def program(folder: Path, *words: str, module: bool = False, **environment: str) -> "subprocess.CompletedProcess[str]":
    how = ["-m", "quantry.serving.onnx_server"] if module else ["-P", str(SERVER)]
    usual = {name: value for name, value in os.environ.items() if name != "QUANTRY_API_KEY"}
    return subprocess.run(
        [str(ensure("onnxruntime")), *how, "--model", str(folder), *words],
        capture_output=True, text=True, timeout=60, env={**usual, **environment},
    )  # fmt: skip


def test_what_cannot_start_says_why(built: dict[str, Path], exact: Running, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "genai_config.json").write_text((built["int4"] / "genai_config.json").read_text())
    folder = built["int4"]
    cases = [
        (program(tmp_path), "is no folder of ONNX Runtime GenAI"),
        (program(broken), "does not load"),
        (program(folder, "--context", "4096"), "--context 4096 is not 2 to 1024"),
        (program(folder, "--host", "0.0.0.0"), "set QUANTRY_API_KEY"),
        (program(folder, "--port", str(exact.launch.port)), f"cannot listen on port {exact.launch.port}"),
        (program(folder, "--port", "70000"), "cannot listen on port 70000"),
    ]
    for done, words in cases:
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    assert program(folder, "--cont", "5").returncode == 2


def test_as_a_module_it_needs_nothing_of_quantry(tmp_path: Path) -> None:
    """The environment has no typer, no gguf; PYTHONPATH leads to the package alone."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "quantry").symlink_to(SERVER.parents[2])
    done = program(tmp_path, module=True, PYTHONPATH=str(root))
    assert "is no folder of ONNX Runtime GenAI" in done.stderr


HOSTILE = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes more than 5 s",
    "{% set n = namespace(x='x') %}{% for _ in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}": "memory",
    "{{ 'x' * 9000000 }}": "gives more than",
}


@pytest.mark.parametrize(("template", "words"), HOSTILE.items(), ids=list(HOSTILE.values()))
def test_a_hostile_chat_template_ends_at_a_limit(
    built: dict[str, Path], tmp_path: Path, template: str, words: str
) -> None:
    """The chat is answered with an error, and others are served as before."""
    folder = shutil.copytree(built["int4"], tmp_path / "hostile")
    (folder / "chat_template.jinja").write_text(template)
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    with started(folder) as running:
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=talk, timeout=30)
        assert answer.status_code == 500
        assert words in answer.json()["error"]["message"]
        assert complete(running, tokens=2)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("genai_config.json", b"\xff", "byte 0 is not UTF-8"),
        ("genai_config.json", b"[" * 100_000, "nested too deeply"),
        ("genai_config.json", b'{"model": []}', "model is a list, not an object"),
        ("tokenizer.json", b"[]", "holds a list, not an object"),
        ("tokenizer.json", b'{"post_processor": {"processors": 1}}', "post_processor is none"),
    ],
)
def test_a_damaged_folder_is_one_line(
    built: dict[str, Path], tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in built["int4"].iterdir():
        (folder / file.name).symlink_to(file)
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    done = program(folder)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_without_the_library_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text(
        '{"model": {"context_length": 8, "vocab_size": 8, "eos_token_id": [1]}}'
    )
    done = subprocess.run([sys.executable, SERVER, "--model", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("pip install onnxruntime-genai\n")


def test_context_and_name_and_a_stop_in_the_middle(built: dict[str, Path]) -> None:
    with started(built["int4"], context=64, name="small") as running:
        assert (running.facts().context, running.facts().version) == (64, "0.18.0")
        full = ask(running, model="small", prompt=[5] * 60, max_tokens=4, ignore_eos=True)
        assert full["usage"]["total_tokens"] == 64
        assert httpx.post(f"{running.url}/v1/completions", json={"prompt": [5] * 64}).status_code == 400
    with started(built["int4"]) as running:
        link = long(running, stream=True)
        assert link.recv(4096).startswith(b"HTTP/1.1 200")
        begun = time.monotonic()
        os.kill(running.pid, signal.SIGTERM)
        assert running.wait(10) == 0
        assert time.monotonic() - begun < 5
        assert not [line for line in running.lines() if line.startswith("answered")], "it went on to the last token"
        link.close()


def test_a_checkpoint_is_built_once_and_served() -> None:
    """`quantry serve` does both; what was built is found again."""
    asked: dict[str, Any] = {
        "engine": "onnxruntime", "engine_python": ensure("onnxruntime"), "quantization": "int8", "port": 0, "threads": 1,
        "context": 256, "patience": 300,
    }  # fmt: skip
    said: list[list[str]] = []
    for _ in range(2):
        told: list[str] = []
        with serve("demo", tell=told.append, **asked) as running:
            answer = client(running).completions.create(model="demo", prompt=STORY, max_tokens=4, temperature=0)
            said.append([*told, answer.choices[0].text])
    assert said[0] == ["the ONNX model, from the checkpoint", said[1][-1]]
    assert len(said[1]) == 1, "nothing is built the second time"
    assert said[1][0].strip()


def test_an_image_has_no_server_for_it() -> None:
    with pytest.raises(QuantryError, match="Quantry's own, and in no image"):
        prepare("demo", Options(engine="onnxruntime", image="some/image"))
