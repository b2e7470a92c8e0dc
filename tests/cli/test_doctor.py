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
import random
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
from torch.nn.utils import parametrizations, weight_norm

from tests.cli.conftest import Ckptkit
from tests.conftest import ROOT

Diagnose = Callable[..., dict[str, dict[str, Any]]]
NETS = """
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

class Net(nn.Module):
    def __init__(self, classes=3, tied=False):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 8)}) for _ in range(2))
        self.head = nn.Linear(4, 6 if tied else classes, bias=False)
        if tied:
            self.head.weight = self.embed.weight

class Most(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, classes)

def linear():
    return nn.Linear(2, 2)

def norm():
    return nn.ModuleDict({"n": nn.BatchNorm1d(2)})

def old():
    return nn.Sequential(weight_norm(nn.Linear(3, 2)))

def new():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)))
"""
MODEL = ("--model", "nets.py:Net")


@pytest.fixture(autouse=True)
def nets(here: None) -> None:
    Path("nets.py").write_text(NETS)


def net(name: str = "Net", **options: object) -> nn.Module:
    namespace: dict[str, Any] = {}
    exec(NETS, namespace)
    made = namespace[name](**options)
    assert isinstance(made, nn.Module)
    return made


def state(prefix: str = "", old: str = " ", new: str = "", **options: object) -> dict[str, Any]:
    """Return the weights of a Net, with other names."""
    found = net(**options).state_dict().items()
    return {prefix + name.replace(old, new): tensor for name, tensor in found}


@pytest.fixture
def diagnose(ckptkit: Ckptkit) -> Diagnose:
    """``diagnose(path, ...)``: the causes by their ids; the exit code must tell that there are
    some."""

    def invoke(*args: object, code: int = 1) -> dict[str, dict[str, Any]]:
        result = ckptkit("doctor --json", *args)
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
        ckptkit("", *words, code=0)
        return Path(words[words.index("--fix") + 1] if words[0] == "doctor" else words[-1])

    return invoke


Paste = Callable[[dict[str, Any]], Path]


def load(path: Path | str) -> Any:
    return torch.load(path, weights_only=True)


def test_nothing_is_found(diagnose: Diagnose, ckptkit: Ckptkit) -> None:
    torch.save(state(), "net.pth")
    assert diagnose("net.pth", code=0) == diagnose("net.pth", *MODEL, code=0) == {}
    assert "found nothing" in ckptkit("doctor net.pth").stdout


def test_changed_bytes_are_loaded_in_silence(diagnose: Diagnose, paste: Paste) -> None:
    torch.save({"a": torch.arange(100.0), "b": torch.ones(3)}, "run.pth")
    data = Path("run.pth").read_bytes()
    at = data.index(torch.arange(100.0).numpy().tobytes()) + 40
    Path("run.pth").write_bytes(data[:at] + b"abcd" + data[at + 4 :])
    assert load("run.pth")["a"][10] != 10  # and no error
    cause = diagnose("run.pth")["damaged"]
    assert cause["title"].endswith("(a).") and "without an error" in cause["explanation"]
    assert load(paste(cause)).keys() == {"b"}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols_of_pickles(diagnose: Diagnose, paste: Paste, protocol: int, new: bool) -> None:
    how: Any = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": new}
    torch.save(state(), "run.pth", **how)
    if protocol < 4:
        assert diagnose("run.pth", code=0) == {} and load("run.pth")
        return
    with pytest.raises(pickle.UnpicklingError, match="Unsupported operand 149"):
        load("run.pth")
    cause = diagnose("run.pth")["pickle"]
    assert "opcode FRAME" in cause["title"] and "Unsupported operand" in cause["explanation"]
    net().load_state_dict(load(paste(cause)))


def test_a_part_whose_folder_is_incomplete_has_no_command(diagnose: Diagnose) -> None:
    source = ROOT / "fixtures/deepspeed/zero2-fp32-3ranks/global_step2"
    (part,) = source.glob("*rank_1*optim_states.pt")
    (other,) = source.glob("*rank_2*optim_states.pt")
    for copied, said in ((part, "into one folder"), (other, "cannot be read")):
        shutil.copy(copied, ".")
        cause = diagnose(part.name)["part"]
        assert cause["command"] is None and said in cause["explanation"]


# Names


def test_prefix_of_most_keys(diagnose: Diagnose) -> None:
    torch.save({**state("module.", "mlp", "x"), "a": torch.ones(1)}, "run.pth")
    assert diagnose("run.pth")["prefix"]["title"].startswith("10 of 11 keys")


def test_prefix_of_lightning(diagnose: Diagnose) -> None:
    run = {"state_dict": state("model."), "pytorch-lightning_version": "2.5.0", "epoch": 1}
    torch.save(run, "run.ckpt")
    healthy = diagnose("run.ckpt")["attribute"]  # for Lightning it is
    assert "model." in healthy["command"]
    assert (healthy["level"], healthy["fixable"]) == ("note", True)
    torch.save(state("model."), "run.pth")
    found = diagnose("run.pth")["attribute"]  # many networks have a part called model
    assert (found["level"], found["fixable"]) == ("note", False)
    save_file(state("model."), "run.safetensors")
    assert diagnose("run.safetensors", code=0) == {}


def test_network_of_lightning_among_other_parts(
    diagnose: Diagnose, paste: Paste, ckptkit: Ckptkit
) -> None:
    """A file with causes that --fix leaves is not reported to load."""
    weights = {**state("model."), "criterion.weight": torch.ones(3)}
    torch.save({"state_dict": weights, "pytorch-lightning_version": "2.5.0"}, "run.ckpt")
    net().load_state_dict(load(paste(diagnose("run.ckpt")["attribute"]))["state_dict"])
    words = "doctor run.ckpt --fix fixed.pth --force"
    done = ckptkit(f"{words} --fail-on note", code=1)
    verdict = done.stdout.partition("\n\nnote: names and shapes")[0].splitlines()[-1]
    assert "loads" not in verdict and "not fixed" in done.stdout
    ckptkit(words, code=0)  # what is left is a note


def test_a_healthy_training_checkpoint_is_no_failure(ckptkit: Ckptkit) -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    saved = {"model": state(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(saved, "run.pth")
    done = ckptkit("doctor run.pth", code=0)
    assert done.stdout.splitlines()[0].endswith("torch-zip: 1 note")
    assert "1. note: The weights are in its entry 'model'" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("note: names and shapes were not checked")
    torch.save(net("linear").state_dict(), "run.pth")
    done = ckptkit("doctor run.pth --model nets.py:linear", code=0)
    assert "not checked" not in done.stdout


def test_the_level_that_fails(ckptkit: Ckptkit) -> None:
    torch.save({"model": state(), "epoch": 3}, "run.pth")
    torch.save(state("module."), "wrapped.pth")
    for level, code in (("error", 0), ("warning", 0), ("note", 1), ("never", 0), (None, 0)):
        chosen = () if level is None else ("--fail-on", level)
        ckptkit("doctor run.pth", *chosen, code=code)
        ckptkit("doctor wrapped.pth", *chosen, code=int(level != "never"))


def test_the_file_itself_is_no_place_for_what_is_mended(ckptkit: Ckptkit) -> None:
    torch.save({"module.a": torch.ones(1)}, "it's.pth")
    os.link("it's.pth", "link.pth")
    for name in ("it's.pth", "link.pth"):
        done = ckptkit("doctor", "it's.pth", "--fix", name, "--force", code=2)
        assert "--in-place" not in done.stderr
        option, path = shlex.split(done.stderr.partition("hint: use ")[2])
        assert (option, path) == ("--fix", "it's-fixed.pth")
    ckptkit("doctor", "it's.pth", "--fix", path, code=0)


def test_a_save_that_failed(ckptkit: Ckptkit) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        torch.save({"a": torch.ones(2), "f": lambda: 0}, "failed.pth")
    done = ckptkit("doctor failed.pth", code=3)
    assert "half-way" in done.stdout and "page" not in done.stdout
    assert "half-way" in ckptkit("inspect failed.pth").stderr


def most(prefix: str = "", **options: int) -> nn.Module:
    """Return a net, and save its weights, of which most begin otherwise than they do in the net."""
    torch.manual_seed(1)
    saved = {
        prefix + name.replace("layers.", "encoder.blocks.").replace("embed.", "tok."): value
        for name, value in net("Most", **options).state_dict().items()
    }
    torch.save(saved, "run.pth")
    return net("Most")


MOST = ("--model", "nets.py:Most")


@pytest.mark.parametrize("prefix", ["", "module."])
def test_most_keys_have_another_beginning(
    diagnose: Diagnose, paste: Paste, ckptkit: Ckptkit, prefix: str
) -> None:
    """Keys that match already stay unchanged, with each of the commands."""
    model = most(prefix)
    found = diagnose("run.pth", *MOST)
    right = [name for name in model.state_dict() if name.startswith(("norm.", "head."))]
    for cause in found.values():
        assert {key.removeprefix(prefix) for key in load(paste(cause))} >= {*right}
    keys = {name.removeprefix("module.") for name in load("run.pth")}
    pairs = found["renamed"]["title"].partition(": ")[2].split(", ")
    named = [pair.split(" -> ")[0].removeprefix(prefix) for pair in pairs]
    assert {name for name in named if "." in name and " and " not in name} <= keys
    done = ckptkit("doctor run.pth --fix fixed.pth", *MOST, code=0)
    assert "without the prefix, not changed" not in done.stderr
    fixed, source = load("fixed.pth"), load("run.pth")
    model.load_state_dict(fixed)
    assert torch.equal(fixed["embed.weight"], source[prefix + "tok.weight"])
    assert torch.equal(fixed["layers.3.bias"], source[prefix + "encoder.blocks.3.bias"])


def test_a_new_beginning_alone_is_one_substitution(diagnose: Diagnose, paste: Paste) -> None:
    model = most()
    saved = {name.replace("tok.", "embed."): value for name, value in load("run.pth").items()}
    torch.save(saved, "run.pth")
    found = diagnose("run.pth", *MOST)
    assert found.keys() == {"renamed"} and " --sub " in found["renamed"]["command"]
    model.load_state_dict(load(paste(found["renamed"])))


def test_a_new_beginning_and_another_head(diagnose: Diagnose, ckptkit: Ckptkit) -> None:
    most(classes=5)
    assert diagnose("run.pth", *MOST).keys() == {"renamed", "mismatched"}
    ckptkit("doctor run.pth --fix fixed.pth", *MOST)
    assert diagnose("fixed.pth", *MOST).keys() == {"mismatched"}
    head = [name for name in load("fixed.pth") if "head" in name]
    assert head == ["head.weight", "head.bias"]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_of_either_kind(diagnose: Diagnose, paste: Paste) -> None:
    old, new = (
        nn.Sequential(each(nn.Linear(3, 2))) for each in (weight_norm, parametrizations.weight_norm)
    )
    torch.save(old.state_dict(), "old.pth")
    torch.save(new.state_dict(), "new.pth")
    new.load_state_dict(load("old.pth"))  # by a hook of torch
    assert diagnose("old.pth", "--model", "nets.py:new", code=0) == {}
    found = diagnose("new.pth", "--model", "nets.py:old")
    assert found.keys() == {"renamed"} and "100%" in found["renamed"]["explanation"]
    old.load_state_dict(load(paste(found["renamed"])))


def test_unexpected_and_missing(diagnose: Diagnose, paste: Paste) -> None:
    saved = state()
    del saved["head.weight"]
    torch.save({**saved, "loss.centres": torch.ones(2)}, "run.pth")
    found = diagnose("run.pth", *MODEL)
    assert found.keys() == {"unexpected", "missing"}
    assert "head.weight" in found["missing"]["title"] and found["missing"]["command"] is None
    assert load(paste(found["unexpected"])).keys() == saved.keys()


def test_tied(diagnose: Diagnose, paste: Paste) -> None:
    saved = state(tied=True)
    del saved["head.weight"]
    save_file(saved, "run.safetensors")
    found = diagnose("run.safetensors", *MODEL, "--arg", "tied=true")
    assert found.keys() == {"tied"}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"head.weight\""):
        net(tied=True).load_state_dict(load_file("run.safetensors"))
    out = paste({"command": found["tied"]["command"].replace("run-tied.safetensors", "run.pth")})
    net(tied=True).load_state_dict(fixed := load(out))
    assert fixed["head.weight"].data_ptr() == fixed["embed.weight"].data_ptr()


def test_counters_of_old_batch_norms_are_not_missing(diagnose: Diagnose) -> None:
    saved: Any = net("norm").state_dict()
    del saved["n.num_batches_tracked"]
    saved._metadata["n"]["version"] = 1
    torch.save(saved, "old.pth")
    assert diagnose("old.pth", "--model", "nets.py:norm", code=0) == {}
    saved._metadata["n"]["version"] = 2
    torch.save(saved, "new.pth")
    assert "missing" in diagnose("new.pth", "--model", "nets.py:norm")


# What is in it


def test_arrays_that_weights_only_refuses(diagnose: Diagnose, paste: Paste) -> None:
    """Leaving out values that are objects would leave out the weights."""
    torch.save({"w": torch.ones(2).numpy()}, "run.pth")
    found = diagnose("run.pth")
    assert torch.equal(load_file(paste(found["weights-only"]))["w"], torch.ones(2))
    torch.save(torch.ones(2).numpy(), "array.pth")
    assert diagnose("array.pth")["weights-only"]["command"] is None


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_what_loading_would_run_is_said(diagnose: Diagnose) -> None:
    torch.save({"model": state(), "x": Evil()}, "run.pth")
    said = diagnose("run.pth")["weights-only"]["explanation"]
    assert "system" in said and "do not load the file" in said


def test_optimizer_of_the_weights_themselves(diagnose: Diagnose) -> None:
    """Its groups hold the parameters: without it the file would be as large."""
    model = nn.Linear(512, 512)
    held = {"param_groups": [{"params": list(model.parameters()), "lr": 0.1}], "state": {}}
    torch.save({"optimizer": held, "model": model.state_dict()}, "run.pth")
    assert load("run.pth")["model"]["weight"].data_ptr()
    assert "optimizer" not in diagnose("run.pth")


class Arguments:
    """An object as transformers pickles it in training_args.bin."""

    lr = 0.1


@pytest.mark.parametrize("value", [Arguments(), [Arguments()], {"a": Arguments(), "b": None}])
def test_dropping_objects_that_are_all_there_is(
    diagnose: Diagnose, ckptkit: Ckptkit, value: object
) -> None:
    torch.save(value, "args.bin")
    found = diagnose("args.bin")["weights-only"]
    assert found["command"] is None and not found["fixable"]
    assert "--objects drop" not in ckptkit("inspect args.bin").stdout
    ckptkit("doctor args.bin --fix fixed.bin")
    assert "nothing remains" in ckptkit("convert args.bin x.pth --objects drop", code=2).stderr
    assert not Path("fixed.bin").exists() and not Path("x.pth").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_program(diagnose: Diagnose, paste: Paste, ckptkit: Ckptkit) -> None:
    made: Any = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear})
    torch.jit.save(torch.jit.script(made), "q.pt")
    stripped = load(paste(diagnose("q.pt")["program"]))
    assert torch.equal(stripped["0.weight"], made[0].weight().dequantize())
    ckptkit("doctor q.pt --fix fixed.pt", code=0)
    hints = [line for line in ckptkit("inspect q.pt").stdout.splitlines() if "convert" in line]
    assert hints and all("--dequantize" in line for line in hints)
    assert "--dequantize converts them" in ckptkit("convert q.pt new.pth", code=2).stderr
    assert load("fixed.pt").keys() == stripped.keys() == {"0.weight", "0.bias"}


# The container


@pytest.mark.parametrize("name", ["a.pkl", "a.pdparams", "a.npz", "a.npy", "config.pkl"])
def test_what_torch_load_refuses(diagnose: Diagnose, paste: Paste, name: str) -> None:
    arrays = {"fc.weight": np.ones((2, 3), "f4"), "fc.bias": np.zeros(3, "f4")}
    if name == "a.npz":
        np.savez(name, **arrays)
    elif name == "a.npy":
        np.save(name, arrays["fc.bias"])
    else:
        value: object = {"lr": 0.1} if name == "config.pkl" else arrays
        Path(name).write_bytes(pickle.dumps(value, 2))
    for weights_only in (True, False):
        with pytest.raises((RuntimeError, pickle.UnpicklingError, EOFError)):
            torch.load(name, weights_only=weights_only)
    cause = diagnose(name)["not-torch"]
    if name in ("config.pkl", "a.npy"):  # which names no tensor
        assert cause["command"] is None
        return
    out = paste(cause)
    found = load(out) if out.suffix == ".pth" else load_file(out)
    assert {key: value.tolist() for key, value in found.items()} == {
        key: value.tolist() for key, value in arrays.items()
    }
    assert diagnose(out, code=0) == {}


def test_states_of_generators_are_no_weights(diagnose: Diagnose, ckptkit: Ckptkit) -> None:
    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch.save({**states, "cpu": torch.get_rng_state()}, "rng_state.pth")  # as transformers does
    torch.save({"rng": np.random.RandomState(1), "epoch": 3, "model": 1}, "run.pth")
    for name in ("rng_state.pth", "run.pth"):
        found = diagnose(name)
        assert found.keys() == {"weights-only"} and found["weights-only"]["command"] is None
        facts = json.loads(ckptkit("inspect --json", name).stdout)["files"][0]
        assert facts["weights"] is None


def test_slices_of_graphs_are_no_weights(diagnose: Diagnose) -> None:
    """(data, slices), as PyTorch Geometric saves processed data sets."""
    data = {"x": torch.ones(5, 2), "edge_index": torch.zeros(2, 3, dtype=torch.int64)}
    slices = {"x": torch.tensor([0, 2, 5]), "edge_index": torch.tensor([0, 1, 3])}
    torch.save((data, slices, None), "data.pt")
    assert diagnose("data.pt", code=0) == {}
    torch.save({"model": slices}, "run.pth")  # a name that says what it is
    assert "wrapper" in diagnose("run.pth")


def test_checkpoints_in_byte_strings(diagnose: Diagnose, ckptkit: Ckptkit) -> None:
    """skorch pickles its nets in this way."""
    inner = io.BytesIO()
    torch.save(state(), inner)
    value = {"history": [1, 2], "raw": inner.getvalue(), "odd": b"\x80\x04.", "long": bytes(10_000)}
    Path("net.pkl").write_bytes(pickle.dumps(value))
    title = diagnose("net.pkl")["inner"]["title"]
    assert "raw (zip archive" in title and "odd" not in title and "long" not in title
    assert "raw (zip archive" in ckptkit("inspect net.pkl").stdout


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 440449768\n"


@pytest.mark.parametrize(
    "id, data",
    [
        ("lfs-pointer", POINTER),
        ("html", b"<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>"),
        ("foreign", b"lmgg" + bytes(100)),
        ("foreign", b""),
    ],
)
def test_no_checkpoint(diagnose: Diagnose, ckptkit: Ckptkit, id: str, data: bytes) -> None:
    Path("run.pth").write_bytes(data)
    with pytest.raises((pickle.UnpicklingError, EOFError, RuntimeError)):
        torch.load("run.pth", weights_only=False)
    found = diagnose("run.pth", code=3)
    assert found.keys() == {id}
    assert ckptkit("doctor run.pth").stdout.startswith("run.pth: cannot be read\n\n1. ")
    if id == "lfs-pointer":
        assert found[id]["command"] == "git lfs pull"
        assert "440,449,768 bytes" in found[id]["title"]
    ckptkit("doctor run.pth --fix new.pth", code=3)
    assert not Path("new.pth").exists()


def test_a_name_that_this_torch_does_not_have(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.float8_e4m3fn)}, "run.pth")
    monkeypatch.delattr(torch._utils, "_rebuild_tensor_v3")  # as in a torch from before it
    assert "torch._utils._rebuild_tensor_v3" in diagnose("run.pth")["newer"]["title"]


def test_a_shard_is_missing(diagnose: Diagnose) -> None:
    Path("net").mkdir()
    save_file({"w": torch.ones(1)}, "net/model-00001-of-00002.safetensors")
    assert "1 of 2 shards are missing" in diagnose("net", code=3)["unfinished"]["title"]


@pytest.mark.filterwarnings("ignore")
def test_half_written_dcp(diagnose: Diagnose, paste: Paste) -> None:
    """The save before it is whole, and it is what the command takes."""
    from torch.distributed.checkpoint.state_dict_saver import save

    for step in ("step_10", "step_9", "step_100"):
        save({"model": state(), "step": 3}, checkpoint_id=step, no_dist=True)
    Path("step_100/.metadata").unlink()
    cause = diagnose("step_100", code=3)["unfinished"]
    assert "step_10 is complete" in cause["explanation"]
    net().load_state_dict(load(paste(cause))["model"])
    for step in ("step_10", "step_9"):  # another run's, then
        Path(step).rename(f"other_{step}")
    cause = diagnose("step_100", code=3)["unfinished"]
    assert cause["command"] is None and "is complete" not in cause["explanation"]


def test_half_written_zero(diagnose: Diagnose) -> None:
    shutil.copytree(ROOT / "fixtures/deepspeed/zero2-fp32-3ranks", "run")
    Path("run/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    found = diagnose("run", code=3)
    assert "missing: zero_pp_rank_1_mp_rank_00_optim_states.pt" in found["unfinished"]["title"]


# All at once


def test_fix_does_all_in_one_plan(
    ckptkit: Ckptkit, simulated_cuda: Callable[..., AbstractContextManager[None]]
) -> None:
    saved = {"model": state("module.", "blocks", "layers"), "args": Namespace(lr=1)}
    with simulated_cuda(7):
        torch.save(saved, "run.pth")
    words = "doctor run.pth --model nets.py:Net --fix new.pth"
    assert "no problems left" in ckptkit(words, code=0).stdout
    net().load_state_dict(load("new.pth"))
    ckptkit(words, code=2)  # it is there
    ckptkit(f"{words} --force", code=0)


def test_fix_says_what_remains(ckptkit: Ckptkit) -> None:
    torch.save(state("module.", classes=9), "run.pth")
    words = "doctor run.pth --model nets.py:Net --fix new.pth"
    said, _, rest = ckptkit(words, code=1).stdout.partition("remaining problems in")
    assert "stripped 'module.' from 10 keys" in said
    assert "head.weight is [9, 4] in the file and [3, 4] in the model" in rest
    found = json.loads(ckptkit(f"{words} --json --force").stdout)
    assert [cause["code"] for cause in found["causes"]] == ["prefix", "mismatched"]
    assert [cause["code"] for cause in found["fixed"]["remaining"]] == ["mismatched"]


def test_fix_of_a_damaged_file(ckptkit: Ckptkit) -> None:
    whole = io.BytesIO()
    torch.save({"module.first": torch.arange(1e5), "module.last": torch.ones(100_000)}, whole)
    Path("run.pth").write_bytes(whole.getvalue()[:-300_000])
    result = ckptkit("doctor run.pth --fix new.pth", code=1)
    assert "new.pth loads, but 1 entry could not be recovered" in result.stdout
    assert "ckptkit strip-module" not in result.stdout  # which would meet the same damage
    assert "lost: module.last" in result.stderr
    assert load("new.pth").keys() == {"first"}


def test_paths_that_look_like_options(diagnose: Diagnose, paste: Paste) -> None:
    torch.save(state("", "blocks", "layers"), "-run.pth")
    found = diagnose(*MODEL, "--", "-run.pth")
    net().load_state_dict(load(paste(found["renamed"])))


def test_several_files(ckptkit: Ckptkit) -> None:
    torch.save({"w": torch.ones(2)}, "good.pth")
    torch.save({"module.w": torch.ones(2), "module.b": torch.ones(2)}, "ddp.pth")
    both = ckptkit("doctor good.pth ddp.pth", code=1)
    alone = [ckptkit("doctor good.pth", code=0), ckptkit("doctor ddp.pth", code=1)]
    assert both.stdout == "\n".join(each.stdout for each in alone)
    lines = ckptkit("doctor --json good.pth ddp.pth").stdout.splitlines()
    assert [json.loads(line)["file"] for line in lines] == ["good.pth", "ddp.pth"]
    missing = ckptkit("doctor no.pth good.pth", code=3)
    assert missing.stdout == alone[0].stdout and "no.pth: does not exist" in missing.stderr
    fix = ckptkit("doctor good.pth ddp.pth --fix x.pth", code=2)
    assert "--fix takes one FILE" in fix.stderr


def test_two_records_of_one_name(ckptkit: Ckptkit) -> None:
    torch.save({"w": torch.ones(3)}, "twice.pth")
    with zipfile.ZipFile("twice.pth", "a") as archive, pytest.warns(match="Duplicate name"):
        archive.writestr("twice/data/0", bytes(12))
    said = " ".join(ckptkit("doctor twice.pth").stdout.split())
    assert "Two programs may read different values" in said and "save the file again" in said
