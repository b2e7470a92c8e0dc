"""Edits in place: what they write, what others read of it, and what is left when they are ended at
any moment."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.api import Conversion, convert, recover
from ckptkit.core.bytesource import journal_path
from ckptkit.core.errors import (
    CkptkitError,
    InputChangedError,
    InputError,
    OutputError,
    VerifyError,
)
from ckptkit.core.plan import Patch
from ckptkit.publish import in_place as editing
from ckptkit.publish.in_place import journal_of, parse
from tests.conftest import Run
from tests.killing import killed

Maker = Callable[[Path], Path]
Change = Callable[[ckptkit.Checkpoint], ckptkit.Checkpoint]


def values() -> OrderedDict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = [f"module.layers.{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]
    return OrderedDict((name, torch.rand(24, 16, generator=generator)) for name in names)


def make_pth(folder: Path) -> Path:
    path = folder / "run.pth"
    torch.save({"model": values(), "epoch": 3}, path)
    return path


def make_safetensors(folder: Path) -> Path:
    path = folder / "run.safetensors"
    save_file(dict(values()), path, metadata={"format": "pt"})
    return path


MAKERS: dict[str, Maker] = {"pth": make_pth, "safetensors": make_safetensors}


def load(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The state_dict, by those whose format it is."""
    if path.suffix == ".safetensors":
        found: dict[str, torch.Tensor] = load_file(path)
        return found
    root = torch.load(path, weights_only=True, map_location="cpu", **options)
    return dict(root.get("model", root))


def same(found: dict[str, torch.Tensor], prefix: str) -> bool:
    expected = {name.replace("module.", prefix, 1): tensor for name, tensor in values().items()}
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


def strip(checkpoint: ckptkit.Checkpoint) -> ckptkit.Checkpoint:
    return ckptkit.strip_prefix(checkpoint, "module.")


def grow(checkpoint: ckptkit.Checkpoint) -> ckptkit.Checkpoint:
    return ckptkit.add_prefix(strip(checkpoint), LONG)


LONG = "a.much.longer.prefix.than.before."
CHANGES: dict[str, tuple[Change, str]] = {"strip": (strip, ""), "grow": (grow, LONG)}


def in_place(path: Path, *steps: Change, **options: Any) -> Conversion:
    return convert(path, None, *steps, in_place=True, **options)


def patch_of(path: Path, change: Change) -> Patch:
    plan = in_place(path, change, dry_run=True).plan
    assert isinstance(plan, Patch)
    return plan


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MAKERS)
def test_others_read_the_result(kind: str, change: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path)
    inode = path.stat().st_ino
    step, prefix = CHANGES[change]
    done = in_place(path, step, verify=True)
    assert isinstance(done.plan, Patch) and done.plan.size == path.stat().st_size
    assert path.stat().st_ino == inode
    assert same(load(path), prefix)
    if kind == "pth":
        assert same(load(path, mmap=True), prefix)
        assert zipfile.ZipFile(path).testzip() is None
        with torch.serialization.skip_data():
            assert load(path).keys() == load(path, mmap=True).keys()
    with closing(ckptkit.open(path)) as again:
        names = values() if kind == "pth" else sorted(values())  # the order of the file
        assert list(again.weights) == [name.replace("module.", prefix, 1) for name in names]
        assert again.warnings == ()
    assert os.listdir(tmp_path) == [path.name]


def test_storages_stay_where_they_are(tmp_path: Path) -> None:
    """So that programs which have mapped them go on."""
    path = make_pth(tmp_path)
    mapped = load(path, mmap=True)
    places = {name: tensor.storage.record for name, tensor in ckptkit.open(path).weights.items()}  # type: ignore[union-attr]
    in_place(path, strip)
    assert same(mapped, "module.")
    for name, tensor in ckptkit.open(path).weights.items():
        assert tensor.storage is not None
        assert tensor.storage.record[1:] == places["module." + name][1:]  # type: ignore[index]


def test_a_second_edit_takes_the_place_of_the_first(tmp_path: Path) -> None:
    path = make_pth(tmp_path)
    in_place(path, strip)
    size = path.stat().st_size
    for _ in range(3):
        in_place(path, lambda ck: ckptkit.add_prefix(ck, "module."))
        in_place(path, strip)
    assert path.stat().st_size == size
    names = zipfile.ZipFile(path).namelist()
    assert [name for name in names if name.startswith("run/data.")] == [
        "run/data.old",
        "run/data.pkl",
    ]
    assert same(load(path), "")


@pytest.mark.parametrize("kind", MAKERS)
def test_only_what_changes_is_written(kind: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path)
    plan = patch_of(path, strip)
    assert plan.written < 6000 < path.stat().st_size == plan.base.size
    assert f"{plan.written:,} of {plan.size:,} bytes" in str(plan)
    info = path.stat()
    done = in_place(path)  # no change
    assert isinstance(done.plan, Patch) and done.plan.written == 0
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (info.st_mtime_ns, info.st_size)
    done = in_place(path, lambda ck: ckptkit.cast(ck, {"*": "float16"}))
    assert not isinstance(done.plan, Patch)
    assert {tensor.dtype for tensor in load(path).values()} == {torch.float16}


def test_extract_and_drop_leave_dead_records(tmp_path: Path) -> None:
    path = make_pth(tmp_path)
    size = path.stat().st_size
    with closing(ckptkit.open(path)):
        in_place(path, lambda ck: ckptkit.select(ck, drop=["module.layers.0.*"]))
    found = load(path)
    assert len(found) == 10 and all(torch.equal(found[name], values()[name]) for name in found)
    assert size <= path.stat().st_size
    with closing(ckptkit.open(path)) as again:
        assert "nothing refers to 2 of its records" in again.warnings[0]
    convert(path, None, in_place=True, keep_format=False)
    assert path.stat().st_size < size
    assert len(load(path)) == 10


@pytest.mark.parametrize("has_version", [True, False])
def test_archives_of_python(has_version: bool, tmp_path: Path) -> None:
    """No padding, a comment after the end record; without a version, the file is written anew."""
    path, other = make_pth(tmp_path), tmp_path / "other.pth"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for name in sorted(source.namelist(), key=lambda name: name.endswith("data.pkl")):
            if has_version or "version" not in name:
                target.writestr(name, source.read(name))
        target.comment = b"a comment " * 6000 * has_version
    assert isinstance(in_place(other, strip).plan, Patch) == has_version
    assert same(load(other), "")
    assert zipfile.ZipFile(other).testzip() is None


def test_a_longer_header_moves_the_first_tensors(tmp_path: Path) -> None:
    path = make_safetensors(tmp_path)
    before = path.stat().st_size
    in_place(path, grow)
    assert before < path.stat().st_size < before + 6000
    assert path.stat().st_size % 8 == int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize(
    "tensors",
    [
        {
            "module.a": torch.zeros(5, dtype=torch.uint8),
            "module.b": torch.ones(3),
        },  # what moves would lose alignment
        {"module.a": torch.ones(3)},  # nothing to move
    ],
)
def test_a_longer_header_may_need_a_new_file(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    done = in_place(
        path, lambda ck: ckptkit.add_prefix(ck, "a very long prefix that does not fit." * 9)
    )
    assert not isinstance(done.plan, Patch)
    found = load_file(path)
    assert [name[-8:] for name in sorted(found)] == sorted(tensors)


@pytest.mark.parametrize("how", ["symbolic", "hard", "read-only"])
def test_a_file_with_another_name_is_written_anew(how: str, tmp_path: Path) -> None:
    path, other = make_pth(tmp_path), tmp_path / "other.pth"
    if how == "symbolic":
        other.symlink_to(path)
    elif how == "hard":
        os.link(path, other)
    else:
        if os.geteuid() == 0:
            pytest.skip("everything is writable for root")
        shutil.copy(path, other)
        other.chmod(0o444)
    assert not isinstance(in_place(other, strip).plan, Patch)
    assert same(load(path), "module.")
    assert same(load(other), "")


# Ended at any moment


class Torn(NamedTuple):
    """A file after an interrupted edit: what each reader makes of it, None if it refuses."""

    others: str | None
    ours: str | None


def meaning(path: Path, read: Callable[[Path], dict[str, Any]], change: str) -> str | None:
    """Return the version of the file that a reader finds; None if it refuses the file."""
    try:
        found = read(path)
    except Exception:
        return None
    prefix = CHANGES[change][1]
    kept = set(values())
    for meant, start in (("old", "module."), ("new", prefix)):
        if {name.replace("module.", start, 1) for name in kept} == set(found):
            if all(torch.is_tensor(tensor) for tensor in found.values()):
                assert same(found, start)
            return meant
    raise AssertionError(f"neither the old file nor the new one: {sorted(found)[:3]}")


def torn(path: Path, change: str, scratch: Path) -> Torn:
    """Of a copy, which has no journal beside it."""
    copy = scratch / path.name
    shutil.copy(path, copy)
    found = Torn(
        meaning(copy, load, change), meaning(copy, lambda p: dict(ckptkit.open(p).weights), change)
    )
    copy.unlink()
    return found


@pytest.mark.parametrize("half", ["before", "half"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MAKERS)
def test_DS_01_killed_at_every_call(kind: str, change: str, half: str, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "files").mkdir()
    made = MAKERS[kind](tmp_path)
    seen: list[str | None] = []
    going = True
    while going:
        path = tmp_path / "files" / made.name
        shutil.copy(made, path)
        edit = partial(convert, path, None, CHANGES[change][0], in_place=True)
        going = killed(edit, len(seen) + 1, half == "half")
        left = torn(path, change, scratch)
        assert left.others == left.ours or left.ours is None
        known = os.path.exists(journal_path(path))
        assert (
            known or left.others is not None
        )  # nothing but the journal can help a file that nobody reads
        with closing(recover(path).checkpoint) as again:  # as editing commands do, too
            found = meaning(path, lambda p, again=again: dict(again.weights), change)
        assert found == meaning(path, load, change)
        assert left.others in (None, found)
        assert found == "old" or left.others == "new"
        assert not os.path.exists(journal_path(path))
        for other in (tmp_path / "files").iterdir():
            other.unlink()
        seen.append(found)
    assert seen[0] == "old" and seen[-1] == "new" and len(seen) > 10
    assert seen == sorted(seen, key=["old", "new"].index)


class Disk:
    """A file after a power cut: what was synced, and any part of what was written since."""

    def __init__(self, data: bytes) -> None:
        self.synced = data
        self.pending: list[tuple[int, bytes | None]] = []  # offset and bytes; or a size

    def write(self, offset: int, data: bytes) -> None:
        self.pending += [(offset + at, data[at : at + 512]) for at in range(0, len(data), 512)]

    def truncate(self, size: int) -> None:
        self.pending.append((size, None))

    def sync(self) -> None:
        self.synced, self.pending = self._with(self.pending), []

    def after_power_cut(self, chance: random.Random) -> bytes:
        return self._with([each for each in self.pending if chance.random() < 0.5])

    def _with(self, pending: list[tuple[int, bytes | None]]) -> bytes:
        data = bytearray(self.synced)
        for offset, piece in pending:
            if piece is None:
                data = data[:offset].ljust(offset, b"\0")
            else:
                data = data.ljust(offset, b"\0")
                data[offset : offset + len(piece)] = piece
        return bytes(data)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MAKERS)
def test_DS_03_power_cut_at_every_step(
    kind: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sectors reach the disk in any order between two waits for it."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    made = MAKERS[kind](tmp_path)
    path = tmp_path / f"file{made.suffix}"
    shutil.copy(made, path)
    patch = patch_of(path, CHANGES[change][0])
    chance = random.Random(7)
    disk, states = Disk(path.read_bytes()), []

    def note() -> None:
        states.extend(disk.after_power_cut(chance) for _ in range(6))

    def write(_: int, edits: Any, size: int | None = None) -> None:
        for edit in edits:
            disk.write(edit.offset, edit.data)
            note()
        if size is not None:
            disk.truncate(size)
        note()
        disk.sync()

    monkeypatch.setattr(editing, "_write", write)
    editing.apply_all((patch,))
    monkeypatch.undo()
    assert same(load(path), "module.")  # it was not written to
    found = set()
    for state in [*states, disk.synced]:
        path.write_bytes(path.read_bytes()[:0] + made.read_bytes())  # the same inode
        journal = journal_of(patch_of(path, CHANGES[change][0]), path.stat().st_ino)
        path.write_bytes(state)
        Path(journal_path(path)).write_bytes(journal.dump())
        left = torn(path, change, scratch)
        editing.check_journals(str(path), undo=True)
        now = meaning(path, load, change)
        assert now is not None and left.others in (None, now) and left.ours in (None, now)
        assert now == "new" or path.read_bytes() == made.read_bytes()
        found.add((left.others, now))
    assert {(None, "old"), ("new", "new")} <= found


# What is left, and whose it is


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that an edit has left half changed, with its journal."""
    path = make_pth(tmp_path)
    with monkeypatch.context() as during:
        during.setattr(editing, "_undo", lambda fd, journal: None)
        during.setattr(editing, "_remove", lambda journal: None)
        during.setattr(editing, "_write", write_until(2, OSError(5, "Input/output error")))
        with pytest.raises(OutputError, match="Input/output error"):
            in_place(path, strip)
    assert meaning(path, load, "strip") is None
    return path


def write_until(calls: int, error: BaseException) -> Callable[..., None]:
    real, done = editing._write, [0]

    def write(*args: Any) -> None:
        done[0] += 1
        if done[0] > calls:
            raise error
        real(*args)

    return write


@pytest.mark.parametrize(
    "words", ["recover F out.pth", "recover --in-place F", "strip-module --in-place F"]
)
def test_the_next_edit_puts_it_back(words: str, interrupted: Path, run: Run) -> None:
    places = {"F": interrupted, "out.pth": interrupted.with_name("out.pth")}
    done = run(*(places.get(word, word) for word in words.split()))
    assert done.code == 0, done.stderr
    assert same(load(interrupted), "" if "strip" in words else "module.")
    assert not os.path.exists(journal_path(interrupted))


@pytest.mark.parametrize(
    "words", ["inspect F", "inspect D", "scan F", "verify F", "stats F", "convert F out.pth"]
)
def test_reading_changes_nothing(words: str, interrupted: Path, run: Run, tmp_path: Path) -> None:
    """A command that only reads reports the interrupted edit, with the command that undoes it."""
    torn = interrupted.read_bytes()
    places = {"F": interrupted, "D": interrupted.parent, "out.pth": tmp_path / "out.pth"}
    done = run(*(places.get(word, word) for word in words.split()))
    assert done.code == 3
    assert f"ckptkit recover --in-place {interrupted}" in done.stderr
    assert interrupted.read_bytes() == torn
    assert os.path.exists(journal_path(interrupted))


def test_a_journal_of_a_finished_edit_is_no_hindrance(tmp_path: Path, run: Run) -> None:
    """All was done but for the journal."""
    path = make_pth(tmp_path)
    journal = Path(journal_path(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(editing, "_remove", lambda journal: None)
        in_place(path, strip)
    assert journal.exists()
    assert same(load(path), "")
    assert run("scan", path).code == run("inspect", path).code == 0
    assert journal.exists()
    assert run("recover", "--in-place", path).code == 0
    assert not journal.exists()


HEAD = b"ckptkit journal 1\n"


@pytest.mark.parametrize(
    ("head", "size"),
    [
        *((head, 3 << 30) for head in (b"", HEAD, HEAD + b'{"breaks": [0, 1], "spans": []}\n')),
        (HEAD, editing.LARGEST),
        *((head, len(head)) for head in (b"", HEAD, HEAD + b"{}\n" + bytes(32))),
    ],
)
def test_a_journal_that_is_none(
    head: bytes, size: int, tmp_path: Path, lengths_read: list[int]
) -> None:
    """However large it is, little of it is read."""
    path = make_pth(tmp_path)
    with open(journal_path(path), "wb") as file:
        file.write(head)
        file.truncate(size)
    with pytest.raises(InputError, match="the journal is invalid or incomplete"):
        ckptkit.open(path)
    assert sum(lengths_read) < 2 * editing.HEAD


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_DS_18_what_fails_is_undone(
    calls: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_pth(tmp_path)
    before = path.read_bytes()
    real = editing._undo
    monkeypatch.setattr(editing, "_write", write_until(calls, error))
    with monkeypatch.context() as during:
        during.setattr(
            editing,
            "_undo",
            lambda fd, journal: (during.undo(), monkeypatch.undo(), real(fd, journal)),
        )
        with pytest.raises((OutputError, KeyboardInterrupt)):
            in_place(path, strip)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_what_is_read_back_wrong_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_pth(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(editing, "_read", lambda fd, offset, length: b"x" * length)
    with pytest.raises(VerifyError):
        in_place(path, strip, verify=True)
    assert path.read_bytes() == before


def test_somebody_else_wrote_to_it_since(interrupted: Path) -> None:
    """A training that saved again under the same name: its file is not touched."""
    with open(interrupted, "r+b") as file:
        file.truncate(0)
        torch.save(values(), file)
    saved = interrupted.read_bytes()
    with pytest.raises(
        InputError, match="another program has written to the file after the edit"
    ) as refused:
        ckptkit.open(interrupted)
    assert (
        refused.value.hint
        == f"if the file is correct, remove the journal: rm {journal_path(interrupted)}"
    )
    assert interrupted.read_bytes() == saved


def test_a_journal_of_another_file(interrupted: Path, tmp_path: Path) -> None:
    other = tmp_path / "copy" / interrupted.name
    other.parent.mkdir()
    for each in (interrupted, Path(journal_path(interrupted))):
        shutil.copy(each, other.parent)
    left = other.read_bytes()
    with pytest.raises(InputError, match="the journal belongs to another file of the same name"):
        ckptkit.open(other)
    assert other.read_bytes() == left


def test_a_journal_of_a_stranger(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(journal_path(interrupted), 12345, 12345)
    with pytest.raises(InputError, match="another user owns the journal"):
        ckptkit.open(interrupted)


def test_one_at_a_time(tmp_path: Path) -> None:
    path = make_pth(tmp_path)
    with open(path, "r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="is being edited in place by another process"):
            in_place(path, strip)
    in_place(path, strip)
    assert same(load(path), "")


def test_changed_since_it_was_read(tmp_path: Path) -> None:
    path = make_pth(tmp_path)
    patch = patch_of(path, strip)
    torch.save({"epoch": 4}, path)
    saved = path.read_bytes()
    with pytest.raises(InputChangedError):
        editing.apply_all((patch,))
    assert path.read_bytes() == saved


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = make_pth(tmp_path)
    journal = journal_of(patch_of(path, strip), 12)
    assert parse(journal.dump()) == journal
    for at in range(0, len(journal.dump()), 97):
        damaged = bytearray(journal.dump())
        damaged[at] ^= 1
        with pytest.raises(CkptkitError):
            parse(bytes(damaged))


def test_a_dry_run_writes_nothing(tmp_path: Path, run: Run) -> None:
    path = make_pth(tmp_path)
    before = path.read_bytes()
    done = run("strip-module", "--in-place", "--dry-run", path)
    assert done.stdout.startswith(f"would change {path}: 12 tensors, ")
    assert "in place: " in done.stdout
    assert path.read_bytes() == before
    assert run("strip-module", "--in-place", path).stdout.startswith(
        f"changed {path}: 12 tensors, "
    )
