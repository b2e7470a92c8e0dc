"""Which names in a checkpoint are harmless to call, and which of them `torch.load(weights_only=True)` accepts.

Nothing here is ever called by ckptkit. The tables decide what may be written back: a call of a global from Python's
standard library, torch or numpy that is not among the harmless ones has no business in a checkpoint. Other packages'
classes are their owners' affair: kept by name, and named in a warning.
"""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING

from ckptkit.core.dtypes import TABLE
from ckptkit.core.tree import Global, Node, Object

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


# What a call is to whoever loads the file, from harmless to not.
ACCEPTED = "accepted"  # torch.load(weights_only=True) makes it
HARMLESS = "harmless"  # in our tables: it can do no more than make a value
CLASS = "class"  # an object of a class outside our tables, through __new__: its package's code sets it up
LOADS = "loads"  # a file inside: what that would do
ALLOCATES = "allocates"  # memory, as much as the file says
UNKNOWN = "unknown"  # somebody's function, or a class through __init__, with arguments of the file's choosing
HARMFUL = "harmful"
KINDS = (ACCEPTED, HARMLESS, CLASS, LOADS, ALLOCATES, UNKNOWN, HARMFUL)

# Enumerations that trainers leave in checkpoints: pickled as a call that looks a member up by its value.
_ENUMS = frozenset(
    _names("deepspeed.runtime.zero.config", "ZeroStageEnum")
    | _names("transformers.trainer_utils", "EvaluationStrategy", "FSDPOption", "HubStrategy", "IntervalStrategy",
             "SaveStrategy", "SchedulerType")
    | _names("transformers.training_args", "OptimizerNames", "ParallelMode")
    | _names("transformers.debug_utils", "DebugOption")
    | _names("transformers.utils.generic", "PaddingStrategy", "TensorType")
    | _names("accelerate.utils.dataclasses", "DistributedType", "DynamoBackend", "PrecisionType", "RNGType",
             "SageMakerDistributedType")
    | _names("accelerate.state", "DistributedType")
    | _names("torchvision.transforms.functional", "InterpolationMode")
)  # fmt: skip

_LOAD = Global("torch.storage", "_load_from_bytes")  # how a storage is pickled outside torch.save
_GETATTR = Global("builtins", "getattr")
_RECONSTRUCT = Global("copyreg", "_reconstructor")  # how protocols 0 and 1 make an object: (class, base, state)
_SCRIPT = "torch.jit._pickle"  # build_intlist and its kin, restore_type_tag: their argument is their value
_SIZED = ("bytearray", "bytes", "list", "tuple", "set", "frozenset", "deque", "Counter")


def kind(node: Object) -> str:
    """Which of the KINDS a call is. Stricter than `is_harmful`: here it is not the file that decides, but what runs."""
    made, args = node.callable, node.args if isinstance(node.args, tuple) else ()
    if not isinstance(made, Global):
        return HARMFUL
    if made == _LOAD and len(args) == 1:
        return LOADS
    if made == _RECONSTRUCT and len(args) == 3 and isinstance(args[0], Global) and _is_plain_base(args[1]):
        return kind(Object(args[0], new=True))
    if made == _GETATTR and len(args) == 2 and isinstance(args[0], Global) and str(args[1]).isidentifier():
        return CLASS  # a class inside a class, as protocols below 4 name it
    if made.module == _SCRIPT:
        return HARMLESS
    name = (made.module, made.name)
    if _fills_memory(made, args):
        return ALLOCATES
    if is_harmful(Object(made, args, new=node.new)):
        return ALLOCATES if name in WEIGHTS_ONLY and name not in _CALLERS else HARMFUL
    own = _own_kind(name, node.new)
    if name in _CALLERS and len(args) > _CALLERS[name] and isinstance(called := args[_CALLERS[name]], Global):
        return max(own, _own_kind((called.module, called.name), _makes_new(made)), key=KINDS.index)
    return own


def _own_kind(name: tuple[str, str], new: bool) -> str:
    """Of a call that is not harmful."""
    if name in WEIGHTS_ONLY:
        return ACCEPTED
    if name in _INERT:
        return HARMLESS
    return CLASS if new or name in _ENUMS or name[0].partition(".")[0] in _GUARDED else UNKNOWN


def _makes_new(made: Global) -> bool:
    return made.module in ("copyreg", "numpy.random._pickle")


def _is_plain_base(base: Node) -> bool:
    return isinstance(base, Global) and base.module == "builtins" and base.name in (
        "object", "list", "dict", "tuple", "set", "frozenset", "str", "bytes", "int", "float", "complex",
    )  # fmt: skip


def _fills_memory(made: Global, args: tuple[Node, ...]) -> bool:
    """Whether a container is made of a number, which is its size, or of a range."""
    if made.module not in ("builtins", "collections") or made.name not in _SIZED or not args:
        return False
    first = args[0]
    sized = isinstance(first, int) and made.name.startswith("byte")
    return sized or (isinstance(first, Object) and first.callable == Global("builtins", "range"))


# Classes and functions of the standard library that models keep as values.
_KEPT = frozenset((
    "ArithmeticError", "AttributeError", "BaseException", "Ellipsis", "Exception", "False", "IndexError", "KeyError",
    "None", "NotImplemented", "RuntimeError", "StopIteration", "True", "TypeError", "ValueError", "abs", "all", "any",
    "bool", "bytearray", "bytes", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset", "hash",
    "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next", "object", "pow",
    "property", "range", "reversed", "round", "set", "slice", "sorted", "staticmethod", "classmethod", "str", "sum",
    "super", "tuple", "type", "zip",
))  # fmt: skip
_KEPT_MODULES = frozenset((
    "abc", "array", "collections", "copy", "copyreg", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "itertools", "math", "numbers", "operator", "pathlib", "random", "re", "statistics", "string",
    "time", "typing", "uuid",
))  # fmt: skip


def is_out_of_place(name: Global) -> bool:
    """Whether a value in a checkpoint has no business to be this class or function, even if nothing calls it."""
    if (name.module, name.name) in WEIGHTS_ONLY | _INERT or name.module.startswith("__torch__."):
        return False
    top = name.module.partition(".")[0]
    if top not in _GUARDED or top in ("torch", "numpy", "functorch", "torchgen"):
        return False
    if name.module == "builtins":
        return name.name not in _KEPT
    return top not in _KEPT_MODULES or "." in name.name


def is_known(name: Global) -> bool:
    """Whether it is in our tables: accepted by weights_only, harmless to call, or what loads a file inside."""
    return (name.module, name.name) in WEIGHTS_ONLY | _INERT or name.module == _SCRIPT or name == _LOAD


def describe(callable_: Node) -> str:
    """The class or function that an Object is made by, for messages."""
    return str(callable_) if isinstance(callable_, Global) else "the result of another call"
