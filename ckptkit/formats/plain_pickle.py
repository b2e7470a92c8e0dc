"""A pickle that is not a torch file: numpy arrays, or tensors and modules from ``pickle.dump``.

One pickle of protocol 0 to 5, from the first byte of the file to the last. Protocols 2 and later
begin with 0x80 and their number; earlier ones have no signature, so they are tried: a file is one
if it ends with STOP (".") and runs. Arrays stay where they are in the file, whatever their size.

Outside of torch.save each storage is a call of ``torch.storage._load_from_bytes`` with a file of
torch.save, a legacy stream whose object is the storage. (torch/storage.py,
`TypedStorage.__reduce__`)
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.core.bytesource import ByteSource, Memory, Range, Section
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError, UnsupportedError
from ckptkit.core.tensor import TypedStorage
from ckptkit.core.tree import Global, Node, Object, StoredBytes
from ckptkit.formats import table, torch_legacy
from ckptkit.formats.format import Probe
from ckptkit.pickles.globals import REDUCERS
from ckptkit.pickles.streams import Found, PickleStream
from ckptkit.pickles.values import Unpickled, unpickle

TEXT_LIMIT = 64 << 20  # bytes of a protocol 0 or 1 pickle that is tried
_FIRST = b"(]}lctdNIJKMLFGSTUVX"  # opcodes that a pickle of protocol 0 or 1 may begin with


def matches(probe: Probe) -> bool:
    head = probe.head
    if len(head) < 2:
        return False
    if head[0] == 0x80:
        return 2 <= head[1] <= 5
    return head[0] in _FIRST and probe.source.size <= TEXT_LIMIT and _runs(probe)


def _runs(probe: Probe) -> bool:
    source = probe.source
    try:
        if source.read(source.size - 1, 1) != b".":
            return False
        return _machine(source, _Stored()).stop == source.size
    except CkptkitError:
        return False


def read(probe: Probe) -> Checkpoint:
    """Read the tree of the pickle."""
    source = probe.source
    stored = _Stored()
    pickled = _unpickled(probe, stored)
    if pickled.stop != source.size:
        follow = f"{source.size - pickled.stop:,} bytes follow the pickle"
        if _is_pickle(source, pickled.stop):
            raise AmbiguousError(
                f"holds several pickles, one after another: {follow} that pickle.load reads",
                hint="read each with pickle.load if you trust it, and save it in a file of its own",
            )
        raise AmbiguousError(f"{follow}: other readers may interpret them")
    names = tuple(dict.fromkeys((*pickled.globals, *stored.globals)))
    return Checkpoint(
        pickled.root, table.PICKLE.name, source, globals=names, warnings=pickled.warnings
    )


def _is_pickle(source: ByteSource, start: int) -> bool:
    """Return whether a pickle of protocol 2 or later begins at `start`."""
    if source.read(start, min(2, source.size - start))[:1] != b"\x80":
        return False
    try:
        unpickle(source, start)
    except CkptkitError:
        return False
    return True


class _Stored:
    """Reader of the storages of one pickle, each a file inside it."""

    def __init__(self) -> None:
        self.globals: dict[Global, None] = {}

    def load(self, made: Global, args: tuple[Node, ...]) -> Node:
        """Return the storage that `_load_from_bytes` would give.

        Anything else in its file stays a call.
        """
        inner = _inner(args[0]) if len(args) == 1 else None
        if inner is None or not torch_legacy.matches(Probe(inner)):
            return Object(made, args)
        held = torch_legacy.parse(inner)
        if not isinstance(held.root, TypedStorage):
            return Object(made, args)
        self.globals |= dict.fromkeys(held.globals)
        return held.root


def _inner(data: Node) -> ByteSource | None:
    """Open a byte string of a pickle as a file of its own."""
    if isinstance(data, StoredBytes) and isinstance(data.extent, Range):
        return Section(*data.extent)
    return Memory(data, "a storage") if isinstance(data, bytes) else None


def _machine(source: ByteSource, stored: _Stored) -> Unpickled:
    known = {**REDUCERS, ("torch.storage", "_load_from_bytes"): stored.load}
    return unpickle(source, reducers=known)


def _unpickled(probe: Probe, stored: _Stored) -> Unpickled:
    try:
        return _machine(probe.source, stored)
    except FormatError as error:
        if b"NumpyArrayWrapper" in probe.source.read(0, min(probe.source.size, 1 << 20)):
            raise UnsupportedError(
                "is a joblib file: its arrays are between the opcodes of a pickle",
                hint="if you trust it, load it with joblib, and save its arrays with numpy.savez",
            ) from error
        error.hint = (
            error.hint
            or "the file begins like a pickle; if it is something else, ckptkit cannot read it"
        )
        raise


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the single pickle; trailing data is left to the scanner."""
    return (
        iter((PickleStream("", probe.source, 0, probe.source.size, weak=True),))
        if matches(probe)
        else None
    )
