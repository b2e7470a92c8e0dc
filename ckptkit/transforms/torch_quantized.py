"""torch's own quantized tensors as floats: scale times the difference to the zero point, per tensor
or per channel.

torch's quantised layers pack weight and bias into one value, which is not in the state_dict of a
TorchScript module, and no tensor in that of an eager one: ``fc._packed_params._packed_params =
(weight, bias)``. Dequantised they are ``fc.weight`` and ``fc.bias``, as the layer had them before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptkit.compute.dequantize import dequantized_record
from ckptkit.compute.numbers import cast_record
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import CollisionError, TensorError
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.text import flatten, plural, quoted
from ckptkit.core.tree import Global, Node, Object, Path, key_text, nodes, rebuild, walk
from ckptkit.core.weights import Weights, as_tensor, plain_state_dict
from ckptkit.transforms import module_versions

_MADE_BY = Global("torch._utils", "_rebuild_qtensor")
_AFFINE = {"per_tensor_affine": 3, "per_channel_affine": 4, "per_channel_affine_float_qparams": 4}
_STATE = "state"  # of an object
_PACKING = ("_packed_params", "_packed_weight", _STATE)  # from there on a path says how, not where
_PACKER = "PackedParamsBase"


def dequantized(ck: Checkpoint, dtype: DType) -> Checkpoint | None:
    """Every quantized tensor of torch as `dtype`, bit for bit as ``dequantize()`` computes it, then
    rounded; those that are packed with a bias join the weights, named after their layer. None if
    there is none.

    What has no affine scheme stays as it is, which a warning says. Raises TensorError for a scale
    or zero point that torch could not have, CollisionError.
    """
    new, left = _dequantized(ck.root, dtype)
    weights = ck.selection
    layers = list(_layers(weights)) if weights is not None else []
    swap: dict[int, Node] = {key: tensor for key, (_, tensor) in new.items()}
    if weights is not None and layers:
        swap[id(weights.node)] = _with_layers(weights, layers)
    warnings = (
        [f"left as they are, with no affine scheme: {plural(left, 'quantized tensor')}"]
        if left
        else []
    )
    if not swap:
        return ck.with_root(ck.root, warnings=warnings) if left else None
    notes = _notes(new.values(), weights, layers, dtype)
    return ck.with_root(rebuild(ck.root, swap=swap), notes=notes, warnings=warnings)


def _notes(
    new: Iterable[tuple[str, Tensor]], weights: Weights | None, layers: list[_Layer], target: DType
) -> Iterator[str]:
    for dtype, number in Counter(dtype for dtype, _ in new).items():
        yield f"dequantized {plural(number, 'tensor')}: {dtype} -> {target}"
    if layers:
        yield (
            f"unpacked {plural(len(layers), 'layer')}: "
            f"{quoted([layer.name or '(root)' for layer in layers])}"
        )
        if weights is not None and weights.is_module:
            yield f"the module ({weights.node.global_}) is now its plain state_dict"


def _dequantized(root: Node, dtype: DType) -> tuple[dict[int, tuple[str, Tensor]], int]:
    """Return the replacement of each quantized tensor, by id, with its former dtype; and the number
    of tensors that cannot be converted.
    """
    new: dict[int, tuple[str, Tensor]] = {}
    left = 0
    for node in nodes(root):
        if not isinstance(node, Object) or node.tensor is None or node.callable != _MADE_BY:
            continue
        scheme = _affine(node.args)
        if scheme is None:
            left += 1
        else:
            new[id(node)] = node.tensor.dtype.name, _float(dtype, node.tensor, *scheme)
    return new, left


def _affine(args: Node) -> tuple[Node, ...] | None:
    """Scale and zero point, per channel also their axis; None for another scheme."""
    scheme = args[4] if len(args) == 7 else ()
    if not isinstance(scheme, tuple) or not scheme or not isinstance(scheme[0], Global):
        return None
    return scheme[1:] if len(scheme) == _AFFINE.get(scheme[0].name) else None


def _float(dtype: DType, tensor: Tensor, scale: Node, zero_point: Node, axis: Node = 0) -> Tensor:
    if type(axis) is not int or tensor.storage is None:
        raise TensorError("a quantized tensor whose channels have no axis, or without its bytes")
    scale, zero_point = (
        each if as_tensor(each) is None else as_tensor(each) for each in (scale, zero_point)
    )
    record = dequantized_record(tensor, scale, zero_point, axis)
    record = cast_record(record, BY_NAME["float32"], dtype, big_endian=False)
    storage = Storage(record, tensor.storage.device)
    return Tensor(storage, dtype, tensor.shape, contiguous_stride(tensor.shape))


class _Layer(NamedTuple):
    """A packed layer: where its tuple lies below the weights, what it is called, and its tensors by
    name."""

    path: Path
    name: str
    tensors: dict[str, Node]

    def named(self) -> Iterator[tuple[str, Node]]:
        return (
            (f"{self.name}.{each}".removeprefix("."), node) for each, node in self.tensors.items()
        )


def _layers(weights: Weights) -> Iterator[_Layer]:
    """The packed layers, with names that no other layer or weight has."""
    found = [(path, *_names(path), tensors) for path, tensors in _packed(weights.node)]
    short_names = Counter(short for _, short, _, _ in found)
    for path, short, long, tensors in found:
        layer = _Layer(path, short, tensors)
        free = short_names[short] == 1 and not any(
            name in weights.nodes for name, _ in layer.named()
        )
        yield layer if free else layer._replace(name=long)


def _names(path: Path) -> tuple[str, str]:
    """Name a layer by the place where it is packed: with the short name that it had before, and
    with one that is unique.
    """
    parts = [part for part in _parts(path) if part != "_modules"]
    short = parts[: next((i for i, part in enumerate(parts) if part in _PACKING), len(parts))]
    return ".".join(short), ".".join(part for part in parts if part != _STATE)


def _packed(root: Node) -> Iterator[tuple[Path, dict[str, Node]]]:
    """The outermost tuples that pack one weight, perhaps with its bias, and these two. A tied layer
    is met again."""
    inside: set[int] = set()
    holder: Object | None = None
    for path, node in walk(root):
        holder = node if isinstance(node, Object) else holder
        if not isinstance(node, tuple) or id(node) in inside or not _is_packing(path):
            continue
        parts, nested = _flat(node)
        inside |= nested
        tensors = [part for part in parts if as_tensor(part) is not None]
        chosen = [part for part in tensors if _kind(part) == "quantized"]
        if not chosen and _is_packer(holder, node):
            chosen = tensors[:1]
        if len(chosen) == 1:
            after = tensors[tensors.index(chosen[0]) + 1 :]
            biases = [part for part in after if _kind(part) == "float"]
            yield path, dict(zip(("weight", "bias"), (*chosen, *biases), strict=False))


def _is_packer(holder: Object | None, node: Node) -> bool:
    """Return whether a node is the state of an object that packs the parameters of a layer."""
    return holder is not None and holder.state is node and str(holder.global_).endswith(_PACKER)


def _parts(path: Path) -> Iterator[str]:
    """Yield the parts of the dotted names in a path."""
    return flatten(key_text(key).split(".") for key in path)


def _is_packing(path: Path) -> bool:
    return any(part in _PACKING for part in _parts(path))


def _kind(node: Node) -> str | None:
    tensor = as_tensor(node)
    return None if tensor is None else tensor.dtype.kind


def _flat(root: tuple[Node, ...]) -> tuple[list[Node], set[int]]:
    """Flatten nested lists and tuples: the items, in order, and the ids of the containers."""
    found: list[Node] = []
    nested: set[int] = set()
    waiting = list(reversed(root))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (tuple, list)):
            found.append(node)
        elif node is not root and id(node) not in nested:
            nested.add(id(node))
            waiting.extend(reversed(node))
    return found, nested


def _with_layers(weights: Weights, layers: list[_Layer]) -> Node:
    """The weights with the tensors of the layers: in their place in a mapping, after all others of
    a module."""
    if weights.is_module:
        packed = flatten(layer.named() for layer in layers)
        return plain_state_dict(_unique([*plain_state_dict(weights.nodes).items(), *packed]))
    by_key: dict[Node, list[_Layer]] = defaultdict(list)
    for layer in layers:
        by_key[layer.path[0]].append(layer)
    dtypes = {
        f"{key.rpartition('.')[0]}.dtype" for key in by_key
    }  # fc._packed_params.dtype = torch.qint8
    pairs: list[tuple[str, Node]] = []
    for key, node in weights.node.items():
        if key in by_key:
            pairs += flatten(layer.named() for layer in by_key[key])
        elif key not in dtypes or not isinstance(node, Global):
            pairs.append((key, node))
    return module_versions.like(weights.node, _unique(pairs), lambda paths: paths)


def _unique(pairs: list[tuple[str, Node]]) -> dict[str, Node]:
    new = dict(pairs)
    if len(new) < len(pairs):
        twice = next(
            name for name, number in Counter(name for name, _ in pairs).items() if number > 1
        )
        raise CollisionError(f"a packed layer and another weight would both be called {twice!r}")
    return new
