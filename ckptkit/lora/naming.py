"""Names of modules in adapters of image models: underscores that were dots, and two spellings.

kohya writes a module's name with underscores. U-Nets, Flux and the text encoder of OpenCLIP have
two spellings each: the original (sgm, Black Forest Labs), and that of diffusers and transformers.
Flux and OpenCLIP have q, k and v in one matrix where the others have three. `spellings.txt` has the
tables: a row is a tensor rule, with the name of a module in both, and how its rows are cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

from ckptkit.core.errors import AmbiguousError, UnsupportedError
from ckptkit.core.tensor import Shape
from ckptkit.core.text import shown, some, typed
from ckptkit.rules.names import Index, Pattern, Settings, Steps, axis_words, evaluate
from ckptkit.rules.notation import parse_rule

ORIGINAL, DIFFUSERS = "original", "diffusers"
UNET, FLUX, CLIP = "unet", "flux", "clip"

# Its rows are two halves, scale and shift, in another order.
_SWAPPED = "final_layer.adaLN_modulation.1"
_PREFIXES = {  # of the names of a component in a checkpoint, alone or with others
    "text_encoder": (
        "conditioner.embedders.0.transformer.", "cond_stage_model.transformer.",
        "cond_stage_model.model.", "text_encoders.clip_l.transformer.", "text_encoder.",
    ),
    "text_encoder_2": (
        "conditioner.embedders.1.model.", "text_encoders.clip_g.transformer.",
        "text_encoders.t5xxl.transformer.", "text_encoder_2.",
    ),
    "text_encoder_3": ("text_encoders.t5xxl.transformer.", "text_encoder_3."),
}  # fmt: skip
ENCODERS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5xxl": "text_encoder_3"}
_IMAGES = "", "unet", "transformer", "transformer_2", "prior"  # components that make images
_MODELS = "model.diffusion_model.", "diffusion_model.", "unet.", "transformer.", "model."


T = TypeVar("T")


class Part(NamedTuple):
    """Rows of a module that are rows of the module `name` of the other spelling.

    The rows of the module are `units` equal shares: `length` of them, from `start` on, are those
    from `at` on of the other, which has `whole` shares.
    """

    name: str
    start: int = 0
    length: int = 1
    units: int = 1
    at: int = 0
    whole: int = 1


class Placed(NamedTuple):
    """Where a module's change belongs: its rows `start` to `stop` are added to a tensor's `at`."""

    tensor: str
    start: int
    stop: int
    at: int


class _Row:
    """A row of the tables, ready to be matched from both sides."""

    def __init__(self, family: str, line: str) -> None:
        rule = parse_rule(line)
        words = axis_words(rule)
        self.family = family
        self.sides = {
            ORIGINAL: Pattern(rule.left.name, words.left_kinds, {}),
            DIFFUSERS: Pattern(rule.right.name, words.right_kinds, {}),
        }
        self.parts = (words.labels("p") or 1) if "p" in words.scattered else 1
        given = evaluate(rule, Settings()).sizes.get("h", (1,) * self.parts)
        self.ends = tuple(accumulate((n or 1 for n in given), initial=0))

    def other(self, path: str, spelling: str) -> tuple[Part, ...] | None:
        """Return the parts of `path`, which has this spelling, in the other one."""
        values = self.sides[spelling].match(path, Steps(1))
        if values is None:
            return None
        plain = {words[0]: value for words, value in values.items()}
        target = self.sides[DIFFUSERS if spelling == ORIGINAL else ORIGINAL]
        found = []
        whole, ends = self.ends[-1], self.ends
        for number in range(self.parts) if spelling == ORIGINAL else (plain.get("p", 0),):
            assert isinstance(number, int)
            name = target.render({**plain, "p": number}, {})
            assert name is not None
            start, length = ends[number], ends[number + 1] - ends[number]
            if spelling == ORIGINAL:
                found.append(Part(name, start, length, whole, 0, length))
            else:
                found.append(Part(name, 0, length, length, start, whole))
        if _SWAPPED in (path, found[0].name):
            name = found[0].name
            return Part(name, 0, 1, 2, 1, 2), Part(name, 1, 1, 2, 0, 2)
        return tuple(found)


@cache
def _tables() -> tuple[tuple[_Row, ...], frozenset[str]]:
    """Return the rows of spellings.txt, and the words in which names with underscores are split."""
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
    """Return the names that a side stands for, with 0 for each number."""
    found = [""]
    for part in side.parts:
        labels = (part.labels or ("0",)) if isinstance(part, Index) else (part,)
        found = [text + label for text in found for label in labels]
    return found


@cache
def spelled(path: str) -> tuple[str, str, tuple[tuple[Part, ...], ...]] | None:
    """Return the family and the spelling of a module's name, and what it is in the other spelling.

    That is one choice of parts, or two where the number of a layer depends on the model. None for a
    name that is not in the tables.
    """
    for spelling in (ORIGINAL, DIFFUSERS):
        found = [
            (row.family, parts) for row in _tables()[0] if (parts := row.other(path, spelling))
        ]
        if found:
            ways = found[:2] if spelling == DIFFUSERS and found[0][0] == UNET else found[:1]
            return found[0][0], spelling, tuple(parts for _, parts in ways)
    return None


# Underscores that were dots


def flat(name: str) -> str:
    """Return a name as kohya writes it."""
    return name.replace(".", "_")


def dotted(name: str) -> str:
    """Return the dotted name of a module that is written with underscores.

    It is split into known components, as few as possible. Raises UnsupportedError for an unknown
    component, AmbiguousError where two ways need as few.
    """
    pieces = name.split("_")
    best: list[list[tuple[str, ...]]] = [[()]]  # the shortest ways to write the first N pieces
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
            f"which underscores of {shown(name)} were dots is unknown", hint=base
        )
    if len(found) > 1:
        raise AmbiguousError(f"{shown(name)} may be {some(found, 2)}", hint=base)
    return found[0]


def of_comfy(component: str, path: str) -> tuple[str, str]:
    """Return a module's component and name; ComfyUI has those of text encoders in the name."""
    if component != "text_encoders":
        return component, path
    encoder, _, path = path.partition(".")
    return ENCODERS.get(encoder, encoder), path.removeprefix("transformer.")


# Names of a base


class BaseNames:
    """The names and shapes of a checkpoint, in which modules of adapters are looked up.

    `components` are those of the adapter: names of a text encoder without a prefix are meant only
    if the adapter has a single one.
    """

    def __init__(self, shapes: Mapping[str, Shape], components: Collection[str] = ()) -> None:
        self.shapes = shapes
        # ComfyUI has all of them in one component.
        counts = {"text_encoders": 2}
        known = (each for each in components if each.startswith("text_encoder"))
        self._encoders = sum(counts.get(each, 1) for each in known)
        self._flat: dict[str, list[str]] = {}
        for name in shapes:
            self._flat.setdefault(flat(name.removesuffix(".weight")), []).append(name)

    def find(
        self, component: str, path: str, shape: Shape, *, underscores: bool = False
    ) -> tuple[Placed, ...]:
        """Return where the change of a module belongs, () if the base does not have the module.

        `shape` is that of the change, `path` the module's name, with `underscores` as kohya writes
        it. Raises AmbiguousError where several tensors could be meant.
        """
        component, path = of_comfy(component, path)
        if underscores:
            known_there = self.dots(component, path, shape)
            try:
                path = known_there or dotted(path)
            except (UnsupportedError, AmbiguousError):
                return ()
        known = spelled(path)
        found: dict[tuple[str | None, ...], tuple[Part, ...]] = {}
        for prefix in self._prefixes(component):
            for parts in ((Part(path),), *(known[2] if known else ())):
                names = tuple(self._tensor(prefix + part.name) for part in parts)
                if None not in names:
                    found.setdefault(names, parts)
        chosen = _one(path, {
            names: all(self._fits(n, part, shape) for n, part in zip(names, parts, strict=True))
            for names, parts in found.items()
        })  # fmt: skip
        return tuple(
            Placed(
                str(name),
                part.start * shape[0] // part.units,
                (part.start + part.length) * shape[0] // part.units,
                part.at * shape[0] // part.units,
            )
            for name, part in zip(chosen or (), found.get(chosen or (), ()), strict=True)
        )

    def dots(self, component: str, path: str, shape: Shape) -> str | None:
        """Return a name of kohya's with the dots that the base has, None if it has no such module.

        Raises AmbiguousError where the base has several.
        """
        found = {
            name.removeprefix(prefix).removesuffix(".weight"): prod(each) == prod(shape)
            for prefix in self._prefixes(component)
            for name in self._flat.get(flat(prefix) + path, ())
            if name.startswith(prefix) and (each := self.shapes[name]) is not None
        }
        return _one(path, found)

    def _prefixes(self, component: str) -> tuple[str, ...]:
        known = _PREFIXES.get(component, _MODELS if component in _IMAGES else ())
        alone = not component.startswith("text_encoder") or self._encoders < 2
        return (*known, f"{component}." if component else "", *(("",) if alone else ()))

    def _tensor(self, module: str) -> str | None:
        names = (f"{module}.weight", module)
        return next((name for name in names if name in self.shapes), None)

    def _fits(self, name: str | None, part: Part, shape: Shape) -> bool:
        return prod(self.shapes[name or ""]) * part.units == prod(shape) * part.whole


def _one(path: str, fits: Mapping[T, bool]) -> T | None:
    """Return the only candidate, or the only one that fits; None if there is none.

    Raises AmbiguousError for two that fit.
    """
    fitting = [each for each, fit in fits.items() if fit] if len(fits) > 1 else []
    if len(fitting) > 1:
        names = [each if isinstance(each, str) else str(each[0]) for each in fitting]  # type: ignore
        raise AmbiguousError(
            f"{shown(path)} may be {some(names, 4)}",
            hint=f"{typed('lora merge --sub REGEX=REPL', 'sub=...')} gives the name that is meant",
        )
    return next(iter(fitting or fits), None)
