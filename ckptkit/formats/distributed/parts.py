"""Recognize files of single ranks, and folders of rank files that ckptkit cannot join.

A file is from a single rank in any of these cases:

* A DTensor or ShardedTensor has fewer local elements than the complete tensor.
* Training arguments or counters in the file show several parallel ranks.
* The file contains the metadata of a fairscale shard.
* In a file called ``consolidated.<NN>.pth``, ``attention.wo.weight`` has fewer columns than
  ``norm.weight`` has elements.

ckptkit recognizes all other rank files by their names. Examples of other rank files are layers of a
DeepSpeed pipeline, partitions of ZeRO, and optimizers of FSDP.

Sources of the layouts that ckptkit cannot join:

* ``ShardedStateLoader.DEFAULT_PATTERN`` of vLLM.
* ``--dist-ckpt-format zarr`` of Megatron-LM.
* ``LocalShardedCheckpointer`` in olmo/checkpoint.py of OLMo, and scripts/unshard.py.
* ``get_dist_files_name`` in checkpoint_io/distributed_checkpoint_utils.py of ColossalAI, and
  ``Booster.save_model``.
* ``inject_model_parallel_rank`` in nemo/utils/model_utils.py of NeMo 1, and
  megatron_change_num_partitions.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from ckptkit.core.bytesource import ByteSource, Memory, Range
from ckptkit.core.checkpoint import Checkpoint, PartOf
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.text import flatten
from ckptkit.core.tree import Node, join, rebuild
from ckptkit.core.weights import as_tensor
from ckptkit.formats.distributed import meshes
from ckptkit.formats.distributed.meshes import CLASSES, FSDP, Mesh, Piece, piece_of, pieces_in
from ckptkit.formats.format import Probe

_OF_FSDP = "an FSDP checkpoint"
_WORLD = re.compile(r"world_size_([0-9]{1,9})_rank_([0-9]{1,9})\.")
LAYER = re.compile(r"layer_(?P<layer>[0-9]{2,9})(?:-model_(?P<tp>[0-9]{2,9}))?-model_states\.pt")
TENSOR_RANK = re.compile(r"mp_rank_(?P<tp>[0-9]{2,9})_model_states\.pt")
CONSOLIDATED = re.compile(r"consolidated\.(?P<tp>[0-9]{2})\.pth")
ZERO = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_(?:model|optim)_states\.pt"
)
_VLLM = re.compile(r"model-rank-([0-9]{1,6})-part-[0-9]{1,6}\.safetensors")
_MEGATRON = re.compile(r"mp_rank_([0-9]{2,3})(?:_[0-9]{3}){0,2}")
# The keys are training arguments that contain a number of parallel ranks. The values are the
# abbreviations of the parallel axes.
_SIZES = {
    "tensor_model_parallel_size": "TP", "model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "pipe_parallel_size": "PP", "expert_model_parallel_size": "EP",
}  # fmt: skip


def with_part(checkpoint: Checkpoint) -> Checkpoint:
    """Set `part` to a description of the rank and its shards, or to None for a complete file."""
    root, source = checkpoint.root, checkpoint.source
    path = source.name if isinstance(source, ByteSource) else ""
    part = None
    if any(each.name in CLASSES for each in checkpoint.globals):
        part = _pieces(root, path)
    held = root if isinstance(root, dict) else {}
    for look in (_fairscale, _megatron, _deepspeed, _llama, _named):
        part = part or look(held, path)
    if part is not None and part.kind != "vllm":
        is_megatron = part.kind == "megatron" and _MEGATRON.fullmatch(_above(path))
        part = replace(part, folder=folder_of_ranks(path, 1 if is_megatron else 0))
    return replace(checkpoint, part=part)


def _above(path: str) -> str:
    return os.path.basename(os.path.dirname(os.path.abspath(path)))


def plain(checkpoint: Checkpoint) -> Checkpoint:
    """Replace each DTensor and ShardedTensor by its local tensor. A local tensor can be empty."""
    if not any(each.name in CLASSES for each in checkpoint.globals):
        return checkpoint
    swap: dict[int, Node] = {}
    known: dict[int, Mesh] = {}
    nodes = [node for _, node in pieces_in(checkpoint.root)]
    for node in nodes:
        piece = piece_of(node, known)
        assert piece is not None
        shape = (0, *piece.shape[1:])
        empty = Storage(Range(Memory(b""), 0, 0))
        tensors = piece.local() or [Tensor(empty, piece.dtype, shape, contiguous_stride(shape))]
        if len(tensors) > 1:
            raise UnsupportedError("contains a tensor with several shards on one rank")
        swap[id(node)] = tensors[0]
    return replace(checkpoint, root=rebuild(checkpoint.root, lambda leaf: leaf, swap))


def alone(checkpoint: Checkpoint) -> Checkpoint:
    """Prepare the checkpoint of a single rank's file for writing.

    Replace each DTensor and ShardedTensor by its local tensor. Warn that the output is not a
    complete checkpoint.
    """
    made = plain(checkpoint)
    if checkpoint.part is None:
        return replace(made, part_only=True)
    noticed = f"this is {checkpoint.part}: the output is not a complete checkpoint"
    made = replace(made, warnings=(*made.warnings, noticed), part_only=True)
    return made if made.root is checkpoint.root else with_part(made)


def folder_beside(path: str, up: int = 0) -> str | None:
    """Return the folder `up` levels above the folder of a file. Return None for a URL."""
    folder = os.path.normpath(os.path.join(os.path.dirname(path) or ".", *[".."] * up))
    return folder if path and "://" not in path else None


def folder_of_ranks(path: str, up: int = 0) -> str | None:
    """Return the folder of a rank's file, if the folder may contain files of other ranks.

    `folder_beside` describes `up`. Return None if no other name in the folder has the same suffix.
    """
    folder = folder_beside(path, up)
    if folder is None:
        return None
    own = os.path.relpath(path, folder).split(os.sep)[0]
    suffix = os.path.splitext(own)[1]
    try:
        names = os.listdir(folder)
    except OSError:  # readable file in a folder that cannot be listed
        return folder
    return folder if any(name != own and name.endswith(suffix) for name in names) else None


def _pieces(root: Node, path: str) -> PartOf | None:
    """Describe the shards in a file with DTensors or ShardedTensors.

    Return None if all tensors are complete.
    """
    known: dict[int, Mesh] = {}
    found: list[tuple[str, Piece]] = []
    for place, node in pieces_in(root):
        try:
            piece = piece_of(node, known)
        except CkptkitError:  # torch does not write this form
            continue
        if piece is not None:
            found.append((join(place), piece))
    cut = [
        (name, piece)
        for name, piece in found
        if sum(tensor.numel for tensor in piece.local()) < prod(piece.shape)
    ]
    if not cut:
        return None
    ranks = [piece.rank for _, piece in cut if piece.rank is not None]
    worlds = [piece.world for _, piece in found]
    if named := _WORLD.search(os.path.basename(path)):
        ranks.append(int(named[2]))
        worlds.append(int(named[1]))
    rank = ranks[0] if ranks else None
    who = f"rank {'?' if rank is None else f'{rank:,}'} of {max(worlds):,}"
    what = meshes.parallelism(piece for _, piece in found)
    whole = _OF_FSDP if what == FSDP else f"a checkpoint of {what}"
    spans = {text for _, piece in cut if (text := extent(piece, rank))}
    if len(spans) == 1:
        detail = f"{spans.pop()} of each tensor"
    else:
        name, largest = max(cut, key=lambda each: prod(each[1].shape))
        detail = f"a shard of each of {len(cut):,} tensors, e.g. "
        detail += f"{extent(largest, rank) or 'none'} of {name}"
    return PartOf("fsdp" if FSDP in what else "dtensor", f"{who} of {whole}", detail)


def extent(piece: Piece, rank: int | None = None) -> str:
    """Describe the elements of the complete tensor that `piece` contains ("rows 0 to 7 of 16").

    Return "" if these elements are unknown.
    """
    try:
        boxes = piece.boxes(piece.rank if piece.rank is not None else rank)
    except CkptkitError:
        return ""
    if not boxes:
        return "no rows"
    if len(boxes) > 1:
        return f"{len(boxes):,} blocks"
    spans = []
    for dim, (at, n, whole) in enumerate(
        zip(boxes[0].offsets, boxes[0].sizes, piece.shape, strict=True)
    ):
        if n < whole:
            what = ("rows", "columns")[dim] if dim < 2 else f"dimension {dim}: indexes"
            span = f"{what} {at:,} to {at + n - 1:,}" if n > 1 else f"{what[:-1]} {at:,}"
            spans.append(f"{span} of {whole:,}")
    return " and ".join(spans) or "all rows"


def _megatron(root: Mapping[Node, Node], path: str) -> PartOf | None:
    values = meshes.attributes(root.get("args"))
    arguments = {key.replace("-", "_"): n for key, n in values.items() if isinstance(key, str)}
    sizes = {name: arguments[key] for key, name in _SIZES.items() if key in arguments}
    grid = {name: n for name, n in sizes.items() if type(n) is int and 1 < n < 1 << 31}
    if not grid or not any(re.fullmatch(r"model[0-9]{0,4}", str(key)) for key in root):
        return None
    above = _above(path)
    named = _MEGATRON.fullmatch(above)
    if not (named or "checkpoint_version" in root or "padded_vocab_size" in arguments):
        return None  # trainers other than Megatron-LM use these argument names in complete files
    numbers = [int(n) for n in re.findall(r"[0-9]+", above)] if named else []
    axes = ["TP", *(axis for axis in ("PP", "EP") if axis in grid)]
    at = [f"one of {n} {axis} ranks" for axis, n in grid.items()]
    if len(numbers) == len(axes):
        places = zip(axes, numbers, strict=True)
        at = [f"{axis} rank {n} of {grid.get(axis, 1)}" for axis, n in places]
    return PartOf("megatron", f"{', '.join(at)}, of a Megatron-LM checkpoint")


def _deepspeed(root: Mapping[Node, Node], path: str) -> PartOf | None:
    world = root.get("mp_world_size")
    named = TENSOR_RANK.fullmatch(os.path.basename(path))
    if world is None or not ((type(world) is int and world > 1) or (named and int(named[1]))):
        return None
    rank = f"tensor rank {int(named[1])}" if named else "one tensor rank"
    return PartOf("deepspeed", f"{rank} of {world} of a DeepSpeed checkpoint")


def _fairscale(root: Mapping[Node, Node], path: str) -> PartOf | None:
    if not isinstance(root.get("shard_metadata"), dict):
        return None
    found = re.search(r"shard([0-9]+)\.pt", path)
    which = f"shard {int(found[1])}" if found else "a shard"
    return PartOf("fairscale", f"{which} of a fairscale checkpoint")


def _llama(root: Mapping[Node, Node], path: str) -> PartOf | None:
    """Describe a shard of a Llama release.

    In a shard, ``attention.wo.weight`` has fewer columns than ``norm.weight`` has elements.
    """
    named = CONSOLIDATED.fullmatch(os.path.basename(path))
    keys = ("norm.weight", "layers.0.attention.wo.weight")
    norm, output = (as_tensor(root.get(key)) for key in keys)
    if not named or norm is None or output is None:
        return None
    if len(norm.shape) != 1 or len(output.shape) != 2 or not 0 < output.shape[1] < norm.shape[0]:
        return None
    count = norm.shape[0] // output.shape[1]
    return PartOf("llama", f"shard {int(named[1])} of {count} of a Llama release")


def _named(root: Mapping[Node, Node], path: str) -> PartOf | None:
    """Describe a file whose name contains a rank. Used if the contents show no rank."""
    name = os.path.basename(path)
    if (found := _WORLD.search(name)) and not name.startswith("extra_state"):
        what = f"rank {int(found[2])} of {int(found[1])} of {_OF_FSDP}"
        return PartOf("fsdp", what) if int(found[1]) > 1 else None
    if (found := LAYER.fullmatch(name)) and found["tp"]:
        what = f"layer {int(found[1])}, tensor rank {int(found[2])}, of a DeepSpeed pipeline"
        return PartOf("deepspeed", what)
    if found := _VLLM.fullmatch(name):
        return PartOf("vllm", f"rank {int(found[1])} of a sharded state of vLLM")
    if (found := ZERO.fullmatch(name)) and root:
        # `counts` contains the numbers of ranks over which ZeRO partitioned the tensors.
        inner = root.get("optimizer_state_dict")
        cut = inner.get("partition_count") if isinstance(inner, dict) else None
        counts = (root.get("dp_world_size"), cut)
        numbers = flatten(n if isinstance(n, (list, tuple)) else (n,) for n in counts)
        if max((n for n in numbers if type(n) is int), default=1) > 1:
            what = f"the partition of rank {int(found[1])} of DeepSpeed's ZeRO"
            return PartOf("deepspeed", what)
    return None


# Folders of rank files that ckptkit recognizes, but cannot join


_LOOKED_AT = 8  # maximum number of subfolders to list
# Paths below the folder, by the name of the layout. The file refused.toml describes the layouts.
REFUSED = re.compile(
    r"(?P<vllm>model-rank-[0-9]{1,6}-part-[0-9]{1,6}\.safetensors)|(?P<zarr>[^/.][^/]*/\.zarray)"
    r"|(?P<colossalai>(?:pytorch_)?model-(?:meta-)?dist-[0-9]{5}.*\.(?:bin|safetensors|json))"
    r"|(?P<olmo>model/rank[0-9]{1,6}\.pt)|(?P<nemo>(?:(?:mp_rank_[0-9]{2}_)?fsdp_shard_[0-9]{5}"
    r"|mp_rank_[0-9]{2}|tp_rank_[0-9]{2}_pp_rank_[0-9]{3})/[^/]*\.ckpt)"
)
_BESIDE = {"zarr": "metadata.json", "olmo": "optim"}  # a name that the folder also contains


def matches(probe: Probe) -> bool:
    """Return whether the folder has a layout that ckptkit cannot join."""
    return _refused(probe) is not None


def _refused(probe: Probe) -> str | None:
    """Return the name of the layout in refused.toml, or None."""
    paths = list(probe.names)
    for name in probe.folder.folders()[:_LOOKED_AT]:
        try:
            paths += [f"{name}/{inner}" for inner in probe.folder.sub(name).list()]
        except CkptkitError:  # no permission to list the subfolder
            continue
    kinds = (found.lastgroup or "" for found in map(REFUSED.fullmatch, paths) if found)
    there = (kind for kind in kinds if kind not in _BESIDE or _BESIDE[kind] in paths)
    return next(there, None)


def read(probe: Probe) -> Checkpoint:
    """Raise UnsupportedError with the message and hint for the layout."""
    import tomllib  # imported only for folders that ckptkit refuses

    text = Path(__file__).with_name("refused.toml").read_text("utf-8")
    kind = tomllib.loads(text)[_refused(probe) or ""]
    raise UnsupportedError(kind["what"], hint=kind["hint"])
