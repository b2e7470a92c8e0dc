"""Completion by Tab: in this process, and in the shells that are installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import torch
from click.shell_completion import BashComplete

from ckptkit.cli import COMMANDS, completing, main
from tests.cli.conftest import Ckptkit
from tests.conftest import COMMAND, ENVIRONMENT

Tab = Callable[[str], list[str]]


def parameters() -> Iterator[tuple[str, click.Parameter]]:
    """The parameters of all commands, each with the name of its command."""
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            yield name, parameter


@pytest.fixture(autouse=True)
def types_of_parameters() -> Iterator[None]:
    """Put back the types that completion changes: in a shell, its process ends with it."""
    before = [(parameter, parameter.type) for _, parameter in parameters()]
    yield
    for parameter, kind in before:
        parameter.type = kind


@pytest.fixture
def tab() -> Tab:
    """``tab("show run.pth mo")``: what is offered for the last word; ``file`` stands for the
    shell's own list."""
    completer = BashComplete(main, {}, "ckptkit", "_CKPTKIT_COMPLETE")

    def offered(words: str) -> list[str]:
        *args, incomplete = shlex.split(words)
        found = completer.get_completions(args, incomplete)
        return [item.value if item.type == "plain" else item.type for item in found]

    return offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("in", "inspect"),
        ("inspect --tr", "--tree"),
        ("inspect --sort s", "size"),
        ("inspect ''", "file"),
        ("convert x", "file"),
        ("convert a.pth ''", "file"),
        ("doctor --fix ''", "file"),
        ("show run.pth module.1.w", "module.1.weight"),
        ("show run.pth module.1.r", "module.1.running_mean module.1.running_var"),
        ("inspect run.pth --keys module.0.w", "module.0.weight"),
        ("convert run.pth out.pth --keep module.2.b", "module.2.bias"),
        ("batch convert run.pth --drop module.2.b", "module.2.bias"),
        ("show run.pth nothing", ""),
        ("inspect run.pth --key ''", "model optimizer optimizer.state optimizer.param_groups"),
        ("diff run.pth ema.pth --key-b ''", "ema"),
        ("diff run.pth ema.pth --key m", "model"),
        ("inspect two.pth --keys ''", ""),  # which of them?
        ("inspect --key b two.pth --keys ''", "y.w"),
        ("strip-module run.pth --prefix ''", "module. module.1."),
        ("add-module run.pth --prefix ''", "module. module.1."),
        ("remap run.pth --to c", "cpu cuda cuda:0"),
        ("remap run.pth --device ''", "cpu="),
        ("convert run.pth --cast bf", "bfloat16"),
        ("convert run.pth out.pth --quantize ''", "fp8-block mxfp4"),
        ("convert run.pth --format shard", "sharded sharded-bin"),
        ("run tim", "timm timm-vit file"),
    ],
)
def test_what_is_offered(words: str, offered: str, tab: Tab, run_pth: Path) -> None:
    torch.save({"ema": {"w": torch.ones(1)}}, "ema.pth")
    torch.save({"a": {"x.w": torch.ones(1)}, "b": {"y.w": torch.ones(1)}}, "two.pth")
    assert tab(words) == offered.split()


def test_help_beside_a_name(run_pth: Path) -> None:
    completer = BashComplete(main, {}, "ckptkit", "_CKPTKIT_COMPLETE")
    (item,) = completer.get_completions(["show", "run.pth"], "module.0.w")
    assert item.help == "float32 [3, 4]"


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint", b"PK\x03\x04 cut"])
def test_silent_on_errors(
    tab: Tab, content: bytes | None, capfd: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("run.pth").write_bytes(content)
    for words in ("show run.pth", "inspect run.pth --key", "strip-module --prefix"):
        assert tab(f"{words} ''") == []
    assert tab("show https://host.invalid/run.pth ''") == []
    assert capfd.readouterr() == ("", "")


def test_names_that_a_shell_would_act_on_are_not_offered(tab: Tab) -> None:
    bad = ["$(touch x)", "`id`", "a;b", "a b", "a\nplain,b", "--force", "a'b", 'a"b', "a*", "~root", "a\x1b[2J", "ä", "!!"]  # fmt: skip
    torch.save({name: torch.ones(1) for name in [*bad, "good.w"]}, "run.pth")
    assert tab("show run.pth ''") == ["good.w"]


def test_of_too_many_where_they_part(tab: Tab) -> None:
    names = [f"net.layers.{n}.{kind}.w{i}" for n in range(30) for kind in "abc" for i in range(10)]
    torch.save({name: torch.ones(1) for name in names}, "run.pth")
    assert tab("show run.pth net.") == [f"net.layers.{n}." for n in range(30)]
    assert len(tab("show run.pth net.layers.3.")) == 30


# Texts of one's own: nothing can be offered.
FREE = {
    "add-module: P", "convert: NAME", "SIZE", "URL", "NAME=JSON", "REGEX=REPLACEMENT", "[SLICE]", "TEXT", "A,B",
    "D[,GLOB=D...]", "W[,GLOB=W...]", "W", "START:STOP",
    "NAME=INT", "NAME=TEXT", "'NAME CONDITION'", "RULE", "MODEL_TYPE",
    "help: [TOPIC|COMMAND|WORD...]", "help: NAME", "scan: GLOB", "train: A,B", "train: NAME", "train: TEXT",
    "wrap: NAME", "wrap: SIZE", "wrap: URL", "wrap: NAME=JSON",
}  # fmt: skip


def test_every_text_is_completed_or_free() -> None:
    left = {
        f"{name}: {each.metavar}"
        if name in ("scan", "train", "wrap", "help")
        else str(each.metavar)
        for name, each in parameters()
        if isinstance(each.type, click.types.StringParamType)
        and completing.completed_type(each) is None
    }
    assert left <= FREE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script(ckptkit: Ckptkit, shell: str) -> None:
    script = ckptkit("completion", shell).stdout
    assert f"_CKPTKIT_COMPLETE={shell}_complete" in script


def installed(folder: Path) -> dict[str, str]:
    """An environment in which ckptkit is a command."""
    program = folder / "bin/ckptkit"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {**ENVIRONMENT, "PATH": path, "HOME": str(folder)}


# What asks a shell for the completions of: ckptkit show run.pth module.0.
ASKS = {
    "bash": """
        eval "$(ckptkit completion bash)"
        COMP_WORDS=(ckptkit show run.pth module.0.); COMP_CWORD=3
        _ckptkit_completion ckptkit
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        autoload -U compinit && compinit -u
        eval "$(ckptkit completion zsh)"
        _describe() { for item in "${(@P)3}"; do print -r -- "$item"; done }
        compadd() { print -rl -- "${(@P)@[-1]}" }
        words=(ckptkit show run.pth module.0.); CURRENT=4
        _ckptkit_completion
    """,
    "fish": """
        ckptkit completion fish | source
        complete -C 'ckptkit show run.pth module.0.'
    """,
}


@pytest.mark.parametrize("shell", ASKS)
def test_in_a_real_shell(shell: str, run_pth: Path, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [shell, "-c", ASKS[shell]],
        capture_output=True,
        encoding="utf-8",
        cwd=run_pth.parent,
        env=installed(tmp_path),
    )
    found = {line.split("\t")[0].split(":")[0] for line in done.stdout.splitlines()}
    assert found == {"module.0.weight", "module.0.bias"}, done.stdout + done.stderr


def test_neither_torch_nor_an_unpickler(run_pth: Path) -> None:
    program = (
        "import sys; from ckptkit.cli import main\n"
        "try: main.main(prog_name='ckptkit')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print({'torch', 'numpy', 'pickle', 'fsspec'} & {*sys.modules}, file=sys.stderr)"
    )
    words = f"ckptkit show {run_pth} module.0."
    env = {
        **ENVIRONMENT,
        "_CKPTKIT_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", env=env
    )
    assert (done.stdout, done.stderr) == ("plain,module.0.weight\nplain,module.0.bias\n", "set()\n")
