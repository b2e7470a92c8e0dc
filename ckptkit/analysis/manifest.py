r"""The manifest: the ids of a checkpoint's tensors, in the form of ``sha256sum``::

    # ckptkit.digest/1 tensors=2 sha256=<64 hex>
    <64 hex>  conv1.weight
    \<64 hex>  a name with a backslash: \\

Each line after the first is the id of a tensor (:mod:`tensor_digest`), two spaces, its name. As in
a list of ``sha256sum``, a name that holds a backslash or a line break is written with escapes, and
its line begins with a backslash. What else cannot be printed is escaped likewise, as Python does it
(``\x1b``, ``\u202e``), and read back.

The digest of the whole is SHA-256 over these lines, of all escapes only those of ``sha256sum`` in
them (``\\``, ``\n``, ``\r``), as UTF-8, in the order of their bytes, whatever the order of the
tensors::

    grep -v '^#' net.manifest | LC_ALL=C sort | sha256sum
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ckptkit.core.errors import CorruptError, FormatError

SCHEMA = "ckptkit.digest/1"
_FIRST = re.compile(rf"# {SCHEMA} tensors=([0-9]{{1,9}}) sha256=([0-9a-f]{{64}})")
_LINE = re.compile(r"(\\?)([0-9a-f]{64})  (.*)", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:10|0[0-9a-f])[0-9a-f]{4}|[\\nrt]|.?)", re.DOTALL
)
_PLAIN = {"\\": "\\", "n": "\n", "r": "\r", "t": "\t"}


class Differences(NamedTuple):
    """Names that only the manifest has, only the checkpoint has, or that have another digest."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    differing: tuple[str, ...]


def whole(ids: Mapping[str, str]) -> str:
    """The digest of all tensors, given their ids by name, in any order."""
    return hashlib.sha256(
        b"".join(sorted(_line(name, each) for name, each in ids.items()))
    ).hexdigest()


def _line(name: str, id: str) -> bytes:
    escaped = name.replace("\\", "\\\\").replace("\n", r"\n").replace("\r", r"\r")
    return f"{chr(92) * (escaped != name)}{id}  {escaped}\n".encode("utf-8", "surrogatepass")


def lines(ids: Mapping[str, str], printable: Callable[[str], str]) -> list[str]:
    """Yield the lines of the manifest, sorted by name.

    `printable` escapes what must not reach a terminal.
    """
    first = f"# {SCHEMA} tensors={len(ids)} sha256={whole(ids)}"
    return [first, *(_shown(name, ids[name], printable) for name in sorted(ids))]


def _shown(name: str, id: str, printable: Callable[[str], str]) -> str:
    escaped = printable(name.replace("\\", "\\\\"))
    return f"{chr(92) * (escaped != name)}{id}  {escaped}"


def parse(data: bytes) -> dict[str, str]:
    """The ids of a manifest by name.

    Raises FormatError for what is none, CorruptError where it is cut or was changed.
    """
    try:
        first, *rest = data.decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise FormatError("is not a manifest: not UTF-8") from error
    heading = _FIRST.match(first)
    if heading is None:
        raise FormatError("is not a manifest", hint="`digest --output` writes one")
    ids: dict[str, str] = {}
    for number, line in enumerate(rest, 2):
        if line.startswith("# ckptkit.digest/"):
            raise FormatError(f"line {number:,}: the manifest of another file begins")
        if not line or line.startswith("#"):
            continue
        name, id = _read(line, number)
        if name in ids:
            raise FormatError(f"line {number:,}: the name is there twice")
        ids[name] = id
    if len(ids) != int(heading[1]) or whole(ids) != heading[2]:
        raise CorruptError(
            f"is not whole: its first line says {int(heading[1]):,} tensors of another digest"
        )
    return ids


def _read(line: str, number: int) -> tuple[str, str]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise FormatError(f"line {number:,} is not a digest, two spaces and a name")
    escaped, id, name = found.groups()
    try:
        return (_ESCAPE.sub(_unescaped, name) if escaped else name), id
    except ValueError as error:
        raise FormatError(f"line {number:,}: {error}") from error


def _unescaped(found: re.Match[str]) -> str:
    text = found[1]
    if text in _PLAIN:
        return _PLAIN[text]
    if len(text) < 3:
        raise ValueError(f"there is no escape {found[0]}")
    return chr(int(text[1:], 16))


def compare(ids: Mapping[str, str], expected: Mapping[str, str]) -> Differences:
    """Return how a checkpoint differs from a manifest."""
    return Differences(
        tuple(name for name in expected if name not in ids),
        tuple(name for name in ids if name not in expected),
        tuple(name for name, id in ids.items() if expected.get(name, id) != id),
    )
