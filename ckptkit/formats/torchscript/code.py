"""Parse the class declarations in the code of a TorchScript archive; none of the code is run.

``<top>/code/__torch__/torch/nn/modules/conv.py`` holds the classes of the module
``__torch__.torch.nn.modules.conv``, as torch/csrc/jit/serialization/python_print.cpp prints them:

    class Conv2d(Module):                     a class without a base is no module
      __parameters__ = ["weight", "bias", ]
      __buffers__ = []                        since 1.6; before, every other tensor was one
      weight : Tensor                         the attributes
      bias : Optional[Tensor]
      __annotations__["0"] = __torch__.Foo    one whose name is no identifier
      groups : Final[int] = 1                 a constant, which is not in the pickle
      def forward(self: ...) -> Tensor:       methods; a __setstate__ interprets the pickled state
"""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import dataclass, field

from ckptkit.core.errors import FormatError
from ckptkit.core.tree import Global
from ckptkit.formats.torch_zip.reader import Directory

_CLASS = re.compile(r"class (\w+)(?:\((\w*)\))?:")
_STRING = r'"(?:[^"\\]|\\.)*"'
_NAMES = re.compile(rf"  __(parameters|buffers)__ = \[((?:{_STRING}, ?)*)\]")
_TENSOR = re.compile(rf"  (?:(\w+) : |__annotations__\[({_STRING})\] = )Tensor")
_SETSTATE = "  def __setstate__("


@dataclass
class Declared:
    """A class: its base, its attributes by role, and whether it defines the format of its state."""

    base: str | None = None
    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] | None = None
    tensors: set[str] = field(default_factory=set)  # attributes of type Tensor
    has_setstate: bool = False

    @property
    def is_module(self) -> bool:
        return self.base == "Module"

    def part(self, name: str) -> str | None:
        """Return the dict of ``nn.Module`` that a tensor of this name belongs to."""
        if name in self.parameters:
            return "_parameters"
        is_buffer = self.buffers is None or name in self.buffers
        return "_buffers" if is_buffer and name in self.tensors else None


class Code:
    """The classes of an archive, each module of them read on demand."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._modules: dict[str, dict[str, Declared]] = {}

    def __getitem__(self, made: Global) -> Declared | None:
        """Return the declaration of a class, None if its code is missing."""
        if made.module not in self._modules:
            name = f"{self._directory.top}/code/{made.module.replace('.', '/')}.py"
            self._modules[made.module] = (
                parse(self._directory.read(name)) if name in self._directory else {}
            )
        return self._modules[made.module].get(made.name)


def parse(data: bytes) -> dict[str, Declared]:
    """Parse the classes in one file of code.

    Raises FormatError for what is not text or not a list of names.
    """
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise FormatError("its code is not UTF-8") from error
    found: dict[str, Declared] = {}
    current = Declared()
    for line in lines:
        if line.startswith("class ") and (head := _CLASS.fullmatch(line)):
            current = found[head[1]] = Declared(head[2])
        elif line.startswith("def "):
            current = Declared()
        elif line[:2] == "  " and line[2:3] not in ("", " "):
            _declare(current, line)
    return found


def _declare(current: Declared, line: str) -> None:
    if line.startswith(_SETSTATE):
        current.has_setstate = True
    elif tensor := _TENSOR.fullmatch(line):
        current.tensors.add(tensor[1] or _text(tensor[2]))
    elif names := _NAMES.fullmatch(line):
        listed = frozenset(_text(each) for each in re.findall(_STRING, names[2]))
        if names[1] == "parameters":
            current.parameters = listed
        else:
            current.buffers = listed
    elif line.startswith(("  __parameters__", "  __buffers__")):
        raise FormatError(f"its code lists parameters or buffers in an unknown way: {line[:80]!r}")


def _text(quoted: str) -> str:
    try:
        return str(literal_eval(quoted))
    except (SyntaxError, ValueError) as error:
        raise FormatError(f"its code spells a name as {quoted[:40]}") from error
