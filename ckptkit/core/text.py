"""Text for messages and views: counts, lists of names, sizes, escapes, suggestions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice

# Printable by Python's definition, and yet drawn as nothing: joiners, fillers, variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)


def escape(text: str) -> str:
    """Escape the characters of `text` that move the cursor, hide or reorder others.

    These are all that Python calls unprintable (control characters, line breaks, bidirectional
    marks, zero-width characters, lone surrogates, spaces other than the space), and those that are
    printable but invisible.
    """
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    return "".join(c if c.isprintable() and not _INVISIBLE.match(c) else _escaped(c) for c in text)


def message(label: str, text: str, hint: str | None = None) -> list[str]:
    """Return the lines of a message for standard error: ``label: text`` and ``hint: ...``."""
    lines = [f"{label}: {text}", *([f"hint: {hint}"] if hint else [])]
    return [escape(line) for line in lines]


def _escaped(char: str) -> str:
    if char in "\n\r\t":
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[char]
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def argument(path: str) -> tuple[str, ...]:
    """A path as arguments: after ``--`` if it looks like an option."""
    return ("--", path) if path.startswith("-") else (path,)


_typed: list[bool] = []  # not empty while a command of the command line runs


def typed(option: str, argument: str) -> str:
    """Return how the caller asks for something: as an `option`, or as an `argument` in Python."""
    return option if _typed else argument


def typed_value(name: str, value: str) -> str:
    """Return how the caller gives a value: ``--key model``, or ``key='model'`` in Python."""
    return typed(f"--{name} {shell_word(value)}", f"{name}={value!r}")


@contextmanager
def on_command_line() -> Iterator[None]:
    """Name options, not arguments, in what is said meanwhile."""
    _typed.append(True)
    try:
        yield
    finally:
        _typed.pop()


def shell_command(words: Iterable[str]) -> str:
    """Join words into a command that a shell (bash, zsh) takes as they are, whatever is in them."""
    return " ".join(map(shell_word, words))


def shell_word(word: str) -> str:
    """Quote a word for a shell; one that cannot be printed as it is, byte by byte."""
    from shlex import quote

    if escape(word) == word:
        return quote(word)
    try:
        data = word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # of no file
        return quote(escape(word))
    return f"$'{''.join(map(_quoted_byte, data))}'"


def _quoted_byte(byte: int) -> str:
    char = chr(byte)
    return char if 0x20 <= byte < 0x7F and char not in "\\'" else f"\\x{byte:02x}"


# Suffixes of the files that ckptkit writes: a command takes the format from them.
WRITTEN = (".pth", ".pt", ".bin", ".ckpt", ".th", ".pth.tar", ".pt.tar", ".safetensors", ".npz")


def output_name(path: str, mark: str, suffix: str | None = None) -> str:
    """Return ``run-cpu.pth`` for ``run.pth``, in the working directory if `path` is a URL.

    `suffix` replaces that of `path`. A file whose suffix is not one that ckptkit writes, such as
    ``data.pkl`` or ``model.tar.gz``, becomes a ``.pth``.
    """
    if "://" in path:
        path = path.partition("?")[0].rpartition("/")[2]
    stem, own = os.path.splitext(path.rstrip("/"))
    folder, name = os.path.split(stem)
    if name.startswith(".") and not own:  # .metadata stands for its folder
        stem = folder if os.path.basename(folder).strip(".") else "checkpoint"
    if own in (".gz", ".bz2", ".xz", ".zst"):
        stem, own = os.path.splitext(stem)
    if own == ".tar":
        stem, inner = os.path.splitext(stem)
        own = inner + own
    if own[1:2].isalpha() and own.lower() not in WRITTEN and not os.path.isdir(path):
        own = ".pth"
    return f"{stem}-{mark}{own if suffix is None else suffix}"


def size(nbytes: int) -> str:
    """Format a number of bytes in decimal units: ``1.1 MB`` is 1,100,000."""
    if nbytes < 1_000:
        return f"{nbytes} B"
    scaled = nbytes / 1_000 if nbytes < 1 << 100 else float("inf")
    for unit in ("kB", "MB", "GB", "TB"):
        if scaled < 999.95:
            return f"{scaled:.1f} {unit}"
        scaled /= 1_000
    return f"{scaled:,.1f} PB"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 tensor``, ``97 tensors``, ``2 entries``."""
    if count != 1:
        noun = noun[:-1] + "ies" if noun.endswith("ry") else noun + "s"
    return f"{count:,} {noun}"


NAMES = 4  # names that a sentence lists


def some(names: Iterable[str], most: int = NAMES) -> str:
    """List the first `most` names and count the rest: ``a, b, c, d and 93 more``."""
    listed = list(names)
    return ", ".join(listed[:most]) + and_more(len(listed) - most)


def quoted(names: Iterable[str], most: int = NAMES) -> str:
    """List names in quotes: ``'a', 'b' and 5 more``."""
    return some(map(repr, names), most)


def and_more(count: int) -> str:
    """Format the count of names left out: `` and 93 more``; empty for none."""
    return f" and {count:,} more" if count > 0 else ""


SHOWN = 100  # characters of a value in a message


def shown(value: object) -> str:
    """Return the repr of a value from a file for a message, cut to one short line."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN + 2 else f"{text[: SHOWN - 3]}..."


def mismatch(what: str, seen: int, expected: int) -> str:
    """Say that the CRC-32 of `what` is not the one that its container holds."""
    return f"{what} is damaged: its CRC-32 is {seen:08x}, not {expected:08x}"


def matcher(globs: Iterable[str]) -> Callable[[str], bool]:
    """Return a test whether a name matches one of the globs; ``*`` matches dots too."""
    from fnmatch import translate

    match = re.compile("|".join(map(translate, globs))).match
    return lambda name: match(name) is not None


@lru_cache
def shape(sizes: tuple[int, ...]) -> str:
    """Format a shape as torch writes it: ``[16, 3, 3, 3]``."""
    return f"[{', '.join(str(each) if each < 1 << 63 else '...' for each in sizes)}]"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """Return up to three names that look most like `word`.

    Only the first 5,000 of `known` that are short enough to compare are considered.
    """
    from difflib import get_close_matches  # costs 10 ms

    short = [name for name in islice(known, 5_000) if len(name) <= _COMPARED]
    return get_close_matches(word[:_COMPARED], short, n=3, cutoff=cutoff)


def meant(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean a, b? ``; empty if no name is near."""
    close = nearest(word, known)
    return f"did you mean {', '.join(close)}? " if close else ""


def guess(word: str, known: Iterable[str]) -> str | None:
    """Return ``did you mean a, b?`` as a hint of its own; None if no name is near."""
    return meant(word, known).rstrip() or None


def entries(word: str, known: Sequence[str], noun: str = "entries") -> str | None:
    """Return a hint for a missing entry `word`: the nearest names, and the first that exist."""
    listed = some(known, 12)
    return f"{meant(word, known)}the {noun} are: {listed}" if known else None


_COMPARED = 200  # characters
