"""Checkpoints: their forms, going on from one, and what ckptkit does with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.trainer import loop, parallel, saving
from ckptkit.trainer.config import RECORDED_IF_USED, Config, RunFiles
from ckptkit.trainer.run import prepare, random_states, restore_random

from .conftest import Prepare, same
from .test_loop import SMALL, trained

FULL = replace(SMALL, save_form="full", deterministic=True, lr_step=1, lr_gamma=0.5)


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("parallel", ["none", "dp", "ddp"])
def test_S11_three_forms(tmp_path: Path, parallel: str) -> None:
    files = {
        form: loaded(trained(tmp_path, f"{form}.pth", save_form=form, parallel=parallel, epochs=1))
        for form in ("bare", "wrapped", "full")
    }
    assert list(files["wrapped"]) == ["model", "epoch"]
    parts = ["model", "optimizer", "scheduler", "epoch", "rng", "args", "versions"]
    assert list(files["full"]) == parts
    assert files["wrapped"]["epoch"] == files["full"]["epoch"] == 1
    assert same(files["wrapped"]["model"], files["bare"])
    assert same(files["full"]["model"], files["bare"])
    assert not [name for name in files["bare"] if name.startswith("module.")]


def test_S11_the_prefix_is_kept_on_request(tmp_path: Path) -> None:
    plain = loaded(trained(tmp_path, "plain.pth", parallel="dp"))["model"]
    kept = loaded(trained(tmp_path, "kept.pth", parallel="dp", keep_module_prefix=True))["model"]
    assert same(kept, {f"module.{name}": value for name, value in plain.items()})


def test_S12_every_map_location_gives_what_torch_gives(
    tmp_path: Path, simulated_cuda: Callable[..., AbstractContextManager[None]]
) -> None:
    with simulated_cuda(1):
        path = trained(tmp_path)
    for where in ("cpu", torch.device("cpu"), {"cuda:1": "cpu"}, lambda storage, tag: storage):
        found, expected = (
            ckptkit.load(path, map_location=where),
            torch.load(path, where, weights_only=True)["model"],
        )
        assert same(found, expected)
        assert {each.device.type for each in found.values()} == {"cpu"}


def test_S13_only_the_leading_prefix_goes(tmp_path: Path) -> None:
    state = {
        "module.submodule.weight": torch.ones(1),
        "module.module.bias": torch.ones(2),
        "plain": torch.ones(3),
    }
    torch.save(state, tmp_path / "run.pth")
    stripped = ckptkit.strip_prefix(ckptkit.open(tmp_path / "run.pth"), "module.")
    assert set(stripped.weights) == {"submodule.weight", "module.bias", "plain"}


@pytest.mark.parametrize("file", ["none", "dp"])
@pytest.mark.parametrize("model", ["none", "dp", "ddp"])
def test_S14_S18_one_loader_for_every_pair(
    tmp_path: Path, prepared: Prepare, file: str, model: str
) -> None:
    """Weights of one device into a wrapped model, and the other way round."""
    path = trained(tmp_path, epochs=1, parallel=file, keep_module_prefix=file == "dp")
    run = prepared(parallel=model)
    saving.load_weights(run, path)
    expected = {
        name.removeprefix("module."): value for name, value in loaded(path)["model"].items()
    }
    assert same(run.model.state_dict(), expected)


def test_S16_any_part_of_a_wrapped_model_is_reached(tmp_path: Path) -> None:
    path = trained(tmp_path, epochs=1, parallel="dp", keep_module_prefix=True)
    part = ckptkit.select(ckptkit.extract(ckptkit.open(path), "model"), ["module.fc1.*"])
    ckptkit.save(part, tmp_path / "fc1.pth")
    whole = loaded(path)["model"]
    assert same(
        loaded(tmp_path / "fc1.pth"),
        {name: whole[name] for name in ("module.fc1.weight", "module.fc1.bias")},
    )


def test_S21_S22_dtypes_and_numbers_of_parameters(tmp_path: Path, prepared: Prepare) -> None:
    weights = ckptkit.open(trained(tmp_path, epochs=1)).weights
    model = prepared().model
    assert {name: str(each.dtype) for name, each in weights.items()} == {
        name: str(each.dtype).removeprefix("torch.") for name, each in model.state_dict().items()
    }
    assert {name: each.shape for name, each in weights.items()} == {
        name: tuple(each.shape) for name, each in model.named_parameters()
    }


def changed(path: Path) -> Path:
    """Saved elsewhere: without its prefix, tagged for a GPU and back."""
    stripped = path.with_name("stripped.pth")
    ckptkit.save(ckptkit.strip_prefix(ckptkit.open(path), "module."), stripped)
    ckptkit.save(ckptkit.remap(ckptkit.open(stripped), "cuda:3"), path.with_name("tagged.pth"))
    ckptkit.save(
        ckptkit.remap(ckptkit.open(path.with_name("tagged.pth")), "cpu"), path.with_name("back.pth")
    )
    return path.with_name("back.pth")


@pytest.mark.parametrize(
    "how", [lambda path: path, changed], ids=["as it is", "stripped and remapped"]
)
def test_training_goes_on_bit_for_bit(tmp_path: Path, how: Callable[[Path], Path]) -> None:
    config = replace(FULL, parallel="dp", keep_module_prefix=True)
    loop.train(replace(config, epochs=4), tmp_path / "four.pth", log=loop.silent)
    loop.train(replace(config, epochs=2), tmp_path / "two.pth", log=loop.silent)
    files = RunFiles(resume=how(tmp_path / "two.pth"))
    loop.train(replace(config, epochs=4), tmp_path / "more.pth", files, log=loop.silent)
    four, more = loaded(tmp_path / "four.pth"), loaded(tmp_path / "more.pth")
    assert same(more["model"], four["model"])
    assert not same(four["model"], loaded(tmp_path / "two.pth")["model"])
    for number, state in four["optimizer"]["state"].items():
        assert same(more["optimizer"]["state"][number], state)
    assert more["optimizer"]["param_groups"] == four["optimizer"]["param_groups"]
    assert more["scheduler"] == four["scheduler"]
    assert more["rng"]["python"] == four["rng"]["python"]
    assert torch.equal(more["rng"]["torch"], four["rng"]["torch"])


def test_random_states_come_back() -> None:
    import random

    import numpy

    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.random()), torch.rand(()).item()]

    saved = random_states()
    first = drawn()
    assert drawn() != first
    restore_random(saved)
    assert drawn() == first


def test_files_on_the_way(tmp_path: Path) -> None:
    trained(tmp_path, epochs=5, save_every=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.epoch2.pth",
        "run.epoch4.pth",
        "run.pth",
    ]
    assert loaded(tmp_path / "run.epoch2.pth")["epoch"] == 2


def refused(config: Config, out: Path, resume: Path) -> ckptkit.CkptkitError:
    with pytest.raises(ckptkit.CkptkitError) as caught:
        loop.train(config, out, RunFiles(resume=resume), log=loop.silent)
    assert not out.exists()
    return caught.value


def test_a_checkpoint_without_optimizer_is_no_beginning(tmp_path: Path) -> None:
    error = refused(FULL, tmp_path / "out.pth", trained(tmp_path))
    assert "no optimizer" in str(error)
    assert error.hint == "--save-form full saves checkpoints that can be resumed"


def test_a_finished_run_is_no_beginning(tmp_path: Path) -> None:
    error = refused(FULL, tmp_path / "out.pth", trained(tmp_path, save_form="full"))
    assert "trained for 2 of 2 epochs" in str(error)
    assert (error.hint or "").startswith("use --epochs 3 or more")


@pytest.mark.parametrize(
    ("made", "asked", "hint"),
    [
        (
            {"save_form": "full"},
            {"width": 0.25},
            "the run used --model cnn --data random --width 0.5",
        ),
        (
            {},
            {"model": "densenet"},
            "use --model, --data and --width of the run that saved the weights",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_says_what_would(
    tmp_path: Path, made: dict[str, Any], asked: dict[str, Any], hint: str
) -> None:
    path = trained(tmp_path, epochs=1, **made)
    with pytest.raises(ckptkit.CkptkitError, match="does not fit") as caught:
        loop.evaluate(replace(SMALL, **asked), path)
    assert caught.value.hint == hint


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trained(tmp_path, epochs=1)
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ckptkit.CkptkitError, match="cannot be written: disk full") as caught:
        trained(tmp_path, epochs=1)
    assert caught.value.exit_code == 4
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    leftovers = [".run.pth.part", ".run.epoch2.pth.part", ".run.best.pth.part"]
    others = [".run2.pth.part", ".other.epoch2.pth.part", "run.epoch1.pth"]
    for name in (*leftovers, *others):
        (tmp_path / name).touch()
    (tmp_path / ".run.epoch3.pth.part").mkdir()
    (tmp_path / ".run.epoch3.pth.part/__0_0.distcp").touch()
    trained(tmp_path, epochs=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "run.pth"])


def test_the_best_accuracy_is_resumed(tmp_path: Path) -> None:
    config = replace(FULL, epochs=2, save_best=True, save_every=1)
    loop.train(config, tmp_path / "run.pth", log=loop.silent)
    before = loaded(tmp_path / "run.epoch1.pth")
    with parallel.group(config) as group:
        run = prepare(config, group)
        saving.load_weights(run, tmp_path / "run.epoch1.pth")
        assert before["best_accuracy"] == loop.test(run, run.data.validation)[1]


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_goes_on_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    config = replace(FULL, optimizer=optimizer, weight_decay=0.05, epochs=2, save_every=1)
    loop.train(config, tmp_path / "two.pth", log=loop.silent)
    files = RunFiles(resume=tmp_path / "two.epoch1.pth")
    loop.train(config, tmp_path / "more.pth", files, log=loop.silent)
    two, more = loaded(tmp_path / "two.pth"), loaded(tmp_path / "more.pth")
    assert same(more["model"], two["model"])
    assert set(more["optimizer"]["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    for number, state in two["optimizer"]["state"].items():
        assert same(more["optimizer"]["state"][number], state)
    assert more["optimizer"]["param_groups"][0]["weight_decay"] == 0.05


def test_what_is_not_used_is_not_recorded() -> None:
    """RunFiles of runs without the newer options are those of before, byte for byte."""
    assert set(Config().as_dict()).isdisjoint(RECORDED_IF_USED)
    used = Config(optimizer="adam", weight_decay=0.0, eval_every=3).as_dict()
    assert (used["optimizer"], used["weight_decay"], used["eval_every"]) == ("adam", 0.0, 3)
