"""Random checkpoints through every command, against what torch makes of the same files.

Twenty-four seeds here; more by hand: CKPTKIT_SEEDS=1000-5000.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from ckptkit.api import convert, open_checkpoint
from ckptkit.cli import main
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import TensorError
from ckptkit.edits.devices import remap
from ckptkit.edits.elements import cast, compact
from ckptkit.edits.keys import add_prefix, rename, select, strip_prefix
from ckptkit.edits.structure import extract, wrap
from tests.random_checkpoints import make
from tests.torch_equality import bits, has_memory, leaves, same, sha256, tensors, ties

FIRST, _, LAST = os.environ.get("CKPTKIT_SEEDS", "0-24").partition("-")
State = dict[str, torch.Tensor]
Step = Callable[[Checkpoint], Checkpoint]


class Case:
    """One file, and what torch says about it."""

    def __init__(self, seed: int, folder: Path, *, weights: bool = False) -> None:
        self.seed = seed
        self.folder = folder
        self.made = make(seed, weights=weights)
        self.path = folder / "in.pth"
        self.made.save(self.path)
        self.bytes = self.path.read_bytes()
        self.plain = _loads_with_weights_only(self.path)
        self.checkpoint = open_checkpoint(self.path)

    def tree(self) -> Any:
        """The tree as torch reads it, a new one each time."""
        return torch.load(self.path, map_location="cpu", weights_only=False)

    def write(self, *steps: Step, name: str = "out.pth", source: Path | None = None) -> Path:
        """The output of these steps; twice the same bytes, the input as it was."""
        out, again = self.folder / name, self.folder / f"again-{name}"
        for each in (out, again):
            convert(source or self.path, each, *steps, force=True)
        assert out.read_bytes() == again.read_bytes()
        assert self.path.read_bytes() == self.bytes
        return out

    def expect(self, want: Any, *steps: Step, storages: bool = True) -> Path:
        """Assert that torch reads the output as `want`, in each way that the input allows."""
        out = self.write(*steps)
        for mmap in (False, True):
            same(
                want,
                torch.load(out, map_location="cpu", weights_only=self.plain, mmap=mmap),
                storages,
            )
        return out

    def weights(self, tree: Any) -> State:
        """The weights in a tree of torch's."""
        selection = self.checkpoint.required
        found = tree[selection.path[0]] if selection.path else tree
        assert list(found) == list(selection.nodes)
        return found  # type: ignore[no-any-return]

    def with_weights(self, edit: Callable[[State], State]) -> Any:
        """The tree with other weights, wherever they stand in it."""
        tree = self.tree()
        old = self.weights(tree)
        return replaced(tree, old, edit(old))


def _loads_with_weights_only(path: Path) -> bool:
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


def replaced(node: Any, old: Any, new: Any) -> Any:
    """The tree with one container in the place of another, changed where it stands."""
    if node is old:
        return new
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            node[key] = replaced(value, old, new)
    return node


def renamed(
    state: State, name: Callable[[str], str], paths: Callable[[str], str] | None = None
) -> State:
    """A state_dict with other names, its `_metadata` with other paths, where the deeper of two
    stays."""
    new = type(state)((name(key), value) for key, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        new._metadata = OrderedDict(
            ((paths or name)(path), value) for path, value in metadata.items()
        )
    return new


@pytest.fixture(params=range(int(FIRST), int(LAST)), ids=lambda seed: f"seed{seed}")
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def case(seed: int, tmp_path: Path) -> Case:
    return Case(seed, tmp_path)


@pytest.fixture
def weighted(seed: int, tmp_path: Path) -> Case:
    """One with weights that can be edited."""
    return Case(seed, tmp_path, weights=True)


def test_inspect(case: Case) -> None:
    done = CliRunner().invoke(main, ["inspect", "--json", "--digest", str(case.path)])
    assert done.exit_code == 0, done.stderr
    (file,) = json.loads(done.stdout)["files"]
    tree = case.tree()
    want = tensors(tree)
    assert [path for path, _ in want] == [row["path"] for row in file["tensors"]]
    for (path, tensor), row in zip(want, file["tensors"], strict=True):
        device = "meta" if tensor.is_meta else "cuda:1" if case.made.cuda else "cpu"
        assert (row["shape"], row["dtype"]) == (list(tensor.shape), str(tensor.dtype)[6:]), path
        assert (row["device"], row["requires_grad"]) == (device, tensor.requires_grad), path
        assert row["sha256"] == sha256(tensor), path
        if tensor.layout == torch.strided:
            assert (row["stride"], row["offset"]) == (
                list(tensor.stride()),
                tensor.storage_offset(),
            ), path
    numbered = [(str(n), tensor) for n, (_, tensor) in enumerate(want)]
    groups: dict[int, list[str]] = {}
    for (name, tensor), row in zip(numbered, file["tensors"], strict=True):
        if has_memory(tensor):
            groups.setdefault(row["storage"], []).append(name)
    assert sorted(map(sorted, groups.values())) == ties(dict(numbered))


def test_values(case: Case) -> None:
    done = CliRunner().invoke(main, ["inspect", "--json", str(case.path)])
    (file,) = json.loads(done.stdout)["files"]
    kinds = {"bool": bool, "int": int, "float": float, "str": str, "none": type(None)}
    tree = case.tree()
    odd = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
    inside = tuple(
        f"{path}." if path else "" for path, leaf in leaves(tree) if isinstance(leaf, set)
    )
    got = [(row["path"], row["value"]) for row in file["values"] if row["type"] in kinds]
    got = [(path, value) for path, value in got if not path.startswith(inside)]
    want = [(path, leaf) for path, leaf in leaves(tree) if type(leaf) in kinds.values()]
    want = [
        (path, odd.get(repr(leaf), leaf) if type(leaf) is float else leaf) for path, leaf in want
    ]
    assert list(map(repr, got)) == list(map(repr, want))


def test_remap(case: Case) -> None:
    case.expect(case.tree(), lambda ck: remap(ck, "cpu"))


def test_remap_map(case: Case) -> None:
    out = case.expect(case.tree(), lambda ck: remap(ck, {"cuda:1": "cuda:0"}))
    met = set()
    torch.load(out, map_location=lambda storage, tag: met.add(tag) or storage, weights_only=False)  # type: ignore[func-returns-value]
    assert met <= {"cuda:0" if case.made.cuda else "cpu"}


def test_strip_module(weighted: Case) -> None:
    def strip(name: str) -> str:
        return f"{name}.".removeprefix("module.")[:-1]

    want = weighted.with_weights(
        lambda state: renamed(state, lambda key: key.removeprefix("module."), strip)
    )
    weighted.expect(want, strip_prefix)


def test_add_module_and_back(weighted: Case) -> None:
    def add(state: State) -> State:
        new = renamed(state, lambda path: f"module.{path}" if path else "module")
        if hasattr(new, "_metadata"):
            new._metadata = OrderedDict({"": {"version": 1}, **new._metadata})
        return new

    out = weighted.expect(weighted.with_weights(add), add_prefix)
    back = weighted.write(strip_prefix, name="back.pth", source=out)
    assert back.read_bytes() == weighted.write(name="plain.pth").read_bytes()


def test_rename(weighted: Case) -> None:
    want = weighted.with_weights(
        lambda state: renamed(state, lambda key: key.replace("layer", "block"))
    )
    weighted.expect(want, lambda ck: rename(ck, None, [("layer", "block")]))


def test_select(weighted: Case) -> None:
    def keep(state: State) -> State:
        new = type(state)(
            (key, value) for key, value in state.items() if not key.endswith("weight")
        )
        if hasattr(state, "_metadata"):
            live = {""}.union(*({key[:at] for at, c in enumerate(key) if c == "."} for key in new))
            new._metadata = OrderedDict(
                (path, value) for path, value in state._metadata.items() if path in live
            )  # type: ignore[attr-defined]
        return new

    def bare(ck: Checkpoint) -> Checkpoint:
        """The optimizer is of another net: such are cut in tests/edits."""
        root = ck.root
        return ck.without("optimizer") if isinstance(root, dict) and "optimizer" in root else ck

    want = weighted.with_weights(keep)
    if isinstance(want, dict):
        want.pop("optimizer", None)
    weighted.expect(want, lambda ck: select(bare(ck), drop=["*weight"]))


def test_cast(weighted: Case) -> None:
    dtype = ("float16", "float64", "bfloat16", "float8_e4m3fn")[weighted.seed % 4]
    want = weighted.weights(weighted.tree())
    out = weighted.write(lambda ck: cast(ck, dtype))
    got = weighted.weights(torch.load(out, map_location="cpu", weights_only=False))
    for name, tensor in want.items():
        plain = type(tensor) is torch.Tensor
        fixed = not tensor.is_floating_point() or tensor.is_meta or (plain and vars(tensor))
        eight = (
            dtype.startswith("float8") and not fixed
        )  # torch can neither negate those nor load a plain leaf
        assert got[name].requires_grad == (tensor.requires_grad and not (eight and plain)), name
        if not (eight and tensor.is_neg()):
            assert_numbers(
                tensor.detach() if fixed else tensor.detach().to(getattr(torch, dtype)),
                got[name].detach(),
            )


def assert_numbers(want: torch.Tensor, got: torch.Tensor) -> None:
    """Assert equal numbers of one dtype, NaN equal to NaN whatever its bits."""
    assert (want.dtype, want.shape, want.layout) == (got.dtype, got.shape, got.layout)
    if want.layout == torch.sparse_coo:
        want, got = want._values(), got._values()
    if not want.is_meta and not want.is_quantized:
        wide = torch.complex128 if want.is_complex() else torch.float64
        torch.testing.assert_close(got.to(wide), want.to(wide), rtol=0, atol=0, equal_nan=True)


def test_compact(case: Case) -> None:
    want = case.tree()
    out = case.expect(want, compact, storages=False)
    got = torch.load(out, map_location="cpu", weights_only=False)
    assert memory(got) <= memory(want)
    for (name, old), (_, new) in zip(tensors(want), tensors(got), strict=True):
        if old.layout == torch.strided:
            assert old.stride() == new.stride(), name


def memory(tree: Any) -> int:
    """Bytes of all storages."""
    storages = [tensor.untyped_storage() for _, tensor in tensors(tree) if has_memory(tensor)]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


def test_wrap_and_extract(case: Case) -> None:
    tree = case.tree()
    out = case.expect({"a.b": tree}, lambda ck: wrap(ck, "a.b"))
    if isinstance(tree, (torch.Tensor, dict, list, tuple, set)):
        back = case.write(lambda ck: extract(ck, "a.b"), name="back.pth", source=out)
        assert back.read_bytes() == case.write(name="plain.pth").read_bytes()


def test_safetensors_and_back(weighted: Case) -> None:
    want = weighted.weights(weighted.tree())
    if not all(map(is_holdable, want.values())):
        with pytest.raises(TensorError, match="safetensors cannot store"):
            weighted.write(name="out.safetensors")
        return
    out = weighted.write(name="out.safetensors")
    stored = load_file(out)
    assert stored.keys() <= want.keys()
    for name, tensor in stored.items():
        assert (tensor.dtype, tensor.shape) == (want[name].dtype, want[name].shape), name
        assert bits(tensor) == bits(want[name]), name
    back = weighted.write(name="back.pth", source=out)
    got = torch.load(back, map_location="cpu", weights_only=weighted.plain)
    assert (type(got), list(got)) == (type(want), list(want))
    assert getattr(want, "_metadata", None) == getattr(got, "_metadata", None)
    for name, tensor in want.items():
        assert bits(tensor) == bits(got[name]), name
        for fact in ("dtype", "shape", "requires_grad", "__class__"):
            assert getattr(tensor, fact) == getattr(got[name], fact), (name, fact)


def is_holdable(tensor: torch.Tensor) -> bool:
    """Return whether safetensors has a place for it."""
    plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return plain and tensor.dtype not in (torch.complex32, torch.complex128)
