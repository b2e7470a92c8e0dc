"""The limit of magnitudes of a merge, found in passes, against a sort of all of them."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.compute import merging
from ckptkit.compute.numbers import decode, encode
from ckptkit.core.dtypes import BY_NAME

DTYPES = ("bfloat16", "float16", "float32", "float64")


def rounded(values, dtype):
    return decode(encode(values, BY_NAME[dtype]), BY_NAME[dtype]).astype(values.dtype)


def values_of(kind, dtype, rng):
    wide = "f8" if dtype == "float64" else "f4"
    values = rng.standard_normal(1 << 16).astype(wide)
    if kind == "subnormal":
        values *= values.dtype.type(1e-6)  # below the normal numbers of float16
    if kind == "sorted":  # a sample of its beginning guesses wrongly
        values.sort()
    if kind == "equal":
        values[:] = np.where(values > 1, 0.5, -0.25)
    if kind == "odd":
        values[::3], values[1::7], values[2::9] = 0, np.inf, np.nan
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "subnormal", "sorted", "equal", "odd"])
def test_the_limit_is_that_of_a_sort(dtype, kind):
    def in_place(part):
        part[:] = rounded(part, dtype)

    values = values_of(kind, dtype, np.random.default_rng(5))
    sizes = np.sort(np.abs(rounded(values, dtype)))[::-1]  # NaN is the largest
    for goal in (1, 100, len(values) // 2, len(values)):
        for sampled in (0, 4096):
            search = merging._MagnitudeSearch(goal, dtype, in_place)
            if sampled:
                search.guess(rounded(values[:sampled], dtype), len(values))
            passes = 0
            while not search.is_done:
                for at in range(0, len(values), 5000):
                    search.count(values[at : at + 5000])
                search.narrow()
                passes += 1
            np.testing.assert_equal(search.least, float(sizes[goal - 1]))
            if not np.isnan(search.least):
                assert search.ties == goal - np.count_nonzero(~(sizes <= search.least))
            assert passes <= 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sampled_limit_gives_the_same_merge(tmp_path, monkeypatch, dtype):
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(1000, 30, generator=generator)
    files = []
    for name in ("base", "a", "b"):
        change = torch.randn(1000, 30, generator=generator) * torch.linspace(0, 0.1, 1000)[:, None]
        save_file({"w": (base + change).to(dtype)}, tmp_path / f"{name}.safetensors")
        files.append(tmp_path / f"{name}.safetensors")
    made = []
    taken, search = [], merging._MagnitudeSearch
    guess = search.guess
    monkeypatch.setattr(search, "guess", lambda *args: (taken.append(args), guess(*args)))
    for fewest in (1 << 30, 8):
        assert not taken
        monkeypatch.setattr(merging, "_FEWEST_SPOTS", fewest)
        monkeypatch.setattr(merging, "_SPOT", 1 << 5)
        monkeypatch.setattr(merging, "_AT_ONCE", 1 << 8)
        merged = ckptkit.merge(files[1:], method="ties", base=files[0], density=[0.3, 0.6])
        made.append(merged.weights["w"].torch())
    assert taken and torch.equal(*made) and not torch.equal(made[0], base.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_model_is_divided_by_its_weight(tmp_path, dtype):
    """Negative differences too: the mean of one model is that model, whatever its weight."""
    base = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    model = base + torch.tensor([0.5, -0.5, 1.0, -1.0], dtype=dtype)
    files = [tmp_path / "base.safetensors", tmp_path / "model.safetensors"]
    for file, tensor in zip(files, (base, model), strict=True):
        save_file({"w": tensor}, file)
    how = {"method": "ties", "weight": [0.5], "density": [1.0]}
    merged = ckptkit.merge(files[1:], base=files[0], **how)
    assert torch.equal(merged.weights["w"].torch(), model)
