"""Others at work on the same files: who changes what is read, writes what is written, or reads it
meanwhile."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckptkit
from ckptkit.api import convert
from ckptkit.cli import main
from ckptkit.core.bytesource import LocalFile, journal_path
from ckptkit.core.errors import CkptkitError, InputChangedError, UsageError, VerifyError
from ckptkit.core.options import Options
from ckptkit.edits.keys import rename
from ckptkit.publish import in_place, publish
from tests.conftest import COMMAND, Run
from tests.safety.injection import ALIKE, held, leftovers, needs_strace, snapshot
from tests.safety.works import OLD, WORKS, make_source, outcomes

CHANGED = 3  # the input is refused


# what is read changes


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def truncate(path: Path) -> None:
    os.truncate(path, 70_000)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def replace(path: Path) -> None:
    path.with_name("newer").write_bytes(b"saved meanwhile")
    path.with_name("newer").rename(path)


@pytest.mark.parametrize("change", [append, truncate, rewrite, replace])
@pytest.mark.parametrize("name", ["new", "rewritten"])
def test_DS_17_an_input_that_changes(
    change: Callable[[Path], None], name: str, small: Path, tmp_path: Path
) -> None:
    """A running process, held at its first copy. What somebody else has put at the name is never
    replaced."""
    needs_strace()
    work = WORKS[name]
    expected = outcomes(work, tmp_path / "whole", small)
    folder = work.prepare(tmp_path / "changed", small)
    with held(work.arguments, folder) as child:
        change(folder / "run.pth")
        theirs = (folder / "run.pth").read_bytes()
    _, said = child.communicate(timeout=60)
    assert (folder / "run.pth").read_bytes() == theirs and leftovers(folder) == []
    if (name, change) == ("new", replace):  # what was opened is read to its end
        assert child.returncode == 0 and snapshot(folder)["out.pth"] == expected.after["out.pth"]
    else:
        assert (child.returncode, work.in_place or not (folder / "out.pth").exists()) == (
            CHANGED,
            True,
        )
        assert b"error: run.pth: " in said


def test_DS_28_the_same_size_and_time(small: Path, tmp_path: Path) -> None:
    """A rewrite at once is seen by its time, also where the time is set back. --verify compares
    first."""
    path = Path(shutil.copy(small, tmp_path / "run.pth"))
    os.utime(path, ns=(1, 1))  # long before the rewrite, also where the clock is coarse

    def meddle(written: int, of: int) -> None:
        with path.open("r+b") as file:
            file.seek(70_000)
            file.write(b"other")

    for change in (meddle, ever_other(path)):
        with pytest.raises(InputChangedError):
            convert(path, tmp_path / "out.pth", progress=change)
        shutil.copy(small, path)
    with pytest.raises(VerifyError):
        convert(path, tmp_path / "out.pth", verify=True, progress=ever_other(path))
    assert os.listdir(tmp_path) == ["run.pth"]


def ever_other(path: Path) -> Callable[[int, int], None]:
    """Writes other bytes each time, and sets the time back."""
    count = [0]

    def change(written: int, of: int) -> None:
        info = path.stat()
        count[0] += 1
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(bytes([count[0]]) * 10)
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))

    return change


# What reads all values of x.pth. The commands print nothing but an error.
LOOKS: dict[str, list[str] | Callable[[str], object]] = {
    "stats": ["stats", "x.pth"], "stats --json": ["stats", "--json", "x.pth"],
    "stats --csv": ["stats", "--csv", "x.pth"], "digest": ["digest", "x.pth"],
    "digest -o": ["digest", "x.pth", "-o", "out"], "verify": ["verify", "--values", "x.pth"],
    "diff": ["diff", "--values", "x.pth", "y.pth"],
    "diff, other": ["diff", "--values", "y.pth", "x.pth"], "show": ["show", "x.pth", "w"],
    "show --json": ["show", "--json", "x.pth", "w"], "show --nan": ["show", "--nan", "x.pth"],
    "report": ["report", "--values", "x.pth", "-o", "out.html"],
    "check": ["check", "x.pth", "--expect", "* finite"],
    "inspect": ["inspect", "--json", "--digest", "x.pth"],
    "scan": ["scan", "x.pth"], "doctor": ["doctor", "x.pth"], "ckptkit.stats": ckptkit.stats,
    "ckptkit.inspect": lambda path: ckptkit.inspect(path, digest=True),
    "ckptkit.digest": ckptkit.digest, "ckptkit.verify": ckptkit.verify,
    "ckptkit.diff": lambda path: ckptkit.diff("y.pth", path, values=True),
    "ckptkit.doctor": ckptkit.doctor, "ckptkit.load": lambda path: ckptkit.load(path, mmap=False),
    "ckptkit.load_into": lambda path: ckptkit.load_into(Small(), path),
}  # fmt: skip


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(500, 41))


@pytest.fixture
def looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[object, str]]:
    """``looked_at("stats", change)``: the exit code or code of the error, where `change` is applied
    to x.pth after the last time that it is read."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.arange(20_500.0).reshape(500, 41)}, "x.pth")
    shutil.copy("x.pth", "y.pth")
    count, last, changes = [0], [0], [append]
    for name in ("read", "read_into", "read_rows"):
        monkeypatch.setattr(LocalFile, name, _then(getattr(LocalFile, name), count, last, changes))

    def once(look: list[str] | Callable[[str], object]) -> tuple[object, str]:
        count[0] = 0
        if not isinstance(look, list):
            try:
                look("x.pth")
            except CkptkitError as error:
                return error.code, ""
            return 0, ""
        done = CliRunner().invoke(main, look)
        return done.exit_code, done.stdout

    def call(name: str, change: Callable[[Path], None]) -> tuple[object, str]:
        last[0], changes[0] = 0, change
        assert once(LOOKS[name])[0] in (0, 1)
        Path("out").unlink(missing_ok=True), Path("out.html").unlink(missing_ok=True)
        last[0] = count[0]
        return once(LOOKS[name])

    return call


def _then(
    read: Callable[..., object],
    count: list[int],
    last: list[int],
    changes: list[Callable[[Path], None]],
) -> Callable[..., object]:
    def reads(self: LocalFile, *args: object) -> object:
        found = read(self, *args)
        if os.path.basename(self.name) == "x.pth":
            count[0] += 1
            if count[0] == last[0]:
                changes[0](Path("x.pth"))
        return found

    return reads


def set_back(path: Path) -> None:
    """Write other bytes, and set the time back."""
    info = path.stat()
    time.sleep(0.02)  # the clock of file systems is coarse
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(b"other")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("name", LOOKS)
def test_what_changed_is_not_reported_on(
    name: str, looked_at: Callable[..., tuple[object, str]]
) -> None:
    code, printed = looked_at(name, set_back)
    assert code == (3 if isinstance(LOOKS[name], list) else InputChangedError.code)
    assert '"error"' in printed or not printed
    assert sorted(os.listdir()) == ["x.pth", "y.pth"]


def link(path: Path) -> None:
    os.link(path, "kept")


def move(path: Path) -> None:
    path.rename("kept")


@pytest.mark.parametrize("change", [link, move, replace, lambda path: path.chmod(0o600)])
@pytest.mark.parametrize("name", ["stats", "ckptkit.digest"])
def test_another_name_or_mode_is_no_change(
    name: str, change: Callable[[Path], None], looked_at: Callable[..., tuple[object, str]]
) -> None:
    """A trainer replaces its last checkpoint by a rename: what was opened is read to its end."""
    Path("x.pth").chmod(0o644)
    assert looked_at(name, change)[0] == 0


def test_DS_13_the_output_among_the_inputs(small: Path, tmp_path: Path) -> None:
    """A shard is not replaced by what is read from it, nor a folder by what is made of it."""
    shards = tmp_path / "shards"
    with closing(ckptkit.open(small)) as checkpoint:
        ckptkit.save(checkpoint, shards, format="sharded", options=Options(shard_size=60_000))
    before = snapshot(shards)
    inside = [name for name in before if name.endswith("-00003.safetensors")]
    assert len(inside) == 3
    for name in inside:
        with pytest.raises(UsageError, match="is the input file"):
            convert(shards, shards / name, force=True, format="safetensors")
    with pytest.raises(UsageError, match="is a folder and not empty"):
        convert(shards, shards, force=True, format="sharded")
    assert snapshot(shards) == before
    convert(shards, shards / "whole.pth")
    assert snapshot(shards).items() >= before.items()


@pytest.mark.parametrize(
    "spelling", ["run.pth", "./run.pth", "link.pth", "hard.pth", "../run/run.pth"]
)
def test_DS_12_nothing_is_read_of_it_but_it_is_the_input(
    spelling: str, tmp_path: Path, run: Run
) -> None:
    """A checkpoint without tensors is all in memory when it is written, and not to be overwritten
    all the same."""
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"epoch": 3, "name": "x"}, folder / "run.pth")
    (folder / "link.pth").symlink_to("run.pth")
    os.link(folder / "run.pth", folder / "hard.pth")
    before = snapshot(folder)
    done = run("remap", "run.pth", spelling, "--to", "cpu", "--force", cwd=folder)
    assert (done.code, snapshot(folder)) == (2, before), done


# what is written is written by others too


@pytest.mark.parametrize("force", [False, True])
def test_DS_14_DS_20_processes_that_write_one_file(force: bool, tmp_path: Path) -> None:
    sources = [make_source(tmp_path / f"{i}.pth", 1 << 17, i + 1) for i in range(4)]
    valid = []
    for source in sources:
        convert(source, tmp_path / "whole.pth", force=True)
        valid.append((tmp_path / "whole.pth").read_bytes())
    for turn in range(2):
        out = tmp_path / str(turn) / "out.pth"
        out.parent.mkdir()
        command = [*COMMAND, "convert", *["--force"] * force]
        running = [
            subprocess.Popen([*command, str(each), str(out)], env=ALIKE, **QUIET)
            for each in sources
        ]
        codes = [child.wait() for child in running]
        assert sorted(codes) == ([0] * 4 if force else [0, 2, 2, 2])
        assert out.read_bytes() in (valid if force else [valid[codes.index(0)]])
        assert os.listdir(out.parent) == ["out.pth"]


QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@pytest.mark.parametrize("kind", ["patched", "rewritten"])
def test_DS_20_processes_that_edit_one_file_in_place(kind: str, tmp_path: Path) -> None:
    """A process that reports success has made its edit, and no other has undone it."""
    path = make_source(tmp_path / "run.pth", 1 << 14, 6)
    command = [
        *COMMAND, "convert" if kind == "rewritten" else "rename", str(path), "--in-place", "--sub",
    ]  # fmt: skip
    edits = [f"^module\\.{i}\\.weight$=edited.{i}" for i in range(6)]
    running = [subprocess.Popen([*command, edit], env=ALIKE, **QUIET) for edit in edits]
    done = [i for i, child in enumerate(running) if child.wait() == 0]
    assert {child.returncode for child in running} <= {0, 3, 4} and done
    with closing(ckptkit.open(path)) as checkpoint:
        assert [i for i in range(6) if f"edited.{i}" in checkpoint.weights] == done
    assert torch.load(path, weights_only=True)["model"].keys() >= {f"edited.{i}" for i in done}
    assert os.listdir(tmp_path) == ["run.pth"]


def test_DS_20_nothing_replaces_a_file_between_the_check_and_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads rewrite one file, and both have read it before one of them replaces it."""
    path = make_source(tmp_path / "run.pth", 1 << 14, 2)
    together, check = threading.Barrier(2), publish.check_still_there

    def slow(*args: Any) -> None:
        check(*args)
        time.sleep(0.2)

    monkeypatch.setattr(publish, "check_still_there", slow)
    monkeypatch.setattr(publish, "check_space", lambda *_: together.wait(20))
    failures: list[InputChangedError] = []

    def edit(number: int) -> None:
        try:
            step = partial(rename, sub=[(f"^module.{number}.weight$", f"edited.{number}")])
            convert(path, None, step, in_place=True, keep_format=False)
        except InputChangedError as error:
            failures.append(error)

    threads = [threading.Thread(target=edit, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with closing(ckptkit.open(path)) as checkpoint:
        edited = [name for name in checkpoint.weights if name.startswith("edited.")]
    assert len(edited) == 1 and len(failures) == 1


def test_DS_21_readers_see_one_file_or_the_other(tmp_path: Path) -> None:
    sources = [make_source(tmp_path / f"{i}.pth", 1 << 14, i + 1) for i in range(2)]
    out, valid = tmp_path / "out.pth", []
    for source in (*sources, sources[0]):
        convert(source, out, force=True)
        valid.append(out.read_bytes())
    reads: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            data = out.read_bytes()
            reads.append(valid.index(data) if data in valid else -1)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    turns = 0
    while turns < 60 or len(reads) < 500:
        convert(sources[turns % 2], out, force=True)
        turns += 1
    stop.set()
    for reader in readers:
        reader.join()
    assert set(reads) == {0, 1}


# what is left of others


def test_DS_29_what_killed_runs_have_left(small: Path, tmp_path: Path) -> None:
    from ckptkit.publish import publish

    out, gone = tmp_path / "out.pth", gone_process()
    here = publish._where() or pytest.skip("no telling here which process is alive")
    ours = tmp_path / f".out.pth.ckptkit-{gone}-{here}00000001.tmp"
    journal = tmp_path / f"..out.pth.ckptkit-journal.ckptkit-{gone}-{here}00000001.tmp"
    kept = {
        "alive": f".out.pth.ckptkit-{os.getpid()}-{here}00000002.tmp",
        "init": f".out.pth.ckptkit-1-{here}00000002.tmp",
        "other output": f".other.pth.ckptkit-{gone}-{here}00000003.tmp",
        "longer": f".out.pth.pth.ckptkit-{gone}-{here}00000003.tmp",
        "no process": f".out.pth.ckptkit-{'9' * 30}-{here}00000003.tmp",
        "new, elsewhere": f".out.pth.ckptkit-{gone}-0123456700000004.tmp",
    }
    old = tmp_path / f".out.pth.ckptkit-{gone}-0123456700000005.tmp"
    for path in (ours, journal, old, *map(tmp_path.joinpath, kept.values())):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    done = convert(small, out)
    assert not ours.exists() and not journal.exists()
    assert {*os.listdir(tmp_path)} == {"out.pth", old.name, *kept.values()}
    assert done.warnings == (
        f"{old.name} is a stale temporary file; delete it if no other machine is writing this file",
    )


def test_DS_29_a_folder_that_a_killed_run_has_left(small: Path, tmp_path: Path) -> None:
    from ckptkit.publish import publish

    here = publish._where() or pytest.skip("no telling here which process is alive")
    left = tmp_path / f".out.ckptkit-{gone_process()}-{here}00000001.tmp"
    left.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_bytes(OLD)
    (left / "model-00001.safetensors").write_bytes(b"half")
    (left / "link").symlink_to(tmp_path / "elsewhere")
    convert(small, tmp_path / "out", format="sharded")
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out"]
    assert (tmp_path / "elsewhere" / "kept").read_bytes() == OLD


def test_DS_29_what_belongs_to_others_stays(small: Path, tmp_path: Path) -> None:
    from ckptkit.publish import publish

    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    here = publish._where() or pytest.skip("no telling here which process is alive")
    theirs = tmp_path / f".out.pth.ckptkit-{gone_process()}-{here}00000001.tmp"
    theirs.write_bytes(b"half")
    os.chown(theirs, 12345, 12345)
    convert(small, tmp_path / "out.pth")
    assert theirs.exists()


def gone_process() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as child:
        pass
    return child.pid


def test_DS_29_an_edit_that_was_left_unfinished_goes_with_the_file(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal could only undo it in the file that has been replaced, and would stand in the way
    of the new one."""
    path = Path(shutil.copy(small, tmp_path / "run.pth"))
    with monkeypatch.context() as during:
        for name in ("_undo", "_remove"):
            during.setattr(in_place, name, lambda *_: None)
        during.setattr(in_place, "_rewrite", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(path, None, lambda ck: ckptkit.strip_prefix(ck, "module."), in_place=True)
    assert os.path.exists(journal_path(path))
    convert(small, path, force=True)
    assert os.listdir(tmp_path) == ["run.pth"]
    ckptkit.open(path).close()


# the rest of the machine


def test_DS_19_no_memory(large: Path, tmp_path: Path) -> None:
    """If memory does not suffice, there is no output."""
    work = WORKS["replaced"]
    expected = outcomes(work, tmp_path / "whole", large)
    codes = []
    for at, limit in enumerate(range(30, 300, 30)):
        folder = work.prepare(tmp_path / str(at), large)

        def limited(bytes_: int = limit << 20) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))

        done = subprocess.run(
            [*COMMAND, *work.arguments], cwd=folder, env=ALIKE, preexec_fn=limited, **QUIET
        )
        codes.append(done.returncode)
        assert expected.check(folder, killed=done.returncode < 0) == (
            "old" if done.returncode else "new"
        )
        if not done.returncode:
            break
    assert codes[-1] == 0


def test_DS_25_a_report_that_cannot_be_printed(small: Path, tmp_path: Path) -> None:
    """The output is there, whole; that its report is not is an error of its own."""
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    for name in ("replaced", "patched"):
        work = WORKS[name]
        expected = outcomes(work, tmp_path / f"{name}-whole", small)
        folder = work.prepare(tmp_path / name, small)
        with open("/dev/full", "w") as full:
            command = [*COMMAND, *work.arguments, "--json"]
            done = subprocess.run(
                command, cwd=folder, env=ALIKE, stdout=full, stderr=subprocess.PIPE
            )
        assert (done.returncode, done.stderr) == (
            4,
            b"error: standard output: No space left on device\n",
        )
        assert expected.check(folder, killed=False) == "new"
