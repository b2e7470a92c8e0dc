"""Every public function with a wrong argument of each common kind: a sentence, never a raw error."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tensor import Tensor
from tests.conftest import Run

FUNCTIONS = [name for name in ckptkit.__all__ if isinstance(getattr(ckptkit, name), FunctionType)]
METHODS = [
    *((Checkpoint, name) for name in (
        "map", "with_value", "without", "with_key", "get", "__getitem__", "__contains__",
    )),
    *((Tensor, name) for name in ("torch", "__getitem__")),
]  # fmt: skip

# An object of no use, and what people give by mistake.
WRONG: dict[str, Any] = {
    "None": None,
    "bool": True,
    "int": 3,
    "negative": -1,
    "float": 1.5,
    "nan": float("nan"),
    "text": "nowhere",
    "empty text": "",
    "null": "a\0b",
    "surrogate": "\udcff",
    "bytes": b"\x80nothing",
    "empty bytes": b"",
    "list": [],
    "list of None": [None],
    "nested list": [["a"], 3],
    "tuple": (1, 2),
    "set": {1},
    "dict": {},
    "dict of numbers": {1: 2},
    "dict of None": {"a": None},
    "itself": object(),
    "class": dict,
    "function": len,
    "failing function": lambda *given: given[7],
    "generator": (each for each in ()),
    "module": nn.Linear(1, 1),
    "module class": nn.Linear,
    "optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1),
    "tensor": torch.ones(2),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "text file": io.StringIO("text"),
    "exception": ValueError("x"),
    "folder": Path("empty"),
}  # fmt: skip
# A mistake inside a function of the caller is the caller's to see.
OWN_CODE = {
    ("map", "function"), ("convert", "steps"), ("load", "map_location"), ("save", "executor"),
    ("save", "progress"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    torch.save({"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)}, "a.pth")
    return tmp_path


def right(name: str) -> dict[str, Any]:
    """Return arguments that the function takes, for those that it needs."""
    return {
        "source": "a.pth", "ck": "a.pth", "checkpoint": "a.pth", "path": "a.pth",
        "destination": "b.pth", "model": nn.Linear(2, 2), "other": "a.pth", "dtypes": "float16",
        "devices": "cpu", "key": "module", "keys": "*weight", "rows": 3, "rules": "module.{x} -> {x}",
        "by": "names", "old": "a.pth", "new": "a.pth", "base": "a.pth", "deltas": "a.pth",
        "adapters": "a.pth", "adapter": "a.pth", "to": "peft", "tuned": "a.pth", "rank": 1,
        "checkpoints": ["a.pth", "a.pth"],
        **({"path": "b.pth"} if name == "save" or "delta" in name or "lora" in name else {}),
        **({"key": "module.weight"} if name == "extract" else {}),
        **({"key": None} if name in ("open", "load", "load_into", "diff", "convert") else {}),
    }  # fmt: skip


def cases() -> Iterator[tuple[str, str]]:
    for name in FUNCTIONS:
        for each in inspect.signature(getattr(ckptkit, name)).parameters.values():
            if each.kind is not each.VAR_KEYWORD:
                yield name, each.name


def raw(call: Callable[[Any], object], of: tuple[str, str]) -> dict[str, str]:
    """Call with each wrong value; return the errors that are no sentences of ours."""
    found = {}
    for kind, value in WRONG.items():
        try:
            call(value)
        except Exception as error:
            is_sentence = isinstance(error, ckptkit.CkptkitError) and len(str(error)) > 8
            if not is_sentence and not (of in OWN_CODE and callable(value)):
                found[kind] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize(("name", "parameter"), list(cases()))
def test_a_sentence(name: str, parameter: str, folder: Path) -> None:
    function = getattr(ckptkit, name)
    parameters = inspect.signature(function).parameters
    needed = {
        each: value
        for each, value in right(name).items()
        if each in parameters
        and (parameters[each].default is parameters[each].empty or value is None)
    }
    forced = {"force": True} if name == "save" and parameter != "force" else {}

    def call(value: Any) -> None:
        if parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL:
            function(*needed.values(), value)
        else:
            function(**{**needed, **forced, parameter: value})

    assert raw(call, (name, parameter)) == {}


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_sentence_of_methods(kind: type, name: str, folder: Path) -> None:
    ck = ckptkit.open("a.pth")
    method = getattr(ck if kind is Checkpoint else ck.weights["module.weight"], name)
    first, *more = inspect.signature(method).parameters
    rest = [1] if more == ["value"] else []
    assert raw(lambda value: method(value, *rest), (name, first)) == {}


@pytest.mark.parametrize("option", [*(each.name for each in fields(ckptkit.Options)), "nonsense"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors", "folder"])
def test_a_sentence_of_options(option: str, suffix: str, folder: Path) -> None:
    given: dict[str, Any] = {"force": True}
    if suffix == "folder":
        given |= {"dry_run": True, "format": "sharded"}

    def call(value: Any) -> None:
        ckptkit.save("a.pth", f"c.{suffix}", **{**given, option: value})

    assert raw(call, ("save", option)) == {}


def test_errors_name_arguments_in_python_and_options_on_the_command_line(
    folder: Path, run: Run
) -> None:
    torch.save([{"w": torch.ones(1)}, {"w": torch.ones(1)}], "two.pth")
    cases: list[tuple[Callable[[], object], list[str], str, str]] = [
        (lambda: ckptkit.save("a.pth", "a.pth"), ["convert", "a.pth", "a.pth"],
         "in_place=True", "--in-place"),
        (lambda: ckptkit.save("a.pth", "two.pth"), ["convert", "a.pth", "two.pth"],
         "force=True", "--force"),
        (lambda: ckptkit.convert("a.pth", "c.txt", keep_format=False), ["convert", "a.pth", "c.txt"],
         "shard_size", "--shard-size"),
        (lambda: ckptkit.open("two.pth").weights, ["strip-module", "two.pth", "c.pth"], "key='0'", "--key 0"),
        (lambda: ckptkit.join(["a.pth", "a.pth"]), ["join", "a.pth", "a.pth", "c.pth"],
         "last_wins=True", "--last-wins"),
    ]  # fmt: skip
    for call, words, argument, option in cases:
        with pytest.raises(ckptkit.CkptkitError) as caught:
            call()
        said = f"{caught.value} {caught.value.hint}"
        assert argument in said and option not in said
        shown = run(*words).stderr
        assert option in shown and argument not in shown


def test_every_method_with_arguments_has_a_row() -> None:
    public = {
        (kind, name)
        for kind in (Checkpoint, Tensor)
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType)
        and (not name.startswith("_") or name in ("__getitem__", "__contains__"))
        and len(inspect.signature(method).parameters) > 1
    }
    of_rooms = {
        (Checkpoint, "with_root"),  # the tree of a format or a transform
        (Checkpoint, "unchanged"),  # the input of a no-op
        (Tensor, "over"),  # another storage of a header that was checked
        (Tensor, "remade"),  # the elements in another record
    }
    assert public == {*METHODS} | of_rooms


def test_nothing_is_left_out() -> None:
    assert {*FUNCTIONS} | {
        "Checkpoint",
        "CkptkitError",
        "Storage",
        "Tensor",
        "Options",
        "__version__",
    } == {*ckptkit.__all__}


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_to_edit_in_place(path: str) -> None:
    with pytest.raises(ckptkit.CkptkitError, match=r"empty path|null character"):
        ckptkit.convert(path, in_place=True)
