"""Which names in a checkpoint are harmless to call, and which of them `torch.load(weights_only=True)` accepts.

Nothing here is ever called by ckptkit. The tables decide what may be written back: a call of a global from Python's
standard library, torch or numpy that is not among the harmless ones has no business in a checkpoint. Other packages'
classes are their owners' affair: kept by name, and named in a warning.
"""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING

from ckptkit.dtypes import TABLE
from ckptkit.tree import Global, Node, Object

_STORAGES = tuple(row.storage for row in TABLE if row.storage)
_TENSORS = tuple(f"{kind}Tensor" for kind in (
    "BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short",
))  # fmt: skip


def _names(module: str, *names: str) -> set[tuple[str, str]]:
    return {(module, name) for name in names}


# torch/_weights_only_unpickler.py, `_get_allowed_globals` of torch 2.13.
WEIGHTS_ONLY: frozenset[tuple[str, str]] = frozenset(
    _names("_codecs", "encode")
    | _names("builtins", "bytearray", "complex", "set")
    | _names("collections", "Counter", "OrderedDict")
    | _names("torch", *_STORAGES, *_TENSORS, "Size", "Tensor", "device")
    | _names("torch", *(row.name for row in TABLE if not row.name.startswith("float6_")))
    | _names("torch", *(f"per_{what}" for what in (
        "channel_affine", "channel_affine_float_qparams", "channel_symmetric", "tensor_affine", "tensor_symmetric",
    )))
    | _names("torch.cuda", *(name for name in _STORAGES if "Q" not in name), *_TENSORS)
    | _names("torch.sparse", *(name for name in _TENSORS if name != "BoolTensor"))
    | _names("torch.cuda.sparse", *(name for name in _TENSORS if name != "BoolTensor"))
    | _names("torch._tensor", "_rebuild_from_type_v2")
    | _names("torch._utils", *(f"_rebuild_{what}" for what in (
        "device_tensor_from_cpu_tensor", "device_tensor_from_numpy", "meta_tensor_no_storage", "nested_tensor",
        "parameter", "parameter_with_state", "qtensor", "sparse_tensor", "tensor", "tensor_v2", "tensor_v3",
        "wrapper_subclass",
    )))
    | _names("torch.nn.parameter", "Parameter")
    | _names("torch.serialization", "_get_layout")
    | _names("torch.storage", "TypedStorage", "UntypedStorage")
)  # fmt: skip

# What real checkpoints call, and what cannot do more than make a value.
_INERT: frozenset[tuple[str, str]] = frozenset(
    _names("builtins", "bytes", "frozenset", "list", "dict", "tuple", "slice", "range", "object")
    | _names("argparse", "Namespace")
    | _names("types", "SimpleNamespace")
    | _names("collections", "defaultdict", "deque")
    | _names("copyreg", "__newobj__", "__newobj_ex__")
    | _names("datetime", "date", "datetime", "time", "timedelta", "timezone")
    | _names("decimal", "Decimal")
    | _names("fractions", "Fraction")
    | _names("functools", "partial")
    | _names("operator", "attrgetter", "itemgetter")
    | _names("random", "Random")
    | _names("re", "_compile")
    | _names("uuid", "UUID")
    | {(module, name) for module in ("pathlib", "pathlib._local") for name in (
        "Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath",
    )}
    | {(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")}
    | {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
    | _names("numpy", "dtype", "ndarray", "matrix")
    | _names("numpy.random._pickle", "__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor")
    | _names("numpy.random", "__RandomState_ctor")
    | _names("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence")
    | _names("torch._tensor", "_rebuild_from_type")
    | _names("torch.tensor", "_rebuild_from_type")
    | _names("torch._utils", "_rebuild_sparse_csr_tensor", "_rebuild_xla_tensor")
    | _names("torch.nn.parameter", "Buffer", "UninitializedBuffer", "UninitializedParameter")
    | _names("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    | _names("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING")
    | _names("torch.distributed.remote_device", "_remote_device")
    | _names("torch.nested._internal.nested_tensor", "_rebuild_njt")
    | _names("torch.torch_version", "TorchVersion")
    | _names("torch.autograd.variable", "Variable")
    | _names("torch.nn.backends.thnn", "_get_thnn_function_backend")
)  # fmt: skip

# Whose calls are refused unless they are in a table: the standard libraries of this Python, of Python 2 (protocol 2
# maps its names to today's), and of the versions in between; and those whose files these are.
_GUARDED = sys.stdlib_module_names | {name for name in IMPORT_MAPPING if "." not in name} | {
    "aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "exceptions", "imghdr",
    "imp", "lib2to3", "mailcap", "msilib", "nis", "nntplib", "os2emxpath", "ossaudiodev", "pipes", "popen2", "sets",
    "smtpd", "sndhdr", "spwd", "sunau", "telnetlib", "test", "uu", "xdrlib",
    "functorch", "numpy", "torch", "torchgen",
}  # fmt: skip

_GENERATOR = r"__bit_generator_ctor|[A-Z]\w*"

# Harmless calls that call one of their arguments: its position.
_CALLERS = {
    ("torch._tensor", "_rebuild_from_type_v2"): 0,
    ("torch._tensor", "_rebuild_from_type"): 0,
    ("torch.tensor", "_rebuild_from_type"): 0,
    ("numpy.random._pickle", "__bit_generator_ctor"): 0,
    ("numpy.random._pickle", "__generator_ctor"): 1,
    ("numpy.random._pickle", "__randomstate_ctor"): 1,
    ("numpy.random", "__RandomState_ctor"): 1,
    ("copyreg", "__newobj__"): 0,
    ("copyreg", "__newobj_ex__"): 0,
}


def refused_by_weights_only(name: Global) -> bool:
    """Whether `torch.load(weights_only=True)` refuses a file that names this."""
    return (name.module, name.name) not in WEIGHTS_ONLY


def is_harmful(node: Object) -> bool:
    """Whether making this object would call what a checkpoint has no business to call.

    A class of torch made through ``__new__`` (a pickled module, an optimizer) runs no code of the file's choosing.
    """
    made = node.callable
    if not isinstance(made, Global):
        return True
    name = (made.module, made.name)
    if name in _CALLERS and len(node.args) > _CALLERS[name]:
        return _calls_harm(made, node.args[_CALLERS[name]])
    if name in WEIGHTS_ONLY:
        return _allocates(node)
    if name in _INERT or made.module.partition(".")[0] not in _GUARDED:
        return False
    return not (node.new and made.module.startswith("torch.") and made.name.lstrip("_")[:1].isupper())


def _calls_harm(made: Global, called: Node) -> bool:
    """Whether `made`, one of the `_CALLERS`, would call something harmful; a class it makes through ``__new__``."""
    if isinstance(called, str) or called is None:  # numpy's name of a generator
        return False
    if not isinstance(called, Global):
        return True
    if made.module.startswith("numpy.random"):  # a class of bit generators, or what makes one by its name
        return not (called.module.startswith("numpy.random.") and re.fullmatch(_GENERATOR, called.name))
    return (called.module, called.name) in _CALLERS or is_harmful(Object(called, new=made.module == "copyreg"))


def _allocates(node: Object) -> bool:
    """Whether it is a tensor or storage class called with a size: memory on demand of the file."""
    made, args = node.callable, node.args
    if not made.name.endswith(("Tensor", "Storage")) or made.name.startswith("_"):
        return False
    return node.tensor is None and not (isinstance(args, tuple) and len(args) == 0)


def describe(callable_: Node) -> str:
    """The class or function that an Object is made by, for messages."""
    return str(callable_) if isinstance(callable_, Global) else "the result of another call"
