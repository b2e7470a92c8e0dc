"""Files that are no checkpoint: the errors name them by their first bytes, and say what to do."""

from __future__ import annotations

import io
import lzma
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest

import ckptkit
from ckptkit import formats
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.options import Options
from ckptkit.formats.format import Probe
from ckptkit.formats.table import NPZ
from tests.formats.containers.zips import Member, build
from tests.formats.torch_zip.archives import archive, pickle_of, read

GOOD = pickle.dumps({"a": 1}) * 100


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number: int, data: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def onnx(producer: bytes = b"pytorch") -> bytes:
    graph = field(1, field(4, b"MatMul")) + field(2, b"main")
    head = b"\x08\x08" + field(2, producer) + field(3, b"2.1.0")
    return head + field(7, graph) + field(8, b"\x10\x11")


def graph_def() -> bytes:
    return field(1, field(1, b"input") + field(2, b"Placeholder")) * 20


def saved_model() -> bytes:
    return b"\x08\x01" + field(2, field(1, field(4, b"serve")) + graph_def())


def flax(keys: int = 1) -> bytes:
    """{"params": {"kernel": array}}, as flax.serialization.to_bytes packs it."""
    head = bytes([0x80 | keys]) if keys < 16 else b"\xde" + struct.pack(">H", keys)
    rest = b"\xa6params\x81\xa6kernel\xc7\x30\x01\x93\x92\x03\x04\xa7float32\xc4\x30"
    return head + rest + bytes(48)


def tensorflow_index() -> bytes:
    """The first entry of the table is the empty key; the last 8 bytes are the table's own."""
    return b"\0\0\x08\x08\x01\x1a\x02\x08\x01" + bytes(60) + bytes.fromhex("57fb808b247547db")


def joblib_dump(compress: Any = 0) -> bytes:
    file = io.BytesIO()
    joblib.dump({"coef": np.arange(2000.0)}, file, compress=compress)
    return file.getvalue()


KERAS = build(
    *(Member(name, b"{}") for name in ("metadata.json", "config.json", "model.weights.h5"))
)
PACKAGE = build(Member("a/.data/extern_modules", b""), Member("a/model.py", b""))
NOISE = np.random.default_rng(0)
FILES = [
    ("x.pth", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer", "git lfs pull"),
    ("x.pth", lzma.compress(GOOD, lzma.FORMAT_ALONE), "lzma file", "unlzma"),
    ("x.pth", b"\x04\x22\x4d\x18\x64\x40" + bytes(20), "lz4 file", "unlz4"),
    ("x.pth", b"\x1f\x9d\x90" + bytes(20), "compressed file", "uncompress"),
    *(("x.pkl", zlib.compress(GOOD, level), "zlib stream", "zlib") for level in (0, 1, 6, 9)),
    ("x.joblib", joblib_dump(3), "zlib stream", "joblib"),
    ("x.joblib", joblib_dump(("gzip", 3)), "joblib file", "numpy.savez"),
    ("x.joblib", joblib_dump(), "joblib file", "numpy.savez"),
    ("x.7z", b"7z\xbc\xaf\x27\x1c\0\4" + bytes(30), "7z archive", "unpack"),
    ("x.rar", b"Rar!\x1a\7\1\0" + bytes(30), "RAR archive", "unpack"),
    ("x.zip", b"PK\5\6" + bytes(18), "empty zip archive", "download"),
    ("x.zip", b"PK00PK\3\4" + bytes(30), "spanned zip archive", "join"),
    *(("ggml.bin", struct.pack("<I", magic) + bytes(40), "GGML model", "find the checkpoint")
      for magic in (0x67676D6C, 0x67676D66, 0x67676A74, 0x67676C61)),
    ("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5 file", "numpy.savez"),
    ("x.keras", KERAS, "Keras model", "numpy.savez"),
    ("x.pt", PACKAGE, "torch.package", "PackageImporter"),
    ("x.onnx", onnx(), "ONNX model", "onnx.numpy_helper"),
    ("x.onnx", onnx(b""), "ONNX model", "onnx.numpy_helper"),
    ("model.bin", onnx(), "ONNX model", "onnx.numpy_helper"),
    ("graph.pb", graph_def(), "TensorFlow graph", "numpy.savez"),
    ("saved_model.pb", saved_model(), "TensorFlow graph", "numpy.savez"),
    ("x.mlmodel", b"\x08\x04" + field(2, b"\x0a\x05input"), "Core ML model", "find the checkpoint"),
    ("x.caffemodel", field(1, b"AlexNet") + field(100, b"data"), "Caffe model", "numpy.savez"),
    ("model.ckpt.index", tensorflow_index(), "index of a TensorFlow checkpoint", "numpy.savez"),
    ("checkpoint", b'model_checkpoint_path: "model.ckpt-1"\n', "TensorFlow", "numpy.savez"),
    ("x.msgpack", flax(), "msgpack file (Flax)", "numpy.savez"),
    ("x.msgpack", flax(20), "msgpack file (Flax)", "numpy.savez"),
    ("x.tflite", b"\x1c\0\0\0TFL3" + bytes(40), "TensorFlow Lite", "inference"),
    ("x.ptl", b"\x18\0\0\0PTMF" + bytes(40), "PyTorch mobile", "inference"),
    ("x.pte", b"\x18\0\0\0ET12" + bytes(40), "ExecuTorch", "inference"),
    ("x.xml", b'<?xml version="1.0"?>\n<net name="torch-jit-export" version="11">\n', "OpenVINO model", "inference"),
    ("x.weights", struct.pack("<iiiq", 0, 2, 5, 32013312) + bytes(40), "Darknet model", "names or shapes"),
    ("x.mat", b"MATLAB 5.0 MAT-file, Platform: GLNXA64" + bytes(100), "MATLAB file", "scipy.io.loadmat"),
    ("x.parquet", b"PAR1\x15\4" + bytes(40), "or table", "ckptkit formats"),
    ("x.arrow", b"ARROW1\0\0" + bytes(40), "or table", "ckptkit formats"),
    ("x.db", b"SQLite format 3\0" + bytes(40), "or table", "ckptkit formats"),
    ("x.pth", b"\x89PNG\r\n\x1a\n" + bytes(40), "an image", "ckptkit formats"),
    ("x.pth", b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(40), "an image", "ckptkit formats"),
    ("x.pth", b"GIF89a" + bytes(40), "an image", "ckptkit formats"),
    ("x.pth", b"%PDF-1.7\n" + bytes(40), "document", "ckptkit formats"),
    ("x.so", b"\x7fELF\2\1\1" + bytes(40), "program or library", "ckptkit formats"),
    ("x.dll", b"MZ\x90\0" + bytes(40), "program or library", "ckptkit formats"),
    ("x.dylib", b"\xcf\xfa\xed\xfe\7\0\0\1" + bytes(40), "program or library", "ckptkit formats"),
    ("x.pth", b"<!DOCTYPE html>\n<html><body>404</body></html>\n", "HTML page", "download"),
    ("x.pth", "  <html><title>Zugriff verweigert für".encode("latin-1"), "HTML page", "download"),
    ("x.pth", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML document", "download"),
    ("config.json", b'{\n  "architectures": ["BertModel"],\n  "model_type": "bert"\n}\n', "configuration", "another file"),
    ("tokenizer.json", b'{"version": "1.0"}', "is a JSON file", "index file"),
    ("x.pth", b"Entry not found", "is a text file", "'Entry not found'"),
    ("x.pth", b"", "is empty", "again"),
    ("x.pth", bytes(5000), "begins with zeros", "again"),
    ("x.bin", NOISE.normal(0, 0.02, 4000).astype("<f4").tobytes(), "float32 numbers", "numpy.fromfile"),
    ("x.bin", NOISE.bytes(4000), "a format that ckptkit supports", "ckptkit formats"),
    ("x.tar", b"readme" + bytes(251) + b"ustar\0" + bytes(300), "tar archive", "again"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "what", "hint"), FILES, ids=[f"{name}-{what}" for name, _, what, _ in FILES]
)
def test_a_file(tmp_path: Path, name: str, data: bytes, what: str, hint: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CkptkitError) as caught:
        ckptkit.open(tmp_path / name)
    assert caught.value.where == str(tmp_path / name)
    assert what in caught.value.message and hint in str(caught.value.hint), str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("names", "what", "hint"),
    [
        (["Manifest.json", "Data/x"], "Core ML model", "find the checkpoint"),
        (["saved_model.pb", "variables/variables.index"], "TensorFlow model (SavedModel)", "numpy.savez"),
        (["checkpoint", "model.ckpt-9.data-00000-of-00001"], "folder of TensorFlow checkpoints", "numpy.savez"),
        (["manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA", "d/x"], "Orbax checkpoint", "numpy.savez"),
        (["model_index.json", "unet/config.json"], "pipeline of several models", "unet"),
        (["config.json", "tokenizer.json"], "without a checkpoint", "name a checkpoint file"),
        ([], "without a checkpoint", "name a checkpoint file"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_folder(tmp_path: Path, names: list[str], what: str, hint: str) -> None:
    folder = tmp_path / ("x.mlpackage" if "Manifest.json" in names else "x")
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"{}")
    with pytest.raises(CkptkitError) as caught:
        ckptkit.open(folder)
    assert what in caught.value.message and hint in str(caught.value.hint)
    assert caught.value.where == str(folder)


def test_formats_that_are_none() -> None:
    for path, name, said in (
        ("a.pth", "odd", "not a format"), ("a.pth", "torch-tar", "cannot be written"),
        ("a.odd", None, "suffix does not name a format"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            formats.for_writing(path, name)
    with pytest.raises(UsageError, match="cannot store a whole checkpoint"):
        formats.layout(read(archive(pickle_of(b"N"))), NPZ, Options(all=True))
    assert formats.for_writing("a.odd", keep="torch-legacy").name == "torch-zip"


def test_the_page_of_a_file_is_not_the_file() -> None:
    page = Memory(b"<!doctype html><html>", "https://huggingface.co/a/b/blob/main/model.bin")
    with pytest.raises(CkptkitError) as caught:
        formats.identify(Probe(page))
    assert "resolve/main" in str(caught.value.hint)
