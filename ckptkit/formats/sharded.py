"""A checkpoint in several files with an index, as on the Hugging Face hub.

    model.safetensors.index.json | pytorch_model.bin.index.json
        {"metadata": {"total_size": bytes, ...}, "weight_map": {tensor name: file name}}
    model-00001-of-00003.safetensors | pytorch_model-00001-of-00003.bin

Nothing but ``weight_map`` is required. File names are plain names in the folder of the index. Each tensor is in the one
shard that the map names, and each shard holds nothing else, ties to its own tensors aside. ``total_size`` is the bytes
of all tensors, those that share memory counted once; a wrong one is a warning. Texts in ``metadata`` may record ties
as safetensors files do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ckptkit.bytesource import Folder, LocalFile
from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import AmbiguousError, CkptkitError, CorruptError, FormatError
from ckptkit.formats import safetensors, strict_json
from ckptkit.formats.format import Format, Probe
from ckptkit.formats.plain_json import dump
from ckptkit.formats.safetensors_record import restore_ties
from ckptkit.formats.torch import legacy_stream, zip_archive
from ckptkit.limits import LIMITS, check
from ckptkit.tree import Node
from ckptkit.weights import as_tensor

SHARD_FORMATS = (safetensors.FORMAT, zip_archive.FORMAT, legacy_stream.FORMAT)
_INDEXES = (".safetensors.index.json", ".bin.index.json")
_NUMBERED = r"-([0-9]{1,9})-of-([0-9]{1,9})\."
_TOTAL = "total_size"
_FETCH = "fetch the index and the shards again, into an empty folder"


def matches(probe: Probe) -> bool:
    """A folder with an index, or the index itself."""
    if probe.is_folder:
        return any(name.endswith(_INDEXES) for name in probe.names)
    source = probe.source
    if not probe.name.endswith(".index.json") or not isinstance(source, LocalFile):
        return False
    return source.size <= LIMITS.index_bytes and b'"weight_map"' in source.read(0, source.size)


def read(probe: Probe) -> Checkpoint:
    """The tensors in the order of the index. Opens every shard and reads its headers."""
    folder, name = _place(probe)
    try:
        index = _index(folder, name)
        _check_names(folder, set(index["weight_map"].values()))
        return _assemble(folder, index)
    except CkptkitError as error:
        error.at(os.path.join(folder.name, name))
        raise


def _place(probe: Probe) -> tuple[Folder, str]:
    """The folder, and the name of the index in it."""
    if not probe.is_folder:
        folder, name = os.path.split(probe.name)
        return Folder(folder), name
    names = sorted(name for name in probe.names if name.endswith(_INDEXES))
    if len(names) > 1:
        raise AmbiguousError(
            f"holds {len(names)} indexes: {', '.join(names[:4])}",
            where=probe.name,
            hint=f"name the one that is meant, e.g. {os.path.join(probe.name, names[0])}",
        )
    return probe.folder, names[0]


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


def _check_names(folder: Folder, names: set[str]) -> None:
    """Every shard is there, and their numbers fit: shards of two downloads are no checkpoint."""
    missing = sorted(name for name in names if name not in folder)
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise CorruptError(
            f"{len(missing):,} of {len(names):,} shards are missing: {shown}",
            hint="fetch them from where the others came from",
        )
    totals = {int(found[2]) for name in names if (found := re.search(_NUMBERED, name))}
    if totals and totals != {len(names)}:
        said = " and ".join(map(str, sorted(totals)))
        raise CorruptError(f"names {len(names):,} shards, which are numbered as {said}", hint=_FETCH)


def _assemble(folder: Folder, index: dict[str, Any]) -> Checkpoint:
    places: dict[str, str] = index["weight_map"]
    shards = {name: _read_shard(folder, name) for name in sorted(set(places.values()))}
    held = {name: _held(shard) for name, shard in shards.items()}
    for tensor, shard in places.items():
        if tensor not in held[shard]:
            raise CorruptError(f"puts {tensor[:80]!r} into {shard}, which does not hold it", hint=_FETCH)
    root = {tensor: held[shard][tensor] for tensor, shard in places.items()} | _ties(held, places)
    said = index.get("metadata") or {}
    texts = {key: text if isinstance(text, str) else dump(text) for key, text in said.items() if key != _TOTAL}
    restored, metadata, warnings = restore_ties(root, texts)
    return Checkpoint(
        restored,
        FORMAT.name,
        folder,
        {key: text for shard in shards.values() for key, text in shard.metadata.items()} | metadata,
        globals=tuple(dict.fromkeys(each for shard in shards.values() for each in shard.globals)),
        warnings=(
            *(f"{name}: {warning}" for name, shard in shards.items() for warning in shard.warnings),
            *warnings,
            *_wrong_total(said, root),
        ),
    )


def _read_shard(folder: Folder, name: str) -> Checkpoint:
    probe = Probe(folder.open(name))
    try:
        for each in SHARD_FORMATS:
            if each.matches(probe):
                return each.read(probe)
        pointer = probe.head.startswith(b"version https://git-lfs")
        hint = "it is a Git LFS pointer: `git lfs pull` fetches the file" if pointer else None
        raise FormatError("is neither a safetensors file nor one of torch", hint=hint)
    except CkptkitError as error:
        error.at(probe.name)
        raise


def _held(shard: Checkpoint) -> dict[Node, Node]:
    """Everything by name, ``_extra_state`` included."""
    weights = shard.required
    return weights.node if isinstance(weights.node, dict) else dict(weights.nodes)


def _ties(held: Mapping[str, Mapping[Node, Node]], places: Mapping[str, str]) -> dict[str, Node]:
    """Names that the index leaves out because they share memory with one that it has. Any other is an error."""
    ties: dict[str, Node] = {}
    for shard, nodes in held.items():
        extra = [name for name in nodes if places.get(name) != shard]
        known = {_storage(nodes[name]) for name in nodes if places.get(name) == shard} if extra else set()
        for name in extra:
            if name in places:
                raise AmbiguousError(f"{name[:80]!r} is in {shard} and in {places[name]}", hint=_FETCH)
            if _storage(nodes[name]) not in known:
                raise CorruptError(f"{shard} holds {name[:80]!r}, which the index does not have", hint=_FETCH)
            ties[name] = nodes[name]
    return ties


def _storage(node: Node) -> int:
    tensor = as_tensor(node)
    return id(node if tensor is None else tensor.storage)


def _wrong_total(said: Mapping[str, Any], root: Mapping[str, Node]) -> list[str]:
    tensors = [tensor for node in root.values() if (tensor := as_tensor(node)) is not None]
    every = sum(tensor.nbytes for tensor in tensors)
    once = sum({id(tensor.storage): tensor.nbytes for tensor in tensors}.values())
    total = said.get(_TOTAL, once)
    if type(total) is int and total in (every, once):
        return []
    return [f"the index says {str(total)[:40]} bytes in all, the tensors have {once:,}"]


FORMAT = Format("sharded", "shards with an index", matches, read, rewrite_as="safetensors")
