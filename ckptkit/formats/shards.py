"""Read, check and write folders of shards, as on the Hugging Face hub.

    model-00001-of-00003.safetensors, model.safetensors.index.json
    pytorch_model-00001-of-00002.bin, pytorch_model.bin.index.json

`read` raises the first defect. `findings` yields all defects.

The index must contain a ``weight_map``. The ``weight_map`` maps each tensor name to the file name
of a shard in the folder of the index. If the ``weight_map`` omits a tensor of a shard, this tensor
must be tied to a listed tensor. ``total_size`` is the number of bytes of all tensors. A shared
storage counts once. If ``total_size`` is wrong, ckptkit warns. ckptkit reads strings in
``metadata`` like the strings in ``__metadata__`` of a safetensors file.

Without an index, file names identify the shards (``-00002-of-00003``). All shards must exist, with
numbers from 0 or from 1 on. Two shards must not contain the same tensor name.

Like huggingface_hub, ckptkit fills shards in the order of the state_dict. If the next tensor would
exceed the maximum size, ckptkit starts a new shard. A tensor larger than the maximum gets a
separate shard. Tensors that share memory count once and go to one shard. If all tensors fit into
one file, the file name has no number, and ckptkit writes no index. Source:
https://github.com/huggingface/huggingface_hub (serialization/_base.py).

The ``metadata`` of an index has the same entries as the ``__metadata__`` of a single safetensors
file. A tied name is neither in a shard nor in the ``weight_map``. A shard of torch.save is a
state_dict with the attributes of the original state_dict.
"""

from __future__ import annotations

import json
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
    DELTA,
    WRONG_TOTAL,
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    Notice,
    TensorError,
    coded,
    within,
)
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import and_more, flatten, merge_all, owners, some
from ckptkit.core.tree import Node, OrderedMapping, module_versions, nodes, versions_state
from ckptkit.core.weights import Weights, as_tensor
from ckptkit.formats import safetensors, strict_json, table, torch_zip
from ckptkit.formats.folder import BIN, INDEX, SAFE, Candidate, best, unread
from ckptkit.formats.format import CheckedPart, Defect, Format, Probe
from ckptkit.formats.record import (
    FRAMEWORK,
    Restored,
    leftovers,
    of_values,
    refuse_objects,
    restore,
    restore_ties,
    values,
)
from ckptkit.formats.strict_json import dump, is_utf8
from ckptkit.formats.table import SAFETENSORS, TORCH_LEGACY, TORCH_ZIP

SHARD_FORMATS = (SAFETENSORS, TORCH_ZIP, TORCH_LEGACY)
TOTAL = "total_size"
_NUMBERED = re.compile(r"-([0-9]{1,9})-of-([0-9]{1,9})\.")
_ABSENT = object()
_FETCH = "download the index and the shards again, into an empty folder"
_FETCH_THEM = "download the missing shards"

Entries = dict[Node, Node]  # entries of a shard, by name
Restore = Callable[[dict[Node, Node], Mapping[str, str]], Restored]
Refuse = Callable[[CkptkitError], None]


def matches(probe: Probe, suffix: str) -> bool:
    """Return whether the input is an index or folder of shards with the file suffix `suffix`."""
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
    """Read the headers of all shards.

    Tensors have the order of the index, or of the shards if there is no index. `restore` restores
    the state_dict from the tensors and the metadata of the index.
    """
    return _read(probe, format, restore, _raise)[0]


def findings(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield every defect of the index and the shards, and each checksummed range of a shard."""
    wrong: list[CkptkitError] = []
    checkpoint, shards = _read(probe, "", _as_it_is, wrong.append)
    for error in wrong:
        yield Defect(error.message, os.path.basename(error.where or ""), hint=error.hint)
    if not wrong:
        yield from map(Defect, coded(checkpoint.warnings, WRONG_TOTAL))
    for name, (format, each) in shards.probes.items():
        if format.check is not None:
            yield from (replace(found, file=name) for found in format.check(each))


def _read(
    probe: Probe, format: str, restore: Restore, refuse: Refuse
) -> tuple[Checkpoint, _Shards]:
    """Read the shards. Call `refuse` with each defect.

    If `refuse` does not raise, reading continues without the defective data.
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
    """A reader of the shards in a folder."""

    def __init__(self, folder: Folder, format: str, refuse: Refuse) -> None:
        self.folder = folder
        self.format = format
        self.refuse = refuse
        self.probes: dict[str, tuple[Format, Probe]] = {}
        self.shards: dict[str, Checkpoint] = {}
        self.left: dict[str, Entries] = {}  # entries that the index does not list, by file name

    def _refuse(self, kind: type[CkptkitError], what: str, hint: str = _FETCH) -> None:
        self.refuse(kind(what, hint=hint))

    def with_index(
        self, name: str, restore: Restore, names: frozenset[str] = frozenset()
    ) -> Checkpoint:
        """Read the shards of the index called `name`.

        If the input is the folder, `names` contains the files of the folder. If the input is the
        index, `names` is empty.
        """
        try:
            index = _index(self.folder, name)
            places: dict[str, str] = index["weight_map"]
            files = set(places.values())
            self._check_names(files)
            if name.removesuffix(INDEX) in names - files:
                self._refuse(
                    AmbiguousError,
                    f"does not list {name.removesuffix(INDEX)}, which is in the same folder",
                )
            root = self._merged(places, self._read(files))
            metadata = index.get("metadata") or {}
            return self._assembled(root, metadata, restore, unread(names, {name, *files}))
        except CkptkitError as error:
            error.at(os.path.join(self.folder.name, name))
            raise

    def without_index(self, chosen: Candidate, names: frozenset[str]) -> Checkpoint:
        """Read the shards of a folder that has no index."""
        self._check_numbers(chosen)
        places: dict[str, str] = {}
        held = dict(self._read(set(chosen.files)))
        for file in chosen.files:
            for name in held.get(file, ()):
                if name in places:
                    what = f"the tensor {name[:80]!r} is in two shards: {places[name]} and {file}"
                    self._refuse(AmbiguousError, what)
                places[name] = file
        root = self._merged(places, held.items())
        warning = "there is no index: the shards are read in the order of their numbers"
        return self._assembled(root, {}, _as_it_is, (warning, *unread(names, set(chosen.files))))

    def _read(self, files: set[str]) -> Iterator[tuple[str, Entries]]:
        """Read shards. Yield the file name and the entries of each shard."""
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
            raise FormatError("is neither a safetensors nor a torch file", hint=hint)
        except CkptkitError as error:
            error.at(probe.name)
            raise

    def _merged(
        self, places: Mapping[str, str], shards: Iterable[tuple[str, Entries]]
    ) -> dict[Node, Node]:
        """Move the entries of all shards into one dict, in the order of `places`.

        Tied names come after all other names. Each name is looked up in the dict of its shard.
        Lookups in one dict of half a million names are slower, because most lookups miss the
        processor's cache.
        """
        names: defaultdict[str, list[str]] = defaultdict(list)
        # For each run of consecutive names in the same file: the file name, the number of names.
        runs: list[tuple[str, int]] = []
        for file, run in groupby(places.items(), itemgetter(1)):
            known = len(names[file])
            names[file] += map(itemgetter(0), run)
            runs.append((file, len(names[file]) - known))
        nodes: dict[str, Iterable[Node]] = {file: repeat(_ABSENT) for file in names}
        for file, entries in shards:
            nodes[file] = [*map(entries.pop, names[file], repeat(_ABSENT))]
            self.left[file] = entries
            if not entries:
                entries.clear()  # without `clear`, the empty dict would keep its memory
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
        """Drop the names that no shard contains.

        If the shard of a name could be read, call `refuse`, because the index contradicts this
        shard.
        """
        for name in [name for name in places if root[name] is _ABSENT]:
            del root[name]
            file = places[name]
            if file in self.shards:
                what = f"maps {name[:80]!r} to {file}, which does not contain it"
                self._refuse(CorruptError, what)

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
                *_delta(metadata),
                *warnings,
            ),
        )

    def _check_names(self, names: set[str]) -> None:
        """Check that the shards exist, and that the number of shards in each file name is right.

        If such a number is wrong, the folder may contain files of two downloads.
        """
        missing = sorted(name for name in names if name not in self.folder)
        if missing:
            what = f"{len(missing):,} of {len(names):,} shards are missing: {some(missing)}"
            self._refuse(CorruptError, what, _FETCH_THEM)
        totals = {int(found[2]) for name in names if (found := _NUMBERED.search(name))}
        if totals and totals != {len(names)}:
            counts = " and ".join(map(str, sorted(totals)))
            what = f"lists {len(names):,} shards, but the total in their file names is {counts}"
            self._refuse(CorruptError, what)
        names.difference_update(missing)

    def _check_numbers(self, chosen: Candidate) -> None:
        """Check that each shard number occurs in exactly one file name."""
        numbers = sorted(
            int(found[1]) for name in chosen.files if (found := _NUMBERED.search(name))
        )
        total, first = int(chosen.total), 0 if numbers[0] == 0 else 1
        known = set(numbers)
        missing = list(islice((n for n in range(first, first + total) if n not in known), 4))
        if missing:
            count = total - len(known)
            names = some(map(str, missing)) + and_more(count - len(missing))
            what = f"{count:,} of {total:,} shards are missing: number {names}"
            self._refuse(CorruptError, what, _FETCH_THEM)
        elif len(numbers) != total:
            what = (
                f"there are {len(numbers):,} shards, but the total in their file names is {total:,}"
            )
            self._refuse(AmbiguousError, what)

    def _ties(self, file: str, own: Iterable[Node], places: Mapping[str, str]) -> dict[Node, Node]:
        """Return the entries of `file` that the index omits, but that are tied to a listed tensor.

        `own` contains the entries of `file` that the index lists. An omitted entry without such a
        tie is an error.
        """
        ties: dict[Node, Node] = {}
        known = {*map(_storage, own)}
        for name, node in self.left[file].items():
            if name in places:
                what = f"the tensor {name[:80]!r} is in two shards: {file} and {places[name]}"
                self._refuse(AmbiguousError, what)
            elif _storage(node) not in known:
                what = f"{file} contains {name[:80]!r}, which the index does not list"
                self._refuse(CorruptError, what)
            else:
                ties[name] = node
        return ties


def _entries(shard: Checkpoint) -> Entries:
    """Return the entries of a shard by name. A shard without tensors is allowed."""
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
        raise FormatError("the weight_map contains values that are not file names")
    if not isinstance(index.get("metadata") or {}, dict):
        raise FormatError("the metadata of the index is not an object")
    return index


def _storage(node: Node) -> int:
    tensor = as_tensor(node)
    return id(node if tensor is None else tensor.storage)


def _ordered(root: Node, shards: list[Entries]) -> Node:
    """Return `root`, as an OrderedDict if every shard is an OrderedDict.

    The OrderedDict gets the merged ``_metadata`` of all shards.
    """
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


def _wrong_total(metadata: Mapping[str, Any], root: Mapping[str, Node]) -> list[str]:
    tensors = [tensor for node in root.values() if (tensor := as_tensor(node)) is not None]
    every = sum([tensor.nbytes for tensor in tensors])
    total = metadata.get(TOTAL, every)
    if type(total) is int and total == every:
        return []
    once = sum({id(tensor.storage): tensor.nbytes for tensor in tensors}.values())
    # `total_size` may include the packed parameters that quantized modules store inside objects.
    leaves = (node for node in nodes(root) if isinstance(node, (Tensor, TypedStorage)))
    storages = {id(each.storage): each.storage for each in leaves if each.storage is not None}
    stored = sum(storage.nbytes for storage in storages.values())
    if type(total) is int and total in (once, stored):
        return []
    text = f"the index's total_size is {str(total)[:40]} bytes, but the tensors have {once:,}"
    return [Notice(WRONG_TOTAL, text, nbytes=once)]


def _delta(metadata: Mapping[str, Any]) -> list[str]:
    if "delta_encoding" not in metadata:
        return []
    version, base = (str(metadata.get(word))[:9] for word in ("version", "base_version"))
    what = f"contains a delta, not weights: version {version} of base {base}"
    return [Notice(DELTA, f"{what}; `delta inspect` shows what it changes")]


# Choosing the file of each tensor


DEFAULT_SIZE = 5 * 10**9  # bytes


def split(sizes: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Return the names of the tensors in each file. `sizes` maps each name to a number of bytes.

    A file contains at most `limit` bytes (by default `DEFAULT_SIZE`), or one larger tensor.
    """
    limit = DEFAULT_SIZE if limit is None else limit
    files: list[list[str]] = []
    current: list[str] = []
    reached = 0
    for name, size in sizes.items():
        if size > limit:
            files.append([name])
            continue
        if reached + size > limit:
            files.append(current)
            current, reached = [], 0
        current.append(name)
        reached += size
    return [*files, current] if current or not files else files


def shard_names(stem: str, suffix: str, count: int) -> list[str]:
    """Return the file names of `count` shards, such as ``model-00001-of-00002.safetensors``.

    For a single file, return ``model.safetensors``.
    """
    if count == 1:
        return [stem + suffix]
    return [f"{stem}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]


def index_file(name: str, places: Mapping[str, str], metadata: Mapping[str, Any]) -> OutputFile:
    """Return the index file. `places` maps each tensor name to the file name of its shard.

    Raises LimitError if the index is so large that ckptkit cannot read it.
    """
    odd = [place for place in places if not is_utf8(place)]
    if odd:
        raise TensorError(
            f"an index cannot contain the name {odd[0]!r:.100}", hint="`rename` changes it"
        )
    text = (
        json.dumps({"metadata": metadata, "weight_map": places}, indent=2, ensure_ascii=False)
        + "\n"
    )
    data = text.encode()
    check("index_bytes", len(data), "bytes of the index")
    return OutputFile(name + INDEX, (data,))


# Shards of safetensors


_STEM = "model"


matches_safetensors = partial(matches, suffix=SAFE)


def _restored(root: dict[Node, Node], texts: Mapping[str, str]) -> Restored:
    """Restore the state_dict from a safetensors index. For torch shards, restore only the ties."""
    plain = all(isinstance(node, Tensor) for node in root.values())
    return restore(root, texts, index=True) if plain else restore_ties(root, texts, index=True)


read_safetensors = partial(read, format=table.SHARDED.name, restore=_restored)


def layout_safetensors(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan a folder of safetensors shards.

    Raises the errors of `safetensors.layout`. Raises LimitError if the index is too large.
    """
    if options.objects == "error":
        refuse_objects(checkpoint)
    # Reserve the metadata key `total_size`, so that no tie uses this key.
    checkpoint = replace(checkpoint, extras={**checkpoint.extras, TOTAL: ""})
    tensors, metadata, notes = safetensors.prepared(checkpoint, options)
    del metadata[TOTAL]
    parts = split({name: tensor.nbytes for name, tensor in tensors.items()}, options.shard_size)
    names = shard_names(_STEM, SAFE, len(parts))
    if len(parts) == 1:
        return Plan((replace(safetensors.file_of(tensors, metadata), name=names[0]),), tuple(notes))
    framework = {FRAMEWORK: metadata.pop(FRAMEWORK)}
    files = [
        replace(safetensors.file_of({each: tensors[each] for each in part}, framework), name=name)
        for name, part in zip(names, parts, strict=True)
    ]
    file_of = owners(zip(names, parts, strict=True))
    recorded = {
        TOTAL: sum(tensor.nbytes for tensor in tensors.values()),
        **{key: text for key, text in metadata.items() if text is not None},
    }
    index = index_file(_STEM + SAFE, {name: file_of[name] for name in tensors}, recorded)
    return Plan((*files, index), tuple(notes))


# Shards of torch.save


_TORCH_STEM = "pytorch_model"


matches_torch = partial(matches, suffix=BIN)
read_torch = partial(read, format=table.SHARDED_BIN.name, restore=partial(restore_ties, index=True))


def layout_torch(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan a folder of torch.save shards.

    Raises the errors of `torch_zip.layout`. Raises LimitError if the index is too large.
    """
    if options.objects == "error":
        refuse_objects(checkpoint)
    weights = checkpoint.required
    parts, total = _parts(weights, options.shard_size)
    names = shard_names(_TORCH_STEM, BIN, len(parts))
    extra, notes = leftovers(checkpoint, inside=False)
    metadata = {**checkpoint.extras, **of_values({**values(checkpoint.extras), **extra})}
    alone = metadata if len(parts) == 1 else {}
    plans = [torch_zip.layout(Checkpoint(part, extras=alone), options) for part in parts]
    files = [replace(plan.files[0], name=name) for plan, name in zip(plans, names, strict=True)]
    if len(parts) > 1:
        file_of = owners(zip(names, parts, strict=True))
        recorded = {
            **{key: text for key, text in metadata.items() if key != FRAMEWORK},
            TOTAL: total,
        }
        files.append(
            index_file(
                _TORCH_STEM + BIN, {name: file_of[name] for name in _named(weights)}, recorded
            )
        )
    return Plan(
        tuple(files),
        tuple(dict.fromkeys((*notes, *flatten(plan.notes for plan in plans)))),
    )


def _named(weights: Weights) -> Mapping[str, Node]:
    return weights.node if isinstance(weights.node, dict) else weights.nodes


def _parts(weights: Weights, limit: int | None) -> tuple[list[dict[Node, Node]], int]:
    """Return each shard's state_dict, and the number of bytes of all storages."""
    entries = _named(weights)
    first: dict[str, str] = {}  # maps each name to the first name with the same storage
    sizes: dict[str, int] = {}
    owner: dict[int, str] = {}
    for name, node in entries.items():
        storages = _storages(node)
        lead = first[name] = next((owner[id(each)] for each in storages if id(each) in owner), name)
        new = {id(each): each.nbytes for each in storages if id(each) not in owner}
        owner.update(dict.fromkeys(new, lead))
        sizes[lead] = sizes.get(lead, 0) + sum(new.values())
    files = split(sizes, limit)
    like = weights.node
    parts: list[dict[Node, Node]] = [
        OrderedMapping((), like.state) if isinstance(like, OrderedMapping) else {} for _ in files
    ]
    number = owners(enumerate(files))
    for name, node in entries.items():
        parts[number[first[name]]][name] = node
    return parts, sum(sizes.values())


def _storages(root: Node) -> list[Storage]:
    """Return every storage in an entry, including the storages in the arguments of objects."""
    leaves = (node for node in nodes(root) if isinstance(node, (Tensor, TypedStorage)))
    return [each.storage for each in leaves if each.storage is not None]
