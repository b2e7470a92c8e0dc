"""doctor: for each cause, a file that torch made has it, doctor says so, and the command that it
prints mends it.

The commands are run as a person would: what stands below the explanation, split by the rules of the
shell.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shlex
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.cli.conftest import Ckptkit
from tests.conftest import ROOT

Diagnose = Callable[..., dict[str, dict[str, Any]]]
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes=3, tied=False):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 8)}) for _ in range(2))
        self.head = nn.Linear(4, 6 if tied else classes, bias=False)
        if tied:
            self.head.weight = self.embed.weight
"""


def net(**options: object) -> nn.Module:
    namespace: dict[str, Any] = {}
    exec(NET, namespace)
    made = namespace["Net"](**options)
    assert isinstance(made, nn.Module)
    return made


@pytest.fixture
def diagnose(ckptkit: Ckptkit) -> Diagnose:
    """``diagnose(path, ...)``: the causes by their ids; the exit code must tell that there are
    some."""

    def invoke(*args: object, code: int = 1) -> dict[str, dict[str, Any]]:
        result = ckptkit("doctor", "--json", *args)
        found = json.loads(result.stdout)
        fails = any(cause["level"] != "note" for cause in found["causes"])
        assert result.exit_code == (code if code == 3 else int(fails)), result.stderr
        assert found["schema"] == "ckptkit.doctor/1"
        assert found["readable"] == (code != 3)
        assert bool(found["causes"]) == (code != 0)
        return {cause["code"]: cause for cause in found["causes"]}

    return invoke


@pytest.fixture
def paste(ckptkit: Ckptkit) -> Callable[[dict[str, Any]], Path]:
    """Run the command of a cause; what it wrote."""

    def invoke(cause: dict[str, Any]) -> Path:
        program, *words = shlex.split(cause["command"])
        assert program == "ckptkit"
        result = ckptkit(*words)
        assert result.exit_code == 0, (result.stdout, result.stderr)
        return Path(words[words.index("--fix") + 1] if words[0] == "doctor" else words[-1])

    return invoke


Paste = Callable[[dict[str, Any]], Path]


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_nothing_is_found(diagnose: Diagnose, ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "net.pth")
    (tmp_path / "nets.py").write_text(NET)
    assert diagnose(tmp_path / "net.pth", code=0) == {}
    assert diagnose(tmp_path / "net.pth", "--model", f"{tmp_path / 'nets.py'}:Net", code=0) == {}
    assert "found nothing" in ckptkit("doctor", tmp_path / "net.pth").stdout


def test_changed_bytes_are_loaded_in_silence(
    diagnose: Diagnose, paste: Paste, tmp_path: Path
) -> None:
    torch.save({"a": torch.arange(100.0), "b": torch.ones(3)}, tmp_path / "run.pth")
    data = (tmp_path / "run.pth").read_bytes()
    at = data.index(torch.arange(100.0).numpy().tobytes()) + 40
    (tmp_path / "run.pth").write_bytes(data[:at] + b"abcd" + data[at + 4 :])
    assert load(tmp_path / "run.pth")["a"][10] != 10  # and no error
    cause = diagnose(tmp_path / "run.pth")["damaged"]
    assert cause["title"].endswith("(a).") and "without an error" in cause["explanation"]
    assert load(paste(cause)).keys() == {"b"}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("old", [False, True], ids=["zip", "legacy"])
def test_protocols_of_pickles(diagnose: Diagnose, paste: Paste, tmp_path: Path, old: bool) -> None:
    new = not old
    for protocol in (2, 3, 4, 5):
        path = tmp_path / f"{protocol}.pth"
        torch.save(
            net().state_dict(), path, pickle_protocol=protocol, _use_new_zipfile_serialization=new
        )
        if protocol < 4:
            assert diagnose(path, code=0) == {} and load(path)
            continue
        with pytest.raises(pickle.UnpicklingError, match="Unsupported operand 149"):
            load(path)
        cause = diagnose(path)["pickle"]
        assert "opcode FRAME" in cause["title"] and "Unsupported operand" in cause["explanation"]
        net().load_state_dict(load(paste(cause)))


def test_a_part_whose_folder_is_incomplete_has_no_command(
    diagnose: Diagnose, tmp_path: Path
) -> None:
    source = ROOT / "fixtures/deepspeed/zero2-fp32-3ranks/global_step2"
    (part,) = source.glob("*rank_1*optim_states.pt")
    shutil.copy(part, tmp_path)
    cause = diagnose(tmp_path / part.name)["part"]
    assert cause["command"] is None and "into one folder" in cause["explanation"]
    (other,) = source.glob("*rank_2*optim_states.pt")
    shutil.copy(other, tmp_path)
    cause = diagnose(tmp_path / part.name)["part"]
    assert cause["command"] is None and "cannot be read" in cause["explanation"]


# Names


def test_prefix_of_most_keys(diagnose: Diagnose, paste: Paste, tmp_path: Path) -> None:
    state = {
        ("module." if "mlp" not in name else "") + name: tensor
        for name, tensor in net().state_dict().items()
    }
    torch.save(state, tmp_path / "run.pth")
    cause = diagnose(tmp_path / "run.pth")["prefix"]
    assert cause["title"].startswith("6 of 10 keys")
    net().load_state_dict(load(paste(cause)))


def test_prefix_of_lightning(diagnose: Diagnose, tmp_path: Path) -> None:
    state = {"model." + name: tensor for name, tensor in net().state_dict().items()}
    torch.save(
        {"state_dict": state, "pytorch-lightning_version": "2.5.0", "epoch": 1},
        tmp_path / "run.ckpt",
    )
    healthy = diagnose(tmp_path / "run.ckpt")["attribute"]  # for Lightning it is
    assert "model." in healthy["command"] and (healthy["level"], healthy["fixable"]) == (
        "note",
        True,
    )
    torch.save(state, tmp_path / "run.pth")
    found = diagnose(tmp_path / "run.pth")["attribute"]  # many networks have a part called model
    assert (found["level"], found["fixable"]) == ("note", False)
    save_file(state, tmp_path / "run.safetensors")
    assert diagnose(tmp_path / "run.safetensors", code=0) == {}


def test_network_of_lightning_among_other_parts(
    diagnose: Diagnose, paste: Paste, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    """A file with causes that --fix leaves is not reported to load."""
    state = {f"model.{name}": tensor for name, tensor in net().state_dict().items()}
    state["criterion.weight"] = torch.ones(3)
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.5.0"}, tmp_path / "run.ckpt")
    found = diagnose(tmp_path / "run.ckpt")
    net().load_state_dict(load(paste(found["attribute"]))["state_dict"])
    words = ("doctor", tmp_path / "run.ckpt", "--fix", tmp_path / "fixed.pth", "--force")
    done = ckptkit(*words, "--fail-on", "note")
    verdict = done.stdout.partition("\n\nnote: names and shapes")[0].splitlines()[-1]
    assert done.exit_code == 1 and "loads" not in verdict
    assert "not fixed" in done.stdout
    assert ckptkit(*words).exit_code == 0  # what is left is a note


def test_a_healthy_training_checkpoint_is_no_failure(ckptkit: Ckptkit, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(saved, tmp_path / "run.pth")
    done = ckptkit("doctor", tmp_path / "run.pth")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0].endswith("torch-zip: 1 note")
    assert "1. note: The weights are in its entry 'model'" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("note: names and shapes were not checked")


@pytest.mark.parametrize(
    ("level", "code"), [("error", 0), ("warning", 0), ("note", 1), ("never", 0), (None, 0)]
)
def test_the_level_that_fails(
    ckptkit: Ckptkit, tmp_path: Path, level: str | None, code: int
) -> None:
    torch.save({"model": net().state_dict(), "epoch": 3}, tmp_path / "run.pth")
    chosen = () if level is None else ("--fail-on", level)
    assert ckptkit("doctor", *chosen, tmp_path / "run.pth").exit_code == code
    wrapped = {f"module.{name}": tensor for name, tensor in net().state_dict().items()}
    torch.save(wrapped, tmp_path / "wrapped.pth")
    fails = int(level != "never")
    assert ckptkit("doctor", *chosen, tmp_path / "wrapped.pth").exit_code == fails


def test_with_a_model_names_are_checked(ckptkit: Ckptkit, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2)\n"
    )
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "run.pth")
    done = ckptkit("doctor", tmp_path / "run.pth", "--model", f"{tmp_path / 'nets.py'}:make")
    assert done.exit_code == 0 and "not checked" not in done.stdout


def test_the_file_itself_is_no_place_for_what_is_mended(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1)}, tmp_path / "it's.pth")
    os.link(tmp_path / "it's.pth", tmp_path / "link.pth")
    for name in ("it's.pth", "link.pth"):
        done = ckptkit("doctor", tmp_path / "it's.pth", "--fix", tmp_path / name, "--force")
        assert done.exit_code == 2 and "--in-place" not in done.stderr
        option, path = shlex.split(done.stderr.partition("hint: use ")[2])
        assert (option, path) == ("--fix", str(tmp_path / "it's-fixed.pth"))
    assert ckptkit("doctor", tmp_path / "it's.pth", "--fix", path).exit_code == 0


def test_a_save_that_failed(ckptkit: Ckptkit, tmp_path: Path) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        torch.save({"a": torch.ones(2), "f": lambda: 0}, tmp_path / "failed.pth")
    done = ckptkit("doctor", tmp_path / "failed.pth")
    assert done.exit_code == 3 and "half-way" in done.stdout and "page" not in done.stdout
    assert "half-way" in ckptkit("inspect", tmp_path / "failed.pth").stderr


MOST = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, classes)
"""


def most(folder: Path, prefix: str = "", **options: int) -> tuple[nn.Module, Path]:
    """A net, and a file with its weights, of which most begin otherwise than they do in the net."""
    (folder / "nets.py").write_text(MOST)
    namespace: dict[str, Any] = {}
    exec(MOST, namespace)
    torch.manual_seed(1)
    state = namespace["Net"](**options).state_dict()
    state = {
        name.replace("layers.", "encoder.blocks.").replace("embed.", "tok."): value
        for name, value in state.items()
    }
    torch.save({prefix + name: value for name, value in state.items()}, folder / "run.pth")
    return namespace["Net"](), folder / "run.pth"


@pytest.mark.parametrize("prefix", ["", "module."])
def test_most_keys_have_another_beginning(
    diagnose: Diagnose, paste: Paste, ckptkit: Ckptkit, tmp_path: Path, prefix: str
) -> None:
    """Keys that match already stay unchanged, with each of the commands."""
    model, path = most(tmp_path, prefix)
    options = ("--model", f"{tmp_path / 'nets.py'}:Net")
    found = diagnose(path, *options)
    right = [name for name in model.state_dict() if name.startswith(("norm.", "head."))]
    for cause in found.values():
        keys = {key.removeprefix(prefix) for key in load(paste(cause))}
        assert keys >= {*right}
    keys = {name.removeprefix("module.") for name in load(path)}
    named = {
        part.split(" -> ")[0] for part in found["renamed"]["title"].partition(": ")[2].split(", ")
    }
    assert all(
        name.removeprefix(prefix) in keys for name in named if "." in name and " and " not in name
    )
    done = ckptkit("doctor", path, *options, "--fix", tmp_path / "fixed.pth")
    assert done.exit_code == 0 and "without the prefix, not changed" not in done.stderr
    fixed, source = load(tmp_path / "fixed.pth"), load(path)
    model.load_state_dict(fixed)
    assert torch.equal(fixed["embed.weight"], source[prefix + "tok.weight"])
    assert torch.equal(fixed["layers.3.bias"], source[prefix + "encoder.blocks.3.bias"])


def test_a_new_beginning_alone_is_one_substitution(
    diagnose: Diagnose, paste: Paste, tmp_path: Path
) -> None:
    model, path = most(tmp_path)
    state = {name.replace("tok.", "embed."): value for name, value in load(path).items()}
    torch.save(state, path)
    found = diagnose(path, "--model", f"{tmp_path / 'nets.py'}:Net")
    assert found.keys() == {"renamed"} and " --sub " in found["renamed"]["command"]
    model.load_state_dict(load(paste(found["renamed"])))


def test_a_new_beginning_and_another_head(
    diagnose: Diagnose, paste: Paste, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    _, path = most(tmp_path, classes=5)
    options = ("--model", f"{tmp_path / 'nets.py'}:Net")
    assert diagnose(path, *options).keys() == {"renamed", "mismatched"}
    ckptkit("doctor", path, *options, "--fix", tmp_path / "fixed.pth")
    assert diagnose(tmp_path / "fixed.pth", *options).keys() == {"mismatched"}
    head = [name for name in load(tmp_path / "fixed.pth") if "head" in name]
    assert head == ["head.weight", "head.bias"]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_of_either_kind(diagnose: Diagnose, paste: Paste, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\nfrom torch.nn.utils import weight_norm, parametrizations\n"
        "def old():\n    return nn.Sequential(weight_norm(nn.Linear(3, 2)))\n"
        "def new():\n    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)))\n"
    )
    namespace: dict[str, Any] = {}
    exec((tmp_path / "nets.py").read_text(), namespace)
    for kind in ("old", "new"):
        torch.save(namespace[kind]().state_dict(), tmp_path / f"{kind}.pth")
    nets = f"{tmp_path / 'nets.py'}:"
    namespace["new"]().load_state_dict(load(tmp_path / "old.pth"))  # by a hook of torch
    assert diagnose(tmp_path / "old.pth", "--model", f"{nets}new", code=0) == {}
    found = diagnose(tmp_path / "new.pth", "--model", f"{nets}old")
    assert found.keys() == {"renamed"} and "100%" in found["renamed"]["explanation"]
    namespace["old"]().load_state_dict(load(paste(found["renamed"])))


def test_unexpected_and_missing(diagnose: Diagnose, paste: Paste, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NET)
    state = net().state_dict()
    del state["head.weight"]
    torch.save({**state, "loss.centres": torch.ones(2)}, tmp_path / "run.pth")
    found = diagnose(tmp_path / "run.pth", "--model", f"{tmp_path / 'nets.py'}:Net")
    assert found.keys() == {"unexpected", "missing"}
    assert "head.weight" in found["missing"]["title"] and found["missing"]["command"] is None
    assert load(paste(found["unexpected"])).keys() == state.keys()


def test_tied(diagnose: Diagnose, paste: Paste, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NET)
    tied = net(tied=True).state_dict()
    save_file(
        {name: tensor for name, tensor in tied.items() if name != "head.weight"},
        tmp_path / "run.safetensors",
    )
    options = ("--model", f"{tmp_path / 'nets.py'}:Net", "--arg", "tied=true")
    found = diagnose(tmp_path / "run.safetensors", *options)
    assert found.keys() == {"tied"}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"head.weight\""):
        net(tied=True).load_state_dict(load_file(tmp_path / "run.safetensors"))
    out = paste({"command": found["tied"]["command"].replace("run-tied.safetensors", "run.pth")})
    net(tied=True).load_state_dict(load(out))
    state = load(out)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()


def test_counters_of_old_batch_norms_are_not_missing(diagnose: Diagnose, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef make():\n    return nn.ModuleDict({'n': nn.BatchNorm1d(2)})"
    )
    state: Any = nn.ModuleDict({"n": nn.BatchNorm1d(2)}).state_dict()
    del state["n.num_batches_tracked"]
    state._metadata["n"]["version"] = 1
    torch.save(state, tmp_path / "old.pth")
    assert diagnose(tmp_path / "old.pth", "--model", f"{tmp_path / 'nets.py'}:make", code=0) == {}
    state._metadata["n"]["version"] = 2
    torch.save(state, tmp_path / "new.pth")
    assert "missing" in diagnose(tmp_path / "new.pth", "--model", f"{tmp_path / 'nets.py'}:make")


# What is in it


def test_arrays_that_weights_only_refuses(diagnose: Diagnose, paste: Paste, tmp_path: Path) -> None:
    """Leaving out values that are objects would leave out the weights."""
    torch.save({"w": torch.ones(2).numpy()}, tmp_path / "run.pth")
    found = diagnose(tmp_path / "run.pth")
    assert torch.equal(load_file(paste(found["weights-only"]))["w"], torch.ones(2))
    torch.save(torch.ones(2).numpy(), tmp_path / "array.pth")
    assert diagnose(tmp_path / "array.pth")["weights-only"]["command"] is None


def test_what_loading_would_run_is_said(diagnose: Diagnose, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    torch.save({"model": net().state_dict(), "x": Evil()}, tmp_path / "run.pth")
    found = diagnose(tmp_path / "run.pth")
    assert (
        "system" in found["weights-only"]["explanation"]
        and "do not load the file" in found["weights-only"]["explanation"]
    )


def test_optimizer_of_the_weights_themselves(diagnose: Diagnose, tmp_path: Path) -> None:
    """Its groups hold the parameters: without it the file would be as large."""
    model = nn.Linear(512, 512)
    groups = [{"params": list(model.parameters()), "lr": 0.1}]
    held = {"param_groups": groups, "state": {}}
    torch.save({"optimizer": held, "model": model.state_dict()}, tmp_path / "run.pth")
    assert load(tmp_path / "run.pth")["model"]["weight"].data_ptr()
    assert "optimizer" not in diagnose(tmp_path / "run.pth")


class Arguments:
    """An object as transformers pickles it in training_args.bin."""

    lr = 0.1


@pytest.mark.parametrize("value", [Arguments(), [Arguments()], {"a": Arguments(), "b": None}])
def test_dropping_objects_that_are_all_there_is(
    diagnose: Diagnose, ckptkit: Ckptkit, tmp_path: Path, value: object
) -> None:
    torch.save(value, tmp_path / "training_args.bin")
    found = diagnose(tmp_path / "training_args.bin")
    assert found["weights-only"]["command"] is None and not found["weights-only"]["fixable"]
    assert "--objects drop" not in ckptkit("inspect", tmp_path / "training_args.bin").stdout
    ckptkit("doctor", tmp_path / "training_args.bin", "--fix", tmp_path / "fixed.bin")
    done = ckptkit(
        "convert", tmp_path / "training_args.bin", tmp_path / "x.pth", "--objects", "drop"
    )
    assert done.exit_code == 2 and "nothing remains" in done.stderr
    assert not (tmp_path / "fixed.bin").exists() and not (tmp_path / "x.pth").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_program(
    diagnose: Diagnose, paste: Paste, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    made: Any = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear})
    torch.jit.save(torch.jit.script(made), tmp_path / "q.pt")
    cause = diagnose(tmp_path / "q.pt")["program"]
    state = load(paste(cause))
    assert torch.equal(state["0.weight"], made[0].weight().dequantize())
    assert ckptkit("doctor", tmp_path / "q.pt", "--fix", tmp_path / "fixed.pt").exit_code == 0
    hints = [
        line
        for line in ckptkit("inspect", tmp_path / "q.pt").stdout.splitlines()
        if "convert" in line
    ]
    assert hints and all("--dequantize" in line for line in hints)
    packed = ckptkit("convert", tmp_path / "q.pt", tmp_path / "new.pth")
    assert packed.exit_code == 2 and "--dequantize converts them" in packed.stderr
    assert load(tmp_path / "fixed.pt").keys() == state.keys() == {"0.weight", "0.bias"}


# The container


@pytest.mark.parametrize("name", ["a.pkl", "a.pdparams", "a.npz", "a.npy", "config.pkl"])
def test_what_torch_load_refuses(
    diagnose: Diagnose, paste: Paste, ckptkit: Ckptkit, tmp_path: Path, name: str
) -> None:
    arrays, path = (
        {"fc.weight": np.ones((2, 3), "f4"), "fc.bias": np.zeros(3, "f4")},
        tmp_path / name,
    )
    if name == "a.npz":
        np.savez(path, **arrays)
    elif name == "a.npy":
        np.save(path, arrays["fc.bias"])
    else:
        path.write_bytes(pickle.dumps({"lr": 0.1} if name == "config.pkl" else arrays, 2))
    for weights_only in (True, False):
        with pytest.raises((RuntimeError, pickle.UnpicklingError, EOFError)):
            torch.load(path, weights_only=weights_only)
    cause = diagnose(path)["not-torch"]
    if name in ("config.pkl", "a.npy"):  # which names no tensor
        assert cause["command"] is None
        return
    out = paste(cause)
    state = load(out) if out.suffix == ".pth" else load_file(out)
    assert {key: value.tolist() for key, value in state.items()} == {
        key: value.tolist() for key, value in arrays.items()
    }
    assert diagnose(out, code=0) == {}


def test_states_of_generators_are_no_weights(
    diagnose: Diagnose, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    import random

    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    torch.save(state, tmp_path / "rng_state.pth")  # as transformers does
    torch.save({"rng": np.random.RandomState(1), "epoch": 3, "model": 1}, tmp_path / "run.pth")
    for name in ("rng_state.pth", "run.pth"):
        found = diagnose(tmp_path / name)
        assert found.keys() == {"weights-only"} and found["weights-only"]["command"] is None
        facts = json.loads(ckptkit("inspect", "--json", tmp_path / name).stdout)["files"][0]
        assert facts["weights"] is None


def test_slices_of_graphs_are_no_weights(diagnose: Diagnose, tmp_path: Path) -> None:
    """(data, slices), as PyTorch Geometric saves processed data sets."""
    data = {"x": torch.ones(5, 2), "edge_index": torch.zeros(2, 3, dtype=torch.int64)}
    slices = {"x": torch.tensor([0, 2, 5]), "edge_index": torch.tensor([0, 1, 3])}
    torch.save((data, slices, None), tmp_path / "data.pt")
    assert diagnose(tmp_path / "data.pt", code=0) == {}
    torch.save({"model": slices}, tmp_path / "run.pth")  # a name that says what it is
    assert "wrapper" in diagnose(tmp_path / "run.pth")


def test_checkpoints_in_byte_strings(diagnose: Diagnose, ckptkit: Ckptkit, tmp_path: Path) -> None:
    """skorch pickles its nets in this way."""
    inner = io.BytesIO()
    torch.save(net().state_dict(), inner)
    value = {"history": [1, 2], "raw": inner.getvalue(), "odd": b"\x80\x04.", "long": bytes(10_000)}
    (tmp_path / "net.pkl").write_bytes(pickle.dumps(value))
    title = diagnose(tmp_path / "net.pkl")["inner"]["title"]
    assert "raw (zip archive" in title and "odd" not in title and "long" not in title
    assert "raw (zip archive" in ckptkit("inspect", tmp_path / "net.pkl").stdout


@pytest.mark.parametrize(
    "id, data",
    [
        (
            "lfs-pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 440449768\n",
        ),
        ("html", b"<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>"),
        ("foreign", b"lmgg" + bytes(100)),
        ("foreign", b""),
    ],
)
def test_no_checkpoint(
    diagnose: Diagnose, ckptkit: Ckptkit, tmp_path: Path, id: str, data: bytes
) -> None:
    (tmp_path / "run.pth").write_bytes(data)
    with pytest.raises((pickle.UnpicklingError, EOFError, RuntimeError)):
        torch.load(tmp_path / "run.pth", weights_only=False)
    found = diagnose(tmp_path / "run.pth", code=3)
    assert found.keys() == {id}
    assert ckptkit("doctor", tmp_path / "run.pth").stdout.startswith(
        f"{tmp_path / 'run.pth'}: cannot be read\n\n1. "
    )
    if id == "lfs-pointer":
        assert found[id]["command"] == "git lfs pull"
        assert "440,449,768 bytes" in found[id]["title"]


def test_a_name_that_this_torch_does_not_have(
    diagnose: Diagnose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.float8_e4m3fn)}, tmp_path / "run.pth")
    monkeypatch.delattr(torch._utils, "_rebuild_tensor_v3")  # as in a torch from before it
    assert "torch._utils._rebuild_tensor_v3" in diagnose(tmp_path / "run.pth")["newer"]["title"]


def shards(folder: Path, suffix: str = ".safetensors") -> None:
    folder.mkdir()
    state = list(net().state_dict().items())
    for number, part in enumerate((state[:5], state[5:]), 1):
        save_file(dict(part), folder / f"model-0000{number}-of-00002{suffix}")


def test_a_shard_is_missing(diagnose: Diagnose, tmp_path: Path) -> None:
    shards(tmp_path / "net")
    (tmp_path / "net" / "model-00002-of-00002.safetensors").unlink()
    assert "1 of 2 shards are missing" in diagnose(tmp_path / "net", code=3)["unfinished"]["title"]


def dcp(folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": net().state_dict(), "step": 3}, checkpoint_id=folder, no_dist=True)


@pytest.mark.filterwarnings("ignore")
def test_half_written_dcp(diagnose: Diagnose, paste: Paste, tmp_path: Path) -> None:
    """The save before it is whole, and it is what the command takes."""
    for step in ("step_10", "step_9", "step_100"):
        dcp(tmp_path / step)
    (tmp_path / "step_100" / ".metadata").unlink()
    cause = diagnose(tmp_path / "step_100", code=3)["unfinished"]
    assert f"{tmp_path / 'step_10'} is complete" in cause["explanation"]
    net().load_state_dict(load(paste(cause))["model"])
    for step in ("step_10", "step_9"):  # another run's, then
        (tmp_path / step).rename(tmp_path / f"other_{step}")
    cause = diagnose(tmp_path / "step_100", code=3)["unfinished"]
    assert cause["command"] is None and "is complete" not in cause["explanation"]


def test_half_written_zero(diagnose: Diagnose, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fixtures/deepspeed/zero2-fp32-3ranks", tmp_path / "run")
    (tmp_path / "run/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    found = diagnose(tmp_path / "run", code=3)
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing" in found["unfinished"]["title"]


# All at once


def test_fix_does_all_in_one_plan(
    ckptkit: Ckptkit, tmp_path: Path, simulated_cuda: Callable[..., AbstractContextManager[None]]
) -> None:
    (tmp_path / "nets.py").write_text(NET)
    state = {
        f"module.{name.replace('blocks', 'layers')}": tensor
        for name, tensor in net().state_dict().items()
    }
    with simulated_cuda(7):
        torch.save({"model": state, "args": Namespace(lr=1)}, tmp_path / "run.pth")
    command = (
        "doctor",
        tmp_path / "run.pth",
        "--model",
        f"{tmp_path / 'nets.py'}:Net",
        "--fix",
        tmp_path / "new.pth",
    )
    result = ckptkit(*command)
    assert result.exit_code == 0, result.stdout
    assert "no problems left" in result.stdout
    net().load_state_dict(load(tmp_path / "new.pth"))
    assert ckptkit(*command).exit_code == 2  # it is there
    assert ckptkit(*command, "--force").exit_code == 0


def test_fix_says_what_remains(ckptkit: Ckptkit, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NET)
    state = {"module." + name: tensor for name, tensor in net(classes=9).state_dict().items()}
    torch.save(state, tmp_path / "run.pth")
    options = ("--model", f"{tmp_path / 'nets.py'}:Net", "--fix", tmp_path / "new.pth")
    result = ckptkit("doctor", tmp_path / "run.pth", *options)
    assert result.exit_code == 1
    said, _, rest = result.stdout.partition("remaining problems in")
    assert "stripped 'module.' from 10 keys" in said
    assert "head.weight is [9, 4] in the file and [3, 4] in the model" in rest
    found = json.loads(
        ckptkit("doctor", "--json", tmp_path / "run.pth", *options, "--force").stdout
    )
    assert [cause["code"] for cause in found["causes"]] == ["prefix", "mismatched"]
    assert [cause["code"] for cause in found["fixed"]["remaining"]] == ["mismatched"]


def test_fix_of_what_cannot_be_mended_writes_nothing(ckptkit: Ckptkit, tmp_path: Path) -> None:
    (tmp_path / "run.pth").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    result = ckptkit("doctor", tmp_path / "run.pth", "--fix", tmp_path / "new.pth")
    assert result.exit_code == 3
    assert not (tmp_path / "new.pth").exists()


def test_fix_of_a_damaged_file(ckptkit: Ckptkit, tmp_path: Path) -> None:
    whole = io.BytesIO()
    torch.save({"module.first": torch.arange(1e5), "module.last": torch.ones(100_000)}, whole)
    (tmp_path / "run.pth").write_bytes(whole.getvalue()[:-300_000])
    result = ckptkit("doctor", tmp_path / "run.pth", "--fix", tmp_path / "new.pth")
    assert result.exit_code == 1, result.stdout
    assert "new.pth loads, but 1 entry could not be recovered" in result.stdout
    assert "ckptkit strip-module" not in result.stdout  # which would meet the same damage
    assert "lost: module.last" in result.stderr
    assert load(tmp_path / "new.pth").keys() == {"first"}


def test_paths_that_look_like_options(
    ckptkit: Ckptkit,
    diagnose: Diagnose,
    paste: Paste,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NET)
    state = {
        name.replace("blocks", "layers"): tensor for name, tensor in net().state_dict().items()
    }
    torch.save(state, tmp_path / "-run.pth")
    found = diagnose("--model", "nets.py:Net", "--", "-run.pth")
    net().load_state_dict(load(paste(found["renamed"])))


def test_several_files(ckptkit: Ckptkit, tmp_path: Path) -> None:
    good, ddp = tmp_path / "good.pth", tmp_path / "ddp.pth"
    torch.save({"w": torch.ones(2)}, good)
    torch.save({"module.w": torch.ones(2), "module.b": torch.ones(2)}, ddp)
    both = ckptkit("doctor", good, ddp)
    alone = [ckptkit("doctor", each) for each in (good, ddp)]
    assert both.stdout == "\n".join(each.stdout for each in alone)
    assert [each.exit_code for each in (both, *alone)] == [1, 0, 1]
    found = [
        json.loads(line) for line in ckptkit("doctor", "--json", good, ddp).stdout.splitlines()
    ]
    assert [each["file"] for each in found] == [str(good), str(ddp)]
    missing = ckptkit("doctor", tmp_path / "no.pth", good)
    assert missing.exit_code == 3 and missing.stdout == alone[0].stdout
    assert "no.pth: does not exist" in missing.stderr
    fix = ckptkit("doctor", good, ddp, "--fix", tmp_path / "x.pth")
    assert fix.exit_code == 2 and "--fix takes one FILE" in fix.stderr


def test_two_records_of_one_name(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, path := tmp_path / "twice.pth")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("twice/data/0", bytes(12))
    said = " ".join(ckptkit("doctor", path).stdout.split())
    assert "Two programs may read different values" in said and "save the file again" in said
