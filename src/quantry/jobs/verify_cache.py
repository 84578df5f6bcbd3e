"""`quantry verify --kv`: what types of KV cache lose as served, by position, and how much of each fits this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry.devices.detect import device_here
from quantry.engines.contract.catalogue import cache_types, verifying
from quantry.errors import QuantryError
from quantry.models.attention import context_length
from quantry.models.reader import open_checkpoint
from quantry.planning.deployment import Deployment
from quantry.planning.memory.cache_room import cache_rooms
from quantry.planning.memory.footprint import base_cache
from quantry.planning.memory.kv_cache import layers_of
from quantry.proof.cache_loss import base_perplexity, cache_loss
from quantry.proof.prove import VerifyOptions
from quantry.proof.served.engines import scoring_engine
from quantry.proof.text import Window, load_text
from quantry.proof.text import windows as cut
from quantry.proof.unchanged import unchanged
from quantry.quantizing.sources import open_source, tokenizer
from quantry.types import Checkpoint, Progress

CONTEXT = 8192  # tokens of a window unless others are asked for, if the model allows as many
BLOCK = 32  # numbers that ggml's types of cache store together
WHOLE = ("f32", "f16", "bf16")  # its types that store each number alone


@dataclass(frozen=True, slots=True)
class CacheJob:
    """What `--kv` asks for, checked: nothing has run yet."""

    artefact: str
    checkpoint: Checkpoint
    engine: str
    python: Path | None
    caches: tuple[str, ...]
    context: int
    text: str
    windows: list[Window]

    @property
    def deployment(self) -> Deployment:
        return Deployment(self.checkpoint, None, self.engine, device_here())


def check_cache(artefact: str | Path, engine: str | None, kv: str | None, context: int | None) -> None:
    """Raises QuantryError for a cache that the artefact's engine does not have, or a context beyond the model's."""
    if asked := _asked(kv, context):
        _checked(open_checkpoint(artefact), engine, *asked)


def prepare(
    artefact: str, reference: str, options: VerifyOptions, kv: str | None, context: int | None
) -> CacheJob | None:
    """Returns what is to be measured; None if no cache is asked for.

    Windows hold as many tokens in all as those of the proof, and are at least one. Raises QuantryError if the engine
    has no such cache, the context is beyond the model's, or the text has too few tokens for one window.
    """
    if (asked := _asked(kv, context)) is None:
        return None
    checkpoint = open_checkpoint(artefact)
    engine, caches, length = _checked(checkpoint, options.engine, *asked)
    options.check_engine(artefact)
    text, count = load_text(options.text), max(1, options.windows * options.length // length)
    source = open_source(reference)
    windows = cut(text, tokenizer(source), length, count if options.windows else None, option="--context")
    return CacheJob(artefact, checkpoint, engine, options.engine_python, caches, length, text.name, windows)


def measure(job: CacheJob, progress: Progress | None = None) -> dict[str, Any]:
    """Runs the artefact in its engine with the 16-bit cache and each of the others; names are those of the JSON."""
    base = base_cache(job.deployment)
    with unchanged(job.artefact):
        path = open_source(job.artefact).path
        engine = scoring_engine(job.engine, job.python)
        served = engine.compare_caches(path, job.windows, base, job.caches, progress=progress)
    start = job.windows[0].start
    return {
        "engine": served.engine,
        "version": served.version,
        "base": base,
        "text": {"name": job.text, "windows": len(job.windows), "length": job.context},
        "perplexity": base_perplexity(next(iter(served.positions.values()))),
        "caches": {name: cache_loss(found, start, job.context) for name, found in served.positions.items()},
        "room": _room(job, base),
        "notes": served.notes,
    }


def _asked(kv: str | None, context: int | None) -> tuple[str, int | None] | None:
    if kv is None and context is not None:
        raise QuantryError(
            f"--context {context} is the length that a KV cache is measured at, and none is named",
            fix="add --kv q8_0, or use --length for the windows of the proof",
        )
    return None if kv is None else (kv, context)


def _checked(
    checkpoint: Checkpoint, engine: str | None, kv: str, context: int | None
) -> tuple[str, tuple[str, ...], int]:
    """Returns the engine, its types of cache and the length of windows. Raises QuantryError if one does not suit."""
    name = _engine(checkpoint, engine)
    caches = cache_types(name, kv)
    longest = context_length(checkpoint.config)
    length = min(CONTEXT, longest or CONTEXT) if context is None else context
    if length < 2:
        raise QuantryError(f"--context is {length}", fix="give 2 or more, such as 8k")
    if longest is not None and length > longest:
        raise QuantryError(
            f"a context of {length} is more than the {longest} tokens that {checkpoint.source} was made for",
            fix=f"use --context {longest} or less",
        )
    if verifying()[name].embedded:
        _check_heads(checkpoint, caches)
    return name, caches, length


def _engine(checkpoint: Checkpoint, engine: str | None) -> str:
    """Returns the engine that serves the artefact. Raises QuantryError if none is known."""
    embedded = next((name for name, facts in verifying().items() if facts.embedded), None)
    name = engine or (embedded if checkpoint.format == "gguf" else None)
    if name is None:
        raise QuantryError(
            f"a KV cache is measured in an engine, and none is named for {checkpoint.source}",
            fix="add --engine vllm, or quantize to a GGUF file, which llama.cpp measures",
        )
    return name


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


def _room(job: CacheJob, base: str) -> Mapping[str, Any] | None:
    try:
        return cache_rooms(job.deployment, job.context, tuple(dict.fromkeys((base, *job.caches))))
    except QuantryError:  # a shape that the plan does not know is still measured
        return None
