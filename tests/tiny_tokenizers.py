"""Small real tokenizers, trained in a moment, with the files that checkpoints of their family have.

Byte-level BPE comes from the `tokenizers` library, with the normalizer, the pre-tokenizer and the special tokens of a
family; SentencePiece models come from the `sentencepiece` library, with the tokenizer.json that belongs to them.
"""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

CL100K = (  # Llama 3, GPT-4
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}{many}{LOWER}{more}" for many, more in ("*+", "+*"))
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = "|".join([*WORDS, r"\p{N}", TAIL])
GPT4O = "|".join([*(f"{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in WORDS), r"\p{N}{1,3}", TAIL])
DEEPSEEK_LETTERS = (  # escaped: several of them turn into others when normalized
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-"
    "\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-"
    "\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"

TEXT = (
    "The quick brown fox didn't jump over the lazy dog; we'll see that it's there, and they've said I'm right.",
    "Every morning the old man walked along the river, counted the boats, and told his daughter what he had seen.",
    "In 1999 there were 12,345 people and 678.90 dollars; in 2024 it was 1000000 and 31415926535 times more.",
    "def add(first: int, second: int) -> int:\n    return first + second\n\n\nfor index in range(10):\n\tprint(index)\n",
    "if (value != NULL && count >= 0) { total += values[count--]; } // the sum, as before\n",
    'Dr. Smith asked: "What is the meaning of this?" Nobody could answer him... HTTPServer and camelCase names.',
    "der Fluss über die Brücke, größer als je zuvor; la forêt était déjà là où l'été s'achève; el niño pequeño",
    "Привет, как дела? Это большой дом и маленькая река. Ο ποταμός είναι μεγάλος και το σπίτι μικρό.",
    "今天天气很好，我们去公园散步。日本語のテキストもここにあります。한국어 문장도 여기에 있습니다.",
    "مرحبا بالعالم، كيف حالك اليوم؟ שלום עולם, מה שלומך היום? नमस्ते दुनिया, आप कैसे हैं? สวัสดีชาวโลก",
    "emoji 😀 🚀 👩‍👩‍👧 and ✅ marks; a  double  space, a   triple   one, tabs\t\there and\r\nline ends\n\n\n",
)


@dataclass(frozen=True)
class Family:
    """What is particular to a byte-level BPE tokenizer: how text is cut, the special tokens and tokenizer_config."""

    cuts: tuple[str, ...] = ()  # regexes, in order; "digits" for single digits; none: those of GPT-2
    normalizer: str | None = None
    specials: tuple[str, ...] = ("<|endoftext|>",)  # first the beginning and the end of text, in `config`'s names
    plain: tuple[str, ...] = ()  # added tokens that are not special
    first: bool = False  # special tokens have the first ids, before the bytes
    bos: str | None = None  # put in front of every text
    ignore_merges: bool = False
    removed: bool = False  # the regex says what to keep ("Removed", inverted) rather than where to cut
    config: tuple[tuple[str, Any], ...] = ()
    template: str | None = CHATML


LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "llama-bpe": Family(
        (CL100K,),
        specials=LLAMA3,
        bos="<|begin_of_text|>",
        ignore_merges=True,
        config=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>")),
        template=PLAIN,
    ),
    "qwen2": Family(
        (QWEN2,),
        "NFC",
        CHAT,
        ("<tool_call>", "</tool_call>", "<|fim_prefix|>"),
        config=(
            ("add_bos_token", False),
            ("add_prefix_space", False),
            ("bos_token", None),
            ("eos_token", "<|im_end|>"),
            ("pad_token", "<|endoftext|>"),
            ("tokenizer_class", "Qwen2Tokenizer"),
            ("unk_token", None),
        ),
    ),
    "qwen35": Family((QWEN35,), "NFC", CHAT, config=(("eos_token", "<|im_end|>"), ("pad_token", "<|endoftext|>"))),
    "gpt-2": Family(
        config=(
            ("bos_token", "<|endoftext|>"),
            ("eos_token", "<|endoftext|>"),
            ("unk_token", "<|endoftext|>"),
            ("add_prefix_space", False),
            ("tokenizer_class", "GPT2Tokenizer"),
        ),
        template=None,
    ),
    "smollm": Family(
        ("digits",),
        specials=(*CHAT, "<repo_name>", "<jupyter_code>"),
        first=True,
        config=(
            ("add_prefix_space", False),
            ("bos_token", "<|im_start|>"),
            ("eos_token", "<|im_end|>"),
            ("pad_token", "<|im_end|>"),
            ("unk_token", "<|endoftext|>"),
        ),
    ),
    "refact": Family(  # Granite 3
        ("digits",),
        specials=("<|end_of_text|>", "<fim_prefix>", "<fim_middle>", "<|start_of_role|>", "<|end_of_role|>"),
        first=True,
        config=(
            ("add_bos_token", False),
            ("add_prefix_space", False),
            ("bos_token", "<|end_of_text|>"),
            ("eos_token", "<|end_of_text|>"),
            ("pad_token", "<|end_of_text|>"),
            ("unk_token", "<|end_of_text|>"),
        ),
        template=PLAIN,
    ),
    "tekken": Family(
        (TEKKEN,),
        specials=("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"),
        first=True,
        bos="<s>",
        ignore_merges=True,
        config=(
            ("add_bos_token", True),
            ("add_eos_token", False),
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("unk_token", "<unk>"),
        ),
        template=PLAIN,
    ),
    "gpt-4o": Family((GPT4O,), config=(("bos_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>")), template=None),
    "deepseek-llm": Family(
        (
            "[\r\n]",
            rf"\s?[{DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            "digits",
        ),
        specials=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        bos="<｜begin▁of▁sentence｜>",
        config=(
            ("add_bos_token", True),
            ("add_eos_token", False),
            ("bos_token", "<｜begin▁of▁sentence｜>"),
            ("eos_token", "<｜end▁of▁sentence｜>"),
        ),
        template=PLAIN,
    ),
    "deepseek-v3": Family(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK_V3),
        specials=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"),
        plain=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        first=True,
        bos="<｜begin▁of▁sentence｜>",
        config=(
            ("add_bos_token", True),
            ("add_eos_token", False),
            ("bos_token", "<｜begin▁of▁sentence｜>"),
            ("eos_token", "<｜end▁of▁sentence｜>"),
            ("pad_token", "<｜▁pad▁｜>"),
        ),
        template=PLAIN,
    ),
    "dbrx": Family(  # OLMo 2
        (CL100K,),
        specials=CHAT,
        plain=("|||PHONE_NUMBER|||", "|||EMAIL_ADDRESS|||"),
        config=(
            ("add_prefix_space", False),
            ("bos_token", "<|endoftext|>"),
            ("eos_token", "<|endoftext|>"),
            ("pad_token", "<|im_end|>"),
            ("unk_token", "<|endoftext|>"),
        ),
    ),
    "phi-4": Family(
        (CL100K,),
        specials=(*CHAT, "<|dummy_0|>"),
        removed=True,
        config=(
            ("add_prefix_space", False),
            ("bos_token", "<|endoftext|>"),
            ("eos_token", "<|im_end|>"),
            ("pad_token", "<|dummy_0|>"),
            ("unk_token", "<|endoftext|>"),
            ("tokenizer_class", "GPT2Tokenizer"),
        ),
    ),
}

# SentencePiece: which pieces are control tokens, how the text begins, and what tokenizer_config says
LLAMA_CONTROL = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
GEMMA_CONTROL = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>"}
GEMMA_CONTROL |= {"bos_piece": "<bos>", "eos_piece": "<eos>"}
GEMMA_OWN = ("<mask>", "[@BOS@]", "<unused0>", "<unused1>", "<start_of_turn>", "<end_of_turn>")
GEMMA_RUNS = (*("\n" * count for count in range(1, 5)), *("▁" * count for count in range(2, 5)), "<table>", "</p>")
LLAMA_SPECIAL = ("<unk>", "<s>", "</s>")
PHI3_ADDED = ("<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|system|>", "<|end|>", "<|user|>")


def write_tokenizer(folder: Path, name: str) -> int:
    """Writes the files of a tokenizer into a folder; returns the size of its vocabulary, with added tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    is_byte_level = name.startswith("bpe-")
    files = _byte_level(FAMILIES[name.removeprefix("bpe-")]) if is_byte_level else SENTENCEPIECE[name]()
    for file, content in files.items():
        (folder / file).write_bytes(content if isinstance(content, bytes) else _json(content))
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


def _json(content: Any) -> bytes:
    return content.encode() if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False).encode()


@cache
def _byte_level(family: Family, size: int = 640) -> dict[str, Any]:
    tokenizer = Tokenizer(BPE(ignore_merges=family.ignore_merges))
    if family.normalizer:
        tokenizer.normalizer = getattr(normalizers, family.normalizer)()
    tokenizer.pre_tokenizer = _pre_tokenizer(family)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in family.specials]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=specials if family.first else [],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    tokenizer.post_processor = _post_processor(tokenizer, family.bos)
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        **_settings(tokenizer, dict(family.config), family.template),
    }


def _pre_tokenizer(family: Family) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.cuts in ((), ("digits",)))
    if not family.cuts:
        return byte_level
    how = {"behavior": "removed", "invert": True} if family.removed else {"behavior": "isolated"}
    cuts = [
        pre_tokenizers.Digits(individual_digits=True) if cut == "digits" else pre_tokenizers.Split(Regex(cut), **how)
        for cut in family.cuts
    ]
    return pre_tokenizers.Sequence([*cuts, byte_level])


def _post_processor(tokenizer: Tokenizer, bos: str | None) -> Any:
    if bos is None:
        return processors.ByteLevel(trim_offsets=False)
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def _settings(tokenizer: Tokenizer, config: dict[str, Any], template: str | None) -> dict[str, Any]:
    """tokenizer_config.json and, where there is one, the chat template, as transformers writes them."""
    added = {
        str(number): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    settings = {
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **config,
    }
    return {"tokenizer_config.json": settings, **({"chat_template.jinja": template} if template else {})}


@cache
def _sentencepiece(size: int, own: tuple[str, ...], dummy_prefix: bool, **control: Any) -> bytes:
    """A SentencePiece BPE model with bytes to fall back on, as Llama's and Gemma's were trained."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXT for line in text.splitlines()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        character_coverage=0.98,
        user_defined_symbols=list(own),
        num_threads=1,
        minloglevel=2,
        **control,
    )
    return model.getvalue()


def _from_pieces(model: bytes, *, added: Sequence[AddedToken], prefix: bool, bos: str) -> Tokenizer:
    """The tokenizer.json of a SentencePiece model: its pieces, and as merges every way to cut a piece into two others."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocabulary = {pieces.IdToPiece(number): number for number in range(pieces.GetPieceSize())}
    score = {piece: pieces.GetScore(number) for piece, number in vocabulary.items()}
    merges = [
        (piece[:cut], piece[cut:])
        for piece, number in vocabulary.items()
        if not (pieces.IsControl(number) or pieces.IsByte(number) or pieces.IsUnknown(number))
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    merges.sort(key=lambda pair: -score[pair[0] + pair[1]])
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    if not prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    ending = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ending]
    )
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def _special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


LLAMA_SETTINGS = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "legacy": False,
    "pad_token": None,
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": "<unk>",
}


def _llama(added: Sequence[AddedToken] = (), **settings: Any) -> dict[str, Any]:
    model = _sentencepiece(700, (), True, **LLAMA_CONTROL)
    tokenizer = _from_pieces(model, added=[*_special(*LLAMA_SPECIAL), *added], prefix=True, bos="<s>")
    files = {"tokenizer.model": model, "tokenizer.json": tokenizer.to_str(pretty=True)}
    return {**files, **_settings(tokenizer, {**LLAMA_SETTINGS, **settings}, PLAIN)}


def _without_model(files: dict[str, Any]) -> dict[str, Any]:
    return {name: content for name, content in files.items() if name != "tokenizer.model"}


def _llama_metaspace() -> dict[str, Any]:
    """Llama 2's tokenizer as transformers 5 saves it: no tokenizer.model, and spaces in the pre-tokenizer's hands."""
    files = _without_model(_llama())
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return {**files, "tokenizer.json": tokenizer.to_str(pretty=True)}


def _phi3() -> dict[str, Any]:
    end = AddedToken("</s>", special=False, normalized=False, rstrip=True)
    added = [
        AddedToken(text, special=text != "<|placeholder1|>", normalized=False, rstrip=text != "<|endoftext|>")
        for text in PHI3_ADDED
    ]
    files = _llama([end, *added], eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    numbers = {text: 700 + index for index, text in enumerate(PHI3_ADDED)}
    return {**files, "added_tokens.json": numbers}


def _gemma() -> dict[str, Any]:
    model = _sentencepiece(800, (*GEMMA_OWN, *GEMMA_RUNS), False, **GEMMA_CONTROL)
    plain = [AddedToken(text, special=False, normalized=False) for text in (*GEMMA_OWN, *GEMMA_RUNS)]
    added = [*_special("<pad>", "<eos>", "<bos>", "<unk>"), *plain]
    tokenizer = _from_pieces(model, added=added, prefix=False, bos="<bos>")
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
    }
    files = {"tokenizer.model": model, "tokenizer.json": tokenizer.to_str(pretty=True)}
    return {**files, **_settings(tokenizer, settings, PLAIN)}


SENTENCEPIECE: dict[str, Callable[[], dict[str, Any]]] = {
    "spm-llama": _llama,
    "spm-llama-fast": lambda: _without_model(_llama()),  # as many fine-tuned models have it
    "spm-llama-metaspace": _llama_metaspace,
    "spm-phi3": _phi3,
    "spm-gemma": _gemma,
    "spm-gemma-fast": lambda: _without_model(_gemma()),
}
KINDS = (*(f"bpe-{name}" for name in FAMILIES), *SENTENCEPIECE)
