"""Find renamed keys: pairs of a key that only A has and a key that only B has.

Four methods run in this order. Each method pairs keys that the previous methods did not pair:

1. ``suffix``: Pair keys with the longest common suffix.
2. ``shape``: Pair two keys if no other key has their shape and dtype.
3. ``order``: If both sides have the same number of keys of one shape and dtype, pair these keys in
   order.
4. ``edit``: Of all keys with equal shapes, pair the keys with the most similar names.

The parts of two keys before a common suffix are a rename rule, such as ``encoder.layer`` ->
``blocks``. Rules that rename the most keys are applied first.

Keys that differ only in their numbers are a family, such as the keys of all layers. The methods
pair complete families. Each key is in at most one pair, and the two keys of a pair have equal
shapes. The number of comparisons is limited. Therefore, if two large files have no common names,
only some names are compared (see ``unsearched``).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice, product
from typing import NamedTuple, TypeVar

from ckptkit.core.tensor import Shape
from ckptkit.core.text import flatten, without

# Patterns that find the numbers in names. INDICES finds only numbers between dots (``layers.3``),
# NUMBERS finds all numbers (``layer_3``), and NONE finds no number.
INDICES, NUMBERS, NONE = (
    re.compile(text) for text in (r"(?<![^.])([0-9]+)(?![^.])", r"([0-9]+)", r"(?!)")
)

MAX_DOTS = 64  # a name with this number of dots or more is the only member of its family

Parts = tuple[str, ...]  # path components of a name
Numbers = tuple[str, ...]


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


class KeyPattern:
    """A family of names that differ only in their numbers.

    ``members`` maps the numbers in each name to the name, in the order of the file.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.members: dict[Numbers, str] = {}

    @cached_property
    def ranked(self) -> dict[tuple[int, ...], str]:
        """A dict from ranks to names. The rank of a number is its position among the sorted
        numbers.

        For example, ``layers.1`` to ``layers.12`` have the same ranks as ``blocks.0`` to
        ``blocks.11``.
        """
        if len(self.members) == 1:
            return {(): next(iter(self.members.values()))}
        places = [
            sorted(set(values), key=lambda n: (len(n), n))
            for values in zip(*self.members, strict=True)
        ]
        ranks = [{value: rank for rank, value in enumerate(values)} for values in places]
        varying = [place for place, values in enumerate(places) if len(values) > 1]
        return {
            tuple([ranks[place][numbers[place]] for place in varying]): name
            for numbers, name in self.members.items()
        }

    def renamings(self, other: KeyPattern) -> Iterable[Mapping[str, str]]:
        """Yield two dicts from names of this family to names of `other`.

        The first dict pairs names with equal numbers. The second dict pairs names with equal
        ranks.
        """
        same = {
            name: other.members[key] for key, name in self.members.items() if key in other.members
        }
        yield same
        if len(self.members) == len(other.members) == len(same) == 1:
            return
        if len(self.ranked) == len(other.ranked) and self.ranked.keys() == other.ranked.keys():
            yield {name: other.ranked[key] for key, name in self.ranked.items()}


def families(names: Iterable[str], numbers: re.Pattern[str] = INDICES) -> dict[Parts, KeyPattern]:
    """Group `names` into families. `numbers` is the pattern for numbers in names."""
    found: dict[Parts, KeyPattern] = {}
    for name in names:
        pieces = [name] if name.count(".") >= MAX_DOTS else numbers.split(name)
        parts = tuple("{}".join(pieces[::2]).split(".", MAX_DOTS))
        family = found.get(parts)
        if family is None:
            family = found[parts] = KeyPattern(parts)
        family.members[tuple(pieces[1::2])] = name
    return found


# Maximum number of compared components of a name, and of compared characters of a component.
LONGEST = 64
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")


def similarity(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Return the similarity of two names, given as path components, from 0 to 1.

    The similarity is 1 - (edit distance / length of the longer name). The cost of replacing a
    component is 1 - (similarity of the old and the new component).
    """
    ours, theirs = ours[:LONGEST], theirs[:LONGEST]
    row = [float(n) for n in range(len(theirs) + 1)]
    for number, part in enumerate(ours, 1):
        before, row[0] = row[0], float(number)
        for n, other in enumerate(theirs, 1):
            changed = before + 1 - _alike(part, other)
            before, row[n] = row[n], min(row[n] + 1, row[n - 1] + 1, changed)
    return 1 - row[-1] / max(len(ours), len(theirs), 1)


@lru_cache(maxsize=1 << 16)
def _alike(one: str, other: str) -> float:
    """Return the similarity of two path components, such as ``q`` and ``query``.

    The similarity is the mean of two numbers:

    - 1 - (edit distance / length of the longer component)
    - for the two words with the most similar beginning, (length of their common prefix) / (length
      of the shorter word)
    """
    if one == other:
        return 1.0
    one, other = one[:LONGEST], other[:LONGEST]
    edited, begun = 1 - _distance(one, other) / max(len(one), len(other)), 0.0
    words = ([word.lower() for word in _WORD.findall(part)][:8] for part in (one, other))
    for a, b in product(*words):  # (length of the common prefix) / (length of the shorter word)
        shorter = min(len(a), len(b))
        same = next((n for n in range(shorter) if a[n] != b[n]), shorter)
        begun = max(begun, same / shorter)
    return min(0.99, (edited + begun) / 2)


def _distance(one: str, other: str) -> int:
    """Return the Levenshtein distance."""
    row = list(range(len(other) + 1))
    for number, char in enumerate(one, 1):
        before, row[0] = row[0], number
        for n, each in enumerate(other, 1):
            before, row[n] = row[n], min(row[n] + 1, row[n - 1] + 1, before + (char != each))
    return row[-1]


# Limits for the number of comparisons.
# Skip a common suffix if more pairs of families than this have the suffix.
PAIRS = 4_096
COMPARED = 10_000  # maximum number of rules for which `similarity` is computed
WORK = 3_000_000  # maximum number of name lookups
DEEPEST = 24  # maximum number of path components in a suffix
# A rule beats competing rules if its similarity is at least this much higher than theirs.
MARGIN = 0.05


class RenameRule(NamedTuple):
    """A rule that replaces the path components `old` at the start of a name by `new`."""

    old: Parts
    new: Parts


COMPARISONS = 8_000  # maximum number of name comparisons in total
BUCKET = 2_048  # maximum number of name comparisons for each shape
# Minimum similarity of paired names: for equal shapes, for different shapes, and for a single
# vector or scalar.
NEAR, NEAR_RESHAPED, NEAR_VAGUE = 0.5, 0.6, 0.4


class Kind(NamedTuple):
    dtype: str
    shape: Shape


class Renamed(NamedTuple):
    """A pair of keys: the key `old` of A is the key `new` of B under another name.

    `confidence` is a number from 0 to 1. `why` is the method ("suffix", "shape", "order" or
    "edit"). If torch itself renamed the key, `why` is "torch".
    """

    old: str
    new: str
    a: Kind
    b: Kind
    confidence: float
    why: str


@dataclass(frozen=True)
class Matching:
    """The pairs of keys, in the order of A. `renamed` contains pairs with equal shapes, and
    `reshaped` contains pairs with different shapes.

    `unsearched` counts the unpaired keys of A that were not compared with all keys of B.
    """

    renamed: tuple[Renamed, ...] = ()
    reshaped: tuple[Renamed, ...] = ()
    unsearched: int = 0


def match(old: Mapping[str, Kind], new: Mapping[str, Kind]) -> Matching:
    """Pair keys that only A has (`old`) with keys that only B has (`new`)."""
    found = _Matcher(old, new)
    for numbers in (INDICES, NUMBERS, NONE):
        ours, theirs = families(found.old, numbers), families(found.new, numbers)
        if not (found.ours.keys() >= ours.keys() and found.theirs.keys() >= theirs.keys()):
            found.ours, found.theirs = ours, theirs
            found.by_suffix()
            found.by_order()
    found.by_edit()
    found.reshape()
    return _in_order(old, found.renamed, found.reshaped, found.unsearched)


class _Matcher:
    """The state of the matching. ``old`` and ``new`` contain the keys without a pair.

    ``ours`` and ``theirs`` contain the families of these keys. A family can also contain keys that
    already have a pair.
    """

    def __init__(self, old: Mapping[str, Kind], new: Mapping[str, Kind]) -> None:
        self.old, self.new = dict(old), dict(new)
        self.renamed: list[Renamed] = []
        self.reshaped: list[Renamed] = []
        self.rules: list[RenameRule] = []
        self.ours: dict[Parts, KeyPattern] = {}
        self.theirs: dict[Parts, KeyPattern] = {}
        self.unsearched = 0
        self._comparisons = COMPARISONS

    def joined(self, ours: KeyPattern, theirs: KeyPattern) -> dict[str, str]:
        """Pair the unpaired names of two families. Return the pairs as a dict.

        Of the two dicts from `renamings`, use the dict with more pairs.
        """
        old, new = self.old, self.new
        ways = [
            {
                a: b
                for a, b in names.items()
                if a in old and b in new and old[a].shape == new[b].shape
            }
            for names in ours.renamings(theirs)
        ]
        return max(ways, key=len)

    def accept(self, names: Mapping[str, str], confidence: float, why: str) -> None:
        for a, b in names.items():
            self.renamed.append(Renamed(a, b, self.old.pop(a), self.new.pop(b), confidence, why))

    # suffix

    def by_suffix(self) -> None:
        """Find rename rules from common suffixes, and apply the rules that rename the most keys
        first."""
        self._work = WORK
        self._vote()
        near = {rule: similarity(rule.old, rule.new) for rule in islice(self._votes, COMPARED)}
        heap = [
            (-votes, -near.get(rule, 0), n, rule)
            for n, (rule, votes) in enumerate(self._votes.items())
        ]
        heapify(heap)
        while heap and self._work > 0:
            votes, nearness, number, rule = heappop(heap)
            names, weight = self._effect(rule)
            if weight < -votes:
                if weight:
                    heappush(heap, (-weight, nearness, number, rule))
                continue
            # A competing rule renames at least as many keys, and some of the same keys.
            claims = (*self._claims[False, rule.old], *self._claims[True, rule.new])
            rivals = []
            for each in claims:
                if each != rule and self._votes[each] >= self._votes[rule]:
                    theirs, as_much = self._effect(each)
                    if as_much >= weight and (
                        not names.keys().isdisjoint(theirs)
                        or not set(names.values()).isdisjoint(theirs.values())
                    ):
                        rivals.append(near.get(each, 0))
            if not rivals or near.get(rule, 0) >= max(rivals) + MARGIN:
                self.accept(names, sure(rule, len(names), not rivals), "suffix")
                self.rules.append(rule)

    def _vote(self) -> None:
        """Collect the rename rules for all common suffixes, the longest suffixes first. The votes
        of a rule are the number of renamed keys, weighted by the length of the suffix."""
        self._votes: dict[RenameRule, int] = defaultdict(int)
        # Each value is a list of rules. The key is (False, path components that the rules replace)
        # or (True, path components that the rules insert).
        self._claims: dict[tuple[bool, Parts], list[RenameRule]] = defaultdict(list)

        def by_suffix(side: Mapping[Parts, KeyPattern]) -> dict[Parts, list[KeyPattern]]:
            longer = (each for parts, each in side.items() if len(parts) >= length)
            return grouped(longer, lambda each: each.parts[-length:])

        done: set[tuple[Parts, Parts]] = set()
        longest = (max(map(len, side), default=0) for side in (self.ours, self.theirs))
        for length in range(min(DEEPEST, *longest), 0, -1):
            ours, theirs = by_suffix(self.ours), by_suffix(self.theirs)
            for suffix in ours.keys() & theirs.keys():
                if len(ours[suffix]) * len(theirs[suffix]) > PAIRS:
                    continue
                for a, b in product(ours[suffix], theirs[suffix]):
                    if (a.parts, b.parts) in done or self._work <= 0:
                        continue
                    done.add((a.parts, b.parts))
                    self._work -= len(a.members)
                    if names := self.joined(a, b):
                        rule = RenameRule(a.parts[:-length], b.parts[:-length])
                        if rule not in self._votes:
                            self._claims[False, rule.old].append(rule)
                            self._claims[True, rule.new].append(rule)
                        self._votes[rule] += len(names) * length
        self._heads: dict[Parts, list[KeyPattern]] = defaultdict(list)
        known = {rule.old for rule in self._votes}
        for parts, family in self.ours.items():
            for n in range(len(parts)):
                if parts[:n] in known:
                    self._heads[parts[:n]].append(family)

    def _effect(self, rule: RenameRule) -> tuple[dict[str, str], int]:
        """Return the pairs of names that a rule makes, and the weight of these pairs."""
        names: dict[str, str] = {}
        weight = 0
        for family in self._heads[rule.old]:
            rest = family.parts[len(rule.old) :]
            other = self.theirs.get((*rule.new, *rest))
            if other is not None:
                self._work -= len(family.members)
                found = self.joined(family, other)
                names |= found
                weight += len(found) * len(rest)
        return names, weight

    # shape and order

    def by_order(self) -> None:
        """Pair families with equal shapes in the order of the two files.

        First, pair only families whose dtypes and last path components are equal. Then pair
        families whose dtypes are equal. Finally, also pair families with different dtypes.
        """
        self._parents = grouped(self.ours.values(), lambda family: family.parts[:-1])
        for leaves, dtypes in ((True, True), (False, True), (False, False)):
            ours = self._alike(self.ours, self.old, leaves, dtypes)
            theirs = self._alike(self.theirs, self.new, leaves, dtypes)
            common = [
                each for each in ours if each in theirs and len(ours[each]) == len(theirs[each])
            ]
            for each in sorted(common, key=lambda each: len(ours[each])):
                why, confidence = ("shape", 0.65) if len(ours[each]) == 1 else ("order", 0.5)
                for a, b in zip(ours[each], theirs[each], strict=True):
                    self._pair(a, b, confidence, why)

    def _alike(
        self,
        side: Mapping[Parts, KeyPattern],
        kinds: Mapping[str, Kind],
        leaves: bool,
        dtypes: bool,
    ) -> dict[Hashable, list[KeyPattern]]:
        """Group families by the ranks and shapes of their unpaired names.

        With `dtypes`, families in a group also have equal dtypes. With `leaves`, families in a
        group also have equal last path components.
        """
        found: dict[Hashable, list[KeyPattern]] = {}
        for parts, family in side.items():
            left = tuple(
                [
                    (rank, kinds[name] if dtypes else kinds[name].shape)
                    for rank, name in family.ranked.items()
                    if name in kinds
                ]
            )
            if left:
                found.setdefault((parts[-1], left) if leaves else left, []).append(family)
        return found

    def _pair(self, ours: KeyPattern, theirs: KeyPattern, confidence: float, why: str) -> None:
        """Pair two families, then pair the other keys of the same modules, such as biases."""
        names = self.joined(ours, theirs)
        # Many vectors and scalars have the same shape. If the families have only one pair, and the
        # pair consists of vectors or scalars, the names must also be similar.
        vague = len(names) == 1 and all(len(self.old[name].shape) < 2 for name in names)
        if not names or (vague and similarity(ours.parts, theirs.parts) < NEAR_VAGUE):
            return
        self.accept(names, confidence, why)
        rule = RenameRule(ours.parts[:-1], theirs.parts[:-1])
        if ours.parts[-1] != theirs.parts[-1] or not rule.old or not rule.new:
            return
        self.rules.append(rule)
        for sibling in self._parents[rule.old]:
            other = self.theirs.get((*rule.new, sibling.parts[-1]))
            if other is not None:
                self.accept(self.joined(sibling, other), confidence + 0.1, why)

    # edit distance

    def by_edit(self) -> None:
        """For each shape, pair the most similar names."""
        ours = grouped(self.old, lambda name: self.old[name].shape)
        theirs = grouped(self.new, lambda name: self.new[name].shape)
        for shape in sorted(
            ours.keys() & theirs.keys(), key=lambda each: len(ours[each]) * len(theirs[each])
        ):
            for near, a, b in self._nearest(ours[shape], theirs[shape], NEAR):
                self.accept({a: b}, round(0.6 * near, 2), "edit")

    def _nearest(
        self, ours: list[str], theirs: list[str], least: float
    ) -> Iterator[tuple[float, str, str]]:
        """Yield (similarity, our name, their name) for the most similar names first. Use each name
        once.

        If the number of comparisons exceeds the limit, yield nothing.
        """
        number = len(ours) * len(theirs)
        if number > min(BUCKET, self._comparisons):
            self.unsearched += len(ours)
            return
        self._comparisons -= number
        split = {name: name.split(".") for name in (*ours, *theirs)}
        found = []
        for i, a in enumerate(ours):
            for j, b in enumerate(theirs):
                near = similarity(split[a], split[b])
                found.append((-near, abs(i - j), near, a, b))
        found.sort(key=lambda each: each[:2])
        seen: set[tuple[str, str]] = set()
        for _, _, near, a, b in found:
            if near >= least and ("a", a) not in seen and ("b", b) not in seen:
                seen |= {("a", a), ("b", b)}
                yield near, a, b

    # other shapes

    def reshape(self) -> None:
        """Pair names with different shapes. First apply the known rename rules, then pair similar
        names."""
        ours, theirs = families(self.old), families(self.new)
        heads = grouped(dict.fromkeys(self.rules), lambda rule: rule.old)
        for family in ours.values():
            for rule in flatten(heads.get(family.parts[:n], ()) for n in range(len(family.parts))):
                other = theirs.get((*rule.new, *family.parts[len(rule.old) :]))
                if other is not None:
                    self._guess(max(family.renamings(other), key=len), 0.4, "suffix")
        self.unsearched = 0
        for near, a, b in list(self._nearest(list(self.old), list(self.new), NEAR_RESHAPED)):
            self._guess({a: b}, round(0.3 * near, 2), "edit")

    def _guess(self, names: Mapping[str, str], confidence: float, why: str) -> None:
        for a, b in names.items():
            if a in self.old and b in self.new and self.old[a].shape != self.new[b].shape:
                self.reshaped.append(
                    Renamed(a, b, self.old.pop(a), self.new.pop(b), confidence, why)
                )


def sure(rule: RenameRule, hits: int, alone: bool) -> float:
    """Return the confidence in a rule that renames `hits` keys. If no other rule competes with the
    rule, `alone` is true."""
    if not alone:
        return 0.7
    if not rule.old or not rule.new:  # the rule adds or removes a prefix
        return 0.99 if hits > 1 else 0.9
    if hits >= 4:
        return 0.95
    return 0.85 if hits > 1 else 0.6


Kinds = Mapping[str, Kind]
Shapes = Mapping[str, "Shape | None"]  # None for unknown shapes

SAMPLE = 500  # number of sampled names in the search for prefixes
PREFIXES = 16  # maximum number of prefixes to try on each side

# `why` of a pair if torch.nn.utils.parametrizations renamed the key.
CERTAIN = "torch"
_PARAMETRIZED = re.compile(r"(.*\.)?parametrizations\.([^.]+)\.(original[01]?|0\._[uv])", re.DOTALL)
_BEFORE = {
    "original0": "_g", "original1": "_v",  # weight_norm
    "original": "_orig", "0._u": "_u", "0._v": "_v",  # spectral_norm
}  # fmt: skip


class PrefixChange(NamedTuple):
    """Remove the prefix `strip` from names that start with `strip`, then add the prefix `add`."""

    strip: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.strip)


def pair(ours: Kinds, theirs: Kinds, way: PrefixChange) -> Matching:
    """Apply the prefix change `way` to `ours`, then pair the names that only one side has.

    The pairs in the result contain the names of `ours` without the prefix change.
    """
    back = {way(name): name for name in ours}
    rest = {name: ours[old] for name, old in back.items() if name not in theirs}
    lacking = without(theirs, back)
    fixed = certain(shapes_of(rest), shapes_of(lacking))
    found = match(without(rest, fixed), without(lacking, {*fixed.values()}))
    known = [Renamed(old, new, rest[old], lacking[new], 1.0, CERTAIN) for old, new in fixed.items()]
    renamed, reshaped = (
        [each._replace(old=back[each.old]) for each in group]
        for group in ((*known, *found.renamed), found.reshaped)
    )
    return _in_order(ours, renamed, reshaped, found.unsearched)


def pairs(ours: Kinds, theirs: Kinds, way: PrefixChange) -> Matching:
    """Pair names that only one side has. Also pair the names that `way` makes equal."""
    found = pair(ours, theirs, way)
    renamed, reshaped = [*found.renamed], [*found.reshaped]
    equal = {name: new for name in ours if (new := way(name)) != name and new in theirs}
    rule = RenameRule(*(tuple(each.split(".")[:-1]) for each in way))
    confidence = sure(rule, len(equal), True)
    for name, new in equal.items():
        a, b = ours[name], theirs[new]
        if a.shape == b.shape:
            renamed.append(Renamed(name, new, a, b, confidence, "suffix"))
        else:
            reshaped.append(Renamed(name, new, a, b, 0.4, "suffix"))
    return _in_order(ours, renamed, reshaped, found.unsearched)


def _in_order(
    ours: Kinds, renamed: list[Renamed], reshaped: list[Renamed], unsearched: int
) -> Matching:
    place = {name: number for number, name in enumerate(ours)}
    renamed.sort(key=lambda each: place[each.old])
    reshaped.sort(key=lambda each: place[each.old])
    return Matching(tuple(renamed), tuple(reshaped), unsearched)


def shapes_of(kinds: Kinds) -> dict[str, Shape]:
    """Return a dict from names to shapes."""
    return {name: kind.shape for name, kind in kinds.items()}


def is_taken_by_torch(pair: Renamed) -> bool:
    """Return True if torch's weight_norm loads the old name without a rename."""
    found = _PARAMETRIZED.fullmatch(pair.new)
    return pair.why == CERTAIN and found is not None and found[3] in ("original0", "original1")


def certain(ours: Shapes, theirs: Shapes) -> dict[str, str]:
    """Map names in `ours` to their counterparts in `theirs`, if torch itself renamed the tensors.

    Either side can have the older name.
    """
    found: dict[str, str] = {}
    for new, old, is_old in ((theirs, ours, True), (ours, theirs, False)):
        for name, shape in new.items():
            parts = _PARAMETRIZED.fullmatch(name)
            if parts is not None:
                other = f"{parts[1] or ''}{parts[2]}{_BEFORE[parts[3]]}"
                if other in old and fits(shape, old[other]):
                    found |= {other: name} if is_old else {name: other}
    return found


def fits(ours: Shape | None, theirs: Shape | None) -> bool:
    """Return True if torch can load a tensor of shape `ours` into a parameter of shape `theirs`.

    An unknown shape (None) fits any shape. Before torch 0.4, scalars had the shape (1,).
    """
    return ours is None or theirs is None or ours == theirs or (ours == (1,) and theirs == ())


def prefixes(ours: Shapes, theirs: Shapes, common: Iterable[str] = ()) -> PrefixChange:
    """Return the prefix change that turns the most names of the file into names of the model.

    The prefix change does not change names in `common` or names that both sides have. If the prefix
    change replaces a prefix, all names of the file start with this prefix. The prefix change never
    makes two names equal. If no prefix change is better than all others, both prefixes in the
    result are empty.
    """
    common = {*common, *(ours.keys() & theirs.keys())}
    rest = [name for name in ours if name not in common]
    sample = {name: ours[name] for name in rest[:: max(1, len(rest) // SAMPLE)]}
    lacking = [name for name in theirs if name not in common]
    ways = [PrefixChange(*each) for each in product(_leading(sample), _leading(lacking))]
    best, most, unique = PrefixChange(), 0, True
    images: list[str | None] = []
    for way in sorted(ways, key=lambda way: len(way.strip) + len(way.add)):
        made = [
            new if (new := way(name)) in theirs and fits(shape, theirs[new]) else None
            for name, shape in sample.items()
        ]
        hits = len(made) - made.count(None)
        worse = hits < max(most, 1) or (hits == most and made == images)
        if worse or not _is_harmless(way, ours, common):
            continue
        unique = hits > most
        if unique:
            best, most, images = way, hits, made
    return best if unique else PrefixChange()


def _is_harmless(way: PrefixChange, ours: Shapes, common: AbstractSet[str]) -> bool:
    """Return True if `way` changes no common name and does not make two names equal.

    If `way` replaces a prefix, all names of the file must start with this prefix.
    """
    if any(way(name) != name for name in common):
        return False
    if way.strip and way.add and not all(name.startswith(way.strip) for name in ours):
        return False
    images = {way(name) for name in ours}
    return len(images) == len(ours) and images.isdisjoint(common - ours.keys())


def _leading(names: Iterable[str]) -> list[str]:
    """Return "" and the most common prefixes of the names, such as ``model.encoder.``."""
    sample = list(names)
    counts: Counter[str] = Counter()
    for name in sample[:: max(1, len(sample) // SAMPLE)]:
        parts = name.split(".")[:PREFIXES]
        counts.update(".".join(parts[:n]) + "." for n in range(1, len(parts)))
    return ["", *(prefix for prefix, _ in counts.most_common(PREFIXES))]
