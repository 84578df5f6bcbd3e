"""Calibration data: every source, the same windows from the same seed, one BOS, one chat template, refusals."""

import json
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from quantry.errors import CheckpointError, QuantryError
from quantry.models.reader import demo_folder
from quantry.models.tokenizer import load_tokenizer, prefix_of
from quantry.quantizing.calibration.text import BREAK, CalibrationText, load
from tiny_tokenizers import KINDS, TEXT, write_tokenizer

STORIES = [
    f"Story {number}: the old man walked along the river and counted {number * 7} boats." for number in range(40)
]
CHATS = [
    [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": f"Answer {number}."}]
    for number in range(40)
]
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
)
Write = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_tokenizer(demo_folder())


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return written


def lines(records: list[Any]) -> str:
    return "\n".join(json.dumps(record) for record in records)


def decoded(data: CalibrationText, tokenizer: Any) -> str:
    return "".join(tokenizer.decode(window, skip_special_tokens=False) for window in data.tokens)


def test_the_built_in_text(demo: Any) -> None:
    for given in (None, "demo"):
        data = load(given, demo, samples=8, length=256)
        assert (data.name, data.kind, data.chat, data.template) == ("calibration.txt", "text", True, True)
        assert [len(window) for window in data.tokens] == [256] * 8
        assert data.count == 8 * 256
        assert 0 < data.truncated <= data.documents


def test_the_built_in_text_gives_what_it_has(demo: Any) -> None:
    data = load(None, demo, samples=1000, length=2048, context=1024)
    assert 150 < len(data.tokens) < 1000
    assert data.length == 1024
    assert data.notes == (
        "windows have 1024 tokens, not 2048: that is the model's context",
        f"the built-in text gives {len(data.tokens)} of 1000 samples",
    )


def test_windows_are_the_documents_laid_end_to_end(demo: Any, write: Write) -> None:
    """Against a plain restatement: tokens of the same documents, joined, cut."""
    path = write("text.txt", "\n\n".join(STORIES))
    data = load(path, demo, samples=5, length=64, seed=3)
    order = list(STORIES)
    random.Random(3).shuffle(order)
    stream = [token for story in order for token in demo(story + BREAK, add_special_tokens=False)["input_ids"]]
    bos = demo.bos_token_id
    assert [list(window) for window in data.tokens] == [[bos, *stream[63 * at : 63 * at + 63]] for at in range(5)]


def test_the_seed_decides_which_documents(demo: Any, write: Write) -> None:
    path = write("text.txt", "\n\n".join(STORIES))
    one, same, other = (load(path, demo, samples=3, length=64, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.fingerprint == same.fingerprint
    assert one.tokens != other.tokens
    assert one.fingerprint != other.fingerprint


def test_blank_lines_end_documents_whatever_they_hold(demo: Any, write: Write) -> None:
    spread = write("spread.txt", "\n \t\n\n".join(STORIES) + "\n\n\n")
    plain = write("plain.txt", "\n\n".join(STORIES))
    assert load(spread, demo, samples=5, length=64).tokens == load(plain, demo, samples=5, length=64).tokens


def test_documents_and_cuts_are_counted(demo: Any, write: Write) -> None:
    sizes = [len(demo(story + BREAK, add_special_tokens=False)["input_ids"]) for story in STORIES]
    whole = load(write("text.txt", "\n\n".join(STORIES)), demo, samples=1, length=sum(sizes) + 1)
    assert (whole.documents, whole.truncated) == (len(STORIES), 0)
    assert max(sizes) < 63
    cut = load(write("text.txt", "\n\n".join(STORIES)), demo, samples=sum(sizes) // 63, length=64)
    assert len(cut.tokens) - 2 <= cut.truncated <= len(cut.tokens)


@pytest.mark.parametrize(
    "record",
    [
        lambda chat: {"messages": chat},
        lambda chat: {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in chat
            ]
        },
        lambda chat: {"prompt": chat[0]["content"], "completion": chat[1]["content"]},
        lambda chat: {"prompt": chat[:1], "completion": chat[1:]},
    ],
)
def test_chats_go_through_the_template_once(demo: Any, write: Write, record: Any) -> None:
    path = write("chats.jsonl", lines([record(chat) for chat in CHATS]))
    data = load(path, demo, samples=4, length=128)
    text = decoded(data, demo)
    number = next(n for n in range(40) if f"Question {n}?" in text)
    assert f"<|user|>\nQuestion {number}?<|eos|>\n<|assistant|>\nAnswer {number}.<|eos|>\n" in text
    assert data.template
    assert [window.count(demo.bos_token_id) for window in data.tokens] == [1] * 4


def test_text_records_are_plain(demo: Any, write: Write) -> None:
    records = load(write("text.jsonl", lines([{"text": story} for story in STORIES])), demo, samples=5, length=64)
    plain = load(write("text.txt", "\n\n".join(STORIES)), demo, samples=5, length=64)
    assert records.tokens == plain.tokens
    assert (records.kind, records.template) == ("jsonl", False)
    listed = load(write("text.json", json.dumps([{"text": story} for story in STORIES])), demo, samples=5, length=64)
    assert listed.tokens == plain.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_every_tokenizer_puts_its_bos_once(kind: str, tmp_path: Path, write: Write) -> None:
    write_tokenizer(tmp_path / "model", kind)
    tokenizer: Any = load_tokenizer(tmp_path / "model")
    tokenizer.chat_template = WITH_BOS
    path = write("chats.jsonl", lines([{"messages": chat} for chat in CHATS]))
    data = load(path, tokenizer, samples=4, length=96)
    dressed, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    assert list(prefix_of(tokenizer)) == dressed[: len(dressed) - len(plain)]
    assert data.bos == (dressed[0] if len(dressed) > len(plain) else None)
    bos = tokenizer.bos_token_id
    for window in data.tokens:
        assert len(window) == 96
        if data.bos is not None:
            assert window[0] == bos
            assert window.count(bos) == 1
        assert all(pair != (bos, bos) for pair in pairwise(window)) or bos is None


def test_a_text_that_brings_its_bos_gets_no_second(demo: Any, write: Write) -> None:
    path = write("text.txt", "\n\n".join(f"<|bos|>{story}" for story in STORIES))
    data = load(path, demo, samples=5, length=64)
    assert data.tokens == load(write("plain.txt", "\n\n".join(STORIES)), demo, samples=5, length=64).tokens


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("text.txt", "\n\n".join(f"<|bos|><|bos|>{story}" for story in STORIES)),
        ("chats.jsonl", lines([{"messages": [{"role": "user", "content": "<|bos|><|bos|>hello"}]}] * 40)),
    ],
)
def test_two_bos_in_the_data_are_refused(demo: Any, write: Write, name: str, text: str) -> None:
    with pytest.raises(QuantryError, match=rf"{name}, document \d+ has two <\|bos\|> in a row; remove them"):
        load(write(name, text), demo, samples=2, length=32)


def test_a_template_that_adds_a_bos_the_tokenizer_also_adds_makes_one(demo: Any, write: Write) -> None:
    """The usual mistake: rendered text, tokenized with special tokens."""
    chat = CHATS[0]
    wrong = demo(demo.apply_chat_template(chat, tokenize=False))["input_ids"]
    assert wrong[:2] == [demo.bos_token_id] * 2
    data = load(write("chats.jsonl", lines([{"messages": chat}])), demo, samples=1, length=16)
    assert list(data.tokens[0]) == wrong[1:17]


@pytest.mark.parametrize("split", [None, "train", "validation"])
def test_a_folder_that_datasets_saved(demo: Any, write: Write, tmp_path: Path, split: str | None) -> None:
    import datasets  # type: ignore[import-untyped,unused-ignore]

    rows = datasets.Dataset.from_list([{"text": story} for story in STORIES])
    saved = rows if split is None else datasets.DatasetDict({split: rows})
    saved.save_to_disk(str(tmp_path / "saved"))
    data = load(tmp_path / "saved", demo, samples=5, length=64)
    assert data.kind == "datasets"
    assert data.tokens == load(write("text.txt", "\n\n".join(STORIES)), demo, samples=5, length=64).tokens


@pytest.mark.parametrize("form", ["file", "folder"])
def test_parquet(demo: Any, write: Write, tmp_path: Path, form: str) -> None:
    import pyarrow  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]

    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat} for chat in CHATS]), path)
    data = load(path if form == "file" else path.parent, demo, samples=3, length=64)
    assert data.kind == "parquet"
    same = load(write("chats.jsonl", lines([{"messages": chat} for chat in CHATS])), demo, samples=3, length=64)
    assert data.tokens == same.tokens


@pytest.mark.parametrize(("library", "name"), [("datasets", "saved"), ("pyarrow", "rows.parquet")])
def test_a_library_that_is_missing_is_named(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, name: str
) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(QuantryError, match=f"{name} needs the {library} library.*pip install {library}"):
        load(tmp_path / name, demo, samples=1, length=16)


def test_too_little_data_says_how_much_there_is(demo: Any, write: Write) -> None:
    path = write("text.txt", STORIES[0])
    tokens = len(demo(STORIES[0] + BREAK, add_special_tokens=False)["input_ids"])
    with pytest.raises(QuantryError) as caught:
        load(path, demo, samples=16, length=11)
    assert str(caught.value) == (
        f"text.txt has {tokens} tokens and 16 samples of 11 need 160; "
        f"give more data, at most {tokens // 10} --samples or a shorter --length"
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', r"a\.jsonl cannot be read: .*line 2 must be one JSON object"),
        ("a.jsonl", "[1, 2]\n", r"a\.jsonl, line 1 is a JSON list; records need"),
        ("a.jsonl", '{"title": "a", "body": 3}\n', r"a\.jsonl, document 1 has body, title; records need \"text\""),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', r"document 1 has the message .*both text"),
        ("a.jsonl", '{"messages": ["hello"]}\n', r"document 1 has the message 'hello'"),
        ("a.jsonl", '{"messages": []}\n', r"document 1 has messages; records need"),
        ("a.json", '"a"', r"a\.json is no list of records"),
        ("a.parquet", "no table", r"a\.parquet cannot be read"),
        ("a.txt", "", r"a\.txt has 0 tokens"),
    ],
)
def test_bad_data_is_refused_in_one_line(demo: Any, write: Write, name: str, text: str, problem: str) -> None:
    with pytest.raises(QuantryError, match=problem) as caught:
        load(write(name, text), demo, samples=2, length=16)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_or_no_text(demo: Any, tmp_path: Path) -> None:
    with pytest.raises(QuantryError, match="there is no .*missing"):
        load(tmp_path / "missing", demo)
    with pytest.raises(QuantryError, match="holds no data set"):
        load(tmp_path, demo)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(QuantryError, match=r"a\.txt cannot be read.*UTF-8"):
        load(tmp_path / "a.txt", demo)
    with pytest.raises(QuantryError, match="0 samples"):
        load(None, demo, samples=0)
    with pytest.raises(QuantryError, match="a window of 2 tokens"):
        load(None, demo, length=2)
    with pytest.raises(CheckpointError, match="the tokenizer of .* cannot be read"):
        load_tokenizer(tmp_path)


def test_chats_need_a_template_that_takes_them(tmp_path: Path, write: Write) -> None:
    write_tokenizer(tmp_path / "model", "bpe-qwen2")
    tokenizer: Any = load_tokenizer(tmp_path / "model")
    path = write("chats.jsonl", lines([{"messages": chat} for chat in CHATS]))
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(QuantryError, match=r"refuses chats\.jsonl, document \d+: no system role"):
        load(path, tokenizer, samples=1, length=16)
    tokenizer.chat_template = "{{ 'x' * 10 ** 7 }}"
    with pytest.raises(QuantryError, match="chat template gives more than"):
        load(path, tokenizer, samples=1, length=16)
    tokenizer.chat_template = None
    with pytest.raises(QuantryError, match="is a chat and the tokenizer has no chat template"):
        load(path, tokenizer, samples=1, length=16)
    pairs = write("pairs.jsonl", lines([{"prompt": "One, two, ", "completion": "three."}] * 40))
    data = load(pairs, tokenizer, samples=1, length=16)
    assert "One, two, three." in decoded(data, tokenizer)
    assert not data.template


def test_markers_in_plain_text_count_as_the_template(tmp_path: Path, write: Write) -> None:
    write_tokenizer(tmp_path / "model", "bpe-qwen2")
    tokenizer: Any = load_tokenizer(tmp_path / "model")
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<|user|>", "<|end|>", "<|assistant|>")])
    tokenizer.chat_template = WITH_BOS.replace("{{ bos_token }}", "")
    plain = write("plain.txt", "\n\n".join(TEXT * 3))
    rendered = write("rendered.txt", "\n\n".join(f"<|user|>\n{story}<|end|>" for story in STORIES))
    assert not load(plain, tokenizer, samples=4, length=32).template
    assert load(rendered, tokenizer, samples=4, length=32).template
