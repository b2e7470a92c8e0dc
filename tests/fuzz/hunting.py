"""Compose files, scan them, and load the harmless ones in a sandbox: nothing may come of it.

A hunt begins with what libraries write. It puts a probe in the place of each value, and notes what
the loader asks of it there. Then it puts something that answers in those places: an attribute that
is a function, a mapping with a factory, something to go through with such things inside, an object
whose hooks ask in their turn. Other places get what has no business there. Each file may be
disguised, stored behind persistent ids and in other containers. Whatever a file does that scan
calls harmless is made smaller and told.
"""

from __future__ import annotations

import contextlib
import io
import pickletools
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from ckptkit.core.errors import CkptkitError
from ckptkit.scanning.files import scan
from tests.fuzz.material import DECOYS, FIRE, PROBE, Material, group, made, seeds
from tests.fuzz.sandbox import Outcome, Sandbox, loaded
from tests.fuzz.trees import (
    LEGACY,
    MAGICS,
    NONE,
    Node,
    const,
    file,
    mapped,
    mapping,
    places,
    replaced,
    size,
)

BATCH = 128
DEEP = 3  # questions inside answers
LARGE = 330  # nodes of a tree that is hunted
STEPS = 60  # in which a finding is made smaller
HARMLESS = ("none", "safe", "harmless")  # verdicts that exit 0
RARE = {
    "disguised",
    "octal",
    "binpersid",
    "ext",
    "late",
    "nested",
    "inst",
}  # ways to hide something
Hole = Callable[[Node], Node | None]


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
    """A place in a tree, what a loader asks there, and how often it was looked into on the way."""

    seed: Composition
    path: tuple[int, ...]
    asked: tuple[str, ...] = ()
    depth: int = 0


class Judge:
    """What scan says of files; with a hole, of files in which it does not see what the hole hides."""

    def __init__(self, hole: Hole | None = None) -> None:
        self.hole = hole
        self.folder = tempfile.TemporaryDirectory(
            dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        )
        self.path = Path(self.folder.name) / "made.pth"

    def clean(self, made_: Composition) -> bool:
        """Return whether `ckptkit scan` ends with 0."""
        if self.hole is not None:
            made_ = made_._replace(node=mapped(made_.node, self.hole))
        try:
            self.path.write_bytes(made_.data())
            return scan(self.path).verdict in HARMLESS
        except (CkptkitError, IndexError, ValueError):  # refused, or nothing that can be written
            return False


class Hunt:
    """The places that are known, what was tried, and the findings."""

    def __init__(self, seed: int, about: str = "", every: bool = False) -> None:
        """Prepare a hunt; `about`: only of trees with a name that has this in it."""
        warnings.simplefilter("ignore")
        self.random = Random(seed)
        self.material = Material(self.random, every)
        self.judge = Judge()
        self.sandbox = Sandbox()
        self.tried = self.harmless = self.loaded = 0
        self.kinds: Counter[str] = Counter()
        self.spots: dict[tuple[str, ...], list[Spot]] = {}  # where something is asked, by what
        self.others: list[Spot] = []
        self.unasked = self._first(about)
        self.waiting: list[tuple[Composition, bytes]] = []

    def _first(self, about: str) -> list[Spot]:
        """Every place of the seeds, in an order of chance."""
        trees = [each for each in seeds() if size(each) < LARGE]
        found = []
        for each in trees:
            stored = "binpersid" in {node[0] for _, node in places(each)}
            seed = Composition(each, container="zip" if stored else "raw")
            found += [Spot(seed, path) for path, _ in places(each)]
            with contextlib.suppress(Exception):
                loaded(seed.data())  # so that what it needs is imported
        for name, attributes in self.material.hooked:
            pairs = [part for attribute in attributes for part in (const(attribute), NONE)]
            seed = Composition(made(name, mapping(*pairs)))
            found += [
                Spot(seed, (1, *path)) for path in ((), *((at,) for at in range(1, len(pairs), 2)))
            ]
        self.random.shuffle(found)
        return [each for each in found if not about or about in repr(each.seed.node)]

    def run(self, seconds: float = float("inf"), count: float = float("inf")) -> Iterator[Finding]:
        """Try for so long, or so many; the first findings of each kind as they are met."""
        stop, last = time.monotonic() + seconds, self.tried + count
        while self.tried < last and time.monotonic() < stop:
            if self.unasked and (not self.spots or self.random.random() < 0.02):
                self._ask()
            self.tried += 1
            composed = self.disguised(self.composed())
            data = self.offered(composed)
            if data is not None:
                self.harmless += 1
                self.waiting.append((composed, data))
            if len(self.waiting) == BATCH:
                yield from self._load()
        yield from self._load()
        self.sandbox.close()

    def offered(self, made_: Composition) -> bytes | None:
        """Return the bytes to load; None if a user is warned of them."""
        try:
            data = made_.data()
        except (IndexError, ValueError, RecursionError):
            return None
        return data if len(data) < 100_000 and self.judge.clean(made_) else None

    # Questions

    def _ask(self) -> None:
        """Put probes in places of the seeds, and note what they are asked there."""
        batch, self.unasked = self.unasked[-BATCH:], self.unasked[:-BATCH]
        probed = [
            each.seed._replace(node=replaced(each.seed.node, each.path, PROBE)) for each in batch
        ]
        for spot, outcome in zip(
            batch, self.sandbox.run([each.data() for each in probed], alone=False), strict=True
        ):
            asked = tuple(
                each for each in outcome.wanted if not each.startswith((".__reduce", ".__class__"))
            )
            if not asked:
                self.others.append(spot)
                continue
            self.spots.setdefault(asked, []).append(spot._replace(asked=asked))
            if spot.depth < DEEP and self.random.random() < 0.5:
                self._look_inside(spot, asked)

    def _look_inside(self, spot: Spot, asked: tuple[str, ...]) -> None:
        """Give the place a shape that answers the first questions, and ask in the places in that."""
        keys = {way[1:].partition("]")[0].strip("'") for way in asked if way[0] == "["}
        if keys:
            shape = mapping(
                *(
                    part
                    for key in sorted(keys)
                    for part in (const(int(key) if key.isdecimal() else key), NONE)
                )
            )
            inside = range(1, 2 * len(keys), 2)
        elif any(way[0] == "*" for way in asked):
            shape, inside = group("tuple", *[NONE] * self.random.choice((1, 2, 3, 5))), range(1)
        else:
            name, attributes = self.random.choice(self.material.hooked)
            state = mapping(*(part for each in attributes for part in (const(each), NONE)))
            shape, inside = made(name, state), range(1, 2 * len(attributes), 2)
        seed = spot.seed._replace(node=replaced(spot.seed.node, spot.path, shape))
        below = (1,) if shape[0] == "build" else ()
        self.unasked += [
            Spot(seed, (*spot.path, *below, at), depth=spot.depth + 1) for at in inside
        ]

    # Files

    def composed(self) -> Composition:
        """A seed with something in a place, or something from nothing."""
        kind = self.random.random()
        if kind < 0.55 and self.spots:
            spot = self._asked()
            new = self.material.answer(self.random.choice(spot.asked))
        elif kind < 0.8 and self.others and self.spots:
            spot = self._asked() if self.random.random() < 0.5 else self.random.choice(self.others)
            new = self.material.plain() if self.random.random() < 0.4 else self.material.odd(2)
        elif kind < 0.82:
            name: Node = ("disguised", (FIRE[1], self.random.choice(DECOYS)), ())
            return Composition(
                ("reduce", None, (name, *(self.material.plain(),)[: self.random.randrange(2)]))
            )
        else:
            return Composition(self.material.odd(4))
        node = replaced(spot.seed.node, spot.path, new)
        if self.random.random() < 0.15:
            path, _ = self.random.choice(list(places(node)))
            node = replaced(node, path, self.material.odd(2))
        return spot.seed._replace(node=node)

    def _asked(self) -> Spot:
        """A place where something is asked: many ask the same, as all modules of torch do."""
        return self.random.choice(self.spots[self.random.choice(list(self.spots))])

    def disguised(self, made_: Composition) -> Composition:
        """The same, perhaps written in another way, in another place, or behind something."""
        node, chance = made_.node, self.random.random
        if chance() < 0.05:
            node = mapped(
                node,
                lambda each: (
                    ("disguised", (each[1], self.random.choice(DECOYS)), ())
                    if each == FIRE
                    else None
                ),
            )
        if chance() < 0.05:
            path, inner = self.random.choice(list(places(node)))
            node = replaced(
                node,
                path,
                self.random.choice((self.material.persistent(inner), ("put", None, (inner,)))),
            )
        if chance() < 0.03:
            node = mapped(node, self._reconstructed)
        if chance() < 0.05:  # what comes after it cannot be
            odd: Node = (
                "global",
                self.random.choice((("a b", "c"), ("os", "1"), ("os..path", "x"))),
                (),
            )
            node = ("pop", None, (node, odd))
        spelling = self.random.getrandbits(32) if chance() < 0.1 else 0
        container = made_.container
        if chance() < 0.15:
            container = self.random.choice(("raw", "zip", "legacy30", self.legacy()))
        elif "binpersid" in {each[0] for _, each in places(node)} and chance() < 0.7:
            container = "legacy30"
        return Composition(node, self.random.choice((2, 2, 3, 4, 4, 5, 0)), spelling, container)

    def legacy(self) -> str:
        """Any place of a legacy file, and any spelling of its magic number."""
        return f"legacy{self.random.randrange(LEGACY)}{self.random.randrange(len(MAGICS))}"

    def _reconstructed(self, node: Node) -> Node | None:
        """As copyreg writes objects."""
        if node[0] != "new" or len(node[2]) != 1:
            return None
        name = ("global", ("copyreg", self.random.choice(("__newobj__", "_reconstructor"))), ())
        more = () if name[1][1] == "__newobj__" else (("global", ("builtins", "object"), ()), NONE)
        return ("reduce", None, (name, node[2][0], *more))

    # Findings

    def _load(self) -> Iterator[Finding]:
        batch, self.waiting = self.waiting, []
        outcomes = self.sandbox.run([data for _, data in batch])
        for (composed, _), outcome in zip(batch, outcomes, strict=True):
            self.loaded += outcome.end.startswith("ok")
            if outcome.events:
                kind = _kind(outcome)
                ways = sorted({each[0] for _, each in places(composed.node)} & RARE)
                self.kinds[f"{kind} {ways}"] += 1
                if self.kinds[f"{kind} {ways}"] <= 4:
                    yield Finding(self._smaller(composed, kind), outcome.events)

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
        fewer = [
            replaced(made_.node, path, new)
            for path, node in places(made_.node)
            for new in _less(node)
        ]
        yield from (made_._replace(node=each) for each in sorted(fewer, key=size))

    def _still(self, candidates: Iterable[Composition], kind: str) -> Iterator[Composition]:
        """Those that are harmless, and do something of this kind."""
        offered = ((each, data) for each in candidates if (data := self.offered(each)) is not None)
        while batch := list(islice(offered, 4)):
            outcomes = self.sandbox.run([data for _, data in batch])
            yield from (
                each
                for (each, _), outcome in zip(batch, outcomes, strict=True)
                if _kind(outcome) == kind
            )

    def summary(self) -> str:
        """The counts."""
        return (
            f"{self.tried:,} files, {self.harmless:,} harmless, {self.loaded:,} of them loaded to the end; "
            f"{self.kinds.total():,} did something; {len(self.spots):,} questions, "
            f"{len(self.others):,} others, {len(self.unasked):,} not tried"
        )


def _less(node: Node) -> Iterator[Node]:
    """A part of a node, or the same with fewer parts."""
    kind, value, children = node
    yield from (each for each in (NONE, ("tuple", None, ()), *children) if size(each) < size(node))
    step = 2 if kind in ("dict", "setitems") else 1
    first = 0 if kind in ("list", "tuple", "dict", "set", "frozenset", "inst") else 1
    if children and kind not in (
        "pop",
        "put",
        "late",
        "binpersid",
        "apply",
        "newapply",
        "newex",
        "build",
    ):
        for at in range(first, len(children), step):
            yield kind, value, (*children[:at], *children[at + step :])


def _kind(outcome: Outcome) -> str:
    """The first event without its arguments."""
    return " ".join(outcome.events[0].split()[:2]) if outcome.events else ""


def attempts(paths: Sequence[Path]) -> Iterator[tuple[bool, Outcome]]:
    """Yield whether scan ends with 0 for a file, and what it does in the sandbox."""
    Material(Random(0))  # imports what files name
    sandbox = Sandbox()
    for path in paths:
        outcome = sandbox.run([path.read_bytes()])[0]
        try:
            yield scan(path).verdict in HARMLESS, outcome
        except CkptkitError:
            yield False, outcome
    sandbox.close()
