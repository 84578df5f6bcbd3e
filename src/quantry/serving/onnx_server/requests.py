"""Requests: what a client asks for, checked, and the errors that answer it.

What a request asks for is done or refused; nothing that would change the answer is ignored in silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]
USUAL_TOKENS = 16  # of a completion, as OpenAI has it; a chat goes on to the end of the context
STOPS = 16
LIKELIEST = 20  # tokens whose log-probabilities may be asked for at a position
GREEDY = 1e-5  # the temperature below which sampling is the likeliest token
# What changes an answer and is not done here, and the values that ask for nothing.
UNDONE: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "presence_penalty": (0,),
    "frequency_penalty": (0,), "tools": ([],), "functions": ([],), "response_format": ({"type": "text"},),
    "min_tokens": (0,), "min_p": (0,), "guided_json": (), "guided_regex": (), "guided_choice": (), "audio": (),
}  # fmt: skip


class RefusedError(Exception):
    """A request that is answered with an error, as OpenAI words it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def to_dict(self) -> Json:
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}


class GoneError(Exception):
    """The client has left, or the server ends."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class Tokenizing(Protocol):
    """What reading a request needs of the model."""

    name: str
    context: int
    vocabulary: int

    def encode(self, text: str, param: str) -> tuple[int, ...]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for completions or a chat that can be served."""

    prompts: tuple[tuple[int, ...], ...]
    chat: bool
    tokens: int  # of an answer, at most
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    seed: int | None = None
    repetition: float = 1.0
    stops: tuple[str, ...] = ()
    likeliest: int | None = None  # tokens at a position whose log-probabilities are given; None gives none
    as_ids: bool = False  # tokens in log-probabilities are named by their numbers
    ignore_eos: bool = False
    stream: bool = False
    usage: bool = True  # at the end of a stream

    def options(self, prompt: Sequence[int]) -> Json:
        """Returns the options of the library's search."""
        longest = len(prompt) + self.tokens
        chosen: Json = {"max_length": longest, "min_length": longest if self.ignore_eos else 0, "num_beams": 1}
        chosen["repetition_penalty"] = self.repetition
        if self.temperature < GREEDY:
            return chosen | {"do_sample": False}
        chosen |= {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return chosen | {"random_seed": -1 if self.seed is None else self.seed % (1 << 31)}


def read_request(body: Json, model: Tokenizing, *, chat: bool) -> CompletionRequest:
    """Reads and checks the body of a request; raises RefusedError for what is wrong or not supported."""
    _check_model(body, model)
    for name, idle in UNDONE.items():
        if (value := body.get(name)) is not None and value not in idle:
            raise RefusedError(400, f"{name} is not supported by this server: leave it out", param=name)
    prompts = (_conversation(body, model),) if chat else _prompts(body, model)
    stream = _flag(body, "stream")
    return CompletionRequest(
        prompts, chat, _tokens(body, prompts, model.context, chat=chat),
        temperature=_number(body, "temperature", 1.0, 0, 2),
        top_p=_number(body, "top_p", 1.0, 1e-6, 1),
        top_k=max(0, _whole(body, "top_k", 0, -1, 1 << 30)),
        seed=_whole(body, "seed", 0, -(1 << 63), 1 << 63) if body.get("seed") is not None else None,
        repetition=_number(body, "repetition_penalty", 1.0, 0.01, 10),
        stops=_stops(body),
        likeliest=_likeliest(body, chat=chat),
        as_ids=_flag(body, "return_tokens_as_token_ids"),
        ignore_eos=_flag(body, "ignore_eos"),
        stream=stream,
        usage=not stream or _include_usage(body),
    )  # fmt: skip


def _check_model(body: Json, model: Tokenizing) -> None:
    wanted = body.get("model")
    if wanted is not None and wanted != model.name:
        raise RefusedError(
            404, f"there is no model {wanted!r} here, only {model.name!r}", param="model", code="model_not_found"
        )


def _prompts(body: Json, model: Tokenizing) -> tuple[tuple[int, ...], ...]:
    """Reads a text, numbers of tokens, or a list of either."""
    given = body.get("prompt")
    several = isinstance(given, list) and given and not _is_whole(given[0])
    prompts = []
    for prompt in given if isinstance(given, list) and several else [given]:
        if isinstance(prompt, str):
            prompts.append(model.encode(prompt, "prompt"))
        elif isinstance(prompt, list) and all(_is_whole(number) for number in prompt):
            prompts.append(_known(prompt, model.vocabulary))
        else:
            raise RefusedError(400, "prompt is not a text, a list of token numbers, or a list of those", param="prompt")
    if not all(prompts):
        raise RefusedError(400, "prompt is empty: give at least one token", param="prompt")
    return tuple(prompts)


def _known(numbers: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    if wrong := next((number for number in numbers if not 0 <= number < vocabulary), None):
        raise RefusedError(400, f"prompt has token {wrong}, and tokens are 0 to {vocabulary - 1}", param="prompt")
    return tuple(numbers)


def _conversation(body: Json, model: Tokenizing) -> tuple[int, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(400, "messages is not a list of at least one message", param="messages")
    return model.encode_chat([_message(message) for message in messages])


def _message(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise RefusedError(400, "a message has no role", param="messages")
    content = given.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RefusedError(
                400, "a message has a part that is no text: this server reads texts only", param="messages"
            )
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise RefusedError(400, "the content of a message is not a text", param="messages")
    return {"role": given["role"], "content": content or ""}


def _tokens(body: Json, prompts: Sequence[Sequence[int]], context: int, *, chat: bool) -> int:
    """Returns how long an answer may be; prompt and answer must fit the context together."""
    longest = max(map(len, prompts))
    if longest >= context:
        raise RefusedError(
            400, f"the prompt has {longest} tokens, and with at least one of the answer the context is {context}",
            param="messages" if chat else "prompt", code="context_length_exceeded",
        )  # fmt: skip
    room = context - longest
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    wanted = _whole(body, name, room if chat else min(USUAL_TOKENS, room), 1, 1 << 62)
    if wanted > room:
        raise RefusedError(
            400, f"{name} of {wanted} and a prompt of {longest} tokens are more than the context of {context}: "
            f"ask for {room} or fewer", param=name, code="context_length_exceeded",
        )  # fmt: skip
    return wanted


def _stops(body: Json) -> tuple[str, ...]:
    given = body.get("stop")
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise RefusedError(400, f"stop is not a text or a list of at most {STOPS} texts", param="stop")
    return tuple(stops)


def _likeliest(body: Json, *, chat: bool) -> int | None:
    if not chat:
        return _whole(body, "logprobs", 0, 0, LIKELIEST) if body.get("logprobs") is not None else None
    if not _flag(body, "logprobs"):
        if body.get("top_logprobs"):
            raise RefusedError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return _whole(body, "top_logprobs", 0, 0, LIKELIEST)


def _include_usage(body: Json) -> bool:
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RefusedError(400, "stream_options is not an object", param="stream_options")
    return _flag(options or {}, "include_usage")


def _flag(body: Json, name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise RefusedError(400, f"{name} is not true or false", param=name)
    return bool(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(body: Json, name: str, usual: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return usual
    if not _is_whole(value) or not low <= value <= high:
        raise RefusedError(400, f"{name} is not a whole number from {low} to {high}", param=name)
    return int(value)


def _number(body: Json, name: str, usual: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RefusedError(400, f"{name} is not a number from {low} to {high}", param=name)
    return float(value)
