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
CASES: list[tuple[str, str, Make, tuple[str, ...], str]] = []


def case(code: str, *options: str, torch_says: str = "") -> Callable[[Make], Make]:
    """Add a case: the function makes the file that has the finding `code`.

    `torch_says` is what torch.load(weights_only=True) raises for it.
    """

    def add(make: Make) -> Make:
        CASES.append((make.__name__, code, make, options, torch_says))
        return make

    return add


def weights() -> dict[str, Any]:
    return dict(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).state_dict())


def prefixed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in state.items()}


def saved(folder: Path, value: object, suffix: str = ".pth") -> Path:
    torch.save(value, folder / f"{NAME}{suffix}")
    return folder / f"{NAME}{suffix}"


def make_saved(value: Callable[[], object], folder: Path) -> Path:
    return saved(folder, value())


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


# What torch.save writes: a name, the code of its finding, the options of doctor, and the value.
SAVED: list[tuple[str, str, str, Callable[[], object]]] = [
    ("module", "prefix", "", lambda: prefixed("module.", weights())),
    ("two_wrappers", "prefix", "", lambda: prefixed("module._orig_mod.", weights())),
    ("some_are_wrapped", "prefix", "", lambda: {**prefixed("module.", weights()), "temperature": torch.ones(1)}),
    ("wrapped_beside_a_model", "prefix", "--model nets.py:Net", lambda: prefixed("module.", weights())),
    ("bare_beside_a_model", "prefix", "--model nets.py:Wrapped", lambda: weights()),
    ("another_prefix_beside_a_model", "prefix", "--model nets.py:Wrapped", lambda: prefixed("net.", weights())),
    ("prefix_of_one_of_two", "prefix", "--key gen", lambda: {"gen": prefixed("module._orig_mod.", weights()), "disc": weights()}),
    ("bare_one_of_two_beside_a_model", "prefix", "--key gen --model nets.py:Wrapped", lambda: {"gen": weights(), "disc": weights()}),
    ("unexpected_in_one_of_two", "unexpected", "--key gen --model nets.py:Net", lambda: {"gen": {**weights(), "more": torch.ones(9)}, "disc": weights()}),
    ("renamed_in_one_of_two", "renamed", "--key gen --model nets.py:Named", lambda: {"gen": names("layers.", "encoder.layer."), "disc": weights()}),
    ("dtype_of_one_of_two", "dtype", "--key gen --model nets.py:Net", lambda: {"gen": halved(), "disc": weights()}),
    ("attribute", "attribute", "", lambda: prefixed("model.", weights())),
    ("compiled_parts", "inner-prefix", "", lambda: {"a._orig_mod.weight": torch.ones(2), "b.weight": torch.ones(2)}),
    ("renamed_by_prefix", "renamed", "--model nets.py:Named", lambda: names("layers.", "encoder.layer.")),
    ("tied", "tied", "--model nets.py:Tied", lambda: {"embed.weight": torch.ones(6, 4)}),
    ("mismatched", "mismatched", "--model nets.py:Net", lambda: {**weights(), "2.weight": torch.ones(5, 3), "2.bias": torch.ones(5)}),
    ("unexpected", "unexpected", "--model nets.py:Net", lambda: {**weights(), "a[0]*.weight": torch.ones(9), "it's": torch.ones(7)}),
    ("dtype", "dtype", "--model nets.py:Net", lambda: halved()),
    ("whole_module", "module", "", lambda: nn.Sequential(nn.Linear(2, 2))),
    ("wrapper", "wrapper", "", lambda: {"model": weights(), "epoch": 3}),
    ("wrapper_alone", "wrapper", "", lambda: {"state_dict": weights()}),
    ("objects_beside", "weights-only", "", lambda: {"model": weights(), "args": Namespace(lr=0.1)}),
    ("arrays", "weights-only", "", lambda: {"w": np.ones(2)}),
    ("slices", "slices", "", lambda: {"a": torch.ones(1000, 1000)[:2]}),
]  # fmt: skip
for _name, _code, _options, _value in SAVED:
    CASES.append((_name, _code, partial(make_saved, _value), tuple(_options.split()), ""))


# Names


@case("attribute")
def lightning(folder: Path) -> Path:
    state = prefixed("model.", weights())
    return saved(folder, {"state_dict": state, "pytorch-lightning_version": "2.5"}, ".ckpt")


@case("inner-prefix", "--key", "gen")
def compiled_parts_of_one_of_two(folder: Path) -> Path:
    state = {"a._orig_mod.weight": torch.ones(2), "b.weight": torch.ones(2)}
    return saved(folder, {"gen": state, "disc": weights()})


@case("attribute")
def lightning_with_a_loss(folder: Path) -> Path:
    state = {**prefixed("net.", weights()), "loss.weight": torch.ones(2)}
    return saved(folder, {"state_dict": state, "pytorch-lightning_version": "2.5"}, ".ckpt")


@case("renamed", "--model", "nets.py:Named")
def renamed_one_by_one(folder: Path) -> Path:
    numbers = {f"layers.{n}.": f"block_{'abcd'[n]}." for n in range(4)}
    found = names()
    for old, new in numbers.items():
        found = {name.replace(old, new): value for name, value in found.items()}
    return saved(folder, prefixed("module.", found))


def names(old: str = "", new: str = "") -> dict[str, Any]:
    """Return the state_dict of Named, with other beginnings of names."""
    namespace: dict[str, Any] = {}
    exec(NETS, namespace)
    state = namespace["Named"]().state_dict()
    return {name.replace(old, new, 1) if old else name: state[name] for name in state}


# The content


@case("weights-only", torch_says="Weights only load failed")
def objects(folder: Path) -> Path:
    return saved(folder, {**weights(), "args": Namespace(lr=0.1)})


@case("pickle", torch_says="Unsupported operand 149")
def protocol_4(folder: Path) -> Path:
    torch.save(weights(), folder / f"{NAME}.pth", pickle_protocol=4)
    return folder / f"{NAME}.pth"


@case("device", torch_says=r"Attempting to deserialize object on a? ?CUDA device")
def device(folder: Path) -> Path:
    source = ROOT / "fixtures/torch-zip/ddp_bare_cuda3.pth"
    return Path(shutil.copy(source, folder / f"{NAME}.pth"))


@case("optimizer")
def optimizer(folder: Path) -> Path:
    model = nn.Linear(512, 512)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 512)).sum().backward()
    adam.step()
    return saved(folder, {"model": model.state_dict(), "optimizer": adam.state_dict()})


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


@case("quantized", "--model", "nets.py:Matrix")
def quantized_beside_a_model(folder: Path) -> Path:
    return quantized(folder)


@case("inner")
def inner(folder: Path) -> Path:
    held = io.BytesIO()
    torch.save(weights(), held)
    (folder / f"{NAME}.pkl").write_bytes(pickle.dumps({"raw": held.getvalue()}))
    return folder / f"{NAME}.pkl"


# The container


@case("old-format", torch_says=r"legacy \.tar format")
def tar(folder: Path) -> Path:
    source = ROOT / "fixtures/torch-tar/dp_wrapped_cuda1.pth"
    return Path(shutil.copy(source, folder / f"{NAME}.pth"))


@case("suffix")
def not_torch(folder: Path) -> Path:
    save_file(weights(), folder / f"{NAME}.pth")
    return folder / f"{NAME}.pth"


@case("suffix")
def not_safetensors(folder: Path) -> Path:
    return saved(folder, weights(), ".safetensors")


@case("suffix", torch_says="Weights only load failed")
def pickle_of_arrays(folder: Path) -> Path:
    (folder / f"{NAME}.pth").write_bytes(pickle.dumps({"w": np.ones(2)}))
    return folder / f"{NAME}.pth"


@case("not-torch")
def npz(folder: Path) -> Path:
    np.savez(folder / f"{NAME}.npz", w=np.ones((2, 3)))
    return folder / f"{NAME}.npz"


@case("not-torch")
def pickled_arrays(folder: Path) -> Path:
    (folder / f"{NAME}.pkl").write_bytes(pickle.dumps({"fc.weight": np.ones((2, 3))}))
    return folder / f"{NAME}.pkl"


@case("not-torch")
def compressed(folder: Path) -> Path:
    path = saved(folder, weights())
    (folder / f"{NAME}.pth.gz").write_bytes(gzip.compress(path.read_bytes()))
    return folder / f"{NAME}.pth.gz"


@case("not-torch")
def stable_baselines(folder: Path) -> Path:
    held = io.BytesIO()
    torch.save(weights(), held)
    with zipfile.ZipFile(folder / f"{NAME}.zip", "w") as archive:
        archive.writestr("policy.pth", held.getvalue())
        archive.writestr("_stable_baselines3_version", "2.3.0")
    return folder / f"{NAME}.zip"


@case("not-torch")
def unpacked(folder: Path) -> Path:
    zipfile.ZipFile(saved(folder, weights())).extractall(folder)
    return folder / NAME


@case("suffix")
def pickled_module_with_unknown_calls(folder: Path) -> Path:
    class Called:
        def __reduce__(self) -> tuple[Any, ...]:
            return dedent, ("a function that is not allowlisted",)

    module = nn.Linear(2, 2)
    vars(module)["note"] = Called()
    (folder / f"{NAME}.pth").write_bytes(pickle.dumps(module))
    return folder / f"{NAME}.pth"


@case("program")
def program(folder: Path) -> Path:
    source = ROOT / "fixtures/torchscript/scripted.pt"
    return Path(shutil.copy(source, folder / f"{NAME}.pt"))


@case("no-version", torch_says=r"hasRecord\(\"version\"\)")
def no_version(folder: Path) -> Path:
    return rewritten(saved(folder, weights()), None)


@case("no-index")
def no_index(folder: Path) -> Path:
    return shards(folder)


@case("one-shard")
def one_shard(folder: Path) -> Path:
    return shards(folder) / "model-00001-of-00002.safetensors"


def shards(folder: Path) -> Path:
    (folder / NAME).mkdir()
    state = list(weights().items())
    for number, part in enumerate((state[:2], state[2:]), 1):
        save_file(dict(part), folder / NAME / f"model-0000{number}-of-00002.safetensors")
    return folder / NAME


@case("ambiguous")
def ambiguous(folder: Path) -> Path:
    return saved(folder, {"gen": weights(), "disc": weights()})


@case("part")
def part(folder: Path) -> Path:
    found = folder_of(folder, "deepspeed/zero2-fp32-3ranks") / "global_step2"
    return next(found.glob("*rank_1*optim_states.pt"))


@case("dcp")
def dcp(folder: Path) -> Path:
    return folder_of(folder, "dcp/fsdp_full")


@case("parallel")
def llama_parts(folder: Path) -> Path:
    return release(folder / NAME, llama(1, version=3), 2, version=3)


@case("deepspeed")
def zero(folder: Path) -> Path:
    return folder_of(folder, "deepspeed/zero2-fp32-3ranks")


def folder_of(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(ROOT / "fixtures" / name, folder / NAME))


@case("unfinished")
def unfinished(folder: Path) -> Path:
    for step in ("step_9", "step_10"):
        shutil.copytree(ROOT / "fixtures/dcp/fsdp_bare", folder / f"{NAME} {step}")
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
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ckptkit").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptkit "$@"\n')
    (tmp_path / "bin/ckptkit").chmod(0o755)
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "code, make, options, torch_says", [each for _, *each in CASES], ids=[each[0] for each in CASES]
)
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
    path = ambiguous(folder)
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
    tested = {code for _, code, *_ in CASES} | {*OTHERS} | elsewhere
    assert tested == with_command
