"""Prompts and tasks put to the 16-bit model and to the artefact, one model in memory at a time."""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quantry.blockwise import walk
from quantry.engines.contract.catalogue import verifying
from quantry.errors import QuantryError
from quantry.llamacpp.model import Model
from quantry.proof import served
from quantry.proof.served.llama_cpp import gguf_file
from quantry.proof.sources import ModelSource, tokenizer
from quantry.proof.tasks import harness, prompts
from quantry.proof.tasks.answers import CONTEXT, Answers, LlamaAnswers, TorchAnswers
from quantry.proof.tasks.harness import TaskResult
from quantry.proof.tasks.judge import JudgeEndpoint, judge
from quantry.proof.tasks.prompts import MAX_TOKENS, Prompt
from quantry.proof.text import Window
from quantry.types import Progress


@dataclass(frozen=True, slots=True)
class Questions:
    """What both models are asked."""

    prompts: tuple[Prompt, ...] = ()
    tasks: tuple[str, ...] = ()
    limit: int | None = None  # questions of each task
    max_tokens: int = MAX_TOKENS
    judge: JudgeEndpoint | None = None

    def __bool__(self) -> bool:
        return bool(self.prompts or self.tasks)


@dataclass(frozen=True, slots=True)
class Answered:
    """What one model made of them; `windows` are prompts with its answers behind them, which are what is scored."""

    texts: tuple[str, ...]
    results: tuple[TaskResult, ...]
    windows: tuple[Window, ...]


def questions(
    file: Path | None, tasks: str | None, limit: int | None, max_tokens: int, endpoint: JudgeEndpoint | None
) -> Questions:
    """The questions that the options describe, read before anything is run."""
    if endpoint and not file:
        raise QuantryError("a judge compares answers to prompts, and there are none", fix="give --prompts FILE")
    if max_tokens < 1:
        raise QuantryError(f"answers of {max_tokens} tokens are none", fix="give --max-tokens of at least 1")
    names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
    return Questions(tuple(prompts.read_prompts(file)) if file else (), names, limit, max_tokens, endpoint)


def put(asked: Questions, model: AbstractContextManager[Answers], progress: Progress | None = None) -> Answered:
    """Asks one model everything; it is not even loaded when there is nothing to ask."""
    if not asked:
        return Answered((), (), ())
    texts: tuple[str, ...] = ()
    with model as answers:
        if asked.prompts:
            texts = tuple(prompts.ask(asked.prompts, answers, max_tokens=asked.max_tokens, progress=progress))
        results = harness.evaluate(answers, asked.tasks, limit=asked.limit, progress=progress) if asked.tasks else []
        return Answered(texts, tuple(results), tuple(_windows(asked.prompts, texts, answers)))


def compare(
    asked: Questions, base: Answered, quantized: Answered, progress: Progress | None = None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The reports on prompts and on tasks."""
    told = None
    if asked.prompts:
        told = prompts.compare(asked.prompts, base.texts, quantized.texts).to_dict()
        if asked.judge:
            words = [prompt.question for prompt in asked.prompts]
            told["judge"] = judge(words, base.texts, quantized.texts, asked.judge, progress=progress).to_dict()
    found = harness.compare(base.results, quantized.results) if asked.tasks else []
    tasks: dict[str, Any] = {}
    for row in found:
        tasks.setdefault(row.task, {})[row.metric] = asdict(row)
    return told, tasks or None


@contextmanager
def decoded(source: ModelSource, device: str) -> Iterator[Answers]:
    """A model run from its bytes in torch."""
    exact = torch.device(device).type == "cpu"
    dtype = torch.float32 if exact else torch.bfloat16
    yield TorchAnswers(walk.whole(source, device=device, dtype=dtype), tokenizer(source), ends=_ends(source))


@contextmanager
def in_engine(source: ModelSource, engine: str, python: Path | None, device: str) -> Iterator[Answers]:
    """A model in the engine that serves it. vLLM and transformers only write; what is scored is the decoded model."""
    if verifying()[engine].embedded:
        longest = source.config.get("max_position_embeddings") or CONTEXT
        with Model(gguf_file(source.path), context=min(CONTEXT, longest)) as model:
            yield LlamaAnswers(model)
        return
    with decoded(source, device) as answers:
        yield _Written(answers, source.path, engine, python)


class _Written:
    """Answers of a model whose text is written by an engine in another process."""

    def __init__(self, answers: Answers, artefact: Path, engine: str, python: Path | None) -> None:
        self._answers, self._artefact, self._engine, self._python = answers, artefact, engine, python
        self.context, self.prefix = answers.context, answers.prefix
        self.encode, self.decode, self.chat = answers.encode, answers.decode, answers.chat
        self.loglikelihoods = answers.loglikelihoods

    def generate(
        self,
        asked: Sequence[Sequence[int]],
        max_tokens: int,
        stops: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """Tasks stop at texts of their own, which an engine is not told: those are written by the decoded model."""
        if stops:
            return self._answers.generate(asked, max_tokens, stops, progress)
        return served.engine(self._engine).generate(self._artefact, asked, max_tokens, python=self._python)


def _ends(source: ModelSource) -> list[int]:
    """The tokens that end a text by generation_config.json, which may be more than config.json names."""
    file = source.path / "generation_config.json"
    ends = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _windows(asked: Sequence[Prompt], texts: Sequence[str], answers: Answers) -> Iterator[Window]:
    """Each prompt with the answer behind it; the answer's tokens are scored."""
    for prompt, text in zip(asked, texts, strict=True):
        before = answers.encode(answers.chat(prompt.messages) if prompt.text is None else prompt.text)
        after = answers.encode(text, special=False)
        if before and after:
            yield Window((*before, *after), len(before))
