"""The tables of hooks are what the installed torch has."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pickles.torch_hooks import CLASSES, HOOKS, installed, source_of, table

TABLES = {
    path.stem.partition("-")[2]: path for path in Path(__file__).parent.glob("torch_hooks-*.txt")
}
INSTALLED = torch.__version__.partition("+")[0]


@pytest.mark.skipif(INSTALLED not in TABLES, reason="no table of this torch")
def test_the_table_is_that_of_the_installed_torch() -> None:
    assert [*"\n".join(table(installed())).split("\n")] == TABLES[
        INSTALLED
    ].read_text().splitlines()


@pytest.mark.filterwarnings("ignore")
def test_the_source_has_the_hooks_that_the_classes_have() -> None:
    source = source_of(installed())
    seen = 0
    for module, name in CLASSES:
        made = _imported(module, name)
        if made is None or made.__module__.split(".")[0] != "torch":
            continue
        found = source.find(module, name)
        assert found is not None, (module, name)
        assert {hook for hook, _ in source.hooks(found)} == set(filter(_in_python(made), HOOKS)), (
            found
        )
        seen += 1
    assert seen > 500


def _imported(module: str, name: str) -> Any:
    try:
        made: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        made = getattr(made, part, None)
    return made


def _in_python(made: type) -> Any:
    def is_python(hook: str) -> bool:
        found = ((each, vars(each)[hook]) for each in made.__mro__ if hook in vars(each))
        owner, value = next(found, (object, None))
        value = getattr(value, "__func__", value)
        return isinstance(value, types.FunctionType) and owner.__module__.startswith("torch")

    return is_python
