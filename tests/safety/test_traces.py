"""Nothing of the machine is in what is written: no path, no user, no host."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.formats.table import FORMATS
from tests.conftest import COMMAND, ENVIRONMENT

SECRET = "sekrit7391"
WRITABLE = [each.name for each in FORMATS if each.layout is not None and each.readable]
COMMANDS = {
    "strip": ["strip-module", "SRC", "out.pth"],
    "remap": ["remap", "SRC", "out.pth", "--to", "cpu", "--durable", "--verify"],
    "all": ["convert", "SRC", "out.safetensors", "--all"],
    "wrap": ["wrap", "SRC", "out.pth", "--key", "net"],
    "extract": ["extract", "SRC", "out.pth", "--key", "model"],
    "average": ["average", "SRC", "SRC", "out.pth"],
    "join": ["join", "--last-wins", "SRC", "SRC", "out.pth"],
    "recover": ["recover", "SRC", "out.pth"],
    "digest": ["digest", "SRC", "--output", "out.txt"],
    "batch": ["batch", "strip-module", "--into", "out", "SRC"],
    "in place": ["strip-module", "--in-place", "SRC"],
    "rewritten": ["convert", "--in-place", "--cast", "float16", "SRC"],
    **{name: ["convert", "SRC", "out", "--format", name] for name in WRITABLE},
}  # fmt: skip


def isolated(command: list[str]) -> list[str]:
    """The command on a host with a name of its own, where that may be."""
    script = ["unshare", "--uts", "sh", "-c", f'hostname {SECRET}-host && exec "$@"', "sh"]
    allowed = shutil.which("unshare") and shutil.which("hostname")
    works = allowed and subprocess.run([*script, "true"], capture_output=True).returncode == 0
    return [*script, *command] if works else command


@pytest.mark.parametrize("name", COMMANDS)
def test_no_path_user_or_host_is_in_an_output(name: str, small: Path, tmp_path: Path) -> None:
    folder = tmp_path / f"{SECRET}-folder"
    folder.mkdir()
    source = Path(shutil.copy(small, folder / f"{SECRET}-run.pth"))
    source.rename(folder / "run.pth")
    names = dict.fromkeys(("USER", "LOGNAME", "USERNAME", "HOSTNAME"), f"{SECRET}-user")
    words = [str(folder / "run.pth") if word == "SRC" else word for word in COMMANDS[name]]
    env = {**ENVIRONMENT, **names, "HOME": str(folder), "TMPDIR": str(folder), "PWD": str(folder)}
    done = subprocess.run(
        isolated([*COMMAND, *words]), cwd=folder, env=env, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    own = () if "--in-place" in words else (folder / "run.pth",)
    written = [path for path in folder.rglob("*") if path.is_file() and path not in own]
    assert written
    for path in written:
        data = path.read_bytes()
        host = socket.gethostname()
        for secret in (SECRET, str(tmp_path), sys.prefix, host if len(host) > 5 else SECRET):
            for code in ("utf-8", "utf-16-le"):
                assert secret.encode(code) not in data, (path, secret)
        assert SECRET not in path.name
