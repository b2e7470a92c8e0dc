"""More rows and fewer, against torch's own arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import CkptkitError
from tests.conftest import Ok, Run


@pytest.fixture
def saved(tmp_path: Path) -> torch.Tensor:
    torch.manual_seed(0)
    embedding = torch.randn(300, 40) * torch.linspace(0.5, 2, 40) + 1
    held = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding, "w": torch.ones(2)}
    torch.save(held, tmp_path / "model.pth")
    return embedding


def resized(folder: Path, **given: object) -> dict[str, torch.Tensor]:
    done = ckptkit.resize(folder / "model.pth", "*embed_tokens.weight", **given)  # type: ignore[arg-type]
    ckptkit.save(done, folder / "out.pth", force=True)
    found: dict[str, torch.Tensor] = torch.load(folder / "out.pth", weights_only=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_new_rows_are_the_mean(saved: torch.Tensor, tmp_path: Path, dtype: torch.dtype) -> None:
    saved = saved.to(dtype)
    torch.save({"embed_tokens.weight": saved}, tmp_path / "model.pth")
    found = resized(tmp_path, rows=1000)["embed_tokens.weight"]
    assert found.dtype == dtype and torch.equal(found[:300], saved)
    expected = saved.double().mean(0).to(dtype).expand(700, 40)
    torch.testing.assert_close(found[300:], expected, rtol=1e-15, atol=0)


def test_tied_weights_go_along(saved: torch.Tensor, tmp_path: Path) -> None:
    found = resized(tmp_path, rows=320, fill="zeros")
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    assert found["lm_head.weight"].shape == (320, 40)
    assert torch.equal(found["lm_head.weight"][:300], saved)
    assert not found["lm_head.weight"][300:].any() and found["w"].tolist() == [1, 1]


def test_random_rows_are_like_the_others(saved: torch.Tensor, tmp_path: Path) -> None:
    found = resized(tmp_path, rows=10_300, fill="normal")["lm_head.weight"][300:]
    deviation = saved.std(0, correction=0)
    assert ((found.mean(0) - saved.mean(0)).abs() < 0.06 * deviation).all()
    assert ((found.std(0) / deviation - 1).abs() < 0.04).all()
    again = resized(tmp_path, rows=400, fill="normal")["lm_head.weight"][300:]
    assert torch.equal(again, found[:100])
    other = resized(tmp_path, rows=400, fill="normal", seed=1)["lm_head.weight"][300:]
    assert not torch.equal(again, other)


def test_fewer_rows_and_the_configuration(tmp_path: Path, run: Run, ok: Ok) -> None:
    (tmp_path / "model").mkdir()
    weights = {"embed_tokens.weight": torch.randn(30, 4), "lm_head.weight": torch.randn(30, 4)}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text(
        '{"vocab_size": 30, "hidden_size": 30, "text_config": {"vocab_size": 30}}'
    )
    words = ["resize", "model", "out", "--keys", "embed*", "--keys", "lm_head.weight"]
    said = ok(*words, "--rows", "20", cwd=tmp_path)
    assert "'embed_tokens.weight', 'lm_head.weight': 30 -> 20 rows" in said
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], weights[name][:20]) for name in weights)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"vocab_size": 20, "hidden_size": 30, "text_config": {"vocab_size": 20}}
    done = run("resize", "model", "same", *words[3:], "--rows", "30", cwd=tmp_path)
    assert "all selected weights already have 30 rows" in done.stderr


@pytest.mark.parametrize(
    ("keys", "given", "said"),
    [
        ("embedding", {"rows": 3}, "no weight matches 'embedding'"),
        ("w", {"rows": 0}, "rows must be at least 1, got 0"),
        ("scale", {"rows": 3}, "'scale' has no rows"),
        ("count", {"rows": 3}, "is not a floating-point dtype"),
        ("w", {"rows": 3, "fill": "ones"}, "cannot fill rows with 'ones'"),
    ],
)
def test_refusals(tmp_path: Path, keys: str, given: dict[str, object], said: str) -> None:
    held = {"w": torch.ones(2, 2), "scale": torch.tensor(1.0), "count": torch.ones(2).long()}
    torch.save(held, tmp_path / "model.pth")
    with pytest.raises(CkptkitError, match=said):
        ckptkit.resize(tmp_path / "model.pth", keys, **given)  # type: ignore[arg-type]
