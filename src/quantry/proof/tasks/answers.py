"""What a model says when asked: the log-probability of a continuation, and the text it would write itself.

Two models, one interface: decoded weights in torch, and a GGUF file in llama.cpp, each with its own tokenizer, so that
a file whose vocabulary was written wrongly is found out. Text is always written greedily: two runs of the same model
give the same answer, and a difference between two models is theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.utils.chat_template_utils import render_jinja_template

from quantry.errors import QuantryError, WeightError
from quantry.models.files import LocalFiles
from quantry.models.gguf import read_shards
from quantry.types import Progress

if TYPE_CHECKING:
    from quantry.llamacpp.model import Model

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and of what may follow it
Messages = Sequence[Mapping[str, Any]]

CONTEXT = 4096  # tokens that a model is asked with at most, unless told: logits of 128k would not fit
LOGITS = 1 << 28  # numbers in the logits of one batch: 1 GiB of float32
FIRST_PIECE = 32  # tokens llama.cpp writes before stops are looked for; each next piece is twice as long
CONTROL = 3  # the token type of special tokens in GGUF


class Answers(Protocol):
    """A model that can be asked."""

    @property
    def context(self) -> int:
        """Tokens that a question and its answer may have together."""

    @property
    def prefix(self) -> int:
        """The token that stands before a text without context."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids, with those the model wants at the ends if `special`; a BOS in the text is not doubled."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""

    def chat(self, messages: Messages, answer_begun: bool = False) -> str:
        """Messages in the model's own chat template; `answer_begun`: the last one is to be gone on with."""

    def loglikelihoods(self, pairs: Sequence[Pair], progress: Progress | None = None) -> list[tuple[float, bool]]:
        """Of each continuation: its log-probability after its context, and whether greedy writing would give it.

        A context too long is cut at its start.
        """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stops: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """The tokens that greedy writing adds: up to a token that ends the text, without it, or just past a stop."""


class TorchAnswers:
    """A transformers model in torch, with its tokenizer.

    `ends` are token ids that end a text besides those the model's configuration and tokenizer name.
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
        self._batch = batch
        self._ends = sorted({*ends, *_ends(self._module, tokenizer)})
        self._keeps = "logits_to_keep" in signature(self._module.forward).parameters
        self.context = context or min(CONTEXT, _positions(self._module))
        self.prefix = _prefix(tokenizer.bos_token_id, [*_listed(tokenizer.eos_token_id), *self._ends])
        self._prefix_text = str(self._tokenizer.decode([self.prefix]))

    def encode(self, text: str, special: bool = True) -> list[int]:
        adds = special and not _begins(text, self._prefix_text)
        return list(self._tokenizer.encode(text, add_special_tokens=adds))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Messages, answer_begun: bool = False) -> str:
        template = self._tokenizer.chat_template
        with _template_errors(template):
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=not answer_begun,
                    continue_final_message=answer_begun,
                )
            )

    @torch.inference_mode()
    def loglikelihoods(self, pairs: Sequence[Pair], progress: Progress | None = None) -> list[tuple[float, bool]]:
        inputs = _inputs(pairs, self.context)
        found: dict[int, tuple[float, bool]] = {}
        for batch in self._batches(inputs, pairs):
            keep = max(len(pairs[number][1]) for tokens in batch for number in inputs[tokens])
            for tokens, rows in zip(batch, self._logits(batch, keep), strict=True):
                found.update((number, _score(rows, pairs[number][1])) for number in inputs[tokens])
            if progress:
                progress(len(found), len(pairs), "scoring")
        return [found[number] for number in range(len(pairs))]

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stops: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[list[int]]:
        for prompt in prompts:
            _check_room(prompt, max_tokens, self.context)
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        found: dict[int, list[int]] = {}
        for start in range(0, len(order), self._batch):
            numbers = order[start : start + self._batch]
            found.update(zip(numbers, self._written([prompts[n] for n in numbers], max_tokens, stops), strict=True))
            if progress:
                progress(len(found), len(prompts), "writing")
        return [found[number] for number in range(len(prompts))]

    def _batches(
        self, inputs: Mapping[tuple[int, ...], list[int]], pairs: Sequence[Pair]
    ) -> Iterator[list[tuple[int, ...]]]:
        """Inputs of one length together, the longest first: no padding, so that neighbours cannot change a number."""
        rows = max(1, LOGITS // int(self._module.config.get_text_config().vocab_size))
        for length, same in groupby(sorted(inputs, key=len, reverse=True), key=len):
            group = list(same)
            kept = (
                max(len(pairs[number][1]) for tokens in group for number in inputs[tokens]) if self._keeps else length
            )
            size = max(1, min(self._batch, rows // kept))
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _logits(self, batch: Sequence[Sequence[int]], keep: int) -> Tensor:
        wanted = {"logits_to_keep": keep} if self._keeps else {}
        ids = torch.tensor(batch, device=self._device)
        return self._module(input_ids=ids, use_cache=False, **wanted).logits[:, -keep:].float()  # type: ignore[no-any-return]

    def _written(self, prompts: Sequence[Sequence[int]], max_tokens: int, stops: Sequence[str]) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        missing = [width - len(prompt) for prompt in prompts]
        pad = self._ends[0] if self._ends else 0  # masked before the prompt, cut off after the answer
        ids = torch.tensor([[pad] * n + list(prompt) for n, prompt in zip(missing, prompts, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in missing])
        settings = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=self._ends or None, pad_token_id=pad
        )
        with _without_own_settings(self._module):
            written = self._module.generate(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([_finite]),
                stopping_criteria=StoppingCriteriaList([self._stopping(width, stops)]),
            )
        return [self._cut(row[width:], stops) for row in written.tolist()]

    def _stopping(self, width: int, stops: Sequence[str]) -> Callable[..., Tensor]:
        def stopped(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            rows = [bool(stops) and _has_stop(row[width:], stops, self._spelled) for row in ids.tolist()]
            return torch.tensor(rows, device=ids.device)

        return stopped

    def _cut(self, tokens: list[int], stops: Sequence[str]) -> list[int]:
        """Without what follows the end: padding, while others of the batch were still written."""
        end = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        return _until_stop(tokens[:end], stops, self._spelled)

    def _spelled(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    @property
    def _device(self) -> torch.device:
        return next(self._module.parameters()).device  # type: ignore[no-any-return]


class LlamaAnswers:
    """A GGUF file in llama.cpp, with the tokenizer, template and end tokens that llama.cpp finds in it."""

    def __init__(self, model: "Model") -> None:
        metadata = read_shards(LocalFiles(model.path.parent), model.path.name, whole=True).metadata
        self._model = model
        self._control = {token for token, kind in enumerate(_types(metadata)) if kind == CONTROL}
        bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
        self._named = {f"{name}_token": "" if token is None else model.detokenize([token])
                       for name, token in (("bos", bos), ("eos", eos))}  # fmt: skip
        self.context = model.context
        self.prefix = _prefix(bos, _listed(eos))
        self._prefix_text = model.detokenize([self.prefix])

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._model.tokenize(text, special and not _begins(text, self._prefix_text))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._model.detokenize([token for token in tokens if token not in self._control])

    def chat(self, messages: Messages, answer_begun: bool = False) -> str:
        template = self._model.chat_template
        with _template_errors(template):
            render: Any = render_jinja_template  # its annotation forgets that it returns a pair
            rendered, _ = render(
                [[dict(message) for message in messages]],
                chat_template=template,
                add_generation_prompt=not answer_begun,
                continue_final_message=answer_begun,
                **self._named,
            )
        return str(rendered[0])

    def loglikelihoods(self, pairs: Sequence[Pair], progress: Progress | None = None) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        for tokens, numbers in _inputs(pairs, self.context).items():
            logits = torch.from_numpy(self._model.logits(tokens))
            found.update((number, _score(logits, pairs[number][1])) for number in numbers)
            if progress:
                progress(len(found), len(pairs), "scoring")
        return [found[number] for number in range(len(pairs))]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stops: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[list[int]]:
        for prompt in prompts:
            _check_room(prompt, max_tokens, self.context)
        found = []
        for prompt in prompts:
            found.append(self._written(prompt, max_tokens, stops))
            if progress:
                progress(len(found), len(prompts), "writing")
        return found

    def _written(self, prompt: Sequence[int], max_tokens: int, stops: Sequence[str]) -> list[int]:
        """In growing pieces, so that an answer that stops early does not cost all of `max_tokens`."""
        found: list[int] = []
        piece = FIRST_PIECE if stops else max_tokens
        while len(found) < max_tokens:
            count = min(piece, max_tokens - len(found))
            added = self._model.generate([*prompt, *found], count)
            found = _until_stop([*found, *added], stops, self._model.detokenize)
            if len(added) < count or _has_stop(found, stops, self._model.detokenize):
                break
            piece *= 2
        return found


def _ends(module: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end a text, by whatever names one: chat models end a turn with a token of its own."""
    places = (module.config.get_text_config(), getattr(module, "generation_config", None), tokenizer)
    return {token for place in places for token in _listed(getattr(place, "eos_token_id", None))}


def _positions(module: Any) -> int:
    return int(getattr(module.config.get_text_config(), "max_position_embeddings", None) or CONTEXT)


def _listed(tokens: Any) -> list[int]:
    return (
        [] if tokens is None else [int(token) for token in (tokens if isinstance(tokens, list | tuple) else [tokens])]
    )


def _prefix(bos: Any, ends: Sequence[int]) -> int:
    """BOS, or in models without one the end of a text before, as lm-evaluation-harness does."""
    found = next(iter([*_listed(bos), *ends]), None)
    if found is None:
        raise QuantryError(
            "the tokenizer names neither a BOS nor an EOS token, so a text has nothing to start after",
            fix="name one in tokenizer_config.json",
        )
    return found


def _begins(text: str, prefix: str) -> bool:
    return bool(prefix) and text.startswith(prefix)


def _types(metadata: Mapping[str, Any]) -> Sequence[int]:
    found = metadata.get("tokenizer.ggml.token_type", ())
    return found if isinstance(found, list | tuple) else ()


@contextmanager
def _template_errors(template: str | Mapping[str, str] | None) -> Iterator[None]:
    if not template:
        raise QuantryError("the model has no chat template", fix="give a prompt as text instead of messages")
    try:
        yield
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise QuantryError(
            f"the model's chat template takes no such messages: {error}",
            fix="give messages of the roles user and assistant in turns, each with its content",
        ) from error


def _inputs(pairs: Sequence[Pair], context: int) -> dict[tuple[int, ...], list[int]]:
    """What the model is run on, each once, with the numbers of the pairs it decides: one-token choices share theirs."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, (before, after) in enumerate(pairs):
        if not before or not 0 < len(after) <= context:
            raise QuantryError(
                f"a continuation of {len(after)} tokens after {len(before)} cannot be scored in a context of {context}",
                fix="give at least one token of each, and a continuation that fits the context",
            )
        found.setdefault((*before, *after)[-context - 1 : -1], []).append(number)
    return found


def _score(logits: Tensor, after: Sequence[int]) -> tuple[float, bool]:
    """The continuation's log-probability and whether each token is the likeliest; its logits are the last rows."""
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


def _check_room(prompt: Sequence[int], max_tokens: int, context: int) -> None:
    if not prompt or max_tokens < 1 or len(prompt) + max_tokens > context:
        raise QuantryError(
            f"a prompt of {len(prompt)} tokens and {max_tokens} to be written do not fit a context of {context}",
            fix="shorten the prompt, write fewer tokens, at least one, or use a larger context",
        )


def _has_stop(tokens: Sequence[int], stops: Sequence[str], spelled: Callable[[Sequence[int]], str]) -> bool:
    """Whether the end of the text holds a stop: a token has at least a byte, so the last few tokens are enough."""
    if not stops or not tokens:
        return False
    reach = max(len(stop.encode()) for stop in stops) + 4  # a character cut in two decodes to something else
    text = spelled(tokens[-reach:])
    return any(stop in text for stop in stops)


def _until_stop(tokens: list[int], stops: Sequence[str], spelled: Callable[[Sequence[int]], str]) -> list[int]:
    """Tokens up to the one that completes the first stop."""
    if not any(stop in spelled(tokens) for stop in stops):
        return tokens
    ends = (end for end in range(1, len(tokens)) if _has_stop(tokens[:end], stops, spelled))
    return tokens[: next(ends, len(tokens))]


@contextmanager
def _without_own_settings(module: Any) -> Iterator[None]:
    """A model's generation_config (penalties, sampling) would fill whatever is not set: no other engine knows it."""
    own = module.generation_config
    module.generation_config = GenerationConfig()
    try:
        yield
    finally:
        module.generation_config = own
