"""Strict JSON: what two readers could read differently is refused, before anything recurses or
allocates."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError, LimitError
from ckptkit.core.limits import LIMITS
from ckptkit.formats.containers import strict_json


def parse(data: bytes) -> object:
    return strict_json.parse(data, "the header")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=30
)


@given(VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_reads_what_the_standard_library_writes(
    value: object, ascii: bool, indent: int | str | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    assert repr(parse(text.encode())) == repr(value)


@given(
    st.binary(max_size=60)
    | st.text('[]{}"\\,:01-eE.ntu\ud800d', max_size=60).map(lambda t: t.encode(errors="replace"))
)
def test_anything_else_is_an_error_of_ours(data: bytes) -> None:
    try:
        value = parse(data)
    except CkptkitError:
        pass
    else:
        assert json.loads(data) == value


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"a":1,"\\u0061":1}',
        '{"x":{"shape":[1],"shape":[1]}}',
        '[[{"a":null,"b":[],"a":null}]]',
    ],
)
def test_ST_03_repeated_names(text: str) -> None:
    with pytest.raises(AmbiguousError, match="twice"):
        parse(text.encode())


def test_ST_03_repeated_names_are_named() -> None:
    with pytest.raises(AmbiguousError, match="'b'"):
        parse(b'{"a":1,"b":2,"c":3,"b":4}')


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{}{}",
        b"{}\0",
        b"{},",
        b"[1,]",
        b'{"a":1,}',
        b"[1 // one\n]",
        b"['a']",
        b"[NaN]",
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e400]",
        b"[-1e999]",
        b"[-0]",
        b"[01]",
        b"[+1]",
        b"[1.]",
        b"[0x10]",
        b'["a\nb"]',
        b'["\\x41"]',
        b'["\\ud800"]',
        b'["\\uDC80\\ud800"]',
        b'{"\\udfff":1}',
        b'["\xff"]',
        b'["\xed\xa0\x80"]',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        '{"a":1}'.encode("utf-32-be"),
    ],
)
def test_ST_04_other_dialects(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse(data)


def test_ST_04_white_space_around_is_json() -> None:
    assert parse(b" \t\r\n{ } \n") == {}


def test_surrogate_pairs_are_characters() -> None:
    assert parse(b'["\\ud83d\\ude00"]') == ["\U0001f600"]


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_ST_05_depth(opening: str, closing: str) -> None:
    def nested(depth: int) -> bytes:
        return (opening * depth + "1" + closing * depth).encode()

    assert parse(nested(LIMITS.json_depth))
    for depth in (LIMITS.json_depth + 1, 100_000):
        with pytest.raises(LimitError, match="json_depth"):
            parse(nested(depth))


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"]" * 1000, b'{"a":' * 100_000, b"[}" * 100, b'["' + b"[" * 9999]
)
def test_ST_05_brackets_that_never_close(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse(data)


@pytest.mark.parametrize(
    "text", ['"[[[["', '"\\"[["', '"\\\\"', '"\\\\\\"]]"', '{"]":"{"}', '["[","","]"]']
)
def test_brackets_in_texts_do_not_count(text: str) -> None:
    assert parse(f"[{text}]".encode()) == [json.loads(text)]


def test_objects_are_exchanged_from_the_inside_out() -> None:
    data = b'{"a": {"b": {}}, "c": [{"b": 1}]}'
    seen: list[object] = []
    assert strict_json.parse(data, "the header", lambda made: seen.append(made) or len(seen)) == 4
    assert seen == [{}, {"b": 1}, {"b": 1}, {"a": 2, "c": [3]}]


def test_texts_beside_exchanged_objects_are_checked() -> None:
    with pytest.raises(FormatError, match="UTF-8"):
        strict_json.parse(b'[{}, "\\ud800"]', "the header", lambda made: object())


def test_ST_06_digits() -> None:
    assert parse(b"[18446744073709551616]") == [2**64]
    for digits in (21, 5000, 200_000):
        with pytest.raises(FormatError, match="64 bits"):
            parse(b"[" + b"9" * digits + b"]")


def test_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(LIMITS, json_values=100)
    monkeypatch.setattr("ckptkit.core.limits.LIMITS", small)
    assert parse(json.dumps([0] * 100).encode()) == [0] * 100
    with pytest.raises(LimitError, match="json_values"):
        parse(json.dumps([0] * 101).encode())
