"""Texts that tokenizers cut in many ways, and tokenizers of tiny models in llama.cpp."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from quantry.llamacpp import vocabulary
from quantry.llamacpp.model import LlamaModel
from quantry.llamacpp.pretokenizers import PreTokenizer
from tiny_tokenizers import TEXT

CORPUS = (
    *("", " ", "  ", "Hello world", " Hello", "Hello ", "Hello   world  ", "a" * 50, "x  y   z    w"),
    "The quick brown fox didn't jump; WE'LL see I'M they'Ve 's 't 'RE 'Ll x's l'été aujourd'hui",
    *("don't DON'T Don’t ‘quoted’ “double”", "...!!!???---===''''\"\"\"", "wow!!!\n\nnext", "foo. Bar? baz!\r\n"),
    *("12345 678 9 1,000,000.50 3.14159 0x1F 2024-11-15", "1 22 333 4444 55555 1234567 x12345y", "1st 2nd x2y3"),
    *("def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n", "x->y != z || w; // and ++i {[()]} __init__ --flag"),
    *(
        "a\tb\t\tc\r\nd\r\n\r\n e \n\n\n  f",
        "\n",
        "\n\n\n",
        "\t",
        " \n \n",
        "end   \n  ",
        "a\r\rb \r c",
        "x\n  y\n    z",
    ),
    *("camelCase HTTPServer snake_case CONST iPhone", "https://example.com/a/b?c=d&e=f#g //x\n/y", "$100 €50 £ © ™"),
    *("über große Straße façade naïve", "¿qué? ¡sí!", "Привет, мир! Ёлка", "Ο ποταμός είναι", "שלום עולם"),
    *(
        "今天天气很好，我们去公园。12个苹果",
        "日本語テキストとカタカナ、ひらがなABC漢字",
        "한국어 문장입니다 123",
        "ｱｲｳ ー々〆",
    ),
    *("مرحبا بالعالم ١٢٣ كيف", "नमस्ते दुनिया १२३ हिन्दी में", "สวัสดีชาวโลก", "你好world世界123abc", "𠀀𠀁 𝒳 𐍈"),
    *(
        "😀🚀👩‍👩‍👧 ✅ 🇩🇪 ❤️ 🤷🏽‍♀️",
        "cafe\u0301 n\u0303 e\u0301\u0301",
        "foo\u0301bar \u0301x 1\u0301",
        "½ ² Ⅳ ① 一二三 4５６",
    ),
    *(
        "\u00a0nbsp\u2003em\u200bzw\u3000ideo",
        " \u3000 x",
        "\u0001\u0002\x7f",
        "ﬁ Ａｂｃ ǅ ʰ ª º",
        "<not special> [INST </x>",
    ),
    *("ÉCOLE école aÉb ÄpfelBaum", "ПРИВЕТ ПриВет МИР"),
)


@contextmanager
def loaded(path: Path, folder: Path, config: Mapping[str, Any], name: str = "tiny") -> Iterator[LlamaModel]:
    """A model of one layer with the tokenizer in a folder, loaded by llama.cpp."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    for add in ("block_count", "head_count", "head_count_kv"):
        getattr(writer, f"add_{add}")(1)
    for add in ("context_length", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{add}")(32)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary.describe(writer, folder, config)
    size = len(writer.kv_data[0][gguf.Keys.Tokenizer.LIST].value)
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (size, 32), "output_norm": (32,)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), **{f"blk.0.{part}": (32, 32) for part in matrices}}
    for tensor, shape in shapes.items():
        writer.add_tensor(f"{tensor}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with LlamaModel(path, context=32, threads=1) as model:
        yield model


def cross_cutting(row: PreTokenizer, folder: Path) -> Tokenizer:
    """Writes a tokenizer with the cuts of a row, whose merges know no cuts: every difference in cutting shows."""
    tokenizer = Tokenizer.from_str(_uncut())
    tokenizer.model.ignore_merges = row.whole
    cuts = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in row.regexes]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, tokenizer.pre_tokenizer])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@cache
def _uncut() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=6000, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
    tokenizer.train_from_iterator([text for text in (*CORPUS, *TEXT) if text] * 2, trainer)
    return tokenizer.to_str()
