"""What pages are made of: the document, sections, figures, tables, lists. `escaped` is what all text passes.

There is no script, and the page forbids any: what a model is called cannot run.
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

# Contrast with the surface of at least 4.5 in both schemes.
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
    """The whole page; empty sections are left out."""
    return _DOCUMENT.format(title=escaped(title), policy=POLICY, style=_style(), body="\n".join(filter(None, sections)))


def escaped(value: object) -> str:
    """As HTML shows it."""
    return html.escape(plain(str(value)), quote=True)


def section(title: str, *parts: str) -> str:
    body = "\n".join(filter(None, parts))
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}\n</section>" if body else ""


def figure(wide: Plot, narrow: Plot) -> str:
    """Both drawings; the style sheet shows the one that suits and hides the other, from screen readers too."""
    drawings = "".join(
        f'<div class="{kind}">{svg(plot.figure, f"{plot.name}-{kind}", plain(plot.title), plain(plot.about))}</div>'
        f'{f"""<figcaption class="caption {kind}">{escaped(plot.caption)}</figcaption>""" if plot.caption else ""}'
        for kind, plot in (("wide", wide), ("narrow", narrow))
    )
    return f'<figure id="{wide.name}">{drawings}</figure>'


def table(columns: Sequence[str], lines: Iterable[str], kind: str = "", caption: str = "") -> str:
    heads = "".join(f'<th scope="col">{escaped(name)}</th>' for name in columns)
    words = f"<caption>{escaped(caption)}</caption>" if caption else ""
    body = "\n".join(lines)
    # A region that scrolls can be reached by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(caption or "table")}">'
        f'<table{f""" class="{kind}" """ if kind else ""}>{words}<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def bullets(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(item)}</li>' for item in items)}</ul>" if items else ""


def nested(value: Any) -> str:
    """Plain data as lists within lists."""
    if isinstance(value, Mapping):
        inner = "".join(f"<dt>{escaped(_field(str(name)))}</dt><dd>{nested(one)}</dd>" for name, one in value.items())
        return f"<dl>{inner}</dl>" if inner else "–"
    if isinstance(value, (list, tuple)):
        if all(isinstance(one, (str, int, float)) or one is None for one in value):
            return escaped(", ".join(map(str, value))) or "–"
        return "<ul>" + "".join(f"<li>{nested(one)}</li>" for one in value) + "</ul>"
    return "–" if value is None or value == "" else escaped(value)


def _field(name: str) -> str:
    """The name of a field in words; names of files and types are left as they are."""
    return name.replace("_", " ") if re.fullmatch("[a-z_]+", name) else name


@cache
def _style() -> str:
    light, dark = (variables(at) + "".join(f"--{row[0]}:{row[1 + at]};" for row in SIGNALS) for at in (0, 1))
    sheet = files("quantry.report").joinpath("page.css").read_text(encoding="utf-8")
    # Paper is white: the dark colours are for screens only.
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{sheet}"
