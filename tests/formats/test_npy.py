"""Single arrays of numpy, with numpy as the oracle, and headers that nobody should believe."""

from __future__ import annotations

import pickle
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
    return (
        b"\x93NUMPY"
        + version
        + len(raw).to_bytes(2 if version[0] == 1 else 4, "little")
        + raw
        + data
    )


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
    stored = storage_bytes(tensor)
    assert stored == data[len(data) - array.nbytes :]
    assert tensor.storage is not None and tensor.storage.big_endian == array.dtype.str.startswith(
        ">"
    )


@pytest.mark.parametrize("name", ARRAYS)
def test_loads_as_numpy_does(tmp_path: Path, name: str) -> None:
    """Through a file, wrapped so that it has a name."""
    np.save(tmp_path / "x.npy", ARRAYS[name])
    checkpoint = ckptkit.open(tmp_path / "x.npy")
    assert checkpoint.format == "npy"
    wrapped = checkpoint.with_root({"w": checkpoint.root})
    ckptkit.save(wrapped, tmp_path / "x.pth", format="torch-zip")
    got = torch.load(tmp_path / "x.pth", weights_only=True)["w"]
    want = ARRAYS[name].astype(ARRAYS[name].dtype.newbyteorder("="))
    assert str(got.dtype).removeprefix("torch.") == want.dtype.name
    assert tuple(got.shape) == want.shape
    assert got.contiguous().numpy().tobytes() == want.tobytes()


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


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }",
        "{'shape': (3,), 'fortran_order': False, 'descr': '<f4'}\n",
        '{"descr":"<f4","fortran_order":False,"shape":(3,)}',
        " {'descr': '<f4', 'fortran_order': False, 'shape': ( 3 , ), }   \n",
    ],
)
def test_headers_of_others(text: str) -> None:
    tensor = read(made(text, bytes(12)))
    assert tensor.shape == (3,)
    assert np.load(BytesIO(made(text, bytes(12)))).shape == (3,)


def test_a_header_of_python_2() -> None:
    data = made("{'descr': '<f4', 'fortran_order': False, 'shape': (3L,), }", bytes(12))
    with pytest.warns(UserWarning, match="Python 2"):
        assert np.load(BytesIO(data)).shape == (3,)
    assert read(data).shape == (3,)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", FormatError),
        ("{}", FormatError),
        ("[]", FormatError),
        ("{'descr': '<f4', 'fortran_order': False}", FormatError),
        ("{'descr': '<f4', 'shape': (3,)}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'more': 1}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'more': '1'}", FormatError),
        ("{'descr': '<f4', 'fortran_order': 0, 'shape': (3,)}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3)}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': 3}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': [3]}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (,)}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,,)}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3.0,)}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1e1,)}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3*1,)}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}", FormatError),
        ("{'descr': '<f4', 'descr': '<f8', 'fortran_order': False, 'shape': (3,)}", AmbiguousError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'shape': (3,)}", AmbiguousError),
        ("{'descr': '<f4' + '', 'fortran_order': False, 'shape': (3,)}", FormatError),
        ("{'descr': '\\x3cf4', 'fortran_order': False, 'shape': (3,)}", FormatError),
        (
            "{'descr': __import__('os').system('x'), 'fortran_order': False, 'shape': (3,)}",
            FormatError,
        ),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)} + {}", FormatError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 65 + ")}", LimitError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 19 + ",)}", TruncatedError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 19 + ",0)}", AmbiguousError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}", TruncatedError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", AmbiguousError),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", AmbiguousError),
        ("{'descr': 'f4', 'fortran_order': False, 'shape': (3,)}", UnsupportedError),
        ("{'descr': '=f4', 'fortran_order': False, 'shape': (3,)}", UnsupportedError),
        ("{'descr': 'O', 'fortran_order': False, 'shape': (3,)}", FormatError),
        ("{'descr': '', 'fortran_order': False, 'shape': (3,)}", UnsupportedError),
        ("{'descr': '<f5', 'fortran_order': False, 'shape': (3,)}", UnsupportedError),
        ("{'descr': '<U999999999', 'fortran_order': False, 'shape': ()}", LimitError),
        ("{'descr': '<U9', 'fortran_order': False, 'shape': ()}", CorruptError),
    ],
)
def test_NP_01_headers(text: str, error: type[CkptkitError]) -> None:
    with pytest.raises(error):
        read(made(text, bytes(12)))


@pytest.mark.parametrize(
    "text",
    ["[" * 60_000, "{'descr': " + "[" * 60_000, "{" + "'" * 60_000, "{'descr': '<f4'" * 4000],
)
def test_NP_02_headers_made_to_be_slow(text: str) -> None:
    with pytest.raises(FormatError):
        read(made(text))


def test_NP_03_a_header_that_is_too_long() -> None:
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }"
    assert read(made(text + " " * ((64 << 10) - len(text)), bytes(12), b"\2\0")).shape == (3,)
    with pytest.raises(LimitError, match="npy_header_bytes"):
        read(made(text + " " * ((64 << 10) - len(text) + 1), bytes(12), b"\2\0"))


@pytest.mark.parametrize("version", [b"\0\0", b"\4\0", b"\1\1", b"\xff\xff"])
def test_NP_04_versions(version: bytes) -> None:
    with pytest.raises(UnsupportedError, match="version"):
        read(b"\x93NUMPY" + version + saved(np.ones(3))[8:])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, dtype=[("a", "<f4"), ("b", "<i8")]),
        np.array(["a", "b"]),
        np.array([b"a", b"b"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.zeros(3, dtype=np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_NP_05_arrays_that_torch_has_no_tensor_for(array: Any) -> None:
    with pytest.raises(UnsupportedError, match="for which torch has no dtype"):
        read(saved(array))


@pytest.mark.parametrize("descr", ["|V2", "<V2", "|V1"])
def test_NP_05_types_that_numpy_does_not_know(descr: str) -> None:
    """numpy.save writes these for ml_dtypes' bfloat16 and float8."""
    with pytest.raises(UnsupportedError) as caught:
        read(made(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': (6,), }}", bytes(12)))
    assert "bfloat16" in str(caught.value.hint)


def test_NP_06_bytes_after_the_array() -> None:
    one = saved(np.ones(3))
    for data in (one + b"\0", one + one):
        with pytest.raises(AmbiguousError, match="follow the array"):
            read(data)
    objects = saved(np.array([{}], dtype=object))
    with pytest.raises(AmbiguousError, match="follow the pickle"):
        read(objects + pickle.dumps(1))


def test_NP_07_a_size_beyond_64_bits() -> None:
    """Nothing is in it, and still it is not a size."""
    with pytest.raises(TensorError):
        read(made("{'descr': '<f4', 'fortran_order': False, 'shape': (0," + "9" * 19 + ")}"))


def test_an_array_that_is_cut() -> None:
    with pytest.raises(TruncatedError, match="80 bytes, but only 79 are in the file"):
        read(saved(np.arange(10.0))[:-1])


def test_UTF_8_is_for_version_3() -> None:
    bad = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }"
    data = (
        b"\x93NUMPY\3\0" + (len(bad) + 1).to_bytes(4, "little") + bad.encode() + b"\xff" + bytes(12)
    )
    with pytest.raises(FormatError, match="UTF-8"):
        read(data)


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
