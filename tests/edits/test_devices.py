from __future__ import annotations

import pytest

from ckptkit.api import open_checkpoint
from ckptkit.core import dtypes
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import on_command_line
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, SetNode
from ckptkit.edits.devices import DEVICES, remap
from tests.edits.trees import from_torch, lines, storage, tensor
from tests.matrix import FOLDER

FLOAT32 = dtypes.BY_NAME["float32"]


def device(*args: Node) -> Object:
    return Object(Global("torch", "device"), args)


def devices(ck: Checkpoint) -> list[str]:
    return [each.device for each in ck.weights.values()]


def on(*tags: str) -> Checkpoint:
    return Checkpoint(OrderedMapping({f"w{n}": tensor(device=tag) for n, tag in enumerate(tags)}))


@pytest.mark.parametrize(
    ("tags", "request_", "expected"),
    [
        ("cuda:1 cuda:0 cpu", "cpu", "cpu cpu cpu"),
        ("cuda:1 cuda cuda:10 cpu", {"cuda:1": "cuda:0", "cuda": "cpu"}, "cuda:0 cpu cuda:10 cpu"),
        ("cuda:0 cuda:1", {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}, "cuda:1 cuda:0"),  # once
        ("meta cuda:0", "cpu", "meta cpu"),
        ("meta cuda:0", {"meta": "cpu"}, "cpu cuda:0"),
        ("odd:tag", {"odd:tag": "cpu"}, "cpu"),
        *(("cuda:7", each, each) for each in (*DEVICES, "cuda:0", "cuda:12", "xpu:1", "npu:3")),
    ],
)
def test_tags(tags: str, request_: object, expected: str) -> None:
    ck = on(*tags.split())
    done = remap(ck, request_)
    assert devices(done) == expected.split()
    assert not done.warnings
    assert devices(ck) == tags.split(), "the input is as it was"


def test_notes_count_storages() -> None:
    assert remap(on("cuda:1", "cuda:0", "cpu"), "cpu").notes == (
        "changed the device tag of 1 storage: cuda:0 -> cpu",
        "changed the device tag of 1 storage: cuda:1 -> cpu",
    )


def test_bytes_checksums_and_ties_stay() -> None:
    one = storage(bytes(16), "cuda:1")
    whole = Tensor(one, FLOAT32, (4,), (1,))
    view = Tensor(one, FLOAT32, (2,), (1,), 2, kind="parameter")
    root = {"whole": whole, "view": view, "raw": [TypedStorage(one, None)], "again": whole}
    done = remap(Checkpoint(root), "cpu")
    new = done.root["whole"].storage
    assert new is done.root["view"].storage is done.root["raw"][0].storage
    assert done.root["again"] is done.root["whole"]
    assert (new.record, new.crc32, new.device) == (one.record, one.crc32, "cpu")
    assert (done.root["view"].offset, done.root["view"].kind) == (2, "parameter")
    assert done.notes == ("changed the device tag of 1 storage: cuda:1 -> cpu",)


def test_tensors_without_storage() -> None:
    ck = Checkpoint({"a": Tensor(None, FLOAT32, (2,), (1,)), "b": tensor(device="cuda:0")})
    assert devices(remap(ck, "cpu")) == ["meta", "cpu"]


@pytest.mark.parametrize(
    "place",
    [
        lambda t: Object(Global("a", "B"), (t,)),
        lambda t: Object(Global("a", "B"), ((t,), {"k": [t]})),
        lambda t: Object(Global("a", "B"), kwargs={"k": t}),
        lambda t: SetNode([t]),
        lambda t: OrderedMapping({}, {"attribute": t}),
    ],
)
def test_tensors_anywhere(place: Node) -> None:
    leaf = tensor(device="cuda:1")
    done = remap(Checkpoint({"x": place(leaf), "w": leaf}), "cpu")
    assert done.notes == ("changed the device tag of 1 storage: cuda:1 -> cpu",)


def test_nothing_to_do() -> None:
    ck = on("cpu")
    for request in ("cpu", {"cuda:1": "cpu"}):
        done = remap(ck, request)
        assert done.root is ck.root
        assert not done.notes
        assert "the storages are on cpu" in lines(done)


@pytest.mark.parametrize(
    "bad",
    ["gpu", "gpu:0", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda:0 ", "cpu:0", "", "cuda:99999",
     "cuda:\u0661", "Cpu"],
)  # fmt: skip
def test_nonsense_is_refused(bad: str) -> None:
    for request in (bad, {"cuda:0": bad}, {bad: "cpu"}):
        with pytest.raises(UsageError) as caught:
            remap(on("cuda:0"), request)
        assert caught.value.hint


# Device arguments of rebuild calls (torch/_utils.py)


def from_numpy(where: Node) -> Object:
    rebuild = Global("torch._utils", "_rebuild_device_tensor_from_numpy")
    return Object(rebuild, (tensor(), "dtype", where, False))


def wrapper(where: Node) -> Object:
    kind, rebuild = Global("a", "DTensor"), Global("torch._utils", "_rebuild_wrapper_subclass")
    inner = (kind, "dtype", (2,), (1,), 0, "layout", where, False)
    made = Global("torch._tensor", "_rebuild_from_type_v2")
    return Object(made, (rebuild, kind, inner, {"state": 1}))


def test_string_argument() -> None:
    done = remap(Checkpoint({"w": tensor(), "x": from_numpy("xla:0")}), "cpu")
    assert done.root["x"].args[2] == "cpu"
    assert done.notes == ("changed the argument of 1 rebuild call: xla:0 -> cpu",)


def test_device_argument_of_a_wrapper_subclass() -> None:
    shared = wrapper(device("cuda", 1))
    ck = Checkpoint({"w": tensor(device="cuda:1"), "x": shared, "y": [shared]})
    done = remap(ck, {"cuda:1": "cuda:0"})
    new = done.root["x"]
    assert new is done.root["y"][0]
    assert new.args[2][6].args == ("cuda", 0)
    assert new.args[2][:6] == shared.args[2][:6]
    assert new.args[3] == {"state": 1}
    assert not done.warnings
    assert shared.args[2][6].args == ("cuda", 1), "the input is as it was"


def test_same_arguments_elsewhere_stay() -> None:
    call = from_numpy("xla:0")
    done = remap(Checkpoint({"w": tensor(), "x": call, "mine": call.args}), "cpu")
    assert done.root["mine"][2] == "xla:0"


def test_device_value_shared_by_an_argument_is_still_the_users() -> None:
    """The argument changes in a copy of its own."""
    where = device("cuda", 1)
    done = remap(Checkpoint({"w": tensor(), "x": wrapper(where), "mine": where}), "cpu")
    assert done.root["x"].args[2][6].args == ("cpu",)
    assert done.root["mine"].args == ("cuda", 1)


# torch.device values


def test_device_values_are_listed_and_left() -> None:
    config = {"device": device("cuda", 1), "other": device("cpu")}
    done = remap(Checkpoint({"w": tensor(device="cuda:1"), "config": config}), "cpu")
    assert done.root["config"]["device"].args == ("cuda", 1)
    assert "config.device (cuda:1)" in lines(done)
    assert "config.other" not in lines(done)
    assert "device_values=True changes them" in lines(done)


@pytest.mark.parametrize("where", [device("cuda", 1), device("cuda:1")])
def test_device_values_are_changed_on_request(where: Object) -> None:
    ck = Checkpoint({"w": tensor(), "config": {"device": where, "again": where}})
    done = remap(ck, {"cuda:1": "cuda:0"}, device_values=True)
    assert done.root["config"]["device"].args == ("cuda", 0)
    assert done.root["config"]["again"] is done.root["config"]["device"]
    assert done.notes == ("changed 1 torch.device value: cuda:1 -> cuda:0",)
    assert not done.warnings


def test_device_value_alone_is_no_reason_to_write() -> None:
    ck = Checkpoint({"w": tensor(), "device": device("cuda", 1)})
    done = remap(ck, "cpu")
    assert done.root is ck.root
    assert len(done.warnings) == 2


def test_device_object_with_odd_arguments() -> None:
    """A file can hold anything: it is shown, not tripped over."""
    odd = {"a": device(), "b": device({}), "c": Object(Global("torch", "device"), "cuda")}
    done = remap(Checkpoint({"w": tensor(device="cuda:1"), **odd}), "cpu", device_values=True)
    assert done.root["w"].device == "cpu"


def test_order_and_metadata_stay() -> None:
    from torch import nn

    ck = Checkpoint(from_torch(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()))
    done = remap(ck, "cuda:0")
    assert list(done.weights) == list(ck.weights)
    assert done.root.state == ck.root.state
    assert set(devices(done)) == {"cuda:0"}


def test_what_torch_keeps_on_the_cpu_is_named() -> None:
    """Adam's step and the states of generators; the warning says how to leave them there."""
    names = ("torch-zip/adam_cuda1.pth", "torch-zip/none_full_cuda1.pth")
    adam, momentum = (open_checkpoint(FOLDER / name) for name in names)
    (said,) = remap(adam, "cuda:0").warnings
    assert said == (
        "torch keeps 'optimizer.state.0.step', 'optimizer.state.1.step' and 11 more on the CPU, "
        "but their tag is now cuda:0; {'cuda:1': 'cuda:0'} does not change these tensors"
    )
    with on_command_line():
        (said,) = remap(momentum, "cuda:0").warnings
    assert "'rng.torch'" in said
    assert "; --device cuda:1=cuda:0 does not change these tensors" in said
    for devices in ("cpu", {"cuda:1": "cuda:0"}, {"cuda:1": "cuda:0", "cpu": "cpu"}):
        assert not remap(adam, devices).warnings
    (said,) = remap(open_checkpoint(FOLDER / "torch-zip/none_full_cpu.pth"), "cuda:0").warnings
    assert said == (
        "torch keeps 'rng.torch' on the CPU, but their tag is now cuda:0; a dict cannot exclude these tensors, "
        "because all tensors have the tag cpu"
    )
    assert not remap(open_checkpoint(FOLDER / "torch-zip/none_bare_cpu.pth"), "cuda:0").warnings
