"""`quantry verify --kv`: what types of KV cache lose as served, by position, and how much of each fits this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry.devices.detect import device_here
from quantry.errors import QuantryError
from quantry.models.reader import open_checkpoint
from quantry.planning.cache_choice import CacheChoice, cache_choice
from quantry.planning.deployment import Deployment
from quantry.planning.memory.cache_room import cache_rooms
from quantry.planning.memory.footprint import base_cache
from quantry.proof.cache_loss import base_perplexity, cache_loss
from quantry.proof.prove import VerifyOptions
from quantry.proof.served.engines import scoring_engine
from quantry.proof.text import Window, load_texts, names_of
from quantry.proof.text import windows as cut
from quantry.proof.unchanged import unchanged
from quantry.quantizing.sources import open_source, tokenizer
from quantry.report.sizes import counted
from quantry.types import Checkpoint, Progress


@dataclass(frozen=True, slots=True)
class CacheJob:
    """What `--kv` asks for, checked: nothing has run yet."""

    artefact: str
    checkpoint: Checkpoint
    choice: CacheChoice
    python: Path | None
    text: str
    windows: list[Window]

    @property
    def words(self) -> str:
        windows = f"{counted(len(self.windows), 'window')} of {self.choice.context} tokens"
        return f"{windows}, KV cache of {', '.join(self.choice.caches)}"

    @property
    def deployment(self) -> Deployment:
        return Deployment(self.checkpoint, None, self.choice.engine, device_here())


def prepare(
    artefact: str, reference: str, options: VerifyOptions, kv: str | None, context: int | None
) -> CacheJob | None:
    """Returns what is to be measured; None if no cache is asked for.

    Windows hold as many tokens as those of the proof, and are at least one of each text. Raises QuantryError if the
    engine has no such cache, the context is beyond the model's, or a text has too few tokens for one window.
    """
    if kv is None and context is None:
        return None
    options.check_engine(artefact)
    checkpoint = open_checkpoint(artefact)
    choice = cache_choice(checkpoint, options.engine, kv, context)
    texts, count = load_texts(options.text), max(1, options.windows * options.length // choice.context)
    words, each = tokenizer(open_source(reference)), count if options.windows else None
    windows = [window for text in texts for window in cut(text, words, choice.context, each, option="--context")]
    return CacheJob(artefact, checkpoint, choice, options.engine_python, ", ".join(names_of(texts)), windows)


def measure(job: CacheJob, progress: Progress | None = None) -> dict[str, Any]:
    """Runs the artefact in its engine with the 16-bit cache and each of the others; names are those of the JSON."""
    base = base_cache(job.deployment)
    with unchanged(job.artefact):
        path = open_source(job.artefact).path
        engine = scoring_engine(job.choice.engine, job.python)
        served = engine.compare_caches(path, job.windows, base, job.choice.caches, progress=progress)
    start = job.windows[0].start
    return {
        "engine": served.engine,
        "version": served.version,
        "base": base,
        "text": {"name": job.text, "windows": len(job.windows), "length": job.choice.context},
        "perplexity": base_perplexity(next(iter(served.positions.values()))),
        "caches": {name: cache_loss(found, start, job.choice.context) for name, found in served.positions.items()},
        "room": _room(job, base),
        "notes": served.notes,
    }


def _room(job: CacheJob, base: str) -> Mapping[str, Any] | None:
    try:
        return cache_rooms(job.deployment, job.choice.context, tuple(dict.fromkeys((base, *job.choice.caches))))
    except QuantryError:  # a shape that the plan does not know is still measured
        return None
