"""All plots of a report in their order: for a page one by one, for a picture below each other."""

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np
from matplotlib.figure import Figure

from quantry.report.bars import quality
from quantry.report.content import Content
from quantry.report.drawing import WIDE, Plot, one_line, text_width
from quantry.report.ink import DPI, light, pixels, settings
from quantry.report.maps import heat
from quantry.report.memory import memory
from quantry.report.pareto import pareto

if TYPE_CHECKING:
    from numpy.typing import NDArray

MARGIN = 40  # of the picture, in its own pixels


def plots(content: Content, width: int) -> dict[str, Plot]:
    """Every plot that the content has figures for, by name, in the order of the page. Call it within `settings()`."""
    found: list[Plot | None] = [
        pareto(content, width),
        quality(content, width),
        heat(content.sensitivity, width, "sensitivity", "Predicted damage by block and module", "warm"),
        heat(content.bits, width, "bits", "Bits a weight by block and module", "cool"),
        heat(content.outliers, width, "outliers", "Largest channel over the median one", "warm"),
        memory(content.memory, width) if content.memory else None,
    ]
    return {plot.name: plot for plot in found if plot is not None}


def poster(content: Content) -> bytes:
    """All plots below each other, with their titles, as a PNG."""
    from matplotlib.image import imsave

    with settings():
        under = " · ".join(part for part in (content.model, content.date, _verdict(content)) if part)
        parts = [_heading(content.title, 20, under)]
        for plot in plots(content, WIDE).values():
            parts += [_heading(plot.title, 13, plot.caption), pixels(plot.figure)]
        whole = np.pad(np.vstack(parts), ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)
        stored, nothing = io.BytesIO(), cast(dict[str, str], {"Software": None})  # no version, so the same bytes
        imsave(stored, whole, format="png", metadata=nothing)
    return stored.getvalue()


def _verdict(content: Content) -> str:
    words = {"pass": "passes", "fail": "FAILS"}.get(content.verdict, "")
    return f"{words} the gate {content.gate}".strip() if words else ""


def _heading(text: str, size: float, under: str = "") -> "NDArray[np.uint8]":
    """A strip with a title, and a smaller line below it."""
    height = round(size * 1.4 + (26 if under else 12) + 12)
    figure = Figure(figsize=(WIDE / DPI, height / DPI), dpi=DPI)
    figure.text(0, 1 - 14 / height, _cut(text, size), va="top", fontsize=size, weight="bold")
    if under:
        figure.text(0, 8 / height, _cut(under, 11), va="bottom", fontsize=11, color=light("muted"))
    return pixels(figure)


def _cut(text: str, size: float) -> str:
    text = one_line(text)
    kept: Iterator[str] = (text if at == len(text) else text[:at] + "…" for at in range(len(text), 0, -1))
    return next((shown for shown in kept if text_width(shown, size, "bold") <= WIDE), "")
