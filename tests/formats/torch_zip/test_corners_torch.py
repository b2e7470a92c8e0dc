"""torch's files: what no other test comes by: other ways to write the same, and edits that need a
new file."""

from __future__ import annotations

import gc
import struct
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import formats
from ckptkit.containers.zip_entries import MAGIC, REPLACED
from ckptkit.containers.zip_reader import read_directory
from ckptkit.core.bytesource import Derived, LocalFile, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError, LimitError
from ckptkit.core.limits import LIMITS
from ckptkit.core.plan import Patch
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.tree import Node
from ckptkit.formats import torch_tar
from ckptkit.formats.common.zip_pickles import pickles
from ckptkit.formats.format import Probe, WriteOptions
from ckptkit.formats.table import TORCH_LEGACY as LEGACY
from ckptkit.formats.table import TORCH_ZIP as ZIP
from ckptkit.formats.torch_zip import patching as zip_patch
from ckptkit.formats.torch_zip.recovering import recover
from ckptkit.pickles.machine import unpickle
from ckptkit.pickles.plain_tensor import PlainTensors, _match
from ckptkit.pickles.streams import Inner, PickleStream
from ckptkit.scan.trace import LARGE, trace
from ckptkit.scan.trace_window import FIRST_WINDOW, WINDOW
from tests.containers import tars
from tests.containers.zips import Member, build
from tests.formats.torch_zip.archives import (
    FLOATS,
    archive,
    pickle_of,
    saved,
    storage,
    tensor,
    text,
)
from tests.formats.torchscript import scripts, test_old_json, test_reader
from tests.pickles.making import machine
from tests.pickles.test_plain_tensor import pickled, table

U8 = BY_NAME["uint8"]
NOT_UTF8 = "a string of Python 2 that is not UTF-8 (SHORT_BINSTRING at byte 2)"


# Pickles


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("encoding", ["latin1", "latin-1"])
def test_bytes_spelt_as_text(kind: type, encoding: str) -> None:
    call = f"c__builtin__\n{kind.__name__}\n".encode()
    made = machine(b"\x80\x02" + call + text("a\xff") + text(encoding) + b"\x86R.")
    assert type(made) is kind and made == b"a\xff"


def test_the_collector_stays_off() -> None:
    enabled = gc.isenabled()
    gc.disable()
    try:
        assert machine(b"\x80\x02K\x05.") == 5
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert machine(b"\x80\x02K\x05.") == 5 and gc.isenabled()
    if not enabled:
        gc.disable()


def test_a_storage_of_a_long_name() -> None:
    """A key and a device that are together longer than a name may be."""
    half = LIMITS.name_bytes // 2
    fits = pickle_of(tensor(storage(key=text("k" * half), location="d" * half)))
    assert unpickle(Memory(fits), persistent_load=table().load).root["a"].shape == (4,)
    over = pickle_of(tensor(storage(key=text("k" * half), location="d" * (half + 1))))
    with pytest.raises(LimitError, match="name_bytes"):
        unpickle(Memory(over), persistent_load=table().load)


def outcome(data: bytes, load: Any) -> Node:
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
    assert isinstance(outcome(data, table().load), dict)
    start, stop = found.span(group)
    if group == 2:
        start += 1  # after the opcode
        data = data[:start] + b"\xff" * 4 + data[stop:]
    else:
        data = data[: start - 1] + b"j" + b"\xff\xff\xff\x7f" + data[stop:]
    fast = outcome(data, table().load)
    monkeypatch.setattr(PlainTensors, "read", lambda *_: 0)
    assert fast == outcome(data, table().load)
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

    fast = outcome(data, load)
    monkeypatch.setattr(PlainTensors, "read", lambda *_: 0)
    storages = table()
    assert fast == outcome(data, load)
    assert isinstance(fast, tuple) and why in fast[1]


# Traces


def test_text_of_python_2_that_is_utf_8() -> None:
    """Text that torch.load cannot decode is refused; text that it decodes is kept."""
    fine = trace(Memory(b"\x80\x02U\x02\xc3\xa9."))
    assert (fine.error, fine.refused) == (None, trace(Memory(b"\x80\x02U\x02ab.")).refused)
    assert trace(Memory(b"\x80\x02U\x02\xc3\xff.")).refused == NOT_UTF8


def test_bytes_with_characters_that_are_none() -> None:
    spelt = b"\x80\x02c_codecs\nencode\n" + text("\u0100") + text("latin1") + b"\x86R."
    assert "spells bytes with characters beyond 255" in str(trace(Memory(spelt)).error)


def test_large_bytes_in_what_is_read_already() -> None:
    """They are passed over wherever they are: behind the window, or, after something large, in
    it."""
    first = text("x" * WINDOW)
    large = b"B" + struct.pack("<I", LARGE) + bytes(LARGE)
    data = b"\x80\x03(" + first + large + large + b"K\x01t."
    found = trace(Memory(data))
    assert LARGE > FIRST_WINDOW and found.error is None and found.stop == len(data)


# Archives


def test_an_archive_that_lists_nothing() -> None:
    """It is one of no members where there are none; one that is there all the same is not
    overlooked."""
    empty = read_directory(Memory(MAGIC + build()[:16] + struct.pack("<LH", len(MAGIC), 0)))
    assert (empty.entries, empty.top, empty.start) == ({}, "", 4)
    member = Member("a/data.pkl", b"N.")
    data = member.head() + member.stored
    with pytest.raises(AmbiguousError, match=r"'a/data\.pkl' at byte 0 is not in the directory"):
        read_directory(Memory(data + build()[:16] + struct.pack("<LH", len(data), 0)))


@pytest.mark.parametrize("names", ["aa", "bab", "aA"])
def test_ZP_01_duplicate_names_of_one_letter(names: str) -> None:
    """Python keeps one object for each byte: names that are the same may be identical."""
    with pytest.raises(
        AmbiguousError, match=f"two records have the same name: '{names[0]}', '{names[-1]}'"
    ):
        read_directory(Memory(build(*(Member(name, b"x") for name in names))))


def test_an_empty_member_of_a_tar_file_is_no_pickle() -> None:
    root = tars.torch_tar(tars.ids(), [], [], empty=b"", more=b"something")
    found = torch_tar.pickles(Probe(Memory(root)))
    assert found is not None
    kinds = {each.where: type(each) for each in found if isinstance(each, (PickleStream, Inner))}
    assert "empty" not in kinds and kinds["more"] is Inner and kinds["pickle"] is PickleStream


class Remote(Memory):
    remote = True


def test_storages_of_a_remote_archive_are_not_looked_into() -> None:
    data = archive(pickle_of(tensor(storage())))
    names = {
        source.remote: [each.where for each in pickles(Probe(source)) or ()]
        for source in (Memory(data), Remote(data))
    }
    assert names == {
        False: ["a/data.pkl", "a/data/0", "a/version"],
        True: ["a/data.pkl", "a/version"],
    }


def test_a_compressed_storage_without_the_directory() -> None:
    """Its own header has its size and its checksum."""
    both = pickle_of(tensor(storage()), tensor(storage(key=text("1"))))
    members = [
        Member("a/data.pkl", both),
        Member("a/data/0", FLOATS, deflated=True),
        Member("a/data/1", FLOATS),
    ]
    data = build(*members)
    found = recover(Probe(Memory(data[: data.index(b"PK\1\2")])), False)
    assert found is not None and not found.lost and list(found.checkpoint.root) == ["a", "b"]


# Scripts


def test_attributes_that_are_no_tuple() -> None:
    with pytest.raises(FormatError, match=r"attributes\.pkl does not hold a tuple"):
        test_old_json.read(test_old_json.archive(test_old_json.model(), {"a": 1}))


@pytest.mark.parametrize("scale", ["0.5", None, True, [1]])
def test_a_scale_that_is_no_number(scale: Any) -> None:
    said = test_old_json.tensor("tensors/0", (24,), "UINT8", isQuantized=True, scale=scale)
    with pytest.raises(FormatError, match="a quantized tensor whose scale is not a number"):
        test_old_json.read(test_old_json.archive({"mainModule": {}, "tensors": [said]}))


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_a_script_without_constants(tmp_path: Path) -> None:
    """Scripts for phones may have none; their bytecode tells what they are."""
    path = scripts.script(scripts.module_of({"a.weight": torch.ones(2)}), tmp_path / "made.pt")
    data = scripts.rezipped(path, lambda name, data: None if name == "constants.pkl" else data)
    path.write_bytes(data)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("made/bytecode.pkl", test_reader.EMPTY)
    found = test_reader.read(path)
    assert list(found.weights) == ["a.weight"] and "CONSTANTS" not in found.root.state


# Edits in place


def held(path: Path, name: str = "a") -> Checkpoint:
    return ZIP.read(
        Probe(LocalFile(saved(OrderedDict({name: torch.ones(4), "z": torch.ones(2)}), path)))
    )


def patch(before: Checkpoint, after: Checkpoint) -> Patch | None:
    return zip_patch.patch(before, after, WriteOptions())


def test_only_a_file_is_edited_in_place(tmp_path: Path) -> None:
    before = held(tmp_path / "x.pt")
    assert patch(before, replace(before, root={"b": before.root["a"]})) is not None
    copy = ZIP.read(Probe(Memory((tmp_path / "x.pt").read_bytes())))
    assert patch(copy, replace(copy, root={"b": copy.root["a"]})) is None


def test_an_archive_without_a_version_is_not_edited(tmp_path: Path) -> None:
    """torch would refuse the result."""
    for version in (b"3\n", None):
        (tmp_path / "x.pt").write_bytes(archive(pickle_of(tensor(storage())), version=version))
        before = ZIP.read(Probe(LocalFile(tmp_path / "x.pt")))
        assert (patch(before, before) is None) == (version is None)


def test_metadata_get_a_record(tmp_path: Path) -> None:
    before = held(tmp_path / "x.pt")
    made = patch(before, replace(before, metadata={"said": "something new"}))
    assert made is not None and any(b"something new" in edit.data for edit in made.edits)
    plain = patch(before, before)
    assert plain is not None and made.size > plain.size


def replaced(count: int) -> bytes:
    """An archive in which this many of the names for replaced records are taken."""
    taken = [Member(f"a/data{ending}", b"old") for ending in REPLACED[:count]]
    return archive(pickle_of(tensor(storage())), *taken)


def test_an_archive_that_was_edited_too_often(tmp_path: Path) -> None:
    """The record that is replaced keeps its place under another name of the same length, while
    there is one."""
    path = tmp_path / "x.pt"
    for count in (0, len(REPLACED) - 1):
        path.write_bytes(replaced(count))
        before = ZIP.read(Probe(LocalFile(path)))
        made = patch(before, before)
        assert made is not None
        assert any(edit.data == f"a/data{REPLACED[count]}".encode() for edit in made.edits)
    path.write_bytes(replaced(len(REPLACED)))
    before = ZIP.read(Probe(LocalFile(path)))
    assert patch(before, before) is None


def computed(data: bytes) -> Storage:
    return Storage(Derived("byteswap", (Range(Memory(data), 0, len(data)),), (4,), len(data)))


def test_storages_that_are_no_records_of_the_archive(tmp_path: Path) -> None:
    """Computed, of another file, a piece of a record, and bytes between the records."""
    before = held(tmp_path / "x.pt")
    kept: Tensor = before.root["a"]
    assert kept.storage is not None
    record = kept.storage.record
    assert (
        isinstance(record, Range) and patch(before, replace(before, root={"b": kept})) is not None
    )
    others = [
        computed(b"0123456789abcdef"),
        Storage(Range(Memory(b"0123"), 0, 4)),
        Storage(record._replace(length=8)),
        Storage(record._replace(offset=record.offset + 4, length=4)),
    ]
    for other in others:
        view = Tensor(other, U8, (other.nbytes,), (1,))
        assert patch(before, replace(before, root={"b": view})) is None


# By any format


def test_a_format_without_edits(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    before = LEGACY.read(Probe(LocalFile(path)))
    assert formats.patch(before, before, LEGACY, WriteOptions()) is None


def test_an_edit_that_changes_nothing(tmp_path: Path) -> None:
    """Nothing is written; what is not a file is not edited, changed or not."""
    before = held(tmp_path / "x.pt")
    made = formats.patch(before, before, ZIP, WriteOptions())
    assert isinstance(before.source, LocalFile)
    assert made == Patch(before.source, None, (), None, before.source.size) and made.written == 0
    copy = ZIP.read(Probe(Memory((tmp_path / "x.pt").read_bytes())))
    assert formats.patch(copy, copy, ZIP, WriteOptions()) is None


def test_an_edit_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    before = held(tmp_path / "x.pt")
    with pytest.raises(FormatError, match="has no place") as found:
        formats.patch(before, replace(before, root={"a": object()}), ZIP, WriteOptions())
    assert found.value.where == str(tmp_path / "x.pt")


def test_a_gpu_is_spelt_out_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
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
    fast = outcome(data, table().load)
    assert sum(map(bool, taken)) == 4
    monkeypatch.setattr(PlainTensors, "read", lambda *_: 0)
    assert repr(fast) == repr(outcome(data, table().load))
    assert data.count(b"cuda:1") == 4
