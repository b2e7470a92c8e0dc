r"""Compute tensor digests, read and write their manifest, and check the CRC-32 of file parts.

A digest does not depend on the file format. The SHA-256 of a tensor covers its elements alone:
contiguous, row-major, little-endian. The id of a tensor is a SHA-256 over a line of ASCII text
and these same bytes. The line is the dtype in torch's notation, a space, the sizes joined by
commas, and a newline::

    (printf 'float32 16,3,3,3\n'; cat elements.bin) | sha256sum

The manifest lists the ids of a checkpoint's tensors in the format of ``sha256sum``::

    # ckptkit.digest/1 tensors=2 sha256=<64 hex>
    <64 hex>  conv1.weight
    \<64 hex>  a name with a backslash: \\

Each line after the first is the id of a tensor, two spaces and its name. As in a list of
``sha256sum``, backslashes and line breaks in a name are escaped, and a line with escapes starts
with a backslash. Other characters that cannot be printed have the escapes of Python (``\x1b``,
``\u202e``).

The digest of all tensors is the SHA-256 over these lines as UTF-8, sorted by their bytes. They
contain only the escapes of ``sha256sum`` (``\\``, ``\n``, ``\r``)::

    grep -v '^#' net.manifest | LC_ALL=C sort | sha256sum
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ckptkit.api import PathLike, open_checkpoint
from ckptkit.compute.arranged import Allowance, contiguous
from ckptkit.compute.operation import stream_reusing_buffer
from ckptkit.compute.workers import ordered
from ckptkit.core.bytesource import Extent, Folder, Memory, Range, crc32, crc32_combine, leaves
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CollisionError,
    CorruptError,
    FormatError,
    InputError,
    TensorError,
)
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import mismatch
from ckptkit.core.tree import join, walk
from ckptkit.core.weights import as_tensor
from ckptkit.formats.format import CheckedPart, Defect, open_place
from ckptkit.formats.recovering import located, overlap

Progress = Callable[[int, int], None]  # bytes since the last call, bytes in total
Matches = Callable[[str], bool]
Named = tuple[str, Tensor]

# The bytes of tensors


def sha256_each(
    tensors: Iterable[Named], progress: Callable[[int], None] = lambda _: None
) -> Iterator[str | None]:
    """Yield the SHA-256 of the elements of each tensor, in order; threads hash several at a time.

    Yield None for tensors without contiguous bytes: on meta, sparse, strided with elements smaller
    than a byte, or negated with an unsigned dtype. Errors name the tensor. `progress` is called
    with the number of bytes hashed.
    """
    for _, tensor, found in _hashed(tensors, lambda _: b""):
        progress(tensor.nbytes)
        yield found if isinstance(found, str) else None


def tensor_ids(tensors: Iterable[Named]) -> Iterator[tuple[str, Tensor, str | TensorError]]:
    """Yield (name, tensor, id), in order; an error instead of the id if there is none."""
    return _hashed(
        tensors, lambda each: f"{each.dtype} {','.join(map(str, each.shape))}\n".encode()
    )


def _hashed(
    tensors: Iterable[Named], head: Callable[[Tensor], bytes]
) -> Iterator[tuple[str, Tensor, str | TensorError]]:
    allowance = Allowance()

    def hashed(
        row: tuple[str, Tensor, TensorError | None],
    ) -> tuple[str, Tensor, str | TensorError]:
        name, tensor, refusal = row
        if refusal is not None:
            return name, tensor, refusal
        try:
            digest = hashlib.sha256(head(tensor))
            for chunk in stream_reusing_buffer(contiguous(tensor).locate()):
                digest.update(chunk)
            return name, tensor, digest.hexdigest()
        except TensorError as error:
            return name, tensor, error
        except CkptkitError as error:
            error.message = f"{name}: {error.message}"
            raise

    rows = ((name, tensor, allowance.refusal(tensor)) for name, tensor in tensors)
    return ordered(hashed, rows, lambda row: row[1].nbytes)


@dataclass(frozen=True, slots=True)
class Digests:
    """Tensor ids by name, the tensors, and the reasons for missing ids (`without`)."""

    ids: dict[str, str]
    tensors: Mapping[str, Tensor] = field(repr=False)
    without: dict[str, str]

    @property
    def whole(self) -> str:
        """The digest of all tensors, independent of their order."""
        return whole_digest(self.ids)


def digest(
    source: PathLike | Checkpoint,
    *,
    key: str | None = None,
    everything: bool = False,
    matches: Matches | None = None,
    sums: bool = True,
    progress: Progress | None = None,
) -> Digests:
    """Return the tensor ids of the weights by name, or with `everything` of all tensors by path.

    `matches` selects names. With `sums`, bytes are checked against the CRC-32 stored in the file.
    Raises UsageError if there are no weights, CorruptError if bytes are damaged, CollisionError if
    two paths are spelled alike.
    """
    checkpoint = open_checkpoint(source, key=key)
    tensors: dict[str, Tensor] = {} if everything else {**checkpoint.weights}
    for path, node in walk(checkpoint.root) if everything else ():
        tensor = as_tensor(node)
        if tensor is not None and tensors.setdefault(join(path), tensor) is not tensor:
            raise CollisionError(f"two tensors are called {join(path)!r}", where=checkpoint.name)
    rows = [(name, tensor) for name, tensor in tensors.items() if matches is None or matches(name)]
    # Check each storage once. Messages name the first tensor in it.
    storages = {id(each.storage): (name, each.storage) for name, each in reversed(rows)}
    parts = [
        CheckedPart(f"{name}: its storage", storage.record, storage.crc32)
        for name, storage in storages.values()
        if storage is not None and storage.crc32 is not None
    ]
    for _, why in summed(parts if sums else [], lambda count: None):
        if why is not None:
            raise CorruptError(
                why, hint="`ckptkit verify {where}` lists everything that is damaged"
            )
    total = sum(tensor.nbytes for _, tensor in rows)
    ids: dict[str, str] = {}
    without: dict[str, str] = {}
    for name, tensor, found in tensor_ids(rows):
        if isinstance(found, str):
            ids[name] = found
        else:
            without[name] = found.message
        if progress is not None:
            progress(tensor.nbytes, total)
    return Digests(ids, dict(rows), without)


# The manifest

SCHEMA = "ckptkit.digest/1"
_FIRST = re.compile(rf"# {SCHEMA} tensors=([0-9]{{1,9}}) sha256=([0-9a-f]{{64}})")
_LINE = re.compile(r"(\\?)([0-9a-f]{64})  (.*)", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:10|0[0-9a-f])[0-9a-f]{4}|[\\nrt]|.?)", re.DOTALL
)
_PLAIN = {"\\": "\\", "n": "\n", "r": "\r", "t": "\t"}


def whole_digest(ids: Mapping[str, str]) -> str:
    """Return the digest of all tensors from their ids by name; the order does not matter."""

    def only_breaks(name: str) -> str:
        return name.replace("\\", "\\\\").replace("\n", r"\n").replace("\r", r"\r")

    lines = [f"{_line(name, id, only_breaks)}\n" for name, id in ids.items()]
    data = sorted(line.encode("utf-8", "surrogatepass") for line in lines)
    return hashlib.sha256(b"".join(data)).hexdigest()


def manifest_lines(ids: Mapping[str, str], printable: Callable[[str], str]) -> list[str]:
    """Return the lines of the manifest, sorted by name.

    `printable` escapes characters that must not reach a terminal.
    """

    def escape(name: str) -> str:
        return printable(name.replace("\\", "\\\\"))

    first = f"# {SCHEMA} tensors={len(ids)} sha256={whole_digest(ids)}"
    return [first, *(_line(name, ids[name], escape) for name in sorted(ids))]


def _line(name: str, id: str, escape: Callable[[str], str]) -> str:
    escaped = escape(name)
    return f"{chr(92) * (escaped != name)}{id}  {escaped}"


def read_manifest(path: PathLike) -> dict[str, str]:
    """Read a manifest written by `ckptkit digest`; return its ids by name.

    Raises FormatError, CorruptError, LimitError.
    """
    place = open_place(path)
    try:
        if isinstance(place, Folder):
            raise FormatError("is a folder, not a manifest")
        check("index_bytes", place.size, "bytes of a manifest")
        return parse_manifest(place.read(0, place.size))
    except CkptkitError as error:
        raise error.at(place.name) from error.__cause__
    finally:
        place.close()


def parse_manifest(data: bytes) -> dict[str, str]:
    """Return the ids of a manifest by name.

    Raises FormatError if `data` is not a manifest, CorruptError if it is truncated or edited.
    """
    try:
        first, *rest = data.decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise FormatError("is not a manifest: not UTF-8") from error
    heading = _FIRST.match(first)
    if heading is None:
        raise FormatError("is not a manifest", hint="`digest --output` writes one")
    ids: dict[str, str] = {}
    for number, line in enumerate(rest, 2):
        if line.startswith("# ckptkit.digest/"):
            raise FormatError(f"line {number:,}: another manifest starts here")
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise FormatError(f"line {number:,} is not a digest, two spaces and a name")
        escaped, id, name = found.groups()
        try:
            name = _ESCAPE.sub(_unescaped, name) if escaped else name
        except ValueError as error:
            raise FormatError(f"line {number:,}: {error}") from error
        if name in ids:
            raise FormatError(f"line {number:,}: duplicate name")
        ids[name] = id
    if len(ids) != int(heading[1]) or whole_digest(ids) != heading[2]:
        raise CorruptError(
            f"was truncated or edited: it does not match the digest of {int(heading[1]):,} tensors "
            "in its first line"
        )
    return ids


def _unescaped(found: re.Match[str]) -> str:
    text = found[1]
    if text in _PLAIN:
        return _PLAIN[text]
    if len(text) < 3:
        raise ValueError(f"unknown escape {found[0]}")
    return chr(int(text[1:], 16))


class ManifestDifferences(NamedTuple):
    """Three lists: names only in the manifest, only in the checkpoint, with different digests."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    differing: tuple[str, ...]

    def findings(self) -> Iterator[Defect]:
        findings = (
            "missing: only in the manifest",
            "not in the manifest",
            "differs from the manifest",
        )
        for names, what in zip(self, findings, strict=True):
            for name in names:
                yield Defect(what, tensors=(name,))


def compare_ids(
    ids: Mapping[str, str], expected: Mapping[str, str], matches: Matches | None = None
) -> ManifestDifferences:
    """Compare tensor ids with those of a manifest; `matches` selects names of the manifest."""
    listed = {name: id for name, id in expected.items() if matches is None or matches(name)}
    return ManifestDifferences(
        tuple(name for name in listed if name not in ids),
        tuple(name for name in ids if name not in listed),
        tuple(name for name, id in ids.items() if listed.get(name, id) != id),
    )


# Checksums of parts; large parts are split into pieces for several threads

PIECE = 64 << 20  # bytes of a piece
DAMAGE = (FormatError, AmbiguousError, TensorError)  # faults of the file, not of the disk
_NOTHING = Range(Memory(b""), 0, 0)


class PartPiece(NamedTuple):
    """Bytes `start` to `stop` of part `number`, or the error if they cannot be located."""

    number: int
    extent: Extent
    start: int
    stop: int
    error: InputError | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def summed(
    parts: list[CheckedPart], tell: Callable[[int], None]
) -> Iterator[tuple[CheckedPart, str | None]]:
    """Yield (part, problem or None) for each part; `tell` is called with the number of bytes."""
    found = ordered(_sum, _pieces(parts), lambda piece: piece.nbytes)
    for number, pieces in groupby(found, key=lambda result: result[0].number):
        part, total, wrong = parts[number], 0, None
        for piece, sum in pieces:
            if isinstance(sum, InputError):
                wrong = wrong or f"{part.what}: {sum.message}"
            else:
                total = crc32_combine(total, sum, piece.nbytes) if piece.start else sum
            tell(piece.nbytes)
        if wrong is None and part.crc32 is not None and total != part.crc32:
            wrong = mismatch(part.what, total, part.crc32)
        yield part, wrong


def _pieces(parts: Iterable[CheckedPart]) -> Iterator[PartPiece]:
    for number, part in enumerate(parts):
        try:
            extent = part.record.locate()
        except InputError as error:
            yield PartPiece(number, _NOTHING, 0, 0, error)
            continue
        if isinstance(extent, Range) and part.crc32 is None:
            extent = _NOTHING
        size = PIECE if isinstance(extent, Range) else max(1, extent.length)
        for start in range(0, max(1, extent.length), size):
            yield PartPiece(number, extent, start, min(start + size, extent.length))


def _sum(piece: PartPiece) -> tuple[PartPiece, int | InputError]:
    """Return the CRC-32 of a piece, or the error if its bytes are damaged.

    Raises InputError if the disk or the network fails, or a limit is exceeded.
    """
    if piece.error is not None:
        return piece, piece.error
    total = 0
    try:
        for data in stream_reusing_buffer(piece.extent, piece.start, piece.stop):
            total = crc32(data, total)
    except DAMAGE as error:
        return piece, error
    return piece, total


def with_tensors(damaged: list[tuple[CheckedPart, str]], tensors: list[Named]) -> Iterator[Defect]:
    """Yield a finding for each damaged part, with the names of all tensors in it."""
    places = []
    for name, tensor in tensors if damaged else ():
        places += [(name, found) for found in located(tensor)]
    for part, why in damaged:
        try:
            bad = list(leaves(part.record.locate()))
        except InputError:
            bad = []
        hit = dict.fromkeys(
            name for name, found in places if any(overlap(found, each) for each in bad)
        )
        yield Defect(why, part.file, tuple(hit))
