"""The calls of torch: the rarer ones, by hand and by torch, and arguments that none of them
takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CkptkitError, FormatError, TensorError
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.tree import Global, Node, Object, OrderedMapping
from ckptkit.core.weights import as_tensor
from ckptkit.pickles.globals import REDUCERS
from ckptkit.pickles.storages import StorageTable
from ckptkit.pickles.values import unpickle
from tests.pickles.making import Written, read_saved

NAMES = {
    "tensor": b"ctorch._utils\n_rebuild_tensor_v2\n", "v3": b"ctorch._utils\n_rebuild_tensor_v3\n",
    "parameter": b"ctorch._utils\n_rebuild_parameter\n", "sparse": b"ctorch._utils\n_rebuild_sparse_tensor\n",
    "nested": b"ctorch._utils\n_rebuild_nested_tensor\n", "meta": b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n",
    "wrapper": b"ctorch._utils\n_rebuild_wrapper_subclass\n", "q": b"ctorch._utils\n_rebuild_qtensor\n",
    "type": b"ctorch._tensor\n_rebuild_from_type_v2\n", "xla": b"ctorch._utils\n_rebuild_xla_tensor\n",
}  # fmt: skip
FLOATS = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x04tQ"
RAW = b"(Vstorage\nctorch.storage\nUntypedStorage\nV0\nVcpu\nK\x10tQ"
VIEW = b"K\x00K\x04\x85K\x01\x85"
OPEN = NAMES["tensor"] + b"(" + FLOATS + VIEW + b"I00\n"
INSIDE = b"(" + FLOATS + VIEW + b"I00\n}t"
PLAIN = OPEN + b"ccollections\nOrderedDict\n)RtR"


def read(data: bytes) -> Node:
    def opener(key: str, nbytes: int, location: str) -> Storage:
        return Storage(Range(Memory(bytes(nbytes)), 0, nbytes), location)

    return unpickle(Memory(data + b"."), persistent_load=StorageTable(opener).load).root


def test_plain_tensors_are_tensors() -> None:
    assert isinstance(read(PLAIN), Tensor)
    assert isinstance(
        read(NAMES["parameter"] + b"(" + PLAIN + b"I01\nccollections\nOrderedDict\n)RtR"), Tensor
    )


@pytest.mark.parametrize("data", [
    OPEN + b"}X\x01\0\0\0aK\x01stR",  # hooks
    OPEN + b"}}X\x01\0\0\0aI01\nstR",  # metadata that nobody knows
    OPEN + b"}}X\x04\0\0\0conjI00\nstR",
    OPEN + b"}K\x05tR", OPEN + b"}\x8ftR", OPEN + b"}(]ltR",  # metadata that is not a dict
    NAMES["v3"] + INSIDE[:-1] + b"ctorch\nfloat32\ntR",  # not as torch writes it
    NAMES["parameter"] + b"(" + PLAIN + b"I01\n}X\x01\0\0\0aK\x01stR",
])  # fmt: skip
def test_tensors_with_more_to_them_stay_objects(data: bytes) -> None:
    made = read(data)
    assert isinstance(made, Object)
    found = as_tensor(made)
    assert found is not None
    assert (found.shape, found.dtype.name) == ((4,), "float32")


ARRAY = (
    b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x02\x85"
    b"cnumpy\ndtype\n(X\x02\0\0\0f4\x89\x88tR\x89C\x08abcdefghtb"
)
XLA = b"(" + ARRAY + b"ctorch\nfloat32\nVxla:0\nI01\ntR"
ON_XLA = {"device": "xla:0", "shape": (2,), "requires_grad": True, "kind": "tensor"}


def v3(dtype: bytes, elements: int, offset: int = 0) -> bytes:
    size = b"K%cK%c\x85K\x01\x85" % (offset, elements)
    return NAMES["v3"] + b"(" + RAW + size + b"I00\n}ctorch\n" + dtype + b"\ntR"


TYPES = {
    b"int64": 2, b"float16": 8, b"uint16": 8, b"complex128": 1, b"float8_e5m2": 16,
    b"bcomplex32": 4,
}  # fmt: skip
CALLS: dict[str, tuple[bytes, dict[str, Any]]] = {
    **{dtype.decode(): (v3(dtype, n), {"dtype": BY_NAME[dtype.decode()], "shape": (n,), "nbytes": 16, "layout": "strided"})
       for dtype, n in TYPES.items()},
    "wrapper": (
        NAMES["wrapper"] + b"(cm\nDTensor\nctorch\nbfloat16\nK\x02K\x03\x86K\x03K\x01\x86K\x00N"
        b"ctorch\ndevice\nX\x06\0\0\0cuda:1\x85RI01\ntR",
        {"layout": "subclass", "shape": (2, 3), "dtype": BY_NAME["bfloat16"], "requires_grad": True}),
    "xla": (NAMES["xla"] + XLA, ON_XLA),
    "from numpy": (b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n" + XLA, ON_XLA),
    "from the CPU": (
        b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(" + PLAIN + b"ctorch\nfloat32\nVmtia:0\nI00\ntR",
        {"device": "mtia:0"}),
    "old sparse": (
        NAMES["sparse"] + b"(N(" + PLAIN + PLAIN + b"ctorch\nSize\n(K\x09\x85tRttR",
        {"layout": "sparse_coo", "shape": (9,), "nbytes": 16}),
    "from a type": (NAMES["type"] + b"(" + NAMES["tensor"] + b"cm\nMine\n" + INSIDE + b"}tR", {"shape": (4,)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_is_read_as(name: str) -> None:
    data, facts = CALLS[name]
    found = as_tensor(read(data))
    assert {fact: getattr(found, fact) for fact in facts} == facts
    if "nbytes" in facts and found is not None and found.layout == "strided":
        assert len(b"".join(stream(contiguous(found).locate()))) == found.nbytes


@pytest.mark.parametrize("dtype", TYPES)
def test_a_v3_tensor_beyond_its_storage(dtype: bytes) -> None:
    with pytest.raises(TensorError):
        read(v3(dtype, TYPES[dtype], offset=1))


def test_a_type_of_a_later_torch_is_one_entry() -> None:
    """Its elements are unknown here; it is written back unchanged."""
    made = read(v3(b"float99", 4))
    found = as_tensor(made)
    assert isinstance(made, Object) and found is not None
    assert (found.dtype.name, found.layout) == ("float99", "unknown dtype")
    assert found.storage is made.args[0].storage
    with pytest.raises(TensorError, match="unknown dtype"):
        contiguous(found)


@pytest.mark.parametrize("data", [
    NAMES["tensor"] + b"(" + RAW + VIEW + b"I00\n}tR",  # of no type
    NAMES["v3"] + b"(" + RAW + VIEW + b"I00\n}Vfloat32\ntR",
    NAMES["v3"] + b"(" + RAW + VIEW + b"I00\n}cnumpy\nfloat32\ntR",
    NAMES["v3"] + b"(" + RAW + VIEW + b"I00\n}tR",
    NAMES["tensor"] + b"(N" + VIEW + b"I00\n}tR", NAMES["tensor"] + b"(" + PLAIN + VIEW + b"I00\n}tR",
    NAMES["tensor"] + b"(" + FLOATS + b"tR", NAMES["tensor"] + b")R",
    NAMES["parameter"] + b"(NI01\n}tR", NAMES["parameter"] + b"(" + PLAIN + b"K\x02}tR", NAMES["parameter"] + b")R",
    NAMES["sparse"] + b"(N)tR", NAMES["sparse"] + b"(N(NNNttR", NAMES["sparse"] + b"(N(N" + PLAIN + b"ttR",
    NAMES["sparse"] + b"(N(N" + PLAIN + b"NttR", NAMES["sparse"] + b")R",
    NAMES["nested"] + b")R", NAMES["nested"] + b"(NtR", NAMES["meta"] + b")R",
    NAMES["meta"] + b"(ctorch\nfloat32\nK\x05\x85)I00\ntR",
    NAMES["wrapper"] + b")R", NAMES["q"] + b")R", NAMES["type"] + b")R",
    NAMES["xla"] + b")R",
])  # fmt: skip
def test_arguments_that_none_of_them_takes(data: bytes) -> None:
    with pytest.raises((FormatError, TensorError)):
        read(data)


def test_wrapper_subclasses(tmp_path: Path) -> None:
    root = read_saved({"w": TwoTensor(torch.ones(2, 3), torch.zeros(2, 3))}, tmp_path).root
    assert isinstance(root["w"], Object)
    written = Written(root, tmp_path / "new.pt")
    assert "TwoTensor" in written.pickled.notes[0]
    loaded: Any = written.load(weights_only=False)["w"]
    assert loaded.a.tolist() == torch.ones(2, 3).tolist()


@pytest.mark.parametrize("data", [
    NAMES["xla"] + b"(Nctorch\nfloat32\nVxla:0\nI00\ntR",
    *(NAMES["type"] + b"(" + each + b"cm\nMine\n" + INSIDE + b"}tR" for each in (b"cm\nf\n", b"N", NAMES["type"])),
])  # fmt: skip
def test_calls_of_which_no_tensor_is_known(data: bytes) -> None:
    odd = read(data)
    assert isinstance(odd, Object) and odd.tensor is None


def test_ordered_dicts_of_python_2() -> None:
    head = b"ccollections\nOrderedDict\n"
    made = read(head + b"]](Va\nK\x01ea\x85R")
    assert isinstance(made, OrderedMapping)
    assert list(made.items()) == [("a", 1)]
    for odd in (
        b"](](K\x01K\x01e](K\x01K\x01ee\x85R", b"](](Va\nK\x01e](Va\nK\x02ee\x85R", b"]N\x85a\x85R",
        b"N\x85R", b"]]\x86R",
    ):  # fmt: skip
        assert isinstance(read(head + odd), Object)


def test_nested_classes_by_getattr() -> None:
    head = b"c__builtin__\ngetattr\n"
    assert read(head + b"cm\nA\nVB\n\x86R") == Global("m", "A.B")
    for odd in (
        b"cm\nA\nVB.C\n\x86R", b"cm\nA\nV\n\x86R", b"cm\nA\nK\x01\x86R", b"NVB\n\x86R",
        b"cm\nA\nVB\nN\x87R",
    ):  # fmt: skip
        assert isinstance(read(head + odd), Object)


def test_nothing_but_our_errors() -> None:
    """Every call that is known, with arguments of every other kind."""
    odd = [
        b"N", b"K\x01", b"Vx\n", b")", b"]", b"}", b"cm\nf\n", b"cm\nf\n)R", FLOATS, PLAIN,
        b"N\x85" * 3, b"G" + bytes(8), b"I01\n",
    ]  # fmt: skip
    for module, name in REDUCERS:
        head = f"c{module}\n{name}\n".encode()
        for each in odd:
            for count in range(9):
                for data in (
                    b"(" + each * count + b"tR",
                    b"(" + FLOATS + each * count + b"tR",
                    b"(" + PLAIN + each * count + b"tR",
                ):
                    try:
                        read(b"\x80\x03" + head + data)
                    except CkptkitError as error:
                        assert len(str(error)) < 500
