"""All plots of a report in order: for a page one by one, for a picture one below the other."""

import io
from typing import TYPE_CHECKING, cast

import numpy as np

from quantry.report.bars import quality
from quantry.report.content import Content
from quantry.report.drawing import WIDE, Plot, figure_of, one_line, text_width
from quantry.report.ink import light, pixels, settings
from quantry.report.maps import heat
from quantry.report.memory import memory_bars
from quantry.report.pareto import pareto

if TYPE_CHECKING:
    from numpy.typing import NDArray

MARGIN = 40  # pixels of the picture
OUTLIERS = "Largest channel over the median one"
CACHES = "Mean KL of KV caches by tokens in the cache"


def plots(content: Content, width: int) -> dict[str, Plot]:
    """Returns every plot that the content has figures for, by name, in page order. Call it within `settings()`."""
    drawn: list[Plot | None] = [
        pareto(content, width),
        quality(content, width),
        heat(content.sensitivity, width, "sensitivity", "Predicted damage by block and module", "warm"),
        heat(content.bits, width, "bits", "Bits a weight by block and module", "cool"),
        heat(content.outliers, width, "outliers", OUTLIERS, "warm"),
        heat(content.caches, width, "caches", CACHES, "warm", ("position", "type")),
        memory_bars(content.memory, width) if content.memory else None,
    ]
    return {plot.name: plot for plot in drawn if plot is not None}


def poster(content: Content) -> bytes:
    """Returns all plots, one below the other with their titles, as a PNG."""
    from matplotlib.image import imsave

    with settings():
        under = " · ".join(part for part in (content.model, content.date, _verdict(content)) if part)
        parts = [_heading(content.title, 20, under)]
        for plot in plots(content, WIDE).values():
            parts += [_heading(plot.title, 13, plot.caption), pixels(plot.figure)]
        whole = np.pad(np.vstack(parts), ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)
        stored, nothing = io.BytesIO(), cast(dict[str, str], {"Software": None})  # no version, for reproducible bytes
        imsave(stored, whole, format="png", metadata=nothing)
    return stored.getvalue()


def _verdict(content: Content) -> str:
    words = {"pass": "passes", "fail": "FAILS"}.get(content.verdict, "")
    return f"{words} the gate {content.gate}".strip() if words else ""


def _heading(text: str, size: float, under: str = "") -> "NDArray[np.uint8]":
    height = round(size * 1.4 + (26 if under else 12) + 12)
    figure = figure_of(WIDE, height)
    figure.text(0, 1 - 14 / height, _cut(text, size), va="top", fontsize=size, weight="bold")
    if under:
        figure.text(0, 8 / height, _cut(under, 11), va="bottom", fontsize=11, color=light("muted"))
    return pixels(figure)


def _cut(text: str, size: float) -> str:
    line = one_line(text)
    cuts = (line if at == len(line) else line[:at] + "…" for at in range(len(line), 0, -1))
    return next((shown for shown in cuts if text_width(shown, size, "bold") <= WIDE), "")
