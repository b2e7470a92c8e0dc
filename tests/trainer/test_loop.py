"""The loop: what it learns, what decides the result, and what does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.trainer import loop
from ckptkit.trainer.config import Config, RunFiles

from .conftest import Prepare, gradients

SMALL = Config(data="random", width=0.5, devices=("cpu",), epochs=2, batch_size=64)


def trained(folder: Path, name: str = "run.pth", **options: Any) -> Path:
    out = folder / name
    loop.train(replace(SMALL, **options), out, log=loop.silent)
    return out


def weights(path: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = dict(torch.load(path, weights_only=True)["model"])
    return loaded


def test_S15_the_defaults_read_digits_and_so_does_what_is_made_of_their_file(
    tmp_path: Path,
) -> None:
    pytest.importorskip("sklearn")
    config = Config(devices=("cpu",))
    accuracy = loop.train(
        replace(config, parallel="dp", keep_module_prefix=True),
        tmp_path / "run.pth",
        log=loop.silent,
    )
    assert accuracy >= 0.95
    moved = ckptkit.remap(
        ckptkit.strip_prefix(ckptkit.open(tmp_path / "run.pth"), "module."), "cuda:1"
    )
    ckptkit.save(moved, tmp_path / "moved.pth")
    ckptkit.save(ckptkit.remap(moved, "cpu"), tmp_path / "moved.safetensors")
    for name in ("run.pth", "moved.pth", "moved.safetensors"):
        assert loop.evaluate(config, tmp_path / name) == accuracy


@pytest.mark.parametrize(
    "options",
    [
        {"model": "mlp", "width": 0.05},
        {"model": "crnn", "width": 0.25},
        {"model": "densenet", "width": 0.25, "batch_size": 128},
        {"model": "generator", "width": 0.25, "batch_size": 128, "segments": 2},
    ],
)
def test_every_model_trains(prepared: Prepare, options: dict[str, Any]) -> None:
    run = prepared(**options)
    first, second = (loop.train_epoch(run) for _ in range(2))
    assert second < first
    loss, accuracy = loop.test(run)
    assert loss < 20
    assert 0 <= accuracy <= 1


def test_S01_accumulated_batches_are_one_big_batch(tmp_path: Path) -> None:
    """512 images: two steps of 200 and one of 112, whose last batch is smaller, either way."""
    one = weights(trained(tmp_path, "one.pth", batch_size=200))
    many = weights(trained(tmp_path, "many.pth", batch_size=50, accumulate=4))
    torch.testing.assert_close(many, one)
    other = weights(trained(tmp_path, "other.pth", batch_size=50))
    assert not torch.allclose(other["fc3.weight"], one["fc3.weight"])


def test_S19_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    options = {"save_form": "full", "deterministic": True}
    one, same = (
        trained(tmp_path, name, **options).read_bytes() for name in ("one.pth", "same.pth")
    )
    assert one == same
    assert trained(tmp_path, "other.pth", **options, seed=1).read_bytes() != one


def test_S19_versions_are_in_the_full_checkpoint(tmp_path: Path) -> None:
    full = torch.load(trained(tmp_path, save_form="full"), weights_only=True)
    assert full["versions"]["torch"] == torch.__version__
    assert full["versions"]["ckptkit"] == ckptkit.__version__
    assert str(tmp_path).encode() not in (tmp_path / "run.pth").read_bytes()


def test_S19_seeding_reaches_every_generator(prepared: Prepare) -> None:
    import random

    import numpy

    def drawn() -> list[float]:
        prepared(seed=3)
        return [random.random(), float(numpy.random.random()), torch.rand(()).item()]

    assert drawn() == drawn()


def test_S23_gradients_are_clipped_by_norm(prepared: Prepare) -> None:
    """With steps of the gradient itself, one step moves the weights by no more than the norm."""
    moved = []
    for norm in (0.0, 0.01):
        run = prepared(clip_norm=norm, lr=1.0, momentum=0.0, batch_size=512)
        before = {name: each.detach().clone() for name, each in run.model.named_parameters()}
        loop.train_epoch(run)
        changes = [each.detach() - before[name] for name, each in run.model.named_parameters()]
        moved.append(torch.cat([each.flatten() for each in changes]).norm().item())
    assert moved[0] > 0.02
    assert moved[1] == pytest.approx(0.01, rel=1e-3)


def test_S23_the_learning_rate_falls_in_steps(tmp_path: Path) -> None:
    config = replace(SMALL, epochs=5, lr=0.08, lr_step=2, lr_gamma=0.5, save_form="full")
    loop.train(
        config, tmp_path / "run.pth", RunFiles(metrics=tmp_path / "metrics.jsonl"), log=loop.silent
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([0.08, 0.08, 0.04, 0.04, 0.02])
    full = torch.load(tmp_path / "run.pth", weights_only=True)
    assert full["scheduler"]["last_epoch"] == 5
    assert full["scheduler"]["step_size"] == 2


def test_amp_computes_in_bfloat16_and_keeps_float32(prepared: Prepare) -> None:
    run = prepared(amp=True, batch_size=128)
    kinds = set()
    run.model.register_forward_hook(lambda model, inputs, output: kinds.add(output.dtype))
    loss = loop.train_epoch(run)
    assert kinds == {torch.bfloat16}
    assert {each.dtype for each in gradients_of_one_batch(run).values()} == {torch.float32}
    assert 2 < loss < 3


def gradients_of_one_batch(run: Any) -> dict[str, torch.Tensor]:
    inputs, targets = (part[:8] for part in run.data.train)
    run.loss(run.wrapped(inputs), targets).backward()
    return gradients(run.model)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ckptkit.CkptkitError, match=r"the loss is (nan|inf) in epoch") as caught:
        trained(tmp_path, lr=1e6)
    assert caught.value.hint == "use a smaller --lr, or --clip-norm 1"
    assert not list(tmp_path.iterdir())


def test_metrics_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said: list[str] = []
    files = RunFiles(metrics=tmp_path / "metrics.jsonl", plot=tmp_path / "run.png")
    accuracy = loop.train(SMALL, tmp_path / "run.pth", files, log=said.append)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[-1]["accuracy"] == accuracy
    assert [line.split("  ")[0] for line in said] == [
        "epoch 1/2",
        "epoch 2/2",
        f"wrote {tmp_path / 'run.pth'}",
    ]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
