"""The models: shapes, and the same gradients whether activations are kept or computed again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from ckptkit.trainer.log import SavedBytes
from ckptkit.trainer.models import Cnn, Crnn, DenseNet, Generator, Mlp
from ckptkit.trainer.models.recomputing import LAYERS, UNITS, Recomputing

from .conftest import gradients, same


def stepped(
    model: nn.Module, inputs: Tensor, **how: object
) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """Bytes kept for the backward pass, gradients, and buffers after one pass; the same chance each
    time."""
    for each in model.modules():
        if isinstance(each, Recomputing):
            vars(each).update(how)
    model.zero_grad()
    for _, buffer in model.named_buffers():
        nn.init.ones_(buffer)
    torch.manual_seed(1)
    with SavedBytes(model) as saved:
        outputs = model(inputs)
    outputs.square().mean().backward()
    assert inputs.grad is None and not inputs.requires_grad
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    return saved.peak, gradients(model), buffers


def test_S15_the_cnn_is_two_convolutions_and_three_linear_layers() -> None:
    parameters = Cnn((3, 32, 32), 10).named_parameters()
    assert {name: tuple(value.shape) for name, value in parameters if "weight" in name} == {
        "conv1.weight": (6, 3, 5, 5),
        "conv2.weight": (16, 6, 5, 5),
        "fc1.weight": (120, 400),
        "fc2.weight": (84, 120),
        "fc3.weight": (10, 84),
    }


def test_S05_the_mlp_is_72_linear_layers_of_1000() -> None:
    with torch.device("meta"):
        model = Mlp((UNITS,), 100)
    layers = [tuple(each.get_parameter("weight").shape) for each in model.layers]
    assert layers == [(1000, 1000)] * (LAYERS - 1) + [(100, 1000)]


RECOMPUTED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int], float]] = {
    "mlp in 2": (lambda: Mlp((50,), 10, 0.1), (16, 50), {"segments": 2}, 0.6),
    "mlp in 5": (lambda: Mlp((50,), 10, 0.1), (16, 50), {"segments": 5}, 0.35),
    "mlp in 10": (lambda: Mlp((50,), 10, 0.1), (16, 50), {"segments": 10}, 0.3),
    "generator in 1": (lambda: Generator((3, 32, 32), 0.25), (4, 3, 32, 32), {"segments": 1}, 0.6),
    "generator in 2": (lambda: Generator((3, 32, 32), 0.25), (4, 3, 32, 32), {"segments": 2}, 0.6),
    "densenet": (lambda: DenseNet((1, 32, 32), 10, 0.5), (8, 1, 32, 32), {"memory_efficient": True}, 0.7),
    "densenet, dropout": (
        lambda: DenseNet((1, 32, 32), 10, 0.5, dropout=0.3), (8, 1, 32, 32), {"memory_efficient": True}, 0.7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECOMPUTED)
def test_S05_S06_S07_S24_recomputing_keeps_less_and_changes_nothing(name: str) -> None:
    """Dropout falls the same way, and a second pass is not counted in BatchNorm's statistics."""
    make, shape, how, part = RECOMPUTED[name]
    torch.manual_seed(0)
    model, inputs = make(), torch.rand(shape) * 2 - 1
    kept, expected, statistics = stepped(model, inputs)
    less, found, counted = stepped(model, inputs, **how)
    assert less < part * kept
    assert same(found, expected)
    assert same(counted, statistics)
    if name.endswith("dropout"):  # another dropout mask the second time
        assert not same(stepped(model, inputs, **how, preserve_rng=False)[1], expected)


def test_S05_the_first_layer_of_the_mlp_gets_a_gradient_worth_the_name() -> None:
    found = stepped(Mlp((50,), 10, width=0.1), torch.randn(16, 50))[1]
    assert found["layers.0.weight"].norm() > 1e-3 * found["layers.71.weight"].norm()


def test_S06_the_reentrant_kind_loses_gradients_and_ours_does_not() -> None:
    """The reason for dummy layers and arguments in older code."""
    model, inputs = Mlp((50,), 10, width=0.05), torch.randn(4, 50)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        scores = checkpoint_sequential(model.layers, 2, inputs, use_reentrant=True)  # type: ignore[no-untyped-call]
    scores.sum().backward()
    assert [each.grad is None for each in model.parameters()] == [True] * LAYERS + [False] * LAYERS
    stepped(model, inputs, segments=2)  # finds a gradient for each


def test_S07_the_generator_paints_images_of_the_same_shape() -> None:
    images = torch.rand(2, 3, 32, 32)
    assert Generator((3, 32, 32), 0.25)(images).shape == images.shape


def test_S17_crnn_keeps_the_batch_in_front() -> None:
    """[32, ...] in halves of 16 comes back as [32, 65, 5530]; with the time in front it would be
    [130, 16, 5530]."""
    model = Crnn((1, 32, 260), 5529, 0.25).eval()
    lines = torch.randn(32, 1, 32, 260)
    with torch.no_grad():
        halves = [model(half) for half in lines.chunk(2)]
        assert [tuple(half.shape) for half in halves] == [(16, 65, 5530)] * 2
        torch.testing.assert_close(torch.cat(halves), model(lines), atol=1e-5, rtol=0)
    assert torch.cat([half.transpose(0, 1) for half in halves]).shape == (130, 16, 5530)
