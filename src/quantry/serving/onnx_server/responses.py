"""Answers in the form that OpenAI's API gives them."""

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .model import AnswerPiece, GenaiModel
from .requests import CompletionRequest, Json


class ResponseFormat:
    """The answers of one request in OpenAI's form, whole or in pieces."""

    def __init__(self, request: CompletionRequest, model: GenaiModel) -> None:
        self.request, self.model = request, model
        self._id = f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets: Counter[int] = Counter()
        self._begun: set[int] = set()  # answers whose first piece was sent

    def whole(self, choices: list[Json], generated: int) -> Json:
        return {**self._head(streamed=False), "choices": choices, "usage": self.usage(generated)}

    def usage(self, generated: int) -> Json:
        read = sum(map(len, self.request.prompts))
        return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}

    def choice(self, index: int, pieces: Sequence[AnswerPiece]) -> Json:
        """Returns a whole answer, or the next pieces of it."""
        text = "".join(piece.text for piece in pieces)
        choice: Json = {"index": index, "finish_reason": pieces[-1].finish, "logprobs": None}
        if self.request.likeliest is not None:
            choice["logprobs"] = self._of_chat(pieces) if self.request.chat else self._of_text(index, pieces)
        if not self.request.chat:
            return {**choice, "text": text}
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        return {**choice, "delta" if self.request.stream else "message": {**role, "content": text}}

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        return {**self._head(streamed=True), "choices": choices, **more}

    def _head(self, *, streamed: bool) -> Json:
        chat = "chat.completion.chunk" if streamed else "chat.completion"
        name = chat if self.request.chat else "text_completion"
        return {"id": self._id, "object": name, "created": self._created, "model": self.model.name}

    def _name(self, token: int) -> str:
        return self.model.name_of(token, as_ids=self.request.as_ids)

    def _of_chat(self, pieces: Sequence[AnswerPiece]) -> Json:
        rows = [
            {**self._scored(at.token, at.logprob), "top_logprobs": [self._scored(*best) for best in at.likeliest]}
            for piece in pieces
            for at in piece.scored
        ]
        return {"content": rows}

    def _scored(self, token: int, logprob: float) -> Json:
        name = self._name(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in name  # a part of a character has no text to take bytes from
        return {"token": name, "logprob": logprob, "bytes": list(name.encode()) if whole else None}

    def _of_text(self, index: int, pieces: Sequence[AnswerPiece]) -> Json:
        scored = [at for piece in pieces for at in piece.scored]
        offsets = []
        for piece in pieces:
            offsets += [self._offsets[index]] * len(piece.scored)
            self._offsets[index] += len(piece.text)
        return {
            "tokens": [self._name(at.token) for at in scored],
            "token_logprobs": [at.logprob for at in scored],
            "top_logprobs": [{self._name(token): value for token, value in at.likeliest} for at in scored],
            "text_offset": offsets,
        }
