"""SentencePiece tokenizers: pieces with scores, spaces as ▁, and bytes to fall back on.

They are read from tokenizer.model, or from a tokenizer.json that was made from one and whose merges give the scores.
llama.cpp merges the two neighbours whose piece has the best score; it has no list of pairs.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gguf import TokenType
from sentencepiece import SentencePieceProcessor

from quantry.errors import CheckpointError
from quantry.llamacpp.pretokenizers import flatten, merge_pairs
from quantry.llamacpp.tokens import ADDED_SCORE, CARRY, TokenizerFiles, Tokens, added

BPE = 2  # a model type of SentencePiece: 1 unigram, 2 BPE, 3 words, 4 characters


def load(files: TokenizerFiles) -> SentencePieceProcessor | None:
    """Loads tokenizer.model; returns None if it is missing, or is another format beside a tokenizer.json (Llama 3).

    Raises CheckpointError if it is unreadable and alone, or not BPE.
    """
    if not files.has("tokenizer.model"):
        return None
    path = files.folder / "tokenizer.model"
    data = path.read_bytes()
    try:
        model = SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        if files.has("tokenizer.json"):
            return None
        raise CheckpointError(
            f"{path} is not a SentencePiece model, and there is no tokenizer.json",
            fix="save the tokenizer with transformers, which writes tokenizer.json",
        ) from error
    if _model_type(data) != BPE:
        raise CheckpointError(f"{path} is not BPE but unigram: llama.cpp would merge its pieces by score", fix=CARRY)
    return model


def from_model(files: TokenizerFiles, model: SentencePieceProcessor, *, phi3: bool = False) -> Tokens:
    """Returns the pieces of tokenizer.model and the added tokens; the converter has special rules for Phi-3."""
    tokens = Tokens(files.size or model.GetPieceSize())
    for number in range(model.GetPieceSize()):
        tokens.put(number, model.IdToPiece(number), _token_type(model, number), model.GetScore(number))
    extra = files.read("added_tokens.json") if files.has("added_tokens.json") else {}
    for text, number in extra.items():
        if number < tokens.size:  # Gemma 3's text models have an image token without a row in the embedding
            tokens.put(number, text, TokenType.USER_DEFINED)
    listed = [(int(number), token) for number, token in files.settings.get("added_tokens_decoder", {}).items()]
    if phi3 and files.has("tokenizer.json"):
        listed += [(token["id"], token) for token in files.tokenizer.get("added_tokens", [])]
    for number, token in listed:
        if phi3:
            token_type = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
            tokens.put(number, token["content"], token_type)
        elif number < tokens.size:
            tokens.put(number, *added(token["content"], token.get("special", False)))
    return tokens


def from_merges(files: TokenizerFiles) -> Tokens:
    """Returns the pieces of a tokenizer.json; a piece's score is the place of the first merge that makes it.

    llama.cpp's converter gives all pieces the same score here, and llama.cpp then merges from left to right, wrongly.
    """
    pieces: Mapping[str, int] = files.tokenizer["model"]["vocab"]
    listed = files.tokenizer.get("added_tokens", [])
    scores = _scores(files.tokenizer, {token["content"] for token in listed})
    tokens = Tokens(files.size or 1 + max([*pieces.values(), *(token["id"] for token in listed)]))
    for text, number in pieces.items():
        token_type = TokenType.BYTE if re.fullmatch("<0x[0-9A-Fa-f]{2}>", text) else TokenType.NORMAL
        tokens.put(number, text, token_type, scores.get(text, ADDED_SCORE))
    for token in listed:
        tokens.put(token["id"], *added(token["content"], token.get("special", False)))
    return tokens


def prepends_space(tokenizer: Mapping[str, Any]) -> bool:
    """Returns True if text gets a space in front; raises CheckpointError for a step that is not SentencePiece's."""
    normalizer = flatten(tokenizer.get("normalizer"), "normalizers")
    pre_tokenizer = flatten(tokenizer.get("pre_tokenizer"), "pretokenizers")
    prepends = False
    for step in (*normalizer, *pre_tokenizer):
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                prepends = True
            case {"type": "Metaspace", "replacement": "▁", "split": False}:
                prepends = step.get("prepend_scheme", "always") != "never"
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                pass  # Gemma's; spaces were replaced before, so it finds none
            case _:
                shown = json.dumps(step, ensure_ascii=False)
                raise CheckpointError(
                    f"tokenizer.json falls back on bytes and has the step {shown[:80]}, not in llama.cpp", fix=CARRY
                )
    return prepends


def _token_type(model: SentencePieceProcessor, number: int) -> TokenType:
    if model.IsUnknown(number):
        return TokenType.UNKNOWN
    if model.IsControl(number):
        return TokenType.CONTROL
    if model.IsUnused(number):
        return TokenType.UNUSED
    return TokenType.BYTE if model.IsByte(number) else TokenType.NORMAL


def _scores(tokenizer: Mapping[str, Any], listed: set[str]) -> dict[str, float]:
    """Returns minus the place of each merged piece; raises CheckpointError if a pair that makes a piece is no merge."""
    pieces, pairs = tokenizer["model"]["vocab"], dict.fromkeys(merge_pairs(tokenizer))
    scores: dict[str, float] = {}
    for left, right in pairs:
        scores.setdefault(left + right, -float(len(scores)))
    for piece in scores.keys() - listed:
        for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece))):
            if left in pieces and right in pieces and (left, right) not in pairs and not {left, right} & listed:
                raise CheckpointError(
                    f"tokenizer.json makes the token {piece[:40]!r} of other pairs, but not of {left[:40]!r} and "
                    f"{right[:40]!r}; llama.cpp would make it of both",
                    fix=CARRY,
                )
    return scores


def _model_type(data: bytes) -> int:
    """Returns the type of a model: field 3 of its field 2, 1 (unigram) if missing."""
    trainer = next((value for number, value in _fields(data) if number == 2), b"")
    return next((int(value) for number, value in _fields(trainer) if number == 3), 1)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the numbered fields of a protocol buffer: integers, and the bytes of everything else."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if key & 7 == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        length, place = _varint(data, place) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], place)
        yield key >> 3, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while data[place] & 128:
        value, shift, place = value | (data[place] & 127) << shift, shift + 7, place + 1
    return value | data[place] << shift, place + 1
