"""``ckptkit train``, as a person would call it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from ckptkit.trainer import loop
from ckptkit.trainer.command import command
from ckptkit.trainer.command import main as main_of_module
from ckptkit.trainer.config import Config, RequestError, RunFiles, table

from ..conftest import Run
from .conftest import WORDS, invoked, loaded


def test_train_and_evaluate(run: Run, tmp_path: Path) -> None:
    wrapped = ("--parallel", "dp", "--keep-module-prefix")
    done = run("train", "run.pth", *WORDS, *wrapped, cwd=tmp_path)
    assert done.code == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("epoch 1/1  loss 2.")
    assert last == "wrote run.pth"
    accuracy = first.split("accuracy ")[1].split()[0]
    done = run("train", *WORDS, "--evaluate", "run.pth", cwd=tmp_path)
    assert done == (0, f"accuracy {accuracy}\n", "")
    again = run("train", "run.pth", *WORDS, "--quiet", cwd=tmp_path)
    assert again == (2, "", "error: run.pth: already exists\nhint: --force replaces it\n")
    assert run("train", "run.pth", *WORDS, "--quiet", "--force", cwd=tmp_path) == (0, "", "")
    assert "conv1.weight" in loaded(tmp_path / "run.pth")["model"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.pth", *WORDS, "--devices", "cuda:77"],
         "error: this machine has no device cuda:77\nhint: use --devices with cpu"),
        (["--epochs", "none"],
         "error: Invalid value for '--epochs': 'none' is not a valid integer range.\n"
         "hint: see `python -m ckptkit.trainer --help`"),
    ],
)  # fmt: skip
def test_the_module_is_the_command(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["python -m ckptkit.trainer", *words])
    with pytest.raises(SystemExit) as ended:
        main_of_module()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one epoch that a run can go on from."""
    path = tmp_path_factory.mktemp("full") / "one.pth"
    invoked(path, *WORDS, "--save-form", "full")
    return path


@pytest.mark.parametrize(
    "option",
    ["--lr 0.5", "--lr-step 1", "--model mlp", "--weight-decay 0.1", "--batch-size 8"],
)
def test_an_option_that_contradicts_the_checkpoint_is_an_error(
    tmp_path: Path, full: Path, option: str
) -> None:
    resume = ("--devices", "cpu", "--epochs", "2", "--resume", full)
    done = invoked(tmp_path / "more.pth", *resume, *option.split())
    assert done.code == 2
    assert f"{option} contradicts the checkpoint" in done.stderr
    assert f"hint: remove {option.split()[0]}: --resume uses the value" in done.stderr
    assert not (tmp_path / "more.pth").exists()


def test_evaluation_within_epochs_and_the_best_checkpoint(tmp_path: Path) -> None:
    rows = ("--metrics", tmp_path / "metrics.jsonl")
    options = ("--eval-every", "7", "--save-best", "--epochs", "3")
    lines = invoked(tmp_path / "run.pth", *WORDS, *options, *rows).stdout.splitlines()
    starts = [line.split("  ")[0] for line in lines[:3]]
    assert starts == ["epoch 1 step 7", "epoch 1 step 14", "epoch 1/3"]
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "step" in row] == [7, 14] * 3
    accuracies = [row["accuracy"] for row in metrics if "loss" in row]
    assert all("validation_loss" in row for row in metrics[:-1])
    assert list(metrics[-1]) == ["test_loss", "test_accuracy"]  # once
    assert sum(line.startswith("test loss") for line in lines) == 1
    best = loaded(tmp_path / "run.best.pth")
    assert accuracies[best["epoch"] - 1] == max(accuracies)


def test_out_of_memory_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB."
        )

    monkeypatch.setattr(loop, "train_epoch", full)
    assert invoked(tmp_path / "run.pth", *WORDS) == (
        3,
        "",
        "error: the GPU does not have enough memory: CUDA out of memory. Tried to allocate 2.00 "
        "GiB\nhint: use --batch-size 16 --accumulate 2, a smaller --width, --segments 4 or "
        "--memory-efficient\n",
    )


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    done = invoked(
        tmp_path / "run.pth", "--model", "densenet", "--dropout", "0.1", "--no-preserve-rng"
    )
    assert done == (
        2,
        "",
        "error: --dropout 0.1 --no-preserve-rng: recomputing would use another dropout mask, and "
        "compute wrong gradients\nhint: remove --dropout\n",
    )


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"segments": 2}, "--segments 2 needs --model mlp or --model generator\n", "use --model mlp or --model"),
        ({"memory_efficient": True}, "--memory-efficient needs --model densenet\n", "use --model densenet"),
        ({"output_device": "cpu"}, "--output-device cpu needs --parallel dp\n", "use --parallel dp"),
        ({"amp_dtype": "float16"}, "--amp-dtype float16 needs --amp\n", "use --amp"),
        ({"sync_batch_norm": True}, "--sync-batch-norm needs --parallel ddp or --parallel fsdp", "use --parallel ddp"),
        ({"save_best": True, "validation": 0}, "the test set must not select", "remove --save-best"),
        ({"benchmark": True, "deterministic": True}, "cuDNN would choose algorithms by time", "remove --deterministic"),
        ({"amp": True, "amp_dtype": "float16", "parallel": "fsdp"}, "does not support with fsdp", "remove --amp-dtype"),
        ({"ema": 0.9, "parallel": "fsdp"}, "--ema 0.9 --parallel fsdp: .* does not support this", "remove --ema"),
        ({"ema": 0.9, "save_form": "bare"}, "a bare checkpoint cannot contain", "remove --ema"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(options: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Config(**options)  # type: ignore[arg-type]
    assert (caught.value.hint or "").startswith(hint)


def test_there_must_be_something_to_do() -> None:
    assert "Missing argument 'OUT' (or --evaluate FILE)" in invoked(*WORDS).stderr


def test_every_field_of_the_config_is_an_option() -> None:
    names = [each.name for each in (*fields(Config), *fields(RunFiles))]
    assert [*table()] == names
    assert {*names} <= {each.name for each in command.params}
