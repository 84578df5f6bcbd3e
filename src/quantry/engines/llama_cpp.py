"""llama.cpp: `llama-server`, or the same words for the server inside xllamacpp."""

import re
from collections.abc import Iterable
from pathlib import Path

from quantry.engines.contract.boot_log import Facts, last, size, until
from quantry.engines.contract.command import Command, Setting, check, explained, maybe, refuse, started_by, switch
from quantry.engines.contract.options import LOOKUP, Serving

ALL_LAYERS = 999
HUB_GGUF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+(?<!\.gguf))(:((?P<file>[^:]+\.gguf)|[\w.-]+))?", re.ASCII)
WARNING = re.compile(r"[\d.]+ W ")  # how a line of the log starts
# Lookup, measured with a 135M model in Q8_0 on a CPU: repeating a text, editing code, rewriting, extracting lines; 395
# tokens. These sizes need 112 steps and 79 % of 359 guesses are right. llama.cpp's own, 12 and 48, need 225 steps,
# guess nothing in the rewritten text, and lose time to long wrong guesses in the lines; runs of 2 or 3 guess more, and
# more often wrongly. Where fewer tokens are guessed than must match, ngram-simple guesses nothing at all.
MATCH, GUESSES = 4, 8


def settings(serving: Serving) -> list[Setting]:
    return [
        *_model(serving.model),
        Setting("--host", serving.host, "the address that it listens on"),
        Setting("--port", serving.listening_port, "the port that it listens on"),
        *_slots(serving),
        *_places(serving),
        *_cache(serving),
        *_guessing(serving),
        *maybe("--alias", serving.name, "what requests call the model"),
        *maybe(
            "LLAMA_API_KEY=",
            serving.api_key,
            "requests need this key; in the environment it is in no list of processes",
        ),
        Setting("--jinja", None, "the chat template of the model, with tools"),
        Setting("--metrics", None, "counters for quantry bench and for Prometheus"),
    ]


def command(serving: Serving) -> Command:
    """Returns `llama-server` with its words; nothing is run before it."""
    check(serving)
    if serving.chunked_prefill is False:
        refuse(serving, chunked_prefill="leave it out: prompts are always read in pieces (--ubatch-size)")
    return started_by(("llama-server",), serving, settings(serving))


def explain(serving: Serving) -> list[tuple[str, str]]:
    return explained(serving, settings(serving))


def facts(lines: Iterable[str]) -> Facts:
    """Reads the log of its start, which has the sizes of buffers from verbosity 4 on."""
    log = until(r"listening on http", lines)
    build = last(r"build: (\d{3,}) ", log) or last(r"build_info: (b[1-9]\d*)", log)
    slots = last(r"n_slots = (\d+), n_ctx_slot = (\d+)", log)
    cells = last(r"n_ctx += (\d+)", [line for line in log if "llama_context:" in line])
    file_type = last(r"file type += (.+?)\s*$", log)
    return Facts(
        version=f"b{build.group(1).removeprefix('b')}" if build else None,
        weights_bytes=_sum(log, "model buffer size"),
        kv_cache_tokens=int(cells.group(1)) if cells else None,
        kv_cache_bytes=_sum(log, "KV buffer size"),
        max_concurrency=float(slots.group(1)) if slots else None,
        quantization=file_type.group(1) if file_type else None,
        kernels=_buffers(log),
        context=int(slots.group(2)) if slots else None,
        warnings=tuple(dict.fromkeys(line.partition(" W ")[2].strip() for line in log if WARNING.match(line))),
    )


def _model(model: str) -> list[Setting]:
    """Returns the file, or what to download: a repository with the type or the name of a file."""
    hub = HUB_GGUF.fullmatch(model)
    if hub is None or Path(model).exists():
        return [Setting("--model", model, "the file, or the first of its parts")]
    if hub["file"]:
        return [Setting("--hf-repo", hub["repo"], "downloaded once"), Setting("--hf-file", hub["file"], "of those")]
    return [Setting("--hf-repo", model, "downloaded once: the repository, and the type of the file")]


def _slots(serving: Serving) -> list[Setting]:
    tokens = serving.context and serving.context * (serving.parallel or 1)
    return [
        *maybe("--ctx-size", tokens, "tokens of all slots together: the context times the sequences"),
        *maybe("--parallel", serving.parallel, "slots: sequences that are answered at once; more wait"),
        *maybe("--batch-size", serving.batch_tokens, "tokens of one step"),
        *maybe("--threads", serving.threads, "threads that compute: more than free cores slow it down"),
    ]


def _places(serving: Serving) -> list[Setting]:
    if serving.platform == "cpu" and serving.offload_layers is None and serving.host_experts is None:
        return []
    layers = ALL_LAYERS if serving.offload_layers is None else serving.offload_layers
    return [
        Setting("--n-gpu-layers", layers, "layers on the GPU; the others stay with the CPU"),
        *maybe("--n-cpu-moe", serving.host_experts, "blocks whose experts stay with the CPU, which reads few of them"),
    ]


def _cache(serving: Serving) -> list[Setting]:
    prompts = switch(
        serving.prefix_cache,
        "--cache-prompt",
        "prompts that begin alike are read once",
        "--no-cache-prompt",
        "every prompt is read in full",
    )
    prompts += maybe(
        "--cache-ram", serving.prompt_cache_mib, "MiB for prompts that are finished; by itself it would take 8192"
    )
    if serving.kv is None:
        return prompts
    return [
        Setting("--flash-attn", "on", "a quantized cache of values needs it"),
        Setting("--cache-type-k", serving.kv, "a smaller KV cache holds more tokens: keys"),
        Setting("--cache-type-v", serving.kv, "a smaller KV cache holds more tokens: values"),
        *prompts,
    ]


def _guessing(serving: Serving) -> list[Setting]:
    if serving.speculative is None:
        return []
    if serving.speculative == LOOKUP:
        guesses = serving.draft_tokens or GUESSES
        return [
            Setting("--spec-type", "ngram-simple", "guesses are copied from the text so far; answers stay the same"),
            Setting("--spec-ngram-simple-size-n", min(MATCH, guesses), "tokens that must have stood there before"),
            Setting("--spec-ngram-simple-size-m", guesses, "tokens guessed at a time"),
        ]
    return [
        Setting(
            "--model-draft", serving.speculative, "a smaller model guesses, this one checks; answers stay the same"
        ),
        Setting("--spec-type", "draft-simple", "guesses are those of the draft model"),
        *maybe("--spec-draft-n-max", serving.draft_tokens, "tokens guessed at a time"),
    ]


def _sum(log: list[str], what: str) -> int | None:
    """Returns the bytes of a buffer on all devices; a model that is loaded again replaces the earlier lines."""
    sizes = {
        match.group(1): size(*match.groups()[1:])
        for line in log
        if (match := last(rf"(\S+) {what} = +([\d.]+) (MiB)", [line]))
    }
    return sum(sizes.values()) if sizes else None


def _buffers(log: list[str]) -> tuple[str, ...]:
    """Returns the buffers that hold weights: repacked for the processor, mapped from the file, on a GPU."""
    names = (match.group(1) for line in log if (match := last(r"(\S+) model buffer size", [line])))
    return tuple(dict.fromkeys(names))
