"""Find the modules of an adapter in a base by their names.

kohya replaces the dots in module names with underscores. The modules of U-Nets, Flux and the text
encoder of OpenCLIP have two names. One is the original name of sgm or Black Forest Labs. The other
is the name in diffusers and transformers. The original Flux and OpenCLIP fuse q, k and v in one
matrix. diffusers and transformers use three matrices. Each line of `spellings.txt` is a tensor
rule. The rule contains both names of a module, and the split of its rows.

Module names of a peft adapter and of its base may differ in the prefix, for three reasons. The base
was saved without its head, so `bert.` or `transformer.` is missing. The base is a part of another
model. The base is a vision-language model with different module names in memory and in files.
ckptkit rejects ambiguous renames.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ckptkit.core.errors import AmbiguousError, UnsupportedError
from ckptkit.core.tensor import Shape
from ckptkit.core.text import shown, some, typed
from ckptkit.lora.reading import table
from ckptkit.rules.names import Index, KnownSizes, Pattern, Settings, Steps, axis_words
from ckptkit.rules.notation import parse_rule

ORIGINAL, DIFFUSERS = "original", "diffusers"
UNET, FLUX, CLIP = "unet", "flux", "clip"
IMAGES = "unet", "transformer", "transformer_2", "prior"  # pipeline components for images
ENCODERS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5xxl": "text_encoder_3"}
EMBEDDINGS = (
    "embed_tokens", "wte", "word_embeddings", "shared", "embed_in", "tok_embeddings", "embeddings",
)  # fmt: skip
BESIDE_HEAD: Mapping[str, str] = table("heads")
HEADS = (*{head.rpartition(".")[2] for head in BESIDE_HEAD.values()}, "lm_head", "output")

# The original name of a module with rows for scale and shift. diffusers swaps scale and shift.
_SWAPPED = "final_layer.adaLN_modulation.1"
# The groups match the module of all experts, the index of an expert, and the name of a matrix.
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
# Maps each parameter that fuses all experts to the matrices of one expert. The parameter joins the
# rows of these matrices. Models use different names for these matrices, so each parameter has two
# alternatives.
_PARAMETERS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}

T = TypeVar("T")


@cache
def _files() -> tuple[tuple[re.Pattern[str], str, str], ...]:
    """Return (pattern, replacement, ``old -> new``) for each rename in the table ``files``."""
    found = []
    for old, new in ((old, new) for old, names in table("files").items() for new in names):
        pattern = re.escape(old).replace("N", "([0-9]+)")
        named = new.replace("N", r"\1", 1).replace("N", r"\2")
        found.append((re.compile(rf"(?<![^.]){pattern}(?![^.])"), named, f"{old} -> {new}"))
    return tuple(found)


class Part(NamedTuple):
    """The rows of a module that correspond to rows of a module in the other spelling.

    One module has its original name, and the other has its diffusers name. The first module is the
    one that was looked up. The second module is called `name`. The rows of the first are divided
    into `units` equal blocks. The rows of the second are divided into `whole` blocks of the same
    size. `length` blocks of the first, from block `start` on, correspond to `length` blocks of the
    second, from block `at` on.
    """

    name: str
    start: int = 0
    length: int = 1
    units: int = 1
    at: int = 0
    whole: int = 1


class Placed(NamedTuple):
    """A tensor in the base that a weight update changes.

    Rows `start` to `stop` of the update are added to the rows of the tensor from row `at` on. The
    tensor must have `rows` rows.
    """

    tensor: str
    start: int
    stop: int
    at: int
    rows: int


class Rename(NamedTuple):
    """A prefix in names of the adapter (``old``), and the prefix in the base (``new``)."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.old or '(no prefix)'} -> {self.new or '(no prefix)'}"


_EXACT = Rename("", "")


class _Row:
    """A line of spellings.txt with the original names and the diffusers names of modules."""

    def __init__(self, family: str, line: str) -> None:
        rule = parse_rule(line)
        words = axis_words(rule)
        self.family = family
        self.sides = {
            ORIGINAL: Pattern(rule.left.name, words.left_kinds, {}),
            DIFFUSERS: Pattern(rule.right.name, words.right_kinds, {}),
        }
        self.parts = (words.labels("p") or 1) if "p" in words.scattered else 1
        given = KnownSizes(rule, Settings()).sizes.get("h", (1,) * self.parts)
        self.ends = tuple(accumulate((n or 1 for n in given), initial=0))

    def other(self, path: str, spelling: str) -> tuple[Part, ...] | None:
        """Return the modules of the other spelling that correspond to the module `path`.

        `spelling` is the spelling of `path`. Return None if the line does not match `path`.
        """
        values = self.sides[spelling].match(path, Steps(1))
        if values is None:
            return None
        plain: dict[str, Any] = {words[0]: value for words, value in values.items()}
        is_original, whole, found = spelling == ORIGINAL, self.ends[-1], []
        target = self.sides[DIFFUSERS if is_original else ORIGINAL]
        for number in range(self.parts) if is_original else (plain.get("p", 0),):
            name = target.render({**plain, "p": number}, {})
            assert name is not None
            start, stop = self.ends[number : number + 2]
            own, all_rows = (0, stop - start, stop - start), (start, stop - start, whole)
            one, other = (all_rows, own) if is_original else (own, all_rows)
            found.append(Part(name, *one, other[0], other[2]))
        if _SWAPPED in (path, found[0].name):
            name = found[0].name
            return Part(name, 0, 1, 2, 1, 2), Part(name, 1, 1, 2, 0, 2)
        return tuple(found)


@cache
def _tables() -> tuple[tuple[_Row, ...], frozenset[str]]:
    """Return the rules of spellings.txt, and all components of names that these rules contain."""
    text = Path(__file__).with_name("spellings.txt").read_text("utf-8")
    rows, words, family = list[_Row](), set[str](), ""
    for line in text.splitlines():
        if line in (UNET, FLUX, CLIP, "words"):
            family = line
        elif family == "words":
            words.update(line.split())
        elif not line.startswith("#"):
            rows.append(_Row(family, line))
    sides = [side for row in rows for side in row.sides.values()]
    words.update(word for side in sides for text in _texts(side) for word in text.split("."))
    return tuple(rows), frozenset(word for word in words if word and not word.isdigit())


def _texts(side: Pattern) -> list[str]:
    """Return the names that a pattern matches. In these names, each layer index is 0."""
    found = [""]
    for part in side.parts:
        labels = (part.labels or ("0",)) if isinstance(part, Index) else (part,)
        found = [text + label for text in found for label in labels]
    return found


@cache
def spelled(path: str) -> tuple[str, str, tuple[tuple[Part, ...], ...]] | None:
    """Return the model family and spelling of a module, and the modules in the other spelling.

    If a layer index depends on the model, the result contains two alternatives for the modules.
    Return None for a name that spellings.txt does not contain.
    """
    for spelling in (ORIGINAL, DIFFUSERS):
        found = [
            (row.family, parts) for row in _tables()[0] if (parts := row.other(path, spelling))
        ]
        if found:
            ways = found[:2] if spelling == DIFFUSERS and found[0][0] == UNET else found[:1]
            return found[0][0], spelling, tuple(parts for _, parts in ways)
    return None


# Conversion between dots and underscores in names


def flat(name: str) -> str:
    """Replace the dots in a name with underscores, like kohya."""
    return name.replace(".", "_")


def dotted(name: str) -> str:
    """Restore the dots in a module name that kohya wrote with underscores.

    The name is split into known components. The split with the fewest components is returned.
    Raises UnsupportedError for an unknown component. Raises AmbiguousError if two splits have the
    same number of components.
    """
    pieces = name.split("_")
    best: list[list[tuple[str, ...]]] = [[()]]  # best[n] contains the shortest splits of n pieces
    for end in range(1, len(pieces) + 1):
        ways: list[tuple[str, ...]] = []
        for start in range(max(0, end - 6), end):
            word = "_".join(pieces[start:end])
            if word in _tables()[1] or (word.isdigit() and end == start + 1):
                ways += [(*way, word) for way in best[start]]
        least = min(map(len, ways), default=0)
        best.append([way for way in ways if len(way) == least][:4])
    found = [".".join(way) for way in best[-1]]
    base = f"{typed('--base BASE', 'base=...')} takes the dots from the names of the base"
    if not found:
        raise UnsupportedError(
            f"ckptkit does not know which underscores of {shown(name)} were dots", hint=base
        )
    if len(found) > 1:
        raise AmbiguousError(f"{shown(name)} could be {some(found, 2)}", hint=base)
    return found[0]


def of_comfy(component: str, path: str) -> tuple[str, str]:
    """Return the component and the name of a module.

    In ComfyUI, module names of text encoders begin with a name such as ``clip_l``.
    """
    if component != "text_encoders":
        return component, path
    encoder, _, path = path.partition(".")
    return ENCODERS.get(encoder, encoder), path.removeprefix("transformer.")


# Names of a base


def _experts(names: Iterable[str]) -> dict[str, list[tuple[str, ...]]]:
    """Map the name of each parameter that fuses all experts to a list.

    Item i contains the names of the matrices of expert i.
    """
    found: dict[str, dict[str, dict[int, str]]] = {}
    for name in names:
        if one := _EXPERT.fullmatch(name):
            found.setdefault(one[1], {}).setdefault(one[3], {})[int(one[2])] = name
    made = {}
    for stem, matrices in found.items():
        plain = stem.replace(".block_sparse_moe.", ".mlp.")
        for parameter, ways in _PARAMETERS.items():
            for way in ways:
                if all(part in matrices for part in way):
                    rows = [[matrices[part].get(n, "") for part in way] for n in matrices[way[0]]]
                    made[f"{plain}.{parameter}"] = [*map(tuple, rows)]
    return made


def is_fused(name: str, shape: Shape) -> bool:
    """Return whether a tensor is a parameter with the matrices of all experts."""
    return len(shape) == 3 and not name.endswith("weight")


class BaseNames:
    """The names of a base, for finding the modules of an adapter.

    `components` lists the components of the adapter. If the adapter has only one text encoder, the
    modules of this encoder in the base may lack a prefix. ``modules`` maps each module and
    parameter to its tensor. ``experts`` maps each fused parameter of all experts to the matrices of
    each expert.
    """

    def __init__(self, shapes: Mapping[str, Shape], components: Collection[str] = ()) -> None:
        self.shapes = shapes
        encoders = (each for each in components if each.startswith("text_encoder"))
        # ComfyUI stores all text encoders in one component.
        self._encoders = sum(2 if each == "text_encoders" else 1 for each in encoders)
        self.modules: dict[str, str] = {}
        self._flat: dict[str, list[str]] = {}
        for name in shapes:
            for end in (".weight", ".in_proj_weight"):
                if name.endswith(end):
                    self.modules.setdefault(name.removesuffix(end), name)
            self._flat.setdefault(flat(name.removesuffix(".weight")), []).append(name)
        self.modules |= {name: name for name in shapes if name not in self.modules}
        self.experts = _experts(shapes)
        self._ends = {_end(name) for name, shape in shapes.items() if is_fused(name, shape)}
        self._by_end: dict[str, list[str]] = {}
        for path in (*self.modules, *self.experts):
            self._by_end.setdefault(_end(path), []).append(path)

    def like(self, path: str) -> list[str]:
        """Return up to 4 modules or tensors of the base whose names end like `path`."""
        return self._by_end.get(_end(path), [])[:4]

    def find(
        self, component: str | None, path: str, shape: Shape, *, underscores: bool = False
    ) -> tuple[Placed, ...]:
        """Return the tensors that a module changes. Return () if the base lacks the module.

        `path` is the name of the module. `shape` is the shape of the update. If `underscores` is
        True, `path` has underscores instead of dots, like in kohya. For a peft adapter, `component`
        is None. Raises AmbiguousError if several tensors are possible.
        """
        if component is None and path in self.modules:
            return (Placed(self.modules[path], 0, shape[0], 0, shape[0]),)
        for fused, at, count in self._fused(path) if component is None else ():
            total = count * (*self.shapes.get(fused, ()), 0)[0]
            if at < total and is_fused(fused, self.shapes[fused]):
                return (Placed(fused, 0, shape[0], at * shape[0], total * shape[0]),)
        component, path = (None, path) if component is None else of_comfy(component, path)
        if underscores:
            known_there = self.dots(component or "", path, shape)
            try:
                path = known_there or dotted(path)
            except (UnsupportedError, AmbiguousError):
                return ()
        known = spelled(path)
        if component is None and known is None:
            return ()
        found: dict[tuple[str | None, ...], tuple[Part, ...]] = {}
        for prefix in self._prefixes(component or ""):
            for parts in ((Part(path),), *(known[2] if known else ())):
                names = tuple(self.modules.get(prefix + part.name) for part in parts)
                if None not in names:
                    found.setdefault(names, parts)
        chosen = _one(path, {
            names: all(
                prod(self.shapes[name or ""]) * part.units == prod(shape) * part.whole
                for name, part in zip(names, parts, strict=True)
            )
            for names, parts in found.items()
        })  # fmt: skip
        placed = []
        for name, part in zip(chosen or (), found.get(chosen or (), ()), strict=True):
            ends = part.start, part.start + part.length, part.at, part.whole
            placed.append(Placed(str(name), *(shape[0] * each // part.units for each in ends)))
        return tuple(placed)

    def _fused(self, path: str) -> Iterator[tuple[str, int, int]]:
        """Yield the parameters that may contain the matrix `path` of one expert.

        Each item is (parameter, index of the matrix, number of matrices for each expert).
        """
        if one := _EXPERT.fullmatch(f"{path}.weight"):
            stem, number, own = one[1].replace(".block_sparse_moe.", ".mlp."), int(one[2]), one[3]
            for parameter, ways in ((own, ((own,),)), *_PARAMETERS.items()):
                for way in ways:
                    if own in way:
                        at = number * len(way) + way.index(own)
                        yield f"{stem}.{parameter}", at, len(way)

    def dots(self, component: str, path: str, shape: Shape) -> str | None:
        """Return the name in the base for a kohya name. Return None if the base lacks the module.

        Raises AmbiguousError if several modules of the base match.
        """
        found = {
            name.removeprefix(prefix).removesuffix(".weight"): prod(self.shapes[name])
            == prod(shape)
            for prefix in self._prefixes(component)
            for name in self._flat.get(flat(prefix) + path, ())
            if name.startswith(prefix)
        }
        return _one(path, found)

    def _prefixes(self, component: str) -> tuple[str, ...]:
        images = component in ("", *IMAGES)
        known = table("bases").get("image" if images else component, ())
        alone = not component.startswith("text_encoder") or self._encoders < 2
        return (*known, f"{component}." if component else "", *(("",) if alone else ()))

    def renames(
        self, paths: Iterable[str]
    ) -> tuple[dict[str, str], list[Rename], list[str], list[str]]:
        """Find the peft modules and complete tensors `paths` in the base.

        Return the names in the base, the renames of prefixes, the modules that the base lacks, and
        the ambiguous modules. A module is ambiguous if several modules of the base match it, or if
        another one of `paths` would get the same name.

        If the base has a module (except a head) under its name in the adapter, the first component
        of this name is correct. ckptkit then does not rename prefixes with this first component.
        """
        ways = {path: self._ways(path) for path in dict.fromkeys(paths)}
        exact = [path for path, own in ways.items() if _EXACT in own and end_of(path) not in HEADS]
        tops = {path.partition(".")[0] for path in exact}

        def is_possible(way: Rename) -> bool:
            top, dot, _ = way.old.partition(".")
            return way == _EXACT or not (top in tops if dot else exact)

        ways = {path: [*filter(is_possible, own)] for path, own in ways.items()}
        sure: dict[str, set[str]] = {}
        for own in ways.values():
            if len(own) == 1:
                sure.setdefault(own[0].old, set()).add(own[0].new)
        made: dict[str, Rename] = {}
        for path, own in ways.items():
            known = [each for each in own if _EXACT in own or sure.get(each.old) == {each.new}]
            if len(known) == 1:
                made[path] = known[0]
        names = {path: each.new + path.removeprefix(each.old) for path, each in made.items()}
        counts = Counter(names.values())
        names = {path: name for path, name in names.items() if counts[name] == 1}
        missing = [path for path, own in ways.items() if not own]
        unclear = [path for path, own in ways.items() if own and path not in names]
        return names, sorted({*made.values()} - {_EXACT}), missing, unclear

    def in_files(self, path: str) -> tuple[str, tuple[str, ...]]:
        """Convert the name of a module in memory to its name in files.

        Also return each rename as a string.

        Return `path` unchanged if the base has a match for it, or if none or several of its names
        in files have a match. An exact match takes precedence.
        """
        made: dict[str, tuple[str, ...]] = {path: ()}
        for pattern, new, rename in _files() if not self._ways(path) else ():
            for name, done in [*made.items()]:
                if pattern.search(name):
                    made.setdefault(pattern.sub(new, name), (*done, rename))
        ways = {name: found for name in made if len(made) > 1 and (found := self._ways(name))}
        exact = [name for name, found in ways.items() if _EXACT in found]
        known = exact or [*ways]
        name = known[0] if len(known) == 1 else path
        return name, made[name]

    def _ways(self, path: str) -> list[Rename]:
        """Return the best renames of the prefix of a module.

        If the base has the module, return an empty rename. Otherwise compare the module with all
        modules of the base. The best matches have the longest common suffix. Among these
        matches, the best have the most components in common before the suffix. A rename never
        changes a layer index. One of the two prefixes contains all components of the other,
        because a vision tower must not match the language model.
        """
        if path in self.experts or self.find(None, path, (1, 1)):
            return [_EXACT]
        path = next((name for name, *_ in self._fused(path) if _end(name) in self._ends), path)
        parts, best, found = path.split("."), (0, -1), list[Rename]()
        for other in self._by_end.get(_end(path), ()):
            theirs = other.split(".")
            pairs = zip(reversed(parts), reversed(theirs), strict=False)
            same = next((n for n, (one, two) in enumerate(pairs) if one != two), None)
            same = min(len(parts), len(theirs)) if same is None else same
            old, new = parts[: len(parts) - same], theirs[: len(theirs) - same]
            shared = len({*old} & {*new})
            if any(map(str.isdigit, (*old, *new))) or shared < min(len({*old}), len({*new})):
                continue
            if (same, shared) > best:
                best, found = (same, shared), []
            if (same, shared) == best:
                found.append(Rename(*(".".join([*each, ""]) for each in (old, new))))
        return found


def _end(path: str) -> str:
    """Return the last component of a name. For a weight or bias, return the last two components."""
    return ".".join(path.split(".")[-2 if path.endswith((".weight", ".bias")) else -1 :])


def end_of(name: str) -> str:
    """Return the last component of the name of a module, or of the module of a weight."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _one(path: str, fits: Mapping[T, bool]) -> T | None:
    """Return the only candidate, or the only candidate whose value in `fits` is True.

    Return None without candidates. Raises AmbiguousError if several values are True.
    """
    fitting = [each for each, fit in fits.items() if fit] if len(fits) > 1 else []
    if len(fitting) > 1:
        names = [str(each[0] if isinstance(each, tuple) else each) for each in fitting]
        hint = f"choose the name with {typed('lora merge --sub REGEX=REPL', 'sub=...')}"
        raise AmbiguousError(f"{shown(path)} could be {some(names, 4)}", hint=hint)
    return next(iter(fitting or fits), None)
