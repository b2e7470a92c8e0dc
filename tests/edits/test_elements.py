from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.compute.operation import stream
from ckptkit.core import dtypes
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import UsageError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage, contiguous_stride
from ckptkit.core.tree import Global, Object, OrderedMapping
from ckptkit.edits.elements import cast, compact
from ckptkit.edits.quantized_names import matching
from tests.edits.trees import from_torch, lines, storage, tensor

FLOAT32 = dtypes.BY_NAME["float32"]
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def to_torch(leaf: Tensor) -> torch.Tensor:
    """Return a tensor as torch alone reads it."""
    assert leaf.storage is not None
    data = b"".join(bytes(each) for each in stream(leaf.storage.record.locate()))
    values = torch.frombuffer(bytearray(data or b"\0" * 16), dtype=torch.uint8)[: len(data)]
    return values.view(getattr(torch, leaf.dtype.name)).as_strided(
        leaf.shape, leaf.stride, leaf.offset
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes: NaN is itself, and -0.0 is not 0.0."""
    flat = [
        torch.empty(each.shape, dtype=each.dtype).copy_(each).view(-1).view(torch.uint8)
        for each in (a, b)
    ]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def ck_of(**weights: torch.Tensor) -> Checkpoint:
    return Checkpoint(from_torch(weights))


def dtypes_of(ck: Checkpoint) -> str:
    return " ".join(each.dtype.name for each in ck.weights.values())


# cast


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_cast_is_what_torch_does(source: str, target: str) -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -2.25, 3.1, 1e-7, math.inf, math.nan]).to(
        getattr(torch, source)
    )
    ck = ck_of(w=values.reshape(2, 4))
    done = cast(ck, target)
    made, want = to_torch(done.weights["w"]), values.reshape(2, 4).to(getattr(torch, target))
    numbers = ~want.isnan()
    assert torch.equal(~made.isnan(), numbers)
    assert same(made[numbers], want[numbers])
    if source != target:
        assert done.notes == (f"cast 1 weight: {source} -> {target}",)
    else:
        assert done.root is ck.root
        assert done.warnings


ONES = {"a.w": torch.ones(2), "a.norm": torch.ones(2), "b.w": torch.ones(2).double()}
KINDS = {
    "w": torch.ones(2), "i": torch.ones(2).long(), "b": torch.ones(2).bool(), "c": torch.ones(2) + 1j
}  # fmt: skip
BOTH = "cast 1 weight: float32 -> bfloat16, cast 1 weight: float64 -> bfloat16"


@pytest.mark.parametrize(
    ("weights", "given", "expected", "notes"),
    [
        (KINDS, "fp16", "float16 int64 bool complex64", "cast 1 weight: float32 -> float16"),
        (ONES, {"*": "bf16", "*norm*": "float32"}, "bfloat16 float32 bfloat16", BOTH),
        (ONES, {"*norm*": "float32", "*": "bf16"}, "bfloat16 float32 bfloat16", BOTH),
        (ONES, {"a.*": "bf16", "*norm": "bf16"}, "bfloat16 bfloat16 float64", "cast 2 weights: float32 -> bfloat16"),
    ],
)  # fmt: skip
def test_cast_of_some(
    weights: dict[str, torch.Tensor], given: object, expected: str, notes: str
) -> None:
    ck = ck_of(**weights)
    done = cast(ck, given)
    assert dtypes_of(done) == expected
    assert ", ".join(sorted(done.notes)) == notes
    for name, old in ck.weights.items():
        assert (done.weights[name] is old) == (done.weights[name].dtype == old.dtype)


def test_cast_touches_only_the_weights() -> None:
    optimizer = {"state": {0: {"exp_avg": tensor()}}, "param_groups": []}
    done = cast(Checkpoint({"model": {"w": tensor()}, "optimizer": optimizer}), "bfloat16")
    assert done.root["model"]["w"].dtype.name == "bfloat16"
    assert done.root["optimizer"]["state"][0]["exp_avg"].dtype.name == "float32"


def test_cast_keeps_views_and_ties() -> None:
    base = torch.arange(12.0)
    parts = {"whole": base, "rows": base[4:10].view(2, 3), "t": base.view(3, 4).t(), "again": base}
    done = cast(Checkpoint(from_torch(parts)), "float16")
    assert len({id(each.storage) for each in done.weights.values()}) == 1
    for name, part in parts.items():
        assert same(to_torch(done.weights[name]), part.half())
    assert not done.warnings


def test_cast_by_globs_that_contradict_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'a\.norm' matches 'a\.\*', '\*norm', which"):
        cast(ck_of(**ONES), {"a.*": "bf16", "*norm": "float16"})


def test_cast_splits_a_storage_whose_tensors_differ_and_says_so() -> None:
    base = torch.arange(4.0)
    ck = ck_of(a=base[:2], b=base[2:], c=torch.ones(1))
    done = cast(ck, {"a": "float16"})
    assert same(to_torch(done.weights["a"]), base[:2].half())
    assert same(to_torch(done.weights["b"]), base[2:])
    assert done.weights["b"].storage is ck.weights["b"].storage
    said = "these weights no longer share memory with tensors of another dtype: 'a', 'b'"
    assert said in lines(done)


def test_cast_says_when_a_tie_to_the_rest_of_the_tree_is_cut() -> None:
    leaf = tensor()
    view = Tensor(leaf.storage, FLOAT32, (1,), (1,))
    done = cast(Checkpoint({"state_dict": {"w": leaf}, "optimizer": [view]}), "float16")
    assert done.root["optimizer"][0].storage is leaf.storage
    assert "no longer share memory" in lines(done)


def test_cast_one_tensor_in_two_places_stays_one() -> None:
    leaf = tensor()
    done = cast(Checkpoint({"state_dict": {"w": leaf}, "best": [leaf]}), "float16")
    assert done.root["best"][0] is done.root["state_dict"]["w"]
    assert not done.warnings


def test_cast_keeps_device_parameter_and_grad() -> None:
    ck = Checkpoint({"w": tensor(device="cuda:1", kind="parameter", requires_grad=True)})
    new = cast(ck, "float64").weights["w"]
    assert (new.device, new.kind, new.requires_grad) == ("cuda:1", "parameter", True)
    assert new.nbytes == 16


def test_cast_of_a_big_endian_storage() -> None:
    data = struct.pack(">2f", 1.5, -2.0)
    big = Storage(Range(Memory(data), 0, 8), big_endian=True)
    new = cast(Checkpoint({"w": Tensor(big, FLOAT32, (2,), (1,))}), "float64").weights["w"]
    assert new.storage is not None
    assert not new.storage.big_endian
    assert to_torch(new).tolist() == [1.5, -2.0]


def test_cast_of_a_storage_with_bytes_left_over() -> None:
    odd = storage(struct.pack("<f", 1.5) + b"\0\0\0")
    new = cast(Checkpoint({"w": Tensor(odd, FLOAT32, (1,), (1,))}), "float16").weights["w"]
    assert to_torch(new).tolist() == [1.5]


def test_cast_of_a_meta_tensor() -> None:
    done = cast(Checkpoint({"w": Tensor(None, FLOAT32, (2,), (1,))}), "float16")
    assert dtypes_of(done) == "float16"


def sparse(values: Tensor) -> Object:
    indices = Tensor(storage(bytes(16)), dtypes.BY_NAME["int64"], (1, 2), (2, 1))
    layout = Object(Global("torch.serialization", "_get_layout"), ("torch.sparse_coo",))
    shown = Tensor(values.storage, values.dtype, (5,), (), layout="sparse_coo")
    args = (layout, (indices, values, Object(Global("torch", "Size"), ((5,),)), True))
    return Object(Global("torch._utils", "_rebuild_sparse_tensor"), args, tensor=shown)


def test_cast_of_a_sparse_tensor_is_of_its_values() -> None:
    done = cast(Checkpoint({"w": sparse(tensor()), "v": tensor()}), "float16")
    call = done.root["w"]
    indices, values, _, coalesced = call.args[1]
    assert (indices.dtype.name, values.dtype.name, coalesced) == ("int64", "float16", True)
    assert (call.tensor.dtype.name, call.tensor.layout) == ("float16", "sparse_coo")
    assert call.tensor.storage is values.storage
    assert not done.warnings


def parameter(inner: Object, shown: Tensor) -> Object:
    made = Global("torch._utils", "_rebuild_parameter")
    return Object(made, (inner, True, OrderedMapping()), tensor=shown)


def test_cast_of_a_parameter_of_a_sparse_tensor() -> None:
    inner = sparse(tensor())
    shown = replace(inner.tensor, kind="parameter", requires_grad=True)
    call = cast(Checkpoint({"w": parameter(inner, shown)}), "float16").root["w"]
    values = call.args[0].args[1][1]
    assert {each.dtype.name for each in (call.tensor, call.args[0].tensor, values)} == {"float16"}
    assert call.tensor.storage is values.storage


def test_cast_names_what_it_cannot_cast() -> None:
    leaf = tensor()
    call = Global("torch._tensor", "_rebuild_from_type_v2")
    made = Object(call, ("function", "type", (), {}), tensor=leaf)
    float4 = Tensor(storage(b"\0"), dtypes.BY_NAME["float4_e2m1fn_x2"], (1,), (1,))
    root = {"w": made, "p": parameter(made, leaf), "x": float4, "v": tensor()}
    done = cast(Checkpoint(root), "float16")
    assert done.root["w"].tensor.dtype.name == "float32"
    why = "not cast, because the pickle stores the dtype of these tensors separately"
    assert f"{why}: 'w', 'p', 'x'" in lines(done)
    assert done.notes == ("cast 1 weight: float32 -> float16",)


def test_cast_to_8_bits_of_what_torch_could_then_not_load() -> None:
    root = {"w": tensor(requires_grad=True), "p": tensor(kind="parameter", requires_grad=True)}
    done = cast(Checkpoint(root), "float8_e5m2")
    assert [done.root[name].requires_grad for name in "wp"] == [False, True]
    why = "because torch cannot load requires_grad for this dtype"
    assert f"cleared requires_grad of 1 tensor, {why}" in lines(done)
    assert cast(Checkpoint(root), "float16").root["w"].requires_grad


@pytest.mark.parametrize(
    "bad", ["float31", "int8", "bool", "complex64", "qint8", "float4_e2m1fn_x2", "float6_e2m3"]
)
def test_cast_to_nonsense(bad: str) -> None:
    with pytest.raises(UsageError) as caught:
        cast(ck_of(w=torch.ones(1)), bad)
    assert caught.value.hint


def test_cast_glob_that_matches_nothing() -> None:
    with pytest.raises(UsageError) as caught:
        cast(ck_of(weight=torch.ones(1)), {"wieght": "float16"})
    assert caught.value.hint == "did you mean weight? the weights are: weight"


# compact


def test_compact_cuts_to_a_view() -> None:
    base = torch.arange(1000.0)
    done = compact(ck_of(a=base[10:13]))
    leaf = done.weights["a"]
    assert leaf.storage is not None
    assert (leaf.storage.nbytes, leaf.offset) == (12, 0)
    assert same(to_torch(leaf), base[10:13])
    assert done.notes == ("dropped 3,988 unused bytes of 1 storage",)


def test_compact_leaves_one_buffer_that_is_used_up() -> None:
    """Adjacent views, as those of an LSTM: one storage before, one storage after."""
    base = torch.arange(10.0)
    ck = ck_of(a=base[:4], b=base[4:])
    done = compact(ck)
    assert done.root is ck.root
    assert done.warnings


def test_compact_sees_the_whole_tree() -> None:
    one = storage(bytes(400), "cuda:1")
    weight, moment = Tensor(one, FLOAT32, (5,), (1,)), Tensor(one, FLOAT32, (5,), (1,), 50)
    made = Object(Global("a", "B"), ((moment,),))
    done = compact(Checkpoint({"model": {"w": weight}, "made": made}))
    moved = done.root["made"].args[0][0]
    assert (moved.offset, moved.storage.nbytes, moved.storage.device) == (0, 20, "cuda:1")
    assert done.root["model"]["w"].storage is not moved.storage


@pytest.mark.parametrize("dtype", [FLOAT32, None])
def test_compact_leaves_a_storage_that_is_referred_to_as_a_whole(dtype: DType | None) -> None:
    one = storage(bytes(400))
    raw = [TypedStorage(one, dtype)]
    ck = Checkpoint({"w": Tensor(one, FLOAT32, (5,), (1,)), "raw": raw})
    assert compact(ck).root is ck.root


def test_compact_of_empty_tensors() -> None:
    done = compact(Checkpoint({"e": Tensor(storage(bytes(40)), FLOAT32, (0, 3), (3, 1), 7)}))
    leaf = done.weights["e"]
    assert leaf.storage is not None
    assert (leaf.storage.nbytes, leaf.offset, leaf.shape, leaf.stride) == (0, 0, (0, 3), (3, 1))


def test_compact_keeps_elements_smaller_than_a_byte_whole() -> None:
    ck = Checkpoint({"q": Tensor(storage(bytes(40)), dtypes.BY_NAME["quint4x2"], (4,), (1,), 8)})
    assert compact(ck).root is ck.root


View = tuple[str, tuple[int, ...], tuple[int, ...], int]


@st.composite
def views(draw: st.DrawFn) -> View:
    dtype = draw(st.sampled_from(["uint8", "int16", "float32", "int64"]))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    stride = tuple(draw(st.integers(0, 4)) for _ in shape)
    stride = draw(st.sampled_from([stride, contiguous_stride(shape)]))
    return dtype, shape, stride, draw(st.integers(0, 9))


@given(st.lists(views(), min_size=1, max_size=5))
def test_compact_changes_no_value(made: list[View]) -> None:
    one = storage(bytes(n % 251 for n in range(512)))
    root = OrderedMapping(
        (str(n), Tensor(one, dtypes.BY_NAME[dtype], shape, stride, offset))
        for n, (dtype, shape, stride, offset) in enumerate(made)
    )
    done = compact(Checkpoint(root)).weights
    for name, leaf in done.items():
        assert same(to_torch(leaf), to_torch(root[name]))
    spans = {name: range(leaf.extent[0], sum(leaf.extent)) for name, leaf in root.items()}
    used = len({place for name, span in spans.items() if root[name].numel for place in span})
    storages = {id(each.storage): each.storage.nbytes for each in done.values() if each.storage}
    assert used <= sum(storages.values()) <= used + 8 * 2 * len(made)
    for a, b in product(root, root):
        if root[a].numel and root[b].numel and {*spans[a]} & {*spans[b]}:
            assert done[a].storage is done[b].storage


def test_globs_match_in_the_order_of_the_file() -> None:
    """A set of names would have another order in each process, and so would the errors."""
    names = [f"layer{n}.weight" for n in range(30)]
    assert list(matching(["*"], names)["*"]) == names
