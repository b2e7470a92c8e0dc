"""From facts to words: what every surface writes alike, be it the terminal, a page or a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice

# Printable by Python's definition, and yet drawn as nothing: joiners, fillers, variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)


def escape(text: str) -> str:
    """`text` with whatever could move the cursor, hide or reorder its neighbours written as a
    backslash escape.

    That is: all that Python calls unprintable (control characters, line breaks, bidirectional
    marks, zero-width characters, lone surrogates, spaces other than the space), and what is
    printable but invisible.
    """
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    return "".join(c if c.isprintable() and not _INVISIBLE.match(c) else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    if char in "\n\r\t":
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[char]
    code = ord(char)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


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


def plural(count: int, noun: str) -> str:
    """``1 tensor``, ``97 tensors``, ``2 entries``."""
    if count != 1:
        noun = noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"
    return f"{count:,} {noun}"


NAMES = 4  # names that a sentence lists


def some(names: Iterable[str], most: int = NAMES) -> str:
    """``a, b, c, d and 93 more``: the first `most` names, and how many follow."""
    listed = list(names)
    return ", ".join(listed[:most]) + and_more(len(listed) - most)


def quoted(names: Iterable[str], most: int = NAMES) -> str:
    """``'a', 'b' and 5 more``."""
    return some(map(repr, names), most)


def and_more(count: int) -> str:
    """`` and 93 more``; nothing where nothing follows."""
    return f" and {count:,} more" if count > 0 else ""


SHOWN = 100  # characters of a value in a message


def shown(value: object) -> str:
    """Return the repr of a value from a file for a message, cut to one short line."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN + 2 else f"{text[: SHOWN - 3]}..."


@lru_cache
def shape(sizes: tuple[int, ...]) -> str:
    """``[16, 3, 3, 3]``, as torch writes it."""
    return f"[{', '.join(str(each) if each < 1 << 63 else '...' for each in sizes)}]"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """Return up to three names that look most like `word`, of the first 5,000 and those short
    enough to compare."""
    from difflib import get_close_matches  # costs 10 ms

    short = [name for name in islice(known, 5_000) if len(name) <= _COMPARED]
    return get_close_matches(word[:_COMPARED], short, n=3, cutoff=cutoff)


def meant(word: str, known: Iterable[str]) -> str:
    """``did you mean a, b? ``; nothing where nothing is near."""
    close = nearest(word, known)
    return f"did you mean {', '.join(close)}? " if close else ""


def guess(word: str, known: Iterable[str]) -> str | None:
    """``did you mean a, b?`` as a hint of its own; None where nothing is near."""
    return meant(word, known).rstrip() or None


def entries(word: str, known: Sequence[str]) -> str | None:
    """A hint for who asked for the entry `word`: what is near, and what there is."""
    return f"{meant(word, known)}the entries are: {', '.join(known[:12])}" if known else None


_COMPARED = 200  # characters
