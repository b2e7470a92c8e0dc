"""Weights that a backend packed: objects of C++ that hold the tensors of one layer.

``optimize_for_mobile`` and ``freeze`` put them among the constants, which have no names. The pickle
has the tensors as they were before:

    xnnpack, metal, mkldnn    LinearOpContext, Conv2dOpContext...: (weight, bias, stride...)
    vulkan                    LinearPackedContext, Conv2dPackedContext...: [weight, bias, ...]
    quantized                 LinearPackedParamsBase of float16: (weight, bias)

(aten/src/ATen/native/xnnpack/RegisterOpContextClass.cpp.) Quantized tensors, and the layers of a
quantized module, stay packed: ``--dequantize`` unpacks them and names them after the modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptkit.core.tree import Node, Object, Path, join, nodes, walk
from ckptkit.core.weights import as_tensor

CUSTOM = "__torch__.torch.classes."  # classes of C++, with any state
_OF_MODULES = "PackedParamsBase"  # ends the names of the classes in quantized modules
_STATE = "state"
_NAMES = {(0,): "weight", (1,): "bias"}


def is_custom(node: Node) -> bool:
    return isinstance(node, Object) and str(node.global_).startswith(CUSTOM)


def unpack(root: Node, *, of_modules: bool) -> dict[str, Object]:
    """Give each object in `root` that packs weights the parts of a module.

    `of_modules` includes the layers of quantized modules. Return the objects by their paths below
    `root`.
    """
    found: dict[str, Object] = {}
    done: set[int] = set()
    for path, node in [*walk(root)]:
        if not isinstance(node, Object) or not (of_modules or _stands_alone(node)):
            continue
        if id(node) in done or _unpack(node):
            done.add(id(node))
            found[join(tuple([key for key in path if key != _STATE]))] = node
    return found


def _stands_alone(node: Object) -> bool:
    return not str(node.global_).endswith(_OF_MODULES)


def _unpack(node: Object) -> bool:
    """Turn the state of an object of C++ into the parts of a module, if it packs weights."""
    tensors = dict(_tensors(node.state)) if is_custom(node) else {}
    if not tensors or any(map(_is_quantized, nodes(node))):
        return False
    rest = _without(node.state, {*map(id, tensors.values())})
    named = {_NAMES.get(place, join(place)): tensor for place, tensor in tensors.items()}
    parts = {"_parameters": named, "_buffers": {}, "_modules": {}, _STATE: rest}
    node.steps[:] = [("build", parts)]
    return True


def _tensors(state: Node) -> Iterator[tuple[Path, Node]]:
    """Yield the tensors of one object, not those of other objects in it."""
    for path, node in walk(state, skip=lambda _, node: isinstance(node, Object)):
        if as_tensor(node) is not None:
            yield path, node


def _is_quantized(node: Node) -> bool:
    tensor = as_tensor(node)
    return tensor is not None and tensor.dtype.kind == "quantized"


def _without(state: Node, taken: Collection[int]) -> Node:
    """Return a tuple or list without the values taken, at any depth: `walk` has limited it."""
    if not isinstance(state, (tuple, list)):
        return state
    return type(state)(_without(each, taken) for each in state if id(each) not in taken)
