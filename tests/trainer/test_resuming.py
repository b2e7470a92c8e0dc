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
from torch import Tensor, nn

import ckptkit
from ckptkit.trainer import loop, parallel, saving
from ckptkit.trainer.config import Config, RunFiles
from ckptkit.trainer.gpu_checks import train_in_processes
from ckptkit.trainer.run import Run

from ..conftest import ENVIRONMENT
from .conftest import Prepare, same
from .test_command import SMALL, invoked

FULL = Config(
    data="random", width=0.25, devices=("cpu",), epochs=2, batch_size=64, save_form="full",
    save_every=1,
)  # fmt: skip


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_F5_the_devices_of_a_checkpoint_are_taken_where_they_are(tmp_path: Path) -> None:
    """Simulated devices change what BatchNorm sees: without them, the weights would differ."""
    dp = ("--parallel", "dp", "--devices", "cpu,cpu", "--model", "crnn", "--width", "0.25")
    small = ("--data", "random", "--batch-size", "64", "--save-form", "full")
    invoked(tmp_path / "two.pth", *dp, *small, "--epochs", "2", "--save-every", "1")
    done = invoked(tmp_path / "more.pth", "--resume", tmp_path / "two.epoch1.pth")
    assert (done.code, done.stderr) == (0, "")
    assert " instead of " not in done.stdout
    two, more = loaded(tmp_path / "two.pth"), loaded(tmp_path / "more.pth")
    assert two["args"]["devices"] == more["args"]["devices"] == ["cpu", "cpu"]
    assert same(two["model"], more["model"])


def test_F5_other_devices_are_said(tmp_path: Path) -> None:
    config = replace(FULL, parallel="dp", devices=("cpu", "cpu"))
    loop.train(config, tmp_path / "two.pth", log=loop.silent)
    done = invoked(
        tmp_path / "more.pth", "--resume", tmp_path / "two.epoch1.pth", "--devices", "cpu"
    )
    line = done.stdout.splitlines()[0]
    assert line.endswith(
        "; on cpu instead of cpu, cpu; batches of 64 as before, but split differently"
    ), line
    gone = loaded(tmp_path / "two.epoch1.pth")
    gone["args"]["devices"] = ["cuda:7"]
    torch.save(gone, tmp_path / "gone.pth")
    done = invoked(tmp_path / "other.pth", "--resume", tmp_path / "gone.pth", *("--devices", "cpu"))
    assert "; on cpu instead of cuda:7" in done.stdout.splitlines()[0]


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
    files = RunFiles(resume=tmp_path / "run.epoch1.pth")
    train_in_processes(processes, tmp_path / "more.pth", files, **options)
    one, more = loaded(tmp_path / "run.pth"), loaded(tmp_path / "more.pth")
    assert same(one["model"], more["model"])


@pytest.mark.processes
@pytest.mark.slow
def test_F9_another_number_of_processes_keeps_the_batches(tmp_path: Path) -> None:
    """Of 64 images, three processes get 22, 21 and 21: the same step as one process makes."""
    options: dict[str, Any] = {"parallel": "ddp", "devices": ("cpu",), "save_every": 1}
    train_in_processes(3, tmp_path / "three.pth", **options)
    said: list[str] = []
    config = replace(FULL, parallel="ddp")
    files = RunFiles(resume=tmp_path / "three.epoch1.pth")
    loop.train(config, tmp_path / "one.pth", files, log=said.append)
    assert said[0].endswith(
        "; 1 process instead of 3 processes, batches of 64 as before; the results are not bit-exact"
    )
    three, one = loaded(tmp_path / "three.pth"), loaded(tmp_path / "one.pth")
    torch.testing.assert_close(one["model"], three["model"])


class Rank:
    """One of three processes, as far as the batches go."""

    world = 3
    device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def of_rank_0(self, value: Tensor) -> Tensor:
        return value


@pytest.mark.parametrize("sampler", ["hand", "distributed"])
def test_F9_the_images_of_a_batch_are_shared_out(prepared: Prepare, sampler: str) -> None:
    """--batch-size 100 is 100 images for three processes together."""
    run: Run = prepared(batch_size=100, accumulate=2, sampler=sampler)
    torch.manual_seed(0)
    run.order = torch.randperm(512) if sampler == "hand" else None
    steps = []
    for rank in range(3):
        run.group = Rank(rank)  # type: ignore[assignment]
        steps.append(loop.batches(run))
    for of_ranks in zip(*steps, strict=True):
        assert len({step.images for step in of_ranks}) == 1
        sizes = [sum(map(len, step.micro_batches)) for step in of_ranks]
        assert sum(sizes) == of_ranks[0].images
        assert len({len(step.micro_batches) for step in of_ranks}) == 1
    seen = torch.cat([part for step in steps for one in step for part in one.micro_batches])
    assert set(seen.tolist()) == set(range(512))
    if sampler == "hand":
        assert len(seen) == 512
    else:
        assert len(seen) == 513  # one image twice
        run.epoch = 1
        assert not torch.equal(steps[2][0].micro_batches[0], loop.batches(run)[0].micro_batches[0])


def test_F9_fewer_images_than_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with (
        pytest.raises(ckptkit.CkptkitError, match="--batch-size 3 is less than") as caught,
        parallel.group(replace(FULL, parallel="ddp", batch_size=3)),
    ):
        pass
    assert caught.value.hint == "use --batch-size 4"


def test_F9_from_several_devices_to_one_by_the_option_that_one_guesses(tmp_path: Path) -> None:
    config = replace(FULL, parallel="dp", devices=("cpu", "cpu"), keep_module_prefix=True)
    loop.train(config, tmp_path / "dp.pth", log=loop.silent)
    done = invoked(
        tmp_path / "one.pth", "--resume", tmp_path / "dp.epoch1.pth", "--parallel", "none",
        "--devices", "cpu",
    )  # fmt: skip
    assert (done.code, done.stderr) == (0, "")
    line = done.stdout.splitlines()[0]
    assert "--parallel none instead of --parallel dp" in line
    assert "--no-keep-module-prefix instead of --keep-module-prefix" in line
    assert "conv1.weight" in loaded(tmp_path / "one.pth")["model"]
    typed = ("--parallel", "none", "--keep-module-prefix", "--devices", "cpu")
    done = invoked(tmp_path / "two.pth", "--resume", tmp_path / "dp.epoch1.pth", *typed)
    assert done.code == 2  # typed: no guess


def test_F8_what_is_saved_on_the_way_obeys_force(tmp_path: Path) -> None:
    options = (*SMALL, "--epochs", "3", "--save-every", "2", "--save-best")
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
    fsdp = (*SMALL, "--parallel", "fsdp")
    assert invoked(tmp_path / "run", *fsdp).code == 0
    again = invoked(tmp_path / "run", *fsdp)
    assert (again.code, again.stderr.splitlines()[1]) == (2, "hint: --force replaces it")
    assert "already exists" in again.stderr
    assert invoked(tmp_path / "run", *fsdp, "--force").code == 0


def test_files_that_would_be_written_twice_are_refused(tmp_path: Path) -> None:
    """--metrics OUT was lost."""
    for other in ("run.pth", "run.best.pth", "./run.pth"):
        metrics = ("--metrics", tmp_path / other, "--save-best")
        done = invoked(tmp_path / "run.pth", *SMALL, *metrics)
        assert done.code == 2
        assert "would be written twice\nhint: use another file" in done.stderr
        assert not list(tmp_path.iterdir())


def test_a_resumed_run_without_improvement_says_so(tmp_path: Path) -> None:
    config = replace(FULL, save_best=True)
    loop.train(config, tmp_path / "run.pth", log=loop.silent)
    best = loaded(tmp_path / "run.epoch1.pth")
    best["best_accuracy"] = 2.0
    torch.save(best, tmp_path / "high.pth")
    said: list[str] = []
    files = RunFiles(resume=tmp_path / "high.pth")
    loop.train(config, tmp_path / "more.pth", files, log=said.append)
    assert said[-1] == "no epoch was better than 2.0000, the best before --resume"
    assert not (tmp_path / "more.best.pth").exists()


def test_S23_a_resumed_plot_shows_all_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from ckptkit.trainer import log

    drawn: list[list[int]] = []
    monkeypatch.setattr(
        log, "_draw", lambda figure, rows, *_: drawn.append([row["epoch"] for row in rows])
    )
    config, metrics = replace(FULL, epochs=3), tmp_path / "metrics.jsonl"
    loop.train(config, tmp_path / "a.pth", RunFiles(metrics=metrics), log=loop.silent)
    files = RunFiles(resume=tmp_path / "a.epoch2.pth", metrics=metrics, plot=tmp_path / "run.png")
    loop.train(config, tmp_path / "b.pth", files, log=loop.silent)
    said: list[str] = []
    loop.train(config, tmp_path / "c.pth", replace(files, metrics=None), log=said.append)
    assert drawn == [[1, 2, 3], [3]]
    assert (
        "the plot starts with epoch 3, because --metrics names no file with earlier epochs" in said
    )


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer fails again while it closes the file, with an error of its own."""
    original = Path.open

    class Full:
        """A file on a full disk."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    def opened(path: Path, *mode: Any, **options: Any) -> Any:
        file = original(path, *mode, **options)
        return Full(file) if path.name.endswith(".part") else file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ckptkit.CkptkitError) as caught:
        loop.train(FULL, tmp_path / "run.pth", log=loop.silent)
    assert str(caught.value).endswith("cannot be written: No space left on device")


def test_a_stop_within_an_epoch_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """SIGTERM arrives during the third step of the second epoch."""
    config = replace(FULL, save_every=0, optimizer="adam", deterministic=True)
    loop.train(config, tmp_path / "whole.pth", log=loop.silent)

    def kill(steps: Any, title: str) -> Any:
        for number, step in enumerate(steps):
            if (number, title) == (2, "epoch 2"):
                os.kill(os.getpid(), signal.SIGTERM)
            yield step

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(loop.Stopped) as caught:
        loop.train(config, tmp_path / "half.pth", log=loop.silent, bar=kill)
    assert signal.getsignal(signal.SIGTERM) == before
    assert caught.value.exit_code == 143
    assert "stopped by SIGTERM in epoch 2 after step 3" in str(caught.value)
    assert caught.value.hint == f"--resume {tmp_path / 'half.pth'} continues the run"
    half = loaded(tmp_path / "half.pth")
    assert (half["epoch"], half["step"], len(half["order"])) == (1, 3, 512)
    said: list[str] = []
    files = RunFiles(resume=tmp_path / "half.pth")
    loop.train(config, tmp_path / "more.pth", files, log=said.append)
    assert "after epoch 1, step 3" in said[0]
    whole, more = loaded(tmp_path / "whole.pth"), loaded(tmp_path / "more.pth")
    assert same(whole["model"], more["model"])
    assert list(whole) == list(more)


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
