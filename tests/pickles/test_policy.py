"""The tables of names against torch's own, and what may be called."""

from __future__ import annotations

import io
import os
import pickle
import shlex
import sys
import zipfile
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._weights_only_unpickler import _get_allowed_globals

from ckptkit.api import convert
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import UnsafeGlobalError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.tree import Global, Node, Object, OrderedMapping
from ckptkit.pickles.judge import (
    allowlist,
    describe,
    out_of_place,
    refused_by_weights_only,
    weights_only,
)
from ckptkit.pickles.policy import is_harmful
from ckptkit.scanning.files import scan
from ckptkit.scanning.verdict import CLASSES, HARMLESS, SAFE, SINCE, UNKNOWN
from tests.scanning import hostile_pickles as hostile


def call(name: str, *args: Node, new: bool = False) -> Object:
    module, _, inner = name.rpartition(".")
    return Object(Global(module, inner), args, new=new)


def test_the_names_of_weights_only_are_torchs_own() -> None:
    ours = {f"{module}.{name}" for module, name in weights_only()}
    assert ours - {f"{module}.{name}" for module, name in SINCE} == set(_get_allowed_globals())


HARMFUL = """
    os.system posix.system nt.system builtins.eval builtins.exec builtins.getattr
    builtins.__import__ builtins.open builtins.map builtins.type builtins.print __builtin__.eval
    copy_reg._reconstructor copyreg._reconstructor subprocess.Popen subprocess.run
    commands.getoutput torch.load torch.hub.load torch.hub.load_state_dict_from_url
    torch.jit.load torch.storage._load_from_bytes torch.save
    torch.fx.graph_module.reduce_graph_module torch.utils.cpp_extension.load numpy.load
    numpy.save numpy.f2py.compile functools.reduce operator.methodcaller pickle.loads
    _pickle.loads cPickle.loads runpy.run_path importlib.import_module shutil.rmtree
    socket.socket ctypes.CDLL webbrowser.open distutils.spawn.spawn imp.load_source
    pathlib.Path.write_text torch._utils._rebuild_sparse_csr_tensor.x pathlib.os.system
    code.interact pty.spawn asyncio.run timeit.timeit torchgen.utils.x functorch.vmap
    numpy.testing._private.utils.runstring torch.serialization.load types.FunctionType
    types.CodeType
"""


@pytest.mark.parametrize("name", HARMFUL.split())
def test_calls_that_have_no_business_in_a_checkpoint(name: str) -> None:
    assert is_harmful(call(name, "touch canary"))
    assert refused_by_weights_only(Global(*name.rpartition(".")[::2]))


def test_the_attributes_of_tensors_are_torchs_own() -> None:
    """A name that this torch has and the list does not would be found by torch's code."""
    own = {name for name in dir(torch.Tensor) if not name.startswith("_")}
    assert own - allowlist().tensor_attributes == set()


class Thing:
    """An object of a user's class."""


@pytest.mark.parametrize("protocol", [0, 1])
def test_objects_of_protocols_0_and_1_are_judged_as_those_of_newobj(
    protocol: int, tmp_path: Path
) -> None:
    thing = Thing()
    vars(thing).update(depth=3, names=["a"])
    path, out = tmp_path / "in.pkl", tmp_path / "out.pth"
    path.write_bytes(pickle.dumps({"thing": thing, "w": 1.5}, protocol))
    newer = tmp_path / "newer.pkl"
    newer.write_bytes(pickle.dumps({"thing": thing, "w": 1.5}, 2))
    assert scan(path).verdict == scan(newer).verdict == CLASSES
    convert(path, out)
    with zipfile.ZipFile(out) as archive:
        data = archive.read(next(each for each in archive.namelist() if each.endswith("data.pkl")))
    again = pickle.loads(data)
    assert type(again["thing"]) is Thing and vars(again["thing"]) == vars(thing)
    assert again["w"] == 1.5


class Odd(torch.nn.Linear):
    """A layer with something in it that is refused."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.run = os.system


def test_the_hint_for_a_module_that_is_refused_works(tmp_path: Path) -> None:
    path = tmp_path / "a net.pt"
    torch.save(Odd(), path)
    with pytest.raises(UnsafeGlobalError) as raised:
        convert(path, tmp_path / "out.pth")
    words = shlex.split(str(raised.value.hint).partition(": ")[2])
    assert words == ["ckptkit", "convert", str(path), "a net-weights.safetensors"]
    assert set(convert(path, tmp_path / words[3]).checkpoint.weights) == {"weight", "bias"}


def test_modules_under_quantization_of_torch_1_3() -> None:
    old = "torch.quantization"
    wrapper = Object(Global(f"{old}.observer", "_PartialWrapper"), (), new=True)
    wrapper.steps.append(("build", {"p": Global("torch", "qint8")}))
    config = Object(Global(f"{old}.QConfig", "QConfig"), (wrapper, wrapper), new=True)
    hook = Global(f"{old}.quantize", "_observer_forward_hook")
    stub = Object(Global(f"{old}.stubs", "QuantStub"), (), new=True)
    state = {"qconfig": config, "_forward_hooks": OrderedMapping({1: hook})}
    stub.steps.append(("build", state))
    assert not is_harmful(config) and not is_harmful(stub)
    assert out_of_place(hook) is None


@pytest.mark.parametrize("name", hostile.RECONSTRUCTED)
def test_reconstructing_in_any_other_way_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pkl"
    path.write_bytes(hostile.UNCLEAR[f"reconstructor-{name}"])
    assert scan(path).verdict == UNKNOWN
    with pytest.raises(UnsafeGlobalError, match=r"copyreg\._reconstructor"):
        convert(path, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_the_verdict_does_not_depend_on_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the packages of this Python nor the script that runs play a part."""
    (tmp_path / "site-packages" / "somebodys").mkdir(parents=True)
    (tmp_path / "site-packages" / "somebodys" / "__init__.py").touch()
    runner = ModuleSpec("__main__", None, origin="/x/site-packages/y.py")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", runner)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    for own in ("somebodys.nets.Net", "__main__.Net"):
        assert not is_harmful(call(own, new=True))
    for package in ("torchvision.models.resnet.Odd", "transformers.odd.Odd", "sympy.Symbol"):
        assert not is_harmful(call(package, new=True))
        assert is_harmful(call(package, "x", new=True))  # a text that it may evaluate


@pytest.mark.parametrize(
    ("bits", "harmful"),
    [
        (None, False), ({}, False), ({"conj": True}, False), ({"conj": False, "neg": True}, False),
        ({"neg": 1}, True), ({"neg": "x"}, True), ({True: True}, True), ({"neg": None}, True),
        ([], True), ({"neg": Object(Global("mine", "Flag"), new=True)}, True),
    ],
)  # fmt: skip
def test_the_bits_of_a_tensor_are_texts_and_flags(bits: Node, harmful: bool) -> None:
    storage = TypedStorage(BY_NAME["float32"], Storage(Range(Memory(b"abcd"), 0, 4)))
    args = (storage, 0, (1,), (1,), False, OrderedMapping(), bits)
    assert is_harmful(call("torch._utils._rebuild_tensor_v2", *args)) == harmful


def test_tensors_with_bits_are_safe(tmp_path: Path) -> None:
    bits = {"c": torch.ones(2, dtype=torch.complex64).conj(), "n": torch._neg_view(torch.ones(2))}
    torch.save(bits, tmp_path / "in.pth")
    assert scan(tmp_path / "in.pth").verdict == SAFE
    convert(tmp_path / "in.pth", tmp_path / "out.pth")
    again = torch.load(tmp_path / "out.pth", weights_only=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in bits.items())


def test_harm_through_new() -> None:
    assert is_harmful(call("subprocess.Popen", new=True))
    assert is_harmful(call("os.system", new=True))
    assert not is_harmful(call("torch.nn.modules.linear.Linear", new=True))
    assert is_harmful(call("torch.nn.modules.linear.Linear"))
    assert is_harmful(call("torch.hub.load", new=True))
    assert not is_harmful(
        call("torch.distributed.remote_device._remote_device", new=True)
    )  # of a ShardedTensor


@pytest.mark.parametrize(
    "callable_", [Object(Global("functools", "partial")), None, "os.system", 5, ("os", "system")]
)
def test_only_names_may_be_called(callable_: Node) -> None:
    assert is_harmful(Object(callable_, ()))
    assert describe(callable_) == "the result of another call"


SIZE = (2,)
STORAGE = TypedStorage(Storage(Range(Memory(bytes(8)), 0, 8)), BY_NAME["float32"])
TENSOR = Tensor(STORAGE.storage, BY_NAME["float32"], SIZE, (1,))
DTYPE = call("numpy.dtype", "f8", False, True)
DTYPE.steps = [("build", (3, "<", None, None, None, -1, -1, 0))]
PLAIN_CALLS: dict[str, tuple[Node, ...]] = {
    "collections.OrderedDict": ([["a", TENSOR]],), "collections.Counter": ({"a": 1},),
    "collections.defaultdict": (Global("builtins", "list"), {"a": [1]}),
    "collections.deque": ([1, 2], 5), "argparse.Namespace": (), "pathlib.PosixPath": ("a", "b"),
    "pathlib._local.PosixPath": ("a",), "datetime.datetime": (b"\x07\xea\1\1\0\0\0\0\0\0",),
    "numpy.dtype": ("f8", False, True), "numpy.core.multiarray.scalar": (DTYPE, bytes(8)),
    "numpy._core.multiarray._reconstruct": (Global("numpy", "ndarray"), (0,), b"b"),
    "torch.device": ("cuda", 0), "torch.Size": ([1, 2],),
    "torch._utils._rebuild_tensor_v2": (STORAGE, 0, SIZE, (1,), False, OrderedMapping()),
    "torch._utils._rebuild_parameter_with_state": (TENSOR, True, OrderedMapping(), {"a": 1}),
    "torch.serialization._get_layout": ("torch.sparse_coo",), "types.SimpleNamespace": (),
    "builtins.slice": (1, None, 2), "uuid.UUID": ("12345678" * 4,), "decimal.Decimal": ("1.5",),
    "functools.partial": (Global("torch.nn.functional", "gelu"), 1), "builtins.dict": ([("a", 1)],),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_calls_that_only_make_a_value(name: str) -> None:
    assert not is_harmful(call(name, *PLAIN_CALLS[name]))


BAG = call("types.SimpleNamespace")
BAG.steps = [("build", {"keys": call("functools.partial", Global("torch.nn.functional", "gelu"))})]
DUCKS = (
    "builtins.bytes", "builtins.dict", "builtins.frozenset", "builtins.list", "builtins.set", "builtins.tuple",
    "collections.Counter", "collections.OrderedDict", "collections.deque", "fractions.Fraction", "pathlib.Path",
    "random.Random", "re._compile", "torch.Size", "torch.device", "numpy.dtype", "uuid.UUID",
    "torch._utils._rebuild_tensor",
)  # fmt: skip


def test_callables_that_ask_for_methods_take_nothing_that_has_them() -> None:
    """A list of such values may be copied; one of sizes, pairs or bytes may not."""
    copied = ("dict", "frozenset", "list", "set", "tuple", "Counter", "deque")
    values: list[Node] = [BAG, call("mine.Thing", new=True), Global("mine", "Thing"), [BAG]]
    for name, value in product(DUCKS, values):
        if not (isinstance(value, list) and name.endswith(copied)) or name in (
            "builtins.dict",
            "collections.OrderedDict",
        ):
            assert is_harmful(call(name, value)), (name, value)


def test_names_are_exact() -> None:
    for name in (
        "torch.jit._pickle.__loader__.set_data", "torch._utils._rebuild_tensor_v2.__globals__", "random._os",
        "torch._utils.sys", "collections._sys", "torch.utils.collect_env.run", "numpy.lib.utils.safe_eval",
        "functools.reduce", "operator.call",
            "copy.deepcopy", "builtins.sorted", "dataclasses.dataclass", "torch._tensor._rebuild_from_type_v2",
            "builtins.getattr", "builtins.map", "torch.storage._load_from_bytes",
        "mine.nets.__globals__", "sympy.sin", "pluggy.Result", "mine.nets.Net",
        "torch.optim.adam.Adam", "builtins.print", "functools.partial",
    ):  # fmt: skip
        assert out_of_place(Global(*name.rpartition(".")[::2])), name
    for name in ("torch.nn.functional.gelu", "torch.nn.modules.linear.Linear", "builtins.int"):
        assert out_of_place(Global(*name.rpartition(".")[::2])) is None, name
    assert (
        out_of_place(Global("mine.nets", "sys.modules")) == "does not look like the name of a class"
    )


def test_element_types_are_in_place() -> None:
    dtypes = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len(dtypes) > 30
    for name in dtypes:
        assert out_of_place(Global(*name.split("."))) is None, name


def built(made: Object, *states: Node) -> Object:
    made.steps = [("build", state) for state in states]
    return made


def test_states() -> None:
    assert not is_harmful(built(call("mine.Net", new=True), {"a": [1]}))
    assert not is_harmful(built(call("mine.Net", new=True), (None, {"a": BAG})))
    assert not is_harmful(built(call("argparse.Namespace", new=True), {"a": [1]}))
    computed = call("builtins.dict", [("__setstate__", Global("mine", "run"))])
    assert is_harmful(built(call("torch.nn.modules.linear.Linear", new=True), BAG))
    assert is_harmful(built(call("types.SimpleNamespace"), call("mine.Thing", new=True)))
    assert is_harmful(built(call("types.SimpleNamespace"), computed, "touch canary"))
    assert is_harmful(built(call("mine.Net", new=True), {"a": 1}, {"a": 2}))
    assert is_harmful(built(call("builtins.object"), {"a": 1}))
    adam = {"defaults": {"lr": 0.1}, "param_groups": [{"params": [TENSOR]}], "state": {}}
    assert not is_harmful(built(call("torch.optim.adam.Adam", new=True), adam))
    assert is_harmful(built(call("torch.optim.adam.Adam", new=True), {**adam, "defaults": BAG}))
    assert is_harmful(
        built(call("torch.optim.adam.Adam", new=True), {**adam, "param_groups": [BAG]})
    )
    once = call("mine.Net", new=True)
    once.steps = [("build", {"append": Global("mine", "run")}), ("append", ["touch canary"])]
    assert is_harmful(once)
    once.steps.reverse()
    assert not is_harmful(once)


def test_classes_of_packages_only_by_list() -> None:
    assert not is_harmful(call("torch.optim.adam.Adam", new=True))
    for name in (
        "sympy.functions.elementary.trigonometric.sin", "torch.nn.parallel.distributed.DistributedDataParallel",
        "torch.utils.data.datapipes.datapipe._IterDataPipeSerializationWrapper", "joblib.memory.Memory",
        "pluggy._result.Result",  # which is installed where the tests are
    ):  # fmt: skip
        assert is_harmful(call(name, "x", new=True)), name


@pytest.mark.parametrize(
    "name",
    ["torch.FloatTensor", "torch.Tensor", "torch.storage.UntypedStorage", "torch.LongStorage"],
)
def test_memory_on_demand(name: str) -> None:
    assert is_harmful(call(name, 1 << 40))
    assert is_harmful(call(name, (1, 2), new=True))
    assert not is_harmful(call(name))


FROM_TYPE = (
    "torch._tensor._rebuild_from_type_v2",
    "torch._tensor._rebuild_from_type",
    "torch.tensor._rebuild_from_type",
)
NUMPY = (
    "numpy.random._pickle.__generator_ctor",
    "numpy.random._pickle.__randomstate_ctor",
    "numpy.random.__RandomState_ctor",
)
SYSTEM = Global("os", "system")


@pytest.mark.parametrize("name", FROM_TYPE)
def test_rebuilding_from_a_type_calls_its_first_argument(name: str) -> None:
    kind, args = Global("torch", "Tensor"), ("touch canary",)
    rebuild = Global("torch._utils", "_rebuild_tensor_v2")
    made = (STORAGE, 0, SIZE, (1,), False, OrderedMapping())
    assert not is_harmful(call(name, rebuild, kind, made, {}))
    assert is_harmful(call(name, rebuild, kind, made, BAG))
    assert is_harmful(call(name, rebuild, kind, args, {}))
    assert is_harmful(call(name, Global("mine", "rebuild"), kind, args, {}))
    for called in (SYSTEM, call("functools.partial", SYSTEM), Global(*name.rpartition(".")[::2])):
        assert is_harmful(call(name, called, kind, args, {}))


@pytest.mark.parametrize("name", NUMPY)
def test_numpys_generators_call_their_second_argument(name: str) -> None:
    ctor = Global("numpy.random._pickle", "__bit_generator_ctor")
    assert not is_harmful(call(name, "MT19937"))
    assert not is_harmful(call(name, "MT19937", ctor))
    for called in (SYSTEM, call("functools.partial", SYSTEM)):
        assert is_harmful(call(name, "touch canary", called))


def test_classes_that_others_make() -> None:
    bits = "numpy.random._pickle.__bit_generator_ctor"
    assert not is_harmful(call(bits, "MT19937"))
    assert not is_harmful(call(bits, Global("numpy.random._pcg64", "PCG64")))
    assert is_harmful(call(bits, Global("subprocess", "Popen")))
    assert is_harmful(call(bits, Global("numpy.random.mtrand", "np.os.system")))
    assert is_harmful(call(bits, Global("numpy.random.mtrand", "seed")))
    assert is_harmful(call("copyreg.__newobj__", Global("subprocess", "Popen")))
    assert not is_harmful(call("copyreg.__newobj__", Global("mine", "Thing")))
    assert not is_harmful(call("copyreg.__newobj__", Global("torch.nn.modules.linear", "Linear")))


def test_every_module_of_this_python_is_guarded() -> None:
    for module in sys.stdlib_module_names:
        assert is_harmful(call(f"{module}.anything_at_all"))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_in_memory_is_not_harmful(protocol: int, tmp_path: Path) -> None:
    """Megatron-LM keeps the ``_extra_state`` of Transformer Engine as such."""
    state = {"w": torch.ones(2), "fc1._extra_state": io.BytesIO(b"state of fp8")}
    torch.save(state, tmp_path / "a.pth", pickle_protocol=protocol)
    assert scan(tmp_path / "a.pth").verdict == HARMLESS
    convert(tmp_path / "a.pth", tmp_path / "b.pth")
    kept = torch.load(tmp_path / "b.pth", weights_only=False)["fc1._extra_state"]
    assert kept.getvalue() == b"state of fp8"


def test_a_file_in_memory_with_attributes_is_not_known() -> None:
    """They could stand in the place of its methods."""
    made = call("_io.BytesIO", new=True)
    made.steps.append(("build", (b"", 0, {"read": Global("os", "system")})))
    assert is_harmful(made)
