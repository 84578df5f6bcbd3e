"""A model's answers: the log-probability of a continuation, and the text that it generates.

Two implementations share one interface: decoded weights in torch, and a GGUF file in llama.cpp. Each uses its own
tokenizer, so a file with a wrong vocabulary shows. Text is always generated greedily: two runs of the same model give
the same answer, so every difference comes from the models.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from quantry.errors import QuantryError, WeightError
from quantry.models import chat_template
from quantry.models.chat_template import Messages
from quantry.models.files import LocalFiles
from quantry.models.gguf import read_shards
from quantry.models.tokenizer import render_chat, template_of
from quantry.types import Progress

if TYPE_CHECKING:
    from quantry.llamacpp.model import LlamaModel

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and of a continuation
Inputs = dict[tuple[int, ...], list[int]]  # token ids to run -> the numbers of the pairs that they score
Prompts = Sequence[Sequence[int]]  # token ids

CONTEXT = 4096  # the default limit in tokens: logits of 128k would not fit in memory
LOGITS = 1 << 28  # numbers in the logits of one batch: 1 GiB of float32
FIRST_PIECE = 32  # tokens that llama.cpp generates before the first search for stops; each piece is twice as long
CONTROL = 3  # the token type of special tokens in GGUF


class Answers(ABC):
    """A model that scores continuations and answers prompts."""

    context: int  # the limit of question and answer together, in tokens
    prefix: int  # the token before a text without context
    chats: bool  # True if it has a chat template
    batch = 1  # prompts that are answered together

    @abstractmethod
    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns token ids, with the model's BOS and EOS if `special`; does not double a BOS in the text."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""

    @abstractmethod
    def chat(self, messages: Messages) -> str:
        """Renders messages with the model's chat template, ready for an answer."""

    @torch.inference_mode()
    def loglikelihoods(self, pairs: Sequence[Pair], progress: Progress | None = None) -> list[tuple[float, bool]]:
        """Returns, for each continuation, its log-probability and True if greedy generation would give it.

        A context that is too long is cut at its start.
        """
        inputs = _inputs(pairs, self.context)
        scores: dict[int, tuple[float, bool]] = {}
        for batch in self._batches(inputs, pairs):
            for tokens, rows in zip(batch, self._logits(batch, _longest(batch, inputs, pairs)), strict=True):
                scores.update((number, _score(rows, pairs[number][1])) for number in inputs[tokens])
            if progress:
                progress(len(scores), len(pairs), "scoring")
        return [scores[number] for number in range(len(pairs))]

    @torch.inference_mode()
    def generate(
        self, prompts: Prompts, max_tokens: int, stops: Sequence[str] = (), progress: Progress | None = None
    ) -> list[list[int]]:
        """Generates greedily: up to an end token, which is left out, or to the token that completes a stop."""
        _check_prompts(prompts, max_tokens, self.context)
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        answers: dict[int, list[int]] = {}
        for start in range(0, len(order), self.batch):
            numbers = order[start : start + self.batch]
            answers.update(zip(numbers, self._generated([prompts[n] for n in numbers], max_tokens, stops), strict=True))
            if progress:
                progress(len(answers), len(prompts), "writing")
        return [answers[number] for number in range(len(prompts))]

    def _batches(self, inputs: Inputs, pairs: Sequence[Pair]) -> Iterator[list[tuple[int, ...]]]:
        """Yields the inputs that are scored together."""
        yield from ([tokens] for tokens in inputs)

    @abstractmethod
    def _logits(self, batch: Prompts, keep: int) -> Tensor | Sequence[Tensor]:
        """Returns the last rows of logits, at least `keep`, for each input of a batch."""

    @abstractmethod
    def _generated(self, prompts: Prompts, max_tokens: int, stops: Sequence[str]) -> list[list[int]]:
        """Returns the answers to a batch of prompts."""


class TorchAnswers(Answers):
    """A transformers model in torch, with its tokenizer.

    `ends` are end tokens in addition to those of the model's configuration and tokenizer.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int | None = None,
        batch: int = 8,
        ends: Sequence[int] = (),
    ) -> None:
        self._module: Any = module.eval()
        self._tokenizer: Any = tokenizer
        self.batch = batch
        self._ends = sorted({*ends, *_ends(self._module, tokenizer)})
        self._can_cut_logits = "logits_to_keep" in signature(self._module.forward).parameters
        self.context = context or min(CONTEXT, _positions(self._module))
        self.chats = template_of(tokenizer) is not None
        self.prefix = _prefix(tokenizer.bos_token_id, [*_listed(tokenizer.eos_token_id), *self._ends])
        self._prefix_text = str(self._tokenizer.decode([self.prefix]))

    def encode(self, text: str, special: bool = True) -> list[int]:
        adds = special and not _begins(text, self._prefix_text)
        return list(self._tokenizer.encode(text, add_special_tokens=adds))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Messages) -> str:
        return render_chat(self._tokenizer, messages, generation=True)

    def _batches(self, inputs: Inputs, pairs: Sequence[Pair]) -> Iterator[list[tuple[int, ...]]]:
        """Yields inputs of one length, the longest first: without padding, neighbours cannot change a number."""
        rows = max(1, LOGITS // int(self._module.config.get_text_config().vocab_size))
        for length, same in groupby(sorted(inputs, key=len, reverse=True), key=len):
            group = list(same)
            kept = _longest(group, inputs, pairs) if self._can_cut_logits else length
            size = max(1, min(self.batch, rows // kept))
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _logits(self, batch: Prompts, keep: int) -> Tensor:
        options = {"logits_to_keep": keep} if self._can_cut_logits else {}
        ids = torch.tensor(batch, device=self._device)
        return self._module(input_ids=ids, use_cache=False, **options).logits[:, -keep:].float()  # type: ignore[no-any-return]

    def _generated(self, prompts: Prompts, max_tokens: int, stops: Sequence[str]) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        missing = [width - len(prompt) for prompt in prompts]
        pad = self._ends[0] if self._ends else 0  # masked before the prompt, cut off after the answer
        ids = torch.tensor([[pad] * n + list(prompt) for n, prompt in zip(missing, prompts, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in missing])
        settings = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=self._ends or None, pad_token_id=pad
        )
        with _without_generation_config(self._module):
            generated = self._module.generate(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([_finite]),
                stopping_criteria=StoppingCriteriaList([self._stopping(width, stops)]),
            )
        return [self._cut(row[width:], stops) for row in generated.tolist()]

    def _stopping(self, width: int, stops: Sequence[str]) -> Callable[..., Tensor]:
        def stopped(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            rows = [bool(stops) and _has_stop(row[width:], stops, self._spelled) for row in ids.tolist()]
            return torch.tensor(rows, device=ids.device)

        return stopped

    def _cut(self, tokens: list[int], stops: Sequence[str]) -> list[int]:
        """Drops what follows the end: padding, while other answers of the batch were still generated."""
        end = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        return _until_stop(tokens[:end], stops, self._spelled)

    def _spelled(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    @property
    def _device(self) -> torch.device:
        return next(self._module.parameters()).device  # type: ignore[no-any-return]


class LlamaAnswers(Answers):
    """A GGUF file in llama.cpp, with the tokenizer, template and end tokens that llama.cpp reads from it."""

    def __init__(self, model: "LlamaModel") -> None:
        metadata = read_shards(LocalFiles(model.path.parent), model.path.name, whole=True).metadata
        self._model = model
        types = metadata.get("tokenizer.ggml.token_type", ())
        listed = types if isinstance(types, list | tuple) else ()
        self._control = {token for token, type_ in enumerate(listed) if type_ == CONTROL}
        bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
        self._named = {f"{name}_token": "" if token is None else model.detokenize([token])
                       for name, token in (("bos", bos), ("eos", eos))}  # fmt: skip
        self.context = model.context
        self.chats = bool(model.chat_template)
        self.prefix = _prefix(bos, _listed(eos))
        self._prefix_text = model.detokenize([self.prefix])

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._model.tokenize(text, special and not _begins(text, self._prefix_text))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._model.detokenize([token for token in tokens if token not in self._control])

    def chat(self, messages: Messages) -> str:
        template = self._model.chat_template
        if not template:
            raise QuantryError("the model has no chat template", fix="give plain text instead of messages")
        return chat_template.render(template, messages, self._named, generation=True)

    def _logits(self, batch: Prompts, keep: int) -> Sequence[Tensor]:
        return [torch.from_numpy(self._model.logits(tokens)) for tokens in batch]

    def _generated(self, prompts: Prompts, max_tokens: int, stops: Sequence[str]) -> list[list[int]]:
        return [self._answer(prompt, max_tokens, stops) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], max_tokens: int, stops: Sequence[str]) -> list[int]:
        """Generates in growing pieces, so that an answer that stops early does not cost all of `max_tokens`."""
        answer: list[int] = []
        piece = FIRST_PIECE if stops else max_tokens
        while len(answer) < max_tokens:
            count = min(piece, max_tokens - len(answer))
            added = self._model.generate([*prompt, *answer], count)
            answer = _until_stop([*answer, *added], stops, self._model.detokenize)
            if len(added) < count or _has_stop(answer, stops, self._model.detokenize):
                break
            piece *= 2
        return answer


def _ends(module: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns all end tokens of config, generation config and tokenizer: chat models end a turn with another one."""
    places = (module.config.get_text_config(), getattr(module, "generation_config", None), tokenizer)
    return {token for place in places for token in _listed(getattr(place, "eos_token_id", None))}


def _positions(module: Any) -> int:
    return int(getattr(module.config.get_text_config(), "max_position_embeddings", None) or CONTEXT)


def _listed(tokens: Any) -> list[int]:
    several = tokens if isinstance(tokens, list | tuple) else [] if tokens is None else [tokens]
    return [int(token) for token in several]


def _prefix(bos: Any, ends: Sequence[int]) -> int:
    """Returns the BOS token, or in models without one the first end token, as lm-evaluation-harness does."""
    token = next(iter([*_listed(bos), *ends]), None)
    if token is None:
        raise QuantryError(
            "the tokenizer names neither a BOS nor an EOS token, so a text has nothing to start after",
            fix="name one in tokenizer_config.json",
        )
    return token


def _begins(text: str, prefix: str) -> bool:
    return bool(prefix) and text.startswith(prefix)


def _inputs(pairs: Sequence[Pair], context: int) -> Inputs:
    """Returns the distinct inputs of the model, each with the numbers of its pairs: one-token choices share theirs."""
    inputs: Inputs = {}
    for number, (before, after) in enumerate(pairs):
        if not before or not 0 < len(after) <= context:
            raise QuantryError(
                f"a continuation of {len(after)} tokens after {len(before)} cannot be scored in a context of {context}",
                fix="give at least one token of each, and a continuation that fits the context",
            )
        inputs.setdefault((*before, *after)[-context - 1 : -1], []).append(number)
    return inputs


def _longest(batch: Sequence[tuple[int, ...]], inputs: Inputs, pairs: Sequence[Pair]) -> int:
    return max(len(pairs[number][1]) for tokens in batch for number in inputs[tokens])


def _score(logits: Tensor, after: Sequence[int]) -> tuple[float, bool]:
    """Returns the continuation's log-probability, and True if every token is the likeliest, from the last logits."""
    logp = torch.log_softmax(logits[-len(after) :], dim=-1)
    tokens = torch.tensor(after, device=logp.device)
    total = float(logp.gather(1, tokens[:, None]).sum(dtype=torch.float32 if logp.is_mps else torch.float64))
    if total != total:
        raise _not_finite()
    return total, bool((logp.argmax(-1) == tokens).all())


def _finite(ids: Tensor, scores: Tensor) -> Tensor:
    if bool(torch.isnan(scores).any()):
        raise _not_finite()
    return scores


def _not_finite() -> WeightError:
    return WeightError(
        "the model's logits are not finite", fix="check its weights, or run it in float32: float16 may overflow"
    )


def _check_prompts(prompts: Prompts, max_tokens: int, context: int) -> None:
    for prompt in prompts:
        if not prompt or max_tokens < 1 or len(prompt) + max_tokens > context:
            raise QuantryError(
                f"a prompt of {len(prompt)} tokens and an answer of {max_tokens} do not fit a context of {context}",
                fix="shorten the prompt, allow fewer tokens for the answer (at least one), or use a larger context",
            )


def _has_stop(tokens: Sequence[int], stops: Sequence[str], spelled: Callable[[Sequence[int]], str]) -> bool:
    """Returns True if the text ends in a stop: a token has at least a byte, so the last few tokens are enough."""
    if not stops or not tokens:
        return False
    reach = max(len(stop.encode()) for stop in stops) + 4  # a character cut in two decodes to something else
    text = spelled(tokens[-reach:])
    return any(stop in text for stop in stops)


def _until_stop(tokens: list[int], stops: Sequence[str], spelled: Callable[[Sequence[int]], str]) -> list[int]:
    if not any(stop in spelled(tokens) for stop in stops):
        return tokens
    ends = (end for end in range(1, len(tokens)) if _has_stop(tokens[:end], stops, spelled))
    return tokens[: next(ends, len(tokens))]


@contextmanager
def _without_generation_config(module: Any) -> Iterator[None]:
    """Removes the model's generation_config for a while: its penalties and sampling are not those of other engines."""
    own = module.generation_config
    module.generation_config = GenerationConfig()
    try:
        yield
    finally:
        module.generation_config = own
