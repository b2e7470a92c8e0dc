"""Dequantized weights may be many times as large as their file, and are made in little memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ckptkit
from ckptkit.publish.copying import WriteTask, cut
from tests.narrow import narrow
from tests.quantized.made import row, write

ROWS, COLUMNS = 2048, 16384  # of codes of 4 bits: 16 MiB, which become 128 MiB of float32


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak of the memory")
def test_codes_of_4_bits_become_float32_in_little_memory(tmp_path: Path) -> None:
    shape = [1, ROWS, COLUMNS // 32, 16]
    blocks = row("U8", shape, bytes(range(256)) * (ROWS * COLUMNS // 512))
    scales = row("U8", shape[:-1], b"\x7f" * (ROWS * COLUMNS // 32))
    path = write(tmp_path / "model.safetensors", {"w.blocks": blocks, "w.scales": scales})
    out = tmp_path / "out.safetensors"
    done = narrow("convert", path, out, "--dequantize", "float32", "--quiet")
    assert done.code == 0, done.stderr
    assert out.stat().st_size > 4 * ROWS * COLUMNS
    assert done.memory < 100 << 20


def test_the_matrices_of_a_tensor_are_not_cut_between_threads(tmp_path: Path) -> None:
    experts = row("U8", [5, 64, 3, 16]), row("U8", [5, 64, 3])
    tensors = {"w_blocks": experts[0], "w_scales": experts[1]}
    path = write(tmp_path / "model.safetensors", tensors)
    dequantized = ckptkit.dequantize(ckptkit.open(path), "bfloat16")
    (tensor,) = dequantized.weights.values()
    extent = tensor.storage.record.locate()
    matrix = 64 * 96 * 2
    for size, step in ((matrix - 100, matrix), (2 * matrix - 100, 2 * matrix), (1000, 1000)):
        sizes = [task.size for task in cut(WriteTask("out", 0, (extent,)), size)]
        assert sum(sizes) == 5 * matrix
        assert set(sizes[:-1]) == {step}
