"""diff: what is missing, too much, mismatched, changed; and when a prefix is all there is."""

from __future__ import annotations

import pytest

from ckptkit.analysis.diff import Kind, against, compare
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Tensor
from tests.analysis.made import tensor, view


def test_equal() -> None:
    found = compare({"a": tensor(1), "b": tensor(2)}, {"b": tensor(2), "a": tensor(1)}, values=True)
    assert found.equal
    assert found.common == 2
    assert found.advice == ()


def test_missing_is_in_b_alone() -> None:
    found = compare({"a": tensor(1), "mine": tensor(1)}, {"a": tensor(1), "theirs": tensor(1)})
    assert (found.missing, found.unexpected, found.common) == (("theirs",), ("mine",), 1)
    assert not found.equal


def test_shape_is_a_mismatch() -> None:
    found = compare({"a": tensor(1, 2)}, {"a": tensor(1, 2, shape=(2, 1))}, values=True)
    (pair,) = found.mismatched
    assert pair[:3] == ("a", Kind("float32", (2,)), Kind("float32", (2, 1)))
    assert found.changed == ()


def test_values_unless_disabled() -> None:
    a, b = {"a": tensor(1, 2, 3)}, {"a": tensor(1, 5, 3)}
    assert compare(a, b, values=False).equal
    (changed,) = compare(a, b).changed
    assert (changed.name, changed.difference.count, changed.difference.first) == ("a", 1, 1)


def test_values_of_many_are_compared_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.compute.workers.BATCH", 64)
    monkeypatch.setattr("ckptkit.compute.workers.processors", lambda: 4)
    a = {f"w{n}": tensor(*range(n % 7 + 1)) for n in range(200)}
    b = a | {f"w{n}": tensor(*[9.0] * (n % 7 + 1)) for n in range(0, 200, 3)}
    for found in (compare(a, b, values=True), compare(a, b, atol=0.5)):
        counts = [(each.name, each.difference.count) for each in found.changed]
        assert counts == [(f"w{n}", n % 7 + 1) for n in range(0, 200, 3)]


def test_values_are_compared_by_bytes() -> None:
    assert compare({"a": tensor(float("nan"))}, {"a": tensor(float("nan"))}, values=True).equal
    assert not compare({"a": tensor(0.0)}, {"a": tensor(-0.0)}, values=True).equal


def test_a_tolerance_compares_values() -> None:
    a, b = {"a": tensor(1.0, 2.0)}, {"a": tensor(1.0, 2.25)}
    assert compare(a, b, atol=0.25).equal
    assert compare(a, b, atol=0.125).changed[0].difference.largest == 0.25
    assert compare(a, b, rtol=0.125).equal
    assert not compare(a, b, rtol=0.0).equal


def test_values_that_are_not_there_are_named_and_not_called_equal() -> None:
    meta = {"w": Tensor(None, BY_NAME["float32"], (2,), (1,)), "x": tensor(1)}
    found = compare(meta, {"w": tensor(1, 2), "x": tensor(1)})
    assert found.equal and found.unread[0].startswith("w (")
    assert found.summary == "same names, shapes and dtypes: 2 keys; 1 tensor not compared"
    with pytest.raises(TensorError, match=r"^w: "):
        compare(meta, {"w": tensor(1, 2)}, atol=0.1)


def test_views_are_compared_by_their_elements() -> None:
    base = tensor(1, 2, 3, 4)
    assert compare({"a": view(base, (2,), (2,), 1)}, {"a": tensor(2, 4)}, values=True).equal


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        ("module.", "ckptkit strip-module run.pth run-stripped.pth"),
        ("_orig_mod.", "ckptkit strip-module --prefix _orig_mod. run.pth run-stripped.pth"),
        ("a.b.", "ckptkit strip-module --prefix a.b. run.pth run-stripped.pth"),
    ],
)
def test_a_prefix_too_much_is_noticed(prefix: str, command: str) -> None:
    names = ("fc.weight", "fc.bias", "scale")
    ours, theirs = ({p + name: tensor(1) for name in names} for p in (prefix, ""))
    found = compare(ours, theirs, name="run.pth")
    assert found.advice == (f"this makes all keys match: {command}",)


def test_a_prefix_that_is_missing_is_noticed() -> None:
    found = compare({"fc.weight": tensor(1)}, {"module.fc.weight": tensor(1)}, name="run.pth")
    (advice,) = found.advice
    assert advice == "this makes all keys match: ckptkit add-module run.pth run-wrapped.pth"


def test_a_prefix_on_some_keys_is_noticed() -> None:
    a = {"n_averaged": tensor(1), "module.fc.weight": tensor(1)}
    assert "strip-module" in compare(a, {"fc.weight": tensor(1)}).advice[0]


def test_no_advice_where_a_prefix_does_not_help() -> None:
    assert compare({"module.a": tensor(1)}, {"b": tensor(1)}).advice == ()
    found = compare({"module.a": tensor(1)}, {"a": tensor(1), "b": tensor(1)})
    assert "strip-module" not in str(found.advice)
    assert compare({}, {"a": tensor(1)}).advice == ()


def test_against_a_model_only_shapes_count() -> None:
    a = {"a": tensor(1, 2), "b": tensor(1, 2)}
    found = against(a, {"a": ("float16", (2,)), "b": ("float32", (1, 2)), "c": ("float32", ())})
    assert [each.name for each in found.mismatched] == ["b"]
    assert found.missing == ("c",)
