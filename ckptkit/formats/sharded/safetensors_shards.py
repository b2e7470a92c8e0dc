"""Shards of safetensors: ``model-00001-of-00003.safetensors``, ``model.safetensors.index.json``.

What a single file would have in its ``__metadata__`` (ties, by the hub's convention, and the rest
of the state_dict) is in the metadata of the index. A name that is tied to another is in no shard
and not in the ``weight_map``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.plan import Plan
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import owners
from ckptkit.core.tree import Node
from ckptkit.formats import table
from ckptkit.formats.common.dropped import refuse_objects
from ckptkit.formats.common.folder_names import SAFETENSORS
from ckptkit.formats.common.saved_record import FRAMEWORK, Restored, restore, restore_ties
from ckptkit.formats.format import Probe, WriteOptions
from ckptkit.formats.safetensors import writing
from ckptkit.formats.sharded import shards
from ckptkit.formats.sharded.split import index_file, shard_names, split

STEM = "model"


def matches(probe: Probe) -> bool:
    return shards.matches(probe, SAFETENSORS)


def read(probe: Probe) -> Checkpoint:
    """Read the tensors of all shards. See :mod:`shards`."""
    return shards.read(probe, table.SHARDED.name, _restored)


def _restored(root: dict[Node, Node], texts: Mapping[str, str]) -> Restored:
    """Restore the state_dict of shards that are safetensors files; the index may name others."""
    plain = all(isinstance(node, Tensor) for node in root.values())
    return restore(root, texts, index=True) if plain else restore_ties(root, texts, index=True)


def layout(checkpoint: Checkpoint, options: WriteOptions) -> Plan:
    """Plan a folder with the weights.

    Raises what safetensors' own layout raises, and LimitError for a huge index.
    """
    if options.objects == "error":
        refuse_objects(checkpoint)
    # reserve the name, which a tie must not have
    checkpoint = replace(checkpoint, extras={**checkpoint.extras, shards.TOTAL: ""})
    tensors, metadata, notes = writing.prepared(checkpoint, options)
    del metadata[shards.TOTAL]
    parts = split({name: tensor.nbytes for name, tensor in tensors.items()}, options.shard_size)
    names = shard_names(STEM, SAFETENSORS, len(parts))
    if len(parts) == 1:
        return Plan((replace(writing.file_of(tensors, metadata), name=names[0]),), tuple(notes))
    framework = {FRAMEWORK: metadata.pop(FRAMEWORK)}
    files = [
        replace(writing.file_of({each: tensors[each] for each in part}, framework), name=name)
        for name, part in zip(names, parts, strict=True)
    ]
    file_of = owners(zip(names, parts, strict=True))
    recorded = {
        shards.TOTAL: sum(tensor.nbytes for tensor in tensors.values()),
        **{key: text for key, text in metadata.items() if text is not None},
    }
    index = index_file(STEM + SAFETENSORS, {name: file_of[name] for name in tensors}, recorded)
    return Plan((*files, index), tuple(notes))
