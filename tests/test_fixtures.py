"""The manifest against the fixtures: nothing more, nothing less, and what it says of them holds,
through torch and through ckptkit."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckptkit
from ckptkit.cli import main
from ckptkit.core.dtypes import TABLE
from ckptkit.core.errors import AmbiguousError, UnsupportedError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import merge_all
from ckptkit.core.tree import join, nodes
from ckptkit.core.weights import as_tensor
from ckptkit.trainer.simulated import description
from fixtures.make import FIXTURES, KEPT, NET, SHARDED, kept, versions
from fixtures.making import reading, training
from tests import forked
from tests.conftest import ROOT, Run
from tests.formats.conformance import sharing
from tests.matrix import ALL, ENTRIES, FOLDER, MANIFEST, NAMES, OBJECTS, Fixture, of_net

README = (FOLDER / "README.md").read_text(encoding="utf-8")
MATRIX = list(
    product(("none", "dp", "ddp"), ("bare", "wrapped", "full"), ("cpu", "cuda0", "cuda1", "cuda3"))
)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_file_is_in_the_manifest() -> None:
    listed = {name for entry in ENTRIES.values() for name in entry["sha256"]}
    own = ("making", "__pycache__")
    folders = [place for place in FOLDER.iterdir() if place.is_dir() and place.name not in own]
    there = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert {path.relative_to(FOLDER).as_posix() for path in there} == listed
    assert sum(path.stat().st_size for path in there) < 4 << 20


def readme() -> list[tuple[list[str], str]]:
    """Return the rows of the README: patterns of files, and the command that answers them."""
    rows = re.findall(r"^\| (`.*`) \| .* \| `(ckptkit .*)` \|$", README, re.MULTILINE)
    return [(re.findall("`([^`]+)`", patterns), command) for patterns, command in rows]


def test_every_fixture_is_in_the_readme() -> None:
    rows = readme()
    for name in ENTRIES:
        assert any(fnmatch(name, each) for patterns, _ in rows for each in patterns), name
    for patterns, command in rows:
        for each in patterns:
            assert any(fnmatch(name, each) for name in ENTRIES), each
        assert any(
            fnmatch(word.removeprefix("fixtures/"), each)
            for word in shlex.split(command)
            for each in patterns
        ), command


@pytest.mark.parametrize("command", [command for _, command in readme()])
def test_the_commands_of_the_readme_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    model = re.findall("`(ckptkit.trainer.models.cnn:Cnn .*)`", README)[0]
    words = shlex.split(command.replace("NET", model).replace("OUT", str(tmp_path / "out")))
    done = CliRunner().invoke(main, words[1:])
    found = words[1] in ("doctor", "diff")  # 1: there is something to say
    assert done.exit_code in ((1,) if found else (0,)), done.output


def test_bytes_are_those_of_the_manifest() -> None:
    recorded = merge_all(entry["sha256"] for entry in ENTRIES.values())
    found = {file: hashlib.sha256((FOLDER / file).read_bytes()).hexdigest() for file in recorded}
    assert found == recorded


@pytest.mark.parametrize(("kind", "form", "tag"), MATRIX)
def test_the_trainer_left_every_form_under_every_tag(kind: str, form: str, tag: str) -> None:
    entry = ENTRIES[f"torch-zip/{kind}_{form}_{tag}.pth"]
    facts = entry["facts"]
    device = tag.replace("cuda", "cuda:")
    assert facts["prefix"] == ("" if kind == "none" else "module.")
    assert facts["weights"] == ("" if form == "bare" else "model")
    assert facts["devices"] == sorted(
        {device, "cpu"} if form == "full" else {device}
    )  # random states are on the CPU
    assert facts.get("epoch") == (None if form == "bare" else 20)
    assert facts["accuracy"] > 0.9
    assert f"--parallel {kind}" in entry["made_by"]
    assert f"--save-form {form}" in entry["made_by"]


@pytest.mark.parametrize("form", ["bare", "wrapped", "full"])
def test_the_trainer_left_a_folder_of_every_form(form: str) -> None:
    facts = ENTRIES[f"dcp/fsdp_{form}"]["facts"]
    assert (facts["tensors"], facts["prefix"], facts["devices"]) == (10, "", ["cpu"])
    assert facts["accuracy"] > 0.9


def test_tags_of_gpus_are_called_simulated() -> None:
    for name, entry in ENTRIES.items():
        gpus = [device for device in entry["facts"]["devices"] if device != "cpu"]
        assert entry["device"].startswith(gpus[0] if gpus else "cpu"), name
        tagged = bool(gpus) and not name.startswith("cuda/")
        assert tagged == ("simulated" in entry["device"]), name
        assert len(gpus) < 2 or name == "torch-zip/two_gpus.pth", name


@pytest.mark.parametrize("name", ALL)
def test_torch_finds_what_the_manifest_says(name: str) -> None:
    fixture = Fixture(name)
    facts, loaded = fixture.facts, fixture.load()
    assert reading.devices_of(fixture.path) == facts["devices"]
    assert ("epoch" in facts) == (isinstance(loaded, dict) and "epoch" in loaded)
    if "epoch" in facts:
        assert loaded["epoch"] == facts["epoch"]
    if "weights_only" in facts:
        assert reading.loads_weights_only(fixture.path) == facts["weights_only"]
    if facts["weights"] is not None:
        state = reading.state_of(loaded, facts["weights"])
        assert (
            sum(torch.is_tensor(value) or getattr(value, "ndim", 0) > 0 for value in state.values())
            == facts["tensors"]
        )
        assert reading.prefix_of(state) == facts["prefix"]
        tensors = {key: value for key, value in state.items() if torch.is_tensor(value)}
        assert reading.ties_of(tensors) == facts.get("ties", [])


@pytest.mark.parametrize("name", NAMES)
def test_ckptkit_finds_what_the_manifest_says(name: str) -> None:
    fixture = Fixture(name).needs_reader()
    facts, checkpoint = fixture.facts, ckptkit.open(fixture.path)
    assert checkpoint.format == facts["format"]
    tensors = [tensor for node in nodes(checkpoint.root) if (tensor := as_tensor(node)) is not None]
    assert {
        each.storage.device
        for each in tensors
        if each.storage is not None and each.kind != "ndarray"
    } == set(facts["devices"])
    root: Any = checkpoint.root
    if "epoch" in facts:
        assert root["epoch"] == facts["epoch"]
    if facts["weights"] is None:
        with pytest.raises(AmbiguousError):
            _ = checkpoint.weights
        return
    assert checkpoint.selection is not None
    assert join(checkpoint.selection.path) == facts["weights"]
    assert len(checkpoint.weights) == facts["tensors"]
    assert all(key.startswith(facts["prefix"]) for key in checkpoint.weights)
    assert ties(checkpoint.weights) == facts.get("ties", [])


def ties(weights: Any) -> list[list[str]]:
    held: dict[str, Tensor] = {name: tensor for name, tensor in weights.items() if tensor.numel}
    return [
        names
        for names in sharing({name: id(each.storage) for name, each in held.items()})
        if len(names) > 1
    ]


@pytest.mark.parametrize("name", OBJECTS)
def test_the_weights_beside_python_objects_are_those_of_torch(name: str) -> None:
    fixture = Fixture(name)
    assert not fixture.facts["weights_only"]
    assert not reading.loads_weights_only(fixture.path)
    expected = reading.state_of(fixture.load(), fixture.facts["weights"])
    found = ckptkit.load(fixture.path, map_location="cpu")
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_what_the_doctor_says_of_fsdp1_gives_the_names_of_the_net(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "torch-zip/fsdp1.pth", tmp_path / "fsdp1.pth")
    said = CliRunner().invoke(main, ["doctor", str(tmp_path / "fsdp1.pth")]).output
    (command,) = re.findall(r"^ +ckptkit (.*)$", said, re.MULTILINE)
    done = CliRunner().invoke(main, shlex.split(command))
    assert done.exit_code == 0, done.output
    net = ckptkit.load(FOLDER / NET)
    assert list(ckptkit.load(tmp_path / "fsdp1-renamed.pth")) == list(net)


@pytest.mark.parametrize("option", ["optimizer", "scaler", "ema"])
def test_what_is_kept_beside_the_weights(option: str) -> None:
    """Adam has two averages for each parameter, the scaler a scale, EMA the keys of DDP."""
    names = {"optimizer": "adam_ddp", "scaler": "grad_scaler", "ema": "ema_ddp"}
    tree = ckptkit.load(FOLDER / f"torch-zip/{names[option]}.pth", whole=True)
    held = tree[option]
    if option == "optimizer":
        assert set(held["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
        assert len(held["state"]) == len(tree["model"])
    elif option == "scaler":
        assert (held["scale"], held["_growth_tracker"]) == (1024.0, 0)
    else:
        assert set(held) == {"n_averaged", *(f"module.{name}" for name in tree["model"])}


def test_files_of_gpus_keep_on_the_cpu_what_torch_keeps_there() -> None:
    """Adam's step and the states of all generators, those of GPUs included."""
    found = description(FOLDER / "torch-zip/adam_cuda1.pth")
    moments = [each for name, each in found.items() if re.search(r"\.exp_avg(_sq)?$", name)]
    steps = [each for name, each in found.items() if name.endswith(".step")]
    assert len(moments) == 2 * len(steps) == 20
    assert all(each.endswith("on cuda:1") for each in moments)
    assert all(each.endswith("on cpu") for each in steps)
    assert found["rng.cuda"] == "list of 2"
    assert found["rng.cuda.1"].startswith("uint8 [16]")
    assert found["rng.cuda.1"].endswith("on cpu")
    assert found["args.devices.0"] == "'cuda:1'"


def test_one_file_over_two_gpus() -> None:
    found = description(FOLDER / "torch-zip/two_gpus.pth")
    tags = {name: each[-6:] for name, each in found.items() if "weight" in name}
    assert tags["model.conv1.weight"] == tags["model.conv2.weight"] == "cuda:0"
    assert tags["model.fc1.weight"] == tags["model.fc3.weight"] == "cuda:1"


def test_a_training_in_float16_leaves_its_scale() -> None:
    path = FOLDER / "torch-zip/float16_cuda0.pth"
    tree = ckptkit.load(path, map_location="cpu", whole=True)
    assert tree["args"]["amp_dtype"] == "float16"
    assert tree["scaler"]["scale"] > 1
    assert {str(each.dtype) for each in tree["model"].values()} == {"torch.float32"}


def test_the_weights_of_an_lstm_of_cudnn_are_views_of_one_storage() -> None:
    weights = ckptkit.open(FOLDER / "torch-zip/flat_lstm_cuda0.pth").weights
    views = [each for name, each in weights.items() if name.startswith("recurrent.")]
    assert len({id(each.storage) for each in views}) == 1
    assert sorted(each.offset for each in views)[0] == 0
    assert len({each.offset for each in views}) == 8
    saved_on_a_gpu = ckptkit.open(FOLDER / "cuda/crnn_bare_cuda0.pth").weights
    real = {name: each for name, each in saved_on_a_gpu.items() if name.startswith("recurrent.")}
    assert len({id(each.storage) for each in real.values()}) == 1
    assert {name: (each.shape, each.stride, each.offset) for name, each in real.items()} == {
        name: (weights[name].shape, weights[name].stride, weights[name].offset) for name in real
    }


def test_the_shards_of_fsdp1_are_the_state_dict_that_it_gathers() -> None:
    fixture = Fixture(SHARDED)
    found, expected = ckptkit.load(fixture.path), fixture.load()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    shapes = ckptkit.load(FOLDER / NET)
    assert all(torch.equal(found[name], shapes[name]) for name in shapes)


def test_the_random_states_of_both_processes_are_saved() -> None:
    for name in ("torch-zip/ddp_full_cpu.pth", "dcp/fsdp_full"):
        states = ckptkit.load(FOLDER / name, whole=True)["rng_of_ranks"]
        assert len(states) == 2
        assert not torch.equal(states[0]["torch"], states[1]["torch"])


def test_what_is_not_read_is_refused_by_its_name() -> None:
    for fixture in map(Fixture, ALL):
        if not fixture.is_readable:
            with pytest.raises(UnsupportedError, match=fixture.facts["format"]):
                ckptkit.open(fixture.path)


def test_the_net_is_as_good_as_the_manifest_says(one_thread: None) -> None:
    """Its weights loaded by torch, on the test set of the trainer."""
    pytest.importorskip("sklearn")
    from ckptkit.trainer import loop
    from fixtures.making.training import evaluator

    run = evaluator()
    found = {}
    for name in of_net(ALL):
        run.model.load_state_dict(reading.without_prefix(Fixture(name).state()))
        found[name] = round(loop.test(run)[1], 4)
    assert found == {name: ENTRIES[name]["facts"]["accuracy"] for name in of_net(ALL)}
    assert len(found) > 40


def test_evaluate_gives_the_accuracy_of_the_manifest(run: Run) -> None:
    pytest.importorskip("sklearn")
    name = "torch-zip/dp_wrapped_cuda1.pth"
    width = MANIFEST["net"]["arguments"]["width"]
    done = run("train", "--evaluate", FOLDER / name, "--width", width, "--devices", "cpu")
    assert done == (0, f"accuracy {ENTRIES[name]['facts']['accuracy']:.4f}\n", "")


def test_what_is_not_made_again_is_kept() -> None:
    """DeepSpeed is not there to make it."""
    of_runs = [name for kind in training.KINDS for name in training.places(kind)]
    made = {*FIXTURES, SHARDED, *of_runs}
    assert kept() == {name: ENTRIES[name] for name in ENTRIES.keys() - made}
    assert len(kept()) == 8
    assert not any(name.startswith(KEPT) for name in made)  # whose folders are removed


def test_there_is_a_tensor_of_every_dtype() -> None:
    loaded = Fixture("torch-zip/dtypes.pth").load()
    assert all(str(tensor.dtype) == f"torch.{name}" for name, tensor in loaded.items())
    shells = {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}
    missing = {"bcomplex32", "float6_e2m3", "float6_e3m2", *shells}  # for torch.save or for torch
    assert {row.name for row in TABLE} - loaded.keys() == missing


MADE_OF_IT = [name for name in FIXTURES if not name.startswith("torchscript")]


@pytest.mark.parametrize(
    "names",
    [["dp"], MADE_OF_IT, [name for name in MADE_OF_IT if "safetensors" in name or "tied" in name]],
    ids=["a run of the trainer", "what is made of it", "some of that"],
)
def test_making_them_again_gives_the_same(names: list[str], tmp_path: Path) -> None:
    """The same facts and, as SHA-256 says, the same bytes."""
    pytest.importorskip("sklearn")
    if versions() != MANIFEST["versions"]:
        pytest.skip(f"made with {MANIFEST['versions']}, here are {versions()}")
    command = "import runpy; runpy.run_module('fixtures.make', run_name='__main__', alter_sys=True)"
    done = forked.program(command, tmp_path / "again", *names, cwd=ROOT, seconds=300)
    assert done.returncode == 0, done.output
    again = json.loads((tmp_path / "again/manifest.json").read_text())
    made = [
        name
        for name in ENTRIES
        if name in names or name.startswith(tuple(f"torch-zip/{each}_" for each in names))
    ]
    assert again == {**MANIFEST, "fixtures": {name: ENTRIES[name] for name in made}}
