"""Folders that torch.distributed.checkpoint loads, and `dcp_to_torch_save` reads, from ours."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckptkit
from ckptkit import formats
from ckptkit.api import convert as ckptkit_convert
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    CkptkitError,
    CollisionError,
    FormatError,
    LimitError,
    OutputExistsError,
    UnsafeGlobalError,
    UsageError,
)
from ckptkit.core.options import Options
from ckptkit.core.tree import Global, Object
from ckptkit.formats.dcp_metadata import Flat
from ckptkit.formats.format import Probe
from tests.conftest import Run
from tests.formats.conformance import elements, elements_of
from tests.formats.dcp.making import Crafted, alone, archive, whole
from tests.formats.dcp.test_reading import same
from tests.ranks import run_ranks


def convert(state: Any, folder: Path, **options: Any) -> tuple[Path, tuple[str, ...]]:
    """The folder that ckptkit makes of what torch saves, and what it says of it."""
    torch.save(state, folder.with_suffix(".pth"))
    source, chosen = ckptkit.open(folder.with_suffix(".pth")), Options(**options)
    done = ckptkit.save(source, folder, format="dcp", options=chosen, verify=True)
    return folder, done.plan.notes


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_model_loads_it(tmp_path: Path) -> None:
    model, _ = trained()
    folder, _ = convert({"model": model.state_dict(), "epoch": 3}, tmp_path / "x")
    assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp"]
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    state = {"model": other.state_dict(), "epoch": 0}
    with alone():
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert state["epoch"] == 3
    same(dict(state["model"]), dict(model.state_dict()))


@pytest.mark.parametrize(("momentum", "named"), [(0.9, False), (0, False), (0.9, True)])
def test_an_optimizer_goes_on_from_a_folder(momentum: float, named: bool, tmp_path: Path) -> None:
    """`load_state_dict` passes over keys that are strings, and fails without a state."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
        params = model.named_parameters() if named else model.parameters()
        return model, torch.optim.SGD(params, lr=0.1, momentum=momentum)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    state = {"model": dict(model.state_dict()), "optim": optimizer.state_dict()}
    ours, _ = convert(state, tmp_path / "ours")
    with alone():
        dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    step(model, optimizer)
    for folder in (ours, tmp_path / "theirs"):
        ckptkit.convert(folder, folder.with_suffix(".back.pth"), keep_format=False)
        back = torch.load(folder.with_suffix(".back.pth"))
        assert back["optim"]["param_groups"] == optimizer.state_dict()["param_groups"]
        other, resumed = made()
        other.load_state_dict(back["model"])
        resumed.load_state_dict(back["optim"])
        step(other, resumed)
        assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_torch_reads_all_of_it(tmp_path: Path) -> None:
    model, optimizer = trained()
    base = torch.randn(4, 5)
    state = {
        "model": dict(model.state_dict()),
        "optim": optimizer.state_dict(),
        "mixed": [torch.ones(2), "x", [1, 2], {"deep": [[torch.ones(2)], None]}],
        "pair": (torch.ones(2), 3),
        "plain": [1, (2, 3), None],
        "transposed": base.t(),
        "row": base[1],
        "expanded": base[0, :1].expand(3),
        "conj": torch.ones(2, dtype=torch.complex64).conj() * 1j,
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "parameter": nn.Parameter(torch.ones(2)),
        "ключ": "значение",
    }
    folder, _ = convert(state, tmp_path / "x")
    with alone():
        dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = whole(folder), whole(tmp_path / "theirs")
    same(ours, theirs)


def test_what_is_no_plain_tensor_is_a_value(tmp_path: Path) -> None:
    state = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 3, torch.qint8),
        "meta": torch.ones(2, device="meta"),
        "array": np.arange(3),
    }
    folder, _ = convert(state, tmp_path / "x")
    found = whole(folder)
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert elements(found["quantized"]) == elements(state["quantized"])
    assert found["meta"].is_meta
    assert (found["array"] == np.arange(3)).all()


def test_ties_are_stored_once(tmp_path: Path) -> None:
    tied = torch.randn(1000)
    state = {"a": tied, "b": tied, "c": tied[1:]}
    folder, _ = convert(state, tmp_path / "x")
    apart, _ = convert(state, tmp_path / "y", ties="duplicate")
    assert os.path.getsize(folder / "__0_0.distcp") < os.path.getsize(apart / "__0_0.distcp") - 4000
    for each in (folder, apart):
        same(whole(each), state | {"c": tied[1:].clone()})
    weights = ckptkit.open(folder).weights
    assert weights["a"].storage is weights["b"].storage is not weights["c"].storage


def test_metadata_are_what_torch_writes(tmp_path: Path) -> None:
    """But for the name of the save, and the order of the items."""
    model, _ = trained()
    state = {"model": dict(model.state_dict()), "epoch": 1, "list": [{"a": torch.ones(1)}]}
    folder, _ = convert(state, tmp_path / "x")
    with alone():
        dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = (
        pickle.loads((each / ".metadata").read_bytes()) for each in (folder, tmp_path / "theirs")
    )
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert ours.version == theirs.version


def test_items_are_plain_archives(tmp_path: Path) -> None:
    """With true checksums, which zipfile looks at."""
    import zipfile
    from io import BytesIO

    save_file({"a": torch.randn(300), "b": torch.randn(4, 3)}, tmp_path / "in.safetensors")
    ckptkit.save(ckptkit.open(tmp_path / "in.safetensors"), tmp_path / "x", format="dcp")
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    data = (tmp_path / "x" / "__0_0.distcp").read_bytes()
    assert len(metadata.storage_data) == 2
    end = 0
    for info in metadata.storage_data.values():
        assert info.offset == end
        end += info.length
        with zipfile.ZipFile(BytesIO(data[info.offset : end])) as file:
            assert file.testzip() is None
    assert end == len(data)


# What is left out, and said


def test_what_has_no_place(tmp_path: Path) -> None:
    state = {
        "model": OrderedDict(a=torch.ones(1)),
        "optim": {"state": {}, "groups": {0: {"lr": 1}}},
    }
    state["model"]._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    folder, notes = convert(state, tmp_path / "x")
    words = "optim.state", "optim.groups.0", "_metadata of model"
    assert [word in note for word, note in zip(words, notes, strict=True)] == [True] * 3
    same(whole(folder), {"model": {"a": torch.ones(1)}, "optim": {"groups": {"0": {"lr": 1}}}})


def test_metadata_of_a_container(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(1)}, tmp_path / "in.safetensors", metadata={"format": "pt", "author": "x"}
    )
    done = ckptkit.save(ckptkit.open(tmp_path / "in.safetensors"), tmp_path / "x", format="dcp")
    assert done.plan.notes == ("dropped: metadata of the input file (author)",)


def test_a_whole_module_becomes_its_weights(tmp_path: Path) -> None:
    folder, notes = convert(nn.Linear(2, 3), tmp_path / "x")
    assert list(whole(folder)) == ["weight", "bias"]
    assert any("the module itself" in note for note in notes)


def loop() -> dict[str, Any]:
    made: dict[str, Any] = {"a": ONE}
    made["loop"] = made
    return made


def doubled() -> dict[str, Any]:
    wide: list[Any] = [ONE]
    for _ in range(40):
        wide = [wide, wide]
    return {"wide": wide}


ONE = torch.ones(1)
REFUSED: dict[str, tuple[Any, type[CkptkitError], str]] = {
    "a root without names": ([1, 2], UsageError, ""),
    "names that meet": ({"a": {"b": ONE}, "a.b": ONE}, CollisionError, r"'a\.b'"),
    "a number and a text": ({1: ONE, "1": ONE}, CollisionError, ""),
    "a tree in itself": (loop(), LimitError, ""), "a tree that doubles": (doubled(), LimitError, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_written(what: str, tmp_path: Path) -> None:
    state, error, words = REFUSED[what]
    with pytest.raises(error, match=words or None):
        convert(state, tmp_path / "x")
    assert not (tmp_path / "x").exists()


class Custom:
    """A class whose values only its own code can make."""


def test_objects(tmp_path: Path) -> None:
    state = {"a": torch.ones(1), "custom": Custom(), "list": [Custom()]}
    folder, notes = convert(state, tmp_path / "keep")
    assert "Custom" in notes[0] and len(notes) == 1
    assert type(whole(folder)["custom"]).__name__ == "Custom"
    folder, _ = convert(state, tmp_path / "drop", objects="drop")
    same(whole(folder), {"a": torch.ones(1), "list": [None]})
    with pytest.raises(UnsafeGlobalError):
        convert(state, tmp_path / "error", objects="error")


def test_calls_that_have_no_business_there(tmp_path: Path) -> None:
    evil = Object(Global("os", "system"), ("true",))
    with pytest.raises(UnsafeGlobalError):
        ckptkit.save(ckptkit.Checkpoint({"a": evil}), tmp_path / "x", format="dcp")


# Places


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    convert({"a": torch.ones(1)}, tmp_path / "empty")
    with pytest.raises(OutputExistsError):
        convert({"a": torch.ones(1)}, tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["file"]


def test_the_command(tmp_path: Path, run: Run) -> None:
    torch.save({"module.a": torch.ones(2)}, tmp_path / "in.pth")
    source, out = tmp_path / "in.pth", tmp_path / "out"
    done = run("convert", source, f"{out}{os.sep}", "--format", "dcp", "--strip", "module.")
    assert (done.code, done.stderr) == (0, "")
    same(whole(out), {"a": torch.ones(2)})
    assert run("convert", out, tmp_path / "back.safetensors").code == 0
    assert run("remap", out, tmp_path / "again", "--to", "cuda").code == 0
    assert ckptkit.open(tmp_path / "again").format == "dcp"
    assert run("convert", source, out, "--format", "dcp", "--force").code == 2


@pytest.mark.processes
def test_two_processes_load_their_shards(tmp_path: Path) -> None:
    """FSDP from one file of one process."""
    model, _ = trained()
    folder, _ = convert({"model": model.state_dict()}, tmp_path / "x")
    run_ranks(2, "tests.formats.dcp.loading", folder, tmp_path / "x.pth")


def read(folder: Path) -> Checkpoint:
    return formats.read(Folder(folder))


def test_a_shard_that_holds_more_than_tensors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "epoch": 3}, tmp_path / "a.pth")
    (tmp_path / "x").mkdir()
    name = "shard-00001-model-00001-of-00001.safetensors"
    ckptkit_convert(tmp_path / "a.pth", tmp_path / "x" / name, options=Options(all=True))
    with pytest.raises(FormatError, match="contains 'epoch', which is not a tensor") as caught:
        formats.by_name("dcp").read(Probe(Folder(tmp_path / "x")))  # type: ignore[union-attr]
    assert caught.value.where == str(tmp_path / "x" / name)


def test_columns_that_are_conjugated(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3) + 1j
    made = Crafted(tmp_path / "x")
    columns = [((0, 0), (4, 2)), ((0, 2), (4, 1))]
    held = [whole[:, :2].conj().resolve_conj().conj(), whole[:, 2:].clone()]
    items = [(box, archive(each)) for box, each in zip(columns, held, strict=True)]
    made.tensor("w", (4, 3), items, torch.complex64)
    assert held[0].is_conj()
    assert elements_of(read(made.write()).weights["w"]) == whole.numpy().tobytes()


def test_a_list_that_holds_another_twice() -> None:
    inner: list[Any] = [1]
    assert list(Flat({"a": [inner, inner]}).entries) == ["a"]
    assert list(Flat({"a": [inner, inner, {}]}).entries) == ["a.0", "a.1"]
