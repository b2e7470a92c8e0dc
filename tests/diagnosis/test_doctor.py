"""doctor's reports: what a model shows, what is said of hostile names, how fixes go together."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ckptkit.analysis.matching import Kind
from ckptkit.analysis.summary import summarize
from ckptkit.core.errors import (
    NEWER_TORCH,
    RUNS_CODE,
    CkptkitError,
    CorruptError,
    FormatError,
    Notice,
    UnsupportedError,
)
from ckptkit.core.tree import Global, Node, Object
from ckptkit.diagnosis import container, content, fit
from ckptkit.diagnosis.cause import Cause, Facts, together
from ckptkit.formats.format import Format
from ckptkit.formats.table import FORMATS
from tests.analysis.made import checkpoint, tensor


def found(root: Node, **more: object) -> dict[str, Cause]:
    ck = checkpoint(root)
    facts = Facts("run.pth", summarize(ck), root, **more)  # type: ignore[arg-type]
    return {cause.code: cause for cause in content.causes(facts)}


def fitted(
    ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]], **more: object
) -> dict[str, Cause]:
    sides = (
        {name: Kind("float32", shape) for name, shape in side.items()} for side in (ours, theirs)
    )
    return {cause.code: cause for cause in fit.causes(fit.Fitting("run.pth", *sides, **more))}  # type: ignore[arg-type]


def test_fixes_go_together() -> None:
    fixes = (
        {"weights": {}, "rename": {"map": {"a": "b"}}},
        None,
        {"remap": {"devices": "cpu"}, "strip": {"prefix": ("m.",)}},
        {"rename": {"map": {"c": "d"}}, "strip": {"prefix": ("n.",)}},
    )
    causes = [Cause("", "", "", "", None, fix) for fix in fixes]
    found = together(causes)
    assert found == {
        "weights": {},
        "strip": {"prefix": ("m.", "n.")},
        "rename": {"map": {"a": "b", "c": "d"}},
        "remap": {"devices": "cpu"},
    }
    assert list(found) == ["weights", "strip", "rename", "remap"]
    assert together(causes[1:2]) is None


def test_devices_of_this_machine_are_no_cause() -> None:
    root = {"a": tensor(1, device="cuda:1"), "b": tensor(1, device="cuda")}
    assert found(root, devices=("cpu", "cuda:0", "cuda:1")) == {}
    assert "cuda:1" in found(root, devices=("cpu", "cuda:0"))["device"].title
    assert "device" not in found({"a": tensor(1, device="meta")})


def test_a_report_for_others_says_nothing_of_this_machine() -> None:
    root = {"a": tensor(1, device="cuda:1")}
    assert found(root, for_here=False)["device"].title == "It was saved on cuda:1."
    assert "machine" in found(root)["device"].title


def test_a_call_that_harms_is_found_by_its_code() -> None:
    """The words of the warning are of no account."""
    root = {"a": tensor(1), "b": Object(Global("my", "Class"))}
    ck = replace(checkpoint(root), globals=(Global("my", "Class"),))
    summary = summarize(ck)
    for warning, harmful in ((Notice(RUNS_CODE, "odd words"), True), ("odd words", False)):
        facts = Facts("run.pth", replace(summary, warnings=(warning,)), root)
        causes = {cause.code: cause for cause in content.causes(facts)}
        assert ("Odd words: do not load the file" in causes["weights-only"].explanation) is harmful


@pytest.mark.parametrize(
    ("names", "more"),
    [
        ("module.a b c", {}),  # a few keys with a prefix are parts of the model
        ("a._orig_mod.w a.w b c", {}),  # without the inner wrapper, two keys would collide
        ("module.a", {"with_model": True}),  # prefixes are the business of the model
    ],
)
def test_names_that_are_no_cause(names: str, more: dict[str, bool]) -> None:
    assert found({name: tensor(1) for name in names.split()}, **more) == {}


def test_wrappers_inside_one_another_are_taken_off_together() -> None:
    cause = found({f"module._orig_mod.{name}": tensor(1) for name in "abc"})["prefix"]
    assert cause.fix == {"strip": {"prefix": ("module.", "_orig_mod.")}}
    words = shlex.split(cause.command or "")[2:6]
    assert words == ["--prefix", "module.", "--prefix", "_orig_mod."]


def test_tied_to_a_name_that_is_renamed() -> None:
    ours = {"tokens.weight": (9, 4), "b": (3, 3)}
    theirs = {"embed.weight": (9, 4), "head.weight": (9, 4), "b": (3, 3)}
    causes = fitted(ours, theirs, ties=[["embed.weight", "head.weight"]])
    assert causes.keys() == {"renamed", "tied"}
    fix = together(causes.values())
    assert fix is not None
    named, tied = fix["rename"]["map"]["tokens.weight"], fix["tie"]["names"]
    assert {named, *tied} == {"embed.weight", "head.weight"}
    assert tied == {({"embed.weight", "head.weight"} - {named}).pop(): named}


def test_globs_in_names_are_taken_literally() -> None:
    cause = fitted({"a[0]*": (1, 2), "b": (1,)}, {"b": (1,)})["unexpected"]
    assert shlex.split(cause.command or "")[2:4] == ["--drop", "a[[]0][*]"]


def test_no_command_for_many_names() -> None:
    names = {f"{n}.x": (n + 1, 1) for n in range(20)}
    assert fitted({**names, "b": (1,)}, {"b": (1,)})["unexpected"].command is None


def test_a_model_that_fits() -> None:
    assert fitted({"a": (1,)}, {"a": (1,)}) == {}


@pytest.mark.parametrize(
    ("error", "more", "code"),
    [
        (FormatError("is an HTML page"), {"head": b"  <HTML>"}, "html"),
        (FormatError("is a gzip file"), {}, "foreign"),
        (CorruptError("record x"), {"known": True}, "damaged"),
        (CorruptError("is not complete"), {"known": True, "is_folder": True}, "unfinished"),
        (UnsupportedError("has files of experts"), {"known": True, "is_folder": True}, "unsupported"),
        (UnsupportedError("any words", code=NEWER_TORCH), {"known": True}, "newer"),
    ],
)  # fmt: skip
def test_refusals(error: CkptkitError, more: dict[str, Any], code: str) -> None:
    assert container.refused(container.Refusal("run.pth", error, **more)).code == code


@pytest.mark.parametrize(
    "format", [each for each in FORMATS if not each.is_folder], ids=lambda each: each.name
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_suffix_of_another_format(format: Format, suffix: str) -> None:
    """Any that is not of the format, and those alone: the table says which."""
    ck = replace(checkpoint({"a": tensor(1)}), format=format.name)
    ids = {each.code for each in content.causes(Facts(f"run{suffix}", summarize(ck), ck.root))}
    fits = format.loaded_by_torch if suffix == ".pth" else suffix in format.suffixes
    assert ("suffix" in ids) is not fits
    assert ("not-torch" in ids) is (
        suffix != ".pth" and bool(format.torch_error) and not format.loaded_by_torch
    )


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_what_a_diagnosis_calls_a_format(format: Format) -> None:
    """Whatever torch refuses, and whatever several processes wrote, has a noun for the sentence."""
    assert bool(format.noun) is bool(format.torch_error or format.distributed)
    assert format.is_folder or not format.distributed
