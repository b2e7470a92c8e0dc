"""Damage that DeepSpeed's folders are read with all the same; `hostile` has what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.errors import NO_CHECKSUM, CkptkitError, UnsafeGlobalError, coded
from tests.formats.deepspeed.hostile import replaced
from tests.formats.deepspeed.making import MODEL, MOMENTS, OPTIM, Run, edit_optims, small
from tests.formats.folders import Edit, change

LATEST = "../latest"
NO_LATEST: dict[str, Edit] = {
    **{f"SH_01 {content!r}": replaced(LATEST, lambda path, content=content: path.write_bytes(content))
       for content in (b"", b"\0", b"x" * 5000, b"a\nb")},
    "SH_03 a pipe": replaced(LATEST, os.mkfifo), "SH_03 a folder": replaced(LATEST, os.mkdir),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_LATEST)
def test_SH_01_SH_03_latest_is_no_word(tmp_path: Path, what: str) -> None:
    """As if it were not there."""
    NO_LATEST[what](Run(small()).save(tmp_path / "x"))
    assert list(ckptkit.open(tmp_path / "x").weights) == ["a", "b"]


FIELDS = "module", "buffer_names", "shared_params", "frozen_param_shapes", "optimizer_state_dict"
VALUES = {
    **{key: [1, "x", [1], {1: 2}, {"a": 1}, {"a": ()}, torch.ones(1)] for key in FIELDS},
    "base_optimizer_state": [
        1, "x", [1], [{}], {1: 2}, {"state": 1}, {"state": {0: 1}}, {"state": {0: []}},
    ],
}  # fmt: skip


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("key", VALUES)
def test_DC_06_values_of_another_kind(tmp_path: Path, key: str, stage: int) -> None:
    """Read, or refused in words."""
    for number, value in enumerate(VALUES[key]):
        tag = Run(small(), stage=stage).save(tmp_path / str(number))
        for path in tag.iterdir():
            change(path, lambda held, value=value: held.update({key: value} if key in held else {}))
        if key not in FIELDS:
            inner = "optimizer_state_dict" if stage == 3 else key
            edit_optims(tag, lambda state, value=value, key=inner: state.update({key: value}))
        try:
            list(ckptkit.open(tag).weights)
        except CkptkitError as error:
            assert error.where is not None


def test_DC_06_a_moment_that_is_too_short(tmp_path: Path) -> None:
    """It is left out with a warning, the weights are not affected."""
    tag = Run(small()).save(tmp_path / "x")

    def cut(content: dict[str, Any]) -> None:
        kept = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        kept["exp_avg"] = kept["exp_avg"][:-1].clone()

    change(tag / OPTIM.format(0), cut)
    checkpoint = ckptkit.open(tag)
    assert checkpoint.warnings == (
        "dropped from the optimizer state, because they do not have one value per weight: exp_avg",
    )
    assert list(checkpoint.root["optimizer"]["state"]["a"]) == ["step", "exp_avg_sq"]


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch attacked",)


@pytest.mark.parametrize("name", [MODEL, OPTIM.format(1)])
def test_DC_01_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    tag = Run(small()).save(tmp_path / "x")
    change(tag / name, lambda held: held.get("optimizer_state_dict", held).update(client=Attack()))
    checkpoint = ckptkit.open(tag)
    assert list(checkpoint.weights) == ["a", "b"]
    if name == MODEL:
        with pytest.raises(UnsafeGlobalError):
            ckptkit.save(checkpoint, tmp_path / "x.pth")
    assert not (tmp_path / "attacked").exists()


def test_a_buffer_that_is_no_tensor_has_another_name(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")
    more = {"buffer_names": ["note"], "shared_params": {"other": "note"}}
    change(tag / MODEL, lambda held: held.update(module={**held["module"], "note": "x"}, **more))
    module = ckptkit.open(tag).root["module"]
    assert (module["note"], module["other"]) == ("x", "x")


@pytest.mark.parametrize(
    "group", [{"lr": 0.5, "params": ["a"]}, {"lr": 0.5, "params": [1]}, {"lr": 0.5}, "odd"]
)
def test_groups_that_do_not_number_flat_tensors(tmp_path: Path, group: Any) -> None:
    """They are kept as they are."""
    tag = Run(small()).save(tmp_path / "x")
    edit_optims(tag, lambda content: content["base_optimizer_state"].update(param_groups=[group]))
    assert ckptkit.open(tag).root["optimizer"]["param_groups"] == [group]


def test_what_files_of_ranks_warn_of_is_said_once(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        Run(small()).save(tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(before)
    said = "of its storages have no checksum: ckptkit cannot detect damage in them"
    warnings = ckptkit.open(tmp_path / "x").warnings
    assert warnings == (f"{MODEL}: 2 {said}", f"{OPTIM.format(0)} and 1 more: 4 {said}")
    assert coded(warnings, NO_CHECKSUM) == [*warnings]


def test_a_step_without_memory(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")
    step = torch.empty((), device="meta")
    edit_optims(tag, lambda content: content["base_optimizer_state"]["state"][0].update(step=step))
    state = ckptkit.open(tag).root["optimizer"]["state"]
    assert [(held["step"].storage, held["step"].shape) for held in state.values()] == [
        (None, ())
    ] * 2
    assert list(state["a"]) == ["step", *MOMENTS]
