"""From the tokenizer of a GGUF file back to files: tokenizer.json, tokenizer_config.json and generation_config.json.

Byte-level BPE is made of tokens and merges and cut by the regexes of its pre-tokenizer. SentencePiece becomes BPE of
pieces that falls back on bytes; a piece's score gives the order of the merges that make it. Control tokens become
special tokens, user-defined ones added tokens. A file that leaves something open is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

from gguf import Keys, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from quantry.errors import CheckpointError
from quantry.llamacpp.pretokenizers import PreTokenizer, rows_of_table
from quantry.llamacpp.to_checkpoint import AGAIN, OTHER, Metadata, shortest, special_id, table

Key = Keys.Tokenizer
NAMES = {  # a token in tokenizer_config.json -> its key
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # tokens that end an answer
SPACE = "▁"  # stands for a space in SentencePiece


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, without rows of padding."""

    metadata: Metadata
    texts: Mapping[int, str]
    types: Mapping[int, TokenType]

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {text: number for number, text in self.texts.items()}

    def special(self, key: str) -> int | None:
        """Returns the number of a special token, or None if the file has none."""
        number = special_id(self.metadata, key, 1 << 32)
        return number if number in self.texts else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"the file has {key} {str(value)[:40]!r}, not true or false", fix=AGAIN)
        return value

    def chosen(self, *types: TokenType) -> Iterator[tuple[int, str]]:
        return ((number, text) for number, text in self.texts.items() if self.types[number] in types)


def tokenizer(metadata: Metadata) -> dict[str, bytes]:
    """Returns the tokenizer's files by name; raises CheckpointError if the GGUF file leaves something open."""
    model = metadata.get(Key.MODEL)
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"the file has a tokenizer of type {str(model)[:40]!r}: only byte-level BPE (gpt2) and SentencePiece"
            " (llama) can be restored",
            fix=OTHER,
        )
    words = _vocabulary(metadata, pieces=model == "llama")
    try:
        made, ends = _made(words, byte_level=model == "gpt2")
        text = made.to_str(pretty=True)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises a plain Exception
        raise CheckpointError(f"the tokenizer of the file cannot be built: {str(error)[:120]}", fix=AGAIN) from error
    others = {"tokenizer_config.json": _settings(words, ends), "generation_config.json": _generation(words)}
    written = {name: json.dumps(content, ensure_ascii=False, indent=2) for name, content in others.items() if content}
    return {name: content.encode() for name, content in {"tokenizer.json": text, **written}.items()}


def _made(words: Vocabulary, byte_level: bool) -> tuple[Tokenizer, dict[str, bool]]:
    """Returns the tokenizer, and whether it adds a first (bos) and a last (eos) token to texts."""
    made, bos = _byte_level(words) if byte_level else _pieces(words)
    wanted = {"bos": bos, "eos": words.flag(Key.ADD_EOS, False)}
    ends = {name: on and words.special(f"{name}_token_id") is not None for name, on in wanted.items()}
    _add_tokens(made, words)
    made.post_processor = _post_processor(words, ends, byte_level)
    return made, ends


def _vocabulary(metadata: Metadata, pieces: bool) -> Vocabulary:
    texts = _array(metadata, Key.LIST, str)
    types = _array(metadata, Key.TOKEN_TYPE, int, len(texts))
    known = set(TokenType)
    for number, token_type in enumerate(types):
        if token_type not in known:
            raise CheckpointError(f"the file has token {number} of type {token_type}, which is not known", fix=AGAIN)
    numbers: dict[str, int] = {}
    for number, (written, token_type) in enumerate(zip(texts, types, strict=True)):
        if token_type == TokenType.UNUSED and written == f"[PAD{number}]":
            continue
        spaces = pieces and token_type == TokenType.USER_DEFINED and not written.strip(" ")
        text = written.replace(" ", SPACE) if spaces else written  # matches text whose spaces are replaced
        if numbers.setdefault(text, number) != number:
            raise CheckpointError(f"tokens {numbers[text]} and {number} are both {text[:40]!r}", fix=AGAIN)
    kept = {number: text for text, number in numbers.items()}
    return Vocabulary(metadata, kept, {number: TokenType(types[number]) for number in kept})


def _array(metadata: Metadata, name: str, item_type: type, count: int | None = None) -> Sequence[Any]:
    values = metadata.get(name)
    if not isinstance(values, tuple):
        raise CheckpointError(f"the file has {'no' if values is None else 'no list of'} {name}", fix=AGAIN)
    for value in values:
        if type(value) is not item_type:
            wanted = f"a list of {item_type.__name__}"
            raise CheckpointError(f"the file has {str(value)[:40]!r} in {name}, {wanted}", fix=AGAIN)
    if count is not None and len(values) != count:
        raise CheckpointError(f"the file has {count} tokens and {len(values)} items in {name}", fix=AGAIN)
    return values


def _byte_level(words: Vocabulary) -> tuple[Tokenizer, bool]:
    """Returns byte-level BPE, and True if it adds a first token to texts."""
    row = _pre_tokenizer(words.metadata.get(Key.PRE))
    merges = [_pair(merge) for merge in _array(words.metadata, Key.MERGES, str)]
    made = Tokenizer(BPE(words.numbers, merges, ignore_merges=row.whole))
    if words.metadata.get(Key.PRE) in table()["tokenizer"]["composed"]:
        made.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in row.regexes]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    made.decoder = decoders.ByteLevel()
    return made, words.flag(Key.ADD_BOS, row.bos)


def _pre_tokenizer(name: Any) -> PreTokenizer:
    """Returns the row of a name of llama.cpp; some names mean the same regexes."""
    same = {other: own for own, others in table()["tokenizer"]["same"].items() for other in others}
    rows = {row.name: row for row in reversed(rows_of_table())}
    if not isinstance(name, str) or same.get(name, name) not in rows:
        cuts = "does not say how it cuts text" if name in (None, "default") else f"cuts text as {str(name)[:40]!r}"
        raise CheckpointError(f"the tokenizer of the file {cuts}: no regex is known for that", fix=OTHER)
    return rows[same.get(name, name)]


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or " " in right:
        raise CheckpointError(f"the file has a merge {merge[:40]!r}, not two tokens", fix=AGAIN)
    return left, right


def _pieces(words: Vocabulary) -> tuple[Tokenizer, bool]:
    """Returns SentencePiece as BPE, and True if it adds a first token to texts."""
    unknown = next((text for _, text in words.chosen(TokenType.UNKNOWN)), None)
    model = BPE(words.numbers, list(_merges(words)), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    made = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if words.flag(Key.ADD_PREFIX, True):
        made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        made.normalizer = spaces
        made.decoder = decoders.Sequence(back)
    return made, words.flag(Key.ADD_BOS, True)


def _merges(words: Vocabulary) -> Iterator[tuple[str, str]]:
    """Yields all pairs of pieces that make a piece, the best score first, as SentencePiece merges.

    User-defined pieces are found before anything is merged and need no merges, except runs of spaces, which are
    replaced only then: they go first.
    """
    scores = _array(words.metadata, Key.SCORES, float, len(_array(words.metadata, Key.LIST, str)))
    runs = {text for _, text in words.chosen(TokenType.USER_DEFINED) if text and not text.strip(SPACE)}
    plain = {text: scores[number] for number, text in words.chosen(TokenType.NORMAL)}
    parts = {text: words.numbers[text] for text in (*runs, *plain)}
    pairs = [
        ((0, 0.0) if piece in runs else (1, -plain[piece]), number, parts[piece[:cut]], parts[piece[cut:]])
        for piece, number in parts.items()
        for cut in range(1, len(piece))
        if piece[:cut] in parts and piece[cut:] in parts
    ]
    if len(pairs) > 1 and len(set(plain.values())) == 1:
        raise CheckpointError("the file has one score for all pieces: the order of merges is lost", fix=OTHER)
    for *_, left, right in sorted(pairs):
        yield words.texts[left], words.texts[right]


def _add_tokens(made: Tokenizer, words: Vocabulary) -> None:
    """Adds control, unknown and user-defined tokens as added tokens, which are found before text is cut."""
    swallow = None
    if words.metadata[Key.MODEL] == "llama":
        swallow = table()["tokenizer"]["swallow"].get(words.metadata.get(Keys.General.ARCHITECTURE))
    made.add_tokens(
        [
            AddedToken(
                text,
                special=words.types[number] != TokenType.USER_DEFINED,
                normalized=False,
                rstrip=swallow is not None and text not in swallow,
            )
            for number, text in words.chosen(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
            if text
        ]
    )


def _post_processor(words: Vocabulary, ends: Mapping[str, bool], byte_level: bool) -> Any:
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if byte_level else []
    numbers = {name: words.special(f"{name}_token_id") for name, on in ends.items() if on}
    named = {name: words.texts[number] for name, number in numbers.items() if number is not None}
    if named:
        first, last = ([named[name]] if name in named else [] for name in ("bos", "eos"))
        single = [*first, "$A", *last]
        pair = [*single, *(f"{text}:1" for text in first), "$B:1", *(f"{text}:1" for text in last)]
        steps.append(
            processors.TemplateProcessing(
                single=single, pair=pair, special_tokens=[(named[name], numbers[name]) for name in named]
            )
        )
    return steps[0] if len(steps) == 1 else processors.Sequence(steps)


def _settings(words: Vocabulary, ends: Mapping[str, bool]) -> dict[str, Any]:
    special = {name: words.special(key) for name, key in NAMES.items()}
    context = words.metadata.get(f"{words.metadata.get(Keys.General.ARCHITECTURE)}.context_length")
    template = _template(words.metadata)
    keys = {"add_bos_token": Key.ADD_BOS, "add_eos_token": Key.ADD_EOS, "add_prefix_space": Key.ADD_PREFIX}
    flags = {
        "add_prefix_space": words.flag(Key.ADD_PREFIX, True),
        **{f"add_{name}_token": on for name, on in ends.items()},
    }
    return {
        **{name: on for name, on in flags.items() if keys[name] in words.metadata},
        **{name: words.texts[number] if number is not None else None for name, number in special.items()},
        "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}),
        **({"model_max_length": context} if type(context) is int else {}),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _template(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """Returns the chat template, or a list of all if there are several."""
    listed = metadata.get(Key.CHAT_TEMPLATES)
    names = listed if isinstance(listed, tuple) else ()
    keys = {"default": Key.CHAT_TEMPLATE, **{str(name): Key.CHAT_TEMPLATE_N.format(name=name) for name in names}}
    templates = {name: str(metadata[key]) for name, key in keys.items() if key in metadata}
    if list(templates) == ["default"]:
        return templates["default"]
    return [{"name": name, "template": text} for name, text in templates.items()] or None


def _generation(words: Vocabulary) -> dict[str, Any]:
    """Returns the content of generation_config.json: first and last tokens, and how to sample."""
    ends = list(dict.fromkeys(number for key in ENDS if (number := words.special(key)) is not None))
    ids = {
        "bos_token_id": words.special("bos_token_id"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": words.special("padding_token_id"),
    }
    sampling = {
        name: shortest(value)
        for key, name in table()["tokenizer"]["sampling"].items()
        for value in [words.metadata.get(f"general.sampling.{key}")]
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    }
    made = {**{name: value for name, value in ids.items() if value is not None}, **sampling}
    return {**made, "do_sample": True} if sampling else made
