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
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.filesystem import SerializationFormat

import ckptkit
from ckptkit import formats
from ckptkit.analysis.verify import verify
from ckptkit.compute.strided_read import Arrange
from ckptkit.core.bytesource import Derived, Folder, LocalFile, Range, runs
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import TABLE
from ckptkit.core.errors import UnsupportedError
from ckptkit.diagnosis.diagnose import examine
from ckptkit.formats.dcp import pickles
from ckptkit.formats.format import Probe
from ckptkit.pickles.streams import Traced
from ckptkit.scanning import find as hidden
from tests.conftest import Corpus
from tests.formats.conformance import FormatConformance, State, elements
from tests.formats.dcp.making import DATA, Crafted, alone, archive, properties, save, whole
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


def channels_last(folder: Path) -> tuple[Path, Any]:
    """Strides, as torch 2.15 writes them: a tensor in two chunks, cut along its channels."""
    tensor = torch.randn(2, 6, 3, 4).contiguous(memory_format=torch.channels_last)
    crafted = Crafted(folder)
    halves = [
        (((0, start, 0, 0), (2, 3, 3, 4)), archive(tensor[:, start : start + 3].clone()))
        for start in (0, 3)
    ]
    crafted.tensor("w", (2, 6, 3, 4), halves)
    with properties(lambda five: (*five, tensor.stride())):
        return crafted.write(), {"w": tensor}


def of_strides(stride: Any) -> Any:
    """Strides that leave gaps are not kept."""

    def make(folder: Path) -> tuple[Path, Any]:
        tensor = torch.randn(3, 5)
        crafted = Crafted(folder)
        crafted.tensor("w", (3, 5), [(((0, 0), (3, 5)), archive(tensor))])
        with properties(lambda five: (*five, stride)):
            return crafted.write(), {"w": tensor}

    return make


def flat_names(folder: Path) -> tuple[Path, None]:
    """Planners can be told not to flatten: then names are keys of the root, with their dots."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {"a.b": torch.ones(2), "a": torch.zeros(1)}
    with alone():
        dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)
    return folder, None


def of_torch_2_3(folder: Path) -> tuple[Path, None]:
    """Dicts of values were not flattened before torch 2.4."""
    state = {"model": {"a": torch.ones(2)}, "config": {"lr": 0.1, "steps": [1]}}
    with patch.object(_version, "_derived_version", "2_3"):
        save(folder, state)
    planned = pickle.loads((folder / ".metadata").read_bytes()).planner_data
    assert planned["config"] == ("config",)
    return folder, None


def lightning(folder: Path) -> tuple[Path, Any]:
    """What Lightning keeps beside."""
    save(folder, {"model": {"a": torch.ones(2)}})
    more = {"epoch": 3, "hyper_parameters": OrderedDict(lr=0.1)}
    torch.save(more, folder / "meta.pt")
    return folder, {"model": {"a": torch.ones(2)}, **more}


NESTED = {
    "model": OrderedDict({"l.weight": torch.randn(3, 2), "l.bias": torch.randn(3)}),
    "optim": {"state": {0: {"step": 1, "m": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
    "lists": [torch.zeros(2), "x", [1, 2], [torch.ones(1)], {"deep": [[torch.ones(2)], None]}],
    "plain": [1, "two", None], "pair": (torch.ones(2), 3), "epoch": 7, "text": "ключ",
}  # fmt: skip
BASE = torch.arange(24.0).reshape(4, 6)
VIEWS = {
    "transposed": BASE.t(),
    "slice": BASE[:, 1:3],
    "conj": torch.ones(2, dtype=torch.complex64).conj(),
}
SAFE: dict[str, Any] = {
    "model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(6), "c": torch.ones(6)}, "epoch": 1, "name": "x",
}  # fmt: skip


def saved(state: Any, expected: Any = None, **options: Any) -> Any:
    return lambda folder: (save(folder, state, **options), expected)


# A folder, and its whole where torch does not make it.
SAVED: dict[str, Any] = {
    "a nested state": saved(NESTED), "views, stored by their strides": saved(VIEWS),
    "one item in each file": saved({"model": {"a": torch.ones(2), "b": BASE}, "epoch": 1}, single_file_per_rank=False),
    # `dcp_to_torch_save` fails on these.
    "dicts without entries leave gaps": saved({"gap": [{}, {"a": BASE}], "nothing": {}}, {"gap": [None, {"a": BASE}]}),
    # torch cannot read these: values come before the header of the safetensors file.
    "values with safetensors": saved(SAFE, SAFE, serialization_format=SerializationFormat.SAFETENSORS),
    "names that were not flattened": flat_names, "torch 2.3": of_torch_2_3, "Lightning": lightning,
    "chunks of channels_last": channels_last,
    **{f"strides {stride}": of_strides(stride) for stride in (None, (1, 1), (0, 1), (1, 9), (1 << 62, 1 << 62))},
}  # fmt: skip


@pytest.mark.parametrize("what", SAVED)
def test_a_folder_is_whole(what: str, tmp_path: Path) -> None:
    folder, expected = SAVED[what](tmp_path / "x")
    same(ckptkit.load(folder, whole=True), whole(folder) if expected is None else expected)


def test_a_nested_state(tmp_path: Path) -> None:
    checkpoint = read(save(tmp_path / "x", NESTED))
    assert (checkpoint.format, checkpoint.required.path) == ("dcp", ("model",))
    assert list(checkpoint.weights) == ["l.weight", "l.bias"]
    assert checkpoint.warnings == ()


def test_the_metadata_stand_for_their_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"a": torch.ones(2)})
    assert list(read(folder / ".metadata").weights) == ["a"]
    (cause,) = examine(folder / ".metadata").causes
    assert cause.command == f"ckptkit convert {folder}/.metadata {folder}-whole.pth"


def test_storages_of_safetensors(tmp_path: Path) -> None:
    folder, _ = SAVED["values with safetensors"](tmp_path / "x")
    storages = [tensor.storage for tensor in read(folder).weights.values()]
    assert len(set(map(id, storages))) == 3


def test_globals_of_what_lightning_keeps_beside(tmp_path: Path) -> None:
    folder, _ = lightning(tmp_path / "x")
    assert [str(name) for name in read(folder).globals] == ["collections.OrderedDict"]


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


@pytest.mark.parametrize(
    "name",
    [
        ".metadata", "__0.metadata", "__0_0.distcp", ".metadata.tmp",
        "shard-00001-model-00001-of-00001.safetensors", "model.safetensors",
    ],
)  # fmt: skip
def test_matches(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    is_dcp = formats.identify(Probe(Folder(tmp_path))).name == "dcp"
    assert is_dcp == (name != "model.safetensors")


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

    def items() -> list[bool]:
        found = hidden.pickles(LocalFile(folder / DATA))
        return [each.where.startswith("item at byte") for each in found if isinstance(each, Traced)]

    assert items() == [True, True]
    (folder / ".metadata").write_bytes(b"\x80\x02")
    assert items() and not any(items())
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
