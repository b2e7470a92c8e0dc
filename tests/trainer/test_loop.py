"""The loop: what it learns, what decides the result, and what does not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import ckptkit
from ckptkit.trainer import loop
from ckptkit.trainer.config import Config

from .conftest import Prepare, Rank, gradients, same, train, trained


def test_S15_the_defaults_read_digits_and_so_does_what_is_made_of_their_file(
    tmp_path: Path,
) -> None:
    pytest.importorskip("sklearn")
    config = Config(devices=("cpu",), parallel="dp", keep_module_prefix=True)
    accuracy = loop.train(config, tmp_path / "run.pth", log=loop.silent)
    assert accuracy >= 0.95
    stripped = ckptkit.strip_prefix(ckptkit.open(tmp_path / "run.pth"), "module.")
    ckptkit.save(ckptkit.remap(stripped, "cuda:1"), tmp_path / "moved.pth")
    moved = ckptkit.remap(ckptkit.open(tmp_path / "moved.pth"), "cpu")
    ckptkit.save(moved, tmp_path / "moved.safetensors")
    for name in ("run.pth", "moved.pth", "moved.safetensors"):
        assert loop.evaluate(Config(devices=("cpu",)), tmp_path / name) == accuracy


@pytest.mark.slow
def test_F4_S17_crnn_learns_to_read_at_its_defaults(tmp_path: Path) -> None:
    """Seeds 0 to 4 give 0.92 to 0.98, in minutes each; here the first."""
    pytest.importorskip("sklearn")
    config = Config(model="crnn", devices=("cpu",), seed=0)
    assert loop.train(config, tmp_path / "crnn.pth", log=loop.silent) >= 0.9


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


def test_S19_versions_are_in_the_full_checkpoint(tmp_path: Path) -> None:
    versions = trained(tmp_path, save_form="full", epochs=1)["versions"]
    assert (versions["torch"], versions["ckptkit"]) == (torch.__version__, ckptkit.__version__)
    assert str(tmp_path).encode() not in (tmp_path / "run.pth").read_bytes()


def test_S19_seeding_reaches_every_generator(prepared: Prepare) -> None:
    def drawn(seed: int) -> list[float]:
        prepared(seed=seed)
        return [random.random(), float(numpy.random.random()), torch.rand(()).item()]

    first = drawn(3)
    assert drawn(3) == first
    assert not {*drawn(4)} & {*first}


def test_S19_benchmark_is_restored_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    original = loop.train_epoch

    def note(*arguments: Any) -> float:
        seen.append(torch.backends.cudnn.benchmark)
        return original(*arguments)

    monkeypatch.setattr(loop, "train_epoch", note)
    train(tmp_path / "run.pth", epochs=1, benchmark=True)
    assert seen == [True]
    assert not torch.backends.cudnn.benchmark


def test_S23_gradients_are_clipped_without_the_scale_of_float16(prepared: Prepare) -> None:
    """With steps of the gradient itself, one step moves the weights by no more than the norm."""
    options: dict[str, Any] = {"amp": True, "amp_dtype": "float16", "batch_size": 512}
    run = prepared(lr=1.0, momentum=0.0, clip_norm=0.01, **options)
    before = parameters_to_vector(run.model.parameters()).detach()
    loop.train_epoch(run)
    change = parameters_to_vector(run.model.parameters()).detach() - before
    assert change.norm().item() == pytest.approx(0.01, rel=1e-2)


def test_S23_the_learning_rate_falls_in_steps(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    options: dict[str, Any] = {"lr": 0.08, "lr_step": 2, "lr_gamma": 0.5, "save_form": "full"}
    full = trained(tmp_path, epochs=5, metrics=metrics, **options)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([0.08, 0.08, 0.04, 0.04, 0.02])
    assert (full["scheduler"]["last_epoch"], full["scheduler"]["step_size"]) == (5, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp_computes_in_16_bits_and_keeps_float32(prepared: Prepare, dtype: str) -> None:
    run = prepared(amp=True, amp_dtype=dtype, batch_size=128)
    kinds: set[torch.dtype] = set()
    scales: list[float] = []
    scale = run.scaler.scale

    def note(loss: Tensor) -> Tensor:
        scaled: Tensor = scale(loss)  # type: ignore[no-untyped-call]
        scales.append((scaled / loss).item())
        return scaled

    run.model.register_forward_hook(lambda model, inputs, output: kinds.add(output.dtype))
    run.scaler.scale = note  # type: ignore[assignment,method-assign]
    assert 2 < loop.train_epoch(run) < 3
    assert kinds == {getattr(torch, dtype)}
    assert all(each > 1000 if dtype == "float16" else each == 1 for each in scales)
    inputs, targets = (part[:8] for part in run.data.train)
    run.loss(run.wrapped(inputs), targets).backward()
    assert {each.dtype for each in gradients(run.model).values()} == {torch.float32}


def test_a_moving_average_is_saved_and_tested(tmp_path: Path) -> None:
    said = train(tmp_path / "run.pth", ema=0.5, save_form="full")
    assert said[-2].startswith("moving average: test loss ")
    full = torch.load(tmp_path / "run.pth", weights_only=True)
    assert set(full["ema"]) == {"n_averaged", *(f"module.{name}" for name in full["model"])}
    assert full["ema"]["n_averaged"] == 16
    average, weight = full["ema"]["module.fc3.bias"], full["model"]["fc3.bias"]
    assert not torch.equal(average, weight)
    torch.testing.assert_close(average, weight, rtol=0.1, atol=0.01)


@pytest.mark.parametrize(
    "options",
    [{"foreach": False}, {"empty_cache": True}, {"torch_compile": "eager"}],
    ids=str,
)
def test_what_changes_no_weight(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of backends, the one that compiles nothing: what is tested is the way there."""
    plain = trained(tmp_path, epochs=1)["model"]
    assert same(trained(tmp_path, epochs=1, **options)["model"], plain)


def test_a_backend_that_torch_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(
        ckptkit.CkptkitError, match=r"torch\.compile: Invalid backend: 'nonsense'"
    ) as caught:
        train(tmp_path / "run.pth", epochs=1, torch_compile="nonsense")
    assert "--torch-compile inductor" in (caught.value.hint or "")


def test_distributed_sampler_learns_too(tmp_path: Path) -> None:
    one, again, hand = (
        trained(tmp_path, epochs=1, sampler=sampler)["model"]
        for sampler in ("distributed", "distributed", "hand")
    )
    assert same(one, again)
    assert not same(one, hand)


def test_the_test_set_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    original = loop.test

    def note(run: Any, labelled: Any = None, *rest: Any) -> tuple[float, float]:
        looked.append(labelled is run.data.test)
        return original(run, labelled, *rest)

    monkeypatch.setattr(loop, "test", note)
    train(tmp_path / "run.pth", epochs=3, save_best=True)
    assert looked == [False, False, False, True]
    assert (tmp_path / "run.best.pth").exists()


def test_every_process_evaluates_its_images(prepared: Prepare) -> None:
    """37 images over 7 processes in batches of 2: the last batch leaves some without one."""
    run = prepared()
    labelled: Any = tuple(part[:37] for part in run.data.train)
    expected = loop.test(run, labelled)
    calls: list[int] = []
    run.model.register_forward_hook(lambda *_: calls.append(1))
    ranks = [Rank(rank, 7) for rank in range(7)]
    for number, run.group in enumerate(ranks, 1):  # type: ignore[assignment]
        loop.test(run, labelled, batch_size=2)
        assert len(calls) == 3 * number  # equally often
    sums = zip(*(rank.totals for rank in ranks), strict=True)
    assert [sum(values) / 37 for values in sums] == pytest.approx(expected)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ckptkit.CkptkitError, match=r"the loss is (nan|inf) in epoch") as caught:
        train(tmp_path / "run.pth", lr=1e6)
    assert caught.value.hint == "use a smaller --lr, or --clip-norm 1"
    assert not list(tmp_path.iterdir())


def test_metrics_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics, plot = tmp_path / "metrics.jsonl", tmp_path / "run.png"
    said = train(tmp_path / "run.pth", metrics=metrics, plot=plot)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert f"accuracy {rows[-1]['accuracy']:.4f}" in said[1]
    starts = [line.split("  ")[0] for line in said]
    assert starts == ["epoch 1/2", "epoch 2/2", f"wrote {tmp_path / 'run.pth'}"]
    assert plot.read_bytes().startswith(b"\x89PNG")
