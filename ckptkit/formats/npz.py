"""numpy's archive of named arrays: a zip of ``<name>.npy``, stored or deflated (see :mod:`npy`).

Source: numpy.savez, numpy.savez_compressed. In numpy, unlike torch, names that differ only in case
are distinct.

Written as numpy.savez does, uncompressed; the elements begin at multiples of 64 bytes. The format
holds arrays of numbers alone: everything outside the weights is left out, and tied tensors are
written twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckptkit import compute
from ckptkit.core.bytesource import Derived, Memory, Range, crc32, crc32_combine
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, TensorError
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import shown, some
from ckptkit.core.tree import Global, Node, OrderedMapping
from ckptkit.formats import table
from ckptkit.formats.common.dropped import leftovers, refuse_objects, refuse_pieces, shared_bytes
from ckptkit.formats.common.plain_json import is_utf8
from ckptkit.formats.containers.zip_writer import ZipMember, lay_out
from ckptkit.formats.format import Probe, WriteOptions
from ckptkit.formats.npy import header, read_array

SUFFIX = ".npy"
_NAME_BYTES = (1 << 16) - 1 - len(SUFFIX)
_CONTROL = re.compile("[\x00-\x1f\x7f]")


def matches(probe: Probe) -> bool:
    return probe.zip is not None and all(name.endswith(SUFFIX) for name in probe.zip.entries)


def read(probe: Probe) -> Checkpoint:
    """Read the arrays by name, in the order of the archive.

    Raises what :func:`npy.read_array` raises, with the name.
    """
    archive = probe.zip
    assert archive is not None
    root: dict[Node, Node] = {}
    globals: dict[Global, None] = {}
    warnings: list[str] = []
    for member in archive.entries:
        name = member.removesuffix(SUFFIX)
        try:
            array = read_array(archive.locate(member), archive.crc(member))
        except CkptkitError as error:
            error.message = f"array {shown(name)}: {error.message}"
            raise
        root[name] = array.root
        if array.pickled is not None:
            globals.update(dict.fromkeys(array.pickled.globals))
            warnings += [
                f"array {shown(name)} holds objects of Python: a pickle",
                *array.pickled.warnings,
            ]
    return Checkpoint(
        root, table.NPZ.name, archive.source, globals=tuple(globals), warnings=tuple(warnings)
    )


def layout(checkpoint: Checkpoint, options: WriteOptions) -> Plan:
    """Plan the weights as arrays; the notes name what is left out.

    Raises TensorError for tensors without an equivalent array.
    """
    if options.objects == "error":
        refuse_objects(checkpoint)
    tensors = checkpoint.required.tensors
    refuse_pieces(checkpoint.required.nodes)
    _check_holdable(tensors)
    _, notes = leftovers(checkpoint)
    lost = list(_lost(checkpoint))
    if lost:
        notes.insert(0, f"left out: {some(lost, 6)}, for which npz has no place")
    members = (_member(name, tensor) for name, tensor in tensors.items())
    return Plan(
        (OutputFile("", tuple(lay_out(members)), keeps_sums=True),),
        (*notes, *shared_bytes(tensors)),
    )


def _lost(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield notes on the texts that other formats keep."""
    yield from leftovers(checkpoint)[0]
    yield from (f"{key} (metadata)" for key in checkpoint.extras)
    node = checkpoint.required.node
    if isinstance(node, OrderedMapping) and node.state:
        yield from (f"{key} of the state_dict" for key in node.state)


def _member(name: str, tensor: Tensor) -> ZipMember:
    before = header(tensor.dtype, tensor.shape)
    if not tensor.nbytes:
        return ZipMember(name + SUFFIX, before)
    assert tensor.storage is not None
    record = compute.contiguous(tensor)
    extent = record.locate()
    known = (
        tensor.storage.crc32
        if isinstance(extent, Range) and record is tensor.storage.record
        else None
    )
    crc = None if known is None else crc32_combine(crc32(before), known, extent.length)
    literal = Range(Memory(before, name), 0, len(before))
    return ZipMember(
        name + SUFFIX, Derived("concat", (literal, extent), (), literal.length + extent.length), crc
    )


def _check_holdable(tensors: Mapping[str, Tensor]) -> None:
    refused = [(name, why) for name, tensor in tensors.items() if (why := _obstacle(name, tensor))]
    if refused:
        named = some((f"{shown(name)} ({why})" for name, why in refused), 3)
        floats = all(
            tensors[name].dtype.kind == "float" and why == tensors[name].dtype.name
            for name, why in refused
        )
        raise TensorError(
            f"npz cannot hold {named}",
            hint="`convert --cast float32` converts them to floats of numpy"
            if floats
            else "leave them out with `convert --drop`",
        )


def _is_member_name(name: str) -> bool:
    """Return whether every reader of zip files takes a name as the same relative path."""
    if not is_utf8(name) or len(name.encode()) > _NAME_BYTES or _CONTROL.search(name):
        return False
    return not ("\\" in name or name.startswith("/") or ".." in name.split("/"))


def _obstacle(name: str, tensor: Tensor) -> str | None:
    """Return why the format cannot hold a tensor, None if it can."""
    if not _is_member_name(name):
        return "a name that a member of a zip file cannot have"
    if tensor.layout != "strided":
        return tensor.layout
    if tensor.storage is None:
        return "meta"
    return tensor.dtype.name if tensor.dtype.numpy is None else None
