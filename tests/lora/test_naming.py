"""Names of modules of image models: two spellings, underscores, and where they are in a base."""

from __future__ import annotations

import pytest

from ckptkit.core.errors import AmbiguousError, UnsupportedError
from ckptkit.lora.naming import DIFFUSERS, FLUX, ORIGINAL, UNET, BaseNames, Part, dotted, spelled

# Pairs from the conversion scripts of diffusers, for both kinds of U-Net.
PAIRS = {
    "input_blocks.0.0": "conv_in",
    "time_embed.0": "time_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "out.2": "conv_out",
    "input_blocks.1.0.in_layers.2": "down_blocks.0.resnets.0.conv1",
    "input_blocks.8.0.out_layers.3": "down_blocks.2.resnets.1.conv2",
    "input_blocks.4.0.skip_connection": "down_blocks.1.resnets.0.conv_shortcut",
    "input_blocks.11.0.emb_layers.1": "down_blocks.3.resnets.1.time_emb_proj",
    "input_blocks.2.1.proj_in": "down_blocks.0.attentions.1.proj_in",
    "input_blocks.3.0.op": "down_blocks.0.downsamplers.0.conv",
    "input_blocks.9.0.op": "down_blocks.2.downsamplers.0.conv",
    "middle_block.0.in_layers.2": "mid_block.resnets.0.conv1",
    "middle_block.1.transformer_blocks.0.attn1.to_out.0": (
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0"
    ),
    "middle_block.2.out_layers.3": "mid_block.resnets.1.conv2",
    "output_blocks.0.0.in_layers.2": "up_blocks.0.resnets.0.conv1",
    "output_blocks.5.1.proj_out": "up_blocks.1.attentions.2.proj_out",
    "output_blocks.5.2.conv": "up_blocks.1.upsamplers.0.conv",
    "output_blocks.11.0.skip_connection": "up_blocks.3.resnets.2.conv_shortcut",
    "double_blocks.7.img_attn.proj": "transformer_blocks.7.attn.to_out.0",
    "double_blocks.7.txt_mlp.0": "transformer_blocks.7.ff_context.net.0.proj",
    "single_blocks.37.linear2": "single_transformer_blocks.37.proj_out",
    "single_blocks.2.modulation.lin": "single_transformer_blocks.2.norm.linear",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out",
}


@pytest.mark.parametrize(("original", "diffusers"), PAIRS.items())
def test_both_ways(original: str, diffusers: str) -> None:
    there, back = spelled(original), spelled(diffusers)
    assert there and back
    assert there[1:] == (ORIGINAL, ((Part(diffusers),),))
    assert back[:2] == (there[0], DIFFUSERS)
    assert back[2][0] == (Part(original),)


def test_the_block_before_an_upsampler_may_have_no_attention() -> None:
    known = spelled("up_blocks.0.upsamplers.0.conv")
    assert known and known[0] == UNET
    assert [way[0].name for way in known[2]] == ["output_blocks.2.2.conv", "output_blocks.2.1.conv"]
    one = spelled("output_blocks.2.1.conv")
    assert one and one[2] == ((Part("up_blocks.0.upsamplers.0.conv"),),)


def test_fused_matrices_are_cut_by_rows() -> None:
    known = spelled("single_blocks.4.linear1")
    assert known and known[0] == FLUX
    assert [(part.name.split("blocks.4.")[1], *part[1:4]) for part in known[2][0]] == [
        ("attn.to_q", 0, 1, 7), ("attn.to_k", 1, 1, 7), ("attn.to_v", 2, 1, 7),
        ("proj_mlp", 3, 4, 7),
    ]  # fmt: skip
    back = spelled("single_transformer_blocks.4.proj_mlp")
    assert back and back[2] == ((Part("single_blocks.4.linear1", 0, 4, 4, 3, 7),),)


def test_halves_change_places() -> None:
    known = spelled("norm_out.linear")
    name = "final_layer.adaLN_modulation.1"
    assert known and known[2] == ((Part(name, 0, 1, 2, 1, 2), Part(name, 1, 1, 2, 0, 2)),)


def test_other_names_have_one_spelling() -> None:
    assert spelled("model.layers.0.self_attn.q_proj") is None


@pytest.mark.parametrize(
    "name",
    [
        "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_out.0",
        "mid_block.resnets.0.time_emb_proj",
        "up_blocks.1.upsamplers.0.conv",
        "input_blocks.4.1.transformer_blocks.0.ff.net.0.proj",
        "output_blocks.2.2.conv",
        "text_model.encoder.layers.11.self_attn.out_proj",
        "encoder.block.3.layer.0.SelfAttention.q",
        "encoder.block.3.layer.1.DenseReluDense.wi_0",
        "double_blocks.0.img_mod.lin",
        "single_blocks.0.linear1",
        "final_layer.adaLN_modulation.1",
        "transformer_blocks.0.norm1_context.linear",
        "time_text_embed.timestep_embedder.linear_1",
        "blocks.0.cross_attn.k_img",
    ],
)
def test_underscores_that_were_dots(name: str) -> None:
    assert dotted(name.replace(".", "_")) == name


def test_unknown_words_are_not_guessed() -> None:
    with pytest.raises(UnsupportedError) as caught:
        dotted("blocks_0_mlp_in_fc_1")
    assert "base" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("component", "path", "base", "rows"),
    [
        ("unet", "conv_in", "model.diffusion_model.input_blocks.0.0", (0, 6, 0)),
        ("unet", "input_blocks.0.0", "unet.conv_in", (0, 6, 0)),
        ("transformer", "single_transformer_blocks.0.attn.to_k", "single_blocks.0.linear1",
         (0, 6, 6)),
        ("text_encoder", "text_model.encoder.layers.0.mlp.fc1",
         "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1", (0, 6, 0)),
        ("text_encoder_2", "text_model.encoder.layers.0.mlp.fc1",
         "conditioner.embedders.1.model.transformer.resblocks.0.mlp.c_fc", (0, 6, 0)),
    ],
)  # fmt: skip
def test_a_base_of_either_spelling(
    component: str, path: str, base: str, rows: tuple[int, int, int]
) -> None:
    names = BaseNames({f"{base}.weight": (42 if "linear1" in base else 6, 4)})
    for underscores in (False, True):
        name = path.replace(".", "_") if underscores else path
        found = names.find(component, name, (6, 4), underscores=underscores)
        assert [each[:4] for each in found] == [(f"{base}.weight", *rows)]
        assert found[0].rows == names.shapes[f"{base}.weight"][0]


def test_parts_of_a_fused_module() -> None:
    base = {f"transformer_blocks.0.attn.to_{each}.weight": (2, 4) for each in "qkv"}
    found = BaseNames(base).find("transformer", "double_blocks.0.img_attn.qkv", (6, 4))
    assert [(each.start, each.stop, each.at) for each in found] == [(0, 2, 0), (2, 4, 0), (4, 6, 0)]
    assert BaseNames({}).find("transformer", "double_blocks.0.img_attn.qkv", (6, 4)) == ()


def test_openclip_has_q_k_and_v_in_a_parameter() -> None:
    name = "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight"
    names = BaseNames({name: (12, 4)})
    path = "text_model.encoder.layers.0.self_attn.v_proj"
    assert names.find("text_encoder_2", path, (4, 4)) == ((name, 0, 4, 8, 12),)


def test_two_names_with_the_same_underscores() -> None:
    shapes = {"a_b.c.weight": (2, 4), "a.b_c.weight": (2, 3)}
    assert BaseNames(shapes).find("unet", "a_b_c", (2, 3), underscores=True)[0][0] == "a.b_c.weight"
    with pytest.raises(AmbiguousError, match=r"a_b\.c.*a\.b_c") as caught:
        BaseNames({**shapes, "a.b_c.weight": (2, 4)}).find(
            "unet", "a_b_c", (2, 4), underscores=True
        )
    assert caught.value.exit_code == 3


def test_two_text_encoders_without_prefixes_are_not_taken_for_each_other() -> None:
    path = "text_model.encoder.layers.0.mlp.fc1"
    base = {f"{path}.weight": (2, 2)}
    both = BaseNames(base, ("text_encoder", "text_encoder_2"))
    assert both.find("text_encoder_2", path, (2, 2)) == ()
    assert BaseNames(base, ("text_encoder_2",)).find("text_encoder_2", path, (2, 2))
