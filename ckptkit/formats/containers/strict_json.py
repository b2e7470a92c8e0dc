"""A JSON parser for RFC 8259, stricter where two readers could disagree.

UTF-8 without a byte order mark; no name twice in one object; no NaN or Infinity, spelled out or by
overflow; no ``-0`` and no integer of more than 20 digits; no lone surrogates; no nesting deeper
than `LIMITS.json_depth`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ckptkit.core import limits
from ckptkit.core.errors import AmbiguousError, FormatError
from ckptkit.core.limits import LIMITS, check

_DIGITS = 20  # of 2**64
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'{}[]"'))

_PART = 1 << 18  # bytes, at least: some thousand entries
_BETWEEN = re.compile(rb'\}, ?"')  # an object that ends and a name that begins, outside of strings

Hook = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def parse(data: bytes, what: str) -> Any:
    """Parse `data` as strict JSON; `what` names it in messages.

    Raises FormatError for bytes that are not JSON, AmbiguousError for a repeated name, LimitError.
    """
    _check_size(data, what)
    _check_nesting(data, what)
    return _loads(data, what, _object)


def parse_parts(data: bytes, what: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Parse an object as `parse` does, some entries at a time, in half the time and less memory.

    Each part comes with the number of strings (names and texts) in its text. Of a repeated name the
    last entry counts: the caller ensures that there is none.

    * A part that holds as many strings as its text has lost none, so no name was repeated in it:
      each quotation mark begins or ends a string, unless it is escaped, and of two entries of one
      name only one is left, with its strings. Names in different parts are compared by the caller.
    * The entries of all parts are those of the object, because every part is an object by itself,
      and not an empty one: it ends with an object or begins with a name. Where a cut is inside of
      a string or an entry, a part is no JSON, and FormatError is raised, although `parse` may take
      the whole.
    """
    _check_size(data, what)
    for part in _parts(data):
        marks = _check_nesting(part, what)
        value = _loads(part, what, None)
        if not isinstance(value, dict):
            raise FormatError(f"{what} is not a JSON object")
        yield value, marks // 2


def _parts(data: bytes) -> Iterator[bytes]:
    """Cut the text of an object between entries, and complete the brackets of each part."""
    begin, opening = 0, b""
    while cut := _BETWEEN.search(data, begin + _PART):
        yield opening + data[begin : cut.start() + 1] + b"}"
        begin, opening = cut.start() + 2, b"{"
    yield opening + data[begin:]


def _check_size(data: bytes, what: str) -> None:
    if len(data) > limits.LIMITS.json_values:  # else there are fewer: each takes a byte
        check("json_values", sum(map(data.count, (b",", b"[", b"{"))), f"values in {what}")


def _check_nesting(data: bytes, what: str) -> int:
    """Remove matching brackets from the inside out, a layer at a time; count the quotation marks.

    The parser recurses, this check does not.
    """
    escaped = b"\\" in data
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"") if escaped else data
    # Most strings hold no brackets: without these, there is little left to split.
    quoted = unescaped.translate(_SQUARE, _NO_BRACKETS)
    marks = quoted.count(b'"')
    quoted = quoted.replace(b'""', b"")
    brackets = b"".join(quoted.split(b'"')[::2])
    for _ in range(LIMITS.json_depth):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):
            break
        brackets = outer
    if b"[]" in brackets:
        check("json_depth", LIMITS.json_depth + 1, f"nesting of {what}")
    if brackets:
        raise FormatError(f"{what} is not JSON: its brackets do not match")
    return marks


def _loads(data: bytes, what: str, hook: Hook | None) -> Any:
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=hook,
            parse_int=_integer if _has_odd_integers(data) else int,
            parse_float=_number,
            parse_constant=_constant,
        )
        if b"\\" in data and (b"\\ud" in data or b"\\uD" in data):
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise FormatError(f"{what} is not UTF-8: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise FormatError(f"{what} is not JSON: {error.msg} (character {error.pos:,})") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise AmbiguousError(f"the name {twice[:80]!r} occurs twice in one JSON object")
    return made


def _has_odd_integers(data: bytes) -> bool:
    """Return whether `_integer` might refuse one; a name may look like it."""
    return (b"-" in data and b"-0" in data) or b"0" * _DIGITS in data.translate(_ZEROS)


def _integer(text: str) -> int:
    if len(text) > _DIGITS or text == "-0":
        raise FormatError(f"the JSON number {text[:24]} is not an integer that fits in 64 bits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise FormatError(f"the JSON number {text[:24]} is out of range")
    return value


def _constant(text: str) -> float:
    raise FormatError(f"{text} is not JSON")
