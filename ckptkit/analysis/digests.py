"""Digests of the tensors of a checkpoint, and how they differ from a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ckptkit.analysis import manifest
from ckptkit.analysis.checksums import summed
from ckptkit.analysis.tensor_digest import tensor_id
from ckptkit.api import PathLike, open_checkpoint
from ckptkit.compute.expanded import Allowance
from ckptkit.compute.threads import ordered
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CollisionError, CorruptError, FormatError, TensorError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import join, walk
from ckptkit.core.weights import as_tensor
from ckptkit.formats.format import CheckedPart, Defect, open_place

Progress = Callable[[int, int], None]  # bytes since the last time, and in all
Matches = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Digests:
    """Tensor ids by name, the tensors, and the reasons for those that have no bytes to read."""

    ids: dict[str, str]
    tensors: Mapping[str, Tensor] = field(repr=False)
    without: dict[str, str]

    @property
    def whole(self) -> str:
        """The digest of all of them, whatever their order."""
        return manifest.whole(self.ids)


def digest(
    source: PathLike | Checkpoint,
    *,
    key: str | None = None,
    everything: bool = False,
    matches: Matches | None = None,
    sums: bool = True,
    progress: Progress | None = None,
) -> Digests:
    """Return tensor ids by name: of the weights, or with `everything` of all by dotted path.

    `matches` says which names are wanted; with `sums` their bytes must have the checksums that the
    file has of them. Raises UsageError where there are no weights, CorruptError where bytes are
    damaged, CollisionError where two paths are spelled alike.
    """
    checkpoint = open_checkpoint(source, key=key)
    tensors = _by_path(checkpoint) if everything else checkpoint.weights
    rows = [(name, tensor) for name, tensor in tensors.items() if matches is None or matches(name)]
    if sums:
        _check_sums(rows)
    total = sum(tensor.nbytes for _, tensor in rows)
    ids: dict[str, str] = {}
    without: dict[str, str] = {}
    allowance = Allowance()
    wanted = ((name, tensor, allowance.refusal(tensor)) for name, tensor in rows)
    for name, tensor, found in ordered(_digested, wanted, lambda row: row[1].nbytes):
        if isinstance(found, str):
            ids[name] = found
        else:
            without[name] = found.message
        if progress is not None:
            progress(tensor.nbytes, total)
    return Digests(ids, dict(rows), without)


def _check_sums(rows: list[tuple[str, Tensor]]) -> None:
    """Raise CorruptError unless every storage has its CRC-32, where that is known."""
    storages = {id(tensor.storage): (name, tensor.storage) for name, tensor in reversed(rows)}
    parts = [
        CheckedPart(f"{name}: its storage", storage.record, storage.crc32)
        for name, storage in storages.values()
        if storage is not None and storage.crc32 is not None
    ]
    for _, why in summed(parts, lambda count: None):
        if why is not None:
            raise CorruptError(
                why, hint="`ckptkit verify {where}` lists everything that is damaged"
            )


def _digested(row: tuple[str, Tensor, TensorError | None]) -> tuple[str, Tensor, str | TensorError]:
    name, tensor, refusal = row
    try:
        return name, tensor, tensor_id(tensor, refusal)
    except TensorError as error:
        return name, tensor, error
    except CkptkitError as error:
        error.message = f"{name}: {error.message}"
        raise


def _by_path(checkpoint: Checkpoint) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, node in walk(checkpoint.root):
        tensor = as_tensor(node)
        if tensor is not None and found.setdefault(join(path), tensor) is not tensor:
            raise CollisionError(f"two tensors are called {join(path)!r}", where=checkpoint.name)
    return found


def read_manifest(path: PathLike) -> dict[str, str]:
    """The ids by name that a file of `ckptkit digest` holds. Raises FormatError, CorruptError,
    LimitError."""
    place = open_place(path)
    try:
        if isinstance(place, Folder):
            raise FormatError("is a folder, not a manifest")
        check("index_bytes", place.size, "bytes of a manifest")
        return manifest.parse(place.read(0, place.size))
    except CkptkitError as error:
        raise error.at(place.name) from error.__cause__
    finally:
        place.close()


def differences(
    found: Digests, expected: Mapping[str, str], matches: Matches | None = None
) -> Iterator[Defect]:
    """Return how tensors differ from a manifest, among those that are wanted."""
    wanted = {name: id for name, id in expected.items() if matches is None or matches(name)}
    missing, unexpected, differing = manifest.compare(found.ids, wanted)
    for names, what in (
        (missing, "missing: the manifest has it"),
        (unexpected, "not in the manifest"),
        (differing, "not as in the manifest"),
    ):
        for name in names:
            yield Defect(what, tensors=(name,))
