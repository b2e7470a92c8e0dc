"""mergekit: its merge_state_dicts on the same models. pip install mergekit (not in an extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

api = pytest.importorskip(
    "mergekit.merge_methods.api", reason="mergekit is not installed", exc_type=ImportError
)
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import ckptkit  # noqa: E402
from tests.edits.test_merging import DTYPES, assert_close, model  # noqa: E402

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("linear", {"weight": [0.3, 0.5]}, {"method": "linear", "weight": [0.3, 0.5]}),
    "slerp": ("slerp", {"t": 0.3}, {"method": "slerp", "scale": 0.3}),
    "task": (
        "task_arithmetic",
        {"weight": [0.3, 0.5], "lambda": 0.7},
        {"method": "task", "base": True, "weight": [0.3, 0.5], "scale": 0.7},
    ),
    "ties": (
        "ties",
        {"weight": [0.3, 0.5], "density": [0.5, 0.2]},
        {"method": "ties", "base": True, "weight": [0.3, 0.5], "density": [0.5, 0.2]},
    ),
    "ties, rescaled": (
        "ties",
        {"weight": [1, 1], "density": [0.5, 0.2], "rescale": True},
        {"method": "ties", "base": True, "density": [0.5, 0.2], "rescale": True},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_mergekit(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    method, theirs, ours = CASES[case]
    models = {number: model(number, dtype) for number in range(3)}
    paths = {number: tmp_path / f"{number}.safetensors" for number in models}
    for number, each in models.items():
        save_file(each, paths[number])
    if ours.pop("base", False):
        ours["base"] = paths[0]
        expected = api.merge_state_dicts(models, method, parameters=theirs, base=0)
    else:
        two = {number: models[number] for number in (1, 2)}
        base = 1 if method == "slerp" else None
        expected = api.merge_state_dicts(two, method, parameters=theirs, base=base)
    ckptkit.save(ckptkit.merge([paths[1], paths[2]], **ours), tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    if method == "ties" and dtype != torch.float32:  # equal magnitudes at the limit: any may stay
        same = [(found[name] == expected[name]).double().mean() for name in found]
        assert min(same) > 0.8
    elif "rescale" in ours:  # the sums of magnitudes are rounded in another order
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    else:
        assert_close(found, dict(expected), [*models.values()])
