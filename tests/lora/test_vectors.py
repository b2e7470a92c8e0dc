"""The cases of the libraries themselves: merged, refused, converted, checked and extracted.

`case.json` of each says what is expected; see the README of the vectors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Done, Run
from tests.lora.adapters import Weights, loaded, scales_of
from tests.torch_equality import bits

VECTORS = Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere")) / "adapters"
CASES = {path.parent.name: path.parent for path in sorted(VECTORS.glob("*/case.json"))}
KINDS = {name: json.loads((path / "case.json").read_text())["kind"] for name, path in CASES.items()}


def cases(kind: str) -> Any:
    found = [name for name, each in KINDS.items() if each == kind]
    missing = pytest.mark.skip(reason="CKPTKIT_VECTORS has no adapters")
    return pytest.mark.parametrize("name", found or [pytest.param("none", marks=missing)])


class Case:
    """A case, the words of its command, and the path of what the command writes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.out = CASES[name], folder
        self.said: dict[str, Any] = json.loads((self.folder / "case.json").read_text())
        self.words = list(map(self._path, self.said["command"]))

    def _path(self, word: str) -> object:
        if word.startswith("OUT"):
            self.out = self.out / word
            return self.out
        return self.folder / word if (self.folder / word).exists() else word

    def run(self, in_process: Run, code: int = 0) -> Done:
        done = in_process(*self.words)
        assert done.code == code, done.stderr
        return done

    def of(self, name: str) -> Weights:
        """Return the tensors of a file that the case names."""
        return loaded(self.folder / self.said[name])

    def check(self) -> None:
        """Compare the output with the tensors that the library merges."""
        expected, seen = self.of("expected"), loaded(self.out)
        assert seen.keys() == expected.keys()
        first = next(word for word in self.said["command"] if word.startswith("base"))
        base = {} if first.endswith(".pth") else loaded(self.folder / first)
        tolerance = self.said["tolerance"]
        for key, tensor in expected.items():
            assert (seen[key].dtype, seen[key].shape) == (tensor.dtype, tensor.shape), key
            if tolerance == "exact":
                assert bits(seen[key]) == bits(tensor), key
            else:
                assert ulps(seen[key], tensor, base.get(key)) <= tolerance["ulp"], key


def ulps(seen: Any, expected: Any, base: Any) -> float:
    """Return the largest distance in units in the last place of the larger of the two, of the base,
    and of the root mean square of the tensor."""
    digits, least = {
        "torch.bfloat16": (8, -126), "torch.float16": (11, -14), "torch.float32": (24, -126),
    }[str(expected.dtype)]  # fmt: skip
    a, b = seen.double().numpy(), expected.double().numpy()
    size = np.maximum(np.abs(b), np.sqrt(np.mean(b**2)))
    if base is not None and base.shape == expected.shape:
        size = np.maximum(size, np.abs(base.double().numpy()))
    exponent = np.maximum(np.frexp(size)[1] - 1, least)
    return float(np.max(np.abs(a - b) / np.ldexp(1.0, exponent - digits + 1), initial=0))


@cases("merge")
def test_merged_as_the_libraries_do(name: str, in_process: Run, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    case.run(in_process)
    case.check()
    for key, value in case.said.get("config", {}).items():
        assert json.loads((case.out / "config.json").read_text())[key] == value


@cases("refuse")
def test_refused_by_name(name: str, in_process: Run, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    done = case.run(in_process, case.said["exit"])
    for word in (*case.said["words"], "hint:"):
        assert word.lower() in done.stderr.lower()
    assert list(tmp_path.iterdir()) == []


@cases("inspect")
def test_inspect_knows_adapters(name: str, in_process: Run, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    found = json.loads(case.run(in_process).stdout)["files"][0]["adapter"]
    assert case.said["adapter"].items() <= found.items()
    assert "lora merge BASE" in in_process("inspect", case.words[1]).stdout


@cases("convert")
def test_converted_as_the_libraries_do(name: str, in_process: Run, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    case.run(in_process)
    expected, seen = case.of("expected"), loaded(case.out)
    assert seen.keys() == expected.keys()
    for key, tensor in expected.items():
        if key.endswith(".alpha"):
            assert float(seen[key]) == float(tensor), key
            continue
        assert (seen[key].dtype, seen[key].shape) == (tensor.dtype, tensor.shape), key
        assert bits(seen[key]) == bits(tensor), key
    if "scales" in case.said:
        assert scales_of(case.out) == pytest.approx(case.said["scales"])


@cases("check")
def test_checked(name: str, in_process: Run, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    done = case.run(in_process, case.said["exit"])
    codes = {each["code"] for each in json.loads(done.stdout)["findings"]}
    assert codes.issuperset(case.said["must"])
    assert codes.isdisjoint(case.said["must_not"])
    for text in case.said["prints"]:
        assert text in done.stdout


@cases("extract")
def test_extracted(name: str, in_process: Run, tmp_path: Path) -> None:
    """The product of the factors has the error that the case allows, and equal modules are out."""
    case = Case(name, tmp_path)
    case.run(in_process)
    plain = {k.removeprefix("base_model.model."): each for k, each in loaded(case.out).items()}
    factors = {key.removesuffix(".lora_A.weight") for key in plain if key.endswith("A.weight")}
    assert factors == case.said["modules"].keys()
    tuned, base, slack = case.of("tuned"), case.of("base"), case.said["slack"]
    for module, want in case.said["modules"].items():
        change = tuned[f"{module}.weight"].double() - base[f"{module}.weight"].double()
        a, b = (plain[f"{module}.lora_{role}.weight"].double().flatten(1) for role in "AB")
        error = float((change.flatten(1) - b @ a).norm() / change.norm())
        assert error <= want * (1 + slack) + slack / 100 + 1e-6
    for key in case.said.get("saved", ()):
        assert bits(plain[key]) == bits(tuned[key])


SAME = ("kohya-flux-fp16", "kohya-sd15-unet", "sdxl-single-file", "diffusers-unet-metadata")


@pytest.mark.parametrize("to", ["kohya", "comfy", "diffusers", "peft"])
@pytest.mark.parametrize("name", [name for name in SAME if name in CASES])
def test_every_layout_changes_the_base_alike(
    name: str, to: str, in_process: Run, tmp_path: Path
) -> None:
    """What was converted is merged into what the library merges of the original."""
    if to == "peft" and name == "sdxl-single-file":
        pytest.skip("three components")
    case = Case(name, tmp_path)
    one = case.folder / "adapter.safetensors"
    made = tmp_path / (to if to == "peft" else f"{to}.safetensors")
    done = in_process("lora", "convert", "--to", to, one, made)
    assert done.code == 0, done.stderr
    assert one in case.words
    case.words = [made if word == one else word for word in case.words]
    case.run(in_process)
    case.check()
