"""The options of `quantry serve`."""

from dataclasses import dataclass
from pathlib import Path

from quantry.engines.contract.serving import HOST


@dataclass(frozen=True, slots=True)
class Options:
    """All that can be asked of a server beside its model; None leaves a thing to Quantry or to the engine."""

    engine: str | None = None
    host: str = HOST
    port: int | None = None  # 0 takes one that is free
    api_key: str | None = None
    name: str | None = None  # that requests ask for
    context: int | None = None  # tokens of one sequence
    parallel: int | None = None  # sequences at once
    kv: str | None = None  # type of the KV cache
    draft: str | Path | None = None  # a smaller model that guesses
    lookup: bool = False  # guesses are copied from the prompt
    draft_tokens: int | None = None  # guesses at a time
    prefix_cache: bool | None = None
    chunked_prefill: bool | None = None
    batch_tokens: int | None = None
    threads: int | None = None
    offload_layers: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    nodes: int = 1
    head: str | None = None
    utilization: float | None = None
    cache_gib: int | None = None
    dtype: str | None = None
    quantization: str | None = None  # of 16-bit weights as the engine loads or exports them
    eager: bool = False
    trust_remote_code: bool = False
    engine_python: Path | None = None
    engine_bin: Path | None = None
    engine_version: str | None = None
    image: str | None = None
    extra: tuple[str, ...] = ()  # words for the engine itself
