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
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.compute.operation import stream
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError, UsageError
from ckptkit.lora import changes

Cli = Callable[..., Any]
Weights = dict[str, torch.Tensor]
WEIGHTS = "adapter_model.safetensors"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "peft_version": "0.21.2"}


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return multiples of 1/64 whose products and sums are exact in float32.

    torch multiplies small matrices in another order than large ones.
    """
    return (torch.randint(-40, 41, shape) / 64).to(dtype)


def factors(path: str, rows: int, columns: int, rank: int = 2) -> Weights:
    return {
        f"{path}.lora_A.weight": values(rank, columns),
        f"{path}.lora_B.weight": values(rows, rank),
    }


def adapter(folder: Path, tensors: Weights, name: str = "adapter", **config: Any) -> Path:
    path = folder / name
    path.mkdir()
    prefixed = {f"base_model.model.{key}": each for key, each in tensors.items()}
    save_file(prefixed, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return path


def base(folder: Path, tensors: Weights, **config: Any) -> Path:
    path = folder / "base"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": False} | config))
    return path


def merged(folder: Path, base: Path, *adapters: Path, **options: Any) -> Weights:
    out = folder / "out.safetensors"
    ckptkit.save(ckptkit.merge_lora(base, list(adapters), **options), out, force=True)
    return load_file(out)


def delta(tensors: Weights, path: str, scale: float = 3.0) -> torch.Tensor:
    made: torch.Tensor = (
        tensors[f"{path}.lora_B.weight"].float() @ tensors[f"{path}.lora_A.weight"].float()
    )
    return made * scale


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
        weight = values(*change.T.shape)
        (folder := tmp_path / method).mkdir()
        config = {"peft_type": method, "fan_in_fan_out": True, "init_r": 2, "alpha": 6}
        own = adapter(folder, tensors, **config)
        if method == "VERA":
            saved = {
                k.replace("model.vera", "vera"): t for k, t in load_file(own / WEIGHTS).items()
            }
            save_file(saved, own / WEIGHTS)
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
    weight, tensors, factor = values(4, 4), factors(name, 4, 4), {f"{name}.ia3_l": values(4, 1)}
    held = {f"{name}.weight": weight, f"{name}.bias": values(4)}
    if sibling:
        held |= {"attn.c_attn.weight": values(*sibling), "attn.c_attn.bias": values(12)}
    path = base(tmp_path, held, **config)
    lora = adapter(tmp_path, tensors, "lora", fan_in_fan_out=given)
    ia3 = adapter(tmp_path, factor, "ia3", peft_type="IA3", fan_in_fan_out=given)
    if is_turned is None:
        for own in (lora, ia3):
            with pytest.raises(UnsupportedError, match=r"c_proj\.weight' is \[in, out\] or"):
                merged(tmp_path, path, own)
        return
    change, numbers = delta(tensors, name), factor[f"{name}.ia3_l"]
    seen = merged(tmp_path, path, lora)[f"{name}.weight"]
    assert torch.equal(seen, weight + (change.T if is_turned else change))
    seen = merged(tmp_path, path, ia3)[f"{name}.weight"]
    assert torch.equal(seen, weight * (numbers.T if is_turned else numbers))


def test_kronecker_product_of_a_convolution_of_one_dimension(tmp_path: Path) -> None:
    """torch.kron inserts the missing dimension of w1 in front."""
    one, two, weight = values(2, 3), values(4, 5, 3), values(8, 15, 3)
    config = {"peft_type": "LOKR", "alpha": 2}
    own = adapter(tmp_path, {"c.lokr_w1": one, "c.lokr_w2": two}, **config)
    made = merged(tmp_path, base(tmp_path, {"c.weight": weight}), own)
    assert torch.equal(made["c.weight"], weight + torch.kron(one, two).reshape(8, 15, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 40, 41])
def test_tiles_have_the_bits_of_the_whole(
    rows: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 8 rows here; fewer last rows belong to the tile before them."""
    monkeypatch.setattr(changes, "TILE", 1)
    weight, tensors = values(rows, 33, dtype=dtype), factors("fc", rows, 33)
    path = base(tmp_path, {"fc.weight": weight})
    seen = merged(tmp_path, path, adapter(tmp_path, tensors))
    assert torch.equal(seen["fc.weight"], (weight.float() + delta(tensors, "fc")).to(dtype))


@pytest.mark.parametrize(
    ("rows", "columns", "rank"),
    [(70, 90, 128), (70, 90, 129), (70, 90, 300), (130, 4096, 300), (2, 4096, 8), (3, 4096, 16)],
)
def test_sums_have_the_bits_of_torch(rows: int, columns: int, rank: int, tmp_path: Path) -> None:
    """torch sums fewer than 8 rows in another order than more rows, and at high ranks 64."""
    weight, tensors = torch.randn(rows, columns), factors("fc", rows, columns, rank)
    tensors = {name: torch.randn_like(each) for name, each in tensors.items()}
    path = base(tmp_path, {"fc.weight": weight})
    seen = merged(tmp_path, path, adapter(tmp_path, tensors, r=rank, lora_alpha=3 * rank))
    assert torch.equal(seen["fc.weight"], weight + delta(tensors, "fc"))


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
    weight, tensors = values(20, 30), factors("fc", 20, 30)
    tensors["fc.lora_magnitude_vector"] = torch.rand(20)
    value = weight + delta(tensors, "fc")
    norm = torch.linalg.norm(value, dim=1)
    expected = (tensors["fc.lora_magnitude_vector"] / norm)[:, None] * value
    stored = weight.T.contiguous() if is_conv1d else weight
    path = base(tmp_path, {"fc.weight": stored})
    made = adapter(tmp_path, tensors, use_dora=True, fan_in_fan_out=is_conv1d)
    seen = merged(tmp_path, path, made)["fc.weight"]
    torch.testing.assert_close(seen.T if is_conv1d else seen, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first_is_dora", [False, True])
@pytest.mark.parametrize("is_embedding", [False, True])
def test_a_second_dora_takes_its_norms_from_the_unmerged_base(
    first_is_dora: bool, is_embedding: bool, tmp_path: Path
) -> None:
    """As peft 0.21.2 does (tuners/lora/variants.py): the forward of training has these norms."""
    weight, made, value = values(12, 8), [], None
    for name in ("one", "two"):
        magnitude = torch.rand(8 if is_embedding else 12) + 0.5
        if is_embedding:
            a, b = values(2, 12), values(8, 2)
            tensors = {"wte.lora_embedding_A": a, "wte.lora_embedding_B": b}
            path, change, dim = "wte", (b @ a).T * 3, 0
        else:
            tensors = factors("fc", 12, 8)
            path, change, dim = "fc", delta(tensors, "fc"), 1
        before = weight if value is None else value
        value = before + change
        if name == "two" or first_is_dora:
            tensors[f"{path}.lora_magnitude_vector"] = magnitude
            ratio = magnitude / torch.linalg.norm(weight + change, dim=dim)
            value = value * (ratio if is_embedding else ratio[:, None])
        is_dora = f"{path}.lora_magnitude_vector" in tensors
        made.append(adapter(tmp_path, tensors, name, use_dora=is_dora))
    held = base(tmp_path, {f"{path}.weight": weight})
    seen = merged(tmp_path, held, *made)[f"{path}.weight"]
    torch.testing.assert_close(seen, value, rtol=1e-6, atol=1e-6)


def test_casts_are_part_of_the_pass(tmp_path: Path, in_process: Cli) -> None:
    weight, tensors = values(9, 5, dtype=torch.bfloat16), factors("fc", 9, 5)
    path, made = base(tmp_path, {"fc.weight": weight}), adapter(tmp_path, tensors)
    out = tmp_path / "out.safetensors"
    value = (weight.float() + delta(tensors, "fc")).to(torch.bfloat16)
    assert in_process("lora", "merge", path, made, out, "--cast", "float32").code == 0
    assert torch.equal(load_file(out)["fc.weight"], value.float())
    assert in_process("lora", "merge", path, made, out, "--dtype", "fp32", "--force").code == 0
    assert torch.equal(load_file(out)["fc.weight"], weight.float() + delta(tensors, "fc"))


def test_a_copy_of_the_base_does_not_undo_an_earlier_adapter(tmp_path: Path) -> None:
    """peft stores a copy of an embedding or head if the adapter has an update for it."""
    weights = {"lm_head.weight": values(6, 4)}
    copy = {"lm_head.base_layer.weight": weights["lm_head.weight"]}
    one, two = factors("lm_head", 6, 4), factors("lm_head", 6, 4)
    paths = [adapter(tmp_path, each | copy, name) for each, name in ((one, "a"), (two, "b"))]
    out = merged(tmp_path, base(tmp_path, weights), *paths)["lm_head.weight"]
    assert torch.equal(
        out, weights["lm_head.weight"] + delta(one, "lm_head") + delta(two, "lm_head")
    )


def test_patterns_of_an_attention_module_apply_to_its_output(tmp_path: Path) -> None:
    weights = {"mha.in_proj_weight": values(12, 4), "mha.out_proj.weight": values(4, 4)}
    inner, outer = factors("mha.base_layer.out_proj", 4, 4), factors("mha", 12, 4)
    own = adapter(tmp_path, inner | outer, alpha_pattern={"mha": 2, "out_proj": 9})
    out, change = (
        merged(tmp_path, base(tmp_path, weights), own),
        delta(inner, "mha.base_layer.out_proj", 1),
    )
    assert torch.equal(out["mha.out_proj.weight"], weights["mha.out_proj.weight"] + change + change)


# The base


def test_what_is_not_changed_keeps_its_bytes_and_its_order(tmp_path: Path, in_process: Cli) -> None:
    model = {"a.weight": values(4, 3), "fc.weight": values(9, 5), "n": torch.tensor(3)}
    torch.save({"model": model, "epoch": 7}, tmp_path / "run.pth")
    tensors = factors("fc", 9, 5)
    out = tmp_path / "out.pth"
    done = in_process("lora", "merge", tmp_path / "run.pth", adapter(tmp_path, tensors), out)
    assert done.code == 0, done.stderr
    seen = torch.load(out)
    seen = seen.get("model", seen)
    assert list(seen) == list(model)
    assert torch.equal(seen["fc.weight"], model["fc.weight"] + delta(tensors, "fc"))
    assert torch.equal(seen["a.weight"], model["a.weight"]) and seen["n"] == 3


def test_a_folder_stays_a_folder(tmp_path: Path, in_process: Cli) -> None:
    """A folder of one torch file, whose DST has no suffix: config.json comes along."""
    weight, tensors = values(9, 5), factors("fc", 9, 5)
    path = tmp_path / "hub"
    path.mkdir()
    torch.save({"fc.weight": weight}, path / "pytorch_model.bin")
    (path / "config.json").write_text('{"model_type": "llama"}')
    out = tmp_path / "out"
    done = in_process("lora", "merge", path, adapter(tmp_path, tensors), out)
    assert done.code == 0, done.stderr
    assert (out / "config.json").exists()
    seen = ckptkit.load(out)
    assert torch.equal(seen["fc.weight"], weight + delta(tensors, "fc"))


def test_views_and_tied_storages_of_a_torch_file(tmp_path: Path) -> None:
    """A transposed view is changed as the tensor that it is; what shares its memory is not."""
    plain = values(5, 9)
    torch.save({"fc.weight": plain.T, "other": plain}, tmp_path / "run.pth")
    tensors = factors("fc", 9, 5)
    seen = merged(tmp_path, tmp_path / "run.pth", adapter(tmp_path, tensors))
    assert torch.equal(seen["fc.weight"], plain.T + delta(tensors, "fc"))
    assert torch.equal(seen["other"], plain)


@pytest.mark.parametrize(
    ("own", "there"),
    [
        ("transformer.h.0.fc", "h.0.fc"),
        ("h.0.fc", "module.h.0.fc"),
        ("model.language_model.layers.0.q", "language_model.model.layers.0.q"),
    ],
)
def test_prefixes_are_renamed(own: str, there: str, tmp_path: Path) -> None:
    weight, tensors = values(9, 5), factors(own, 9, 5)
    path = base(tmp_path, {f"{there}.weight": weight, "vision.layers.1.q.weight": values(9, 5)})
    made = ckptkit.merge_lora(path, adapter(tmp_path, tensors))
    assert any("renamed modules" in note for note in made.notes)
    assert torch.equal(made.weights[f"{there}.weight"].torch(), weight + delta(tensors, own))


def test_numbers_of_layers_are_never_renamed(tmp_path: Path) -> None:
    path = base(tmp_path, {"model.layers.0.q.weight": values(9, 5)})
    with pytest.raises(UnsupportedError, match=r"layers\.1\.q"):
        ckptkit.merge_lora(path, adapter(tmp_path, factors("model.layers.1.q", 9, 5)))


def test_an_ambiguous_name_is_refused_and_renamed_by_hand(tmp_path: Path) -> None:
    weights = {"a.fc.weight": values(9, 5), "b.fc.weight": values(9, 5)}
    path, tensors = base(tmp_path, weights), factors("fc", 9, 5)
    made = adapter(tmp_path, tensors)
    with pytest.raises(UnsupportedError, match="may be several modules"):
        ckptkit.merge_lora(path, made)
    seen = merged(tmp_path, path, made, sub=[("^fc", "b.fc")])
    assert torch.equal(seen["b.fc.weight"], weights["b.fc.weight"] + delta(tensors, "fc"))
    assert torch.equal(seen["a.fc.weight"], weights["a.fc.weight"])


VISION = {
    "language_model.model.layers.0.self_attn.q_proj": "model.language_model.layers.0.self_attn.q_proj",
    "language_model.model.layers.0.mlp.up_proj": "model.language_model.layers.0.mlp.up_proj",
    "language_model.lm_head": "lm_head",
    "vision_tower.encoder.layers.0.self_attn.q_proj": (
        "model.vision_tower.encoder.layers.0.self_attn.q_proj"
    ),
    "multi_modal_projector.linear_1": "model.multi_modal_projector.linear_1",
}


def test_a_vision_language_model_has_other_names_in_its_files(tmp_path: Path) -> None:
    """The two towers have layers of the same names: each module goes to its own."""
    weights = {f"{name}.weight": values(9, 5) for name in VISION}
    tensors = {k: v for own in VISION.values() for k, v in factors(own, 9, 5).items()}
    path = base(tmp_path, weights)
    made = ckptkit.merge_lora(path, adapter(tmp_path, tensors))
    for name, own in VISION.items():
        seen = made.weights[f"{name}.weight"].torch()
        assert torch.equal(seen, weights[f"{name}.weight"] + delta(tensors, own))


@pytest.mark.parametrize(
    ("own", "there", "word"),
    [
        # One name for two towers.
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
    ],
)  # fmt: skip
def test_ambiguous_towers_are_refused(
    own: list[str], there: list[str], word: str, tmp_path: Path
) -> None:
    path = base(tmp_path, {f"{name}.weight": values(9, 5) for name in there})
    tensors = {k: v for name in own for k, v in factors(name, 9, 5).items()}
    made = adapter(tmp_path, tensors)
    with pytest.raises(UnsupportedError, match=word) as error:
        ckptkit.merge_lora(path, made)
    assert "sub" in str(error.value.hint)


def test_complete_tensors_are_renamed_like_modules(tmp_path: Path) -> None:
    """Heads, projectors and biases of a vision tower; no tensor is added under its old name."""
    weights = {
        f"{name}.{end}": values(*shape)
        for name in VISION
        for end, shape in (("weight", (9, 5)), ("bias", (9,)))
    }
    own = "model.language_model.layers.0.self_attn.q_proj"
    whole = {
        "lm_head.weight": values(9, 5),
        "model.multi_modal_projector.linear_1.weight": values(9, 5),
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.bias": values(9),
        "model.language_model.layers.0.mlp.up_proj.base_layer.bias": values(9),
    }
    saved = ["multi_modal_projector", "lm_head"]
    made = adapter(tmp_path, factors(own, 9, 5) | whole, modules_to_save=saved, bias="all")
    seen = merged(tmp_path, base(tmp_path, weights), made)
    assert seen.keys() == weights.keys()
    names = {own: name for name, own in VISION.items()}
    for name, tensor in whole.items():
        path, _, end = name.replace(".base_layer", "").rpartition(".")
        assert torch.equal(seen[f"{names[path]}.{end}"], tensor), name


def test_an_adapter_of_complete_tensors_is_renamed(tmp_path: Path) -> None:
    path = base(tmp_path, {"h.0.LayerNorm.weight": values(9), "h.0.q.weight": values(9, 5)})
    own = {"bert.h.0.LayerNorm.weight": values(9)}
    seen = merged(tmp_path, path, adapter(tmp_path, own, peft_type="LN_TUNING"))
    assert torch.equal(seen["h.0.LayerNorm.weight"], own["bert.h.0.LayerNorm.weight"])
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"h.0.norm.scale": (9,)}, r"h\.0\.norm\.scale"),
        ({"other.LayerNorm.weight": (9,)}, r"other\.LayerNorm\.weight"),
        ({"fc.mystery_scale": (9,), "fc.lora_A.weight": (2, 5), "fc.lora_B.weight": (9, 2)},
         r"fc\.mystery_scale"),
        ({}, "contains no tensors"),
        ({"fc.original_module.weight": (9, 5)}, "contains no tensors"),
    ],
)  # fmt: skip
def test_tensors_without_a_place_are_refused(
    tensors: dict[str, tuple[int, ...]], word: str, tmp_path: Path
) -> None:
    path = base(tmp_path, {"fc.weight": values(9, 5), "h.0.LayerNorm.weight": values(9)})
    made = adapter(tmp_path, {name: values(*shape) for name, shape in tensors.items()})
    with pytest.raises(UnsupportedError, match=word):
        ckptkit.merge_lora(path, made)
    assert [each.level for each in ckptkit.check_lora(made, base=path).findings][:1] == ["error"]


@pytest.mark.parametrize(
    "config", [{"modules_to_save": ["score"]}, {"task_type": "SEQ_CLS"}, {"modules_to_save": None}]
)
def test_only_new_heads_are_added(config: dict[str, Any], tmp_path: Path) -> None:
    path = base(tmp_path, {"model.fc.weight": values(9, 5)})
    tensors = factors("model.fc", 9, 5) | {"score.weight": values(2, 9)}
    own = adapter(tmp_path, tensors, **config)
    if config == {"modules_to_save": None}:
        with pytest.raises(UnsupportedError, match=r"score\.weight"):
            ckptkit.merge_lora(path, own)
        return
    made = ckptkit.merge_lora(path, own)
    assert torch.equal(made.weights["score.weight"].torch(), tensors["score.weight"])
    assert any("added 'score.weight'" in str(note) for note in made.notes)


def test_a_rename_applies_to_all_modules_with_the_prefix(tmp_path: Path) -> None:
    """The base has model.enc under its own name, so nothing else of the adapter moves."""
    tensors = factors("model.enc.fc1", 9, 5) | factors("model.head.out", 9, 5)
    made = adapter(tmp_path, tensors)
    for number, name in enumerate(("model.dec.out", "out", "model.model.head.out")):
        (folder := tmp_path / str(number)).mkdir()
        path = base(folder, {"model.enc.fc1.weight": values(9, 5), f"{name}.weight": values(9, 5)})
        with pytest.raises(UnsupportedError, match=r"not in the base: 'model\.head\.out'"):
            ckptkit.merge_lora(path, made)


def test_a_module_whose_name_is_that_of_a_wrapper(tmp_path: Path) -> None:
    weights = {"module.fc.weight": values(9, 5), "module.fc.bias": values(9),
               "fc.weight": values(9, 5), "fc.bias": values(9)}  # fmt: skip
    tensors = factors("module.fc", 9, 5) | {"module.fc.base_layer.bias": values(9)}
    seen = merged(tmp_path, base(tmp_path, weights), adapter(tmp_path, tensors, bias="all"))
    expected = weights["module.fc.weight"] + delta(tensors, "module.fc")
    assert torch.equal(seen["module.fc.weight"], expected)
    assert torch.equal(seen["module.fc.bias"], tensors["module.fc.base_layer.bias"])
    assert torch.equal(seen["fc.weight"], weights["fc.weight"])
    assert torch.equal(seen["fc.bias"], weights["fc.bias"])


def test_the_bias_of_an_output_projection(tmp_path: Path) -> None:
    weights = {"attn.in_proj_weight": values(24, 8), "attn.in_proj_bias": values(24),
               "attn.out_proj.weight": values(8, 8), "attn.out_proj.bias": values(8)}  # fmt: skip
    bias = {"attn.base_layer.out_proj.base_layer.bias": values(8),
            "attn.base_layer.in_proj_bias": values(24)}  # fmt: skip
    tensors = factors("attn", 24, 8) | factors("attn.base_layer.out_proj", 8, 8) | bias
    seen = merged(tmp_path, base(tmp_path, weights), adapter(tmp_path, tensors, bias="all"))
    assert seen.keys() == weights.keys()
    for name, tensor in bias.items():
        assert torch.equal(seen[name.replace(".base_layer", "")], tensor)


def test_two_modules_never_change_one_matrix(tmp_path: Path) -> None:
    file = tmp_path / "both.safetensors"
    save_file(factors("unet.conv_in", 9, 5) | factors("unet.input_blocks.0.0", 9, 5), file)
    with pytest.raises(UnsupportedError, match="would both change"):
        ckptkit.merge_lora(base(tmp_path, {"conv_in.weight": values(9, 5)}), file)


def test_a_fused_change_is_cut_into_the_matrices_of_the_base(tmp_path: Path) -> None:
    """qkv of Flux, in a file of kohya, on a base of diffusers; and the other way round."""
    names = [f"transformer_blocks.0.attn.to_{p}" for p in "qkv"]
    split = {f"{name}.weight": values(4, 6) for name in names}
    fused = {"double_blocks.0.img_attn.qkv.weight": torch.cat([*split.values()])}
    tensors = {
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": values(2, 6),
        "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": values(12, 2),
    }
    save_file(tensors, tmp_path / "kohya.safetensors")
    down, up = tensors.values()
    expected = fused["double_blocks.0.img_attn.qkv.weight"] + up @ down
    save_file(split, tmp_path / "split.safetensors")
    seen = merged(tmp_path, tmp_path / "split.safetensors", tmp_path / "kohya.safetensors")
    assert torch.equal(torch.cat([seen[f"{name}.weight"] for name in names]), expected)
    save_file(fused, tmp_path / "fused.safetensors")
    diffusers = {
        f"transformer.{names[1]}.lora_A.weight": down,
        f"transformer.{names[1]}.lora_B.weight": up[4:8].clone(),
    }
    save_file(diffusers, tmp_path / "diffusers.safetensors")
    seen = merged(tmp_path, tmp_path / "fused.safetensors", tmp_path / "diffusers.safetensors")
    (matrix,) = seen.values()
    assert torch.equal(matrix[4:8], expected[4:8])
    assert torch.equal(matrix[:4], split[f"{names[0]}.weight"])


@pytest.mark.parametrize(
    ("memory", "file"),
    [
        ("layers.1.attention.q_proj", "encoder.layer.1.attention.attention.query"),
        ("vit.layers.1.mlp.fc2", "vit.encoder.layer.1.output.dense"),
        ("swin.encoder.layers.0.blocks.1.attention.v_proj",
         "swin.encoder.layers.0.blocks.1.attention.self.value"),
        ("stages.0.blocks.1.mlp.fc1", "segformer.encoder.block.0.1.mlp.dense1"),
        ("model.layers.1.mlp.gate", "model.layers.1.block_sparse_moe.gate"),
    ],
)  # fmt: skip
def test_names_that_transformers_changes_in_memory(tmp_path: Path, memory: str, file: str) -> None:
    weights = {f"{file}.weight": values(6, 4), f"{file}.bias": values(6)}
    tensors, bias = factors(memory, 6, 4), {f"{memory}.base_layer.bias": values(6)}
    out = merged(tmp_path, base(tmp_path, weights), adapter(tmp_path, tensors | bias))
    assert torch.equal(out[f"{file}.weight"], weights[f"{file}.weight"] + delta(tensors, memory))
    assert torch.equal(out[f"{file}.bias"], bias[f"{memory}.base_layer.bias"])
    assert out.keys() == weights.keys()


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
    weight, a, b = values(3, 4, 4), values(6, 4), values(4, 6)
    tensors = {"mlp.experts.lora_A.weight": a, "mlp.experts.lora_B.weight": b}
    path = base(tmp_path, {"mlp.experts.down_proj": weight}, model_type=model_type)
    config = {"target_parameters": ["experts.down_proj"], "peft_version": version}
    seen = merged(tmp_path, path, adapter(tmp_path, tensors, **config))["mlp.experts.down_proj"]
    for number in range(3):
        change = b.reshape(4, 2, 3)[:, :, number] @ a[2 * number : 2 * number + 2] * 3
        assert torch.equal(seen[number], weight[number] + (change.T if is_turned else change))


def test_square_experts_without_a_version_are_refused(tmp_path: Path) -> None:
    tensors = {"experts.lora_A.weight": values(6, 4), "experts.lora_B.weight": values(4, 6)}
    path = base(tmp_path, {"experts.down_proj": values(3, 4, 4)})
    config = {"target_parameters": ["experts.down_proj"], "peft_version": None}
    with pytest.raises(UnsupportedError, match="peft_version"):
        ckptkit.merge_lora(path, adapter(tmp_path, tensors, **config))


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
    gate_up, down = values(3, 12, 4, dtype=dtype), values(3, 4, 6, dtype=dtype)
    held = {f"{stem}.experts.gate_up_proj": gate_up, f"{stem}.experts.down_proj": down,
            f"{stem}.shared.w1.weight": values(6, 4)}  # fmt: skip
    seen = merged(tmp_path, base(tmp_path, held), adapter(tmp_path, tensors))
    for n in (0, 2):
        change = {end: delta(tensors, f"{at}.{n}.{end}").to(dtype).float() for end in sizes}
        both = torch.cat([change["w1"], change["w3"]])
        expected = (gate_up[n].float() + both).to(dtype)
        assert torch.equal(seen[f"{stem}.experts.gate_up_proj"][n], expected)
        expected = (down[n].float() + change["w2"]).to(dtype)
        assert torch.equal(seen[f"{stem}.experts.down_proj"][n], expected)
    assert torch.equal(seen[f"{stem}.experts.gate_up_proj"][1], gate_up[1])


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
    path_of_base = base(tmp_path, {"mlp.experts.down_proj": weight}, model_type=model_type)
    seen = merged(tmp_path, path_of_base, adapter(tmp_path, tensors))["mlp.experts.down_proj"]
    change = delta(tensors, path)
    assert torch.equal(seen[1], weight[1] + (change.T if is_turned else change))
    assert torch.equal(seen[0], weight[0]) and torch.equal(seen[2], weight[2])


@pytest.mark.parametrize(
    ("path", "shape", "model_type", "word"),
    [
        ("mlp.experts.3.up_proj", (3, 12, 4), "qwen3_moe", r"not in .*'mlp\.experts\.3"),
        (
            "mlp.experts.1.up_proj",
            (3, 4, 12),
            "qwen3_moe",
            r"\[6, 4\], but the weight .* \[3, 4, 12",
        ),
        ("mlp.experts.1.up_proj", (3, 12, 4), "aria", r"\[4, 6\], but the weight"),
    ],
)
def test_single_experts_that_do_not_fit(
    path: str, shape: tuple[int, ...], model_type: str, word: str, tmp_path: Path
) -> None:
    held = base(tmp_path, {"mlp.experts.gate_up_proj": values(*shape)}, model_type=model_type)
    with pytest.raises(UnsupportedError, match=word):
        merged(tmp_path, held, adapter(tmp_path, factors(path, 6, 4)))


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    tensors = {"m.experts.lora_A.weight": values(6, 4), "m.experts.lora_B.weight": values(5, 6)}
    names = [f"m.experts.{number}.down_proj.weight" for number in range(2)]
    path = base(tmp_path, {name: values(5, 4) for name in names})
    with pytest.raises(UnsupportedError, match="3 experts, but the base has 2"):
        ckptkit.merge_lora(
            path, adapter(tmp_path, tensors, target_parameters=["experts.down_proj"])
        )


# Ties


@pytest.mark.parametrize("is_stored_twice", [False, True])
def test_tied_embeddings(is_stored_twice: bool, tmp_path: Path, in_process: Cli) -> None:
    weight = values(12, 8)
    weights = {"model.embed_tokens.weight": weight}
    if is_stored_twice:
        weights["lm_head.weight"] = weight.clone()
    path = base(tmp_path, weights, tie_word_embeddings=True, vocab_size=12)
    tensors = factors("lm_head", 12, 8)
    made = adapter(tmp_path, tensors)
    changed = weight + delta(tensors, "lm_head")
    assert "--tied untie" in in_process("lora", "merge", path, made, tmp_path / "no").stderr
    for tied, embedding in (("untie", weight), ("keep", changed)):
        out = tmp_path / tied
        done = in_process("lora", "merge", "--tied", tied, path, made, out, "--ties", "duplicate")
        assert done.code == 0, done.stderr
        seen = load_file(out / "model.safetensors")
        assert torch.equal(seen["model.embed_tokens.weight"], embedding)
        assert torch.equal(seen.get("lm_head.weight", embedding), changed)
        assert ("lm_head.weight" in seen) == (is_stored_twice or tied == "untie")
        config = json.loads((out / "config.json").read_text())
        assert config["tie_word_embeddings"] is (tied == "keep")


@pytest.mark.parametrize("method", ["lora", "both", "whole", "tokens"])
def test_two_equal_copies_stay_two(method: str, tmp_path: Path, in_process: Cli) -> None:
    names, weight = ("lm_head", "model.embed_tokens"), values(12, 8)
    path = base(tmp_path, {f"{n}.weight": weight.clone() for n in names}, tie_word_embeddings=True)
    lora, whole = factors("lm_head", 12, 8), values(12, 8)
    down, up = lora["lm_head.lora_A.weight"], lora["lm_head.lora_B.weight"]
    row = {"model.embed_tokens.token_adapter.trainable_tokens_delta": values(1, 8)}
    embedding = {f"{names[1]}.lora_embedding_A": up.T, f"{names[1]}.lora_embedding_B": down.T}
    tensors: dict[str, Weights] = {
        "lora": lora,
        "both": lora | {name: each.contiguous() for name, each in embedding.items()},
        "whole": {f"{name}.weight": whole.clone() for name in names},
        "tokens": row,
    }
    made = adapter(
        tmp_path, tensors[method], trainable_token_indices=[3],
        ensure_weight_tying=method in ("both", "whole"),
    )  # fmt: skip
    done = in_process("lora", "merge", "--tied", "keep", path, made, tmp_path / "out")
    assert done.code == 0, done.stderr
    seen = load_file(tmp_path / "out/model.safetensors")
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
    weights = {f"{name}.weight": values(6, 4) for name in (embedding, near)}
    weights[f"{stem}.bias"] = values(6)
    path = base(tmp_path, weights, tie_word_embeddings=True)
    memory = head.replace("embed_out", "lm_head")
    tensors, bias = factors(memory, 6, 4), {f"{head}.base_layer.bias": values(6)}
    own = adapter(tmp_path, tensors | (bias if stem != head else {}))
    with pytest.raises(UnsupportedError, match="tied to one matrix"):
        ckptkit.merge_lora(path, own)
    out = merged(tmp_path, path, own, tied="untie")
    old = weights[f"{embedding}.weight"]
    assert torch.equal(out[f"{head}.weight"], old + delta(tensors, memory))
    assert torch.equal(out[f"{embedding}.weight"], old)
    if stem != head:
        assert torch.equal(out[f"{stem}.bias"], bias[f"{head}.base_layer.bias"])
    assert out.keys() == {*weights, f"{head}.weight"}


def test_a_class_without_a_head_has_nothing_tied(tmp_path: Path) -> None:
    weights = {"bert.embeddings.word_embeddings.weight": values(6, 4)}
    tensors = {"bert.embeddings.word_embeddings.weight": values(6, 4)}
    config = {"tie_word_embeddings": True, "architectures": ["BertForSequenceClassification"]}
    out = merged(tmp_path, base(tmp_path, weights, **config), adapter(tmp_path, tensors))
    assert out.keys() == weights.keys()


def test_tokens_of_embeddings_tied_to_a_shared_embedding(tmp_path: Path) -> None:
    """peft saves the trained rows under each name of the tied modules."""
    names, rows = ("shared", "encoder.embed_tokens", "decoder.embed_tokens"), values(1, 4)
    tensors = {f"{name}.trainable_tokens_delta": rows.clone() for name in names}
    weights = {"shared.weight": values(6, 4)}
    own = adapter(tmp_path, tensors, trainable_token_indices={"shared": [2]})
    out = merged(tmp_path, base(tmp_path, weights, tie_word_embeddings=True), own)
    weights["shared.weight"][2] = rows[0]
    assert torch.equal(out["shared.weight"], weights["shared.weight"])


def test_different_matrices_are_not_tied_whatever_the_configuration_says(tmp_path: Path) -> None:
    weights = {"embed_tokens.weight": values(12, 8), "model.lm_head.weight": values(12, 8)}
    path = base(tmp_path, weights, tie_word_embeddings=True)
    tensors = factors("model.lm_head", 12, 8)
    seen = merged(tmp_path, path, adapter(tmp_path, tensors))
    assert torch.equal(seen["embed_tokens.weight"], weights["embed_tokens.weight"])


def test_a_larger_classifier_is_no_vocabulary(tmp_path: Path, in_process: Cli) -> None:
    path = base(tmp_path, {"fc.weight": values(6, 6), "score.weight": values(2, 6)}, vocab_size=12)
    made = adapter(tmp_path, factors("fc", 6, 6) | {"score.weight": values(3, 6)})
    assert in_process("lora", "merge", path, made, tmp_path / "out").code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 12


@pytest.mark.parametrize("name", ["classifier", "classifier.out_proj", "score"])
@pytest.mark.parametrize(("old", "new"), [(2, 3), (5, 3), (3, 2)])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_classifier_with_another_number_of_labels(
    name: str, old: int, new: int, is_new: bool, tmp_path: Path, in_process: Cli
) -> None:
    """transformers counts id2label, and takes num_labels if id2label is null."""
    head = {f"{name}.weight": values(new, 6), f"{name}.bias": values(new)}
    old_head = {f"{name}.weight": values(old, 6), f"{name}.bias": values(old)}
    labels = {str(n): f"L{n}" for n in range(old)}
    more = {"id2label": labels, "label2id": {"L0": 0}} if old != 2 else {}
    path = base(tmp_path, {"fc.weight": values(6, 6)} | ({} if is_new else old_head), **more)
    made = adapter(tmp_path, factors("fc", 6, 6) | head, task_type="SEQ_CLS")
    done = in_process("lora", "merge", path, made, tmp_path / "out")
    assert done.code == 0, done.stderr
    seen = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(seen[key], each) for key, each in head.items())
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["num_labels"] == new and config.get("id2label") is None
    assert config.get("label2id") is None


@pytest.mark.parametrize("end", ["weight", "bias"])
def test_half_a_classifier_is_refused(end: str, tmp_path: Path) -> None:
    head = {"score.weight": values(2, 6), "score.bias": values(2)}
    path = base(tmp_path, {"fc.weight": values(6, 6)} | head)
    new = {"weight": values(3, 6), "bias": values(3)}[end]
    made = adapter(tmp_path, factors("fc", 6, 6) | {f"score.{end}": new})
    with pytest.raises(UnsupportedError, match=rf"score\.{end}' has shape \[3"):
        merged(tmp_path, path, made)


@pytest.mark.parametrize(
    ("stem", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ],
)
def test_configuration_and_new_head_of_a_language_model(
    stem: str, head: str, tmp_path: Path, in_process: Cli
) -> None:
    weights = {f"{stem}embed_tokens.weight": values(12, 8), f"{stem}fc.weight": values(6, 8)}
    text = {"tie_word_embeddings": True, "vocab_size": 12, "hidden_size": 8}
    path = base(tmp_path, weights, text_config=text, tie_word_embeddings=True)
    lora = factors("model.language_model.fc", 6, 8)
    both = {n: values(14, 8) for n in (f"{stem}embed_tokens.weight", head)}
    for name, tensors, rows in (
        ("untied", lora | factors("lm_head", 12, 8), 12),
        ("larger", lora | both, 14),
    ):
        made, out = adapter(tmp_path, tensors, name), tmp_path / f"out-{name}"
        done = in_process("lora", "merge", "--tied", "untie", path, made, out)
        assert done.code == 0, done.stderr
        assert load_file(out / "model.safetensors")[head].shape == (rows, 8)
        config = json.loads((out / "config.json").read_text())
        changed = {"tie_word_embeddings": False, "vocab_size": rows}
        assert config["text_config"] == text | changed
        assert config["tie_word_embeddings"] is False
        assert "vocab_size" not in config


@pytest.mark.parametrize("is_stored_twice", [False, True])
def test_one_larger_matrix_of_a_tied_pair(
    is_stored_twice: bool, tmp_path: Path, in_process: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {"model.embed_tokens.weight": values(12, 8)}
    if is_stored_twice:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
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
    stem: str, word: str, tmp_path: Path, in_process: Cli
) -> None:
    """replicate_layers of peft; the other stacks, also those inside a layer, stay as they are."""
    held = {f"visual.layers.{n}.q.weight": values(4, 4) for n in range(2)}
    held |= {f"{stem}.{n}.moe.layers.0.q.weight": values(4, 4) for n in range(3)}
    config = {word: 3, "layer_types": ["a", "b", "c"]}
    tensors = factors(f"{stem}.2.moe.layers.0.q", 4, 4) | factors("visual.layers.1.q", 4, 4)
    own = adapter(tmp_path, tensors, layer_replication=[[0, 2], [1, 3]])
    done = in_process("lora", "merge", base(tmp_path, held, **config), own, tmp_path / "out")
    assert done.code == 0, done.stderr
    seen = load_file(tmp_path / "out/model.safetensors")
    expected = {k: each for k, each in held.items() if k.startswith("visual")}
    for number, old in enumerate((0, 1, 1, 2)):
        name = f"{stem}.{number}.moe.layers.0.q"
        expected[f"{name}.weight"] = held[f"{stem}.{old}.moe.layers.0.q.weight"]
    for key in ("visual.layers.1.q", f"{stem}.2.moe.layers.0.q"):
        expected[f"{key}.weight"] = expected[f"{key}.weight"] + delta(tensors, key)
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], each) for name, each in expected.items())
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert made[word] == 4 and made["layer_types"] == ["a", "b", "b", "c"]
    assert made.get("num_hidden_layers", 4) == 4


@pytest.mark.parametrize(
    "stems", [("encoder.layers", "decoder.layers"), ("layers", "model.layers")]
)
def test_two_stacks_that_peft_may_repeat_are_refused(
    stems: tuple[str, str], tmp_path: Path
) -> None:
    held = {f"{stem}.{n}.q.weight": values(4, 4) for stem in stems for n in range(2)}
    own = adapter(tmp_path, factors(f"{stems[0]}.0.q", 4, 4), layer_replication=[[0, 2], [0, 1]])
    with pytest.raises(UnsupportedError, match=rf"several stacks of layers: .*'{stems[0]}'"):
        merged(tmp_path, base(tmp_path, held), own)


# What is refused


@pytest.mark.parametrize(
    ("tensors", "config", "error", "word"),
    [
        ({"fc.lora_A.weight": (2, 4), "fc.lora_B.weight": (9, 2)}, {}, UnsupportedError, r"\[9, 4\]"),
        ({"fc.lora_A.weight": (2, 5), "fc.lora_B.weight": (9, 3)}, {}, UnsupportedError, "do not match"),
        ({"fc.lora_A.weight": (3, 5), "fc.lora_B.weight": (9, 3)}, {}, UnsupportedError, "rank 3"),
        ({"fc.lora_A.weight": (2, 5)}, {}, UnsupportedError, "missing"),
        ({"fc.lora_A.weight": (2, 5), "fc.lora_B.weight": (0, 2)}, {}, UnsupportedError, "empty"),
        (
            {"fc.lora_A.weight": (2, 5), "fc.lora_B.weight": (9, 2), "fc.lora_B.bias": (9,)},
            {}, UnsupportedError, "has no bias",
        ),
        ({"fc.lora_A.weight": (2, 5), "fc.lora_B.weight": (9, 2)}, {"r": None}, CorruptError, "'r'"),
        (
            {"fc.lora_A.weight": (2, 5), "fc.lora_B.weight": (9, 2)},
            {"layer_replication": [[0, 10**12]]}, UnsupportedError, "layer_replication",
        ),
    ],
)  # fmt: skip
def test_refused(
    tensors: dict[str, tuple[int, ...]],
    config: dict[str, Any],
    error: type[CkptkitError],
    word: str,
    tmp_path: Path,
) -> None:
    path = base(tmp_path, {"fc.weight": values(9, 5)})
    made = adapter(tmp_path, {name: values(*shape) for name, shape in tensors.items()}, **config)
    with pytest.raises(error, match=word) as found:
        ckptkit.merge_lora(path, made)
    assert "adapter_model.safetensors" in str(found.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_an_adapter_writes_nothing(value: float, tmp_path: Path, in_process: Cli) -> None:
    tensors = factors("fc", 9, 5)
    tensors["fc.lora_B.weight"][8, 1] = value
    path = base(tmp_path, {"fc.weight": values(9, 5)})
    done = in_process("lora", "merge", path, adapter(tmp_path, tensors), tmp_path / "out")
    assert done.code == 3 and "NaN" in done.stderr and "'fc'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_adalora_pruned_to_nothing_changes_nothing(tmp_path: Path) -> None:
    shapes = {"lora_A": (0, 5), "lora_B": (9, 0), "lora_E": (0, 1)}
    tensors = {f"fc.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    weight = values(9, 5)
    made = adapter(tmp_path, tensors, peft_type="ADALORA", init_r=4)
    seen = merged(tmp_path, base(tmp_path, {"fc.weight": weight}), made)
    assert torch.equal(seen["fc.weight"], weight)


def test_a_parameter_that_is_one_matrix(tmp_path: Path) -> None:
    weight, tensors = values(9, 5), factors("fc", 9, 5)
    made = adapter(tmp_path, tensors, target_parameters=["fc.weight"])
    seen = merged(tmp_path, base(tmp_path, {"fc.weight": weight}), made)
    assert torch.equal(seen["fc.weight"], weight + delta(tensors, "fc"))


def test_magnitudes_of_lycoris_in_names_of_comfy(tmp_path: Path) -> None:
    """[1, in]: one for each column."""
    weight, down, up = values(9, 5), values(2, 5), values(9, 2)
    scale = torch.rand(1, 5)
    names = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": scale}
    file = tmp_path / "comfy.safetensors"
    save_file({f"diffusion_model.fc.{name}": each for name, each in names.items()}, file)
    seen = merged(tmp_path, base(tmp_path, {"diffusion_model.fc.weight": weight}), file)
    value = weight + up @ down
    expected = value * (scale / (value.norm(dim=0, keepdim=True) + 2**-23))
    torch.testing.assert_close(seen["diffusion_model.fc.weight"], expected, rtol=1e-6, atol=1e-6)


def test_integers_are_no_factors_and_no_base(tmp_path: Path) -> None:
    tensors = {name: each.to(torch.int8) for name, each in factors("fc", 9, 5).items()}
    path = base(tmp_path, {"fc.weight": values(9, 5), "codes.weight": torch.ones(9, 5).char()})
    with pytest.raises(UnsupportedError, match="requires floats"):
        ckptkit.merge_lora(path, adapter(tmp_path, tensors))
    made = adapter(tmp_path, factors("codes", 9, 5), "second")
    with pytest.raises(UnsupportedError, match="int8"):
        ckptkit.merge_lora(path, made)


def test_weights_of_what_is_no_sum(tmp_path: Path, in_process: Cli) -> None:
    path = base(tmp_path, {"fc.weight": values(9, 5)})
    dora = factors("fc", 9, 5) | {"fc.lora_magnitude_vector": torch.ones(9)}
    made, out = adapter(tmp_path, dora, use_dora=True), tmp_path / "out"
    done = in_process("lora", "merge", "--weight", "0.5", path, made, out)
    assert done.code == 2 and "'fc'" in done.stderr
    done = in_process("lora", "merge", "--weight", "1", "--weight", "1", path, made, out)
    assert done.code == 2 and "--weight" in done.stderr
    with pytest.raises(UsageError, match="finite"):
        ckptkit.merge_lora(path, made, weights=[float("nan")])
    assert not out.exists()


def test_the_numbers_of_a_merge(tmp_path: Path, in_process: Cli) -> None:
    path = base(tmp_path, {"fc.weight": values(9, 5), "other": values(3)})
    made = adapter(tmp_path, factors("fc", 9, 5))
    done = in_process("lora", "merge", "--json", path, made, tmp_path / "out")
    (found,) = json.loads(done.stdout)["adapters"]
    assert found.pop("adapter").startswith(str(made))
    assert found == {"modules": 1, "ranks": [2], "replaced": 0, "unchanged": 1}


def test_unknown_fields_of_a_configuration(tmp_path: Path, in_process: Cli) -> None:
    path = base(tmp_path, {"fc.weight": values(9, 5)})
    made = adapter(tmp_path, factors("fc", 9, 5), use_wonder=True, use_nothing=None)
    done = in_process("lora", "merge", path, made, tmp_path / "out")
    assert done.code == 0 and "use_wonder" in done.stderr and "use_nothing" not in done.stderr
    done = in_process("lora", "merge", "--strict", path, made, tmp_path / "strict")
    assert done.code == 3 and not (tmp_path / "strict").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vera_shares_one_pair_of_matrices(dtype: torch.dtype, tmp_path: Path) -> None:
    """peft 0.21.2 (tuners/vera/layer.py): each module has the first rows and columns of the pair."""
    weights = {"fc.weight": values(9, 5, dtype=dtype), "up.weight": values(4, 7, dtype=dtype)}
    a, b, tensors = values(2, 7), values(9, 2), dict[str, torch.Tensor]()
    expected = {}
    for name, weight in weights.items():
        path, (rows, columns) = name.removesuffix(".weight"), weight.shape
        d, lam = values(2), values(rows)
        tensors |= {f"{path}.vera_lambda_d": d, f"{path}.vera_lambda_b": lam}
        change = (lam[:, None] * b[:rows]) @ (d[:, None] * a[:, :columns])
        expected[name] = (weight.float() + change).to(dtype)
    path = adapter(tmp_path, tensors, peft_type="VERA", save_projection=True)
    file = path / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.vera_A": a, "base_model.vera_B": b}, file)
    seen = merged(tmp_path, base(tmp_path, weights), path)
    assert all(torch.equal(seen[name], each) for name, each in expected.items())
    save_file({"base_model.model.fc.vera_lambda_b": values(9)}, file)
    with pytest.raises(UnsupportedError, match="missing"):
        ckptkit.merge_lora(tmp_path / "base", path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_diagonal_matrices(dtype: torch.dtype, tmp_path: Path) -> None:
    """peft 0.21.2 (BdLoraLinearVariant): row blocks on the diagonal; the change is rounded first."""
    weights = {name: values(6, 8, dtype=dtype) for name in ("q.weight", "o.weight", "x.weight")}
    tensors = {"q.lora_A.weight": values(2, 8), "q.lora_B.weight": values(6, 1),
               "o.lora_A.weight": values(2, 4), "o.lora_B.weight": values(6, 2),
               **factors("x", 6, 8)}  # fmt: skip
    whole = dict(tensors)
    for name in ("q.lora_B.weight", "o.lora_A.weight"):
        whole[name] = torch.block_diag(*tensors[name].chunk(2))
    blocks = {"nblocks": 2, "target_modules_bd_a": ["o"], "target_modules_bd_b": ["q"]}
    path = adapter(tmp_path, tensors, use_bdlora=blocks)
    seen = merged(tmp_path, base(tmp_path, weights), path)
    for name, weight in weights.items():
        change = delta(whole, name.removesuffix(".weight")).to(dtype).float()
        assert torch.equal(seen[name], (weight.float() + change).to(dtype))
    wrong = adapter(tmp_path, tensors, "wrong", use_bdlora=blocks | {"nblocks": 4})
    with pytest.raises(UnsupportedError, match="into 4 blocks"):
        ckptkit.merge_lora(tmp_path / "base", wrong)


def test_a_component_of_a_pipeline(tmp_path: Path) -> None:
    file, weight = tmp_path / "both.safetensors", values(9, 5)
    tensors = factors("unet.fc", 9, 5) | factors("text_encoder.q", 4, 4)
    save_file(tensors, file)
    path = base(tmp_path, {"fc.weight": weight})
    with pytest.raises(UnsupportedError, match=r"text_encoder\.q"):
        ckptkit.merge_lora(path, file)
    seen = merged(tmp_path, path, file, component="unet")
    assert torch.equal(seen["fc.weight"], weight + delta(tensors, "unet.fc", 1.0))


def test_merge_and_average_name_the_command(tmp_path: Path, in_process: Cli) -> None:
    weight, tensors = values(9, 5), factors("fc", 9, 5)
    path, made = base(tmp_path, {"fc.weight": weight}), adapter(tmp_path, tensors)
    done = in_process("average", path, made, tmp_path / "out.safetensors")
    assert done.code == 3 and "ckptkit lora merge" in done.stderr
    command = done.stderr.split("`")[1].split()[1:]
    assert in_process(*command).code == 0
    seen = load_file(command[-1])
    assert torch.equal(seen["fc.weight"], weight + delta(tensors, "fc"))


def test_the_step_of_a_recipe(tmp_path: Path, in_process: Cli) -> None:
    weight, tensors = values(9, 5), factors("fc", 9, 5)
    path, made = base(tmp_path, {"fc.weight": weight}), adapter(tmp_path, tensors)
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out.safetensors"
    step = f"- lora: {{adapter: '{made}', weight: 0.5}}"
    recipe.write_text(f"steps:\n  {step}\n  - cast: float64\n")
    done = in_process("run", recipe, path, out)
    assert done.code == 0, done.stderr
    value = weight + delta(tensors, "fc", 1.5)
    assert torch.equal(load_file(out)["fc.weight"], value.double())
    for wrong in ("{weight: 2}", f"{{adapter: '{made}', weight: x}}"):
        recipe.write_text(f"steps:\n  - lora: {wrong}\n")
        assert in_process("run", recipe, path, tmp_path / "no.safetensors").code == 2


def test_names_of_modules_with_lora(tmp_path: Path) -> None:
    weight, norm = values(4, 3), values(4)
    path = base(tmp_path, {"enc.lora_proj.weight": weight, "enc.lora_block.norm.weight": norm})
    tensors = factors("enc.lora_proj", 4, 3)
    whole = {"enc.lora_proj.base_layer.weight": weight, "enc.lora_block.norm.weight": norm + 1}
    seen = merged(tmp_path, path, adapter(tmp_path, tensors | whole))
    assert torch.equal(seen["enc.lora_proj.weight"], weight + delta(tensors, "enc.lora_proj"))
    assert torch.equal(seen["enc.lora_block.norm.weight"], norm + 1)
    odd = adapter(tmp_path, tensors | {"enc.lora_proj.lora_X.weight": norm}, "odd")
    with pytest.raises(UnsupportedError, match=r"unknown tensors: .*lora_X"):
        merged(tmp_path, path, odd)


@pytest.mark.parametrize("name", ["", "default", "lora_A", "lora_B", "alpha"])
def test_modules_and_adapters_named_like_a_role(name: str, tmp_path: Path) -> None:
    """`name` is the adapter in the names of state_dict(); files of save_pretrained have none."""
    paths = ("lora_A", "fc", "enc.lora_A", "enc.default", "enc.alpha")
    weights = {f"{path}.weight": values(4, 3) for path in paths}
    tensors = {key: each for path in paths for key, each in factors(path, 4, 3).items()}
    named = {key.removesuffix("weight") + f"{name}.weight": each for key, each in tensors.items()}
    own = adapter(tmp_path, named if name else tensors)
    seen = merged(tmp_path, base(tmp_path, weights), own)
    for path in paths:
        key = f"{path}.weight"
        assert torch.equal(seen[key], weights[key] + delta(tensors, path)), path


def test_feedforward_modules_as_a_pattern(tmp_path: Path) -> None:
    weight, factor = values(4, 3), values(4, 1)
    path = base(tmp_path, {"net.fc2.weight": weight})
    options = {"peft_type": "IA3", "feedforward_modules": "fc2"}
    seen = merged(tmp_path, path, adapter(tmp_path, {"net.fc2.ia3_l": factor}, **options))
    assert torch.equal(seen["net.fc2.weight"], weight * factor)
    options["feedforward_modules"] = r".*\.fc2"
    inputs = values(1, 3)
    own = adapter(tmp_path, {"net.fc2.ia3_l": inputs}, "inputs", **options)
    assert torch.equal(merged(tmp_path, path, own)["net.fc2.weight"], weight * inputs)


@pytest.mark.parametrize("prefix", ["transformer._orig_mod.", "_orig_mod.transformer."])
def test_a_compiled_model_of_diffusers(prefix: str, tmp_path: Path) -> None:
    weight, tensors = values(4, 3), factors("blocks.0.q", 4, 3)
    file = tmp_path / "a.safetensors"
    save_file({f"{prefix}{name}": each for name, each in tensors.items()}, file)
    seen = merged(tmp_path, base(tmp_path, {"blocks.0.q.weight": weight}), file)
    assert torch.equal(seen["blocks.0.q.weight"], weight + delta(tensors, "blocks.0.q", 1.0))


def test_a_file_of_only_norms_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"lycoris_blocks_0_q.w_norm": values(4)}, file)
    with pytest.raises(UnsupportedError, match=r"lycoris_blocks_0_q\.w_norm"):
        merged(tmp_path, base(tmp_path, {"blocks.0.q.weight": values(4, 3)}), file)


def test_parameters_without_the_name_of_a_module(tmp_path: Path) -> None:
    q, gate, down = values(4, 3), values(2, 6, 4), values(2, 4, 3)
    at = "mlp.experts"
    held = {"q_proj.weight": q, f"{at}.gate_up_proj": gate, f"{at}.down_proj": down}
    tensors = factors("q_proj", 4, 3) | factors(f"{at}.base_layer", 6, 4, 4) | factors(at, 4, 3, 4)
    names = ["gate_up_proj", "down_proj"]
    own = adapter(tmp_path, tensors, target_parameters=names, target_modules=["q_proj"])
    seen = merged(tmp_path, base(tmp_path, held), own)
    assert torch.equal(seen["q_proj.weight"], q + delta(tensors, "q_proj"))
    assert all(not torch.equal(seen[name], held[name]) for name in held)


def test_biases_go_to_the_rows_of_their_weights(tmp_path: Path) -> None:
    """Flux fuses q, k and v, and swaps the halves of its last modulation."""
    blocks, last = "transformer_blocks.0.attn.to_", "norm_out.linear"
    names = [*(f"{blocks}{each}" for each in "qkv"), last]
    own = {key: each for name in names for key, each in factors(name, 4, 3).items()}
    own |= {f"{name}.lora_B.bias": values(4) for name in names}
    qkv, swapped = "double_blocks.0.img_attn.qkv", "final_layer.adaLN_modulation.1"
    weights = {f"{qkv}.weight": values(12, 3), f"{qkv}.bias": values(12),
               f"{swapped}.weight": values(4, 3), f"{swapped}.bias": values(4)}  # fmt: skip
    there = base(tmp_path, weights)
    made = merged(tmp_path, there, adapter(tmp_path, own, lora_bias=True))
    bias = torch.cat([own[f"{blocks}{each}.lora_B.bias"] for each in "qkv"])
    assert torch.equal(made[f"{qkv}.bias"], weights[f"{qkv}.bias"] + 3 * bias)
    for end, change in (("weight", delta(own, last)), ("bias", 3 * own[f"{last}.lora_B.bias"])):
        expected = weights[f"{swapped}.{end}"] + torch.cat(change.split(2)[::-1])
        assert torch.equal(made[f"{swapped}.{end}"], expected)


@pytest.mark.parametrize("more", ["lora_mid.weight", "diff", "hada_w1_a", "lora_embedding_A"])
def test_two_updates_of_one_module_are_refused(more: str, tmp_path: Path) -> None:
    names = {"lora_down.weight": values(2, 3, 1, 1), "lora_up.weight": values(4, 2, 1, 1)}
    loha = {f"hada_w{n}_{each}": values(4, 4) for n in (1, 2) for each in "ab"}
    path, weight = tmp_path / "one.safetensors", {"unet.conv_in.weight": values(4, 3, 1, 1)}
    tucker = {"lora_mid.weight": values(2, 2, 1, 1), **loha}
    both = names | (tucker if "mid" in more else {more: values(4, 3, 1, 1)})
    save_file({f"lora_unet_conv_in.{key}": each for key, each in both.items()}, path)
    with pytest.raises(UnsupportedError, match="too; the update is ambiguous"):
        ckptkit.merge_lora(base(tmp_path, weight), path)


@pytest.mark.parametrize("names", [["down_proj"], ["experts.down_proj"]])
def test_one_expert_has_as_many_rows_as_the_rank(names: list[str], tmp_path: Path) -> None:
    q, down, at = values(4, 3), values(1, 4, 3), "mlp.experts"
    tensors = factors("q_proj", 4, 3) | factors(at, 4, 3)
    own = adapter(tmp_path, tensors, target_parameters=names, target_modules=["q_proj"])
    held = {"q_proj.weight": q, f"{at}.down_proj": down}
    seen = merged(tmp_path, base(tmp_path, held), own)
    assert torch.equal(seen["q_proj.weight"], q + delta(tensors, "q_proj"))
    assert torch.equal(seen[f"{at}.down_proj"][0], down[0] + delta(tensors, at))


def test_norms_of_columns_need_all_rows(tmp_path: Path) -> None:
    """A base in diffusers' names has q, k and v in three matrices, whose columns are shorter."""
    name, path = "lora_unet_double_blocks_0_img_attn_qkv", tmp_path / "one.safetensors"
    own = {"lora_down.weight": values(2, 3), "lora_up.weight": values(12, 2)}
    own |= {"dora_scale": values(1, 3), "alpha": torch.tensor(2.0)}
    save_file({f"{name}.{key}": each for key, each in own.items()}, path)
    weights = {f"transformer_blocks.0.attn.to_{each}.weight": values(4, 3) for each in "qkv"}
    with pytest.raises(UnsupportedError, match="magnitude for each column"):
        ckptkit.merge_lora(base(tmp_path, weights), path)
