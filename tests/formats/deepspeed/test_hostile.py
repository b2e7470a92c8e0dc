"""Folders of DeepSpeed that are damaged, mixed, cut differently from what they say, or made to do
harm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit import formats
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    NO_CHECKSUM,
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    PathError,
    TensorError,
    UnsafeGlobalError,
    UnsupportedError,
    coded,
)
from tests.formats.deepspeed.making import TAG, Run, State, load
from tests.formats.deepspeed.test_reading import odd

MODEL = "mp_rank_00_model_states.pt"
MODEL_3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
FLATS_3 = "fp32_flat_groups"
HUGE = [-(2**63), -1, 2**62, 2**63, 2**64, 2**2000, True, 1.0, "1", None]


def read(path: Path) -> Checkpoint:
    return formats.read(Folder(path))


def small(**shapes: tuple[int, ...]) -> State:
    return odd(**(shapes or {"a": (7, 5), "b": (4,)}))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a file holds."""
    content = load(path)
    change(content)
    torch.save(content, path)


def edit_optims(tag: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state that every rank has."""
    for path in tag.glob("*_optim_states.pt"):
        edit(path, lambda content: change(content["optimizer_state_dict"]))


# Which folder


@pytest.mark.parametrize(
    "text",
    [
        "../y/global_step7",
        "/etc",
        "..",
        ".",
        "global_step7/",
        "a\\b",
        "%2e%2e",
        "global_step8",
        "zero_to_fp32.py",
    ],
)
def test_SH_01_latest_leads_elsewhere(tmp_path: Path, text: str) -> None:
    for name in ("x", "y"):
        Run(small()).save(tmp_path / name)
    (tmp_path / "x" / "latest").write_text(text)
    with pytest.raises(CorruptError, match="latest names") as caught:
        read(tmp_path / "x")
    assert TAG in str(caught.value.hint)


@pytest.mark.parametrize("content", [b"", b"\0", b"\xff\xfe", b"x" * 5000, b"a\nb"])
def test_SH_01_latest_is_no_word(tmp_path: Path, content: bytes) -> None:
    """As if it were not there."""
    Run(small()).save(tmp_path / "x")
    (tmp_path / "x" / "latest").write_bytes(content)
    if content == b"\xff\xfe":
        with pytest.raises(CorruptError):
            read(tmp_path / "x")
    else:
        assert list(read(tmp_path / "x").weights) == ["a", "b"]


def test_SH_02_links(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")
    shutil.move(tag, tmp_path / "elsewhere")
    tag.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptError):
        read(tmp_path / "x")
    tag.unlink()
    shutil.copytree(tmp_path / "elsewhere", tag)
    (tag / MODEL).unlink()
    (tag / MODEL).symlink_to(tmp_path / "elsewhere" / MODEL)
    with pytest.raises(PathError):
        read(tmp_path / "x")


def test_SH_02_a_link_in_place_of_the_blobs(tmp_path: Path) -> None:
    """The cache of the hub is followed into blobs, but not to where a link of that name leads."""
    tag = Run(small()).save(tmp_path / "snapshots" / "0123")
    shutil.move(tag / MODEL, tmp_path / "secret")
    (tmp_path / "blobs").symlink_to(tmp_path)
    (tag / MODEL).symlink_to("../../../blobs/secret")
    with pytest.raises(PathError):
        read(tmp_path / "snapshots" / "0123")


@pytest.mark.parametrize("name", ["latest", f"{TAG}/{MODEL}", f"{TAG}/{OPTIM.format(0)}"])
def test_SH_03_special_files(tmp_path: Path, name: str) -> None:
    for make in (os.mkfifo, os.mkdir):
        folder = tmp_path / make.__name__
        Run(small()).save(folder)
        (folder / name).unlink()
        make(folder / name)
        if name == "latest":  # as if it were not there
            assert list(read(folder).weights) == ["a", "b"]
        else:
            with pytest.raises(PathError):
                read(folder)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"],
)
def test_SH_09_a_model_beside_it(tmp_path: Path, name: str) -> None:
    """As transformers saves it: 16 bits there, 32 here."""
    tag = Run(small()).save(tmp_path / "x")
    (tmp_path / "x" / name).write_bytes(b"{}")
    with pytest.raises(AmbiguousError, match=name) as caught:
        read(tmp_path / "x")
    assert str(tag) in str(caught.value.hint) and name in str(caught.value.hint)
    assert list(read(tag).weights) == ["a", "b"]


# Which files


def test_DC_08_missing_models(tmp_path: Path) -> None:
    for rank in (0, 1):
        tag = Run(small(), stage=3).save(tmp_path / str(rank))
        (tag / MODEL_3.format(rank)).unlink()
        with pytest.raises(CorruptError, match=MODEL_3.format(rank)):
            read(tag)
    tag = Run(small(), stage=2).save(tmp_path / "x")
    (tag / MODEL).unlink()
    with pytest.raises(CorruptError, match=f"{MODEL} is missing"):
        read(tag)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_DC_08_no_optimizer_files(tmp_path: Path, stage: int) -> None:
    """Of stage 0 there would be none either, but this one says what was cut."""
    tag = Run(small(), stage=stage, ranks=3).save(tmp_path / "x")
    for path in tag.glob("*_optim_states.pt"):
        path.unlink()
    names = ", ".join(OPTIM.format(rank) for rank in range(3))
    with pytest.raises(CorruptError, match=f"{names} are missing"):
        read(tag)


@pytest.mark.parametrize(
    "name", [f"bf16_{OPTIM.format(0)}", OPTIM.format("00"), "mp_rank_0_model_states.pt"]
)
def test_SH_09_two_files_of_a_rank(tmp_path: Path, name: str) -> None:
    tag = Run(small()).save(tmp_path / "x")
    shutil.copy(tag / (MODEL if name.startswith("mp") else OPTIM.format(0)), tag / name)
    with pytest.raises(AmbiguousError, match="two files of rank"):
        read(tag)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "model-parallel"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "experts"),
        ("expert_3_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
        ("another_model_states.pt", "an unsupported kind"),
    ],
)
def test_DC_09_other_parallelism(tmp_path: Path, name: str, says: str) -> None:
    tag = Run(small()).save(tmp_path / "x")
    shutil.copy(tag / MODEL, tag / name)
    with pytest.raises(UnsupportedError, match=f"{says}.*{name}|{name}.*{says}|{name}") as caught:
        read(tag)
    assert says in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"PK\3\4"]
)
def test_SH_07_files_of_another_kind(tmp_path: Path, content: bytes) -> None:
    for name in (MODEL, OPTIM.format(1)):
        tag = Run(small()).save(tmp_path / name)
        (tag / name).write_bytes(content)
        with pytest.raises(FormatError) as caught:
            read(tag)
        assert caught.value.where == str(tag / name)


# What they say


OPTIMS, MODELS = "*_optim_states.pt", "*_model_states.pt"
Wrong = tuple[str, tuple[int, ...], Callable[[int, Any], dict[str, Any]], list[Any]]
WRONG: dict[str, Wrong] = {
    "DC_03 partition_count": (
        OPTIMS, (2, 3), lambda stage, value: {"partition_count": value if stage == 3 else [value]},
        [0, 1, 3, 10**12, *HUGE],
    ),
    "DC_03 gaps": (
        OPTIMS, (2,), lambda stage, value: {"param_alignment_paddings": value},
        [[], [[0]], [[0, 0], [0, 0]], [[0, 0, 0]], [[100, 0]], [[-1, 0]], [[2**62, 0]], [5], "ab"],
    ),
    "DC_06 flat tensors": (
        OPTIMS, (2, 3),
        lambda stage, value: {FLATS_3 if stage == 3 else "single_partition_of_fp32_groups": value},
        [None, 1, {}, [1], ["x"], [None], [torch.ones(4, 5)], [torch.ones(40)[::2]],
         [torch.tensor(1.0)], [torch.ones(20, device="meta")]],
    ),
    "DC_05 shapes": (
        MODELS, (2, 3), lambda stage, value: {"param_shapes": [{"a": value, "b": (4,)}]},
        [shape for size in HUGE for shape in ((size,), (size, size), [size], size)],
    ),
    "DC_10 dicts of shapes": (
        MODELS, (3,), lambda stage, value: {"param_shapes": value},
        [1, {}, "ab", [], [1], [[]], [{1: (3,)}], [{"a": {}}], [{"a": (7, 5)}, {"a": (4,)}]],
    ),
    "DC_04 frozen parameters": (
        MODELS, (2, 3), lambda stage, value: {"frozen_param_fragments": value},
        [{}, {"c": None}, {"c": 1}, {"c": torch.ones(2)}, {"c": torch.ones(3, 1)},
         {"c": torch.ones(4)[::2]}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_fields_of_another_kind_or_size(tmp_path: Path, what: str) -> None:
    pattern, stages, make, values = WRONG[what]
    for number, (stage, value) in enumerate(product(stages, values)):
        run = Run(small(), stage=stage, frozen={"c": torch.ones(5)})
        tag = run.save(tmp_path / str(number))
        for path in tag.glob(pattern):
            content = load(path)
            content.get("optimizer_state_dict", content).update(make(stage, value))
            torch.save(content, path)
        with pytest.raises((FormatError, LimitError)):
            read(tag)


@pytest.mark.parametrize("stage", [2, 3])
def test_DC_04_parameters_that_are_not_covered(tmp_path: Path, stage: int) -> None:
    """A gap never becomes zeros, and what is behind the last parameter is not dropped in
    silence."""
    shapes: dict[str, dict[str, Any]] = {
        "more": {"a": (7, 5), "b": (4,), "c": (9,)},
        "less": {"a": (7, 5)},
        "longer": {"a": (7, 6), "b": (4,)},
        "shorter": {"a": (7, 4), "b": (4,)},
        "none": {},
    }
    for name, held in shapes.items():
        tag = Run(small(), stage=stage).save(tmp_path / name)
        for path in tag.glob("*_model_states.pt"):
            sizes = {key: torch.Size(shape) for key, shape in held.items()}
            edit(path, lambda content, new=sizes: content.update(param_shapes=[new], module={}))
        with pytest.raises(CorruptError, match="elements"):
            read(tag)


def test_DC_05_a_rank_without_end(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")
    edit(
        tag / MODEL,
        lambda content: content.update(param_shapes=[{"a": (2**62,) * 100_000, "b": (4,)}]),
    )
    with pytest.raises(LimitError, match="rank"):
        read(tag)


@pytest.mark.parametrize(
    "key",
    ["module", "buffer_names", "shared_params", "frozen_param_shapes", "optimizer_state_dict"],
)
@pytest.mark.parametrize("value", [1, "x", [1], {1: 2}, {"a": 1}, {"a": ()}, torch.ones(1)])
def test_DC_06_values_of_another_kind(tmp_path: Path, key: str, value: Any) -> None:
    """Read, or refused in words."""
    for stage in (2, 3):
        tag = Run(small(), stage=stage).save(tmp_path / str(stage))
        for path in tag.iterdir():
            content = load(path)
            if key in content:
                torch.save(content | {key: value}, path)
        try:
            list(read(tag).weights)
        except CkptkitError as error:
            assert error.where is not None


@pytest.mark.parametrize(
    "value", [1, "x", [1], [{}], {1: 2}, {"state": 1}, {"state": {0: 1}}, {"state": {0: []}}]
)
def test_DC_06_optimizers_of_another_kind(tmp_path: Path, value: Any) -> None:
    for stage in (2, 3):
        tag = Run(small(), stage=stage).save(tmp_path / str(stage))
        key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        edit_optims(tag, lambda state, key=key: state.update({key: value}))
        try:
            list(read(tag).weights)
        except CkptkitError as error:
            assert error.where is not None


def test_DC_06_a_moment_that_is_too_short(tmp_path: Path) -> None:
    """It is left out with a warning, the weights are not affected."""
    tag = Run(small()).save(tmp_path / "x")

    def cut(state: dict[str, Any]) -> None:
        kept = state["base_optimizer_state"]["state"][0]
        kept["exp_avg"] = kept["exp_avg"][:-1].clone()

    edit(tag / OPTIM.format(0), lambda content: cut(content["optimizer_state_dict"]))
    checkpoint = read(tag)
    assert checkpoint.warnings == (
        "dropped from the optimizer state, because they do not have one value per weight: exp_avg",
    )
    assert list(checkpoint.root["optimizer"]["state"]["a"]) == ["step", "exp_avg_sq"]


def test_TM_04_more_values_than_any_optimizer_keeps(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")
    state = {"state": {0: dict.fromkeys(range(1000), 1)}, "param_groups": []}
    edit_optims(tag, lambda content: content.update(base_optimizer_state=state))
    with pytest.raises(LimitError):
        read(tag)


def test_TM_04_one_flat_tensor_many_times(tmp_path: Path) -> None:
    """Memory that is named again and again is not written without limit."""
    flat = torch.ones(1 << 20)
    run = Run({"a": torch.ones(1)}, stage=3, ranks=1)
    tag = run.save(tmp_path / "x")
    edit_optims(
        tag, lambda state: state.update(fp32_flat_groups=[flat] * 200, optimizer_state_dict={})
    )
    edit(
        tag / MODEL_3.format(0), lambda content: content.update(param_shapes=[{"a": (200 << 20,)}])
    )
    with pytest.raises(LimitError):
        ckptkit.save(read(tag), tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch attacked",)


@pytest.mark.parametrize("name", [MODEL, OPTIM.format(1)])
def test_DC_01_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    tag = Run(small()).save(tmp_path / "x")
    edit(
        tag / name,
        lambda content: content.get("optimizer_state_dict", content).update(client=Attack()),
    )
    checkpoint = read(tag)
    assert list(checkpoint.weights) == ["a", "b"]
    if name == MODEL:
        with pytest.raises(UnsafeGlobalError):
            ckptkit.save(checkpoint, tmp_path / "x.pth")
    assert not (tmp_path / "attacked").exists()


# Universal checkpoints


def universal(tmp_path: Path) -> Path:
    return Run(small(), groups=[["a"], ["b"]]).universal(tmp_path / "x")


@pytest.mark.parametrize(
    "value", [1, {}, {"param": None}, {"param": torch.ones(5)}, torch.ones(2, 2), torch.ones(5)]
)
def test_DC_06_files_that_hold_something_else(tmp_path: Path, value: Any) -> None:
    tag = universal(tmp_path)
    torch.save(value, tag / "zero" / "b" / "fp32.pt")
    with pytest.raises(FormatError):
        read(tag)


def test_SH_02_links_in_a_universal_checkpoint(tmp_path: Path) -> None:
    tag = universal(tmp_path)
    shutil.move(tag / "zero" / "b", tmp_path / "b")
    (tag / "zero" / "b").symlink_to(tmp_path / "b")
    with pytest.raises(CorruptError, match="no folder for parameter 'b'"):
        read(tag)


def test_SH_01_names_of_parameters_that_lead_out(tmp_path: Path) -> None:
    tag = universal(tmp_path)
    edit(
        tag / MODEL,
        lambda content: content.update(param_shapes=[{"a": (7, 5), "../../b": (4,)}], module={}),
    )
    with pytest.raises(CorruptError, match="no folder for parameter"):
        read(tag)


def test_TM_01_a_flat_tensor_beyond_its_storage(tmp_path: Path) -> None:
    """Made by changing a number in the pickle of a real file."""
    tag = Run({"a": torch.ones(300)}, ranks=1).save(tmp_path / "x")
    path = tag / OPTIM.format(0)
    data = path.read_bytes()
    sizes = b"M\x2c\x01\x85"  # the tuple (300,)
    assert sizes in data
    path.write_bytes(data.replace(sizes, b"M\x2d\x01\x85"))
    with pytest.raises((TensorError, CorruptError)):
        read(tag)


def test_a_buffer_that_is_no_tensor_has_another_name(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")

    def change(content: dict[str, Any]) -> None:
        content["module"]["note"] = "x"
        content |= {"buffer_names": ["note"], "shared_params": {"other": "note"}}

    edit(tag / MODEL, change)
    module = read(tmp_path / "x").root["module"]
    assert (module["note"], module["other"]) == ("x", "x")


@pytest.mark.parametrize(
    "group", [{"lr": 0.5, "params": ["a"]}, {"lr": 0.5, "params": [1]}, {"lr": 0.5}, "odd"]
)
def test_groups_that_do_not_number_flat_tensors(tmp_path: Path, group: Any) -> None:
    """They are kept as they are."""
    tag = Run(small()).save(tmp_path / "x")
    edit_optims(tag, lambda content: content["base_optimizer_state"].update(param_groups=[group]))
    assert read(tmp_path / "x").root["optimizer"]["param_groups"] == [group]


def test_what_files_of_ranks_warn_of_is_said_once(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        Run(small()).save(tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(before)
    said = "of its storages have no checksum: ckptkit cannot detect damage in them"
    warnings = read(tmp_path / "x").warnings
    assert warnings == (f"{MODEL}: 2 {said}", f"{OPTIM.format(0)} and 1 more: 4 {said}")
    assert coded(warnings, NO_CHECKSUM) == [*warnings]


def test_a_step_without_memory(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")
    step = torch.empty((), device="meta")
    edit_optims(tag, lambda content: content["base_optimizer_state"]["state"][0].update(step=step))
    state = read(tmp_path / "x").root["optimizer"]["state"]
    assert [(each["step"].storage, each["step"].shape) for each in state.values()] == [
        (None, ())
    ] * 2
    assert list(state["a"]) == ["step", "exp_avg", "exp_avg_sq"]
