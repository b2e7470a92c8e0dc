"""gguf, the library of llama.cpp, writes files; ckptkit reads them, and both compute the same
numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit.compute.ggml import DECODERS, TYPES
from tests.conftest import Run

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

COMPUTED = [name for name in DECODERS if name not in ("Q1_0", "Q2_0")]  # the library cannot


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def written(path: Path, names: list[str], **tensors: np.ndarray[Any, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_token_list([f"t{n}" for n in range(50)])
    writer.add_array("a.numbers", [1, 2, 3])
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    for name in names:
        size = 3 * TYPES[name].itemsize
        data = np.random.default_rng(size).integers(0, 256, (2, size), dtype="u1")
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[name])
    finish(writer)
    return path


def test_metadata_and_plain_tensors(tmp_path: Path) -> None:
    array = np.arange(12, dtype="f4").reshape(3, 4)
    path = written(tmp_path / "m.gguf", [], a=array, b=array.astype("f2"), c=array.astype("i4"))
    with ckptkit.open(path) as ck:
        assert (ck["general.architecture"], ck["general.name"]) == ("llama", "Tiny")
        assert list(ck["tokenizer.ggml.tokens"]) == [f"t{n}" for n in range(50)]
        assert list(ck["a.numbers"]) == [1, 2, 3]
        for tensor, dtype in zip(ck.weights.values(), ("f4", "f2", "i4"), strict=True):
            assert tensor.numpy().dtype == dtype
            assert (tensor.numpy() == array).all()


def test_every_type_has_the_same_numbers(tmp_path: Path, run: Run) -> None:
    path = written(tmp_path / "m.gguf", COMPUTED)
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize", "float32")
    assert done.code == 0, done.stderr
    with ckptkit.open(tmp_path / "out.safetensors") as ck, np.errstate(all="ignore"):
        for tensor in gguf.GGUFReader(path).tensors:
            theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
            ours = ck.weights[tensor.name].numpy()
            same = (ours.view("u4") == theirs.view("u4")) | (np.isnan(ours) & np.isnan(theirs))
            assert same.all(), tensor.name


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "MXFP4"])
def test_what_it_quantizes(name: str, tmp_path: Path) -> None:
    """Quantized by the library, the numbers are near those that they were."""
    numbers = np.random.default_rng(0).normal(size=(4, 64)).astype("f4")
    kind = gguf.GGMLQuantizationType[name]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", gguf.quantize(numbers, kind), raw_dtype=kind)
    finish(writer)
    with ckptkit.open(tmp_path / "m.gguf") as ck:
        found = ckptkit.dequantize(ck, "float32").weights["w"].numpy()
    assert np.linalg.norm(found - numbers) < 0.25 * np.linalg.norm(numbers)


def test_split_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for number in range(5):
        writer.add_tensor(f"t{number}", np.full((2, 3), number, "f4"))
    finish(writer)
    assert len(list(tmp_path.iterdir())) == 3
    with ckptkit.open(tmp_path) as ck:
        found = {name: float(each.numpy()[0, 0]) for name, each in ck.weights.items()}
    assert found == {f"t{number}": number for number in range(5)}
