"""Adapters and bases as the tests write them, and the base as a merge must make it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptkit

Weights = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "peft_version": "0.21.2"}


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return multiples of 1/64 whose products and sums are exact in float32.

    torch multiplies small matrices in another order than large ones.
    """
    return (torch.randint(-40, 41, shape) / 64).to(dtype)


def drawn(shapes: Shapes) -> Weights:
    return {name: values(*shape) for name, shape in shapes.items()}


def pair(path: str, rows: int, columns: int, rank: int = 2) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the two factors of a module."""
    return {f"{path}.lora_A.weight": (rank, columns), f"{path}.lora_B.weight": (rows, rank)}


def factors(path: str, rows: int, columns: int, rank: int = 2) -> Weights:
    return drawn(pair(path, rows, columns, rank))


def save(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> Path:
    """Write a safetensors file of tensors of torch or numpy."""
    path.parent.mkdir(exist_ok=True)
    save_file(
        {k: torch.as_tensor(each).contiguous().clone() for k, each in tensors.items()},
        path,
        metadata,
    )
    return path


def adapter(folder: Path, tensors: Mapping[str, Any], name: str = "adapter", **config: Any) -> Path:
    """Write a folder of peft."""
    prefixed = {f"base_model.model.{key}": each for key, each in tensors.items()}
    path = save(folder / name / WEIGHTS, prefixed).parent
    (path / CONFIG).write_text(json.dumps(SETTINGS | config))
    return path


def base(folder: Path, tensors: Mapping[str, Any], **config: Any) -> Path:
    path = save(folder / "base/model.safetensors", tensors).parent
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": False} | config))
    return path


def delta(tensors: Weights, path: str, scale: float = 3.0) -> torch.Tensor:
    a, b = (tensors[f"{path}.lora_{role}.weight"].float() for role in "AB")
    made: torch.Tensor = (b @ a) * scale
    return made


def changed(
    weights: Weights, tensors: Weights, names: Mapping[str, str] = {}, scale: float = 3.0
) -> Weights:
    """Return the weights after adding the update of each module. `names` are names in the base."""
    made, end = dict(weights), ".lora_A.weight"
    for path in (name.removesuffix(end) for name in tensors if name.endswith(end)):
        name = f"{names.get(path, path)}.weight"
        made[name] = (made[name].float() + delta(tensors, path, scale)).to(made[name].dtype)
    return made


def assert_same(seen: Weights, expected: Weights) -> None:
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert seen[name].dtype == tensor.dtype and torch.equal(seen[name], tensor), name


def merged(folder: Path, base: Path, *adapters: Path, **options: Any) -> Weights:
    out = folder / "out.safetensors"
    ckptkit.save(ckptkit.merge_lora(base, list(adapters), **options), out, force=True)
    return load_file(out)


def check(
    folder: Path,
    weights: Weights,
    tensors: Weights,
    expected: Weights | None = None,
    there: Mapping[str, Any] = {},
    **config: Any,
) -> None:
    """Merge a peft adapter into a base whose configuration is `there`, and compare all tensors.

    `expected` are the tensors that change. By default, these are the modules of the adapter.
    """
    expected = changed(weights, tensors) if expected is None else weights | expected
    made = adapter(folder, tensors, **config)
    assert_same(merged(folder, base(folder, weights, **there), made), expected)


def loaded(path: Path) -> Weights:
    """Return the tensors of a file, or of the files of a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def scales_of(path: Path) -> dict[str, float]:
    """Return the factor of B @ A of each module, as a reader of peft or diffusers computes it."""
    config: dict[str, Any] = {}
    if path.is_dir():
        config = {f".{k}": v for k, v in json.loads((path / CONFIG).read_text()).items()}
    else:
        with safe_open(path, "pt") as file:
            config = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    made, end = {}, ".lora_A.weight"
    for name, rank in ((k.removesuffix(end), len(v)) for k, v in loaded(path).items() if end in k):
        plain = name.removeprefix("base_model.model.")
        part, inner = ("", plain) if path.is_dir() else plain.split(".", 1)
        number = {}
        for pattern, whole in (("alpha_pattern", "lora_alpha"), ("rank_pattern", "r")):
            known = config.get(f"{part}.{pattern}", {}).items()
            own = [n for key, n in known if re.match(rf"(.*\.)?({key})$", inner)]
            number[whole] = own[0] if own else config.get(f"{part}.{whole}", rank)
        assert number["r"] == rank
        root = rank**0.5 if config.get(f"{part}.use_rslora") else rank
        made[plain] = number["lora_alpha"] / root
    return made
