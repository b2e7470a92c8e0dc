"""DeepSpeed's folders, against the parameters that they were made from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.compute.operation import Concat
from ckptkit.core.bytesource import Derived, Folder, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tree import Object, OrderedMapping
from ckptkit.formats.format import Probe
from ckptkit.formats.table import DEEPSPEED
from tests.formats.conformance import check_equal, elements, elements_of, reading, sharing
from tests.formats.deepspeed.making import MOMENTS, TAG, Run, State, load

ODD = {"a": (7, 5), "b": (3,), "c": (1,), "d": (2, 3, 2), "e": (), "f": (0, 4), "g": (11,)}
GROUPS = [["a", "c", "d"], ["b", "e", "f", "g"]]


def odd(**shapes: tuple[int, ...]) -> State:
    """Parameters of odd sizes, no two elements equal."""
    made: State = {}
    start = 1
    for name, shape in (shapes or ODD).items():
        tensor = torch.empty(shape)
        made[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float32).view(shape)
        start += tensor.numel()
    return made


def read(path: Path) -> Checkpoint:
    probe = Probe(Folder(path))
    assert DEEPSPEED.matches(probe)
    return DEEPSPEED.read(probe)


def check_state(checkpoint: Checkpoint, state: State) -> None:
    """The optimizer has what `making` gave it for each parameter."""
    found = checkpoint.root["optimizer"]["state"]
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        for key, shift in MOMENTS.items():
            assert found[name][key].shape == tuple(tensor.shape)
            assert elements_of(found[name][key]) == elements(tensor + shift), (name, key)
        assert elements_of(found[name]["step"]) == elements(torch.tensor(7.0))


# Weights


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_element_of_odd_parameters(
    tmp_path: Path, stage: int, groups: Any, ranks: int
) -> None:
    state = odd()
    Run(state, ranks=ranks, stage=stage, groups=groups).save(tmp_path / "x")
    checkpoint = read(tmp_path / "x")
    check_equal(checkpoint.weights, state)
    check_state(checkpoint, state)
    assert checkpoint.warnings == ()
    assert {tensor.device for tensor in checkpoint.weights.values()} == {"cpu"}


def test_a_parameter_over_many_ranks(tmp_path: Path) -> None:
    """Natural order of the ranks: rank 10 comes after rank 9."""
    state = odd(a=(3,), b=(5, 20), c=(2,))
    for stage in (2, 3):
        Run(state, ranks=12, stage=stage).save(tmp_path / str(stage))
        check_equal(read(tmp_path / str(stage)).weights, state)


def test_groups_that_leave_ranks_empty(tmp_path: Path) -> None:
    state = odd(a=(40,), b=(1,))
    Run(state, ranks=4, groups=[["a"], ["b"]]).save(tmp_path / "x")
    last = load(tmp_path / "x" / TAG / "zero_pp_rank_3_mp_rank_00_optim_states.pt")
    assert last["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].numel() == 0
    check_equal(read(tmp_path / "x").weights, state)
    check_state(read(tmp_path / "x"), state)


@pytest.mark.parametrize("elastic", [False, True])
def test_gaps_between_parameters(tmp_path: Path, elastic: bool) -> None:
    state = odd()
    Run(state, ranks=3, groups=GROUPS, gaps=[[1, 3, 0], [1, 3, 0, 0]], elastic=elastic).save(
        tmp_path / "x"
    )
    check_equal(read(tmp_path / "x").weights, {name: state[name] for name in state})
    check_state(read(tmp_path / "x"), state)


@pytest.mark.parametrize("flats", [2, 3, 7])
def test_stage_3_flat_tensors_that_split_a_parameter(tmp_path: Path, flats: int) -> None:
    state = odd()
    Run(state, ranks=2, stage=3, flats=flats).save(tmp_path / "x")
    check_equal(read(tmp_path / "x").weights, state)


def test_flat_tensors_that_are_not_cut(tmp_path: Path) -> None:
    """bf16_optimizer.py: no zero_stage, the padding is counted but left on."""
    state = odd(a=(8, 5), b=(6,))
    for ranks in (1, 2, 3):
        run = Run(state, ranks=ranks, stage=1, trimmed=False, half=torch.bfloat16, prefix="bf16_")
        tag = run.save(tmp_path / str(ranks))
        for path in tag.glob("*_optim_states.pt"):
            content = load(path)
            del content["optimizer_state_dict"]["zero_stage"]
            torch.save(content, path)
        checkpoint = read(tag)
        check_equal(checkpoint.weights, state)
        check_state(checkpoint, state)


def test_buffers_frozen_parameters_and_ties(tmp_path: Path) -> None:
    state = odd(embed=(7, 3), w=(5,))
    mean = torch.tensor(
        [1.5, -2.25, float("nan")]
    )  # which NaN torch makes of a half depends on the processor
    buffers = {"mean": mean.half(), "steps": torch.tensor(9)}
    frozen = {"fixed": torch.arange(11.0).bfloat16(), "none": torch.empty(0, 3)}
    want = state | frozen | {"head": state["embed"], "mean": mean, "steps": buffers["steps"]}
    for stage, ranks in ((2, 1), (2, 3), (3, 1), (3, 3)):
        run = Run(
            state,
            ranks=ranks,
            stage=stage,
            buffers=buffers,
            frozen=frozen,
            shared={"head": "embed"},
        )
        run.save(tmp_path / f"{stage}.{ranks}")
        checkpoint = read(tmp_path / f"{stage}.{ranks}")
        check_equal(checkpoint.weights, want)
        assert checkpoint.weights["head"].storage is checkpoint.weights["embed"].storage
        assert checkpoint.weights["head"] is not checkpoint.weights["embed"]
        assert checkpoint.warnings == ()


def test_views_of_one_buffer_stay_views(tmp_path: Path) -> None:
    base = torch.arange(6.0).half()
    buffers = {"all": base, "end": base[4:], "turned": base.view(2, 3).t()}
    Run(odd(a=(3,)), buffers=buffers).save(tmp_path / "x")
    weights = read(tmp_path / "x").weights
    wide = base.float()
    want = {"a": odd(a=(3,))["a"], "all": wide, "end": wide[4:], "turned": wide.view(2, 3).t()}
    check_equal(weights, want)
    assert sharing({name: id(tensor.storage) for name, tensor in weights.items()}) == [
        ["a"],
        ["all", "end", "turned"],
    ]


def test_what_is_in_module_alone(tmp_path: Path) -> None:
    """Stage 1 does not record frozen parameters; a module that is registered twice is recorded
    nowhere."""
    state = odd(a=(3, 2), b=(4,))
    frozen = {"fixed": torch.arange(5.0).half()}
    tag = Run(state, stage=1, frozen=frozen, half=torch.float16).save(tmp_path / "x")
    change(tag / "mp_rank_00_model_states.pt", lambda content: content["module"].update(
        again=content["module"]["a"], a_extra_state={"scale": 2}, none=torch.empty(0, 3)
    ))  # fmt: skip
    checkpoint = read(tag)
    want = state | frozen | {"again": state["a"], "none": torch.empty(0, 3)}
    check_equal(checkpoint.weights, want)
    assert checkpoint.weights["again"].storage is checkpoint.weights["a"].storage
    assert checkpoint.root["module"]["a_extra_state"] == {"scale": 2}
    assert checkpoint.warnings == (
        "copied these tensors unchanged from module, because their fp32 weights are missing: fixed, none",
    )


def test_names_that_stage_3_has_no_values_for(tmp_path: Path) -> None:
    tag = Run(odd(a=(3,)), stage=3).save(tmp_path / "x")
    for path in tag.glob("*_model_states.pt"):
        change(path, lambda content: content["module"].update(again=torch.empty(0)))
    checkpoint = read(tag)
    assert list(checkpoint.weights) == ["a"]
    (warning,) = checkpoint.warnings
    assert warning.startswith("dropped these entries of module") and warning.endswith("again")


def test_weights_of_the_run_in_16_bits(tmp_path: Path) -> None:
    state = odd(a=(3, 2), b=(5,))
    buffers = {"n": torch.tensor(3)}
    for dtype in (torch.bfloat16, torch.float16):
        Run(state, half=dtype, buffers=buffers).save(tmp_path / str(dtype))
        checkpoint = read(tmp_path / str(dtype))
        check_equal(checkpoint.weights, state | buffers)
        half = checkpoint.root[f"module_{str(dtype).removeprefix('torch.')}"]
        check_equal(half, {name: tensor.to(dtype) for name, tensor in state.items()} | buffers)
        assert half["n"].storage is checkpoint.weights["n"].storage
    for run in (Run(state), Run(state, stage=3, half=torch.float16)):
        run.save(tmp_path / f"none{run.stage}")
        assert [
            key for key in read(tmp_path / f"none{run.stage}").root if key.startswith("module")
        ] == ["module"]


def test_the_order_and_the_metadata_of_the_model(tmp_path: Path) -> None:
    state = odd(a=(3,), b=(5,), c=(2,))
    Run(state, groups=[["c"], ["b", "a"]]).save(tmp_path / "x")
    module = read(tmp_path / "x").root["module"]
    assert list(module) == ["a", "b", "c"]
    assert isinstance(module, OrderedMapping) and module.state["_metadata"][""] == {"version": 1}


def test_tags_of_devices_are_left_aside(tmp_path: Path, simulated_cuda: Any) -> None:
    state, buffers = odd(a=(3, 2), b=(5,)), {"mean": torch.ones(3), "half": torch.ones(3).half()}
    frozen = {"fixed": torch.arange(4.0)}
    for stage in (1, 2, 3):
        with simulated_cuda(1):
            tag = Run(state, stage=stage, buffers=buffers, frozen=frozen, half=torch.float16).save(
                tmp_path / str(stage)
            )
        checkpoint = read(tag)
        assert {tensor.device for tensor in checkpoint.weights.values()} == {"cpu"}
        check_equal(checkpoint.weights, state | frozen | buffers | {"half": torch.ones(3)})


def change(path: Path, edit: Any) -> None:
    content = load(path)
    edit(content)
    torch.save(content, path)


# Everything else


def test_the_tree(tmp_path: Path) -> None:
    Run(odd(a=(3,), b=(2,)), groups=[["b"], ["a"]], client={"epoch": 3, "rng": torch.ones(2)}).save(
        tmp_path / "x"
    )
    checkpoint = read(tmp_path / "x")
    assert list(checkpoint.root) == [
        "module", "optimizer", "buffer_names", "shared_params", "lr_scheduler", "global_steps", "dp_world_size",
        "mp_world_size", "ds_version", "epoch", "rng",
    ]  # fmt: skip
    assert checkpoint.root["epoch"] == 3 and checkpoint.root["global_steps"] == 7
    optimizer = checkpoint.root["optimizer"]
    assert list(optimizer) == ["state", "param_groups", "clip_grad"]
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": ["b"]}, {"lr": 0.2, "params": ["a"]}]
    assert checkpoint.selection is not None and checkpoint.selection.path == ("module",)


@pytest.mark.parametrize("key", ["model", "state_dict", "weights"])
def test_client_values_are_not_the_weights(tmp_path: Path, key: str) -> None:
    """Whatever name they have."""
    state = odd(a=(3,))
    Run(state, client={key: {"other": torch.ones(2)}}).save(tmp_path / "x")
    check_equal(read(tmp_path / "x").weights, state)


def test_groups_of_the_optimizer(tmp_path: Path) -> None:
    """By name, whether flat tensors are a group each (1, 2) or several of one (3), or there are
    none."""
    state = odd()
    Run(state, stage=3, groups=GROUPS).save(tmp_path / "3")
    names = [name for group in GROUPS for name in group]
    assert read(tmp_path / "3").root["optimizer"]["param_groups"] == [{"lr": 0.1, "params": names}]
    Run(state, groups=GROUPS, elastic=True).save(tmp_path / "elastic")
    groups = read(tmp_path / "elastic").root["optimizer"]["param_groups"]
    assert groups == [{"params": names} for names in GROUPS]


def test_no_step_yet(tmp_path: Path) -> None:
    for stage in (2, 3):
        Run(odd(a=(3,), b=(2,)), stage=stage, steps=False).save(tmp_path / str(stage))
        checkpoint = read(tmp_path / str(stage))
        assert (
            checkpoint.root["optimizer"]["state"] == {"a": {}, "b": {}}
            and checkpoint.warnings == ()
        )


def test_the_step_of_a_parameter_is_its_own(tmp_path: Path) -> None:
    """torch would count a shared one once for each parameter."""
    Run(odd(a=(3,), b=(2,))).save(tmp_path / "x")
    state = read(tmp_path / "x").root["optimizer"]["state"]
    assert state["a"]["step"].storage is not state["b"]["step"].storage


def test_state_that_is_not_one_value_per_weight(tmp_path: Path) -> None:
    tag = Run(odd(a=(6, 4), b=(5,)), groups=[["a"], ["b"]]).save(tmp_path / "x")
    for path in tag.glob("*_optim_states.pt"):
        content = load(path)
        state = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
        state[0]["absmax"] = torch.ones(2)
        state[1] = {"step": state[1]["step"]}
        torch.save(content, path)
    checkpoint = read(tag)
    assert checkpoint.warnings == (
        "dropped from the optimizer state, because they do not have one value per weight: absmax",
    )
    state = checkpoint.root["optimizer"]["state"]
    assert list(state["a"]) == ["step", *MOMENTS] and list(state["b"]) == ["step"]


def test_stage_0(tmp_path: Path) -> None:
    state, buffers = odd(a=(3,), b=(2,)), {"n": torch.tensor(3)}
    tag = Run(state, stage=0, buffers=buffers, client={"model": {"x": torch.ones(1)}}).save(
        tmp_path / "x"
    )
    assert sorted(os.listdir(tag)) == ["mp_rank_00_model_states.pt"]
    checkpoint = read(tmp_path / "x")
    check_equal(checkpoint.weights, state | buffers)
    assert checkpoint.root["optimizer"] == {"state": {}, "param_groups": []}


# Folders


def test_a_folder_with_its_tag(tmp_path: Path) -> None:
    state = odd(a=(3,))
    tag = Run(state).save(tmp_path / "x", latest=False)
    for path in (tag, tmp_path / "x"):
        checkpoint = read(path)
        check_equal(checkpoint.weights, state)
        assert checkpoint.format == "deepspeed" and checkpoint.name == str(path)
    Run(odd(a=(4,))).save(tmp_path / "y")
    shutil.move(tmp_path / "y" / TAG, tmp_path / "x" / "global_step10")
    for text, shape in ((TAG, (3,)), ("global_step10\n", (4,))):
        (tmp_path / "x" / "latest").write_text(text)
        assert read(tmp_path / "x").weights["a"].shape == shape


def test_the_files_inside_belong_to_the_folder(tmp_path: Path) -> None:
    """Its size counts them, and it closes them."""
    tag = Run(odd(a=(3,))).save(tmp_path / "x")
    folder = Folder(tmp_path / "x")
    checkpoint = DEEPSPEED.read(Probe(folder))
    files = [*tag.iterdir(), *(path for path in (tmp_path / "x").iterdir() if path.is_file())]
    assert folder.nbytes() == sum(path.stat().st_size for path in files)
    record = checkpoint.weights["a"].storage
    assert record is not None
    extent = record.record.locate()
    assert isinstance(extent, Derived)
    folder.close()
    for source in extent.sources():
        assert source.name.startswith(str(tag))
        with pytest.raises(ckptkit.CkptkitError):
            source.read(0, 1)


def test_the_cache_of_the_hub(tmp_path: Path) -> None:
    state = odd(a=(3,))
    Run(state).save(tmp_path / "made")
    snapshot, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(
        sorted(path for path in (tmp_path / "made").rglob("*") if path.is_file())
    ):
        link = snapshot / path.relative_to(tmp_path / "made")
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    for path in (snapshot, snapshot / TAG):
        check_equal(read(path).weights, state)


@pytest.mark.parametrize("stage", [2, 3])
def test_universal(tmp_path: Path, stage: int) -> None:
    state = odd()
    run = Run(
        state, stage=stage, ranks=3, buffers={"n": torch.tensor(3)}, frozen={"fixed": torch.arange(4.0)},
        shared={"again": "a"}, groups=[list(state)],
    )  # fmt: skip
    tag = run.universal(tmp_path / "x")
    for path in (tag, tmp_path / "x"):
        checkpoint = read(path)
        check_equal(checkpoint.weights, state | run.frozen | {"again": state["a"]} | run.buffers)
        check_state(checkpoint, state)
        assert checkpoint.warnings == ()
    optimizer = checkpoint.root["optimizer"]
    assert (
        optimizer["param_groups"] == [{"lr": 0.1, "params": list(state)}]
        and optimizer["clip_grad"] == 1.0
    )


def test_universal_of_other_ranks(tmp_path: Path) -> None:
    """Model-parallel ranks are merged: the shapes are those of the folders."""
    state = odd(a=(4, 2), b=(5,))
    tag = Run(state).universal(tmp_path / "x")
    part = Run(odd(a=(2, 2), b=(5,))).model(0)
    for rank in (0, 1):
        torch.save(part | {"mp_world_size": 2}, tag / f"mp_rank_{rank:02}_model_states.pt")
    change(tag / "mp_rank_00_model_states.pt", lambda content: content.update(module=None))
    check_equal(read(tag).weights, state)


def test_universal_vocabulary_without_its_padding(tmp_path: Path) -> None:
    state = odd(embed=(8, 2), b=(5,))
    tag = Run(state).universal(tmp_path / "x")
    value = {"param": state["embed"][:7], "vocab_tensor": True}
    change(tag / "mp_rank_00_model_states.pt", lambda content: content["module"].pop("embed"))
    for name in ("fp32", *MOMENTS):
        torch.save(value, tag / "zero" / "embed" / f"{name}.pt")
    check_equal(read(tag).weights, {"b": state["b"], "embed": state["embed"][:7].clone()})


def test_latest_comes_before_latest_universal(tmp_path: Path) -> None:
    run = Run(odd(a=(3,)))
    run.save(tmp_path / "x")
    Run(odd(a=(4,))).universal(tmp_path / "x")
    assert read(tmp_path / "x").weights["a"].shape == (3,)


@pytest.mark.parametrize(
    "names",
    [(), ("x.txt",), ("latest",), ("a/x.pt", "b/y.bin"), ("a/b/mp_rank_00_model_states.pt",)],
)
def test_folders_of_others(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("latest")
    assert not DEEPSPEED.matches(Probe(Folder(tmp_path)))


def test_a_folder_that_nobody_may_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    scandir = os.listdir

    def refuse(path: str) -> list[str]:
        if str(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert not DEEPSPEED.matches(Probe(Folder(tmp_path)))


# What comes out


def test_pieces_of_a_parameter_are_ranges(tmp_path: Path) -> None:
    """Nothing is computed: the kernel can copy them."""
    Run(odd(a=(7, 5)), stage=3, ranks=3).save(tmp_path / "x")
    storage = read(tmp_path / "x").weights["a"].storage
    assert storage is not None
    extent = storage.record.locate()
    assert isinstance(extent, Derived) and isinstance(extent.operation, Concat)
    assert [part.length for part in extent.inputs if isinstance(part, Range)] == [48, 48, 44]
    Run(odd(a=(7, 5)), ranks=1).save(tmp_path / "y")
    alone = read(tmp_path / "y").weights["a"].storage
    assert alone is not None and isinstance(alone.record.locate(), Range)


def test_written_as_torch_and_as_safetensors(tmp_path: Path) -> None:
    state = odd()
    run = Run(state, stage=3, ranks=3, groups=GROUPS, shared={"again": "a"}, client={"epoch": 3})
    run.save(tmp_path / "x")
    with reading(tmp_path / "x") as checkpoint:
        ckptkit.save(checkpoint, tmp_path / "x.pth")
        ckptkit.save(checkpoint, tmp_path / "x.safetensors")
        ckptkit.save(checkpoint, tmp_path / "copy")  # of no suffix: as a file of torch
    for path in (tmp_path / "x.pth", tmp_path / "copy"):
        loaded = torch.load(path, weights_only=True)
        assert loaded["epoch"] == 3
        assert loaded["module"]["again"].data_ptr() == loaded["module"]["a"].data_ptr()
        for name, tensor in state.items():
            assert torch.equal(loaded["module"][name], tensor)
            assert torch.equal(loaded["optimizer"]["state"][name]["exp_avg"], tensor + 1000)
    with reading(tmp_path / "x.safetensors") as written:
        assert {name: elements_of(tensor) for name, tensor in written.weights.items()} == {
            name: elements(tensor) for name, tensor in (state | {"again": state["a"]}).items()
        }


def test_names_of_deepspeed_are_kept_or_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zero_stage is an enum and the slices are objects of DeepSpeed: nothing of it is imported."""
    scaler_class, stage = stubs(monkeypatch)
    tag = Run(odd(a=(3,))).save(tmp_path / "x")
    for path in tag.glob("*_optim_states.pt"):
        change(
            path,
            lambda content: content["optimizer_state_dict"].update(
                zero_stage=stage(2), loss_scaler=scaler_class()
            ),
        )
    checkpoint = read(tag)
    check_equal(checkpoint.weights, odd(a=(3,)))
    scaler = checkpoint.root["optimizer"]["loss_scaler"]
    assert isinstance(scaler, Object) and scaler.state == {"cur_scale": 8.0}
    assert "zero_stage" not in checkpoint.root["optimizer"]
    assert {str(each) for each in checkpoint.globals} >= {
        "deepspeed_stub.Stage",
        "deepspeed_stub.Scaler",
    }


def stubs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Classes that pickle by name, as DeepSpeed's do."""
    import enum
    import sys
    import types

    module = types.ModuleType("deepspeed_stub")

    class Scaler:
        def __init__(self) -> None:
            self.cur_scale = 8.0

    stage = enum.IntEnum("Stage", {"gradients": 2})
    for each in (Scaler, stage):
        each.__module__ = module.__name__
        each.__qualname__ = each.__name__
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Scaler, stage
