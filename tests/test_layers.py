"""The architecture, read from the syntax trees: who may import whom, and how long a function or a file may be.

Imports inside functions count, and so do those for type checkers (except in ``ckptkit/__init__.py``, which names
everything that it offers).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ckptkit

PACKAGE = Path(ckptkit.__file__).parent
MODULES = sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))

# Each layer sees those above it. The names of one line do not see each other.
LAYERS = (
    ("errors", "text", "fold"),
    ("limits",),
    ("dtypes",),
    ("bytesource",),
    ("remote",),
    ("tensor",),
    ("tree",),
    ("weights", "trust"),
    ("pickles", "notebook"),
    ("checkpoint",),
    ("plan",),
    ("journal",),
    ("bridge",),
    ("quantized",),
    ("formats", "transforms", "reports"),
    ("copying", "scanning"),
    ("upload", "temporaries", "preflight"),
    ("publish",),
    ("patching",),
    ("convert",),
    ("checking",),
    ("recipes",),
    ("loading",),
    ("__init__",),
    ("pages", "browser"),
    ("workers",),
    ("batch",),
    ("trainer",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Who may import what others made; None: everybody, inside functions.
OTHERS = {
    "click": ("cli",),
    "tabulate": ("cli",),
    "tqdm": ("cli",),
    "torch": ("bridge", "loading", "trainer"),
    "sklearn": ("trainer",),
    "matplotlib": ("trainer", "cli", "pages"),
    "textual": ("browser",),
    "rich": ("browser",),
    "numpy": None,
    "fsspec": ("remote", "upload"),
    "aiohttp": ("remote",),
    "safetensors": ("bridge",),
    "distributed": ("workers",),
    "typing_extensions": None,
    "yaml": ("recipes",),
    "tomli": ("recipes",),
}
LAZY = ("torch", "numpy", "fsspec", "aiohttp", "safetensors", "distributed", "typing_extensions")
TRAINER_IS_SEEN_BY = "cli.train"

LONGEST_FUNCTION = 60
LONGEST_FILE = 400
# What may be longer, and why.
LONG_FUNCTIONS = {
    "formats.torch.unpickle:_loop": "the hot loop of the pickle machine: a call for each opcode would double its time",
}
LONG_FILES: dict[str, str] = {}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def path_of(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def imports(module: str) -> Iterator[tuple[str, str]]:
    """Full dotted names that a module imports, and when: at once, later, or never (for type checkers)."""
    when = {}
    for node in ast.walk(parsed(module)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            when.update(dict.fromkeys(map(id, ast.walk(node)), "later"))
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            when.update(dict.fromkeys(map(id, ast.walk(node)), "never"))
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, when.get(id(node), "at once")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            yield from ((f"{base}.{alias.name}", when.get(id(node), "at once")) for alias in node.names)


def absolute(module: str, node: ast.ImportFrom) -> str:
    """What ``from X import`` means by X."""
    if not node.level:
        return node.module or ""
    parts = ["ckptkit", *module.split(".")]
    return ".".join([*parts[: len(parts) - node.level], *filter(None, [node.module])])


def own(module: str) -> Iterator[str]:
    """The modules of ckptkit that a module imports, as they stand in MODULES."""
    for name, _ in imports(module):
        parts = name.split(".")
        if parts[0] != "ckptkit":
            continue
        candidates = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
        names = (found for each in candidates for found in (each, f"{each}.__init__") if found in MODULES)
        yield next(names, "__init__")


def layer(module: str) -> str:
    return "__main__" if module.endswith(".__main__") else module.split(".")[0]


def test_the_modules_are_found() -> None:
    assert {"errors", "formats.format", "cli.__init__"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    assert layer(module) in LEVEL, f"{module} is in no layer of LAYERS"
    if module == "__init__":
        return
    for other in own(module):
        if layer(other) == layer(module):
            continue
        assert LEVEL[layer(other)] < LEVEL[layer(module)], f"{module} imports {other}"


@pytest.mark.parametrize("module", MODULES)
def test_the_trainer_is_a_user(module: str) -> None:
    """It loads through the public names, and only its command knows it."""
    if layer(module) == "trainer":
        assert {layer(other) for other in own(module)} <= {"trainer", "__init__"}
    elif module != TRAINER_IS_SEEN_BY:
        assert "trainer" not in map(layer, own(module))


def test_no_cycles() -> None:
    """Hidden imports included."""
    graph = {module: set(own(module)) - {module} for module in MODULES if module != "__init__"}
    while free := {module for module, needs in graph.items() if not needs & graph.keys()}:
        graph = {module: needs for module, needs in graph.items() if module not in free}
    assert not graph, f"import each other: {', '.join(graph)}"


@pytest.mark.parametrize("module", MODULES)
def test_other_packages_stay_where_they_belong(module: str) -> None:
    for name, _ in imports(module):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top == "ckptkit":
            continue
        assert top in OTHERS, f"{module} imports {name}, which is no dependency"
        allowed = OTHERS[top]
        assert allowed is None or layer(module) in allowed, f"{module} imports {name}"


@pytest.mark.parametrize("module", [each for each in MODULES if layer(each) != "trainer"])
def test_heavy_packages_are_imported_when_needed(module: str) -> None:
    eager = [name for name, when in imports(module) if when == "at once" and name.split(".")[0] in LAZY]
    assert not eager, f"{module} imports {eager} at once"


@pytest.mark.parametrize("module", MODULES)
def test_functions_and_files_are_short(module: str) -> None:
    lines = path_of(module).read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_FILE or module in LONG_FILES, f"{module} has {lines} lines"
    for node in ast.walk(parsed(module)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        name = f"{module}:{node.name}"
        assert length <= LONGEST_FUNCTION or name in LONG_FUNCTIONS, f"{name} has {length} lines"


@pytest.mark.parametrize("name", [each for each in ckptkit.__all__ if each != "__version__"])
def test_public_names_are_where_init_says(name: str) -> None:
    """The lazy table and what type checkers are told are the same list."""
    told = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(parsed("__init__"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckptkit.")
        for alias in node.names
    }
    found = getattr(ckptkit, name)
    module, attribute = ckptkit._PLACES[name]
    assert ckptkit._PLACES.keys() == told.keys() == {*ckptkit.__all__} - {"__version__"}
    assert told[name] == f"ckptkit.{module}.{attribute}"
    assert found.__name__ == attribute
