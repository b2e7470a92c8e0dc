"""Folders of torch.distributed.checkpoint as torch writes them, with `dcp_to_torch_save` as the
oracle."""

from __future__ import annotations

import pickle
import pickletools
import shutil
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import TensorProperties

import ckptkit
from ckptkit import formats
from ckptkit.analysis.verify import verify
from ckptkit.compute.strided_read import Arrange
from ckptkit.core.bytesource import Derived, Folder, LocalFile, Range, runs
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import TABLE
from ckptkit.core.errors import CorruptError, FormatError, UnsupportedError
from ckptkit.diagnosis.diagnose import examine
from ckptkit.formats.dcp import pickles
from ckptkit.formats.format import Probe
from ckptkit.pickles.streams import Traced
from ckptkit.scanning import find as hidden
from tests.conftest import Corpus
from tests.formats.conformance import FormatConformance, State, elements
from tests.formats.dcp.making import DATA, Crafted, alone, archive, save, whole
from tests.formats.dcp.ranks import tensors
from tests.ranks import run_ranks

PLAIN = [
    row.name
    for row in TABLE
    if row.kind in ("float", "bool", "complex") and hasattr(torch, row.name)
]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"]


class TestDcp(FormatConformance):
    name = "dcp"
    suffix = ""
    views = False
    dtypes = [*PLAIN, *INTEGERS]

    def make(self, folder: Path, state: State) -> Path:
        return save(folder / "made", state)

    def oracle(self, path: Path) -> State:
        return whole(path)

    def boundaries(self, data: bytes) -> Iterable[int]:
        """The opcodes of the metadata, the members of the archives."""
        if data.startswith(b"\x80"):
            return [position or 0 for _, _, position in pickletools.genops(data)]
        return [at for at in range(len(data)) if data.startswith(b"PK", at)]


def read(path: Path) -> Checkpoint:
    return formats.read(Folder(path) if path.is_dir() else LocalFile(path))


def same(ours: Any, theirs: Any) -> None:
    """Trees of equal types, keys, order, values, and tensors of equal bytes."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.stride(), ours.device) == (
            theirs.dtype, theirs.shape, theirs.stride(), theirs.device,
        )  # fmt: skip
        assert elements(ours) == elements(theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


# One process


def test_a_nested_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "model": OrderedDict({"l.weight": torch.randn(3, 2), "l.bias": torch.randn(3)}),
        "optim": {
            "state": {0: {"step": 1, "m": torch.ones(3)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "lists": [torch.zeros(2), "x", [1, 2], [torch.ones(1)], {"deep": [[torch.ones(2)], None]}],
        "plain": [1, "two", None],
        "pair": (torch.ones(2), 3),
        "epoch": 7,
        "text": "ключ",
    }
    folder = save(tmp_path / "x", state)
    same(ckptkit.load(folder, whole=True), whole(folder))
    checkpoint = read(folder)
    assert checkpoint.format == "dcp"
    assert checkpoint.required.path == ("model",)
    assert list(checkpoint.weights) == ["l.weight", "l.bias"]
    assert checkpoint.warnings == ()


def test_dicts_without_entries_leave_gaps(tmp_path: Path) -> None:
    """`dcp_to_torch_save` fails on these."""
    folder = save(tmp_path / "x", {"gap": [{}, {"a": torch.ones(1)}], "nothing": {}})
    same(ckptkit.load(folder, whole=True), {"gap": [None, {"a": torch.ones(1)}]})


def test_the_metadata_stand_for_their_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"a": torch.ones(2)})
    assert list(read(folder / ".metadata").weights) == ["a"]


def test_names_that_were_not_flattened(tmp_path: Path) -> None:
    """Planners can be told not to: then names are keys of the root, with their dots."""
    with alone():
        dcp.save(
            {"a.b": torch.ones(2), "a": torch.zeros(1)},
            checkpoint_id=tmp_path / "x",
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
    folder = tmp_path / "x"
    same(ckptkit.load(folder, whole=True), whole(folder))
    assert list(read(folder).root) == ["a.b", "a"]


def test_dicts_of_values_were_not_flattened_before_torch_2_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    folder = save(
        tmp_path / "x", {"model": {"a": torch.ones(2)}, "config": {"lr": 0.1, "steps": [1]}}
    )
    assert pickle.loads((folder / ".metadata").read_bytes()).planner_data["config"] == ("config",)
    assert read(folder).root["config"] == {"lr": 0.1, "steps": [1]}


def test_tensors_of_one_item_each_file(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2), "b": torch.zeros(3, 2)}, "epoch": 1}
    folder = save(tmp_path / "x", state, single_file_per_rank=False)
    assert len(list(folder.iterdir())) == 4
    same(ckptkit.load(folder, whole=True), whole(folder))


def test_views_are_stored_by_their_strides(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "slice": base[:, 1:3],
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
    }
    folder = save(tmp_path / "x", state)
    same(ckptkit.load(folder, whole=True), whole(folder))


def test_values_with_safetensors(tmp_path: Path) -> None:
    """torch cannot read what it writes then: values come before the header of the safetensors
    file."""
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(6), "c": torch.ones(6)}
    options = {"serialization_format": SerializationFormat.SAFETENSORS}
    folder = save(tmp_path / "x", {"model": state, "epoch": 1, "name": "x"}, **options)
    same(ckptkit.load(folder, whole=True), {"model": state, "epoch": 1, "name": "x"})
    storages = [tensor.storage for tensor in read(folder).weights.values()]
    assert len(set(map(id, storages))) == 3


def test_what_lightning_keeps_beside(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"model": {"a": torch.ones(2)}})
    torch.save({"epoch": 3, "hyper_parameters": OrderedDict(lr=0.1)}, folder / "meta.pt")
    checkpoint = read(folder)
    assert list(checkpoint.root) == ["model", "epoch", "hyper_parameters"]
    assert checkpoint.root["epoch"] == 3
    assert [str(name) for name in checkpoint.globals] == ["collections.OrderedDict"]


def test_what_else_is_in_the_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"a": torch.ones(2)})
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    (folder / ".metadata.tmp").write_bytes(b"")
    first, second = read(folder).warnings
    assert "__1_0.distcp" in first and "interrupted" in second


def test_only_metadata_and_values_are_read(tmp_path: Path, lengths_read: list[int]) -> None:
    folder = save(tmp_path / "x", {"a": torch.ones(1 << 20), "epoch": 1})
    read(folder)
    assert 0 < sum(lengths_read) < 10_000


def test_matches(tmp_path: Path) -> None:
    def claims(*names: str) -> bool:
        folder = tmp_path / "-".join(names).replace(".", "")
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"")
        return formats.identify(Probe(Folder(folder))).name == "dcp"

    assert claims(".metadata")
    assert claims("__0.metadata")
    assert claims("__0_0.distcp")
    assert claims(".metadata.tmp")
    assert claims("shard-00001-model-00001-of-00001.safetensors")
    assert not claims("model.safetensors")


# Several processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that four processes saved."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(4, "tests.formats.dcp.ranks", folder)
    return folder


ALL = (
    "rows", "columns", "grid", "cuts_twice", "part_replicated", "transposed", "boxes", "fsdp2", "fsdp1", "items",
    "threads",
)  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("name", ALL)
def test_shards_are_put_together(ranks: Path, name: str) -> None:
    same(ckptkit.load(ranks / name, whole=True), whole(ranks / name))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["safe", "hub", "both", "alone"])
def test_shards_that_torch_does_not_put_together(ranks: Path, name: str) -> None:
    """It has no reader for the first, needs as many processes as there were for the last, and a
    folder of the hub is not its own. What comes out is what went in."""
    found = ckptkit.load(ranks / name)
    want = {
        key: tensor
        for key, tensor in tensors().items()
        if name != "both" or tensor.is_floating_point()
    }
    same(dict(sorted(found.items())), dict(sorted(want.items())))


@pytest.mark.processes
def test_the_shards_behind_a_folder_of_the_hub(ranks: Path) -> None:
    checkpoint = read(ranks / "both" / "sharded")
    assert checkpoint.format == "dcp"
    assert {name: tensor.shape for name, tensor in checkpoint.weights.items()} == {
        "even": (8, 12), "odd": (5, 7, 3), "half": (4, 6),
    }  # fmt: skip


@pytest.mark.processes
def test_rows_are_copied_and_columns_computed(ranks: Path) -> None:
    """Row after row is four ranges of files, which the kernel copies."""
    rows, columns = (read(ranks / name).weights["even"].storage for name in ("rows", "columns"))
    assert rows is not None and columns is not None
    ranges = list(runs(rows.record.locate()))
    assert [each.length for each in ranges] == [96] * 4
    assert all(isinstance(each, Range) and isinstance(each.source, LocalFile) for each in ranges)
    computed = columns.record.locate()
    assert isinstance(computed, Derived) and isinstance(computed.operation, Arrange)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["rows", "grid", "fsdp2"])
def test_shards_become_one_file(ranks: Path, tmp_path: Path, name: str) -> None:
    for suffix in (".pth", ".safetensors"):
        ckptkit.save(ckptkit.open(ranks / name), tmp_path / f"out{suffix}", verify=True)
    theirs = whole(ranks / name)
    same(torch.load(tmp_path / "out.pth", weights_only=True), theirs)
    flat = load_file(tmp_path / "out.safetensors")
    same(dict(sorted(flat.items())), dict(sorted(theirs.get("model", theirs).items())))


# Others' files


def test_a_folder_of_lightning(corpus: Corpus, tmp_path: Path) -> None:
    """FSDP of torch 2.0, two processes."""
    folder = tmp_path / "x"
    shutil.copytree(corpus / "pytorch-lightning__fsdp_BufferedRandom", folder)
    same(ckptkit.load(folder, whole=True), whole(folder))
    assert read(folder).required.path == ("model",)


# Metadata with strides, as torch 2.15 writes them


def with_strides(monkeypatch: pytest.MonkeyPatch, stride: tuple[int, ...] | None) -> None:
    five = TensorProperties.__getstate__
    monkeypatch.setattr(
        TensorProperties, "__getstate__", lambda properties: (*five(properties), stride)
    )


def test_strides_lay_the_chunks_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A channels_last tensor in two chunks, cut along its channels: rows of pixels of both
    alternate."""
    tensor = torch.randn(2, 6, 3, 4).contiguous(memory_format=torch.channels_last)
    crafted = Crafted(tmp_path / "x")
    halves = [
        (((0, start, 0, 0), (2, 3, 3, 4)), archive(tensor[:, start : start + 3].clone()))
        for start in (0, 3)
    ]
    crafted.tensor("w", (2, 6, 3, 4), halves)
    with_strides(monkeypatch, tensor.stride())
    same(ckptkit.load(crafted.write(), whole=True), {"w": tensor})


@pytest.mark.parametrize("stride", [None, (1, 1), (0, 1), (1, 9), (1 << 62, 1 << 62)])
def test_strides_that_leave_gaps_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: tuple[int, ...] | None
) -> None:
    tensor = torch.randn(3, 5)
    crafted = Crafted(tmp_path / "x")
    crafted.tensor("w", (3, 5), [(((0, 0), (3, 5)), archive(tensor))])
    with_strides(monkeypatch, stride)
    same(ckptkit.load(crafted.write(), whole=True), {"w": tensor})


@pytest.mark.parametrize("stride", [(1,), (1, -5), (1, True), "12"])
def test_strides_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: Any
) -> None:
    crafted = Crafted(tmp_path / "x")
    crafted.tensor("w", (3, 5), [(((0, 0), (3, 5)), archive(torch.randn(3, 5)))])
    with_strides(monkeypatch, stride)
    with pytest.raises((CorruptError, FormatError), match=r"'w'.*stride"):
        read(crafted.write())


def test_what_lightning_keeps_beside_is_checked(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"w": torch.ones(2)})
    before = verify(folder).records
    torch.save({"note": "told here"}, folder / "meta.pt")
    assert (verify(folder).findings, verify(folder).records > before) == ([], True)
    whole = (folder / "meta.pt").read_bytes()
    (folder / "meta.pt").write_bytes(whole.replace(b"told here", b"told hers"))
    assert "meta.pt" in {finding.file for finding in verify(folder).findings}
    torch.save({"note": "told here"}, folder / "meta.pt", _use_new_zipfile_serialization=False)
    assert (verify(folder).findings, verify(folder).records) == ([], before)


def test_a_data_file_beside_damaged_metadata_is_searched_all_the_same(tmp_path: Path) -> None:
    """Only the metadata say where its items are: without them it is what any archive is."""
    folder = save(tmp_path / "x", {"a": torch.ones(2), "b": 1})
    listed = [
        each.where for each in hidden.pickles(LocalFile(folder / DATA)) if isinstance(each, Traced)
    ]
    assert len(listed) == 2 and all(where.startswith("item at byte") for where in listed)
    (folder / ".metadata").write_bytes(b"\x80\x02")
    found = [
        each.where for each in hidden.pickles(LocalFile(folder / DATA)) if isinstance(each, Traced)
    ]
    assert found and not any(where.startswith("item at byte") for where in found)
    assert pickles(Probe(Folder(folder))) is None


@pytest.mark.parametrize("has_metadata", [True, False])
def test_a_data_file_alone(tmp_path: Path, has_metadata: bool) -> None:
    """Zip archives one after another: no damage, and nothing is recovered from one of them."""
    folder = save(tmp_path / "a run", {"a": torch.ones(2), "b": torch.zeros(3), "step": 7})
    (shard,) = folder.glob("*.distcp")
    if not has_metadata:
        (folder / ".metadata").unlink()
    for use in (ckptkit.open, ckptkit.recover, verify):
        with pytest.raises(UnsupportedError, match="a data file of rank 0 of a torch") as raised:
            use(shard)
        if has_metadata:
            command = raised.value.hint.split(": ")[1]
            assert command == f"`ckptkit convert '{folder}' out.safetensors`"
        else:
            assert "no .metadata" in raised.value.message
    assert examine(shard).causes[0].code == "part"


def test_the_metadata_stands_for_the_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", {"a": torch.ones(2)})
    (cause,) = examine(folder / ".metadata").causes
    assert cause.command == f"ckptkit convert {folder}/.metadata {folder}-whole.pth"
