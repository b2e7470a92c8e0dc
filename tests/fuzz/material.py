"""What hunts make pickles of: values of libraries, names, and answers to what a loader asks.

Most of it comes from outside ckptkit's tables: every class of the installed torch that has a hook
(with the attributes that the code of its hooks names), names that nobody should call, packages of
one's own and packages that are not here. The tables add their own names.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import importlib
import inspect
import io
import itertools
import pathlib
import pkgutil
import random
import re
import sys
import types
import uuid
import warnings
import zipfile
import zoneinfo
from collections.abc import Callable, Iterator
from random import Random
from types import ModuleType
from typing import Any

from tests.fuzz.canary import ABSENT
from tests.fuzz.trees import NONE, Node, call, changed, const, mapping, named, read
from tests.pickles.torch_hooks import HOOKS

Name = tuple[str, str]

FIRE = named("usercode", "fire")
NET = named("usercode", "Net")
PROBE: Node = ("new", None, (named("usercode", "Probe"),))
COMMAND = const("canary")
EVIL = b"\x80\x02cusercode\nfire\n)R."
DECOYS = (
    ("builtins", "dict"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("torch", "float32"),
)
_HOSTILE = """
    os.system os.popen os.remove os.mkdir os.environ.update os.putenv posix.system subprocess.Popen
    builtins.exec builtins.eval builtins.compile builtins.__import__ builtins.open builtins.getattr
    builtins.setattr builtins.map builtins.filter builtins.type builtins.vars builtins.globals
    builtins.next builtins.iter builtins.print builtins.sorted builtins.max builtins.sum builtins.zip
    builtins.enumerate builtins.reversed builtins.super builtins.property builtins.classmethod
    builtins.memoryview builtins.hash builtins.repr builtins.any builtins.min builtins.isinstance
    functools.reduce functools.partial functools.partialmethod functools.cmp_to_key
    functools.lru_cache functools.singledispatch operator.methodcaller operator.attrgetter
    operator.itemgetter operator.call operator.add operator.iadd operator.getitem operator.setitem
    itertools.starmap itertools.accumulate itertools.chain itertools.repeat itertools.takewhile
    itertools.groupby itertools.cycle itertools.count types.FunctionType types.CodeType
    types.MethodType types.ModuleType types.GenericAlias types.MappingProxyType
    types.SimpleNamespace pickle.loads pickle.Unpickler marshal.loads codecs.open codecs.decode
    codecs.lookup io.open io.FileIO io.BytesIO io.TextIOWrapper importlib.import_module
    runpy.run_path code.interact random._os random.Random.seed statistics.sys copy.copy copy.deepcopy
    copy._reconstruct copyreg.add_extension copyreg.constructor copyreg.__newobj__ collections._sys
    collections.UserDict collections.UserList collections.ChainMap collections.namedtuple
    dataclasses.make_dataclass dataclasses.replace enum.Enum enum.EnumType abc.ABCMeta
    typing.ForwardRef typing.get_type_hints typing.NamedTuple re.sub re.Scanner string.Formatter
    weakref.ref weakref.WeakSet contextlib.ExitStack contextlib.ContextDecorator logging.FileHandler
    shutil.rmtree tempfile.mktemp urllib.request.urlopen socket.socket ctypes.CDLL sqlite3.connect
    pathlib.os pathlib.Path.touch pathlib.Path.write_text pathlib.Path.exists uuid.uuid1
    timeit.timeit pdb.run doctest.testmod unittest.mock.Mock queue.Queue threading.Thread
    decimal.setcontext argparse.ArgumentParser argparse.FileType torch.load torch.save torch.hub.load
    torch.utils.collect_env.run torch.utils.cpp_extension.load torch.jit.load torch.storage._load_from_bytes
    torch.storage.UntypedStorage.from_file torch.serialization.load torch._utils._set_obj_state
    torch._utils.ExceptionWrapper torch.manual_seed torch.set_default_dtype torch.set_num_threads
    torch.from_file torch.fx.GraphModule torch.fx.graph_module.reduce_graph_module
    torch.package.package_importer.PackageImporter torch.distributed.rpc.PyRRef torch.Generator
    torch.utils.data._utils.collate.default_collate torch.jit._pickle.__loader__.set_data
    torch.jit._pickle.build_intlist.__class__ numpy.load numpy.save numpy.memmap numpy.fromfile
    numpy.frompyfunc numpy.vectorize numpy.fromfunction numpy.genfromtxt numpy.loadtxt numpy.array
    numpy.asarray numpy.frombuffer numpy.record numpy.recarray numpy.ma.MaskedArray numpy.ufunc
    numpy.poly1d numpy.random.seed numpy.random.RandomState numpy.random.bit_generator.SeedSequence
    numpy.testing._private.utils.runstring numpy._core.records.fromfile numpy._core._ufunc_reconstruct
    sympy.sympify sympy.sin sympy.Symbol sympy.Function sympy.Lambda sympy.core.numbers.Float
    sympy.parsing.sympy_parser.parse_expr sympy.utilities.lambdify.lambdify fsspec.open
    fsspec.core.OpenFile fsspec.filesystem fsspec.mapping.FSMap yaml.unsafe_load yaml.load joblib.load
    cloudpickle.loads cloudpickle.cloudpickle._make_function cloudpickle.cloudpickle.subimport
    setuptools._distutils.spawn.spawn networkx.Graph jinja2.Template
"""
OWN = tuple(
    ("usercode", name)
    for name in ("fire", "Net", "Caller", "Stateful", "Items", "Table", "Caller.make")
)
FAR = tuple((module, name) for module in ABSENT for name in ("run", "Net", "Helper.make"))

# Names of attributes that somebody calls, or that say what is called.
_ATTRIBUTES = """
    __setstate__ append extend add keys items get setdefault pop values update replace to detach
    startswith encode decode read readline seek tell getvalue __class__ __dict__ __getitem__ __iter__
    __call__ __len__ __reduce_ex__ __array__ __array_interface__ __torch_function__ __fspath__ dtype
    device shape size numel clone copy data storage untyped_storage _untyped_storage func fn func_args
    datapipe dataset sampler hook module p callable_args _parameters _modules _buffers step state
    default_factory name numpy cpu requires_grad_ __name__ __qualname__ __module__ __doc__ __wrapped__
"""
ATTRIBUTES = tuple(_ATTRIBUTES.split())
NUMBERS = (
    0,
    1,
    2,
    3,
    -1,
    8,
    64,
    255,
    4096,
    2**31 - 1,
    -(2**31),
    2**40,
    2**63 - 1,
    2**63,
    2**70,
    -2,
    10**12,
    0.5,
    float("nan"),
)
TEXTS = (
    "", "a", "keys", "params", "fire", "O", "i8", "O8", "i4,f8", "(2,3)f4", "V8", "M8", "m8[ns]", "datetime64[D]", "x=1",
    "latin1", "rot13", "zlib", "idna", "unicode_escape", "MT19937", "PCG64", "cpu", "cuda", "meta", "mkldnn:0", "strided",
    "usercode", "usercode.fire", "os.system", "__main__", "__import__('os').system('x')", "open('canary','w')", "/canary",
    "file:///canary", "{0.__class__}", "(?i)(a+)+", "(a{1,1000}){1,1000}", "1e999999999", "1/3", "9" * 500, "nan",
    "2020-01-01", "\ud800", "00000000-0000-0000-0000-000000000000", "storage", "module", "<", "|", "zeros", "reflect",
)  # fmt: skip
DATA = (b"", b"\0", bytes(8), b"A" * 64, EVIL, b"\x07\xe4\1\1\0\0\0\0\0\0", b"os\nsystem\n")


def group(kind: str, *parts: Node) -> Node:
    """A list, tuple, set."""
    return (kind, None, parts)


def made(name: Name, state: Node | None = None) -> Node:
    """NEWOBJ, and BUILD if there is a state."""
    new: Node = ("new", None, (named(*name),))
    return new if state is None else changed(new, "build", state)


def pair(key: Node, value: Node) -> Node:
    """Pairs of one pair, for what makes dicts of them."""
    return group("list", group("tuple", key, value))


_STORED = (
    "binpersid",
    None,
    (
        group(
            "tuple", const("storage"), named("torch", "FloatStorage"), *map(const, ("0", "cpu", 64))
        ),
    ),
)
TENSOR = call(named("torch._utils", "_rebuild_tensor_v2"), _STORED, const(0), group("tuple", const(2)), group("tuple", const(1)),
              const(False), call(named("collections", "OrderedDict")))  # fmt: skip


class Material:
    """Draws names and nodes."""

    def __init__(self, source: Random, every: bool = False) -> None:
        self.random = source
        with warnings.catch_warnings():  # old names say that they are old
            warnings.simplefilter("ignore")
            self.table = sorted(table_names())  # which imports torch
            self.hooked = sorted(hooked(every).items())
            self.hostile = [name for each in _HOSTILE.split() if (name := split(each)) is not None]

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    # Names

    def name(self) -> Name:
        """A name from anywhere."""
        kind = self.random.random()
        if kind < 0.3:
            return self.one(*self.table)
        if kind < 0.4:  # what stands beside a row in its module
            module = self.one(*self.table)[0]
            return module, self.one(*vars(imported(module) or ModuleType(module)))
        if kind < 0.6:  # what hangs on a row
            row = self.one(*self.table)
            return row[0], f"{row[1]}.{self.one(*dir(resolved(row)))}"
        return self.one(
            *self.one(self.hostile, self.hostile, OWN, FAR, [name for name, _ in self.hooked])
        )

    # Values

    def plain(self) -> Node:
        """A number, a text or bytes."""
        value = self.one(
            None, True, self.one(*NUMBERS), self.one(*NUMBERS), self.one(*TEXTS), self.one(*DATA)
        )
        return ("octal", 63, ()) if value == 64 else const(value)

    def function(self, depth: int = 2) -> Node:
        """Something that can be called, and does something then."""
        name = self.one(
            FIRE, FIRE, named(*self.one(*OWN)), named(*self.one(*FAR)), named("builtins", "input")
        )
        if depth <= 0:
            return name  # type: ignore[no-any-return]
        inner = self.function(depth - 1)
        none, empty = group("tuple"), mapping()
        return self.one(  # type: ignore[no-any-return]
            name, name, name,
            call(named("functools", "partial"), inner, self.plain()),
            changed(("new", None, (named("functools", "partial"), inner)), "build", group("tuple", inner, none, empty, empty)),
            call(named("operator", "methodcaller"), const("fire")),
            made(("usercode", "Caller"), mapping(const("a"), inner)),
            made(("torch.ao.quantization.observer", "_PartialWrapper"), mapping(const("p"), inner, const("callable_args"), empty)),
            ("disguised", (("usercode", "fire"), self.one(*DECOYS)), ()),
            self.persistent(inner),
            call(named("builtins", "getattr"), named("usercode", "Caller"), const("make")),
            call(named("functools", "partial"), named("functools", "reduce"), named("operator", "call"), group("list", inner, NONE)),
        )  # fmt: skip

    def carrier(self, name: str, value: Node) -> Node:
        """An object with an attribute of the file's choosing."""
        state = mapping(const(name), value)
        state = self.one(
            state,
            state,
            state,
            call(named("builtins", "dict"), pair(const(name), value)),
            group("tuple", NONE, state),
        )
        kind = self.one(*"nnnnacpomtedwv")
        if kind == "p":
            parts = (FIRE, group("tuple"), mapping(), state)
            return changed(
                ("new", None, (named("functools", "partial"), FIRE)),
                "build",
                group("tuple", *parts),
            )
        if kind == "w":
            tensor = call(named("torch", "Tensor"))
            hooks = call(named("collections", "OrderedDict"))
            return call(
                named("torch._utils", "_rebuild_parameter_with_state"),
                tensor,
                const(False),
                hooks,
                state,
            )
        if kind == "t":
            return changed(
                call(named("torch.torch_version", "TorchVersion"), const("1")), "build", state
            )
        if kind == "h":
            return made(self.one(*self.hooked)[0], state)
        if kind == "n" and self.random.random() < 0.5:
            return changed(call(named("types", "SimpleNamespace")), "build", state)
        return made({
            "n": ("types", "SimpleNamespace"), "a": ("argparse", "Namespace"), "c": ("collections", "ChainMap"),
            "o": ("collections", "OrderedDict"), "m": ("torch.nn.modules.module", "Module"), "e": ("builtins", "Exception"),
            "d": ("usercode", "Net"), "v": ("torch.optim.lr_scheduler", "StepLR"),
        }[kind], state)  # fmt: skip

    def container(self, item: Node) -> Node:
        """Something that gives an item when it is gone through, or unpacked."""
        items = group("list", *[item] * self.one(1, 1, 1, 2, 2, 3, 5))
        called = ("list", "tuple", "set", "iter", "reversed")
        kind = self.random.randrange(16)
        if kind < 3:
            return items
        if kind < 5:
            return group("tuple", *items[2])
        if kind < 8:
            return call(named("collections", self.one("deque", "deque", "OrderedDict")), items)
        if kind < 10:
            made_ = call(named(*self.one(("builtins", "list"), ("collections", "deque"))))
            return changed(made_, "appends", item)
        if kind < 13:
            return call(named("builtins", self.one(*called)), items)
        if kind == 13:
            return self.one(self.pairs(const(1), item), group("set", item))  # type: ignore[no-any-return]
        if kind == 14:
            return ("late", None, (item,))
        subset = ("torch.utils.data.dataset", "Subset")
        parts = (const("dataset"), items, const("indices"), group("list", const(0)))
        return made(subset, mapping(*parts))

    def pairs(self, key: Node, value: Node) -> Node:
        """Something that gives a value for a key."""
        literal = mapping(key, value)
        default = named("collections", "defaultdict")
        return self.one(  # type: ignore[no-any-return]
            literal, literal, literal,
            call(default, self.function()), call(default, self.function(), literal), changed(call(default, self.function()), "setitem", key, value),
            call(default, NONE, literal), call(named("builtins", "dict"), pair(key, value)), call(named("collections", "OrderedDict"), pair(key, value)),
            changed(call(named("collections", "OrderedDict")), "setitem", key, value), call(named("collections", "Counter"), literal),
            changed(made(("usercode", "Table")), "setitem", key, value),
            changed(made(("pytorch_lightning.utilities.parsing", "AttributeDict")), "setitem", key, value),
        )  # fmt: skip

    def persistent(self, value: Node) -> Node:
        """A value behind a persistent id, which gives it back in legacy files."""
        return ("binpersid", None, (group("tuple", const("module"), value, NONE, NONE),))

    def storage(self, location: Node) -> Node:
        """A storage that is somewhere."""
        parts = (
            const("storage"),
            named("torch", self.one("FloatStorage", "ByteStorage")),
            const("0"),
            location,
            const(self.one(0, 4)),
        )
        return ("binpersid", None, (group("tuple", *parts),))

    def endless(self) -> Node:
        """An iterator that does not end, or not soon."""
        return self.one(  # type: ignore[no-any-return]
            call(named("itertools", "count")), call(named("itertools", "repeat"), const(1)), call(named("builtins", "range"), const(2**60)),
            call(named("itertools", "cycle"), group("list", const(1))),
        )  # fmt: skip

    def step(self, target: Node, depth: int) -> Node:
        """BUILD, APPEND and the like on a value, now and then for a second time."""
        value = self.odd(depth - 1)
        kind = self.one("build", "build", "append", "appends", "additems", "setitem")
        return changed(target, kind, *((self.plain(), value) if kind == "setitem" else (value,)))

    def late(self, depth: int) -> Node:
        """An object that gets a hook by its state, and what calls the hook."""
        name, kind = self.one(
            ("__setstate__", "build"),
            ("append", "append"),
            ("extend", "appends"),
            ("add", "additems"),
        )
        return changed(self.carrier(name, self.function()), kind, self.odd(depth - 1))

    def called(self, depth: int) -> Node:
        """A call of anything with anything."""
        args = [self.odd(depth - 1) for _ in range(self.one(0, 1, 1, 2, 3))]
        name, kind = self.name(), self.one("reduce", "reduce", "reduce", "new", "inst")
        if kind == "inst":
            return ("inst", name, tuple(args))
        disguised: Node = ("disguised", (name, self.one(*DECOYS)), ())
        return (kind, None, (self.one(*[named(*name)] * 9, disguised), *args))

    def object(self, depth: int) -> Node:
        """An object of one of torch's classes that have hooks, with what these ask for."""
        name, attributes = self.one(*self.hooked)
        pairs = [part for each in attributes for part in (const(each), self.odd(depth - 1))]
        return self.one(made(name, mapping(*pairs)), made(name, self.container(self.odd(depth - 1))),
                        ("new", None, (named(*name), *(self.odd(depth - 1) for _ in range(self.one(1, 2, 4))))))  # type: ignore[no-any-return]  # fmt: skip

    def array(self) -> Node:
        """An array of objects, or of what a dtype is that has been tampered with."""
        parts = [const(each) for each in (3, "|", None, None, None, -1, -1, self.one(0, 16, 63))]
        if parts[-1] == const(63):
            parts[-1] = self.one(parts[-1], ("octal", 63, ()))
        kind = self.one("O8", "O8", "M8", "V8", "i8")
        parts = parts[: self.one(7, 8, 8, 8, 8)]
        dtype = changed(
            call(named("numpy", "dtype"), const(kind), const(False), const(True)),
            "build",
            group("tuple", *parts),
        )
        empty = call(
            named("numpy._core.multiarray", "_reconstruct"),
            named("numpy", "ndarray"),
            group("tuple", const(0)),
            const(b"b"),
        )
        count = self.one(1, 64)
        data = self.one(const(b"A" * 8 * count), group("list", *[const(1)] * count))
        state = group("tuple", const(1), group("tuple", const(count)), dtype, const(False), data)
        return self.one(dtype, changed(empty, "build", state), changed(empty, "build", state))  # type: ignore[no-any-return]

    def odd(self, depth: int = 3) -> Node:
        """A value that has no business in the place of a plain one."""
        if depth <= 0:
            return self.one(self.plain(), self.function(0), mapping(), group("list"))  # type: ignore[no-any-return]
        makers: tuple[Callable[[], Node], ...] = (
            self.plain, self.plain, self.function, self.function,
            lambda: self.carrier(self.one(*ATTRIBUTES), self.function()), lambda: self.carrier(self.one(*ATTRIBUTES), self.odd(depth - 1)),
            lambda: self.container(self.odd(depth - 1)), lambda: self.pairs(self.plain(), self.odd(depth - 1)),
            lambda: self.pairs(self.odd(depth - 1), self.plain()), lambda: self.persistent(self.odd(depth - 1)),
            lambda: self.storage(self.odd(depth - 1)), self.endless, lambda: self.called(depth), lambda: self.object(depth),
            lambda: named(*self.name()), lambda: self.late(depth), lambda: self.step(self.odd(depth - 1), depth), self.array,
            lambda: ("ext", self.random.randrange(1, 250), ()), lambda: ("nested", call(FIRE), ()),
        )  # fmt: skip
        made_: Node = self.one(*makers)()
        return made_

    def answer(self, way: str, depth: int = 4) -> Node:
        """Return a value that answers what is asked on a way, and does something at its end."""
        if depth <= 0:
            return self.function(1)
        if way.startswith("()"):
            return self.function()
        if way.startswith("*"):
            return self.container(self.answer(way[1:], depth - 1))
        if found := re.match(r"\[(.*?)\]", way):
            key = found[1].strip("'")
            return self.pairs(
                const(int(key) if key.isdecimal() else key),
                self.answer(way[found.end() :], depth - 1),
            )
        if found := re.match(r"\.(\w+)", way):
            return self.carrier(found[1], self.answer(way[found.end() :] or "()", depth - 1))
        return self.one(self.odd(), self.object(2), self.endless(), self.plain())  # type: ignore[no-any-return]


# Names


@functools.cache
def imported(name: str) -> ModuleType | None:
    """Return a module, None if there is none."""
    if name.endswith("__main__"):
        return None
    try:
        return importlib.import_module(name)
    except BaseException:  # old names refuse in many ways
        return None


def resolved(name: Name) -> Any:
    """Return what a name means here, None if nothing."""
    value: Any = imported(name[0])
    for part in name[1].split("."):
        value = getattr(value, part, None)
    return value


def split(dotted: str) -> Name | None:
    """The module and the name of a dotted name that means something here."""
    parts = dotted.split(".")
    for at in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:at]), ".".join(parts[at:])
        if imported(name[0]) is not None:
            return name if resolved(name) is not None else None
    return None


def table_names() -> set[Name]:
    """Every (module, name) that ckptkit's tables hold, however they hold them, and that is here."""
    found: set[Name] = set()
    for value in vars(imported("ckptkit.pickles.judge")).values():
        found |= set(_harvest(value, 0))
    return {name for name in found if resolved(name) is not None}


def _harvest(value: Any, depth: int) -> Iterator[Name]:
    """Pairs of texts, modules with their names in a text, and whatever has a module and a name."""
    module, name = getattr(value, "module", None), getattr(value, "name", None)
    if isinstance(value, tuple) and list(map(type, value)) == [str, str]:
        yield value
    elif isinstance(module, str) and isinstance(name, str):
        yield module, name
    elif isinstance(value, dict) and depth < 6:
        for key, each in value.items():
            if isinstance(key, str) and isinstance(each, str):
                yield from ((key, word) for word in each.split())
            yield from _harvest(key, depth + 1)
            yield from _harvest(each, depth + 1)
    elif type(value).__module__.startswith("ckptkit.") and depth < 6:
        yield from _harvest(getattr(value, "__dict__", {}), depth + 1)
    elif isinstance(value, (tuple, list, set, frozenset)) and depth < 6:
        for each in value:
            yield from _harvest(each, depth + 1)


PACKAGES = (
    "torch.optim", "torch.nn", "torch.ao", "torch.distributions", "torch.utils.data", "torch.utils.hooks", "torch.amp",
    "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed._shard", "torch.distributed.fsdp",
    "torch.nested", "torch.masked", "torch.fx", "torch.package", "torch.autograd", "torch.storage", "torch.jit",
)  # fmt: skip


@functools.cache
def hooked(every: bool) -> dict[Name, tuple[str, ...]]:
    """Return the classes of torch that have hooks in Python, and the attributes that these name.

    Those of modules that are imported already; `every`: of all modules of torch's packages.
    """
    for package in PACKAGES if every else ():
        paths = getattr(imported(package), "__path__", ())
        for each in pkgutil.walk_packages(paths, f"{package}.", onerror=lambda name: None):
            if ".benchmarks" not in each.name:
                imported(each.name)
    found = {}
    for name, module in sorted(sys.modules.items()):
        for value in (
            list(vars(module).values()) if name.startswith("torch.") and module is not None else ()
        ):
            if inspect.isclass(value) and getattr(value, "__module__", None) == name:
                hooks = list(filter(None, (_in_python(value, hook) for hook in HOOKS)))
                if hooks and not issubclass(value, BaseException):
                    found[name, value.__qualname__] = tuple(
                        sorted({each for hook in hooks for each in _attributes(hook)})
                    )
    return found


def _in_python(made_: type, hook: str) -> types.FunctionType | None:
    value = next((vars(each)[hook] for each in made_.__mro__ if hook in vars(each)), None)
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


@functools.cache
def _attributes(hook: types.FunctionType) -> tuple[str, ...]:
    try:
        source = inspect.getsource(hook)
    except (OSError, TypeError):
        return ()
    return tuple(
        set(re.findall(r"self\.(\w+)(?!\w*\()", source) + re.findall(r"\[\"(\w+)\"\]", source))
    )[:12]


# Values of libraries


def seeds() -> list[Node]:
    """Return the trees of good values, as torch.save and pickle write them."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in good():
            for save in (_saved, lambda each: pickled(each, 4)):
                try:
                    found.append(read(save(value)))
                    break
                except Exception:  # what cannot be pickled, in one of the two ways
                    continue
    return found


def pickled(value: object, protocol: int) -> bytes:
    """Return what pickle writes."""
    import pickle

    return pickle.dumps(value, protocol)


def _saved(value: object) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as made_:
        name = next(name for name in made_.namelist() if name.endswith("data.pkl"))
        return made_.read(name)


def good() -> Iterator[Any]:
    """Yield values of Python, numpy and torch that checkpoints hold, one of each kind."""
    import numpy as np
    import torch
    import torch.nn.utils.prune
    from torch import nn, optim

    tensor = torch.arange(6.0).reshape(2, 3)
    yield from (
        {"a": [1, 2.5, None, True], "b": (b"x", bytearray(b"y"), "z")}, {1, 2}, frozenset((1,)), 1j, slice(1, 2), range(3),
        collections.OrderedDict(a=1), collections.Counter("aab"), collections.defaultdict(list, a=[1]), collections.defaultdict(dict),
        collections.deque([1, 2], 3), types.SimpleNamespace(a=1), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        datetime.timedelta(1), zoneinfo.ZoneInfo("Europe/Berlin"), decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=5), pathlib.Path("a"), random.Random(1),
        functools.partial(nn.functional.relu, inplace=True), itertools.count(), ValueError("a"), io.BytesIO(b"a"), re.compile("a"),
    )  # fmt: skip
    yield from (
        np.arange(6).reshape(2, 3), np.array([1, "a"], object), np.float32(1.5), np.dtype("i4,f8"), np.dtype("O"), np.dtype("M8[D]"),
        np.zeros(2, [("a", "i4"), ("b", "O")]), np.datetime64("2020-01-01"), np.random.default_rng(1), np.random.RandomState(1),
        np.matrix([[1]]), np.array("x"), np.zeros(3, ">i2"), np.zeros(3, "M8[D]"), np.ma.masked_array([1], [True]),
    )  # fmt: skip
    dressed = nn.Parameter(tensor)
    dressed.note = "a"  # type: ignore[attr-defined]
    yield from (
        tensor, nn.Parameter(tensor), dressed, torch.Size([1]), torch.device("cpu"), torch.float32, torch.strided, tensor.to_sparse(),
        torch.quantize_per_tensor(tensor, 0.1, 1, torch.quint8), torch.empty(2, device="meta"), torch.nested.nested_tensor([tensor]),
        torch.zeros(2).untyped_storage(), torch.torch_version.TorchVersion("1"), nn.functional.relu, optim.lr_scheduler.LambdaLR,
        nn.utils.rnn.pack_sequence([tensor]), torch.amp.GradScaler("cpu"),
    )  # fmt: skip
    linear = nn.Linear(2, 2)
    modules = [
        linear, nn.LSTM(2, 2), nn.GRU(1, 1), nn.MultiheadAttention(2, 1), nn.TransformerEncoderLayer(2, 1, 2), nn.TransformerDecoderLayer(2, 1, 2),
        nn.Conv2d(1, 1, 1), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU(), nn.Softmax(1)), nn.ModuleDict({"a": nn.GELU()}), nn.ModuleList([nn.Identity()]),
        nn.ParameterList([nn.Parameter(tensor)]), nn.ParameterDict({"a": nn.Parameter(tensor)}), nn.Upsample(scale_factor=2), nn.AvgPool3d(2),
        nn.DataParallel(nn.Linear(1, 1)), nn.utils.spectral_norm(nn.Linear(2, 2)), nn.utils.weight_norm(nn.Linear(2, 2)),
        nn.utils.prune.l1_unstructured(nn.Linear(2, 2), "weight", 1), optim.swa_utils.AveragedModel(nn.Linear(1, 1)),
        torch.ao.nn.quantized.Conv2d(1, 1, 1), torch.ao.nn.quantized.Conv1d(1, 1, 1), torch.ao.quantization.MinMaxObserver(),
        torch.ao.quantization.FakeQuantize(), torch.ao.nn.quantized.ReLU6(),
    ]  # fmt: skip
    hooked_ = nn.Linear(1, 1)
    hooked_.register_forward_hook(
        sys.modules["torch.ao.quantization.quantize"]._observer_forward_hook
    )
    yield from (*modules, hooked_, linear.state_dict(), torch.ao.quantization.default_qconfig)
    linear(torch.zeros(1, 2)).sum().backward()
    for kind in (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop,
                 optim.Rprop, optim.Adafactor):  # fmt: skip
        optimizer = kind(linear.parameters(), lr=0.1)
        optimizer.step()
        yield optimizer
        yield optimizer.state_dict()
    optimizer = optim.SGD(linear.parameters(), 0.1)
    yield from (
        optim.lr_scheduler.StepLR(optimizer, 2), optim.lr_scheduler.CosineAnnealingLR(optimizer, 2), optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        optim.lr_scheduler.SequentialLR(optimizer, [optim.lr_scheduler.StepLR(optimizer, 2)], []), optim.swa_utils.SWALR(optimizer, 0.1),
        optim.lr_scheduler.OneCycleLR(optimizer, 1, 4),
    )  # fmt: skip
    data = torch.utils.data
    dataset = data.TensorDataset(tensor)
    yield from (data.DataLoader(dataset), data.Subset(dataset, [0]), data.ConcatDataset([dataset]), data.RandomSampler(dataset),
                data.BatchSampler([0], 1, False))  # fmt: skip
    one = torch.distributions
    yield from (
        one.Normal(tensor, 1.0),
        one.Independent(one.Normal(tensor, 1.0), 1),
        one.Categorical(tensor),
        one.AffineTransform(0, 1),
    )
    from torch.distributed.checkpoint import metadata
    from torch.distributed.tensor import Replicate, Shard

    properties = metadata.TensorProperties(torch.float32)
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    stored = metadata.TensorStorageMetadata(properties, torch.Size([2]), [chunk])
    index = metadata.MetadataIndex("a", torch.Size([0]))
    yield from (metadata.Metadata({"a": stored}, {"a": ("a",)}, {index: 1}), Shard(0), Replicate())
