"""Names that a checkpoint may call, and the arguments allowed. Data only, judged by ``calls``.

A row of `ROWS` says what a call takes and gives. Arguments are words, one for each position: ``?``
before those that may be missing, ``*`` before the last one for any number of them, ``/`` between
alternatives. `KINDS` says which sorts of values a word stands for, and what a container may hold.

A callable that asks its argument for methods (``dict``, ``list``, ``UUID``, ``Path`` ...) takes
plain values, or containers of exactly Python's own types, and nothing else that a call has made.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from ckptkit.core.dtypes import TABLE
from ckptkit.core.text import flatten

Name = tuple[str, str]

# Sorts of values, a bit for each: a container has the sorts of what it holds directly as a mask.
NONE, FLAG, INT, FLOAT, TEXT, BYTES = (1 << bit for bit in range(6))
LIST, TUPLE, DICT, SET = (1 << bit for bit in range(6, 10))  # exactly these types
NAME = 1 << 10  # a class or function, not called
STORAGE, TENSOR, ARRAY, NUMPY_DTYPE, SIZE, MAPPING, TIME = (1 << bit for bit in range(11, 18))
INERT = 1 << 18  # made by a row of the table, of no sort that another row asks for
BAG = (
    1 << 19
)  # made by a row, and has attributes or calls of the file's choosing: SimpleNamespace, partial
OBJECT = 1 << 20  # of a class outside the table
DRESSED = 1 << 21  # a tensor that has attributes of the file's choosing
UNKNOWN_SORT = 1 << 22

SCALARS = NONE | FLAG | INT | FLOAT | TEXT | BYTES
LITERALS = LIST | TUPLE | DICT | SET
INERTS = STORAGE | TENSOR | DRESSED | ARRAY | NUMPY_DTYPE | SIZE | MAPPING | TIME | INERT
VALUES = UNKNOWN_SORT - 1  # all but what is not known
ASKED = (
    BAG | OBJECT | UNKNOWN_SORT
)  # may answer in the file's words: nothing that looks inside takes them


class Kind(NamedTuple):
    """Values of these sorts; containers among them hold only `inside`, at `every` depth if
    asked."""

    sorts: int
    inside: int = VALUES
    every: bool = False


KINDS: dict[str, tuple[Kind, ...]] = {
    "any": (Kind(VALUES),),
    "array": (Kind(ARRAY),),
    "bag": (Kind(BAG),),
    "bare": (Kind(TENSOR),),
    "bytes": (Kind(BYTES),),
    "dict": (Kind(DICT),),
    "flag": (Kind(FLAG | INT),),
    "float": (Kind(FLOAT | INT),),
    "generator": (
        Kind(INERT),
        Kind(SCALARS | LITERALS, SCALARS | LITERALS | ARRAY | INERT, every=True),
    ),
    "hooks": (Kind(NONE | DICT | MAPPING),),
    "inert": (Kind(INERT),),
    "int": (Kind(INT),),
    "list": (Kind(LIST),),
    "literal": (Kind(LITERALS),),
    "memory_file": (Kind(TUPLE, BYTES | INT | NONE),),  # bytes, position, no attributes
    "name": (Kind(NAME),),
    "kinds": (Kind(NAME | INERT | NONE), Kind(TUPLE | LIST, NAME | INERT | NONE | TUPLE | LIST)),
    "names": (Kind(TUPLE, NAME | INERT),),
    "none": (Kind(NONE),),
    "npdtype": (Kind(NUMPY_DTYPE),),
    "optimizer": (Kind(DICT, SCALARS | LITERALS | TENSOR | DRESSED | INERT, every=True),),
    "pairs": (Kind(DICT), Kind(LIST | TUPLE, LIST | TUPLE)),
    "plain": (Kind(SCALARS | LITERALS, SCALARS | LITERALS | ARRAY, every=True),),
    "scalar": (Kind(SCALARS),),
    "shape": (Kind(TUPLE | LIST, INT), Kind(SIZE)),
    "state": (
        Kind(SCALARS | LITERALS | INERTS),
    ),  # of a class outside the table: anything but another object
    "storage": (Kind(STORAGE),),
    "tensor": (Kind(TENSOR | DRESSED),),
    "tensor_state": (
        Kind(TUPLE, SCALARS | TUPLE | LIST | SIZE | STORAGE | TENSOR | DICT | MAPPING),
    ),
    "tensors": (Kind(TUPLE, TENSOR | SIZE | TUPLE | FLAG | INT | NONE),),
    "text": (Kind(TEXT),),
    "texts": (Kind(SCALARS), Kind(TUPLE, SCALARS)),
    "time": (Kind(SCALARS | TIME),),
    "tuple": (Kind(TUPLE),),
}


class AllowedCall(NamedTuple):
    """One callable.

    ``takes`` are the signatures, each a tuple of words; ``gives`` is the sort of the result.
    ``new``: it may be made through ``__new__`` too. ``state`` is the word for what BUILD may set,
    "" for nothing; ``fill`` are the other steps that may follow: append, set, add. ``keeps``: what
    its arguments hold is only kept; all others take nothing of the sorts ASKED, at no depth.
    """

    takes: tuple[tuple[str, ...], ...]
    gives: int
    state: str
    fill: tuple[str, ...]
    new: bool
    keeps: bool


ROWS: dict[Name, AllowedCall] = {}
SIZED: set[Name] = set()  # classes whose arguments are the size of what they allocate


def _row(
    module: str,
    names: str,
    takes: str,
    gives: int = INERT,
    *,
    state: str = "",
    fill: str = "",
    new: bool = False,
    keeps: bool = False,
) -> None:
    signatures = tuple(tuple(each.split()) for each in takes.split("|"))
    for name in names.split():
        ROWS[module, name] = AllowedCall(signatures, gives, state, tuple(fill.split()), new, keeps)


def names_in(listed: dict[str, str]) -> frozenset[Name]:
    """Return pairs of module and name, from names in one text for each module."""
    return frozenset(flatten(product([module], names.split()) for module, names in listed.items()))


_STORAGES = " ".join(row.storage for row in TABLE if row.storage)
_TENSORS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_TENSOR_CLASSES = " ".join(f"{kind}Tensor" for kind in _TENSORS)
_SPARSE_CLASSES = " ".join(f"{kind}Tensor" for kind in _TENSORS if kind != "Bool")
_NOT_ON_CUDA = (
    "QInt8Storage",
    "QInt32Storage",
    "QUInt8Storage",
    "QUInt4x2Storage",
    "QUInt2x4Storage",
)
_CUDA_STORAGES = " ".join(each for each in _STORAGES.split() if each not in _NOT_ON_CUDA)
DTYPES = " ".join(row.name for row in TABLE)
_QSCHEMES = (
    "per_channel_affine per_channel_affine_float_qparams per_channel_symmetric per_tensor_affine "
    "per_tensor_symmetric"
)

# torch/_weights_only_unpickler.py, `_get_allowed_globals` of torch 2.13.
WEIGHTS_ONLY = names_in({
    "_codecs": "encode",
    "builtins": "bytearray complex set",
    "collections": "Counter OrderedDict",
    "torch": f"{_STORAGES} {_TENSOR_CLASSES} {_QSCHEMES} Size Tensor device "
    + " ".join(name for name in DTYPES.split() if not name.startswith("float6_")),
    "torch.cuda": f"{_CUDA_STORAGES} {_TENSOR_CLASSES}",
    "torch.sparse": _SPARSE_CLASSES,
    "torch.cuda.sparse": _SPARSE_CLASSES,
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy "
    "_rebuild_meta_tensor_no_storage _rebuild_nested_tensor _rebuild_parameter "
    "_rebuild_parameter_with_state "
    "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 "
    "_rebuild_wrapper_subclass",
    "torch.nn.parameter": "Parameter",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage UntypedStorage",
})  # fmt: skip

# Classes that make an empty value when they are called without arguments.
EMPTY = names_in(
    {
        "builtins": "bool bytes complex dict float frozenset int list set str tuple",
        "collections": "Counter OrderedDict defaultdict deque",
    }
)

# Python

_row("_codecs", "encode", "text latin1", BYTES)
_row("builtins", "bytes bytearray", "|bytes|text latin1", BYTES)
_row("builtins", "complex", "float float", FLOAT)
_row("builtins", "set", "|literal", SET, fill="add", keeps=True)
_row("builtins", "frozenset", "|literal", SET, keeps=True)
_row("builtins", "tuple", "|literal", TUPLE, keeps=True)
_row("builtins", "list", "|literal", LIST, fill="append", keeps=True)
_row("builtins", "dict", "|pairs", DICT, fill="set", keeps=True)
_row("builtins", "slice", "scalar ?scalar ?scalar")
_row("builtins", "range", "int ?int ?int")
_row("builtins", "object", "")
_row("builtins", "type", "none")
_row("builtins", "ArithmeticError AttributeError Exception IndexError KeyError RuntimeError "
     "StopIteration TypeError ValueError", "*scalar", BAG, state="dict")  # fmt: skip
_row("argparse", "Namespace", "", BAG, state="fields", new=True)
_row("types", "SimpleNamespace", "", BAG, state="fields", new=True)
_row(
    "collections", "OrderedDict", "|pairs", MAPPING, state="mapping_fields", fill="set", keeps=True
)
_row("collections", "Counter", "|dict|literal", MAPPING, fill="set", keeps=True)
_row("collections", "defaultdict", "?factory ?pairs", INERT, fill="set", keeps=True)
_row("collections", "deque", "?literal ?optional_int", fill="append", keeps=True)
_row("collections", "ChainMap", "", BAG, state="fields", new=True)
_row("datetime", "date datetime time timedelta timezone", "*time", TIME)
_row("zoneinfo", "ZoneInfo._unpickle", "zone flag", TIME)
_row("_io", "BytesIO", "", state="memory_file", new=True)  # _extra_state of Transformer Engine
_row("decimal", "Decimal", "decimal")
_row("fractions", "Fraction", "fraction|int ?int")
_row("functools", "partial", "name *any", BAG, state="partial_state", keeps=True)
_row("itertools", "count", "?int ?int", BAG)  # never ends
_row("random", "Random", "?scalar", state="plain")
_row("re", "_compile", "text int|bytes int")
_row("uuid", "UUID", "?text", state="plain", new=True)
_row("uuid", "SafeUUID", "int")
for _module in ("pathlib", "pathlib._local"):
    _row(_module, "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath", "*text")
for _module in ("operator", "_operator"):
    _row(_module, "getitem", "generic kinds|literal_type texts")
_row("functools", "reduce", "or names")  # int | None

# numpy and pandas

for _module in ("numpy.core", "numpy._core"):
    _row(f"{_module}.multiarray", "_reconstruct", "ndarray empty byte", ARRAY, state="array_state")
    _row(f"{_module}.multiarray", "scalar", "npdtype bytes/text")
    _row(f"{_module}.numeric", "_frombuffer", "bytes npdtype shape text ?tuple/none", ARRAY)
_row("numpy", "dtype", "type_text ?flag ?flag", state="dtype_state")
_row("numpy.ma.core", "_mareconstruct", "masked ndarray empty byte", ARRAY, state="masked_state")
_row("numpy.random._pickle", "__bit_generator_ctor", "?text/bit_generator", state="generator")
_row(
    "numpy.random._pickle",
    "__generator_ctor __randomstate_ctor",
    "?text/inert ?bit_generator_ctor",
    state="generator",
)
_row("numpy.random", "__RandomState_ctor", "?text/inert ?bit_generator_ctor", state="generator")
_row(
    "numpy.random.bit_generator",
    "__pyx_unpickle_SeedSequence",
    "seed_sequence int none/tuple",
    state="tuple",
)
_row("pandas._libs.tslibs.timestamps", "_unpickle_timestamp", "int/none time time ?int", TIME)
_row("pandas._libs.tslibs.timedeltas", "_timedelta_unpickle", "int int", TIME)
_row("pandas._libs.tslibs.nattype", "_nat_unpickle __nat_unpickle", "*none", TIME)

_row(
    "pandas._libs.tslibs.offsets",
    "BusinessDay Day Hour Minute MonthBegin MonthEnd QuarterEnd Second Week YearEnd",
    "*scalar",
)
for _module, _kind in (("pandas", "Period"), ("pandas._libs.tslibs.period", "Period")):
    _row(_module, _kind, "none inert int")
for _module, _kind in (("pandas", "Interval"), ("pandas._libs.interval", "Interval")):
    _row(_module, _kind, "time time text")
_row("tensordict._reductions", "_make_td", "tensordict dict", OBJECT, keeps=True)

# torch

for _module, _kinds in (("torch", f"{_STORAGES} {_TENSOR_CLASSES} Tensor"),
                        ("torch.cuda", f"{_CUDA_STORAGES} {_TENSOR_CLASSES}"),
                        ("torch.sparse", _SPARSE_CLASSES), ("torch.cuda.sparse", _SPARSE_CLASSES),
                        ("torch.storage", "TypedStorage UntypedStorage")):  # fmt: skip
    for _kind in _kinds.split():
        if _kind.endswith("Storage"):
            _row(_module, _kind, "", INERT, new=True)
        else:
            _row(_module, _kind, "", TENSOR, state="tensor_state", new=True)
    SIZED.update((_module, _kind) for _kind in _kinds.split())
_row("torch", "Size", "|shape", SIZE)
_row("torch", "device", "text ?int")
_row("torch.serialization", "_get_layout", "text")
_row("torch._utils", "_rebuild_tensor", "storage int shape shape", TENSOR)
_row("torch._utils", "_rebuild_tensor_v2", "storage int shape shape flag hooks ?bits", TENSOR)
_row(
    "torch._utils",
    "_rebuild_tensor_v3",
    "storage int shape shape flag hooks name ?bits",
    TENSOR,
)
_row("torch._utils", "_rebuild_parameter", "tensor flag hooks", TENSOR, state="attributes")
_row("torch._utils", "_rebuild_parameter_with_state", "tensor flag hooks attributes", TENSOR)
_row("torch._utils", "_rebuild_qtensor", "storage int shape shape quantizer flag hooks", TENSOR)
_row("torch._utils", "_rebuild_sparse_tensor _rebuild_sparse_csr_tensor", "inert tensors", TENSOR)
_row("torch._utils", "_rebuild_nested_tensor", "*bare", TENSOR)
_row("torch._utils", "_rebuild_meta_tensor_no_storage", "name shape shape flag", TENSOR)
_row("torch._utils", "_rebuild_wrapper_subclass",
     "class name shape shape/none int/none inert inert/text flag", TENSOR)  # fmt: skip
_row(
    "torch._utils",
    "_rebuild_device_tensor_from_numpy _rebuild_xla_tensor",
    "array name text/inert flag",
    TENSOR,
)
_row("torch._utils", "_rebuild_device_tensor_from_cpu_tensor", "bare name text/inert flag", TENSOR)
for _module in (
    "torch.ao.quantization.qconfig",
    "torch.quantization.qconfig",
    "torch.quantization.QConfig",
):  # of torch 1.3 to 1.5
    _row(_module, "QConfig QConfigDynamic", "any any", OBJECT, new=True, keeps=True)  # named tuples
_row("torch.nested._internal.nested_tensor", "_rebuild_njt", "dict", TENSOR)
_row("torch.nn.parameter", "Parameter Buffer", "?tensor ?flag ?none",
     TENSOR, state="tensor_state", new=True)  # fmt: skip
_row("torch.nn.parameter", "UninitializedParameter UninitializedBuffer", "flag", TENSOR)
_row("torch.autograd.variable", "Variable", "?tensor", TENSOR, state="tensor_state", new=True)
_row("torch.nn.backends.thnn", "_get_thnn_function_backend", "")
_row("torch.torch_version", "TorchVersion", "text", BAG, state="fields", new=True)
_row(
    "torch.jit._pickle",
    "build_boollist build_doublelist build_intlist build_tensorlist",
    "list/tuple",
    LIST,
)
_row("torch.jit._pickle", "restore_type_tag", "literal text", LIST, keeps=True)
_row("torch.jit._pickle", "build_tensor_from_id", "int", TENSOR)

# Calls that call one of their arguments, or name something inside it. ``calls`` judges what they
# call.
FROM_TYPE = names_in(
    {
        "torch._tensor": "_rebuild_from_type_v2 _rebuild_from_type",
        "torch.tensor": "_rebuild_from_type",
    }
)
NEW_CALLS = names_in({"copyreg": "__newobj__ __newobj_ex__"})
RECONSTRUCT: Name = (
    "copyreg",
    "_reconstructor",
)  # how protocols 0 and 1 make an object: (class, base, state)
GETATTR: Name = ("builtins", "getattr")  # how protocols below 4 name what is inside a class
LOAD: Name = ("torch.storage", "_load_from_bytes")  # how a storage is pickled outside torch.save
# Called as their rows say, and nothing that anybody keeps as a value.
CALLED_ONLY = names_in({
    "_operator": "getitem", "functools": "reduce", "operator": "getitem",
    "tensordict._reductions": "_make_td",
})  # fmt: skip
SPECIAL = FROM_TYPE | NEW_CALLS | {RECONSTRUCT, GETATTR, LOAD}

# Names that stand for one argument.
ARGUMENTS: dict[str, frozenset[Name]] = {
    "ndarray": names_in({"numpy": "ndarray matrix recarray"}),
    "masked": names_in({"numpy.ma": "MaskedArray", "numpy.ma.core": "MaskedArray"}),
    "bit_generator": names_in({
        "numpy.random._mt19937": "MT19937", "numpy.random._pcg64": "PCG64 PCG64DXSM",
        "numpy.random._philox": "Philox", "numpy.random._sfc64": "SFC64",
    }),
    "bit_generator_ctor": names_in({"numpy.random._pickle": "__bit_generator_ctor"}),
    "or": names_in({"operator": "or_", "_operator": "or_"}),
    "literal_type": names_in({"typing": "Literal"}),
    "seed_sequence": names_in({"numpy.random.bit_generator": "SeedSequence"}),
    "tensordict": names_in({"tensordict._td": "TensorDict", "tensordict.tensordict": "TensorDict"}),
    "generic": names_in({
        "builtins": "dict frozenset list set tuple type",
        "typing": "Callable ClassVar DefaultDict Deque Dict FrozenSet Iterable Iterator List "
        "Mapping Optional OrderedDict Sequence Set Tuple Type Union",
    }),
}  # fmt: skip

# Enumerations that trainers leave in checkpoints: pickled as a call that looks a member up by its
# value.
ENUMS = names_in({
    "accelerate.state": "DistributedType",
    "accelerate.utils.dataclasses": "DistributedType DynamoBackend PrecisionType RNGType "
    "SageMakerDistributedType",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "pytorch_lightning.trainer.states": "RunningStage TrainerFn TrainerStatus",
    "torch.ao.quantization.quant_type": "QuantType",
    "torch.ao.quantization.observer": "MappingType TorchAODType ZeroPointDomain",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "LoadItemType WriteItemType",
    "torch.distributed.fsdp.api": "BackwardPrefetch ShardingStrategy StateDictType",
    "torchao.dtypes.utils": "ScaleCalculationMode",
    "torchao.prototype.mx_formats.config": "ScaleCalculationMode",
    "torchao.quantization.quant_primitives": "MappingType TorchAODType ZeroPointDomain",
    "torchao.quantization.quantize_.common.kernel_preference": "KernelPreference",
    "torchao.quantization.quantize_.workflows.float8.float8_packing_format": "Float8PackingFormat",
    "torchao.quantization.quantize_.workflows.int4.int4_choose_qparams_algorithm":
    "Int4ChooseQParamsAlgorithm",
    "torchao.quantization.quantize_.workflows.int4.int4_packing_format": "Int4PackingFormat",
    "torchao.quantization.quantize_.workflows.intx.intx_packing_format": "IntxPackingFormat",
    "torchao.float8.config": "ScalingGranularity ScalingType",
    "torchao.float8.float8_training_tensor": "GemmInputRole",
    "torchvision.transforms.functional": "InterpolationMode",
    "transformers.debug_utils": "DebugOption",
    "transformers.trainer_utils": "EvaluationStrategy FSDPOption HubStrategy IntervalStrategy "
    "SaveStrategy SchedulerType",
    "transformers.training_args": "OptimizerNames ParallelMode",
    "transformers.utils.generic": "PaddingStrategy TensorType",
})  # fmt: skip
