"""Pickles that were found, and what loading them would do: facts, without a verdict.

Found by formats, filled in by the tracer (:mod:`ckptkit.scanning.trace`), judged by
:mod:`ckptkit.scanning.verdict`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptkit.core import above
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
    """Bytes that some loader hands to a pickle machine.

    ``where`` is their place inside the file, ``""`` for the file itself. They are `length` bytes,
    `packed` by a method of compression if that is not None; where they end is not known if
    `open_end`. ``count`` pickles follow each other, and then come other bytes if there are more
    than one; with None there are some, with other bytes between them. ``no_weights_only`` says why
    `torch.load(weights_only=True)` does not read the container, None if it does. ``weak``: only how
    it begins says that it is a pickle.
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
    """Bytes inside a file that may be a file of their own. ``likely``: its name says that it is a
    pickle."""

    where: str
    source: ByteSource
    likely: bool = False
    packed: str | None = None
    open_end: bool = False


@dataclass(frozen=True, slots=True)
class Remark:
    """A place that could not be read, or that two readers see differently.

    ``harmless``: a text that is no doubt about the file, but about what a program does with it.
    """

    where: str
    reason: str
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """Source text of TorchScript: compiled when it is loaded, run when it is called. ``files``:
    what it reads, writes or loads, by the operators that do."""

    where: str
    functions: int
    files: tuple[str, ...]


Found = PickleStream | Inner | Remark | Program


class Call(NamedTuple):
    """A call that loading would make, the first of its `kind` for this callable.

    Kinds are those of :mod:`ckptkit.pickles.judge`.
    """

    name: str  # what is called
    opcode: str
    kind: str
    args: str  # shortened
    offset: int  # of the opcode, in the stream's source
    times: int


class Nested(NamedTuple):
    """A byte string that looks like a file.

    It is loaded by the user of the value, or by the pickle itself (`loaded`).
    """

    offset: int  # of the opcode
    source: ByteSource
    loaded: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The names and calls of one pickle, as far as a machine would run it.

    ``error`` is where and why it stops before STOP, ``goes_on`` whether CPython's machines may run
    what follows; ``may_be_legacy`` whether its value may be the magic number, so that torch.load
    loads the four pickles that follow; ``doubts`` are what different machines
    understand differently. ``refused`` is what else than a name `torch.load(weights_only=True)`
    refuses, None if nothing.
    """

    protocol: int
    size: int  # bytes that were read, without large byte strings
    stop: int  # offset in the source of the first byte after STOP, or of the opcode that fails
    globals: tuple[Global, ...]
    values: tuple[
        Global, ...
    ]  # those that are not only called, but kept as values or handed to calls
    calls: tuple[Call, ...]
    nested: tuple[Nested, ...]
    doubts: tuple[str, ...]
    refused: str | None
    error: str | None
    goes_on: bool
    may_be_legacy: bool

    @property
    def is_proved(self) -> bool:
        """Return whether every step is one that may be written back, files inside aside."""
        steps = all(call.kind in (*judge.WRITTEN, judge.LOADS) for call in self.calls)
        whole = self.error is None and not self.doubts
        return steps and whole and all(judge.out_of_place(name) is None for name in self.values)


@dataclass(frozen=True, slots=True)
class Traced:
    """A pickle that was found, and what it would do.

    ``nested``: in a byte string that nothing in the file loads.
    """

    where: str
    offset: int  # in the archive's member, or whatever else `where` says
    base: int | None  # where that begins in the file, None if it was unpacked
    loader: str
    no_weights_only: str | None
    trace: Trace
    nested: bool = False


# Byte strings and texts that are files of their own, with calls in them: a program may load them.
# The search for their content needs every format: it is in the room scanning, above this one.

# How files begin that may have pickles inside: pickles since protocol 2, zip, gzip, bzip2, xz,
# numpy.
_HEADS = (
    *(bytes((0x80, protocol)) for protocol in range(2, 6)),
    *(b"PK\3\4", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x93NUMPY"),
)
# All opcodes: a pickle without a protocol may begin with any of them.
OPCODES = frozenset((*b"().012BCFGIJKLMNPQRSTUVX]abcdeghijlopqrstu}", *range(0x80, 0x99)))


def looks_like_a_file(head: bytes) -> bool:
    """Return whether bytes that begin so may be a pickle, or a file that has pickles inside."""
    return head.startswith(_HEADS) or looks_like_a_pickle(head)


def looks_like_a_pickle(head: bytes) -> bool:
    """Return whether bytes that begin so may be a pickle: of protocol 0 and 1 it has no
    signature."""
    return len(head) > 2 and head[0] in OPCODES


def holds_calls(value: Node) -> bool:
    """Return whether a byte string or a text is a file of its own with calls in it.

    A text may be a byte string of Python 2.
    """
    if isinstance(value, str):
        return (value[-1:] == "." or value[:1] == "\x80") and _text_holds_calls(value)
    if isinstance(value, (bytes, bytearray)):
        return _source_holds_calls(Memory(bytes(value)))
    if isinstance(value, ByteString):
        return _source_holds_calls(Memory(value.data))
    if isinstance(value, StoredBytes) and isinstance(value.extent, Range):  # else made here
        return _source_holds_calls(Section(*value.extent))
    return False


def check_no_calls(value: Node) -> None:
    """Refuse a byte string or text that is a file with calls in it. Raises UnsafeGlobalError."""
    if holds_calls(value):
        raise UnsafeGlobalError(
            "the file holds a byte string that is a file of its own, with calls that are not "
            "in the allowlist",
            hint="`ckptkit scan {where}` says what is in it; "
            f"{typed_value('objects', 'drop')} leaves it out",
        )


def _text_holds_calls(text: str) -> bool:
    try:
        return _source_holds_calls(Memory(text.encode("latin-1")))
    except UnicodeEncodeError:
        return False


def _source_holds_calls(source: ByteSource) -> bool:
    return looks_like_a_file(source.read(0, min(8, source.size))) and not _is_proved(source)


def _is_proved(source: ByteSource) -> bool:
    for seen in above.call("inside", source):
        unproved = isinstance(seen, Traced) and not seen.trace.is_proved
        if unproved or (isinstance(seen, Program) and seen.files):
            return False
    return True
