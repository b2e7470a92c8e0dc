"""DeepSpeed's folders, against the parameters that they were made from."""

from __future__ import annotations

import os
import shutil
from itertools import product
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
from tests.formats.deepspeed.making import MODEL, MOMENTS, TAG, Run, edit_optims, odd
from tests.formats.folders import change

GROUPS = [["a", "c", "d"], ["b", "e", "f", "g"]]


def read(path: Path) -> Checkpoint:
    probe = Probe(Folder(path))
    assert DEEPSPEED.matches(probe)
    return DEEPSPEED.read(probe)


def check(path: Path, run: Run) -> Checkpoint:
    """Compare a folder with the run that it was made from."""
    checkpoint = read(path)
    weights, module = checkpoint.weights, checkpoint.root["module"]
    assert checkpoint.warnings == ()
    check_equal(weights, run.whole)
    assert {tensor.device for tensor in weights.values()} == {"cpu"}
    assert list(module) == list(run.module())
    assert isinstance(module, OrderedMapping) and module.state["_metadata"][""] == {"version": 1}
    for name, kept in run.shared.items():
        assert weights[name].storage is weights[kept].storage and weights[name] is not weights[kept]
    state = checkpoint.root["optimizer"]["state"]
    assert checkpoint.root["optimizer"]["param_groups"] == run.param_groups
    assert state.keys() == run.state.keys()
    for name, tensor in run.state.items() if run.steps else ():
        for key, shift in MOMENTS.items():
            assert state[name][key].shape == tuple(tensor.shape)
            assert elements_of(state[name][key]) == elements(tensor + shift), (name, key)
        assert elements_of(state[name]["step"]) == elements(torch.tensor(7.0))
    # torch would count a shared step once for each parameter.
    steps = {id(each["step"].storage) for each in state.values() if each}
    assert len(steps) == (len(state) if run.steps else 0)
    has_half = run.stage < 3 and run.half not in (None, torch.float32)
    key = f"module_{str(run.half).removeprefix('torch.')}"
    assert [each for each in checkpoint.root if each.startswith("module_")] == [key] * has_half
    if has_half:
        half = checkpoint.root[key]
        check_equal(half, run.module())
        for name, tensor in run.buffers.items():
            is_same = half[name].storage is weights[name].storage
            assert is_same == (half[name].device == "cpu" and tensor.dtype != run.half)
    return checkpoint


# Weights and the optimizer


NAN = torch.tensor([1.5, -2.25, float("nan")])
KINDS: dict[str, Any] = {
    "state": odd(embed=(7, 3), w=(5,)), "buffers": {"mean": NAN.half(), "steps": torch.tensor(9)},
    "frozen": {"fixed": torch.arange(11.0).bfloat16(), "none": torch.empty(0, 3)}, "shared": {"head": "embed"},
}  # fmt: skip
MANY = odd(a=(3,), b=(5, 20), c=(2,))
RUNS = {
    **{f"stage {stage}, {ranks} ranks, groups {groups}": Run(odd(), ranks=ranks, stage=stage, groups=groups)
       for stage, groups, ranks in product((1, 2, 3), (None, GROUPS), (1, 2, 3, 5))},
    # Natural order of the ranks: rank 10 comes after rank 9.
    **{f"many ranks, stage {stage}": Run(MANY, ranks=12, stage=stage) for stage in (2, 3)},
    "groups that leave ranks empty": Run(odd(a=(40,), b=(1,)), ranks=4, groups=[["a"], ["b"]]),
    **{f"gaps, elastic {elastic}": Run(odd(), ranks=3, groups=GROUPS, gaps=[[1, 3, 0], [1, 3, 0, 0]], elastic=elastic)
       for elastic in (False, True)},
    **{f"{flats} flat tensors that split a parameter": Run(odd(), stage=3, flats=flats) for flats in (2, 3, 7)},
    # bf16_optimizer.py: no zero_stage, the padding is counted but left on.
    **{f"padding left on, {ranks} ranks": Run(odd(a=(8, 5), b=(6,)), ranks=ranks, stage=1, trimmed=False,
                                              half=torch.bfloat16, prefix="bf16_") for ranks in (1, 2, 3)},
    **{f"buffers, frozen and ties, stage {stage}, {ranks} ranks": Run(stage=stage, ranks=ranks, **KINDS)
       for stage, ranks in product((2, 3), (1, 3))},
    **{f"stage {stage} of {half}": Run(odd(a=(3, 2), b=(5,)), stage=stage, half=half, buffers={"n": torch.tensor(3)})
       for stage, half in product((2, 3), (torch.bfloat16, torch.float16))},
    "another order than the model's": Run(odd(a=(3,), b=(5,), c=(2,)), groups=[["c"], ["b", "a"]]),
    **{f"no step yet, stage {stage}": Run(odd(a=(3,), b=(2,)), stage=stage, steps=False) for stage in (2, 3)},
    **{f"client values called {key}": Run(odd(a=(3,)), client={key: {"other": torch.ones(2)}})
       for key in ("model", "state_dict", "weights")},
}  # fmt: skip


@pytest.mark.parametrize("what", RUNS)
def test_a_run_is_read_as_it_was(tmp_path: Path, what: str) -> None:
    RUNS[what].save(tmp_path / "x")
    check(tmp_path / "x", RUNS[what])


def test_views_of_one_buffer_stay_views(tmp_path: Path) -> None:
    base = torch.arange(6.0).half()
    buffers = {"all": base, "end": base[4:], "turned": base.view(2, 3).t()}
    Run(odd(a=(3,)), buffers=buffers).save(tmp_path / "x")
    weights = read(tmp_path / "x").weights
    wide = base.float()
    want = {"a": odd(a=(3,))["a"], "all": wide, "end": wide[4:], "turned": wide.view(2, 3).t()}
    check_equal(weights, want)
    shared = sharing({name: id(tensor.storage) for name, tensor in weights.items()})
    assert shared == [["a"], ["all", "end", "turned"]]


def test_what_is_in_module_alone(tmp_path: Path) -> None:
    """Stage 1 does not record frozen parameters; a module that is registered twice is recorded
    nowhere."""
    state = odd(a=(3, 2), b=(4,))
    frozen = {"fixed": torch.arange(5.0).half()}
    tag = Run(state, stage=1, frozen=frozen, half=torch.float16).save(tmp_path / "x")
    change(
        tag / MODEL,
        lambda content: content["module"].update(
            again=content["module"]["a"], a_extra_state={"scale": 2}, none=torch.empty(0, 3)
        ),
    )
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


def test_tags_of_devices_are_left_aside(tmp_path: Path, simulated_cuda: Any) -> None:
    buffers = {"mean": torch.ones(3), "half": torch.ones(3).half()}
    for stage in (1, 2, 3):
        run = Run(odd(a=(3, 2), b=(5,)), stage=stage, buffers=buffers, half=torch.float16)
        run.frozen = {"fixed": torch.arange(4.0)}
        with simulated_cuda(1):
            tag = run.save(tmp_path / str(stage))
        if stage > 1:
            check(tag, run)
        else:  # it does not record frozen parameters
            assert {each.device for each in read(tag).weights.values()} == {"cpu"}
            check_equal(read(tag).weights, run.whole)


# Everything else


def test_the_tree(tmp_path: Path) -> None:
    client = {"epoch": 3, "rng": torch.ones(2)}
    Run(odd(a=(3,), b=(2,)), groups=[["b"], ["a"]], client=client).save(tmp_path / "x")
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


def test_state_that_is_not_one_value_per_weight(tmp_path: Path) -> None:
    tag = Run(odd(a=(6, 4), b=(5,)), groups=[["a"], ["b"]]).save(tmp_path / "x")

    def edit(content: Any) -> None:
        state = content["base_optimizer_state"]["state"]
        state[0]["absmax"] = torch.ones(2)
        state[1].pop("exp_avg"), state[1].pop("exp_avg_sq")

    edit_optims(tag, edit)
    checkpoint = read(tag)
    assert checkpoint.warnings == (
        "dropped from the optimizer state, because they do not have one value per weight: absmax",
    )
    state = checkpoint.root["optimizer"]["state"]
    assert list(state["a"]) == ["step", *MOMENTS] and list(state["b"]) == ["step"]


def test_stage_0(tmp_path: Path) -> None:
    state, buffers = odd(a=(3,), b=(2,)), {"n": torch.tensor(3)}
    client = {"model": {"x": torch.ones(1)}}
    tag = Run(state, stage=0, buffers=buffers, client=client).save(tmp_path / "x")
    assert sorted(os.listdir(tag)) == [MODEL]
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
    files = [path for path in (tmp_path / "made").rglob("*") if path.is_file()]
    for number, path in enumerate(files):
        link = snapshot / path.relative_to(tmp_path / "made")
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    for path in (snapshot, snapshot / TAG):
        check_equal(read(path).weights, state)


@pytest.mark.parametrize("stage", [2, 3])
def test_universal(tmp_path: Path, stage: int) -> None:
    run = Run(
        odd(),
        stage=stage,
        ranks=3,
        buffers={"n": torch.tensor(3)},
        frozen={"fixed": torch.arange(4.0)},
        shared={"again": "a"},
    )
    tag = run.universal(tmp_path / "x")
    for path in (tag, tmp_path / "x"):
        assert check(path, run).root["optimizer"]["clip_grad"] == 1.0


def test_universal_of_other_ranks(tmp_path: Path) -> None:
    """Model-parallel ranks are merged: the shapes are those of the folders."""
    state = odd(a=(4, 2), b=(5,))
    tag = Run(state).universal(tmp_path / "x")
    part = Run(odd(a=(2, 2), b=(5,))).model(0)
    for rank in (0, 1):
        torch.save(part | {"mp_world_size": 2}, tag / f"mp_rank_{rank:02}_model_states.pt")
    change(tag / MODEL, lambda content: content.update(module=None))
    check_equal(read(tag).weights, state)


def test_universal_vocabulary_without_its_padding(tmp_path: Path) -> None:
    state = odd(embed=(8, 2), b=(5,))
    tag = Run(state).universal(tmp_path / "x")
    value = {"param": state["embed"][:7], "vocab_tensor": True}
    change(tag / MODEL, lambda content: content["module"].pop("embed"))
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
    more = {"zero_stage": stage(2), "loss_scaler": scaler_class()}
    edit_optims(tag, lambda content: content.update(more))
    checkpoint = read(tag)
    check_equal(checkpoint.weights, odd(a=(3,)))
    scaler = checkpoint.root["optimizer"]["loss_scaler"]
    assert isinstance(scaler, Object) and scaler.state == {"cur_scale": 8.0}
    assert "zero_stage" not in checkpoint.root["optimizer"]
    named = {str(each) for each in checkpoint.globals}
    assert named >= {"deepspeed_stub.Stage", "deepspeed_stub.Scaler"}


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
