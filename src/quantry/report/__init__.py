"""The report: one self-contained HTML page, and the same plots as one PNG.

`Content` is plain data and every part of it is optional: a finished job, one proof and a sweep fill in what they know.
The same content gives the same bytes. matplotlib is imported when something is drawn, not before.
"""

from quantry.report.content import Content, FileRow, Memory, frontier

__all__ = ["Content", "FileRow", "Memory", "frontier", "picture", "render"]


def render(content: Content) -> str:
    """Returns the page: no scripts, no network, no external fonts; light and dark, for screens, phones and paper."""
    from quantry.report.page import page

    return page(content)


def picture(content: Content) -> bytes:
    """Returns the same plots, one below the other, as a PNG."""
    from quantry.report.plots import poster

    return poster(content)
