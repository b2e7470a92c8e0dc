"""Words of the command line: one for each meaning, in any order, and the old ones answer."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors import safe_open

from ckptkit.cli import COMMANDS, main, render
from ckptkit.cli.suggestions import ARGUMENT, DST, MULTIPLE, OPTIONS
from ckptkit.core.text import flatten
from tests.cli.conftest import Ckptkit
from tests.conftest import ENVIRONMENT, Run


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
        return found


OLD_WORDS = [
    ("remap SRC DST --map cuda:1=cpu", "--device"),
    ("convert SRC DST --device-map cuda:1=cpu", "--device"),
    ("remap SRC DST --to cpu --values", "--device-values"),
    ("convert SRC DST --prefix module.", "--strip"),
    ("strip-module SRC DST --strip module.", "--prefix"),
    ("convert SRC DST --keys a", "--keep"),
    ("convert SRC DST --map-device cuda:1=cpu", "--device"),
    ("add-module SRC DST --add x.", "--prefix"),
    ("digest SRC --manifest OUT", "--output"),
]


@pytest.mark.parametrize(("words", "new"), OLD_WORDS)
def test_an_old_word_answers_with_the_new_one(words: str, new: str, ckptkit: Ckptkit) -> None:
    done = ckptkit(*words.split())
    assert done.exit_code == 2 and f"use {new}:" in done.stderr


def test_every_other_word_for_an_option_leads_to_one() -> None:
    """Each is no option of the command that it is typed for, and the new one is."""
    every = {name: main.get_command(click.Context(main), name) for name in COMMANDS}
    groups = [each for each in every.values() if isinstance(each, click.Group)]
    every |= {
        f"{group.name} {name}": each for group in groups for name, each in group.commands.items()
    }
    known = {
        name: set(flatten([*p.opts, *p.secondary_opts] for p in each.params))
        for name, each in every.items()
        if each is not None
    }
    for old, new in OPTIONS.items():
        name, _, word = old.rpartition(" ")
        owner, _, option = new.rpartition(" --")
        option = f"--{option}".split()[0] if owner else new.split()[0]
        if (
            old == "merge --ties" or new in (ARGUMENT, MULTIPLE) or name == "lora"
        ):  # depends on the command
            continue
        if new in every:  # the command does what the option asks for
            assert word not in known[name]
        elif name and name != "batch":
            assert option in known[owner or name] and word not in known[name]
        elif owner:
            assert option in known[owner] and word not in known[owner], old
        elif new != DST:
            assert any(option in each for each in known.values()) or option == "--into"


@pytest.mark.parametrize(
    "words", ["--traceback inspect NONE", "inspect --traceback NONE", "inspect NONE --traceback"]
)
def test_traceback_anywhere(words: str, run: Run, tmp_path: Path) -> None:
    assert "Traceback" in run(*words.split(), cwd=tmp_path).stderr
    assert "Traceback" not in run("inspect", "--", "--traceback", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    "casts", [("bfloat16", "*norm*=float32"), ("*norm*=float32", "bfloat16")], ids=str
)
def test_a_bare_dtype_is_the_default(
    casts: tuple[str, ...], ckptkit: Ckptkit, tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2), "norm": torch.ones(2)}, tmp_path / "a.pth")
    given = [word for each in casts for word in ("--cast", each)]
    assert ckptkit("convert", tmp_path / "a.pth", tmp_path / "b.pth", *given).exit_code == 0
    found = torch.load(tmp_path / "b.pth")
    assert (found["w"].dtype, found["norm"].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("casts", "word"),
    [
        (("bfloat16", "float16"), "given twice"),
        (("w*=bfloat16", "w*=float16"), "given twice"),
        (("w*=bfloat16", "*1=float16"), "which have different dtypes"),
        (("bfloat16", "x*=float16"), "no weight matches"),
    ],
    ids=str,
)
def test_a_cast_that_is_overridden_or_unmatched_is_an_error(
    casts: tuple[str, ...], word: str, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    torch.save({"w1": torch.ones(2), "w2": torch.ones(2)}, tmp_path / "a.pth")
    given = [part for each in casts for part in ("--cast", each)]
    done = ckptkit("convert", tmp_path / "a.pth", tmp_path / "b.pth", *given)
    assert done.exit_code == 2 and word in done.stderr
    assert not (tmp_path / "b.pth").exists()


def test_drop_entry(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pth"
    assert ckptkit("convert", run_pth, out, "--drop-entry", "optimizer").exit_code == 0
    before, after = torch.load(run_pth), torch.load(out)
    assert before.keys() - after.keys() == {"optimizer"}
    assert all(torch.equal(each, after["model"][name]) for name, each in before["model"].items())
    done = ckptkit("convert", run_pth, out, "--force", "--drop-entry", "optimiser")
    assert done.exit_code == 2 and "optimizer" in done.stderr


def test_set_metadata(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "out.safetensors", tmp_path / "more.safetensors"
    given = ["--set-metadata", "license=mit", "--set-metadata", "note=a=b"]
    assert ckptkit("convert", run_pth, out, *given).exit_code == 0
    assert metadata(out) | {"license": "mit", "note": "a=b"} == metadata(out)
    assert ckptkit("convert", out, more, "--set-metadata", "license=").exit_code == 0
    assert metadata(more)["license"] == "" and metadata(more)["note"] == "a=b"
    for words in (["ckptkit=x"], ["=x"], ["x"]):
        done = ckptkit("convert", run_pth, more, "--force", "--set-metadata", *words)
        assert done.exit_code == 2


def test_no_extras(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert ckptkit("convert", run_pth, out, "--no-extras").exit_code == 0
    assert metadata(out) == {"format": "pt"}
    (length,) = struct.unpack("<Q", out.read_bytes()[:8])
    header: dict[str, Any] = json.loads(out.read_bytes()[8 : 8 + length])
    assert header.keys() - {"__metadata__"} == torch.load(run_pth)["model"].keys()
    done = ckptkit("convert", run_pth, out, "--force", "--no-extras", "--all")
    assert done.exit_code == 2


@pytest.mark.parametrize(
    "words",
    ["remap SRC DST --to cpu", "convert SRC DST --strip x."],
)
def test_strict(words: str, ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    """A change that changes nothing is a warning, and an error if it is asked for."""
    out = tmp_path / "out.pth"
    given = [{"SRC": str(run_pth), "DST": str(out)}.get(word, word) for word in words.split()]
    refused = ckptkit(*given, "--strict")
    assert refused.exit_code == 2 and not out.exists()
    done = ckptkit(*given)
    assert done.exit_code == 0 and out.exists()
    assert refused.stderr.splitlines()[0].partition(": ")[2] in done.stderr.replace(
        "warning: ", f"warning: {run_pth}: "
    )
    assert ckptkit("strip-module", run_pth, out, "--force", "--strict").exit_code == 0


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that warnings and reports go to, in their order."""
    lines: list[str] = []
    monkeypatch.setattr(render, "warn", lambda line, *_: lines.append(line))
    monkeypatch.setattr(render, "emit_text", lambda *given: lines.extend(given))
    return lines


def test_a_change_that_changes_nothing_is_said_first(
    ckptkit: Ckptkit, run_pth: Path, tmp_path: Path, said: list[str]
) -> None:
    ckptkit("convert", run_pth, tmp_path / "out.pth", "--strip", "x.")
    lines = said
    assert len(lines) == 2
    assert "no key of model starts with 'x.'" in lines[0] and lines[1].startswith("wrote ")


def test_inspect_names(ckptkit: Ckptkit, run_pth: Path) -> None:
    assert ckptkit("inspect", "--names", run_pth).stdout.split() == list(
        torch.load(run_pth)["model"]
    )
    done = ckptkit("inspect", "--names", "--keys", "*bias", "--sort", "name", run_pth)
    assert done.stdout.split() == ["module.0.bias", "module.1.bias", "module.2.bias"]
    assert ckptkit("inspect", "--names", "--json", run_pth).exit_code == 2


def test_totals_of_what_is_selected(ckptkit: Ckptkit, tmp_path: Path) -> None:
    weight = torch.ones(3, 4)
    torch.save({"a.weight": weight, "tied.weight": weight, "b": torch.ones(2)}, tmp_path / "a.pth")
    found = ckptkit("inspect", "--keys", "*.weight", tmp_path / "a.pth").stdout
    assert "selected: 2 tensors, 12 parameters, 48 B" in found
    assert "selected" not in ckptkit("inspect", tmp_path / "a.pth").stdout


def test_totals_of_what_is_selected_as_json(ckptkit: Ckptkit, tmp_path: Path) -> None:
    weight = torch.ones(3, 4)
    path = tmp_path / "a.pth"
    torch.save({"a.weight": weight, "tied.weight": weight, "b": torch.ones(2)}, path)
    found = json.loads(ckptkit("inspect", "--json", "--keys", "*.weight", path).stdout)["files"][0]
    assert found["selected"] == {"tensor_count": 2, "parameters": 12, "nbytes": 48}
    assert found["totals"]["tensor_count"] == 3
    assert json.loads(ckptkit("inspect", "--json", path).stdout)["files"][0]["selected"] is None
    nothing = json.loads(ckptkit("inspect", "--json", "--keys", "x", path).stdout)["files"][0]
    assert nothing["selected"] == {"tensor_count": 0, "parameters": 0, "nbytes": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_show_nan(dtype: torch.dtype, ckptkit: Ckptkit, tmp_path: Path) -> None:
    values = torch.zeros(300, 1000)
    values[7, 31], values[299, 999], values[0, 5] = float("nan"), float("-inf"), float("inf")
    torch.save({"w": values.to(dtype).t(), "none": torch.arange(3)}, tmp_path / "a.pth")
    lines = ckptkit("show", tmp_path / "a.pth", "w", "--nan").stdout.splitlines()
    odd = (~torch.isfinite(values.t())).nonzero().tolist()
    assert lines[0].endswith(": w: 1 NaN, 2 infinite")
    assert [line.rpartition(" ")[0].strip() for line in lines[1:]] == list(map(str, odd))
    assert [line.split()[-1] for line in lines[1:]] == ["inf", "nan", "-inf"]
    assert "0 NaN" in ckptkit("show", tmp_path / "a.pth", "none", "--nan").stdout


def test_show_nan_of_all_tensors(ckptkit: Ckptkit, tmp_path: Path) -> None:
    bad = torch.ones(3, 4)
    bad[1, 2], bad[2, 3] = float("nan"), float("inf")
    saved = {
        "fine": torch.ones(5),
        "bad": bad,
        "count": torch.tensor(3),
        "meta": torch.empty(3, device="meta"),
    }
    torch.save(
        {"model": saved, "optimizer": {"state": {0: {"exp_avg": bad[1:].clone()}}}},
        tmp_path / "a.pth",
    )
    done = ckptkit("show", tmp_path / "a.pth", "--nan")
    assert done.exit_code == 1, done.stderr
    assert done.stdout.splitlines() == [
        f"{tmp_path / 'a.pth'}: bad: 1 NaN, 1 infinite", "  [1, 2] nan", "  [2, 3] inf",
        f"{tmp_path / 'a.pth'}: optimizer.state.0.exp_avg: 1 NaN, 1 infinite", "  [0, 2] nan", "  [1, 3] inf",
        f"{tmp_path / 'a.pth'}: 2 of 3 tensors with NaN or infinities",
    ]  # fmt: skip
    torch.save({"fine": torch.ones(5)}, tmp_path / "b.pth")
    assert "no tensor with NaN" in ckptkit("show", tmp_path / "b.pth", "--nan").stdout
    assert ckptkit("show", tmp_path / "b.pth").exit_code == 2


def test_show_nan_lists_the_first(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"w": torch.full((4, 5), float("nan"))}, tmp_path / "a.pth")
    lines = ckptkit("show", tmp_path / "a.pth", "w", "--nan").stdout.splitlines()
    assert lines[1] == "  [0, 0] nan" and lines[-1] == "  and 10 more" and len(lines) == 12


def test_a_folder_becomes_a_folder(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    """Without a suffix, and of the format that was read."""
    shards, again = tmp_path / "shards", tmp_path / "again"
    assert ckptkit("convert", run_pth, shards, "--shard-size", "60B").exit_code == 0
    assert ckptkit("convert", shards, again, "--cast", "float16").exit_code == 0
    assert [each.name for each in again.iterdir()] == ["model.safetensors"]
    assert ckptkit("convert", shards, tmp_path / "one.pth").exit_code == 0
    assert (tmp_path / "one.pth").is_file()
    assert ckptkit("convert", run_pth, tmp_path / "nothing").exit_code == 2


@pytest.mark.skipif(os.name != "posix" or not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("name", [b"caf\xe9.pth", b"a\nb.pth", b"it's \x01.pth"], ids=repr)
def test_a_pasted_command_works_for_any_name(name: bytes, run: Run, tmp_path: Path) -> None:
    """Names that cannot be printed as they are, in UTF-8 or without line breaks."""
    torch.save({"module.w": torch.ones(2)}, tmp_path / "plain.pth")
    os.rename(tmp_path / "plain.pth", os.fsencode(tmp_path) + b"/" + name)
    (found,) = (each for each in os.listdir(tmp_path) if each.endswith(".pth"))
    printed = run("inspect", found, cwd=tmp_path).stdout
    hint = next(line for line in printed.splitlines() if "strip-module" in line)
    pasted = hint[hint.index("ckptkit strip-module") :].replace(
        "ckptkit", f"{sys.executable} -m ckptkit", 1
    )
    subprocess.run(["bash", "-c", pasted], cwd=tmp_path, env=ENVIRONMENT, check=True, timeout=60)
    made = os.fsencode(tmp_path) + b"/" + name.replace(b".pth", b"-stripped.pth")
    assert list(torch.load(os.fsdecode(made))) == ["w"]


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
        ("strip-module SRC DST --key model --key optimizer", "no key of optimizer starts with"),
        ("convert SRC DST --cast float32", "nothing to cast"),
        ("convert SRC DST --compact", "nothing to compact"),
        ("convert SRC DST --keep *", "no weight is dropped"),
        ("convert SRC DST --optimizer-keys numbers", "is already keyed by numbers"),
        ("convert SRC DST --strip module. --to cpu", "not on another device"),
    ],
)
def test_each_option_without_effect_is_said_first(
    words: str,
    warning: str,
    ckptkit: Ckptkit,
    run_pth: Path,
    tmp_path: Path,
    said: list[str],
) -> None:
    out = tmp_path / "out.pth"
    given = [{"SRC": str(run_pth), "DST": str(out)}.get(word, word) for word in words.split()]
    refused = ckptkit(*given, "--strict")
    assert refused.exit_code == 2 and not out.exists()
    assert refused.stderr.startswith("error: ") and warning in refused.stderr
    assert ckptkit(*given).exit_code == 0
    lines = said
    assert warning in "".join(lines[:-1]) and lines[-1].startswith("wrote ")
