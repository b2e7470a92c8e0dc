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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    placed,
    within,
)
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import and_more, flatten, merge_all, owners, some, without
from ckptkit.core.tree import Node, OrderedMapping, module_versions, nodes, versions_state
from ckptkit.core.weights import Weights, as_tensor
from ckptkit.formats import record, safetensors, strict_json, table, torch_zip
from ckptkit.formats.folder import BIN, INDEX, SAFE, Candidate, best, unread
from ckptkit.formats.format import CheckedPart, Defect, Format, Probe
from ckptkit.formats.strict_json import dump, is_utf8
from ckptkit.formats.table import SAFETENSORS, TORCH_LEGACY, TORCH_ZIP

SHARD_FORMATS = (SAFETENSORS, TORCH_ZIP, TORCH_LEGACY)
TOTAL = "total_size"
_NUMBERED = re.compile(r"-([0-9]{1,9})-of-([0-9]{1,9})\.")
_ABSENT = object()
_FETCH = "download the index and the shards again, into an empty folder"
_FETCH_THEM = "download the missing shards"

Entries = dict[Node, Node]  # entries of a shard, by name
Restore = Callable[[dict[Node, Node], Mapping[str, str]], record.Restored]


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

    def refuse(error: CkptkitError) -> None:
        raise error

    return _Shards(probe, refuse).read(format, restore)


def findings(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield every defect of the index and the shards, and each checksummed range of a shard."""
    wrong: list[CkptkitError] = []
    shards = _Shards(probe, wrong.append)
    checkpoint = shards.read("", record.restore_ties)
    for error in wrong:
        yield Defect(error.message, os.path.basename(error.where or ""), hint=error.hint)
    if not wrong:
        yield from map(Defect, coded(checkpoint.warnings, WRONG_TOTAL))
    for name, (format, each) in shards.probes.items():
        if format.check is not None:
            yield from (replace(found, file=name) for found in format.check(each))


class _Shards:
    """A reader of the shards in a folder.

    `refuse` is called with each defect. If `refuse` does not raise, reading continues without the
    defective data.
    """

    def __init__(self, probe: Probe, refuse: Callable[[CkptkitError], None]) -> None:
        self.probe = probe
        self.refuse = refuse
        self.probes: dict[str, tuple[Format, Probe]] = {}
        self.shards: dict[str, Checkpoint] = {}
        self.left: dict[str, Entries] = {}  # entries that the index does not list, by file name

    def _refuse(self, kind: type[CkptkitError], what: str, hint: str = _FETCH) -> None:
        self.refuse(kind(what, hint=hint))

    def read(self, format: str, restore: Restore) -> Checkpoint:
        """Read the shards of a folder, or of an index."""
        names, chosen = self.probe.names, best(self.probe.names)
        if chosen is None:
            place = self.probe.source.folder_and_name()
            assert place is not None
            self.folder, name = place
        else:
            self.folder, name = self.probe.folder, chosen.files[0]
        if chosen is not None and chosen.form == "shards":
            self._check_numbers(chosen)
            held = dict(self._read(chosen.files))
            root = self._merged(owners(held.items()), held.items())
            warning = "there is no index: the shards are read in the order of their numbers"
            warnings = (warning, *unread(names, chosen.files))
            return self._assembled(root, format, {}, restore, warnings)
        with placed(os.path.join(self.folder.name, name)):
            index = _index(self.folder, name)
            places: dict[Node, str] = index["weight_map"]
            files = set(places.values())
            self._check_names(files)
            whole = name.removesuffix(INDEX)
            if whole in names - files:
                what = f"does not list {whole}, which is in the same folder"
                self._refuse(AmbiguousError, what)
            root = self._merged(places, self._read(files))
            metadata = index.get("metadata") or {}
            beside = unread(names, {name, *files})
            return self._assembled(root, format, metadata, restore, beside)

    def _check_names(self, names: set[str]) -> None:
        """Check that the shards exist, and that the number of shards in each file name is right.

        If such a number is wrong, the folder may contain files of two downloads. Remove the missing
        shards from `names`.
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
        numbers = [int(found[1]) for name in chosen.files if (found := _NUMBERED.search(name))]
        total, first, known = int(chosen.total), min(*numbers, 1), set(numbers)
        missing = list(islice((n for n in range(first, first + total) if n not in known), 4))
        if missing:
            count = total - len(known)
            listed = some(map(str, missing)) + and_more(count - len(missing))
            what = f"{count:,} of {total:,} shards are missing: number {listed}"
            self._refuse(CorruptError, what, _FETCH_THEM)
        elif len(numbers) != total:
            what = f"there are {len(numbers):,} shards"
            self._refuse(AmbiguousError, f"{what}, but the total in their file names is {total:,}")

    def _read(self, files: Iterable[str]) -> Iterator[tuple[str, Entries]]:
        """Read shards. Yield the file name and the entries of each shard."""
        for name in sorted(files):
            try:
                probe = Probe(self.folder.open(name))
                with placed(probe.name):
                    format = next((each for each in SHARD_FORMATS if each.matches(probe)), None)
                    if format is None:
                        pointer = probe.head.startswith(b"version https://git-lfs")
                        hint = "it is a Git LFS pointer: `git lfs pull` fetches the file"
                        what = "is neither a safetensors nor a torch file"
                        raise FormatError(what, hint=hint if pointer else None)
                    self.probes[name] = format, probe
                    shard = format.read(probe)
                entries = _entries(shard)
            except CkptkitError as error:
                self.refuse(error)
                continue
            self.shards[name] = replace(shard, root=None)
            yield name, entries

    def _merged(
        self, places: Mapping[Node, str], shards: Iterable[tuple[str, Entries]]
    ) -> dict[Node, Node]:
        """Move the entries of all shards into one dict, in the order of `places`.

        Tied names come after all other names. Each name is looked up in the dict of its shard.
        Lookups in one dict of half a million names are slower, because most lookups miss the
        processor's cache.
        """
        names: defaultdict[str, list[Node]] = defaultdict(list)
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
            for name in [name for name in places if root[name] is _ABSENT]:
                del root[name]
                # If the shard could not be read, its defect has been refused before.
                if (file := places[name]) in self.shards:
                    what = f"maps {name[:80]!r} to {file}, which does not contain it"
                    self._refuse(CorruptError, what)
        for file, entries in self.left.items():
            # The index may omit an entry that is tied to a listed tensor of the same shard.
            listed = {*map(_storage, nodes[file])} if entries else ()
            for name, node in entries.items():
                if name in places:
                    what = f"the tensor {name[:80]!r} is in two shards: {file} and {places[name]}"
                    self._refuse(AmbiguousError, what)
                elif _storage(node) not in listed:
                    what = f"{file} contains {name[:80]!r}, which the index does not list"
                    self._refuse(CorruptError, what)
                else:
                    root[name] = node
        return root

    def _assembled(
        self,
        root: dict[Node, Node],
        format: str,
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
        restored = restore(root, texts) if texts else record.Restored(root, {})
        merged, states = restored.root, self.left.values()
        if type(merged) is dict and states and all(isinstance(e, OrderedMapping) for e in states):
            versions = merge_all(module_versions(each) or {} for each in states)
            merged = OrderedMapping(merged, versions_state(versions) if versions else None)
        return Checkpoint(
            merged,
            format,
            self.folder,
            merge_all(shard.extras for _, shard in shards) | restored.metadata,
            globals=tuple(
                dict.fromkeys((*flatten(shard.globals for _, shard in shards), *restored.globals))
            ),
            warnings=(
                *flatten(map(partial(within, name), shard.warnings) for name, shard in shards),
                *restored.warnings,
                *_index_notices(metadata, root),
                *warnings,
            ),
        )


def _entries(shard: Checkpoint) -> Entries:
    """Return the entries of a shard by name. A shard without tensors is allowed."""
    root = shard.root
    if (
        isinstance(root, dict)
        and {*map(type, root)} <= {str}
        and ({*map(type, root.values())} <= {Tensor} or shard.selection is None)
    ):
        return root
    return _named(shard.required)


def _named(weights: Weights) -> Entries:
    return weights.node if isinstance(weights.node, dict) else dict(weights.nodes)


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


def _index_notices(metadata: Mapping[str, Any], root: Mapping[Node, Node]) -> Iterator[Notice]:
    """Yield the warnings about a wrong total size, and about a delta."""
    tensors = [tensor for node in root.values() if (tensor := as_tensor(node)) is not None]
    every = sum([tensor.nbytes for tensor in tensors])
    total = metadata.get(TOTAL, every)
    if type(total) is not int or total != every:
        once = sum({id(tensor.storage): tensor.nbytes for tensor in tensors}.values())
        # `total_size` may include the packed parameters that quantized modules store inside
        # objects.
        stored = sum({id(each): each.nbytes for each in _storages(root)}.values())
        if type(total) is not int or total not in (once, stored):
            text = f"the index's total_size is {str(total)[:40]} bytes, but the tensors have"
            yield Notice(WRONG_TOTAL, f"{text} {once:,}", nbytes=once)
    if "delta_encoding" in metadata:
        version, base = (str(metadata.get(word))[:9] for word in ("version", "base_version"))
        what = f"contains a delta, not weights: version {version} of base {base}"
        yield Notice(DELTA, f"{what}; `delta inspect` shows what it changes")


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


def _folder(
    title: tuple[str, str],
    files: Iterable[OutputFile],
    parts: Sequence[Iterable[Node]],
    order: Iterable[str],
    metadata: Mapping[str, Any],
) -> tuple[OutputFile, ...]:
    """Name the files of the shards, and add the index. A single file gets no index.

    `title` is the stem and the suffix of the file names. `parts` contains the names of the tensors
    in each file, and `order` all names in the order of the index.
    """
    stem, suffix = title
    names = shard_names(stem, suffix, len(parts))
    named = [replace(file, name=name) for file, name in zip(files, names, strict=True)]
    if len(parts) > 1:
        file_of = owners(zip(names, parts, strict=True))
        named.append(index_file(stem + suffix, {name: file_of[name] for name in order}, metadata))
    return tuple(named)


# Shards of safetensors


matches_safetensors = partial(matches, suffix=SAFE)


def _restored(root: dict[Node, Node], texts: Mapping[str, str]) -> record.Restored:
    """Restore the state_dict from a safetensors index. For torch shards, restore only the ties."""
    plain = all(isinstance(node, Tensor) for node in root.values())
    return (
        record.restore(root, texts, index=True)
        if plain
        else record.restore_ties(root, texts, index=True)
    )


read_safetensors = partial(read, format=table.SHARDED.name, restore=_restored)


def layout_safetensors(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan a folder of safetensors shards.

    Raises the errors of `safetensors.layout`. Raises LimitError if the index is too large.
    """
    # Reserve the metadata key `total_size`, so that no tie uses this key.
    checkpoint = replace(checkpoint, extras={**checkpoint.extras, TOTAL: ""})
    tensors, metadata, notes = safetensors.prepared(checkpoint, options)
    del metadata[TOTAL]
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    parts = split(sizes, options.shard_size)
    inside = metadata if len(parts) == 1 else {record.FRAMEWORK: metadata.pop(record.FRAMEWORK)}
    files = (safetensors.file_of({each: tensors[each] for each in part}, inside) for part in parts)
    texts = {key: text for key, text in metadata.items() if text is not None}
    recorded = {TOTAL: sum(sizes.values()), **texts}
    return Plan(_folder(("model", SAFE), files, parts, tensors, recorded), tuple(notes))


# Shards of torch.save


matches_torch = partial(matches, suffix=BIN)
read_torch = partial(
    read, format=table.SHARDED_BIN.name, restore=partial(record.restore_ties, index=True)
)


def layout_torch(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan a folder of torch.save shards.

    Raises the errors of `torch_zip.layout`. Raises LimitError if the index is too large.
    """
    if options.objects == "error":
        record.refuse_objects(checkpoint)
    like = checkpoint.required.node
    entries = _named(checkpoint.required)
    first: dict[Node, str] = {}  # maps each name to the first name with the same storage
    sizes: dict[str, int] = {}
    owner: dict[int, str] = {}
    for name, node in entries.items():
        storages = _storages(node)
        lead = first[name] = next((owner[id(each)] for each in storages if id(each) in owner), name)
        new = {id(each): each.nbytes for each in storages if id(each) not in owner}
        owner.update(dict.fromkeys(new, lead))
        sizes[lead] = sizes.get(lead, 0) + sum(new.values())
    groups = split(sizes, options.shard_size)
    parts: list[dict[Node, Node]] = [
        OrderedMapping((), like.state) if isinstance(like, OrderedMapping) else {} for _ in groups
    ]
    number = owners(enumerate(groups))
    for name, node in entries.items():
        parts[number[first[name]]][name] = node
    extra, notes = record.leftovers(checkpoint, inside=False)
    metadata = {
        **checkpoint.extras,
        **record.of_values({**record.values(checkpoint.extras), **extra}),
    }
    inside = metadata if len(parts) == 1 else {}
    plans = [torch_zip.layout(Checkpoint(part, extras=inside), options) for part in parts]
    files = (plan.files[0] for plan in plans)
    recorded = {**without(metadata, {record.FRAMEWORK}), TOTAL: sum(sizes.values())}
    notes += flatten(plan.notes for plan in plans)
    return Plan(
        _folder(("pytorch_model", BIN), files, parts, entries, recorded),
        tuple(dict.fromkeys(notes)),
    )


def _storages(root: Node) -> list[Storage]:
    """Return every storage in an entry, including the storages in the arguments of objects."""
    leaves = (node for node in nodes(root) if isinstance(node, (Tensor, TypedStorage)))
    return [each.storage for each in leaves if each.storage is not None]
