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


def test_tensors_with_bits_are_safe(tmp_path: Path) -> None:
    bits = {"c": torch.ones(2, dtype=torch.complex64).conj(), "n": torch._neg_view(torch.ones(2))}
    torch.save(bits, tmp_path / "in.pth")
    assert scan(tmp_path / "in.pth").verdict == SAFE
    convert(tmp_path / "in.pth", tmp_path / "out.pth")
    again = torch.load(tmp_path / "out.pth", weights_only=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in bits.items())


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


def new(name: str, *states: Node) -> Object:
    """An object by __new__ that gets these states."""
    return built(call(name, new=True), *states)


def built(made: Object, *states: Node) -> Object:
    made.steps = [("build", state) for state in states]
    return made


def hooked(*order: int) -> Object:
    """An object that gets a method of the file's choosing, and items, in this order."""
    made, method = new("mine.Net"), {"append": Global("mine", "run")}
    steps: list[tuple[str, Node]] = [("build", method), ("append", ["touch canary"])]
    made.steps = [steps[at] for at in order]
    return made


def from_type(name: str, called: Node, *more: Node) -> Object:
    args, state = more or (("touch canary",), {})
    return call(name, called, Global("torch", "Tensor"), args, state)


def bits(value: Node) -> Object:
    """A tensor with these bits."""
    return call("torch._utils._rebuild_tensor_v2", *ARGS, value)


ADAM, LINEAR = "torch.optim.adam.Adam", "torch.nn.modules.linear.Linear"
OPTIMIZER = {"defaults": {"lr": 0.1}, "param_groups": [{"params": [TENSOR]}], "state": {}}
COMPUTED = call("builtins.dict", [("__setstate__", Global("mine", "run"))])
SYSTEM, POPEN = Global("os", "system"), Global("subprocess", "Popen")
REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
ARGS = (STORAGE, 0, SIZE, (1,), False, OrderedMapping())
ALLOCATE = (
    "torch.FloatTensor", "torch.Tensor", "torch.storage.UntypedStorage", "torch.LongStorage",
)  # fmt: skip
FROM_TYPE = (
    "torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type", "torch.tensor._rebuild_from_type",
)  # fmt: skip
NUMPY = (
    "numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__randomstate_ctor",
    "numpy.random.__RandomState_ctor",
)  # fmt: skip
BIT_GENERATOR = "numpy.random._pickle.__bit_generator_ctor"
BIT_GENERATORS = Global("numpy.random._pickle", "__bit_generator_ctor")
PACKAGES = (
    "sympy.functions.elementary.trigonometric.sin",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.utils.data.datapipes.datapipe._IterDataPipeSerializationWrapper", "joblib.memory.Memory",
    "pluggy._result.Result",  # which is installed where the tests are
)  # fmt: skip
# Objects that are harmless, and objects that are not.
JUDGED: dict[str, tuple[list[Object], list[Object]]] = {
    "through __new__": (
        # the last is of a ShardedTensor
        [new(LINEAR), new(ADAM), new("torch.distributed.remote_device._remote_device")],
        [new("subprocess.Popen"), new("os.system"), new("torch.hub.load"), call(LINEAR)]),
    "classes of packages": ([], [call(name, "x", new=True) for name in PACKAGES]),
    "states": (
        [new("mine.Net", {"a": [1]}), new("mine.Net", (None, {"a": BAG})),
         new("argparse.Namespace", {"a": [1]}), new(ADAM, OPTIMIZER), hooked(1, 0)],
        [new(LINEAR, BAG), built(call("types.SimpleNamespace"), new("mine.Thing")),
         built(call("types.SimpleNamespace"), COMPUTED, "touch canary"),
         new("mine.Net", {"a": 1}, {"a": 2}), built(call("builtins.object"), {"a": 1}),
         new(ADAM, {**OPTIMIZER, "defaults": BAG}), new(ADAM, {**OPTIMIZER, "param_groups": [BAG]}),
         hooked(0, 1), new("_io.BytesIO", (b"", 0, {"read": SYSTEM}))]),  # as its method
    "memory on demand": (
        [call(name) for name in ALLOCATE],
        [*(call(name, 1 << 40) for name in ALLOCATE),
         *(call(name, (1, 2), new=True) for name in ALLOCATE)]),
    "the bits of a tensor": (
        [bits(each) for each in (None, {}, {"conj": True}, {"conj": False, "neg": True})],
        [bits(each) for each in (
            {"neg": 1}, {"neg": "x"}, {True: True}, {"neg": None}, [], {"neg": new("mine.Flag")})]),
    "the first argument is called": (
        [from_type(name, REBUILD, ARGS, {}) for name in FROM_TYPE],
        [made for name in FROM_TYPE for made in (
            from_type(name, REBUILD, ARGS, BAG), from_type(name, REBUILD),
            from_type(name, Global("mine", "rebuild")), from_type(name, SYSTEM),
            from_type(name, call("functools.partial", SYSTEM)),
            from_type(name, Global(*name.rpartition(".")[::2])))]),
    "the second argument is called": (
        [*(call(name, "MT19937") for name in NUMPY),
         *(call(name, "MT19937", BIT_GENERATORS) for name in NUMPY)],
        [*(call(name, "touch canary", SYSTEM) for name in NUMPY),
         *(call(name, "touch canary", call("functools.partial", SYSTEM)) for name in NUMPY)]),
    "classes that others make": (
        [call(BIT_GENERATOR, "MT19937"),
         call(BIT_GENERATOR, Global("numpy.random._pcg64", "PCG64")),
         call("copyreg.__newobj__", Global("mine", "Thing")),
         call("copyreg.__newobj__", Global("torch.nn.modules.linear", "Linear"))],
        [call(BIT_GENERATOR, POPEN), call("copyreg.__newobj__", POPEN),
         call(BIT_GENERATOR, Global("numpy.random.mtrand", "np.os.system")),
         call(BIT_GENERATOR, Global("numpy.random.mtrand", "seed"))]),
}  # fmt: skip


@pytest.mark.parametrize("topic", JUDGED)
def test_harmless_and_harmful_objects(topic: str) -> None:
    harmless, harmful = JUDGED[topic]
    assert [each for each in harmless if is_harmful(each)] == []
    assert [each for each in harmful if not is_harmful(each)] == []


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
