"""What an artefact lost on each of several texts, as cells of a table: for the terminal, the card and the page."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

COLUMNS = ("text", "mean KL", "same first token", "perplexity", "in 16 bit", "gate")
STYLES = {"kl": ".4f", "top1": ".1%", "perplexity": ".3f", "reference_perplexity": ".3f"}
VERDICTS = {"pass": "passes", "fail": "worse"}


def cells(domain: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a domain of a proof (types.Proof as a dict); its figures are the engine's if one was measured."""
    served = domain.get("served")
    side = served if isinstance(served, Mapping) else domain
    figures = [_figure(domain if name == "reference_perplexity" else side, name) for name in STYLES]
    return str(domain.get("name", "")), *figures, VERDICTS.get(str(domain.get("verdict")), "–")


def markdown(domains: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table; none for a proof on one text."""
    if not domains:
        return []
    lines = [f"| {' | '.join(_plain(cell) for cell in cells(domain))} |" for domain in domains]
    return [f"| {' | '.join(COLUMNS)} |", "|---" + "|--:" * (len(COLUMNS) - 1) + "|", *lines]


def _figure(side: Mapping[str, Any], name: str) -> str:
    style, spans = STYLES[name], side.get("intervals")
    span = spans.get(name) if isinstance(spans, Mapping) else None
    bounds: Sequence[Any] = span if isinstance(span, list | tuple) else ()
    reach = (
        f" ({bounds[0]:{style}} to {bounds[1]:{style}})" if len(bounds) == 2 and all(map(_is_number, bounds)) else ""
    )
    return f"{side[name]:{style}}{reach}" if _is_number(side.get(name)) else "–"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
