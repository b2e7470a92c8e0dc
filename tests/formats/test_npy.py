"""Single arrays of numpy, with numpy as the oracle, and headers that nobody should believe."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    TensorError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import Object
from ckptkit.formats.npy import header, read_array
from tests.formats.catalogue import Row, refuses_all
from tests.formats.conformance import storage_bytes

ARRAYS = {
    "matrix": np.arange(6, dtype="<f4").reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(24, dtype="<f8").reshape(2, 3, 4)),
    "big-endian": np.arange(6, dtype=">f8").reshape(3, 2),
    "big-endian-fortran": np.asfortranarray(np.arange(6, dtype=">i2").reshape(3, 2)),
    "big-endian-complex": (np.arange(4) * (1 + 2j)).astype(">c8"),
    "scalar": np.array(7, dtype="<i8"),
    "empty": np.zeros((0, 3), dtype="<f4"),
    "empty-fortran": np.zeros((2, 0), dtype="<f4", order="F"),
    "no-elements": np.zeros(0, dtype="u1"),
    "bool": np.array([[True], [False]]),
    "half": np.array([1.0, -0.0, np.nan, np.inf], dtype="<f2"),
    "many-dimensions": np.zeros((1,) * 32, dtype="i1"),
}


def saved(array: Any, version: tuple[int, int] | None = None, **options: Any) -> bytes:
    file = BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array), version, **options)
    return file.getvalue()


def made(text: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    """A file with this header."""
    raw = text.encode("utf-8" if version[0] == 3 else "latin-1")
    length = len(raw).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + length + raw + data


def read(data: bytes) -> Any:
    return read_array(Range(Memory(data), 0, len(data)), None).root


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_as_numpy_reads_it(name: str, version: tuple[int, int]) -> None:
    array = ARRAYS[name]
    data = saved(array, version)
    tensor = read(data)
    assert isinstance(tensor, Tensor)
    assert tensor.dtype.name == array.dtype.name and tensor.shape == array.shape
    if array.size:
        assert tensor.stride == tuple(step // array.itemsize for step in array.strides)
    assert storage_bytes(tensor) == data[len(data) - array.nbytes :]
    assert tensor.storage is not None
    assert tensor.storage.big_endian == array.dtype.str.startswith(">")


def test_an_array_alone_has_no_name(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    checkpoint = ckptkit.open(tmp_path / "x.npy")
    with pytest.raises(CkptkitError) as caught:
        dict(checkpoint.weights)
    assert "wrap --key" in str(caught.value.hint)


def test_the_checksum_of_the_elements_follows() -> None:
    data = saved(np.arange(100, dtype="<f4"))
    tensor = read_array(Range(Memory(data), 0, len(data)), zlib.crc32(data)).root
    assert tensor.storage.crc32 == zlib.crc32(data[-400:])
    assert read(data).storage.crc32 is None


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array("héllo"), "héllo"),
        (np.array("héllo").astype(">U5"), "héllo"),
        (np.array("ab").astype("<U9"), "ab"),
        (np.array(b"csr"), b"csr"),
        (np.array(""), ""),
    ],
    ids=repr,
)
def test_one_text(array: Any, expected: object) -> None:
    assert read(saved(array)) == expected


def test_objects_are_shown_and_not_made(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Bad:
        def __reduce__(self) -> Any:
            return open, (str(marker), "w")

    (tmp_path / "x.npy").write_bytes(saved(np.array([Bad(), {"a": 1}], dtype=object)))
    checkpoint = ckptkit.open(tmp_path / "x.npy")
    assert isinstance(checkpoint.root, Object)
    assert "io.open" in map(str, checkpoint.globals) or "_io.open" in map(str, checkpoint.globals)
    assert not marker.exists()


# What others write, and what is refused


def test_a_header_of_python_2() -> None:
    data = made("{'descr': '<f4', 'fortran_order': False, 'shape': (3L,), }", bytes(12))
    with pytest.warns(UserWarning, match="Python 2"):
        assert np.load(BytesIO(data)).shape == (3,)
    assert read(data).shape == (3,)


def text_of(descr: str = "'<f4'", shape: str = "(3,)", order: str = "False", more: str = "") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}{more}}}"


def refused() -> Iterator[Row]:
    """Yield the row of threats.md, a file, the error when it is read, and what it says."""
    shapes = ("(3)", "3", "[3]", "(,)", "(3,,)", "(-3,)", "(3.0,)", "(1e1,)", "(3*1,)")
    codes = ("'<f4' + ''", "'\\x3cf4'", "__import__('os').system('x')", "'O'")
    for text in (
        "", "{}", "[]", "{'descr': '<f4', 'fortran_order': False}", "{'descr': '<f4', 'shape': (3,)}",
        text_of(more=", 'more': 1"), text_of(more=", 'more': '1'"), text_of(order="0"),
        text_of() + " + {}", *(text_of(shape=shape) for shape in (*shapes, f"({'9' * 5000},)")),
        *map(text_of, codes),
    ):  # fmt: skip
        yield "NP_01", made(text, bytes(12)), FormatError, ""
    rows: list[tuple[str, type[CkptkitError]]] = [
        (text_of(more=", 'descr': '<f8'"), AmbiguousError), (text_of(more=", 'shape': (3,)"), AmbiguousError),
        (text_of(shape=f"({'1,' * 65})"), LimitError), (text_of(shape=f"({'9' * 19},)"), TruncatedError),
        (text_of(shape=f"({'9' * 19},0)"), AmbiguousError), (text_of(shape="(4,)"), TruncatedError),
        (text_of(shape="(2,)"), AmbiguousError), (text_of(shape="()"), AmbiguousError),
        (text_of("'f4'"), UnsupportedError), (text_of("'=f4'"), UnsupportedError),
        (text_of("''"), UnsupportedError), (text_of("'<f5'"), UnsupportedError),
        (text_of("'<U999999999'", "()"), LimitError), (text_of("'<U9'", "()"), CorruptError),
    ]  # fmt: skip
    for text, error in rows:
        yield "NP_01", made(text, bytes(12)), error, ""
    slow = ("[" * 60_000, "{'descr': " + "[" * 60_000, "{" + "'" * 60_000, "{'descr': '<f4'" * 4000)
    for text in slow:
        yield "NP_02", made(text), FormatError, ""
    for version in (b"\0\0", b"\4\0", b"\1\1", b"\xff\xff"):
        data = b"\x93NUMPY" + version + saved(np.ones(3))[8:]
        yield "NP_04", data, UnsupportedError, "version"
    for array in (
        np.zeros(3, dtype=[("a", "<f4"), ("b", "<i8")]), np.array(["a", "b"]), np.array([b"a", b"b"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"), np.zeros(3, dtype=np.longdouble),
    ):  # fmt: skip
        yield "NP_05", saved(array), UnsupportedError, "for which torch has no dtype"
    for descr in ("'|V2'", "'<V2'", "'|V1'"):  # numpy.save writes ml_dtypes' bfloat16 and float8 so
        odd = made(text_of(descr), bytes(12))
        yield "NP_05", odd, UnsupportedError, "whose type numpy did not record"
    one, objects = saved(np.ones(3)), saved(np.array([{}], dtype=object))
    for data in (one + b"\0", one + one):
        yield "NP_06", data, AmbiguousError, "follow the array"
    yield "NP_06", objects + pickle.dumps(1), AmbiguousError, "follow the pickle"
    yield "NP_07", made(text_of(shape=f"(0,{'9' * 19})")), TensorError, ""  # nothing is in it
    cut = saved(np.arange(10.0))[:-1]
    yield "cut", cut, TruncatedError, "80 bytes, but only 79 are in the file"
    latin = text_of().encode() + b"\xff"
    head = b"\x93NUMPY\3\0" + len(latin).to_bytes(4, "little")
    yield "UTF-8 is for version 3", head + latin + bytes(12), FormatError, "UTF-8"


def test_NP_01_NP_02_NP_04_NP_05_NP_06_NP_07_refused() -> None:
    refuses_all(read, refused())


def test_NP_03_a_header_that_is_too_long() -> None:
    text = text_of(more=",")
    assert read(made(text + " " * ((64 << 10) - len(text)), bytes(12), b"\2\0")).shape == (3,)
    with pytest.raises(LimitError, match="npy_header_bytes"):
        read(made(text + " " * ((64 << 10) - len(text) + 1), bytes(12), b"\2\0"))


@pytest.mark.parametrize(
    "shape", [(), (3,), (2, 3), (0, 3), (1,) * 64, (9_223_372_036_854_775_807, 0)]
)
def test_headers_that_we_write(shape: tuple[int, ...]) -> None:
    for name in ("float32", "bool", "complex128", "uint8"):
        dtype = next(row for row in ckptkit.core.dtypes.TABLE if row.name == name)
        head = header(dtype, shape)
        assert len(head) % 64 == 0 and head.endswith(b"\n")
        file = BytesIO(head)
        assert np.lib.format.read_magic(file) == (1, 0)
        assert np.lib.format.read_array_header_1_0(file) == (shape, False, np.dtype(name))
        assert np.lib.format.dtype_to_descr(np.dtype(name)) in head.decode("latin-1")
