"""What hunts make pickles of: values of libraries, names, and answers to what a loader asks.

Most of it comes from outside ckptkit's tables: every class of the installed torch that has a hook
(with the attributes that the code of its hooks names), names that nobody should call, packages of
one's own and packages that are not here. The tables add their own names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from random import Random
from types import ModuleType
from typing import Any

from ckptkit.pickles.judge import allowlist
from tests.fuzz.canary import ABSENT
from tests.fuzz.trees import (
    HELD,
    NONE,
    Node,
    aliased,
    apply,
    call,
    changed,
    const,
    late,
    mapping,
    named,
    places,
)
from tests.pickles.torch_hooks import HOOKS

Name = tuple[str, str]

FIRE = named("usercode", "fire")
NET = named("usercode", "Net")
PROBE = named("usercode", "Probe")
COMMAND = const("canary")
EVIL = b"\x80\x02cusercode\nfire\n)R."
DECOYS = (
    ("builtins", "dict"), ("collections", "OrderedDict"), ("builtins", "set"), ("torch", "float32"),
)  # fmt: skip
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
    0, 1, 2, 3, -1, 8, 64, 255, 4096, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, 2**63, 2**70, -2,
    10**12, 0.5, float("nan"),
)  # fmt: skip
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


_ID = group(
    "tuple", const("storage"), named("torch", "FloatStorage"), *map(const, ("0", "cpu", 64))
)
_STORED: Node = ("binpersid", None, (_ID,))
TENSOR = apply("torch._utils._rebuild_tensor_v2", _STORED, const(0), group("tuple", const(2)), group("tuple", const(1)),
              const(False), apply("collections.OrderedDict"))  # fmt: skip


HOOKS_OF_VALUES = (
    "__class__", "__call__", "__setattr__", "__getattribute__", "__reduce_ex__", "__init__",
    "__get__",
)  # fmt: skip


class Material:
    """Draws names and nodes."""

    def __init__(self, source: Random, every: bool = False) -> None:
        self.random = source
        with warnings.catch_warnings():  # old names say that they are old
            warnings.simplefilter("ignore")
            import torch  # noqa: F401  # whose names and classes are looked for

            self.table = tuple(sorted(name for name in allowlist().rows if resolved(name)))
            self.hooked = tuple(sorted(hooked(every).items()))
            self.hostile = tuple(filter(None, map(split, _HOSTILE.split())))
        self.known = set(self.table)
        self.accepted: dict[Name, list[str]] = {}  # by the module, and what the names hang on
        self.classes = tuple(name for name, _ in self.hooked)
        self.modules = tuple(sorted({module for module, _ in self.table}))
        self.others = tuple(sorted({module for module, _ in self.hostile}))
        self.makers: tuple[Callable[[int], Node], ...] = (
            lambda depth: self.plain(), lambda depth: self.plain(), lambda depth: self.function(), lambda depth: self.function(),
            lambda depth: self.carrier(self.one(ATTRIBUTES), self.function()),
            lambda depth: self.carrier(self.one(ATTRIBUTES), self.odd(depth - 1)),
            lambda depth: self.container(self.odd(depth - 1)), lambda depth: self.container(self.odd(depth - 1)),
            lambda depth: self.pairs(self.plain(), self.odd(depth - 1)), lambda depth: self.pairs(self.odd(depth - 1), self.plain()),
            lambda depth: self.persistent(self.odd(depth - 1)), self.storage, lambda depth: self.endless(),
            self.called, self.called, self.called, self.object, lambda depth: named(*self.name()), self.late, self.changing, self.array, self.array,
            lambda depth: self.step(self.odd(depth - 1), depth), lambda depth: self.step(self.called(depth - 1), depth),
            lambda depth: ("ext", self.random.randrange(1, 250), ()), lambda depth: ("nested", call(FIRE), ()),
        )  # fmt: skip

    def one(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def any(self, *makers: Callable[[], Node]) -> Node:
        """What one of the makers makes."""
        return self.random.choice(makers)()

    # Names

    def name(self) -> Name:
        """A name from anywhere."""
        kind = self.random.random()
        if self.accepted and self.random.random() < 0.2:
            return self.beside()
        if kind < 0.25:
            return self.one(self.table)
        if kind < 0.65:  # what stands in a module, or hangs on what stands there
            module = self.one(self.modules if kind < 0.45 else self.others)
            name = module, self.one(names_in(module))
            return self.hanging(name) if self.random.random() < 0.5 else name
        if kind < 0.75:
            return self.hanging(self.one(self.table))
        return self.one(self.one((self.hostile, self.hostile, OWN, FAR, self.classes)))

    def beside(self) -> Name:
        """A name that scan accepts though no table has it, or one that stands beside it."""
        module, outer = self.one(tuple(self.accepted))
        names = self.accepted[module, outer]
        kind = self.random.random()
        if kind < 0.3:
            return module, self.one(names)
        if kind < 0.8 and outer:
            return module, f"{outer}.{self.one(names_on((module, outer)))}"
        return self.hanging((module, self.one(names_in(module) or ("a",))))

    def accept(self, node: Node) -> None:
        """Note the names in a file that scan calls harmless."""
        names = {each[1] for _, each in places(node) if each[0] in ("global", "inst")}
        for module, name in sorted(names - self.known):
            self.accepted.setdefault((module, name.rpartition(".")[0]), []).append(name)
        self.known |= names

    def hanging(self, name: Name) -> Name:
        """An attribute of what a name means; half of them have hooks."""
        more = self.one(names_on(name)) if self.random.random() < 0.7 else self.one(HOOKS_OF_VALUES)
        return name[0], f"{name[1]}.{more}"

    # Values

    def plain(self) -> Node:
        """A number, a text or bytes."""
        kind = self.random.random()
        if kind < 0.2:
            return const(self.one((None, True)))
        value = self.one(NUMBERS if kind < 0.6 else TEXTS if kind < 0.8 else DATA)
        return ("octal", 63, ()) if value == 64 else const(value)

    def function(self, depth: int = 2) -> Node:
        """Something that can be called, and does something then."""
        own = self.one(
            (FIRE, FIRE, named(*self.one(OWN)), named(*self.one(FAR)), named("builtins", "input"))
        )
        if depth <= 0 or self.random.random() < 0.5:
            return own
        inner = self.function(depth - 1)
        none, empty = group("tuple"), mapping()
        return self.any(
            lambda: apply("functools.partial", inner, self.plain()),
            lambda: changed(("new", None, (named("functools", "partial"), inner)), "build", group("tuple", inner, none, empty, empty)),
            lambda: apply("operator.methodcaller", const("fire")),
            lambda: made(("usercode", "Caller"), mapping(const("a"), inner)),
            lambda: made(("torch.ao.quantization.observer", "_PartialWrapper"), mapping(const("p"), inner, const("callable_args"), empty)),
            lambda: ("disguised", (("usercode", "fire"), self.one(DECOYS)), ()),
            lambda: self.persistent(inner),
            lambda: apply("builtins.getattr", named("usercode", "Caller"), const("make")),
            lambda: apply("functools.partial", named("functools", "reduce"), named("operator", "call"), group("list", inner, NONE)),
        )  # fmt: skip

    def carrier(self, name: str, value: Node) -> Node:
        """An object with an attribute of the file's choosing."""
        state, kind = mapping(const(name), value), self.random.random()
        if kind < 0.2:
            state = apply("builtins.dict", pair(const(name), value))
        elif kind < 0.4:
            state = group("tuple", NONE, state)
        kind = self.one("nnnnacpomtedwvh")
        if kind == "p":
            partial: Node = ("new", None, (named("functools", "partial"), FIRE))
            return changed(partial, "build", group("tuple", FIRE, group("tuple"), mapping(), state))
        if kind == "w":
            hooks, tensor = (
                apply("collections.OrderedDict"),
                self.one((TENSOR, apply("torch.Tensor"))),
            )
            return apply(
                "torch._utils._rebuild_parameter_with_state", tensor, const(False), hooks, state
            )
        if kind == "t":
            return changed(apply("torch.torch_version.TorchVersion", const("1")), "build", state)
        if kind == "h":
            return made(self.one(self.hooked)[0], state)
        if kind == "n" and self.random.random() < 0.5:
            return changed(apply("types.SimpleNamespace"), "build", state)
        return made({
            "n": ("types", "SimpleNamespace"), "a": ("argparse", "Namespace"), "c": ("collections", "ChainMap"),
            "o": ("collections", "OrderedDict"), "m": ("torch.nn.modules.module", "Module"), "e": ("builtins", "Exception"),
            "d": ("usercode", "Net"), "v": ("torch.optim.lr_scheduler", "StepLR"),
        }[kind], state)  # fmt: skip

    def container(self, item: Node) -> Node:
        """Something that gives an item when it is gone through, or unpacked."""
        items = group("list", *[item] * self.one((1, 1, 1, 2, 2, 3, 5)))
        deque, subset = ("collections", "deque"), ("torch.utils.data.dataset", "Subset")
        return self.any(
            lambda: items, lambda: items, lambda: group("tuple", *items[2]),
            lambda: call(named(*deque), items), lambda: apply("collections.OrderedDict", items),
            lambda: changed(call(named(*self.one((deque, ("builtins", "list"))))), "appends", item),
            lambda: call(named("builtins", self.one(("list", "tuple", "set", "iter", "reversed"))), items),
            lambda: self.pairs(const(1), item), lambda: group("set", item), lambda: late(item),
            lambda: aliased(items, apply("builtins.tuple", HELD), "append", item),
            lambda: made(subset, mapping(const("dataset"), items, const("indices"), group("list", const(0)))),
        )  # fmt: skip

    def pairs(self, key: Node, value: Node) -> Node:
        """Something that gives a value for a key."""
        literal = mapping(key, value)
        default, ordered = named("collections", "defaultdict"), apply("collections.OrderedDict")
        parsed = ("pytorch_lightning.utilities.parsing", "AttributeDict")
        return self.any(
            lambda: literal, lambda: literal, lambda: literal,
            lambda: call(default, self.function()), lambda: call(default, self.function(), literal),
            lambda: changed(call(default, self.function()), "setitem", key, value), lambda: call(default, NONE, literal),
            lambda: apply("builtins.dict", pair(key, value)), lambda: apply("collections.OrderedDict", pair(key, value)),
            lambda: changed(ordered, "setitem", key, value), lambda: apply("collections.Counter", literal),
            lambda: changed(made(("usercode", "Table")), "setitem", key, value), lambda: changed(made(parsed), "setitem", key, value),
            lambda: aliased(mapping(), apply("builtins.dict", HELD), "setitem", key, value),
        )  # fmt: skip

    def persistent(self, value: Node) -> Node:
        """A value behind a persistent id, which gives it back in legacy files."""
        return ("binpersid", None, (group("tuple", const("module"), value, NONE, NONE),))

    def storage(self, depth: int) -> Node:
        """A storage of an odd type, under an odd key, that is somewhere odd; the rest is as it should be."""
        kind = self.one(("FloatStorage", "ByteStorage"))
        parts = [named("torch", kind), const("0"), const("cpu"), const(self.one((0, 4)))]
        at = self.random.randrange(4)
        if at < 2:
            parts[at] = self.odd(depth - 1)
        else:
            parts[at] = self.carrier(self.one(ATTRIBUTES), self.function())
        return ("binpersid", None, (group("tuple", const("storage"), *parts),))

    def endless(self) -> Node:
        """An iterator that does not end, or not soon."""
        return self.any(
            lambda: apply("itertools.count"), lambda: apply("itertools.repeat", const(1)),
            lambda: apply("builtins.range", const(2**60)), lambda: apply("itertools.cycle", group("list", const(1))),
        )  # fmt: skip

    def step(self, target: Node, depth: int) -> Node:
        """BUILD, APPEND and the like on a value, now and then for a second time."""
        value = self.odd(depth - 1)
        kind = self.one(("build", "build", "append", "appends", "additems", "setitem"))
        return changed(target, kind, *((self.plain(), value) if kind == "setitem" else (value,)))

    def late(self, depth: int) -> Node:
        """An object that gets a hook by its state, and what calls the hook."""
        name, kind = self.one((
            ("__setstate__", "build"), ("append", "append"), ("extend", "appends"),
            ("add", "additems"),
        ))  # fmt: skip
        return changed(self.carrier(name, self.function()), kind, self.odd(depth - 1))

    def changing(self, depth: int) -> Node:
        """A value that is changed after it was used."""
        target = self.any(
            lambda: group("list"), mapping, lambda: self.called(depth - 1),
            lambda: self.carrier(self.one(ATTRIBUTES), self.plain()),
        )  # fmt: skip
        user = self.any(
            lambda: HELD, lambda: self.container(HELD), lambda: self.calling(self.name(), HELD),
            lambda: self.pairs(self.plain(), HELD),
        )  # fmt: skip
        kind, _, (_, *values) = self.step(NONE, depth)
        return aliased(target, user, kind, *values)

    def called(self, depth: int) -> Node:
        """A call of anything with anything, mostly as many arguments as it takes."""
        name = self.name()
        least, most = arguments(name)
        args = [
            self.plain() if self.random.random() < 0.5 else self.odd(depth - 1)
            for _ in range(self.random.randint(least, most))
        ]
        return self.calling(name, *args)

    def calling(self, name: Name, *args: Node) -> Node:
        """A call by one of the opcodes."""
        kind = self.random.random()
        if kind < 0.2:
            return ("inst", name, args)
        called = named(*name) if kind < 0.9 else ("disguised", (name, self.one(DECOYS)), ())
        return ("new" if kind < 0.4 else "reduce", None, (called, *args))

    def object(self, depth: int) -> Node:
        """An object of one of torch's classes that have hooks, with what these ask for."""
        name, attributes = self.one(self.hooked)
        return self.any(
            lambda: made(name, mapping(*(part for each in attributes for part in (const(each), self.odd(depth - 1))))),
            lambda: made(name, self.container(self.odd(depth - 1))),
            lambda: ("new", None, (named(*name), *(self.odd(depth - 1) for _ in range(self.one((1, 2, 4)))))),
        )  # fmt: skip

    def array(self, depth: int) -> Node:
        """An array of objects, or of what a dtype is that has been tampered with."""
        flags = self.one((const(0), const(16), const(63), ("octal", 63, ())))
        parts = [*map(const, (3, "|", None, None, None, -1, -1)), flags]
        parts = parts[: self.one((7, 8, 8, 8, 8))]
        kind = const(self.one(("O8", "O8", "M8", "V8", "i8")))
        plain = apply("numpy.dtype", kind, const(False), const(True))
        dtype = changed(plain, "build", group("tuple", *parts))
        if depth % 2:
            return dtype
        count = self.one((1, 64))
        data = self.one((const(b"A" * 8 * count), group("list", *[const(1)] * count)))
        parts = [const(1), group("tuple", const(count)), dtype, const(False), data]
        ndarray, rebuild = named("numpy", "ndarray"), "numpy._core.multiarray._reconstruct"
        empty = apply(rebuild, ndarray, group("tuple", const(0)), const(b"b"))
        return changed(empty, "build", group("tuple", *parts))

    def odd(self, depth: int = 3) -> Node:
        """A value that has no business in the place of a plain one."""
        if depth <= 0:
            return self.any(self.plain, lambda: self.function(0), mapping, lambda: group("list"))
        made_: Node = self.one(self.makers)(depth)
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
            rest = self.answer(way[found.end() :], depth - 1)
            return self.pairs(key_of(found[1]), rest)
        if found := re.match(r"\.(\w+)", way):
            return self.carrier(found[1], self.answer(way[found.end() :] or "()", depth - 1))
        return self.any(self.odd, lambda: self.object(2), self.endless, self.plain)


def key_of(shown: str) -> Node:
    """The key that a probe was asked for."""
    text = shown.strip("'")
    return const(int(text) if text.isdecimal() else text)


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


@functools.cache
def names_in(module: str) -> tuple[str, ...]:
    """The names in a module, those of every module among them."""
    return tuple(vars(imported(module) or ModuleType(module)))


@functools.cache
def names_on(name: Name) -> tuple[str, ...]:
    """The names of the attributes of what a name means, those without underscores often."""
    names = dir(resolved(name))
    return (*names, *[each for each in names if each[:1] != "_"] * 6)


@functools.cache
def arguments(name: Name) -> tuple[int, int]:
    """How many arguments what a name means takes, and how many are given at most."""
    try:
        parameters = inspect.signature(resolved(name)).parameters.values()
    except Exception:  # not all can be asked
        return 0, 3
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [each for each in parameters if each.kind in kinds]
    least = min(sum(each.default is each.empty for each in places), 6)
    return least, max(least, min(len(places), 4))


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
