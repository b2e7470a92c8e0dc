"""Folders that stand for a checkpoint: what is meant is read, what is not is named, doubts are
errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.core.errors import AmbiguousError, CkptkitError, CorruptError, FormatError, PathError

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
# Names of training state.
STATE = (
    "rng_state.pth", "rng_state_0.pth", "rng_state_1.pth", "training_args.bin", "scaler.pt",
    "optimizer_1.bin", "sampler.bin",
)  # fmt: skip


def make(folder: Path, names: Iterable[str]) -> Path:
    """Files whose one tensor is called as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        state = {name: torch.ones(2)}
        if name.endswith(".safetensors"):
            save_file(state, folder / name)
        elif name.endswith(".npz"):
            np.savez(folder / name, **{name: np.ones(2)})
        elif name.endswith(".json"):
            (folder / name).write_text("{}")
        else:
            torch.save(state, folder / name)
    return folder


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors"], "model.safetensors"),
        (["pytorch_model.bin"], "pytorch_model.bin"),
        (["model.safetensors", "config.json", "tokenizer.json"], "model.safetensors"),
        (["adapter_model.safetensors", "adapter_config.json"], "adapter_model.safetensors"),
        (["last.ckpt"], "last.ckpt"),
        (["last.pth.tar"], "last.pth.tar"),
        (["last.th"], "last.th"),
        (["weights.npz"], "weights.npz"),
        (["consolidated.00.pth", "params.json"], "consolidated.00.pth"),
        (["model.safetensors", "optimizer.pt", "scheduler.pt", *STATE], "model.safetensors"),
        (["pytorch_model.bin", "optimizer.bin", *STATE], "pytorch_model.bin"),
        (["optimizer.pt"], "optimizer.pt"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_one_file(tmp_path: Path, names: list[str], chosen: str) -> None:
    checkpoint = ckptkit.open(make(tmp_path / "x", names))
    assert list(checkpoint.weights) == [chosen]
    assert checkpoint.name == str(tmp_path / "x" / chosen)
    assert checkpoint.format == ckptkit.open(tmp_path / "x" / chosen).format
    assert checkpoint.warnings == ()


@pytest.mark.parametrize(
    "other", ["pytorch_model.bin", "model.bin", "model.pt", "pytorch_model.bin.index.json"]
)
def test_safetensors_rather_than_torch(tmp_path: Path, other: str) -> None:
    """Of one model, as transformers does, and with a word about it."""
    checkpoint = ckptkit.open(make(tmp_path / "x", ["model.safetensors", other]))
    assert list(checkpoint.weights) == ["model.safetensors"]
    assert checkpoint.warnings == (f"the folder also contains {other}, not read",)


@pytest.mark.parametrize(
    "names",
    [
        ["a.safetensors", "b.safetensors"],
        ["model.safetensors", "model.fp16.safetensors"],
        ["epoch=1.ckpt", "epoch=2.ckpt"],
        ["adapter_model.safetensors", "model.safetensors"],
        ["adapter.safetensors", "base.pth"],
        ["model.bin", "model.pth"],
        ["consolidated.safetensors", ONE, TWO],
        ["optimizer.pt", "scheduler.pt"],
    ],
    ids="+".join,
)
def test_SH_09_several_files(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(AmbiguousError) as caught:
        ckptkit.open(make(tmp_path / "x", names))
    assert caught.value.where == str(tmp_path / "x")
    for name in {name for name in names if name != TWO}:
        assert name in str(caught.value)
    assert str(tmp_path / "x" / min(names)) in str(caught.value.hint)


def test_SH_02_SH_03_what_is_no_file_of_the_folder(tmp_path: Path) -> None:
    """A link that leads out, a folder called like a file, and a file that is damaged."""
    make(tmp_path, ["secret.safetensors"])
    place = tmp_path / "x" / "model.safetensors"
    place.parent.mkdir()
    place.symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(PathError):
        ckptkit.open(place.parent)
    place.unlink()
    place.mkdir()
    with pytest.raises(PathError):
        ckptkit.open(place.parent)
    place.rmdir()
    place.write_bytes((tmp_path / "secret.safetensors").read_bytes()[:-1])
    with pytest.raises(CkptkitError) as caught:
        ckptkit.open(place.parent)
    assert caught.value.where == str(place)


# The cache of the Hugging Face hub


def cache(folder: Path, revisions: dict[str, list[str]], main: str | None) -> Path:
    """As huggingface_hub lays it out: links to blobs."""
    (folder / "blobs").mkdir(parents=True)
    for revision, names in revisions.items():
        snapshot = folder / "snapshots" / revision
        for name in names:
            place = snapshot / name
            place.parent.mkdir(parents=True, exist_ok=True)
            blob = f"{len(os.listdir(folder / 'blobs')):040x}"
            made = make(folder / "made", [place.name])
            shutil.move(made / place.name, folder / "blobs" / blob)
            place.symlink_to(os.path.relpath(folder / "blobs" / blob, place.parent))
    shutil.rmtree(folder / "made", ignore_errors=True)
    if main is not None:
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text(main)
    return folder


def test_the_cache_of_a_model(tmp_path: Path) -> None:
    files = ["model.safetensors", "config.json"]
    revisions = {"aaa": files, "bbb": ["pytorch_model.bin"]}
    folder = cache(tmp_path / "models--me--net", revisions, "aaa")
    for path in (folder, folder / "snapshots/aaa", folder / "snapshots/aaa/model.safetensors"):
        assert list(ckptkit.open(path).weights) == ["model.safetensors"]
    assert list(ckptkit.open(folder / "snapshots/bbb").weights) == ["pytorch_model.bin"]
    (folder / "refs/main").write_text("bbb\n")
    assert list(ckptkit.open(folder).weights) == ["pytorch_model.bin"]


def test_shards_in_a_cache(tmp_path: Path) -> None:
    folder = cache(tmp_path / "models--me--net", {"aaa": [ONE, TWO]}, "aaa")
    checkpoint = ckptkit.open(folder)
    assert list(checkpoint.weights) == [ONE, TWO] and checkpoint.format == "sharded"


def test_SH_02_links_of_a_cache_lead_to_its_own_blobs(tmp_path: Path) -> None:
    folder = cache(tmp_path / "models--me--net", {"aaa": ["model.safetensors"]}, "aaa")
    other = cache(tmp_path / "models--me--other", {"aaa": ["model.safetensors"]}, "aaa")
    (blob,) = (other / "blobs").iterdir()
    for name in ("model.safetensors", "unet/model.safetensors"):
        place = folder / "snapshots/aaa" / name
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(blob)
        with pytest.raises(PathError):
            ckptkit.open(place.parent)


@pytest.mark.parametrize("main", ["ccc", "", "../../elsewhere", "..", "\0", "\xff" * 1000])
def test_SH_01_a_revision_that_is_not_there(tmp_path: Path, main: str) -> None:
    folder = cache(tmp_path / "models--me--net", {"aaa": ["model.safetensors"]}, main)
    make(tmp_path / "elsewhere", ["model.safetensors"])
    with pytest.raises(CorruptError, match="which was not downloaded"):
        ckptkit.open(folder)


def test_a_cache_inside_a_cache(tmp_path: Path) -> None:
    folder = cache(tmp_path / "models--me--net", {}, "aaa")
    (folder / "snapshots").mkdir()
    (folder / "snapshots/aaa").symlink_to("..")
    with pytest.raises(FormatError, match="inside a cache"):
        ckptkit.open(folder)


@pytest.mark.parametrize("has_refs", [True, False])
def test_a_cache_without_main(tmp_path: Path, has_refs: bool) -> None:
    """Of several revisions, of one, and of none; other refs than main do not count."""
    names = ["model.safetensors"]
    folder = cache(tmp_path / "models--me--net", {"aaa": names, "bbb": names}, None)
    if has_refs:
        (folder / "refs").mkdir()
        (folder / "refs" / "v1.0").write_text("aaa")
    with pytest.raises(AmbiguousError, match="2 revisions, none called main: aaa, bbb") as caught:
        ckptkit.open(folder)
    assert str(folder / "snapshots") in str(caught.value.hint)
    shutil.rmtree(folder / "snapshots" / "bbb")
    assert list(ckptkit.open(folder).weights) == ["model.safetensors"]
    shutil.rmtree(folder / "snapshots" / "aaa")
    with pytest.raises(AmbiguousError, match="0 revisions"):
        ckptkit.open(folder)
