"""Nothing of a file is executed: the calls that could do it do not occur in the package at all."""

from __future__ import annotations

import ast
import builtins
import fnmatch
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ckptkit

PACKAGE = Path(ckptkit.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Full names, as they read once import aliases are resolved; a mention is enough.
FORBIDDEN = (
    "pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._*", "_pickle.*", "pickle.Pickler",
    "marshal.*", "shelve.*", "dill.*", "cloudpickle.*", "joblib.*", "runpy.*",
    "eval", "exec", "compile", "__import__", "builtins.*",
    "torch.load", "torch.jit.load", "torch.package.*", "torch.export.load", "torch.hub.*", "numpy.load",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all",
    "shutil.unpack_archive", "subprocess.*", "os.system", "os.popen", "os.exec*", "os.spawn*", "os.posix_spawn*",
    "os.startfile",
)  # fmt: skip
# Methods of objects whose class the syntax does not show.
FORBIDDEN_METHODS = ("extractall", "unpack_archive", "find_class")
# Methods that are forbidden in a file that imports one of these modules.
ARCHIVES = ("tarfile", "zipfile")
# Modules named at run time: ckptkit's own, imported when they are used, and the model class that
# the user typed.
IMPORTERS = {
    "__init__.py", "edits/__init__.py", "formats/format.py", "loading/building.py", "cli/__init__.py",
    "quantized/finding.py", "formats/distributed/__init__.py",
}  # fmt: skip


parsed = cache(ast.parse)  # two tests look at every module


def found(source: str) -> Iterator[str]:
    """Return the forbidden names that a source text mentions."""
    tree = parsed(source)
    alias = aliases(tree)
    yield from (name for name in set(alias.values()) if forbidden(name))
    for node in ast.walk(tree):
        name = dotted(node, alias)
        if name and forbidden(name):
            yield name
        elif isinstance(node, ast.Attribute) and method_forbidden(node.attr, alias):
            yield f".{node.attr}"


def forbidden(name: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern) or name == pattern.removesuffix(".*")
        for pattern in FORBIDDEN
    )


def method_forbidden(method: str, alias: dict[str, str]) -> bool:
    if method == "extract":
        return any(name.split(".")[0] in ARCHIVES for name in alias.values())
    return method in FORBIDDEN_METHODS


@cache
def aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> what was imported under it."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({each.asname or each.name: each.name for each in node.names})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update(
                {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            )
    return names


def dotted(node: ast.AST, alias: dict[str, str]) -> str | None:
    """The full name of a builtin or of something imported, None for any other expression."""
    if isinstance(node, ast.Name):
        return alias.get(node.id, node.id if hasattr(builtins, node.id) else None)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, alias)):
        return f"{base}.{node.attr}"
    return None


def imports_by_name(source: str) -> bool:
    return any(
        name.split(".")[0] in ("importlib", "pkgutil") for name in aliases(parsed(source)).values()
    )


# It writes values of this process, and asks what is a tensor; nothing is read.
PICKLES = {"pickles/from_python.py": ["pickle.Pickler"]}


def test_PK_30_no_call_that_executes() -> None:
    mentions = {
        path.relative_to(PACKAGE).as_posix(): sorted(found(path.read_text(encoding="utf-8")))
        for path in FILES
    }
    assert {path: names for path, names in mentions.items() if names} == PICKLES


def test_PK_30_imports_by_name_only_where_the_user_names_them() -> None:
    others = [path for path in FILES if path.relative_to(PACKAGE).as_posix() not in IMPORTERS]
    assert [path for path in others if imports_by_name(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(f)",
        "import pickle as p\np.loads(data)",
        "from pickle import loads as harmless\nharmless(data)",
        "from pickle import Unpickler",
        "import pickle\nclass Mine(pickle.Unpickler): pass",
        "import _pickle",
        "def late():\n    import marshal\n    return marshal.loads(b'')",
        "import shelve",
        "eval('1')",
        "run = exec",
        "compile('1', '', 'eval')",
        "__import__('os')",
        "import torch\ntorch.load(path, weights_only=True)",
        "from torch import load",
        "import torch\ntorch.jit.load(path)",
        "import numpy as np\nnp.load(path)",
        "import tarfile\ntarfile.open(path).extractall()",
        "import tarfile\ntarfile.open(path).extract('a')",
        "from zipfile import ZipFile\nZipFile(path).extract('a')",
        "import shutil\nshutil.unpack_archive(path)",
        "import yaml\nyaml.load(text)",
        "import os\nos.system('ls')",
        "from os import execv",
        "import subprocess",
        "import builtins\nbuiltins.eval('1')",
    ],
)
def test_PK_30_the_gate_sees(source: str) -> None:
    assert list(found(source))


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('a')",
        "from ckptkit.edits.structure import extract\nextract(ck)",
        "from ckptkit.loading import load\nload(path)",
        "import pickletools\npickletools.opcodes",
        "import os\nos.path.join('a', 'b')",
    ],
)
def test_PK_30_the_gate_lets_pass(source: str) -> None:
    assert not list(found(source))


@pytest.mark.parametrize(
    "source", ["import importlib", "from importlib import import_module", "import pkgutil"]
)
def test_PK_30_the_gate_sees_imports_by_name(source: str) -> None:
    assert imports_by_name(source)
