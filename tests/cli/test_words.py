"""Words of the command line: one for each meaning, in any order, and the old ones answer."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckptkit.cli import COMMANDS, main, render
from ckptkit.cli.suggestions import ARGUMENT, DST, MULTIPLE, OPTIONS
from ckptkit.core.text import flatten
from tests.cli.conftest import Ckptkit
from tests.conftest import Run


def metadata(path: str) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
        return found


def test_every_other_word_for_an_option_leads_to_one() -> None:
    """Each is no option of the command that it is typed for, and the new one is."""
    every = {name: main.get_command(click.Context(main), name) for name in COMMANDS}
    groups = [each for each in every.values() if isinstance(each, click.Group)]
    every |= {f"{at.name} {name}": each for at in groups for name, each in at.commands.items()}
    known = {
        name: {*flatten([*p.opts, *p.secondary_opts] for p in each.params)}
        for name, each in every.items()
        if each is not None
    }
    for old, new in OPTIONS.items():
        name, _, word = old.rpartition(" ")
        owner, _, option = new.rpartition(" --")
        option = f"--{option}".split()[0] if owner else new.split()[0]
        if old == "merge --ties" or new in (ARGUMENT, MULTIPLE) or name == "lora":
            continue  # it depends on the command
        if new in every:  # the command does what the option asks for
            assert word not in known[name]
        elif owner or (name and name != "batch"):
            assert option in known[owner or name] and word not in known[name or owner], old
        elif new != DST:
            assert any(option in each for each in known.values()) or option == "--into"


@pytest.mark.parametrize(
    "words", ["--traceback inspect NONE", "inspect --traceback NONE", "inspect NONE --traceback"]
)
def test_traceback_anywhere(words: str, run: Run, tmp_path: Path) -> None:
    assert "Traceback" in run(*words.split(), cwd=tmp_path).stderr
    assert "Traceback" not in run("inspect", "--", "--traceback", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    "casts", ["--cast bfloat16 --cast *n=float32", "--cast *n=float32 --cast bfloat16"]
)
def test_a_bare_dtype_is_the_default(casts: str, ckptkit: Ckptkit) -> None:
    torch.save({"w": torch.ones(2), "n": torch.ones(2)}, "a.pth")
    ckptkit(f"convert a.pth b.pth {casts}", code=0)
    found = torch.load("b.pth")
    assert (found["w"].dtype, found["n"].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("casts", "word"),
    [
        ("--cast bfloat16 --cast float16", "given twice"),
        ("--cast w*=bfloat16 --cast w*=float16", "given twice"),
        ("--cast w*=bfloat16 --cast *1=float16", "which have different dtypes"),
        ("--cast bfloat16 --cast x*=float16", "no weight matches"),
    ],
)
def test_a_cast_that_is_overridden_or_unmatched_is_an_error(
    casts: str, word: str, ckptkit: Ckptkit
) -> None:
    torch.save({"w1": torch.ones(2), "w2": torch.ones(2)}, "a.pth")
    assert word in ckptkit(f"convert a.pth b.pth {casts}", code=2).stderr
    assert not Path("b.pth").exists()


def test_drop_entry(ckptkit: Ckptkit, run_pth: Path) -> None:
    ckptkit("convert run.pth out.pth --drop-entry optimizer", code=0)
    before, after = torch.load(run_pth), torch.load("out.pth")
    assert before.keys() - after.keys() == {"optimizer"}
    assert all(torch.equal(each, after["model"][name]) for name, each in before["model"].items())
    wrong = ckptkit("convert run.pth out.pth --force --drop-entry optimiser", code=2)
    assert "optimizer" in wrong.stderr


def test_set_metadata(ckptkit: Ckptkit, run_pth: Path) -> None:
    words = "--set-metadata license=mit --set-metadata note=a=b"
    ckptkit(f"convert run.pth out.safetensors {words}", code=0)
    found = metadata("out.safetensors")
    assert found | {"license": "mit", "note": "a=b"} == found
    ckptkit("convert out.safetensors more.safetensors --set-metadata license=", code=0)
    assert metadata("more.safetensors") | {"license": "", "note": "a=b"} == metadata(
        "more.safetensors"
    )
    for word in ("ckptkit=x", "=x", "x"):
        ckptkit(f"convert run.pth more.safetensors --force --set-metadata {word}", code=2)


def test_no_extras(ckptkit: Ckptkit, run_pth: Path) -> None:
    ckptkit("convert run.pth out.safetensors --no-extras", code=0)
    assert metadata("out.safetensors") == {"format": "pt"}
    assert load_file("out.safetensors").keys() == torch.load(run_pth)["model"].keys()
    ckptkit("convert run.pth out.safetensors --force --no-extras --all", code=2)


def test_a_folder_becomes_a_folder(ckptkit: Ckptkit, run_pth: Path) -> None:
    """Without a suffix, and of the format that was read."""
    ckptkit("convert run.pth shards --shard-size 60B", code=0)
    ckptkit("convert shards again --cast float16", code=0)
    assert [each.name for each in Path("again").iterdir()] == ["model.safetensors"]
    ckptkit("convert shards one.pth", code=0)
    assert Path("one.pth").is_file()
    ckptkit("convert run.pth nothing", code=2)


@pytest.mark.parametrize(
    ("columns", "least", "most"), [(60, 45, 60), (100, 81, 100), (300, 101, 120)]
)
def test_help_is_as_wide_as_the_terminal(columns: int, least: int, most: int, alone: Run) -> None:
    lines = alone("convert", "--help", env={"COLUMNS": str(columns)}).stdout.splitlines()
    prose = [line for line in lines if "ckptkit" not in line]
    assert least <= max(map(len, prose)) <= most


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        ("rename SRC DST --sub x=y", "no key of model is renamed"),
        ("rename SRC DST --sub x=y --sub ^module.=", "the substitution 'x' changes no key"),
        ("remap SRC DST --device cuda:7=cpu", "not on cuda:7"),
        ("remap SRC DST --device cpu=cuda:0 --device cuda:7=cpu", "not on cuda:7"),
        ("remap SRC DST --to cpu", "not on another device"),
        ("strip-module SRC DST --key model --key optimizer", "no key of optimizer starts with"),
        ("convert SRC DST --strip x.", "no key of model starts with 'x.'"),
        ("convert SRC DST --cast float32", "nothing to cast"),
        ("convert SRC DST --compact", "nothing to compact"),
        ("convert SRC DST --keep *", "no weight is dropped"),
        ("convert SRC DST --optimizer-keys numbers", "is already keyed by numbers"),
        ("convert SRC DST --strip module. --to cpu", "not on another device"),
    ],
)
def test_each_option_without_effect_is_said_first(
    words: str, warning: str, ckptkit: Ckptkit, run_pth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --strict it is an error."""
    lines: list[str] = []
    monkeypatch.setattr(render, "warn", lambda line, *_: lines.append(line))
    monkeypatch.setattr(render, "emit_text", lambda *given: lines.extend(given))
    words = words.replace("SRC", "run.pth").replace("DST", "out.pth")
    refused = ckptkit(f"{words} --strict", code=2)
    assert refused.stderr.startswith("error: ") and warning in refused.stderr
    assert not Path("out.pth").exists()
    ckptkit(words, code=0)
    assert warning in "".join(lines[:-1]) and lines[-1].startswith("wrote ")
    ckptkit("strip-module run.pth out.pth --force --strict", code=0)
