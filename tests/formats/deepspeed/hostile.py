"""Folders of DeepSpeed that are damaged, mixed, cut differently from what they say, or made to do
harm: a row for each.

Rows that begin with a code are threats: tests/safety/README.md explains the codes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

import ckptkit
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    AmbiguousError,
    CorruptError,
    FormatError,
    LimitError,
    PathError,
    TensorError,
    UnsupportedError,
)
from tests.formats.deepspeed.making import MODEL, MODEL_3, OPTIM, TAG, Run, edit_optims, small
from tests.formats.folders import Attempt, Edit, Row, change

FLATS = "single_partition_of_fp32_groups"
FLATS_3 = "fp32_flat_groups"
HUGE = [-(2**63), -1, 2**62, 2**63, 2**64, 2**2000, True, 1.0, "1", None]


def zero(edit: Edit, **run: Any) -> Callable[[Path], Checkpoint]:
    """The folder of a run of two ranks, changed; `edit` takes that of the step."""

    def attempt(folder: Path) -> Checkpoint:
        edit(Run(**{"state": small(), **run}).save(folder / "x"))
        return ckptkit.open(folder / "x")

    return attempt


def universal(edit: Edit, **run: Any) -> Callable[[Path], Checkpoint]:
    """A universal checkpoint, changed."""

    def attempt(folder: Path) -> Checkpoint:
        edit(Run(small(), groups=[["a"], ["b"]]).universal(folder / "x"))
        return ckptkit.open(folder / "x")

    return attempt


def latest(text: bytes) -> Edit:
    """Another word in ``latest``; a second run is beside this one."""

    def edited(tag: Path) -> None:
        shutil.copytree(tag.parent, tag.parent.with_name("y"))
        (tag.parent / "latest").write_bytes(text)

    return edited


def optims(edit: Edit) -> Edit:
    return lambda tag: edit_optims(tag, edit)


def second(**values: Any) -> Edit:
    """Other values in the state of the second rank."""
    return lambda tag: change(
        tag / OPTIM.format(1), lambda held: held["optimizer_state_dict"].update(values)
    )


def models(**values: Any) -> Edit:
    """Other values in each file of a model."""

    def edited(tag: Path) -> None:
        for path in tag.glob("*_model_states.pt"):
            change(path, lambda held: held.update(values))

    return edited


def model(edit: Edit) -> Edit:
    return lambda tag: change(tag / MODEL, edit)


def copied(name: str, new: str) -> Edit:
    return lambda tag: shutil.copy(tag / name, tag / new)


def without(pattern: str) -> Edit:
    return lambda tag: [path.unlink() for path in tag.glob(pattern)]


def replaced(name: str, make: Edit) -> Edit:
    """Something else of that name."""

    def edited(tag: Path) -> None:
        (tag / name).unlink()
        make(tag / name)

    return edited


def moved(name: str) -> Edit:
    """A link in place of a file or folder, which is elsewhere now."""

    def edited(tag: Path) -> None:
        elsewhere = tag.parent.parent / "elsewhere"
        shutil.move(tag / name, elsewhere)
        (tag / name).symlink_to(elsewhere)

    return edited


def blobs(folder: Path) -> Checkpoint:
    """The cache of the hub is followed into blobs, but not to where a link of that name leads."""
    tag = Run(small()).save(folder / "snapshots" / "0123")
    shutil.move(tag / MODEL, folder / "secret")
    (folder / "blobs").symlink_to(folder)
    (tag / MODEL).symlink_to("../../../blobs/secret")
    return ckptkit.open(folder / "snapshots" / "0123")


def of_two_stages(name: str) -> Attempt:
    """Files of stage 3 of a name among those of stage 2."""

    def attempt(folder: Path) -> Checkpoint:
        three = Run({"a": torch.ones(4)}, stage=3).save(folder / "3")
        two = Run({"a": torch.ones(4)}).save(folder / "2")
        for path in three.glob(name):
            shutil.copy(path, two / path.name)
        return ckptkit.open(folder / "2")

    return attempt


def many_times(folder: Path) -> Any:
    """One flat tensor, named again and again."""
    flats = {FLATS_3: [torch.ones(1 << 20)] * 200, "optimizer_state_dict": {}}
    tag = Run({"a": torch.ones(1)}, stage=3, ranks=1).save(folder / "x")
    edit_optims(tag, lambda state: state.update(flats))
    models(param_shapes=[{"a": (200 << 20,)}])(tag)
    try:
        return ckptkit.save(ckptkit.open(tag), folder / "x.safetensors")
    finally:
        assert not (folder / "x.safetensors").exists()


def beyond(tag: Path) -> None:
    """A flat tensor beyond its storage: a number in the pickle of a real file is changed."""
    path = tag / OPTIM.format(0)
    data = path.read_bytes()
    sizes = b"M\x2c\x01\x85"  # the tuple (300,)
    assert sizes in data
    path.write_bytes(data.replace(sizes, b"M\x2d\x01\x85"))


# Fields of another kind or size: the files that have them, stages, how a value is put, the values.
WRONG: dict[str, tuple[str, tuple[int, ...], Callable[[int, Any], dict[str, Any]], list[Any]]] = {
    "DC_03 partition_count": (
        OPTIM, (2, 3), lambda stage, value: {"partition_count": value if stage == 3 else [value]},
        [0, 1, 3, 10**12, *HUGE],
    ),
    "DC_03 gaps": (
        OPTIM, (2,), lambda stage, value: {"param_alignment_paddings": value},
        [[], [[0]], [[0, 0], [0, 0]], [[0, 0, 0]], [[100, 0]], [[-1, 0]], [[2**62, 0]], [5], "ab"],
    ),
    "DC_06 flat tensors": (
        OPTIM, (2, 3), lambda stage, value: {FLATS_3 if stage == 3 else FLATS: value},
        [None, 1, {}, [1], ["x"], [None], [torch.ones(4, 5)], [torch.ones(40)[::2]],
         [torch.tensor(1.0)], [torch.ones(20, device="meta")]],
    ),
    "DC_05 shapes": (
        MODEL, (2, 3), lambda stage, value: {"param_shapes": [{"a": value, "b": (4,)}]},
        [shape for size in HUGE for shape in ((size,), (size, size), [size], size)],
    ),
    "DC_10 dicts of shapes": (
        MODEL, (3,), lambda stage, value: {"param_shapes": value},
        [1, {}, "ab", [], [1], [[]], [{1: (3,)}], [{"a": {}}], [{"a": (7, 5)}, {"a": (4,)}]],
    ),
    "DC_04 frozen parameters": (
        MODEL, (2, 3), lambda stage, value: {"frozen_param_fragments": value},
        [{}, {"c": None}, {"c": 1}, {"c": torch.ones(2)}, {"c": torch.ones(3, 1)},
         {"c": torch.ones(4)[::2]}],
    ),
}  # fmt: skip


def wrong(what: str, stage: int, value: Any) -> Attempt:
    name, _, make, _ = WRONG[what]
    put = make(stage, value)
    edit = models(**put) if name == MODEL else optims(lambda state: state.update(put))
    return zero(edit, stage=stage, frozen={"c": torch.ones(5)})


# Shapes of parameters that do not cover the flat tensors: a gap never becomes zeros, and what is
# behind the last parameter is not dropped silently.
UNCOVERED: dict[str, dict[str, tuple[int, ...]]] = {
    "more": {"a": (7, 5), "b": (4,), "c": (9,)}, "less": {"a": (7, 5)}, "none": {},
    "longer": {"a": (7, 6), "b": (4,)}, "shorter": {"a": (7, 4), "b": (4,)},
}  # fmt: skip
EXPERTS = "layer_0_expert_3_mp_rank_00_model_states.pt"
OTHERS = {
    "zero_pp_rank_0_mp_rank_01_optim_states.pt": "model-parallel", EXPERTS: "single experts",
    EXPERTS.removeprefix("layer_0_"): "single experts", "another_model_states.pt": "an unsupported kind",
    "expp_rank_0_mp_rank_00_optim_states.pt": "single experts",
}  # fmt: skip
FIRST = OPTIM.format(0)

ZERO = {
    "two steps and no latest": Row(
        zero(lambda tag: (shutil.copytree(tag, tag.with_name("global_step8")), (tag.parent / "latest").unlink())),
        AmbiguousError, "global_step7, global_step8 name one"),
    **{f"SH_01 latest leads to {text!r}": Row(zero(latest(text)), CorruptError, f"latest names ... folders: {TAG}")
       for text in (b"../y/global_step7", b"/etc", b"..", b".", b"global_step7/", b"a\\b", b"%2e%2e", b"global_step8",
                    b"zero_to_fp32.py", b"\xff\xfe")},
    "SH_02 a folder that is a link": Row(zero(moved("")), CorruptError, "is not the folder of a training state"),
    "SH_02 a file that is a link": Row(zero(moved(MODEL)), PathError, MODEL),
    "SH_02 a link in place of the blobs": Row(blobs, PathError, MODEL),
    **{f"SH_03 {make.__name__} {name}": Row(zero(replaced(name, make)), PathError, name)
       for make, name in product((os.mkfifo, os.mkdir), (MODEL, FIRST))},
    **{f"SH_09 beside {name}": Row(
        zero(lambda tag, name=name: (tag.parent / name).write_bytes(b"{}")), AmbiguousError, f"a model, {name} ... /x/{TAG} or ")
       for name in ("model.safetensors", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin")},
    **{f"DC_09 {name}": Row(zero(copied(MODEL, name)), UnsupportedError, f"{what} ... {name}") for name, what in OTHERS.items()},
    **{f"SH_09 both {name} and {new}": Row(zero(copied(name, new)), AmbiguousError, f"has two files of rank 0: ... {new}")
       for name, new in ((FIRST, f"bf16_{FIRST}"), (FIRST, OPTIM.format("00")), (MODEL, "mp_rank_0_model_states.pt"))},
    "a model of stage 3": Row(of_two_stages("*_model_states.pt"), AmbiguousError, "has two files of rank 0"),
    "ranks of stage 3": Row(of_two_stages("*_optim_states.pt"), CorruptError, "of different ZeRO stages"),
    "one rank of stage 3": Row(of_two_stages("*_rank_1_*_optim_states.pt"), FormatError, "of another ZeRO stage"),
    "DC_08 no model": Row(zero(without(MODEL)), CorruptError, f"1 of 1 rank files are missing: {MODEL}"),
    **{f"DC_08 no model of rank {rank}": Row(zero(without(MODEL_3.format(rank)), stage=3), CorruptError, MODEL_3.format(rank))
       for rank in (0, 1)},
    "DC_08 no optimizer of rank 0": Row(zero(without(FIRST)), CorruptError, f"1 of 2 rank files are missing: {FIRST}"),
    **{f"DC_08 no optimizer in stage {stage}": Row(
        zero(without("*_optim_states.pt"), stage=stage, ranks=3), CorruptError,
        f"3 of 3 rank files are missing: {', '.join(OPTIM.format(rank) for rank in range(3))}") for stage in (1, 2, 3)},
    "a rank too many": Row(zero(copied(FIRST, OPTIM.format(2))), CorruptError, "files of other"),
    **{f"SH_07 {content!r} as {name}": Row(
        zero(lambda tag, name=name, content=content: (tag / name).write_bytes(content)), FormatError, f"/{TAG}/{name}: ")
       for content, name in product((b"", b"version https://git-lfs.github.com/spec/v1\n", b"PK\3\4"), (MODEL, OPTIM.format(1)))},
    "a file of another kind": Row(zero(lambda tag: (tag / FIRST).write_bytes(b"nothing")), FormatError, "not a torch.save file"),
    "groups of other ranks": Row(
        zero(optims(lambda state: state.update(partition_count=[2, 1])), groups=[["a"], ["b"]]),
        UnsupportedError, "expert parallelism"),
    "another count": Row(zero(second(partition_count=[3])), CorruptError, "is not 2"),
    "other groups": Row(zero(second(group_paddings=[0, 0])), CorruptError, "must be 1, as in the file of rank 0"),
    "parts of other sizes": Row(zero(second(**{FLATS: [torch.ones(21)]})), CorruptError, "differ in size"),
    "parts of other types": Row(zero(second(**{FLATS: [torch.ones(20).half()]})), CorruptError, "different dtypes"),
    "other gaps": Row(
        zero(optims(lambda state: state.update(param_alignment_paddings=[]))), CorruptError, "param_alignment_paddings has groups of []"),
    "a parameter of two groups": Row(
        zero(models(param_shapes=[{"a": (7, 5)}, {"a": (4,)}]), stage=3), CorruptError, "1 names in groups of [1, 1]"),
    **{f"DC_04 {what} parameters in stage {stage}": Row(
        zero(models(param_shapes=[UNCOVERED[what]], module={}), stage=stage), CorruptError, "elements")
       for what, stage in product(UNCOVERED, (2, 3))},
    "more parameters": Row(zero(models(param_shapes=[{"a": (90,)}], module={})), CorruptError, "need 90 elements"),
    "DC_05 a rank without end": Row(zero(models(param_shapes=[{"a": (2**62,) * 100_000, "b": (4,)}])), LimitError, "rank"),
    "another shape": Row(
        zero(model(lambda held: held["module"].update(a=torch.ones(5, 7)))), CorruptError, "'a' has the shape"),
    "no module": Row(zero(model(lambda held: held.pop("module"))), FormatError, "has no module"),
    "a frozen one is missing": Row(
        zero(models(frozen_param_fragments={}), frozen={"c": torch.ones(5)}), CorruptError, "of some ranks"),
    "a frozen piece of another size": Row(
        zero(models(frozen_param_fragments={"c": torch.ones(2)}), stage=3, frozen={"c": torch.ones(5)}),
        CorruptError, "another size there"),
    "an optimizer that is a list": Row(
        zero(lambda tag: change(tag / FIRST, lambda held: held.update(optimizer_state_dict=[]))), FormatError, "is not a dict"),
    "no count": Row(zero(optims(lambda state: state.pop("partition_count"))), FormatError, "has no partition_count"),
    "flat tensors that are none": Row(zero(optims(lambda state: state.update({FLATS: 1}))), FormatError, "not a list"),
    "flat tensors of numbers": Row(zero(optims(lambda state: state.update({FLATS: [1]}))), FormatError, "not flat"),
    "names that are none": Row(zero(models(param_shapes=[{1: (3,)}])), FormatError, "is not a string"),
    "a shape that is none": Row(zero(models(param_shapes=[{"a": "x"}])), FormatError, "is not a list of sizes"),
    "a count that is none": Row(
        zero(optims(lambda state: state.update(partition_count=["x"]))), FormatError, "not counts"),
    **{f"{what}, stage {stage}, {number}": Row(wrong(what, stage, value), (FormatError, LimitError), "")
       for what, (_, stages, _, values) in WRONG.items() for stage in stages for number, value in enumerate(values)},
    "TM_01 a flat tensor beyond its storage": Row(
        zero(beyond, state={"a": torch.ones(300)}, ranks=1), (TensorError, CorruptError), ""),
    "TM_04 more values than any optimizer keeps": Row(
        zero(optims(lambda state: state.update(base_optimizer_state={"state": {0: dict.fromkeys(range(1000), 1)}}))),
        LimitError, "values for a parameter"),
    "TM_04 one flat tensor many times": Row(many_times, LimitError, ""),
    "a universal checkpoint among ranks": Row(
        zero(lambda tag: shutil.copytree(Run(small()).universal(tag.parent / "u") / "zero", tag / "zero")),
        AmbiguousError, "universal"),
    "no folder of a parameter": Row(
        universal(lambda tag: shutil.rmtree(tag / "zero/b")), CorruptError, "no folder for parameter 'b'"),
    "SH_01 the name of a parameter leads out": Row(
        universal(models(param_shapes=[{"a": (7, 5), "../../b": (4,)}], module={})), CorruptError, "no folder for parameter"),
    "SH_02 the folder of a parameter is a link": Row(universal(moved("zero/b")), CorruptError, "no folder for parameter 'b'"),
    "no weights of a parameter": Row(
        universal(lambda tag: (tag / "zero/b/fp32.pt").unlink()), CorruptError, "has no fp32.pt with a tensor"),
    **{f"DC_06 weights of a parameter, {number}": Row(
        universal(lambda tag, value=value: torch.save(value, tag / "zero/b/fp32.pt")), FormatError, words)
       for number, (value, words) in enumerate((
           (1, "has no fp32.pt"), ({}, "has no fp32.pt"), ({"param": None}, "has no fp32.pt"),
           ({"param": torch.ones(5)}, "the parameter has (4,)"), (torch.ones(2, 2), "(2, 2)"), (torch.ones(5), "(5,)")))},
}  # fmt: skip
