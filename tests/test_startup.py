"""The imports of each command: no heavy package, and a ceiling on the modules of ckptkit."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from ckptkit.cli import COMMANDS
from ckptkit.formats.format import Format, Lazy
from ckptkit.formats.table import BY_SUFFIX, FORMATS
from tests.matrix import Fixture
from tests.spy import spied

PTH, SAFETENSORS = (
    Fixture("torch-zip/dp_wrapped_cuda1.pth").path,
    Fixture("safetensors/net.safetensors").path,
)


SLOW = {"asyncio", "concurrent", "difflib", "multiprocessing", "pickle", "traceback", "zipfile"}


# For each command line, in which PTH and SAFETENSORS are files: how many modules of ckptkit it may
# import.
MOST = {
    "--version": 8,
    "--help": 22 + len(COMMANDS),  # the line of each command comes from its module
    "formats --json": 27,
    "inspect --json PTH": 57,
    "inspect PTH": 59,
    "inspect --json SAFETENSORS": 68,
    "strip-module --dry-run PTH out.pth": 64,
    "strip-module PTH out.pth": 64,
    "remap PTH out.pth --to cpu": 60,
    "extract PTH out.pth --key model": 60,
    "rename SAFETENSORS out.safetensors --sub conv=c": 75,
    "convert PTH out.safetensors": 63,
    "convert SAFETENSORS out.pth": 68,
    "convert PTH out.npz": 64,
    "diff --json PTH PTH": 65,
    "diff PTH PTH": 68,
}


@pytest.mark.parametrize("command", MOST)
def test_a_command_imports_what_it_needs(command: str, tmp_path: Path) -> None:
    """No torch, no numpy, no asyncio for what only copies; and not half of the package."""
    words = [
        str({"PTH": PTH, "SAFETENSORS": SAFETENSORS}.get(word, word)) for word in command.split()
    ]
    (done,) = spied(tmp_path, [*words])
    packages = {name.partition(".")[0] for name in done.modules}
    others = packages - sys.stdlib_module_names - {"ckptkit"}
    assert (done.code, packages & SLOW) == (0, set())
    assert others == {"click", *["regex"] * ("--sub" in command)}
    assert sum(name.partition(".")[0] == "ckptkit" for name in done.modules) <= MOST[command]


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_every_function_of_a_format_is_there(format: Format) -> None:
    """The table names them as text."""
    functions = [getattr(format, field.name) for field in fields(format)]
    for each in functions:
        if isinstance(each, Lazy):
            module, _, name = each.place.partition(":")
            assert callable(getattr(import_module(f"ckptkit.formats.{module}"), name))


def test_a_suffix_chooses_a_format_that_can_be_written() -> None:
    assert all(format.layout is not None for format in BY_SUFFIX.values())
