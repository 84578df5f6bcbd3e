"""What a proof has of KV caches, as fields of a report's content; every field is checked, since users may edit it."""

from collections.abc import Mapping
from typing import Any

from quantry.jobs.artefact_card import count, figure, finite, mapping, mappings
from quantry.report.caches import cache_sentence, room_sentence
from quantry.report.sizes import position_range

ROOMS = ("bytes_per_token", "tokens", "sequences")


def cache_fields(proof: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the map of KL by position, the figures of each type and the words, if the proof has them."""
    found = mapping(proof.get("kv_cache") or {}, "what a proof has of KV caches")
    if not found:
        return {}
    rows = _rows(found, "caches")
    room = mapping(found.get("room") or {}, "the room for KV caches")
    rooms = _rows(room, "caches") if room else {}
    text = mapping(found.get("text"), "the text of the KV caches")
    sentences = [
        cache_sentence({**found, "text": {**text, **{key: count(text, key) for key in ("windows", "length")}}})
    ]
    if room:
        sentences.append(f"capacity {room_sentence({**room, 'bytes': count(room, 'bytes')})}")
    return {
        "caches": _bins(rows),
        "cache_figures": {name: _figures(rows.get(name, {}), rooms.get(name, {})) for name in {**rooms, **rows}},
        "cache_words": "; ".join(sentences),
    }


def _rows(found: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    rows = mapping(found.get(name), f"{name} of the proof")
    return {str(kind): mapping(row, f"that of {kind}") for kind, row in rows.items()}


def _bins(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns bin -> type -> mean KL; rounding may take that of equal caches below zero."""
    bins: dict[str, dict[str, float]] = {}
    for kind, row in rows.items():
        for part in mappings(row.get("bins", ()), f"bins of {kind}"):
            name = position_range({key: count(part, key) for key in ("begin", "end")})
            if (value := finite(part.get("kl"))) is not None:
                bins.setdefault(name, {})[kind] = max(0.0, value)
    return bins


def _figures(row: Mapping[str, Any], room: Mapping[str, Any]) -> dict[str, float]:
    kl, interval = figure(row, "kl")
    figures: dict[str, float | None] = {"kl": kl and max(0.0, kl)}
    if interval:
        figures |= {"kl_low": max(0.0, interval[0]), "kl_high": max(0.0, interval[1])}
    figures |= {name: finite(row.get(name)) for name in ("top1", "perplexity")}
    figures |= {name: finite(room.get(name)) for name in ROOMS}
    return {name: value for name, value in figures.items() if value is not None}
