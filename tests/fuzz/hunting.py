"""Compose files, scan them, and load the harmless ones in a sandbox: nothing may come of it.

A hunt begins with what libraries write, and with an object of each class of torch that has a hook.
It puts probes in the places of values, and notes what the loader asks of them there. Then it puts
something that answers in those places: an attribute that is a function, a mapping with a factory,
something to go through with such things inside, an object whose hooks ask in their turn. Other
places get what has no business there. Each file may be disguised, stored behind persistent ids and
in other containers; what is harmless may be the beginning of further files. Whatever a file does
that scan calls harmless is made smaller and told.
"""

from __future__ import annotations

import contextlib
import io
import pickletools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import CkptkitError
from ckptkit.scanning import find
from ckptkit.scanning.verdict import Trusted, judge_file
from tests.fuzz.good import seeds
from tests.fuzz.material import DECOYS, FIRE, PROBE, Material, group, key_of, made
from tests.fuzz.sandbox import Outcome, Sandbox, loaded
from tests.fuzz.trees import (
    LEGACY,
    MAGICS,
    NONE,
    Node,
    apply,
    changed,
    const,
    file,
    keep,
    mapped,
    mapping,
    named,
    places,
    replaced,
    size,
    storages,
)

BATCH = 128
DEEP = 3  # questions inside answers
LARGE = 330  # nodes of a tree that is hunted
PLANTED = 2_000  # harmless files that further files are made of
STEPS = 60  # in which a finding is made smaller
HARMLESS = ("none", "safe", "harmless")  # verdicts that exit 0
# Ways to hide something.
RARE = {"disguised", "octal", "binpersid", "ext", "alias", "nested", "inst"}
Hole = Callable[[Node], Node | None]
Path_ = tuple[int, ...]


class Composition(NamedTuple):
    """A tree, and how it is written."""

    node: Node
    protocol: int = 4
    spelling: int = 0
    container: str = "raw"

    def data(self) -> bytes:
        """The bytes of the file."""
        return file(*self)


class Finding(NamedTuple):
    """Something that a harmless file did."""

    composition: Composition
    events: tuple[str, ...]

    def text(self) -> str:
        """The events, and the pickle in opcodes."""
        shown = io.StringIO()
        with contextlib.suppress(Exception):
            pickletools.dis(self.composition._replace(container="raw").data(), shown)
        data = self.composition.data()
        return f"== {self.composition.container}: {'; '.join(self.events)}\n{data[:3000]!r}\n{shown.getvalue()}"


class Spot(NamedTuple):
    """A tree, places in it, what a loader asks in each, and how many questions are around it."""

    seed: Composition
    places: tuple[Path_, ...]
    asked: tuple[tuple[str, ...], ...] = ()
    depth: int = 0

    def filled(self, values: Sequence[Node]) -> Composition:
        """The tree with a value in each place."""
        node = self.seed.node
        for path, value in zip(self.places, values, strict=True):
            node = replaced(node, path, value)
        return self.seed._replace(node=node)


def clean(data: bytes) -> bool:
    """Return whether `ckptkit scan` ends with 0."""
    try:
        seen = find.pickles(Memory(data, "made.pth"))
        return judge_file("made.pth", len(data), seen, Trusted()).verdict in HARMLESS
    except CkptkitError:
        return False


class Hunt:
    """The places that are known, what was tried, and the findings."""

    def __init__(self, seed: int, about: str = "", every: bool = True) -> None:
        """Prepare a hunt; `about`: only of trees with a name that has this in it.

        `every`: with all modules of torch imported, and objects of all classes with hooks.
        """
        warnings.simplefilter("ignore")
        self.random = Random(seed)
        self.material = Material(self.random, every)
        self.sandbox = Sandbox()
        self.hole: Hole | None = None
        self.tried = self.harmless = self.loaded = 0
        self.kinds: Counter[str] = Counter()
        self.asked: dict[tuple[str, ...], list[Spot]] = {}  # by the first questions
        self.keys: list[tuple[str, ...]] = []
        self.others: list[Spot] = []
        self.closed: dict[Spot, bool] = {}  # whether scan reports a spot with nothing in it
        self.unasked = [
            each for each in self._first(every) if not about or about in repr(each.seed)
        ]
        self.random.shuffle(self.unasked)
        self.waiting: list[tuple[Composition, bytes]] = []

    def _first(self, every: bool) -> Iterator[Spot]:
        """Every place of the seeds, and objects with hooks where the hooks are called."""
        for tree in [keep(each) for each in seeds() if size(each) < LARGE]:
            seed = Composition(tree, container="zip" if storages(tree) else "raw")
            yield from (Spot(seed, (path,)) for path, _ in places(tree))
            with contextlib.suppress(Exception):
                loaded(seed.data())  # so that what it needs is imported
        hooked = self.material.hooked
        for name, attributes in hooked if every else self.random.sample(hooked, 100):
            yield from _spots(name, attributes)

    def run(self, seconds: float = float("inf"), count: float = float("inf")) -> Iterator[Finding]:
        """Try for so long (of processor time), or so many; the first findings of each kind."""
        stop, last = time.process_time() + seconds, self.tried + count
        while self.tried < last and time.process_time() < stop:
            if self.unasked and (not self.asked or self.random.random() < 0.002):
                self._ask()
            self.tried += 1
            composed = self.disguised(self.composed())
            data = self.offered(composed)
            if data is not None:
                self.harmless += 1
                self.material.accept(composed.node)
                self.waiting.append((composed, data))
            if len(self.waiting) == BATCH:
                yield from self._load()
        yield from self._load()
        self.sandbox.close()

    def offered(self, made_: Composition) -> bytes | None:
        """Return the bytes to load; None if a user is warned of them.

        With a hole, scan sees what the hole makes of them; the others are of no interest.
        """
        try:
            data = made_.data()
            seen = data
            if self.hole is not None:
                node = mapped(made_.node, self.hole)
                if node is made_.node:
                    return None
                seen = made_._replace(node=node).data()
        except (IndexError, ValueError, RecursionError):  # nothing that can be written
            return None
        return data if len(data) < 100_000 and clean(seen) else None

    # Questions

    def _ask(self) -> None:
        """Put probes in places, and note what they are asked there."""
        batch, self.unasked = self.unasked[-BATCH:], self.unasked[:-BATCH]
        probed = [each.filled([_probe(at) for at in range(len(each.places))]) for each in batch]
        outcomes = self.sandbox.run([each.data() for each in probed], alone=False)
        for spot, outcome in zip(batch, outcomes, strict=True):
            asked: list[list[str]] = [[] for _ in spot.places]
            for each in outcome.wanted:
                at, _, way = each.partition(":")
                if not way.startswith((".__reduce", ".__class__")):
                    asked[int(at)].append(way)
            if not any(asked):
                self.others.append(spot)
                continue
            spot = spot._replace(asked=tuple(map(tuple, asked)))
            key = tuple(sorted({way[:12] for ways in asked for way in ways}))
            if key not in self.asked:
                self.keys.append(key)
            self.asked.setdefault(key, []).append(spot)
            if spot.depth < DEEP and self.random.random() < 0.5:
                self._look_inside(spot)

    def _look_inside(self, spot: Spot) -> None:
        """Give a place a shape that answers the first questions, and ask in the places in that."""
        at = self.random.choice([at for at, ways in enumerate(spot.asked) if ways])
        ways = spot.asked[at]
        keys = sorted({way[1:].partition("]")[0] for way in ways if way[0] == "["})
        inside: Sequence[Path_]
        if keys:
            shape = mapping(*(part for key in keys for part in (key_of(key), NONE)))
            inside = [(at,) for at in range(1, 2 * len(keys), 2)]
        elif any(way[0] == "*" for way in ways):
            shape, inside = group("tuple", *[NONE] * self.random.choice((1, 2, 3, 5))), [(0,)]
        else:
            other = self.random.choice(list(_spots(*self.random.choice(self.material.hooked))))
            shape, inside = other.seed.node, other.places
        seed = spot.seed._replace(node=replaced(spot.seed.node, spot.places[at], shape))
        others = (*spot.places[:at], *spot.places[at + 1 :])
        below = tuple((*spot.places[at], *path) for path in inside)
        self.unasked.append(Spot(seed, below + others, depth=spot.depth + 1))

    # Files

    def composed(self) -> Composition:
        """A seed with something in its places, or something from nothing."""
        kind = self.random.random()
        if kind < 0.4 and self.asked:
            made_ = self._answered(self._drawn())
        elif kind < 0.5 and self.others and self.asked:
            spot = self._drawn() if self.random.random() < 0.5 else self.random.choice(self.others)
            odd = self.material.plain if self.random.random() < 0.4 else self.material.odd
            made_ = spot.filled([odd() for _ in spot.places])
        elif kind < 0.51:
            name: Node = ("disguised", (FIRE[1], self.random.choice(DECOYS)), ())
            return Composition(("reduce", None, (name, self.material.plain())))
        else:
            return Composition(self.material.odd(self.random.choice((1, 2, 3, 4))))
        if self.random.random() < 0.15:
            path = self._somewhere(made_.node)
            made_ = made_._replace(node=replaced(made_.node, path, self.material.odd(2)))
        return made_

    def _answered(self, spot: Spot) -> Composition:
        """Answers in most of the places where something is asked; the others are empty."""
        values = []
        for ways in spot.asked:
            answers = ways and (len(ways) == 1 or self.random.random() < 0.8)
            way = self.random.choice(ways) if answers else ""
            values.append(self.material.answer(way) if way else NONE)
        return spot.filled(values)

    def _drawn(self) -> Spot:
        """A place where something is asked: many ask the same, as all modules of torch do.

        Mostly of those that scan does not report when there is nothing in them.
        """
        for _ in range(4):
            spot = self.random.choice(self.asked[self.random.choice(self.keys)])
            if spot not in self.closed:
                self.closed[spot] = self._reported(spot)
            if not self.closed[spot]:
                break
        return spot

    def _reported(self, spot: Spot) -> bool:
        """A place of a good value is not reported, if scan does not report the value."""
        whole = spot.depth == 0 and len(spot.places) == 1
        made_ = spot.seed if whole else spot.filled([NONE] * len(spot.places))
        if self.hole is not None:
            made_ = made_._replace(node=mapped(made_.node, self.hole))
        return not clean(made_.data())

    def _somewhere(self, node: Node) -> Path_:
        """A way into a tree."""
        path = []
        while node[2] and self.random.random() < 0.75:
            path.append(self.random.randrange(len(node[2])))
            node = node[2][path[-1]]
        return tuple(path)

    def disguised(self, made_: Composition) -> Composition:
        """The same, perhaps written in another way, in another place, or behind something."""
        node, chance = made_.node, self.random.random
        if chance() < 0.05:
            node = mapped(node, _Disguise(self.random.choice(DECOYS)))
        if chance() < 0.05:
            path = self._somewhere(node)
            inner = node
            for at in path:
                inner = inner[2][at]
            hidden = self.material.persistent(inner), ("put", None, (inner,))
            node = replaced(node, path, self.random.choice(hidden))
        if chance() < 0.03:
            node = mapped(node, _Reconstructed(chance() < 0.5))
        if chance() < 0.03:  # what comes after it cannot be
            odd = self.random.choice((("a b", "c"), ("os", "1"), ("os..path", "x")))
            node = ("pop", None, (node, named(*odd)))
        spelling = self.random.getrandbits(32) if chance() < 0.1 else 0
        container = made_.container
        if chance() < 0.15:
            container = self.random.choice(("raw", "zip", "legacy30", self.legacy()))
        elif _stored(node) and container == "raw":
            container = self.random.choice(("zip", "legacy30", "legacy30"))
        return Composition(node, self.random.choice((2, 2, 3, 4, 4, 4, 5, 0)), spelling, container)

    def legacy(self) -> str:
        """Any place of a legacy file, and any spelling of its magic number."""
        return f"legacy{self.random.randrange(LEGACY)}{self.random.randrange(len(MAGICS))}"

    # Findings

    def _load(self) -> Iterator[Finding]:
        batch, self.waiting = self.waiting, []
        outcomes = self.sandbox.run([data for _, data in batch])
        for (composed, _), outcome in zip(batch, outcomes, strict=True):
            is_whole = outcome.end.startswith("ok")
            self.loaded += is_whole
            if outcome.events and self._is_hidden(composed):
                kind = _kind(outcome)
                ways = sorted({each[0] for _, each in places(composed.node)} & RARE)
                self.kinds[f"{kind} {ways}"] += 1
                if self.kinds[f"{kind} {ways}"] <= 4:
                    smaller = self._smaller(composed, kind)
                    best = smaller if self._is_hidden(smaller) else composed
                    yield Finding(best, outcome.events)
            elif is_whole and self.random.random() < 0.02 and len(self.closed) < PLANTED:
                seed = composed._replace(node=keep(composed.node), spelling=0)
                if size(seed.node) < LARGE:
                    spots = [Spot(seed, (path,), depth=1) for path, _ in places(seed.node)]
                    self.unasked += self.random.sample(spots, min(8, len(spots)))

    def _is_hidden(self, made_: Composition) -> bool:
        """With a hole: nothing happens when what is hidden there is taken apart.

        So it was that which did something, and not something that is hidden with it.
        """
        if self.hole is None or clean(made_.data()):
            return True
        apart = mapped(made_.node, _Apart(self.hole))
        return not self.sandbox.run([made_._replace(node=apart).data()])[0].events

    def _smaller(self, made_: Composition, kind: str) -> Composition:
        """The smallest found that is harmless, and does the same."""
        for change in ({"container": "raw"}, {"spelling": 0}, {"protocol": 4}):
            made_ = next(self._still([made_._replace(**change)], kind), made_)
        for _ in range(8 if kind.startswith("dies") else STEPS):
            found = next(self._still(self._less(made_), kind), None)
            if found is None:
                break
            made_ = found
        return made_

    def _less(self, made_: Composition) -> Iterator[Composition]:
        """The same with parts left out, the large ones first."""
        all_ = ((path, new) for path, node in places(made_.node) for new in _less(node))
        fewer = [replaced(made_.node, path, new) for path, new in all_]
        yield from (made_._replace(node=each) for each in sorted(fewer, key=size))

    def _still(self, candidates: Iterable[Composition], kind: str) -> Iterator[Composition]:
        """Those that are harmless, and do something of this kind."""
        offered = ((each, data) for each in candidates if (data := self.offered(each)) is not None)
        while batch := list(islice(offered, 4)):
            outcomes = self.sandbox.run([data for _, data in batch])
            for (each, _), outcome in zip(batch, outcomes, strict=True):
                if _kind(outcome) == kind:
                    yield each

    def summary(self) -> str:
        """The counts."""
        return (
            f"{self.tried:,} files, {self.harmless:,} harmless, {self.loaded:,} of them loaded to the end; "
            f"{self.kinds.total():,} did something; {len(self.keys):,} questions, "
            f"{len(self.others):,} others, {len(self.unasked):,} not tried"
        )


def _probe(at: int) -> Node:
    """A probe that tells which one it is."""
    return changed(("new", None, (PROBE,)), "build", const(f"{at}:"))


def _spots(name: tuple[str, str], attributes: Sequence[str]) -> Iterator[Spot]:
    """An object with hooks in the ways in which they are called, and what it holds."""
    state = mapping(*(part for each in attributes for part in (const(each), NONE)))
    inside = tuple(range(1, 2 * len(attributes), 2))
    whole, new = made(name, state), made(name)
    two = group("tuple", *[NONE] * 2)
    ways: tuple[tuple[Node, list[Path_]], ...] = (
        (whole, [(1, at) for at in inside]),
        (made(name, group("tuple", NONE, state)), [(1, 1, at) for at in inside]),
        (apply("builtins.list", whole), [(1, 1, at) for at in inside]),
        (group("set", whole, whole), [(at, 1, each) for at in (0, 1) for each in inside]),
        (made(name, NONE), [(1,)]), (made(name, two), [(1, 0), (1, 1)]),
        (changed(new, "append", NONE), [(1,)]), (changed(new, "additems", NONE), [(1,)]),
        (changed(new, "setitem", NONE, NONE), [(1,), (2,)]),
        (("new", None, (named(*name), NONE, NONE)), [(1,), (2,)]),
    )  # fmt: skip
    yield from (Spot(Composition(node), tuple(paths)) for node, paths in ways if paths)


class _Apart(NamedTuple):
    """What a hole hides, as a tuple of its parts."""

    hole: Hole

    def __call__(self, node: Node) -> Node | None:
        return group("tuple", *node[2]) if self.hole(node) is not None else None


class _Disguise(NamedTuple):
    """The canary's function by another name."""

    name: tuple[str, str]

    def __call__(self, node: Node) -> Node | None:
        return ("disguised", (node[1], self.name), ()) if node == FIRE else None


class _Reconstructed(NamedTuple):
    """Objects as copyreg writes them."""

    new: bool

    def __call__(self, node: Node) -> Node | None:
        if node[0] != "new" or len(node[2]) != 1:
            return None
        if self.new:
            return apply("copyreg.__newobj__", node[2][0])
        object_ = named("builtins", "object")
        return apply("copyreg._reconstructor", node[2][0], object_, NONE)


def _stored(node: Node) -> bool:
    """Return whether a tree has persistent ids."""
    return node[0] == "binpersid" or any(map(_stored, node[2]))


def _less(node: Node) -> Iterator[Node]:
    """A part of a node, or the same with fewer parts."""
    kind, value, children = node
    yield from (each for each in (NONE, ("tuple", None, ()), *children) if size(each) < size(node))
    step = 2 if kind in ("dict", "setitems") else 1
    first = 0 if kind in ("list", "tuple", "dict", "set", "frozenset", "inst") else 1
    fixed = ("pop", "put", "alias", "binpersid", "apply", "newapply", "newex", "build")
    if children and kind not in fixed:
        for at in range(first, len(children), step):
            yield kind, value, (*children[:at], *children[at + step :])


def _kind(outcome: Outcome) -> str:
    """The first event without its arguments."""
    return " ".join(outcome.events[0].split()[:2]) if outcome.events else ""


def attempts(paths: Sequence[Path]) -> Iterator[tuple[bool, Outcome]]:
    """Yield whether scan ends with 0 for a file, and what it does in the sandbox."""
    Material(Random(0), every=False)  # imports what files name
    sandbox = Sandbox()
    for path in paths:  # one after the other: those that die load no other once more
        data = path.read_bytes()
        yield clean(data), sandbox.run([data])[0]
    sandbox.close()
