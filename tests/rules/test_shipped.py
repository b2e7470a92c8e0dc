"""The recipes of families that ship: on the pairs of the vectors, and on names of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.run import recipes
from tests.conftest import Ok, Run
from tests.rules.families import VECTORS
from tests.rules.test_applying import assert_same

LAYOUTS = {recipe.name: recipe for name in recipes.names() if (recipe := recipes.load(name)).source}
PAIRS = {
    "meta-llama": "llama-meta",
    "mixtral": "mixtral-experts",
    "gpt2-linear": "gpt2-conv1d",
    "phi3": "phi3-fused-gqa",
}


@pytest.mark.skipif(not VECTORS.is_dir(), reason="CKPTKIT_VECTORS is not set")
@pytest.mark.parametrize("name", PAIRS)
def test_the_pairs(name: str, tmp_path: Path, ok: Ok) -> None:
    folder = VECTORS / PAIRS[name]
    for source, expected, reverse in (("a", "b", []), ("b", "a", ["--reverse"])):
        out = tmp_path / f"{expected}.safetensors"
        ok("run", name, folder / f"{source}.safetensors", out, *reverse)
        assert_same(load_file(out), load_file(folder / f"{expected}.safetensors"))


@pytest.mark.filterwarnings("ignore")
def test_weight_norm_is_that_of_torch(tmp_path: Path, ok: Ok) -> None:
    old = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(3, 2)))
    new = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2)))
    torch.save(old.state_dict(), tmp_path / "old.pth")
    ok("run", "weight-norm", tmp_path / "old.pth", tmp_path / "new.pth")
    new.load_state_dict(torch.load(tmp_path / "new.pth"))
    x = torch.randn(1, 3)
    assert torch.equal(new(x), old(x))


def test_fused_heads_of_gpt_neox(tmp_path: Path, ok: Ok) -> None:
    """By the view that the model itself takes of them: heads, then q, k and v of each."""
    fused = torch.arange(4 * 3 * 2 * 5.0).reshape(24, 5)
    torch.save({"gpt_neox.layers.0.attention.query_key_value.weight": fused}, tmp_path / "a.pth")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    ok("run", "gpt-neox", tmp_path / "a.pth", tmp_path / "b.pth")
    parts = fused.view(4, 3 * 2, 5).split(2, dim=1)
    expected = {
        f"gpt_neox.layers.0.attention.{p}_proj.weight": part.reshape(8, 5)
        for p, part in zip("qkv", parts, strict=True)
    }
    assert_same(ckptkit.load(tmp_path / "b.pth"), expected)


def test_old_names_of_layer_norms(tmp_path: Path, ok: Ok) -> None:
    state = {
        "bert.LayerNorm.gamma": torch.ones(2),
        "bert.LayerNorm.beta": torch.zeros(2),
        "x": torch.ones(1),
    }
    torch.save(state, tmp_path / "a.pth")
    ok("run", "bert-gamma", tmp_path / "a.pth", tmp_path / "b.pth")
    found = torch.load(tmp_path / "b.pth")
    assert sorted(found) == ["bert.LayerNorm.bias", "bert.LayerNorm.weight", "x"]


def test_the_list_says_where_facts_come_from(run: Run) -> None:
    done = run("run", "--list")
    assert "mixtral" in done.stdout
    assert "transformers 5.23.0" in done.stdout
    assert "source code only" in done.stdout  # what nobody compared with the library


def test_a_layout_that_nobody_checked_is_marked(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = "about: A to b.\nsource: the paper\nsteps:\n- rules: [a -> b]\n"
    (tmp_path / "unchecked.yaml").write_text(recipe)
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    assert "not checked" in run("run", "--list").stdout


def test_names_of_torchtitan_before_0_3(tmp_path: Path, ok: Ok) -> None:
    old = [
        *("tok_embeddings", "norm", "output", "layers.0.attention_norm", "layers.0.ffn_norm"),
        *(f"layers.0.attention.w{p}" for p in "qkvo"),
        *(f"layers.0.feed_forward.w{p}" for p in "123"),
    ]
    torch.save({f"{name}.weight": torch.ones(2, 2) for name in old}, tmp_path / "a.pth")
    ok("run", "torchtitan-qwen3", tmp_path / "a.pth", tmp_path / "b.pth")
    found = torch.load(tmp_path / "b.pth")
    assert len(found) == len(old)
    assert {"lm_head.weight", "model.layers.0.self_attn.q_proj.weight"} <= found.keys()
