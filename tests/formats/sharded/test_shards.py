"""Sharded checkpoints: whatever the index and the folder disagree on is an error, and nothing is
dropped."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.core.bytesource import Folder, LocalFile, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    InputError,
    PathError,
)
from ckptkit.formats.format import Probe
from ckptkit.formats.table import SHARDED, SHARDED_BIN

State = dict[str, torch.Tensor]
FORMATS = (SHARDED, SHARDED_BIN)
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
WHOLE = {"a": [1, 1], "b": [0, 0, 0]}  # the values that `make` writes


def make(
    folder: Path,
    shards: dict[str, State] | None = None,
    *,
    weight_map: object = None,
    metadata: object = None,
    index: str = INDEX,
    save: Callable[[State, Path], object] = save_file,
) -> Path:
    """A folder with shards and the index that fits them, unless `weight_map` is another."""
    folder.mkdir(exist_ok=True)
    shards = {ONE: {"a": torch.ones(2)}, TWO: {"b": torch.zeros(3)}} if shards is None else shards
    places = {}
    for name, state in shards.items():
        save(state, folder / name)
        places |= dict.fromkeys(state, name)
    said = {} if metadata is None else {"metadata": metadata}
    text = json.dumps({**said, "weight_map": places if weight_map is None else weight_map})
    (folder / index).write_text(text, encoding="utf-8")
    return folder


def read(path: Path) -> Checkpoint:
    probe = Probe(Folder(path) if path.is_dir() else LocalFile(path))
    (format,) = (each for each in FORMATS if each.matches(probe))
    return format.read(probe)


def values(checkpoint: Checkpoint) -> dict[str, list[float]]:
    found = {}
    for name, tensor in checkpoint.weights.items():
        assert tensor.storage is not None
        extent = tensor.storage.record.locate()
        assert isinstance(extent, Range) and tensor.dtype.name == "float32"
        found[name] = torch.frombuffer(bytearray(extent.read()), dtype=torch.float32).tolist()
    return found


# What others write


def test_an_index_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path / "x"))
    assert values(read(Path(INDEX))) == WHOLE


def test_one_shard_without_a_number_and_none(tmp_path: Path) -> None:
    make(tmp_path / "x", {"model.safetensors": {"a": torch.ones(2)}})
    assert values(read(tmp_path / "x")) == {"a": [1, 1]}
    assert read(make(tmp_path / "y", {})).root == {}


@pytest.mark.parametrize(
    "state",
    [
        {"rng_state": torch.zeros(16, dtype=torch.uint8)},
        {"a": torch.ones(1), "a_extra_state": torch.ones(1)},
        {"a": torch.ones(1), "optimizer_extra_state": 3},
    ],
)
def test_entries_of_a_shard_are_all_that_it_holds(tmp_path: Path, state: dict[str, Any]) -> None:
    file, index = "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"
    root = read(make(tmp_path, {file: state}, index=index, save=torch.save)).root
    assert isinstance(root, dict) and list(root) == list(state)


def test_ties_that_the_index_records(tmp_path: Path) -> None:
    make(tmp_path / "x", metadata={"total_size": 20, "head": "a"})
    checkpoint = read(tmp_path / "x")
    assert list(checkpoint.weights) == ["a", "b", "head"]
    assert checkpoint.weights["head"].storage is checkpoint.weights["a"].storage
    assert checkpoint.extras == {}


# Hostile and damaged folders


def shard(number: int, total: int, stem: str = "model") -> str:
    return f"{stem}-{number:05}-of-{total:05}.safetensors"


A, B, C = ({name: torch.ones(1)} for name in "abc")
TOTAL = "the total in their file names is"
LONG = "model-000000001-of-999999999.safetensors"
# What `make` gets, whether the index stays, the error, and what it says.
REFUSED: list[tuple[dict[str, Any], bool, type[CkptkitError], str]] = [
    *(
        ({"weight_map": {"a": ONE, "b": name}}, True, PathError, "")
        for name in (
            *("../x", "a/../../x", "/etc/passwd", "C:\\x", "\\\\srv\\x", "file://x", "%2e%2e%2fx"),
            *("a\0b", "", ".", "..", "sub/x"),
        )
    ),
    ({"weight_map": {"a": ONE, "b": TWO, "c": TWO}}, True, CorruptError, f"maps 'c' to {TWO}"),
    (
        {"shards": {ONE: A | C, TWO: B}, "weight_map": {"a": ONE, "b": TWO}}, True,
        CorruptError, f"{ONE} contains 'c'",
    ),
    ({"shards": {ONE: A | B, TWO: B}}, True, AmbiguousError, f"'b' is in two shards: {ONE} and {TWO}"),
    ({"shards": {ONE: A, TWO: A}}, False, AmbiguousError, f"'a' is in two shards: {ONE} and {TWO}"),
    ({"weight_map": {"a": ONE, "b": INDEX}}, True, CkptkitError, ""),
    ({"shards": {shard(1, 3): A, shard(2, 3): B}}, True, CorruptError, TOTAL),
    ({"shards": {ONE: A, shard(2, 3): B}}, True, CorruptError, TOTAL),
    ({"shards": {ONE: A, TWO: B, f"model-2{TWO[11:]}": C}}, False, AmbiguousError, f"{TOTAL} 2"),
    ({"shards": {ONE: A}}, False, CorruptError, "1 of 2 shards are missing: number 2"),
    ({"shards": {TWO: A}}, False, CorruptError, "1 of 2 shards are missing: number 1"),
    ({"shards": {LONG: A}}, False, CorruptError, "999,999,998 of 999,999,999 shards are missing"),
    (
        {"shards": {ONE: A}, "weight_map": {"a": ONE, "b": TWO}}, True,
        CorruptError, f"1 of 2 shards are missing: {TWO}",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("made", "has_index", "error", "said"), REFUSED)
def test_SH_01_SH_05_SH_07_SH_09_refused(
    made: dict[str, Any], has_index: bool, error: type[CkptkitError], said: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "x", **made)
    if not has_index:
        (folder / INDEX).unlink()
    (folder / "sub").mkdir()
    for outside in (folder / "sub" / "x", tmp_path / "x.safetensors"):
        save_file(B, outside)
    with pytest.raises(error, match=said or None):
        read(folder)


INDEXES = (
    "", "null", "[]", "{}", '{"weight_map":[]}', '{"weight_map":null}', '{"weight_map":{"a":1}}',
    '{"weight_map":{"a":null}}', '{"weight_map":{"a":["x"]}}', '{"weight_map":{"a":"x","a":"x"}}',
    '{"weight_map":{},"metadata":[1]}', '{"weight_map":{},"metadata":"x"}',
    '{"weight_map":{},"metadata":{"total_size":NaN}}',
)  # fmt: skip
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
SHARDS = ('{"weight_map":{}}', POINTER, "<!doctype html>", "", None)


@pytest.mark.parametrize(
    ("file", "text"), [*((INDEX, text) for text in INDEXES), *((TWO, text) for text in SHARDS)]
)
def test_SH_04_SH_07_a_file_that_is_none(file: str, text: str | None, tmp_path: Path) -> None:
    """Of other content, or cut."""
    place = make(tmp_path / "x") / file
    data = place.read_bytes()[:-1] if text is None else text.encode()
    place.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read(tmp_path / "x")
    assert caught.value.where == str(place)
    assert ("git lfs pull" in str(caught.value.hint)) == (text == POINTER)


# What `make` gets, the error, and what it says.
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
SHARDS = ('{"weight_map":{}}', POINTER, "<!doctype html>", "")


def test_SH_02_links(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    elsewhere = tmp_path / "elsewhere.safetensors"
    shutil.move(folder / ONE, elsewhere)
    for target in (elsewhere, tmp_path / "x" / ONE):
        (folder / ONE).unlink(missing_ok=True)
        (folder / ONE).symlink_to(target)
        with pytest.raises(PathError):
            read(folder)


def test_SH_02_links_of_the_hub(tmp_path: Path) -> None:
    made = make(tmp_path / "made")
    snapshot, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(sorted(os.listdir(made))):
        shutil.move(made / name, blobs / f"{number:040}")
        (snapshot / name).symlink_to(f"../../blobs/{number:040}")
    for path in (snapshot, snapshot / INDEX):
        assert values(read(path)) == WHOLE


def test_SH_03_special_files(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    (folder / TWO).unlink()
    os.mkfifo(folder / TWO)
    with pytest.raises(PathError):
        read(folder)
    (folder / TWO).unlink()
    (folder / TWO).mkdir()
    with pytest.raises(PathError):
        read(folder)


def test_order_is_that_of_the_index(tmp_path: Path) -> None:
    """Also where it names the shards in turns; ties that it omits follow."""
    states: list[State] = [{f"{n}{shard}": torch.ones(1) * n for n in range(4)} for shard in "ab"]
    states[1]["tied"] = states[1]["2b"]
    files = [file.replace("safetensors", "bin") for file in (ONE, TWO)]
    order = ["1b", "3a", "2b", "0b", "1a", "0a", "3b", "2a"]
    folder = make(
        tmp_path / "model",
        dict(zip(files, states, strict=True)),
        weight_map={name: files["ab".index(name[1])] for name in order},
        index="pytorch_model.bin.index.json",
        save=torch.save,
    )
    found = read(folder)
    assert list(found.weights) == [*order, "tied"]
    assert values(found) == {**{name: [int(name[0])] for name in order}, "tied": [2]}


@pytest.mark.parametrize("total", [0, -1, 2**64, 20.0, "20", None, True, [20]])
def test_SH_06_total_size_lies(tmp_path: Path, total: Any) -> None:
    make(tmp_path / "x", metadata={"total_size": total})
    checkpoint = read(tmp_path / "x")
    (warning,) = checkpoint.warnings
    assert "20" in warning and "total_size" not in checkpoint.extras


def test_SH_09_two_indexes(tmp_path: Path) -> None:
    """Of two models."""
    folder = make(tmp_path / "x")
    (folder / "other.safetensors.index.json").write_text((folder / INDEX).read_text())
    with pytest.raises(AmbiguousError) as caught:
        ckptkit.open(folder)
    assert str(folder / INDEX) in str(caught.value.hint)
    assert values(read(folder / INDEX)) == WHOLE


def test_SH_09_two_indexes_of_one_model(tmp_path: Path) -> None:
    """As safetensors and as torch files: what transformers takes is taken."""
    folder = make(tmp_path / "x")
    shards = {
        f"pytorch_model-0000{n}-of-00002.bin": {name: torch.full((4,), 7.0)}
        for n, name in ((1, "a"), (2, "b"))
    }
    make(folder, shards, index="pytorch_model.bin.index.json", save=torch.save)
    checkpoint = read(folder)
    assert values(checkpoint) == WHOLE and checkpoint.format == "sharded"
    (warning,) = checkpoint.warnings
    assert "also contains" in warning and "pytorch_model.bin.index.json" in warning
    checkpoint = read(folder / "pytorch_model.bin.index.json")
    assert values(checkpoint) == {"a": [7] * 4, "b": [7] * 4} and checkpoint.format == "sharded-bin"
    assert checkpoint.warnings == ()


def test_SH_09_an_index_beside_a_whole_file(tmp_path: Path) -> None:
    """transformers would load model.safetensors, others what the index says."""
    folder = make(tmp_path / "x")
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(AmbiguousError, match=r"model\.safetensors"):
        read(folder)
    assert values(read(folder / INDEX)) == WHOLE


def test_SH_09_shards_of_another_download_beside_them(tmp_path: Path) -> None:
    """Files that the index does not name are not read, and that is said."""
    folder = make(tmp_path / "x")
    save_file({"c": torch.ones(1)}, folder / "model-00003-of-00003.safetensors")
    torch.save({"a": torch.zeros(2)}, folder / "pytorch_model.bin")
    checkpoint = read(folder)
    assert values(checkpoint) == WHOLE
    (warning,) = checkpoint.warnings
    assert "model-00003-of-00003.safetensors, pytorch_model.bin" in warning


# Without an index


@pytest.mark.parametrize("first", [0, 1])
def test_shards_without_an_index(tmp_path: Path, first: int) -> None:
    names = [f"model-{number:05}-of-00003.safetensors" for number in range(first, first + 3)]
    state = {"z": torch.ones(2), "y": torch.zeros(3), "x": torch.full((1,), 4.0)}
    folder = make(
        tmp_path / "x", {file: {name: state[name]} for file, name in zip(names, state, strict=True)}
    )
    (folder / INDEX).unlink()
    checkpoint = read(folder)
    assert list(checkpoint.weights) == ["z", "y", "x"] and checkpoint.format == "sharded"
    assert values(checkpoint) == {"z": [1, 1], "y": [0, 0, 0], "x": [4]}
    (warning,) = checkpoint.warnings
    assert "no index" in warning


def test_SH_09_two_downloads_without_an_index(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    (folder / INDEX).unlink()
    save_file({"c": torch.ones(1)}, folder / "model-00003-of-00003.safetensors")
    with pytest.raises(AmbiguousError) as caught:
        ckptkit.open(folder)
    assert ONE in str(caught.value) and "model-00003-of-00003.safetensors" in str(caught.value)


def test_shards_of_torch_without_an_index(tmp_path: Path) -> None:
    tied = torch.full((2,), 3.0)
    shards = {
        "pytorch_model-00001-of-00002.bin": OrderedDict(a=torch.ones(2)),
        "pytorch_model-00002-of-00002.bin": OrderedDict(head=tied, embed=tied),
    }
    for number, shard in enumerate(shards.values()):
        shard._metadata = OrderedDict({f"m{number}": {"version": number}})
    folder = make(tmp_path / "x", shards, index="pytorch_model.bin.index.json", save=torch.save)
    (folder / "pytorch_model.bin.index.json").unlink()
    checkpoint = read(folder)
    assert checkpoint.format == "sharded-bin"
    assert values(checkpoint) == {"a": [1, 1], "head": [3, 3], "embed": [3, 3]}
    assert checkpoint.weights["head"].storage is checkpoint.weights["embed"].storage
    assert checkpoint.root.state == {"_metadata": {"m0": {"version": 0}, "m1": {"version": 1}}}
