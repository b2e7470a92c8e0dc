"""The cases of the libraries themselves: merged, refused, converted, checked and extracted.

`case.json` of each says what is expected; see the README of the vectors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

VECTORS = Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere")) / "adapters"
CASES = {path.parent.name: path.parent for path in sorted(VECTORS.glob("*/case.json"))}
KINDS = {name: json.loads((path / "case.json").read_text())["kind"] for name, path in CASES.items()}
CONFIG = "adapter_config.json"
Cli = Callable[..., Any]


def cases(*kinds: str) -> Any:
    found = [name for name, kind in KINDS.items() if kind in kinds]
    missing = pytest.mark.skip(reason="CKPTKIT_VECTORS has no adapters")
    return pytest.mark.parametrize("name", found or [pytest.param("none", marks=missing)])


def arguments(case: dict[str, Any], folder: Path, out: Path) -> list[str]:
    """Return the command of a case, with the paths of its files."""
    words = []
    for word in case["command"]:
        if word.startswith("OUT"):
            word = str(out / word)
        elif (folder / word).exists():
            word = str(folder / word)
        words.append(word)
    return words


def tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a file, or of the files of a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def bytes_of(tensor: Any) -> bytes:
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def written(case: dict[str, Any], out: Path) -> Path:
    return out / next(word for word in case["command"] if word.startswith("OUT"))


def ulps(seen: Any, expected: Any, base: Any) -> float:
    """Return the largest distance in units in the last place of the larger of the two, of the base,
    and of the root mean square of the tensor."""
    bits = {"torch.bfloat16": 8, "torch.float16": 11, "torch.float32": 24}[str(expected.dtype)]
    least = {"torch.bfloat16": -126, "torch.float16": -14, "torch.float32": -126}
    a, b = seen.double().numpy(), expected.double().numpy()
    size = np.maximum(np.abs(b), np.sqrt(np.mean(b**2)))
    if base is not None and base.shape == expected.shape:
        size = np.maximum(size, np.abs(base.double().numpy()))
    exponent = np.maximum(np.frexp(size)[1] - 1, least[str(expected.dtype)])
    return float(np.max(np.abs(a - b) / np.ldexp(1.0, exponent - bits + 1), initial=0))


@cases("merge")
def test_merged_as_the_libraries_do(name: str, in_process: Cli, tmp_path: Path) -> None:
    folder, case = CASES[name], json.loads((CASES[name] / "case.json").read_text())
    done = in_process(*arguments(case, folder, tmp_path))
    assert done.code == 0, done.stderr
    expected, seen = tensors(folder / case["expected"]), tensors(written(case, tmp_path))
    assert seen.keys() == expected.keys()
    bases = [folder / word for word in case["command"] if word.startswith("base")]
    base = tensors(bases[0]) if bases[0].suffix != ".pth" else {}
    for key, tensor in expected.items():
        assert (seen[key].dtype, seen[key].shape) == (tensor.dtype, tensor.shape), key
        if case["tolerance"] == "exact":
            assert bytes_of(seen[key]) == bytes_of(tensor), key
        else:
            assert ulps(seen[key], tensor, base.get(key)) <= case["tolerance"]["ulp"], key
    for key, value in case.get("config", {}).items():
        config = json.loads((written(case, tmp_path) / "config.json").read_text())
        assert config[key] == value


@cases("refuse")
def test_refused_by_name(name: str, in_process: Cli, tmp_path: Path) -> None:
    folder, case = CASES[name], json.loads((CASES[name] / "case.json").read_text())
    done = in_process(*arguments(case, folder, tmp_path))
    assert done.code == case["exit"], done.stderr
    for word in case["words"]:
        assert word.lower() in done.stderr.lower()
    assert "hint:" in done.stderr
    assert list(tmp_path.iterdir()) == []


@cases("inspect")
def test_inspect_knows_adapters(name: str, in_process: Cli, tmp_path: Path) -> None:
    folder, case = CASES[name], json.loads((CASES[name] / "case.json").read_text())
    done = in_process(*arguments(case, folder, tmp_path))
    found = json.loads(done.stdout)["files"][0]["adapter"]
    assert {key: found[key] for key in case["adapter"]} == case["adapter"]
    shown = in_process("inspect", folder / case["command"][1])
    assert "lora merge BASE" in shown.stdout


def scales_of(path: Path) -> dict[str, float]:
    """Return the factor of B @ A of each module, as a reader of peft or diffusers computes it."""
    found = tensors(path)
    ranks = {
        name.removesuffix(".lora_A.weight"): len(each)
        for name, each in found.items()
        if name.endswith(".lora_A.weight")
    }
    config: dict[str, Any] = {}
    if path.is_dir():
        config = {f".{k}": v for k, v in json.loads((path / CONFIG).read_text()).items()}
    else:
        with safe_open(path, "pt") as file:
            config = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    made = {}
    for name, rank in ranks.items():
        plain = name.removeprefix("base_model.model.")
        part, inner = ("", plain) if path.is_dir() else plain.split(".", 1)
        if not config:
            made[plain] = 1.0
            continue
        number = {}
        for pattern, whole in (("alpha_pattern", "lora_alpha"), ("rank_pattern", "r")):
            known = config[f"{part}.{pattern}"].items()
            own = [n for key, n in known if re.match(rf"(.*\.)?({key})$", inner)]
            number[whole] = own[0] if own else config[f"{part}.{whole}"]
        assert number["r"] == rank
        root = rank**0.5 if config[f"{part}.use_rslora"] else rank
        made[plain] = number["lora_alpha"] / root
    return made


@cases("convert")
def test_converted_as_the_libraries_do(name: str, in_process: Cli, tmp_path: Path) -> None:
    folder, case = CASES[name], json.loads((CASES[name] / "case.json").read_text())
    done = in_process(*arguments(case, folder, tmp_path))
    assert done.code == 0, done.stderr
    path = written(case, tmp_path)
    expected, seen = tensors(folder / case["expected"]), tensors(path)
    assert seen.keys() == expected.keys()
    for key, tensor in expected.items():
        if key.endswith(".alpha"):
            assert float(seen[key]) == float(tensor), key
            continue
        assert (seen[key].dtype, seen[key].shape) == (tensor.dtype, tensor.shape), key
        assert bytes_of(seen[key]) == bytes_of(tensor), key
    if "scales" in case:
        assert scales_of(path) == pytest.approx(case["scales"])


@cases("check")
def test_checked(name: str, in_process: Cli, tmp_path: Path) -> None:
    folder, case = CASES[name], json.loads((CASES[name] / "case.json").read_text())
    done = in_process(*arguments(case, folder, tmp_path))
    assert done.code == case["exit"], done.stderr
    codes = {each["code"] for each in json.loads(done.stdout)["findings"]}
    assert codes.issuperset(case["must"])
    assert codes.isdisjoint(case["must_not"])
    for text in case["prints"]:
        assert text in done.stdout


@cases("extract")
def test_extracted(name: str, in_process: Cli, tmp_path: Path) -> None:
    """The product of the factors has the error that the case allows, and equal modules are out."""
    folder, case = CASES[name], json.loads((CASES[name] / "case.json").read_text())
    done = in_process(*arguments(case, folder, tmp_path))
    assert done.code == 0, done.stderr
    found = tensors(written(case, tmp_path))
    plain = {key.removeprefix("base_model.model."): each.double() for key, each in found.items()}
    factors = {key.removesuffix(".lora_A.weight") for key in plain if key.endswith("A.weight")}
    assert factors == case["modules"].keys()
    tuned, base = tensors(folder / case["tuned"]), tensors(folder / case["base"])
    for module, want in case["modules"].items():
        change = tuned[f"{module}.weight"].double() - base[f"{module}.weight"].double()
        a, b = plain[f"{module}.lora_A.weight"], plain[f"{module}.lora_B.weight"]
        left = change.flatten(1) - b.flatten(1) @ a.flatten(1)
        error = float(left.norm() / change.norm())
        assert error <= want * (1 + case["slack"]) + case["slack"] / 100 + 1e-6
    for key in case.get("saved", ()):
        assert bytes_of(found[f"base_model.model.{key}"]) == bytes_of(tuned[key])


SAME = ("kohya-flux-fp16", "kohya-sd15-unet", "sdxl-single-file", "diffusers-unet-metadata")


@pytest.mark.parametrize("to", ["kohya", "comfy", "diffusers", "peft"])
@pytest.mark.parametrize("name", [name for name in SAME if name in CASES])
def test_every_layout_changes_the_base_alike(
    name: str, to: str, in_process: Cli, tmp_path: Path
) -> None:
    """What was converted is merged into what the library merges of the original."""
    folder, case = CASES[name], json.loads((CASES[name] / "case.json").read_text())
    if to == "peft" and name == "sdxl-single-file":
        pytest.skip("three components")
    one, base = folder / "adapter.safetensors", folder / "base.safetensors"
    made = tmp_path / (to if to == "peft" else f"{to}.safetensors")
    done = in_process("lora", "convert", "--to", to, one, made)
    assert done.code == 0, done.stderr
    words = arguments(case, folder, tmp_path)
    assert str(one) in words
    merged = in_process(*[made if word == str(one) else word for word in words])
    assert merged.code == 0, merged.stderr
    expected, seen = tensors(folder / case["expected"]), tensors(written(case, tmp_path))
    before = tensors(base)
    assert seen.keys() == expected.keys()
    for key, tensor in expected.items():
        ulp = 0 if case["tolerance"] == "exact" else case["tolerance"]["ulp"]
        assert ulps(seen[key], tensor, before.get(key)) <= ulp, key
