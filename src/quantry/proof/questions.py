"""Prompts and tasks for the 16-bit model and for the artefact, with one model in memory at a time."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from quantry.blockwise import walk
from quantry.engines.contract.catalogue import verifying
from quantry.errors import CheckpointError, QuantryError
from quantry.llamacpp.model import LlamaModel
from quantry.llamacpp.trial import check_loads
from quantry.proof.served.contract import ScoringEngine
from quantry.proof.served.engines import scoring_engine
from quantry.proof.served.llama_cpp import gguf_file
from quantry.proof.tasks import harness, prompts
from quantry.proof.tasks.answers import CONTEXT, Answers, LlamaAnswers, Prompts, TorchAnswers
from quantry.proof.tasks.harness import TaskResult
from quantry.proof.tasks.judge import JudgeEndpoint, judge
from quantry.proof.tasks.prompts import MAX_TOKENS, Prompt, tokens_of
from quantry.proof.text import Window
from quantry.quantizing.sources import ModelSource, tokenizer
from quantry.storage.reading import read_json
from quantry.types import Progress


class GenerationConfig(TypedDict, total=False):
    """What is read of generation_config.json."""

    eos_token_id: int | list[int] | None


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
    """One model's answers; `windows` are the prompts followed by its answers, of which the answers are scored."""

    texts: tuple[str, ...] = ()
    results: tuple[TaskResult, ...] = ()
    windows: tuple[Window, ...] = ()
    chats: bool = True  # False if the model has no chat template


def read_questions(
    file: Path | None, tasks: str | None, limit: int | None, max_tokens: int, endpoint: JudgeEndpoint | None
) -> Questions:
    """Reads the questions that the options describe, before any model runs.

    Raises QuantryError if there is a judge without prompts, or if answers may have no token.
    """
    if endpoint and not file:
        raise QuantryError("a judge compares answers to prompts, and there are none", fix="give --prompts FILE")
    if max_tokens < 1:
        raise QuantryError(f"--max-tokens is {max_tokens}", fix="give at least 1")
    names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
    if names:
        harness.check(names, limit)
    return Questions(tuple(prompts.read_prompts(file)) if file else (), names, limit, max_tokens, endpoint)


def ask(
    questions: Questions,
    model: AbstractContextManager[Answers],
    *,
    chats: bool = True,
    progress: Progress | None = None,
) -> Answered:
    """Asks one model everything; does not load it if there is nothing to ask.

    Without `chats` it is asked as a model without chat template: both models are given the same texts.
    """
    if not questions:
        return Answered()
    texts: tuple[str, ...] = ()
    results: list[TaskResult] = []
    with model as answers:
        if questions.prompts:
            most = questions.max_tokens
            texts = tuple(prompts.ask(questions.prompts, answers, max_tokens=most, chats=chats, progress=progress))
        if questions.tasks:
            results = harness.evaluate(answers, questions.tasks, limit=questions.limit, progress=progress)
        windows = tuple(_windows(questions.prompts, texts, answers))
        return Answered(texts, tuple(results), windows, answers.chats)


def compare_prompts(
    questions: Questions, base: Answered, quantized: Answered, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Returns the report on prompts, with the judge's verdict if there is one; None without prompts."""
    if not questions.prompts:
        return None
    report = asdict(prompts.compare(questions.prompts, base.texts, quantized.texts, chats=base.chats))
    if questions.judge:
        texts = [prompt.question for prompt in questions.prompts]
        report["judge"] = asdict(judge(texts, base.texts, quantized.texts, questions.judge, progress=progress))
    return report


def compare_tasks(base: Answered, quantized: Answered) -> dict[str, Any] | None:
    """Returns the report on tasks: task -> metric -> comparison; None without tasks."""
    report: dict[str, Any] = {}
    for row in harness.compare(base.results, quantized.results):
        report.setdefault(row.task, {})[row.metric] = asdict(row)
    return report or None


@contextmanager
def decoded_model(source: ModelSource, device: str) -> Iterator[Answers]:
    """Runs a model from its bytes in torch."""
    module, encoder, ends = _in_torch(source, device)
    yield TorchAnswers(module, encoder, ends=ends)


@contextmanager
def served_model(source: ModelSource, engine: str, python: Path | None, device: str) -> Iterator[Answers]:
    """Runs a model in the engine that serves it. One in another process only generates; torch scores choices."""
    if verifying()[engine].embedded:
        longest = source.config.get("max_position_embeddings") or CONTEXT
        check_loads(file := gguf_file(source.path))
        with LlamaModel(file, context=min(CONTEXT, longest)) as model:
            yield LlamaAnswers(model)
        return
    yield ProcessAnswers(*_in_torch(source, device), scoring_engine(engine, python), source.path)


class ProcessAnswers(TorchAnswers):
    """Answers that an engine in another process generates; torch scores choices and, with stops, generates."""

    def __init__(
        self, module: Module, tokenizer: PreTrainedTokenizerBase, ends: list[int], engine: ScoringEngine, artefact: Path
    ) -> None:
        super().__init__(module, tokenizer, ends=ends)
        self._engine, self._artefact = engine, artefact

    def generate(
        self, prompts: Prompts, max_tokens: int, stops: Sequence[str] = (), progress: Progress | None = None
    ) -> list[list[int]]:
        """Generates in the engine; with stops, which only tasks have, in torch, since the engine does not know them."""
        if stops:
            return super().generate(prompts, max_tokens, stops, progress)
        return self._engine.generate(self._artefact, prompts, max_tokens)


def _in_torch(source: ModelSource, device: str) -> tuple[Module, PreTrainedTokenizerBase, list[int]]:
    """Loads a model from its bytes in torch; returns it with its tokenizer and end tokens."""
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return walk.whole(source, device=device, dtype=dtype), tokenizer(source), _ends(source)


def _ends(source: ModelSource) -> list[int]:
    """Returns the end tokens of generation_config.json, which may be more than those of config.json."""
    file = source.path / "generation_config.json"
    ends = None
    if file.is_file():
        shape, fix = GenerationConfig, "copy it from the original model"
        ends = read_json(file, shape, fix=fix, error=CheckpointError).get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _windows(asked_prompts: Sequence[Prompt], texts: Sequence[str], answers: Answers) -> Iterator[Window]:
    """Yields each prompt followed by its answer, whose tokens are scored."""
    for prompt, text in zip(asked_prompts, texts, strict=True):
        before, after = tokens_of(prompt, answers), answers.encode(text, special=False)
        if before and after:
            yield Window((*before, *after), len(before))
