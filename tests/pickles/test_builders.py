"""Tensors, variables and parameters of torch 0.1 to 0.3 in streams by hand, against what torch of
today reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.compute.operation import stream
from ckptkit.core.errors import CkptkitError, FormatError, TensorError
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import Node, Object
from ckptkit.core.weights import as_tensor
from tests.formats.test_torch_legacy import legacy, pid, read_bytes
from tests.pickles.making import Written
from tests.pickles.test_writer import agree

VIEW = b"K\x00K\x02K\x02\x86K\x02K\x01\x86"
FLOATS = b"(" + pid() + VIEW + b"t"
PLAIN = b"ctorch._utils\n_rebuild_tensor\n" + FLOATS + b"R"
BY_CLASS = b"ctorch\nFloatTensor\n)\x81" + FLOATS + b"b"
HOOKS = b"ccollections\nOrderedDict\n)R"
PARAMETER = b"ctorch.nn.parameter\nParameter\n"
VARIABLE = b"ctorch.autograd.variable\nVariable\n"

OLD = {
    "tensor by class": BY_CLASS,
    "tensor by a call of its class": b"ctorch\nFloatTensor\n)R" + FLOATS + b"b",
    **{
        f"{name} of {what}{how}, {said}": code
        for name, made in (("parameter", PARAMETER), ("variable", VARIABLE))
        for what, data in (("a tensor", PLAIN), ("a tensor by class", BY_CLASS))
        for how, call in (("", b"R"), (" by __new__", b"\x81"))
        for said, code in (
            ("gradient", made + data + b"\x85" + call + b"\x88\x89" + HOOKS + b"\x87b"),
            ("no gradient", made + data + b"\x85" + call + b"\x89\x89N\x87b"),
            (
                "gradient, as before",
                made + b")" + call + b"(" + data + b"N" + HOOKS + b"\x88\x89tb",
            ),
            ("no gradient, as before", made + b")" + call + b"(" + data + b"NN\x89\x88tb"),
        )
    },
}


def both(tree: bytes, folder: Path) -> tuple[Node, Any]:
    """Return what ckptkit and torch read."""
    data = legacy(tree)
    root = read_bytes(data, folder).root
    return root, torch.load(folder / "legacy.pt", weights_only=False)


@pytest.mark.parametrize("case", OLD)
def test_as_torch_reads_them(case: str, tmp_path: Path) -> None:
    root, expected = both(b"}(Va\n" + OLD[case] + b"u", tmp_path)
    assert isinstance(root["a"], Tensor)
    assert root["a"].requires_grad == expected["a"].requires_grad
    assert root["a"].kind == (
        "parameter" if type(expected["a"]) is torch.nn.Parameter else "tensor"
    )
    assert agree(Written(root, tmp_path / "new.pt").load(), expected)


@pytest.mark.parametrize("case", OLD)
def test_one_object_stays_one(case: str, tmp_path: Path) -> None:
    root, expected = both(b"](" + OLD[case] + b"q\x05h\x05e", tmp_path)
    assert root[0] is root[1] and isinstance(root[0], Tensor)
    assert expected[0] is expected[1]


def test_the_memo_has_it_before_it_is_told(tmp_path: Path) -> None:
    root, expected = both(
        b"](ctorch\nFloatTensor\n)\x81q\x05" + FLOATS + b"bh\x05h\x05\x85e", tmp_path
    )
    assert root[0] is root[1] is root[2][0]
    assert agree(Written(root, tmp_path / "new.pt").load(), expected)


def test_sharing_goes_through_them(tmp_path: Path) -> None:
    """A parameter, the tensor inside it, and a view of that."""
    data = b"ctorch\nFloatTensor\n)\x81q\x05" + FLOATS + b"b"
    tree = b"](" + PARAMETER + data + b"\x85R\x88\x89N\x87bh\x05" + PLAIN + b"e"
    root, expected = both(tree, tmp_path)
    assert root[0].storage is root[1].storage is root[2].storage
    loaded = Written(root, tmp_path / "new.pt").load()
    assert agree(loaded, expected)
    assert loaded[0].data_ptr() == loaded[1].data_ptr() == loaded[2].data_ptr()


@pytest.mark.parametrize(
    "kind", ["Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
)
@pytest.mark.parametrize("module", ["torch", "torch.cuda"])
def test_every_class_of_that_time(kind: str, module: str, tmp_path: Path) -> None:
    size = {"Byte": 1, "Char": 1, "Double": 8, "Half": 2, "Long": 8, "Short": 2}.get(kind, 4)
    storage = (4, bytes(range(1, 1 + 4 * size)))
    tree = (
        f"c{module}\n{kind}Tensor\n".encode() + b")\x81(" + pid(kind=kind.encode()) + VIEW + b"tb"
    )
    root = read_bytes(legacy(tree, storages=[storage]), tmp_path).root
    assert (root.shape, root.dtype.itemsize) == ((2, 2), size)
    assert b"".join(stream(root.storage.record.locate())) == storage[1]
    if module == "torch":
        expected = torch.load(tmp_path / "legacy.pt", weights_only=False)
        assert agree(Written(root, tmp_path / "new.pt").load(), expected)


def test_with_hooks_they_stay_objects(tmp_path: Path) -> None:
    hooks = HOOKS + b"K\x01cm\nhook\ns"
    for made in (
        PARAMETER + PLAIN + b"\x85R\x88\x89" + hooks + b"\x87b",
        VARIABLE + b")\x81(" + PLAIN + b"N" + hooks + b"\x88\x89tb",
    ):
        node = read_bytes(legacy(made), tmp_path).root
        assert isinstance(node, Object)
        found = as_tensor(node)
        assert found is not None
        assert (found.shape, found.requires_grad) == ((2, 2), True)


def test_of_what_is_more_than_a_tensor_they_stay_objects(tmp_path: Path) -> None:
    meta = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\nK\x02\x85K\x01\x85\x89tR"
    node = read_bytes(
        legacy(PARAMETER + meta + b"\x85R\x88\x89N\x87b", keys=(), storages=[]), tmp_path
    ).root
    assert isinstance(node, Object)
    assert as_tensor(node) is not None


def test_told_twice(tmp_path: Path) -> None:
    """An object with two states is kept unchanged: only torch knows the result."""
    node = read_bytes(legacy(BY_CLASS + FLOATS + b"b"), tmp_path).root
    assert isinstance(node, Object)
    assert len(node.steps) == 2


@pytest.mark.parametrize(
    "state",
    [b"N", b"K\x01", b")", b"(NNNt", b"(NNNNt", b"(NNNNNt", b"(" + PLAIN + b"NNt", b"]", b"}"],
)
@pytest.mark.parametrize("made", [PARAMETER, VARIABLE, b"ctorch\nFloatTensor\n"])
def test_states_that_say_nothing(made: bytes, state: bytes, tmp_path: Path) -> None:
    node = read_bytes(legacy(b"(" + made + b")\x81" + state + b"b" + PLAIN + b"t"), tmp_path).root[
        0
    ]
    assert isinstance(node, Object)
    assert as_tensor(node) is None


def test_no_dimensions_were_no_elements(tmp_path: Path) -> None:
    """torch of today takes such a tensor for one element, and makes it up."""
    empty = b"(" + pid(numel=0) + b"K\x00))t"
    for made in (
        b"ctorch._utils\n_rebuild_tensor\n" + empty + b"R",
        b"ctorch\nFloatTensor\n)\x81" + empty + b"b",
    ):
        root = read_bytes(legacy(b"](" + made + b"e", storages=[(0, b"")]), tmp_path).root
        assert (root[0].shape, root[0].nbytes) == ((0,), 0)
        assert Written(root, tmp_path / "new.pt").load()[0].shape == (0,)
    full = b"ctorch._utils\n_rebuild_tensor\n(" + pid() + b"K\x01))tR"
    root, expected = both(full, tmp_path)
    assert root.shape == expected.shape == ()
    with pytest.raises(TensorError):
        read_bytes(
            legacy(b"ctorch._utils\n_rebuild_tensor_v2\n" + empty[:-1] + b"\x89" + HOOKS + b"tR"),
            tmp_path,
        )


@pytest.mark.parametrize("made", [b"Int", b"Double", b"Half"])
def test_D_05_a_class_over_a_storage_of_another_type(made: bytes, tmp_path: Path) -> None:
    data = legacy(b"ctorch\n" + made + b"Tensor\n)\x81" + FLOATS + b"b")
    with pytest.raises(FormatError, match="a tensor of class"):
        read_bytes(data, tmp_path)
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / "legacy.pt", weights_only=False)


@pytest.mark.parametrize(
    "view",
    [
        b"K\x01K\x02K\x02\x86K\x02K\x01\x86",
        b"K\x00K\x05\x85K\x01\x85",
        b"J\xff\xff\xff\xffK\x01\x85K\x01\x85",
    ],
)
def test_D_07_D_08_beyond_the_storage(view: bytes, tmp_path: Path) -> None:
    with pytest.raises(TensorError):
        read_bytes(legacy(b"ctorch\nFloatTensor\n)\x81(" + pid() + view + b"tb"), tmp_path)


def test_nothing_but_our_errors(tmp_path: Path) -> None:
    odd = [
        b"N", b"K\x01", b"Vx\n", b")", b"]", b"}", b"cm\nf\n", pid(), PLAIN, BY_CLASS, b"\x88",
        HOOKS,
    ]  # fmt: skip
    for made in (PARAMETER, VARIABLE, b"ctorch\nFloatTensor\n", b"ctorch.cuda\nHalfTensor\n"):
        for args in (b")", b"N\x85", PLAIN + b"\x85", b"(NNNt"):
            for each in odd:
                for count in (0, 1, 3, 4, 5):
                    tree = made + args + b"\x81(" + each * count + b"tb"
                    try:
                        read_bytes(legacy(tree), tmp_path)
                    except CkptkitError as error:
                        assert len(str(error)) < 500


def test_the_weights_of_a_module_of_that_time(tmp_path: Path) -> None:
    """Python 2, parameters of 0.1.6: an OrderedDict by a list of pairs, strings of bytes, the
    backend by a call."""
    parameter = PARAMETER + b")\x81(" + BY_CLASS + b"NN\x88\x89tb"
    named = b"ccollections\nOrderedDict\n](](U\x06weight" + parameter + b"e](U\x04biasNee\x85R"
    empty = b"ccollections\nOrderedDict\n]\x85R"
    parts = ((b"U\x0b_parameters", named), (b"U\x08_buffers", empty), (b"U\x08_modules", empty))
    backend = b"U\x08_backendctorch.nn.backends.thnn\n_get_thnn_function_backend\n)R"
    module = (
        b"cmine\nNet\n)\x81}(" + b"".join(key + value for key, value in parts) + backend + b"ub"
    )
    checkpoint = read_bytes(legacy(module), tmp_path)
    assert list(checkpoint.weights) == ["weight"]
    found = checkpoint.weights["weight"]
    assert (found.kind, found.shape) == ("parameter", (2, 2))
    loaded = Written(dict(checkpoint.required.nodes), tmp_path / "new.pt").load()
    assert loaded["weight"].tolist() == [[0, 1], [2, 3]]
