"""TorchScript against torch.jit.load: the same weights, and every attribute, whoever saved the file
and how."""

from __future__ import annotations

import io
import pickle
import sys
import types
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

import ckptkit
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    UnsupportedError,
)
from ckptkit.core.tree import Global, Node, Object, join, walk
from ckptkit.core.weights import as_tensor, module_state
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TORCH_ZIP, TORCHSCRIPT
from ckptkit.formats.torchscript import Declared, ScriptSource, parse
from ckptkit.formats.zip_reader import read_directory
from tests.formats.catalogue import read_as
from tests.formats.conformance import check_equal
from tests.formats.containers.zips import Member, build
from tests.formats.torch_zip.archives import archive, text
from tests.formats.torchscript.scripts import (
    QUIET,
    by_torch,
    constants_by_torch,
    quantized,
    rezipped,
    script,
)

pytestmark = QUIET
EMPTY = b"\x80\x02)."  # a pickled tuple of nothing


class Inner(nn.Module):
    """Every kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("not_kept", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("bias", None)
        self.plain = torch.arange(4.0)
        self.numbers = [1, 2, 3]
        self.flags = [True, False]
        self.rates = {"a": 1.5}
        self.mixed = (1, "x", 2.5)
        self.tensors = [torch.ones(2)]
        self.place = torch.device("cpu")
        self.late = nn.Parameter(torch.randn(2))
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tied(x) @ self.weight + self.kept + self.plain[:3] + self.mixed[0]
        return y + len(self.numbers) + len(self.flags) + self.rates["a"] + self.tensors[0][0]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.maybe = torch.jit.Attribute(torch.ones(1), Optional[torch.Tensor])  # noqa: UP045

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.inner(x)) * 2


def outer() -> nn.Module:
    torch.manual_seed(0)
    return Outer().eval()


read = partial(read_as, TORCHSCRIPT)


def tensors(root: Node) -> dict[str, Any]:
    found = ((join(path), as_tensor(node)) for path, node in walk(root))
    return {path: tensor for path, tensor in found if tensor is not None}


def test_scripted(tmp_path: Path) -> None:
    path = script(outer(), tmp_path / "made.pt")
    checkpoint = read(path)
    check_equal(checkpoint.weights, by_torch(path))
    assert checkpoint.format == "torchscript" and not checkpoint.warnings
    assert checkpoint.selection is not None and checkpoint.selection.is_module
    assert str(checkpoint.root.global_).endswith("Outer")
    assert not {"inner.plain", "maybe", "inner.tensors.0"} & set(checkpoint.weights)
    assert "inner.not_kept" in checkpoint.weights  # torch keeps it too


def test_frozen_weights_are_constants(tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    torch.jit.save(torch.jit.freeze(torch.jit.script(outer())), path)
    assert by_torch(path) == {}
    checkpoint = read(path)
    assert module_state(checkpoint.root) == {} and checkpoint.key == "CONSTANTS"
    assert any("frozen" in each for each in checkpoint.warnings)
    want = constants_by_torch(path)
    check_equal({name: checkpoint.weights[name] for name in want}, want)


def _packed(path: Path, module: nn.Module, layers: dict[str, tuple[str, tuple[Any, ...]]]) -> None:
    """Save a frozen module whose constants are packed layers, as a torch with XNNPACK writes it.

    The classes exist in C++ alone: stand-ins of their names pickle the same state.
    """
    names = types.ModuleType("__torch__.torch.classes.xnnpack")
    made = []
    for kind, state in layers.values():
        members = {"__module__": names.__name__, "__getstate__": lambda self: self.held}
        stand_in = type(kind, (), members)
        setattr(names, kind, stand_in)
        made.append(stand_in())
        made[-1].held = state
    inner = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        for end in range(4):
            package = ".".join(names.__name__.split(".")[: end + 1])
            patch.setitem(sys.modules, package, names)
        torch.save(tuple(made), inner)
    torch.jit.save(torch.jit.freeze(torch.jit.script(module.eval())), path)
    with zipfile.ZipFile(inner) as file:
        saved = {each.partition("/")[2]: file.read(each) for each in file.namelist()}
    path.write_bytes(rezipped(path, lambda name, data: None if name.startswith("const") else data))
    with zipfile.ZipFile(path, "a") as file:
        top = file.namelist()[0].partition("/")[0]
        for name, data in saved.items():
            if name.startswith("data"):
                file.writestr(f"{top}/{name.replace('data', 'constants', 1)}", data)


def test_packed_weights(tmp_path: Path) -> None:
    """``optimize_for_mobile`` packs each layer into an object of C++; a plain constant is beside
    them."""
    state = {"0.weight": torch.randn(2, 1, 3, 3), "0.bias": torch.randn(2)}
    state["1.weight"] = torch.randn(3, 8)
    path = tmp_path / "made.ptl"
    _packed(path, nn.Linear(1, 1), {
        "c0": ("Conv2dOpContext", (state["0.weight"], state["0.bias"], [1, 1], [0, 0], [1, 1], 1, 0.0, None)),
        "c1": ("LinearOpContext", (state["1.weight"], None, None, None)),
    })  # fmt: skip
    checkpoint = read(path)
    want = {f"CONSTANTS.c{name}": tensor for name, tensor in state.items()}
    assert list(checkpoint.weights) == list(want)
    check_equal(checkpoint.weights, want)
    assert any("packed weights" in each for each in checkpoint.warnings)
    ckptkit.convert(path, tmp_path / "made.pth")
    check_equal(ckptkit.open(tmp_path / "made.pth").weights, want)


def test_packed_weights_of_torch(tmp_path: Path) -> None:
    """Of a torch without XNNPACK: linear layers of float16, also those inside an LSTM."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = nn.LSTM(4, 4), nn.Linear(4, 2)
            self.bias = nn.Parameter(torch.randn(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.lstm(x)[0]) + self.bias

    module = Packed().eval()
    made = quantization.quantize_dynamic(module, {nn.LSTM, nn.Linear}, dtype=torch.float16)
    torch.jit.save(torch.jit.freeze(torch.jit.script(made)), tmp_path / "made.pt")
    weights = ckptkit.load(tmp_path / "made.pt")
    want = [each.detach() for each in module.parameters()]
    half = [each.half().float() if each.dim() > 1 else each for each in want]
    key = lambda each: each.flatten().tolist()  # noqa: E731
    assert sorted(map(key, weights.values())) == sorted(map(key, half))


def test_a_mobile_archive_without_code(tmp_path: Path) -> None:
    path = tmp_path / "made.ptl"
    torch.jit.script(outer())._save_for_lite_interpreter(str(path))
    checkpoint = read(rezipped(path, lambda name, data: None if name.startswith("code/") else data))
    assert set(by_torch(path)) < set(checkpoint.weights)
    assert any("the code of __torch__." in each for each in checkpoint.warnings)


def test_extra_files_are_metadata(tmp_path: Path) -> None:
    """As long as they are text, and not more than a megabyte of it."""
    texts = {"config.json": '{"rate": 16000}', "labels/all.txt": "häuser"}
    extra = {**texts, "image.png": b"\xff\xd8", "long.txt": "x" * (2 << 20)}
    checkpoint = read(script(nn.Linear(2, 2), tmp_path / "made.pt", _extra_files=extra))
    assert checkpoint.extras == {f"extra/{name}": text for name, text in texts.items()}
    (warning,) = checkpoint.warnings
    assert "image.png" in warning and "long.txt" in warning


def test_the_whole_tree_loads(tmp_path: Path) -> None:
    root = ckptkit.load(script(outer(), tmp_path / "made.pt"), whole=True)
    inner = root.state["_modules"]["inner"].state
    assert torch.equal(inner["plain"], torch.arange(4.0)) and inner["place"] == torch.device("cpu")


def test_quantized(tmp_path: Path) -> None:
    """Weights that layers have packed are shown, and are no part of the state_dict, as with
    torch."""
    module = quantized()
    path = script(module, tmp_path / "made.pt")
    checkpoint = read(path)
    check_equal(checkpoint.weights, by_torch(path))
    assert list(checkpoint.weights) == ["quant.scale", "quant.zero_point"]
    kept = tensors(checkpoint.root)
    found = {name: each for name, each in kept.items() if each.dtype.kind == "quantized"}
    want = {"_modules.conv.": module.conv.weight(), "_modules.fc.": module.fc.weight()}
    for (name, ours), (place, tensor) in zip(found.items(), want.items(), strict=True):
        assert name.startswith(place)
        assert (ours.dtype.name, ours.shape) == ("qint8", tuple(tensor.shape))


class Kept(nn.Module):
    """Buffers of quantised types."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(6.0).reshape(2, 3)
        for name in ("qint8", "quint8", "qint32"):
            made = torch.quantize_per_tensor(base, 0.5, 3, getattr(torch, name))
            self.register_buffer(name, made)
        scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([0, 1])
        made = torch.quantize_per_channel(base, scales, zeros, 0, torch.qint8)
        self.register_buffer("channels", made)


def test_quantized_buffers(tmp_path: Path) -> None:
    path = script(Kept(), tmp_path / "made.pt")
    check_equal(read(path).weights, by_torch(path))


class Stateful(nn.Module):
    """Its own code makes its parameters of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.weight

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return self.weight, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        self.training = state[1]


def test_state_that_only_code_understands(tmp_path: Path) -> None:
    """It is shown, and what it would become is not guessed."""
    checkpoint = read(script(nn.Sequential(Stateful(), nn.Linear(2, 2)), tmp_path / "made.pt"))
    assert list(checkpoint.weights) == ["1.weight", "1.bias"]
    (warning,) = checkpoint.warnings
    assert "ckptkit does not run the code of" in warning and "Stateful" in warning
    assert "_modules.0.state.0" in tensors(checkpoint.root)


# Files that are not as they should be


@pytest.mark.parametrize("name", ["constants.pkl", "bytecode.pkl"])
def test_ZP_21_one_name_decides(name: str) -> None:
    data = archive(b"\x80\x02N.", Member(f"a/{name}", EMPTY))
    assert not TORCH_ZIP.matches(Probe(Memory(data)))
    with pytest.raises(FormatError, match="does not contain a TorchScript module"):
        read(data)


@pytest.mark.parametrize(
    "name", ["a/code/model.py", "a/x/constants.pkl", "a/data/constants.pkl", "a/model.json"]
)
def test_D_30_other_names_do_not(name: str) -> None:
    probe = Probe(Memory(archive(b"\x80\x02N.", Member(name, b"?"))))
    assert not TORCHSCRIPT.matches(probe) and TORCH_ZIP.matches(probe)
    assert any(name.rpartition("/")[2] in said for said in TORCH_ZIP.read(probe).warnings)


def made(
    state: bytes, code: bytes = b"", constants: bytes = EMPTY, made_by: bytes = b"__torch__\nM"
) -> bytes:
    """An archive whose one object has this state."""
    pickled = b"\x80\x02c" + made_by + b"\n)\x81" + state + b"b."
    records = {"code/__torch__.py": code, "constants.pkl": constants}
    return archive(pickled, records=records)


MODULE = b"class M(Module):\n  __parameters__ = []\n  __buffers__ = []\n"


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (made(b"}" + text("_parameters") + b"}s", MODULE), AmbiguousError, "names that nn.Module itself uses"),
        (made(b"}" + text("CONSTANTS") + b"K\1s", MODULE), AmbiguousError, "called CONSTANTS"),
        (made(b"}", MODULE, b"\x80\x02]."), FormatError, "does not contain a tuple"),
        (made(b"}b}", MODULE), FormatError, "that torch.jit.save writes"),
        (made(b"}", b"class M(Module):\n  __parameters__ = f()\n"), FormatError, "malformed list"),
        (made(b"}", b"\xff"), FormatError, "not UTF-8"),
        (made(b"}", MODULE, made_by=b"os\nsystem"), FormatError, "does not contain a TorchScript module"),
        (build(Member("a/constants.pkl", EMPTY), Member("a/version", b"3")), CorruptError, "record 'a/data.pkl' is missing"),
        (build(Member("a/constants.pkl", EMPTY), Member("a/version", b"99")), UnsupportedError, "version 99"),
    ],
)  # fmt: skip
def test_refused(data: bytes, error: type[CkptkitError], said: str) -> None:
    with pytest.raises(error, match=said):
        TORCHSCRIPT.read(Probe(Memory(data)))


def test_constants_are_numbered() -> None:
    checkpoint = read(made(b"}" + text("training") + b"\x89s", MODULE, pickle.dumps((1, "two"), 2)))
    assert checkpoint.root.state["CONSTANTS"] == {"c0": 1, "c1": "two"} and checkpoint.key is None
    assert isinstance(checkpoint.root, Object) and checkpoint.weights == {}


def test_a_module_inside_itself() -> None:
    with pytest.raises(LimitError, match="inside itself"):
        read(made(b"q\0}" + text("again") + b"h\0s", MODULE))


# Declarations in the code, as torch prints it


CODE = """class Old(Module):
  __parameters__ = ["w", ]
  w : Tensor
  b : Tensor
  maybe : Optional[Tensor]
  size : Final[int] = 3
  __annotations__["0"] = Tensor
  __annotations__["a\\\\b"] = Tensor
  def forward(self: __torch__.Old,
    x: Tensor) -> Tensor:
    y : Tensor = x
    __buffers__ = []
    return "class Inside(Module):"
def function(x: Tensor) -> Tensor:
  x : Tensor
  return x
class Point(NamedTuple):
  x : Tensor
class Plain:
  x : Tensor
class Own(Module):
  __parameters__ = []
  __buffers__ = ["häuser", ]
  __annotations__["häuser"] = Tensor
  def __setstate__(self: __torch__.Own,
    state: Tensor) -> None:
    return None
"""


def test_declarations_by_hand() -> None:
    found = parse(CODE.encode())
    assert found == {
        "Old": Declared("Module", frozenset({"w"}), None, {"w", "b", "0", "a\\b"}),
        "Point": Declared("NamedTuple", tensors={"x"}),
        "Plain": Declared(None, tensors={"x"}),
        "Own": Declared("Module", frozenset(), frozenset({"häuser"}), {"häuser"}, True),
    }
    assert [each.is_module for each in found.values()] == [True, False, False, True]
    old = found["Old"]
    parts = {"w": "_parameters", "b": "_buffers", "0": "_buffers", "maybe": None}
    assert {name: old.part(name) for name in parts} == parts


@pytest.mark.parametrize(
    "line",
    [
        *("  __parameters__ = f()", '  __buffers__ = ["a", b]', '  __parameters__ = ["\\x"]'),
        *("  __buffers__ = [", "\xff"),
    ],
)
def test_code_that_is_refused(line: str) -> None:
    with pytest.raises(FormatError):
        parse(b"class M(Module):\n" + line.encode("latin-1"))


def test_only_what_is_asked_for_is_read() -> None:
    files = {"x": b"class M(Module):\n", "y": b"\xff"}
    members = (Member(f"a/code/__torch__/{name}.py", data) for name, data in files.items())
    code = ScriptSource(read_directory(Memory(build(*members))))
    assert code[Global("__torch__.x", "M")] == Declared("Module")
    assert code[Global("__torch__.x", "N")] is None and code[Global("__torch__.z", "M")] is None
    with pytest.raises(FormatError):
        code[Global("__torch__.y", "M")]


def test_hostile_code_takes_no_time() -> None:
    """Expressions that run backwards, over a line of a megabyte."""
    for line in (b'["' + b"\\" * (1 << 20), b'["a", ' * (1 << 17), b'["' + b"a" * (1 << 20)):
        with pytest.raises(FormatError):
            parse(b"class M(Module):\n  __parameters__ = " + line)
