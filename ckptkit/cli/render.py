"""Text output: escaping, sizes, tables, JSON, progress. Commands print only through this module.

On a terminal, this module fits tables and lines to the width of the terminal. In a pipe or file, it
shortens no text, and wraps only the tables of the manual.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from ckptkit.core.errors import CkptkitError, OutputError
from ckptkit.core.text import escape as escape
from ckptkit.core.text import flatten, message
from ckptkit.core.text import matcher as matcher
from ckptkit.core.text import plural as plural
from ckptkit.core.text import shape as shape
from ckptkit.core.text import size as size

if TYPE_CHECKING:
    from tqdm import tqdm

STDOUT = "standard output"
COLOURS = {"red": 31, "green": 32, "yellow": 33, "cyan": 36}
LABELS = {
    "different:": "red", "equal:": "green", "error:": "red", "hint:": "cyan", "mismatched": "red",
    "missing": "red", "note:": "cyan", "unexpected": "yellow", "warning:": "yellow",
}  # fmt: skip
BATCH = 1_000  # maximum number of JSON list items on one line
NARROWEST = 16  # minimum width of a name, in characters
PROSE = 24  # minimum width of prose in the last column, in characters
GAP = 2  # number of spaces between columns
HEADING = 2  # a column is at least this much wider than its heading; 0 on a narrow terminal
UNBROKEN = "\N{NO-BREAK SPACE}"  # a space at which lines do not break; escaped text contains none
BLOCKS = " ▁▂▃▄▅▆▇█"
PATIENCE = 1.0  # seconds until a progress bar appears

begun = False  # whether anything was written to standard output
progress_asked = False  # whether --progress is given
table_format = ""  # value of --table
quiet = False  # value of the common --quiet; False if the command defines its own --quiet


def emit(*lines: str) -> None:
    """Print lines on standard output. Raise OutputError if standard output is closed or full."""
    write(f"{line}\n" for line in lines)


def emit_text(*lines: str) -> None:
    """Escape lines and print them. On a terminal, wrap long lines between words."""
    escaped = text_lines(lines) if is_terminal(sys.stdout) else map(escape, lines)
    write(f"{line}\n" for line in escaped)


def text_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that `emit_text` prints."""
    return flatten(wrapped(escape(line), whole=True) for line in lines)


def write(pieces: Iterable[str]) -> None:
    """Write strings to standard output."""
    global begun
    if sys.stdout is None:
        raise OutputError("is closed", where=STDOUT)
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            begun = True
    except (BrokenPipeError, CkptkitError):
        raise
    except OSError as error:
        raise stdout_failed(error) from error


def stdout_failed(error: OSError) -> OutputError:
    return OutputError(error.strerror or str(error), where=STDOUT)


def error(line: str, hint: str | None = None) -> None:
    """Print ``error: line`` on standard error, and a hint below it."""
    _message("error", line, hint)


def warn(line: str, hint: str | None = None) -> None:
    """Print ``warning: line`` on standard error, and a hint below it."""
    _message("warning", line, hint)


def note(line: str, hint: str | None = None) -> None:
    """Print ``note: line`` on standard error, and a hint below it. A note requires no action."""
    _message("note", line, hint)


def _message(label: str, line: str, hint: str | None) -> None:
    """Print a message with its label. If standard error is closed, do nothing."""
    if sys.stderr is None or (quiet and label != "error"):
        return
    lines = message(label, line, None if quiet else hint)
    try:
        sys.stderr.writelines(f"{labelled(each, sys.stderr)}\n" for each in lines)
    except OSError:
        pass


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Color `text` if `stream` (default: standard output) is a terminal that allows colors.

    NO_COLOR and TERM=dumb disable colors (https://no-color.org).
    """
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if (
        wanted
        and is_terminal(stream or sys.stdout)
        and (os.name != "nt" or "WT_SESSION" in os.environ)
    ):
        return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"
    return text


def labelled(line: str, stream: TextIO | None = None) -> str:
    """Color the first word of an escaped line if it is a status word."""
    word = line.split(" ", 1)[0]
    return paint(word, LABELS[word], stream) + line[len(word) :] if word in LABELS else line


def remark(line: str) -> Iterator[str]:
    """Escape and wrap a line such as ``hint: ...``, and color its first word."""
    return map(labelled, wrapped(escape(line)))


# Fit lines and tables to the terminal. All strings are already escaped.


def terminal_width() -> int | None:
    """Return the number of columns of the terminal. Return None if standard output is not a
    terminal."""
    if not is_terminal(sys.stdout):
        return None
    from shutil import get_terminal_size

    return get_terminal_size().columns


def wrapped(line: str, *, whole: bool = False) -> list[str]:
    """Break a line into lines that fit on the terminal. In a pipe, return the line unchanged.

    If a word is longer than a line, break the word too, unless `whole` is true. Use `whole` for
    paths and names, which users paste. Hints stay on one line, because a hint may contain a
    command.
    """
    width = terminal_width()
    if width is None or len(line) <= width or line.startswith("hint: "):
        return [line]
    return _broken(line, width, whole=whole)


def _broken(line: str, width: int, *, whole: bool = False) -> list[str]:
    """Break a line into lines; indent all but the first. Keep a number and its unit on one line."""
    import re
    from textwrap import wrap

    lines = wrap(
        re.sub(r"(?<=[0-9]) (?=[kMGTP]?B\b)", UNBROKEN, line),
        max(NARROWEST, width),
        subsequent_indent=" " * (len(line) - len(line.lstrip()) + 4),
        break_long_words=not whole,
        break_on_hyphens=False,
    )
    return [each.replace(UNBROKEN, " ") for each in lines]


def listed(names: Iterable[str]) -> Iterator[str]:
    """Yield names as an indented list.

    On a terminal, shorten long names. If two shortened names would be equal, wrap names instead.
    """
    names, width = list(names), terminal_width()
    if width is not None:
        names = _distinct(names, max(NARROWEST, width - 2)) or names
    yield from flatten(wrapped(f"  {name}", whole=True) for name in names)


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    *,
    whole: bool = False,
    piped: int | None = None,
) -> Iterator[str]:
    """Format a table without ruled lines. Align the columns in `right` to the right.

    If the table is too wide for the terminal, take these steps until it fits:

    - Remove columns with the same cell in every row, and print each such cell above the table.
    - Wrap prose in the last column.
    - Shorten names in the first column, unless two names would become equal.
    - Print the name of each row on a line, and the other cells of the row below this line.

    If standard output is not a terminal, the table may be `piped` characters wide. If
    `piped` is None, the table may have any width. If `whole` is true, shorten no name and break no
    word. With --table, tabulate formats the table, even if the table is too wide for the terminal.
    """
    if table_format and rows:
        from tabulate import tabulate  # the import costs 30 ms

        align = ["right" if head in right else "left" for head in headers]
        if table_format == "github":
            rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
        text = tabulate(rows, headers, table_format, disable_numparse=True, colalign=align)
        yield from text.split("\n")
        return
    width = terminal_width() or piped
    lines = _aligned(headers, rows, right, HEADING)
    if width is not None:
        lines = iter(listed := list(lines))
    if width is None or max(map(len, listed), default=0) <= width:
        yield from lines
        return
    if sum(_widths(headers, rows)) > width + GAP and len(rows) > 1:
        first, *columns = zip(headers, *rows, strict=True)
        same = [each for each in columns if each[0] not in right and len({*each[1:]}) == 1]
        if same:
            shown = _pairs([head for head, *_ in same], [cell for _, cell, *_ in same])
            yield from _broken(f"same in all rows: {shown}", width)
        headers, *rows = zip(first, *(each for each in columns if each not in same), strict=True)
    *others, last = _widths(headers, rows)
    words = list(flatten(row[-1].split() for row in rows))
    is_prose = last - GAP > PROSE and headers[-1] not in right and len(words) > len(rows)
    room = width - sum(others)
    if sum(others) + last <= width + GAP:
        yield from _aligned(headers, rows, right)
    elif others and is_prose and room >= max(PROSE, len(headers[-1]), *map(len, words)):
        yield from _aligned(headers, list(_with_prose(rows, room)), right)
    else:
        names = [row[0] for row in rows]
        room = width - sum(_widths(headers, rows)[1:]) - 1  # keep one column of the terminal empty
        cut = _distinct(names, room) if room >= NARROWEST and not whole else None
        if cut is not None:
            named = [[name, *row[1:]] for name, row in zip(cut, rows, strict=True)]
            yield from _aligned(headers, named, right)
            return
        names = (None if whole else _distinct(names, max(NARROWEST, width))) or names
        for name, (_, *cells) in zip(names, rows, strict=True):
            yield from _broken(name, width, whole=True)
            yield from _broken(f"  {_pairs(headers[1:], cells)}", width, whole=whole)


def _widths(headers: Sequence[str], rows: Sequence[Sequence[str]], heading: int = 0) -> list[int]:
    """Return the width of each column, including the gap after the column."""
    return [
        max(len(head) + heading, *map(len, cells)) + GAP
        for head, *cells in zip(headers, *rows, strict=True)
    ]


def _aligned(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], heading: int = 0
) -> Iterator[str]:
    if rows:
        widths = zip(headers, _widths(headers, rows, heading), strict=True)
        cells = [f"{{:{'>' if head in right else '<'}{width - GAP}}}" for head, width in widths]
        form = (" " * GAP).join(cells)
        for row in (headers, *rows):
            yield form.format(*row).rstrip()


def _with_prose(rows: Sequence[Sequence[str]], room: int) -> Iterator[list[str]]:
    """Yield rows. If the prose in the last cell is too wide, continue the prose in further rows."""
    from textwrap import wrap

    for *cells, prose in rows:
        first, *others = wrap(prose, room, break_on_hyphens=False) or [""]
        yield [*cells, first]
        yield from ([*[""] * len(cells), other] for other in others)


def _pairs(headers: Sequence[str], cells: Sequence[str]) -> str:
    """Join each heading with its cell, and return all pairs as one string. Lines do not break
    inside a short pair."""
    pairs = []
    for header, cell in zip(headers, cells, strict=True):
        mark = ":" if " " in header else ""
        pair = f"{header}{mark} {cell}".strip()
        if cell:
            pairs.append(pair.replace(" ", UNBROKEN) if len(pair) <= PROSE else pair)
    return ", ".join(pairs)


def _distinct(names: Sequence[str], room: int) -> list[str] | None:
    """Shorten names to `room` characters. If two names would become equal, return None."""
    short = {name: shortened(name, room) for name in names}
    return [short[name] for name in names] if len({*short.values()}) == len(short) else None


def shortened(text: str, room: int) -> str:
    """Shorten `text` in the middle to at most `room` characters."""
    if len(text) <= room:
        return text
    head = (room - 3) // 2
    return f"{text[:head]}...{text[len(text) - (room - 3 - head) :]}"


def bars(counts: Sequence[int]) -> str:
    """Return one block character per count, scaled to the largest count.

    Return '' if the terminal cannot encode block characters.
    """
    if not counts or not _has_blocks():
        return ""
    largest = max(counts) or 1
    return "".join(BLOCKS[-(-8 * count // largest)] for count in counts)


def horizontal_bars(counts: Sequence[int], width: int) -> Iterator[str]:
    """Yield a horizontal bar of at most `width` characters for each count."""
    largest, has_blocks = max(counts, default=0) or 1, _has_blocks()
    for count in counts:
        whole, eighths = divmod(8 * width * count // largest, 8)
        if has_blocks:
            yield "█" * whole + "▏▎▍▌▋▊▉"[eighths - 1 : eighths]
        else:
            yield "#" * max(whole, count > 0)


def _has_blocks() -> bool:
    try:
        BLOCKS.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


# JSON


def emit_json(value: dict[str, Any]) -> None:
    """Print `value` as one JSON object."""
    write(json_pieces(value))
    write(["\n"])


def json_pieces(value: Any) -> Iterator[str]:
    """Yield the JSON text of `value` in pieces. Encode an iterator as a list, item by item."""
    from json import JSONEncoder

    encode = JSONEncoder(allow_nan=False).encode

    def pieces(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield "{"
            for number, (key, item) in enumerate(value.items()):
                yield f"{', ' if number else ''}{encode(key)}: "
                yield from pieces(item)
            yield "}"
        elif isinstance(value, Iterator):
            yield "["
            for number, item in enumerate(value):
                parts = item.values() if isinstance(item, dict) else ()
                holds_iterators = any(hasattr(part, "__next__") for part in parts)
                if number:
                    yield ", " if number % BATCH and not holds_iterators else ",\n"
                yield from pieces(item) if holds_iterators else (encode(item),)
            yield "]"
        else:
            yield encode(value)

    return pieces(value)


# Progress


class Progress:
    """Show a progress bar: ``with Progress("copying", total) as progress: progress(nbytes)``.

    The bar appears on standard error. On a terminal, the bar appears after one second. With
    --progress, the bar appears at once. A call can pass a total that was unknown before.
    """

    def __init__(self, title: str, total: int | None = None, *, shown: bool = True) -> None:
        self.shown = shown and (progress_asked or is_terminal(sys.stderr))
        self.title, self.total = title, total
        self.done = 0
        self.started = monotonic()
        self.bar: tqdm[Any] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def name(self, title: str) -> None:
        """Change the title, such as the name of the current file."""
        self.title = title
        if self.bar is not None:
            self.bar.set_description(title, refresh=False)

    def clear(self) -> None:
        """Erase the bar before lines are printed. The next call of the Progress object draws the
        bar again."""
        if self.bar is not None:
            self.bar.clear()

    def __call__(self, nbytes: int, total: int | None = None) -> None:
        self.done += nbytes
        self.total = self.total if total is None else total
        if self.bar is not None:
            self.bar.update(nbytes)
        elif self.shown and (progress_asked or monotonic() - self.started > PATIENCE):
            from tqdm import tqdm

            tqdm.monitor_interval = (
                0  # disable the monitor thread of tqdm, because a thread would prevent forking
            )
            self.bar = tqdm(
                desc=self.title, total=self.total, initial=self.done, unit="B", unit_scale=True,
                leave=progress_asked,
            )  # fmt: skip


# Files


def publish(data: bytes, path: str, force: bool) -> None:
    """Write a file at `path` atomically."""
    from ckptkit.core.plan import OutputFile, Plan
    from ckptkit.publish.publish import publish

    publish(Plan((OutputFile("", (data,)),)), path, force=force, allow_expand=True)
