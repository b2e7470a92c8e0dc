"""Read shards, with an index or without; or check them and report every defect, not only the first.

Nothing but the index's ``weight_map`` is required. File names are plain names in the folder of the
index. Each tensor is in the one shard that the map names, and each shard holds nothing else, ties
to its own tensors aside. ``total_size`` is the bytes of all tensors, those that share memory
counted once; a wrong one is a warning. Texts in ``metadata`` may record what those of a safetensors
file may.

Without an index, shards are those whose names say so (``-00002-of-00003``): all of them must be
there, numbered from 1 or 0 on, and no two may hold a tensor of one name.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby, islice, repeat
from operator import itemgetter
from typing import Any

from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    WRONG_TOTAL,
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    Notice,
    coded,
    within,
)
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import flatten, merge_all
from ckptkit.core.tree import Node, OrderedMapping, module_versions, nodes, versions_state
from ckptkit.core.weights import as_tensor
from ckptkit.formats.common.folder_names import BIN, INDEX, Candidate, best, unread
from ckptkit.formats.common.plain_json import dump
from ckptkit.formats.common.saved_record import Restored
from ckptkit.formats.containers import strict_json
from ckptkit.formats.format import CheckedPart, Finding, Format, Probe
from ckptkit.formats.table import SAFETENSORS, TORCH_LEGACY, TORCH_ZIP

SHARD_FORMATS = (SAFETENSORS, TORCH_ZIP, TORCH_LEGACY)
TOTAL = "total_size"
_NUMBERED = re.compile(r"-([0-9]{1,9})-of-([0-9]{1,9})\.")
_ABSENT = object()
_FETCH = "fetch the index and the shards again, into an empty folder"

Entries = dict[Node, Node]  # of a shard, by name
Restore = Callable[[dict[Node, Node], Mapping[str, str]], Restored]
Refuse = Callable[[CkptkitError], None]


def matches(probe: Probe, suffix: str) -> bool:
    """Return whether this is an index, or a folder with one or with shards of this suffix."""
    if probe.is_folder:
        chosen = best(probe.names)
        return chosen is not None and chosen.form in ("index", "shards") and chosen.suffix == suffix
    source = probe.source
    _, name = source.folder_and_name() or (None, "")
    if not name.endswith(INDEX) or source.size > LIMITS.index_bytes:
        return False
    is_bin = name.endswith(BIN + INDEX)
    return is_bin == (suffix == BIN) and b'"weight_map"' in source.read(0, source.size)


def read(probe: Probe, format: str, restore: Restore) -> Checkpoint:
    """Read the tensors in the order of the index or of the shards: every shard, headers alone.

    `restore` restores what the texts in the metadata of the index record.
    """
    return _read(probe, format, restore, _raise)[0]


def findings(probe: Probe) -> Iterator[CheckedPart | Finding]:
    """Yield every defect of the index and the shards, and what can be checked in the shards."""
    wrong: list[CkptkitError] = []
    checkpoint, shards = _read(probe, "", _as_it_is, wrong.append)
    for error in wrong:
        yield Finding(error.message, os.path.basename(error.where or ""), hint=error.hint)
    if not wrong:
        yield from map(Finding, coded(checkpoint.warnings, WRONG_TOTAL))
    for name, (format, each) in shards.probes.items():
        if format.check is not None:
            yield from (replace(found, file=name) for found in format.check(each))


def _read(
    probe: Probe, format: str, restore: Restore, refuse: Refuse
) -> tuple[Checkpoint, _Shards]:
    """Read the shards; `refuse` is called with a defect.

    If it returns, reading goes on with what there is.
    """
    if not probe.is_folder:
        place = probe.source.folder_and_name()
        assert place is not None
        shards = _Shards(place[0], format, refuse)
        return shards.with_index(place[1], restore), shards
    chosen = best(probe.names)
    assert chosen is not None
    shards = _Shards(probe.folder, format, refuse)
    if chosen.form == "shards":
        return shards.without_index(chosen, probe.names), shards
    return shards.with_index(chosen.files[0], restore, probe.names), shards


def _raise(error: CkptkitError) -> None:
    raise error


class _Shards:
    """The shards in a folder while they are read."""

    def __init__(self, folder: Folder, format: str, refuse: Refuse) -> None:
        self.folder = folder
        self.format = format
        self.refuse = refuse
        self.probes: dict[str, tuple[Format, Probe]] = {}
        self.shards: dict[str, Checkpoint] = {}
        self.left: dict[str, Entries] = {}  # file name -> entries that no place names

    def with_index(
        self, name: str, restore: Restore, names: frozenset[str] = frozenset()
    ) -> Checkpoint:
        """Read the shards of the index called `name`.

        `names` are those in the folder, if the folder was named.
        """
        try:
            index = _index(self.folder, name)
            places: dict[str, str] = index["weight_map"]
            files = set(places.values())
            self._check_names(files)
            if name.removesuffix(INDEX) in names - files:
                self.refuse(
                    AmbiguousError(
                        f"does not name {name.removesuffix(INDEX)}, which is in the same folder",
                        hint=_FETCH,
                    )
                )
            root = self._merged(places, self._read(files))
            metadata = index.get("metadata") or {}
            return self._assembled(root, metadata, restore, unread(names, {name, *files}))
        except CkptkitError as error:
            error.at(os.path.join(self.folder.name, name))
            raise

    def without_index(self, chosen: Candidate, names: frozenset[str]) -> Checkpoint:
        """Read all shards together."""
        self._check_numbers(chosen)
        places: dict[str, str] = {}
        held = dict(self._read(set(chosen.files)))
        for file in chosen.files:
            for name in held.get(file, ()):
                if name in places:
                    self.refuse(
                        AmbiguousError(
                            f"{name[:80]!r} is in {places[name]} and in {file}", hint=_FETCH
                        )
                    )
                places[name] = file
        root = self._merged(places, held.items())
        warning = "there is no index: the shards are read in the order of their numbers"
        return self._assembled(root, {}, _as_it_is, (warning, *unread(names, set(chosen.files))))

    def _read(self, files: set[str]) -> Iterator[tuple[str, Entries]]:
        """Read shards; yield the file name of each, and its entries by name."""
        for file in sorted(files):
            try:
                shard = self._read_shard(file)
                entries = _entries(shard)
            except CkptkitError as error:
                self.refuse(error)
                continue
            self.shards[file] = replace(shard, root=None)
            yield file, entries

    def _read_shard(self, name: str) -> Checkpoint:
        probe = Probe(self.folder.open(name))
        try:
            for each in SHARD_FORMATS:
                if each.matches(probe):
                    self.probes[name] = each, probe
                    return each.read(probe)
            pointer = probe.head.startswith(b"version https://git-lfs")
            hint = "it is a Git LFS pointer: `git lfs pull` fetches the file" if pointer else None
            raise FormatError("is neither a safetensors file nor one of torch", hint=hint)
        except CkptkitError as error:
            error.at(probe.name)
            raise

    def _merged(
        self, places: Mapping[str, str], shards: Iterable[tuple[str, Entries]]
    ) -> dict[Node, Node]:
        """Move the entries of shards into one dict, under the names and in the order of `places`.

        Ties that `places` omits follow. Each name is looked up in its shard alone: in a dict of all
        names, half a million of them would each wait for the memory.
        """
        names: defaultdict[str, list[str]] = defaultdict(list)
        runs: list[tuple[str, int]] = []  # of names in one file
        for file, run in groupby(places.items(), itemgetter(1)):
            known = len(names[file])
            names[file] += map(itemgetter(0), run)
            runs.append((file, len(names[file]) - known))
        nodes: dict[str, Iterable[Node]] = {file: repeat(_ABSENT) for file in names}
        for file, entries in shards:
            nodes[file] = [*map(entries.pop, names[file], repeat(_ABSENT))]
            self.left[file] = entries
            if not entries:
                entries.clear()  # an empty dict keeps its table else
        rest = {file: iter(each) for file, each in nodes.items()}
        root: dict[Node, Node] = dict(
            zip(places, flatten(islice(rest[file], count) for file, count in runs), strict=True)
        )
        if object in {*map(type, root.values())}:
            self._drop_absent(root, places)
        for file, entries in self.left.items():
            if entries:
                root.update(self._ties(file, nodes[file], places))
        return root

    def _drop_absent(self, root: dict[Node, Node], places: Mapping[str, str]) -> None:
        """Drop the names that no shard has; refuse those whose shard could be read."""
        for name in [name for name in places if root[name] is _ABSENT]:
            del root[name]
            file = places[name]
            if file in self.shards:
                self.refuse(
                    CorruptError(
                        f"puts {name[:80]!r} into {file}, which does not hold it", hint=_FETCH
                    )
                )

    def _assembled(
        self,
        root: dict[Node, Node],
        metadata: Mapping[str, Any],
        restore: Restore,
        warnings: tuple[str, ...],
    ) -> Checkpoint:
        shards = self.shards.items()
        texts = {
            key: text if isinstance(text, str) else dump(text)
            for key, text in metadata.items()
            if key != TOTAL
        }
        restored = restore(root, texts)
        return Checkpoint(
            _ordered(restored.root, list(self.left.values())),
            self.format,
            self.folder,
            merge_all(shard.extras for _, shard in shards) | restored.metadata,
            globals=tuple(
                dict.fromkeys((*flatten(shard.globals for _, shard in shards), *restored.globals))
            ),
            warnings=(
                *flatten(map(partial(within, name), shard.warnings) for name, shard in shards),
                *restored.warnings,
                *_wrong_total(metadata, root),
                *warnings,
            ),
        )

    def _check_names(self, names: set[str]) -> None:
        """Check that shards exist and their numbers fit: two downloads are no checkpoint."""
        missing = sorted(name for name in names if name not in self.folder)
        if missing:
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            self.refuse(
                CorruptError(
                    f"{len(missing):,} of {len(names):,} shards are missing: {shown}",
                    hint="fetch them from where the others came from",
                )
            )
        totals = {int(found[2]) for name in names if (found := _NUMBERED.search(name))}
        if totals and totals != {len(names)}:
            counts = " and ".join(map(str, sorted(totals)))
            self.refuse(
                CorruptError(
                    f"names {len(names):,} shards, which are numbered as {counts}", hint=_FETCH
                )
            )
        names.difference_update(missing)

    def _check_numbers(self, chosen: Candidate) -> None:
        """Check that each shard exists exactly once."""
        numbers = sorted(
            int(found[1]) for name in chosen.files if (found := _NUMBERED.search(name))
        )
        total, first = int(chosen.total), 0 if numbers[0] == 0 else 1
        known = set(numbers)
        missing = list(islice((n for n in range(first, first + total) if n not in known), 4))
        if missing:
            shown = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
            self.refuse(
                CorruptError(
                    f"{total - len(known):,} of {total:,} shards are missing: number {shown}",
                    hint="fetch them from where the others came from",
                )
            )
        elif len(numbers) != total:
            self.refuse(
                AmbiguousError(f"{len(numbers):,} shards are numbered as {total:,}", hint=_FETCH)
            )

    def _ties(self, file: str, own: Iterable[Node], places: Mapping[str, str]) -> dict[Node, Node]:
        """Return names that the index omits because they share memory with one that it lists.

        `own` are the nodes that are in the file by the index. Any other name left is an error.
        """
        ties: dict[Node, Node] = {}
        known = {*map(_storage, own)}
        for name, node in self.left[file].items():
            if name in places:
                self.refuse(
                    AmbiguousError(f"{name[:80]!r} is in {file} and in {places[name]}", hint=_FETCH)
                )
            elif _storage(node) not in known:
                self.refuse(
                    CorruptError(
                        f"{file} holds {name[:80]!r}, which the index does not have", hint=_FETCH
                    )
                )
            else:
                ties[name] = node
        return ties


def _entries(shard: Checkpoint) -> Entries:
    """Return the entries of a shard by name. It may have values of a state_dict and no tensors."""
    root = shard.root
    if (
        isinstance(root, dict)
        and {*map(type, root)} <= {str}
        and ({*map(type, root.values())} <= {Tensor} or shard.selection is None)
    ):
        return root
    weights = shard.required
    return weights.node if isinstance(weights.node, dict) else dict(weights.nodes)


def _as_it_is(root: dict[Node, Node], texts: Mapping[str, str]) -> Restored:
    return Restored(root, dict(texts))


def _index(folder: Folder, name: str) -> dict[str, Any]:
    source = folder.open(name)
    check("index_bytes", source.size, "bytes of the index")
    index = strict_json.parse(source.read(0, source.size), "the index")
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise FormatError("the index has no weight_map")
    if not all(isinstance(shard, str) for shard in index["weight_map"].values()):
        raise FormatError("the weight_map does not map to file names")
    if not isinstance(index.get("metadata") or {}, dict):
        raise FormatError("the metadata of the index are not an object")
    return index


def _storage(node: Node) -> int:
    tensor = as_tensor(node)
    return id(node if tensor is None else tensor.storage)


def _ordered(root: Node, shards: list[Entries]) -> Node:
    """Return `root` as an OrderedDict with the ``_metadata`` of all shards, if all are such."""
    if (
        root.__class__ is not dict
        or not shards
        or not all(isinstance(each, OrderedMapping) for each in shards)
    ):
        return root
    metadata = OrderedMapping()
    for shard in shards:
        metadata.update(module_versions(shard) or {})
    return OrderedMapping(root, versions_state(metadata) if metadata else None)


def _nbytes_with_objects(root: Node) -> int:
    """Bytes of all storages, those inside objects included (packed parameters of quantized
    modules)."""
    leaves = (node for node in nodes(root) if isinstance(node, (Tensor, TypedStorage)))
    return sum(
        {
            id(leaf.storage): leaf.storage.nbytes for leaf in leaves if leaf.storage is not None
        }.values()
    )


def _wrong_total(metadata: Mapping[str, Any], root: Mapping[str, Node]) -> list[str]:
    tensors = [tensor for node in root.values() if (tensor := as_tensor(node)) is not None]
    every = sum([tensor.nbytes for tensor in tensors])
    total = metadata.get(TOTAL, every)
    if type(total) is int and total == every:
        return []
    once = sum({id(tensor.storage): tensor.nbytes for tensor in tensors}.values())
    stored = sum(
        {
            id(each.storage): each.storage.nbytes for each in tensors if each.storage is not None
        }.values()
    )
    if type(total) is int and total in (once, stored, _nbytes_with_objects(root)):
        return []
    text = f"the index says {str(total)[:40]} bytes in all, the tensors have {once:,}"
    return [Notice(WRONG_TOTAL, text, nbytes=once)]
