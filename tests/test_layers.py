"""The architecture, read from the syntax trees: which room may import which.

Imports inside functions count, and so do those for type checkers (except in
``ckptkit/__init__.py``, which names everything that it offers).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import ckptkit
from ckptkit import edits

PACKAGE = Path(ckptkit.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
)
KNOWN = frozenset(MODULES)

# A room sees those above it; the names of one line do not see each other.
ROOMS = (
    ("core",),
    ("compute", "remote"),
    ("pickles", "publish", "quantized", "rules"),
    ("edits", "formats"),
    ("scanning", "api"),
    ("lora",),
    ("analysis",),
    ("loading",),
    ("diagnosis", "__init__"),  # __init__: the public names
    ("views", "run", "trainer", "deltas"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}

# Who may import what others made; None: everybody, inside functions.
OTHERS = {
    "click": ("cli", "trainer"),
    "tabulate": ("cli",),
    "tqdm": ("cli", "trainer"),
    "torch": ("core", "compute", "rules", "lora", "loading", "diagnosis", "trainer", "run"),
    "sklearn": ("trainer",),
    "matplotlib": ("trainer", "cli", "views"),
    "textual": ("views",),
    "rich": ("views",),
    "numpy": None,
    "fsspec": ("remote", "publish"),
    "aiohttp": ("remote",),
    "safetensors": ("compute", "loading"),
    "ml_dtypes": ("compute",),
    "transformers": ("rules",),
    "distributed": ("run",),
    "zstandard": ("formats", "deltas"),
    "xxhash": ("deltas",),
    "blake3": ("deltas",),
    "isal": ("core",),
    "regex": ("edits", "lora"),
    "yaml": ("run", "formats"),
}
LAZY = {
    *("torch", "transformers", "numpy", "fsspec", "aiohttp", "safetensors", "distributed"),
    *("isal", "ml_dtypes", "regex"),
}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def path_of(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


@cache
def imports(module: str) -> tuple[tuple[str, str], ...]:
    """Return full dotted names that a module imports, and when: at once, later, or never (for type
    checkers)."""
    return tuple(_imports(module))


def _imports(module: str) -> Iterator[tuple[str, str]]:
    found: list[tuple[ast.AST, str]] = [(parsed(module), "at once")]
    for node, when in found:  # which grows
        if isinstance(node, ast.Import):
            yield from ((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            yield from ((f"{base}.{alias.name}", when) for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            when = "later"
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            when = "never"
        found += [(each, when) for each in ast.iter_child_nodes(node) if isinstance(each, BLOCKS)]


BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)  # expressions hold no imports


def is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def absolute(module: str, node: ast.ImportFrom) -> str:
    """Return what ``from X import`` means by X."""
    if not node.level:
        return node.module or ""
    parts = ["ckptkit", *module.split(".")]
    return ".".join([*parts[: len(parts) - node.level], *filter(None, [node.module])])


@cache
def own(module: str) -> tuple[str, ...]:
    """Return the modules of ckptkit that a module imports, as they stand in MODULES."""
    return tuple(_own(module))


def _own(module: str) -> Iterator[str]:
    for name, _ in imports(module):
        parts = name.split(".")
        if parts[0] != "ckptkit":
            continue
        candidates = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
        names = (
            found for each in candidates for found in (each, f"{each}.__init__") if found in KNOWN
        )
        yield next(names, "__init__")


def room(module: str) -> str:
    return module.split(".")[0]


def test_the_modules_are_found() -> None:
    assert {"core.errors", "formats.format", "cli.__init__"} <= set(MODULES)


def test_imports_go_down() -> None:
    """`__main__` modules of rooms are no exception."""
    assert {room(module) for module in MODULES} - LEVEL.keys() == set()
    pairs = [(module, other) for module in MODULES if module != "__init__" for other in own(module)]
    up = [
        f"{a} imports {b}" for a, b in pairs if room(a) != room(b) and not below(room(b), room(a))
    ]
    assert not up


def below(lower: str, upper: str) -> bool:
    return lower in LEVEL and LEVEL[lower] < LEVEL[upper]


def test_the_trainer_is_a_leaf() -> None:
    """It loads through the public names, and no other room imports it."""
    allowed = {"trainer", "core", "__init__"}
    seen = {room(other) for module in MODULES if room(module) == "trainer" for other in own(module)}
    assert seen <= allowed
    others = [module for module in MODULES if room(module) != "trainer"]
    assert [module for module in others if "trainer" in map(room, own(module))] == []


def test_no_cycles() -> None:
    """Hidden imports included."""
    graph = {module: set(own(module)) - {module} for module in MODULES if module != "__init__"}
    while free := {module for module, needs in graph.items() if not needs & graph.keys()}:
        graph = {module: needs for module, needs in graph.items() if module not in free}
    assert not graph, f"import each other: {', '.join(graph)}"


def test_other_packages_stay_where_they_belong() -> None:
    wrong = []
    for module in MODULES:
        named = {name.split(".")[0] for name, _ in imports(module)}
        for name in named - sys.stdlib_module_names - {"ckptkit"}:
            allowed = OTHERS.get(name, ())
            if allowed is not None and room(module) not in allowed:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_heavy_packages_are_imported_when_needed() -> None:
    eager = [
        f"{module} imports {name}"
        for module in MODULES
        if room(module) != "trainer"
        for name, when in imports(module)
        if when == "at once" and name.split(".")[0] in LAZY
    ]
    assert not eager


def test_rooms_say_what_they_are_for() -> None:
    """Each `__init__` says what comes in, what goes out, and which rooms it may use, in at most
    five lines."""
    rooms = [name for names in ROOMS for name in names if f"{name}.__init__" in MODULES]
    texts = {name: ast.get_docstring(parsed(f"{name}.__init__")) or "" for name in rooms}
    assert [name for name, text in texts.items() if not text or text.count("\n") > 4] == []


def test_rooms_name_the_rooms_that_they_use() -> None:
    """Those of "Uses core, compute and formats." are all that it imports."""
    wrong = {}
    for name in sorted({room(module) for module in MODULES if f"{room(module)}.__init__" in KNOWN}):
        text = " ".join((ast.get_docstring(parsed(f"{name}.__init__")) or "").split())
        listed = re.search(r"\bUses ((?:\w+, )*\w+(?: and \w+)?)[.;]", text)
        said = set(re.findall(r"\w+", listed[1])) - {"and"} if listed else set()
        if said <= LEVEL.keys() and said:
            inside = (module for module in MODULES if room(module) == name)
            used = {room(other) for module in inside for other in own(module)} - {name, "__init__"}
            if said != used:
                wrong[name] = (said - used, used - said)
    assert not wrong


def public_names() -> dict[str, str]:
    """Return the full name of each public name, as type checkers are told it."""
    head = ast.Module([node for node in parsed("__init__").body if isinstance(node, ast.If)], [])
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(head)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckptkit.")
        for alias in node.names
    }


def test_public_names_are_those_that_type_checkers_see() -> None:
    names = {*ckptkit.__all__} - {"__version__", "open"}
    assert public_names().keys() - {"open_checkpoint"} == names
    assert sorted([*names, "open"]) == sorted([*edits.PUBLIC, *chain(*ckptkit._PLACES.values())])


@pytest.mark.parametrize("name", [each for each in ckptkit.__all__ if each != "__version__"])
def test_public_names_are_where_init_says(name: str) -> None:
    """The lazy tables and what type checkers are told are the same list."""
    attribute = "open_checkpoint" if name == "open" else name
    found = (module for module, names in ckptkit._PLACES.items() if name in names)
    module = next(found, None) or edits.PUBLIC[name]
    assert public_names()[attribute] == f"ckptkit.{module}.{attribute}"
    assert getattr(ckptkit, name).__name__ == attribute
