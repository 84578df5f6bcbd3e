"""vLLM: `vllm serve` on GPUs, its module on CPUs, where the distribution has another name and `vllm` does not start."""

import json
import re
from collections.abc import Iterable

from quantry.engines.contract.boot_log import Facts, last, size, until
from quantry.engines.contract.command import (
    HEAD,
    THREADS,
    WORKER,
    Command,
    Setting,
    Step,
    check,
    explained,
    maybe,
    refuse,
    several,
    started_by,
    switch,
)
from quantry.engines.contract.options import LOOKUP, MTP, Serving
from quantry.errors import RecipeError

GUESSES = 5  # tokens guessed at a time where nobody says
MATCH = 4  # the longest run of tokens that lookup searches for
RAY_PORT = 6379
CARRIED = re.compile(r"\b(?:Using|Selected) (\w*Kernel\w*) for [A-Z]\w+|\bUsing (\w*Kernel\w*) for ")


def settings(serving: Serving) -> list[Setting]:
    """Returns flags in the order of `vllm serve --help`'s groups: server, sizes, devices, types, cache, the rest."""
    key_why = "requests need this key; in the environment it is in no list of processes"
    return [
        Setting("--host", serving.host, "the address that it listens on"),
        Setting("--port", serving.listening_port, "the port that it listens on"),
        *maybe("--served-model-name", serving.name, "what requests call the model"),
        *maybe("VLLM_API_KEY=", serving.api_key, key_why),
        *maybe(
            "--max-model-len", serving.context, "the longest sequence, prompt and answer; fewer tokens leave more room"
        ),
        *maybe("--max-num-seqs", serving.parallel, "sequences that are answered at once; more wait"),
        *_spread(serving),
        *maybe("--dtype", serving.dtype, "the type of activations, where the device lacks the model's own"),
        *maybe("--kv-cache-dtype", serving.kv, "a smaller KV cache holds more tokens"),
        *_memory(serving),
        *_schedule(serving),
        *_guessing(serving),
        *maybe("--quantization", serving.quantization, "16-bit weights are quantized as they are loaded"),
        *switch(serving.eager, "--enforce-eager", "no graphs and no compilation: starts sooner, answers slower"),
        *switch(serving.trust_remote_code, "--trust-remote-code", "code of the checkpoint is run, as was asked for"),
    ]


def command(serving: Serving) -> Command:
    """Returns `vllm serve`, after the start of a Ray cluster if there are several nodes."""
    check(serving)
    if serving.platform != "cpu":
        refuse(serving, threads="leave it out on a GPU", cache_gib="give a share of the device instead")
    return started_by(_program(serving), serving, settings(serving), _cluster(serving))


def explain(serving: Serving) -> list[tuple[str, str]]:
    rows = explained(serving, settings(serving))
    return [*rows, *((" ".join(step.argv), f"{step.where}: {step.why}") for step in _cluster(serving))]


def facts(lines: Iterable[str]) -> Facts:
    """Reads the log of its start, which the process of the engine and that of the server both write to."""
    log = until(r"Application startup complete", lines)
    weights = last(r"Model loading took ([\d.]+) (GiB)", log)
    cache = last(r"KV cache size: ([\d,]+) tokens", log)
    room = last(r"Available KV cache memory: ([\d.]+) (GiB)", log) or last(
        r"set \(([\d.]+)/[\d.]+\) (GiB) for KV cache", log
    )
    most = last(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", log)
    context = last(r"Using max model len (\d+)", log) or last(r"max_seq_len=(\d+)", log)
    version = last(r"LLM engine \(v([^)]+)\)", log) or last(r"\bversion (\d+\.\d[\w.+]*)", log)
    method = last(r"\bquantization=([\w-]+)", log)
    return Facts(
        version=version.group(1) if version else None,
        weights_bytes=size(*weights.groups()) if weights else None,
        kv_cache_tokens=int(cache.group(1).replace(",", "")) if cache else None,
        kv_cache_bytes=size(*room.groups()) if room else None,
        max_concurrency=float(most.group(1)) if most else None,
        quantization=method.group(1) if method and method.group(1) != "None" else None,
        kernels=_kernels(log),
        context=int(context.group(1)) if context else None,
        warnings=_warnings(log),
    )


def _program(serving: Serving) -> tuple[str, ...]:
    if serving.platform == "cpu":
        return (serving.python, "-m", "vllm.entrypoints.openai.api_server", "--model", serving.model)
    if serving.python != "python":  # its own environment, whose programs are on no path
        return (serving.python, "-m", "vllm.entrypoints.cli.main", "serve", serving.model)
    return ("vllm", "serve", serving.model)


def _spread(serving: Serving) -> list[Setting]:
    ray = "ray" if serving.nodes > 1 else None
    return [
        *several(
            "--tensor-parallel-size", serving.tensor_parallel, "every layer is cut into as many parts, one a device"
        ),
        *several("--pipeline-parallel-size", serving.pipeline_parallel, "layers are shared out over as many stages"),
        *several("--data-parallel-size", serving.replicas, "copies of the model that share the requests"),
        *switch(serving.expert_parallel, "--enable-expert-parallel", "whole experts are shared out over the devices"),
        *maybe("--distributed-executor-backend", ray, f"parts of the model run on {serving.nodes} nodes"),
    ]


def _memory(serving: Serving) -> list[Setting]:
    if serving.platform != "cpu":
        return maybe("--gpu-memory-utilization", serving.utilization, "the share of each device that it may fill")
    threads = serving.threads
    return [
        *maybe("VLLM_CPU_KVCACHE_SPACE=", serving.cache_gib, "GiB of the KV cache, which on a CPU is not measured"),
        *maybe("VLLM_CPU_OMP_THREADS_BIND=", threads and "nobind", "threads go where the system puts them"),
        *maybe(THREADS, threads, "threads that compute: more than free cores slow it down"),
    ]


def _schedule(serving: Serving) -> list[Setting]:
    return [
        *switch(
            serving.prefix_cache,
            "--enable-prefix-caching",
            "prompts that begin alike are read once",
            "--no-enable-prefix-caching",
            "every prompt is read in full",
        ),
        *switch(
            serving.chunked_prefill,
            "--enable-chunked-prefill",
            "long prompts are read in pieces between steps of answers",
            "--no-enable-chunked-prefill",
            "a prompt is read in one piece, and answers wait for it",
        ),
        *maybe("--max-num-batched-tokens", serving.batch_tokens, "tokens of one step, of prompts and answers together"),
    ]


def _guessing(serving: Serving) -> list[Setting]:
    if serving.speculative is None:
        return []
    number = serving.draft_tokens or GUESSES
    if serving.speculative == LOOKUP:
        method: dict[str, object] = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_max": MATCH}
        why = "guesses are copied from the prompt, where the last tokens stood before"
    elif serving.speculative == MTP:
        method = {"method": MTP, "num_speculative_tokens": number}
        why = "heads that the model brings guess, the model checks; answers stay the same"
    else:
        method = {"method": serving.drafter, "model": serving.speculative, "num_speculative_tokens": number}
        why = "a smaller model guesses, this one checks; answers stay the same"
    return [Setting("--speculative-config", json.dumps(method), why)]


def _cluster(serving: Serving) -> tuple[Step, ...]:
    """Returns the steps that start Ray, for the user to run on every node; the server is started on the first."""
    if serving.nodes == 1:
        return ()
    if not serving.head:
        raise RecipeError(
            f"{serving.nodes} nodes need the address of the first",
            fix="give it as the others reach it, such as 10.0.0.1",
        )
    head = ("ray", "start", "--head", "--port", str(RAY_PORT))
    worker = ("ray", "start", "--address", f"{serving.head}:{RAY_PORT}")
    others = serving.nodes - 1
    return (
        Step(head, "the first node of the cluster, where the server is started too", HEAD),
        Step(worker, f"each of the {others} other node{'s' if others > 1 else ''}, before the server starts", WORKER),
    )


def _kernels(log: list[str]) -> tuple[str, ...]:
    names = (match.group(1) or match.group(2) for line in log if (match := CARRIED.search(line)))
    return tuple(dict.fromkeys(names))


def _warnings(log: list[str]) -> tuple[str, ...]:
    said = (line.partition("WARNING ")[2] for line in log if "WARNING " in line)
    return tuple(dict.fromkeys(text.partition("] ")[2].strip() or text.strip() for text in said))
