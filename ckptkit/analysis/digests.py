r"""Compute digests of tensors, read and write manifests, and check the CRC-32 of file parts.

A digest does not depend on the file format. The SHA-256 of a tensor is computed over its elements
in contiguous, row-major, little-endian order. The id of a tensor is the SHA-256 of an ASCII line
and the elements. The line is the dtype in torch's notation, a space, the sizes joined by
commas, and a newline::

    (printf 'float32 16,3,3,3\n'; cat elements.bin) | sha256sum

A manifest lists the ids of the tensors of a checkpoint in the format of ``sha256sum``::

    # ckptkit.digest/1 tensors=2 sha256=<64 hex>
    <64 hex>  conv1.weight
    \<64 hex>  a name with a backslash: \\

Each line after the first is the id of a tensor, two spaces and its name. As in the output of
``sha256sum``, backslashes and line breaks in a name are escaped, and a line with escapes starts
with a backslash. Other unprintable characters are written as Python escapes (``\x1b``, ``\u202e``).

The digest of all tensors is the SHA-256 of the tensor lines as UTF-8, sorted by bytes. For this
digest, the lines contain only the escapes of ``sha256sum`` (``\\``, ``\n``, ``\r``)::

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

Progress = Callable[[int, int], None]  # arguments: bytes since the last call, bytes in total
Matches = Callable[[str], bool]
Named = tuple[str, Tensor]

# Digests of single tensors


def sha256_each(
    tensors: Iterable[Named], progress: Callable[[int], None] = lambda _: None
) -> Iterator[str | None]:
    """Yield the SHA-256 of the elements of each tensor, in the order of the tensors.

    Several threads hash tensors at the same time. For a tensor whose elements cannot be read as
    contiguous bytes, yield None. Examples are tensors on meta, sparse tensors, and strided tensors
    whose elements are smaller than a byte. Error messages contain the name of the tensor.
    `sha256_each` calls `progress` with the number of hashed bytes.
    """
    for _, tensor, found in _hashed(tensors, lambda _: b""):
        progress(tensor.nbytes)
        yield found if isinstance(found, str) else None


def tensor_ids(tensors: Iterable[Named]) -> Iterator[tuple[str, Tensor, str | TensorError]]:
    """Yield (name, tensor, id) for each tensor. If a tensor has no id, yield an error instead of
    the id."""
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
    """The ids of tensors by name. `without` maps the names of tensors without an id to the
    reason."""

    ids: dict[str, str]
    tensors: Mapping[str, Tensor] = field(repr=False)
    without: dict[str, str]

    @property
    def whole(self) -> str:
        """The digest of all tensors. The order of the tensors does not change the digest."""
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
    """Return the ids of the weights by name. With `everything`, return the ids of all tensors by
    path.

    `matches` selects names. With `sums`, `digest` first compares the tensors with the CRC-32 in the
    file. Raises UsageError if the checkpoint contains no weights, and CorruptError if a tensor is
    damaged. Raises CollisionError if two paths become the same string.
    """
    checkpoint = open_checkpoint(source, key=key)
    tensors: dict[str, Tensor] = {} if everything else {**checkpoint.weights}
    for path, node in walk(checkpoint.root) if everything else ():
        tensor = as_tensor(node)
        if tensor is not None and tensors.setdefault(join(path), tensor) is not tensor:
            raise CollisionError(f"two tensors are called {join(path)!r}", where=checkpoint.name)
    rows = [(name, tensor) for name, tensor in tensors.items() if matches is None or matches(name)]
    # Check the CRC-32 of each storage once. Error messages contain the name of the first tensor on
    # the storage.
    storages = {id(each.storage): (name, each.storage) for name, each in reversed(rows)}
    parts = [
        CheckedPart(f"{name}: its storage", storage.record, storage.crc32)
        for name, storage in storages.values()
        if storage is not None and storage.crc32 is not None
    ]
    for _, why in summed(parts if sums else [], lambda count: None):
        if why is not None:
            raise CorruptError(why, hint="`ckptkit verify {where}` lists all damage")
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
    """Return the digest of all tensors. `ids` maps names to tensor ids in any order."""

    def only_breaks(name: str) -> str:
        return name.replace("\\", "\\\\").replace("\n", r"\n").replace("\r", r"\r")

    lines = [f"{_line(name, id, only_breaks)}\n" for name, id in ids.items()]
    data = sorted(line.encode("utf-8", "surrogatepass") for line in lines)
    return hashlib.sha256(b"".join(data)).hexdigest()


def manifest_lines(ids: Mapping[str, str], printable: Callable[[str], str]) -> list[str]:
    """Return the lines of the manifest for these tensor ids, sorted by name.

    `printable` escapes control characters.
    """

    def escape(name: str) -> str:
        return printable(name.replace("\\", "\\\\"))

    first = f"# {SCHEMA} tensors={len(ids)} sha256={whole_digest(ids)}"
    return [first, *(_line(name, ids[name], escape) for name in sorted(ids))]


def _line(name: str, id: str, escape: Callable[[str], str]) -> str:
    escaped = escape(name)
    return f"{chr(92) * (escaped != name)}{id}  {escaped}"


def read_manifest(path: PathLike) -> dict[str, str]:
    """Read a manifest that `ckptkit digest` wrote. Return the tensor ids by name.

    Raises FormatError if the file is not a manifest, CorruptError if the manifest is truncated or
    edited, and LimitError if the manifest is too large.
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
    """Parse a manifest. Return the tensor ids by name.

    Raises FormatError if `data` is not a manifest. Raises CorruptError if `data` is truncated or
    edited.
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
            "was truncated or edited: the first line gives the digest of "
            f"{int(heading[1]):,} tensors, and the other lines do not match this digest"
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
    """Names only in the manifest, names only in the checkpoint, and names with different
    digests."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    differing: tuple[str, ...]

    def findings(self) -> Iterator[Defect]:
        findings = (
            "missing: the tensor is only in the manifest",
            "not in the manifest",
            "differs from the manifest",
        )
        for names, what in zip(self, findings, strict=True):
            for name in names:
                yield Defect(what, tensors=(name,))


def compare_ids(
    ids: Mapping[str, str], expected: Mapping[str, str], matches: Matches | None = None
) -> ManifestDifferences:
    """Compare tensor ids with the ids in a manifest. `matches` selects names in the manifest."""
    listed = {name: id for name, id in expected.items() if matches is None or matches(name)}
    return ManifestDifferences(
        tuple(name for name in listed if name not in ids),
        tuple(name for name in ids if name not in listed),
        tuple(name for name, id in ids.items() if listed.get(name, id) != id),
    )


# Checksums of file parts. Large parts are split into pieces for several threads.

PIECE = 64 << 20  # number of bytes in a piece
DAMAGE = (FormatError, AmbiguousError, TensorError)  # errors that ckptkit raises for damaged files
_NOTHING = Range(Memory(b""), 0, 0)


class PartPiece(NamedTuple):
    """The bytes from `start` to `stop` of the file part with index `number`."""

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
    """Yield (part, problem) for each part. The problem of an intact part is None."""
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
    """Return a piece with its CRC-32. If the piece is damaged, return an error instead of the
    CRC-32.

    Raises InputError for errors of the disk and the network, and for exceeded limits.
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
    """Yield a finding for each damaged part. The finding lists all tensors with bytes in the
    part."""
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
