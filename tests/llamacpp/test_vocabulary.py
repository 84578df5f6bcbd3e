"""Tokenizers in GGUF: the key-values against llama.cpp's own converter, the token ids against the tokenizers library."""

import json
import os
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import Tokenizer, normalizers

from depth import DEEP, cases
from gguf_tokenizers import CORPUS, cross_cutting, loaded
from llama_cpp_converter import LLAMA_CPP, Converter
from quantry.errors import CheckpointError, QuantryError
from quantry.llamacpp import pretokenizers, vocabulary
from quantry.llamacpp.families import known
from quantry.llamacpp.pretokenizers import rows_of_table
from shared import recorded
from tiny_tokenizers import TEXT, write_tokenizer

DEMO = Path(vocabulary.__file__).parents[1] / "demo"
KeyValues = dict[str, tuple[tuple[Any, ...], Any]]
Converted = dict[str, tuple[Path, dict[str, Any], KeyValues]]  # a case's folder, its config, and what it becomes


@dataclass(frozen=True)
class Case:
    """A tokenizer in a checkpoint of an architecture, and the name its pre-tokenizer must get."""

    kind: str
    architecture: str
    model_type: str
    pre: str = "default"
    config: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[Path], object] = lambda folder: None


def change(name: str, **values: Any) -> Callable[[Path], object]:
    """Sets entries of a JSON file in a checkpoint."""

    def edit(folder: Path) -> None:
        path = folder / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**old, **values}))

    return edit


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def both(*edits: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: [edit(folder) for edit in edits]


def unlist(*texts: str) -> Callable[[Path], object]:
    """Takes added tokens out of the lists, so that only tokenizer_config.json's names of them remain."""

    def edit(folder: Path) -> None:
        tokenizer, settings = (json.loads((folder / f"tokenizer{end}.json").read_text()) for end in ("", "_config"))
        left = [token for token in tokenizer["added_tokens"] if token["content"] not in texts]
        listed = settings["added_tokens_decoder"]
        kept = {number: token for number, token in listed.items() if token["content"] not in texts}
        change("tokenizer.json", added_tokens=left)(folder)
        change("tokenizer_config.json", added_tokens_decoder=kept)(folder)

    return edit


SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
CASES = {
    "Llama 2": Case("spm-llama", "LlamaForCausalLM", "llama"),
    "Mistral": Case("spm-llama", "MistralForCausalLM", "mistral", config={"bos_token_id": 1, "pad_token_id": 999}),
    "Mixtral": Case("spm-llama", "MixtralForCausalLM", "mixtral", config={"vocab_size": 720}),
    "Llama 3": Case("bpe-llama-bpe", "LlamaForCausalLM", "llama", "llama-bpe", {"eos_token_id": [641, 644]}),
    "SmolLM 3": Case("bpe-llama-bpe", "SmolLM3ForCausalLM", "smollm3", "llama-bpe"),
    "Qwen 2": Case("bpe-qwen2", "Qwen2ForCausalLM", "qwen2", "qwen2", {"vocab_size": 672, "bos_token_id": 640}),
    "Qwen 3": Case("bpe-qwen2", "Qwen3ForCausalLM", "qwen3", "qwen2"),
    "Qwen 3 MoE": Case("bpe-qwen2", "Qwen3MoeForCausalLM", "qwen3_moe", "qwen2"),
    "Qwen 3.5": Case("bpe-qwen35", "Qwen3ForCausalLM", "qwen3", "qwen35"),
    "Gemma 1": Case("spm-gemma", "GemmaForCausalLM", "gemma"),
    "Gemma 2": Case("spm-gemma", "Gemma2ForCausalLM", "gemma2"),
    "Gemma 3": Case(
        "spm-gemma",
        "Gemma3ForCausalLM",
        "gemma3_text",
        config={"vocab_size": 801},
        edit=change("added_tokens.json", **{"<end_of_image>": 800, "<image_soft_token>": 801}),
    ),
    "Gemma 3 with vision": Case(
        "spm-gemma",
        "Gemma3ForConditionalGeneration",
        "gemma3",
        config={"text_config": {"model_type": "gemma3_text", "vocab_size": 832, **SHAPE}, "eos_token_id": [1, 9]},
    ),
    "Phi-3": Case("spm-phi3", "Phi3ForCausalLM", "phi3", config={"vocab_size": 720, "pad_token_id": 700}),
    "Phi-3 saved anew": Case(
        "spm-phi3",
        "Phi3ForCausalLM",
        "phi3",
        edit=both(change("tokenizer_config.json", added_tokens_decoder={}), without("added_tokens.json")),
    ),
    "Phi-4": Case("bpe-phi-4", "Phi3ForCausalLM", "phi3", "dbrx", {"pad_token_id": 643}),
    "SmolLM 2": Case("bpe-smollm", "LlamaForCausalLM", "llama", "smollm"),
    "OLMo 2": Case("bpe-dbrx", "Olmo2ForCausalLM", "olmo2", "dbrx", {"pad_token_id": 642, "vocab_size": 704}),
    "Granite": Case("bpe-refact", "GraniteForCausalLM", "granite", "smollm"),
    "Mistral NeMo": Case("bpe-tekken", "MistralForCausalLM", "mistral", "tekken"),
    "GPT-2's": Case("bpe-gpt-2", "LlamaForCausalLM", "llama", "gpt-2"),
    "GPT-4o's": Case("bpe-gpt-4o", "LlamaForCausalLM", "llama", "gpt-4o"),
    "DeepSeek LLM": Case("bpe-deepseek-llm", "LlamaForCausalLM", "llama", "deepseek-llm"),
    "DeepSeek V3": Case("bpe-deepseek-v3", "LlamaForCausalLM", "llama", "deepseek-v3"),
    "special by name": Case("bpe-tekken", "LlamaForCausalLM", "llama", "tekken", edit=unlist("</s>", "<unk>")),
    "special and new": Case(
        "bpe-smollm",
        "LlamaForCausalLM",
        "llama",
        "smollm",
        {"vocab_size": 648},
        change("tokenizer_config.json", pad_token="[PAD]", extra_special_tokens=["<|tool|>", "Ġthe"]),
    ),
    "listed in tokenizer_config alone": Case(
        "bpe-qwen2",
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen2",
        edit=change("tokenizer.json", added_tokens=[]),
    ),
    "nothing said": Case(
        "bpe-gpt-2",
        "Olmo2ForCausalLM",
        "olmo2",
        "gpt-2",
        edit=without("tokenizer_config.json"),
    ),
}
# Sizes of the vocabulary by which the converter knows a model
SIZES = {
    "Code Llama": Case("spm-llama", "LlamaForCausalLM", "llama", config={"vocab_size": 32016}),
    "StarCoder": Case("bpe-smollm", "GraniteForCausalLM", "granite", "smollm", {"vocab_size": 49152}),
}
# Tokenizers the converter has no right way for
ALONE = {
    "Llama 2 without its model": Case("spm-llama-fast", "LlamaForCausalLM", "llama"),
    "Llama 2 saved anew": Case("spm-llama-metaspace", "LlamaForCausalLM", "llama", config={"vocab_size": 720}),
    "Gemma 2 without its model": Case("spm-gemma-fast", "Gemma2ForCausalLM", "gemma2"),
}

ONE_OF_A_KIND = {case.kind: name for name, case in {**CASES, **ALONE}.items()}.values()


def has_mark(text: str) -> bool:
    return any(unicodedata.category(character)[0] == "M" for character in text)


def has_foreign_capital(text: str) -> bool:
    return any(character.isupper() and not character.isascii() for character in text)


# Where llama.cpp b10605 itself takes text apart otherwise than the tokenizer, by pre-tokenizer, and why. All other texts
# must agree, and in the test of the table some text of each sort must differ, or the entry is out of date.
DIFFERENCES: dict[str, tuple[Callable[[str], object], ...]] = {
    # its regex leaves combining marks out, and takes any letter outside ASCII for a small and a capital one
    "tekken": (has_mark, has_foreign_capital),
    "gpt-4o": (has_mark, has_foreign_capital),
    # it keeps digits together (the real vocabulary has no token of two), and sees any Unicode space as a vertical tab,
    # which is in no range
    "deepseek-llm": (re.compile(r"\d\d").search, re.compile("[\u2003\u3000]").search),
    "deepseek-coder": (re.compile("[\u2003\u3000]").search,),
}


def differs(case: Case, text: str) -> bool:
    """Whether llama.cpp is known to take a text apart otherwise than the tokenizer of a case."""
    if case.kind in ("bpe-qwen2", "bpe-qwen35"):  # it does not compose characters, the tokenizer's NFC does
        return unicodedata.normalize("NFC", text) != text
    if case.kind == "spm-llama-metaspace":  # a space goes in front where there is none; llama.cpp puts one anyway
        return text.startswith(" ")
    return any(holds(text) for holds in DIFFERENCES.get(case.pre, ()))


def make(folder: Path, case: Case) -> dict[str, Any]:
    """The files of a checkpoint but for its weights; its config."""
    size = write_tokenizer(folder, case.kind)
    config = {"architectures": [case.architecture], "model_type": case.model_type, "vocab_size": size, **SHAPE}
    config |= case.config
    (folder / "config.json").write_text(json.dumps(config))
    case.edit(folder)
    return config


def key_values(path: Path) -> KeyValues:
    """The tokenizer's keys in a GGUF file, in order: types and contents."""
    fields = gguf.GGUFReader(path).fields
    return {
        name: (tuple(found.types), found.contents()) for name, found in fields.items() if name.startswith("tokenizer.")
    }


def described(path: Path, folder: Path, config: Mapping[str, Any]) -> KeyValues:
    writer = gguf.GGUFWriter(path, "llama")
    vocabulary.describe(writer, folder, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return key_values(path)


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory, converter: Converter) -> Converted:
    """What llama.cpp's converter makes of every case."""

    def convert(root: Path) -> Converted:
        alone = "Llama 2 without its model"
        converted = {}
        for number, (name, case) in enumerate({**CASES, **(SIZES if DEEP else {}), alone: ALONE[alone]}.items()):
            folder = root / f"case-{number}"
            config = make(folder, case)
            out = Path(f"{folder}.gguf")
            converter.convert(folder, out, gguf.LlamaFileType.MOSTLY_F16, pre=case.pre, vocabulary_only=True)
            converted[name] = (folder, config, key_values(out))
        return converted

    converted: Converted = recorded(tmp_path_factory, "vocabularies", convert)
    return converted


@pytest.mark.parametrize("name", cases([*CASES, *SIZES], CASES))
def test_key_values_are_the_converters(theirs: Converted, name: str, tmp_path: Path) -> None:
    folder, config, expected = theirs[name]
    found = described(tmp_path / "ours.gguf", folder, config)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key] == value, key


def test_routes_are_the_converters(converter: Converter) -> None:
    """Every architecture that can be written, and every one with a route, goes the way of the converter's class."""
    ways = {
        "_llama": {"LlamaModel", "Mistral3Model"},
        "_gemma": {"GemmaModel", "Gemma2Model", "Gemma3Model"},
        "_phi3": {"Phi3MiniModel"},
        "_plain": {"TextModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel"},
    }
    for architecture, method in converter.vocabulary_methods([*vocabulary.ROUTES, *known()]).items():
        route = vocabulary.route(architecture)
        assert method.partition(".")[0] in ways[route.__name__], architecture


def test_scores_come_from_merges(theirs: Converted, tmp_path: Path) -> None:
    """Without tokenizer.model the converter writes one score for all; ours put merges in the order of the model's."""
    folder, config, expected = theirs["Llama 2 without its model"]
    ours = described(tmp_path / "ours.gguf", folder, config)
    assert list(ours) == list(expected)
    assert [key for key in ours if ours[key] != expected[key]] == ["tokenizer.ggml.scores"]
    write_tokenizer(tmp_path, "spm-llama")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    scores = ours["tokenizer.ggml.scores"][1]
    merged = [number for number in range(259, 700) if len(model.IdToPiece(number)) > 1]
    assert len(merged) > 100
    assert [scores[number] for number in merged] == [model.GetScore(number) for number in merged]


@pytest.mark.parametrize("name", cases([*CASES, *ALONE], ONE_OF_A_KIND))
def test_token_ids(name: str, tmp_path: Path) -> None:
    """Token ids are those of the tokenizers library, and with special tokens those of transformers."""
    from transformers import AutoTokenizer

    case = {**CASES, **ALONE}[name]
    config = make(tmp_path, case)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole = AutoTokenizer.from_pretrained(tmp_path)
    anew = type(whole).__name__ == "LlamaTokenizer"  # transformers 5 puts spaces as in the kind spm-llama-metaspace
    with loaded(tmp_path / "model.gguf", tmp_path, config, name) as model:

        def same(text: str) -> bool:
            return model.tokenize(text, special=False) == tokenizer.encode(text, add_special_tokens=False).ids

        for text in CORPUS:
            if not differs(case, text):
                assert same(text), text
                assert (anew and text.startswith(" ")) or model.tokenize(text) == whole(text)["input_ids"], text
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if "▁▁" not in token.content]
        for text in ("".join(f"{token}word " for token in added), " ".join(added), "\n".join(added), "".join(added)):
            # in one kind a space goes in front of the text alone; llama.cpp puts one after every special token
            assert same(text) or case.kind == "spm-llama-metaspace", text


def test_characters_are_not_composed(tmp_path: Path) -> None:
    """llama.cpp leaves decomposed text as it is, where Qwen's tokenizer has NFC."""
    config = make(tmp_path, CASES["Qwen 2"])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    composed = tokenizer.encode("cafe\u0301").ids
    tokenizer.normalizer = normalizers.Sequence([])
    with loaded(tmp_path / "model.gguf", tmp_path, config) as model:
        assert model.tokenize("cafe\u0301") == tokenizer.encode("cafe\u0301").ids != composed
        assert model.tokenize("caf\u00e9") == composed


def test_runs_of_spaces_in_gemma(tmp_path: Path) -> None:
    """More spaces than the longest token of them: llama.cpp and SentencePiece take the longest first, tokenizers merges."""
    config = make(tmp_path, CASES["Gemma 2"])
    text = "w     v"
    with loaded(tmp_path / "model.gguf", tmp_path, config) as model:
        found = model.tokenize(text, special=False)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert found == pieces.Encode(text)
    assert found != Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "number", cases(range(len(rows_of_table())), range(0, 99, 3)), ids=lambda number: rows_of_table()[number].name
)
def test_every_row_of_the_table(number: int, tmp_path: Path) -> None:
    row = rows_of_table()[number]
    tokenizer = cross_cutting(row, tmp_path)
    config = {"architectures": ["Any"], "vocab_size": tokenizer.get_vocab_size()}
    known = DIFFERENCES.get(row.name, ())
    with loaded(tmp_path / "model.gguf", tmp_path, config) as model:
        found = {text for text in CORPUS if model.tokenize(text) != tokenizer.encode(text).ids}
    assert not {text for text in found if not any(holds(text) for holds in known)}
    for holds in known:
        assert any(holds(text) for text in found)
    assert described(tmp_path / "ours.gguf", tmp_path, config)["tokenizer.ggml.pre"][1] == row.name


def test_fingerprints_are_the_converters() -> None:
    source = (LLAMA_CPP / "conversion" / "base.py").read_text(encoding="utf-8")
    theirs = dict(re.findall(r'chkhsh == "(\w{64})":\s+#.*\s+res = "(.*)"', source))
    ours = pretokenizers.fingerprints()
    assert len(ours) > 70
    assert {found: theirs[found] for found in ours} == ours
    encoders = re.compile("bert|jina|granite-embed|sarvam")  # sarvam: pieces, not bytes
    assert all(encoders.search(name) for found, name in theirs.items() if found not in ours)
    assert f"chktxt = {pretokenizers.probe_text()!r}".replace("\u200d", r"\u200d") in source


@pytest.mark.parametrize(
    "name", cases([name for name, case in CASES.items() if case.pre != "default"], ("Llama 3", "Phi-4"))
)
def test_fingerprint_goes_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter's fingerprint, of what transformers encodes, gives the name whatever the cuts are."""
    from transformers import AutoTokenizer

    config = make(tmp_path, CASES[name])
    tokens = AutoTokenizer.from_pretrained(tmp_path).encode(pretokenizers.probe_text())
    monkeypatch.setitem(pretokenizers.fingerprints(), sha256(str(tokens).encode()).hexdigest(), "command-r")
    assert described(tmp_path / "ours.gguf", tmp_path, config)["tokenizer.ggml.pre"][1] == "command-r"


def test_fingerprint_with_what_tokenizer_config_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's was taken when transformers still put the beginning-of-text token there that tokenizer.json lacks."""
    edit = change("tokenizer.json", post_processor=None)
    config = make(tmp_path, Case("bpe-deepseek-v3", "LlamaForCausalLM", "llama", edit=edit))
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(pretokenizers.probe_text()).ids
    fingerprint = sha256(str([0, *ids]).encode()).hexdigest()
    monkeypatch.setitem(pretokenizers.fingerprints(), fingerprint, "command-r")
    assert described(tmp_path / "ours.gguf", tmp_path, config)["tokenizer.ggml.pre"][1] == "command-r"


def test_demo_model(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert described(tmp_path / "ours.gguf", DEMO, config)["tokenizer.ggml.pre"][1] == "qwen2"
    with loaded(tmp_path / "model.gguf", DEMO, config) as model:
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        for text in CORPUS:
            assert model.tokenize(text) == tokenizer.encode(text).ids


def test_spellings_of_a_cut(tmp_path: Path) -> None:
    """The same cut said otherwise: line ends escaped in the regex, what to keep, digits as a regex."""
    names = {}
    for kind, old, new in (
        ("bpe-deepseek-v3", r"\r\n", r"\\r\\n"),
        ("bpe-dbrx", '"Isolated",\n        "invert": false', '"Removed",\n        "invert": true'),
        ("bpe-smollm", '"type": "Digits",\n        "individual_digits": true', SPLIT_DIGITS),
    ):
        write_tokenizer(tmp_path, kind)
        source = (tmp_path / "tokenizer.json").read_text()
        assert old in source, kind
        (tmp_path / "tokenizer.json").write_text(source.replace(old, new))
        names[kind] = described(tmp_path / "ours.gguf", tmp_path, {})["tokenizer.ggml.pre"][1]
    assert names == {"bpe-deepseek-v3": "deepseek-v3", "bpe-dbrx": "dbrx", "bpe-smollm": "smollm"}


SPLIT_DIGITS = r'"type": "Split", "pattern": {"Regex": "\\p{N}"}, "behavior": "Isolated", "invert": false'


def pre_tokenizer(**step: Any) -> Callable[[Path], object]:
    return change("tokenizer.json", pre_tokenizer=step)


def model(**values: Any) -> Callable[[Path], object]:
    """Sets entries of tokenizer.json's model."""

    def edit(folder: Path) -> None:
        old = json.loads((folder / "tokenizer.json").read_text())["model"]
        change("tokenizer.json", model={**old, **values})(folder)

    return edit


def unigram(folder: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_prefix=str(folder / "tokenizer"), vocab_size=260, minloglevel=2
    )


def renamed(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": False}
ODD_SPLIT = {"type": "Split", "pattern": {"Regex": "[aeiou]+|" + "x" * 90}, "behavior": "Isolated", "invert": False}
LOST = {**ODD_SPLIT, "pattern": {"Regex": r"\p{N}"}, "behavior": "Removed", "invert": True}
REFUSALS = {
    "WordPiece": ("bpe-gpt-2", model(type="WordPiece"), "of type WordPiece: .*encoders only"),
    "Unigram": ("bpe-gpt-2", model(type="Unigram"), "of type Unigram: .*by likelihood"),
    "WordLevel": ("bpe-gpt-2", model(type="WordLevel"), "of type WordLevel"),
    "no type": ("bpe-gpt-2", model(type=None), "of type None: it must be BPE"),
    "characters": ("bpe-gpt-2", pre_tokenizer(type="Whitespace"), "neither ByteLevel nor byte_fallback"),
    "unknown regex": (
        "bpe-qwen2",
        pre_tokenizer(type="Sequence", pretokenizers=[ODD_SPLIT, BYTE_LEVEL]),
        r"cuts text by \[aeiou\]\+\|x{48}\.\.\.: no pre-tokenizer of llama.cpp",
    ),
    "text that is lost": ("bpe-qwen2", pre_tokenizer(type="Sequence", pretokenizers=[LOST, BYTE_LEVEL]), "Removed"),
    "no cut": ("bpe-qwen2", pre_tokenizer(**BYTE_LEVEL), "cuts text by nothing"),
    "space in front": ("bpe-gpt-2", pre_tokenizer(**{**BYTE_LEVEL, "add_prefix_space": True}), "a space in front"),
    "another step": (
        "bpe-gpt-2",
        pre_tokenizer(type="Sequence", pretokenizers=[DIGITS, BYTE_LEVEL]),
        r"by \\p\{N\}\+: no",
    ),
    "small letters": ("bpe-gpt-2", change("tokenizer.json", normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
    "suffix": ("bpe-gpt-2", model(end_of_word_suffix="</w>"), "end_of_word_suffix '</w>'"),
    "words taken whole": (
        "bpe-qwen2",
        both(model(ignore_merges=True), model(merges=[])),
        "ignore_merges true and the token '.*', which no merge",
    ),
    "pieces cut": (
        "spm-llama-fast",
        pre_tokenizer(type="Digits", individual_digits=True),
        '"Digits".*not in llama.cpp',
    ),
    "pairs missing": ("spm-llama-fast", lambda folder: drop_a_merge(folder), "of other pairs, but not of"),
    "unigram pieces": ("spm-llama", unigram, "not BPE but unigram"),
    "not SentencePiece": (
        "spm-llama",
        both(
            lambda folder: (folder / "tokenizer.model").write_text("IQ== 0"),
            without("tokenizer.json"),
        ),
        "not a SentencePiece model",
    ),
    "nothing": (
        "bpe-gpt-2",
        without("tokenizer.json"),
        "neither tokenizer.json nor tokenizer.model; copy",
    ),
    "tekken only": ("bpe-tekken", renamed("tokenizer.json", "tekken.json"), "a tokenizer only as tekken.json; save"),
    "tiktoken only": ("bpe-qwen2", renamed("tokenizer.json", "qwen.tiktoken"), "only as qwen.tiktoken"),
    "one token twice": (
        "bpe-qwen2",
        change("tokenizer_config.json", pad_token="[PAD650]"),
        r"tokens 646 and 650 are both '\[PAD650\]'",
    ),
    "damaged": (
        "bpe-gpt-2",
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        "tokenizer.json is damaged: it is not JSON",
    ),
    "not an object": (
        "bpe-gpt-2",
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        "it holds a list, not an object",
    ),
    "nested": (
        "bpe-gpt-2",
        lambda folder: (folder / "tokenizer.json").write_text('{"a": ' + "[" * 99 + "]" * 99 + "}"),
        "nested deeper than 64 levels",
    ),
    "too large": (
        "bpe-gpt-2",
        lambda folder: os.truncate(folder / "tokenizer.json", 300 << 20),
        "more than 268,435,456",
    ),
    "empty": (
        "bpe-gpt-2",
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "are damaged .KeyError",
    ),
    "no merges": ("bpe-gpt-2", model(merges=7), "tokenizer.json"),
    "a number as vocabulary": ("spm-llama-fast", model(vocab=7), "are damaged"),
}


def drop_a_merge(folder: Path) -> None:
    """Takes away one of several pairs that make a piece."""
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    made = [left + right for left, right in merges]
    number = next(number for number, piece in enumerate(made) if made.count(piece) > 1)
    model(merges=merges[:number] + merges[number + 1 :])(folder)


@pytest.mark.parametrize("reason", REFUSALS)
def test_refusals(reason: str, tmp_path: Path) -> None:
    kind, edit, message = REFUSALS[reason]
    config = make(tmp_path, Case(kind, "LlamaForCausalLM", "llama", config={"vocab_size": 704}, edit=edit))
    with pytest.raises(CheckpointError, match=message) as caught:
        described(tmp_path / "ours.gguf", tmp_path, config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [600, 0, -1, "700", 1 << 40])
@pytest.mark.parametrize("kind", ["bpe-smollm", "spm-llama", "spm-llama-fast", "spm-phi3"])
def test_vocabulary_larger_than_the_embedding(kind: str, size: Any, tmp_path: Path) -> None:
    config = make(tmp_path, Case(kind, "Phi3ForCausalLM" if "phi" in kind else "LlamaForCausalLM", "llama"))
    with pytest.raises(QuantryError, match=r"the number \d+, and the model has 600 tokens|vocab_size"):
        described(tmp_path / "ours.gguf", tmp_path, {**config, "vocab_size": size})


def test_size_of_the_tokenizer_where_the_config_has_none(tmp_path: Path) -> None:
    for kind, size in (("bpe-qwen2", 646), ("spm-llama", 700), ("spm-gemma-fast", 800)):
        write_tokenizer(tmp_path / kind, kind)
        found = described(tmp_path / "ours.gguf", tmp_path / kind, {"architectures": ["Any"]})
        assert len(found["tokenizer.ggml.tokens"][1]) == size


def test_size_a_family_has_by_default(tmp_path: Path) -> None:
    """Gemma 3's configs leave it out."""
    write_tokenizer(tmp_path, "spm-gemma")
    writer = gguf.GGUFWriter(tmp_path / "ours.gguf", "gemma3")
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "gemma3_text"}}
    vocabulary.describe(writer, tmp_path, config)
    assert len(writer.kv_data[0][gguf.Keys.Tokenizer.LIST].value) == 262208


def test_another_file_named_tokenizer_model(tmp_path: Path) -> None:
    """Llama 3 has its tiktoken file under that name, beside tokenizer.json."""
    config = make(tmp_path, CASES["Llama 3"])
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    assert described(tmp_path / "ours.gguf", tmp_path, config)["tokenizer.ggml.pre"][1] == "llama-bpe"


def test_no_beginning_of_text_unless_the_tokenizer_has_one(tmp_path: Path) -> None:
    """llama.cpp's llama-bpe puts one in front by itself."""
    edit = change("tokenizer.json", post_processor=None)
    config = make(tmp_path, Case("bpe-llama-bpe", "LlamaForCausalLM", "llama", edit=edit))
    with loaded(tmp_path / "model.gguf", tmp_path, config) as model:
        assert model.tokenize("Hello") == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Hello").ids


def test_words_taken_whole_where_merges_make_them_all(tmp_path: Path) -> None:
    """ignore_merges says nothing then, and a name without it will do."""
    config = make(tmp_path, Case("bpe-qwen2", "Qwen2ForCausalLM", "qwen2", edit=model(ignore_merges=True)))
    assert described(tmp_path / "ours.gguf", tmp_path, config)["tokenizer.ggml.pre"][1] == "qwen2"
