"""``ckptkit train``, as a person would call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckptkit.cli import main
from ckptkit.trainer.command import command
from ckptkit.trainer.config import Config

from ..conftest import ENVIRONMENT, Done, Run

SMALL = ("--data", "random", "--width", "0.5", "--devices", "cpu", "--epochs", "1")


def test_train_and_evaluate(run: Run, tmp_path: Path) -> None:
    alone = {"OMP_NUM_THREADS": "1"}
    done = run(
        "train",
        "run.pth",
        *SMALL,
        "--parallel",
        "dp",
        "--keep-module-prefix",
        cwd=tmp_path,
        env=alone,
    )
    assert done.code == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("epoch 1/1  loss 2.")
    assert last == "wrote run.pth"
    accuracy = first.split("accuracy ")[1].split()[0]
    assert run("train", *SMALL, "--evaluate", "run.pth", cwd=tmp_path, env=alone) == (
        0,
        f"accuracy {accuracy}\n",
        "",
    )
    again = run("train", "run.pth", *SMALL, cwd=tmp_path)
    assert (again.code, again.stderr) == (
        2,
        "ckptkit: run.pth: exists already\nhint: --force replaces it\n",
    )


def test_the_module_is_the_command(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "ckptkit.trainer", "run.pth", *SMALL, "--devices", "cuda:77"]
    done = subprocess.run(
        arguments, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("ckptkit: there is no device cuda:77 here\nhint: --devices cpu")


def invoked(*arguments: object) -> Done:
    done = CliRunner().invoke(main, ["train", *map(str, arguments)])
    return Done(done.exit_code, done.stdout, done.stderr)


def test_S02_shapes_on_request(tmp_path: Path) -> None:
    said = invoked(tmp_path / "run.pth", *SMALL, "--parallel", "dp", "--trace-shapes").stdout
    assert "in the model: input [32, 3, 32, 32], output [32, 10] on cpu\n" in said
    assert "outside: input [32, 3, 32, 32], output [32, 10] on cpu\n" in said


def test_S03_memory_of_both_kinds_on_request(tmp_path: Path) -> None:
    done = invoked(
        tmp_path / "run.pth",
        *SMALL,
        "--parallel",
        "dp",
        "--memory-report",
        tmp_path / "memory.jsonl",
    )
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["dp", "dp-balanced"]


def test_quiet_is_quiet(tmp_path: Path) -> None:
    assert invoked(tmp_path / "run.pth", *SMALL, "--quiet") == (0, "", "")
    assert torch.load(tmp_path / "run.pth", weights_only=True)["epoch"] == 1


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--segments", "2"), "cnn has no segments", "--model mlp or generator has"),
        (("--memory-efficient",), "cnn has no bottlenecks to recompute", "--model densenet has"),
        (
            ("--keep-module-prefix",),
            "--parallel none gives the keys no prefix to keep",
            "dp, dp-balanced, ddp do",
        ),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, options: tuple[str, ...], message: str, hint: str
) -> None:
    assert invoked(tmp_path / "run.pth", *options) == (2, "", f"ckptkit: {message}\nhint: {hint}\n")


def test_out_is_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for out, options, message in (
        ("none/run.pth", (), "there is no folder for it"),
        (
            "run.pth",
            ("--metrics", tmp_path / "none" / "to" / "run.pth"),
            "there is no folder for it",
        ),
        ("full", (), "is a folder"),
        ("full", ("--parallel", "fsdp"), "is a folder that is not empty"),
        ("full", ("--parallel", "fsdp", "--force"), "is a folder that is not empty"),
    ):
        done = invoked(tmp_path / out, *SMALL, *options)
        assert done.code == 2
        assert done.stderr.split("\n")[0].endswith(f"/{out}: {message}")


def test_there_must_be_something_to_do() -> None:
    assert "Missing argument 'OUT' (or --evaluate FILE)" in invoked(*SMALL).stderr


def test_every_field_of_the_config_is_an_option() -> None:
    names = {each.name for each in command.params}
    assert set(Config.__dataclass_fields__) <= names
