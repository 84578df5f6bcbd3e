"""Byte-level BPE from tokenizer.json: the tokens as transformers lists them, and the name of the pre-tokenizer."""

from collections.abc import Iterator, Mapping
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer

from quantry.errors import STOPS, CheckpointError
from quantry.llamacpp import pretokenizers
from quantry.llamacpp.pretokenizers import PreTokenizer
from quantry.llamacpp.tokens import CARRY, COPY, TokenizerFiles, Tokens, added
from quantry.storage.address_space import check_address_space

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
UNFIT = {
    "Unigram": "its pieces are chosen by likelihood, and llama.cpp has that for encoders and T5 only",
    "WordPiece": "llama.cpp has it for encoders only",
    "WordLevel": "llama.cpp has no such tokenizer",
}


def is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    """Returns True for byte-level BPE, False for BPE of pieces that falls back on bytes.

    Raises CheckpointError for any other tokenizer.
    """
    model = tokenizer["model"].get("type")
    if model != "BPE":
        raise CheckpointError(f"tokenizer.json is of type {model}: {UNFIT.get(model, 'it must be BPE')}", fix=CARRY)
    steps = pretokenizers.flatten(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if any(step["type"] == "ByteLevel" for step in steps):
        return True
    if not tokenizer["model"].get("byte_fallback"):
        raise CheckpointError("tokenizer.json is BPE without bytes: neither ByteLevel nor byte_fallback", fix=CARRY)
    return False


def read(files: TokenizerFiles) -> tuple[Tokens, PreTokenizer]:
    """Reads the tokens of tokenizer.json, and finds its pre-tokenizer by fingerprint or by its regexes."""
    tokenizer = _load(files)
    names = (pretokenizers.by_fingerprint(ids) for ids in _encodings(tokenizer, files.settings))
    try:
        known = next(filter(None, names), None)
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, STOPS):
            raise
        raise CheckpointError(f"tokenizer.json cannot encode a text: {str(error)[:120]}", fix=COPY) from error
    row = PreTokenizer(known, ()) if known else pretokenizers.by_cuts(files.tokenizer)
    return _tokens(tokenizer, files.size), row


def _load(files: TokenizerFiles) -> Tokenizer:
    """Loads tokenizer.json and adds the tokens that tokenizer_config.json lists or names, as transformers does."""
    path, settings = files.folder / "tokenizer.json", files.settings
    check_address_space()
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a plain Exception
        raise CheckpointError(f"{path}: {str(error)[:120]}", fix=COPY) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    listed = {int(number): token for number, token in settings.get("added_tokens_decoder", {}).items()}
    tokenizer.add_tokens([_added_token(listed[number]) for number in sorted(listed)])
    named = [settings.get(name) for name in NAMED]
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    texts = [token["content"] if isinstance(token, dict) else token for token in (*named, *more) if token]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([AddedToken(text, special=True) for text in texts if text not in known])
    return tokenizer


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    flags = {key: bool(token[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
    return AddedToken(token["content"], special=bool(token.get("special")), **flags)


def _encodings(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yields the probe text's tokens: as tokenizer.json encodes it, then with the ends of tokenizer_config.json.

    transformers 5 does the former; fingerprints taken with transformers 4, such as DeepSeek's, need the latter.
    """
    text = pretokenizers.probe_text()
    yield tokenizer.encode(text).ids
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    yield [*_end(tokenizer, settings, "bos"), *ids, *_end(tokenizer, settings, "eos")]


def _end(tokenizer: Tokenizer, settings: Mapping[str, Any], name: str) -> list[int]:
    token = settings.get(f"{name}_token") if settings.get(f"add_{name}_token") else None
    text = token.get("content") if isinstance(token, dict) else token
    number = None if text is None else tokenizer.token_to_id(text)
    return [] if number is None else [number]


def _tokens(tokenizer: Tokenizer, size: int | None) -> Tokens:
    vocabulary, listed = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    tokens = Tokens(size or 1 + max(vocabulary.values()))
    for text, number in vocabulary.items():
        if number not in listed:
            tokens.put(number, text, TokenType.NORMAL)
    for number, token in listed.items():
        text = token.content if token.normalized else _round_trip(tokenizer, token.content)
        tokens.put(number, *added(text, token.special))
    return tokens


def _round_trip(tokenizer: Tokenizer, text: str) -> str:
    """Returns an added token as it reads in normalized text, where llama.cpp looks for it."""
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
