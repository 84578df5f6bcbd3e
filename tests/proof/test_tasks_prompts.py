"""A person's own prompts: read, asked of the demo model, and compared."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantry.errors import QuantryError
from quantry.models.reader import demo_folder
from quantry.proof.tasks.answers import TorchAnswers
from quantry.proof.tasks.prompts import Prompt, ask, compare, is_match, normalized, read_prompts
from quantry.proof.tasks.significance import sign_test


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_lines_become_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is 2 plus 3?"}]
    file = write(
        tmp_path / "prompts.jsonl",
        {"text": "The sky is", "answer": "blue", "id": "sky"},
        "",
        {"messages": messages, "answer": ["5", "five"], "match": "exact", "id": 7},
        {"prompt": "Grüße 🙂"},
    )
    assert read_prompts(file) == [
        Prompt("sky", "The sky is", (), ("blue",), "contains"),
        Prompt("7", None, tuple(messages), ("5", "five"), "exact"),
        Prompt("4", "Grüße 🙂", ({"role": "user", "content": "Grüße 🙂"},)),
    ]
    assert read_prompts(file)[1].question == "user: What is 2 plus 3?"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("[]", "needs either"),
        ('{"prompt": "a", "messages": []}', "needs either"),
        ('{"prompt": "a", "text": "a"}', "needs either"),
        ('{"answer": "a"}', "needs either"),
        ('{"prompt": "a", "anwser": "b"}', "unknown field anwser"),
        ('{"prompt": ""}', "prompt that is not text"),
        ('{"prompt": 3}', "prompt that is not text"),
        ('{"messages": []}', "not a list of roles and contents"),
        ('{"messages": [{"role": "user"}]}', "not a list of roles and contents"),
        ('{"messages": {"role": "user", "content": "a"}}', "not a list of roles and contents"),
        ('{"prompt": "a", "match": "fuzzy"}', "match 'fuzzy'"),
        ('{"prompt": "a", "match": ["exact"]}', "match ['exact']"),
        ('{"prompt": "a", "answer": []}', "answer that is not text"),
        ('{"prompt": "a", "answer": [" "]}', "answer that is not text"),
        ('{"prompt": "a", "answer": null}', "answer that is not text"),
        ('{"prompt": "a", "id": [1]}', "id that is not text"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "the id x 2 times"),
        ("\n \n", "has no prompts"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(QuantryError) as caught:
        read_prompts(write(tmp_path / "prompts.jsonl", line))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuantryError, match="cannot read"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(QuantryError, match="UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("  The sky\nis  blue. ", "the sky is blue", True),
        ("Paris!!", "paris", True),
        ("“Paris”", "Paris", True),
        ("The answer is 5.2", "The answer is 5", False),
        ("-5", "5", False),
        ("$5", "5", False),
        ("5%", "5", False),
        ("C++", "C.", False),
        ("é", "e\u0301", True),
        ("?", "!", False),
        ("", " ", True),
    ],
)
def test_texts_are_compared_by_their_words(first: str, second: str, same: bool) -> None:
    assert (normalized(first) == normalized(second)) is same


@pytest.mark.parametrize(
    ("written", "answer", "contains", "exact"),
    [
        ("The capital of France is Paris.", "paris", True, False),
        ("Paris.", "Paris", True, True),
        ("15", "5", False, False),
        ("It is 5.2 metres", "5", False, False),
        ("It is 2,5 metres", "5", False, False),
        ("It is 5. And no more", "5", True, False),
        ("I know", "no", False, False),
        ("a.b", "a?b", False, False),
        ("They live in the deep\n ocean, dear", "the deep ocean", True, False),
        ("", "5", False, False),
    ],
)
def test_an_answer_is_found_as_whole_words(written: str, answer: str, contains: bool, exact: bool) -> None:
    assert is_match(written, ["something else", answer], "contains") is contains
    assert is_match(written, ["something else", answer], "exact") is exact


def test_both_models_are_compared_prompt_by_prompt() -> None:
    prompts = [
        Prompt("a", "x", answers=("blue",)),
        Prompt("b", "x", answers=("5", "five"), match="exact"),
        Prompt("c", "x", answers=("cold",)),
        Prompt("d", "x"),
    ]
    base = ["The sky is blue.", "five", "It is cold.", "Once upon a time"]
    quantized = ["the sky is blue", "It is five", "It is hot.", "Once upon a time"]
    report = compare(prompts, base, quantized)
    assert [record.agree for record in report.records] == [True, False, False, True]
    assert [record.base_correct for record in report.records] == [True, True, True, None]
    assert [record.quantized_correct for record in report.records] == [True, False, False, None]
    assert (report.prompts, report.with_answer, report.agreement.value) == (4, 3, 0.5)
    assert report.correct is not None
    assert report.exact is not None
    assert report.contained is not None
    third = pytest.approx(1 / 3)
    assert [report.correct.base, report.correct.quantized, report.correct.p] == [1.0, third, sign_test(2, 0)]
    assert [report.exact.base, report.exact.quantized] == [third, 0.0]
    assert [report.contained.base, report.contained.quantized] == [1.0, pytest.approx(2 / 3)]
    assert len(report.warnings) == 2
    assert "50% of the answers are those of the 16-bit model, less than 85%" in report.warnings[0]
    assert json.loads(json.dumps(asdict(report)))["agreement"]["value"] == 0.5


def test_an_empty_answer_agrees_with_nothing() -> None:
    prompts = [Prompt(str(number), "x") for number in range(4)]
    report = compare(prompts, ["", " \n", "blue", "blue"], ["", "", "blue", ""])
    assert [record.agree for record in report.records] == [False, False, True, False]
    assert report.agreement.value == 0.25
    assert report.warnings[-1] == "3 of 4 prompts got an empty answer, which counts as a different one"


@pytest.mark.parametrize(("alike", "warned"), [(17, False), (16, True)])
def test_agreement_below_the_limit_is_warned_of(alike: int, warned: bool) -> None:
    prompts = [Prompt(str(number), "x") for number in range(20)]
    report = compare(prompts, ["same"] * 20, ["same"] * alike + ["other"] * (20 - alike))
    assert bool(report.warnings) is warned
    assert report.correct is None


def test_the_demo_model_is_asked_as_text_and_as_chat(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_folder())
    answers = TorchAnswers(model, AutoTokenizer.from_pretrained(demo_folder()))
    file = write(
        tmp_path / "prompts.jsonl",
        {"messages": [{"role": "user", "content": "What color is the sky?"}], "answer": "blue"},
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "answer": "Paris"},
        {"prompt": "What is the capital of France?", "answer": "Paris"},
        {"text": "Once upon a time"},
    )
    prompts = read_prompts(file)
    written = ask(prompts, answers, max_tokens=24)
    assert written[:3] == ["The sky is blue.", "The capital of France is Paris.", "The capital of France is Paris."]
    assert written[3].startswith(", there was a little girl")
    continued = ask(prompts[2:3], answers, max_tokens=24, chats=False)
    assert continued != written[2:3]
    assert ask([Prompt("plain", prompts[2].text)], answers, max_tokens=24) == continued
    assert "no chat template: 1 prompt went" in compare(prompts, written, written, chats=False).warnings[0]
    report = compare(prompts, written, written)
    assert report.agreement.value == 1.0
    assert report.correct is not None
    assert report.correct.base == 1.0
    assert report.warnings == ()
    long = Prompt("long", "word " * 2000)
    with pytest.raises(QuantryError, match="prompt long has"):
        ask([long], answers, max_tokens=24)
    with pytest.raises(QuantryError, match="no prompts"):
        compare([], [], [])
