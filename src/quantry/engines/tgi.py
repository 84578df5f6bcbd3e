"""Text Generation Inference: its launcher; in maintenance since December 2025."""

from collections.abc import Iterable

from quantry.engines.contract.boot_log import Facts, last
from quantry.engines.contract.command import (
    Command,
    Setting,
    check,
    explained,
    maybe,
    refuse,
    several,
    started_by,
    switch,
)
from quantry.engines.contract.options import LOOKUP, Serving

GUESSES = 2  # tokens guessed at a time where nobody says


def settings(serving: Serving) -> list[Setting]:
    longest = serving.context and serving.context - 1
    guesses = serving.draft_tokens or GUESSES if serving.speculative == LOOKUP else None
    prefix_cache = None if serving.prefix_cache is None else str(serving.prefix_cache).lower()
    return [
        Setting("--model-id", serving.model, "the folder"),
        Setting("--hostname", serving.host, "the address that it listens on; its own default is every address"),
        Setting("--port", serving.listening_port, "the port that it listens on"),
        *maybe("--max-input-tokens", longest, "the longest prompt: one token is left for the answer"),
        *maybe("--max-total-tokens", serving.context, "the longest sequence, prompt and answer"),
        *maybe("--max-concurrent-requests", serving.parallel, "requests that are taken at once; more are refused"),
        *several("--num-shard", serving.tensor_parallel, "every layer is cut into as many parts, one a device"),
        *maybe("--dtype", serving.dtype, "the type of activations"),
        *maybe("--kv-cache-dtype", serving.kv, "a smaller KV cache holds more tokens"),
        *maybe("--quantize", serving.quantization, "16-bit weights are quantized as they are loaded"),
        *maybe("--max-batch-prefill-tokens", serving.batch_tokens, "tokens of prompts in one step"),
        *maybe("--cuda-memory-fraction", serving.utilization, "the share of each device that it may fill"),
        *maybe("--speculate", guesses, "guesses are copied from the prompt"),
        *maybe("PREFIX_CACHING=", prefix_cache, "whether prompts that begin alike are read once"),
        *maybe("API_KEY=", serving.api_key, "requests need this key; in the environment it is in no list of processes"),
        *switch(serving.trust_remote_code, "--trust-remote-code", "code of the checkpoint is run, as was asked for"),
    ]


def command(serving: Serving) -> Command:
    """Returns `text-generation-launcher`, as in its container."""
    check(serving)
    if serving.speculative not in (None, LOOKUP):
        refuse(serving, speculative="use lookup here, or vLLM for a draft model")
    return started_by(("text-generation-launcher",), serving, settings(serving))


def explain(serving: Serving) -> list[tuple[str, str]]:
    return explained(serving, settings(serving))


def facts(lines: Iterable[str]) -> Facts:
    """Reads the launcher's log."""
    log = list(lines)
    whole = [" ".join(log)]  # its arguments are printed over several lines
    tokens = last(r"Setting max batch total tokens to (\d+)", log)
    context = last(r"max_total_tokens: Some\(\s*(\d+)", whole) or last(r"Maximum total tokens defaulted to (\d+)", log)
    method = last(r"quantize: Some\(\s*(\w+)", whole)
    return Facts(
        kv_cache_tokens=int(tokens.group(1)) if tokens else None,
        quantization=method.group(1).lower() if method else None,
        context=int(context.group(1)) if context else None,
        warnings=tuple(dict.fromkeys(line.partition("WARN")[2].strip() for line in log if " WARN " in line)),
    )
