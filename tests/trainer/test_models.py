"""The models: shapes, and the same gradients whether activations are kept or computed again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from ckptkit.trainer.log import SavedBytes
from ckptkit.trainer.models import Cnn, Crnn, DenseNet, Generator, Mlp
from ckptkit.trainer.models.recomputing import LAYERS, UNITS, DenseLayer

from .conftest import gradients, same


def stepped(model: nn.Module, inputs: Tensor) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """Bytes kept for the backward pass, gradients, and buffers after one pass; the same chance each
    time."""
    torch.manual_seed(1)
    with SavedBytes(model) as saved:
        outputs = model(inputs)
    outputs.square().mean().backward()
    return (
        saved.peak,
        gradients(model),
        {name: each.clone() for name, each in model.named_buffers()},
    )


def test_S15_the_cnn_is_two_convolutions_and_three_linear_layers() -> None:
    shapes = {
        name: tuple(value.shape)
        for name, value in Cnn((3, 32, 32), 10).named_parameters()
        if "weight" in name
    }
    assert shapes == {
        "conv1.weight": (6, 3, 5, 5),
        "conv2.weight": (16, 6, 5, 5),
        "fc1.weight": (120, 400),
        "fc2.weight": (84, 120),
        "fc3.weight": (10, 84),
    }


def test_S05_the_mlp_is_72_linear_layers_of_1000() -> None:
    with torch.device("meta"):
        model = Mlp((UNITS,), 100)
    layers = [
        (each.in_features, each.out_features)
        for each in model.layers
        if isinstance(each, nn.Linear)
    ]
    assert layers == [(1000, 1000)] * (LAYERS - 1) + [(1000, 100)]


def test_S05_segments_save_activations_and_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    model, inputs = Mlp((50,), 10, width=0.1), torch.randn(16, 50)
    kept, expected, _ = stepped(model, inputs)
    for segments in (2, 5, 10):
        model.zero_grad()
        model.segments = segments
        less, found, _ = stepped(model, inputs)
        assert less < kept
        assert same(found, expected)
        kept = less


def test_S05_the_first_layer_of_the_mlp_gets_a_gradient_worth_the_name() -> None:
    model = Mlp((50,), 10, width=0.1)
    found = stepped(model, torch.randn(16, 50))[1]
    assert found["layers.0.weight"].norm() > 1e-3 * found["layers.71.weight"].norm()


def test_S06_the_reentrant_kind_loses_gradients_and_ours_does_not() -> None:
    """The reason for dummy layers and arguments in older code."""
    model, inputs = Mlp((50,), 10, width=0.05), torch.randn(4, 50)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        scores = checkpoint_sequential(model.layers, 2, inputs, use_reentrant=True)  # type: ignore[no-untyped-call]
    scores.sum().backward()
    assert [each.grad is None for each in model.parameters()] == [True] * LAYERS + [False] * LAYERS
    model.zero_grad()
    model.segments = 2
    stepped(model, inputs)  # finds a gradient for each


def test_S06_dropout_falls_the_same_way_when_it_is_computed_again() -> None:
    torch.manual_seed(0)
    model, images = DenseNet((1, 16, 16), 10, 0.5, dropout=0.3), torch.randn(8, 1, 16, 16)
    _, expected, _ = stepped(model, images)
    model.zero_grad()
    efficient(model)
    assert same(stepped(model, images)[1], expected)
    model.zero_grad()
    efficient(model, preserve_rng=False)  # another dropout mask the second time
    assert not same(stepped(model, images)[1], expected)


def efficient(model: DenseNet, preserve_rng: bool = True) -> None:
    for each in model.modules():
        if isinstance(each, DenseLayer):
            each.memory_efficient, each.preserve_rng = True, preserve_rng


@pytest.mark.parametrize("segments", [1, 2])
def test_S07_the_generator_uses_both_kinds(segments: int) -> None:
    torch.manual_seed(0)
    model, images = Generator((3, 32, 32), 0.25), torch.rand(4, 3, 32, 32) * 2 - 1
    kept, expected, _ = stepped(model, images)
    model.zero_grad()
    model.segments = segments
    less, found, _ = stepped(model, images)
    assert less < 0.6 * kept
    assert same(found, expected)
    assert images.grad is None
    assert not images.requires_grad
    assert model(images).shape == images.shape


def test_S17_crnn_keeps_the_batch_in_front() -> None:
    """[32, ...] in halves of 16 comes back as [32, 65, 5530]; with the time in front it would be
    [130, 16, 5530]."""
    model = Crnn((1, 32, 260), 5529, 0.25).eval()
    lines = torch.randn(32, 1, 32, 260)
    with torch.no_grad():
        halves = [model(half) for half in lines.chunk(2)]
        assert [tuple(half.shape) for half in halves] == [(16, 65, 5530)] * 2
        joined = torch.cat(halves)
        assert joined.shape == (32, 65, 5530)
        assert torch.allclose(joined, model(lines), atol=1e-5)
    assert torch.cat([half.transpose(0, 1) for half in halves]).shape == (130, 16, 5530)


def test_S24_bottlenecks_computed_again_keep_less_and_change_nothing() -> None:
    torch.manual_seed(0)
    model, images = DenseNet((1, 32, 32), 10, 0.5), torch.randn(8, 1, 32, 32)
    before = {name: each.clone() for name, each in model.named_buffers()}
    kept, expected, statistics = stepped(model, images)
    assert not same(before, statistics)
    model.zero_grad()
    model.load_state_dict(before, strict=False)
    efficient(model)
    less, found, counted = stepped(model, images)
    assert less < 0.7 * kept
    assert same(found, expected)
    assert same(counted, statistics)  # a second pass has not been counted
