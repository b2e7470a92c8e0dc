"""The allowlist, read from ``allowlist.txt``: which names a pickle may call or hold, and how.

A row says which arguments a call takes, what sort it gives, and which state and items may follow.
The file's sections say what each kind of row means. Its parser is strict: anything that it does not
know is a ValueError, so that no row is dropped by a typing error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ckptkit.core.dtypes import TABLE
from ckptkit.core.text import flatten
from ckptkit.pickles.shapes import LISTED, OTHER, SORTS, Compiler, Shape, Tuple, by_sorts

Name = tuple[str, str]


class Row(NamedTuple):
    """A callable: the arguments that it takes (one of these tuples), and the sort that it gives."""

    takes: tuple[Tuple, ...]
    gives: int
    new: bool  # whether it may be made through ``__new__``
    called: bool  # whether it may be called
    state: str | None  # the name of the shape that BUILD may set, None for no state at all
    fill: tuple[str, ...]  # other steps that may follow: append, set, add
    by_sorts: bool  # whether the sorts of the arguments decide all
    consumed: tuple[int, ...]  # positions of names that it takes
    of_class: bool  # whether it makes an object of the class that is its first argument


_TENSORS = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
_STORAGES = [row.storage for row in TABLE if row.storage]
_NOT_ON_CUDA = ("QInt8Storage", "QInt32Storage", "QUInt8Storage", "QUInt4x2Storage",
                "QUInt2x4Storage")  # fmt: skip
_DTYPES = [row.name for row in TABLE]
_QSCHEMES = ("affine", "affine_float_qparams", "symmetric")
_PLACEHOLDERS: dict[str, list[str]] = {
    "@storages": _STORAGES,
    "@cuda_storages": [each for each in _STORAGES if each not in _NOT_ON_CUDA],
    "@tensors": [f"{kind}Tensor" for kind in _TENSORS],
    "@sparse": [f"{kind}Tensor" for kind in _TENSORS if kind != "Bool"],
    "@dtypes": _DTYPES,
    "@weights_only_dtypes": [name for name in _DTYPES if not name.startswith("float6_")],
    "@qschemes": [f"per_channel_{each}" for each in _QSCHEMES]
    + ["per_tensor_affine", "per_tensor_symmetric"],
}
# Where torch had its quantized modules before 1.13.
_OLDER = (("torch.ao.nn.", "torch.nn."), ("torch.ao.quantization", "torch.quantization"))
_ROW = re.compile(
    r"(?P<names>(?:[^({\s]|\{[^}]*\})+) (?P<takes>\(.*?\))"
    r"(?: -> (?P<gives>\w+))?(?P<new> new)?(?: build (?P<state>.+?))?(?: fill (?P<fill>[a-z ]+))?"
)
_CLASS = re.compile(
    r"(?P<module>[\w.]+)(?: new (?P<takes>\(.*\)))?(?: \[(?P<state>\w+)\])?"
    r"(?: -> (?P<gives>\w+))?(?: fill (?P<fill>[a-z ]+))?: (?P<names>.+)"
)


def _sections(text: str) -> dict[str, list[str]]:
    """Return the lines of each section, those that are indented joined to the one above."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("["):
            lines = found[line[1:-1]] = []
        elif line.startswith("    "):
            lines[-1] += f" {line.strip()}"
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


def _expanded(text: str) -> list[str]:
    """Return the names that a text with braces stands for: ``a.{b c}`` is a.b and a.c."""
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [each.split() if number % 2 else [each] for number, each in enumerate(parts)]
    choices = [list(flatten(_PLACEHOLDERS.get(word, [word]) for word in each)) for each in choices]
    return ["".join(each) for each in product(*choices)]


def _split(name: str) -> Name:
    """Return module and name; an inner class has the module of its outer one."""
    module, _, last = name.rpartition(".")
    return (module, last) if name != "zoneinfo.ZoneInfo._unpickle" else ("zoneinfo", name[9:])


def _listed(lines: list[str], classes: dict[str, list[str]] | None = None) -> Iterator[Name]:
    """Yield the names of lines such as ``module: name name``."""
    for line in lines:
        modules, _, names = line.partition(": ")
        found = flatten(
            (classes or {})[modules] if word == "@" else _PLACEHOLDERS.get(word, [word])
            for word in names.split()
        )
        yield from _also_older(product(_expanded(modules), list(found)))


def _also_older(names: Iterator[Name] | product[Name]) -> Iterator[Name]:
    for module, name in names:
        yield module, name
        for new, old in _OLDER:
            if module.startswith(new):
                yield module.replace(new, old, 1), name


class Allowlist:
    """The tables of the file."""

    def __init__(self, sections: dict[str, list[str]], tests: dict[str, Shape]) -> None:
        self.sets = {
            name: frozenset(map(_split, names.split()))
            for name, _, names in (line.partition(": ") for line in sections["sets"])
        }
        self.shapes = dict(tests)
        self._compiler = Compiler(self.shapes, self.sets)
        for line in sections["shapes"]:
            name, equals, shape = line.partition(" = ")
            if not equals or name in self.shapes or name in SORTS:
                raise ValueError(f"not a new shape: {line!r}")
            self.shapes[name] = self._compiler.compile(shape)
        self.rows: dict[Name, Row] = {}
        classes: dict[str, list[str]] = {}
        for line in sections["calls"]:
            self._add_call(line)
        for line in sections["classes"]:
            self._add_class(line, classes)
        self.enums = frozenset(_listed(sections["enums"]))
        self.constants = frozenset(_listed(sections["constants"]))
        self.functions = frozenset(_listed(sections["functions"], classes))
        self.tensor_attributes = {name for _, name in _listed(sections["tensor_attributes"])}

    def _add_call(self, line: str) -> None:
        found = _ROW.fullmatch(line)
        if found is None:
            raise ValueError(f"not a row: {line!r}")
        takes = self._compiler.signatures(found["takes"])
        state = self._state(found["state"])
        self._add(map(_split, _expanded(found["names"])), found, takes, state, called=True)

    def _add_class(self, line: str, classes: dict[str, list[str]]) -> None:
        found = _CLASS.fullmatch(line)
        if found is None:
            raise ValueError(f"not a class: {line!r}")
        module, names = found["module"], found["names"].split()
        classes.setdefault(module, []).extend(names)
        is_module = module.startswith(("torch.nn.", "torch.ao."))
        state = self._state(found["state"] or ("module" if is_module else "fields"))
        takes = self._compiler.signatures(found["takes"] or "()")
        named = _also_older(product([module], names))
        self._add(named, found, takes, state, called=False)

    def _state(self, text: str | None) -> str | None:
        """Return the name of a shape; one that is spelled out in a row gets a name."""
        if text is not None and text not in self.shapes:
            self.shapes[text] = self._compiler.compile(text)
        return text

    def _add(
        self,
        names: Iterator[Name] | map[Name],
        found: re.Match[str],
        takes: list[Tuple],
        state: str | None,
        called: bool,
    ) -> None:
        gives = OTHER if called else LISTED
        if found["gives"]:
            gives = SORTS[found["gives"]]
        fill = tuple((found["fill"] or "").split())
        spelled = (found["takes"] or "()").strip("()").split()
        consumed = tuple(
            n for n, word in enumerate(spelled) if "%" in word or word == "tensor_class"
        )
        new = not called or bool(found["new"])
        is_by_sorts = all(map(by_sorts, takes))
        for name in names:
            if name in self.rows and called:
                raise ValueError(f"two rows for {name}")
            self.rows[name] = Row(
                tuple(takes), gives, new, called, state, fill, is_by_sorts, consumed,
                spelled[:1] == ["tensor_class"],
            )  # fmt: skip


@cache
def _text() -> dict[str, list[str]]:
    return _sections(Path(__file__).with_name("allowlist.txt").read_text("utf-8"))


def load(tests: dict[str, Shape]) -> Allowlist:
    """Return the allowlist; `tests` are the shapes that are functions, by name."""
    return Allowlist(_text(), tests)


@cache
def weights_only() -> frozenset[Name]:
    """Return the names that `torch.load(weights_only=True)` accepts, without the other tables."""
    return frozenset(_listed(_text()["weights_only"]))
