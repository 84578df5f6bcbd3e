"""The elements of pages: document, sections, figures, tables, lists. All text passes through `escaped`.

A page has no script and forbids any, so that the name of a model cannot run as code.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from quantry.report.content import plain
from quantry.report.drawing import Plot
from quantry.report.ink import svg, variables

# contrast with the surface is at least 4.5 in both schemes
SIGNALS = (("good", "#13733a", "#58cf85"), ("bad", "#b3201b", "#ff8a80"), ("warn", "#8a5a00", "#e8b04a"))
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def document(title: str, sections: Iterable[str]) -> str:
    """Returns the whole page, without empty sections."""
    return _DOCUMENT.format(title=escaped(title), policy=POLICY, style=_style(), body="\n".join(filter(None, sections)))


def escaped(value: object) -> str:
    """Returns text with HTML's special characters escaped."""
    return html.escape(plain(str(value)), quote=True)


def section(title: str, *parts: str) -> str:
    body = "\n".join(filter(None, parts))
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}\n</section>" if body else ""


def figure(wide: Plot, narrow: Plot) -> str:
    """Returns both drawings; the style sheet shows the one that fits and hides the other, from screen readers too."""
    drawings = "".join(
        f'<div class="{size}">{svg(plot.figure, f"{plot.name}-{size}", plain(plot.title), plain(plot.about))}</div>'
        f'{f"""<figcaption class="caption {size}">{escaped(plot.caption)}</figcaption>""" if plot.caption else ""}'
        for size, plot in (("wide", wide), ("narrow", narrow))
    )
    return f'<figure id="{wide.name}">{drawings}</figure>'


def table(columns: Sequence[str], lines: Iterable[str], style: str = "", caption: str = "") -> str:
    heads = "".join(f'<th scope="col">{escaped(name)}</th>' for name in columns)
    words = f"<caption>{escaped(caption)}</caption>" if caption else ""
    body = "\n".join(lines)
    kind = "scroll" if style else "scroll figures"
    # a region that scrolls must be reachable by keyboard; one of figures is wider than the text if the window is
    return (
        f'<div class="{kind}" tabindex="0" role="region" aria-label="{escaped(caption or "table")}">'
        f'<table{f""" class="{style}" """ if style else ""}>{words}<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def row(head: object, cells: Iterable[object], style: str = "") -> str:
    """Returns a line of a table: a heading and escaped cells."""
    tag = f' class="{style}"' if style else ""
    values = "".join(f"<td>{escaped(cell)}</td>" for cell in cells)
    return f'<tr{tag}><th scope="row">{escaped(head)}</th>{values}</tr>'


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns key figures, each with its words."""
    items = "".join(f"<li><b>{escaped(value)}</b><span>{escaped(words)}</span></li>" for value, words in pairs)
    return f'<ul class="tiles">{items}</ul>'


def bullets(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(item)}</li>' for item in items)}</ul>" if items else ""


def nested(value: Any) -> str:
    """Returns plain data as lists within lists."""
    if isinstance(value, Mapping):
        inner = "".join(f"<dt>{escaped(_field(str(name)))}</dt><dd>{nested(item)}</dd>" for name, item in value.items())
        return f"<dl>{inner}</dl>" if inner else "–"
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, (str, int, float)) or item is None for item in value):
            return escaped(", ".join(map(str, value))) or "–"
        return "<ul>" + "".join(f"<li>{nested(item)}</li>" for item in value) + "</ul>"
    return "–" if value is None or value == "" else escaped(value)


def _field(name: str) -> str:
    """Returns the name of a field in words; names of files and types stay unchanged."""
    return name.replace("_", " ") if re.fullmatch("[a-z_]+", name) else name


@cache
def _style() -> str:
    light, dark = (variables(at) + "".join(f"--{row[0]}:{row[1 + at]};" for row in SIGNALS) for at in (0, 1))
    sheet = files("quantry.report").joinpath("page.css").read_text(encoding="utf-8")
    # paper is white: the dark colours are for screens only
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{sheet}"
