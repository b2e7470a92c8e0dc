"""safetensors: what no other test comes by: edits that need a new file, odd trees, entries that are
none."""

from __future__ import annotations

import json
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckptkit.api import convert, open_checkpoint
from ckptkit.core.bytesource import LocalFile, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import FormatError, UnsafeGlobalError, UnsupportedError
from ckptkit.core.limits import LIMITS
from ckptkit.core.plan import Patch
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import Global, Object
from ckptkit.formats import safetensors as ours
from ckptkit.formats.format import Probe, WriteOptions
from ckptkit.formats.safetensors import patching, skeleton, skeleton_reader
from ckptkit.formats.safetensors.recovering import recover
from ckptkit.formats.safetensors.skeleton import Skeleton, Statement
from tests.pickles.making import isomorphic

F32 = BY_NAME["float32"]
LONG = "a very long prefix that does not fit. " * 9


# Edits in place


def held(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    path = folder / "x.safetensors"
    save_file(tensors, path)
    return ours.read(Probe(LocalFile(path)))


def renamed(checkpoint: Checkpoint, prefix: str = "", *names: str) -> Checkpoint:
    """With `prefix` before the names; of these tensors alone, if some are named."""
    kept = {name: tensor for name, tensor in checkpoint.root.items() if not names or name in names}
    return replace(checkpoint, root={f"{prefix}{name}": tensor for name, tensor in kept.items()})


def patch(before: Checkpoint, after: Checkpoint) -> Patch | None:
    return patching.patch(before, after, WriteOptions())


def test_only_a_file_is_edited_in_place(tmp_path: Path) -> None:
    inside = held(tmp_path, a=torch.ones(1024))
    copy = ours.read(Probe(Memory((tmp_path / "x.safetensors").read_bytes())))
    assert patch(inside, renamed(inside, "b")) is not None
    assert patch(copy, renamed(copy, "b")) is None


@pytest.mark.parametrize("kept", [("a", "c"), ("b", "c"), ("a", "b")])
def test_tensors_that_leave_a_hole(kept: tuple[str, ...], tmp_path: Path) -> None:
    """In the middle, at the beginning, at the end."""
    before = held(tmp_path, a=torch.ones(4), b=torch.ones(4), c=torch.ones(4))
    assert patch(before, renamed(before)) is not None
    assert patch(before, renamed(before, "", *kept)) is None


def test_a_tensor_of_another_file_is_not_there(tmp_path: Path) -> None:
    before = held(tmp_path, a=torch.ones(4))
    (tmp_path / "other").mkdir()
    other = held(tmp_path / "other", a=torch.ones(4))
    assert patch(before, replace(before, root=other.root)) is None


def test_a_tensor_that_is_too_much_to_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held(tmp_path, a=torch.ones(1024), b=torch.ones(1024))
    after = renamed(before, LONG)
    grown = patch(before, after)
    size = (tmp_path / "x.safetensors").stat().st_size
    assert grown is not None and [edit.offset for edit in grown.edits] == [8, size]
    monkeypatch.setattr(patching, "_MOVED", 4095)
    assert patch(before, after) is None


def test_tensors_that_are_too_much_to_move_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places of what moved are longer numbers, for which the place of one more may be
    needed."""
    for size in range(2, 400, 2):
        before = held(tmp_path, a=torch.ones(size), b=torch.ones(1024), c=torch.ones(1 << 16))
        grown = patch(before, renamed(before, LONG[:99]))
        if grown is not None and len(grown.edits) == 3:
            break
    assert grown is not None
    moved = [len(edit.data) for edit in grown.edits[1:]]
    assert moved == [4 * size, 4096]
    monkeypatch.setattr(patching, "_MOVED", sum(moved))
    assert patch(before, renamed(before, LONG[:99])) is not None
    monkeypatch.setattr(patching, "_MOVED", sum(moved) - 1)
    assert patch(before, renamed(before, LONG[:99])) is None


def test_a_header_that_would_be_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held(tmp_path, a=torch.ones(1024), b=torch.ones(1024))
    after = renamed(before, LONG)
    assert patch(before, after) is not None
    monkeypatch.setattr(patching, "LIMITS", replace(LIMITS, safetensors_header_bytes=512))
    assert patch(before, after) is None


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.ones(1), "b": torch.ones(1)},  # all of them are too few bytes
        {"a": torch.ones(1023, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.uint8)},
        {"a": torch.ones(5, dtype=torch.uint8)},  # the file ends where nothing is aligned
    ],
)
def test_too_little_to_move(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    before = held(tmp_path, **tensors)
    assert patch(before, renamed(before, LONG * 2)) is None


# Damaged files


@pytest.mark.parametrize("entry", [5, None, ["U8"], "text"])
def test_an_entry_that_is_none_is_lost_alone(entry: object) -> None:
    header = {"bad": entry, "good": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
    text = json.dumps(header).encode()
    found = recover(Probe(Memory(len(text).to_bytes(8, "little") + text + b"ab")))
    assert found is not None and list(found.checkpoint.root) == ["good"]
    assert [(loss.path, loss.what) for loss in found.lost] == [("bad", "an entry")]


# Whole trees


def statements(root: Any) -> Skeleton:
    """Of a tree without bytes."""
    return skeleton.Writer(lambda held: pytest.fail("nothing has bytes")).write(root)


def again(root: Any) -> Any:
    return skeleton_reader.read(statements(root), {}).root


def test_an_object_that_is_an_argument_of_itself() -> None:
    made = Object(Global("m", "C"), new=True)
    made.args = (made,)
    with pytest.raises(UnsupportedError, match="an argument of its own construction"):
        statements(made)
    made.new = False  # a call of what may be a function
    with pytest.raises(UnsafeGlobalError, match="allowlist"):
        statements(made)


def test_a_value_that_is_none_of_a_checkpoint() -> None:
    with pytest.raises(FormatError, match="of type object cannot be kept"):
        statements({"a": object()})


def test_a_sparse_tensor_without_bytes() -> None:
    tensor = Tensor(None, F32, (2, 3), (), layout="sparse_csr")
    made = statements(tensor).statements
    assert made == [["tensor", None, {"dtype": "float32", "shape": [2, 3], "layout": "sparse_csr"}]]
    assert isomorphic(again(tensor), tensor)


@pytest.mark.parametrize("step", ["append", "add"])
def test_what_is_put_into_an_object(step: str) -> None:
    made = Object(Global("m", "C"), new=True)
    made.steps.append((step, [1, "x", made]))
    found = again(made)
    assert found.steps[0][0] == step and found.steps[0][1][:2] == [1, "x"]
    assert found.steps[0][1][2] is found
    made.new = False  # a call of what may be a function: what it gives decides what that does
    with pytest.raises(UnsafeGlobalError, match="allowlist"):
        again(made)


def test_an_object_is_filled_in_no_other_way() -> None:
    made: list[Statement] = [["global", "m", "C"], ["tuple"], ["object", [0], [1], None, True]]
    assert isinstance(skeleton_reader.read(Skeleton(made, [2]), {}).root, Object)
    with pytest.raises(FormatError, match="an object cannot be filled"):
        skeleton_reader.read(Skeleton([*made, ["fill", 2, "odd", 1]], [2]), {})


def test_a_name_that_we_would_have_given(tmp_path: Path) -> None:
    """A storage that no tensor fills gets a name of ours; a tensor of that name keeps it."""
    kept = torch.arange(3.0)
    torch.save(
        {"view": torch.arange(8.0)[2:5], "ckptkit": {"storage": {"0": kept}}}, tmp_path / "in.pth"
    )
    options = WriteOptions(everything=True)
    convert(tmp_path / "in.pth", tmp_path / "out.safetensors", options=options)
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("ckptkit.storage.0"), kept)
        assert sorted(file.keys()) == ["ckptkit.storage.0", "ckptkit.storage.1"]
        assert bytes(file.get_tensor("ckptkit.storage.1").tolist()) == struct.pack("<8f", *range(8))
    with closing(open_checkpoint(tmp_path / "out.safetensors")) as back:
        view = back.root["view"]
        assert (view.shape, view.offset) == ((3,), 2) and isinstance(
            view.storage.record.locate(), Range
        )
