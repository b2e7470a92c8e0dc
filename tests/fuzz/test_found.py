"""Faults that the targets found, each of them fixed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import formats
from ckptkit.core.bytesource import Memory, journal_path
from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError
from ckptkit.core.tree import SetNode
from ckptkit.pickles.writer import write_pickle
from ckptkit.publish import in_place
from tests.formats.containers.zips import Member, build
from tests.formats.torch_zip.archives import FLOATS, pickle_of, storage, tensor
from tests.fuzz import seeds
from tests.fuzz.driving import scan
from tests.pickles.making import machine


def rewritten(data: bytes) -> Any:
    """Return a pickle that was read, written and read again."""
    made = write_pickle(machine(data), lambda typed: ()).data
    assert isinstance(made, bytes)
    return machine(made)


@pytest.mark.parametrize("external", [0x10, 0xFFFFFFFF])
def test_torch_finds_nothing_in_a_member_that_is_a_folder(external: int, tmp_path: Path) -> None:
    """It gave whatever was in memory for the numbers; ckptkit copied those of the file."""
    members = [Member("a/data.pkl", pickle_of(tensor(storage()))), Member("a/version", b"3\n")]
    made = build(*members, Member("a/data/0", FLOATS, central={"external": external}))
    (tmp_path / "a.pth").write_bytes(made)
    torch.load(tmp_path / "a.pth", weights_only=True)
    with pytest.raises(AmbiguousError):
        formats.read(Memory(made))


def test_a_class_in_a_class_whose_name_is_no_name() -> None:
    """It was written as a call of getattr, which was refused when that was to be written."""
    with pytest.raises(FormatError, match="invalid name"):
        machine(b"\x80\x04\x8c\x07pathlib\x8c\x09os.syst(e\x93.")


@pytest.mark.parametrize(
    "data", [b"(c__builtin__\nset\n]K\1ao.", b"(]K\1ai__builtin__\nset\n."], ids=["OBJ", "INST"]
)
def test_a_call_by_another_opcode_is_that_call(data: bytes) -> None:
    """Written as REDUCE it meant something else than it did before, or nothing."""
    for made in (machine(data), rewritten(data)):
        assert isinstance(made, SetNode) and made.items == [1]


@pytest.mark.parametrize(
    "name", ["ctorch._utils\n_rebuild_parameter\n", "c__builtin__\nset\ncos\nsystem\n"]
)
def test_what_cannot_be_read_when_it_is_written_is_not_read_before(name: str) -> None:
    with pytest.raises(CkptkitError):
        machine(b"(" + name.encode() + b"X\1\0\0\0ao.")


def test_the_tracer_calls_with_what_is_no_tuple() -> None:
    for callee in (
        b"cbuiltins\nbytearray\n", b"c_codecs\nencode\n", b"cbuiltins\ngetattr\n", b"cm\nf\n",
    ):  # fmt: skip
        scan(Memory(b"\x80\x02" + callee + b"(\x8a\x06\0\0\0\0\0\1dR.", "made.pkl"))


def journal_with(change: Callable[[dict[str, Any]], object], inode: int) -> bytes:
    """A journal whose checksum is right, and whose numbers are not."""
    first, line, rest = seeds.journals()[0].split(b"\n", 2)
    numbers = {**json.loads(line), "inode": inode}
    change(numbers)
    data = b"\n".join((first, json.dumps(numbers).encode(), rest[:-32]))
    return data + hashlib.sha256(data).digest()


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "huge": lambda numbers: numbers["spans"][0].__setitem__(0, 1 << 64),
    "negative": lambda numbers: numbers["spans"][0].__setitem__(0, -1),
    "half": lambda numbers: numbers["spans"][0].__setitem__(0, 1.5),
    "true": lambda numbers: numbers["spans"][0].__setitem__(1, True),
    "huge-break": lambda numbers: numbers["breaks"].__setitem__(0, 1 << 70),
    "nothing-before": lambda numbers: numbers.update(before=0),
    "more-before": lambda numbers: numbers.update(before=1 << 62),
    "less-after": lambda numbers: numbers.update(after=60),
    "left-over": lambda numbers: numbers["spans"].pop(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_numbers_of_a_journal_that_are_no_places(name: str, tmp_path: Path) -> None:
    """They went into the system's calls, which raised what is no error of ours."""
    path = tmp_path / "run.pth"
    path.write_bytes(seeds.EDITED)
    Path(journal_path(path)).write_bytes(journal_with(CHANGES[name], path.stat().st_ino))
    with pytest.raises(CkptkitError, match="incomplete"):
        in_place.check_journals(str(path), undo=True)
    assert path.read_bytes() == seeds.EDITED


def test_a_journal_with_its_own_numbers_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "run.pth"
    path.write_bytes(seeds.EDITED)
    beside = Path(journal_path(path))
    beside.write_bytes(journal_with(lambda numbers: None, path.stat().st_ino))
    in_place.check_journals(str(path), undo=True)
    assert path.read_bytes() == seeds.EDITED and not beside.exists()
