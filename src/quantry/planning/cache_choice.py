"""Which types of KV cache are compared, in which engine and at what length: checked from headers alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantry.engines.contract.catalogue import cache_types, scoring_name, verifying
from quantry.errors import QuantryError
from quantry.models.attention import context_length
from quantry.planning.memory.kv_cache import layers_of
from quantry.types import Checkpoint

CONTEXT = 8192  # tokens of a window unless others are asked for, if the model allows as many
BLOCK = 32  # numbers that ggml's types of cache store together
WHOLE = ("f32", "f16", "bf16")  # its types that store each number alone


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """Types of an engine's KV cache, and the tokens of a sequence."""

    engine: str
    caches: tuple[str, ...]
    context: int


def cache_choice(checkpoint: Checkpoint, engine: str | None, kv: str | None, context: int | None) -> CacheChoice:
    """Returns what `--kv` and `--context` ask for, of which one at least is given.

    Raises QuantryError if the engine has no such cache for the model, or the context is beyond the model's.
    """
    if kv is None:
        raise QuantryError(
            f"--context {context} is the length that a KV cache is measured at, and none is named",
            fix="add --kv q8_0, or use --length for the windows of the proof",
        )
    name = _engine(checkpoint, engine)
    caches = cache_types(name, kv)
    length = _length(checkpoint, context)
    if verifying()[name].embedded:
        _check_heads(checkpoint, caches)
    return CacheChoice(name, caches, length)


def _engine(checkpoint: Checkpoint, engine: str | None) -> str:
    """Returns the engine that serves the artefact. Raises QuantryError if none is known."""
    embedded = next((name for name, facts in verifying().items() if facts.embedded), None)
    name = scoring_name(engine) or (embedded if checkpoint.format == "gguf" else None)
    if name is None:
        raise QuantryError(
            f"a KV cache is measured in an engine, and none is named for {checkpoint.source}",
            fix="add --engine vllm, or quantize to a GGUF file, which llama.cpp measures",
        )
    return name


def _length(checkpoint: Checkpoint, context: int | None) -> int:
    longest = context_length(checkpoint.config)
    if context is None:
        return min(CONTEXT, longest or CONTEXT)
    if context < 2:
        raise QuantryError(f"--context is {context}", fix="give 2 or more, such as 8k")
    if longest is not None and context > longest:
        raise QuantryError(
            f"--context {context} is more than the {longest} tokens that {checkpoint.source} was made for",
            fix=f"use --context {longest} or less",
        )
    return context


def _check_heads(checkpoint: Checkpoint, caches: Sequence[str]) -> None:
    layers = [layer for layer in layers_of(checkpoint.config) if layer and layer.kind != "recurrent"]
    if not layers:
        raise QuantryError(f"{checkpoint.source} has no attention, so no KV cache", fix="leave --kv out")
    odd = next((size for layer in layers for size in (layer.key, layer.value) if size % BLOCK), None)
    blocks = next((cache for cache in caches if cache not in WHOLE), None)
    if odd and blocks:
        raise QuantryError(
            f"a KV cache of {blocks} stores {BLOCK} numbers together, and heads of {checkpoint.source} have {odd}",
            fix="leave --kv out: llama.cpp keeps the cache of this model in 16 bit",
        )
