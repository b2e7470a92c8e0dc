"""The program: help, exit codes, closed and full outputs, what is imported."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit as package
from ckptkit import cli
from ckptkit.core.errors import CkptkitError, OutputError, UsageError
from tests.cli.conftest import Ckptkit
from tests.conftest import COMMAND, ENVIRONMENT, Run

EXAMPLES = ["inspect small.pth", "inspect --json small.pth", "--help", "inspect --help", "formats"]


@pytest.fixture(autouse=True)
def small(here: None) -> None:
    torch.save({"module.w": torch.zeros(2)}, "small.pth")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(ckptkit: Ckptkit, name: str) -> None:
    for option in ("-h", "--help"):
        result = ckptkit(name, option, code=0)
        assert f"  Example: ckptkit {name}" in result.stdout
        assert "\\b" not in result.stdout


def test_help_lists_the_commands_in_full(ckptkit: Ckptkit) -> None:
    lines = ckptkit("--help", code=0).stdout.partition("Look:\n")[2].splitlines()
    listed = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert [words[0] for words in listed] == list(cli.COMMANDS)
    assert not any(words[1].endswith("...") for words in listed)
    titles = [line for line in lines if line and line[0] != " "]
    assert titles == [f"{title}:" for title in [*cli.GROUPS][1:]]


def test_help_names_a_topic_that_exists(ckptkit: Ckptkit) -> None:
    listed = {line.split()[0] for line in ckptkit("help").stdout.splitlines()[1:]}
    assert {*cli.TOPICS.values()} <= listed
    assert "Manual: ckptkit help formats" in ckptkit("convert --help").stdout


def test_help_shows_pages_and_commands(ckptkit: Ckptkit) -> None:
    page = ckptkit("help diagnosis").stdout
    assert page.startswith("# Why a checkpoint does not load")
    assert "<!--" not in page and "```" not in page
    assert ckptkit("help scan").stdout == ckptkit("scan --help").stdout
    assert "did you mean formats" in ckptkit("help formts", code=2).stderr


def test_no_command_is_usage_with_the_help(ckptkit: Ckptkit) -> None:
    result = ckptkit(code=2)
    assert "Look:" in result.stdout


def test_version(ckptkit: Ckptkit) -> None:
    for option in ("--version", "-V"):
        assert ckptkit(option).stdout == f"ckptkit, version {package.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("no", where="x.pth", hint="do"), 2, "error: x.pth: no\nhint: do\n"),
        (CkptkitError("no"), 3, "error: no\n"),
        (OutputError("no"), 4, "error: no\n"),
        (MemoryError(), 3, "error: needs more memory than this process can get\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_exit_codes(
    ckptkit: Ckptkit,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("ckptkit.api.open_checkpoint", fail)
    monkeypatch.setattr("ckptkit.cli._mute", lambda: None)
    result = ckptkit("inspect small.pth")
    assert (result.exit_code, result.stderr.lstrip("\n")) == (code, said)


def test_a_bug_is_5_and_one_line(ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.api.open_checkpoint", lambda *_, **__: 1 / 0)
    result = ckptkit("inspect small.pth", code=5)
    assert result.stderr.startswith(
        "error: a bug in ckptkit: ZeroDivisionError: division by zero\nhint: "
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("how", ["--traceback", ""])
def test_the_traceback_on_request(
    ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("ckptkit.api.open_checkpoint", lambda *_, **__: 1 / 0)
    if not how:
        monkeypatch.setenv("CKPTKIT_TRACEBACK", "1")
    result = ckptkit(f"{how} inspect small.pth", code=5)
    assert "Traceback" in result.stderr and "test_main.py" in result.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", EXAMPLES)
def test_CL_04_full(words: str) -> None:
    with open("/dev/full", "w") as full:
        command = [*COMMAND, *words.split()]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
    assert done.returncode == 4
    assert done.stderr == "error: standard output: No space left on device\n"


@pytest.mark.parametrize("option", ["--flat", "--json", "--tree"])
def test_CL_04_closed_pipe(option: str) -> None:
    torch.save({f"w{i}.x": torch.zeros(1) for i in range(5_000)}, "many.pth")
    command = [*COMMAND, "inspect", option, "many.pth"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=ENVIRONMENT) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.read(10)
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 141


@pytest.mark.skipif(os.name != "posix", reason="file descriptors of a shell")
def test_CL_04_closed_output() -> None:
    def ended(words: str) -> tuple[int, str]:
        script = f"{shlex.join(COMMAND)} inspect {words}"
        shell = ["sh", "-c", script]
        done = subprocess.run(shell, capture_output=True, text=True, env=ENVIRONMENT)
        return done.returncode, done.stderr

    assert ended("small.pth >&-") == (4, "error: standard output: is closed\n")
    assert ended("absent.pth 2>&-") == (3, "")


def test_CL_04_ascii(alone: Run) -> None:
    torch.save({"größe": torch.zeros(1)}, "g.pth")
    done = alone("inspect", "g.pth", env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert done.code == 0
    assert r"gr\xf6\xdfe" in done.stdout


@pytest.mark.parametrize("name", ["--help.pt", "-rf.pt", "@args.pt", "*.pt", "$(x).pt"])
def test_CL_05_names_that_look_like_options(ckptkit: Ckptkit, name: str) -> None:
    torch.save({"w": torch.zeros(1)}, name)
    done = ckptkit("inspect --", name, code=0)
    assert done.stdout.startswith(f"{name}: torch-zip")


def test_CL_06_modules_in_the_working_directory_are_not_imported(alone: Run) -> None:
    for name in ("torch", "json", "click", "numpy", "tabulate", "dataclasses", "struct"):
        Path(f"{name}.py").write_text("import sys; sys.stderr.write('canary'); sys.exit(9)")
    done = alone("inspect", "--json", "--digest", "small.pth")
    assert (done.code, done.stderr) == (0, "")


IMPORTED = """
import sys; from ckptkit.cli import main
try: main.main(sys.argv[1:])
except SystemExit as end: assert not end.code, end.code
print('', *sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        ("--help", "tabulate json ckptkit.formats ckptkit.compute ckptkit.analysis"),
        ("inspect small.pth", "ckptkit.analysis.digests ckptkit.analysis.diff ckptkit.edits.keys"),
        ("inspect --json --digest small.pth", "tabulate"),
    ],
)
def test_CL_07_only_what_is_needed_is_imported(words: str, unneeded: str) -> None:
    command = [sys.executable, "-c", IMPORTED, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "ckptkit.cli.inspect" in loaded
    assert not loaded & {"torch", "numpy", "tqdm", "fsspec", "safetensors", *unneeded.split()}


def test_formats_and_env(ckptkit: Ckptkit) -> None:
    text = ckptkit("formats").stdout
    assert "torch-zip" in text and ".safetensors" in text
    assert f"torch        {torch.__version__}" in ckptkit("env").stdout
