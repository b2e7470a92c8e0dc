"""Names for pickles: the rows of tables, what hangs on them, and what nobody should ever call."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, NamedTuple

Name = tuple[str, str]

_HOSTILE = """
    os.system os.popen os.remove os.mkdir os.environ.update os.putenv posix.system
    subprocess.Popen subprocess.run builtins.exec builtins.eval builtins.compile
    builtins.__import__ builtins.open builtins.getattr builtins.setattr builtins.map
    builtins.filter builtins.type builtins.vars builtins.globals builtins.next builtins.iter
    builtins.print builtins.sorted builtins.max builtins.sum builtins.zip builtins.enumerate
    builtins.reversed builtins.super builtins.property builtins.classmethod
    builtins.staticmethod builtins.str builtins.int builtins.float builtins.bool
    builtins.memoryview builtins.hash builtins.repr builtins.any builtins.all builtins.min
    builtins.isinstance functools.reduce functools.partial functools.partialmethod
    functools.cmp_to_key functools.lru_cache functools.singledispatch functools.cached_property
    operator.methodcaller operator.attrgetter operator.itemgetter operator.call operator.add
    operator.iadd operator.getitem operator.setitem operator.concat operator.mod
    itertools.starmap itertools.accumulate itertools.chain itertools.repeat itertools.islice
    itertools.takewhile itertools.groupby itertools.cycle itertools.count types.FunctionType
    types.CodeType types.MethodType types.ModuleType types.GenericAlias types.MappingProxyType
    types.DynamicClassAttribute types.SimpleNamespace pickle.loads pickle.Unpickler
    pickle._Unpickler marshal.loads codecs.open codecs.decode codecs.lookup io.open io.FileIO
    io.BytesIO io.TextIOWrapper importlib.import_module runpy.run_path runpy.run_module
    code.interact random._os random.Random.seed random.SystemRandom statistics.random
    statistics.sys collections.abc.sys copy.copy copy.deepcopy copy._reconstruct
    copyreg.add_extension copyreg.constructor copyreg.pickle copyreg.__newobj__ collections._sys
    collections.UserDict collections.UserList collections.ChainMap collections.namedtuple
    dataclasses.make_dataclass dataclasses.replace dataclasses.sys enum.Enum enum.EnumMeta
    enum.EnumType abc.ABCMeta typing.ForwardRef typing.get_type_hints typing.NamedTuple
    typing.sys re.sub re._compiler.compile re.Scanner re.template string.Formatter
    string.Template weakref.ref weakref.WeakSet contextlib.ExitStack contextlib.ContextDecorator
    logging.FileHandler shutil.rmtree tempfile.mktemp webbrowser.open urllib.request.urlopen
    socket.socket ctypes.CDLL ctypes.cast sqlite3.connect pathlib.os pathlib.Path.touch
    pathlib.Path.write_text pathlib.Path.mkdir pathlib.Path.read_bytes pathlib.Path.cwd
    pathlib.Path.exists pathlib.io.open uuid.uuid1 uuid.os.system uuid.getnode timeit.timeit
    cProfile.run pdb.run doctest.testmod unittest.mock.Mock queue.Queue threading.Thread
    multiprocessing.Process datetime.sys decimal.setcontext fractions.operator.call
    argparse.ArgumentParser argparse.FileType argparse.Action torch.load torch.save
    torch.hub.load torch.utils.collect_env.run torch.utils.cpp_extension.load torch.jit.load
    torch.jit._pickle.__loader__.set_data torch.jit._pickle.build_intlist.__class__
    torch.storage._load_from_bytes torch.storage.UntypedStorage.from_file
    torch.serialization.load torch.serialization.pickle.loads torch._utils.sys
    torch._utils.traceback torch._utils._get_obj_state torch._utils._set_obj_state
    torch._utils.ExceptionWrapper torch.nn.Module torch.nn.Linear torch.nn.Sequential
    torch.nn.ModuleDict torch.nn.parameter.ParameterDict torch.optim.SGD
    torch.nn.functional.relu torch.manual_seed torch.set_default_dtype torch.set_num_threads
    torch.from_file torch.fx.GraphModule torch.fx._lazy_graph_module
    torch.fx.graph_module.reduce_graph_module torch.package.package_importer.PackageImporter
    torch.distributed.rpc.PyRRef torch.cuda.Stream torch.Generator
    torch.utils.data.datapipes.iter.utils.IterableWrapperIterDataPipe
    torch.utils.data.datapipes.iter.callable.MapperIterDataPipe
    torch.utils.data.datapipes.iter.selecting.FilterIterDataPipe
    torch.utils.data.datapipes.datapipe._IterDataPipeSerializationWrapper
    torch.utils.data.datapipes.datapipe._MapDataPipeSerializationWrapper
    torch.utils.data.datapipes.map.callable.MapperMapDataPipe torch.utils.data.dataset.Subset
    torch.utils.data.dataset.ConcatDataset torch.utils.data.dataloader.DataLoader
    torch.utils.data._utils.collate.default_collate torch.utils.data._utils.worker.WorkerInfo
    torch.ao.quantization.observer.MinMaxObserver torch.ao.quantization.qconfig.QConfig
    numpy.load numpy.save numpy.memmap numpy.fromfile numpy.frompyfunc numpy.vectorize
    numpy.fromfunction numpy.apply_along_axis numpy.genfromtxt numpy.loadtxt numpy.savetxt
    numpy.array numpy.asarray numpy.frombuffer numpy.fromiter numpy.record numpy.recarray
    numpy.rec.array numpy.ma.MaskedArray numpy.ma.core._mareconstruct numpy.ufunc numpy.add
    numpy.poly1d numpy.random.seed numpy.random.RandomState numpy.random.Generator
    numpy.random.bit_generator.SeedSequence numpy._core._internal._commastring
    numpy.polynomial.Polynomial numpy._core.records.fromfile numpy._core._ufunc_reconstruct
    numpy.char.chararray sympy.sympify sympy.core.sympify.sympify sympy.sin sympy.Symbol
    sympy.Function sympy.Matrix sympy.Lambda sympy.functions.elementary.trigonometric.sin
    sympy.core.symbol.Symbol sympy.core.numbers.Integer sympy.core.numbers.Float
    sympy.core.function.Lambda sympy.parsing.sympy_parser.parse_expr
    sympy.utilities.lambdify.lambdify sympy.printing.preview.preview fsspec.open
    fsspec.core.OpenFile fsspec.core.url_to_fs fsspec.filesystem fsspec.spec.AbstractFileSystem
    fsspec.spec.make_instance fsspec.implementations.local.LocalFileSystem fsspec.mapping.FSMap
    fsspec.get_mapper yaml.unsafe_load yaml.load joblib.load
    joblib.numpy_pickle.NumpyArrayWrapper cloudpickle.loads
    cloudpickle.cloudpickle._make_function cloudpickle.cloudpickle._make_skeleton_class
    cloudpickle.cloudpickle.subimport setuptools._distutils.spawn.spawn networkx.Graph
    jinja2.Template usercode.tell
"""

_USER = (
    "fire",
    "Net",
    "Caller",
    "Stateful",
    "Items",
    "Table",
    "Caller.make",
    "Caller.method",
    "fire.__call__",
)

# Names of attributes that somebody calls, or that say what is called.
HOOKS = (
    "__setstate__", "append", "extend", "add", "keys", "items", "__getitem__", "__iter__",
    "update", "replace", "to", "detach", "as_subclass", "__reduce__", "__reduce_ex__", "__call__",
    "__class__", "__dict__", "__del__", "__len__", "__index__", "__fspath__", "__array__",
    "__array_interface__", "__array_struct__", "__array_function__", "__dlpack__", "__float__",
    "__int__", "__hash__", "__eq__", "__missing__", "__getattr__", "__new__", "__init__",
    "__torch_function__", "dtype", "_untyped_storage", "untyped_storage", "device", "func", "fn",
    "datapipe", "numerator", "as_integer_ratio", "_dtype", "__numpy_dtype__", "_parameters",
    "_modules", "_buffers", "_value_", "_value2member_map_", "tzinfo", "utcoffset", "__name__",
    "__qualname__", "__module__", "__doc__", "__code__", "__globals__", "__wrapped__", "name",
    "default_factory", "__getnewargs__", "__copy__", "__deepcopy__", "__enter__", "__exit__",
    "__next__", "__contains__", "shape", "size", "read", "readline", "getvalue", "seek", "tell",
    "numpy", "cpu", "data", "requires_grad_", "requires_grad", "_set_obj_state", "__args__",
    "__origin__", "_state", "seed", "__tensor_unflatten__", "clone",
)  # fmt: skip


class Catalog(NamedTuple):
    """Names by where they come from. All of them are there when they are looked up."""

    rows: tuple[Name, ...]
    callables: tuple[Name, ...]  # those of the rows that may be called
    around: tuple[Name, ...]  # what stands beside a row in its module
    below: tuple[Name, ...]  # attributes of rows, with a dot
    hostile: tuple[Name, ...]
    user: tuple[Name, ...]
    classes: tuple[Name, ...]  # of packages that are there

    def full(self) -> set[str]:
        """Return callables, as one dotted name each; and as what they call themselves."""
        found = set()
        for row in self.callables:
            found.add(".".join(row))
            made = resolved(row)
            module, name = getattr(made, "__module__", None), getattr(made, "__qualname__", None)
            found |= {f"{module}.{name}"} if module and name else set()
        return found


_NO_CALLS = {"KEPT", "CLASSES", "LISTED", "FILLED", "ARGUMENTS"}  # in the names of variables
_ABOUT_TRUST = ("ckptkit.pickles.trust", "ckptkit.pickles.allowlist")


def table_rows() -> tuple[set[Name], set[Name]]:
    """Every (module, name) that the tables of ckptkit hold; and those that may be called.

    However the tables hold them; classes, and values that are only kept, may not be called.
    """
    found: set[Name] = set()
    calls: set[Name] = set()
    for name in ("ckptkit.pickles.trust", "ckptkit.pickles.allowlist"):
        _module(name)
    for name in sorted(name for name in sys.modules if name.startswith(_ABOUT_TRUST)):
        for variable, value in vars(sys.modules[name]).items():
            if not isinstance(value, ModuleType):
                rows = set(_harvest(value, 0))
                found |= rows
                calls |= set() if _NO_CALLS & set(variable.strip("_").split("_")) else rows
    kept = vars(sys.modules["ckptkit.pickles.trust"])
    found |= {("builtins", name) for name in kept.get("_KEPT", ())}
    for module in kept.get("_KEPT_MODULES", ()):
        names = vars(_module(module) or ModuleType(""))
        found |= {(module, name) for name in names if name[0] != "_"}
    return found, calls


def _harvest(value: Any, depth: int) -> Iterator[Name]:
    """Pairs of texts, and whatever has a module and a name, anywhere inside containers."""
    if depth > 5 or isinstance(value, (str, bytes, type, ModuleType)):
        return
    if isinstance(value, tuple) and list(map(type, value)) == [str, str]:
        yield value
        return
    module, name = getattr(value, "module", None), getattr(value, "name", None)
    if isinstance(module, str) and isinstance(name, str):
        yield module, name
    if isinstance(value, dict):
        for pair in value.items():
            yield from _harvest(pair[0], depth + 1)
            yield from _harvest(pair[1], depth + 1)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for each in value:
            yield from _harvest(each, depth + 1)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _harvest(getattr(value, field.name), depth + 1)


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def resolved(name: Name) -> Any:
    """Return what a name means here, None if nothing."""
    made: Any = _module(name[0])
    for part in name[1].split("."):
        made = getattr(made, part, None)
    return made


def _split(dotted: str) -> Name | None:
    """The module and the name of a dotted name, by what can be imported."""
    parts = dotted.split(".")
    for at in range(len(parts) - 1, 0, -1):
        if _module(".".join(parts[:at])) is not None:
            return ".".join(parts[:at]), ".".join(parts[at:])
    return None


def catalog(rows: Iterable[Name], calls: Iterable[Name]) -> Catalog:
    """Everything that can be named, from the rows of a table, of which some may be called."""
    there = tuple(sorted(row for row in set(rows) if resolved(row) is not None))
    split = filter(None, map(_split, _HOSTILE.split()))
    hostile = [each for each in split if resolved(each) is not None]
    around, below = set[Name](), set[Name]()
    for module in sorted({row[0] for row in there}):
        around |= {(module, name) for name in vars(_module(module) or ModuleType(""))}
    for module, name in there:
        below |= {(module, f"{name}.{each}") for each in dir(resolved((module, name)))}
    return Catalog(
        there,
        tuple(sorted(set(there) & set(calls))),
        tuple(sorted(around - set(there))),
        tuple(sorted(below)),
        tuple(hostile),
        tuple(("usercode", each) for each in _USER),
        tuple(sorted(_classes())),
    )


_PACKAGES = (
    "torch", "numpy", "sympy", "fsspec", "yaml", "collections", "pathlib", "argparse", "enum",
    "decimal", "datetime", "random", "logging", "io", "functools", "types", "weakref", "threading",
    "accelerate", "safetensors", "tqdm", "joblib", "cloudpickle", "huggingface_hub",
    "transformers", "lightning", "tensordict", "torchao", "timm", "pandas", "sklearn", "scipy",
)  # fmt: skip


def _classes() -> Iterator[Name]:
    """Classes that packages define where they can be found by their names."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in _PACKAGES or module is None:
            continue
        for value in list(vars(module).values()):
            if inspect.isclass(value) and getattr(value, "__module__", None) == name:
                yield name, value.__qualname__
