"""Every command that doctor prints, as a shell reads it: the finding is gone afterwards.

A code of a finding that carries a command and has no case here fails a test.
"""

from __future__ import annotations

import ast
import gzip
import io
import json
import os
import pickle
import shutil
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckptkit import diagnosis
from ckptkit.formats.table import FORMATS
from tests.cli.conftest import Ckptkit
from tests.conftest import ROOT
from tests.formats.parallel.making import llama, release
from tests.quantized import made
from tests.readme import shell, words

NETS = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, classes=2):
        super().__init__(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, classes))

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 + n, 4) for n in range(4))
        self.head = nn.Linear(4, 2)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = Net()

class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(64, 4, bias=False)
"""
NAME = "it's a $run *"  # a shell would change it
Make = Callable[[Path], Path]
CASES: dict[str, tuple[str, Make, tuple[str, ...], str]] = {}


def case(code: str, *options: str, torch_says: str = "") -> Callable[[Make], Make]:
    """Add a case: the function makes the file that has the finding `code`.

    `torch_says` is what torch.load(weights_only=True) raises for it.
    """

    def add(make: Make) -> Make:
        CASES[make.__name__] = (code, make, options, torch_says)
        return make

    return add


def weights() -> dict[str, Any]:
    return dict(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).state_dict())


def prefixed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in state.items()}


def saved(folder: Path, value: object, suffix: str = ".pth", **how: Any) -> Path:
    torch.save(value, folder / f"{NAME}{suffix}", **how)
    return folder / f"{NAME}{suffix}"


def halved() -> dict[str, Any]:
    return {name: value.half() for name, value in weights().items()}


def rewritten(path: Path, version: str | None) -> Path:
    """Exchange the version record of an archive; None leaves it out."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            if not name.endswith("/version"):
                archive.writestr(name, data)
            elif version is not None:
                archive.writestr(name, version)
    return path


def names(old: str = "", new: str = "") -> dict[str, Any]:
    """Return the state_dict of Named, with other beginnings of names."""
    namespace: dict[str, Any] = {}
    exec(NETS, namespace)
    state = namespace["Named"]().state_dict()
    return {name.replace(old, new, 1) if old else name: state[name] for name in state}


def lettered() -> dict[str, Any]:
    """Return the state_dict of a wrapped Named, with letters in place of numbers."""
    found = names()
    for n, letter in enumerate("abcd"):
        found = {
            name.replace(f"layers.{n}.", f"block_{letter}."): each for name, each in found.items()
        }
    return prefixed("module.", found)


def of_lightning(prefix: str, **more: Any) -> dict[str, Any]:
    state = {**prefixed(prefix, weights()), **more}
    return {"state_dict": state, "pytorch-lightning_version": "2.5"}


def trained() -> dict[str, Any]:
    model = nn.Linear(512, 512)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 512)).sum().backward()
    adam.step()
    return {"model": model.state_dict(), "optimizer": adam.state_dict()}


def torch_bytes(value: object) -> bytes:
    torch.save(value, held := io.BytesIO())
    return held.getvalue()


class Called:
    def __reduce__(self) -> tuple[Any, ...]:
        return dedent, ("a function that is not allowlisted",)


def odd_module() -> nn.Module:
    vars(module := nn.Linear(2, 2))["note"] = Called()
    return module


COMPILED = {"a._orig_mod.weight": torch.ones(2), "b.weight": torch.ones(2)}
# What torch.save writes: a name, the code of its finding, the options of doctor, the suffix, and the value.
SAVED: list[tuple[str, str, str, str, Callable[[], object]]] = [
    ("module", "prefix", "", ".pth", lambda: prefixed("module.", weights())),
    ("two_wrappers", "prefix", "", ".pth", lambda: prefixed("module._orig_mod.", weights())),
    ("some_are_wrapped", "prefix", "", ".pth", lambda: {**prefixed("module.", weights()), "temperature": torch.ones(1)}),
    ("wrapped_beside_a_model", "prefix", "--model nets.py:Net", ".pth", lambda: prefixed("module.", weights())),
    ("bare_beside_a_model", "prefix", "--model nets.py:Wrapped", ".pth", lambda: weights()),
    ("another_prefix_beside_a_model", "prefix", "--model nets.py:Wrapped", ".pth", lambda: prefixed("net.", weights())),
    ("prefix_of_one_of_two", "prefix", "--key gen", ".pth", lambda: {"gen": prefixed("module._orig_mod.", weights()), "disc": weights()}),
    ("bare_one_of_two_beside_a_model", "prefix", "--key gen --model nets.py:Wrapped", ".pth", lambda: {"gen": weights(), "disc": weights()}),
    ("unexpected_in_one_of_two", "unexpected", "--key gen --model nets.py:Net", ".pth", lambda: {"gen": {**weights(), "more": torch.ones(9)}, "disc": weights()}),
    ("renamed_in_one_of_two", "renamed", "--key gen --model nets.py:Named", ".pth", lambda: {"gen": names("layers.", "encoder.layer."), "disc": weights()}),
    ("dtype_of_one_of_two", "dtype", "--key gen --model nets.py:Net", ".pth", lambda: {"gen": halved(), "disc": weights()}),
    ("attribute", "attribute", "", ".pth", lambda: prefixed("model.", weights())),
    ("lightning", "attribute", "", ".ckpt", lambda: of_lightning("model.")),
    ("lightning_with_a_loss", "attribute", "", ".ckpt", lambda: of_lightning("net.", **{"loss.weight": torch.ones(2)})),
    ("compiled_parts", "inner-prefix", "", ".pth", lambda: COMPILED),
    ("compiled_parts_of_one_of_two", "inner-prefix", "--key gen", ".pth", lambda: {"gen": COMPILED, "disc": weights()}),
    ("renamed_by_prefix", "renamed", "--model nets.py:Named", ".pth", lambda: names("layers.", "encoder.layer.")),
    ("renamed_one_by_one", "renamed", "--model nets.py:Named", ".pth", lambda: lettered()),
    ("tied", "tied", "--model nets.py:Tied", ".pth", lambda: {"embed.weight": torch.ones(6, 4)}),
    ("mismatched", "mismatched", "--model nets.py:Net", ".pth", lambda: {**weights(), "2.weight": torch.ones(5, 3), "2.bias": torch.ones(5)}),
    ("unexpected", "unexpected", "--model nets.py:Net", ".pth", lambda: {**weights(), "a[0]*.weight": torch.ones(9), "it's": torch.ones(7)}),
    ("dtype", "dtype", "--model nets.py:Net", ".pth", lambda: halved()),
    ("whole_module", "module", "", ".pth", lambda: nn.Sequential(nn.Linear(2, 2))),
    ("wrapper", "wrapper", "", ".pth", lambda: {"model": weights(), "epoch": 3}),
    ("wrapper_alone", "wrapper", "", ".pth", lambda: {"state_dict": weights()}),
    ("objects_beside", "weights-only", "", ".pth", lambda: {"model": weights(), "args": Namespace(lr=0.1)}),
    ("objects", "weights-only", "", ".pth", lambda: {**weights(), "args": Namespace(lr=0.1)}),
    ("arrays", "weights-only", "", ".pth", lambda: {"w": np.ones(2)}),
    ("slices", "slices", "", ".pth", lambda: {"a": torch.ones(1000, 1000)[:2]}),
    ("optimizer", "optimizer", "", ".pth", lambda: trained()),
    ("not_safetensors", "suffix", "", ".safetensors", lambda: weights()),
    ("ambiguous", "ambiguous", "", ".pth", lambda: {"gen": weights(), "disc": weights()}),
]  # fmt: skip
# What pickle writes.
PICKLED: list[tuple[str, str, str, Callable[[], object]]] = [
    ("inner", "inner", ".pkl", lambda: {"raw": torch_bytes(weights())}),
    ("pickled_arrays", "not-torch", ".pkl", lambda: {"fc.weight": np.ones((2, 3))}),
    ("pickled_module_with_unknown_calls", "suffix", ".pth", odd_module),
]
# Fixtures: a name, the code of the finding, the file or folder, and the suffix of the copy.
COPIED = [
    ("device", "device", "torch-zip/ddp_bare_cuda3.pth", ".pth"),
    ("tar", "old-format", "torch-tar/dp_wrapped_cuda1.pth", ".pth"),
    ("program", "program", "torchscript/scripted.pt", ".pt"),
    ("dcp", "dcp", "dcp/fsdp_full", ""),
    ("zero", "deepspeed", "deepspeed/zero2-fp32-3ranks", ""),
]
TORCH_SAYS = {
    "device": r"Attempting to deserialize object on a? ?CUDA device",
    "tar": r"legacy \.tar format",
    "objects": "Weights only load failed",
}


def make_saved(value: Callable[[], object], suffix: str, folder: Path) -> Path:
    return saved(folder, value(), suffix)


def make_pickled(value: Callable[[], object], suffix: str, folder: Path) -> Path:
    (folder / f"{NAME}{suffix}").write_bytes(pickle.dumps(value()))
    return folder / f"{NAME}{suffix}"


def copied(fixture: str, suffix: str, folder: Path) -> Path:
    source, target = ROOT / "fixtures" / fixture, folder / f"{NAME}{suffix}"
    return Path((shutil.copytree if source.is_dir() else shutil.copy)(source, target))


for _name, _code, _options, _suffix, _value in SAVED:
    CASES[_name] = (_code, partial(make_saved, _value, _suffix), tuple(_options.split()), TORCH_SAYS.get(_name, ""))  # fmt: skip
for _name, _code, _suffix, _value in PICKLED:
    CASES[_name] = (_code, partial(make_pickled, _value, _suffix), (), "")
for _name, _code, _fixture, _suffix in COPIED:
    CASES[_name] = (_code, partial(copied, _fixture, _suffix), (), TORCH_SAYS.get(_name, ""))


@case("suffix", torch_says="Weights only load failed")
def pickle_of_arrays(folder: Path) -> Path:
    return make_pickled(lambda: {"w": np.ones(2)}, ".pth", folder)


@case("pickle", torch_says="Unsupported operand 149")
def protocol_4(folder: Path) -> Path:
    return saved(folder, weights(), pickle_protocol=4)


@case("quantized")
def quantized(folder: Path) -> Path:
    parts = {"w.weight_packed": made.row("U8", [4, 32]), "w.weight_scale": made.row("U8", [4, 2])}
    config = {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "float", "group_size": 32, "strategy": "group",
            "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"}}},
    }}  # fmt: skip
    (folder / NAME).mkdir()
    (folder / NAME / "config.json").write_text(json.dumps(config))
    made.write(folder / NAME / "model.safetensors", parts)
    return folder / NAME


CASES["quantized_beside_a_model"] = ("quantized", quantized, ("--model", "nets.py:Matrix"), "")


@case("suffix")
def not_torch(folder: Path) -> Path:
    save_file(weights(), folder / f"{NAME}.pth")
    return folder / f"{NAME}.pth"


@case("not-torch")
def npz(folder: Path) -> Path:
    np.savez(folder / f"{NAME}.npz", w=np.ones((2, 3)))
    return folder / f"{NAME}.npz"


@case("not-torch")
def compressed(folder: Path) -> Path:
    (folder / f"{NAME}.pth.gz").write_bytes(gzip.compress(torch_bytes(weights())))
    return folder / f"{NAME}.pth.gz"


@case("not-torch")
def stable_baselines(folder: Path) -> Path:
    with zipfile.ZipFile(folder / f"{NAME}.zip", "w") as archive:
        archive.writestr("policy.pth", torch_bytes(weights()))
        archive.writestr("_stable_baselines3_version", "2.3.0")
    return folder / f"{NAME}.zip"


@case("not-torch")
def unpacked(folder: Path) -> Path:
    zipfile.ZipFile(saved(folder, weights())).extractall(folder)
    return folder / NAME


@case("no-version", torch_says=r"hasRecord\(\"version\"\)")
def no_version(folder: Path) -> Path:
    return rewritten(saved(folder, weights()), None)


@case("no-index")
def no_index(folder: Path) -> Path:
    (folder / NAME).mkdir()
    state = list(weights().items())
    for number, part in enumerate((state[:2], state[2:]), 1):
        save_file(dict(part), folder / NAME / f"model-0000{number}-of-00002.safetensors")
    return folder / NAME


@case("one-shard")
def one_shard(folder: Path) -> Path:
    return no_index(folder) / "model-00001-of-00002.safetensors"


@case("part")
def part(folder: Path) -> Path:
    found = copied("deepspeed/zero2-fp32-3ranks", "", folder) / "global_step2"
    return next(found.glob("*rank_1*optim_states.pt"))


@case("parallel")
def llama_parts(folder: Path) -> Path:
    return release(folder / NAME, llama(1, version=3), 2, version=3)


@case("unfinished")
def unfinished(folder: Path) -> Path:
    for step in ("step_9", "step_10"):
        copied("dcp/fsdp_bare", f" {step}", folder)
    (folder / f"{NAME} step_10/.metadata").unlink()
    return folder / f"{NAME} step_10"


@case("damaged", torch_says="failed finding central directory")
def cut(folder: Path) -> Path:
    path = saved(folder, {"first": torch.arange(1e5), "last": torch.ones(100_000)})
    path.write_bytes(path.read_bytes()[:-300_000])
    return path


@case("damaged")
def flipped(folder: Path) -> Path:
    path = saved(folder, {"a": torch.arange(100.0), "b": torch.arange(100.0) * 3})
    data = bytearray(path.read_bytes())
    data[bytes(data).index(torch.arange(100.0).numpy().tobytes()) + 40] ^= 1
    path.write_bytes(data)
    return path


# Commands of other programs, which are not run: code -> command.
OTHERS = {"newer": "pip install --upgrade torch", "lfs-pointer": "git lfs pull"}
# The command looks at the file, and says more about it.
LOOKS = {"inner": "scan", "ambiguous": "doctor --key"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Path("bin").mkdir()
    Path("bin/ckptkit").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptkit "$@"\n')
    Path("bin/ckptkit").chmod(0o755)
    Path("nets.py").write_text(NETS)
    return tmp_path


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("code, make, options, torch_says", CASES.values(), ids=[*CASES])
def test_the_finding_is_gone(
    code: str, make: Make, options: tuple[str, ...], torch_says: str, folder: Path,
    ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    path = make(folder).relative_to(folder)
    if torch_says:
        with pytest.raises((RuntimeError, pickle.UnpicklingError), match=torch_says):
            torch.load(path, weights_only=True)
    said = ckptkit("doctor", path, *options, "--fail-on", "never").stdout
    found = causes(ckptkit, path, options)
    assert code in found, found.keys()
    command = found[code]["command"]
    printed = [line.strip() for line in said.splitlines()]
    assert command in printed
    before = {*folder.rglob("*")}
    done = ckptkit(*words(command, folder))
    if code in LOOKS:
        assert command.startswith(f"ckptkit {LOOKS[code]}") and "Error" not in done.output
        assert code not in done.output
        return
    assert done.exit_code == 0, (command, done.output)
    new = [each for each in folder.rglob("*") if each not in before and each.parent.exists()]
    ours = [each for each in new if not each.name.startswith("torchinductor")]  # torch's cache
    made = [each for each in ours if each.parent not in ours]
    assert len(made) == 1, (command, made)
    if made[0].suffix == ".pth":
        there = None if code == "device" else "cpu"
        state = torch.load(made[0], map_location=there, weights_only=True)
        assert code != "device" or {str(each.device) for each in state.values()} == {"cpu"}
    elif made[0].suffix == ".safetensors":
        assert load_file(made[0])
    left = causes(ckptkit, made[0].relative_to(folder), options)
    assert code not in left, (command, left[code])


def causes(ckptkit: Ckptkit, path: Path, options: tuple[str, ...]) -> dict[str, Any]:
    done = ckptkit("doctor", path, *options, "--json")
    return {each["code"]: each for each in json.loads(done.stdout)["causes"]}


def test_ambiguous_is_gone_with_the_key(folder: Path, ckptkit: Ckptkit) -> None:
    os.chdir(folder)
    path = CASES["ambiguous"][1](folder)
    command = causes(ckptkit, path, ())["ambiguous"]["command"]
    found = json.loads(shell(f"{command} --json", folder, strict=False).stdout)
    assert [each["code"] for each in found["causes"]] == ["wrapper"]


@pytest.mark.parametrize("code", OTHERS)
def test_commands_of_other_programs(code: str, folder: Path, ckptkit: Ckptkit) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 440449768\n"
    path = rewritten(saved(folder, weights()), "11\n")
    if code == "lfs-pointer":
        path.write_bytes(pointer)
    assert causes(ckptkit, path, ())[code]["command"] == OTHERS[code]


def calls() -> Iterator[ast.Call]:
    """Yield every place where the doctor makes a finding."""
    for path in Path(diagnosis.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "cause":
                yield node


def codes_of(call: ast.Call) -> set[str]:
    """Return the codes that a finding may have."""
    code = ast.unparse(call.args[0])
    if code == "'folder'":
        return {each.name for each in FORMATS if each.distributed}
    if code == "name":  # each row of the code has the same command
        return {"damaged", "pickle"}
    if code == "_REFUSED.get(type(error), 'refused')":
        return {"ambiguous", "unsupported", "limit", "refused"}
    return {ast.literal_eval(code).partition("/")[0]}


def has_command(call: ast.Call) -> bool:
    return len(call.args) > 1 or any(each.arg == "command" for each in call.keywords)


def test_every_code_with_a_command_has_a_case() -> None:
    with_command = set[str]().union(*(codes_of(call) for call in calls() if has_command(call)))
    elsewhere = {"delta"}  # deltas/test_deltas.py::test_other_commands_know_a_delta
    tested = {code for code, *_ in CASES.values()} | {*OTHERS} | elsewhere
    assert tested == with_command
