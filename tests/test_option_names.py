"""A keyword argument has the name of its command-line option, with `_` in place of `-`.

A repeatable option may have the plural as its keyword: Python takes all its values in one dict or
list.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields

import click
import pytest

import ckptkit
from ckptkit.cli import main
from ckptkit.cli.options import KINDS
from ckptkit.core.options import Options
from ckptkit.edits import EDITS

# Functions that are not edits, and the command of each.
COMMAND = {
    "apply_delta": "delta apply", "check_lora": "lora check", "convert": "convert", "convert_lora": "lora convert",
    "delta": "delta make", "diff": "diff", "digest": "digest", "doctor": "doctor", "extract_lora": "lora extract",
    "inspect": "inspect", "merge_lora": "lora merge", "recover": "recover", "resize_lora": "lora resize",
    "scan": "scan", "squash_delta": "delta squash", "stats": "stats", "verify": "verify",
    "verify_delta": "delta verify",
}  # fmt: skip
# Keywords with another name than their option, and the reason.
OTHERWISE = {
    ("remap", "devices", "--to"): "the same argument as --device: one device, or a dict of devices",
    ("cast", "dtypes", "--cast"): "the option has the name of the function",
    ("dequantize", "dtype", "--dequantize"): "the option has the name of the function",
    ("key_optimizer", "by", "--optimizer-keys"): "the option has the name of the function",
    ("check_lora", "target", "--for"): "`for` is a keyword of Python",
}
# Keywords without an option, and the reason.
ONLY_PYTHON = {
    ("convert", "options"): "one Options object for all output options",
    ("convert_lora", "options"): "one Options object for all output options",
    ("extract_lora", "options"): "one Options object for all output options",
    ("resize_lora", "options"): "one Options object for all output options",
    ("apply_delta", "options"): "one Options object for all output options",
    ("squash_delta", "checksum"): "`delta squash` keeps the algorithm of the deltas",
}


def allowed(flag: str, repeatable: bool) -> set[str]:
    """The keywords that an option may have."""
    name = flag.partition("/")[0].removeprefix("--").replace("-", "_")
    return {name, f"{name}s"} if repeatable else {name}


def edits() -> Iterator[tuple[str, str, str, bool]]:
    """Each option of a public edit: function, keyword, option, and whether it is repeatable."""
    for edit in EDITS:
        name = edit.place.partition(":")[2]
        for option in edit.options:
            if edit.public and name in ckptkit.__all__ and option.flag and option.parameter:
                yield name, option.parameter, option.flag, "multiple" in KINDS[option.kind]


@pytest.mark.parametrize(("name", "keyword", "flag", "repeatable"), list(edits()))
def test_edits(name: str, keyword: str, flag: str, repeatable: bool) -> None:
    assert keyword in inspect.signature(getattr(ckptkit, name)).parameters
    equal = keyword in allowed(flag, repeatable)
    assert equal != ((name, keyword, flag) in OTHERWISE)


@pytest.mark.parametrize("name", COMMAND)
def test_other_functions(name: str) -> None:
    command: click.Command = main
    for word in COMMAND[name].split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    known = {field.name for field in fields(Options)}
    flags: set[str] = set()
    for option in command.params:
        if isinstance(option, click.Option):
            flags.update(option.opts, option.secondary_opts)
            for flag in (*option.opts, *option.secondary_opts):
                known |= allowed(flag, option.multiple)
    for each in inspect.signature(getattr(ckptkit, name)).parameters.values():
        if each.kind is each.KEYWORD_ONLY:
            renamed = any((name, each.name) == key[:2] and key[2] in flags for key in OTHERWISE)
            equal = each.name in known
            assert equal or renamed or (name, each.name) in ONLY_PYTHON, each.name
            assert not (equal and (name, each.name) in ONLY_PYTHON), each.name


def test_the_exceptions_exist() -> None:
    for name, keyword, *_ in (*OTHERWISE, *ONLY_PYTHON):
        assert keyword in inspect.signature(getattr(ckptkit, name)).parameters, (name, keyword)
