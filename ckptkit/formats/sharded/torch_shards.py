"""Shards of torch.save: ``pytorch_model-00001-of-00002.bin``, ``pytorch_model.bin.index.json``.

Each shard is a state_dict of its own, with the attributes of the whole one; tensors that share
memory are in one shard. Texts that a single file has in a record of its own (:mod:`extra_records`)
are in the metadata of the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.plan import Plan
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import flatten, owners
from ckptkit.core.tree import Node, OrderedMapping, rebuild
from ckptkit.core.weights import Weights
from ckptkit.formats import table
from ckptkit.formats.common.dropped import leftovers, refuse_objects
from ckptkit.formats.common.folder_names import BIN
from ckptkit.formats.common.saved_record import FRAMEWORK, of_values, restore_ties, values
from ckptkit.formats.format import Probe, WriteOptions
from ckptkit.formats.sharded import shards
from ckptkit.formats.sharded.split import index_file, shard_names, split
from ckptkit.formats.torch_zip import writer

STEM = "pytorch_model"


def matches(probe: Probe) -> bool:
    return shards.matches(probe, BIN)


def read(probe: Probe) -> Checkpoint:
    """Read the entries of all shards. See :mod:`shards`."""
    return shards.read(probe, table.SHARDED_BIN.name, partial(restore_ties, index=True))


def layout(checkpoint: Checkpoint, options: WriteOptions) -> Plan:
    """Plan a folder with the weights and the other entries among them.

    Raises what torch-zip's layout raises, and LimitError for a huge index.
    """
    if options.objects == "error":
        refuse_objects(checkpoint)
    weights = checkpoint.required
    parts, total = _parts(weights, options.shard_size)
    names = shard_names(STEM, BIN, len(parts))
    extra, notes = leftovers(checkpoint, inside=False)
    metadata = {**checkpoint.extras, **of_values({**values(checkpoint.extras), **extra})}
    alone = metadata if len(parts) == 1 else {}
    plans = [writer.layout(Checkpoint(part, extras=alone), options) for part in parts]
    files = [replace(plan.files[0], name=name) for plan, name in zip(plans, names, strict=True)]
    if len(parts) > 1:
        file_of = owners(zip(names, parts, strict=True))
        recorded = {
            **{key: text for key, text in metadata.items() if key != FRAMEWORK},
            shards.TOTAL: total,
        }
        files.append(
            index_file(STEM + BIN, {name: file_of[name] for name in _entries(weights)}, recorded)
        )
    return Plan(
        tuple(files),
        tuple(dict.fromkeys((*notes, *flatten(plan.notes for plan in plans)))),
    )


def _entries(weights: Weights) -> Mapping[str, Node]:
    return weights.node if isinstance(weights.node, dict) else weights.nodes


def _parts(weights: Weights, limit: int | None) -> tuple[list[dict[Node, Node]], int]:
    """Return each shard's state_dict, in the order of the whole, and the bytes of all storages."""
    entries = _entries(weights)
    first: dict[str, str] = {}  # each name -> the first one that it shares a storage with
    sizes: dict[str, int] = {}
    owner: dict[int, str] = {}
    for name, node in entries.items():
        storages = _storages(node)
        lead = first[name] = next((owner[id(each)] for each in storages if id(each) in owner), name)
        new = {id(each): each.nbytes for each in storages if id(each) not in owner}
        owner.update(dict.fromkeys(new, lead))
        sizes[lead] = sizes.get(lead, 0) + sum(new.values())
    files = split(sizes, limit)
    parts = [_empty(weights.node) for _ in files]
    number = owners(enumerate(files))
    for name, node in entries.items():
        parts[number[first[name]]][name] = node
    return parts, sum(sizes.values())


def _empty(like: Node) -> dict[Node, Node]:
    return OrderedMapping((), like.state) if isinstance(like, OrderedMapping) else {}


def _storages(root: Node) -> list[Storage]:
    """Return every storage in an entry, those in the arguments of objects included."""
    found: list[Storage] = []

    def see(node: Node) -> Node:
        if isinstance(node, (Tensor, TypedStorage)) and node.storage is not None:
            found.append(node.storage)
        return node

    if isinstance(root, Tensor):
        see(root)
    else:
        rebuild(root, see)
    return found
