"""The report: one self-contained HTML page, and the same plots as one PNG.

`Content` is plain data and every part of it is optional: a finished job, one proof and a sweep fill in what they know.
The same content gives the same bytes. matplotlib is imported when something is drawn, not before.
"""

from quantry.report.content import Content, Memory, Row, frontier

__all__ = ["Content", "Memory", "Row", "frontier", "picture", "render"]


def render(content: Content) -> str:
    """The page: no scripts, no network, no fonts of others; light and dark, on paper and on a phone."""
    from quantry.report.page import page

    return page(content)


def picture(content: Content) -> bytes:
    """The same plots below each other in one PNG."""
    from quantry.report.plots import poster

    return poster(content)
