"""The commands that write: what they write, opened with torch; what they say; what they refuse."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from ckptkit.cli import main
from tests.cli.conftest import Ckptkit

Json = Callable[..., Any]


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def without(prefix: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.pth"


def test_strip_module(ckptkit: Ckptkit, run_pth: Path, out: Path) -> None:
    result = ckptkit("strip-module", run_pth, out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"wrote {out}: 15 tensors, ")
    assert result.stdout.endswith("; stripped 'module.' from 9 keys of model\n")
    before, after = load(run_pth), load(out)
    assert equal(after["model"], without("module.", before["model"]))
    assert after["epoch"] == 3 and list(after) == list(before)


def test_strip_module_takes_other_prefixes(ckptkit: Ckptkit, tmp_path: Path, out: Path) -> None:
    torch.save({"_orig_mod.module.w": torch.ones(1), "b": torch.zeros(1)}, tmp_path / "c.pth")
    result = ckptkit(
        "strip-module", "--prefix", "_orig_mod.", "--prefix", "module.", tmp_path / "c.pth", out
    )
    assert list(load(out)) == ["w", "b"]
    assert "without the prefix, not changed: 'b'" in result.stderr


def test_strip_module_edits_what_keys_name(ckptkit: Ckptkit, tmp_path: Path, out: Path) -> None:
    torch.save(
        {"model": {"module.w": torch.ones(1)}, "ema": {"module.w": torch.ones(1)}},
        tmp_path / "e.pth",
    )
    result = ckptkit("strip-module", tmp_path / "e.pth", out)
    assert "--key model --key ema" in result.stderr
    assert list(load(out)["ema"]) == ["module.w"]
    ckptkit("strip-module", "--force", "--key", "model", "--key", "ema", tmp_path / "e.pth", out)
    assert list(load(out)["model"]) == list(load(out)["ema"]) == ["w"]


@pytest.mark.parametrize(
    ("before", "options", "hint"),
    [
        (
            "_orig_mod.",
            [],
            " --prefix _orig_mod. ",
        ),
        ("module._orig_mod.", ["--prefix", "net."], " --prefix module. --prefix _orig_mod. "),
        ("net.", ["--prefix", "module."], " --prefix net. "),
        ("", ["--prefix", "net."], "ckptkit inspect"),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_nothing_to_strip_is_1_and_nothing_is_written(
    before: str, options: list[str], hint: str, in_place: bool, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    """The hint is the command for the prefix that the file has, and it works."""
    path = tmp_path / "p.pth"
    torch.save({f"{before}0.weight": torch.ones(1), f"{before}1.bias": torch.ones(1)}, path)
    data = path.read_bytes()
    places = ["--in-place", path] if in_place else [path, tmp_path / "o.pth"]
    done = ckptkit("strip-module", *options, *places)
    assert (done.exit_code, done.stdout) == (1, "")
    assert hint in done.stderr and path.read_bytes() == data
    assert os.listdir(tmp_path) == ["p.pth"]
    if before:
        ckptkit(*shlex.split(done.stderr.partition("ckptkit ")[2]))
        assert list(load(places[-1])) == ["0.weight", "1.bias"]


@pytest.mark.parametrize("before", ["net.", ""])
def test_keys_of_no_wrapper_are_copied_with_a_warning(
    before: str, ckptkit: Ckptkit, tmp_path: Path, out: Path
) -> None:
    torch.save({f"{before}0.weight": torch.ones(1)}, tmp_path / "p.pth")
    done = ckptkit("strip-module", tmp_path / "p.pth", out)
    assert (done.exit_code, "no key starts with 'module.'" in done.stderr) == (0, True)
    assert list(load(out)) == [f"{before}0.weight"]
    assert ckptkit("strip-module", "--force", "--strict", tmp_path / "p.pth", out).exit_code == 2


def test_a_batch_copies_files_without_the_prefix(ckptkit: Ckptkit, tmp_path: Path) -> None:
    for name in ("module.w", "w"):
        torch.save({name: torch.ones(1)}, tmp_path / f"{name}.pth")
    done = ckptkit("batch", "strip-module", "--into", tmp_path / "out", tmp_path / "*.pth")
    assert done.exit_code == 0 and "w.pth: no key starts with 'module.'" in done.stderr
    assert [list(load(each)) for each in (tmp_path / "out").glob("*.pth")] == [["w"], ["w"]]


def test_a_collision_is_3(ckptkit: Ckptkit, tmp_path: Path, out: Path) -> None:
    torch.save({"module.w": torch.ones(1), "w": torch.zeros(1)}, tmp_path / "p.pth")
    result = ckptkit("strip-module", tmp_path / "p.pth", out)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "'w'" in result.stderr and not out.exists()


def test_add_module(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path, out: Path) -> None:
    ckptkit("strip-module", run_pth, tmp_path / "plain.pth")
    assert ckptkit("add-module", tmp_path / "plain.pth", out).exit_code == 0
    assert equal(load(out)["model"], load(run_pth)["model"])
    assert (
        ckptkit("add-module", "--prefix", "net.", "--force", tmp_path / "plain.pth", out).exit_code
        == 0
    )
    assert all(name.startswith("net.") for name in load(out)["model"])


def test_remap(
    ckptkit: Ckptkit, as_json: Json, tmp_path: Path, out: Path, simulated_cuda: Any
) -> None:
    with simulated_cuda(1):
        torch.save({"w": torch.ones(3)}, tmp_path / "c.pth")
    assert ckptkit("remap", tmp_path / "c.pth", out, "--device", "cuda:1=cuda:0").exit_code == 0
    assert as_json("inspect", out)["files"][0]["tensors"][0]["device"] == "cuda:0"
    result = ckptkit("remap", tmp_path / "c.pth", out, "--to", "cpu", "--force")
    assert "cuda:1 -> cpu" in result.stdout
    assert torch.equal(load(out)["w"], torch.ones(3))


def test_rename(ckptkit: Ckptkit, tmp_path: Path, out: Path) -> None:
    torch.save({"a.w": torch.ones(1), "b.w": torch.zeros(1)}, tmp_path / "p.pth")
    (tmp_path / "names.json").write_text('{"a.w": "first"}')
    result = ckptkit(
        "rename",
        tmp_path / "p.pth",
        out,
        "--map",
        tmp_path / "names.json",
        "--sub",
        r"^(?=b)b\.=c.",
    )
    assert result.exit_code == 0, result.stderr
    assert list(load(out)) == ["first", "c.w"]


REFUSED = [
    ("remap run.pth out.pth", 2, ""),
    ("remap run.pth out.pth --to cpu --device cuda:0=cpu", 2, ""),
    ("remap run.pth out.pth --device cuda:0", 2, ""),
    ("remap run.pth out.pth --to gpu", 2, ""),
    ("rename run.pth out.pth", 2, ""),
    ("rename run.pth out.pth --sub 'no equals'", 2, ""),
    ("rename run.pth out.pth --map absent.json", 2, ""),
    ("rename run.pth out.pth --map list.json", 2, ""),
    ("rename run.pth out.pth --map nested.json", 2, ""),
    ("strip-module run.pth", 2, ""),
    ("strip-module --in-place run.pth out.pth", 2, ""),
    ("strip-module run.pth mine.pth", 2, "--force"),
    ("strip-module --force run.pth run.pth", 2, ""),
    ("strip-module run.pth none/out.pth", 4, "none"),
    ("extract run.pth out.pth --key nope", 2, "model"),
    ("average run.pth out.pth", 2, "name two or more SRC"),
    ("convert --in-place --format safetensors run.pth", 2, "has the suffix of torch-zip, but the"),
    ("wrap run.pth out.safetensors --key model", 2, "--all keeps the entry"),
]


@pytest.mark.parametrize(("words", "code", "said"), REFUSED)
def test_refused(
    words: str,
    code: int,
    said: str,
    ckptkit: Ckptkit,
    run_pth: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is written, and the files of the user stay unchanged."""
    monkeypatch.chdir(run_pth.parent)
    Path("list.json").write_text("[]")
    Path("nested.json").write_text('{"a": {"b": "c"}}')
    Path("mine.pth").write_text("mine")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    done = ckptkit(*shlex.split(words))
    assert done.exit_code == code and said in done.stderr
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_extract_and_wrap_are_ways_back(
    ckptkit: Ckptkit, run_pth: Path, tmp_path: Path, out: Path
) -> None:
    assert ckptkit("extract", run_pth, tmp_path / "model.pth", "--key", "model").exit_code == 0
    assert equal(load(tmp_path / "model.pth"), load(run_pth)["model"])
    assert ckptkit("wrap", tmp_path / "model.pth", out, "--key", "model").exit_code == 0
    assert equal(load(out)["model"], load(run_pth)["model"])


def test_convert_names_what_is_left_out(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    target = tmp_path / "run.safetensors"
    result = ckptkit("convert", run_pth, target)
    assert result.exit_code == 0
    stored, weights = load_file(target), load(run_pth)["model"]
    assert equal(dict(sorted(stored.items())), dict(sorted(weights.items())))
    assert "optimizer" in result.stderr


def test_convert_applies_everything_in_its_order(
    ckptkit: Ckptkit, tmp_path: Path, out: Path
) -> None:
    weights = {
        "module.enc.w": torch.ones(2, 2),
        "module.dec.w": torch.ones(2),
        "module.enc.n": torch.ones(3).long(),
    }
    torch.save(weights, tmp_path / "p.pth")
    result = ckptkit(
        "convert", tmp_path / "p.pth", out,
        "--compact", "--to", "cpu", "--cast", "enc.*=float16", "--sub", r"^net\.=", "--add", "net.",
        "--strip", "module.", "--drop", "module.dec.*",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert {name: tensor.dtype for name, tensor in load(out).items()} == {
        "enc.w": torch.float16,
        "enc.n": torch.int64,
    }


def test_convert_wants_a_suffix_that_it_knows(
    ckptkit: Ckptkit, run_pth: Path, tmp_path: Path
) -> None:
    result = ckptkit("convert", run_pth, tmp_path / "run.unknown")
    assert result.exit_code == 2
    assert ".safetensors" in result.stderr and "--format" in result.stderr
    assert (
        ckptkit("convert", run_pth, tmp_path / "run.unknown", "--format", "torch-zip").exit_code
        == 0
    )
    assert load(tmp_path / "run.unknown")["epoch"] == 3


@pytest.mark.parametrize("name", ["run", "run-1.5", "run.pth2", "run.pth.best", "folder/"])
def test_editing_keeps_the_format_under_a_name_without_another_suffix(
    ckptkit: Ckptkit, run_pth: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    assert ckptkit("strip-module", run_pth, f"{tmp_path}/{name}").exit_code == 0
    assert load(tmp_path / (f"{name}run.pth" if name.endswith("/") else name))["epoch"] == 3


@pytest.mark.parametrize("command", ["strip-module", "recover", "ema", "extract --key model"])
def test_every_writer_refuses_an_unknown_suffix(
    ckptkit: Ckptkit, run_pth: Path, command: str
) -> None:
    name, *options = command.split()
    torch.save({"model": {"module.w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, run_pth)
    done = ckptkit(name, run_pth, run_pth.with_name("out.txt"), *options)
    assert done.exit_code == 2 and "the suffix does not name a format" in done.stderr
    assert not run_pth.with_name("out.txt").exists()
    same = run_pth.rename(run_pth.with_name("run.best"))
    again = run_pth.with_name("other.best")
    assert ckptkit(name, same, again, *options).exit_code == 0 and again.exists()


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_file_goes_into_a_folder(
    ckptkit: Ckptkit, run_pth: Path, tmp_path: Path, slash: str
) -> None:
    (tmp_path / "made").mkdir()
    folder = f"{tmp_path}/made{slash}"
    assert ckptkit("strip-module", run_pth, folder).exit_code == 0
    assert ckptkit("convert", run_pth, folder, "--format", "safetensors").exit_code == 0
    assert ckptkit("recover", run_pth, folder, "--force").exit_code == 0
    assert sorted(os.listdir(folder)) == ["run.pth", "run.safetensors"]
    assert ckptkit("strip-module", run_pth, folder).exit_code == 2
    done = ckptkit("strip-module", run_pth, f"{tmp_path}/none/")
    assert done.exit_code == 4 and f"mkdir -p {tmp_path}/none" in done.stderr


def test_standard_output_is_no_file(
    ckptkit: Ckptkit, run_pth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_pth.parent)
    done = ckptkit("digest", run_pth, "-o", "-")
    assert done.exit_code == 2 and "./- is a file called" in done.stderr
    assert ckptkit("strip-module", run_pth, "./-").exit_code == 0
    assert load(Path("-"))["epoch"] == 3
    Path("-").unlink()


def test_standard_streams(run_pth: Path, ckptkit: Ckptkit) -> None:
    """One file each way: read in any order, so by way of temporary files."""
    data = run_pth.read_bytes()

    def piped(*words: str, data: bytes = data) -> Result:
        return CliRunner().invoke(main, words, input=data)

    stripped = run_pth.with_name("stripped.pth")
    ckptkit("strip-module", run_pth, stripped)
    done = piped("strip-module", "-", "-")
    assert done.stdout_bytes == stripped.read_bytes()
    assert done.stderr.startswith("note: wrote -: ")
    again = piped("convert", "-", "-", "--format", "safetensors", "--quiet", data=done.stdout_bytes)
    assert "0.weight" in safetensors.torch.load(again.stdout_bytes) and not again.stderr
    for words in ("inspect -", "verify -", "scan -", "doctor -", "digest -", "diff - -"):
        assert piped(*words.split()).exit_code in (0, 1), words
    for words, why in (
        ("convert - -", "the suffix does not name a format"),
        ("convert - - --shard-size 5GB", "is a single file"),
        ("strip-module - - --json", "already contains the object of --json"),
        ("strip-module - --in-place", "cannot edit a folder or a remote file in place"),
    ):
        done = piped(*words.split())
        assert done.exit_code == 2 and why in done.stderr and "error: -: " in done.stderr, words
    assert piped("inspect", "-", data=b"").exit_code == 3
    assert not run_pth.with_name("-").exists()


def test_objects(ckptkit: Ckptkit, tmp_path: Path, out: Path) -> None:
    torch.save({"w": torch.ones(1), "args": argparse.Namespace(lr=1)}, tmp_path / "o.pth")
    kept = ckptkit("remap", tmp_path / "o.pth", out, "--to", "cpu")
    assert kept.exit_code == 0 and "argparse.Namespace" in kept.stderr
    assert (
        ckptkit(
            "remap", tmp_path / "o.pth", out, "--to", "cpu", "--objects", "error", "--force"
        ).exit_code
        == 3
    )
    assert (
        ckptkit(
            "remap", tmp_path / "o.pth", out, "--to", "cpu", "--objects", "drop", "--force"
        ).exit_code
        == 0
    )
    assert list(load(out)) == ["w"]


def test_force(ckptkit: Ckptkit, run_pth: Path, out: Path) -> None:
    out.write_text("mine")
    assert ckptkit("strip-module", "--force", run_pth, out).exit_code == 0
    assert load(out)["epoch"] == 3


def test_in_place(ckptkit: Ckptkit, run_pth: Path) -> None:
    expected = without("module.", load(run_pth)["model"])
    result = ckptkit("strip-module", "--in-place", run_pth)
    assert result.exit_code == 0, result.stderr
    assert equal(load(run_pth)["model"], expected)


def test_dry_run_writes_nothing(ckptkit: Ckptkit, run_pth: Path, out: Path) -> None:
    result = ckptkit("strip-module", "--dry-run", run_pth, out)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"would write {out}: 15 tensors, ")
    assert "copied" in result.stdout
    assert not out.exists()


def test_quiet(ckptkit: Ckptkit, run_pth: Path, out: Path) -> None:
    result = ckptkit("convert", "--quiet", run_pth, out.with_suffix(".safetensors"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_verify_and_durable(ckptkit: Ckptkit, run_pth: Path, out: Path) -> None:
    assert ckptkit("strip-module", "--verify", "--durable", run_pth, out).exit_code == 0
    assert load(out)["epoch"] == 3


def test_the_json_report(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    target = tmp_path / "run.safetensors"
    result = ckptkit("convert", "--json", "--strip", "module.", run_pth, target)
    found = json.loads(result.stdout)
    assert found["schema"] == "ckptkit.edit/1"
    assert (found["inputs"], found["output"]) == ([str(run_pth)], str(target))
    assert (found["format"], found["tensor_count"], found["size"]) == (
        "safetensors",
        9,
        target.stat().st_size,
    )
    assert found["done"] == ["stripped 'module.' from 9 keys of model"]
    assert any("optimizer" in line for line in found["left_out"])
    assert (found["in_place"], found["dry_run"]) == (False, False)


def test_wrapping_for_a_format_of_weights_alone(
    ckptkit: Ckptkit, run_pth: Path, tmp_path: Path
) -> None:
    words = ("wrap", run_pth, tmp_path / "out.safetensors", "--key", "model", "--all")
    assert ckptkit(*words).exit_code == 0


def test_in_place_on_a_link_says_what_stays(
    ckptkit: Ckptkit, run_pth: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.pth").symlink_to(run_pth)
    done = ckptkit("strip-module", "--in-place", tmp_path / "link.pth")
    assert f"replaced the symlink; its target {run_pth} is unchanged" in done.stderr
