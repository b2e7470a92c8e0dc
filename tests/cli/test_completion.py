"""Completion by Tab: in this process, and in the shells that are installed."""

from __future__ import annotations

import os
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

Tab = Callable[..., list[str]]


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
    """``tab("show", path, "mo")``: what is offered for the last word; ``file`` stands for the
    shell's own list."""
    completer = BashComplete(main, {}, "ckptkit", "_CKPTKIT_COMPLETE")

    def offered(*words: object) -> list[str]:
        *args, incomplete = map(str, words)
        found = completer.get_completions(args, incomplete)
        return [item.value if item.type == "plain" else item.type for item in found]

    return offered


def test_commands_options_choices(tab: Tab) -> None:
    assert tab("in") == ["inspect"]
    assert tab("inspect", "--tr") == ["--tree"]
    assert tab("inspect", "--sort", "s") == ["size"]


@pytest.mark.parametrize(
    "words", [("inspect", ""), ("convert", "x"), ("convert", "a.pth", ""), ("doctor", "--fix", "")]
)
def test_files(tab: Tab, words: tuple[str, ...]) -> None:
    assert tab(*words) == ["file"]


def test_names(tab: Tab, run_pth: Path) -> None:
    inner = ["module.1.weight", "module.1.bias", "module.1.running_mean", "module.1.running_var"]
    assert tab("show", run_pth, "module.1.")[:4] == inner
    assert tab("show", run_pth, "module.1.w") == ["module.1.weight"]
    assert tab("inspect", run_pth, "--keys", "module.0.w") == ["module.0.weight"]
    assert tab("convert", run_pth, "out.pth", "--keep", "module.2.b") == ["module.2.bias"]
    assert tab("batch", "convert", run_pth, "--drop", "module.2.b") == ["module.2.bias"]
    assert tab("show", run_pth, "nothing") == []


def test_help_beside_a_name(run_pth: Path) -> None:
    completer = BashComplete(main, {}, "ckptkit", "_CKPTKIT_COMPLETE")
    (item,) = completer.get_completions(["show", str(run_pth)], "module.0.w")
    assert item.help == "float32 [3, 4]"


def test_entries(tab: Tab, run_pth: Path) -> None:
    assert tab("inspect", run_pth, "--key", "") == [
        "model",
        "optimizer",
        "optimizer.state",
        "optimizer.param_groups",
    ]
    torch.save({"ema": {"w": torch.ones(1)}}, run_pth.with_name("b.pth"))
    assert tab("diff", run_pth, run_pth.with_name("b.pth"), "--key-b", "") == ["ema"]
    assert tab("diff", run_pth, run_pth.with_name("b.pth"), "--key", "m") == ["model"]


def test_names_in_the_entry_of_key(tab: Tab, run_pth: Path) -> None:
    torch.save({"a": {"x.w": torch.ones(1)}, "b": {"y.w": torch.ones(1)}}, run_pth)
    assert tab("inspect", run_pth, "--keys", "") == []  # which of them?
    assert tab("inspect", "--key", "b", run_pth, "--keys", "") == ["y.w"]


def test_prefixes_devices_tags_dtypes_formats_recipes(tab: Tab, run_pth: Path) -> None:
    assert tab("strip-module", run_pth, "--prefix", "") == ["module.", "module.1."]
    assert tab("add-module", run_pth, "--prefix", "") == ["module.", "module.1."]
    assert tab("remap", run_pth, "--to", "c") == ["cpu", "cuda", "cuda:0"]
    assert tab("remap", run_pth, "--device", "") == ["cpu="]
    assert tab("convert", run_pth, "--cast", "bf") == ["bfloat16"]
    assert tab("convert", run_pth, "out.pth", "--quantize", "") == ["fp8-block", "mxfp4"]
    assert tab("convert", run_pth, "--format", "shard") == ["sharded", "sharded-bin"]
    assert tab("run", "tim") == ["timm", "timm-vit", "file"]


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint", b"PK\x03\x04 cut"])
def test_silent_on_errors(
    tab: Tab, tmp_path: Path, content: bytes | None, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.pth"
    if content is not None:
        path.write_bytes(content)
    assert (
        tab("show", path, "")
        == tab("inspect", path, "--key", "")
        == tab("strip-module", "--prefix", "")
        == []
    )
    assert tab("show", "https://host.invalid/run.pth", "") == []
    assert capfd.readouterr() == ("", "")


def test_names_that_a_shell_would_act_on_are_not_offered(tab: Tab, tmp_path: Path) -> None:
    bad = [
        "$(touch x)",
        "`id`",
        "a;b",
        "a b",
        "a\nplain,b",
        "--force",
        "a'b",
        'a"b',
        "a*",
        "~root",
        "a\x1b[2J",
        "ä",
        "!!",
    ]
    torch.save({name: torch.ones(1) for name in [*bad, "good.w"]}, tmp_path / "run.pth")
    assert tab("show", tmp_path / "run.pth", "") == ["good.w"]


def test_of_too_many_where_they_part(tab: Tab, tmp_path: Path) -> None:
    names = [f"net.layers.{n}.{kind}" for n in range(30) for kind in ("a.w", "b.w", "c.w")]
    torch.save(
        {f"{name}{i}": torch.ones(1) for name in names for i in range(10)}, tmp_path / "run.pth"
    )
    assert tab("show", tmp_path / "run.pth", "net.") == [f"net.layers.{n}." for n in range(30)]
    assert len(tab("show", tmp_path / "run.pth", "net.layers.3.")) == 30


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


def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which ckptkit is a command."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/ckptkit"
    program.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    return {
        **ENVIRONMENT,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
    }


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
