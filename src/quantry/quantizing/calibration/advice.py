"""Advice on calibration text before it spoils a model: one sentence per finding."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from quantry.quantizing.calibration.text import CalibrationText
from quantry.report.sizes import counted

FEW = 16_384  # tokens; the Gram matrix of a layer with 4096 inputs wants several times as many
RANDOM = 0.9  # share of pairs of neighbours that occur once: prose, notes and code 0.1 to 0.6, random tokens 0.99
PAIRS = 16_384  # that this is measured on; of a few hundred most are single in any text
ENOUGH = 1_024
REPEATED = 4.0  # bits of a token: prose, notes and code 7 to 9


def advise(text: CalibrationText) -> tuple[str, ...]:
    """Returns what a person should know of a calibration text: of each part, if it is a mixture."""
    parts = text.parts or (text,)
    cut = (note for part in parts for note in _cut(part))
    content = (note for part in parts for note in (*_doubled(part), *_content(part)))
    return (*_mixture(text), *text.notes, *_amount(text), *cut, *_form(text), *content)


def _mixture(text: CalibrationText) -> Iterator[str]:
    """Says what a mixture consists of."""
    for part in text.parts:
        form = "with the chat template" if part.template else "without a chat template"
        yield (
            f"{part.name}: {counted(len(part.tokens), 'window')}, {part.count:,} tokens, "
            f"{part.count / text.count:.0%} of the mixture, {form}"
        )


def _amount(text: CalibrationText) -> Iterator[str]:
    if text.count < FEW:
        yield f"{text.name} gives {text.count:,} tokens: give at least {FEW:,} for statistics that hold"


def _cut(text: CalibrationText) -> Iterator[str]:
    if text.truncated * 2 > text.documents:
        yield (
            f"{text.truncated} of {text.documents} documents of {text.name} are cut at the end of a window of "
            f"{text.length} tokens: a longer --length keeps them whole"
        )


def _form(text: CalibrationText) -> Iterator[str]:
    if text.chat and not text.template:
        yield (
            f"the model has a chat template and {text.name} is not in its form: "
            'give records with "messages" if it will be used for chats'
        )


def _doubled(text: CalibrationText) -> Iterator[str]:
    doubled = sum(text.bos is not None and window[:2] == (text.bos, text.bos) for window in text.tokens)
    if doubled:
        yield f"{doubled} windows begin with two BOS: the model sees one when it is used"


def _content(text: CalibrationText) -> Iterator[str]:
    same = len(text.tokens) - len(set(text.tokens))
    if same:
        yield f"{same} of {len(text.tokens)} windows are the same as another: give more varied data"
    if unigram_bits(text) < REPEATED:
        yield f"{text.name} repeats itself ({unigram_bits(text):.1f} bits a token, text has 7 to 9): give other data"
    elif text.count > ENOUGH and single_pairs(text) > RANDOM:
        yield (
            f"{text.name} looks random: {single_pairs(text):.0%} of neighbouring tokens meet only once, in text "
            "10 to 60 %: check that it is text and that the tokenizer belongs to the model"
        )


def unigram_bits(text: CalibrationText) -> float:
    """Returns the entropy of single tokens."""
    counts = Counter(token for window in text.tokens for token in window)
    total = sum(counts.values())
    return -sum(count / total * math.log2(count / total) for count in counts.values())


def single_pairs(text: CalibrationText) -> float:
    """Returns the share of neighbouring pairs of tokens that occur once, among the first thousands."""
    pairs = [pair for window in text.tokens for pair in pairwise(window)][:PAIRS]
    return sum(count == 1 for count in Counter(pairs).values()) / max(1, len(pairs))
