"""What three switches of `quantry serve` do to speed on the embedded engine, each beside the same server without it.

    python benchmarks/serve_switches.py MODEL [--draft MODEL] [--text FILE] [-o benchmarks/results/serve_switches.json]

MODEL is a 16-bit model, which is served as Q8_0 and drafted for by its own Q4_0, or a GGUF together with --draft. All
servers run at once and take turns with equal greedy requests, so that whatever else the machine does meets all of them.

- prefix cache: prompts that share a head of about a thousand tokens and end in different questions; time to first
  token and tokens a second of the whole request, with the cache and without it.
- lookup and draft: the pace after the first token on prompts whose continuation is a copy of what stands in them, and
  on ordinary prose, where there is little to copy.

How many answers are the same as without the switch is counted: it need not be all, since tokens that are computed in
other batches are rounded in another order, and near ties then fall otherwise.
Hits and accepted guesses are the engine's own counts.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))

import measure
import quantry
from quantry.jobs.load.metrics import Watch
from quantry.serving import embedded
from quantry.serving.client import Answer, Server
from quantry.serving.prepare import serve

CONTEXT = 2048
HEAD, SHORT, LONG = 1000, 32, 128  # tokens of the common head; of answers to its questions; of other answers
PARAGRAPH = range(450, 750)  # characters: three times that and an answer are well within the context
BEGUN = 60  # characters of a third copy that tell the model to go on copying
SELDOM = 3600.0  # seconds between two looks at gauges, which are not asked for here
RATES = {"prefix_hit_rate": "from the cache", "acceptance_rate": "of the guesses accepted"}
QUESTIONS = (
    "Who is the first that the text speaks of?", "Where does it happen?", "What is found?", "What is the text about?",
    "Which animals are in it?", "How does it end?", "What is said about a friend?", "What do they learn?",
    "Which colours are named?", "What is the weather like?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """What a load did on one server: the answers in the order of the prompts, and what the engine counted."""

    answers: list[Answer]
    prefix_hit_rate: float | None
    acceptance_rate: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path, help="a GGUF with the same vocabulary")
    parser.add_argument("--text", type=Path, default=Path(quantry.__file__).parent / "demo" / "held-out.txt")
    parser.add_argument("--requests", type=int, default=6, help="of each load to each server")
    parser.add_argument("--threads", type=int)
    parser.add_argument("-o", "--output", type=Path, default=measure.RESULTS / "serve_switches.json")
    given = parser.parse_args()
    text = given.text.read_text(encoding="utf-8")
    with TemporaryDirectory() as place:
        model, draft = _models(given.model, given.draft, Path(place))
        figures = {
            "engine": f"llama.cpp {embedded.build()}", "model": given.model.name, "requests": given.requests,
            "text": given.text.name, "prefix_cache": _prefix_cache(model, text, given.requests, given.threads),
            **_guesses(model, draft, text, given.requests, given.threads),
        }  # fmt: skip
    measure.keep(given.output.stem, figures, given.output.parent)


def _models(model: Path, draft: Path | None, place: Path) -> tuple[Path, Path]:
    """The GGUF that is served and the one that drafts, made where they are not given."""
    if model.suffix == ".gguf" and draft is None:
        sys.exit("a GGUF cannot be quantized again: give --draft, or the 16-bit model")
    if model.suffix != ".gguf":
        source, model = model, place / "q8_0"
        quantry.quantize(source, model, preset="gguf-q8_0")
        if draft is None:
            draft = place / "q4_0"
            quantry.quantize(source, draft, preset="gguf-q4_0")
    assert draft is not None
    return model, draft


# ---- the loads ----


def _prefix_cache(model: Path, text: str, requests: int, threads: int | None) -> dict[str, Any]:
    ways = {"without": {"prefix_cache": False}, "with": {"prefix_cache": True}}
    with _servers(model, ways, threads) as servers:
        head = _first_tokens(servers["with"].url, text, HEAD)
        asked = [f"{head}\n\nQuestion {n}: {q}\nAnswer:" for n, q in enumerate(islice(cycle(QUESTIONS), requests + 1))]
        done = _taken(servers, asked, SHORT)
    rows = {name: _row(way, done["without"]) for name, way in done.items()}
    _show(f"prefix cache, a common head of {HEAD} tokens", rows)
    return {"head_tokens": HEAD, "answer_tokens": SHORT, **rows}


def _guesses(model: Path, draft: Path, text: str, requests: int, threads: int | None) -> dict[str, Any]:
    """Lookup and a draft model beside plain decoding, on two loads."""
    ways: dict[str, dict[str, Any]] = {"plain": {}, "lookup": {"lookup": True}, "draft": {"draft": draft}}
    found: dict[str, Any] = {"lookup": {}, "draft": {}, "plain": {}}
    with _servers(model, ways, threads) as servers:
        for load, asked in _prompts(text, requests + 1).items():
            done = _taken(servers, asked, LONG)
            rows = {name: _row(way, done["plain"]) for name, way in done.items()}
            _show(f"{load}, {LONG} tokens", rows)
            for name, row in rows.items():
                found[name][load] = row
    return found


def _prompts(text: str, number: int) -> dict[str, list[str]]:
    """Of each load as many; no paragraph is used twice."""
    paragraphs = [one for one in text.split("\n\n") if len(one) in PARAGRAPH and "<|" not in one]
    if len(paragraphs) < 2 * number:
        sys.exit(f"the text has {len(paragraphs)} paragraphs of {PARAGRAPH}, and {2 * number} are needed")
    copied, ordinary = paragraphs[:number], paragraphs[number : 2 * number]
    return {
        "copying": [f"{one}\n\n{one}\n\n{one[:BEGUN]}" for one in copied],
        "ordinary": [one[: len(one) // 2] for one in ordinary],
    }


def _first_tokens(url: str, text: str, number: int) -> str:
    """The beginning of a text that has so many tokens for the model."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        tokens = client.post("/tokenize", json={"content": text[: number * 8]}).json()["tokens"][:number]
        if len(tokens) < number:
            sys.exit(f"the text has {len(tokens)} tokens, and {number} are needed")
        return str(client.post("/detokenize", json={"tokens": tokens}).json()["content"])


# ---- requests ----


@contextmanager
def _servers(model: Path, ways: Mapping[str, Mapping[str, Any]], threads: int | None) -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        found = {}
        for name, options in ways.items():
            running = stack.enter_context(serve(model, port=0, context=CONTEXT, parallel=1, threads=threads, **options))
            found[name] = stack.enter_context(Server(running.url))
        yield found


def _taken(servers: Mapping[str, Server], prompts: Sequence[str], tokens: int) -> dict[str, Way]:
    """Every prompt to every server in turns, the order turned round each time; the first prompt only warms up."""
    names = list(servers)
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    for name in names:
        _answer(servers[name], prompts[0], tokens)
    with ExitStack() as stack:
        watches = {name: stack.enter_context(Watch(server.url, every=SELDOM)) for name, server in servers.items()}
        for number, prompt in enumerate(prompts[1:]):
            for name in names if number % 2 else reversed(names):
                answers[name].append(_answer(servers[name], prompt, tokens))
    counted = {name: watch.figures() for name, watch in watches.items()}
    return {
        name: Way(answers[name], one.prefix_hit_rate if one else None, one.acceptance_rate if one else None)
        for name, one in counted.items()
    }


def _answer(server: Server, prompt: str, tokens: int) -> Answer:
    return server.complete(prompt, max_tokens=tokens, temperature=0, seed=0, ignore_eos=True).whole()


# ---- what comes out ----


def _row(way: Way, plain: Way) -> dict[str, Any]:
    """Medians, and their ratios to the server without the switch: above 1 is faster."""
    pairs = list(zip(way.answers, plain.answers, strict=True))
    first, whole, pace = (_medians(way, plain, name) for name in ("first_s", "seconds", "tokens_per_s"))
    tokens = statistics.median(one.tokens for one in way.answers)
    return {
        "first_token_ms": round(first[0] * 1000, 1), "first_token_faster": round(first[1] / first[0], 3),
        "request_tokens_per_s": round(tokens / whole[0], 2), "request_faster": round(whole[1] / whole[0], 3),
        "tokens_per_s": round(pace[0], 2), "faster": round(pace[0] / pace[1], 3),
        "same_text": sum(one.text == other.text for one, other in pairs), "of": len(pairs),
        "prefix_hit_rate": _rounded(way.prefix_hit_rate), "acceptance_rate": _rounded(way.acceptance_rate),
    }  # fmt: skip


def _medians(way: Way, plain: Way, name: str) -> tuple[float, float]:
    mine, other = (statistics.median(getattr(one, name) for one in each.answers) for each in (way, plain))
    return mine, other


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)


def _show(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        rates = [f"{row[key]:.0%} {what}" for key, what in RATES.items() if row[key] is not None]
        print(
            f"{name:<8} first token {row['first_token_ms']:8.1f} ms ({row['first_token_faster']:.2f} x)  "
            f"request {row['request_tokens_per_s']:6.1f} tokens/s ({row['request_faster']:.2f} x)  "
            f"after the first {row['tokens_per_s']:6.1f} ({row['faster']:.2f} x)  "
            f"same text {row['same_text']} of {row['of']}  {', '.join(rates)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
