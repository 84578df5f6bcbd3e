"""Tables for terminals: names and figures are never cut. What does not fit is left out and named, or shown below."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from re import finditer
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text

GAP = 2  # letters of padding of a column
INDENT = 2  # letters by which a line of a list goes on further in
WORD = r"\s*\S+(?:(?<=\d) (?:[KMG]i?B(?:/s)?|tok/s|bytes|ms|s)\b\S*)?\s*"  # a figure stays with its unit
LEAST = 24  # letters of a column of sentences, if it has so many


def wrapped(text: "Text", width: int) -> "Iterator[Text]":
    """Breaks a text between words alone, so that a longer word stays whole; lines of a list are indented below."""
    for line in text.split():
        indent = INDENT + len(line.plain) - len(line.plain.lstrip()) if line.plain.startswith(" ") else 0
        breaks, filled = [], 0
        for word in finditer(WORD, line.plain):
            if filled and filled + cell_len(word[0].rstrip()) > width:
                breaks.append(word.start())
                filled = indent
            filled += cell_len(word[0])
        for number, part in enumerate(line.divide(breaks)):
            part.rstrip()
            part.pad_left(indent if number else 0)
            yield part


@dataclass(slots=True)
class Fitted:
    """A table without lines. `drop` are headings in the order in which columns may go; `prose` may wrap at blanks.

    With `stacked`, columns that do not fit follow in a second table below the first.
    """

    headings: Sequence[str]
    right: Collection[str] = ()
    drop: Sequence[str] = ()
    prose: Collection[str] = ()
    title: str | None = None
    header: bool = True
    stacked: bool = False
    rows: "list[list[Text]]" = field(default_factory=list)

    def add_row(self, *cells: "str | Text") -> None:
        """Adds a row; brackets in a cell are no markup."""
        from rich.text import Text

        self.rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType | Segment]":
        from rich.text import Text

        width, every = options.max_width, list(range(len(self.headings)))
        columns = self._fitting(every, width) if console.is_terminal else every
        yield from console.render(self._drawn(columns, width), options.update(width=self._most(columns, width)))
        left = [column for column in every if column not in columns]
        if left and self.stacked:
            yield ""
            yield from self._below(left).__rich_console__(console, options)
        elif left:
            names = ", ".join(dict.fromkeys(self.headings[column] or "bars" for column in left))
            yield from wrapped(Text(f" a wider window also shows: {names}", "dim"), width)

    def _fitting(self, columns: list[int], width: int) -> list[int]:
        """Returns the columns that fit, without those that may go first."""
        going = [[column for column in columns if self.headings[column] == name] for name in self.drop]
        if self.stacked:
            going = [[column] for column in columns[:1:-1]]  # the last first; a row's name and one column stay
        kept = columns
        for group in going:
            if sum(self._least(column) + GAP for column in kept) <= width:
                break
            kept = [column for column in kept if column not in group]
        return kept

    def _below(self, columns: Iterable[int]) -> "Fitted":
        """Returns the table of the names of rows and of the columns that did not fit."""
        chosen = (0, *columns)
        rows = [[row[column] for column in chosen] for row in self.rows]
        headings = [self.headings[column] for column in chosen]
        return Fitted(headings, self.right, prose=self.prose, header=self.header, stacked=True, rows=rows)

    def _drawn(self, columns: Sequence[int], width: int) -> "Table":
        from rich.table import Table

        drawn = Table(box=None, header_style="dim", show_header=self.header, title=self.title, title_justify="left")
        for column, letters in zip(columns, self._widths(columns, width), strict=True):
            heading = self.headings[column]
            style = None if self.header or column else "dim"
            justify: JustifyMethod = "right" if heading in self.right else "left"
            drawn.add_column(heading, justify=justify, width=letters, style=style)
        for row in self.rows:
            drawn.add_row(*(row[column] for column in columns))
        return drawn

    def _most(self, columns: Sequence[int], width: int) -> int:
        """Returns the width of the table: that of the window, or more where names need it."""
        return max(width, sum(letters + GAP for letters in self._widths(columns, width)))

    def _widths(self, columns: Sequence[int], width: int) -> list[int]:
        """Returns the letters of each column: whole figures, and for sentences a share of what is left."""
        least = [self._least(column) for column in columns]
        wanted = [self._longest(column) - few for column, few in zip(columns, least, strict=True)]
        room = max(0, width - sum(few + GAP for few in least))
        share = min(1.0, room / (sum(wanted) or 1))
        return [few + int(more * share) for few, more in zip(least, wanted, strict=True)]

    def _least(self, column: int) -> int:
        """Returns the letters that a column needs: those of its longest cell, or of its longest word if it wraps."""
        heading = max(map(len, self.headings[column].split()), default=0) if self.header else 0
        if self.headings[column] not in self.prose:
            return max(heading, self._longest(column, headed=False))
        words = (len(word) for row in self.rows for word in row[column].plain.split())
        return max(heading, *words, min(LEAST, self._longest(column)), 0)

    def _longest(self, column: int, *, headed: bool = True) -> int:
        own = len(self.headings[column]) if headed and self.header else 0
        return max(own, *(row[column].cell_len for row in self.rows), 0)
