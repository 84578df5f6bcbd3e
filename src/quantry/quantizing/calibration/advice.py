"""What is wrong with calibration data, before it spoils a model: one sentence for each finding."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from quantry.quantizing.calibration.observe import LEAST
from quantry.quantizing.calibration.text import Data

FEW = 16_384  # tokens; the Gram matrix of a layer with 4096 inputs wants several times as many
RANDOM = 0.9  # share of pairs of neighbours that occur once: prose, notes and code 0.1 to 0.6, random tokens 0.99
PAIRS = 16_384  # that this is measured on; of a few hundred most are single in any text
ENOUGH = 1_024
REPEATED = 4.0  # bits of a token: prose, notes and code 7 to 9
SHOWN = 8  # experts named in one sentence

Counts = Mapping[str, Mapping[str, int]]  # tokens by pool of experts, then by expert; `Observed.tokens`


def diagnose(data: Data, experts: Sequence[Counts] = (), *, least: int = LEAST) -> tuple[str, ...]:
    """What a person should know of the data, and of the experts of each block that it left without tokens."""
    return (*data.notes, *_amount(data), *_form(data), *_content(data), *_starved(experts, least))


def _amount(data: Data) -> Iterator[str]:
    if data.count < FEW:
        yield f"{data.name} gives {data.count:,} tokens: give at least {FEW:,} for statistics that hold"
    if data.truncated * 2 > data.documents:
        yield (
            f"{data.truncated} of {data.documents} documents of {data.name} are cut at the end of a window of "
            f"{data.length} tokens: a longer --length keeps them whole"
        )


def _form(data: Data) -> Iterator[str]:
    if data.chat and not data.template:
        yield (
            f"the model has a chat template and {data.name} is not in its form: "
            'give records with "messages" if it will be used for chats'
        )
    doubled = sum(data.bos is not None and window[:2] == (data.bos, data.bos) for window in data.tokens)
    if doubled:
        yield f"{doubled} windows begin with two BOS: the model sees one when it is used"


def _content(data: Data) -> Iterator[str]:
    same = len(data.tokens) - len(set(data.tokens))
    if same:
        yield f"{same} of {len(data.tokens)} windows are the same as another: give more varied data"
    if unigram_bits(data) < REPEATED:
        yield f"{data.name} repeats itself ({unigram_bits(data):.1f} bits a token, text has 7 to 9): give other data"
    elif data.count > ENOUGH and single_pairs(data) > RANDOM:
        yield (
            f"{data.name} looks random: {single_pairs(data):.0%} of neighbouring tokens meet only once, in text "
            "10 to 60 %: check that it is text and that the tokenizer belongs to the model"
        )


def unigram_bits(data: Data) -> float:
    """The entropy of single tokens."""
    counts = Counter(token for window in data.tokens for token in window)
    total = sum(counts.values())
    return -sum(count / total * math.log2(count / total) for count in counts.values())


def single_pairs(data: Data) -> float:
    """The share of pairs of neighbouring tokens that occur once, in the first thousands of pairs."""
    pairs = [pair for window in data.tokens for pair in pairwise(window)][:PAIRS]
    return sum(count == 1 for count in Counter(pairs).values()) / max(1, len(pairs))


def _starved(experts: Sequence[Counts], least: int) -> Iterator[str]:
    for pools in experts:
        for pool, counts in pools.items():
            few = {group: tokens for group, tokens in counts.items() if tokens < least}
            if few:
                named = ", ".join(f"{group} ({tokens})" for group, tokens in list(few.items())[:SHOWN])
                more = f" and {len(few) - SHOWN} more" if len(few) > SHOWN else ""
                yield (
                    f"{len(few)} of {len(counts)} experts of {pool} saw fewer than {least} tokens: {named}{more}; "
                    "they get the statistics of all experts of the layer together"
                )
