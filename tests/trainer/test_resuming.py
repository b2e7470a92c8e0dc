"""Going on elsewhere: on other devices, with other processes, in the middle of an epoch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.trainer import log, loop, parallel, saving
from ckptkit.trainer.gpu_checks import train_in_processes
from tests import torch_equality

from ..conftest import ENVIRONMENT
from .conftest import FULL, SMALL, WORDS, Prepare, Rank, invoked, loaded, same, train, trained

RESUMED: dict[str, dict[str, Any]] = {
    "sgd": {"lr_step": 1, "lr_gamma": 0.5, "deterministic": True},
    "adam": {"optimizer": "adam", "weight_decay": 0.05},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.05},
    "average": {"ema": 0.5},
    "float16": {"amp": True, "amp_dtype": "float16", "clip_norm": 1.0},
    "dp": {"parallel": "dp", "devices": ("cpu", "cpu"), "keep_module_prefix": True},
    "ddp": {"parallel": "ddp"},
    "best": {"save_best": True},
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_gives_the_same_checkpoint(tmp_path: Path, name: str) -> None:
    """Weights, optimizer, scheduler, scale, average and random states, bit for bit."""
    options = {**FULL, **RESUMED[name]}
    two = trained(tmp_path, "two", **options)
    more = trained(tmp_path, "more", resume=tmp_path / "two.epoch1", **options)
    torch_equality.same(two, more)
    assert not same(two["model"], loaded(tmp_path / "two.epoch1")["model"])
    if "weight_decay" in options:
        assert set(two["optimizer"]["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
        assert two["optimizer"]["param_groups"][0]["weight_decay"] == 0.05
    elif name == "float16":
        assert loaded(tmp_path / "two.epoch1")["scaler"]["_growth_tracker"] > 0


def test_a_changed_file_is_resumed_likewise(tmp_path: Path) -> None:
    """Saved elsewhere: without its prefix, tagged for a GPU and back."""
    options = {**FULL, "parallel": "dp", "keep_module_prefix": True}
    two = trained(tmp_path, "two.pth", **options)
    checkpoint = ckptkit.strip_prefix(ckptkit.open(tmp_path / "two.epoch1.pth"), "module.")
    for name, device in (("tagged.pth", "cuda:3"), ("back.pth", "cpu")):
        ckptkit.save(ckptkit.remap(checkpoint, device), tmp_path / name)
        checkpoint = ckptkit.open(tmp_path / name)
    torch_equality.same(two, trained(tmp_path, "more", resume=tmp_path / "back.pth", **options))


def test_F5_the_options_and_devices_of_a_checkpoint_are_taken(tmp_path: Path) -> None:
    """Simulated devices change what BatchNorm sees: without them, the weights would differ."""
    dp = ("--parallel", "dp", "--devices", "cpu,cpu", "--model", "crnn", "--save-form", "full")
    own = ("--optimizer", "adam", "--lr", "0.003", "--seed", "5", "--epochs", "2")
    invoked(tmp_path / "two.pth", *WORDS, *dp, *own, "--save-every", "1")
    done = invoked(tmp_path / "more.pth", "--resume", tmp_path / "two.epoch1.pth")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"resuming {tmp_path / 'two.epoch1.pth'} after epoch 1\n")
    two, more = loaded(tmp_path / "two.pth"), loaded(tmp_path / "more.pth")
    torch_equality.same(two, more)
    assert (more["args"]["devices"], more["args"]["lr"]) == (["cpu", "cpu"], 0.003)


def test_F5_other_devices_are_said(tmp_path: Path) -> None:
    train(tmp_path / "two.pth", **FULL, parallel="dp", devices=("cpu", "cpu"))
    gone = loaded(tmp_path / "two.epoch1.pth")
    gone["args"]["devices"] = ["cuda:7"]
    torch.save(gone, tmp_path / "gone.pth")
    for name, said in (
        ("two.epoch1.pth", "; on cpu instead of cpu, cpu; batches of 64 as before, but split differently"),
        ("gone.pth", "; on cpu instead of cuda:7"),
    ):  # fmt: skip
        done = invoked(tmp_path / f"more-{name}", "--resume", tmp_path / name, "--devices", "cpu")
        assert done.stdout.splitlines()[0].endswith(said)


def test_F6_simulated_devices_update_batch_norm_once(prepared: Prepare) -> None:
    """As on GPUs, where the first replica shares its buffers with the model."""
    run = prepared(model="densenet", width=0.25, parallel="dp", devices=("cpu", "cpu"))
    norm = run.model.get_submodule("blocks.0.0.norm1")
    assert isinstance(norm, nn.BatchNorm2d)
    before = {name: each.clone() for name, each in run.model.named_buffers()}
    inputs = run.data.train[0][:16]
    run.loss(run.wrapped(inputs), run.data.train[1][:16]).backward()
    assert norm.num_batches_tracked == 1
    after = {name: each.clone() for name, each in run.model.named_buffers()}
    run.model.load_state_dict(before, strict=False)
    run.model(inputs[:8])
    torch.testing.assert_close(after, dict(run.model.named_buffers()))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("processes", [3, 4])
def test_F7_ddp_resumes_bit_for_bit(tmp_path: Path, processes: int) -> None:
    options: dict[str, Any] = {"parallel": "ddp", "devices": ("cpu",), "save_every": 1}
    train_in_processes(processes, tmp_path / "run.pth", **options)
    options["resume"] = tmp_path / "run.epoch1.pth"
    train_in_processes(processes, tmp_path / "more.pth", **options)
    one, more = loaded(tmp_path / "run.pth"), loaded(tmp_path / "more.pth")
    assert same(one["model"], more["model"])


@pytest.mark.processes
@pytest.mark.slow
def test_F9_another_number_of_processes_keeps_the_batches(tmp_path: Path) -> None:
    """Of 64 images, three processes get 22, 21 and 21: the same step as one process makes."""
    options: dict[str, Any] = {"parallel": "ddp", "devices": ("cpu",), "save_every": 1}
    train_in_processes(3, tmp_path / "three.pth", **options)
    said = train(tmp_path / "one.pth", **FULL, parallel="ddp", resume=tmp_path / "three.epoch1.pth")
    assert said[0].endswith(
        "; 1 process instead of 3 processes, batches of 64 as before; the results are not bit-exact"
    )
    three, one = loaded(tmp_path / "three.pth"), loaded(tmp_path / "one.pth")
    torch.testing.assert_close(one["model"], three["model"])


@pytest.mark.parametrize("sampler", ["hand", "distributed"])
def test_F9_the_images_of_a_batch_are_shared_out(prepared: Prepare, sampler: str) -> None:
    """--batch-size 100 is 100 images for three processes together."""
    run = prepared(batch_size=100, accumulate=2, sampler=sampler)
    torch.manual_seed(0)
    run.order = torch.randperm(512) if sampler == "hand" else None
    steps = []
    for rank in range(3):
        run.group = Rank(rank, 3)  # type: ignore[assignment]
        steps.append(loop.batches(run))
    for of_ranks in zip(*steps, strict=True):
        assert len({step.images for step in of_ranks}) == 1
        assert sum(sum(map(len, step.micro_batches)) for step in of_ranks) == of_ranks[0].images
        assert len({len(step.micro_batches) for step in of_ranks}) == 1
    seen = torch.cat([part for step in steps for one in step for part in one.micro_batches])
    assert set(seen.tolist()) == set(range(512))
    assert len(seen) == (512 if sampler == "hand" else 513)  # one image twice
    if sampler == "distributed":
        run.epoch = 1
        assert not torch.equal(steps[2][0].micro_batches[0], loop.batches(run)[0].micro_batches[0])


def test_F9_fewer_images_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with (
        pytest.raises(ckptkit.CkptkitError, match="--batch-size 3 is less than") as caught,
        parallel.group(replace(SMALL, parallel="ddp", batch_size=3)),
    ):
        pass
    assert caught.value.hint == "use --batch-size 4"


def test_F9_from_several_devices_to_one_by_the_option_that_one_guesses(tmp_path: Path) -> None:
    train(tmp_path / "dp.pth", **FULL, **RESUMED["dp"])
    resume = ("--resume", tmp_path / "dp.epoch1.pth", "--parallel", "none", "--devices", "cpu")
    done = invoked(tmp_path / "one.pth", *resume, "--epochs", "3")
    assert (done.code, done.stderr) == (0, "")
    line = done.stdout.splitlines()[0]
    assert "; --epochs 3 instead of --epochs 2" in line
    assert "; --parallel none instead of --parallel dp" in line
    assert "; --no-keep-module-prefix instead of --keep-module-prefix" in line
    made = loaded(tmp_path / "one.pth")
    assert (made["epoch"], made["args"]["keep_module_prefix"]) == (3, False)
    assert "conv1.weight" in made["model"]
    done = invoked(tmp_path / "two.pth", *resume, "--keep-module-prefix")
    assert done.code == 2  # typed: no guess


@pytest.mark.parametrize(("before", "after"), [("fsdp", "none"), ("ddp", "fsdp")])
def test_a_run_goes_on_under_another_kind(tmp_path: Path, before: str, after: str) -> None:
    """Optimizers name parameters in one kind and number them in the other."""
    start = trained(tmp_path, "start", **FULL, parallel=before)
    resume = tmp_path / "start.epoch1"
    said = train(tmp_path / "end", **FULL, parallel=after, resume=resume)
    assert f"--parallel {after} instead of --parallel {before}" in said[0]
    end = loaded(tmp_path / "end")
    torch.testing.assert_close(dict(end["model"]), dict(start["model"]))


def test_F8_what_is_saved_on_the_way_obeys_force(tmp_path: Path) -> None:
    options = (*WORDS, "--epochs", "3", "--save-every", "2", "--save-best")
    for name in ("run.epoch2.pth", "run.best.pth"):
        (tmp_path / name).write_bytes(b"precious")
        done = invoked(tmp_path / "run.pth", *options)
        assert done.code == 2
        assert done.stderr.endswith(f"{name}: already exists\nhint: --force replaces it\n")
        assert (tmp_path / name).read_bytes() == b"precious"
        (tmp_path / name).unlink()
    (tmp_path / "run.epoch1.pth").touch()  # which this run does not write
    (tmp_path / "run.best.pth").touch()
    done = invoked(tmp_path / "run.pth", *options, "--force")
    assert (done.code, done.stderr) == (0, "")


def test_F8_force_replaces_a_folder_of_shards(tmp_path: Path) -> None:
    fsdp = (tmp_path / "run", *WORDS, "--parallel", "fsdp")
    assert invoked(*fsdp).code == 0
    again = invoked(*fsdp)
    assert (again.code, again.stderr.splitlines()[1]) == (2, "hint: --force replaces it")
    assert "already exists" in again.stderr
    assert invoked(*fsdp, "--force").code == 0


def test_save_best_cannot_begin_when_a_run_is_resumed(tmp_path: Path) -> None:
    """The images that it would select on have been trained on."""
    train(tmp_path / "run.pth", **FULL)
    resume = tmp_path / "run.epoch1.pth"
    with pytest.raises(
        ckptkit.CkptkitError, match=r"--validation 10 contradicts .* with --validation 0"
    ):
        train(tmp_path / "more.pth", **FULL, save_best=True, resume=resume)


def test_a_resumed_run_without_improvement_says_so(tmp_path: Path) -> None:
    best = trained(tmp_path, **FULL, epochs=1, save_best=True)
    best["best_accuracy"] = 2.0
    torch.save(best, tmp_path / "high.pth")
    said = train(tmp_path / "more.pth", **FULL, save_best=True, resume=tmp_path / "high.pth")
    assert said[-1] == "no epoch was better than 2.0000, the best before --resume"
    assert not (tmp_path / "more.best.pth").exists()


def test_S23_a_resumed_plot_shows_all_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[list[int]] = []
    monkeypatch.setattr(
        log, "_draw", lambda figure, rows, *_: drawn.append([row["epoch"] for row in rows])
    )
    options = {**FULL, "epochs": 3, "metrics": tmp_path / "metrics.jsonl"}
    train(tmp_path / "a.pth", **options)
    options |= {"resume": tmp_path / "a.epoch2.pth", "plot": tmp_path / "run.png"}
    train(tmp_path / "b.pth", **options)
    said = train(tmp_path / "c.pth", **{**options, "metrics": None})
    assert drawn == [[1, 2, 3], [3]]
    assert (
        "the plot starts with epoch 3, because --metrics names no file with earlier epochs" in said
    )


def test_a_stop_within_an_epoch_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """SIGTERM arrives during the third step of the second epoch."""
    options: dict[str, Any] = {"save_form": "full", "optimizer": "adam", "deterministic": True}
    whole, half = trained(tmp_path, "whole.pth", **options), tmp_path / "half.pth"

    def kill(steps: Any, title: str) -> Any:
        for number, step in enumerate(steps):
            if (number, title) == (2, "epoch 2"):
                os.kill(os.getpid(), signal.SIGTERM)
            yield step

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(loop.Stopped) as caught:
        loop.train(replace(SMALL, **options), half, log=loop.silent, bar=kill)
    assert signal.getsignal(signal.SIGTERM) == before
    assert caught.value.exit_code == 143
    assert "stopped by SIGTERM in epoch 2 after step 3" in str(caught.value)
    assert caught.value.hint == f"--resume {half} continues the run"
    stopped = loaded(half)
    assert (stopped["epoch"], stopped["step"], len(stopped["order"])) == (1, 3, 512)
    said = train(tmp_path / "more.pth", **options, resume=half)
    assert "after epoch 1, step 3" in said[0]
    torch_equality.same(whole, loaded(tmp_path / "more.pth"))


def test_a_second_sigterm_is_not_caught() -> None:
    signals: list[int] = []
    original = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        with loop.on_sigterm() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (stop.is_set(), signals) == (True, [])
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, original)


@pytest.mark.slow
def test_sigterm_from_outside(tmp_path: Path) -> None:
    words = ["-m", "ckptkit.trainer", "run.pth", "--data", "random", "--devices", "cpu"]
    with subprocess.Popen(
        [sys.executable, *words, "--epochs", "500", "--save-form", "full"],
        cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert re.match(r"error: run\.pth: stopped by SIGTERM in epoch \d+ after step \d+", errors)
    assert "hint: --resume run.pth continues the run" in errors
    assert saving.finished_epochs(tmp_path / "run.pth") >= 1
