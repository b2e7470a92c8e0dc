"""Composes pickles at random: calls of what tables allow, with arguments that nobody foresaw."""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import pathlib
import pickle
import random
import types
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

from tests.fuzz.catalog import HOOKS, Catalog, Name
from tests.fuzz.compositions import (
    CALLS,
    NONE,
    Node,
    call,
    changed,
    const,
    mapping,
    named,
    places,
    read,
    replaced,
    size,
)

EVIL = b"\x80\x02cusercode\nfire\n)R."
TEXTS = (
    "", "a", "keys", "system", "fire", "Net", "O", "i8", "O8", "i4,f8", "(2,3)f4", "datetime64[D]",
    "1 2; 3 4", "x=1", "latin1", "rot13", "zlib", "idna", "unicode_escape", "hex", "bz2", "uu",
    "undefined", "MT19937", "PCG64", "cpu", "cuda", "meta", "mkldnn:0", "strided", "torch.strided",
    "usercode", "usercode.fire", "os", "os.system", "__main__", "__import__('os').system('x')",
    "open('canary','w')", "canary", "/tmp/canary", "file:///tmp/canary", "{0.__class__}",
    "(?i)(a+)+", "(a{1,1000}){1,1000}", "1e999999", "1e999999999", "1/3", "9" * 500, "nan", "inf",
    "2020-01-01", "+01:00", "\ud800", "00000000-0000-0000-0000-000000000000", "storage", "module",
    "<f8", "|O", "V8", "M8[ns]", "C", "F", "0",
)  # fmt: skip
NUMBERS = (
    0,
    1,
    2,
    3,
    -1,
    7,
    8,
    64,
    127,
    255,
    256,
    4096,
    2**31 - 1,
    2**31,
    -(2**31),
    2**40,
    2**63 - 1,
    2**63,
    2**64,
    -2,
)
DATA = (
    b"", b"\0", bytes(8), bytes(64), b"abc", b"\xff" * 16, EVIL, base64.b64encode(EVIL),
    b"\x07\xe4\1\1\0\0\0\0\0\0", b"os\nsystem\n", bytes(range(32)),
)  # fmt: skip


FIRE = named("usercode", "fire")
NET = named("usercode", "Net")
PROBE: Node = ("new", None, (NET,))  # tells what is looked for in it
FOLLOWED = 3  # times that the same attribute is followed in the same calls


class Composer:
    """Draws nodes. What became clean verdicts is drawn more often."""

    def __init__(self, names: Catalog, seed: int) -> None:
        self.random = Random(seed)
        self.names = names
        self.tried: Counter[tuple[str, Name]] = Counter()
        self.clean: Counter[tuple[str, Name]] = Counter()
        self.wanted: list[str] = []  # attributes that were looked for
        self.queue: list[Node] = []  # what is to be tried next
        self.followed: Counter[tuple[str, ...]] = Counter()
        self.pool: list[Node] = list(seeds())
        self.fixed = len(self.pool)

    def compose(self) -> Node:
        """A new pickle: of the pool with something else in it, or from nothing."""
        if self.queue:
            return self.queue.pop()
        kind = self.random.random()
        if kind < 0.12:
            made = self.probed(self.drawn())
        elif kind < 0.45:
            made = self.mutated(self.drawn())
        elif kind < 0.75:
            made = self.idiom(3)
        else:
            made = self.value(4)
        return made if size(made) < 150 else self.call(2)

    def learn(self, node: Node, clean: bool, novel: bool = False) -> None:
        """Take note of whether it was taken for clean, and of whether it did something new."""
        for role, name in _roles(node):
            self.tried[role, name] += 1
            self.clean[role, name] += clean
        if novel and size(node) < 60:
            if len(self.pool) < self.fixed + 3_000:
                self.pool.append(node)
            else:
                self.pool[self.random.randrange(self.fixed, len(self.pool))] = node

    def drawn(self) -> Node:
        """A node of the pool, of the newest half in half of all cases."""
        half = len(self.pool) // 2 if self.random.random() < 0.5 else 0
        return self.pool[self.random.randrange(half, len(self.pool))]

    def mutated(self, node: Node) -> Node:
        """The same with one to three places changed."""
        for _ in range(self.random.choice((1, 1, 2, 3))):
            path, old = self.random.choice(list(places(node)))
            node = replaced(node, path, self.instead(old))
        return node

    def instead(self, old: Node) -> Node:
        """Something in the place of a node."""
        kind, value, children = old
        chance = self.random.random()
        if kind == "global" and chance < 0.7:
            return named(*self.name("value" if chance < 0.25 else "call"))
        if kind == "const" and chance < 0.6:
            return self.constant()
        if children and chance < 0.2:
            return self.random.choice(children)
        if children and chance < 0.4:
            return (kind, value, (*children, self.value(1)))
        if chance < 0.55:
            return self.step(old, 2)
        if chance < 0.65:
            return call(named(*self.name("call")), old)
        if chance < 0.75:
            return self.random.choice([part for _, part in places(self.drawn())])
        return self.value(2)

    # Names

    def name(self, role: str) -> Name:
        """A name to be called, made by NEWOBJ, or kept as a value."""
        for _ in range(20):
            found = self.random.choice(self.random.choice(self.sources(role)))
            chance = (self.clean[role, found] + 1.5) / (self.tried[role, found] + 1.5)
            if self.random.random() < max(chance, 0.02):
                return found
        return found

    def sources(self, role: str) -> tuple[tuple[Name, ...], ...]:
        """Return the sources of names of a role; frequent ones are repeated."""
        names = self.names
        if role == "call":
            return (*(names.callables,) * 12, names.around, names.below, names.hostile, names.user)
        if role == "new":
            return (
                *(names.rows,) * 4,
                names.classes,
                names.classes,
                names.user,
                names.user,
                names.hostile,
            )
        return (
            *(names.user,) * 8,
            *(names.rows,) * 4,
            names.around,
            names.below,
            names.hostile,
            names.classes,
        )

    # Values

    def value(self, depth: int) -> Node:
        """Anything."""
        if depth <= 0:
            return self.leaf()
        makers = self.random.choices(_MAKERS, _WEIGHTS)[0]
        made: Node = makers(self, depth - 1)
        return made

    def values(self, depth: int, most: int = 4) -> tuple[Node, ...]:
        """Some of them."""
        return tuple(self.value(depth) for _ in range(self.random.randrange(most + 1)))

    def leaf(self, depth: int = 0) -> Node:
        """A constant, or a name."""
        chance = self.random.random()
        if chance < 0.6:
            return self.constant()
        if chance < 0.64:
            return ("ref", self.random.randrange(8), ())
        return named(*self.name("value"))

    def constant(self, depth: int = 0) -> Node:
        """A number, text or bytes."""
        kind = self.random.randrange(10)
        if kind < 4:
            return const(self.random.choice(TEXTS if kind < 2 else HOOKS))
        if kind < 6:
            return const(self.random.choice(NUMBERS))
        if kind < 8:
            return const(self.random.choice((None, True, False, 1.5, float("nan"), -0.0, 1e308)))
        data = self.random.choice(DATA)
        return const(data if kind == 8 else bytearray(data))

    def container(self, depth: int) -> Node:
        """A list, tuple, dict or set."""
        kind = self.random.choice(("list", "tuple", "dict") * 2 + ("set", "frozenset"))
        items = self.values(depth)
        if kind == "dict":
            often = [self.constant, self.constant, self.constant, self.value]
            keys = [self.random.choice(often)(depth) for _ in items]
            items = tuple(node for pair in zip(keys, items, strict=True) for node in pair)
        made: Node = (kind, None, items)
        return ("put", None, (made,)) if self.random.random() < 0.3 else made

    def call(self, depth: int) -> Node:
        """A call of a name, in one of the ways."""
        kind = self.random.random()
        if kind < 0.6:
            made = call(named(*self.name("call")), *self.values(depth))
        elif kind < 0.65:
            made = ("apply", None, (named(*self.name("call")), self.value(depth)))
        elif kind < 0.68:
            made = ("inst", self.name("call"), self.values(depth))
        elif kind < 0.9:
            made = ("new", None, (named(*self.name("new")), *self.values(depth, 2)))
        elif kind < 0.95:
            keywords = self.keywords(depth) if self.random.random() < 0.8 else self.value(depth)
            made = (
                "newex",
                None,
                (named(*self.name("new")), ("tuple", None, self.values(depth, 2)), keywords),
            )
        else:
            made = call(self.value(depth), *self.values(depth))
        return ("put", None, (made,)) if self.random.random() < 0.3 else made

    def step(self, target: Node, depth: int) -> Node:
        """BUILD, APPEND and the like on a value."""
        others = ("append", "appends", "additems", "setitem", "setitems")
        kind = self.random.choice(("build",) * 6 + others)
        if kind == "build":
            return changed(target, kind, self.state(depth))
        if kind == "append":
            return changed(target, kind, self.value(depth))
        if kind == "setitem":
            return changed(target, kind, self.constant(), self.value(depth))
        if kind == "setitems":
            pairs = (self.constant(), self.value(depth), self.constant(), self.value(depth))
            return changed(target, kind, *pairs)
        return changed(target, kind, *self.values(depth))

    def stepped(self, depth: int) -> Node:
        """An object, and one to three steps on it."""
        made = self.value(depth) if self.random.random() < 0.3 else self.call(depth)
        for _ in range(self.random.choice((1, 1, 2, 3))):
            made = self.step(made, depth)
        return made

    def state(self, depth: int) -> Node:
        """Return an argument for BUILD: attributes, slots, or whatever a class has for it."""
        kind = self.random.random()
        if kind < 0.55:
            return self.keywords(depth)
        if kind < 0.7:
            first = self.keywords(depth) if self.random.random() < 0.5 else const(None)
            return ("tuple", None, (first, self.keywords(depth)))
        if kind < 0.8:
            pairs = ("list", None, (("tuple", None, (const(self.hook()), self.function(depth))),))
            return call(named("builtins", "dict"), pairs)
        return self.value(depth)

    def keywords(self, depth: int) -> Node:
        """A dict of attributes, hooks most of all."""
        pairs: list[Node] = []
        for _ in range(self.random.choice((1, 1, 2, 3))):
            value = self.function(depth) if self.random.random() < 0.6 else self.value(depth)
            pairs += [const(self.hook()), value]
        return mapping(*pairs)

    def want(self, node: Node, names: Iterable[str]) -> None:
        """Take note of attributes that somebody looked for; then let the objects have them."""
        for name in names:
            if self.wanted.count(name) < 5:
                self.wanted.append(name)
            key = (
                name,
                *sorted({".".join(called) for role, called in _roles(node) if role == "call"}),
            )
            self.followed[key] += 1
            if self.followed[key] <= FOLLOWED:
                self.queue += list(self.followers(node, name))

    def followers(self, node: Node, name: str) -> Iterator[Node]:
        """The same with an attribute for each of the canary's objects, in several ways."""
        partial = call(named("functools", "partial"), FIRE, const(1))
        for path, each in places(node):
            if each[0] in ("new", "newapply") and each[2][0] == NET:
                for value in (FIRE, partial, PROBE, const(1)):
                    pairs = mapping(const(name), value)
                    for state in (pairs, ("tuple", None, (const(None), pairs))):
                        yield replaced(node, path, changed(each, "build", state))

    def probed(self, node: Node) -> Node:
        """The same with an object of the canary in one place, or in a container there."""
        path, _ = self.random.choice(list(places(node)))
        kind = self.random.choice(("", "", "", "list", "tuple", "dict"))
        children = (const("a"), PROBE) if kind == "dict" else (PROBE,)
        return replaced(node, path, (kind, None, children) if kind else PROBE)

    def hook(self) -> str:
        """The name of an attribute."""
        known = self.wanted if self.wanted and self.random.random() < 0.6 else HOOKS
        return self.random.choice(known)

    # What attacks are made of

    def function(self, depth: int) -> Node:
        """Something that can be called, and does something then."""
        kind = self.random.randrange(12)
        name = self.random.choice(("fire", "fire", "fire", "Caller", "Caller.make"))
        user = named("usercode", name)
        if kind < 5 or depth <= 0:
            return user
        if kind == 5:
            return call(named("functools", "partial"), user, *self.values(0, 2))
        if kind == 6:
            return call(named("operator", "methodcaller"), const("fire"), *self.values(0, 1))
        if kind == 7:
            getter = self.random.choice(("attrgetter", "itemgetter"))
            return call(
                named("operator", getter),
                const(self.random.choice(("fire", "system", 0, "__class__"))),
            )
        if kind == 8:
            empty: Node = ("new", None, (named("functools", "partial"), user))
            state: Node = ("tuple", None, (user, ("tuple", None, ()), mapping(), mapping()))
            return changed(empty, "build", state)
        if kind == 9:
            return named(*self.name("value"))
        if kind == 10:
            caller: Node = ("new", None, (named("usercode", "Caller"),))
            return changed(caller, "build", self.keywords(depth - 1))
        chain = ("list", None, (user, *self.values(0, 2)))
        parts = (named("functools", "reduce"), named("operator", "call"), chain)
        return call(named("functools", "partial"), *parts)

    def duck(self, depth: int) -> Node:
        """An object with attributes of the file's choosing."""
        kind = self.random.randrange(5)
        state = self.keywords(depth)
        if kind == 0:
            return changed(call(named("types", "SimpleNamespace")), "build", state)
        if kind == 1:
            return changed(call(named("argparse", "Namespace")), "build", state)
        if kind == 2:
            return changed(("new", None, (named("usercode", "Net"),)), "build", state)
        if kind == 3:
            empty: Node = ("tuple", None, ())
            return ("newex", None, (named(*self.name("new")), empty, state))
        return changed(("new", None, (named(*self.name("new")),)), "build", state)

    def idiom(self, depth: int) -> Node:
        """One of the known shapes, with other parts."""
        shape: Callable[[Composer, int], Node] = self.random.choice(_SHAPES)
        return shape(self, depth - 1)

    def consumer(self, depth: int) -> Node:
        """A row that takes a duck."""
        before, after = self.values(0, 2), self.values(0, 3)
        return call(named(*self.name("call")), *before, self.duck(depth), *after)

    def lazy(self, depth: int) -> Node:
        """A row that goes through what is computed on the way."""
        maker = self.random.choice(("map", "filter", "zip", "iter", "reversed", "enumerate"))
        items: Node = ("list", None, self.values(0, 2))
        inner = call(named("builtins", maker), self.function(depth), items)
        return call(named(*self.name("call")), inner)

    def hooked(self, depth: int) -> Node:
        """An object whose hook is replaced, and what calls the hook."""
        target = self.duck(depth) if self.random.random() < 0.6 else self.call(depth)
        for _ in range(self.random.choice((1, 2))):
            target = self.step(target, depth)
        return target

    def probing(self, depth: int) -> Node:
        """A row with the canary's objects among its arguments."""
        args = list(self.values(0, 5))
        for _ in range(self.random.choice((1, 1, 2))):
            args.insert(self.random.randrange(len(args) + 1), PROBE)
        kind = "reduce" if self.random.random() < 0.8 else "new"
        return (kind, None, (named(*self.name("call" if kind == "reduce" else "new")), *args))

    def caller(self, depth: int) -> Node:
        """A row that calls one of its arguments."""
        args = list(self.values(depth, 3))
        args.insert(self.random.randrange(len(args) + 1), self.function(depth))
        return call(named(*self.name("call")), *args)

    def reconstructed(self, depth: int) -> Node:
        """copyreg's ways to make objects."""
        made = named(*self.name("new"))
        kind = self.random.randrange(3)
        if kind == 0:
            base = named(
                "builtins",
                self.random.choice(("object", "list", "dict", "tuple", "str", "int", "type")),
            )
            plain = self.random.random() < 0.5  # as protocols 0 and 1 write it
            state = NONE if plain else self.value(depth)
            base = named("builtins", "object") if plain else base
            return call(named("copyreg", "_reconstructor"), made, base, state)
        if kind == 1:
            return call(named("copyreg", "__newobj__"), made, *self.values(depth, 2))
        args: Node = ("tuple", None, self.values(depth, 2))
        return call(named("copyreg", "__newobj_ex__"), made, args, self.keywords(depth))

    def inner(self, depth: int) -> Node:
        """An attribute of a name by getattr, called or kept."""
        got = call(named("builtins", "getattr"), named(*self.name("call")), const(self.hook()))
        return got if self.random.random() < 0.4 else call(got, *self.values(depth))

    def packed(self, depth: int) -> Node:
        """A pickle inside a value, as bytes in one of the ways."""
        kind = self.random.randrange(5)
        if kind == 0:
            return ("nested", self.value(depth), ())
        if kind == 1:
            return call(named("builtins", "bytes"), ("list", None, tuple(map(const, EVIL))))
        if kind == 2:
            return call(named("builtins", "bytearray"), ("nested", self.value(depth), ()))
        if kind == 3:
            return call(named("_codecs", "encode"), const(EVIL.decode("latin1")), const("latin1"))
        loader = self.random.choice((("torch.storage", "_load_from_bytes"), ("pickle", "loads")))
        return call(named(*loader), const(EVIL))

    def cyclic(self, depth: int) -> Node:
        """A value that holds itself, or what was stored before."""
        again: Node = ("ref", self.random.randrange(4), ())
        stored: Node = ("put", None, (self.value(depth),))
        return changed(stored, self.random.choice(("append", "build")), again)

    def outside(self, depth: int) -> Node:
        """A persistent id, an extension, or something thrown away."""
        kind = self.random.randrange(5)
        if kind == 0:
            return ("ext", self.random.randrange(1, 250), ())
        if kind == 1:
            return ("persid", self.random.choice(("0", "1")), ())
        if kind == 2:
            return ("pop", None, (self.value(depth), self.value(depth)))
        if kind == 3:
            return ("binpersid", None, (self.value(depth),))
        made = named("torch", self.random.choice(("FloatStorage", "LongStorage", "ByteStorage")))
        parts = (
            const("storage"),
            made,
            const("0"),
            const("cpu"),
            const(self.random.choice((0, 4, 8, 16))),
        )
        return ("binpersid", None, (("tuple", None, parts),))

    def pooled(self, depth: int) -> Node:
        """A part of what was good before."""
        return self.random.choice([node for _, node in places(self.drawn())])


_MAKERS: tuple[Callable[[Composer, int], Node], ...] = (
    Composer.leaf, Composer.container, Composer.call, Composer.stepped, Composer.duck,
    Composer.idiom, Composer.pooled, Composer.outside, Composer.packed,
)  # fmt: skip
_WEIGHTS = (20, 18, 25, 8, 6, 8, 12, 2, 2)
_SHAPES: tuple[Callable[[Composer, int], Node], ...] = (
    Composer.consumer, Composer.consumer, Composer.consumer, Composer.lazy, Composer.hooked,
    Composer.hooked, Composer.caller, Composer.caller, Composer.reconstructed, Composer.inner,
    Composer.packed, Composer.cyclic, Composer.stepped, Composer.call,
)  # fmt: skip


def _roles(node: Node) -> Iterable[tuple[str, Name]]:
    """The names of a tree, and what is done with them there."""
    for _, (kind, value, children) in places(node):
        if kind == "inst":
            yield "call", value
        called = kind in CALLS
        for at, child in enumerate(children):
            if child[0] == "global":
                role = "value" if at or not called else "new" if kind.startswith("new") else "call"
                yield role, child[1]


def seeds() -> list[Node]:
    """Return pickles that libraries make of good values."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good = _good()
    for made in good:
        for protocol in (2, 4):
            try:
                found.append(read(pickle.dumps(made, protocol)))
            except (TypeError, AttributeError, IndexError, KeyError, pickle.PicklingError):
                continue
    return found


def _good() -> list[Any]:
    import numpy as np
    import torch

    utc = datetime.UTC
    tensor = torch.arange(6.0).reshape(2, 3)
    return [
        {"a": [1, 2.5, None, True], "b": (b"x", bytearray(b"y"), "z")}, {1, 2}, frozenset((1,)),
        1j, slice(1, 2), range(3), collections.OrderedDict(a=1), collections.Counter("aab"),
        collections.defaultdict(list, a=[1]), collections.deque([1, 2], 3),
        types.SimpleNamespace(a=1), datetime.datetime(2020, 1, 1, tzinfo=utc),
        datetime.timedelta(1), datetime.date(2020, 1, 1), decimal.Decimal("1.5"),
        fractions.Fraction(1, 3), uuid.UUID(int=5), pathlib.PurePosixPath("/a/b"),
        pathlib.Path("a"), random.Random(1), np.arange(6).reshape(2, 3),
        np.array([1, "a"], object), np.float32(1.5), np.dtype("i4,f8"), np.dtype("O"),
        np.zeros(2, [("a", "i4"), ("b", "O")]), np.datetime64("2020-01-01"),
        np.random.default_rng(1), np.random.RandomState(1), np.matrix([[1]]), np.array("x"),
        np.zeros(3, ">i2"), np.zeros(3, "M8[D]"), tensor, torch.nn.Parameter(tensor),
        torch.Size([1]), torch.device("cpu"), torch.float32, torch.strided, torch.nn.Linear(2, 2),
        torch.optim.SGD([torch.nn.Parameter(tensor)], 0.1).state_dict(), tensor.to_sparse(),
        torch.zeros(2, 2).untyped_storage(), tensor.t(),
        torch.quantize_per_tensor(tensor, 0.1, 1, torch.quint8), torch.empty(2, device="meta"),
        torch.nn.Sequential(torch.nn.ReLU()).state_dict(), torch.nn.functional.relu,
        torch.optim.lr_scheduler.LambdaLR, torch.nested.nested_tensor([tensor]),
        torch.torch_version.TorchVersion("1"),
    ]  # fmt: skip
