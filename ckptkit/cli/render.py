"""From facts to text: escaping, sizes, tables, folding, JSON. Everything that is printed goes through here."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, TextIO

from ckptkit.errors import OutputError

STDOUT = "standard output"
STREAMED = 2_000  # rows from which on a table is written as plain columns, without looking at all of it twice
NARROWEST = 16  # characters that are left of a name on a terminal, however narrow
BATCH = 1_000  # rows that are put into text at once

# Printable by Python's definition, and yet drawn as nothing: joiners, fillers, variation selectors.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]")


def escape(text: str) -> str:
    """`text` with whatever could move the cursor, hide or reorder its neighbours written as a backslash escape.

    That is: all that Python calls unprintable (control characters, line breaks, bidirectional marks, zero-width
    characters, lone surrogates, spaces other than the space), and what is printable but invisible.
    """
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    return "".join(c if c.isprintable() and not _INVISIBLE.match(c) else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    if char in "\n\r\t":
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[char]
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def size(nbytes: int) -> str:
    """Bytes for people: ``1.1 MB`` is 1,100,000."""
    if nbytes < 1_000:
        return f"{nbytes} B"
    scaled = nbytes / 1_000 if nbytes < 1 << 100 else float("inf")
    for unit in ("kB", "MB", "GB", "TB"):
        if scaled < 999.95:
            return f"{scaled:.1f} {unit}"
        scaled /= 1_000
    return f"{scaled:,.1f} PB"


def matcher(globs: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name matches one of the globs; ``*`` matches dots too."""
    from fnmatch import translate

    match = re.compile("|".join(map(translate, globs))).match
    return lambda name: match(name) is not None


def plural(count: int, noun: str) -> str:
    """``1 tensor``, ``97 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@lru_cache
def shape(sizes: tuple[int, ...]) -> str:
    """``[16, 3, 3, 3]``, as torch writes it."""
    return f"[{', '.join(str(each) if each < 1 << 63 else '...' for each in sizes)}]"


def emit(*lines: str) -> None:
    """Print lines on standard output. Raises OutputError where that is closed or full."""
    write(f"{line}\n" for line in lines)


def write(pieces: Iterable[str]) -> None:
    """Write pieces of text to standard output."""
    if sys.stdout is None:
        raise OutputError("is closed", where=STDOUT)
    try:
        sys.stdout.writelines(pieces)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise stdout_failed(error) from error


def stdout_failed(error: OSError) -> OutputError:
    return OutputError(error.strerror or str(error), where=STDOUT)


def warn(line: str, hint: str | None = None) -> None:
    """Print a line on standard error, marked as ours, and what to type next below it; nothing where that is closed."""
    if sys.stderr is None:
        return
    lines = [f"ckptkit: {line}", *([f"hint: {hint}"] if hint else [])]
    try:
        sys.stderr.writelines(f"{escape(each)}\n" for each in lines)
    except OSError:
        pass


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> Iterator[str]:
    """Lines of a table without rules. `right` are the headers of columns that are aligned to the right.

    On a terminal the first column gives way so that a row fits on a line; elsewhere nothing is cut.
    """
    align = ["right" if header in right else "left" for header in headers]
    rows = _fitted(headers, rows)
    if len(rows) > STREAMED:
        yield from _columns(headers, rows, align)
    elif rows:
        from tabulate import tabulate  # costs 30 ms

        text = tabulate(rows, headers, tablefmt="plain", disable_numparse=True, colalign=align)
        yield from map(str.rstrip, text.split("\n"))


def _columns(headers: Sequence[str], rows: Sequence[Sequence[str]], align: Sequence[str]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    form = "  ".join(f"{{:{'>' if side == 'right' else '<'}{w}}}" for side, w in zip(align, widths, strict=True))
    for row in (headers, *rows):
        yield form.format(*row).rstrip()


def _fitted(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """`rows` with the first cells shortened in the middle to what the terminal has left for them."""
    if not rows or not is_terminal(sys.stdout):
        return rows
    from shutil import get_terminal_size

    others = sum(2 + max(map(len, column)) for column in list(zip(headers, *rows, strict=True))[1:])
    room = max(NARROWEST, get_terminal_size().columns - others - 1)
    return [(shortened(first, room), *rest) for first, *rest in rows]


def shortened(text: str, room: int) -> str:
    """`text` in at most `room` characters, its middle left out."""
    if len(text) <= room:
        return text
    head = (room - 3) // 2
    return f"{text[:head]}...{text[len(text) - (room - 3 - head) :]}"


def json_number(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: they become the words. Everything else stays."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_pieces(value: Any) -> Iterator[str]:
    """JSON text of `value`, in pieces; an iterator becomes a list that is never whole in memory."""
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
    """Items that hold iterators come one by one, plain ones are encoded a batch at a time."""
    from json import dumps

    before = ""
    for first in items:
        if isinstance(first, dict) and any(isinstance(part, Iterator) for part in first.values()):
            yield before
            yield from json_pieces(first)
        else:
            batch = [first, *islice(items, BATCH)]
            yield before + dumps(batch, allow_nan=False)[1:-1]
        before = ",\n"


def emit_json(value: dict[str, Any]) -> None:
    """Print `value` as one JSON object."""
    write(json_pieces(value))
    write(["\n"])
