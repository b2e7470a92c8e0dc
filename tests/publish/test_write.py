"""The protocol around the engine: all of the output, or the destination as it was and nothing left
behind."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.compute.numbers import Cast
from ckptkit.compute.operation import Inflate, Slice, Swap
from ckptkit.core.bytesource import Derived, LocalFile, Memory, Range, journal_path
from ckptkit.core.errors import (
    CkptkitError,
    LimitError,
    OutputError,
    OutputExistsError,
    UsageError,
    VerifyError,
)
from ckptkit.core.limits import LIMITS
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, OutputFile, Plan, Segment
from ckptkit.publish import preflight
from ckptkit.publish import publish as publishing
from ckptkit.publish.publish import publish, temporary_name
from tests.compute.arranging import view

DATA = bytes(range(256)) * 400  # 100 KiB
OLD = b"what was there before"


@pytest.fixture
def source(tmp_path: Path) -> LocalFile:
    (tmp_path / "inputs").mkdir()
    path = tmp_path / "inputs" / "source.pt"
    path.write_bytes(DATA)
    return LocalFile(path)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder for outputs; at the end, no temporary may be left in it."""
    path = tmp_path / "outputs"
    path.mkdir()
    yield path
    assert [name for name in os.listdir(os.fsencode(path)) if b".ckptkit-" in name] == []


def file_plan(*segments: Segment) -> Plan:
    return Plan((OutputFile("", segments),))


def copy_plan(source: LocalFile) -> Plan:
    return file_plan(b"head", Range(source, 0, source.size), Range(source, 5, 10))


COPY = b"head" + DATA + DATA[5:15]


def folder_plan(source: LocalFile) -> Plan:
    return Plan(
        (
            OutputFile("model-1.bin", (Range(source, 0, 60_000),)),
            OutputFile("model-2.bin", (Range(source, 60_000, source.size - 60_000),)),
            OutputFile("index.json", (b"{}",)),
            OutputFile("empty", ()),
        )
    )


# new outputs


def test_a_file(source: LocalFile, folder: Path) -> None:
    told: list[int] = []
    done = publish(
        copy_plan(source), folder / "out.pt", progress=lambda count, total: told.append(count)
    )
    assert (folder / "out.pt").read_bytes() == COPY
    assert (Path(done.path), done.nbytes, done.files) == (folder / "out.pt", len(COPY), 1)
    assert sum(told) == len(COPY)


@pytest.mark.parametrize("name", ["", "/", "//"])
def test_a_folder(name: str, source: LocalFile, folder: Path) -> None:
    done = publish(folder_plan(source), f"{folder}/out{name}")
    found = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    assert found == {
        "model-1.bin": DATA[:60_000], "model-2.bin": DATA[60_000:], "index.json": b"{}", "empty": b"",
    }  # fmt: skip
    assert (done.nbytes, done.files) == (len(DATA) + 2, 4)


def test_a_name_behind_a_linked_folder(source: LocalFile, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "deeper")
    publish(copy_plan(source), f"{tmp_path}/link/../out.pt")
    assert (tmp_path / "deep" / "out.pt").read_bytes() == COPY


def test_DS_30_long_and_odd_names(source: LocalFile, folder: Path) -> None:
    for name in ("x" * 255, "é" * 127, os.fsdecode(b"\xff.pt")):
        publish(copy_plan(source), folder / name)
        assert (folder / name).read_bytes() == COPY


def test_the_temporary_is_beside_the_destination_and_says_whose_it_is() -> None:
    one, other = temporary_name("/some/out.pt"), temporary_name("/some/out.pt")
    assert one != other
    assert re.fullmatch(rf"/some/\.out\.pt\.ckptkit-{os.getpid()}-[0-9a-f]{{16}}\.tmp", one)
    assert len(os.fsencode(os.path.basename(temporary_name("/some/" + "é" * 127)))) <= 255


@pytest.mark.parametrize(
    ("umask", "given", "mode"),
    [
        *((0o022, 0o644, 0o644), (0o077, 0o644, 0o600), (0o000, 0o666, 0o666)),
        # who may not read the input may not read the output
        *((0o022, 0o600, 0o600), (0o022, 0o640, 0o640), (0o022, 0o444, 0o644)),
        (0o022, 0o400, 0o600),
    ],
)
def test_FS_07_the_mode_follows_the_umask(
    umask: int, given: int, mode: int, source: LocalFile, folder: Path
) -> None:
    before = os.umask(umask)
    os.chmod(source.path, given)
    source = LocalFile(source.path)
    try:
        publish(copy_plan(source), folder / "out.pt")
        publish(folder_plan(source), folder / "out")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "out.pt").stat().st_mode) == mode
    inside = (folder / "out" / "model-1.bin").stat().st_mode
    assert stat.S_IMODE(inside) == 0o666 & ~umask
    assert stat.S_IMODE((folder / "out").stat().st_mode) == mode | (mode & 0o444) >> 2


def test_a_replaced_file_keeps_its_owner(source: LocalFile, folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    out = folder / "out.pt"
    out.write_bytes(OLD)
    os.chown(out, 12345, 12346)
    publish(copy_plan(source), out, force=True)
    assert out.read_bytes() == COPY
    assert (out.stat().st_uid, out.stat().st_gid) == (12345, 12346)


def test_FS_05_nobody_else_reads_what_is_not_finished(source: LocalFile, folder: Path) -> None:
    modes: set[int] = set()

    def look(count: int, _: int) -> None:
        modes.update(stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir())

    publish(copy_plan(source), folder / "out.pt", progress=look)
    assert modes == {0o600}


def test_DS_32_the_output_is_deterministic(source: LocalFile, folder: Path) -> None:
    segments = (
        ChecksumPlaceholder(bytes(4), ((0, 0),)),
        Checksummed(Range(source, 0, source.size), 0),
    )
    for name in ("a", "b"):
        publish(file_plan(*segments), folder / name)
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()


# a destination that is there


def test_DS_14_an_existing_file_is_kept(source: LocalFile, folder: Path) -> None:
    (folder / "out.pt").write_bytes(OLD)
    with pytest.raises(OutputExistsError) as caught:
        publish(copy_plan(source), folder / "out.pt")
    assert "force=True" in (caught.value.hint or "")
    assert (folder / "out.pt").read_bytes() == OLD


def test_DS_31_a_replaced_file_leaves_its_mode_and_its_other_names_keep_the_old_bytes(
    source: LocalFile, folder: Path
) -> None:
    out = folder / "out.pt"
    out.write_bytes(OLD)
    out.chmod(0o640)
    os.link(out, folder / "other")
    publish(copy_plan(source), out, force=True)
    assert out.read_bytes() == COPY
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    assert (folder / "other").read_bytes() == OLD


@pytest.mark.parametrize("target", ["there", "missing", "out.pt"])
def test_FS_04_a_link_is_replaced_and_never_followed(
    target: str, source: LocalFile, folder: Path
) -> None:
    (folder / "there").write_bytes(OLD)
    (folder / "out.pt").symlink_to(folder / target)
    with pytest.raises(OutputExistsError):
        publish(copy_plan(source), folder / "out.pt")
    publish(copy_plan(source), folder / "out.pt", force=True)
    assert not (folder / "out.pt").is_symlink()
    assert (folder / "out.pt").read_bytes() == COPY
    assert (folder / "there").read_bytes() == OLD
    assert not (folder / "missing").exists()


@pytest.mark.parametrize(
    "target", ["/dev/null", "fifo", "link", "/proc/self/fd/1", "/proc/self/fd/{file}"]
)
def test_DS_15_a_link_to_a_device_a_pipe_or_a_descriptor_is_not_replaced(
    target: str, source: LocalFile, folder: Path
) -> None:
    """`/dev/stdout` is a link like that, to a file or to a pipe."""
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/dev/null")
    with open(__file__) as file:
        (folder / "out.pt").symlink_to(target.format(file=file.fileno()))
        with pytest.raises(UsageError, match="is a link to"):
            publish(copy_plan(source), folder / "out.pt", force=True)
    assert (folder / "out.pt").is_symlink()
    assert sorted(os.listdir(folder)) == ["fifo", "link", "out.pt"]


@pytest.mark.parametrize("force", [False, True])
def test_DS_15_a_file_does_not_replace_what_is_no_file(
    force: bool, source: LocalFile, folder: Path
) -> None:
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    for place in (
        folder / "folder",
        folder / "fifo",
        "/dev/null",
        "/",
        folder / ".",
        folder / "..",
    ):
        with pytest.raises(UsageError):
            publish(copy_plan(source), place, force=force)
    assert sorted(os.listdir(folder)) == ["fifo", "folder"]


@pytest.mark.parametrize("force", [False, True])
def test_FS_06_a_folder_is_never_merged(force: bool, source: LocalFile, folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine").write_bytes(OLD)
    (folder / "file").write_bytes(OLD)
    for name, kind in (("out", OutputExistsError), ("file", UsageError)):
        with pytest.raises(kind):
            publish(folder_plan(source), folder / name, force=force)
    assert os.listdir(folder / "out") == ["mine"]
    assert (folder / "file").read_bytes() == OLD


def test_an_empty_folder_is_taken(source: LocalFile, folder: Path) -> None:
    (folder / "out").mkdir()
    publish(folder_plan(source), folder / "out")
    assert len(os.listdir(folder / "out")) == 4
    with pytest.raises(OutputError) as caught:
        publish(copy_plan(source), folder / "no" / "out.pt")
    assert caught.value.hint == f"mkdir -p {folder / 'no'}"


def test_names_that_leave_the_folder_of_a_plan(folder: Path) -> None:
    for names in (["../a"], ["a/../b"], ["/a"], ["a//b"], [".."], ["a", "a"]):
        with pytest.raises(UsageError):
            publish(Plan(tuple(OutputFile(name, (b"x",)) for name in names)), folder / "out")
    assert os.listdir(folder) == []


def test_folders_inside_a_folder_appear_with_it_or_not_at_all(folder: Path) -> None:
    def plan(last: bytes | Range) -> Plan:
        files = {"a/b/c.pt": b"x", "a/d.pt": last, "e": b"z"}
        return Plan(tuple(OutputFile(name, (data,)) for name, data in files.items()))

    publish(plan(b"y"), folder / "out", durable=True)
    names = ("a/b/c.pt", "a/d.pt", "e")
    assert [(folder / "out" / name).read_bytes() for name in names] == [b"x", b"y", b"z"]
    with pytest.raises(CkptkitError):
        publish(plan(Range(Memory(b"short"), 0, 9)), folder / "other")
    assert os.listdir(folder) == ["out"]


def test_DS_12_the_input_is_not_the_output(source: LocalFile, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    os.link(source.path, inputs / "hard")
    (inputs / "soft").symlink_to("source.pt")
    for spelling in ("source.pt", "./source.pt", "../inputs/source.pt", "hard", "soft"):
        with pytest.raises(UsageError, match="is the input file"):
            publish(copy_plan(source), f"{inputs}/{spelling}", force=True)
    assert (inputs / "source.pt").read_bytes() == DATA
    assert len(os.listdir(inputs)) == 3


def test_the_input_is_replaced_where_that_is_asked_for(source: LocalFile, tmp_path: Path) -> None:
    publish(copy_plan(source), source.path, replace_source=True)
    assert Path(source.path).read_bytes() == COPY
    assert os.listdir(tmp_path / "inputs") == ["source.pt"]


# failures


def failing(name: str, code: int, after: int = 0) -> Callable[..., Any]:
    """os.<name>, whose calls fail from number `after` on."""
    real, calls = getattr(os, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return call


def test_DS_22_a_folder_is_all_or_nothing(
    source: LocalFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, after in (
        ("open", 1),
        ("open", 3),
        ("write", 0),
        ("rename", 0),
        ("mkdir", 0),
        ("copy_file_range", 0),
    ):
        monkeypatch.setattr(os, name, failing(name, errno.EIO, after))
        with pytest.raises(OutputError):
            publish(folder_plan(source), folder / "out")
        monkeypatch.undo()
        assert os.listdir(folder) == []


def test_DS_04_no_space_is_known_before_anything_is_written(
    source: LocalFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "free", lambda path: 5_000)
    monkeypatch.setattr(os, "open", failing("open", errno.EIO))
    with pytest.raises(OutputError, match=f"needs {len(COPY):,} bytes, but 5,000 are free"):
        publish(copy_plan(source), folder / "out.pt")


def test_FS_03_an_input_whose_name_is_reused_is_read_to_its_end(
    source: LocalFile, folder: Path
) -> None:
    def swap(count: int, _: int) -> None:
        Path(source.path).unlink(missing_ok=True)
        Path(source.path).write_bytes(bytes(len(DATA)))

    publish(copy_plan(source), folder / "out.pt", progress=swap)
    assert (folder / "out.pt").read_bytes() == COPY


def test_a_plan_that_writes_less_than_it_says(
    source: LocalFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "execute", lambda *args, **named: ([{}], []))
    with pytest.raises(OutputError, match="0 bytes were written instead of"):
        publish(copy_plan(source), folder / "out.pt")


# --verify


def flipping(number: int) -> Callable[[int, Any], int]:
    """os.write, with the last bit of the `number`-th write flipped."""
    real, calls = os.write, [0]

    def write(fd: int, data: Any) -> int:
        calls[0] += 1
        changed = bytearray(data)
        changed[-1] ^= calls[0] == number
        return real(fd, changed)

    return write


def all_kinds(source: LocalFile) -> Plan:
    return file_plan(
        b"head",
        Range(source, 0, 200),
        Range(Memory(DATA), 0, len(DATA)),
        Checksummed(Range(source, 7, 60_000), 0),
        Derived(Swap(2), (Range(source, 0, 60_000),), 60_000),
        ChecksumPlaceholder(bytes(8), ((4, 0),)),
        Range(source, 7, 60_000),
    )


@pytest.mark.parametrize(
    "number", [1, 2, 3, 4, 6]
)  # the fifth are the holes, which the sixth fills
def test_DS_23_verify_finds_a_flipped_bit(
    number: int, source: LocalFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", flipping(number))
    with pytest.raises(VerifyError, match="at byte"):
        publish(all_kinds(source), folder / "out.pt", verify=True)
    assert os.listdir(folder) == []


# what is on the disk


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls that matter, in their order; fsync says what was brought to the
    disk."""
    seen: list[str] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            kind = "folder" if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode) else ""
            seen.append(f"{name} {kind}".strip())
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "link", "replace", "rename"):
        note(name)
    return seen


def test_DS_03_durable_outputs_are_on_the_disk_before_they_have_a_name(
    source: LocalFile, folder: Path, calls: list[str]
) -> None:
    publish(copy_plan(source), folder / "new", durable=True)
    assert calls == ["fsync", "link", "fsync folder"]
    calls.clear()
    publish(folder_plan(source), folder / "out", durable=True)
    assert calls == ["fsync"] * 4 + ["fsync folder", "rename", "fsync folder"]


def test_DS_03_a_replaced_file_always_is(source: LocalFile, folder: Path, calls: list[str]) -> None:
    (folder / "out.pt").write_bytes(OLD)
    publish(copy_plan(source), folder / "out.pt", force=True)
    assert calls == ["fsync", "replace", "fsync folder"]


def test_a_new_output_waits_for_no_disk(source: LocalFile, folder: Path, calls: list[str]) -> None:
    publish(copy_plan(source), folder / "out.pt")
    publish(copy_plan(source), folder / "other", force=True)
    publish(folder_plan(source), folder / "out")
    assert calls == ["link", "replace", "rename"]


# others at work


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_where_there_are_no_links(
    code: int, source: LocalFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing("link", code))
    publish(copy_plan(source), folder / "out.pt")
    assert (folder / "out.pt").read_bytes() == COPY

    def somebody_else(count: int, _: int) -> None:
        (folder / "raced").write_bytes(OLD)

    with pytest.raises(OutputExistsError):
        publish(copy_plan(source), folder / "raced", progress=somebody_else)
    assert (folder / "raced").read_bytes() == OLD


def test_DS_14_somebody_else_makes_the_file_meanwhile(source: LocalFile, folder: Path) -> None:
    def somebody_else(count: int, _: int) -> None:
        (folder / "out").mkdir(exist_ok=True)
        (folder / "out" / "theirs").write_bytes(OLD)

    with pytest.raises(OutputExistsError):
        publish(folder_plan(source), folder / "out", progress=somebody_else)
    assert os.listdir(folder / "out") == ["theirs"]
    with pytest.raises(OutputExistsError):
        publish(
            copy_plan(source),
            folder / "file",
            progress=lambda count, total: (folder / "file").touch(),
        )
    assert (folder / "file").read_bytes() == b""


def test_a_file_that_is_rewritten_keeps_the_attributes_of_its_user(
    source: LocalFile, folder: Path
) -> None:
    path = folder / "in.pt"
    path.write_bytes(OLD)
    try:
        os.setxattr(path, "user.note", b"mine")
    except OSError:
        pytest.skip("no extended attributes here")
    own = LocalFile(path)
    publish(file_plan(Range(own, 0, 3)), path, replace_source=True)
    assert path.read_bytes() == OLD[:3] and os.getxattr(path, "user.note") == b"mine"
    publish(copy_plan(source), path, force=True)
    assert os.listxattr(path) == []


def test_a_temporary_that_cannot_be_removed_is_named(
    source: LocalFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is in place by then."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing("unlink", errno.EIO))
        done = publish(copy_plan(source), folder / "out.pt")
    assert (folder / "out.pt").read_bytes() == COPY
    assert [*done.left, "out.pt"] == sorted(os.listdir(folder))
    (folder / done.left[0]).unlink()


# how much


def test_TM_03_an_expand_bomb_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = Derived(view(4, (1 << 40,), (0,)), (Range(Memory(bytes(16)), 0, 16),), 4 << 40)
    monkeypatch.setattr(os, "open", failing("open", errno.EIO))
    with pytest.raises(LimitError) as caught:
        publish(file_plan(bomb), folder / "out.pt")
    assert "allow_expand=True" in (caught.value.hint or "")
    with pytest.raises(OutputError, match=r"needs 4,398,046,511,104 bytes"):
        publish(file_plan(bomb), folder / "out.pt", allow_expand=True)


def test_headers_are_no_expansion(
    source: LocalFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .pth has some hundred bytes for each tensor, however few the elements are."""
    monkeypatch.setattr(preflight, "LIMITS", replace(LIMITS, expansion_free=1000))
    headers = [part for _ in range(50) for part in (bytes(100), Range(source, 0, 2))]
    publish(file_plan(*headers), folder / "out.pt")
    assert (folder / "out.pt").stat().st_size == 5100


def test_TM_04_bytes_that_are_read_twice_count_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Memory(bytes(2 << 20))
    views = [Range(source, start, 1 << 20) for start in range(100)]
    assert preflight.referenced(file_plan(*views)) == (1 << 20) + 99
    with pytest.raises(LimitError):
        publish(file_plan(*views), folder / "out.pt")


def test_what_a_plan_refers_to() -> None:
    one, other = Memory(bytes(1000)), Memory(bytes(1000))
    inflated = Derived(Inflate(), (Range(one, 900, 10),), 5000)
    two = (Range(one, 0, 10), Range(other, 0, 10), Checksummed(Range(one, 5, 10), 0))
    slices = (Derived(Slice(0), (inflated,), 10), Derived(Slice(10), (inflated,), 10))
    assert preflight.referenced(file_plan(b"literal")) == 0
    assert preflight.referenced(file_plan(*two)) == 25
    assert preflight.referenced(file_plan(Range(one, 0, 10), *slices)) == 5010


def test_a_cast_to_wider_elements_is_no_bomb(source: LocalFile, folder: Path) -> None:
    wide = Derived(
        Cast("float8_e4m3fn", "float64"), (Range(source, 0, source.size),), 8 * source.size
    )
    publish(file_plan(wide), folder / "out.pt")
    assert (folder / "out.pt").stat().st_size == 8 * source.size


# disks that fail at the very end, folders that cannot be synced


def no_sync(monkeypatch: pytest.MonkeyPatch, number: int, folders: bool) -> None:
    """From now on fsync fails so, for folders or for files."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) == folders:
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_name_that_may_not_be_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is there, whole, and the error says so."""
    no_sync(monkeypatch, errno.EIO, folders=True)
    with pytest.raises(
        OutputError, match="is written, but may not survive a power failure: Input/output error"
    ) as found:
        publish(file_plan(b"new"), tmp_path / "out.pt", durable=True)
    assert found.value.where == str(tmp_path / "out.pt")
    assert os.listdir(tmp_path) == ["out.pt"] and (tmp_path / "out.pt").read_bytes() == b"new"


def test_bytes_that_may_not_be_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sync(monkeypatch, errno.EIO, folders=False)
    with pytest.raises(OutputError, match="cannot be written: Input/output error"):
        publish(file_plan(b"new"), tmp_path / "out.pt", durable=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL, errno.EBADF])
def test_a_file_system_that_cannot_sync_folders(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_sync(monkeypatch, number, folders=True)
    publish(file_plan(b"new"), tmp_path / "out.pt", durable=True)
    folder = Plan((OutputFile("a", (b"1",)), OutputFile("b", (b"2",))))
    publish(folder, tmp_path / "out", durable=True)
    assert sorted(os.listdir(tmp_path)) == ["out", "out.pt"] and sorted(
        os.listdir(tmp_path / "out")
    ) == ["a", "b"]


def test_nothing_is_synced_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        publishing.sync(str(tmp_path / "missing"))
    monkeypatch.setattr(publishing, "os", SimpleNamespace(name="nt"))
    publishing.sync(str(tmp_path / "missing"))


def test_the_journal_of_a_file_that_is_replaced_goes_with_it(tmp_path: Path) -> None:
    """The edit that it would undo is gone with the file; the journal of another file stays."""
    for name in ("out.pt", "other.pt"):
        (tmp_path / name).write_bytes(b"old")
        Path(journal_path(tmp_path / name)).write_bytes(b"ckptkit journal 1\n")
    publish(file_plan(b"new"), tmp_path / "out.pt", force=True)
    assert (tmp_path / "out.pt").read_bytes() == b"new"
    assert not os.path.lexists(journal_path(tmp_path / "out.pt"))
    assert os.path.lexists(journal_path(tmp_path / "other.pt"))


def test_a_journal_that_somebody_else_began_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "out.pt"
    journal = Path(journal_path(path))
    path.write_bytes(b"old")
    journal.write_bytes(b"one")

    def begin(count: int, total: int) -> None:
        (tmp_path / "another").write_bytes(b"two")
        (tmp_path / "another").replace(journal)

    publish(file_plan(b"new"), path, force=True, progress=begin)
    assert path.read_bytes() == b"new" and journal.read_bytes() == b"two"
