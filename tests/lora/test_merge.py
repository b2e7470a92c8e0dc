"""Merging: the arithmetic beside torch's, names and ties of the base, and what is refused.

The cases of the libraries themselves are in `test_vectors`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.compute.operation import stream
from ckptkit.core.errors import CorruptError, UnsupportedError, UsageError
from ckptkit.lora import changes
from tests.conftest import Run
from tests.lora.adapters import (
    WEIGHTS,
    Shapes,
    Weights,
    adapter,
    assert_same,
    base,
    changed,
    check,
    delta,
    drawn,
    factors,
    merged,
    pair,
    save,
    values,
)

Merged = Callable[..., tuple[Weights, dict[str, Any]]]


@pytest.fixture
def in_folder(in_process: Run, tmp_path: Path) -> Merged:
    """Run `lora merge` into a new folder, and return its tensors and its configuration."""

    def command(*words: object) -> tuple[Weights, dict[str, Any]]:
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        done = in_process("lora", "merge", *words, out)
        assert done.code == 0, done.stderr
        return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())

    return command


# Arithmetic


def test_transposed_updates_of_every_kind(tmp_path: Path) -> None:
    """The weight of a Conv1D is [in, out], so the complete update is transposed."""
    a, b, e = values(2, 6), values(9, 2), values(2, 1)
    one, two = values(2, 2), values(4, 3)
    va, vb, lb, ld = values(2, 7), values(7, 2), values(6), values(2)
    rows = (
        ("ADALORA", {"h.c.lora_A": a, "h.c.lora_B": b, "h.c.lora_E": e}, b @ (a * e) * 6 / 2.00001),
        ("LOKR", {"h.c.lokr_w1": one, "h.c.lokr_w2": two}, torch.kron(one, two) * 3),
        ("VERA", {"vera_A": va, "vera_B": vb, "h.c.vera_lambda_b": lb, "h.c.vera_lambda_d": ld},
         (lb[:, None] * vb[:6]) @ (ld[:, None] * va[:, :5])),
    )  # fmt: skip
    for method, tensors, change in rows:
        weight, folder = values(*change.T.shape), tmp_path / method
        config = {"peft_type": method, "fan_in_fan_out": True, "init_r": 2, "alpha": 6}
        folder.mkdir()
        own = adapter(folder, tensors, **config)
        save(
            own / WEIGHTS,
            {k.replace("model.vera", "vera"): t for k, t in load_file(own / WEIGHTS).items()},
        )
        made = merged(folder, base(folder, {"h.c.weight": weight}), own)["h.c.weight"]
        assert torch.allclose(made, weight + change.T, rtol=1e-6, atol=1e-6), method


@pytest.mark.parametrize(
    ("name", "sibling", "config", "given", "is_turned"),
    [
        ("attn.c_proj", (4, 12), {}, False, True),
        ("attn.c_proj", (12, 4), {"model_type": "gpt2"}, True, False),
        ("attn.c_proj", None, {"model_type": "gpt2"}, False, True),
        ("attn.c_proj", None, {"model_type": "gpt_bigcode"}, False, False),
        ("attn.c_proj", None, {}, False, None),
        ("attn.c_proj", None, {}, True, True),
        ("attn.q_proj", (4, 12), {"model_type": "gpt2"}, False, False),
    ],
)
def test_square_weights_are_transposed_by_the_class_of_the_module(
    name: str, sibling: tuple[int, int] | None, config: dict[str, Any], given: bool,
    is_turned: bool | None, tmp_path: Path,
) -> None:  # fmt: skip
    """peft (dispatch_default in tuners/lora/layer.py) sets fan_in_fan_out by the class. `sibling` is
    the shape of c_attn, which has 12 outputs."""
    weight, tensors, factor = values(4, 4), factors(name, 4, 4), values(4, 1)
    held = {f"{name}.weight": weight, f"{name}.bias": values(4)}
    if sibling:
        held |= {"attn.c_attn.weight": values(*sibling), "attn.c_attn.bias": values(12)}
    path, change = base(tmp_path, held, **config), delta(tensors, name)
    for method, own, expected in (
        ("LORA", tensors, weight + (change.T if is_turned else change)),
        ("IA3", {f"{name}.ia3_l": factor}, weight * (factor.T if is_turned else factor)),
    ):
        made = adapter(tmp_path, own, method, peft_type=method, fan_in_fan_out=given)
        if is_turned is None:
            with pytest.raises(UnsupportedError, match=r"c_proj\.weight' is \[in, out\] or"):
                merged(tmp_path, path, made)
        else:
            assert torch.equal(merged(tmp_path, path, made)[f"{name}.weight"], expected)


def test_kronecker_product_of_a_convolution_of_one_dimension(tmp_path: Path) -> None:
    """torch.kron inserts the missing dimension of w1 in front."""
    one, two, weight = values(2, 3), values(4, 5, 3), values(8, 15, 3)
    expected = {"c.weight": weight + torch.kron(one, two).reshape(8, 15, 3)}
    own = {"c.lokr_w1": one, "c.lokr_w2": two}
    check(tmp_path, {"c.weight": weight}, own, expected, peft_type="LOKR", alpha=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 40, 41])
def test_tiles_have_the_bits_of_the_whole(
    rows: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 8 rows here; fewer last rows belong to the tile before them."""
    monkeypatch.setattr(changes, "TILE", 1)
    check(tmp_path, {"fc.weight": values(rows, 33, dtype=dtype)}, factors("fc", rows, 33))


@pytest.mark.parametrize(
    ("rows", "columns", "rank"),
    [(70, 90, 128), (70, 90, 129), (70, 90, 300), (130, 4096, 300), (2, 4096, 8), (3, 4096, 16)],
)
def test_sums_have_the_bits_of_torch(rows: int, columns: int, rank: int, tmp_path: Path) -> None:
    """torch sums fewer than 8 rows in another order than more rows, and at high ranks 64."""
    tensors = {k: torch.randn_like(each) for k, each in factors("fc", rows, columns, rank).items()}
    weights = {"fc.weight": torch.randn(rows, columns)}
    check(tmp_path, weights, tensors, r=rank, lora_alpha=3 * rank)


def test_any_range_of_bytes_is_that_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "TILE", 1)
    path = base(tmp_path, {"fc.weight": values(41, 5, dtype=torch.bfloat16)})
    made = ckptkit.merge_lora(path, adapter(tmp_path, factors("fc", 41, 5)))
    storage = made.weights["fc.weight"].storage
    assert storage is not None
    extent = storage.record.locate()
    whole = b"".join(stream(extent))
    for start, stop in ((0, 1), (7, 8), (79, 161), (400, 410), (399, 401), (0, 410), (5, 5)):
        assert b"".join(stream(extent, start, stop)) == whole[start:stop]


@pytest.mark.parametrize("is_conv1d", [False, True])
def test_dora_of_rows_and_of_columns(
    is_conv1d: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "HELD", 64)  # a few columns at a time
    monkeypatch.setattr(changes, "TILE", 1)
    weight, tensors, magnitude = values(20, 30), factors("fc", 20, 30), torch.rand(20)
    value = weight + delta(tensors, "fc")
    expected = (magnitude / torch.linalg.norm(value, dim=1))[:, None] * value
    path = base(tmp_path, {"fc.weight": weight.T if is_conv1d else weight})
    tensors["fc.lora_magnitude_vector"] = magnitude
    made = adapter(tmp_path, tensors, use_dora=True, fan_in_fan_out=is_conv1d)
    seen = merged(tmp_path, path, made)["fc.weight"]
    torch.testing.assert_close(seen.T if is_conv1d else seen, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first_is_dora", [False, True])
@pytest.mark.parametrize("is_embedding", [False, True])
def test_a_second_dora_takes_its_norms_from_the_unmerged_base(
    first_is_dora: bool, is_embedding: bool, tmp_path: Path
) -> None:
    """As peft 0.21.2 does (tuners/lora/variants.py): the forward of training has these norms."""
    weight, made = values(12, 8), []
    value = weight
    for name in ("one", "two"):
        tensors, dim = factors("fc", 12, 8), 0 if is_embedding else 1
        change = delta(tensors, "fc")
        if is_embedding:
            a, b = (tensors.pop(f"fc.lora_{role}.weight").T for role in "AB")
            tensors = {"fc.lora_embedding_A": b, "fc.lora_embedding_B": a}
        value = value + change
        if name == "two" or first_is_dora:
            magnitude = torch.rand(8 if is_embedding else 12) + 0.5
            tensors["fc.lora_magnitude_vector"] = magnitude
            value = value * (magnitude / (weight + change).norm(dim=dim)).unsqueeze(dim)
        made.append(adapter(tmp_path, tensors, name, use_dora=len(tensors) > 2))
    seen = merged(tmp_path, base(tmp_path, {"fc.weight": weight}), *made)["fc.weight"]
    torch.testing.assert_close(seen, value, rtol=1e-6, atol=1e-6)


def test_casts_are_part_of_the_pass(tmp_path: Path, in_process: Run) -> None:
    weights, tensors = {"fc.weight": values(9, 5, dtype=torch.bfloat16)}, factors("fc", 9, 5)
    path, made = base(tmp_path, weights), adapter(tmp_path, tensors)
    value, out = changed(weights, tensors)["fc.weight"].float(), tmp_path / "out.safetensors"
    wide = weights["fc.weight"].float() + delta(tensors, "fc")
    for words, expected in ((("--cast", "float32"), value), (("--dtype", "fp32", "--force"), wide)):
        assert in_process("lora", "merge", path, made, out, *words).code == 0
        assert torch.equal(load_file(out)["fc.weight"], expected)


def test_a_copy_of_the_base_does_not_undo_an_earlier_adapter(tmp_path: Path) -> None:
    """peft stores a copy of an embedding or head if the adapter has an update for it."""
    weights = {"lm_head.weight": values(6, 4)}
    copy = {"lm_head.base_layer.weight": weights["lm_head.weight"]}
    one, two = factors("lm_head", 6, 4), factors("lm_head", 6, 4)
    paths = [adapter(tmp_path, each | copy, name) for each, name in ((one, "a"), (two, "b"))]
    seen = merged(tmp_path, base(tmp_path, weights), *paths)
    assert_same(seen, changed(changed(weights, one), two))


def test_patterns_of_an_attention_module_apply_to_its_output(tmp_path: Path) -> None:
    weights = {"mha.in_proj_weight": values(12, 4), "mha.out_proj.weight": values(4, 4)}
    inner, outer = factors("mha.base_layer.out_proj", 4, 4), factors("mha", 12, 4)
    expected = {
        "mha.in_proj_weight": weights["mha.in_proj_weight"] + delta(outer, "mha", 1),
        "mha.out_proj.weight": (
            weights["mha.out_proj.weight"] + 2 * delta(inner, "mha.base_layer.out_proj", 1)
        ),
    }
    alphas = {"mha": 2, "out_proj": 9}
    check(tmp_path, weights, inner | outer, expected, alpha_pattern=alphas)


# The base


def test_what_is_not_changed_keeps_its_bytes_and_its_order(tmp_path: Path, in_process: Run) -> None:
    model = {"a.weight": values(4, 3), "fc.weight": values(9, 5), "n": torch.tensor(3)}
    torch.save({"model": model, "epoch": 7}, tmp_path / "run.pth")
    tensors, out = factors("fc", 9, 5), tmp_path / "out.pth"
    done = in_process("lora", "merge", tmp_path / "run.pth", adapter(tmp_path, tensors), out)
    assert done.code == 0, done.stderr
    seen = torch.load(out)
    seen = seen.get("model", seen)
    assert list(seen) == list(model)
    assert_same(seen, changed(model, tensors))


def test_a_folder_stays_a_folder(tmp_path: Path, in_process: Run) -> None:
    """A folder of one torch file, whose DST has no suffix: config.json comes along."""
    weights, tensors = {"fc.weight": values(9, 5)}, factors("fc", 9, 5)
    path, out = base(tmp_path, {}), tmp_path / "out"
    (path / "model.safetensors").unlink()
    torch.save(weights, path / "pytorch_model.bin")
    done = in_process("lora", "merge", path, adapter(tmp_path, tensors), out)
    assert done.code == 0, done.stderr
    assert (out / "config.json").exists()
    assert_same(dict(ckptkit.load(out)), changed(weights, tensors))


def test_views_and_tied_storages_of_a_torch_file(tmp_path: Path) -> None:
    """A transposed view is changed as the tensor that it is; what shares its memory is not."""
    plain, tensors = values(5, 9), factors("fc", 9, 5)
    weights = {"fc.weight": plain.T, "other": plain}
    torch.save(weights, tmp_path / "run.pth")
    seen = merged(tmp_path, tmp_path / "run.pth", adapter(tmp_path, tensors))
    assert_same(seen, changed(weights, tensors))


VISION = {
    "model.language_model.layers.0.self_attn.q_proj": "language_model.model.layers.0.self_attn.q_proj",
    "model.language_model.layers.0.mlp.up_proj": "language_model.model.layers.0.mlp.up_proj",
    "lm_head": "language_model.lm_head",
    "model.vision_tower.encoder.layers.0.self_attn.q_proj": (
        "vision_tower.encoder.layers.0.self_attn.q_proj"
    ),
    "model.multi_modal_projector.linear_1": "multi_modal_projector.linear_1",
}


@pytest.mark.parametrize(
    "names",
    [
        {"transformer.h.0.fc": "h.0.fc"},
        {"h.0.fc": "module.h.0.fc"},
        {"model.language_model.layers.0.q": "language_model.model.layers.0.q"},
        VISION,  # the two towers have layers of the same names: each module goes to its own
        {"layers.1.attention.q_proj": "encoder.layer.1.attention.attention.query"},
        {"vit.layers.1.mlp.fc2": "vit.encoder.layer.1.output.dense"},
        {"swin.encoder.layers.0.blocks.1.attention.v_proj":
         "swin.encoder.layers.0.blocks.1.attention.self.value"},
        {"stages.0.blocks.1.mlp.fc1": "segformer.encoder.block.0.1.mlp.dense1"},
        {"model.layers.1.mlp.gate": "model.layers.1.block_sparse_moe.gate"},
    ],
)  # fmt: skip
def test_names_in_memory_and_in_files(names: dict[str, str], tmp_path: Path) -> None:
    """Prefixes differ, and transformers renames modules. Biases move with their modules."""
    there = [*names.values(), "vision.layers.1.q"]
    weights = {f"{n}.weight": values(9, 5) for n in there} | {f"{n}.bias": values(9) for n in there}
    tensors = {k: v for own in names for k, v in factors(own, 9, 5).items()}
    bias = {f"{own}.base_layer.bias": values(9) for own in names}
    path, made = base(tmp_path, weights), adapter(tmp_path, tensors | bias, bias="all")
    biases = {f"{names[own]}.bias": bias[f"{own}.base_layer.bias"] for own in names}
    assert_same(merged(tmp_path, path, made), changed(weights, tensors, names) | biases)
    assert any("renamed modules" in note for note in ckptkit.merge_lora(path, made).notes)


def test_a_module_is_renamed_by_hand(tmp_path: Path) -> None:
    weights, tensors = drawn({"a.fc.weight": (9, 5), "b.fc.weight": (9, 5)}), factors("fc", 9, 5)
    path, made = base(tmp_path, weights), adapter(tmp_path, tensors)
    seen = merged(tmp_path, path, made, sub=[("^fc", "b.fc")])
    assert_same(seen, changed(weights, tensors, {"fc": "b.fc"}))


@pytest.mark.parametrize(
    ("own", "there", "word"),
    [
        # One name for two modules.
        (["fc"], ["a.fc", "b.fc"], "may be several modules"),
        (["layers.0.q_proj"], ["vision.layers.0.q_proj", "text.layers.0.q_proj"], "may be several"),
        (["model.layers.0.q_proj"], ["a.model.layers.0.q_proj", "b.model.layers.0.q_proj"],
         "may be several"),
        # Two towers for one name.
        (["x.model.layers.0.q", "y.model.layers.0.q"], ["model.layers.0.q"], "may be several"),
        # The vision tower has another name in the base: its layers are not those of the text.
        (["model.vision_tower.layers.0.q"], ["language_model.layers.0.q"], "are not in"),
        (["vision_tower.layers.0.q"], ["language_model.layers.0.q"], "are not in"),
        # Two renames of one prefix.
        (["model.layers.0.q", "model.layers.0.k"], ["a.model.layers.0.q", "b.model.layers.0.k"],
         "may be several"),
        # Numbers of layers are never renamed.
        (["model.layers.1.q"], ["model.layers.0.q"], r"layers\.1\.q"),
        # The base has model.enc under its own name, so nothing else of the adapter moves.
        *((["model.enc.fc1", "model.head.out"], ["model.enc.fc1", name],
           r"not in the base: 'model\.head\.out'")
          for name in ("model.dec.out", "out", "model.model.head.out")),
    ],
)  # fmt: skip
def test_ambiguous_and_missing_modules_are_refused(
    own: list[str], there: list[str], word: str, tmp_path: Path
) -> None:
    path = base(tmp_path, {f"{name}.weight": values(9, 5) for name in there})
    made = adapter(tmp_path, {k: v for name in own for k, v in factors(name, 9, 5).items()})
    with pytest.raises(UnsupportedError, match=word) as error:
        ckptkit.merge_lora(path, made)
    assert "sub" in str(error.value.hint)


def test_complete_tensors_are_renamed_like_modules(tmp_path: Path) -> None:
    """Heads, projectors and biases of a vision tower; no tensor is added under its old name."""
    weights = drawn({f"{name}.weight": (9, 5) for name in VISION.values()})
    weights |= drawn({f"{name}.bias": (9,) for name in VISION.values()})
    own = "model.language_model.layers.0.self_attn.q_proj"
    tensors, whole = factors(own, 9, 5), drawn({
        "lm_head.weight": (9, 5),
        "model.multi_modal_projector.linear_1.weight": (9, 5),
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.bias": (9,),
        "model.language_model.layers.0.mlp.up_proj.base_layer.bias": (9,),
    })  # fmt: skip
    expected = changed(weights, tensors, VISION)
    for name, tensor in whole.items():
        path, _, end = name.replace(".base_layer", "").rpartition(".")
        expected[f"{VISION[path]}.{end}"] = tensor
    saved = ["multi_modal_projector", "lm_head"]
    check(tmp_path, weights, tensors | whole, expected, modules_to_save=saved, bias="all")


def test_an_adapter_of_complete_tensors_is_renamed(tmp_path: Path) -> None:
    weights, norm = drawn({"h.0.LayerNorm.weight": (9,), "h.0.q.weight": (9, 5)}), values(9)
    own, expected = {"bert.h.0.LayerNorm.weight": norm}, {"h.0.LayerNorm.weight": norm}
    check(tmp_path, weights, own, expected, peft_type="LN_TUNING")


@pytest.mark.parametrize("config", [{"modules_to_save": ["score"]}, {"task_type": "SEQ_CLS"}])
def test_new_heads_are_added(config: dict[str, Any], tmp_path: Path) -> None:
    weights, head = {"model.fc.weight": values(9, 5)}, {"score.weight": values(2, 9)}
    tensors = factors("model.fc", 9, 5)
    check(tmp_path, weights, tensors | head, changed(weights, tensors) | head, **config)
    made = ckptkit.merge_lora(tmp_path / "base", tmp_path / "adapter")
    assert any("added 'score.weight'" in str(note) for note in made.notes)


def test_a_module_whose_name_is_that_of_a_wrapper(tmp_path: Path) -> None:
    weights = drawn({f"{name}.weight": (9, 5) for name in ("module.fc", "fc")})
    weights |= drawn({f"{name}.bias": (9,) for name in ("module.fc", "fc")})
    tensors, bias = factors("module.fc", 9, 5), values(9)
    expected = changed(weights, tensors) | {"module.fc.bias": bias}
    own = tensors | {"module.fc.base_layer.bias": bias}
    check(tmp_path, weights, own, expected, bias="all")


def test_the_bias_of_an_output_projection(tmp_path: Path) -> None:
    weights = drawn(
        {
            "attn.in_proj_weight": (24, 8),
            "attn.in_proj_bias": (24,),
            "attn.out_proj.weight": (8, 8),
            "attn.out_proj.bias": (8,),
        }
    )
    bias = drawn(
        {"attn.base_layer.out_proj.base_layer.bias": (8,), "attn.base_layer.in_proj_bias": (24,)}
    )
    tensors = factors("attn", 24, 8) | factors("attn.base_layer.out_proj", 8, 8) | bias
    seen = merged(tmp_path, base(tmp_path, weights), adapter(tmp_path, tensors, bias="all"))
    assert seen.keys() == weights.keys()
    for name, tensor in bias.items():
        assert torch.equal(seen[name.replace(".base_layer", "")], tensor)


def test_a_fused_change_is_cut_into_the_matrices_of_the_base(tmp_path: Path) -> None:
    """qkv of Flux, in a file of kohya, on a base of diffusers; and the other way round."""
    names = [f"transformer_blocks.0.attn.to_{p}" for p in "qkv"]
    split = {f"{name}.weight": values(4, 6) for name in names}
    fused = {"double_blocks.0.img_attn.qkv.weight": torch.cat([*split.values()])}
    down, up = values(2, 6), values(12, 2)
    expected = fused["double_blocks.0.img_attn.qkv.weight"] + up @ down
    at = "lora_unet_double_blocks_0_img_attn_qkv.lora"
    kohya = save(tmp_path / "kohya", {f"{at}_down.weight": down, f"{at}_up.weight": up})
    seen = merged(tmp_path, save(tmp_path / "split", split), kohya)
    assert torch.equal(torch.cat([seen[f"{name}.weight"] for name in names]), expected)
    at = f"transformer.{names[1]}.lora"
    diffusers = save(tmp_path / "k", {f"{at}_A.weight": down, f"{at}_B.weight": up[4:8]})
    (matrix,) = merged(tmp_path, save(tmp_path / "fused", fused), diffusers).values()
    assert torch.equal(matrix[4:8], expected[4:8])
    assert torch.equal(matrix[:4], split[f"{names[0]}.weight"])


# Experts


@pytest.mark.parametrize(
    ("version", "model_type", "is_turned"),
    [
        ("0.18.1", "qwen3_moe", True),
        ("0.19.0", "qwen3_moe", True),
        ("0.19.0", "gpt_oss", False),
        ("0.19.1", "qwen3_moe", False),
        ("0.19.1", "gpt_oss", True),
        ("0.21.2", "gpt_oss", True),
    ],
)
def test_square_experts_by_the_version_of_peft(
    version: str, model_type: str, is_turned: bool, tmp_path: Path
) -> None:
    weight, tensors = values(3, 4, 4), factors("mlp.experts", 4, 4, 6)
    a, b = (tensors[f"mlp.experts.lora_{role}.weight"] for role in "AB")
    updates = torch.einsum("irn,nrj->nij", b.reshape(4, 2, 3), a.reshape(3, 2, 4)) * 3
    expected = {"mlp.experts.down_proj": weight + (updates.mT if is_turned else updates)}
    config = {"target_parameters": ["experts.down_proj"], "peft_version": version}
    there = {"model_type": model_type}
    check(tmp_path, {"mlp.experts.down_proj": weight}, tensors, expected, there, **config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stem", ["model.layers.1.mlp", "language_model.model.layers.1.mlp"])
def test_an_adapter_of_single_experts_on_fused_experts(
    stem: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """peft 0.21.2 joins the experts of an adapter of transformers 4, and rounds the change first."""
    sizes = {"w1": (6, 4), "w3": (6, 4), "w2": (4, 6)}
    at = "model.layers.1.block_sparse_moe.experts"
    paths = {f"{at}.{n}.{end}": size for n in (0, 2) for end, size in sizes.items()}
    tensors = {k: each for path, size in paths.items() for k, each in factors(path, *size).items()}
    held = {f"{stem}.experts.gate_up_proj": values(3, 12, 4, dtype=dtype),
            f"{stem}.experts.down_proj": values(3, 4, 6, dtype=dtype),
            f"{stem}.shared.w1.weight": values(6, 4)}  # fmt: skip
    expected = {name: each.clone() for name, each in held.items()}
    for n in (0, 2):
        change = {end: delta(tensors, f"{at}.{n}.{end}").to(dtype).float() for end in sizes}
        expected[f"{stem}.experts.gate_up_proj"][n] += torch.cat([change["w1"], change["w3"]])
        expected[f"{stem}.experts.down_proj"][n] += change["w2"]
    check(tmp_path, held, tensors, expected)


@pytest.mark.parametrize(
    ("shape", "model_type", "is_turned"),
    [
        ((3, 4, 6), "mixtral", False),
        ((3, 6, 4), "llama4_text", True),
        ((3, 4, 4), "mixtral", False),
        ((3, 4, 4), "aria", True),
    ],
)
def test_single_experts_on_transposed_experts(
    shape: tuple[int, int, int], model_type: str, is_turned: bool, tmp_path: Path
) -> None:
    weight, path = values(*shape), "mlp.experts.1.down_proj"
    tensors = factors(path, 4, shape[1] if is_turned else shape[2])
    change, made = delta(tensors, path), weight.clone()
    made[1] += change.T if is_turned else change
    name, there = "mlp.experts.down_proj", {"model_type": model_type}
    check(tmp_path, {name: weight}, tensors, {name: made}, there)


@pytest.mark.parametrize("names", [["down_proj"], ["experts.down_proj"]])
def test_one_expert_has_as_many_rows_as_the_rank(names: list[str], tmp_path: Path) -> None:
    at = "mlp.experts"
    held = drawn({"q_proj.weight": (4, 3), f"{at}.down_proj": (1, 4, 3)})
    query, expert = factors("q_proj", 4, 3), factors(at, 4, 3)
    expected = changed(held, query) | {
        f"{at}.down_proj": held[f"{at}.down_proj"] + delta(expert, at)
    }
    config = {"target_parameters": names, "target_modules": ["q_proj"]}
    check(tmp_path, held, query | expert, expected, **config)


def test_parameters_without_the_name_of_a_module(tmp_path: Path) -> None:
    at, names = "mlp.experts", ["gate_up_proj", "down_proj"]
    held = drawn(
        {"q_proj.weight": (4, 3), f"{at}.gate_up_proj": (2, 6, 4), f"{at}.down_proj": (2, 4, 3)}
    )
    query = factors("q_proj", 4, 3)
    tensors = query | factors(f"{at}.base_layer", 6, 4, 4) | factors(at, 4, 3, 4)
    own = adapter(tmp_path, tensors, target_parameters=names, target_modules=["q_proj"])
    seen = merged(tmp_path, base(tmp_path, held), own)
    assert torch.equal(seen["q_proj.weight"], changed(held, query)["q_proj.weight"])
    assert all(not torch.equal(seen[name], held[name]) for name in held)


# Ties


@pytest.mark.parametrize("is_stored_twice", [False, True])
def test_tied_embeddings(
    is_stored_twice: bool, tmp_path: Path, in_process: Run, in_folder: Merged
) -> None:
    weight, tensors = values(12, 8), factors("lm_head", 12, 8)
    weights = {"model.embed_tokens.weight": weight}
    if is_stored_twice:
        weights["lm_head.weight"] = weight.clone()
    path = base(tmp_path, weights, tie_word_embeddings=True, vocab_size=12)
    made, changed = adapter(tmp_path, tensors), weight + delta(tensors, "lm_head")
    assert "--tied untie" in in_process("lora", "merge", path, made, tmp_path / "no").stderr
    for tied, embedding in (("untie", weight), ("keep", changed)):
        seen, config = in_folder("--tied", tied, "--ties", "duplicate", path, made)
        assert torch.equal(seen["model.embed_tokens.weight"], embedding)
        assert torch.equal(seen.get("lm_head.weight", embedding), changed)
        assert ("lm_head.weight" in seen) == (is_stored_twice or tied == "untie")
        assert config["tie_word_embeddings"] is (tied == "keep")


@pytest.mark.parametrize("method", ["lora", "both", "whole", "tokens"])
def test_two_equal_copies_stay_two(method: str, tmp_path: Path, in_folder: Merged) -> None:
    names, weight = ("lm_head", "model.embed_tokens"), values(12, 8)
    path = base(tmp_path, {f"{n}.weight": weight for n in names}, tie_word_embeddings=True)
    lora, whole = factors("lm_head", 12, 8), values(12, 8)
    down, up = lora.values()
    embedding = {f"{names[1]}.lora_embedding_A": up.T, f"{names[1]}.lora_embedding_B": down.T}
    tensors: dict[str, Weights] = {
        "lora": lora,
        "both": lora | embedding,
        "whole": {f"{name}.weight": whole for name in names},
        "tokens": {f"{names[1]}.token_adapter.trainable_tokens_delta": values(1, 8)},
    }
    made = adapter(
        tmp_path, tensors[method], trainable_token_indices=[3],
        ensure_weight_tying=method in ("both", "whole"),
    )  # fmt: skip
    seen, _ = in_folder("--tied", "keep", path, made)
    assert sorted(seen) == [f"{name}.weight" for name in names]
    assert torch.equal(seen["lm_head.weight"], seen["model.embed_tokens.weight"])
    assert not torch.equal(seen["lm_head.weight"], weight)


@pytest.mark.parametrize(
    ("embedding", "near", "head"),
    [
        ("bert.embeddings.word_embeddings", "cls.predictions.transform.dense",
         "cls.predictions.decoder"),
        ("roberta.embeddings.word_embeddings", "lm_head.dense", "lm_head.decoder"),
        ("model.decoder.embed_tokens", "model.encoder.conv1", "proj_out"),
        ("backbone.embeddings", "backbone.norm_f", "lm_head"),
        ("gpt_neox.embed_in", "gpt_neox.fc", "embed_out"),
    ],
)  # fmt: skip
def test_names_of_tied_heads(tmp_path: Path, embedding: str, near: str, head: str) -> None:
    """Files lack a tied head. Its bias is stored beside it."""
    stem = head.removesuffix(".decoder")
    weights = drawn({f"{embedding}.weight": (6, 4), f"{near}.weight": (6, 4), f"{stem}.bias": (6,)})
    path = base(tmp_path, weights, tie_word_embeddings=True)
    memory = head.replace("embed_out", "lm_head")
    tensors, bias = factors(memory, 6, 4), {f"{head}.base_layer.bias": values(6)}
    own = adapter(tmp_path, tensors | (bias if stem != head else {}))
    with pytest.raises(UnsupportedError, match="tied to one matrix"):
        ckptkit.merge_lora(path, own)
    expected = weights | {f"{head}.weight": weights[f"{embedding}.weight"]}
    if stem != head:
        expected[f"{stem}.bias"] = bias[f"{head}.base_layer.bias"]
    seen = merged(tmp_path, path, own, tied="untie")
    assert_same(seen, changed(expected, tensors, {memory: head}))


def test_a_class_without_a_head_has_nothing_tied(tmp_path: Path) -> None:
    name = "bert.embeddings.word_embeddings.weight"
    config = {"tie_word_embeddings": True, "architectures": ["BertForSequenceClassification"]}
    tensors = {name: values(6, 4)}
    check(tmp_path, {name: values(6, 4)}, tensors, tensors, config)


def test_tokens_of_embeddings_tied_to_a_shared_embedding(tmp_path: Path) -> None:
    """peft saves the trained rows under each name of the tied modules."""
    names, rows = ("shared", "encoder.embed_tokens", "decoder.embed_tokens"), values(1, 4)
    tensors = {f"{name}.trainable_tokens_delta": rows for name in names}
    weight = values(6, 4)
    expected = {"shared.weight": torch.cat([weight[:2], rows, weight[3:]])}
    tied, tokens = {"tie_word_embeddings": True}, {"shared": [2]}
    check(
        tmp_path, {"shared.weight": weight}, tensors, expected, tied, trainable_token_indices=tokens
    )


def test_different_matrices_are_not_tied_whatever_the_configuration_says(tmp_path: Path) -> None:
    weights = drawn({"embed_tokens.weight": (12, 8), "model.lm_head.weight": (12, 8)})
    there = {"tie_word_embeddings": True}
    check(tmp_path, weights, factors("model.lm_head", 12, 8), there=there)


def test_a_larger_classifier_is_no_vocabulary(tmp_path: Path, in_folder: Merged) -> None:
    path = base(tmp_path, drawn({"fc.weight": (6, 6), "score.weight": (2, 6)}), vocab_size=12)
    made = adapter(tmp_path, factors("fc", 6, 6) | {"score.weight": values(3, 6)})
    assert in_folder(path, made)[1]["vocab_size"] == 12


@pytest.mark.parametrize("name", ["classifier", "classifier.out_proj", "score"])
@pytest.mark.parametrize(("old", "new"), [(2, 3), (5, 3), (3, 2)])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_classifier_with_another_number_of_labels(
    name: str, old: int, new: int, is_new: bool, tmp_path: Path, in_folder: Merged
) -> None:
    """transformers counts id2label, and takes num_labels if id2label is null."""
    head = drawn({f"{name}.weight": (new, 6), f"{name}.bias": (new,)})
    weights = drawn(
        {"fc.weight": (6, 6)}
        | ({} if is_new else {f"{name}.weight": (old, 6), f"{name}.bias": (old,)})
    )
    labels = {str(n): f"L{n}" for n in range(old)}
    more = {"id2label": labels, "label2id": {"L0": 0}} if old != 2 else {}
    tensors = factors("fc", 6, 6)
    made = adapter(tmp_path, tensors | head, task_type="SEQ_CLS")
    seen, config = in_folder(base(tmp_path, weights, **more), made)
    assert_same(seen, changed(weights, tensors) | head)
    assert config["num_labels"] == new and config.get("id2label") is None
    assert config.get("label2id") is None


@pytest.mark.parametrize(
    ("stem", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ],
)
def test_configuration_and_new_head_of_a_language_model(
    stem: str, head: str, tmp_path: Path, in_folder: Merged
) -> None:
    text = {"tie_word_embeddings": True, "vocab_size": 12, "hidden_size": 8}
    weights = drawn({f"{stem}embed_tokens.weight": (12, 8), f"{stem}fc.weight": (6, 8)})
    path = base(tmp_path, weights, text_config=text, tie_word_embeddings=True)
    lora = factors("model.language_model.fc", 6, 8)
    both = drawn({f"{stem}embed_tokens.weight": (14, 8), head: (14, 8)})
    for name, tensors, rows in (
        ("untied", lora | factors("lm_head", 12, 8), 12),
        ("larger", lora | both, 14),
    ):
        seen, config = in_folder("--tied", "untie", path, adapter(tmp_path, tensors, name))
        assert seen[head].shape == (rows, 8)
        assert config["text_config"] == text | {"tie_word_embeddings": False, "vocab_size": rows}
        assert config["tie_word_embeddings"] is False
        assert "vocab_size" not in config


@pytest.mark.parametrize("is_stored_twice", [False, True])
def test_one_larger_matrix_of_a_tied_pair(
    is_stored_twice: bool, tmp_path: Path, in_process: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {"model.embed_tokens.weight": values(12, 8)}
    if is_stored_twice:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    base(tmp_path, weights, tie_word_embeddings=True, vocab_size=12)
    adapter(tmp_path, {"model.embed_tokens.weight": values(14, 8)})
    refused = in_process("lora", "merge", "base", "adapter", "out")
    assert refused.code == 3
    assert "model.embed_tokens.weight would have 14 rows" in refused.stderr
    command = shlex.split(refused.stderr.partition("`ckptkit ")[2].partition("`")[0])
    assert in_process(*command).code == 0
    assert in_process("lora", "merge", command[-1], "adapter", "out").code == 0
    seen = load_file(tmp_path / "out/model.safetensors")
    assert {each.shape for each in seen.values()} == {(14, 8)} and len(seen) == 2


@pytest.mark.parametrize(
    ("stem", "word"),
    [("model.layers", "num_hidden_layers"), ("h", "n_layer"), ("bert.encoder.layer", "num_layers")],
)
def test_only_the_stack_that_peft_repeats_is_repeated(
    stem: str, word: str, tmp_path: Path, in_folder: Merged
) -> None:
    """replicate_layers of peft; the other stacks, also those inside a layer, stay as they are."""
    held = drawn({f"visual.layers.{n}.q.weight": (4, 4) for n in range(2)})
    expected, end = dict(held), "moe.layers.0.q"
    held |= drawn({f"{stem}.{n}.{end}.weight": (4, 4) for n in range(3)})
    expected |= {
        f"{stem}.{n}.{end}.weight": held[f"{stem}.{old}.{end}.weight"]
        for n, old in enumerate((0, 1, 1, 2))
    }
    tensors = factors(f"{stem}.2.{end}", 4, 4) | factors("visual.layers.1.q", 4, 4)
    own = adapter(tmp_path, tensors, layer_replication=[[0, 2], [1, 3]])
    path = base(tmp_path, held, **{word: 3, "layer_types": ["a", "b", "c"]})
    seen, made = in_folder(path, own)
    assert_same(seen, changed(expected, tensors))
    assert made[word] == 4 and made["layer_types"] == ["a", "b", "b", "c"]
    assert made.get("num_hidden_layers", 4) == 4


# What is refused

FC: Shapes = {"fc.weight": (9, 5), "h.0.LayerNorm.weight": (9,)}
STACKS: Shapes = {
    f"{stem}.{n}.q.weight": (4, 4)
    for stem in ("encoder.layers", "decoder.layers")
    for n in range(2)
}
LAYERS: Shapes = {
    f"{stem}.{n}.q.weight": (4, 4) for stem in ("layers", "model.layers") for n in range(2)
}
SCORE: Shapes = {"fc.weight": (6, 6), "score.weight": (2, 6), "score.bias": (2,)}
DOWN = {"target_parameters": ["experts.down_proj"]}
QWEN, TWICE = {"model_type": "qwen3_moe"}, {"layer_replication": [[0, 2], [0, 1]]}
# A word of the message, shapes of the base and of the adapter, and both configurations.
REFUSED: list[tuple[str, Shapes, Shapes, dict[str, Any], dict[str, Any]]] = [
    (r"\[9, 4\]", FC, pair("fc", 9, 4), {}, {}),
    ("do not match", FC, {**pair("fc", 9, 5), "fc.lora_B.weight": (9, 3)}, {}, {}),
    ("rank 3", FC, pair("fc", 9, 5, 3), {}, {}),
    ("missing", FC, {"fc.lora_A.weight": (2, 5)}, {}, {}),
    ("empty", FC, pair("fc", 0, 5), {}, {}),
    ("has no bias", FC, {**pair("fc", 9, 5), "fc.lora_B.bias": (9,)}, {}, {}),
    ("layer_replication", FC, pair("fc", 9, 5), {"layer_replication": [[0, 10**12]]}, {}),
    # Tensors without a place.
    (r"h\.0\.norm\.scale", FC, {"h.0.norm.scale": (9,)}, {}, {}),
    (r"other\.LayerNorm\.weight", FC, {"other.LayerNorm.weight": (9,)}, {}, {}),
    (r"fc\.mystery_scale", FC, {**pair("fc", 9, 5), "fc.mystery_scale": (9,)}, {}, {}),
    (r"unknown tensors: .*lora_X", FC, {**pair("fc", 9, 5), "fc.lora_X.weight": (9,)}, {}, {}),
    (r"score\.weight", FC, {**pair("fc", 9, 5), "score.weight": (2, 9)}, {}, {}),
    ("contains no tensors", FC, {}, {}, {}),
    ("contains no tensors", FC, {"fc.original_module.weight": (9, 5)}, {}, {}),
    # Experts.
    ("peft_version", {"experts.down_proj": (3, 4, 4)}, pair("experts", 4, 4, 6),
     {**DOWN, "peft_version": None}, {}),
    ("3 experts, but the base has 2", {f"m.experts.{n}.down_proj.weight": (5, 4) for n in range(2)},
     pair("m.experts", 5, 4, 6), DOWN, {}),
    (r"not in .*'mlp\.experts\.3", {"mlp.experts.gate_up_proj": (3, 12, 4)},
     pair("mlp.experts.3.up_proj", 6, 4), {}, QWEN),
    (r"\[6, 4\], but the weight .* \[3, 4, 12", {"mlp.experts.gate_up_proj": (3, 4, 12)},
     pair("mlp.experts.1.up_proj", 6, 4), {}, QWEN),
    (r"\[4, 6\], but the weight", {"mlp.experts.gate_up_proj": (3, 12, 4)},
     pair("mlp.experts.1.up_proj", 6, 4), {}, {"model_type": "aria"}),
    # Half a classifier, and two stacks that peft may repeat.
    (r"score\.weight' has shape \[3", SCORE, {**pair("fc", 6, 6), "score.weight": (3, 6)}, {}, {}),
    (r"score\.bias' has shape \[3", SCORE, {**pair("fc", 6, 6), "score.bias": (3,)}, {}, {}),
    (r"several stacks of layers: .*'encoder.layers'", STACKS, pair("encoder.layers.0.q", 4, 4),
     TWICE, {}),
    (r"several stacks of layers: .*'layers'", LAYERS, pair("layers.0.q", 4, 4), TWICE, {}),
]  # fmt: skip


@pytest.mark.parametrize(("word", "weights", "tensors", "config", "there"), REFUSED)
def test_refused(
    word: str, weights: Shapes, tensors: Shapes, config: dict[str, Any], there: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    path = base(tmp_path, drawn(weights), **there)
    made = adapter(tmp_path, drawn(tensors), **config)
    with pytest.raises(UnsupportedError, match=word) as found:
        ckptkit.merge_lora(path, made)
    assert WEIGHTS in str(found.value)
    assert ckptkit.check_lora(made, base=path).findings[0].level == "error"


def test_a_configuration_without_a_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=rf"{WEIGHTS}.*'r'"):
        check(tmp_path, {"fc.weight": values(9, 5)}, factors("fc", 9, 5), r=None)


KOHYA: Shapes = {"lora_down.weight": (2, 3, 1, 1), "lora_up.weight": (4, 2, 1, 1)}
LOHA: Shapes = {f"hada_w{n}_{each}": (4, 4) for n in (1, 2) for each in "ab"}
IN = "lora_unet_conv_in"
# A word of the message, shapes of the base, and of a file of another layout.
REFUSED_FILES: list[tuple[str, Shapes, Shapes]] = [
    ("would both change", {"conv_in.weight": (9, 5)},
     pair("unet.conv_in", 9, 5) | pair("unet.input_blocks.0.0", 9, 5)),
    (r"text_encoder\.q", {"fc.weight": (9, 5)},
     pair("unet.fc", 9, 5) | pair("text_encoder.q", 4, 4)),
    (r"lycoris_blocks_0_q\.w_norm", {"blocks.0.q.weight": (4, 3)},
     {"lycoris_blocks_0_q.w_norm": (4,)}),
    # A base in diffusers' names has q, k and v in three matrices, whose columns are shorter.
    ("magnitude for each column",
     {f"transformer_blocks.0.attn.to_{each}.weight": (4, 3) for each in "qkv"},
     {f"lora_unet_double_blocks_0_img_attn_qkv.{role}": shape for role, shape in (
         ("lora_down.weight", (2, 3)), ("lora_up.weight", (12, 2)), ("dora_scale", (1, 3)))}),
    *(("too; the update is ambiguous", {"unet.conv_in.weight": (4, 3, 1, 1)},
       {f"{IN}.{role}": shape for role, shape in {**KOHYA, **more}.items()})
      for more in ({"lora_mid.weight": (2, 2, 1, 1), **LOHA}, {"diff": (4, 3, 1, 1)},
                   {"hada_w1_a": (4, 3, 1, 1)}, {"lora_embedding_A": (4, 3, 1, 1)})),
]  # fmt: skip


@pytest.mark.parametrize(("word", "weights", "tensors"), REFUSED_FILES)
def test_refused_files(word: str, weights: Shapes, tensors: Shapes, tmp_path: Path) -> None:
    file = save(tmp_path / "a.safetensors", drawn(tensors))
    with pytest.raises(UnsupportedError, match=word):
        ckptkit.merge_lora(base(tmp_path, drawn(weights)), file)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_an_adapter_writes_nothing(value: float, tmp_path: Path, in_process: Run) -> None:
    tensors = factors("fc", 9, 5)
    tensors["fc.lora_B.weight"][8, 1] = value
    path = base(tmp_path, {"fc.weight": values(9, 5)})
    done = in_process("lora", "merge", path, adapter(tmp_path, tensors), tmp_path / "out")
    assert done.code == 3 and "NaN" in done.stderr and "'fc'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_integers_are_no_factors_and_no_base(tmp_path: Path) -> None:
    codes = {name: each.to(torch.int8) for name, each in factors("fc", 9, 5).items()}
    path = base(tmp_path, {"fc.weight": values(9, 5), "codes.weight": torch.ones(9, 5).char()})
    for word, tensors in (("requires floats", codes), ("int8", factors("codes", 9, 5))):
        with pytest.raises(UnsupportedError, match=word):
            ckptkit.merge_lora(path, adapter(tmp_path, tensors, word[:4]))


def test_weights_of_what_is_no_sum(tmp_path: Path, in_process: Run) -> None:
    path = base(tmp_path, {"fc.weight": values(9, 5)})
    dora = factors("fc", 9, 5) | {"fc.lora_magnitude_vector": torch.ones(9)}
    made, out = adapter(tmp_path, dora, use_dora=True), tmp_path / "out"
    half, two = ("--weight", "0.5"), ("--weight", "1", "--weight", "1")
    for words, named in ((half, "'fc'"), (two, "--weight")):
        done = in_process("lora", "merge", *words, path, made, out)
        assert done.code == 2 and named in done.stderr
    with pytest.raises(UsageError, match="finite"):
        ckptkit.merge_lora(path, made, weights=[float("nan")])
    assert not out.exists()


# Other kinds of adapters


def test_adalora_pruned_to_nothing_changes_nothing(tmp_path: Path) -> None:
    tensors = drawn({"fc.lora_A": (0, 5), "fc.lora_B": (9, 0), "fc.lora_E": (0, 1)})
    weights = {"fc.weight": values(9, 5)}
    check(tmp_path, weights, tensors, {}, peft_type="ADALORA", init_r=4)


def test_a_parameter_that_is_one_matrix(tmp_path: Path) -> None:
    parameters = ["fc.weight"]
    weights = {"fc.weight": values(9, 5)}
    check(tmp_path, weights, factors("fc", 9, 5), target_parameters=parameters)


def test_magnitudes_of_lycoris_in_names_of_comfy(tmp_path: Path) -> None:
    """[1, in]: one for each column."""
    weight, down, up, scale = values(9, 5), values(2, 5), values(9, 2), torch.rand(1, 5)
    names = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": scale}
    tensors = {f"diffusion_model.fc.{name}": each for name, each in names.items()}
    file = save(tmp_path / "comfy.safetensors", tensors)
    seen = merged(tmp_path, base(tmp_path, {"diffusion_model.fc.weight": weight}), file)
    value = weight + up @ down
    expected = value * (scale / (value.norm(dim=0, keepdim=True) + 2**-23))
    torch.testing.assert_close(seen["diffusion_model.fc.weight"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vera_shares_one_pair_of_matrices(dtype: torch.dtype, tmp_path: Path) -> None:
    """peft 0.21.2 (tuners/vera/layer.py): each module has the first rows and columns of the pair."""
    weights = {"fc.weight": values(9, 5, dtype=dtype), "up.weight": values(4, 7, dtype=dtype)}
    a, b, tensors, expected = values(2, 7), values(9, 2), dict[str, torch.Tensor](), {}
    for name, weight in weights.items():
        path, (rows, columns) = name.removesuffix(".weight"), weight.shape
        d, lam = values(2), values(rows)
        tensors |= {f"{path}.vera_lambda_d": d, f"{path}.vera_lambda_b": lam}
        change = (lam[:, None] * b[:rows]) @ (d[:, None] * a[:, :columns])
        expected[name] = (weight.float() + change).to(dtype)
    path = adapter(tmp_path, tensors, peft_type="VERA", save_projection=True)
    file = path / WEIGHTS
    save(file, load_file(file) | {"base_model.vera_A": a, "base_model.vera_B": b})
    assert_same(merged(tmp_path, base(tmp_path, weights), path), expected)
    save(file, {"base_model.model.fc.vera_lambda_b": values(9)})
    with pytest.raises(UnsupportedError, match="missing"):
        ckptkit.merge_lora(tmp_path / "base", path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_diagonal_matrices(dtype: torch.dtype, tmp_path: Path) -> None:
    """peft 0.21.2 (BdLoraLinearVariant): row blocks on the diagonal; the change is rounded first."""
    weights = {name: values(6, 8, dtype=dtype) for name in ("q.weight", "o.weight", "x.weight")}
    tensors = drawn(
        {
            "q.lora_A.weight": (2, 8),
            "q.lora_B.weight": (6, 1),
            "o.lora_A.weight": (2, 4),
            "o.lora_B.weight": (6, 2),
            **pair("x", 6, 8),
        }
    )
    whole, expected = dict(tensors), {}
    for name in ("q.lora_B.weight", "o.lora_A.weight"):
        whole[name] = torch.block_diag(*tensors[name].chunk(2))
    for name, weight in weights.items():
        change = delta(whole, name.removesuffix(".weight")).to(dtype).float()
        expected[name] = (weight.float() + change).to(dtype)
    blocks = {"nblocks": 2, "target_modules_bd_a": ["o"], "target_modules_bd_b": ["q"]}
    check(tmp_path, weights, tensors, expected, use_bdlora=blocks)
    wrong = adapter(tmp_path, tensors, "wrong", use_bdlora=blocks | {"nblocks": 4})
    with pytest.raises(UnsupportedError, match="into 4 blocks"):
        ckptkit.merge_lora(tmp_path / "base", wrong)


def test_feedforward_modules_as_a_pattern(tmp_path: Path) -> None:
    weights = {"net.fc2.weight": values(4, 3)}
    path = base(tmp_path, weights)
    for names, factor in (("fc2", values(4, 1)), (r".*\.fc2", values(1, 3))):
        options = {"peft_type": "IA3", "feedforward_modules": names}
        own = adapter(tmp_path, {"net.fc2.ia3_l": factor}, names[:2], **options)
        expected = {"net.fc2.weight": weights["net.fc2.weight"] * factor}
        assert_same(merged(tmp_path, path, own), expected)


def test_biases_go_to_the_rows_of_their_weights(tmp_path: Path) -> None:
    """Flux fuses q, k and v, and swaps the halves of its last modulation."""
    blocks, last = "transformer_blocks.0.attn.to_", "norm_out.linear"
    names = [*(f"{blocks}{each}" for each in "qkv"), last]
    own = {key: each for name in names for key, each in factors(name, 4, 3).items()}
    own |= drawn({f"{name}.lora_B.bias": (4,) for name in names})
    qkv, swapped = "double_blocks.0.img_attn.qkv", "final_layer.adaLN_modulation.1"
    weights = drawn(
        {
            f"{qkv}.weight": (12, 3),
            f"{qkv}.bias": (12,),
            f"{swapped}.weight": (4, 3),
            f"{swapped}.bias": (4,),
        }
    )
    fused = {"weight": torch.cat([delta(own, name) for name in names[:3]]),
             "bias": 3 * torch.cat([own[f"{name}.lora_B.bias"] for name in names[:3]])}  # fmt: skip
    halves = {"weight": delta(own, last), "bias": 3 * own[f"{last}.lora_B.bias"]}
    expected = {f"{qkv}.{end}": weights[f"{qkv}.{end}"] + each for end, each in fused.items()}
    for end, change in halves.items():
        moved = torch.cat(change.split(2)[::-1])
        expected[f"{swapped}.{end}"] = weights[f"{swapped}.{end}"] + moved
    check(tmp_path, weights, own, expected, lora_bias=True)


# Names of files, and commands


def test_names_of_modules_with_lora(tmp_path: Path) -> None:
    weights = drawn({"enc.lora_proj.weight": (4, 3), "enc.lora_block.norm.weight": (4,)})
    tensors, norm = factors("enc.lora_proj", 4, 3), values(4)
    whole = {"enc.lora_proj.base_layer.weight": weights["enc.lora_proj.weight"],
             "enc.lora_block.norm.weight": norm}  # fmt: skip
    expected = changed(weights, tensors) | {"enc.lora_block.norm.weight": norm}
    check(tmp_path, weights, tensors | whole, expected)


@pytest.mark.parametrize("name", ["", "default", "lora_A", "lora_B", "alpha"])
def test_modules_and_adapters_named_like_a_role(name: str, tmp_path: Path) -> None:
    """`name` is the adapter in the names of state_dict(); files of save_pretrained have none."""
    paths = ("lora_A", "fc", "enc.lora_A", "enc.default", "enc.alpha")
    weights = drawn({f"{path}.weight": (4, 3) for path in paths})
    tensors = {key: each for path in paths for key, each in factors(path, 4, 3).items()}
    named = {key.removesuffix("weight") + f"{name}.weight": each for key, each in tensors.items()}
    check(tmp_path, weights, named if name else tensors, changed(weights, tensors))


@pytest.mark.parametrize("prefix", ["transformer._orig_mod.", "_orig_mod.transformer."])
def test_a_compiled_model_of_diffusers(prefix: str, tmp_path: Path) -> None:
    weights, tensors = {"blocks.0.q.weight": values(4, 3)}, factors("blocks.0.q", 4, 3)
    prefixed = {f"{prefix}{name}": each for name, each in tensors.items()}
    file = save(tmp_path / "a.safetensors", prefixed)
    assert_same(merged(tmp_path, base(tmp_path, weights), file), changed(weights, tensors, scale=1))


def test_a_component_of_a_pipeline(tmp_path: Path) -> None:
    unet, weights = factors("unet.fc", 9, 5), {"fc.weight": values(9, 5)}
    file = save(tmp_path / "both.safetensors", unet | factors("text_encoder.q", 4, 4))
    seen = merged(tmp_path, base(tmp_path, weights), file, component="unet")
    assert_same(seen, changed(weights, unet, {"unet.fc": "fc"}, 1))


def test_the_numbers_of_a_merge_and_unknown_fields(tmp_path: Path, in_process: Run) -> None:
    path = base(tmp_path, drawn({"fc.weight": (9, 5), "other": (3,)}))
    made = adapter(tmp_path, factors("fc", 9, 5), use_wonder=True, use_nothing=None)
    done = in_process("lora", "merge", "--json", path, made, tmp_path / "out")
    (found,) = json.loads(done.stdout)["adapters"]
    assert found.pop("adapter").startswith(str(made))
    assert found == {"modules": 1, "ranks": [2], "replaced": 0, "unchanged": 1}
    assert done.code == 0 and "use_wonder" in done.stderr and "use_nothing" not in done.stderr
    done = in_process("lora", "merge", "--strict", path, made, tmp_path / "strict")
    assert done.code == 3 and not (tmp_path / "strict").exists()


def test_merge_and_average_name_the_command(tmp_path: Path, in_process: Run) -> None:
    weights, tensors = {"fc.weight": values(9, 5)}, factors("fc", 9, 5)
    path, made = base(tmp_path, weights), adapter(tmp_path, tensors)
    done = in_process("average", path, made, tmp_path / "out.safetensors")
    assert done.code == 3 and "ckptkit lora merge" in done.stderr
    command = done.stderr.split("`")[1].split()[1:]
    assert in_process(*command).code == 0
    assert_same(load_file(command[-1]), changed(weights, tensors))


def test_the_step_of_a_recipe(tmp_path: Path, in_process: Run) -> None:
    weights, tensors = {"fc.weight": values(9, 5)}, factors("fc", 9, 5)
    path, made = base(tmp_path, weights), adapter(tmp_path, tensors)
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out.safetensors"
    step = f"- lora: {{adapter: '{made}', weight: 0.5}}"
    recipe.write_text(f"steps:\n  {step}\n  - cast: float64\n")
    done = in_process("run", recipe, path, out)
    assert done.code == 0, done.stderr
    assert torch.equal(
        load_file(out)["fc.weight"], changed(weights, tensors, scale=1.5)["fc.weight"].double()
    )
    for wrong in ("{weight: 2}", f"{{adapter: '{made}', weight: x}}"):
        recipe.write_text(f"steps:\n  - lora: {wrong}\n")
        assert in_process("run", recipe, path, tmp_path / "no.safetensors").code == 2
