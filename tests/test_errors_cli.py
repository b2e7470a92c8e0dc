"""Wrong input gives one clear line, what to do next, and the right exit code; nothing is left
behind or changed."""

from __future__ import annotations

import gzip
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import COMMAND, ENVIRONMENT, ROOT, Done, Run
from tests.hints import commands_in

FIXTURES = ROOT / "fixtures"
GOOD = (FIXTURES / "torch-zip/dp_wrapped_cuda1.pth").read_bytes()
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that are wrong, each in its own way, and a good one."""
    weight = torch.arange(3.0)
    files = {
        "good.pth": GOOD,
        "there.pth": b"was here before",
        "empty.pth": b"",
        "text.pth": b"just some text\n" * 20,
        "pointer.pth": POINTER,
        "page.pth": b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n",
        "denied.pth": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
        "list.json": b"[]",
        "nested.json": b'{"a": {"b": "c"}}',
        "foreign.pth": "ein Prüfstand, kein Prüfpunkt\n".encode() * 20,
        "packed.pth": gzip.compress(gzip.compress(GOOD)),
        "cut.pth": GOOD[:-100],
        "cut.safetensors": (FIXTURES / "safetensors/net.safetensors").read_bytes()[:-1],
        "legacy-cut.pth": (FIXTURES / "torch-legacy/dp_wrapped_cuda1.pth").read_bytes()[:-1],
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.txt").write_text("nothing to see")
    os.link(tmp_path / "good.pth", tmp_path / "linked.pth")
    os.symlink("good.pth", tmp_path / "symbolic.pth")
    os.symlink("gone.pth", tmp_path / "dangling.pth")
    torch.save({"first": {"w": weight}, "second": {"w": weight}}, tmp_path / "ambiguous.pth")
    torch.save({"module.w": weight, "w": weight}, tmp_path / "colliding.pth")
    archives = {
        "script.pt": "script/data.pkl script/constants.pkl script/code/__torch__.py script/version",
        "readme.zip": "readme.txt docs/more.txt",
        "packed.zip": "run/readme.txt run/good.pth",
        "arrays.npz": "a.npy b.npy",
    }
    for archive, names in archives.items():
        with zipfile.ZipFile(tmp_path / archive, "w") as file:
            for name in names.split():
                file.writestr(name, b"3\n")
    return tmp_path


def listing(folder: Path) -> dict[str, str]:
    """Every file and the digest of its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def check_said(done: Done, code: int, *phrases: str) -> None:
    """One line that says what is wrong, perhaps one with what to do, and no traceback."""
    assert done.code == code, done.stderr
    lines = done.stderr.lstrip("\n").splitlines()  # an interrupted terminal shows ^C
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), done.stderr
    assert "Traceback" not in done.stderr
    for phrase in phrases:
        assert phrase.lower() in done.stderr.lower(), done.stderr


@pytest.mark.parametrize(
    ("command", "code", "phrases"),
    [
        ("inspect nowhere.pth", 3, ["nowhere.pth", "does not exist"]),
        ("inspect god.pth", 3, ["did you mean good.pth?"]),
        ("inspect missing/good.pth", 3, ["there is no folder"]),
        ("inspect dangling.pth", 3, ["link to gone.pth"]),
        ("inspect http://127.0.0.1:9/good.pth", 3, ["its host refuses the connection"]),
        ("inspect folder", 3, ["folder"]),
        ("inspect empty.pth", 3, ["empty.pth", "is empty"]),
        ("inspect text.pth", 3, ["text.pth", "text"]),
        ("inspect pointer.pth", 3, ["pointer.pth", "git lfs pull"]),
        ("inspect page.pth", 3, ["page.pth", "html"]),
        ("inspect denied.pth", 3, ["denied.pth", "xml"]),
        ("inspect foreign.pth", 3, ["foreign.pth", "is a text file"]),
        ("inspect readme.zip", 3, ["readme.zip", "zip archive without a data.pkl"]),
        ("inspect packed.zip", 3, ["packed.zip", "unpack it first: `unzip packed.zip`"]),
        ("inspect arrays.npz", 3, ["arrays.npz", "array 'a'"]),
        ("inspect packed.pth", 3, ["packed.pth", "compressed twice", "with gunzip"]),
        ("inspect cut.pth", 3, ["cut.pth", "cut"]),
        ("inspect cut.safetensors", 3, ["cut.safetensors", "cut"]),
        ("inspect legacy-cut.pth", 3, ["legacy-cut.pth", "cut"]),
        ("inspect script.pt", 3, ["script.pt", "pickle"]),
        ("inspect", 2, []),
        ("inspect --nonsense good.pth", 2, ["--nonsense"]),
        ("nonsense good.pth", 2, ["nonsense"]),
        ("convert good.pth out.xyz", 2, ["out.xyz", ".safetensors"]),
        ("convert good.pth out", 2, ["out"]),
        ("convert good.pth out.pth --format nonsense", 2, ["nonsense"]),
        ("convert good.pth out.pth --cast nonsense", 2, ["nonsense"]),
        ("convert ambiguous.pth out.safetensors", 3, ["first", "second", "--key"]),
        ("extract good.pth out.pth --key nothing", 2, ["nothing", "model"]),
        ("strip-module ambiguous.pth out.pth", 3, ["--key"]),
        ("inspect good.pth --key nothing", 2, ["good.pth", "nothing", "model"]),
        ("diff ambiguous.pth good.pth", 3, ["ambiguous.pth", "--key"]),
        ("extract good.pth out.pth --key epoch", 2, ["single int", "inspect"]),
        ("strip-module colliding.pth out.pth", 3, ["colliding.pth", "module.w", "--drop"]),
        ("strip-module empty.pth out.pth", 3, ["empty.pth"]),
        ("remap good.pth out.pth", 2, ["--to"]),
        ("remap good.pth out.pth --device nonsense", 2, ["nonsense"]),
        ("remap good.pth", 2, ["DST"]),
        ("remap good.pth there.pth --to cpu", 2, ["there.pth", "--force"]),
        ("remap good.pth good.pth --to cpu", 2, ["good.pth", "--in-place"]),
        ("remap good.pth linked.pth --to cpu --force", 2, ["linked.pth"]),
        ("remap good.pth symbolic.pth --to cpu --force", 2, ["symbolic.pth"]),
        ("remap good.pth nowhere/out.pth --to cpu", 4, ["nowhere"]),
        ("remap good.pth text.pth/out.pth --to cpu", 4, ["text.pth/out.pth"]),
        ("diff good.pth nowhere.pth", 3, ["nowhere.pth"]),
        ("diff good.pth --model nonsense", 3, ["nonsense"]),
        ("diff good.pth --model nowhere.py:Net", 3, ["nowhere.py"]),
        ("rename good.pth out.pth --map nowhere.json", 2, ["nowhere.json"]),
        ("rename good.pth out.pth --map list.json", 2, ["list.json"]),
        ("rename good.pth out.pth --map nested.json", 2, ["nested.json"]),
        ("rename good.pth out.pth --sub ([=x", 2, ["(["]),
        ("rename good.pth out.pth --sub 'no equals'", 2, ["REGEX=REPLACEMENT"]),
        ("rename good.pth out.pth", 2, ["--sub"]),
        ("remap good.pth out.pth --to cpu --device cuda:1=cpu", 2, ["--to"]),
        ("remap good.pth out.pth --to gpu", 2, ["gpu"]),
        ("strip-module --in-place good.pth out.pth", 2, ["remove DST"]),
        ("strip-module --force good.pth good.pth", 2, ["good.pth"]),
        ("average good.pth out.pth", 2, ["name two or more SRC"]),
        ("convert --in-place --format safetensors good.pth", 2, ["has the suffix of torch-zip"]),
        ("wrap good.pth out.safetensors --key model", 2, ["--all keeps the entry"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_input(command: str, code: int, phrases: list[str], folder: Path, run: Run) -> None:
    before = listing(folder)
    check_said(run(*shlex.split(command), cwd=folder), code, *phrases)
    assert listing(folder) == before


def test_every_cut_is_refused(folder: Path, run: Run) -> None:
    for step in range(1, 16):
        (folder / "cut.pth").write_bytes(GOOD[: len(GOOD) * step // 16])
        check_said(run("inspect", "cut.pth", cwd=folder), 3, "cut.pth")


@pytest.mark.parametrize("old", [b"", b"what was there"], ids=["new", "replaced"])
def test_a_full_disk_leaves_the_old_file(old: bytes, folder: Path) -> None:
    """On a filesystem of 64 KiB, of which 60 are taken."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare, to mount a small filesystem of its own")
    script = """
        mount -t tmpfs -o size=64k none full 2>/dev/null || exit 77
        head -c 57344 /dev/zero > full/ballast
        [ -z "$1" ] || printf %s "$1" > full/out.pth
        shift; "$@" 2> said; echo $? > code
        ls full > listing; cat full/out.pth > kept 2>/dev/null; exit 0
    """
    (folder / "full").mkdir()
    command = [*COMMAND, *["remap", "good.pth", "full/out.pth", "--to", "cpu", "--force"]]
    if ended(["unshare", "-rm", "sh", "-c", script, "sh", old.decode(), *command], folder).code:
        pytest.skip("may not mount a small filesystem here")
    code, said = int((folder / "code").read_text()), (folder / "said").read_text()
    check_said(Done(code, "", said), 4, "full/out.pth", "free")
    assert (folder / "listing").read_text().split() == ["ballast", *(["out.pth"] if old else [])]
    assert (folder / "kept").read_bytes() == old


def ended(command: list[str], folder: Path, **how: Any) -> Done:
    """Run a command in a process of its own."""
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        cwd=folder,
        timeout=60,
        **{"env": ENVIRONMENT, **how},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_disk_that_fills_up_meanwhile(folder: Path) -> None:
    """A limit on the size of files, which nobody can see in advance."""
    resource = pytest.importorskip("resource")
    (folder / "out.pth").write_bytes(b"what was there")
    before = listing(folder)
    command = [*COMMAND, *["remap", "good.pth", "out.pth", "--to", "cpu", "--force"]]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    check_said(ended(command, folder, preexec_fn=limit), 4, "out.pth", "large")
    assert listing(folder) == before


# Sends the process a signal when a copy of tensor bytes begins, then goes on with it.
INTERRUPT = """
import os, signal, sys
copy = os.preadv
def interrupted(*args, **kwargs):
    os.kill(os.getpid(), getattr(signal, sent))
    return copy(*args, **kwargs)
os.preadv = interrupted
sent = sys.argv.pop()
from ckptkit.cli import main
main()
"""


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="needs os.preadv, to interrupt a copy")
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("old", [b"", b"what was there"], ids=["new", "replaced"])
def test_an_interrupt_leaves_the_old_file(old: bytes, sent: str, folder: Path) -> None:
    torch.save({f"w{i}": torch.full((50_000,), float(i)) for i in range(8)}, folder / "large.pth")
    if old:
        (folder / "out.pth").write_bytes(old)
    before = listing(folder)
    words = ["remap", "large.pth", "out.pth", "--to", "cpu", "--force"]
    command = [sys.executable, "-c", INTERRUPT, *words, sent]
    check_said(ended(command, folder), 130, "interrupted")
    assert listing(folder) == before


def test_an_interrupt_while_modules_are_imported(tmp_path: Path) -> None:
    """It ends the process without a traceback."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = ended([*COMMAND, "formats"], tmp_path, env={**ENVIRONMENT, "PYTHONPATH": path})
    assert done == (130, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="others keep a folder that is in use")
@pytest.mark.parametrize("path", ["good.pth", "out.pth", None])
def test_the_working_directory_was_removed(path: str | None, folder: Path) -> None:
    """Whole paths need none."""
    (folder / "gone").mkdir()
    words = [name if name == path else str(folder / name) for name in ("good.pth", "out.pth")]
    script = ["sh", "-c", 'rmdir "$PWD" && exec "$0" "$@"']
    done = ended([*script, *COMMAND, "convert", *words], folder / "gone")
    if path is None:
        assert done.code == 0 and (folder / "out.pth").exists()
    else:
        check_said(done, 3, "working directory was removed")


class _Called:
    """An object that no output holds."""

    def __reduce__(self) -> object:
        return os.getcwd, ()


def test_recover_names_no_command_that_a_cut_file_fails(tmp_path: Path, run: Run) -> None:
    torch.save({"w": torch.ones(5000), "own": _Called()}, tmp_path / "whole.pth")
    path = tmp_path / "cut.pth"
    path.write_bytes((tmp_path / "whole.pth").read_bytes()[:-300])
    done = run("recover", path, tmp_path / "out.pth")
    check_said(done, 3, "getcwd", "hint: --objects drop drops such values")
    assert [run(*words[1:]).code for words in commands_in(done.stderr)] == []
    assert run("recover", path, tmp_path / "out.pth", "--objects", "drop").code == 0
