"""The commands that write: what they write, opened with torch; what they say; what they refuse."""

from __future__ import annotations

import argparse
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
pytestmark = pytest.mark.usefixtures("run_pth")


def load(path: str) -> Any:
    return torch.load(path, weights_only=True)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def save(path: str, **names: str) -> None:
    """Save a dict of state_dicts, whose names are given in one word."""
    made = {key: {name: torch.ones(1) for name in text.split()} for key, text in names.items()}
    torch.save(made, path)


def save_names(path: str, *names: str) -> None:
    torch.save({name: torch.full((1,), float(n)) for n, name in enumerate(names)}, path)


def plain() -> dict[str, torch.Tensor]:
    """Return the weights in run.pth without the prefix."""
    model = load("run.pth")["model"]
    return {name.removeprefix("module."): tensor for name, tensor in model.items()}


def test_strip_module(ckptkit: Ckptkit) -> None:
    said = ckptkit("strip-module run.pth out.pth", code=0).stdout
    assert said.startswith("wrote out.pth: 15 tensors, ")
    assert said.endswith("; stripped 'module.' from 9 keys of model\n")
    after = load("out.pth")
    assert equal(after["model"], plain())
    assert after["epoch"] == 3 and list(after) == list(load("run.pth"))


def test_strip_module_takes_other_prefixes(ckptkit: Ckptkit) -> None:
    save_names("c.pth", "_orig_mod.module.w", "b")
    done = ckptkit("strip-module --prefix _orig_mod. --prefix module. c.pth out.pth")
    assert list(load("out.pth")) == ["w", "b"]
    assert "without the prefix, not changed: 'b'" in done.stderr


def test_strip_module_edits_what_keys_name(ckptkit: Ckptkit) -> None:
    save("e.pth", model="module.w", ema="module.w")
    assert "--key model --key ema" in ckptkit("strip-module e.pth out.pth").stderr
    assert list(load("out.pth")["ema"]) == ["module.w"]
    ckptkit("strip-module --force --key model --key ema e.pth out.pth")
    assert list(load("out.pth")["model"]) == list(load("out.pth")["ema"]) == ["w"]


@pytest.mark.parametrize(
    ("before", "options", "hint"),
    [
        ("_orig_mod.", "", " --prefix _orig_mod. "),
        ("module._orig_mod.", "--prefix net.", " --prefix module. --prefix _orig_mod. "),
        ("net.", "--prefix module.", " --prefix net. "),
        ("", "--prefix net.", "ckptkit inspect"),
    ],
)
@pytest.mark.parametrize("places", ["--in-place p.pth", "p.pth o.pth"])
def test_nothing_to_strip_is_1_and_nothing_is_written(
    before: str, options: str, hint: str, places: str, ckptkit: Ckptkit
) -> None:
    """The hint is the command for the prefix that the file has, and it works."""
    save_names("p.pth", f"{before}0.weight", f"{before}1.bias")
    data = Path("p.pth").read_bytes()
    done = ckptkit(f"strip-module {options} {places}", code=1)
    assert done.stdout == "" and hint in done.stderr
    assert Path("p.pth").read_bytes() == data and not Path("o.pth").exists()
    if before:
        ckptkit(done.stderr.partition("ckptkit ")[2])
        assert list(load(places.split()[-1])) == ["0.weight", "1.bias"]


@pytest.mark.parametrize("before", ["net.", ""])
def test_keys_of_no_wrapper_are_copied_with_a_warning(before: str, ckptkit: Ckptkit) -> None:
    save_names("p.pth", f"{before}0.weight")
    done = ckptkit("strip-module p.pth out.pth", code=0)
    assert "no key starts with 'module.'" in done.stderr
    assert list(load("out.pth")) == [f"{before}0.weight"]
    ckptkit("strip-module --force --strict p.pth out.pth", code=2)


def test_a_batch_copies_files_without_the_prefix(ckptkit: Ckptkit) -> None:
    for name in ("module.w", "w"):
        save_names(f"{name}.pth", name)
    done = ckptkit("batch strip-module --into out '*w.pth'", code=0)
    assert "w.pth: no key starts with 'module.'" in done.stderr
    assert [list(load(str(each))) for each in Path("out").glob("*.pth")] == [["w"], ["w"]]


def test_a_collision_is_3(ckptkit: Ckptkit) -> None:
    save_names("p.pth", "module.w", "w")
    done = ckptkit("strip-module p.pth out.pth", code=3)
    assert done.stdout == "" and "'w'" in done.stderr and not Path("out.pth").exists()


def test_add_module(ckptkit: Ckptkit) -> None:
    ckptkit("strip-module run.pth plain.pth")
    ckptkit("add-module plain.pth out.pth", code=0)
    assert equal(load("out.pth")["model"], load("run.pth")["model"])
    ckptkit("add-module --prefix net. --force plain.pth out.pth", code=0)
    assert all(name.startswith("net.") for name in load("out.pth")["model"])


def test_remap(ckptkit: Ckptkit, as_json: Json, simulated_cuda: Any) -> None:
    with simulated_cuda(1):
        torch.save({"w": torch.ones(3)}, "c.pth")
    ckptkit("remap c.pth out.pth --device cuda:1=cuda:0", code=0)
    assert as_json("inspect out.pth")["files"][0]["tensors"][0]["device"] == "cuda:0"
    assert "cuda:1 -> cpu" in ckptkit("remap c.pth out.pth --to cpu --force").stdout
    assert torch.equal(load("out.pth")["w"], torch.ones(3))


def test_rename(ckptkit: Ckptkit) -> None:
    save_names("p.pth", "a.w", "b.w")
    Path("names.json").write_text('{"a.w": "first"}')
    ckptkit(r"rename p.pth out.pth --map names.json --sub '^(?=b)b\.=c.'", code=0)
    assert list(load("out.pth")) == ["first", "c.w"]


def test_extract_and_wrap_are_ways_back(ckptkit: Ckptkit) -> None:
    ckptkit("extract run.pth model.pth --key model", code=0)
    assert equal(load("model.pth"), load("run.pth")["model"])
    ckptkit("wrap model.pth out.pth --key model", code=0)
    assert equal(load("out.pth")["model"], load("run.pth")["model"])
    ckptkit("wrap model.pth out.safetensors --key model --all", code=0)


def test_convert_names_what_is_left_out(ckptkit: Ckptkit, as_json: Json) -> None:
    assert "optimizer" in ckptkit("convert run.pth run.safetensors", code=0).stderr
    stored, weights = load_file("run.safetensors"), load("run.pth")["model"]
    assert equal(dict(sorted(stored.items())), dict(sorted(weights.items())))
    found = as_json("convert --force --strip module. run.pth run.safetensors")
    assert found["schema"] == "ckptkit.edit/1"
    assert (found["inputs"], found["output"]) == (["run.pth"], "run.safetensors")
    assert (found["format"], found["tensor_count"]) == ("safetensors", 9)
    assert found["size"] == os.path.getsize("run.safetensors")
    assert found["done"] == ["stripped 'module.' from 9 keys of model"]
    assert any("optimizer" in line for line in found["left_out"])
    assert (found["in_place"], found["dry_run"]) == (False, False)
    done = ckptkit("convert --force --quiet run.pth run.safetensors")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_convert_applies_everything_in_its_order(ckptkit: Ckptkit) -> None:
    shapes: dict[str, Any] = {"module.enc.w": (2, 2), "module.dec.w": 2}
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    torch.save({**weights, "module.enc.n": torch.ones(3).long()}, "p.pth")
    words = r"--compact --to cpu --cast enc.*=float16 --sub '^net\.=' --add net. --strip module."
    ckptkit(f"convert p.pth out.pth {words} --drop module.dec.*", code=0)
    found = {name: tensor.dtype for name, tensor in load("out.pth").items()}
    assert found == {"enc.w": torch.float16, "enc.n": torch.int64}


def test_convert_wants_a_suffix_that_it_knows(ckptkit: Ckptkit) -> None:
    said = ckptkit("convert run.pth run.unknown", code=2).stderr
    assert ".safetensors" in said and "--format" in said
    ckptkit("convert run.pth run.unknown --format torch-zip", code=0)
    assert load("run.unknown")["epoch"] == 3


@pytest.mark.parametrize("name", ["run", "run-1.5", "run.pth2", "run.pth.best", "folder/"])
def test_editing_keeps_the_format_under_a_name_without_another_suffix(
    ckptkit: Ckptkit, name: str
) -> None:
    Path("folder").mkdir()
    ckptkit(f"strip-module run.pth {name}", code=0)
    assert load(f"{name}run.pth" if name.endswith("/") else name)["epoch"] == 3


@pytest.mark.parametrize("command", ["strip-module", "recover", "ema", "extract --key model"])
def test_every_writer_refuses_an_unknown_suffix(ckptkit: Ckptkit, command: str) -> None:
    save("run.pth", model="module.w", ema="w")
    said = ckptkit(f"{command} run.pth out.txt", code=2).stderr
    assert "the suffix does not name a format" in said and not Path("out.txt").exists()
    os.rename("run.pth", "run.best")
    ckptkit(f"{command} run.best other.best", code=0)
    assert Path("other.best").exists()


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_file_goes_into_a_folder(ckptkit: Ckptkit, slash: str) -> None:
    Path("made").mkdir()
    ckptkit(f"strip-module run.pth made{slash}", code=0)
    ckptkit(f"convert run.pth made{slash} --format safetensors", code=0)
    ckptkit(f"recover run.pth made{slash} --force", code=0)
    assert sorted(os.listdir("made")) == ["run.pth", "run.safetensors"]
    ckptkit(f"strip-module run.pth made{slash}", code=2)
    said = ckptkit("strip-module run.pth none/", code=4).stderr
    assert f"mkdir -p {Path('none').absolute()}\n" in said


def test_standard_output_is_no_file(ckptkit: Ckptkit) -> None:
    assert "./- is a file called" in ckptkit("digest run.pth -o -", code=2).stderr
    ckptkit("strip-module run.pth ./-", code=0)
    assert load("-")["epoch"] == 3


def test_standard_streams(ckptkit: Ckptkit) -> None:
    """One file each way: read in any order, so by way of temporary files."""
    whole = Path("run.pth").read_bytes()

    def piped(words: str, data: bytes = whole) -> Result:
        return CliRunner().invoke(main, shlex.split(words), input=data)

    ckptkit("strip-module run.pth stripped.pth")
    done = piped("strip-module - -")
    assert done.stdout_bytes == Path("stripped.pth").read_bytes()
    assert done.stderr.startswith("note: wrote -: ")
    again = piped("convert - - --format safetensors --quiet", done.stdout_bytes)
    assert "0.weight" in safetensors.torch.load(again.stdout_bytes) and not again.stderr
    for words in ("inspect -", "verify -", "scan -", "doctor -", "digest -", "diff - -"):
        assert piped(words).exit_code in (0, 1), words
    for words, why in (
        ("convert - -", "the suffix does not name a format"),
        ("convert - - --shard-size 5GB", "is a single file"),
        ("strip-module - - --json", "already contains the object of --json"),
        ("strip-module - --in-place", "cannot edit a folder or a remote file in place"),
    ):
        done = piped(words)
        assert done.exit_code == 2 and why in done.stderr and "error: -: " in done.stderr, words
    assert piped("inspect -", b"").exit_code == 3
    assert not Path("-").exists()


def test_objects(ckptkit: Ckptkit) -> None:
    torch.save({"w": torch.ones(1), "args": argparse.Namespace(lr=1)}, "o.pth")
    words = "remap o.pth out.pth --to cpu --force"
    assert "argparse.Namespace" in ckptkit(words, code=0).stderr
    ckptkit(f"{words} --objects error", code=3)
    ckptkit(f"{words} --objects drop", code=0)
    assert list(load("out.pth")) == ["w"]


def test_force_verify_and_durable(ckptkit: Ckptkit) -> None:
    Path("out.pth").write_text("mine")
    ckptkit("strip-module --force --verify --durable run.pth out.pth", code=0)
    assert load("out.pth")["epoch"] == 3


def test_in_place(ckptkit: Ckptkit) -> None:
    expected = plain()
    ckptkit("strip-module --in-place run.pth", code=0)
    assert equal(load("run.pth")["model"], expected)


def test_in_place_on_a_link_says_what_stays(ckptkit: Ckptkit) -> None:
    Path("link.pth").symlink_to("run.pth")
    said = ckptkit("strip-module --in-place link.pth").stderr
    assert "replaced the symlink; its target run.pth is unchanged" in said


def test_dry_run_writes_nothing(ckptkit: Ckptkit) -> None:
    said = ckptkit("strip-module --dry-run run.pth out.pth", code=0).stdout
    assert said.startswith("would write out.pth: 15 tensors, ") and "copied" in said
    assert not Path("out.pth").exists()
