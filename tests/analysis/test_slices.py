"""Parts of tensors: torch's own indexing is the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.analysis.slices import parse, plane, select, show
from ckptkit.compute.tallies import numbers
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import TensorError, UsageError
from ckptkit.core.tensor import Tensor
from tests.analysis.made import tensor, view

WHOLE = torch.arange(2 * 3 * 5, dtype=torch.float32).reshape(2, 3, 5)
MADE = tensor(*map(float, range(30)), shape=(2, 3, 5))

ints = st.integers(-6, 6)
optional = st.one_of(st.just(""), ints.map(str))


@st.composite
def items(draw: st.DrawFn) -> str:
    """An index, a slice with any of its parts, or an ellipsis."""
    if draw(st.booleans()):
        return str(draw(st.integers(-5, 4)))
    text = f"{draw(optional)}:{draw(optional)}"
    return text + draw(st.sampled_from(["", ":", ":1", ":2", ":7"]))


@given(st.lists(items(), max_size=3), st.one_of(st.none(), st.integers(0, 3)), st.booleans())
def test_what_torch_chooses(parts: list[str], ellipsis: int | None, brackets: bool) -> None:
    if ellipsis is not None and ellipsis <= len(parts):
        parts.insert(ellipsis, "...")
    text = ", ".join(parts)
    try:
        want = eval(f"WHOLE[{text or '...'}]")  # noqa: S307 - what Python makes of it
    except IndexError:
        with pytest.raises(UsageError, match="out of range for dimension"):
            parse(text, (2, 3, 5))
        return
    picks = parse(f"[{text}]" if brackets else text, (2, 3, 5))
    found = select(MADE, picks)
    assert found.shape == tuple(want.shape)
    assert numbers(found).tolist() == want.tolist()
    if 0 not in want.shape:
        assert numbers(select(MADE, parse(show(picks), (2, 3, 5)))).tolist() == want.tolist()


def test_a_slice_of_a_view() -> None:
    transposed = view(tensor(*map(float, range(12)), shape=(3, 4)), (4, 3), (1, 4))
    want = torch.arange(12.0).reshape(3, 4).t()[1::2, -1]
    assert numbers(select(transposed, parse("1::2, -1", (4, 3)))).tolist() == want.tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0, 0, 0, 0", "has 4 indices"),
        ("..., ...", "more than one ellipsis"),
        ("::0", "a step of 0"),
        ("::-1", "is not an index"),
        ("x", "is not an index"),
        ("__import__('os')", "is not an index"),
        ("1.0", "is not an index"),
        ("0,,1", "is not an index"),
        ("None", "is not an index"),
        ("[0", "is not an index"),
        ("9" * 30, "is not an index"),
        ("0, 3", "index 3 is out of range for dimension 1"),
        ("-3", "index -3 is out of range for dimension 0"),
    ],
)
def test_what_is_no_slice(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(text, (2, 3, 5))


def test_the_whole_and_a_scalar() -> None:
    assert parse("", ()) == parse("...", ()) == ()
    assert show(parse("", (2, 3))) == "[0:2, 0:3]"
    assert show(parse("-1, ::2", (2, 4))) == "[1, 0:3:2]"


def test_the_plane_of_a_grid() -> None:
    picks = parse("", (7, 6, 5, 4))
    assert show(plane(picks, 2, 3)) == "[0, 0, 0:2, 0:3]"
    assert show(plane(parse("3, 2:, :, 1", (7, 6, 5, 4)), 2, 9)) == "[3, 2:4, 0:5, 1]"
    assert show(plane(parse("0, 0, 0", (7, 6, 5, 4)), 2, 3)) == "[0, 0, 0, 0:3]"


def test_a_tensor_without_elements_of_its_own() -> None:
    with pytest.raises(TensorError, match="meta"):
        select(Tensor(None, BY_NAME["float32"], (2,), (1,)), parse("0", (2,)))
