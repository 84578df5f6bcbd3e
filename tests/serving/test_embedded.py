"""The embedded llama.cpp for real, under everything that clients do to it."""

import json
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import quantry
from depth import cases, deep
from local_servers import STORY, complete, get, metric, post, send, until
from quantry.errors import QuantryError
from quantry.serving import embedded
from quantry.serving.prepare import serve
from quantry.serving.process import Running

SMALL: dict[str, Any] = {"port": 0, "threads": 1}


def test_streaming_through_the_openai_client(server: Running) -> None:
    from openai import OpenAI  # a second of imports

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    asked: list[Any] = [{"role": "user", "content": "What color is the sky?"}]
    chat = client.chat.completions
    whole = chat.create(model=server.model, messages=asked, max_tokens=12, temperature=0).choices[0].message.content
    pieces = [
        piece.choices[0].delta.content or ""
        for piece in chat.create(model=server.model, messages=asked, max_tokens=12, temperature=0, stream=True)
        if piece.choices
    ]
    assert whole
    assert "".join(pieces) == whole
    assert sum(bool(piece) for piece in pieces) > 3, "it came in one piece"
    assert [model.id for model in client.models.list()] == ["demo-Q8_0"]


def test_the_model_has_its_name_and_facts(server: Running, q8: Path) -> None:
    facts = server.facts()
    assert (server.model, facts.context, facts.max_concurrency) == ("demo-Q8_0", 512, 4)
    assert facts.kv_cache_tokens == 4 * 512
    assert facts.weights_bytes == pytest.approx(quantry.inspect(q8).bytes, rel=0.01)
    assert facts.kv_cache_bytes == 4 * 512 * quantry.inspect(q8).kv_bytes_per_token


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
    status, text, _ = post(server, "/v1/completions", {"prompt": "word " * 600})
    assert status == 400
    assert "context" in text
    assert complete(server)


@deep
def test_memory_returns_after_a_large_request(server: Running) -> None:
    """Large enough that glibc would keep more than is allowed here."""

    def held() -> int:
        return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    before = held()
    with ThreadPoolExecutor(4) as clients:
        answers = clients.map(lambda _: post(server, "/v1/completions", {"prompt": "a " * (2 << 20)}), range(4))
        assert {status for status, _, _ in answers} == {400}
    until(lambda: held() < before + (256 << 20))


def test_requests_cannot_take_all_memory(server: Running) -> None:
    """A schema of 10**9 items would: llama.cpp ends itself where the limit is, before the machine has no memory left."""
    soft, _ = resource.prlimit(server.pid, resource.RLIMIT_AS)
    held = int(Path(f"/proc/{server.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    facts = Path("/proc/meminfo").read_text().split()
    assert 0 < soft - held < int(facts[facts.index("MemTotal:") + 1]) << 10


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


def test_two_servers_side_by_side_one_with_a_key(server: Running, q8: Path) -> None:
    with serve(q8, context=256, api_key="open sesame", name="other", **SMALL) as other:
        assert other.url != server.url
        assert post(other, "/v1/completions", {"prompt": STORY})[0] == 401
        assert complete(other, tokens=2, key="open sesame")
        models = json.loads(get(other, "/v1/models", Authorization="Bearer open sesame")[1])
        assert [model["id"] for model in models["data"]] == ["other"]
        assert "sesame" not in Path(f"/proc/{other.pid}/cmdline").read_text()
        assert complete(server, tokens=2)
    assert not other.healthy()
    assert server.healthy()


@pytest.mark.parametrize(("kv", "bits"), cases([("q8_0", 8.5), ("q4_0", 4.5)], [("q8_0", 8.5)]))
def test_smaller_caches(q8: Path, kv: str, bits: float) -> None:
    with serve(q8, context=512, kv=kv, **SMALL) as running:
        whole = 512 * quantry.inspect(q8).kv_bytes_per_token
        assert running.facts().kv_cache_bytes == pytest.approx(whole * bits / 16, rel=0.01)
        assert complete(running)


def test_a_draft_model_changes_nothing_but_speed(server: Running, q8: Path) -> None:
    plain = complete(server, tokens=60)
    with serve(q8, context=256, draft=q8, **SMALL) as running:
        assert complete(running, tokens=60) == plain
        drafted = metric(running, "spec_decode_num_draft_tokens_total")
        accepted = metric(running, "spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= drafted
    assert accepted / drafted > 0.9, "it is the same model"


@pytest.mark.parametrize("guesses", cases([None, 2], [None]))
def test_lookup_changes_nothing_but_speed(server: Running, q8: Path, guesses: int | None) -> None:
    """The demo model falls into a loop here, which is text that repeats itself."""
    tokens = 200

    def written(running: Running) -> str:
        return complete(running, "the cat sat. " * 20, tokens, ignore_eos=True)

    with serve(q8, context=512, lookup=True, draft_tokens=guesses, **SMALL) as running:
        assert written(running) == written(server)
        accepted, drafted = (metric(running, f"spec_decode_num_{name}_tokens_total") for name in ("accepted", "draft"))
    assert tokens / 10 < accepted <= drafted


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
