"""What is said of calibration data: nothing of good data, the right thing of each kind of bad data."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantry.models.reader import demo_folder
from quantry.models.tokenizer import load_tokenizer
from quantry.quantizing.calibration.advice import diagnose, single_pairs, unigram_bits
from quantry.quantizing.calibration.text import Data, load


@pytest.fixture(scope="module")
def good() -> Data:
    return load(None, load_tokenizer(demo_folder()), samples=64, length=512)


def drawn(seed: int, vocabulary: int, **others: Any) -> Data:
    source = random.Random(seed)
    windows = tuple(tuple(source.randrange(vocabulary) for _ in range(512)) for _ in range(64))
    return Data(windows, "noise.txt", "text", 64, 0, True, None, False, **others)


def test_good_data_needs_no_words(good: Data) -> None:
    assert diagnose(good) == ()
    assert 7 < unigram_bits(good) < 11
    assert 0.1 < single_pairs(good) < 0.7


def test_notes_are_handed_on(good: Data) -> None:
    assert diagnose(replace(good, notes=("a note",))) == ("a note",)


def test_little_data(good: Data) -> None:
    (said,) = diagnose(replace(good, tokens=good.tokens[:4]))
    assert said == "calibration.txt gives 2,048 tokens: give at least 16,384 for statistics that hold"


def test_cut_documents(good: Data) -> None:
    (said,) = diagnose(replace(good, documents=10, truncated=6))
    assert said.startswith("6 of 10 documents of calibration.txt are cut at the end of a window of 512 tokens")
    assert diagnose(replace(good, documents=10, truncated=5)) == ()


def test_a_chat_model_on_plain_text(good: Data) -> None:
    (said,) = diagnose(replace(good, template=False))
    assert 'give records with "messages"' in said
    assert diagnose(replace(good, template=False, chat=False)) == ()


def test_two_bos(good: Data) -> None:
    assert good.bos is not None
    doubled = (good.bos, good.bos, *good.tokens[0][2:])
    (said,) = diagnose(replace(good, tokens=(doubled, *good.tokens[1:])))
    assert said == "1 windows begin with two BOS: the model sees one when it is used"


@pytest.mark.parametrize("vocabulary", [4096, 32000, 150000])
def test_tokens_drawn_at_random(vocabulary: int) -> None:
    (said,) = diagnose(drawn(0, vocabulary))
    assert said.startswith("noise.txt looks random: ")


def test_words_drawn_at_random_from_text(good: Data) -> None:
    """The right tokens in the wrong order are not caught as noise: half of their pairs are common ones."""
    tokens = [token for window in good.tokens for token in window]
    random.Random(0).shuffle(tokens)
    shuffled = tuple(tuple(tokens[start : start + 512]) for start in range(0, len(tokens), 512))
    assert single_pairs(replace(good, tokens=shuffled)) > single_pairs(good)


def test_repetition(good: Data) -> None:
    phrase = good.tokens[0][1:12]
    long = tuple((phrase * 3000)[start : start + 512] for start in range(0, 64 * 512, 512))
    said = diagnose(replace(good, tokens=long, bos=None))
    assert any("repeats itself" in line for line in said)


def test_equal_windows(good: Data) -> None:
    (said,) = diagnose(replace(good, tokens=(*good.tokens, good.tokens[0], good.tokens[0])))
    assert said == "2 of 66 windows are the same as another: give more varied data"


def test_starved_experts_are_named(good: Data) -> None:
    pool = {f"layers.0.experts.{number}.gate_proj": tokens for number, tokens in enumerate((900, 3, 256, 0))}
    (said,) = diagnose(good, [{"layers.0.experts.gate_up_proj.*": pool}, {}])
    assert said == (
        "2 of 4 experts of layers.0.experts.gate_up_proj.* saw fewer than 256 tokens: layers.0.experts.1.gate_proj (3), "
        "layers.0.experts.3.gate_proj (0); they get the statistics of all experts of the layer together"
    )
    many = {f"e.{number}": 0 for number in range(60)}
    (said,) = diagnose(good, [{"e.*": many}])
    assert said.startswith("60 of 60 experts of e.* saw fewer than 256 tokens: e.0 (0), ")
    assert " and 52 more; " in said
    assert diagnose(good, [{"e.*": many}], least=0) == ()


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
    assert diagnose(data) == ()
