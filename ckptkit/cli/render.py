"""Text output: escaping, sizes, tables, JSON. Everything that is printed goes through here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from typing import Any, TextIO

from ckptkit.core.errors import CkptkitError, OutputError
from ckptkit.core.text import escape as escape
from ckptkit.core.text import flatten, message
from ckptkit.core.text import matcher as matcher
from ckptkit.core.text import plural as plural
from ckptkit.core.text import shape as shape
from ckptkit.core.text import size as size

STDOUT = "standard output"
COLOURS = {"red": 31, "green": 32, "yellow": 33, "cyan": 36}
LABELS = {
    "different:": "red", "equal:": "green", "error:": "red", "hint:": "cyan", "mismatched": "red",
    "missing": "red", "note:": "cyan", "unexpected": "yellow", "warning:": "yellow",
}  # fmt: skip
STREAMED = 2_000  # rows; longer tables are formatted row by row, without tabulate
BATCH = 1_000  # rows that are formatted at once
_PLAIN = frozenset({str, int, float, bool, type(None), list, tuple, dict})


def emit(*lines: str) -> None:
    """Print lines on standard output. Raises OutputError if it is closed or full."""
    write(f"{line}\n" for line in lines)


def emit_text(*lines: str) -> None:
    """Print lines, escaped, and wrapped between words on a terminal."""
    emit(*text_lines(lines))


def text_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that `emit_text` prints."""
    return flatten(wrapped(escape(line), whole=True) for line in lines)


begun = False  # whether anything was written to standard output


def write(pieces: Iterable[str]) -> None:
    """Write pieces of text to standard output."""
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
    """Print ``note: line`` on standard error, and a hint below it: for what is as it should be."""
    _message("note", line, hint)


def _message(label: str, line: str, hint: str | None) -> None:
    """Print a message with its label; do nothing if standard error is closed."""
    if sys.stderr is None:
        return
    lines = message(label, line, hint)
    try:
        sys.stderr.writelines(f"{labelled(each, sys.stderr)}\n" for each in lines)
    except OSError:
        pass


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def has_colour(stream: TextIO | None) -> bool:
    """Return whether output goes to a terminal that allows color (https://no-color.org)."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and is_terminal(stream) and (os.name != "nt" or "WT_SESSION" in os.environ)


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return `text`, already escaped, in a color if `stream` (standard output) shows colors."""
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if has_colour(stream or sys.stdout) else text


def labelled(line: str, stream: TextIO | None = None) -> str:
    """Return `line`, already escaped, with its first word in color if it is a status word."""
    word = line.split(" ", 1)[0]
    return paint(word, LABELS[word], stream) + line[len(word) :] if word in LABELS else line


def terminal_width() -> int | None:
    """Return the columns of the terminal that output goes to, None if there is none."""
    if not is_terminal(sys.stdout):
        return None
    from shutil import get_terminal_size

    return get_terminal_size().columns


def wrapped(line: str, *, whole: bool = False) -> list[str]:
    """Break an escaped line into lines that fit on the terminal; in a pipe, it stays whole.

    A word that is longer is broken, unless it is to stay `whole`: a path or a name, to be pasted.
    A hint stays in one line: it may hold a command.
    """
    width = terminal_width()
    if width is None or len(line) <= width or line.startswith("hint: "):
        return [line]
    from ckptkit.cli import narrow

    return narrow.line(line, width, whole=whole)


def listed(names: Iterable[str]) -> Iterator[str]:
    """Yield names as an indented list, shortened on a terminal, or wrapped if that confuses two."""
    names, width = list(names), terminal_width()
    if width is not None:
        from ckptkit.cli import narrow

        names = narrow.distinct(names, max(narrow.NARROWEST, width - 2)) or names
    yield from flatten(wrapped(f"  {name}", whole=True) for name in names)


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> Iterator[str]:
    """Format a table without rules; columns named in `right` are right-aligned.

    On a terminal, it is made to fit (`narrow.table`); elsewhere nothing is cut.
    """
    width = terminal_width()
    if not rows or width is None:
        yield from _aligned(headers, rows, right)
        return
    lines = list(_aligned(headers, rows, right))
    if max(map(len, lines)) <= width:
        yield from lines
        return
    from ckptkit.cli import narrow

    yield from narrow.table(headers, rows, right, width, partial(_columns, right=right))


def _aligned(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> Iterator[str]:
    if len(rows) > STREAMED:
        yield from _columns(headers, rows, right)
    elif rows:
        from tabulate import tabulate  # costs 30 ms

        align = ["right" if header in right else "left" for header in headers]
        text = tabulate(rows, headers, tablefmt="plain", disable_numparse=True, colalign=align)
        yield from map(str.rstrip, text.split("\n"))


def _columns(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> Iterator[str]:
    """Format a table as `_aligned` does, without its space around headings."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    form = "  ".join(
        f"{{:{'>' if header in right else '<'}{w}}}"
        for header, w in zip(headers, widths, strict=True)
    )
    for row in (headers, *rows):
        yield form.format(*row).rstrip()


def json_pieces(value: Any) -> Iterator[str]:
    """Yield the JSON text of `value` in pieces; iterators become lists without being held in
    memory.
    """
    from json import dumps

    if isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield f"{', ' if number else ''}{dumps(key)}: "
            yield from json_pieces(item)
        yield "}"
    elif isinstance(value, Iterator):
        yield "["
        yield from _json_items(value)
        yield "]"
    else:
        yield dumps(value, allow_nan=False)


def _json_items(items: Iterator[Any]) -> Iterator[str]:
    """Yield the items of a container: plain ones in batches, those with iterators singly."""
    from json import dumps

    before = ""
    for is_plain, same in groupby(items, key=_is_plain):
        while batch := list(islice(same, BATCH if is_plain else 1)):
            yield before
            if is_plain:
                yield dumps(batch, allow_nan=False)[1:-1]
            else:
                yield from json_pieces(batch[0])
            before = ",\n"


def _is_plain(item: Any) -> bool:
    """Return whether an item holds no iterator; the types of most are known to be none."""
    if not isinstance(item, dict) or _PLAIN.issuperset(map(type, item.values())):
        return True
    return not any(isinstance(part, Iterator) for part in item.values())


def emit_json(value: dict[str, Any]) -> None:
    """Print `value` as one JSON object."""
    write(json_pieces(value))
    write(["\n"])
