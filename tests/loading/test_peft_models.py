"""load_into of a model of peft takes an adapter as peft saves it: without its name, or the base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptkit
from ckptkit.core.errors import ModelError


class Wrapped(nn.Module):
    """A layer with an adapter, with the names that peft gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(5, 4)
        self.lora_A = nn.ModuleDict({"style": nn.Linear(5, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"style": nn.Linear(2, 4, bias=False)})


class PeftModel(nn.Module):
    active_adapter = "style"
    peft_config = {"style": object()}

    def __init__(self) -> None:
        super().__init__()
        net = nn.Module()
        net.fc = Wrapped()
        net.head = nn.Module()
        net.head.modules_to_save = nn.ModuleDict({"style": nn.Linear(3, 3)})
        net.head.original_module = nn.Linear(3, 3)
        self.base_model = nn.Module()
        self.base_model.model = net


def adapter(folder: Path, *, without: str = "nothing") -> Path:
    shapes = {
        "fc.lora_A.weight": (2, 5),
        "fc.lora_B.weight": (4, 2),
        "head.weight": (3, 3),
        "head.bias": (3,),
    }
    tensors = {f"base_model.model.{n}": torch.rand(s) for n, s in shapes.items() if n != without}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_fills_its_own_parameters_alone(tmp_path: Path) -> None:
    model = PeftModel()
    base = {name: value.clone() for name, value in model.state_dict().items()}
    report = ckptkit.load_into(model, adapter(tmp_path))
    assert len(report.loaded) == 4
    saved = ckptkit.load(tmp_path / "adapter_model.safetensors")
    net = model.base_model.model
    assert torch.equal(net.fc.lora_A["style"].weight, saved["base_model.model.fc.lora_A.weight"])
    assert torch.equal(net.head.modules_to_save["style"].bias, saved["base_model.model.head.bias"])
    for name in ("fc.base_layer.weight", "head.original_module.weight"):
        assert torch.equal(
            model.state_dict()[f"base_model.model.{name}"], base[f"base_model.model.{name}"]
        )


def test_a_module_with_the_name_of_the_adapter(tmp_path: Path) -> None:
    """peft does not save the ranks of AdaLoRA. The module `style` belongs to the base."""
    model = PeftModel()
    net = model.base_model.model
    net.style = nn.Linear(2, 2)
    net.fc.ranknum = nn.ParameterDict({"style": torch.tensor(2.0)})
    assert len(ckptkit.load_into(model, adapter(tmp_path)).loaded) == 4


def test_tied_tokens_have_several_names(tmp_path: Path) -> None:
    model = PeftModel()
    net, delta = model.base_model.model, nn.ParameterDict({"style": torch.zeros(1, 3)})
    net.one, net.two = nn.Module(), nn.Module()
    net.one.trainable_tokens_delta = net.two.trainable_tokens_delta = delta
    file = adapter(tmp_path) / "adapter_model.safetensors"
    rows = {
        f"base_model.model.{n}.trainable_tokens_delta": torch.ones(1, 3) for n in ("one", "two")
    }
    save_file(ckptkit.load(file) | rows, file)
    ckptkit.load_into(model, tmp_path)
    assert torch.equal(delta["style"], torch.ones(1, 3))


def test_a_bias_under_two_names(tmp_path: Path) -> None:
    """peft saves it twice with `bias="all"` and modules_to_save."""
    model, file = PeftModel(), adapter(tmp_path) / "adapter_model.safetensors"
    saved = ckptkit.load(file)
    bias = saved["base_model.model.head.bias"]
    inside = {f"base_model.model.head.{each}.bias": bias.clone()
              for each in ("modules_to_save.style", "modules_to_save")}  # fmt: skip
    save_file(saved | inside, file)
    ckptkit.load_into(model, tmp_path)
    assert torch.equal(model.base_model.model.head.modules_to_save["style"].bias, bias)


def test_what_an_adapter_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing in the file: .*lora_B\.style"):
        ckptkit.load_into(PeftModel(), adapter(tmp_path, without="fc.lora_B.weight"))
