"""GGUF files written by hand: what is read, and what is refused."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit import quantized
from ckptkit.core.dtypes import GGML
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.tree import StoredList
from tests.conftest import Run, in_process
from tests.formats.gguf_files import Entry, Typed, Writer, made

run = in_process

F32 = np.arange(12, dtype="<f4")
PLAIN = Entry("a.weight", (3, 4), 0, F32.tobytes())
Q4_0 = Entry("b.weight", (2, 32), 2, bytes(36))


def written(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def opened(folder: Path, data: bytes) -> ckptkit.Checkpoint:
    return ckptkit.open(written(folder, data))


class TestValues:
    """Metadata are entries of the tree, under their own keys."""

    NUMBERS = [
        (0, 255), (1, -128), (2, 65535), (3, -32768), (4, 2**32 - 1), (5, -(2**31)), (6, 0.5),
        (7, True), (10, 2**64 - 1), (11, -(2**63)), (12, 1e300),
    ]  # fmt: skip

    @pytest.mark.parametrize("version, order", [(1, "<"), (2, "<"), (3, "<"), (3, ">")])
    def test_every_type(self, tmp_path: Path, version: int, order: str) -> None:
        values = [(f"k.{number}", Typed(number, value)) for number, value in self.NUMBERS]
        values += [("k.text", "grüß"), ("k.list", [Typed(5, n) for n in (1, -2)])]
        file = made(values, [PLAIN] if order == "<" else [], version=version, order=order)
        with opened(tmp_path, file) as ck:
            assert [(int(key[2:]), ck[key]) for key in ck.keys()[: len(self.NUMBERS)]] == (
                self.NUMBERS
            )
            assert ck["k.text"] == "grüß"
            assert (ck["k.list"].of, list(ck["k.list"])) == ("int32", [1, -2])
            assert ck.keys()[-1] == "tensors"

    def test_long_arrays_stay_in_the_file(self, tmp_path: Path) -> None:
        words = [f"w{n}" * (n % 7) for n in range(200_000)]
        with opened(tmp_path, made([("tokens", words), ("a.b", Typed(7, [True, False]))])) as ck:
            found = ck["tokens"]
            assert isinstance(found, StoredList)
            assert (found.of, len(found), found.first) == ("string", len(words), tuple(words[:8]))
            assert list(found) == words
            assert list(ck["a.b"]) == [True, False]

    def test_texts_that_are_not_utf8(self, tmp_path: Path) -> None:
        writer = Writer()
        words = writer.number("I", 8) + writer.number("Q", 1) + writer.text(b"\xff")
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + writer.text("t") + struct.pack("<I", 9)
        with opened(tmp_path, head + words) as ck:
            assert list(ck["t"]) == ["\\xff"]

    def test_a_key_called_like_the_entry_of_the_tensors(self, tmp_path: Path) -> None:
        with opened(tmp_path, made([("tensors", 7)], [PLAIN])) as ck:
            assert ck["tensors"] == 7
            assert list(ck.weights) == ["a.weight"]

    def test_torch_files_get_them(self, tmp_path: Path) -> None:
        file = made([("general.name", "x"), ("tokens", ["a", "b"] * 9)], [PLAIN])
        ckptkit.convert(written(tmp_path, file), tmp_path / "made.pth")
        found = torch.load(tmp_path / "made.pth", weights_only=True)
        assert found.pop("tensors")["a.weight"].equal(torch.from_numpy(F32.reshape(3, 4)))
        assert found == {"general.name": "x", "tokens": ["a", "b"] * 9}


class TestTensors:
    def test_big_endian(self, tmp_path: Path) -> None:
        arrays = {0: "f4", 1: "f2", 24: "i1", 25: "i2", 26: "i4", 27: "i8", 28: "f8"}
        tensors = [
            Entry(f"t{number}", (2, 3), number, np.arange(6, dtype=">" + kind).tobytes())
            for number, kind in arrays.items()
        ]
        with opened(tmp_path, made(tensors=tensors, order=">")) as ck:
            for number, kind in arrays.items():
                expected = np.arange(6, dtype=kind).reshape(2, 3)
                assert ck.weights[f"t{number}"].numpy().dtype == expected.dtype
                assert (ck.weights[f"t{number}"].numpy() == expected).all()

    def test_shapes(self, tmp_path: Path) -> None:
        """Also those that ComfyUI-GGUF changed, and of a type that is not known."""
        shapes = {"scalar": (), "empty": (0, 4), "eight": (1,) * 7 + (2,), "comfy": (3, 4)}
        tensors = [Entry(name, shape, 0, bytes(4 * prod(shape))) for name, shape in shapes.items()]
        tensors.append(Entry("odd", (3, 4), 155, bytes(32)))
        values = [
            (f"comfy.gguf.orig_shape.{name}", [Typed(5, n) for n in (2, 3, 2)])
            for name in ("comfy", "odd")
        ]
        with opened(tmp_path, made(values, tensors)) as ck:
            found = {name: tensor.shape for name, tensor in ck.weights.items()}
        assert found == {**shapes, "comfy": (2, 3, 2), "odd": (2, 3, 2)}

    @pytest.mark.parametrize("number", GGML)
    def test_blocks(self, tmp_path: Path, number: int) -> None:
        dtype = GGML[number]
        data = bytes(6 * dtype.itemsize)
        entry = Entry("t", (2, 3 * dtype.block), number, data)
        with opened(tmp_path, made(tensors=[entry])) as ck:
            tensor = ck.weights["t"]
            assert (tensor.dtype, tensor.nbytes) == (dtype, len(data))
            assert tensor.extent == (0, len(data))

    def test_sizes_of_blocks(self) -> None:
        """Bits of an element, as llama.cpp counts them."""
        bits = {dtype.name: dtype.bits / dtype.block for dtype in GGML.values()}
        assert (bits["Q4_K"], bits["Q6_K"], bits["Q8_0"]) == (4.5, 6.5625, 8.5)
        assert (bits["IQ1_S"], bits["TQ1_0"], bits["MXFP4"]) == (1.5625, 1.6875, 4.25)

    def test_any_order_and_holes(self, tmp_path: Path) -> None:
        tensors = [PLAIN._replace(offset=128), Entry("b", (2,), 0, F32[:2].tobytes(), 0)]
        writer, data = Writer(), F32[:2].tobytes().ljust(128, b"\0") + F32.tobytes()
        head = b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
        head += b"".join(writer.info(each, each.offset or 0) for each in tensors)
        with opened(tmp_path, head + bytes(-len(head) % 32) + data) as ck:
            assert (ck.weights["a.weight"].numpy().ravel() == F32).all()
            assert (ck.weights["b"].numpy() == F32[:2]).all()
            assert "llama.cpp refuses" in ck.warnings[0]

    def test_type_that_is_not_known(self, tmp_path: Path) -> None:
        tensors = [PLAIN, Entry("odd", (5, 7), 155, bytes(64)), PLAIN._replace(name="c")]
        with opened(tmp_path, made(tensors=tensors)) as ck:
            assert ck.weights["odd"].dtype.name == "ggml type 155"
            assert (ck.weights["odd"].shape, ck.weights["odd"].nbytes) == ((5, 7), 64)
            assert (ck.weights["c"].numpy().ravel() == F32).all()


def split(number: int, count: int, total: int) -> list[tuple[str, Any]]:
    keys = {"no": Typed(2, number), "count": Typed(2, count), "tensors.count": Typed(5, total)}
    return [(f"split.{key}", value) for key, value in keys.items()]


class TestSplit:
    def files(self, folder: Path, **changes: Any) -> list[Path]:
        paths = []
        for number in range(3):
            values = [("general.name", "x")] * (not number) + split(number, 3, 2)
            tensors = [PLAIN._replace(name=f"t{number}")] if number else []
            name = f"m-{number + 1:05}-of-00003.gguf"
            paths.append(written(folder, made(values, tensors), name))
        return paths

    def pair(
        self, folder: Path, value: tuple[str, Any], alignments: Sequence[int], padded: bool = True
    ) -> Path:
        """Write two files, of which only the first has `value`. Return the second."""
        for number, alignment in enumerate(alignments):
            values = split(number, 2, 2) + [value] * (not number)
            tensors = [PLAIN._replace(name=f"t{number}")]
            file = made(values, tensors, alignment=alignment, padded=padded)
            path = written(folder, file, f"m-{number + 1:05}-of-00002.gguf")
        return path

    def test_any_file_and_the_folder(self, tmp_path: Path) -> None:
        for path in (*self.files(tmp_path), tmp_path):
            with ckptkit.open(path) as ck:
                assert list(ck.weights) == ["t1", "t2"]
                assert (ck["general.name"], ck["split.no"]) == ("x", 0)
                assert (ck.weights["t2"].numpy().ravel() == F32).all()
                assert not ck.warnings

    def test_one_file_alone(self, tmp_path: Path) -> None:
        with ckptkit.open(self.files(tmp_path)[1], part_only=True) as ck:
            assert list(ck.weights) == ["t1"]
            assert ck.part is not None and "file 2 of 3" in ck.part.name

    def test_missing(self, tmp_path: Path) -> None:
        paths = self.files(tmp_path)
        paths[1].unlink()
        for path in (paths[0], paths[2], tmp_path):
            with pytest.raises(CorruptError, match=r"m-00002-of-00003\.gguf is missing"):
                ckptkit.open(path)

    def test_renamed(self, tmp_path: Path) -> None:
        paths = self.files(tmp_path)
        paths[0].rename(tmp_path / "model.gguf")
        with pytest.raises(UnsupportedError, match="file 1 of 3"):
            ckptkit.open(tmp_path / "model.gguf")

    def test_named_as_if_split(self, tmp_path: Path) -> None:
        path = written(tmp_path, made(), "m-00001-of-00002.gguf")
        with pytest.raises(CorruptError, match=r"split\.count is missing"):
            ckptkit.open(path)

    def test_alignment_of_the_first_alone(self, tmp_path: Path) -> None:
        second = self.pair(tmp_path, ("general.alignment", 256), (256, 256))
        for path in (tmp_path, second):
            with ckptkit.open(path) as ck:
                assert (ck.weights["t1"].numpy().ravel() == F32).all()
                assert "the first file has 256" in ck.warnings[0]

    @pytest.mark.parametrize("alone", [False, True])
    @pytest.mark.parametrize("padded", [False, True])
    def test_alignment_that_the_size_tells(self, tmp_path: Path, alone: bool, padded: bool) -> None:
        """A last tensor need not be padded."""
        path = self.pair(tmp_path, ("general.alignment", 256), (256, 256), padded)
        with ckptkit.open(path, part_only=alone) as ck:
            assert (ck.weights["t1"].numpy().ravel() == F32).all()
            assert "general.alignment is missing" in ck.warnings[0]
        path.write_bytes(path.read_bytes() + bytes(300))
        with pytest.raises(CorruptError, match="does not fit 32"):
            ckptkit.open(path, part_only=alone)

    def test_alignment_of_each_file(self, tmp_path: Path) -> None:
        self.pair(tmp_path, ("general.alignment", 256), (256, 32))
        with ckptkit.open(tmp_path) as ck:
            assert (ck.weights["t1"].numpy().ravel() == F32).all()
            assert "the first file has 256. ckptkit uses 32" in ck.warnings[0]

    @pytest.mark.parametrize(
        "name, values, words",
        [
            ("m-00000-of-00000", split(0, 0, 1), "file 1 of 0"),
            ("m-00002-of-00001", split(1, 1, 1), "file 2 of 1"),
            ("m-00002-of-00003", split(0, 1, 1), r"split\.count is 1, but"),
            ("m-00001-of-00001", split(7, 1, 1), r"split\.no is 7, not 0"),
            ("m-00001-of-00001", split(0, 1, 9), r"split\.tensors\.count is 9, not 1"),
            ("m-00001-of-00001", split(0, 1, 1)[:2], r"split\.tensors\.count is missing"),
            ("m-00001-of-00001", [("split.no", "0"), *split(0, 1, 1)[1:]], "is '0', not 0"),
            ("m-00001-of-00001", [("split.count", True)], r"split\.count is True"),
            ("model", split(1, 1, 1), r"split\.no is 1, not 0"),
        ],
    )
    def test_keys_and_name(
        self, tmp_path: Path, name: str, values: list[tuple[str, Any]], words: str
    ) -> None:
        path = written(tmp_path, made(values, [PLAIN]), f"{name}.gguf")
        with pytest.raises(CkptkitError, match=words):
            ckptkit.open(path)

    def test_a_single_file(self, tmp_path: Path) -> None:
        for name in ("model.gguf", "m-00001-of-00001.gguf"):
            with ckptkit.open(written(tmp_path, made(split(0, 1, 1), [PLAIN]), name)) as ck:
                assert (list(ck.weights), ck.part) == (["a.weight"], None)

    def test_shape_of_comfy_in_the_first_file(self, tmp_path: Path) -> None:
        shape = ("comfy.gguf.orig_shape.t1", [Typed(5, n) for n in (2, 3, 2)])
        self.pair(tmp_path, shape, (32, 32))
        with ckptkit.open(tmp_path) as ck:
            assert ck.weights["t1"].shape == (2, 3, 2)


class TestFolders:
    def test_other_models_come_first(self, tmp_path: Path) -> None:
        ckptkit.save({"w": np.zeros(3, "f4")}, tmp_path / "model.safetensors")
        written(tmp_path, made(tensors=[PLAIN]))
        with ckptkit.open(tmp_path) as ck:
            assert ck.format == "safetensors"
            assert "model.gguf, not read" in ck.warnings[0]
        (tmp_path / "model.safetensors").unlink()
        with ckptkit.open(tmp_path) as ck:
            assert ck.format == "gguf"

    def test_several(self, tmp_path: Path) -> None:
        written(tmp_path, made(tensors=[PLAIN]), "q4.gguf")
        written(tmp_path, made(tensors=[PLAIN]), "q8.gguf")
        with pytest.raises(AmbiguousError, match=r"2 checkpoints: q4\.gguf, q8\.gguf"):
            ckptkit.open(tmp_path)


def comfy(shape: Any) -> bytes:
    """A file whose tensor has this as its original shape."""
    return made([("comfy.gguf.orig_shape.a.weight", shape)], [PLAIN])


MODEL = made([("general.name", "x")], [PLAIN, Q4_0])
HOSTILE: dict[str, tuple[bytes, type[CkptkitError], str]] = {
    "no version": (MODEL[:6], TruncatedError, "inside its header"),
    "version 0": (made(version=3)[:4] + bytes(20), UnsupportedError, "version 0"),
    "big-endian of version 2": (made(version=2, order=">"), UnsupportedError, "version 2, big"),
    "keys": (made(counts=(0, 2**60)), CorruptError, "metadata entries"),
    "tensors": (made(counts=(2**62, 0)), CorruptError, "tensors, but only"),
    "key twice": (made([("a", 1), ("a", 1)]), AmbiguousError, "'a' occurs twice"),
    "name twice": (made(tensors=[PLAIN, PLAIN]), AmbiguousError, "'a.weight' occurs twice"),
    "key not UTF-8": (made([(b"\xff", 1)]), FormatError, "a key of the metadata is not UTF-8"),
    "name not UTF-8": (made(tensors=[PLAIN._replace(name=b"\xff")]), FormatError, "a tensor is not UTF-8"),
    "long name": (made(tensors=[PLAIN._replace(name="a" * 65537)]), LimitError, "name_bytes"),
    "nested arrays": (made([("a", [[1], [2]])]), UnsupportedError, "array of arrays"),
    "alignment 0": (made([("general.alignment", 0)]), FormatError, "power of two"),
    "alignment 48": (made([("general.alignment", 48)]), FormatError, "power of two"),
    "alignment of i32": (made([("general.alignment", Typed(5, 64))]), FormatError, "of type uint32"),
    "nine dimensions": (made(tensors=[PLAIN._replace(shape=(1,) * 9)]), FormatError, "9 dimensions"),
    "rows of no blocks": (made(tensors=[Q4_0._replace(shape=(4, 16))]), FormatError, "divisible"),
    "unaligned": (made(tensors=[PLAIN._replace(offset=4)]), FormatError, "not aligned to 32"),
    "beyond": (made(tensors=[PLAIN._replace(shape=(2**40, 4))]), TruncatedError, "after the end of the file"),
    "wrapping": (
        made(tensors=[PLAIN._replace(shape=(2**62, 2**62))]), TruncatedError, "after the end of the file",
    ),
    "cut": (MODEL[:-40], TruncatedError, "'b.weight' ends 12 bytes after the end of the file"),
    "overlap": (
        made(tensors=[PLAIN, Entry("b", (2,), 0, b"", 32), Entry("c", (2,), 0, bytes(64), 64)]),
        CorruptError, "2 tensors overlap: 'a.weight', 'b'",
    ),
    "shape of comfy": (comfy([Typed(5, 5)] * 2), CorruptError, "elements"),
    "fraction as a shape": (comfy([Typed(6, 3.5), Typed(6, 4.0)]), FormatError, "not a shape"),
    "NaN as a shape": (comfy([Typed(6, float("nan"))]), FormatError, "not a shape"),
    "text as a shape": (comfy("3,4"), FormatError, "not a shape"),
    "unknown type beyond": (
        made(tensors=[PLAIN, Entry("odd", (32,), 155, b"", 4096)])[:512],
        TruncatedError, "'odd' ends",
    ),
    "empty tensor beyond": (
        made(tensors=[PLAIN, Entry("none", (0,), 0, b"", 4096)])[:512], TruncatedError, "'none' ends",
    ),
    "unknown type overlaps": (
        made(tensors=[Entry("odd", (32,), 155, b"", 0), PLAIN._replace(offset=0)]),
        CorruptError, "2 tensors overlap: 'odd', 'a.weight'",
    ),
    "size of 64 bits": (
        made(tensors=[PLAIN, Entry("none", (0, 2**63), 0, b"")]), FormatError, "tensor 'none'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_refuses(tmp_path: Path, name: str) -> None:
    data, kind, words = HOSTILE[name]
    with pytest.raises(kind) as caught:
        ckptkit.open(written(tmp_path, data))
    assert words in caught.value.message
    assert caught.value.where == str(tmp_path / "model.gguf")


@pytest.mark.parametrize("count", [2**30, 2**60])
def test_false_counts_take_no_memory(tmp_path: Path, count: int) -> None:
    """A file of 300 bytes that claims arrays and strings of any length."""
    writer = Writer()
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + writer.text("a")
    claims: list[Callable[[int], bytes]] = [
        lambda n: struct.pack("<IIQ", 9, 8, n),
        lambda n: struct.pack("<IIQ", 9, 4, n),
        lambda n: struct.pack("<IQ", 8, n),
    ]
    code = (
        "import resource, sys, ckptkit\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
        "try: ckptkit.open(sys.argv[1])\n"
        "except ckptkit.CkptkitError as error: print(type(error).__name__)\n"
    )
    for claim in claims:
        path = written(tmp_path, head + claim(count) + bytes(300))
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(Path(ckptkit.__file__).parent.parent)},
        )  # fmt: skip
        assert done.stdout.strip() in ("CorruptError", "TruncatedError"), done.stderr


def test_config_of_another_model_beside_it(tmp_path: Path) -> None:
    """A folder may hold the configuration of the model that the file was made of."""
    config = '{"torch_dtype": "float16", "quantization_config": {"quant_method": "quark"}}'
    (tmp_path / "config.json").write_text(config)
    with opened(tmp_path, made(tensors=[Q4_0])) as ck:
        assert not quantized.find(ck).unread
        assert quantized.dequantized_view(ck).weights["b.weight"].dtype == "float32"


def test_blocks_are_no_arrays(tmp_path: Path) -> None:
    """Neither numpy nor torch has such elements; the error names what makes numbers of them."""
    path = written(tmp_path, made(tensors=[Q4_0]))
    with ckptkit.open(path) as ck:
        tensor = ck.weights["b.weight"]
        asked: list[Callable[[], Any]] = [
            tensor.numpy, tensor.torch, lambda: tensor[0], lambda: ckptkit.load(path),
            lambda: ckptkit.save(ck, tmp_path / "out.pth"),
            lambda: ckptkit.save(ck, tmp_path / "out.npz"),
        ]  # fmt: skip
        for ask in asked:
            with pytest.raises(CkptkitError) as caught:
                ask()
            assert "dequantize" in (caught.value.hint or "")
        numbers = ckptkit.dequantize(ck, "float16").weights["b.weight"].numpy()
        assert (numbers.dtype, numbers.shape) == ("f2", (2, 32))


class TestCommands:
    """What commands say of GGUF alone."""

    def test_inspect_one_file_of_a_split_model(self, tmp_path: Path, run: Run) -> None:
        path = TestSplit().files(tmp_path)[1]
        done = run("inspect", "--part-only", str(path))
        assert done.code == 0
        assert "this is file 2 of 3 of a split GGUF model" in done.stdout
        assert "put all files of the split model into one folder" in done.stdout
        assert "ranks" not in done.stdout + run("doctor", "--part-only", str(path)).stdout

    def test_one_file_of_a_split_model_is_converted_as_printed(
        self, tmp_path: Path, run: Run
    ) -> None:
        written(tmp_path, made(split(0, 2, 2), [Q4_0]), "m-00001-of-00002.gguf")
        words = ("convert", "m-00001-of-00002.gguf", "m.safetensors", "--part-only")
        command = run(*words, cwd=tmp_path).stderr.split("`")[1]
        assert run(*command.split()[1:], cwd=tmp_path).code == 0

    @pytest.mark.parametrize(
        "version, order, words", [(1, "<", "gguf 1,"), (3, ">", "gguf 3, big-endian,")]
    )
    def test_inspect_names_version_and_architecture(
        self, version: int, order: str, words: str, tmp_path: Path, run: Run
    ) -> None:
        head = [("general.architecture", "qwen\x1b3"), ("general.name", "x")]
        for values, end in ((head, ", qwen\\x1b3"), (head[1:], " B")):
            written(tmp_path, made(values, [PLAIN], version=version, order=order))
            first, *lines = run("inspect", "model.gguf", cwd=tmp_path).stdout.splitlines()
            assert first.startswith(f"model.gguf: {words} ") and first.endswith(end)
            assert lines.count("metadata") == 1 and "values" not in lines

    def test_an_adapter_is_named(self, tmp_path: Path, run: Run) -> None:
        values = [("general.architecture", "llama"), ("general.type", "adapter")]
        tensors = [PLAIN._replace(name=f"blk.0.attn_q.weight.lora_{part}") for part in "ab"]
        written(tmp_path, made(values, tensors))
        done = run("lora", "check", "model.gguf", cwd=tmp_path)
        assert done.code == 3
        assert "is an adapter in the GGUF layout" in done.stderr

    def test_show_prints_the_warnings(self, tmp_path: Path, run: Run) -> None:
        written(tmp_path, made(tensors=[Q4_0, PLAIN._replace(offset=128)]))
        for words in (("a.weight",), ("a.weight", "--json"), ("--nan",)):
            done = run("show", "model.gguf", *words, cwd=tmp_path)
            assert done.code == 0
            assert done.stderr.startswith("warning: model.gguf: tensors are not contiguous")

    def test_convert_names_the_command(self, tmp_path: Path, run: Run) -> None:
        written(tmp_path, MODEL)
        done = run("convert", "model.gguf", "out.safetensors", cwd=tmp_path)
        assert done.code == 3
        command = "ckptkit convert model.gguf out.safetensors --dequantize bfloat16"
        assert f"hint: `{command}`" in done.stderr

    def test_doctor(self, tmp_path: Path, run: Run) -> None:
        tensors = [Q4_0, PLAIN._replace(offset=128)]
        written(tmp_path, made([("general.name", "x")], tensors))
        done = run("doctor", "model.gguf", cwd=tmp_path)
        assert done.code == 1
        command = "ckptkit convert --dequantize bfloat16 model.gguf model-safe.safetensors"
        assert command in done.stdout
        assert "llama.cpp refuses the file" in done.stdout
        assert run(*command.split()[1:], cwd=tmp_path).code == 0
        assert run("doctor", "--fix", "fixed.pth", "model.gguf", cwd=tmp_path).code in (0, 1)
        state = torch.load(tmp_path / "fixed.pth", weights_only=True)
        assert {name: each.dtype for name, each in state.items()} == {
            "b.weight": torch.bfloat16, "a.weight": torch.float32,
        }  # fmt: skip

    def test_doctor_names_what_llama_cpp_refuses(self, tmp_path: Path, run: Run) -> None:
        deep, long = Entry("deep", (1, 1, 1, 1, 4), 0, bytes(16)), PLAIN._replace(name="n" * 64)
        reshaped = ("comfy.gguf.orig_shape.w", [Typed(5, n) for n in (1, 1, 1, 3, 4)])
        for tensors, version, values, said in (
            ([PLAIN], 1, [], "llama.cpp refuses the file: it has version 1."),
            ([deep], 3, [], "refuses the file: more than 4 dimensions (deep)."),
            ([long], 3, [], "refuses the file: names of more than 63 bytes (nnn"),
            ([PLAIN._replace(name="w")], 3, [reshaped], ""),
            ([PLAIN._replace(name="n" * 63)], 3, [], ""),
        ):
            written(tmp_path, made([("a", 1), *values], tensors, version=version))
            found = " ".join(run("doctor", "model.gguf", cwd=tmp_path).stdout.split())
            assert said in found
            assert ("llama.cpp refuses" in found) == bool(said)

    def test_doctor_names_the_alignment(self, tmp_path: Path, run: Run) -> None:
        TestSplit().test_alignment_of_the_first_alone(tmp_path)
        done = run("doctor", str(tmp_path))
        assert "llama.cpp and gguf-py read wrong values from it." in done.stdout
        assert "general.alignment is missing" in " ".join(done.stdout.split())

    def test_diff_compares_whole_arrays(self, tmp_path: Path, run: Run) -> None:
        words = [f"w{n}" for n in range(20)]
        written(tmp_path, made([("tokens", words)], [PLAIN]), "a.gguf")
        written(tmp_path, made([("tokens", [*words[:-1], "other"])], [PLAIN]), "b.gguf")
        assert run("diff", "a.gguf", "b.gguf", cwd=tmp_path).code == 0
        done = run("diff", "--all", "a.gguf", "b.gguf", cwd=tmp_path)
        assert done.code == 1
        assert "tokens" in done.stdout

    def test_verify_values(self, tmp_path: Path, run: Run) -> None:
        block = struct.pack("<e", float("inf")) + bytes([0x99] * 16)
        written(tmp_path, made(tensors=[Entry("w", (1, 64), 2, block + bytes(18))]))
        assert run("verify", "model.gguf", cwd=tmp_path).code == 0
        done = run("verify", "--values", "model.gguf", cwd=tmp_path)
        assert (done.code, "32 infinite of 64 elements" in done.stdout) == (1, True)

    @pytest.mark.parametrize(("number", "order"), [(9, "<"), (155, "<"), (6, ">")])
    def test_verify_names_values_that_it_cannot_read(
        self, number: int, order: str, tmp_path: Path, run: Run
    ) -> None:
        odd = Entry("odd.weight", (1, 32), number, bytes(36))
        written(tmp_path, made(tensors=[odd, PLAIN], order=order))
        done = run("verify", "--values", "model.gguf", cwd=tmp_path)
        assert done.code == 0
        assert "did not check their values: odd.weight" in " ".join(done.stdout.split())

    def test_scan_of_a_folder_names_templates(self, tmp_path: Path, run: Run) -> None:
        (tmp_path / "some").mkdir()
        written(tmp_path / "some", MODEL, "plain.gguf")
        written(tmp_path / "some", made([("tokenizer.chat_template.tools", "{{ x }}")]))
        done = run("scan", "some", cwd=tmp_path)
        assert done.code == 0
        assert "some/model.gguf: no pickles" in done.stdout
        assert "tokenizer.chat_template.tools: a chat template, 7 characters" in done.stdout
        assert "plain.gguf" not in done.stdout
        assert run("scan", "--quiet", "some", cwd=tmp_path).stdout == ""

    @pytest.mark.parametrize("character", ["x", "\0", "\U0001f600"])
    def test_json_of_long_strings(self, character: str, tmp_path: Path, run: Run) -> None:
        words = ["a", *[character * 100_000] * 8]
        written(tmp_path, made([("long", words), ("short", words[:1])], [PLAIN]))
        done = run("inspect", "--json", "model.gguf", cwd=tmp_path)
        long, short = json.loads(done.stdout)["files"][0]["values"]
        assert len(json.dumps(long)) <= 4096
        assert (long["count"], len(long["value"]), long["truncated"]) == (9, 8, True)
        assert all(words[1].startswith(each) and each for each in long["value"][1:])
        assert (short["value"], "truncated" in short) == (["a"], False)

    def test_batch_names(self, tmp_path: Path, run: Run) -> None:
        written(tmp_path, MODEL, "a.gguf")
        words = "batch convert a.gguf --into out --format safetensors --dequantize float16"
        assert run(*words.split(), cwd=tmp_path).code == 0
        assert [path.name for path in (tmp_path / "out").glob("a*")] == ["a.safetensors"]
