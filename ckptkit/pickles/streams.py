"""Data classes for the pickles in a file, and for the effects of loading a pickle.

The readers in `ckptkit.formats` find the pickles. :mod:`ckptkit.scanning.trace` lists the effects
of loading a pickle, and :mod:`ckptkit.scanning.verdict` judges these effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptkit.core import hooks
from ckptkit.core.bytesource import ByteSource, Memory, Range, Section
from ckptkit.core.errors import UnsafeGlobalError
from ckptkit.core.text import typed_value
from ckptkit.core.tree import ByteString, Global, Node, StoredBytes
from ckptkit.pickles import judge
from ckptkit.pickles.machine import NAMES

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # value of the first pickle in a legacy torch.save file
TORCH_LOAD = "torch.load"
PICKLE = "pickle.load"
TORCHSCRIPT = "torch.jit.load"
NUMPY = "numpy.load(allow_pickle=True)"
NOT_TORCH = "not a file of torch.save"


@dataclass(frozen=True, slots=True)
class PickleStream:
    """Bytes that a loader passes to an unpickler.

    ``where`` names the position inside the file, such as an archive member. ``where`` is ``""``
    for the file itself. ``packed`` is the compression method, None for uncompressed bytes. If
    ``open_end`` is True, the end of the bytes is unknown.

    ``count`` is the number of consecutive pickles. If ``count`` exceeds 1, other bytes may follow
    the last pickle. If ``count`` is None, the number of pickles is unknown, and other bytes may lie
    between two pickles.

    ``no_weights_only`` is the reason why `torch.load(weights_only=True)` cannot read the file, None
    if it can. If ``weak`` is True, only the first bytes suggest a pickle.
    """

    where: str
    source: ByteSource
    offset: int
    length: int
    loader: str = PICKLE
    no_weights_only: str | None = NOT_TORCH
    count: int | None = 1
    packed: str | None = None
    open_end: bool = False
    weak: bool = False


@dataclass(frozen=True, slots=True)
class Inner:
    """Bytes inside a file, such as an archive member. The bytes may themselves be a file.

    If ``likely`` is True, the name of the archive member ends like that of a pickle (``.pkl``).
    """

    where: str
    source: ByteSource
    likely: bool = False
    packed: str | None = None
    open_end: bool = False


@dataclass(frozen=True, slots=True)
class Remark:
    """A part of a file that ckptkit cannot read, or that two readers interpret differently.

    If ``harmless`` is True, the remark does not change the verdict on the file.
    """

    where: str
    reason: str
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """TorchScript source code. `torch.jit.load` compiles the code, and calling the model runs it.

    ``files`` describes the files that operators in the code read, write or load.
    """

    where: str
    functions: int
    files: tuple[str, ...]


Found = PickleStream | Inner | Remark | Program


class Call(NamedTuple):
    """A call that loading the pickle would make.

    ``kind`` is one of `LEVELS` in :mod:`ckptkit.pickles.judge`. Calls of the same kind to the same
    callable share one `Call`, and ``times`` counts the calls.
    """

    name: str  # the callable
    opcode: str
    kind: str
    args: str  # shortened
    offset: int  # offset of the first call's opcode in the source
    times: int


class Nested(NamedTuple):
    """A byte string that looks like a file.

    If ``loaded`` is True, unpickling also loads the byte string as a file. If ``loaded`` is False,
    unpickling does not load the byte string, but a program may load it later.
    """

    offset: int  # where the source contains the opcode that pushes or loads the byte string
    source: ByteSource
    loaded: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The names and calls of one pickle, up to its end or the first error.

    ``error`` describes the first error and its position, None without an error. If ``goes_on`` is
    True, an unpickler of CPython may continue after the error. ``doubts`` describes opcodes that
    different unpicklers interpret differently.

    If ``may_be_legacy`` is True, the value of the pickle may be the magic number of a legacy
    torch.save file. After the magic number, torch.load loads four more pickles.

    ``refused`` describes the first operation that `torch.load(weights_only=True)` rejects, and is
    None without such an operation. Names of classes and functions do not count as operations.
    """

    protocol: int
    size: int  # Number of bytes read. Large byte strings do not count.
    stop: int  # Offset of the first byte after STOP, or of the opcode that fails.
    globals: tuple[Global, ...]
    values: tuple[Global, ...]  # globals that the pickle uses as a value or argument
    calls: tuple[Call, ...]
    nested: tuple[Nested, ...]
    doubts: tuple[str, ...]
    refused: str | None
    error: str | None
    goes_on: bool
    may_be_legacy: bool

    @property
    def is_proved(self) -> bool:
        """True if loading the pickle is proved harmless, except for byte strings inside it."""
        steps = all(call.kind in (*judge.WRITTEN, judge.LOADS) for call in self.calls)
        whole = self.error is None and not self.doubts
        return steps and whole and all(judge.out_of_place(name) is None for name in self.values)


@dataclass(frozen=True, slots=True)
class Traced:
    """A pickle and its trace.

    If ``nested`` is True, the pickle is inside a byte string that no call in the file loads.
    """

    where: str
    offset: int  # offset of the pickle inside the archive member that `where` names
    base: int | None  # offset of the archive member in the file, None if it was compressed
    loader: str
    no_weights_only: str | None
    trace: Trace
    nested: bool = False


# A byte string in a pickle can contain a second pickle that calls functions. A program may load the
# second pickle. `holds_calls` searches byte strings for such pickles. `holds_calls` calls
# `ckptkit.scanning` through a hook, because the byte string may have any file format.

# Signatures of pickles since protocol 2, and of the zip, gzip, bzip2, xz and NumPy formats
_HEADS = (
    *(bytes((0x80, protocol)) for protocol in range(2, 6)),
    *(b"PK\3\4", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x93NUMPY"),
)


def looks_like_a_file(head: bytes) -> bool:
    """Return whether a file with these first bytes may be a pickle or contain pickles."""
    return head.startswith(_HEADS) or looks_like_a_pickle(head)


def looks_like_a_pickle(head: bytes) -> bool:
    """Return whether a file with these first bytes may be a pickle.

    Protocols 0 and 1 have no signature: such a pickle may begin with any opcode.
    """
    return len(head) > 2 and head[0] in NAMES


def holds_calls(value: Node) -> bool:
    """Return whether a byte string or string contains a pickle with calls outside the allowlist.

    Strings are checked because Python 2 pickled byte strings as strings.
    """
    if isinstance(value, str):
        if value[-1:] != "." and value[:1] != "\x80":
            return False
        try:
            source: ByteSource = Memory(value.encode("latin-1"))
        except UnicodeEncodeError:
            return False
    elif isinstance(value, (bytes, bytearray)):
        source = Memory(bytes(value))
    elif isinstance(value, ByteString):
        source = Memory(value.data)
    elif isinstance(value, StoredBytes) and isinstance(value.extent, Range):  # not computed bytes
        source = Section(*value.extent)
    else:
        return False
    return looks_like_a_file(source.read(0, min(8, source.size))) and not _is_proved(source)


def check_no_calls(value: Node) -> None:
    """Raise UnsafeGlobalError if `holds_calls` returns True for a byte string or string."""
    if holds_calls(value):
        raise UnsafeGlobalError(
            "a byte string in the file contains a pickle with calls that are not allowlisted",
            hint="`ckptkit scan {where}` lists the calls; "
            f"{typed_value('objects', 'drop')} drops the byte string",
        )


def _is_proved(source: ByteSource) -> bool:
    for seen in hooks.pickles(source, inside=True):
        unproved = isinstance(seen, Traced) and not seen.trace.is_proved
        if unproved or (isinstance(seen, Program) and seen.files):
            return False
    return True
