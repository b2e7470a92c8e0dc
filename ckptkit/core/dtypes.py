"""The table of element types, with the name and size of each type in every format.

Sources: torch/_utils and torch/storage (storage classes), safetensors' `Dtype`, numpy, ggml. `bits`
is the size of one element. Torch counts a pair of float4_e2m1fn_x2 numbers as one element of 8
bits, but each quint4x2 number as an element of 4 bits. ggml types store blocks of `block` elements.
For ggml types, `bits` is the size of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptkit.core import arguments
from ckptkit.core.errors import ArgumentError, FormatError
from ckptkit.core.text import meant


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type. A DType equals its name, and the torch or numpy dtype of that name.

    The hash of a DType is the hash of its name. Sets and dicts therefore find a DType by its name,
    but not by a torch or numpy dtype, because such a dtype has another hash.

    ``name`` is the name in torch, without ``torch.``. ``kind`` is float, int, bool, complex,
    quantized, bits, blocks (of ggml) or unknown (:func:`unknown`). ``storage`` is the typed storage
    class in module torch. If torch writes an UntypedStorage, ``storage`` is None. ``safetensors``
    is the name of the type in a safetensors header. ``numpy`` is the name of the type in numpy. If
    numpy does not have the type, ``numpy`` is None.
    """

    name: str
    bits: int
    kind: str
    storage: str | None = None
    safetensors: str | None = None
    numpy: str | None = None
    packed: int = 1  # number of elements that safetensors counts for one element of torch
    block: int = 1  # number of elements in a block of `bits` bits

    @property
    def itemsize(self) -> int:
        """Number of bytes of an element or block. 1 for types smaller than a byte."""
        return self.bits // 8 or 1

    def nbytes(self, elements: int) -> int:
        """Return the number of bytes of `elements` elements, rounded up to a byte or a block."""
        if self.block > 1:
            return -(-elements // self.block) * self.bits // 8
        return (elements * self.bits + 7) // 8

    @property
    def component(self) -> int:
        """A change of byte order reverses the bytes in groups of this size.

        For complex types this is half an element, because the real and the imaginary part are
        swapped separately. For blocks it is 1, because the fields of a block differ in size. The
        code that decodes a block swaps the bytes of each field.
        """
        if self.kind == "blocks":
            return 1
        return self.itemsize // 2 if self.kind == "complex" else self.itemsize

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<DType {self.name}>"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, DType):
            return (self.name, self.bits, self.kind) == (other.name, other.bits, other.kind)
        try:
            return _name(other).removeprefix("torch.") == self.name
        except ArgumentError:
            return False

    def __hash__(self) -> int:
        return hash(self.name)


TABLE: tuple[DType, ...] = (
    DType("float64", 64, "float", "DoubleStorage", "F64", "float64"),
    DType("float32", 32, "float", "FloatStorage", "F32", "float32"),
    DType("float16", 16, "float", "HalfStorage", "F16", "float16"),
    DType("bfloat16", 16, "float", "BFloat16Storage", "BF16"),
    DType("float8_e4m3fn", 8, "float", None, "F8_E4M3"),
    DType("float8_e5m2", 8, "float", None, "F8_E5M2"),
    DType("float8_e4m3fnuz", 8, "float", None, "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 8, "float", None, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 8, "float", None, "F8_E8M0"),
    DType("float4_e2m1fn_x2", 8, "float", None, "F4", packed=2),
    # float6_e2m3 and float6_e3m2 exist in safetensors, but not in torch.
    DType("float6_e2m3", 6, "float", None, "F6_E2M3"),
    DType("float6_e3m2", 6, "float", None, "F6_E3M2"),
    DType("int64", 64, "int", "LongStorage", "I64", "int64"),
    DType("int32", 32, "int", "IntStorage", "I32", "int32"),
    DType("int16", 16, "int", "ShortStorage", "I16", "int16"),
    DType("int8", 8, "int", "CharStorage", "I8", "int8"),
    DType("uint8", 8, "int", "ByteStorage", "U8", "uint8"),
    DType("uint16", 16, "int", None, "U16", "uint16"),
    DType("uint32", 32, "int", None, "U32", "uint32"),
    DType("uint64", 64, "int", None, "U64", "uint64"),
    DType("bool", 8, "bool", "BoolStorage", "BOOL", "bool"),
    DType("complex128", 128, "complex", "ComplexDoubleStorage", None, "complex128"),
    DType("complex64", 64, "complex", "ComplexFloatStorage", "C64", "complex64"),
    DType("complex32", 32, "complex"),
    DType("bcomplex32", 32, "complex"),  # a pair of bfloat16 numbers; exists since torch 2.15
    DType("qint8", 8, "quantized", "QInt8Storage"),
    DType("quint8", 8, "quantized", "QUInt8Storage"),
    DType("qint32", 32, "quantized", "QInt32Storage"),
    DType("quint4x2", 4, "quantized", "QUInt4x2Storage"),
    DType("quint2x4", 2, "quantized", "QUInt2x4Storage"),
    DType("bits8", 8, "bits"),
    DType("bits16", 16, "bits"),
    DType("bits1x8", 8, "bits"),
    DType("bits2x4", 8, "bits"),
    DType("bits4x2", 8, "bits"),
    # torch.save rejects tensors of the types int1 to int7 and uint1 to uint7.
    *(DType(f"int{bits}", 8, "int") for bits in range(1, 8)),
    *(DType(f"uint{bits}", 8, "int") for bits in range(1, 8)),
)

# The type of F4 tensors with an odd last dimension. Torch has no such type: it stores F4 in pairs.
FLOAT4 = DType("float4_e2m1fn", 4, "float", None, "F4")

BY_NAME: dict[str, DType] = {row.name: row for row in (*TABLE, FLOAT4)}
BY_STORAGE: dict[str, DType] = {row.storage: row for row in TABLE if row.storage}
BY_SAFETENSORS: dict[str, DType] = {row.safetensors: row for row in TABLE if row.safetensors}
BY_NUMPY: dict[str, DType] = {row.numpy: row for row in TABLE if row.numpy}

# The types of tensors in GGUF files, by their number in ggml.h. The table omits types that ggml
# removed. `formats.gguf` contains the numbers of types that exist in torch.
GGML: dict[int, DType] = {
    number: DType(name, 8 * nbytes, "blocks", block=block)
    for number, name, block, nbytes in (
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 36), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56), (31, "Q4_0_4_4", 32, 18), (32, "Q4_0_4_8", 32, 18),
        (33, "Q4_0_8_8", 32, 18), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (36, "IQ4_NL_4_4", 32, 18), (37, "IQ4_NL_4_8", 32, 18), (38, "IQ4_NL_8_8", 32, 18),
        (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18),
    )
}  # fmt: skip

# Other names of the types, in torch and on command lines.
ALIASES: dict[str, str] = {
    "float": "float32", "double": "float64", "half": "float16", "chalf": "complex32",
    "cfloat": "complex64", "cdouble": "complex128", "long": "int64", "int": "int32",
    "short": "int16", "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16",
    "f64": "float64", "f32": "float32", "f16": "float16", "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}  # fmt: skip

DTypeLike: TypeAlias = Any  # a name, a DType, or a dtype of torch, numpy or ml_dtypes

UINT8 = BY_NAME["uint8"]
NOT_IN_TORCH = frozenset({FLOAT4.name, "float6_e2m3", "float6_e3m2"})
UNKNOWN = "unknown dtype"  # `layout` of a tensor whose element size is unknown


def unknown(name: str) -> DType:
    """Return a placeholder for an unsupported type, for example of a later torch version."""
    return DType(name, 8, "unknown")


def parse(given: DTypeLike) -> DType:
    """Return the DType for ``float32``, ``fp16``, ``torch.float32``, ``np.float32`` and so on.

    Raise FormatError for an unknown name. Raise ArgumentError for an object that is neither a name
    nor a dtype of torch, numpy or ml_dtypes.
    """
    name = _name(given)
    plain = name.strip().lower().removeprefix("torch.")
    found = BY_NAME.get(ALIASES.get(plain, plain))
    if found is None:
        known = ", ".join(row.name for row in TABLE[:24])
        raise FormatError(
            f"unknown dtype {name!r}",
            hint=f"{meant(plain, [*BY_NAME, *ALIASES])}known dtypes: {known}",
        )
    return found


def _name(given: object) -> str:
    """Return the name of the type `given`.

    `given` is a name, a torch.dtype, a numpy.dtype or a numpy class.
    """
    if isinstance(given, (str, DType)):
        return str(given)
    origin = (given if isinstance(given, type) else type(given)).__module__.partition(".")[0]
    if origin == "torch" and type(given).__name__ == "dtype":
        return str(given)
    if origin in ("numpy", "ml_dtypes"):
        name = getattr(given, "__name__" if isinstance(given, type) else "name", None)
        if isinstance(name, str):
            return name
    raise arguments.wrong("a dtype", "a name, a torch.dtype or a numpy dtype", given)
