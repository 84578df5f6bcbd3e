"""Windows: cut front to back from one tokenization, with the BOS that the tokenizer itself adds and no second one."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quantry.errors import QuantryError
from quantry.models.reader import demo_folder
from quantry.proof.text import PIECE, TextFile, Window, default_text, fitting_length, load_text, windows
from tiny_tokenizers import write_tokenizer

TEXT = "The old man walked along the river, counted the boats, and told his daughter what he had seen. " * 8


def load(folder: Path, kind: str) -> Any:
    write_tokenizer(folder, kind)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "bos"), [("bpe-llama-bpe", True), ("spm-llama", True), ("spm-gemma", True), ("bpe-qwen2", False)]
)
def test_windows_are_the_text_front_to_back(tmp_path: Path, kind: str, bos: bool) -> None:
    tokenizer = load(tmp_path, kind)
    plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    dressed = tokenizer(TEXT)["input_ids"]
    own = dressed[: len(dressed) - len(plain)] if dressed[-len(plain) :] == plain else []
    assert len(own) == bos
    assert not own or own == [tokenizer.bos_token_id]
    found = windows(TEXT, tokenizer, 32, None)
    step = 32 - bos
    assert len(found) == len(plain) // step > 2
    for number, window in enumerate(found):
        assert window == Window((*own, *plain[number * step : (number + 1) * step]), 1)
        assert len(window.tokens) == 32
        assert window.scored == 31
    assert windows(TEXT, tokenizer, 32, 2) == found[:2]
    assert windows(TEXT, tokenizer, 32, 1000) == found


def test_a_text_that_brings_its_own_bos_gets_no_second(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "bpe-llama-bpe")
    found = windows(tokenizer.bos_token + TEXT, tokenizer, 32, 2)
    assert found == windows(TEXT, tokenizer, 32, 2)
    assert [window.tokens.count(tokenizer.bos_token_id) for window in found] == [1, 1]


def test_every_token_that_a_tokenizer_puts_before_a_text_is_there_and_none_is_scored(tmp_path: Path) -> None:
    """GLM's tokenizers begin with two tokens; some end with an EOS, which does not belong into a window."""
    write_tokenizer(tmp_path, "bpe-qwen2")
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    first, second, last = list(special)[:3]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": first, "type_id": 0}},
            {"SpecialToken": {"id": second, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": last, "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [special[name]], "tokens": [name]} for name in (first, second, last)
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    found = windows(TEXT, tokenizer, 20, 2)
    before = (special[first], special[second])
    assert found == [Window((*before, *plain[:18]), 2), Window((*before, *plain[18:36]), 2)]


def test_the_demo_model_has_windows_of_its_own_text() -> None:
    text = default_text()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_folder())
    found = windows(text, tokenizer, 512, 3)
    assert text.name == "held-out.txt"
    assert [len(window.tokens) for window in found] == [512] * 3
    assert {window.tokens[0] for window in found} == {tokenizer.bos_token_id}
    assert text.start(4000).startswith(tokenizer.decode(found[0].tokens[1:])[:200])


def test_a_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "bpe-llama-bpe")
    text = "The river."
    have = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    with pytest.raises(QuantryError) as caught:
        windows(text, tokenizer, 64, None)
    assert str(caught.value) == (
        f"the text has {have} tokens and one window needs 63; use a shorter --length or a longer text"
    )
    with pytest.raises(QuantryError, match="has 0 tokens"):
        windows("", tokenizer, 64, 1)


@pytest.mark.parametrize(
    ("length", "count", "words"),
    [
        (1, 1, "no token to score; give a --length of at least 2"),
        (-5, 1, "of at least 2"),
        (8, 0, "0 windows"),
        (8, -1, "-1 windows"),
    ],
)
def test_windows_of_nothing_are_refused(tmp_path: Path, length: int, count: int, words: str) -> None:
    with pytest.raises(QuantryError, match=words):
        windows(TEXT, load(tmp_path, "bpe-llama-bpe"), length, count)


def test_no_warning_of_a_text_longer_than_the_context(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load(tmp_path, "bpe-llama-bpe")
    tokenizer.model_max_length = 16
    windows(TEXT, tokenizer, 32, None)
    assert not caplog.records


def test_a_text_of_the_users_own_is_read_or_refused(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("Grüße vom Fluss", encoding="utf-8")
    own = load_text(tmp_path / "own.txt")
    assert (own.start(5), own.name) == ("Grüße", "own.txt")
    assert own.digest() == hashlib.sha256("Grüße vom Fluss".encode()).hexdigest()
    (tmp_path / "other.txt").write_bytes(b"Gr\xfc\xdfe")
    (tmp_path / "empty.txt").write_text(" \n\n")
    for file, problem in (
        ("other.txt", f"cannot read {tmp_path / 'other.txt'}: it is not UTF-8"),
        ("none.txt", f"cannot read {tmp_path / 'none.txt'}: No such file or directory"),
        ("empty.txt", f"{tmp_path / 'empty.txt'} has no text"),
        ("", f"{tmp_path} is not a file"),
    ):
        with pytest.raises(QuantryError) as caught:
            load_text(tmp_path / file)
        assert str(caught.value) == f"{problem}; give a text file in UTF-8"


def test_a_long_text_is_read_as_far_as_its_windows_reach(tmp_path: Path) -> None:
    """The end of the file is no text at all: a reader of the whole file would stumble over it."""
    tokenizer = load(tmp_path, "bpe-llama-bpe")
    lines = TEXT.replace(". ", ".\n") * (2 * PIECE // len(TEXT))
    (tmp_path / "long.txt").write_bytes(lines.encode() + b"\xff\xfe")
    text = load_text(tmp_path / "long.txt")
    plain = tokenizer(lines[: PIECE // 4], add_special_tokens=False)["input_ids"]
    assert [window.tokens[1:] for window in windows(text, tokenizer, 32, 3)] == [
        tuple(plain[start : start + 31]) for start in (0, 31, 62)
    ]
    with pytest.raises(QuantryError, match="not UTF-8"):
        text.digest()


def test_pieces_of_a_text_end_with_lines_and_are_the_text(tmp_path: Path) -> None:
    lines = TEXT.replace(". ", ".\n")
    (tmp_path / "own.txt").write_text(lines)
    pieces = list(TextFile(tmp_path / "own.txt").pieces(100))
    assert "".join(pieces) == lines
    assert len(pieces) > 3
    assert all(piece.endswith("\n") for piece in pieces)
    (tmp_path / "line.txt").write_text("x" * 1000)  # no line ends
    assert {len(piece) for piece in TextFile(tmp_path / "line.txt").pieces(100)} == {200}


def test_windows_are_no_longer_than_the_context_of_a_model() -> None:
    short, long = {"max_position_embeddings": 64}, {"max_position_embeddings": 4096}
    assert fitting_length(512, long, {}) == (512, ())
    assert fitting_length(512, long, short) == (64, ("windows have 64 tokens, not 512: that is the model's context",))
