"""Engines that serve: the probabilities an engine gives to the reference's tokens, and what it writes, by its own kernels.

One file is one engine, with two functions:

- `score(artefact, windows, ids, *, python, length, progress) -> Served`: at every scored position of every window the
  log-probabilities of the reference's tokens `ids`, of the token that follows, and the likeliest token;
- `generate(artefact, prompts, max_tokens, *, python) -> list[list[int]]`: greedy tokens, without the one that ends the text.

llama.cpp is embedded, and has `tokenize` and `chat_template` besides, since it reads both from the file. vLLM and
transformers run in a process of their own (`_process.py`), in the `python` they are installed in, where the script
`inside/engines.py` speaks to them.
"""  # noqa: E501

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from quantry import registry
from quantry.proof.divergence import Array, Scores
from quantry.proof.text import Window
from quantry.types import Progress


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine said of the windows, in their order, and the bytes it took by its own account."""

    engine: str
    version: str
    scores: list[Scores]
    memory: Mapping[str, int] = field(default_factory=dict)  # weights, kv_cache, compute, as far as it tells them
    notes: tuple[str, ...] = ()


class Engine(Protocol):
    """What every file here offers."""

    def score(
        self,
        artefact: Path,
        windows: Sequence[Window],
        ids: Sequence[Array],
        *,
        python: Path | None = None,
        length: int | None = None,
        progress: Progress | None = None,
    ) -> Served: ...

    def generate(
        self, artefact: Path, prompts: Sequence[Sequence[int]], max_tokens: int, *, python: Path | None = None
    ) -> list[list[int]]: ...


def engine(name: str) -> Engine:
    """The engine of that name: llama.cpp, vllm or transformers."""
    return cast(Engine, registry.load("quantry.proof.served", name.replace(".", "-")))
