"""Quantized weights that are never guessed: each reason has a file, made by hand, and a word that
names it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit import quantized
from ckptkit.core.dtypes import GGML
from ckptkit.core.errors import CollisionError, UnsupportedError, UsageError
from ckptkit.quantized.fp8 import METHODS, OTHERS
from ckptkit.quantized.group import QuantizedWeight
from tests.conftest import Run
from tests.formats.gguf_files import Entry
from tests.formats.gguf_files import made as of_gguf
from tests.formats.parallel.old_forms import Wrapped, save
from tests.quantized.made import ones, row, write
from tests.quantized.refusals import BLOCKS, FP8, GPTQ, REFUSALS, L, made, method, without
from tests.reached import is_called, modules, unreached, watch

GPTQ_32 = method("gptq", bits=4, group_size=32)


def test_each_family_that_is_not_read_has_a_file() -> None:
    named = {each.name.removeprefix("compressed-tensors ") for each in OTHERS} | {*METHODS.values()}
    assert named <= REFUSALS.keys()


def test_each_refusal_of_the_package_has_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = watch(monkeypatch, (QuantizedWeight, "refused"))
    quantized.find(ckptkit.open(pickled(tmp_path)))
    for number, refusal in enumerate(REFUSALS.values()):
        (tmp_path / str(number)).mkdir()
        quantized.find(ckptkit.open(made(refusal, tmp_path / str(number))))
    for number in GGUF:
        quantized.find(ckptkit.open(gguf(tmp_path, number)))
    for name in ("refused", "unfit"):
        assert unreached(modules(quantized), found, is_called(name)) == []


# Types of GGUF: the order of bytes, and a word of the reason.
GGUF = {155: ("<", "155 is unknown"), 31: ("<", "interleaved"), 15: ("<", "intermediate results"),
        16: (">", "big-endian")}  # fmt: skip


def gguf(folder: Path, number: int) -> Path:
    dtype = GGML.get(number)
    shape, data = ((2, dtype.block), bytes(2 * dtype.itemsize)) if dtype else ((2, 3), bytes(64))
    path = folder / f"{number}.gguf"
    path.write_bytes(of_gguf((), [Entry("w", shape, number, data)], order=GGUF[number][0]))
    return path


@pytest.mark.parametrize("number", GGUF)
def test_types_of_gguf(run: Run, tmp_path: Path, number: int) -> None:
    """They are shown; who needs their numbers gets the reason, and the other tensors by name."""
    path, out = gguf(tmp_path, number), tmp_path / "out.safetensors"
    reason = GGUF[number][1]
    shown = run("inspect", path)
    assert (shown.code, reason in shown.stdout) == (0, True)
    done = run("convert", path, out, "--dequantize", "float32")
    assert done.code == 3
    assert reason in done.stderr
    assert "--drop" in done.stderr
    assert not out.exists()


def pickled(folder: Path) -> Path:
    """A subclass of torchao's that says another shape than its parts make."""
    parts = {"qdata": torch.zeros(8, 16, dtype=torch.uint8), "scale": torch.ones(8, 1)}
    parts["scale"] = parts["scale"].to(torch.float8_e8m0fnu)
    state = {**parts, "block_size": 32, "elem_dtype": torch.float4_e2m1fn_x2}
    where = "torchao.prototype.mx_formats.mx_tensor"
    save({"fc.weight": Wrapped(where, "MXTensor", torch.zeros(8, 16), state)}, folder / "model.pth")
    return folder / "model.pth"


def test_a_pickled_weight_of_another_shape_than_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="which the pickle declares"):
        ckptkit.dequantize(ckptkit.open(pickled(tmp_path)), "bfloat16")


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("act-order of compressed-tensors", "compressed-tensors 0.17"),
        ("sparse-bitmask", "compressed-tensors 0.10"),
        ("sparse-24-bitmask", "compressed-tensors 0.10"),
    ],
)
def test_a_refusal_names_what_reads_it(reason: str, hint: str, tmp_path: Path, run: Run) -> None:
    path = made(REFUSALS[reason], tmp_path)
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize")
    assert done.code == 3 and REFUSALS[reason].word in done.stderr and hint in done.stderr
    assert hint[1:] in run("doctor", path).stdout and not (tmp_path / "out.safetensors").exists()


def test_a_shard_alone_is_not_dequantized(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "model-00001-of-00002.safetensors", without(FP8, "_inv"), config=BLOCKS)
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize")
    assert done.code == 3 and not (tmp_path / "out.safetensors").exists()
    assert "shard" in done.stderr


@pytest.mark.parametrize("reason", REFUSALS)
def test_it_is_refused_with_its_reason(reason: str, tmp_path: Path) -> None:
    ck = ckptkit.open(made(REFUSALS[reason], tmp_path))
    with pytest.raises(UnsupportedError, match=REFUSALS[reason].word):
        ckptkit.dequantize(ck, "bfloat16")
    with pytest.raises(UsageError, match="quantized as"):  # nor is it cast
        ckptkit.cast(ck, "float32")
    assert ckptkit.cast(ck, {"*norm*": "float32"}).notes  # other tensors are


@pytest.mark.parametrize("reason", ["the size of blocks", "AQLM", "fp8 without its scale"])
def test_it_is_shown_and_explained(reason: str, tmp_path: Path, run: Run) -> None:
    path = made(REFUSALS[reason], tmp_path)
    done = run("inspect", path)
    assert done.code == 0
    assert "not dequantized" in done.stdout and REFUSALS[reason].word in done.stdout
    done = run("doctor", path)
    assert done.code == 1 and REFUSALS[reason].word in done.stdout
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize", "bfloat16")
    assert done.code == 3 and not (tmp_path / "out.safetensors").exists()


def test_what_is_not_quantized_is_said_and_nothing_is_written(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "model.safetensors", {"fc.weight": ones([4, 4])})
    done = run("convert", path, tmp_path / "out.safetensors", "--dequantize")
    assert done.code == 2 and "has no quantized" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_codes_that_are_only_a_cast_are_cast(tmp_path: Path) -> None:
    tensors = {"fc.weight": row("F8_E4M3", [4, 4]), "norm.scale": ones([4])}
    ck = ckptkit.open(write(tmp_path / "model.safetensors", tensors))
    assert not quantized.find(ck)
    assert ckptkit.cast(ck, "bfloat16").weights["fc.weight"].dtype.name == "bfloat16"


@pytest.mark.parametrize("command", ["average", "join"])
def test_codes_are_not_mixed(command: str, tmp_path: Path, run: Run) -> None:
    fp8 = write(tmp_path / "a" / "model.safetensors", FP8, config=BLOCKS)
    gptq = write(tmp_path / "b" / "model.safetensors", GPTQ, config=GPTQ_32)
    done = run(command, fp8, fp8 if command == "average" else gptq, tmp_path / "out.safetensors")
    assert done.code == 2 and "fp8-block" in done.stderr and "--dequantize" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_a_weight_and_its_codes_are_not_merged(tmp_path: Path) -> None:
    codes = ckptkit.open(write(tmp_path / "a.safetensors", GPTQ))
    floats = ckptkit.open(write(tmp_path / "b.safetensors", {f"{L}.weight": ones([16, 64])}))
    with pytest.raises(UsageError, match="only one checkpoint"):
        ckptkit.join([codes, floats], last_wins=True)
    other = ckptkit.open(write(tmp_path / "c.safetensors", {"head.weight": ones([2, 2])}))
    assert len(ckptkit.join([codes, other]).weights) == 5


def test_averaged_codes_are_not_taken_out(tmp_path: Path) -> None:
    ck = ckptkit.open(write(tmp_path / "a.safetensors", FP8, config=BLOCKS))
    with pytest.raises(UsageError, match="fp8-block"):
        ckptkit.ema(ckptkit.wrap(ck, "ema", {"model": None}).with_key("ema"))


def test_a_name_that_is_taken_is_a_collision(tmp_path: Path) -> None:
    tensors = {**GPTQ, f"{L}.weight": ones([16, 64])}
    path = write(tmp_path / "model.safetensors", tensors, config=GPTQ_32)
    with pytest.raises(CollisionError, match="both"):
        ckptkit.dequantize(ckptkit.open(path))


def test_other_tensors_of_gguf(run: Run, tmp_path: Path) -> None:
    """The command of the hint leaves out the tensor whose type is not known."""
    tensors = [Entry("odd", (2, 3), 155, bytes(64)), Entry("w", (2, 32), 8, bytes(68))]
    (tmp_path / "m.gguf").write_bytes(of_gguf((), tensors))
    done = run("convert", "m.gguf", "x.safetensors", "--dequantize", cwd=tmp_path)
    assert done.code == 3 and "its type 155 is unknown" in done.stderr
    assert "`ckptkit convert m.gguf m.safetensors --dequantize bfloat16 --drop odd`" in done.stderr
    done = run("convert", "m.gguf", "x.safetensors", "--dequantize", "--drop", "odd", cwd=tmp_path)
    assert done.code == 0
    assert list(ckptkit.open(tmp_path / "x.safetensors").weights) == ["w"]
