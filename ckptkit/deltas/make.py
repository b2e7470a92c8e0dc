"""Make a delta from two checkpoints, or combine several consecutive deltas into one delta."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ckptkit import formats
from ckptkit.api import open_checkpoint, save
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.lazy import np
from ckptkit.compute.operation import PIECE, in_step, stream_reusing_buffer
from ckptkit.core import arguments
from ckptkit.core.bytesource import Extent, LocalFile, Range
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.options import Options, made
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.text import plural, some, typed
from ckptkit.core.text import size as shown_size
from ckptkit.core.tree import Node, OrderedMapping
from ckptkit.deltas.apply import apply, version_of
from ckptkit.deltas.forms import (
    INDEX,
    OVERWRITE,
    WHOLE,
    XOR,
    Change,
    Delta,
    Hash,
    Paths,
    hashing,
    read_all,
    unzstd,
    zstandard,
)
from ckptkit.formats.table import SAFETENSORS
from ckptkit.publish.preflight import check_destination
from ckptkit.publish.publish import new_file, publish, temporary_name

if TYPE_CHECKING:
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    # The changed tensor as (``new ^ old``, new bytes) in pieces, the size of the tensor in bytes,
    # and a function that returns the checksum of the new bytes after the last piece.
    _Work = tuple[Iterator[tuple[Bytes, Bytes]], int, Callable[[], str]]

ENCODINGS = XOR, OVERWRITE, "auto"
CHECKSUMS = "xxh3-128", "blake3", "adler32"
_LEVEL = 1  # zstd level, as in slime
# `overwrite` encodes only tensors with fewer bytes than this number, because the position of a byte
# is a uint32.
_MOST_PLACES = 1 << 32
_FILE = 5 * 10**9  # maximum size of an output file in bytes, unless a single frame is larger
_AT_ONCE = 1 << 20  # number of bytes to compare at once
# Maximum number of bytes to keep in memory, for positions and for values separately.
_HELD = 8 << 20


@dataclass(frozen=True, slots=True)
class Made:
    """The result of `delta` or `squash_delta`: changed bytes, versions, and size of the delta."""

    path: str
    encoding: str
    version: int
    base_version: int
    changed: dict[str, int]  # name of a tensor -> number of changed bytes
    tensors: int
    nbytes: int  # size of all tensors in bytes; 0 if deltas were combined without a base
    written: int  # size of the delta in bytes

    def __str__(self) -> str:
        share = 100 * sum(self.changed.values()) / (self.nbytes or 1)
        return (
            f"{len(self.changed):,} of {plural(self.tensors, 'tensor')} changed, "
            f"{sum(self.changed.values()):,} bytes ({share:.2g} %): "
            f"{shown_size(self.written)} instead of {shown_size(self.nbytes)}"
        )


class _Frame(NamedTuple):
    """The change of one tensor, and the position of its frame in a temporary file."""

    path: str
    begin: int
    length: int  # number of bytes of the frame
    digest: str
    changed: int  # number of changed bytes


@arguments.checked
def delta(
    old: Source,
    new: Source,
    path: str | os.PathLike[str],
    *,
    encoding: str = XOR,
    checksum: str = CHECKSUMS[0],
    version: int | None = None,
    base_version: int | None = None,
    whole: bool = False,
    **options: Any,
) -> Made:
    """Write the folder `path`: a delta from the weights of `old` to the weights of `new`.

    `old` and `new` must have the same names, dtypes and shapes. `encoding` is one of these:

    - ``xor``: the smallest delta.
    - ``overwrite``: a delta with the same result if you apply it twice.
    - ``auto``: ``overwrite``, or ``xor`` if a tensor has 4 GiB or more.

    The default of `base_version` is the version that the folder of `old` records. If the folder
    records no version, the default is `version` - 1, or 0 without `version`. The default of
    `version` is the base version + 1. With `whole`, `delta` writes `new` as a complete version.
    `options` are those of :func:`ckptkit.save`. If the format cannot store the difference, `delta`
    raises UsageError and writes nothing.
    """
    choices = (("encoding", encoding, ENCODINGS), ("checksum", checksum, CHECKSUMS))
    for word, given, known in choices:
        if given not in known:
            raise UsageError(f"{word} {given!r} is not one of {some(known)}")
    settings = made(Options(), options)
    with open_checkpoint(old) as before, open_checkpoint(new) as after:
        base = version_of(before) if base_version is None else base_version
        if base is None:
            base = 0 if version is None else version - 1
        number = base + 1 if version is None else version
        if whole:
            sizes = {name: tensor.nbytes for name, tensor in after.required.tensors.items()}
            done = save(after, path, replace(settings, format="sharded"))
            size = done.plan.size
            return Made(
                done.path, WHOLE, number, base, sizes, len(sizes), sum(sizes.values()), size
            )
        pairs = _paired(before.required.tensors, after.required.tensors)
        sizes = {name: tensor.nbytes for name, (_, tensor) in pairs.items()}
        is_large = max(sizes.values(), default=0) >= _MOST_PLACES
        if encoding == "auto":
            encoding = XOR if is_large else OVERWRITE
        if encoding == OVERWRITE and is_large:
            what = "a tensor has 4 GiB or more, which the encoding overwrite does not support"
            raise UsageError(what, hint=f"use {typed('--encoding xor', 'encoding=xor')}")

        def work(name: str) -> _Work:
            one, other = (contiguous(each).locate() for each in pairs[name])
            total = hashing(checksum)
            return _differences(one, other, total), other.length, total.hexdigest

        changed, written = _written(pairs, work, path, encoding, (number, base), checksum, settings)
        nbytes = sum(sizes.values())
        name = os.fspath(path)
        return Made(name, encoding, number, base, changed, len(pairs), nbytes, written)


def _paired(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Map names to pairs (old tensor, new tensor). For tied tensors, use only the first name.

    Raises UsageError if the names, dtypes or shapes in `old` and `new` differ.
    """
    odd = [f"{name} is new" for name in new if name not in old]
    odd += [f"{name} is gone" for name in old if name not in new]
    for name, tensor in new.items():
        before = old.get(name, tensor)
        if (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
            odd.append(
                f"{name} was {before.dtype} {list(before.shape)} and is {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    if odd:
        raise UsageError(
            f"a delta cannot express {plural(len(odd), 'difference')}: {'; '.join(odd[:8])}"
            + ("..." if len(odd) > 8 else ""),
            hint=f"{typed('--whole', 'whole=True')} writes the complete new checkpoint",
        )
    pairs: dict[tuple[object, ...], str] = {}
    for name, tensor in new.items():
        if tensor.storage is None or old[name].storage is None:
            raise UnsupportedError(f"{name} has no data (meta device)")
        pairs.setdefault((tensor.elements_key, old[name].elements_key), name)
    return {name: (old[name], new[name]) for name in pairs.values()}


def _written(
    names: Iterable[str],
    work: Callable[[str], _Work],
    path: str | os.PathLike[str],
    encoding: str,
    versions: tuple[int, int],
    checksum: str,
    options: Options,
) -> tuple[dict[str, int], int]:
    """Compute the frames of all tensors on all cores, and publish the folder.

    Return the number of changed bytes of each changed tensor, and the size of the folder in bytes.
    Each thread writes frames to a temporary file first, because the header of a safetensors file
    must contain the sizes of its frames.
    """
    place = os.path.abspath(arguments.path("destination", path))
    check_destination(Plan((OutputFile(INDEX, ()),)), os.fspath(path), place, options.force, ())
    here = threading.local()
    spools: dict[str, BinaryIO] = {}
    sources: dict[str, LocalFile] = {}

    def run(name: str) -> _Frame:
        if not hasattr(here, "path"):
            here.path = temporary_name(place)
            spools[here.path] = os.fdopen(new_file(here.path), "wb", buffering=PIECE)
        spool = spools[here.path]
        pieces, length, digest = work(name)
        begin = spool.tell()
        changed = _encode(pieces, length, encoding, spool)
        return _Frame(here.path, begin, spool.tell() - begin, digest(), changed)

    names = list(names)
    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            try:
                frames = zip(names, pool.map(run, names), strict=True)
                found = {name: frame for name, frame in frames if frame.changed}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for spool_path, spool in spools.items():
            spool.close()
            sources[spool_path] = LocalFile(spool_path)
        files, places = _files(found, sources, options)
        index = {
            "metadata": {
                "version": f"{versions[0]:06d}",
                "base_version": f"{versions[1]:06d}",
                "delta_encoding": encoding,
                "compression_format": "zstd",
                "checksum_format": checksum,
            },
            "weight_map": places,
        }
        text = json.dumps(index, indent=1).encode()
        plan = Plan((*files, OutputFile(INDEX, (text,))), tensors=len(found))
        publish(plan, path, replace(options, allow_expand=True))
        return {name: frame.changed for name, frame in found.items()}, plan.size
    finally:
        for spool_path, spool in spools.items():
            spool.close()
            if spool_path in sources:
                sources[spool_path].close()
            os.unlink(spool_path)


def _files(
    found: Mapping[str, _Frame], sources: Mapping[str, LocalFile], options: Options
) -> tuple[list[OutputFile], dict[str, str]]:
    """Return the planned output files, and a dict from tensor names to file names."""
    groups: list[dict[Node, Node]] = []
    room = 0
    for name, frame in found.items():
        if not groups or frame.length > room:
            groups.append({})
            room = _FILE
        room -= frame.length
        storage = Storage(Range(sources[frame.path], frame.begin, frame.length))
        groups[-1][name] = Tensor(storage, BY_NAME["uint8"], (frame.length,), (1,))
    files: list[OutputFile] = []
    places: dict[str, str] = {}
    for number, tensors in enumerate(groups):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        sums = {name: found[name].digest for name in tensors}
        held = Checkpoint(OrderedMapping(tensors), SAFETENSORS.name, None, sums)
        plan = formats.layout(held, SAFETENSORS, replace(options, extras=False, all=False))
        files.append(replace(plan.files[0], name=file))
        places |= dict.fromkeys(sums, file)
    return files, places


def _differences(old: Extent, new: Extent, total: Hash) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield (``new ^ old``, new bytes) in pieces. Add the new bytes to the checksum `total`."""
    for one, other in in_step(
        [stream_reusing_buffer(old), stream_reusing_buffer(new)], (1, 1), _AT_ONCE
    ):
        total.update(other)
        after = np.frombuffer(other, np.uint8)
        yield np.bitwise_xor(np.frombuffer(one, np.uint8), after), after


def _encode(
    differences: Iterable[tuple[Bytes, Bytes]], length: int, encoding: str, spool: BinaryIO
) -> int:
    """Append the frame of a tensor to `spool`. Return the number of changed bytes.

    `length` is the size of the tensor in bytes. If no byte changed, append nothing.
    """
    compressor = zstandard().ZstdCompressor(level=_LEVEL)
    begin, at, changed = spool.tell(), 0, 0
    if encoding == XOR:
        machine = compressor.compressobj(size=length)
        for difference, _ in differences:
            changed += int(np.count_nonzero(difference))
            spool.write(machine.compress(difference.data))
        spool.write(machine.flush())
        if not changed:
            spool.seek(begin)
            spool.truncate()
        return changed
    held = tempfile.SpooledTemporaryFile
    with held(_HELD) as positions, held(_HELD) as values:
        for difference, after in differences:
            places = np.flatnonzero(difference)
            positions.write((places + at).astype("<u4").data)
            values.write(after[places].data)
            changed += len(places)
            at += len(after)
        if changed:
            machine = compressor.compressobj(size=4 + 5 * changed)
            spool.write(machine.compress(changed.to_bytes(4, "little")))
            for file in (positions, values):
                file.seek(0)
                for piece in iter(partial(file.read, _AT_ONCE), b""):
                    spool.write(machine.compress(piece))
            spool.write(machine.flush())
    return changed


@arguments.checked
def squash_delta(
    deltas: Paths,
    path: str | os.PathLike[str],
    *,
    base: Source | None = None,
    checksum: str = CHECKSUMS[0],
    **options: Any,
) -> Made:
    """Combine consecutive `deltas` into one delta.

    Without `base`, all deltas must have the encoding ``xor``. With `base`, ckptkit applies the
    deltas to the base and computes a new delta. Raises UsageError for deltas that are not
    consecutive.
    """
    found = read_all(deltas)
    if not found:
        raise UsageError("no deltas to combine")
    first, last = found[0], found[-1]
    for one, other in pairwise(found):
        if other.base_version != one.version:
            raise UsageError(
                f"applies to version {other.base_version}, but {one.name} is version "
                f"{one.version}: the deltas are not consecutive",
                where=other.name,
            )
    if first.version is None or last.version is None or first.base_version is None:
        raise UsageError("records no version", where=first.name)
    if base is not None:
        with open_checkpoint(base) as before:
            after = apply(before, found, base_version=first.base_version)
            encoding = XOR if first.encoding == XOR else OVERWRITE
            return delta(
                before, after, path, encoding=encoding, checksum=checksum, version=last.version,
                base_version=first.base_version, **options,
            )  # fmt: skip
    if odd := [each for each in found if each.encoding != XOR]:
        raise UsageError(
            f"has the encoding {odd[0].encoding}; only {XOR} deltas can be combined without a base",
            where=odd[0].name,
            hint=f"pass the base: {typed('--base BASE', 'base=...')}",
        )
    return _joined(found, path, made(Options(), options))


def _joined(found: Sequence[Delta], path: str | os.PathLike[str], options: Options) -> Made:
    """Combine the frames of xor deltas."""
    changes: dict[str, list[Change]] = {}
    for each in found:
        for name, change in each.changes.items():
            changes.setdefault(name, []).append(change)
    sums = {name: each[-1].checksum for name, each in changes.items()}
    algorithms = {checksum[0] for checksum in sums.values() if checksum}
    unchecked = [name for name, checksum in sums.items() if checksum is None]
    if unchecked or len(algorithms) > 1:
        what = f"the deltas have no checksums for {some(unchecked)}"
        if not unchecked:
            what = f"the deltas have different checksum algorithms: {some(sorted(algorithms))}"
        raise UsageError(what, hint=f"pass the base: {typed('--base BASE', 'base=...')}")

    def work(name: str) -> _Work:
        """Return the change of a tensor by all deltas."""
        length = _length(changes[name][0])
        streams = [stream_reusing_buffer(each.decompressed(length)) for each in changes[name]]

        def pieces() -> Iterator[tuple[Bytes, Bytes]]:
            for row in in_step(streams, (1,) * len(streams), _AT_ONCE):
                total = np.frombuffer(row[0], np.uint8).copy()
                for piece in row[1:]:
                    total ^= np.frombuffer(piece, np.uint8)
                yield total, total

        _, digest = sums[name] or ("", "")
        return pieces(), length, lambda: digest

    first, end = found[0], found[-1]
    assert first.base_version is not None and end.version is not None
    versions = end.version, first.base_version
    algorithm = min(algorithms, default=CHECKSUMS[0])
    changed, written = _written(changes, work, path, XOR, versions, algorithm, options)
    return Made(os.fspath(path), XOR, *versions, changed, len(changes), 0, written)


def _length(change: Change) -> int:
    """Return the size of the decompressed frame.

    If the header of the frame does not contain the size, decompress the frame.
    """
    head = change.frame.part(0, min(change.frame.length, 18)).read()
    module = zstandard()
    try:
        size = module.frame_content_size(head)
    except module.ZstdError:
        size = -1  # `unzstd` raises an error that names the tensor
    return size if size >= 0 else sum(map(len, unzstd(change.frame, change.name)))
