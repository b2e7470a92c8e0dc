"""The objects that a BUILD makes: numpy arrays, tensors and variables of torch 0.1 to 0.3.

Those were made by their class; their state says what they are (torch/_tensor.py,
`Tensor.__setstate__`, which reads them to this day). One that has nothing else to it ends as a
plain Tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import FormatError
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.tree import Global, Node, Object
from ckptkit.core.weights import as_tensor
from ckptkit.pickles import ndarray
from ckptkit.pickles.globals import flag, is_empty, strided, with_grad

State = tuple[Node, ...]
Builder = Callable[[Object, State], bool]
_PARAMETER = Global("torch.nn.parameter", "Parameter")
_TENSORS = tuple(
    f"{kind}Tensor" for kind in ("Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
)
_MODULES = ("torch", "torch.cuda")


def _built_array(target: Object, state: State) -> bool:
    ndarray.built(target, state)
    return False


def _built_tensor(target: Object, state: State) -> bool:
    """Tensors of torch 0.1: ``torch.FloatTensor`` made by class, state (storage, offset, size,
    stride)."""
    if len(state) != 4 or not isinstance(state[0], TypedStorage):
        return False
    check_class(target.callable, state[0].dtype)
    target.tensor, _ = strided(state[0], state[0].dtype, state)
    return not len(target.args)


def _built_variable(target: Object, state: State) -> bool:
    """Variables and parameters of torch 0.1 to 0.3: Parameter(data), state (requires_grad,
    volatile, hooks); before that no argument, state (data, grad, hooks, requires_grad,
    volatile)."""
    if len(state) == 5:
        data, _, hooks, grad, _ = state
    elif len(state) == 3 and isinstance(target.args, tuple) and target.args:
        data, (grad, _, hooks) = target.args[0], state
    else:
        return False
    tensor = as_tensor(data)
    if tensor is not None:
        kind = "parameter" if target.callable == _PARAMETER else "tensor"
        target.tensor = with_grad(tensor, flag(grad), kind)
    return is_empty(hooks) and (isinstance(data, Tensor) or _is_made_by_class(data))


def _is_made_by_class(node: Node) -> bool:
    name = (
        (node.callable.module, node.callable.name)
        if isinstance(node, Object) and node.global_
        else ("", "")
    )
    return _BUILDERS.get(name) is _built_tensor and as_tensor(node) is not None


def check_class(made: Node, dtype: DType | None) -> None:
    """Raise FormatError unless `made` is the tensor class of the element type, on any device."""
    expected = "" if dtype is None else (dtype.storage or "").replace("Storage", "Tensor")
    if not isinstance(made, Global) or made.module not in _MODULES or made.name != expected:
        kind = made if isinstance(made, Global) else "something that is no class"
        raise FormatError(f"a tensor of class {kind} over a storage of {dtype or 'no type'}")


def built(target: Object, state: Node) -> bool:
    """Return whether an object is no more than its `tensor` after a BUILD."""
    made = target.callable
    builder = _BUILDERS.get((made.module, made.name)) if isinstance(made, Global) else None
    return builder is not None and isinstance(state, tuple) and builder(target, state)


_BUILDERS: dict[tuple[str, str], Builder] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _built_array for core in ("core", "_core")},
    **dict.fromkeys(product(_MODULES, _TENSORS), _built_tensor),
    ("torch.nn.parameter", "Parameter"): _built_variable,
    ("torch.autograd.variable", "Variable"): _built_variable,
}
