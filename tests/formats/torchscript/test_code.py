"""Declarations in the code of TorchScript archives, as torch prints it."""

from __future__ import annotations

import pytest

from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import FormatError
from ckptkit.core.tree import Global
from ckptkit.formats.torchscript import Declared, ScriptSource, _unquoted, parse
from ckptkit.formats.zip_reader import read_directory
from tests.formats.containers.zips import Member, build
from tests.formats.torchscript.scripts import QUIET

pytestmark = QUIET


CODE = """class Old(Module):
  __parameters__ = ["w", ]
  w : Tensor
  b : Tensor
  maybe : Optional[Tensor]
  size : Final[int] = 3
  __annotations__["0"] = Tensor
  __annotations__["a\\\\b"] = Tensor
  def forward(self: __torch__.Old,
    x: Tensor) -> Tensor:
    y : Tensor = x
    __buffers__ = []
    return "class Inside(Module):"
def function(x: Tensor) -> Tensor:
  x : Tensor
  return x
class Point(NamedTuple):
  x : Tensor
class Plain:
  x : Tensor
class Own(Module):
  __parameters__ = []
  __buffers__ = ["häuser", ]
  __annotations__["häuser"] = Tensor
  def __setstate__(self: __torch__.Own,
    state: Tensor) -> None:
    return None
"""


def test_by_hand() -> None:
    found = parse(CODE.encode())
    assert found == {
        "Old": Declared("Module", frozenset({"w"}), None, {"w", "b", "0", "a\\b"}),
        "Point": Declared("NamedTuple", tensors={"x"}),
        "Plain": Declared(None, tensors={"x"}),
        "Own": Declared("Module", frozenset(), frozenset({"häuser"}), {"häuser"}, True),
    }
    assert [each.is_module for each in found.values()] == [True, False, False, True]
    old = found["Old"]
    assert [old.part(name) for name in ("w", "b", "0", "maybe")] == [
        "_parameters",
        "_buffers",
        "_buffers",
        None,
    ]


@pytest.mark.parametrize(
    "line",
    [
        "  __parameters__ = f()",
        '  __buffers__ = ["a", b]',
        '  __parameters__ = ["\\x"]',
        "  __buffers__ = [",
        "\xff",
    ],
)
def test_refused(line: str) -> None:
    with pytest.raises(FormatError):
        parse(b"class M(Module):\n" + line.encode("latin-1"))


def test_only_what_is_asked_for_is_read() -> None:
    members = [
        Member("a/code/__torch__/x.py", b"class M(Module):\n"),
        Member("a/code/__torch__/y.py", b"\xff"),
    ]
    code = ScriptSource(read_directory(Memory(build(*members))))
    assert code[Global("__torch__.x", "M")] == Declared("Module")
    assert code[Global("__torch__.x", "N")] is None and code[Global("__torch__.z", "M")] is None
    with pytest.raises(FormatError):
        code[Global("__torch__.y", "M")]


def test_hostile_code_takes_no_time() -> None:
    """Expressions that run backwards, over a line of a megabyte."""
    for line in (b'["' + b"\\" * (1 << 20), b'["a", ' * (1 << 17), b'["' + b"a" * (1 << 20)):
        with pytest.raises(FormatError):
            parse(b"class M(Module):\n  __parameters__ = " + line)


def test_names_in_code_that_are_not_spelled() -> None:
    with pytest.raises(FormatError, match="contains the malformed name"):
        _unquoted("'a")
