"""Computing the loss inside or outside of DataParallel, and its memory on the first device.

A model with two outputs, a batch split over two devices, and four ways to the same gradients:

- gathered: outputs and loss on the first device (``--parallel dp``);
- balanced: a loss on each device (``--parallel dp-balanced``); several outputs are taken apart by
  ``zip(*outputs)``;
- inside forward: the replicas return losses, and only these are gathered;
- on the CPU: all outputs are gathered there, and the loss is computed there.

``python -m ckptkit.trainer.examples.losses``; without two GPUs the split is simulated on one
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

BATCH, FEATURES, CLASSES = 64, 32, 1000
Outputs = tuple[Tensor, Tensor]


class TwoHeads(nn.Module):
    """Scores of classes, and the inputs again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, FEATURES)
        self.scores = nn.Linear(FEATURES, CLASSES)
        self.again = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: Tensor) -> Outputs:
        features = self.body(inputs).relu()
        return self.scores(features), self.again(features)


class WithLoss(nn.Module):
    """A model whose forward pass computes the loss: one number for each replica."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(self.model(inputs), inputs, targets)[None]


def loss(outputs: Outputs, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over a batch, of both outputs."""
    scores, again = outputs
    return cross_entropy(scores, targets) + mse_loss(again, inputs)


@dataclass(frozen=True)
class Split:
    """A batch in equal parts, a replica for each."""

    inputs: list[Tensor]
    targets: list[Tensor]
    replicas: list[nn.Module]

    def outputs(self) -> list[Outputs]:
        return [model(part) for model, part in zip(self.replicas, self.inputs, strict=True)]


def gathered(split: Split, device: torch.device) -> tuple[Tensor, int]:
    """Return the loss of the outputs gathered on a device, and the bytes they take there."""
    all_scores, all_again = zip(*split.outputs(), strict=True)
    scores, again = _joined(all_scores, device), _joined(all_again, device)
    inputs, targets = _joined(split.inputs, device), _joined(split.targets, device)
    return loss((scores, again), inputs, targets), scores.nbytes + again.nbytes


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([part.to(device) for part in parts])


def on_first(split: Split) -> tuple[Tensor, int]:
    return gathered(split, split.inputs[0].device)


def on_cpu(split: Split) -> tuple[Tensor, int]:
    total, _ = gathered(split, torch.device("cpu"))
    return total, 0


def balanced(split: Split) -> tuple[Tensor, int]:
    outputs = split.outputs()
    losses = [loss(*parts) for parts in zip(outputs, split.inputs, split.targets, strict=True)]
    return _mean(losses), sum(each.nbytes for each in outputs[0])


def inside_forward(split: Split) -> tuple[Tensor, int]:
    models = [WithLoss(replica) for replica in split.replicas]
    parts = zip(models, split.inputs, split.targets, strict=True)
    losses = [model(inputs, targets) for model, inputs, targets in parts]
    outputs = CLASSES + FEATURES  # which only their own replica sees
    return _mean(losses), split.inputs[0].element_size() * outputs * len(split.inputs[0])


def _mean(losses: list[Tensor]) -> Tensor:
    first = losses[0].device
    return torch.stack([each.to(first).sum() for each in losses]).mean()


WAYS: dict[str, Callable[[Split], tuple[Tensor, int]]] = {
    "gathered": on_first,
    "balanced": balanced,
    "inside forward": inside_forward,
    "on the CPU": on_cpu,
}


def measure(devices: list[torch.device]) -> dict[str, tuple[list[Tensor], int]]:
    """Return, for each way, the gradients and the bytes of outputs on the first device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TwoHeads().to(devices[0])
        inputs = torch.randn(BATCH, FEATURES)
        targets = torch.randint(CLASSES, (BATCH,))
    found = {}
    for name, way in WAYS.items():
        model.zero_grad()
        total, nbytes = way(_split(model, inputs, targets, devices))
        total.backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        found[name] = gradients, nbytes
    return found


def _split(model: nn.Module, inputs: Tensor, targets: Tensor, devices: list[torch.device]) -> Split:
    count = len(devices)
    replicas: list[nn.Module] = [model] * count
    if len(set(devices)) > 1:
        replicas = nn.parallel.replicate(model, devices)
    moved = [
        [part.to(device) for part, device in zip(whole.chunk(count), devices, strict=True)]
        for whole in (inputs, targets)
    ]
    return Split(moved[0], moved[1], replicas)


def table(measured: dict[str, tuple[list[Tensor], int]]) -> list[str]:
    """Return a line for each way."""
    expected = measured["gathered"][0]
    lines = ["the loss is computed  outputs on the first device  gradients"]
    for name, (gradients, nbytes) in measured.items():
        same = all(
            torch.allclose(one, other, atol=1e-6)
            for one, other in zip(gradients, expected, strict=True)
        )
        lines.append(f"{name:20}  {nbytes / 1e3:24.1f} kB  {'equal' if same else 'different'}")
    return lines


def main() -> None:
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    devices = gpus if len(gpus) > 1 else [*gpus, torch.device("cpu")][:1] * 2
    if len(set(devices)) == 1:
        print(f"simulated: two parts of each batch, one after the other on {devices[0]}")
    print(*table(measure(devices)), sep="\n")


if __name__ == "__main__":
    main()
