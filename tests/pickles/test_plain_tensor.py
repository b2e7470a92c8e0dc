"""Tensors recognised at once, against the same pickles read opcode by opcode."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tensor import Storage, TypedStorage
from ckptkit.core.tree import Node
from ckptkit.pickles import machine as module
from ckptkit.pickles.machine import unpickle
from ckptkit.pickles.plain_tensor import PlainTensors
from ckptkit.pickles.storages import StorageTable, storage_class
from ckptkit.pickles.writer import write_pickle
from tests.pickles.making import isomorphic, saved

PADDING = [f"{n}" for n in range(300)]  # fills the part of the memo that one byte addresses


def pickled(**tensors: torch.Tensor) -> bytes:
    """The pickle of `tensors`, after whatever moves them into the part of the memo that torch's
    large files have."""
    first = [torch.zeros(2, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.int64)]
    value = {"first": first, "padding": PADDING, **tensors}
    with zipfile.ZipFile(io.BytesIO(saved(value))) as archive:
        return archive.read("archive/data.pkl")


class Absent(NamedTuple):
    """The place of a storage, without its bytes."""

    key: str
    length: int

    def locate(self) -> Range:
        return Range(Memory(self.key.encode()), 0, len(self.key.encode()))


def table() -> StorageTable:
    return StorageTable(lambda key, nbytes, device: Storage(Absent(key, nbytes), device))


def outcome(data: bytes) -> Node:
    """The tree, or what is said instead."""
    try:
        return unpickle(Memory(data), persistent_load=table().load).root
    except CkptkitError as error:
        return type(error).__name__, str(error)


def both(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    """The outcome, and that of a machine which knows opcodes alone."""
    found = outcome(data)
    with monkeypatch.context() as patch:
        patch.setattr(PlainTensors, "read", lambda *_: 0)
        return found, outcome(data)


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the codes that were recognised."""
    lengths: list[int] = []
    read: Callable[..., int] = PlainTensors.read

    def counted(self: PlainTensors, data: bytes, pos: int, stack: list[Node]) -> int:
        end = read(self, data, pos, stack)
        if end:
            lengths.append(end - pos)
        return end

    monkeypatch.setattr(PlainTensors, "read", counted)
    return lengths


TIED = torch.zeros(3, 70000)
PLAIN = {
    "vector": torch.zeros(5), "matrix": torch.zeros(2, 3), "cube": torch.zeros(2, 3, 4),
    "four": torch.zeros(1, 2, 3, 4), "eight": torch.zeros(1, 1, 1, 2, 1, 1, 1, 2), "none": torch.zeros(0),
    "long": torch.zeros(70000, dtype=torch.int64),
    "transposed": torch.zeros(300, 2).t(), "view": torch.zeros(1000)[300:], "grad": torch.zeros(2).requires_grad_(),
    "half": torch.zeros(2, dtype=torch.float16), "strided": torch.zeros(1000)[::7], "tied": TIED,
}  # fmt: skip
OTHERS = {
    "scalar": torch.zeros(()), "nine": torch.zeros([1] * 9), "again": TIED, "part": TIED[1:],
    "uint16": torch.zeros(2).to(torch.uint16),
    "conj": torch.zeros(2, dtype=torch.complex64).conj(), "parameter": torch.nn.Parameter(torch.zeros(2)),
    "sparse": torch.eye(3).to_sparse(),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_are_recognised(
    name: str, recognised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickled(**{name: PLAIN[name]})
    found = outcome(data)
    assert len(recognised) == 1
    assert isomorphic(found, both(data, monkeypatch)[1])


def test_classes_may_be_named_late(recognised: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {name: torch.zeros(3, dtype=torch.int32) for name in "abc"}
    found = outcome(pickled(**numbers))
    assert len(recognised) == 2  # the first names the class
    assert isomorphic(found, both(pickled(**numbers), monkeypatch)[1])


def test_others_are_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isomorphic(*both(pickled(tied=TIED, **OTHERS), monkeypatch))


@pytest.mark.parametrize("window", [1, 64, 1000])
def test_a_window_may_end_anywhere(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", window)
    monkeypatch.setattr(module, "FIRST_WINDOW", window)
    assert isomorphic(*both(pickled(**PLAIN, **OTHERS), monkeypatch))


@pytest.mark.parametrize("name", ["matrix", "four", "long"])
@pytest.mark.parametrize("seed", range(4))
def test_changed_code_reads_as_its_opcodes_do(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of a tensor's code changed: the same tree or the same refusal."""
    chance = random.Random(seed)
    data = pickled(**{name: PLAIN[name]})
    for at in range(data.index(name.encode()), len(data)):
        changed = bytearray(data)
        changed[at] = chance.choice(
            [changed[at] ^ 1, changed[at] + 1 & 255, chance.randrange(256), *b"rqhjKMJ(t.R"]
        )
        found, expected = both(bytes(changed), monkeypatch)
        assert isomorphic(found, expected), f"byte {at}: {changed[at]:#x}"


@pytest.mark.parametrize("back", range(1, 9))
def test_what_is_stored_in_between_can_be_had(back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference to arguments, id or hooks, which are not kept: then all is read opcode by
    opcode."""
    data = pickled(matrix=PLAIN["matrix"])
    at = data.rindex(b"Rr") + 2  # where the last number of a memo entry is
    entry = int.from_bytes(data[at : at + 4], "little") - back + 1
    more = b"X\x04\0\0\0moreK\x01j" + entry.to_bytes(4, "little") + b"\x86s."
    found, expected = both(data[:-1] + more, monkeypatch)
    assert "more" in found
    assert isomorphic(found, expected)


def test_what_ckptkit_writes_is_recognised(
    recognised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: dict[int, str] = {}

    def pid(typed: TypedStorage) -> tuple[Node, ...]:
        key = pids.setdefault(id(typed.storage), str(len(pids)))
        return "storage", storage_class(typed.dtype), key, typed.storage.device, typed.elements

    data = write_pickle(outcome(pickled(**PLAIN)), pid).data
    recognised.clear()
    found, expected = both(data, monkeypatch)
    assert (
        len(recognised) > len(PLAIN) // 2
    )  # the first that names something is not as the others are
    assert isomorphic(found, expected)
