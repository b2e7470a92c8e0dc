"""torch.export.save: the weights of its archives, of today's and of those before torch 2.8."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.core.errors import (
    CkptkitError,
    CorruptError,
    FormatError,
    TensorError,
    UnsupportedError,
)
from ckptkit.formats.table import PT2
from tests.formats.catalogue import change, read_as
from tests.formats.conformance import FormatConformance, State, check_equal, elements, elements_of
from tests.formats.containers.zips import Member, build
from tests.formats.test_conformance import zip_boundaries
from tests.formats.torchscript.scripts import rezipped
from tests.pickles.making import saved

WEIGHTS = "data/weights/model_weights_config.json"


class Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.plain = torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(x * self.scale + self.hidden + self.plain)
        return out


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    return torch.export.export(Program().eval(), (torch.zeros(1, 3),))


@pytest.fixture
def path(program: torch.export.ExportedProgram, tmp_path: Path) -> Path:
    torch.export.save(program, tmp_path / "made.pt2")
    return tmp_path / "made.pt2"


read = partial(read_as, PT2)


def detached(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def test_weights_and_constants(path: Path) -> None:
    checkpoint = read(path)
    loaded = torch.export.load(path)
    check_equal(checkpoint.weights, detached(loaded.state_dict))
    check_equal(checkpoint.root["constants"], detached(loaded.constants))
    assert set(loaded.constants) == {"hidden", "plain"} and not checkpoint.warnings
    kinds = {
        name: (tensor.kind, tensor.requires_grad) for name, tensor in checkpoint.weights.items()
    }
    assert kinds["fc.weight"] == ("parameter", True) and kinds["scale"] == ("tensor", False)


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The archive with another configuration of its weights."""

    def apply(name: str, data: bytes) -> bytes:
        if name != WEIGHTS:
            return data
        said = json.loads(data)
        edit(said["config"])
        return json.dumps(said).encode()

    return rezipped(path, apply)


def test_devices_and_what_is_pickled(path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["fc.bias"]["tensor_meta"]["device"] = {"type": "cuda", "index": 1}
        config["scale"]["use_pickle"] = True

    checkpoint = read(edited(path, edit))
    assert checkpoint.weights["fc.bias"].device == "cuda:1" and "scale" not in checkpoint.weights
    assert any("pickled: 'scale'" in each for each in checkpoint.warnings)


META = ("fc.weight", "tensor_meta")


@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        (change("fc.weight", to=[]), FormatError, "lacks the required field 'path_name'"),
        (change("fc.weight", "path_name", to="weight_9"), CorruptError,
         "record 'made/data/weights/weight_9', which contains a tensor, is missing"),
        (change("fc.weight", "path_name", to="../../byteorder"), CorruptError, "is missing"),
        (change(*META, to=None), FormatError, "lacks the required field 'tensor_meta'"),
        (change(*META, "sizes", to=[{"as_expr": "s0"}, {"as_int": 3}]), FormatError, "lacks the required field 'as_int'"),
        (change(*META, "sizes", to=[{"as_int": 400}, {"as_int": 3}]), TensorError, "storage has 48"),
        (change(*META, "storage_offset", to={"as_int": -1}), TensorError, "non-negative"),
        (change(*META, "device", to="cpu"), FormatError, "lacks the required field 'device'"),
    ],
)  # fmt: skip
def test_refused(
    path: Path, edit: Callable[[dict[str, Any]], None], error: type[CkptkitError], said: str
) -> None:
    with pytest.raises(error, match=said):
        read(edited(path, edit))


@pytest.mark.parametrize(
    ("key", "to", "said"), [("dtype", 99, "unknown dtype"), ("layout", 1, "not strided")]
)
def test_a_tensor_that_is_not_known_is_an_entry(path: Path, key: str, to: int, said: str) -> None:
    weights = read(edited(path, change(*META, key, to=to))).weights
    (odd,) = (tensor for tensor in weights.values() if tensor.layout != "strided")
    assert (odd.layout, odd.nbytes) == (said, 48) and len(weights) > 1


def test_other_archives_of_the_kind(path: Path) -> None:
    """Compiled models have no weights of their own; of other formats nothing is known."""
    for name, data in (("archive_format", b"pt3"), ("models/model.json", None)):
        odd = rezipped(path, lambda each, old, name=name, data=data: data if each == name else old)
        with pytest.raises(UnsupportedError):
            read(odd)


def test_several_models(path: Path) -> None:
    made = io.BytesIO(rezipped(path, lambda name, data: data))
    with zipfile.ZipFile(made, "a") as file:
        file.writestr("made/models/second.json", b"{}")
        file.writestr("made/data/weights/second_weights_config.json", file.read(f"made/{WEIGHTS}"))
    root = read(made.getvalue()).root
    assert list(root) == ["model", "second"]
    first, second = (each["state_dict"] for each in root.values())
    assert list(first) == list(second) and first["scale"].storage is second["scale"].storage


def before(program: torch.export.ExportedProgram, suffix: str = "pt") -> bytes:
    """Return what torch 2.1 to 2.7 wrote; until 2.3 files of torch.save were called .json."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("serialized_exported_program.json", b"{}")
        for name, value in (("state_dict", program.state_dict), ("constants", program.constants)):
            file.writestr(f"serialized_{name}.{suffix}", saved(value))
        file.writestr("version", b"8.2")
    return made.getvalue()


@pytest.mark.parametrize("suffix", ["pt", "json"])
def test_before_2_8(program: torch.export.ExportedProgram, suffix: str) -> None:
    checkpoint = read(before(program, suffix))
    assert list(checkpoint.weights) == list(program.state_dict)
    for name, tensor in program.state_dict.items():
        assert elements_of(checkpoint.weights[name]) == elements(tensor.detach())
    assert set(checkpoint.root["constants"]) == {"hidden", "plain"}


@pytest.mark.parametrize(
    ("parts", "error"), [((), UnsupportedError), (("state_dict", "constants"), FormatError)]
)
def test_before_2_8_refused(parts: tuple[str, ...], error: type[CkptkitError]) -> None:
    names = ("exported_program.json", *(f"{part}.pt" for part in parts))
    with pytest.raises(error):
        read(build(*(Member(f"serialized_{name}", b"nonsense") for name in names)))


# Models of Stable-Baselines3, as its own writer lays them out


def model(path: Path, policy: bytes, *, deflated: bool = False) -> Path:
    """Write what `save_to_zip_file` writes, in its order."""
    members = {
        "data": b"{}", "pytorch_variables.pth": saved(None), "policy.pth": policy,
        "policy.optimizer.pth": saved({"state": {}, "param_groups": []}),
        "_stable_baselines3_version": b"1.7.0", "system_info.txt": b"OS: none",
    }  # fmt: skip
    made = (Member(name, data, deflated=deflated) for name, data in members.items())
    path.write_bytes(build(*made))
    return path


class TestStableBaselines(FormatConformance):
    name = "stable-baselines3"
    suffix = ".zip"
    dtypes = ("float32", "float16", "int64", "bool")

    def make(self, folder: Path, state: State) -> Path:
        return model(folder / "made.zip", saved(state))

    def oracle(self, path: Path) -> State:
        with zipfile.ZipFile(path) as archive:
            loaded: State = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
        return loaded

    def boundaries(self, data: bytes) -> Iterable[int]:
        return zip_boundaries(data)


def test_a_policy_of_an_older_torch(tmp_path: Path) -> None:
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}
    policy = saved(state, _use_new_zipfile_serialization=False)
    checkpoint = ckptkit.open(model(tmp_path / "best_model.zip", policy))
    check_equal(checkpoint.weights, state)
    (warning,) = [each for each in checkpoint.warnings if "only policy.pth" in each]
    others = ("data", "pytorch_variables.pth", "policy.optimizer.pth", "system_info.txt")
    assert all(name in warning for name in others)


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    packed = model(tmp_path / "packed.zip", saved({"a": torch.zeros(999)}), deflated=True)
    with pytest.raises(UnsupportedError, match="compressed"):
        ckptkit.open(packed)
    with pytest.raises(FormatError, match=r"not a torch\.save file"):
        ckptkit.open(model(tmp_path / "other.zip", b"text"))
