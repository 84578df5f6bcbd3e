"""A model with the interface of lm-evaluation-harness. Imported when tasks run, since the harness is optional."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quantry.errors import QuantryError
from quantry.proof.tasks.answers import Answers, Pair
from quantry.types import Progress

MAX_TOKENS = 256  # of an answer, if the task does not say; as in the harness
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # synonyms in the harness


class LmEvalModel(TemplateLM):  # type: ignore[misc]
    """Encodes texts as the harness's own `hf` model does: context and continuation together, then cut apart."""

    def __init__(self, answers: Answers, progress: Progress | None = None) -> None:
        super().__init__()
        self.answers, self.progress = answers, progress
        self.failed = False  # True if an error came from the model and not from a task

    @property
    def eot_token_id(self) -> int:
        return self.answers.prefix

    @property
    def tokenizer_name(self) -> str:
        return type(self.answers).__name__

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.answers.encode(string, special=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([(before, after) for _texts, before, after in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Returns the log-probability of whole texts, in windows that each continue where the last one ended."""
        windows = [
            (number, make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.answers.context,
                context_len=1,
            )
        ]
        totals = [0.0] * len(requests)
        for (number, _), (score, _) in zip(windows, self._scores([pair for _, pair in windows]), strict=True):
            totals[number] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_settings(request.args[1]), []).append(number)
        answers: dict[int, str] = {}
        for (count, stops), numbers in groups.items():
            prompts = [self._prompt(requests[number], count) for number in numbers]
            with self._noting_failure():
                generated = self.answers.generate(prompts, count, stops, self.progress)
            whole = [self.answers.decode(tokens) for tokens in generated]
            texts = [text[: min((text.find(stop) for stop in stops if stop in text), default=None)] for text in whole]
            answers.update(zip(numbers, texts, strict=True))
        return [answers[number] for number in range(len(requests))]

    def _prompt(self, request: Instance, count: int) -> list[int]:
        room = self.answers.context - count
        if room < 1:
            raise QuantryError(
                f"{request.task_name} asks for {count} tokens in a context of {self.answers.context}",
                fix="set a smaller max_gen_toks in its generation_kwargs, or use a larger context",
            )
        return self.tok_encode(request.args[0])[-room:]

    def _scores(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        with self._noting_failure():
            return self.answers.loglikelihoods(pairs, self.progress)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.failed = True
            raise


def _settings(given: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Returns the longest answer and the stops of a request. Raises QuantryError if it samples."""
    if given.get("do_sample") and given.get("temperature", 1.0) != 0:
        raise QuantryError(
            "a task that samples gives another answer each time", fix="set do_sample: false in its generation_kwargs"
        )
    until = given.get("until") or ()
    count = next((int(given[name]) for name in LENGTHS if given.get(name) is not None), MAX_TOKENS)
    return count, tuple(stop for stop in ((until,) if isinstance(until, str) else until) if stop)
