"""What people write first in Python: it works, or the error names the right call."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit


@pytest.fixture
def net(tmp_path: Path) -> ckptkit.Checkpoint:
    state = {"conv.weight": torch.ones(2, 3), "conv.bias": torch.zeros(2)}
    torch.save(state, tmp_path / "net.pth")
    return ckptkit.open(tmp_path / "net.pth")


def test_counts_as_in_torch(net: ckptkit.Checkpoint) -> None:
    tensor = net.weights["conv.weight"]
    assert tensor.numel == tensor.numel() == 6
    assert len(net) == 2 and bool(net) and bool(ckptkit.open({}))


def test_names_by_a_function(net: ckptkit.Checkpoint) -> None:
    assert list(ckptkit.rename(net, str.upper).weights) == ["CONV.WEIGHT", "CONV.BIAS"]


def test_map_with_the_name(net: ckptkit.Checkpoint, tmp_path: Path) -> None:
    def doubled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2 if name.endswith("weight") else tensor

    ckptkit.save(net.map(doubled), tmp_path / "new.pth")
    assert torch.equal(torch.load(tmp_path / "new.pth")["conv.weight"], torch.full((2, 3), 2.0))


def test_sizes_as_text(net: ckptkit.Checkpoint, tmp_path: Path) -> None:
    done = ckptkit.save(net, tmp_path / "shards", shard_size="24B")
    assert len(list(Path(done.path).glob("*.safetensors"))) == 2
    with pytest.raises(ckptkit.CkptkitError, match="shard_size"):
        ckptkit.save(net, tmp_path / "others", shard_size="many")


def saved(net: ckptkit.Checkpoint) -> io.BytesIO:
    torch.save(ckptkit.load(net), file := io.BytesIO())
    return file


def test_the_error_shows_the_value() -> None:
    with pytest.raises(
        ckptkit.CkptkitError, match=r"density: expected a list of numbers, got 0\.5"
    ):
        ckptkit.merge([{}, {}], method="ties", density=0.5)  # type: ignore[arg-type]
    with pytest.raises(ckptkit.CkptkitError, match="numbers and mappings, got 'many'"):
        ckptkit.merge([{}, {}], method="ties", density=["many"])


GUESSES: list[tuple[Callable[[Any], object], str]] = [
    (lambda net: net.weights.__setitem__("conv.bias", 1), "ck.with_value(path, tensor)"),
    (lambda net: net.weights.__delitem__("conv.bias"), "ck.without(path)"),
    (lambda net: net.__setitem__("epoch", 3), "ck.with_value(path, tensor)"),
    (lambda net: net.__delitem__("conv.bias"), "ck.without(path)"),
    (lambda net: ckptkit.average(net, "x.pth"), "pass one list of them"),  # type: ignore[arg-type]
    (lambda net: ckptkit.merge([net], method="task", density="x.pth"), "pass one list of them"),  # type: ignore[arg-type]
    (lambda net: ckptkit.save(ckptkit.recover(saved(net)), "x.pth"), "attribute checkpoint"),  # type: ignore[arg-type]
    (lambda net: ckptkit.convert(net, "x.pth", dequantize="bf16"), "ckptkit.dequantize)"),
    (lambda net: ckptkit.convert(net, "x.pth", drop="conv.*"), "drop='head.*'"),
    (lambda net: ckptkit.save(net, io.StringIO()), "open(path, 'wb') returns a binary file object"),  # type: ignore[arg-type]
    (lambda net: ckptkit.open(net, "model"), "key='model'"),  # type: ignore[arg-type]
    (lambda net: ckptkit.save(net, "x.pth", no_extras=True), "extras=False"),
    (lambda net: ckptkit.convert(net, "x.pth", cast="fp16"), "ckptkit.cast(ck, 'float16')"),
    (lambda net: ckptkit.diff(net, torch.nn.Linear), "pass an instance: Linear(...)"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("guess", "call"), GUESSES, ids=[call for _, call in GUESSES])
def test_the_error_names_the_call(
    guess: Callable[[Any], object], call: str, net: ckptkit.Checkpoint
) -> None:
    with pytest.raises(ckptkit.CkptkitError) as caught:
        guess(net)
    assert call in (caught.value.hint or "")
