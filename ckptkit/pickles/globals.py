"""Evaluate the calls that make tensors and plain values in pickles. No call is executed.

A reducer is a function that evaluates the calls of one class or function of torch, numpy or Python.
The first line of a reducer's docstring is the call. torch/_utils.py, torch/_tensor.py and
torch/nn/parameter.py define the called functions.

A reducer takes the Global and the arguments of the call, and returns a node. For a plain tensor,
the node is a Tensor. For a tensor with hooks or attributes, or of a subclass, the node is an
Object. The attribute `tensor` of the Object then is the plain tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

from ckptkit.core.dtypes import BY_NAME, UNKNOWN, DType, unknown
from ckptkit.core.errors import FormatError, TensorError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, SetNode, StoredBytes
from ckptkit.core.weights import as_tensor, inner_tensors
from ckptkit.pickles import ndarray

Args = tuple[Node, ...]
Reducer = Callable[[Global, Args], Node]
_DTYPE = "[a-z]+[0-9][a-z0-9_]*"  # pattern of dtype names in torch
_LATIN1 = ("latin1", "latin-1")


# Plain values


def ordered_dict(made: Global, args: Args) -> Node:
    """OrderedDict() or OrderedDict([[key, value], ...]). Python 2 writes the second form."""
    if not args:
        return OrderedMapping()
    if len(args) == 1 and isinstance(args[0], list):
        pairs = [
            tuple(each) for each in args[0] if isinstance(each, (list, tuple)) and len(each) == 2
        ]
        if len(pairs) == len(args[0]) and all(isinstance(key, str) for key, _ in pairs):
            new = OrderedMapping(pairs)
            return new if len(new) == len(pairs) else Object(made, args)
    return Object(made, args)


def _set(made: Global, args: Args) -> Node:
    if len(args) > 1 or (args and not isinstance(args[0], (list, tuple))):
        raise FormatError("pickle makes a set from something other than a list")
    return SetNode(list(args[0]) if args else [], frozen=made.name == "frozenset")


def _bytes(made: Global, args: Args) -> Node:
    """bytes() and bytearray(b"...").

    Pickles of protocols 0 to 2 contain calls of ``bytes`` and ``bytearray``. A call ``bytes(size)``
    becomes an Object, because evaluating the call could allocate much memory.
    """
    make = bytes if made.name == "bytes" else bytearray
    if not args:
        return make()
    if isinstance(args[0], (bytes, bytearray)) and len(args) == 1:
        return make(args[0])
    if isinstance(args[0], StoredBytes) and len(args) == 1:
        return StoredBytes(args[0].extent, made.name)
    if len(args) == 2 and isinstance(args[0], str) and args[1] in _LATIN1:
        return make(_latin1(args[0]))
    return Object(made, args)  # ckptkit shows this Object, but does not write it


def _encode(made: Global, args: Args) -> Node:
    """_codecs.encode(text, "latin1"). Protocol 2 stores byte strings as calls of ``encode``."""
    if len(args) == 2 and isinstance(args[0], str) and args[1] in _LATIN1:
        return _latin1(args[0])
    return Object(made, args)


def _latin1(text: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError as error:
        raise FormatError("pickle contains a byte string with a character above 255") from error


def _complex(made: Global, args: Args) -> Node:
    try:
        if len(args) == 2 and all(isinstance(each, (int, float)) for each in args):
            return complex(*map(float, args))
    except OverflowError:
        pass
    raise FormatError("pickle makes a complex number from something other than two numbers")


def _getattr(made: Global, args: Args) -> Node:
    """getattr(Class, "Inner").

    Pickles below protocol 4 store a nested class as a call of ``getattr``.
    """
    outer, inner = args if len(args) == 2 else (None, None)
    if isinstance(outer, Global) and isinstance(inner, str) and inner.isidentifier():
        return Global(outer.module, f"{outer.name}.{inner}")
    return Object(made, args)


def _same(made: Global, args: Args) -> Node:
    """build_intlist(list), build_boollist(list) and restore_type_tag(list or dict, type).

    TorchScript writes these calls for types that Python does not have. The functions return the
    first argument.
    """
    return args[0] if args and isinstance(args[0], (list, dict)) else Object(made, args)


# Tensors


def _shape(node: Node) -> tuple[int, ...]:
    if isinstance(node, Object) and node.global_ == _SIZE and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, (tuple, list)):
        raise TensorError("the size or stride of a tensor is not a tuple")
    return tuple(node)


def _storage(node: Node) -> TypedStorage:
    if not isinstance(node, TypedStorage):
        raise FormatError("the first argument of a tensor is not a storage")
    return node


def flag(node: Node) -> bool:
    """Return a requires_grad flag as bool. Raises TensorError for a value other than 0 and 1."""
    if node.__class__ is not bool and node not in (0, 1):
        raise TensorError("the requires_grad of a tensor is neither True nor False")
    return bool(node)


def is_empty(hooks: Node) -> bool:
    """Return whether a tensor has no backward hooks. `hooks` is the dict of hooks, or None."""
    return hooks is None or (isinstance(hooks, (dict, list, tuple)) and not len(hooks))


def _arity(made: Global, args: Args, least: int, most: int) -> None:
    if not least <= len(args) <= most:
        raise FormatError(f"{made} has {len(args)} arguments; expected {least} to {most}")


def strided(
    typed: TypedStorage, dtype: DType | None, args: Args, metadata: Node = None
) -> tuple[Tensor, bool]:
    """Return the tensor that torch makes of (storage, offset, size, stride[, ...]).

    Also return whether the tensor has neither hooks nor unknown metadata. torch 0.1 to 0.3 passed
    four arguments. In these versions, an empty size means a tensor without elements.
    """
    if dtype is None:
        raise TensorError("a tensor of an untyped storage has no dtype")
    grad = flag(args[4]) if len(args) > 4 else False
    bits = metadata if isinstance(metadata, dict) else {}
    flags = {key for key, value in bits.items() if value is True}
    shape, stride = _shape(args[2]), _shape(args[3])
    if shape == stride == () and len(args) == 4 and not typed.elements:
        shape, stride = (0,), (1,)
    if type(args[1]) is not int or args[1] < 0:
        raise TensorError("the storage offset of a tensor is negative or not an integer")
    tensor = Tensor(
        typed.storage, dtype, shape, stride, typed.start + args[1], grad,
        conj="conj" in flags, neg="neg" in flags,
    )  # fmt: skip
    if typed.stop is not None and sum(tensor.extent) > dtype.nbytes(typed.stop):
        raise TensorError(
            f"shape {shape}, stride {stride} and offset {args[1]} exceed the view of the storage"
        )
    known = metadata is None or (bits is metadata and bits.keys() == flags <= {"conj", "neg"})
    return tensor, known and (len(args) < 6 or is_empty(args[5]))


def tensor_v2(made: Global, args: Args) -> Node:
    """_rebuild_tensor(storage, offset, size, stride).

    `_rebuild_tensor_v2` also has the arguments requires_grad, hooks and, optionally, metadata.
    """
    if len(args) == 6:  # this branch handles the most common form quickly
        typed, offset, size, stride, grad, hooks = args
        if (
            typed.__class__ is TypedStorage and typed.dtype is not None and typed.stop is None
            and size.__class__ is tuple and stride.__class__ is tuple and grad.__class__ is bool
            and hooks.__class__ is OrderedMapping and not hooks
        ):  # fmt: skip
            return Tensor(typed.storage, typed.dtype, size, stride, offset, grad)
    _arity(made, args, 4, 7)
    typed = _storage(args[0])
    tensor, plain = strided(typed, typed.dtype, args[:6], args[6] if len(args) > 6 else None)
    return tensor if plain else Object(made, args, tensor=tensor)


def _tensor_v3(made: Global, args: Args) -> Node:
    """_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, bits])."""
    _arity(made, args, 7, 8)
    typed, dtype = _storage(args[0]), dtype_or_unknown(args[6])
    if dtype.kind == "unknown":
        shape, grad = _shape(args[2]), flag(args[4])
        tensor = Tensor(typed.storage, dtype, shape, (), requires_grad=grad, layout=UNKNOWN)
        return Object(made, args, tensor=tensor)
    tensor, plain = strided(typed, dtype, args[:6], args[7] if len(args) > 7 else None)
    return tensor if plain and tensor.dtype.storage is None else Object(made, args, tensor=tensor)


def _parameter(made: Global, args: Args) -> Node:
    """_rebuild_parameter(data, requires_grad, hooks).

    `_rebuild_parameter_with_state` also has the argument state.
    """
    _arity(made, args, 3, 4)
    tensor = as_tensor(args[0])
    if tensor is None:
        raise FormatError("the first argument of a parameter is not a tensor")
    parameter = replace(tensor, requires_grad=flag(args[1]), kind="parameter")
    plain = isinstance(args[0], Tensor) and not args[0].requires_grad
    if plain and len(args) == 3 and is_empty(args[2]):
        return parameter
    return Object(made, args, tensor=parameter)


def _quantized(made: Global, args: Args) -> Node:
    """_rebuild_qtensor(storage, offset, size, stride, quantizer_params, requires_grad, hooks)."""
    _arity(made, args, 7, 7)
    typed = _storage(args[0])
    tensor, _ = strided(typed, typed.dtype, (*args[:4], args[5], args[6]))
    return Object(made, args, tensor=tensor)


def _sparse(made: Global, args: Args) -> Node:
    """_rebuild_sparse_tensor(layout, data).

    For the COO layout, `data` is (indices, values, size, ...). For compressed layouts, `data` is
    (compressed indices, plain indices, values, size).
    """
    _arity(made, args, 2, 2)
    layout, data = args
    named = isinstance(layout, Object) and len(layout.args) == 1
    name = layout.args[0] if named else "torch.sparse_coo"
    if not isinstance(name, str) or not isinstance(data, tuple) or len(data) < 3:
        raise FormatError("a sparse tensor has an unknown layout or too few arguments")
    at = 1 if name.endswith("sparse_coo") else 2
    values = as_tensor(data[at])
    if values is None or at + 1 >= len(data):
        raise FormatError("a sparse tensor has no values or no size")
    tensor = _composed(values, _shape(data[at + 1]), name.removeprefix("torch."))
    return Object(made, args, tensor=tensor)


def _nested(made: Global, args: Args) -> Node:
    """_rebuild_nested_tensor(buffer, sizes, strides, storage offsets).

    The arguments after ``buffer`` are tensors, so ckptkit does not know the shape.
    """
    buffer = as_tensor(args[0]) if args else None
    if buffer is None:
        raise FormatError("a nested tensor has no buffer")
    return Object(made, args, tensor=_composed(buffer, (), "nested"))


def _composed(values: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    return Tensor(values.storage, values.dtype, shape, (), layout=layout)


def _meta(made: Global, args: Args) -> Node:
    """_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)."""
    _arity(made, args, 4, 4)
    shape, stride = _shape(args[1]), _shape(args[2])
    if len(shape) != len(stride):
        raise TensorError(f"a meta tensor has {len(shape)} sizes but {len(stride)} strides")
    dtype, grad = dtype_or_unknown(args[0]), flag(args[3])
    return Object(made, args, tensor=Tensor(None, dtype, shape, stride, 0, grad))


def _subclass(made: Global, args: Args) -> Node:
    """_rebuild_wrapper_subclass(class, dtype, size, stride, offset, layout, device, grad)."""
    _arity(made, args, 8, 8)
    dtype, shape, grad = dtype_or_unknown(args[1]), _shape(args[2]), flag(args[7])
    tensor = Tensor(None, dtype, shape, (), requires_grad=grad, layout="subclass")
    return Object(made, args, tensor=tensor)


def _from_type(made: Global, args: Args) -> Node:
    """_rebuild_from_type_v2(function, class, arguments, state).

    torch.save writes this call for a tensor of a subclass, and for a tensor with attributes.
    """
    _arity(made, args, 3, 4)
    inner = REDUCERS.get((args[0].module, args[0].name)) if isinstance(args[0], Global) else None
    if inner is _from_type or not isinstance(args[2], tuple):
        return Object(made, args)
    if inner is None:  # assume that an unknown function with tensor arguments returns a tensor
        first = next(iter(inner_tensors(args)), None)
        tensor = None if first is None else Tensor(None, first[1].dtype, (), (), layout="subclass")
        return Object(made, args, tensor=tensor)
    return Object(made, args, tensor=as_tensor(inner(args[0], args[2])))


def _on_device(made: Global, args: Args) -> Node:
    """_rebuild_device_tensor_from_numpy(array, dtype, device, requires_grad).

    The first argument of _rebuild_device_tensor_from_cpu_tensor is a tensor instead of an array.
    """
    _arity(made, args, 4, 4)
    tensor = as_tensor(args[0])
    if tensor is None or tensor.storage is None or not isinstance(args[2], str):
        return Object(made, args)
    was = tensor.storage
    storage = Storage(was.record, args[2], was.crc32, was.big_endian)
    moved = Tensor(storage, tensor.dtype, tensor.shape, tensor.stride, tensor.offset, flag(args[3]))
    return Object(made, args, tensor=moved)


def dtype_of(node: Node) -> DType:
    """Return the element type of a Global such as ``torch.float16``. Raises TensorError."""
    found = BY_NAME.get(node.name) if isinstance(node, Global) and node.module == "torch" else None
    if found is None:
        raise TensorError(
            f"{node if isinstance(node, Global) else 'a value'} is not a supported dtype"
        )
    return found


def dtype_or_unknown(node: Node) -> DType:
    """Return the element type like `dtype_of`, or a placeholder for an unsupported torch dtype."""
    known = not isinstance(node, Global) or node.module != "torch" or node.name in BY_NAME
    if not known and re.fullmatch(_DTYPE, node.name):
        return unknown(node.name)
    return dtype_of(node)


_SIZE = Global("torch", "Size")

_UTILS: dict[str, Reducer] = {
    "_rebuild_tensor": tensor_v2, "_rebuild_tensor_v2": tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3, "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter, "_rebuild_qtensor": _quantized,
    "_rebuild_sparse_tensor": _sparse, "_rebuild_sparse_csr_tensor": _sparse,
    "_rebuild_nested_tensor": _nested, "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_wrapper_subclass": _subclass, "_rebuild_device_tensor_from_numpy": _on_device,
    "_rebuild_xla_tensor": _on_device, "_rebuild_device_tensor_from_cpu_tensor": _on_device,
}  # fmt: skip
_BUILTINS: dict[str, Reducer] = {
    "set": _set, "frozenset": _set, "bytes": _bytes, "bytearray": _bytes, "complex": _complex,
    "getattr": _getattr,
}  # fmt: skip
_SCRIPTED = ("build_boollist", "build_doublelist", "build_intlist", "build_tensorlist")
REDUCERS: dict[tuple[str, str], Reducer] = {
    ("collections", "OrderedDict"): ordered_dict,
    ("_codecs", "encode"): _encode,
    **{("builtins", name): reducer for name, reducer in _BUILTINS.items()},
    **{("torch.jit._pickle", name): _same for name in (*_SCRIPTED, "restore_type_tag")},
    **{("torch._utils", name): reducer for name, reducer in _UTILS.items()},
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch._tensor", "_rebuild_from_type"): _from_type,
    ("torch.tensor", "_rebuild_from_type"): _from_type,
    **{(f"numpy.{core}.multiarray", "scalar"): ndarray.scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): ndarray.from_buffer for core in ("core", "_core")},
}


# Functions that evaluate the BUILD state of a NumPy array, or of a tensor or variable of torch 0.1
# to 0.3. torch 0.1 to 0.3 pickled a tensor as a call of its class, and stored the data in the
# state. `Tensor.__setstate__` of current torch still supports such a state. If the pickle contains
# nothing but the data, the object becomes a plain Tensor.

State = tuple[Node, ...]
Builder = Callable[[Object, State], bool]
_PARAMETER = Global("torch.nn.parameter", "Parameter")
_TENSORS = tuple(
    f"{kind}Tensor" for kind in ("Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
)
_MODULES = ("torch", "torch.cuda")


def _built_tensor(target: Object, state: State) -> bool:
    """Evaluate the state (storage, offset, size, stride) of a call such as torch.FloatTensor().

    torch 0.1 wrote such calls.
    """
    if len(state) != 4 or not isinstance(state[0], TypedStorage):
        return False
    check_class(target.callable, state[0].dtype)
    target.tensor, _ = strided(state[0], state[0].dtype, state)
    return not len(target.args)


def _built_variable(target: Object, state: State) -> bool:
    """Evaluate the state of a variable or parameter of torch 0.1 to 0.3.

    Newer versions call ``Parameter(data)``, and the state is (requires_grad, volatile, hooks).
    Older versions call ``Parameter()``, and the state is (data, grad, hooks, requires_grad,
    volatile).
    """
    if len(state) == 5:
        data, _, hooks, grad, _ = state
    elif len(state) == 3 and isinstance(target.args, tuple) and target.args:
        data, (grad, _, hooks) = target.args[0], state
    else:
        return False
    tensor = as_tensor(data)
    if tensor is not None:
        kind = "parameter" if target.callable == _PARAMETER else "tensor"
        target.tensor = replace(tensor, requires_grad=flag(grad), kind=kind)
    return is_empty(hooks) and (isinstance(data, Tensor) or _is_made_by_class(data))


def _is_made_by_class(node: Node) -> bool:
    made = node.global_ if isinstance(node, Object) else None
    is_class = made is not None and _BUILDERS.get((made.module, made.name)) is _built_tensor
    return is_class and as_tensor(node) is not None


def check_class(made: Node, dtype: DType | None) -> None:
    """Raise FormatError unless `made` is the CPU or CUDA tensor class of `dtype`."""
    expected = "" if dtype is None else (dtype.storage or "").replace("Storage", "Tensor")
    if not isinstance(made, Global) or made.module not in _MODULES or made.name != expected:
        kind = made if isinstance(made, Global) else "(unknown)"
        raise FormatError(f"a tensor of class {kind} has a storage of {dtype or 'no type'}")


def built(target: Object, state: Node) -> bool:
    """Evaluate the BUILD state of an object. Return whether the object becomes a plain tensor."""
    made = target.callable
    builder = _BUILDERS.get((made.module, made.name)) if isinstance(made, Global) else None
    return builder is not None and isinstance(state, tuple) and builder(target, state)


_BUILDERS: dict[tuple[str, str], Builder] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): ndarray.built for core in ("core", "_core")},
    **dict.fromkeys(product(_MODULES, _TENSORS), _built_tensor),
    ("torch.nn.parameter", "Parameter"): _built_variable,
    ("torch.autograd.variable", "Variable"): _built_variable,
}
