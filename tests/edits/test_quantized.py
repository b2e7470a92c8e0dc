"""Quantised weights become what torch's ``dequantize`` makes of them, and get back the names that
they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

import ckptkit
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CollisionError, TensorError, UsageError
from ckptkit.core.tree import Global, Object
from ckptkit.edits.quantized import dequantize
from tests.conftest import Corpus
from tests.edits.trees import lines, storage, tensor
from tests.formats.conformance import elements, elements_of
from tests.formats.torchscript.scripts import QUIET, Layers, by_torch, quantized, script

pytestmark = QUIET
QTENSOR = Global("torch._utils", "_rebuild_qtensor")
INT8 = torch.quantize_per_tensor(torch.arange(6.0).reshape(2, 3), 0.5, 3, torch.qint8)


def saved(value: Any, path: Path) -> Checkpoint:
    torch.save(value, path)
    return ckptkit.open(path)


def check_floats(ck: Checkpoint, want: dict[str, torch.Tensor]) -> None:
    """Names in order, dtypes, shapes and bytes."""
    assert list(ck.weights) == list(want)
    for name, each in want.items():
        ours, expected = ck.weights[name], each.dequantize() if each.is_quantized else each.detach()
        assert (ours.dtype.name, ours.shape) == (
            str(expected.dtype).removeprefix("torch."),
            tuple(expected.shape),
        )
        assert elements_of(ours) == elements(expected), name


def test_per_tensor_and_per_channel(tmp_path: Path) -> None:
    base = torch.randn(4, 3)
    scales, zeros = torch.rand(4) + 0.1, torch.zeros(4)
    state = {
        "int8": torch.quantize_per_tensor(base, 0.1, 3, torch.qint8),
        "uint8": torch.quantize_per_tensor(base, 0.1, 3, torch.quint8),
        "int32": torch.quantize_per_tensor(base, 0.1, 3, torch.qint32),
        "channels": torch.quantize_per_channel(base, scales.double(), zeros.long(), 0, torch.qint8),
        "floats": torch.quantize_per_channel(base, scales, zeros, 0, torch.quint4x2),
        "plain": base,
    }
    ck = dequantize(saved(state, tmp_path / "made.pth"))
    check_floats(ck, state)
    assert "dequantized 2 tensors: qint8 -> float32" in ck.notes and not ck.warnings
    assert len(ck.notes) == 4


def test_everywhere_and_once(tmp_path: Path) -> None:
    """Not only among the weights; what is the same tensor twice stays so."""
    root = {"model": {"a": INT8, "tied": INT8}, "ema": [INT8, 3]}
    ck = dequantize(saved(root, tmp_path / "made.pth"))
    check_floats(ck, root["model"])  # type: ignore[arg-type]
    assert ck.weights["a"] is ck.weights["tied"] is ck.root["ema"][0]


def test_nothing_to_do() -> None:
    with pytest.raises(UsageError, match="no quantized weights"):
        dequantize(Checkpoint({"w": tensor()}))


# Packed layers


def floats(module: Any) -> dict[str, torch.Tensor]:
    """The weights of quantised `Layers` as they were named before."""
    return {
        "conv.weight": module.conv.weight(), "conv.bias": module.conv.bias(), "fc.weight": module.fc.weight(),
        "fc.bias": module.fc.bias(),
    }  # fmt: skip


def test_a_script(tmp_path: Path) -> None:
    module = quantized()
    path = script(module, tmp_path / "made.pt")
    ck = dequantize(ckptkit.open(path))
    check_floats(ck, by_torch(path) | floats(module))
    assert "unpacked 2 layers: 'conv', 'fc'" in ck.notes and "plain state_dict" in lines(ck)
    assert set(Layers().state_dict()) <= set(ck.weights)


def test_an_eager_state_dict(tmp_path: Path) -> None:
    """The names of the layers in their place; the dtype that stood beside them goes."""
    module = quantized()
    state = module.state_dict()
    packed = "fc._packed_params._packed_params"
    names = [name for name in state if not name.startswith("fc._packed_params")]
    ck = dequantize(saved(state, tmp_path / "made.pth"))
    want = {name: state[name] for name in names} | floats(module)
    check_floats(ck, {name: want[name] for name in [*names, "fc.weight", "fc.bias"]})
    assert list(ck.root) == list(ck.weights) and packed not in ck.root
    assert list(ck.root.state["_metadata"]) == list(state._metadata)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_dynamic_layers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Layers of half precision pack plain floats, which torch gives back as float32."""
    module: Any = quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 3)), {nn.Linear}, dtype=dtype
    )
    ck = dequantize(ckptkit.open(script(module, tmp_path / "made.pt")))
    check_floats(ck, {"0.weight": module[0].weight(), "0.bias": module[0].bias()})


def test_layers_in_one_place_keep_their_numbers(tmp_path: Path) -> None:
    """An LSTM packs its input and its hidden weights together."""
    module: Any = quantization.quantize_dynamic(nn.Sequential(nn.LSTM(3, 2)), {nn.LSTM})
    ck = dequantize(ckptkit.open(script(module[0], tmp_path / "made.pt")))
    place = "_all_weight_values.0.param.4"
    assert list(ck.weights) == [
        f"{place}.{number}.{name}" for number in (0, 1) for name in ("weight", "bias")
    ]
    assert [ck.weights[f"{place}.{number}.weight"].shape for number in (0, 1)] == [(8, 3), (8, 2)]


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.a = self.b = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


def test_a_tied_layer_has_both_names(tmp_path: Path) -> None:
    module: Any = quantization.quantize_dynamic(Twice(nn.Linear(3, 3)), {nn.Linear})
    module.b = module.a
    ck = dequantize(ckptkit.open(script(module, tmp_path / "made.pt")))
    assert list(ck.weights) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert ck.weights["a.weight"] is ck.weights["b.weight"]


def test_casts_follow(tmp_path: Path) -> None:
    ck = ckptkit.cast(dequantize(saved({"w": INT8}, tmp_path / "made.pth")), "float16")
    assert elements_of(ck.weights["w"]) == elements(INT8.dequantize().half())


def test_embeddings(tmp_path: Path) -> None:
    module = torch.ao.nn.quantized.Embedding(10, 4)
    ck = dequantize(ckptkit.open(script(nn.Sequential(module), tmp_path / "made.pt")))
    check_floats(ck, {"0.weight": module.weight()})


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    """The place where it is packed tells it apart, unless that is taken too."""
    place = "fc._packed_params._packed_params"
    state = {"fc.weight": torch.ones(1), place: (INT8, None)}
    ck = dequantize(saved(state, tmp_path / "made.pth"))
    check_floats(ck, {"fc.weight": torch.ones(1), f"{place}.weight": INT8})
    with pytest.raises(CollisionError, match=r"_packed_params\.weight"):
        dequantize(saved(state | {f"{place}.weight": torch.ones(1)}, tmp_path / "made.pth"))


def test_other_tuples_stay(tmp_path: Path) -> None:
    root = {"w": torch.ones(1), "pair": (INT8, torch.ones(1)), "x._packed_params": (INT8, INT8)}
    ck = dequantize(saved(root, tmp_path / "made.pth"))
    assert (
        list(ck.weights) == ["w"]
        and [each.dtype.name for each in ck.root["pair"]] == ["float32"] * 2
    )
    assert len(ck.root["x._packed_params"]) == 2


def quantised(*scheme: Any) -> Object:
    """A call that makes a tensor of two qint8."""
    from ckptkit.core.dtypes import BY_NAME
    from ckptkit.core.tensor import Tensor

    made = Tensor(storage(b"\1\2"), BY_NAME["qint8"], (2,), (1,))
    return Object(QTENSOR, (None, 0, (2,), (1,), scheme, False, None), tensor=made)


def test_other_schemes_stay() -> None:
    odd = quantised(Global("torch", "per_tensor_symmetric"), 0.5)
    ck = dequantize(
        Checkpoint({"odd": odd, "even": quantised(Global("torch", "per_tensor_affine"), 0.5, 0)})
    )
    assert [each.dtype.name for each in ck.weights.values()] == ["qint8", "float32"]
    assert "the quantization is not affine: 1 quantized tensor" in lines(ck)


@pytest.mark.parametrize("scheme", [("0.5", 0), (0.5, 1 << 40), (None, None), (0.5, 0.5)])
def test_hostile_schemes_are_refused(scheme: tuple[Any, ...]) -> None:
    with pytest.raises(TensorError):
        dequantize(Checkpoint({"w": quantised(Global("torch", "per_tensor_affine"), *scheme)}))


def test_hostile_channels_are_refused() -> None:
    affine = Global("torch", "per_channel_affine")
    for scales, zeros, axis, said in (
        (tensor(3), tensor(3), 0, "."),
        (tensor(2), tensor(2), 1, "."),
        (tensor(2), tensor(2), "0", "with axis .*0.*, not an integer"),
    ):
        with pytest.raises(TensorError, match=said):
            dequantize(Checkpoint({"w": quantised(affine, scales, zeros, axis)}))


def test_corpus(corpus: Corpus) -> None:
    """Each packed layer has a weight and a bias, named as the layer is."""
    ck = dequantize(ckptkit.open(corpus / "silero-vad__2021-02_model_micro.jit"))
    assert len(ck.weights) == 88
    assert {"encoder.1.linear1.weight", "encoder.1.attention.QKV.bias"} <= set(ck.weights)
    assert {each.dtype.name for each in ck.weights.values()} == {"float32", "int64"}


def test_written(tmp_path: Path) -> None:
    """torch loads the same from the copy as from the original."""
    module = quantized()
    ck = dequantize(saved(module.state_dict(), tmp_path / "made.pth"))
    ckptkit.save(ck, tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    for name, each in floats(module).items():
        assert torch.equal(loaded[name], each.detach().dequantize())
