"""The reference of the library, made of its signatures and docstrings.

``python -m tests.reference`` writes ``ckptkit/help/python.md``; a test says when that is due.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ckptkit
from ckptkit.core import errors

PAGE = Path(ckptkit.__file__).parent / "help" / "python.md"
HEAD = """# Python reference

This page is generated from the docstrings; `help(ckptkit.open)` prints the same text. `ckptkit help library` shows how to
combine the functions.

A checkpoint argument (`Source`) is a path, a URL, the bytes of a file, a binary file object, a mapping in memory such as a
state_dict, or a `Checkpoint`. A dtype (`DTypeLike`) is a name (`"bfloat16"`), a `torch.dtype` or a numpy dtype. A device
(`Device`) is a name or a `torch.device`.
"""
GROUPS: dict[str, tuple[str, ...]] = {
    "Open, save, load": ("open", "save", "convert", "load", "load_into", "recover"),
    "Look": ("inspect", "stats", "diff", "doctor", "scan", "verify", "digest"),
    "Change": (
        "strip_prefix", "add_prefix", "rename", "select", "cast", "resize", "dequantize", "remap", "compact",
        "extract", "wrap", "apply_rules", "key_optimizer",
    ),
    "Combine": ("average", "join", "merge", "ema"),
    "Adapters": ("merge_lora", "check_lora", "convert_lora", "extract_lora", "resize_lora"),
    "Deltas": ("delta", "apply_delta", "squash_delta", "verify_delta"),
    "Classes": ("Checkpoint", "Tensor", "Storage", "Options"),
}  # fmt: skip
METHODS = {
    "Checkpoint": (
        "weights", "keys", "__getitem__", "__contains__", "map", "with_value", "without",
        "with_key", "close",
    ),
    "Tensor": (
        "numpy", "torch", "__getitem__", "__len__", "numel", "nbytes", "device", "is_contiguous",
    ),
    "Storage": ("nbytes",),
}  # fmt: skip
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *lines()]).rstrip() + "\n"


def lines() -> Iterator[str]:
    for group, names in GROUPS.items():
        yield from (f"## {group}", "")
        for name in names:
            if name in ckptkit.__all__:
                yield from _entry(name)
    yield from _errors()


def _entry(name: str) -> Iterator[str]:
    value = getattr(ckptkit, name)
    if not inspect.isclass(value):
        yield from _described(f"ckptkit.{name}", value, f"{name}{_signature(value)}")
        return
    yield from _described(f"ckptkit.{name}", value, None)
    for each in METHODS.get(name, ()):
        method = inspect.getattr_static(value, each)
        if callable(method):
            yield from _described(f"{name}.{each}", method, f"{each}{_signature(method, 1)}")
        else:
            yield from _described(f"{name}.{each}", method, None)


def _described(title: str, value: Any, signature: str | None) -> Iterator[str]:
    yield from (f"### `{title}`", "")
    if signature is not None:
        yield from ("```text", *_wrapped(signature), "```", "")
    yield from (_plain(inspect.getdoc(value) or ""), "")


def _signature(function: Callable[..., Any], skipped: int = 0) -> str:
    found = inspect.signature(function)
    parameters = [
        each.replace(annotation=_Unquoted(each.annotation))
        for each in list(found.parameters.values())[skipped:]
    ]
    return str(
        found.replace(parameters=parameters, return_annotation=_Unquoted(found.return_annotation))
    )


class _Unquoted(str):
    """An annotation, which is a string in the modules of the package."""

    def __repr__(self) -> str:
        return self.replace("'", "")


def _wrapped(signature: str) -> list[str]:
    """Return a signature on one line, or with a line for each parameter."""
    if len(signature) <= 100:
        return [signature]
    start, _, rest = signature.partition("(")
    inner, _, result = rest.rpartition(")")
    parts = re.split(r", (?![^\[(]*[\])])", inner)
    return [f"{start}(", *(f"    {part}," for part in parts), f"){result}"]


def _plain(text: str) -> str:
    """Return a docstring as Markdown."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


def _errors() -> Iterator[str]:
    yield from (
        "## Errors",
        "",
        "Every error is a subclass of `CkptkitError`. The column `also` lists the builtin base classes of an error.",
        "",
    )
    yield from ("| error | also | |", "|---|---|---|")
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.CkptkitError):
            builtin = [
                each.__name__
                for each in kind.__mro__[1:]
                if each.__module__ == "builtins" and each not in (Exception, BaseException, object)
            ]
            doc = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
            yield f"| `{name}` | {', '.join(f'`{each}`' for each in builtin[:2])} | {_plain(doc)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
