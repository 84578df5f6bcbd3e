"""The user's own prompts, put to the 16-bit model and to the quantized one, and how far their answers agree.

Prompts are JSON lines, one object each:

    {"prompt": "What is the capital of France?", "answer": "Paris"}
    {"text": "The capital of France is", "answer": "Paris"}
    {"messages": [{"role": "user", "content": "What is 2 plus 3?"}], "answer": ["5", "five"], "match": "exact"}

`prompt` goes through the chat template as a user's message, and is continued unchanged only by a model that has none;
`text` always is; `messages` always go through the template. `answer` (one text or several, any of which counts), `id`
and `match` are optional. "contains" (the default, since a model answers prose with
prose) accepts an answer anywhere in the generated text, "exact" only the answer alone. Comparison ignores case, white
space, and punctuation at the ends.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from quantry.errors import QuantryError
from quantry.proof.interval import Interval
from quantry.proof.tasks.answers import Answers
from quantry.proof.tasks.significance import Paired, mean, paired
from quantry.report.sizes import counted, percent
from quantry.types import Progress

Match = Literal["contains", "exact"]
MAX_TOKENS = 128
AGREEMENT = 0.85  # below this share, more bits or another group size are worth considering
KINDS = ("prompt", "text", "messages")
FIX = 'every line is an object with "prompt", "text" or "messages", and optionally "answer", "match" and "id"'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question: `text` for a model to continue, `messages` for a chat template; with both, the template first."""

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    answers: tuple[str, ...] = ()
    match: Match = "contains"

    @property
    def question(self) -> str:
        """The question as a person or a judge reads it."""
        if self.text is not None:
            return self.text
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The answers to one prompt; `base_correct` and `quantized_correct` are None if it has no expected answer."""

    id: str
    base: str
    quantized: str
    agree: bool
    base_correct: bool | None
    quantized_correct: bool | None


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Both models on the same prompts. `exact`, `contained` and `correct` are None if no prompt has an answer."""

    prompts: int
    with_answer: int
    agreement: Interval  # share of prompts that both models answer alike
    exact: Paired | None
    contained: Paired | None
    correct: Paired | None  # each prompt by its own `match`
    warnings: tuple[str, ...]
    records: tuple[PromptRecord, ...]


def read_prompts(file: Path | str) -> list[Prompt]:
    """Reads JSON lines. Raises QuantryError if they cannot be read, or have no prompt, a wrong field or an id twice."""
    path = Path(file)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise QuantryError(f"cannot read {path}: {error}", fix="give a file of JSON lines in UTF-8") from error
    prompts = [
        _prompt(line, f"{path}, line {number}", str(number)) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise QuantryError(f"{path} has no prompts", fix=FIX)
    name, count = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise QuantryError(f"{path} has the id {name} {count} times", fix="give each prompt a unique id, or none")
    return prompts


def ask(
    prompts: Sequence[Prompt],
    answers: Answers,
    *,
    max_tokens: int = MAX_TOKENS,
    chats: bool = True,
    progress: Progress | None = None,
) -> list[str]:
    """Returns a model's answer to each prompt; without `chats` a prompt that has a text is not put as a chat.

    Raises QuantryError if prompt and answer do not fit the context.
    """
    encoded = [tokens_of(prompt, answers, chats=chats) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not 0 < len(tokens) <= answers.context - max_tokens:
            raise QuantryError(
                f"prompt {prompt.id} has {counted(len(tokens), 'token')}; a context of {answers.context} with room for "
                f"an answer of {max_tokens} allows 1 to {answers.context - max_tokens}",
                fix="shorten the prompt, or allow fewer tokens for the answer",
            )
    return [answers.decode(tokens) for tokens in answers.generate(encoded, max_tokens, progress=progress)]


def tokens_of(prompt: Prompt, answers: Answers, *, chats: bool = True) -> list[int]:
    """Returns the tokens of a prompt, through the chat template if it has messages and the model a template."""
    is_chat = prompt.messages and (prompt.text is None or (chats and answers.chats))
    return answers.encode(answers.chat(prompt.messages) if is_chat else prompt.question)


def compare(
    prompts: Sequence[Prompt], base: Sequence[str], quantized: Sequence[str], *, chats: bool = True
) -> PromptReport:
    """Compares the answers of the 16-bit model and of the quantized one, prompt by prompt.

    `chats` says if prompts went through a chat template. An empty answer agrees with nothing.
    """
    records = [_record(*each) for each in zip(prompts, base, quantized, strict=True)]
    if not records:
        raise QuantryError("there are no prompts to compare", fix=FIX)
    expected = [each for each in zip(prompts, records, strict=True) if each[0].answers]
    agreement = mean([record.agree for record in records])
    correct = _paired([(record.base_correct, record.quantized_correct) for _, record in expected])
    return PromptReport(
        prompts=len(records),
        with_answer=len(expected),
        agreement=agreement,
        exact=_paired([_matches("exact", prompt, record) for prompt, record in expected]),
        contained=_paired([_matches("contains", prompt, record) for prompt, record in expected]),
        correct=correct,
        warnings=(*_warnings(agreement, correct), *_odd(prompts, records, chats=chats)),
        records=tuple(records),
    )


def normalized(text: str) -> str:
    """Returns a text in the form that is compared: lower case, single spaces, no punctuation at its ends."""
    words = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    stripped = re.sub(r"^[^\w+\-$€£]+|[^\w%°+#]+$", "", words)
    return stripped or words  # "?" and "?!" stay different


def is_match(written: str, answers: Sequence[str], match: Match) -> bool:
    """Returns True if a text equals one of the answers, or contains the words of one if `match` is "contains"."""
    text = normalized(written)
    return any(
        _contains(text, normalized(answer)) if match == "contains" else text == normalized(answer) for answer in answers
    )


def _contains(text: str, answer: str) -> bool:
    """Searches for whole words only: "5" is not in "15" nor in "5.2", and "no" is not in "know"."""
    return re.search(rf"(?<![\w])(?<!\d[.,]){re.escape(answer)}(?!\w)(?![.,]\d)", text) is not None


def _record(prompt: Prompt, base: str, quantized: str) -> PromptRecord:
    right = [is_match(text, prompt.answers, prompt.match) if prompt.answers else None for text in (base, quantized)]
    agree = bool(base.strip()) and normalized(base) == normalized(quantized)
    return PromptRecord(prompt.id, base, quantized, agree, *right)


def _matches(match: Match, prompt: Prompt, record: PromptRecord) -> tuple[bool, bool]:
    return is_match(record.base, prompt.answers, match), is_match(record.quantized, prompt.answers, match)


def _paired(pairs: Sequence[tuple[bool | None, bool | None]]) -> Paired | None:
    return paired([bool(first) for first, _ in pairs], [bool(second) for _, second in pairs]) if pairs else None


def _warnings(agreement: Interval, correct: Paired | None) -> list[str]:
    warnings = []
    if agreement.value < AGREEMENT:
        warnings.append(
            f"{percent(agreement.value)} of the answers are those of the 16-bit model, less than "
            f"{percent(AGREEMENT)}; consider more bits or smaller groups"
        )
    if correct and correct.quantized < AGREEMENT * correct.base:
        warnings.append(
            f"{percent(correct.quantized)} of the quantized model's answers are right, and {percent(correct.base)} of "
            f"the 16-bit model's: less than {percent(AGREEMENT)} as often; consider more bits or smaller groups"
        )
    return warnings


def _odd(prompts: Sequence[Prompt], records: Sequence[PromptRecord], *, chats: bool) -> list[str]:
    """Says what makes answers worth less than they look."""
    odd = []
    empty = sum(not (record.base.strip() and record.quantized.strip()) for record in records)
    if empty:
        odd.append(f"{empty} of {len(records)} prompts got an empty answer, which counts as a different one")
    plain = sum(bool(prompt.messages) and prompt.text is not None for prompt in prompts)
    if plain and not chats:
        odd.append(f"the model has no chat template: {counted(plain, 'prompt')} went to it as text to continue")
    return odd


def _prompt(line: str, where: str, number: str) -> Prompt:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise QuantryError(f"{where} is not JSON: {error}", fix=FIX) from error
    if not isinstance(row, dict) or sum(kind in row for kind in KINDS) != 1:
        raise QuantryError(f'{where} needs either "prompt", "text" or "messages"', fix=FIX)
    strange = sorted(set(row) - {*KINDS, "answer", "match", "id"})
    if strange:
        raise QuantryError(f"{where} has the unknown field {strange[0]}", fix=FIX)
    match = row.get("match", "contains")
    if match not in get_args(Match):
        raise QuantryError(f"{where} has match {match!r}", fix='"match" is "contains" or "exact"')
    given = row.get("id", number)
    if not isinstance(given, str | int):
        raise QuantryError(f"{where} has an id that is not text: {given!r}", fix=FIX)
    return Prompt(str(given), _text(row, where), _messages(row, where), _answers(row, where), match)


def _text(row: Mapping[str, Any], where: str) -> str | None:
    if "messages" in row:
        return None
    text = row.get("prompt", row.get("text"))
    if not isinstance(text, str) or not text:
        raise QuantryError(f"{where} has a prompt that is not text", fix=FIX)
    return text


def _messages(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    if "prompt" in row:
        return ({"role": "user", "content": row["prompt"]},)
    messages = row.get("messages", [])
    is_right = isinstance(messages, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    )
    if not is_right or (not messages and "messages" in row):
        raise QuantryError(
            f"{where} has messages that are not a list of roles and contents",
            fix='write them as [{"role": "user", "content": "..."}]',
        )
    return tuple(messages)


def _answers(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    given = row.get("answer", [])
    answers = given if isinstance(given, list) else [given]
    if not all(isinstance(answer, str) and answer.strip() for answer in answers) or ("answer" in row and not answers):
        raise QuantryError(f"{where} has an answer that is not text", fix='"answer" is a text or a list of texts')
    return tuple(answers)
