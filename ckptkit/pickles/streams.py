"""Records of the pickles in a file and of the effects of loading them, without a verdict.

Formats find the pickles, :mod:`ckptkit.scanning.trace` traces them, and
:mod:`ckptkit.scanning.verdict` judges the traces.
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

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # the first pickle of a legacy stream
TORCH_LOAD = "torch.load"
PICKLE = "pickle.load"
TORCHSCRIPT = "torch.jit.load"
NUMPY = "numpy.load(allow_pickle=True)"
NOT_TORCH = "not a file of torch.save"


@dataclass(frozen=True, slots=True)
class PickleStream:
    """Bytes that a loader passes to an unpickler.

    ``where`` is their place inside the file, ``""`` for the file itself. ``packed`` is the
    compression method of the `length` bytes, None without compression. ``open_end``: the end of the
    bytes is unknown. ``count`` is the number of consecutive pickles. If it exceeds 1, other bytes
    may follow. If it is None, the number is unknown, and other bytes may lie between the pickles.
    ``no_weights_only`` is the reason why `torch.load(weights_only=True)` cannot read the container,
    None if it can. ``weak``: only the first bytes suggest that the bytes are a pickle.
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
    """Bytes inside a file that may be a separate file.

    ``likely``: the bytes have the file name of a pickle.
    """

    where: str
    source: ByteSource
    likely: bool = False
    packed: str | None = None
    open_end: bool = False


@dataclass(frozen=True, slots=True)
class Remark:
    """A part of a file that ckptkit cannot read, or that two readers interpret differently.

    ``harmless``: the remark casts no doubt on the file, only on how programs treat it.
    """

    where: str
    reason: str
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """TorchScript source, which loading compiles and a call runs.

    ``files`` are descriptions of the files that its operators read, write or load.
    """

    where: str
    functions: int
    files: tuple[str, ...]


Found = PickleStream | Inner | Remark | Program


class Call(NamedTuple):
    """A call that loading would make: the first of its `kind` for this callable.

    Kinds are the levels of :mod:`ckptkit.pickles.judge`.
    """

    name: str  # the callable
    opcode: str
    kind: str
    args: str  # shortened
    offset: int  # of the opcode, in the stream's source
    times: int


class Nested(NamedTuple):
    """A byte string that looks like a file.

    If `loaded`, the pickle itself loads the file. Otherwise a program that uses the value may.
    """

    offset: int  # of the opcode
    source: ByteSource
    loaded: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The names and calls of one pickle, up to its end or the first error.

    ``error`` is the position and reason of a failure before the end. ``goes_on``: an unpickler of
    CPython may continue after that position. ``may_be_legacy``: the value may be the magic number
    of a legacy file, after which torch.load loads four more pickles. ``doubts`` are points on which
    unpicklers disagree. ``refused`` describes the first step, other than a name, that
    `torch.load(weights_only=True)` rejects; None without such a step.
    """

    protocol: int
    size: int  # bytes read, without large byte strings
    stop: int  # offset in the source of the first byte after STOP, or of the opcode that fails
    globals: tuple[Global, ...]
    values: tuple[Global, ...]  # globals that are values or arguments, not only called
    calls: tuple[Call, ...]
    nested: tuple[Nested, ...]
    doubts: tuple[str, ...]
    refused: str | None
    error: str | None
    goes_on: bool
    may_be_legacy: bool

    @property
    def is_proved(self) -> bool:
        """True if all steps may be written back. Files inside byte strings are not considered."""
        steps = all(call.kind in (*judge.WRITTEN, judge.LOADS) for call in self.calls)
        whole = self.error is None and not self.doubts
        return steps and whole and all(judge.out_of_place(name) is None for name in self.values)


@dataclass(frozen=True, slots=True)
class Traced:
    """A pickle and its trace.

    ``nested``: the pickle is in a byte string that nothing in the file loads.
    """

    where: str
    offset: int  # in the archive member, or in the part that `where` names
    base: int | None  # offset of that part in the file, None if it was compressed
    loader: str
    no_weights_only: str | None
    trace: Trace
    nested: bool = False


# A byte string in a pickle can contain a file that calls functions, and a program may load that
# file. Reading it needs every format, so `ckptkit.scanning` reads it, through a hook.

# First bytes of files that may contain pickles: pickles since protocol 2, zip, gzip, bzip2, xz,
# numpy.
_HEADS = (
    *(bytes((0x80, protocol)) for protocol in range(2, 6)),
    *(b"PK\3\4", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x93NUMPY"),
)
# All opcodes: a pickle of protocol 0 or 1 may begin with any of them.
OPCODES = frozenset((*b"().012BCFGIJKLMNPQRSTUVX]abcdeghijlopqrstu}", *range(0x80, 0x99)))


def looks_like_a_file(head: bytes) -> bool:
    """Return whether a file with these first bytes may be a pickle or contain pickles."""
    return head.startswith(_HEADS) or looks_like_a_pickle(head)


def looks_like_a_pickle(head: bytes) -> bool:
    """Return whether a file with these first bytes may be a pickle.

    Protocols 0 and 1 have no signature.
    """
    return len(head) > 2 and head[0] in OPCODES


def holds_calls(value: Node) -> bool:
    """Return whether a byte string or string is a file with calls that are not allowlisted.

    Python 2 pickled byte strings as strings.
    """
    if isinstance(value, str):
        return (value[-1:] == "." or value[:1] == "\x80") and _text_holds_calls(value)
    if isinstance(value, (bytes, bytearray)):
        return _source_holds_calls(Memory(bytes(value)))
    if isinstance(value, ByteString):
        return _source_holds_calls(Memory(value.data))
    if isinstance(value, StoredBytes) and isinstance(value.extent, Range):  # not computed bytes
        return _source_holds_calls(Section(*value.extent))
    return False


def check_no_calls(value: Node) -> None:
    """Raise UnsafeGlobalError for a byte string or string that is a file with calls."""
    if holds_calls(value):
        raise UnsafeGlobalError(
            "a byte string in the file is a file with calls that are not allowlisted",
            hint="`ckptkit scan {where}` lists them; "
            f"{typed_value('objects', 'drop')} drops the byte string",
        )


def _text_holds_calls(text: str) -> bool:
    try:
        return _source_holds_calls(Memory(text.encode("latin-1")))
    except UnicodeEncodeError:
        return False


def _source_holds_calls(source: ByteSource) -> bool:
    return looks_like_a_file(source.read(0, min(8, source.size))) and not _is_proved(source)


def _is_proved(source: ByteSource) -> bool:
    for seen in hooks.call("inside", source):
        unproved = isinstance(seen, Traced) and not seen.trace.is_proved
        if unproved or (isinstance(seen, Program) and seen.files):
            return False
    return True
