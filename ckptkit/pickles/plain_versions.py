"""The versions of modules, recognized at once: a dict of one number for each, in ``_metadata``.

    X name r   } r version K s        version: fetched from the memo, as it was stored before

Nothing refers to such a dict again: its memo entry is UNSET, and a reference finds that out. Only
the name or the end of the dicts may follow, so that the dict does not stay on top of the stack,
where opcodes would change it, repeat it or store it again.
"""

from __future__ import annotations

import re
from struct import Struct

from ckptkit.core.tree import MODULE_VERSIONS, ModuleVersion, Node, OrderedMapping
from ckptkit.pickles.opcode_values import U2, U4, UNSET
from ckptkit.pickles.plain_tensor import TEXT_SIZES, Code

_match = re.compile(rb"r(....)(h.|j....)(K.|M..)s(?=[Xu])", re.DOTALL).match
_FOLLOWING = b"Xu"
_PUT = Struct("<cI").pack
_DICT_AT = 1 + 4  # after the PUT of a name
_KEY = "version"


class PlainVersions:
    """Reads the versions of modules of one pickle, whose machine has this memo."""

    def __init__(self, memo: list[Node]) -> None:
        self._memo = memo
        self._known: dict[bytes, ModuleVersion] = {}  # by the code of the number

    def read(self, data: bytes, pos: int, stack: list[Node], marks: list[list[Node]]) -> int:
        """Read a dict's code at `pos`, after EMPTY_DICT; return the offset after it, or 0.

        The names and dicts that follow are read, too, while they are alike.
        """
        if not stack or not _is_metadata(marks):
            return 0
        found = _match(data, pos)
        if found is None:
            return 0
        put, get, number = found.groups()
        memo = self._memo
        n = len(memo) - 1  # the entry of the name
        start = pos - 1 - _DICT_AT
        if (
            n < 0
            or memo[n] is not stack[-1]
            or put != (n + 1).to_bytes(4, "little")
            or start < 0
            or data[start : pos - 1] != _PUT(b"r", n)
        ):
            return 0
        index = get[1] if len(get) == 2 else U4(get, 1)[0]
        if index > n or memo[index].__class__ is not str or memo[index] != _KEY:
            return 0
        version = self._known.get(number)
        if version is None:
            value = number[1] if len(number) == 2 else U2(number, 1)[0]
            version = self._known[number] = ModuleVersion({_KEY: value})
        stack.append(version)
        memo.append(UNSET)
        code = Code(data[start : found.end()], (1, _DICT_AT + 2), n)
        return self._read_on(data, found.end(), stack, code, version)

    def _read_on(
        self, data: bytes, pos: int, stack: list[Node], code: Code, version: ModuleVersion
    ) -> int:
        """Read names at `pos` while `code` comes after each; return the offset after them."""
        memo, integer, sizes, size = self._memo, int.from_bytes, TEXT_SIZES.get, code.size
        rest, unit, last = code.rest, code.unit, len(data) - 1
        while True:
            name_at = pos + 5
            code_at = name_at + sizes(data[pos:name_at], len(data))
            end = code_at + size
            if (
                end > last
                or integer(data[code_at:end], "little") != rest + len(memo) * unit
                or data[end] not in _FOLLOWING
            ):
                return pos
            try:
                name = str(data[name_at:code_at], "utf-8", "surrogatepass")
            except UnicodeDecodeError:
                return pos
            stack += (name, version)
            memo += (name, UNSET)
            pos = end


def _is_metadata(marks: list[list[Node]]) -> bool:
    """Return whether the values above the last mark are items of the ``_metadata`` of a dict."""
    below = marks[-1] if marks else []
    return (
        len(below) > 1
        and below[-1].__class__ is OrderedMapping
        and below[-2].__class__ is str
        and below[-2] == MODULE_VERSIONS
    )
