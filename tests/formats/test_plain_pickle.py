"""Pickles that are no torch files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError, TruncatedError
from ckptkit.core.tree import Global, Object
from ckptkit.formats import torch_legacy
from ckptkit.formats.format import Probe
from ckptkit.formats.table import PICKLE as FORMAT


def probe(data: bytes) -> Probe:
    return Probe(Memory(data, "x.pkl"))


def test_names_are_listed() -> None:
    assert FORMAT.read(probe(b"\x80\x02cos\nsystem\n.")).globals == (Global("os", "system"),)


@pytest.mark.parametrize("tail", [b"N.", b"\n", b"\0" * 100, pickle.dumps(1)])
def test_PK_13_what_follows(tail: bytes) -> None:
    with pytest.raises(AmbiguousError, match=f"{len(tail)} bytes follow"):
        FORMAT.read(probe(pickle.dumps({"a": 1}, 2) + tail))


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"hello world.", b"(not a pickle.", b"{}", b"[1, 2]", b"{\"a\": 1}.", b"c.",
        b"PK\x03\x04", b"\x80\x06N.",
        b"\x80\x01N.", b"I5\nN.", b"]N.", b"c\xff\n\n.", b"import os\n.", b"Lorem ipsum dolor sit amet.", b"\x93NUMPY",
    ],
)  # fmt: skip
def test_what_is_none_is_not_mine(data: bytes) -> None:
    assert not FORMAT.matches(probe(data))


def test_text_that_is_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(["a"] * 50, 0)
    assert FORMAT.matches(probe(data))
    monkeypatch.setattr(torch_legacy, "TEXT_LIMIT", len(data) - 1)
    assert not FORMAT.matches(probe(data))


def test_a_cut_file_is_an_error_with_advice() -> None:
    data = pickle.dumps({"a": [1, 2, 3]}, 2)
    for length in range(2, len(data)):
        with pytest.raises(FormatError) as caught:
            FORMAT.read(probe(data[:length]))
        assert caught.value.hint
    assert isinstance(caught.value, TruncatedError)


def test_persistent_ids_are_refused() -> None:
    with pytest.raises(CkptkitError, match="persistent"):
        FORMAT.read(probe(b"\x80\x02K\x01Q."))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_tensors_that_pickle_wrote(tmp_path: Path, protocol: int) -> None:
    """Each storage is a file of torch.save in a byte string: short ones, and those that stay where
    they are."""
    base = torch.randn(130, 130)
    state = {
        "view": base.t(),
        "row": base[3],
        "half": torch.randn(3).half(),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "empty": torch.empty(0),
    }
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(state, protocol))
    checkpoint = ckptkit.open(tmp_path / "a.pkl")
    assert checkpoint.format == "pickle" and list(checkpoint.weights) == list(state)
    ckptkit.save(checkpoint, tmp_path / "b.pth")
    for made in (ckptkit.load(tmp_path / "a.pkl"), torch.load(tmp_path / "b.pth")):
        for name, tensor in pickle.loads((tmp_path / "a.pkl").read_bytes()).items():
            assert torch.equal(made[name], tensor) and made[name].stride() == tensor.stride(), name
            assert (made[name].dtype, made[name].requires_grad) == (
                tensor.dtype,
                tensor.requires_grad,
            )


@pytest.mark.parametrize("inner", [b"", b"junk", pickle.dumps(1)])
def test_bytes_that_hold_no_storage(tmp_path: Path, inner: bytes) -> None:
    """They are a call that nothing makes; a tensor of it is refused."""
    call = b"ctorch.storage\n_load_from_bytes\nC%c%b\x85R" % (len(inner), inner)
    (tmp_path / "a.pkl").write_bytes(b"\x80\x03" + call + b".")
    root = ckptkit.open(tmp_path / "a.pkl").root
    assert isinstance(root, Object) and root.args == (inner,)
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + call + b"K\0)" + b")\x89NtR."
    (tmp_path / "a.pkl").write_bytes(b"\x80\x03" + rebuilt)
    with pytest.raises(FormatError, match="storage"):
        ckptkit.open(tmp_path / "a.pkl")
