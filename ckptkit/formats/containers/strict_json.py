"""A JSON parser for RFC 8259, stricter where two readers could disagree.

UTF-8 without a byte order mark; no name twice in one object; no NaN or Infinity, spelled out or by
overflow; no ``-0`` and no integer of more than 20 digits; no lone surrogates; no nesting deeper
than `LIMITS.json_depth`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from ckptkit.core.errors import AmbiguousError, FormatError
from ckptkit.core.limits import LIMITS, check

_DIGITS = 20  # of 2**64
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'{}[]"'))


Exchange = Callable[[dict[str, Any]], Any]


def parse(data: bytes, what: str, exchange: Exchange | None = None) -> Any:
    """Parse `data` as strict JSON; `what` names it in messages.

    `exchange` returns what is to stand for an object, each as soon as it is parsed.

    Raises FormatError for bytes that are not JSON, AmbiguousError for a repeated name, LimitError.
    """
    check("json_values", sum(map(data.count, (b",", b"[", b"{"))), f"values in {what}")
    _check_nesting(data, what)
    return _loads(data, what, exchange)


def _check_nesting(data: bytes, what: str) -> None:
    """Remove matching brackets from the inside out, a layer at a time.

    The parser recurses, this check does not.
    """
    escaped = b"\\" in data
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"") if escaped else data
    # Most strings hold no brackets: without these, there is little left to split.
    quoted = unescaped.translate(_SQUARE, _NO_BRACKETS).replace(b'""', b"")
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


def _loads(data: bytes, what: str, exchange: Exchange | None) -> Any:
    hook = _object if exchange is None else partial(_exchanged, exchange)
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=hook,
            parse_int=_integer if _has_odd_integers(data) else int,
            parse_float=_number,
            parse_constant=_constant,
        )
        if b"\\" in data and (b"\\ud" in data or b"\\uD" in data):
            json.dumps(value, ensure_ascii=False, default=repr).encode()
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


def _exchanged(exchange: Exchange, pairs: list[tuple[str, Any]]) -> Any:
    return exchange(_object(pairs))


def _has_odd_integers(data: bytes) -> bool:
    """Return whether `_integer` might refuse one; a name may look like it."""
    return b"-0" in data or b"0" * _DIGITS in data.translate(_ZEROS)


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
