"""What types of KV cache lose, as Markdown for the card and for a job's summary."""

from collections.abc import Iterator, Mapping
from typing import Any

from quantry.report.sizes import counted, human, position_range


def cache_sentence(found: Mapping[str, Any]) -> str:
    """Says what was compared, where and on what."""
    text = found["text"]
    return (
        f"KV caches in {found['engine']} against its own of {found['base']}, on {text['name']}:"
        f" {counted(text['windows'], 'window')} of {text['length']:,} tokens; mean KL by the tokens in the cache"
    )


def room_sentence(room: Mapping[str, Any]) -> str:
    """Says what the capacity is predicted for."""
    return f"predicted for {room['device']}, of which {human(room['bytes'])} may be filled"


def cache_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table of what each type loses by position, and one of how much of each fits, as Markdown."""
    bins = [position_range(row) for row in next(iter(found["caches"].values()))["bins"]]
    yield f"{cache_sentence(found)}."
    yield ""
    yield from _table("KV cache", ["mean KL", *bins, "same first token", "perplexity"])
    yield f"| {found['base']} |{' |' * (len(bins) + 2)} {found['perplexity']:.3f} |"
    for name, row in found["caches"].items():
        low, high = row["intervals"]["kl"]
        binned = "".join(f" {part['kl']:.4f} |" for part in row["bins"])
        spanned = f"{row['kl']:.4f} ({low:.4f} to {high:.4f})"
        yield f"| {name} | {spanned} |{binned} {row['top1']:.1%} | {row['perplexity']:.3f} |"
    if room := found.get("room"):
        yield from ("", f"Capacity {room_sentence(room)}.", "")
        yield from _table("KV cache", ["bytes a token", "tokens that fit", f"sequences of {found['text']['length']:,}"])
        for name, row in room["caches"].items():
            yield f"| {name} | {row['bytes_per_token']:,} | {row['tokens']:,} | {row['sequences']:,} |"


def _table(first: str, columns: list[str]) -> Iterator[str]:
    yield f"| {first} | {' | '.join(columns)} |"
    yield f"|---|{'--:|' * len(columns)}"
