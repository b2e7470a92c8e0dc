"""Parse JSON (RFC 8259), and refuse input that two readers could read differently.

`parse` refuses:

* A byte order mark, bytes that are not UTF-8, and lone surrogates.
* A name that occurs twice in one object.
* NaN and Infinity, and numbers that overflow to infinity.
* The number ``-0``, and integers of more than 20 digits.
* Nesting deeper than `LIMITS.json_depth`.

Some formats store values outside the weights as JSON. `encode` converts a value to JSON, and
`decode` converts the JSON back. `encode` does not change null, booleans, integers of up to 19
digits, finite floats, strings, lists, and dicts whose keys are strings without a leading ``$``.
Any other value becomes an object with one key:

    {"$float": "nan" | "inf" | "-inf"}    {"$tuple": [...]}    {"$dict": [[key, value], ...]}
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ckptkit.core import limits
from ckptkit.core.errors import AmbiguousError, FormatError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tree import Node, Object, StoredList, children

_DIGITS = 20  # number of decimal digits of 2**64
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'{}[]"'))

_PART = 1 << 18  # minimum size of a part in bytes; a part contains a few thousand entries
_BETWEEN = re.compile(rb'\}, ?"')  # the end of an entry, and the quote before the next name

Found = TypeVar("Found")
Hook = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def parse(data: bytes, what: str) -> Any:
    """Parse `data` as strict JSON. Error messages call the data `what`.

    Raises FormatError for invalid JSON, AmbiguousError for a repeated name, and LimitError for too
    many values or too deep nesting.
    """
    _check_size(data, what)
    _check_nesting(data, what)
    return _loads(data, what, _object)


def field(parsed: Any, key: str, kind: type[Found], what: str, default: Any = None) -> Found:
    """Return a field of an object. Raises FormatError unless the value's type is `kind`."""
    found = parsed.get(key, default) if isinstance(parsed, dict) else None
    if type(found) is not kind:
        raise FormatError(f"{what} lacks the required field {key!r}")
    return found


def parse_parts(data: bytes, what: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Parse an object like `parse`, but in parts, in half the time and with less memory.

    Yield each part, and the number of strings in its JSON text. Names count as strings. If two
    entries of a part have the same name, the part silently contains only the last entry. To
    detect such entries, the caller counts the strings in the parsed part. If this count is equal to
    the yielded number, no name was repeated in the part. The caller compares the names of different
    parts separately.

    Each part is a non-empty object. The parts together contain exactly the entries of the object.
    If a part boundary falls inside a string or an entry, the part is invalid JSON. In this case,
    `parse_parts` raises FormatError, even if `parse` accepts the complete text.
    """
    _check_size(data, what)
    for part in _parts(data):
        marks = _check_nesting(part, what)
        value = _loads(part, what, None)
        if not isinstance(value, dict):
            raise FormatError(f"{what} is not a JSON object")
        yield value, marks // 2


def _parts(data: bytes) -> Iterator[bytes]:
    """Split the bytes of an object between entries. Add the missing brackets to each part."""
    begin, opening = 0, b""
    while cut := _BETWEEN.search(data, begin + _PART):
        yield opening + data[begin : cut.start() + 1] + b"}"
        begin, opening = cut.start() + 2, b"{"
    yield opening + data[begin:]


def _check_size(data: bytes, what: str) -> None:
    if len(data) > limits.LIMITS.json_values:  # each value takes at least one byte
        check("json_values", sum(map(data.count, (b",", b"[", b"{"))), f"values in {what}")


def _check_nesting(data: bytes, what: str) -> int:
    """Check that brackets match and are not nested too deep. Return the number of quotation marks.

    Each iteration removes the innermost brackets. Unlike the parser, this check is not recursive.
    """
    escaped = b"\\" in data
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"") if escaped else data
    # Keep only quotes and brackets. A string without brackets becomes an empty string.
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
    # `is_odd` is true if the data contains a number that `_integer` refuses. Other numbers may also
    # make `is_odd` true.
    is_odd = (b"-" in data and b"-0" in data) or b"0" * _DIGITS in data.translate(_ZEROS)
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=hook,
            parse_int=_integer if is_odd else int,
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


# Plain values


_SCALARS = frozenset({bool, int, float, str, type(None)})
_PLAIN = _SCALARS | {dict, list, tuple}
_DEPTH = 32
_ROOM = 250_000
_INT = 10**19


def is_plain(root: Node, room: int = _ROOM) -> bool:
    """Return whether `root` consists of at most `room` scalars, lists, tuples and dicts.

    Each value counts as 1. A string counts as 1 plus its length. A value counts once for each path
    that leads to it. Therefore a value that contains itself exceeds the limits.
    """
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        node = _unwrapped(node)
        kind = node.__class__
        room -= 1 + (len(node) if kind is str else 0)
        if (
            room < 0
            or depth > _DEPTH
            or kind not in _PLAIN
            or (kind is dict and not all(key.__class__ in _SCALARS for key in node))
            or (kind is int and not -_INT < node < _INT)
            or (kind is str and not is_utf8(node))
        ):
            return False
        for pair in children(node):
            waiting.extend((child, depth + 1) for child in pair)
    return True


def _unwrapped(node: Node) -> Node:
    """Return the value of a numpy scalar, or the items of a short StoredList as a list.

    Return any other node unchanged.
    """
    if node.__class__ is StoredList and len(node) < _ROOM:
        return list(node)
    return node.value if isinstance(node, Object) and node.value is not None else node


def is_utf8(text: str) -> bool:
    """Return whether a string has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def dump(value: Any) -> str:
    """Return compact JSON. For equal values, return equal strings."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode(node: Node) -> Any:
    """Convert a plain value to JSON. Recursion is safe: a plain value has at most 32 levels."""
    node = _unwrapped(node)
    if isinstance(node, float) and not math.isfinite(node):
        return {"$float": str(node)}
    if isinstance(node, tuple):
        return {"$tuple": [encode(each) for each in node]}
    if isinstance(node, list):
        return [encode(each) for each in node]
    if not isinstance(node, dict):
        return node
    if all(isinstance(key, str) and not key.startswith("$") for key in node):
        return {key: encode(value) for key, value in node.items()}
    return {"$dict": [[encode(key), encode(value)] for key, value in node.items()]}


def decode(value: Any) -> Node:
    """Convert the JSON that `encode` returned back to the value.

    Raises FormatError if `encode` cannot have returned the JSON. Recursion is safe: strict JSON has
    at most 128 levels.
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(each) for key, each in value.items()}
    match [*value.items()]:
        case [("$float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
        case [("$tuple", list(items))]:
            return tuple(decode(each) for each in items)
        case [("$dict", list(items))]:
            pairs = [decode(each) for each in items]
            if all(isinstance(each, list) and len(each) == 2 for each in pairs) and all(
                key.__class__ in _SCALARS for key, _ in pairs
            ):
                return dict(pairs)
    raise FormatError(f"{tag[:40]!r} is not a kind of value that ckptkit stores")
