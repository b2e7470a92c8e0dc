"""Rules on types of which several elements share a byte: rows move whole, or nothing does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.core.errors import TensorError

FLOAT4 = torch.float4_e2m1fn_x2


def packed(rows: int, columns: int, start: int = 0) -> torch.Tensor:
    values = torch.arange(start, start + rows * columns, dtype=torch.int32) % 251
    return values.to(torch.uint8).reshape(rows, columns).view(FLOAT4)


def ruled(path: Path, *lines: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.save(state, path / "in.pth")
    made = ckptkit.apply_rules(path / "in.pth", list(lines))
    ckptkit.save(made, path / "out.pth")
    found: dict[str, torch.Tensor] = torch.load(path / "out.pth")
    return found


def test_rows_of_two_elements_in_a_byte_move(tmp_path: Path) -> None:
    state = {"e.0.w": packed(4, 6), "e.1.w": packed(4, 6, 100)}
    found = ruled(tmp_path, "e.{n}.w [o i] -> w [(n o) i]", state=state)["w"]
    expected = torch.cat([each.view(torch.uint8) for each in state.values()])
    assert found.dtype == FLOAT4 and found.shape == (8, 6)
    assert torch.equal(found.view(torch.uint8), expected)


def test_rows_are_put_in_another_order(tmp_path: Path) -> None:
    state = {"w": packed(12, 6)}
    found = ruled(tmp_path, "w [(h r t) i] -> w [(h t r) i] with h=2 t=2", state=state)["w"]
    expected = state["w"].view(torch.uint8).reshape(2, 3, 2, 6).transpose(1, 2).reshape(12, 6)
    assert torch.equal(found.view(torch.uint8), expected)


@pytest.mark.parametrize("line", ["w [o i] -> w [i o]", "w [o (a b)] -> w.{a} [o b] with a=2"])
def test_nothing_is_taken_apart_inside_a_byte(line: str, tmp_path: Path) -> None:
    with pytest.raises(TensorError, match=r"rule 1: the rule splits bytes of .*w") as caught:
        ruled(tmp_path, line, state={"w": packed(4, 6)})
    assert "packs elements along the last dimension" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bool, torch.complex128, torch.bfloat16]
)
def test_whole_elements_of_every_size_are_transposed(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = (torch.arange(60).reshape(6, 10) % 2).to(dtype)
    found = ruled(tmp_path, "w [o i] -> w [i o]", state={"w": whole})["w"]
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.complex128), whole.t().to(torch.complex128))
