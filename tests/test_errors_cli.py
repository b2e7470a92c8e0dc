"""Wrong input gives one clear line, what to do next, and the right exit code; nothing is left
behind or changed."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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
        "script.pt": (
            "script/data.pkl",
            "script/constants.pkl",
            "script/code/__torch__.py",
            "script/version",
        ),
        "readme.zip": ("readme.txt", "docs/more.txt"),
        "packed.zip": ("run/readme.txt", "run/good.pth"),
        "arrays.npz": ("a.npy", "b.npy"),
    }
    for archive, names in archives.items():
        with zipfile.ZipFile(tmp_path / archive, "w") as file:
            for name in names:
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
        ("rename good.pth out.pth --sub ([=x", 2, ["(["]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_input(command: str, code: int, phrases: list[str], folder: Path, run: Run) -> None:
    before = listing(folder)
    check_said(run(*command.split(), cwd=folder), code, *phrases)
    assert listing(folder) == before


def test_another_wrapper_than_the_one_to_strip_is_1(folder: Path, run: Run) -> None:
    done = run("strip-module", FIXTURES / "torch-zip/orig_mod.pth", "out.pth", cwd=folder)
    assert done.code == 1
    assert "no key starts with 'module.'" in done.stderr and "--prefix _orig_mod." in done.stderr
    assert not (folder / "out.pth").exists()


def test_every_cut_is_refused(folder: Path, run: Run) -> None:
    for step in range(1, 16):
        (folder / "cut.pth").write_bytes(GOOD[: len(GOOD) * step // 16])
        check_said(run("inspect", "cut.pth", cwd=folder), 3, "cut.pth")


def test_names_from_a_file_cannot_drive_the_terminal(folder: Path, run: Run) -> None:
    torch.save({"\x1b[2Jmodule.w": torch.zeros(1), "a\nb": torch.zeros(1)}, folder / "escape.pth")
    for option in ([], ["--flat"], ["--tree"], ["--json"]):
        done = run("inspect", "escape.pth", *option, cwd=folder)
        assert done.code == 0
        assert "\x1b" not in done.stdout + done.stderr


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
    command = [*COMMAND, "remap", "good.pth", "full/out.pth", "--to", "cpu", "--force"]
    isolated = ["unshare", "-rm", "sh", "-c", script, "sh", old.decode(), *command]
    if subprocess.run(isolated, cwd=folder, env=ENVIRONMENT, capture_output=True).returncode:
        pytest.skip("may not mount a small filesystem here")
    code, said = int((folder / "code").read_text()), (folder / "said").read_text()
    check_said(Done(code, "", said), 4, "full/out.pth", "free")
    assert (folder / "listing").read_text().split() == ["ballast", *(["out.pth"] if old else [])]
    assert (folder / "kept").read_bytes() == old


def test_a_disk_that_fills_up_meanwhile(folder: Path) -> None:
    """A limit on the size of files, which nobody can see in advance."""
    resource = pytest.importorskip("resource")
    (folder / "out.pth").write_bytes(b"what was there")
    before = listing(folder)
    command = [*COMMAND, "remap", "good.pth", "out.pth", "--to", "cpu", "--force"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(
        command, capture_output=True, cwd=folder, env=ENVIRONMENT, preexec_fn=limit
    )
    check_said(Done(done.returncode, "", done.stderr.decode()), 4, "out.pth", "large")
    assert listing(folder) == before


def test_a_full_pipe_of_output_is_said(folder: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ckptkit", "inspect", "good.pth"]
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            cwd=folder,
            env=ENVIRONMENT,
        )
    check_said(Done(done.returncode, "", done.stderr), 4, "standard output")


def test_a_closed_pipe_ends_quietly(folder: Path) -> None:
    torch.save({f"layer.{i}.w{i}": torch.zeros(1) for i in range(3000)}, folder / "long.pth")
    command = [*COMMAND, "inspect", "--flat", "long.pth"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env=ENVIRONMENT
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(10)
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 141


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
    command = [
        sys.executable,
        "-c",
        INTERRUPT,
        "remap",
        "large.pth",
        "out.pth",
        "--to",
        "cpu",
        "--force",
        sent,
    ]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", cwd=folder, env=ENVIRONMENT, timeout=60
    )
    check_said(Done(done.returncode, done.stdout, done.stderr), 130, "interrupted")
    assert listing(folder) == before


def test_an_interrupt_while_modules_are_imported(tmp_path: Path) -> None:
    """It ends the process without a traceback."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [*COMMAND, "formats"],
        capture_output=True,
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.skipif(sys.platform != "linux", reason="others keep a folder that is in use")
@pytest.mark.parametrize("path", ["good.pth", "out.pth", None])
def test_the_working_directory_was_removed(path: str | None, folder: Path) -> None:
    """Whole paths need none."""
    (folder / "gone").mkdir()
    source, target = folder / "good.pth", folder / "out.pth"
    words = {"good.pth": [path, target], "out.pth": [source, path], None: [source, target]}[path]
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD" && exec "$0" "$@"', *COMMAND, "convert", *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        cwd=folder / "gone",
        env=ENVIRONMENT,
        timeout=60,
    )
    if path is None:
        assert done.returncode == 0 and target.exists()
    else:
        check_said(
            Done(done.returncode, done.stdout, done.stderr), 3, "working directory was removed"
        )


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
