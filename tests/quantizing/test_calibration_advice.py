"""What is said of calibration data: nothing of good data, the right thing of each kind of bad data."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantry.models.reader import demo_folder
from quantry.models.tokenizer import load_tokenizer
from quantry.quantizing.calibration.advice import advise, single_pairs, unigram_bits
from quantry.quantizing.calibration.text import CalibrationText, load


@pytest.fixture(scope="module")
def good() -> CalibrationText:
    return load(None, load_tokenizer(demo_folder()), samples=64, length=512)


def drawn(seed: int, vocabulary: int, **others: Any) -> CalibrationText:
    source = random.Random(seed)
    windows = tuple(tuple(source.randrange(vocabulary) for _ in range(512)) for _ in range(64))
    return CalibrationText(windows, "noise.txt", "text", 64, 0, True, None, False, **others)


def test_good_data_needs_no_words(good: CalibrationText) -> None:
    assert advise(good) == ()
    assert 7 < unigram_bits(good) < 11
    assert 0.1 < single_pairs(good) < 0.7


def test_notes_are_handed_on(good: CalibrationText) -> None:
    assert advise(replace(good, notes=("a note",))) == ("a note",)


def test_little_data(good: CalibrationText) -> None:
    (said,) = advise(replace(good, tokens=good.tokens[:4]))
    assert said == "calibration.txt gives 2,048 tokens: give at least 16,384 for statistics that hold"


def test_cut_documents(good: CalibrationText) -> None:
    (said,) = advise(replace(good, documents=10, truncated=6))
    assert said.startswith("6 of 10 documents of calibration.txt are cut at the end of a window of 512 tokens")
    assert advise(replace(good, documents=10, truncated=5)) == ()


def test_a_chat_model_on_plain_text(good: CalibrationText) -> None:
    (said,) = advise(replace(good, template=False))
    assert 'give records with "messages"' in said
    assert advise(replace(good, template=False, chat=False)) == ()


def test_two_bos(good: CalibrationText) -> None:
    assert good.bos is not None
    doubled = (good.bos, good.bos, *good.tokens[0][2:])
    (said,) = advise(replace(good, tokens=(doubled, *good.tokens[1:])))
    assert said == "1 windows begin with two BOS: the model sees one when it is used"


@pytest.mark.parametrize("vocabulary", [4096, 32000, 150000])
def test_tokens_drawn_at_random(vocabulary: int) -> None:
    (said,) = advise(drawn(0, vocabulary))
    assert said.startswith("noise.txt looks random: ")


def test_words_drawn_at_random_from_text(good: CalibrationText) -> None:
    """The right tokens in the wrong order are not caught as noise: half of their pairs are common ones."""
    tokens = [token for window in good.tokens for token in window]
    random.Random(0).shuffle(tokens)
    shuffled = tuple(tuple(tokens[start : start + 512]) for start in range(0, len(tokens), 512))
    assert single_pairs(replace(good, tokens=shuffled)) > single_pairs(good)


def test_repetition(good: CalibrationText) -> None:
    phrase = good.tokens[0][1:12]
    long = tuple((phrase * 3000)[start : start + 512] for start in range(0, 64 * 512, 512))
    said = advise(replace(good, tokens=long, bos=None))
    assert any("repeats itself" in line for line in said)


def test_equal_windows(good: CalibrationText) -> None:
    (said,) = advise(replace(good, tokens=(*good.tokens, good.tokens[0], good.tokens[0])))
    assert said == "2 of 66 windows are the same as another: give more varied data"


def test_text_of_a_file_in_another_language_is_fine(tmp_path: Path) -> None:
    """A tokenizer that cuts words into many tokens must not make text look random or repeated."""
    tokenizer = load_tokenizer(demo_folder())
    words = [
        "der Fluss",
        "über",
        "die Brücke",
        "größer",
        "als je zuvor",
        "wo",
        "der Sommer endet",
        "und",
        "das Haus am Wald",
    ]
    source = random.Random(1)
    text = "\n\n".join(" ".join(source.choice(words) for _ in range(40)) + "." for _ in range(700))
    (tmp_path / "deutsch.txt").write_text(text, encoding="utf-8")
    data = replace(load(tmp_path / "deutsch.txt", tokenizer, samples=64, length=512), template=True)
    assert advise(data) == ()
