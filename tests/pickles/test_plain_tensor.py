"""Tensors recognised at once, against the same pickles read opcode by opcode."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import AmbiguousError, CkptkitError, LimitError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Storage, TypedStorage
from ckptkit.core.tree import Node, Pairs
from ckptkit.pickles import machine as module
from ckptkit.pickles.machine import unpickle
from ckptkit.pickles.plain_tensor import PlainTensors, _match
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


def outcome_of(data: bytes, storages: StorageTable) -> Node:
    load, another = storages.load, storages.another
    return unpickle(Memory(data), persistent_load=load, another=another).root


def outcome(data: bytes) -> Node:
    """The tree, or what is said instead."""
    try:
        return outcome_of(data, table())
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


def outcome_made(data: bytes, load: Any) -> Node:
    try:
        return unpickle(Memory(data), persistent_load=load).root
    except CkptkitError as error:
        return type(error).__name__, str(error)


def second_tensor() -> tuple[bytes, Any]:
    """A pickle, and how the last of its tensors is recognised; its class is fetched by a number of
    four bytes."""
    data = pickled(a=torch.zeros(2, dtype=torch.float64), b=torch.zeros(2, dtype=torch.float64))
    found = [match for at in range(len(data)) if (match := _match(data, at))][-1]
    assert len(found[2]) == 5
    return data, found


@pytest.mark.parametrize("group", [1, 2, 6, 18])
def test_a_tensor_of_what_the_memo_does_not_have(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused as the machine refuses it that knows opcodes alone."""
    data, found = second_tensor()
    assert isinstance(outcome_made(data, table().load), dict)
    start, stop = found.span(group)
    if group == 2:
        start += 1  # after the opcode
        data = data[:start] + b"\xff" * 4 + data[stop:]
    else:
        data = data[: start - 1] + b"j" + b"\xff\xff\xff\x7f" + data[stop:]
    fast = outcome_made(data, table().load)
    monkeypatch.setattr(PlainTensors, "read", lambda *_: 0)
    assert fast == outcome_made(data, table().load)
    assert fast == ("NotStoredError", "pickle refers to a value that it has not stored")


def of_no_type(typed: TypedStorage) -> Node:
    return replace(typed, dtype=None)


def of_a_part(typed: TypedStorage) -> Node:
    return replace(typed, stop=1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (of_no_type, "does not say its dtype"),
        (of_a_part, "reach beyond a view of a storage"),
        (lambda typed: "text", "is built from something that is not a storage"),
    ],
)
def test_a_tensor_of_a_storage_that_is_not_plain(
    change: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, found = second_tensor()
    storages = table()

    def load(pid: Any) -> Node:
        typed = storages.load(pid)
        return change(typed) if pid[2] == found[4].decode() else typed

    fast = outcome_made(data, load)
    monkeypatch.setattr(PlainTensors, "read", lambda *_: 0)
    storages = table()
    assert fast == outcome_made(data, load)
    assert isinstance(fast, tuple) and why in fast[1]


def test_a_gpu_is_spelled_out_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a new string for each tag: none of them is fetched from the memo."""
    with monkeypatch.context() as gpu:
        gpu.setattr(
            torch.serialization,
            "location_tag",
            lambda storage: "cuda:" + str(storage.nbytes() // 24),
        )
        data = pickled(**{name: torch.zeros(2, 3) for name in "abcd"})
    taken: list[int] = []
    read = PlainTensors.read
    monkeypatch.setattr(PlainTensors, "read", lambda *args: taken.append(read(*args)) or taken[-1])
    fast = outcome_made(data, table().load)
    assert sum(map(bool, taken)) == 4
    monkeypatch.setattr(PlainTensors, "read", lambda *_: 0)
    assert repr(fast) == repr(outcome_made(data, table().load))
    assert data.count(b"cuda:1") == 4


# Tensors of kinds that are expected

ROWS = {f"{n}.{name}": PLAIN[name].clone() for n in range(4) for name in ("vector", "half", "cube")}


@pytest.fixture
def read_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were read as they were expected, each time."""
    counts: list[int] = []
    read: Callable[..., int] = PlainTensors._read_on

    def counted(self: PlainTensors, data: bytes, pos: int, stack: list[Node]) -> int:
        before = len(stack)
        end = read(self, data, pos, stack)
        counts.append((len(stack) - before) // 2)
        return end

    monkeypatch.setattr(PlainTensors, "_read_on", counted)
    return counts


def of_gpus(monkeypatch: pytest.MonkeyPatch, **tensors: torch.Tensor) -> bytes:
    """The pickle of tensors whose devices are spelled out each time."""
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.serialization, "location_tag", lambda storage: "".join(("cuda:", "1")))
        return pickled(**tensors)


def rewritten(data: bytes) -> bytes:
    """The same as ckptkit writes it: names and tensors alone are stored."""
    pids: dict[int, str] = {}

    def pid(typed: TypedStorage) -> tuple[Node, ...]:
        key = pids.setdefault(id(typed.storage), str(len(pids)))
        return "storage", storage_class(typed.dtype), key, typed.storage.device, typed.elements

    return write_pickle(outcome(data), pid).data


@pytest.mark.parametrize("how", ["cpu", "gpu", "rewritten"])
def test_an_order_that_repeats_is_expected(
    how: str, read_on: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three of the rows are met, the next three remembered, one more begins again."""
    data = of_gpus(monkeypatch, **ROWS) if how == "gpu" else pickled(**ROWS)
    data = rewritten(data) if how == "rewritten" else data
    read_on.clear()
    found, expected = both(data, monkeypatch)
    assert sum(read_on) == 5
    assert isomorphic(found, expected)


def test_a_dict_longer_than_a_batch(read_on: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is still known after the opcodes between two batches, and another dict's."""
    names = [f"{n}.{'é' * (n % 100)}" for n in range(2500)]
    data = pickled(**dict.fromkeys(names, torch.zeros(2)), other={"name": torch.zeros(2)})
    found, expected = both(data, monkeypatch)
    assert isomorphic(found, expected)
    data = pickled(**{name: torch.zeros(2) for name in names})
    found, expected = both(data, monkeypatch)
    assert sum(read_on) > 2400
    assert isomorphic(found, expected)


@pytest.mark.parametrize("window", [1, 64, 1000])
def test_a_window_may_end_in_what_is_expected(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", window)
    monkeypatch.setattr(module, "FIRST_WINDOW", window)
    assert isomorphic(*both(pickled(**ROWS), monkeypatch))
    assert isomorphic(*both(rewritten(pickled(**ROWS)), monkeypatch))


@pytest.mark.parametrize("how", ["cpu", "gpu", "rewritten"])
def test_what_differs_from_the_expected_reads_as_its_opcodes_do(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of the code of tensors that were expected changed, or left out, or doubled."""
    chance = random.Random(how)
    data = of_gpus(monkeypatch, **ROWS) if how == "gpu" else pickled(**ROWS)
    data = rewritten(data) if how == "rewritten" else data
    for at in range(data.index(b"X\x08\0\0\x002.vector"), data.index(b"3.vector") + 12):
        changes = bytes([data[at] ^ 1]), chance.randbytes(1), b"", data[at : at + 1] * 2
        for new in chance.sample(changes, 2):
            found, expected = both(data[:at] + new + data[at + 1 :], monkeypatch)
            if isinstance(found, Pairs):  # two of one name
                found, expected = found.pairs, expected.pairs
            assert isomorphic(found, expected), f"byte {at}: {new!r}"


@pytest.mark.parametrize("entry", ["class", "device", "call", "other"])
def test_an_entry_of_the_memo_that_is_overwritten(
    entry: str, read_on: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the code of a kind fetches from the memo is another value from there on."""
    data = rewritten(pickled(**ROWS))
    third = [match for at in range(len(data)) if (match := _match(data, at))][-3]
    code = third.string
    entries = {
        "class": int.from_bytes(third[2][1:], "little"), "device": third[6][0],
        "call": code[third.start() - 2], "other": 100,
    }  # fmt: skip
    start = code.rindex(b"X\x08\0\0\0", 0, third.start())
    put = b"X\x03\0\0\0newr" + entries[entry].to_bytes(4, "little")
    changed = code[:start] + put + b"K\x01" + code[start:]
    read_on.clear()
    found, expected = both(changed, monkeypatch)
    assert isomorphic(found, expected)
    assert sum(read_on) == 2  # those before


def test_kinds_beyond_a_number_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.pickles.plain_tensor._MOST_KINDS", 2)
    assert isomorphic(*both(pickled(**ROWS), monkeypatch))


def test_a_storage_that_comes_again_among_the_expected(
    read_on: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one storage for both tensors; of another size, it is refused."""
    data = pickled(**{str(n): torch.zeros(2) for n in range(6)})
    last = [match for at in range(len(data)) if (match := _match(data, at))][-1]
    start, stop = last.span(4)
    key = last[4]
    tied = data[:start] + str(int(key) - 1).encode() + data[stop:]
    found, expected = both(tied, monkeypatch)
    assert isomorphic(found, expected)
    assert found["5"].storage is found["4"].storage
    other = data[:start] + b"2" + data[stop:]  # of 64-bit integers
    found, expected = both(other, monkeypatch)
    assert found == expected == ("AmbiguousError", "storage '2' is described in two ways")
    assert read_on


def test_storages_made_as_another_are_known_as_all_others_are() -> None:
    storages = table()
    id_of = ("storage", storage_class(BY_NAME["int16"]))
    first = storages.load((*id_of, "0", "cpu", 3))
    second = storages.another(first, "1")
    assert second is not None and (second.nbytes, second.device) == (6, "cpu")
    assert storages.another(first, "1") is storages.another(first, "0") is None
    assert list(storages) == ["0", "1"]
    assert storages.itemsizes() == {"0": 2, "1": 2}
    assert storages.load((*id_of, "1", "cpu", 3)).storage is second
    with pytest.raises(AmbiguousError, match="described in two ways"):
        storages.load((*id_of, "1", "cpu", 4))
    with pytest.raises(LimitError, match="characters of a storage's name"):
        storages.another(first, "7" * (LIMITS.name_bytes + 1))
