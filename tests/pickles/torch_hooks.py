"""The Python code of torch that loading a pickle runs without naming it, read from torch's source.

    python -m tests.pickles.torch_hooks [FOLDER] > tests/pickles/torch_hooks-VERSION.txt

FOLDER holds a package `torch` (default: the installed one); nothing of it is imported. A hook is a
method that runs when an object is made, gets its state, is filled, tested, compared, hashed or
destroyed. The table has each hook that a listed class has, and the expressions in which its code
asks something of its arguments or of the object's attributes; then each class and its hooks.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ckptkit.pickles.judge import allowlist

HOOKS = (
    "__new__", "__setstate__", "__setattr__", "__getattr__", "__getattribute__", "__del__", "__hash__", "__eq__",
    "__len__", "__bool__", "__iter__", "__contains__", "__getitem__", "__setitem__", "__call__", "__reduce__",
    "__reduce_ex__", "append", "extend", "add", "update",
)  # fmt: skip


CLASSES = sorted(name for name, row in allowlist().rows.items() if not row.called)


class Class(NamedTuple):
    """A class of the source, by its module and its name there."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Source:
    """The modules of a folder, parsed when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = cache(self._tree)
        self.names = cache(self._names)

    def _path(self, module: str) -> Path | None:
        stem = self.folder.joinpath(*module.split("."))
        paths = (stem.with_suffix(".py"), stem / "__init__.py")
        return next(filter(Path.exists, paths), None)

    def _tree(self, module: str) -> ast.Module | None:
        path = self._path(module)
        return None if path is None else ast.parse(path.read_text())

    def _names(self, module: str) -> dict[str, ast.ClassDef | str]:
        """Return the classes of a module, and the full names of what it imports."""
        found: dict[str, ast.ClassDef | str] = {}
        stars: dict[str, ast.ClassDef | str] = {}
        tree = self.tree(module)
        path = self._path(module)
        package = (
            module if path is not None and path.stem == "__init__" else module.rpartition(".")[0]
        )
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.ImportFrom):
                base = (
                    package.split(".")[: len(package.split(".")) - node.level + 1]
                    if node.level
                    else []
                )
                where = ".".join([*base, *([node.module] if node.module else [])])
                if node.names[0].name == "*":
                    stars |= {
                        each: f"{where}.{each}" for each in self.names(where) if each[0] != "_"
                    }
                else:
                    found |= {
                        each.asname or each.name: f"{where}.{each.name}" for each in node.names
                    }
            elif isinstance(node, ast.Import):
                for each in node.names:
                    first = each.name.partition(".")[0]
                    found[each.asname or first] = each.name if each.asname else first
        found = stars | found
        found |= dict(_classes(tree.body if tree is not None else [], ""))
        return found

    def find(self, module: str, dotted: str, depth: int = 0) -> Class | None:
        """Return the class that a dotted name means in a module."""
        names = self.names(module)
        if isinstance(names.get(dotted), ast.ClassDef):
            return Class(module, dotted)
        first, _, rest = dotted.partition(".")
        full = names.get(first, f"{module}.{first}" if self._path(f"{module}.{first}") else None)
        if not isinstance(full, str) or depth > 9:
            return None
        parts = [*full.split("."), *filter(None, rest.split("."))]
        for at in range(len(parts) - 1, 0, -1):
            inside = ".".join(parts[:at])
            if self._path(inside) is not None and (inside, ".".join(parts[at:])) != (
                module,
                dotted,
            ):
                return self.find(inside, ".".join(parts[at:]), depth + 1)
        return None

    def definition(self, made: Class) -> ast.ClassDef:
        """Return the statement that defines a class."""
        found = self.names(made.module)[made.name]
        assert isinstance(found, ast.ClassDef)
        return found

    def lineage(self, made: Class) -> list[Class]:
        """Return a class and those that it inherits from, as far as they are in the source."""
        bases = [
            self.find(made.module, ast.unparse(_generic(each)))
            for each in self.definition(made).bases
        ]
        found = [self.lineage(each) for each in bases if each is not None and each != made]
        merged = [made]
        rest = [each for line in found for each in line]
        return merged + [each for at, each in enumerate(rest) if each not in rest[at + 1 :]]

    def hooks(self, made: Class) -> Iterator[tuple[str, Class | None]]:
        """Yield the hooks of a class, and which class defines each: none if it is generated."""
        lineage = self.lineage(made)
        for hook in HOOKS:
            for each in lineage:
                definition = self.definition(each)
                if function(definition, hook) is not None:
                    yield hook, each
                elif hook in _generated(definition):
                    yield hook, None
                elif not _assigns(definition, hook):
                    continue
                break


def _classes(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the classes of a module, those inside others and inside conditions too; the last."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
            yield from _classes(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _classes([*node.body, *node.orelse], prefix)


def _generic(base: ast.expr) -> ast.expr:
    return base.value if isinstance(base, ast.Subscript) else base


def function(definition: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return the method of a class with this name, or that is assigned to it; None if there is none."""
    found: dict[str, ast.FunctionDef | None] = {}
    for each in definition.body:
        if isinstance(each, ast.FunctionDef):
            found[each.name] = each
        elif isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value is not None:
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                found[ast.unparse(target)] = found.get(ast.unparse(each.value))
    return found.get(name)


def _assigns(definition: ast.ClassDef, name: str) -> bool:
    targets = [each.targets for each in definition.body if isinstance(each, ast.Assign)]
    return name in [ast.unparse(each) for one in targets for each in one]


def _generated(definition: ast.ClassDef) -> set[str]:
    """Return the hooks that decorators and NamedTuple write for a class."""
    written = set()
    for each in map(ast.unparse, definition.decorator_list):
        if re.match(r"(\w+\.)*dataclass\b", each):
            written |= {"__eq__"} if "eq=False" not in each else set()
            written |= {"__hash__", "__setattr__"} if "frozen=True" in each else set()
            written |= {"__setstate__"} if "slots=True" in each and "frozen=True" in each else set()
        written |= {"__new__"} if each.startswith("deprecated(") else set()
    named = any(ast.unparse(each).endswith("NamedTuple") for each in definition.bases)
    return written | ({"__new__"} if named else set())


class Uses(ast.NodeVisitor):
    """The expressions of a function that ask something of what the file decides."""

    def __init__(self, method: ast.FunctionDef) -> None:
        given = method.args
        self.foreign = {
            each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)
        } - {"cls"}
        self.foreign |= {each.arg for each in (given.vararg, given.kwarg) if each is not None}
        self.found: list[str] = []
        for each in method.body:
            self.visit(each)

    def visit(self, node: ast.AST) -> None:
        """Visit what comprehensions go through before what they make of it."""
        for each in getattr(node, "generators", ()):
            self.iterate(each.target, each.iter)
        super().visit(node)

    def is_foreign(self, node: ast.expr | None) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id in self.foreign

    def tell(self, text: str) -> None:
        if text not in self.found:
            self.found.append(text)

    def note(self, node: ast.AST, *parts: ast.expr | None, text: str = "{}") -> None:
        if any(map(self.is_foreign, parts)):
            self.tell(text.format(re.sub(r"\s+", " ", ast.unparse(node))))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        shown = ast.unparse(node)
        if shown.startswith(("super().", "isinstance(", "hasattr(")):
            self.generic_visit(node)
        else:
            self.note(node, node.func, *node.args, *(each.value for each in node.keywords))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.note(node, node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        quiet = (
            all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
            or ast.unparse(node.comparators[-1]) == "self.__dict__"
        )
        self.note(node, *(() if quiet else (node.left, *node.comparators)))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.note(node, node.left, node.right)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.note(node, node.target, node.value)

    def visit_If(self, node: ast.If) -> None:
        self.note_truth(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.note_truth(node.test)
        self.generic_visit(node)

    def note_truth(self, test: ast.expr) -> None:
        for each in test.values if isinstance(test, ast.BoolOp) else [test]:
            each = each.operand if isinstance(each, ast.UnaryOp) else each
            if self.is_foreign(each) and not isinstance(each, ast.Call):
                self.tell(f"truth of {ast.unparse(each)}")

    def visit_For(self, node: ast.For) -> None:
        self.iterate(node.target, node.iter)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and self.is_foreign(node.value):
                self.iterate(target, node.value)
            elif isinstance(target, ast.Name) and self.is_foreign(node.value):
                self.foreign.add(target.id)
        self.generic_visit(node)

    def iterate(self, target: ast.expr, values: ast.expr) -> None:
        if self.is_foreign(values):
            self.tell(f"iterates {ast.unparse(values)}")
            self.foreign |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}


source_of = cache(Source)  # a Source keeps the modules that it has parsed


def table(folder: Path) -> Iterator[str]:
    """Yield the lines of the table."""
    source = source_of(folder)
    version = re.search(r'__version__ = "?\'?([\d.]+)', (folder / "torch/version.py").read_text())
    yield f"torch {version and version[1]}"
    rows: dict[str, list[str]] = {}
    defined: dict[str, list[str]] = {}
    for module, name in CLASSES:
        made = source.find(module, name) if module.startswith("torch.") else None
        if made is None or made != Class(module, name):
            continue
        rows[str(made)] = []
        for hook, by in source.hooks(made):
            by_whom = "a decorator or NamedTuple" if by is None else by.name
            rows[str(made)].append(hook if by == made else f"{hook} of {by_whom}")
            method = None if by is None else function(source.definition(by), hook)
            if method is not None:
                defined[f"{by}.{hook}"] = Uses(method).found
    for hook_name, uses in sorted(defined.items()):
        yield f"\n{hook_name}"
        yield from (f"    {each}" for each in uses or ["(asks nothing)"])
    alike: dict[str, list[str]] = {}
    for name, hooks in rows.items():
        alike.setdefault(", ".join(hooks) or "no hook", []).append(name)
    for shown, names in sorted(alike.items()):
        yield f"\n{shown}:"
        yield from textwrap.wrap(" ".join(names), 120, initial_indent="    ", subsequent_indent="    ",
                                 break_on_hyphens=False)  # fmt: skip


def installed() -> Path:
    """Return the folder that the installed torch is in."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


if __name__ == "__main__":
    print(*table(Path(sys.argv[1]) if sys.argv[1:] else installed()), sep="\n")
