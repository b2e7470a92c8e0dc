"""Compose pickles, scan them, and load the clean ones in a sandbox: nothing may come of it.

    python -m tests.fuzz.soundness --count 100000 --seed 1

Whatever does something that no clean pickle does is made smaller and printed.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import pickletools
import sys
import time
import warnings
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import CkptkitError
from ckptkit.pickles.streams import NOT_TORCH, PICKLE, Traced
from ckptkit.scanning import find as hidden
from ckptkit.scanning.trace import trace
from ckptkit.scanning.verdict import FINDINGS, Trusted, judge, judge_file
from tests.fuzz import canary
from tests.fuzz.catalog import Catalog, catalog, table_rows
from tests.fuzz.composing import Composer
from tests.fuzz.compositions import NONE, Node, places, replaced, size, write
from tests.fuzz.sandbox import Outcome, Sandbox, archive

BATCH = 128
SHOWN = 60  # findings that are told
EACH = 4  # of a kind that are made smaller
TOLD = 10_000  # compositions after which the counts are told
STEPS = 100  # in which one is made smaller


class Composition(NamedTuple):
    """A pickle, and how it is written."""

    node: Node
    protocol: int
    spelling: int
    torch: bool  # in an archive of torch.save

    def data(self) -> bytes:
        """The bytes of the file."""
        made = write(self.node, self.protocol, self.spelling)
        return archive(made) if self.torch else made


class Finding(NamedTuple):
    """Something that a clean pickle did."""

    composition: Composition
    events: tuple[str, ...]

    def text(self) -> str:
        """The events, and the pickle in opcodes."""
        made = write(self.composition.node, self.composition.protocol, self.composition.spelling)
        shown = io.StringIO()
        with contextlib.suppress(ValueError):
            pickletools.dis(made, shown)
        where = "torch.load" if self.composition.torch else "pickle.load"
        return f"== {where}: {'; '.join(self.events)}\n{made!r}\n{shown.getvalue()}"


def is_clean(data: bytes, name: str = "made.pkl") -> bool:
    """Return whether `ckptkit scan` ends with 0."""
    source = Memory(data, name)
    try:
        if data[:2] != b"PK":
            alone = Traced("", 0, 0, PICKLE, NOT_TORCH, trace(source))
            if judge(alone, Trusted()).verdict in FINDINGS:
                return False
        verdict = judge_file(name, len(data), hidden.pickles(source), Trusted())
    except CkptkitError:
        return False
    return verdict.verdict not in FINDINGS


def unnamed(data: bytes, outcome: Outcome) -> Iterator[str]:
    """Names that the unpickler looked up, and the scanner has not seen."""
    if data[:2] == b"PK":
        return
    found = judge_file("made.pkl", len(data), hidden.pickles(Memory(data, "made.pkl")), Trusted())
    traces = [each.found.trace for each in found.pickles]
    seen = {(name.module, name.name) for each in traces for name in each.globals}
    for module, name in outcome.names:
        mapped = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if not {(module, name), mapped} & seen:
            yield f"looks up {module}.{name}, which scan does not see"


class Hunt:
    """Compositions, what became of them, and the findings."""

    def __init__(self, names: Catalog, seed: int) -> None:
        self.composer = Composer(names, seed)
        self.random = Random(seed)
        self.sandbox = Sandbox(names.full())
        self.tried = self.clean = self.loaded = self.fired = 0
        self.ends: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.findings: dict[str, Finding] = {}
        self.waiting: list[tuple[Composition, bytes]] = []

    def run(self, count: int) -> Iterator[Finding]:
        """Try so many; the first finding of each kind as it is met."""
        while self.tried < count:
            self.tried += 1
            if self.tried % TOLD == 0:
                print(self.summary(), file=sys.stderr, flush=True)
            made = self._composition()
            data = made.data()
            clean = is_clean(data)
            self.composer.learn(made.node, clean)
            if clean:
                self.clean += 1
                self.waiting.append((made, data))
            if len(self.waiting) == BATCH or self.tried == count:
                yield from self._load()
        self.sandbox.close()

    def _composition(self) -> Composition:
        protocol = self.random.choice((2, 2, 3, 4, 4, 4, 5, 0))
        spelling = self.random.getrandbits(32) if self.random.random() < 0.1 else 0
        return Composition(self.composer.compose(), protocol, spelling, self.random.random() < 0.03)

    def _load(self) -> Iterator[Finding]:
        batch, self.waiting = self.waiting, []
        outcomes = self.sandbox.run([data for _, data in batch])
        for (made, data), outcome in zip(batch, outcomes, strict=True):
            self.loaded += outcome.end.startswith("ok")
            self.composer.learn(made.node, True, self.ends[outcome.end] < 3)
            self.ends[outcome.end] += 1
            self.composer.want(made.node, outcome.wanted)
            events = (*outcome.events, *unnamed(data, outcome))
            if events:
                self.fired += 1
                before = [each for each, _ in batch[: batch.index((made, data))]]
                yield from self._found(made, events, before)

    def _found(
        self,
        made: Composition,
        events: tuple[str, ...],
        before: list[Composition],
    ) -> Iterator[Finding]:
        kind = _kind(events[0])
        self.kinds[kind] += 1
        if len(self.findings) >= SHOWN or self.kinds[kind] > EACH:
            return
        if not self._does(made, kind):
            made = self._together(made, before, kind)
        small = self._smaller(made, kind)
        key = f"{kind} / {_shape(small.node)}"
        if key not in self.findings:
            self.findings[key] = Finding(small, events)
            yield self.findings[key]

    def _together(self, made: Composition, before: list[Composition], kind: str) -> Composition:
        """Return the pickle that acts only after others, with as few of these as it takes."""
        step = len(before)
        while step:
            at = 0
            while at < len(before):
                fewer = before[:at] + before[at + step :]
                if self._does(_joined(made, fewer), kind):
                    before = fewer
                else:
                    at += step
            step //= 2
        return _joined(made, before)

    def _does(self, made: Composition, kind: str) -> bool:
        """Return whether it is clean, and does something of this kind."""
        return next(self._still(iter([made]), kind), None) is not None

    def _smaller(self, made: Composition, kind: str) -> Composition:
        """The smallest found that is clean, and does the same."""
        for change in _SIMPLER:
            if self._does(made._replace(**change), kind):
                made = made._replace(**change)
        for _ in range(STEPS):
            found = next(self._still(self._candidates(made), kind), None)
            if found is None:
                return made
            made = found
        return made

    def _candidates(self, made: Composition) -> Iterator[Composition]:
        for path, node in places(made.node):
            for new in _less(node):
                yield made._replace(node=replaced(made.node, path, new))

    def _still(self, candidates: Iterator[Composition], kind: str) -> Iterator[Composition]:
        for each in candidates:
            try:
                data = each.data()
            except (IndexError, ValueError):
                continue
            if not is_clean(data):
                continue
            outcome = self.sandbox.run([data])[0]
            if any(_kind(event) == kind for event in (*outcome.events, *unnamed(data, outcome))):
                yield each

    def summary(self) -> str:
        """The counts."""
        return (
            f"{self.tried:,} compositions, {self.clean:,} clean, {self.loaded:,} of them loaded to "
            f"the end; {self.fired:,} did something, in {len(self.findings):,} ways; "
            f"{self.sandbox.started:,} processes"
        )


def _less(node: Node) -> Iterator[Node]:
    """A part of a node, or the same with fewer parts."""
    kind, value, children = node
    yield from (each for each in (NONE, ("tuple", None, ()), *children) if size(each) < size(node))
    step = 2 if kind in ("dict", "setitems") else 1
    first = 0 if kind in ("list", "tuple", "dict", "set", "frozenset", "inst") else 1
    if children and kind not in ("pop", "put", "binpersid", "apply", "newapply", "newex", "build"):
        for at in range(first, len(children), step):
            yield kind, value, (*children[:at], *children[at + step :])


def _joined(made: Composition, before: list[Composition]) -> Composition:
    """One pickle that makes what others make, throws it away, and goes on."""
    node = made.node
    for each in reversed(before):
        node = ("pop", None, (each.node, node))
    return made._replace(node=node)


_SIMPLER = ({"torch": False}, {"spelling": 0}, {"protocol": 4})


def _kind(event: str) -> str:
    """An event without its arguments."""
    return " ".join(event.split()[:2])


def _shape(node: Node) -> str:
    """The names of a tree."""
    names = [each[1] for _, each in places(node) if each[0] in ("global", "inst")]
    return " ".join(map(".".join, names))[:200]


def prepared(rows: Collection[tuple[str, str]] | None = None) -> Catalog:
    """The names, with all their modules imported, so that no pickle has to."""
    sys.modules[canary.MODULE] = canary
    canary.__name__ = canary.MODULE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        codecs.lookup("latin1")
        torch.set_num_threads(1)
        return catalog(*table_rows()) if rows is None else catalog(rows, rows)


def main(arguments: list[str]) -> int:
    """Hunt as the options say; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soundness")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file", type=Path, action="append", default=[], help="load this one")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    names = prepared()
    if options.file:
        return _files(options.file, names)
    hunt = Hunt(names, options.seed)
    start = time.monotonic()
    for finding in hunt.run(options.count):
        print(finding.text(), flush=True)
    seconds = time.monotonic() - start
    print(f"{hunt.summary()}; {hunt.tried / seconds:,.0f} a second", flush=True)
    return 1 if hunt.findings else 0


def _files(paths: list[Path], names: Catalog) -> int:
    """Load files in the sandbox; print a line of JSON for each: what it did, and what scan says."""
    sandbox = Sandbox(names.full())
    found = 0
    for path in paths:
        data = path.read_bytes()
        outcome = sandbox.run([data])[0]
        clean = is_clean(data, path.name)
        found += clean and bool(outcome.events)
        told = {"file": path.stem, "clean": clean, "end": outcome.end, "events": outcome.events}
        print(json.dumps(told), flush=True)
    sandbox.close()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
