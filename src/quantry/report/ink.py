"""Colours, and the conversion of a figure into part of a page or of a picture.

Every colour has a role. Figures are drawn in the light colours; in the page each becomes `var(--role)`, so that a
drawing follows the reader's light or dark scheme. A picture shows the light colours.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import matplotlib
import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

STEPS = 9  # of a heat map
DPI = 72  # one unit of a drawing is one pixel of the page
SHARP = 2  # pixels of the picture for one of the page

# role -> light, dark
PLAIN = {
    "surface": ("#ffffff", "#14171c"),
    "ink": ("#1b1f26", "#e7eaef"),
    "muted": ("#5b6472", "#a5adba"),
    "lines": ("#dfe3e8", "#323842"),
    "noise": ("#eceef2", "#22272f"),
    "ours": ("#2460c8", "#73a6ff"),
    "peer": ("#b8500b", "#f2a562"),
    "second": ("#a3610a", "#e5b25c"),
    "third": ("#0f7d70", "#43c6b3"),
    "fourth": ("#7a58bd", "#b39cf2"),
    "fifth": ("#6b7380", "#8b94a2"),
}
# the least is close to the surface colour, the most far from it, in both schemes
RAMPS = {
    "warm": (("#fdf3e1", "#ee9a3a", "#7a1f04"), ("#2a241d", "#c9641a", "#ffe2ae")),
    "cool": (("#eaf2fe", "#4f8ee2", "#0a2f6e"), ("#1c2530", "#3d78c9", "#d5e6ff")),
}


def _between(stops: tuple[str, str, str], share: float) -> str:
    low, middle, high = (np.array([int(stop[at : at + 2], 16) for at in (1, 3, 5)]) for stop in stops)
    mixed = low + (middle - low) * share * 2 if share <= 0.5 else middle + (high - middle) * (share * 2 - 1)
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def _ramps() -> dict[str, tuple[str, str]]:
    return {
        f"{name}-{step}": (_between(light, step / (STEPS - 1)), _between(dark, step / (STEPS - 1)))
        for name, (light, dark) in RAMPS.items()
        for step in range(STEPS)
    }


PALETTE = {**PLAIN, **_ramps()}
ROLES = {light: role for role, (light, _) in PALETTE.items()}  # no two roles have the same light colour


def light(role: str) -> str:
    return PALETTE[role][0]


def variables(scheme: int) -> str:
    """Returns the colours of a scheme (0 light, 1 dark) for the style sheet."""
    return "".join(f"--{role}:{colours[scheme]};" for role, colours in PALETTE.items())


@contextmanager
def settings() -> Iterator[None]:
    """Resets matplotlib to its defaults inside a `with`, whatever the user's settings; `$x$` is no formula."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the page uses the reader's fonts
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.hashsalt": "quantry",
                "svg.fonttype": "none",
                "text.parse_math": False,
                "font.family": ["DejaVu Sans"],  # part of matplotlib: labels take the same room on every machine
                "font.size": 11,
                "text.color": light("ink"),
                "axes.edgecolor": light("lines"),
                "axes.labelcolor": light("muted"),
                "xtick.color": light("muted"),
                "ytick.color": light("muted"),
                "grid.color": light("lines"),
            }
        )
        yield


def svg(figure: "Figure", name: str, title: str, about: str) -> str:
    """Returns the drawing as an element of a page: unique ids, colours by role, a description for screen readers."""
    stored = io.BytesIO()
    figure.savefig(stored, format="svg", transparent=True)
    root = ElementTree.fromstring(stored.getvalue())
    _tidy(root, name)
    box = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib.update({"viewBox": box, "role": "img", "aria-labelledby": f"{name}-title {name}-desc"})
    for at, (tag, words) in enumerate((("title", title), ("desc", about))):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        element.text = words
        root.insert(at, element)
    return ElementTree.tostring(root, encoding="unicode")


def pixels(figure: "Figure") -> "NDArray[np.uint8]":
    """Returns the drawing as rows of RGB pixels, in the light colours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_facecolor(light("surface"))
    figure.set_dpi(DPI * SHARP)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _tidy(root: ElementTree.Element, name: str) -> None:
    """Drops date and creator, keeps plain tags, ids that are referenced and two decimals, and names colours by role."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}style", "}metadata")):
                parent.remove(child)
    used = set(
        re.findall(r"#([\w-]+)\)?", " ".join(value for element in root.iter() for value in element.attrib.values()))
    )
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            kept = _attribute(key.rpartition("}")[2], value, name, used)
            if kept is not None:
                element.set(*kept)
        if element.tag != "text":
            element.text = None  # line breaks between the elements
        element.tail = None


def _attribute(key: str, value: str, name: str, used: set[str]) -> tuple[str, str] | None:
    if key == "id":
        return (key, f"{name}-{value}") if value in used else None
    if key == "href":
        return key, value.replace("#", f"#{name}-")
    if key == "clip-path":
        return key, value.replace("url(#", f"url(#{name}-")
    if key == "style":
        return key, re.sub(r"#[0-9a-f]{6}", _by_role, re.sub(r"font(-family)?: [^;]*'[^;]*;? ?", _size, value))
    if key in ("d", "transform", "x", "y"):
        return key, re.sub(
            r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), " ".join(value.split())
        )
    return key, value


def _by_role(colour: re.Match[str]) -> str:
    return f"var(--{ROLES[colour[0]]})" if colour[0] in ROLES else colour[0]


def _size(font: re.Match[str]) -> str:
    """Keeps the size and weight of a font: the family is the page's."""
    size = re.search(r"[\d.]+px", font[0])
    weight = re.search(r"\b(bold|[5-9]00)\b", font[0])
    return (f"font-size: {size[0]}; " if size else "") + (f"font-weight: {weight[0]}; " if weight else "")
