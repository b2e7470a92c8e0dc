"""Checkpoints: their forms, what ckptkit does with them, and writes that fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptkit
from ckptkit.trainer import loop, parallel, saving
from ckptkit.trainer.config import RECORDED_IF_USED, Config
from ckptkit.trainer.run import prepare, random_states, restore_random

from .conftest import FULL, SMALL, WORDS, Prepare, invoked, loaded, same, train, trained


@pytest.mark.parametrize("parallel", ["none", "dp", "ddp"])
def test_S11_three_forms(tmp_path: Path, parallel: str) -> None:
    bare, wrapped, full = (
        trained(tmp_path, form, save_form=form, parallel=parallel, epochs=1)
        for form in ("bare", "wrapped", "full")
    )
    assert list(wrapped) == ["model", "epoch"]
    assert list(full) == ["model", "optimizer", "scheduler", "epoch", "rng", "args", "versions"]
    assert wrapped["epoch"] == full["epoch"] == 1
    assert same(wrapped["model"], bare) and same(full["model"], bare)
    assert not [name for name in bare if name.startswith("module.")]
    kept = trained(
        tmp_path, save_form="bare", parallel=parallel, epochs=1, keep_module_prefix=True
    ) if parallel != "none" else None  # fmt: skip
    assert kept is None or same(kept, {f"module.{name}": value for name, value in bare.items()})


def test_S12_every_map_location_gives_what_torch_gives(
    tmp_path: Path, simulated_cuda: Callable[..., AbstractContextManager[None]]
) -> None:
    with simulated_cuda(1):
        train(tmp_path / "run.pth")
    for where in ("cpu", torch.device("cpu"), {"cuda:1": "cpu"}, lambda storage, tag: storage):
        found = ckptkit.load(tmp_path / "run.pth", map_location=where)
        assert same(found, torch.load(tmp_path / "run.pth", where, weights_only=True)["model"])
        assert {each.device.type for each in found.values()} == {"cpu"}


def test_S13_only_the_leading_prefix_goes(tmp_path: Path) -> None:
    names = ("module.submodule.weight", "module.module.bias", "plain")
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "run.pth")
    stripped = ckptkit.strip_prefix(ckptkit.open(tmp_path / "run.pth"), "module.")
    assert set(stripped.weights) == {"submodule.weight", "module.bias", "plain"}


@pytest.mark.parametrize("file", ["none", "dp"])
@pytest.mark.parametrize("model", ["none", "dp", "ddp"])
def test_S14_S18_one_loader_for_every_pair(
    tmp_path: Path, prepared: Prepare, file: str, model: str
) -> None:
    """Weights of one device into a wrapped model, and the other way round."""
    prefixed = trained(
        tmp_path, width=0.5, epochs=1, parallel=file, keep_module_prefix=file == "dp"
    )["model"]
    run = prepared(parallel=model)
    saving.load_weights(run, tmp_path / "run.pth")
    expected = {name.removeprefix("module."): value for name, value in prefixed.items()}
    assert same(run.model.state_dict(), expected)


def test_random_states_come_back() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.random()), torch.rand(()).item()]

    saved = random_states()
    first = drawn()
    assert drawn() != first
    restore_random(saved)
    assert drawn() == first


def test_files_on_the_way(tmp_path: Path) -> None:
    train(tmp_path / "run.pth", epochs=5, save_every=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run.epoch2.pth", "run.epoch4.pth", "run.pth"}
    assert loaded(tmp_path / "run.epoch2.pth")["epoch"] == 2


@pytest.mark.parametrize(
    ("made", "message", "hint"),
    [
        ({}, "the checkpoint has no optimizer", "--save-form full saves checkpoints that can be resumed"),
        ({"save_form": "full"}, "trained for 2 of 2 epochs", "use --epochs 3 or more"),
    ],
)  # fmt: skip
def test_what_is_no_beginning(
    tmp_path: Path, made: dict[str, Any], message: str, hint: str
) -> None:
    train(tmp_path / "run.pth", **made)
    with pytest.raises(ckptkit.CkptkitError, match=message) as caught:
        train(tmp_path / "out.pth", **FULL, resume=tmp_path / "run.pth")
    assert (caught.value.hint or "").startswith(hint)
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(
    ("made", "asked", "hint"),
    [
        ({"save_form": "full"}, {"width": 0.5}, "the run used --model cnn --data random --width 0.25"),
        ({}, {"model": "densenet"}, "use --model, --data and --width of the run that saved the weights"),
        ({}, {"parallel": "fsdp", "width": 0.5}, "use --model, --data and --width"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_says_what_would(
    tmp_path: Path, made: dict[str, Any], asked: dict[str, Any], hint: str
) -> None:
    train(tmp_path / "run.pth", epochs=1, **made)
    with pytest.raises(ckptkit.CkptkitError, match="does not fit") as caught:
        loop.evaluate(replace(SMALL, **asked), tmp_path / "run.pth")
    assert (caught.value.hint or "").startswith(hint)


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint import filesystem

    path = tmp_path / "run.pth"
    train(path, epochs=1)
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(filesystem.FileSystemWriter, "write_data", full)
    for name, kind in (("run.pth", "none"), ("shards", "fsdp")):
        with pytest.raises(
            ckptkit.CkptkitError, match=f"{name}: cannot be written: .*disk full"
        ) as caught:
            train(tmp_path / name, epochs=1, parallel=kind)
        assert caught.value.exit_code == 4
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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
        train(tmp_path / "run.pth", epochs=1)
    assert str(caught.value).endswith("cannot be written: No space left on device")


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    leftovers = [".run.pth.part", ".run.epoch2.pth.part", ".run.best.pth.part"]
    others = [".run2.pth.part", ".other.epoch2.pth.part", "run.epoch1.pth"]
    for name in (*leftovers, *others):
        (tmp_path / name).touch()
    (tmp_path / ".run.epoch3.pth.part").mkdir()
    (tmp_path / ".run.epoch3.pth.part/__0_0.distcp").touch()
    train(tmp_path / "run.pth", epochs=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "run.pth"])


def test_files_that_would_be_written_twice_are_refused(tmp_path: Path) -> None:
    """--metrics OUT was lost."""
    for other in ("run.pth", "run.best.pth", "./run.pth"):
        metrics = ("--metrics", tmp_path / other, "--save-best")
        done = invoked(tmp_path / "run.pth", *WORDS, *metrics)
        assert done.code == 2
        assert "would be written twice\nhint: use another file" in done.stderr
        assert not list(tmp_path.iterdir())


def test_out_is_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    lost = "the folder of this file does not exist"
    other = "is a non-empty folder, but not a checkpoint"
    for out, options, message in (
        ("none/run.pth", (), lost),
        ("run.pth", ("--metrics", tmp_path / "none" / "to" / "run.pth"), lost),
        ("full", (), "is a folder"),
        ("full", ("--parallel", "fsdp"), other),
        ("full", ("--parallel", "fsdp", "--force"), other),
    ):
        done = invoked(tmp_path / out, *WORDS, *options)
        assert done.code == 2
        assert done.stderr.split("\n")[0].endswith(f"/{out}: {message}")


def test_the_best_accuracy_is_that_of_the_validation_set(tmp_path: Path) -> None:
    before = trained(tmp_path, save_form="full", epochs=1, save_best=True)
    config = replace(SMALL, save_best=True)
    with parallel.group(config) as group:
        run = prepare(config, group)
        saving.load_weights(run, tmp_path / "run.pth")
        assert before["best_accuracy"] == loop.test(run, run.data.validation)[1]


def test_what_is_not_used_is_not_recorded() -> None:
    """RunFiles of runs without the newer options are those of before, byte for byte."""
    assert set(Config().as_dict()).isdisjoint(RECORDED_IF_USED)
    used = Config(optimizer="adam", weight_decay=0.0, eval_every=3).as_dict()
    assert (used["optimizer"], used["weight_decay"], used["eval_every"]) == ("adam", 0.0, 3)
