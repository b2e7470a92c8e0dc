"""Plain values survive as JSON, types and signs of zero included."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.errors import FormatError
from ckptkit.core.tree import Global, Object
from ckptkit.formats import strict_json
from ckptkit.formats.strict_json import decode, dump, encode, is_plain

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["$float", "$dict", "$", ""]
)
INTEGERS = st.integers(-(10**19) + 1, 10**19 - 1)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(SCALARS, inner)
        | st.dictionaries(TEXTS, inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_there_and_back(value: Any) -> None:
    assert is_plain(value)
    text = dump(encode(value))
    assert repr(decode(strict_json.parse(text.encode(), "it"))) == repr(value)


def test_what_json_has_is_itself() -> None:
    value = {"lr": 0.1, "steps": [1, None, True, "é"], "": {}}
    assert dump(encode(value)) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    scalar = Object(Global("numpy", "float64"))
    scalar.value = 0.5
    assert is_plain([scalar]) and encode([scalar]) == [0.5]


@pytest.mark.parametrize(
    "value",
    [
        10**19, -(10**19), 10**5000, b"", 1j, {1}, "\udc80", {"\udc80": 1}, {(1,): 2}, {b"k": 1},
        Global("os", "system"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_not_plain(value: object) -> None:
    assert not is_plain(value)
    assert not is_plain({"inside": [value]})


@pytest.mark.parametrize(
    "value",
    [
        *({"$float": 1}, {"$float": []}, {"$tuple": {}}, {"$dict": [[1]]}, {"$dict": [[[1], 2]]}),
        *({"$x": 1}, {"$tuple": [], "a": 1}),
    ],
)
def test_what_nobody_wrote(value: object) -> None:
    with pytest.raises(FormatError):
        decode(value)
