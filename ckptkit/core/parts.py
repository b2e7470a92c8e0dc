"""A file that is one part of a checkpoint: how it is known, and what to do instead of taking it for
the whole.

By content: pieces of tensors (DTensor, ShardedTensor) that hold less than the whole, arguments or
counters of a training that name several parallel ranks, the metadata of fairscale's shards,
projections narrower than the model. By name, where the content of such files says nothing: layers
of a DeepSpeed pipeline, partitions of ZeRO, optimizers of ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptkit.core import parallelism
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.piece_forms import attributes, piece_of, pieces_in
from ckptkit.core.pieces import Mesh, Piece
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.text import argument, flatten, shell_command
from ckptkit.core.tree import Node, Path, join, rebuild
from ckptkit.core.weights import as_tensor

FSDP, MEGATRON, LLAMA, DEEPSPEED, FAIRSCALE = "fsdp", "megatron", "llama", "deepspeed", "fairscale"
DTENSOR, VLLM = "dtensor", "vllm"
_OF_FSDP = "an FSDP checkpoint"
_WORLD = re.compile(r"world_size_([0-9]{1,9})_rank_([0-9]{1,9})\.")
_LAYER = re.compile(r"layer_([0-9]{2,9})-model_([0-9]{2,9})-model_states\.pt")
_ZERO = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_(?:model|optim)_states\.pt"
)
_VLLM = re.compile(r"model-rank-([0-9]{1,6})-part-[0-9]{1,6}\.safetensors")
_TENSOR_RANK = re.compile(r"mp_rank_([0-9]{2,9})_model_states\.pt")
_MEGATRON = re.compile(r"mp_rank_([0-9]{2,3})(?:_[0-9]{3}){0,2}")
_CONSOLIDATED = re.compile(r"consolidated\.([0-9]{2})\.pth")
# Arguments that count parallel ranks, and what those are called.
_SIZES = {
    "tensor_model_parallel_size": "TP", "model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "pipe_parallel_size": "PP", "expert_model_parallel_size": "EP",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartOf:
    """A file that is one part of a checkpoint.

    ``name`` is a phrase ("rank 0 of 2 of an FSDP checkpoint"), ``detail`` what of the tensors it
    holds, ``folder`` where the whole is, None if nothing tells. ``alone``: it can be read alone.
    """

    kind: str
    name: str
    detail: str
    folder: str | None
    alone: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name

    def refusal(self, what: str = "this would take it for the whole") -> UnsupportedError:
        """The error of a command that is for whole checkpoints."""
        return UnsupportedError(f"is {self}; {what}", hint=self.hint)

    @property
    def hint(self) -> str:
        """The command to use instead."""
        whole = "the whole is made of all parts, in one folder"
        if self.folder:
            command = shell_command(
                ("ckptkit", "convert", *argument(self.folder), "out.safetensors")
            )
            whole = f"the whole is the folder: `{command}`"
        return f"{whole}; --part-only takes this part alone" if self.alone else whole


def part_of(root: Node, path: str, *, pieces: bool) -> PartOf | None:
    """Find out which part the tree of the file at `path` is; None if it is complete as far as it
    tells.

    `pieces` says whether its pickle names a class of which there could be some.
    """
    looks = (_fairscale, _megatron, _deepspeed, _llama, _named)
    for look in (_pieces, *looks) if pieces else looks:
        found = look(root, path)
        if found is not None:
            return found
    return None


def folder_beside(path: str, up: int = 0) -> str | None:
    """Return the folder of a file, or one above it; None for a URL."""
    folder = os.path.normpath(os.path.join(os.path.dirname(path) or ".", *[".."] * up))
    return folder if path and "://" not in path else None


# Pieces of tensors


def pieces(root: Node) -> Iterator[tuple[Path, Piece]]:
    """The pieces in a tree. Those that no known torch wrote are passed over."""
    meshes: dict[int, Mesh] = {}
    for path, node in pieces_in(root):
        try:
            piece = piece_of(node, meshes)
        except CkptkitError:
            continue
        if piece is not None:
            yield path, piece


def _pieces(root: Node, path: str) -> PartOf | None:
    """A rank file; None where the tensors that it holds are whole."""
    found = list(pieces(root))
    cut = [(place, piece) for place, piece in found if held(piece) < piece_elements(piece)]
    if not cut:
        return None
    ranks = [piece.rank for _, piece in cut if piece.rank is not None]
    worlds = [piece.world for _, piece in found]
    if named := _WORLD.search(os.path.basename(path)):
        ranks.append(int(named[2]))
        worlds.append(int(named[1]))
    rank, world = (ranks[0] if ranks else None), max(worlds)
    who = f"rank {'?' if rank is None else f'{rank:,}'} of {world:,}"
    what = parallelism.named(piece for _, piece in found)
    whole = _OF_FSDP if what == parallelism.FSDP else f"a checkpoint of {what}"
    kind = FSDP if parallelism.FSDP in what else DTENSOR
    return PartOf(kind, f"{who} of {whole}", _rows(cut, rank), folder_beside(path))


def held(piece: Piece) -> int:
    """Elements that a piece holds."""
    return sum(tensor.numel for tensor in piece.local())


def piece_elements(piece: Piece) -> int:
    """Elements of the whole."""
    count = 1
    for n in piece.shape:
        count *= n
    return count


def _rows(cut: list[tuple[Path, Piece]], rank: int | None) -> str:
    """Describe the rows that it holds: of all tensors if they agree, else of the first."""
    texts = {text for _, piece in cut if (text := extent(piece, rank))}
    if len(texts) == 1:
        return f"{texts.pop()} of each tensor"
    sizes = [piece_elements(piece) for _, piece in cut]
    place, piece = cut[sizes.index(max(sizes))]
    return (
        f"a part of each of {len(cut):,} tensors, e.g. {extent(piece, rank) or 'none'} of "
        f"{join(place)}"
    )


def extent(piece: Piece, rank: int | None = None) -> str:
    """Describe the rows, or other indices, of a tensor in a piece; "" if they are unknown."""
    try:
        boxes = piece.boxes(piece.rank if piece.rank is not None else rank)
    except CkptkitError:
        return ""
    if not boxes:
        return "no rows"
    if len(boxes) > 1:
        return f"{len(boxes):,} runs of rows"
    spans = []
    for dim, (at, n, whole) in enumerate(
        zip(boxes[0].offsets, boxes[0].sizes, piece.shape, strict=True)
    ):
        if n < whole:
            what = ("rows", "columns")[dim] if dim < 2 else f"dimension {dim}: indexes"
            span = f"{what} {at:,} to {at + n - 1:,}" if n > 1 else f"{what[:-1]} {at:,}"
            spans.append(f"{span} of {whole:,}")
    return " and ".join(spans) or "all rows"


# Arguments, counters and names


def _arguments(root: Node) -> Mapping[str, Node]:
    found = root.get("args") if isinstance(root, dict) else None
    values = attributes(found)
    return {key.replace("-", "_"): value for key, value in values.items() if isinstance(key, str)}


def _grid(root: Node) -> dict[str, int]:
    """Parallel ranks by what they are called, where there is more than one."""
    arguments = _arguments(root)
    found = ((name, arguments.get(key)) for key, name in _SIZES.items())
    sizes = {name: n for name, n in found if type(n) is int}
    return {name: n for name, n in sizes.items() if 1 < n < 1 << 31}


def _megatron(root: Node, path: str) -> PartOf | None:
    grid = _grid(root)
    if not grid or not any(re.fullmatch(r"model[0-9]{0,4}", str(key)) for key in root):
        return None
    above = os.path.basename(os.path.dirname(os.path.abspath(path)))
    named = _MEGATRON.fullmatch(above)
    if not (named or "checkpoint_version" in root or "padded_vocab_size" in _arguments(root)):
        return None  # other trainers have arguments of these names, and files that are complete
    numbers = [int(n) for n in re.findall(r"[0-9]+", above)] if named else []
    axes = ["TP", *(axis for axis in ("PP", "EP") if axis in grid)]
    if len(numbers) == len(axes):
        at = [f"{axis} {n} of {grid.get(axis, 1)}" for axis, n in zip(axes, numbers, strict=True)]
    else:
        at = [f"one of {axis} {n}" for axis, n in grid.items()]
    return PartOf(
        MEGATRON,
        f"part {', '.join(at)} of a Megatron-LM checkpoint",
        "",
        folder_beside(path, 1 if named else 0),
    )


def _deepspeed(root: Node, path: str) -> PartOf | None:
    name = os.path.basename(path)
    if isinstance(root, dict) and "mp_world_size" in root:
        world = root["mp_world_size"]
        named = _TENSOR_RANK.fullmatch(name)
        if (type(world) is int and world > 1) or (named and int(named[1])):
            rank = f"tensor rank {int(named[1])}" if named else "one tensor rank"
            return PartOf(
                DEEPSPEED, f"{rank} of {world} of a DeepSpeed checkpoint", "", folder_beside(path)
            )
    return None


def _fairscale(root: Node, path: str) -> PartOf | None:
    if not isinstance(root, dict) or not isinstance(root.get("shard_metadata"), dict):
        return None
    found = re.search(r"shard([0-9]+)\.pt", path)
    which = f"shard {int(found[1])}" if found else "a shard"
    return PartOf(FAIRSCALE, f"{which} of a fairscale checkpoint", "", folder_beside(path))


def _llama(root: Node, path: str) -> PartOf | None:
    """A part of a release of Meta's: its projections have fewer rows than the model is wide."""
    named = _CONSOLIDATED.fullmatch(os.path.basename(path))
    if not isinstance(root, dict) or not named:
        return None
    norm, output = (
        as_tensor(root.get(key)) for key in ("norm.weight", "layers.0.attention.wo.weight")
    )
    if norm is None or output is None or len(norm.shape) != 1 or len(output.shape) != 2:
        return None
    count = norm.shape[0] // output.shape[1] if output.shape[1] else 1
    if count < 2:
        return None
    return PartOf(
        LLAMA, f"part {int(named[1])} of {count} of a Llama release", "", folder_beside(path)
    )


def _named(root: Node, path: str) -> PartOf | None:
    """Recognize a part by the name of its file; the content does not show it."""
    name = os.path.basename(path)
    if found := _WORLD.search(name):
        if int(found[1]) > 1 and not name.startswith("extra_state"):
            return PartOf(
                FSDP,
                f"rank {int(found[2])} of {int(found[1])} of {_OF_FSDP}",
                "",
                folder_beside(path),
            )
    elif found := _LAYER.fullmatch(name):
        name = f"layer {int(found[1])}, tensor rank {int(found[2])}, of a DeepSpeed pipeline"
        return PartOf(DEEPSPEED, name, "", folder_beside(path))
    elif found := _VLLM.fullmatch(name):
        return PartOf(VLLM, f"rank {int(found[1])} of a sharded state of vLLM", "", None)
    elif (found := _ZERO.fullmatch(name)) and _counted(root) > 1:
        name = f"the partition of rank {int(found[1])} of DeepSpeed's ZeRO"
        return PartOf(DEEPSPEED, name, "", folder_beside(path))
    return None


def _counted(root: Node) -> int:
    """Ranks among which ZeRO has divided what is in a file."""
    if not isinstance(root, dict):
        return 1
    inner = root.get("optimizer_state_dict")
    counts = [
        root.get("dp_world_size"),
        inner.get("partition_count") if isinstance(inner, dict) else None,
    ]
    numbers = flatten(each if isinstance(each, (list, tuple)) else (each,) for each in counts)
    return max((n for n in numbers if type(n) is int), default=1)


# The part alone


def local(root: Node) -> Node:
    """The tree with each piece exchanged for the tensor that it holds; one that holds nothing is an
    empty tensor."""
    swap: dict[int, Node] = {}
    keep = []
    meshes: dict[int, Mesh] = {}
    for _, node in pieces_in(root):
        if id(node) in swap:
            continue
        piece = piece_of(node, meshes)
        assert piece is not None
        tensors = piece.local()
        keep.append(node)
        swap[id(node)] = tensors[0] if len(tensors) == 1 else _empty(piece)
    return rebuild(root, lambda leaf: leaf, swap)


def _empty(piece: Piece) -> Tensor:
    """A tensor of no rows; a piece of several boxes has no one tensor that it is."""
    if piece.local():
        raise UnsupportedError("holds a tensor of which one rank has several boxes")
    shape = (0, *piece.shape[1:])
    return Tensor(Storage(Range(Memory(b""), 0, 0)), piece.dtype, shape, contiguous_stride(shape))
