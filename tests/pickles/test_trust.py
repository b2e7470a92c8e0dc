"""The tables of names against torch's own, and what may be called."""

from __future__ import annotations

import sys

import pytest
from torch._weights_only_unpickler import _get_allowed_globals

from ckptkit.core.tree import Global, Node, Object
from ckptkit.pickles.trust import WEIGHTS_ONLY, describe, is_harmful, refused_by_weights_only


def call(name: str, *args: Node, new: bool = False) -> Object:
    module, _, inner = name.rpartition(".")
    return Object(Global(module, inner), args, new=new)


def test_the_names_of_weights_only_are_torchs_own() -> None:
    ours = {f"{module}.{name}" for module, name in WEIGHTS_ONLY}
    assert ours == set(_get_allowed_globals())


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "posix.system",
        "nt.system",
        "builtins.eval",
        "builtins.exec",
        "builtins.getattr",
        "builtins.__import__",
        "builtins.open",
        "builtins.map",
        "builtins.type",
        "builtins.print",
        "__builtin__.eval",
        "copy_reg._reconstructor",
        "copyreg._reconstructor",
        "subprocess.Popen",
        "subprocess.run",
        "commands.getoutput",
        "torch.load",
        "torch.hub.load",
        "torch.hub.load_state_dict_from_url",
        "torch.jit.load",
        "torch.storage._load_from_bytes",
        "torch.save",
        "torch.fx.graph_module.reduce_graph_module",
        "torch.utils.cpp_extension.load",
        "numpy.load",
        "numpy.save",
        "numpy.f2py.compile",
        "functools.reduce",
        "operator.methodcaller",
        "pickle.loads",
        "_pickle.loads",
        "cPickle.loads",
        "runpy.run_path",
        "importlib.import_module",
        "shutil.rmtree",
        "socket.socket",
        "ctypes.CDLL",
        "webbrowser.open",
        "distutils.spawn.spawn",
        "imp.load_source",
        "pathlib.Path.write_text",
        "torch._utils._rebuild_sparse_csr_tensor.x",
        "pathlib.os.system",
        "code.interact",
        "pty.spawn",
        "asyncio.run",
        "timeit.timeit",
        "torchgen.utils.x",
        "functorch.vmap",
        "numpy.testing._private.utils.runstring",
        "torch.serialization.load",
        "types.FunctionType",
        "types.CodeType",
    ],
)
def test_calls_that_have_no_business_in_a_checkpoint(name: str) -> None:
    assert is_harmful(call(name, "touch canary"))
    assert refused_by_weights_only(Global(*name.rpartition(".")[::2]))


def test_harm_through_new() -> None:
    assert is_harmful(call("subprocess.Popen", new=True))
    assert is_harmful(call("os.system", new=True))
    assert not is_harmful(call("torch.nn.modules.linear.Linear", new=True))
    assert is_harmful(call("torch.nn.modules.linear.Linear"))
    assert is_harmful(call("torch.hub.load", new=True))
    assert not is_harmful(call("torch.distributed.remote_device._remote_device", new=True))  # of a ShardedTensor


@pytest.mark.parametrize("callable_", [Object(Global("functools", "partial")), None, "os.system", 5, ("os", "system")])
def test_only_names_may_be_called(callable_: Node) -> None:
    assert is_harmful(Object(callable_, ()))
    assert describe(callable_) == "the result of another call"


@pytest.mark.parametrize(
    "name",
    [
        "collections.OrderedDict",
        "collections.Counter",
        "collections.defaultdict",
        "collections.deque",
        "argparse.Namespace",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "datetime.datetime",
        "numpy.dtype",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray._reconstruct",
        "torch.device",
        "torch.Size",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter_with_state",
        "torch.serialization._get_layout",
        "types.SimpleNamespace",
        "mypackage.train.Config",
        "omegaconf.dictconfig.DictConfig",
        "builtins.slice",
        "uuid.UUID",
        "decimal.Decimal",
    ],
)
def test_calls_that_only_make_a_value(name: str) -> None:
    assert not is_harmful(call(name, "x"))


@pytest.mark.parametrize(
    "name", ["torch.FloatTensor", "torch.Tensor", "torch.storage.UntypedStorage", "torch.LongStorage"]
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
    assert not is_harmful(call(name, rebuild, kind, args, {}))
    assert not is_harmful(call(name, Global("mine", "rebuild"), kind, args, {}))
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
