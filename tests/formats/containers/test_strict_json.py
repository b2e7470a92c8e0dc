"""Strict JSON: what two readers could read differently is refused, before anything recurses or
allocates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.errors import AmbiguousError, FormatError, LimitError
from ckptkit.core.limits import LIMITS
from ckptkit.formats import strict_json
from tests.formats.catalogue import Row, refuses_all
from tests.formats.safetensors.files import Pairs, json_of


def parse(data: bytes) -> object:
    return strict_json.parse(data, "the header")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


DIALECTS = (
    b"", b" ", b"{}{}", b"{}\0", b"{},", b"[1,]", b'{"a":1,}', b"[1 // one\n]", b"['a']", b"[NaN]",
    b"[Infinity]", b"[-Infinity]", b"[1e400]", b"[-1e999]", b"[-0]", b"[01]", b"[+1]", b"[1.]",
    b"[0x10]", b'["a\nb"]', b'["\\x41"]', b'["\\ud800"]', b'["\\uDC80\\ud800"]', b'{"\\udfff":1}',
    b'["\xff"]', b'["\xed\xa0\x80"]', b"\xef\xbb\xbf{}",
    *('{"a":1}'.encode(encoding) for encoding in ("utf-16", "utf-16-le", "utf-32-be")),
)  # fmt: skip


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


def refused() -> Iterator[Row]:
    """Yield the row of threats.md, a text, the error when it is read, and what it says."""
    for text, name in (
        (b'{"a":1,"a":2}', "a"), (b'{"a":1,"\\u0061":1}', "a"), (b'{"x":{"y":[1],"y":[1]}}', "y"),
        (b'[[{"a":null,"b":[],"a":null}]]', "a"), (b'{"a":1,"b":2,"c":3,"b":4}', "b"),
    ):  # fmt: skip
        yield "ST_03", text, AmbiguousError, f"'{name}' occurs twice"
    for text in DIALECTS:
        yield "ST_04", text, FormatError, ""
    for depth in (LIMITS.json_depth + 1, 100_000):
        yield "ST_05", nested(depth), LimitError, "json_depth"
        yield "ST_05", nested(depth, '{"a":', "}"), LimitError, "json_depth"
    for text in (
        b"[" * 100_000, b"]" * 1000, b'{"a":' * 100_000, b"[}" * 100, b'["' + b"[" * 9999,
    ):  # fmt: skip
        yield "ST_05", text, FormatError, ""
    for digits in (21, 5000, 200_000):
        yield "ST_06", b"[" + b"9" * digits + b"]", FormatError, "64 bits"


def test_ST_03_ST_04_ST_05_ST_06() -> None:
    refuses_all(parse, refused())


def test_what_is_json() -> None:
    assert parse(b" \t\r\n{ } \n") == {}
    assert parse(b'["\\ud83d\\ude00"]') == ["\U0001f600"]
    assert parse(b"[18446744073709551616]") == [2**64]
    assert parse(nested(LIMITS.json_depth)) and parse(nested(LIMITS.json_depth, '{"a":', "}"))


@pytest.mark.parametrize(
    "text", ['"[[[["', '"\\"[["', '"\\\\"', '"\\\\\\"]]"', '{"]":"{"}', '["[","","]"]']
)
def test_brackets_in_texts_do_not_count(text: str) -> None:
    assert parse(f"[{text}]".encode()) == [json.loads(text)]


NAMES = st.sampled_from(
    ["a", "b", "", "a:", '"', 'a"},"b', '}, "', "},", "\\", "\u00e9", "[{", "-0"]
)
REPEATED = st.recursive(
    NAMES | st.sampled_from([None, 0, 1.5, []]),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(NAMES, inner)).map(Pairs),
    max_leaves=12,
)
OBJECTS = st.lists(st.tuples(NAMES | TEXTS, REPEATED)).map(Pairs)


def strings_in(value: object) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(strings_in, value.values()))
    return sum(map(strings_in, value)) if isinstance(value, list) else isinstance(value, str)


@settings(max_examples=150)
@given(OBJECTS, st.sampled_from(["", " ", "\n"]), st.booleans(), st.sampled_from([0, 9, 1 << 18]))
def test_parts_show_each_repeated_name(value: Pairs, space: str, ascii: bool, size: int) -> None:
    text = json_of(value, space, ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_PART", size)
        try:
            parts = list(strict_json.parse_parts(text, "the header"))
        except FormatError:
            assert size < len(text)  # a cut inside of a name, or of an entry
            return
    merged: dict[str, object] = {}
    for part, _ in parts:
        merged |= part
    distinct = len(merged) == sum(len(part) for part, _ in parts)
    try:
        expected = parse(text)
    except AmbiguousError:
        assert not distinct or any(strings_in(part) < strings for part, strings in parts)
    else:
        assert distinct and repr(merged) == repr(expected)
        assert all(strings_in(part) == strings for part, strings in parts)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":{},"b":{},}', b'{"a":{},,"b":{}}', b'{"a":{},"b":{}', b'"a":{},"b":{}}', b'[{},"b"]',
        b'{"a":{"b":{},"c":1}}', b'{"a":"{},","b":1}', b'{"a":{}},"b":{}}', b'{"a":{},"b"}',
        b'{"a":{},"b":-0}', b'{"a":{},"b":"\xff"}', b'{"a":{},"\\ud800":1}', b"[]", b'"a"',
    ],
)  # fmt: skip
def test_parts_that_are_no_objects(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "_PART", 0)
    with pytest.raises(FormatError):
        list(strict_json.parse_parts(data, "the header"))


def test_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(LIMITS, json_values=100)
    monkeypatch.setattr("ckptkit.core.limits.LIMITS", small)
    assert parse(json.dumps([0] * 100).encode()) == [0] * 100
    with pytest.raises(LimitError, match="json_values"):
        parse(json.dumps([0] * 101).encode())
    monkeypatch.setattr(strict_json, "_PART", 0)
    few = b'{"a":{},"b":{},"c":{}}'
    assert len(list(strict_json.parse_parts(few, "the header"))) == 3
    with pytest.raises(LimitError, match="json_values"):
        list(strict_json.parse_parts(few[:-1] + b',"d":' + b"[0" + b",0" * 100 + b"]}", "it"))
