"""Copies of one tensor in the files of several processes: equal, or the files are not of one
save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptkit.compute.compare import compare
from ckptkit.core.errors import CorruptError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import size, some, typed, typed_value

COMPARE, CHECK, FIRST = "compare", "check", "first"  # what is done about copies
CHOICES = (COMPARE, CHECK, FIRST)
READ = 16 << 20  # bytes of each side that are read where checksums do not decide
_SHOWN = 80  # characters of a name in a message


class Copy(NamedTuple):
    """A tensor that two files hold alike."""

    name: str
    first: Tensor
    other: Tensor
    files: tuple[str, str]


class Copies:
    """The copies met while files are put together, and what became of them.

    ``compare``: checksums decide, small ones are read; ``check``: what checksums do not decide is
    read; ``first``: those that differ are passed over, the first is taken.
    """

    def __init__(self, policy: str = COMPARE) -> None:
        self.policy = policy
        self.left: list[Copy] = []  # not compared
        self.equal = 0
        self.passed: list[str] = []  # differ, and the first was taken
        self._read = 0

    def same(self, copy: Copy, *, always: bool = True) -> bool | None:
        """Return whether a copy equals the first, None if that is unknown. Bytes are read if
        `always`.
        """
        same = _by_checksum(copy.first, copy.other)
        if same is None and (always or self._may_read(copy.first.nbytes)):
            same = compare(copy.first, copy.other) is None
        return same

    def add(self, copy: Copy) -> None:
        """Raise CorruptError if it differs from the first."""
        same = self.same(copy, always=False)
        if same is None:
            self.left.append(copy)
        elif same:
            self.equal += 1
        else:
            self._differs(copy)

    def _may_read(self, nbytes: int) -> bool:
        self._read += nbytes
        return self.policy == CHECK or self._read <= READ

    def _differs(self, copy: Copy) -> None:
        if self.policy == FIRST:
            self.passed.append(copy.name)
            return
        raise CorruptError(
            f"{copy.name[:_SHOWN]!r} should be the same in {copy.files[0]} and "
            f"{copy.files[1]}, and {_how(copy)}",
            hint="the files are of two saves, or the processes drifted apart; "
            f"{typed_value('copies', 'first')} takes the first of each",
        )

    def warnings(self) -> Iterator[str]:
        """Yield the warnings."""
        if self.policy == CHECK and not (self.equal or self.passed):
            yield (
                "no two processes hold the same tensor: nothing says that the files are of one save"
            )
        if self.left:
            nbytes = sum(copy.first.nbytes for copy in self.left)
            check = typed("--check-copies", "copies='check'")
            yield (
                f"{len(self.left):,} copies ({size(nbytes)}) were not compared, the first of each "
                f"is taken: {check} reads them"
            )
        if self.passed:
            names = list(dict.fromkeys(self.passed))
            yield f"copies differ, the first of each was taken: {some(names)}"


def _by_checksum(a: Tensor, b: Tensor) -> bool | None:
    """Return whether the checksums of two tensors of one shape and dtype are equal, None if they
    cannot tell.
    """
    one, other = a.storage, b.storage
    if one is None or other is None or one is other:
        return one is other
    if not a.nbytes:
        return True
    if one.crc32 is None or other.crc32 is None or one.nbytes != other.nbytes:
        return None
    if one.big_endian != other.big_endian or (a.offset, a.stride) != (b.offset, b.stride):
        return None
    if one.crc32 == other.crc32:
        return True
    whole = a.is_contiguous and one.nbytes == a.nbytes
    return False if whole else None


def _how(copy: Copy) -> str:
    if copy.first.nbytes > READ:
        return "its checksums differ"
    found = compare(copy.first, copy.other)
    if found is None:
        return "its checksums differ, though its bytes do not: one of the files is damaged"
    return f"{found.count:,} of {copy.first.numel:,} elements differ"
