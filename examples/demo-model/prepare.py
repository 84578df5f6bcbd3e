"""Clean the generated texts, drop duplicates and wrong answers, and split them for training, calibration and scoring.

The teacher is small: it loops, contradicts itself and gets facts wrong. What looks bad by simple rules is dropped, and
so are the stories it found least likely itself. No first sentence occurs twice, and a training story that shares many
runs of eight words with a calibration or held-out story is dropped, so that held-out scores mean something.

    python prepare.py raw.jsonl --out text

writes text/train.jsonl (fields kind, user, text), text/calibration.txt, text/held-out.txt and text/counts.json.
"""

import argparse
import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from itertools import pairwise
from multiprocessing import Pool
from pathlib import Path

from prompts import NUMBERS, identity

Document = dict[str, str]

PLAIN = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2026": "..."}
)
STRANGE = re.compile(r"[^A-Za-z0-9 \n.,!?'\"():;\u00c0-\u00ff-]|https?|\b[A-Z]{4,}\b|^\s*(\d+[.)]|-)\s", re.MULTILINE)
UNWANTED = re.compile(
    r"\b(kill\w*|blood\w*|murder\w*|gun|guns|drunk|beer|wine|drugs?|sex\w*|naked|suicide"
    r"|allah|gods?|jesus|corpse|war|wars|weapon\w*|hell|damn"
    r"|language model|as an ai|i'm sorry, but|i cannot|i can't assist|smollm|hugging face|this story|the story|moral of"
    r"|title|chapter|narrator|readers?|in conclusion|important to)\b",
    re.IGNORECASE,
)
# What the teacher copies from its examples, and answers that do not fit their questions.
ODD = re.compile(r"^(no, i|yes, that)|\b(bikes?|wheels?|before|crabbies|fishes)\b", re.IGNORECASE)
# Questions that people try first: they always go into the training text.
PINNED = {
    "What color is the sky?",
    "What is the capital of France?",
    "What sound does a cow make?",
    "What is 2 plus 3?",
    "What is a cat?",
    "Where do fish live?",
    "What is the opposite of hot?",
    "Hello!",
    "What is a dog?",
    "What do rabbits eat?",
    "What day comes after Monday?",
    "How many legs does a dog have?",
    "What does a teacher do?",
}


def normal(text: str) -> str:
    """Return the letters and digits of a text in lower case, with single spaces."""
    return " ".join(re.findall(r"[a-z0-9\u00e0-\u00ff]+", text.lower()))


def first_sentence(text: str) -> str:
    """Return the first sentence, normalized."""
    return normal(re.split(r"(?<=[.!?])[\s\"]", text, maxsplit=1)[0])


def clean_story(document: Document) -> Document | None:
    """Return a story in its final form, or None if it is not worth keeping."""
    lines = [" ".join(line.split()) for line in document["text"].translate(PLAIN).splitlines()]
    text = "\n".join(line for line in lines if line)
    words = normal(text).split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    pairs = list(pairwise(words))
    expect = document.get("expect") or ()
    if (
        not 220 <= len(text) <= 1150
        or STRANGE.search(text)
        or UNWANTED.search(text)
        or not text.endswith((".", "!", '."', '!"'))
        or text.count('"') % 2
        or re.search(r"\b(\w+),? \1\b", text)
        or len(set(triples)) < 0.93 * len(triples)
        or len(set(pairs)) < 0.8 * len(pairs)
        or not all(word in words for word in expect)
    ):
        return None
    return {**document, "text": text, "key": first_sentence(text)}


def right(question: str, answer: str, expect: list[str]) -> bool:
    """Tell whether an answer holds one of the expected words and says nothing that contradicts it."""
    words = re.findall(r"[\w'-]+", answer.lower())
    joined = " ".join(words)
    wanted = [e.lower() for e in expect]
    if not any(re.search(rf"(?<![\w-]){re.escape(e)}(?![\w-])", joined) for e in wanted):
        return False
    if wanted[0] == "yes" and any(w in ("no", "not", "never") or w.endswith("n't") for w in words):
        return False
    if re.search(r"\d", question):  # arithmetic: the last number counts
        numbers = [w for w in words if w.isdigit() or w in NUMBERS]
        return bool(numbers) and numbers[-1] in wanted
    if match := re.search(r"(bigger|smaller), an? (\w+) or an? (\w+)", question):
        named = [w for w in words if w in match.groups()[1:]]
        wrong = (
            ("small", "smaller", "smallest")
            if match[1] == "bigger"
            else ("big", "bigger", "larger", "large", "largest")
        )
        return named[0] in wanted and not any(w in wrong for w in words)
    return True


def clean_answer(document: Document) -> Document | None:
    """Return a question with its answer in final form, or None if the answer is not short, plain and right."""
    text = " ".join(document["text"].translate(PLAIN).split())
    words = normal(text).split()
    if (
        not 2 <= len(text) <= 110
        or STRANGE.search(text.replace("=", "").replace("+", ""))
        or UNWANTED.search(text)
        or (ODD.search(text) and not ODD.search(document["user"]))
        or not text.endswith((".", "!", "?"))
        or len(re.findall(r"[.!?](\s|$)", text)) > (2 if len(words) < 12 else 1)
        or text.count('"') % 2
        or len(set(words)) < 0.6 * len(words)
        or normal(document["user"]) == normal(text)
        or not right(document["user"], text, list(document.get("expect") or ()))
    ):
        return None
    return {**document, "text": text[0].upper() + text[1:], "key": normal(document["user"])}


def clean(line: str) -> Document | None:
    """Clean one line of the generator's output."""
    document = json.loads(line)
    return clean_answer(document) if document["kind"] == "qa" else clean_story(document)


def best_answers(answers: list[Document], most: int) -> list[Document]:
    """Keep for each question the answers given most often (the teacher agrees with itself on what it knows)."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for document in answers:
        groups[document["user"]][document["text"]] += 1
    kept = []
    for question, counter in groups.items():
        top = counter.most_common(most)
        kept += [
            {"kind": "qa", "user": question, "text": text, "key": normal(question)}
            for text, count in top
            if count * 6 >= top[0][1]
        ]
    return kept


def render(document: Document) -> str:
    """Write a document as the chat template does, without the leading <|bos|>."""
    if not document["user"]:
        return document["text"]
    return f"<|user|>\n{document['user']}<|eos|>\n<|assistant|>\n{document['text']}<|eos|>"


def shingles(text: str, size: int = 8) -> set[int]:
    """Return the hashes of all runs of `size` words."""
    words = normal(text).split()
    return {hash(" ".join(words[i : i + size])) for i in range(len(words) - size + 1)}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", nargs="+", help="what generate.py wrote")
    parser.add_argument("--out", default="text", help="folder to write")
    parser.add_argument("--drop", type=float, default=0.2, help="share of the least likely stories to drop")
    parser.add_argument("--answers", type=int, default=4, help="most answers kept for one question")
    parser.add_argument("--copies", type=int, default=4, help="how often a question is repeated in the training text")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="size of calibration.txt and of held-out.txt")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    lines = [line for name in options.raw for line in Path(name).read_text(encoding="utf-8").splitlines()]
    with Pool() as pool:
        found = [document for document in pool.imap(clean, lines, chunksize=2000) if document is not None]
    stories = [document for document in found if document["kind"] != "qa"]
    answers = best_answers([document for document in found if document["kind"] == "qa"], options.answers)
    answers += [{"kind": "qa", "user": q, "text": a, "key": normal(q)} for q, a in identity()]
    counts = {"raw": len(lines), "clean stories": len(stories)}

    stories.sort(key=lambda document: -float(document["score"]))
    stories = stories[: round(len(stories) * (1 - options.drop))]
    # Of two stories with one first sentence, the likelier stays.
    unique = {document["key"]: document for document in reversed(stories)}
    counts |= {"distinct stories": len(unique), "answers": len(answers)}

    # Whole groups of one key go to one split, in an order that depends on the key alone.
    groups: dict[str, list[Document]] = defaultdict(list)
    for document in [*unique.values(), *answers]:
        groups[document["key"]].append(document)
    pinned = {normal(question) for question in PINNED} | {normal(question) for question, _ in identity()}
    splits: dict[str, list[Document]] = {"calibration": [], "held-out": [], "train": []}
    room = {"calibration": options.bytes, "held-out": options.bytes}
    for key in sorted(groups, key=lambda key: hashlib.sha256(key.encode()).hexdigest()):
        name = next((n for n, left in room.items() if left > 0), "train") if key not in pinned else "train"
        splits[name] += groups[key]
        if name != "train":
            room[name] -= sum(len(render(document).encode()) + 2 for document in groups[key])

    seen = set().union(*(shingles(d["text"]) for n in room for d in splits[n] if d["kind"] != "qa"))
    train = []
    for document in splits["train"]:
        own = shingles(document["text"]) if document["kind"] != "qa" else set()
        if len(own & seen) <= 0.15 * len(own):
            train.append(document)
    counts["near-duplicates of scored text dropped"] = len(splits["train"]) - len(train)
    counts |= {f"train {kind}": sum(d["kind"] == kind for d in train) for kind in ("story", "story-chat", "qa")}
    counts |= {name: len(splits[name]) for name in room}

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)
    train += [document for document in train if document["kind"] == "qa"] * (options.copies - 1)
    rng.shuffle(train)
    with (out / "train.jsonl").open("w", encoding="utf-8") as file:
        for document in train:
            fields = {name: document[name] for name in ("kind", "user", "text")}
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")
    for name in room:
        rng.shuffle(splits[name])
        text = "\n\n".join(render(document) for document in splits[name]) + "\n"
        (out / f"{name}.txt").write_text(text, encoding="utf-8")
    (out / "counts.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(counts, indent=2))


if __name__ == "__main__":
    main()
