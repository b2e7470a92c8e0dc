"""Weights that libraries quantized, dequantized byte for byte as the libraries do it (a NaN equals
any NaN)."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit import quantized
from ckptkit.compute.operation import stream
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import TensorError
from tests.conftest import Run
from tests.quantized.made import Row, read

FOLDER = Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere")) / "quantized"
CASES = sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []
PICKLED = [name for name in CASES if (FOLDER / name / "model.pth").exists()]
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
pytestmark = pytest.mark.skipif(
    not CASES, reason="CKPTKIT_VECTORS names no folder with vectors of quantized weights"
)


def is_nan(dtype: str, data: bytes) -> np.ndarray:
    is_half = dtype == "BF16"
    bits = np.frombuffer(data, "<u2" if is_half else "<u4").astype("<u4")
    return np.isnan((bits << 16 if is_half else bits).view("<f4"))


def assert_equal(found: Row, expected: Row, name: str) -> None:
    assert found[:2] == expected[:2], name
    if found[2] != expected[2]:
        ours, theirs = is_nan(found[0], found[2]), is_nan(found[0], expected[2])
        unit = "<u2" if found[0] == "BF16" else "<u4"
        differ = np.frombuffer(found[2], unit) != np.frombuffer(expected[2], unit)
        assert not (differ & ~(ours & theirs)).any(), name


def assert_expected(found: dict[str, Row], case: str, short: str) -> None:
    expected = read(FOLDER / case / "expected" / f"{short}.safetensors")
    assert found.keys() >= expected.keys()
    for name, theirs in expected.items():
        assert_equal(found[name], theirs, name)


def check(source: Path, case: str, folder: Path, short: str = "fp32", prefix: str = "") -> None:
    """Dequantize a file, and compare the tensors with those of the library."""
    out = folder / "dequantized.safetensors"
    ckptkit.save(ckptkit.dequantize(ckptkit.open(source), DTYPES[short]), out)
    found = {name.removeprefix(prefix): each for name, each in read(out).items()}
    assert_expected(found, case, short)
    assert not quantized.find(ckptkit.open(out))  # nothing of it is left


@pytest.mark.parametrize("short", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_every_byte_is_that_of_the_library(case: str, short: str, tmp_path: Path) -> None:
    check(FOLDER / case, case, tmp_path, short)


@pytest.mark.parametrize("case", PICKLED)
def test_pickled_subclasses_are_read_like_their_files(case: str, tmp_path: Path) -> None:
    source = FOLDER / case / "model.pth"
    check(source, case, tmp_path)
    with pytest.raises(TensorError, match="subclass") as raised:  # safetensors cannot hold them
        ckptkit.save(source, tmp_path / "out.safetensors")
    assert "dequantize converts quantized tensors" in str(raised.value.hint)


@pytest.mark.parametrize("case", CASES)
def test_any_part_is_a_part_of_the_whole(case: str) -> None:
    numbers = random.Random(case)
    found = quantized.find(ckptkit.open(FOLDER / case))
    for group in found.groups:
        for dtype in DTYPES.values():
            record = group.tensor(BY_NAME[dtype]).storage.record  # type: ignore[union-attr]
            extent = record.locate()
            whole = b"".join(stream(extent))
            assert len(whole) == extent.length
            for _ in range(6):
                start, stop = sorted(numbers.randrange(extent.length + 1) for _ in range(2))
                assert b"".join(stream(extent, start, stop)) == whole[start:stop]


def test_the_command_line_writes_shards_and_a_configuration_that_says_nothing(
    tmp_path: Path, run: Run
) -> None:
    case = FOLDER / "fp8-deepseek"
    done = run("convert", case, tmp_path / "out", "--dequantize", "--shard-size", "100kB")
    assert done.code == 0, done.stderr
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    places = index["weight_map"]
    assert not any("scale" in name for name in places) and len(set(places.values())) > 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    before = json.loads((case / "config.json").read_text())
    del before["quantization_config"]
    assert config == before
    assert "2 weights: fp8 128x128 -> bfloat16" in done.stdout and "weight_scale_inv" in done.stdout
    shards = [read(path) for path in (tmp_path / "out").glob("*.safetensors")]
    found = {name: row for shard in shards for name, row in shard.items()}
    assert_expected(found, "fp8-deepseek", "bf16")


@pytest.mark.parametrize(
    ("case", "name", "dtype"),
    [
        ("gptq-int8", "self_attn.q_proj", "float16"),
        ("fp8-fbgemm", "mlp.gate_proj", "bfloat16"),
    ],
)
def test_without_a_dtype_the_configuration_decides(case: str, name: str, dtype: str) -> None:
    weights = ckptkit.dequantize(ckptkit.open(FOLDER / case)).weights
    assert weights[f"model.layers.0.{name}.weight"].dtype.name == dtype


def test_names_of_wrappers_are_not_in_the_qmap_of_quanto(tmp_path: Path) -> None:
    case = FOLDER / "quanto-qint4"
    (tmp_path / "quanto_qmap.json").write_bytes((case / "quanto_qmap.json").read_bytes())
    wrapped = ckptkit.add_prefix(ckptkit.open(case), "module.")
    ckptkit.save(wrapped, tmp_path / "model.safetensors")
    check(tmp_path / "model.safetensors", case.name, tmp_path, prefix="module.")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_the_config_beside_a_compressed_file_is_read(suffix: str, tmp_path: Path) -> None:
    case = FOLDER / "gptq-int2"
    (tmp_path / "config.json").write_bytes((case / "config.json").read_bytes())
    ckptkit.save(ckptkit.open(case), plain := tmp_path / f"model{suffix}")
    packed = tmp_path / f"model{suffix}.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    check(packed, case.name, tmp_path)
