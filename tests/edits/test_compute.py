"""The step `compute`: elementwise expressions, each undone by its inverse, against torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.errors import CkptkitError, TensorError, UsageError
from ckptkit.edits.elements import compute
from tests.conftest import Ok

EXPRESSIONS = {
    "x - 1": lambda x: x - 1,
    "x + 1": lambda x: x + 1,
    "log(-x)": lambda x: torch.log(-x.double()),
    "-exp(x)": lambda x: -torch.exp(x.double()),
}


def written(state: Any, expressions: dict[str, str], tmp_path: Path) -> Any:
    torch.save(state, tmp_path / "in.pth")
    with ckptkit.open(tmp_path / "in.pth") as ck:
        ckptkit.save(compute(ck, expressions), tmp_path / "out.pth", force=True)
    return torch.load(tmp_path / "out.pth")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_equals_torch(expression: str, dtype: str, tmp_path: Path) -> None:
    """In float32 (float64: in that), rounded once to the dtype of the tensor."""
    kind = getattr(torch, dtype)
    x = -(torch.rand(1000, dtype=torch.float64) * 8 + 0.01).to(kind)
    if expression == "-exp(x)":
        x = -x
    wide = x if kind == torch.float64 else x.float()
    expected = EXPRESSIONS[expression](wide).to(wide.dtype).to(kind)
    found = written({"a.norm": x, "b": x + 1}, {"*norm": expression}, tmp_path)
    assert torch.equal(found["b"], x + 1)
    if dtype == "float64" and "x)" in expression:  # two libraries: one unit in the last place
        torch.testing.assert_close(found["a.norm"], expected, rtol=2**-51, atol=0)
    else:
        assert torch.equal(found["a.norm"], expected)


def test_views_and_ties(tmp_path: Path) -> None:
    """A tied weight is computed once; the other rows of its storage stay."""
    base = torch.randn(4, 6)
    found = written({"a": base[1:3], "b": base[1:3], "c": base.t()}, {"[ab]": "x + 1"}, tmp_path)
    assert torch.equal(found["a"], base[1:3] + 1)
    assert torch.equal(found["c"], base.t())
    assert found["a"].data_ptr() == found["b"].data_ptr()
    empty = written({"a": torch.zeros(0, 3), "s": torch.tensor(2.0)}, {"*": "x - 1"}, tmp_path)
    assert empty["a"].shape == (0, 3)
    assert empty["s"] == 1


def test_no_finite_result(tmp_path: Path) -> None:
    infinite = torch.tensor([float("-inf"), float("nan"), -1.0])
    found = written({"a": infinite}, {"a": "log(-x)"}, tmp_path)["a"]
    assert found[0] == float("inf")
    assert found[1].isnan()
    with pytest.raises(TensorError, match=r"'a': log\(-x\) of 2 is not finite"):
        written({"a": torch.tensor([-1.0, 2.0])}, {"a": "log(-x)"}, tmp_path)
    with pytest.raises(TensorError, match=r"-exp\(x\) of 100"):
        written({"a": torch.tensor([100.0])}, {"a": "-exp(x)"}, tmp_path)


@pytest.mark.parametrize(
    ("state", "expressions", "said"),
    [
        ({"a": torch.ones(2)}, {"a": "x * 2"}, "'x * 2' is not a supported expression"),
        ({"a": torch.ones(2)}, {"c*": "x + 1"}, "no weight matches 'c*'"),
        ({"a": torch.ones(2)}, {"a": "x + 1", "*": "x - 1"}, "'a' matches two globs"),
        ({"a": torch.ones(2).long()}, {"a": "x + 1"}, "'a' is not a strided floating-point tensor"),
        ({"a": torch.ones(2, 2).to_sparse()}, {"a": "x + 1"},
         "'a' is not a strided floating-point tensor"),
    ],
)  # fmt: skip
def test_refused(state: Any, expressions: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError) as caught:
        written(state, expressions, tmp_path)
    assert said in caught.value.message


def test_quantized_weights(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(128, 128).bfloat16()}, tmp_path / "in.pth")
    from ckptkit.edits.quantized import quantize

    ck = quantize(ckptkit.open(tmp_path / "in.pth"), "fp8-block")
    with pytest.raises(UsageError, match="expressions cannot compute with codes"):
        compute(ck, {"*": "x + 1"})


def test_step_of_a_recipe_and_back(tmp_path: Path, ok: Ok) -> None:
    steps = [{"compute": {"*norm.weight": "x - 1", "A": "log(-x)"}}, {"rules": ["{x:**} -> m.{x}"]}]
    (tmp_path / "r.yaml").write_text(json.dumps({"steps": steps}))
    state = {"norm.weight": torch.randn(9) + 1, "A": -torch.rand(5) - 0.1}
    torch.save(state, tmp_path / "a.pth")
    said = ok("run", tmp_path / "r.yaml", tmp_path / "a.pth", tmp_path / "b.pth")
    assert "computed x - 1 for the elements of 1 weight" in said
    found = torch.load(tmp_path / "b.pth")
    assert torch.equal(found["m.norm.weight"], state["norm.weight"] - 1)
    ok("run", tmp_path / "r.yaml", tmp_path / "b.pth", tmp_path / "c.pth", "--reverse")
    back = torch.load(tmp_path / "c.pth")
    assert back.keys() == state.keys()
    torch.testing.assert_close(back, state, rtol=1e-6, atol=1e-6)
