"""Errors name what is nearest: commands, options, entries, names, dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.cli import COMMANDS, SYNONYMS
from tests.cli.conftest import Ckptkit


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("inspekt", "inspect"),
        ("strip", "strip-module"),
        ("ls", "inspect"),
        ("stat", "stats"),
        ("dif", "diff"),
    ],
)
def test_commands(ckptkit: Ckptkit, word: str, meant: str) -> None:
    done = ckptkit(word, "run.pth")
    assert done.exit_code == 2
    assert (
        done.stderr
        == f"error: No such command '{word}'.\nhint: did you mean {meant}? see `ckptkit --help`\n"
    )


def test_a_file_instead_of_a_command(ckptkit: Ckptkit, run_pth: Path) -> None:
    assert ckptkit(run_pth, "--json").stderr.endswith(
        f"hint: what is in it: ckptkit inspect {run_pth} --json\n"
    )


def test_nothing_is_near(ckptkit: Ckptkit) -> None:
    assert (
        ckptkit("xyzzy").stderr == "error: No such command 'xyzzy'.\nhint: see `ckptkit --help`\n"
    )


def test_synonyms_are_no_commands_and_mean_some() -> None:
    assert not SYNONYMS.keys() & {*COMMANDS} and {*SYNONYMS.values()} <= {*COMMANDS}


def test_options(ckptkit: Ckptkit) -> None:
    assert "'--json'" in ckptkit("inspect", "--jsn", "run.pth").stderr


@pytest.mark.parametrize("key", ["modle", "Model"])
def test_entries(ckptkit: Ckptkit, run_pth: Path, key: str) -> None:
    assert (
        "hint: did you mean model? the entries are: model, optimizer,"
        in ckptkit("extract", run_pth, "x.pth", "--key", key).stderr
    )


def test_names(ckptkit: Ckptkit, run_pth: Path) -> None:
    assert "did you mean module.0.weight" in ckptkit("show", run_pth, "0.weigth").stderr


def test_globs(ckptkit: Ckptkit, run_pth: Path) -> None:
    said = ckptkit("inspect", run_pth, "--keys", "1.w*").stdout
    assert "matches --keys 1.w*\nhint: 1 tensor with --keys '*1.w*'\n" in said
    assert "with --keys" not in ckptkit("inspect", run_pth, "--keys", "xyz").stdout


def test_dtypes(ckptkit: Ckptkit, run_pth: Path) -> None:
    done = ckptkit("convert", run_pth, run_pth.with_name("x.pth"), "--cast", "bfloat17")
    assert "hint: did you mean bfloat16, " in done.stderr


def test_very_long_names_are_not_compared(ckptkit: Ckptkit, run_pth: Path) -> None:
    """The time grows with the square of their length."""
    done = ckptkit("inspect", run_pth, "--key", "m" * 1_000_000)
    assert done.exit_code == 2 and "the entries are: model" in done.stderr
