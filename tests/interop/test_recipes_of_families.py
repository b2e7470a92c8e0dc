"""Recipes that ship, against the models of the libraries: they make the names and shapes of these.

The tensors of a tiny model are taken back by the reversed recipe, and made again: every name of the
library must be taken, and every byte come back. What stands on the other side is not checked here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import Ckptkit, assert_same

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: interop)"
)
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "vocab_size": 48, "tie_word_embeddings": False,
}  # fmt: skip
VISION = {"image_size": 8, "patch_size": 4}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip


def causal(model_type: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **more})
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


def vit() -> Any:
    config = transformers.ViTConfig(**{**SIZES, **VISION, "intermediate_size": 24})
    return transformers.ViTForImageClassification(config)


def clip() -> Any:
    text = {
        **SIZES,
        "max_position_embeddings": 16,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**SIZES, **VISION}, projection_dim=16
    )
    return transformers.CLIPModel(config)


def whisper() -> Any:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=48, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=16,
            max_target_positions=16, pad_token_id=0, bos_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    )  # fmt: skip


def vae() -> Any:
    diffusers = pytest.importorskip(
        "diffusers", reason="diffusers is not installed (extra: interop)"
    )
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 16, 16), norm_num_groups=4, sample_size=16, layers_per_block=2,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip


FAMILIES: Mapping[str, Callable[[], Any]] = {
    "meta-llama": causal("llama"),
    "internlm2": causal("llama"),
    "megatron-llama": causal("llama"),
    "phi3": causal("llama"),
    "torchtitan-qwen3": causal("qwen3"),
    "torchtitan-deepseek-v3": causal("deepseek_v3", **MLA),
    "torchtitan-gpt-oss": causal("gpt_oss", num_local_experts=2, num_experts_per_tok=1),
    "mixtral": causal("mixtral", num_local_experts=3),
    "moe-experts": causal(
        "qwen3_moe", num_experts=3, moe_intermediate_size=24, num_experts_per_tok=2
    ),
    "timm-vit": vit,
    "openai-clip": clip,
    "openai-whisper": whisper,
    "ldm-vae": vae,
}
BACK = {"megatron-llama": ("--arg", "pad=16")}
STACKED = ("mixtral", "moe-experts")  # recipes to the layout of the model, not to that of its files


@pytest.mark.parametrize("name", FAMILIES)
def test_the_names_of_the_library_are_made(name: str, ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name]()
    if name in STACKED or not hasattr(model, "base_model_prefix"):
        state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
        save_file(state, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(SIZES))
    else:
        model.save_pretrained(tmp_path)
    there, back = tmp_path / "there.pth", tmp_path / "back.safetensors"
    ckptkit("run", name, tmp_path / "model.safetensors", there, "--reverse", *BACK.get(name, ()))
    ckptkit("run", name, there, back)
    assert_same(load_file(back), load_file(tmp_path / "model.safetensors"))
    assert sorted(torch.load(there)) != sorted(load_file(back))


def test_a_vocabulary_without_padding_goes_back(ckptkit: Ckptkit, tmp_path: Path) -> None:
    FAMILIES["megatron-llama"]().save_pretrained(tmp_path)
    source, back = tmp_path / "model.safetensors", tmp_path / "back.safetensors"
    there = tmp_path / "there.pth"
    ckptkit("run", "megatron-llama", source, there, "--reverse", "--arg", "pad=0")
    rows = torch.load(there)["embedding.word_embeddings.weight"].shape[0]
    assert rows == SIZES["vocab_size"]
    ckptkit("run", "megatron-llama", there, back)
    assert_same(load_file(back), load_file(source))


def test_vision_transformer_of_torchvision_gives_the_outputs_in_timm(
    ckptkit: Ckptkit, tmp_path: Path
) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed (extra: interop)")
    pytest.importorskip("torchvision", reason="torchvision is not installed (extra: interop)")
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    theirs = VisionTransformer(16, 8, 2, 2, 32, 128, num_classes=5).eval()
    torch.nn.init.normal_(theirs.heads.head.weight)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    ckptkit("run", "torchvision-vit", tmp_path / "vit.pth", tmp_path / "out.safetensors")
    ours = timm.models.VisionTransformer(16, 8, num_classes=5, embed_dim=32, depth=2, num_heads=2)
    ours.load_state_dict(load_file(tmp_path / "out.safetensors"))
    picture = torch.rand(1, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(picture), theirs(picture))


def test_densenet_names_are_those_that_torchvision_makes(ckptkit: Ckptkit, tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed (extra: interop)")
    from torchvision.models import densenet

    torch.manual_seed(0)
    model = densenet.DenseNet(8, (2, 2), 8, num_classes=3)
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    old, out = tmp_path / "old.pth", tmp_path / "out.safetensors"
    kept = {name: each for name, each in expected.items() if "num_batches" not in name}
    torch.save(kept, tmp_path / "new.pth")  # a file before 2018 does not count batches
    ckptkit("run", "densenet-2018", tmp_path / "new.pth", old, "--reverse")
    names = torch.load(old).keys()
    assert "features.denseblock1.denselayer1.norm.1.weight" in names
    weights = type("Weights", (), {"get_state_dict": lambda *_, **__: torch.load(old)})()
    again = densenet.DenseNet(8, (2, 2), 8, num_classes=3)
    densenet._load_state_dict(again, weights, progress=False)  # renames what it was to download
    assert_same(again.state_dict(), expected)
    ckptkit("run", "densenet-2018", old, out)
    assert_same(load_file(out), kept)


@pytest.mark.parametrize(("name", "new"), [("falcon", True), ("falcon-7b", False)])
def test_fused_heads_are_those_that_falcon_takes(
    name: str, new: bool, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    """By the method of the model that splits what the fused matrix gives."""
    from transformers.models.falcon.modeling_falcon import FalconAttention

    config = transformers.FalconConfig(
        hidden_size=32, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=new,
        multi_query=True, num_hidden_layers=1, bias=False,
    )  # fmt: skip
    attention = FalconAttention(config, layer_idx=0)
    fused = attention.query_key_value.weight.detach()
    key = "transformer.h.0.self_attention"
    save_file({f"{key}.query_key_value.weight": fused}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    ckptkit("run", name, tmp_path / "model.safetensors", tmp_path / "out.safetensors")
    parts = attention._split_heads(fused.t()[None].contiguous())  # [1, in, heads, head]
    heads = {"q": 4, "k": 2 if new else 1, "v": 2 if new else 1}
    expected = {}
    for (p, count), part in zip(heads.items(), parts, strict=True):
        rows = part[0].flatten(1).t()  # the heads of k and v may be repeated for each query
        step = rows.shape[0] // (count * 8)
        kept = rows.reshape(count, step, 8, 32)[:, 0].reshape(count * 8, 32)
        expected[f"{key}.{p}_proj.weight"] = kept.contiguous()
    assert_same(load_file(tmp_path / "out.safetensors"), expected)


def test_a_megatron_folder_loads_with_from_pretrained(ckptkit: Ckptkit, tmp_path: Path) -> None:
    from tests.formats.parallel.making import mcore, megatron

    said = {
        "normalization": "RMSNorm", "position_embedding_type": "rope", "ffn_hidden_size": 12,
        "max_position_embeddings": 32, "group_query_attention": True, "norm_epsilon": 1e-5, "rotary_base": 10000,
    }  # fmt: skip
    megatron(tmp_path / "in", mcore(2), [[[0]], [[1]]], tp=2, **said)
    ckptkit("run", "megatron-llama", tmp_path / "in", tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values())
    assert model.config.num_key_value_heads == 2 and model.config.vocab_size == 16
    assert torch.equal(
        model.state_dict()["lm_head.weight"],
        load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"],
    )


def test_chatglm_gives_the_parts_that_glm_of_transformers_takes(
    ckptkit: Ckptkit, tmp_path: Path
) -> None:
    """GLM there is ChatGLM with its gate and up still fused; q, k and v as the original splits."""
    from transformers.models.glm.modeling_glm import GlmConfig, GlmMLP

    torch.manual_seed(0)
    config = GlmConfig(hidden_size=32, intermediate_size=24, num_attention_heads=4)
    theirs, qkv = GlmMLP(config), torch.nn.Linear(32, (4 + 2 + 2) * 8)
    layer = "transformer.encoder.layers.0"
    state = {
        f"{layer}.self_attention.query_key_value.weight": qkv.weight.detach(),
        f"{layer}.self_attention.query_key_value.bias": qkv.bias.detach(),
        f"{layer}.mlp.dense_h_to_4h.weight": theirs.gate_up_proj.weight.detach(),
    }
    save_file(state, tmp_path / "model.safetensors")
    said = {"num_attention_heads": 4, "multi_query_group_num": 2}
    (tmp_path / "config.json").write_text(json.dumps(said))
    ckptkit("run", "chatglm", tmp_path / "model.safetensors", tmp_path / "out.safetensors")
    made = load_file(tmp_path / "out.safetensors")
    hidden, linear = torch.randn(1, 3, 32), torch.nn.functional.linear
    with torch.no_grad():
        gate, up = (linear(hidden, made[f"{layer}.mlp.{m}_proj.weight"]) for m in ("gate", "up"))
        ours = theirs.down_proj(up * theirs.activation_fn(gate))
        torch.testing.assert_close(ours, theirs(hidden))
        for p, part in zip("qkv", qkv(hidden).split([32, 16, 16], dim=-1), strict=True):
            name = f"{layer}.self_attention.{p}_proj"
            found = linear(hidden, made[f"{name}.weight"], made[f"{name}.bias"])
            torch.testing.assert_close(found, part)


def test_an_adapter_of_peft_gives_the_outputs_in_diffusers(
    ckptkit: Ckptkit, tmp_path: Path
) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed (extra: interop)")

    def unet() -> Any:
        torch.manual_seed(0)
        return diffusers.UNet2DConditionModel(
            sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=8, attention_head_dim=4,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ).eval()  # fmt: skip

    adapted = ["to_q", "to_k", "to_v", "to_out.0"]
    theirs = peft.get_peft_model(unet(), peft.LoraConfig(r=2, lora_alpha=2, target_modules=adapted))
    for name, weight in theirs.named_parameters():
        if "lora_B" in name:  # which would be zeros
            torch.nn.init.normal_(weight)
    theirs.eval().save_pretrained(tmp_path)
    out = tmp_path / "lora.safetensors"
    ckptkit("run", "peft-diffusers", tmp_path / "adapter_model.safetensors", out)
    ours = unet()
    ours.load_lora_adapter(load_file(out), prefix="unet")
    given = torch.randn(1, 4, 8, 8), torch.tensor(3), torch.randn(1, 2, 8)
    with torch.no_grad():
        expected = theirs(*given).sample
        torch.testing.assert_close(ours(*given).sample, expected)
        assert not torch.allclose(unet()(*given).sample, expected)
