"""A serving: everything that the command of an engine depends on."""

import ipaddress
from dataclasses import dataclass, field

from quantry.engines.contract.catalogue import engine

HOST = "127.0.0.1"
LOOKUP = "lookup"  # as `speculative`: guesses are copied from the prompt, no draft model


@dataclass(frozen=True, slots=True)
class Serving:
    """All that the command of an engine depends on; None leaves a thing to the engine."""

    model: str  # what the engine is given: a folder, a .gguf file or a hub id
    format: str  # gguf, compressed-tensors, gptq, awq, bitsandbytes, fp8, onnx; safetensors for 16 bit
    engine: str
    version: str
    platform: str = "cpu"  # cuda, rocm, xpu, metal, cpu
    host: str = HOST
    port: int | None = None
    api_key: str | None = field(default=None, repr=False)
    name: str | None = None  # that requests ask for
    context: int | None = None  # tokens of one sequence
    concurrency: int | None = None  # sequences at once, of one copy of the model
    kv: str = "auto"
    prefix_cache: bool | None = None
    chunked_prefill: bool | None = None
    batch_tokens: int | None = None  # of one step, prompts and answers together
    speculative: str | None = None  # a draft model's path, or LOOKUP
    draft_tokens: int | None = None  # guesses at a time
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    nodes: int = 1
    head: str | None = None  # address of the first node, where there are several
    offload_layers: int | None = None  # layers on the GPU; None is all
    threads: int | None = None
    utilization: float | None = None  # share of a device's memory
    cache_gib: int | None = None  # of the KV cache, where the engine is told a size
    prompt_cache_mib: int | None = None  # of host memory, for prompts that are finished (llama.cpp)
    dtype: str | None = None
    quantization: str | None = None  # of 16-bit weights as they are loaded
    bits: int | None = None  # of the weights, where it is known
    eager: bool = False  # no graphs, no compilation: starts sooner, answers slower
    trust_remote_code: bool = False
    built: str | None = None  # folder for what the engine makes of the model first; beside the model if None
    python: str = "python"  # of the engine's environment
    extra: tuple[str, ...] = ()  # words for the engine itself, as the user gave them

    @property
    def open_to_others(self) -> bool:
        """Whether other machines can reach it."""
        return not _is_loopback(self.host)

    @property
    def listening_port(self) -> int:
        """The port that was chosen, or the engine's usual one."""
        return self.port or engine(self.engine).server.port


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
