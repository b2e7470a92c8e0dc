"""TorchScript made by torch: modules of given tensors, and what torch reads from their files."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

State = dict[str, torch.Tensor]

# What torch says about parts of itself that it does not want to be used any more.
QUIET = [
    pytest.mark.filterwarnings(f"ignore:{said}")
    for said in (
        ".torch.jit.:DeprecationWarning",
        "Lite Interpreter is deprecated:DeprecationWarning",
        "torch.ao.quantization is deprecated:DeprecationWarning",
        "Please use quant_min and quant_max:UserWarning",
        "must run observer before calling calculate_qparams:UserWarning",
    )
]


def module_of(state: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module with this state_dict: what is called ``weight`` is a parameter, all else a buffer.

    Names that methods of modules have, such as ``half``, get an underscore.
    """
    root = nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        last += "_" * hasattr(nn.Module, last)
        if last == "weight" and tensor.is_floating_point():
            module.register_parameter(last, nn.Parameter(tensor))
        else:
            module.register_buffer(last, tensor)
    return root


def script(module: nn.Module, path: Path, **extra: Any) -> Path:
    torch.jit.save(torch.jit.script(module.eval()), path, **extra)
    return path


class Layers(nn.Module):
    """Layers that can be quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dequant(self.fc(self.conv(self.quant(x)).mean([2, 3])))
        return out


def quantized() -> Any:
    """`Layers` with weights of qint8 that are packed together with the biases."""
    torch.manual_seed(0)
    module = Layers().eval()
    module.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    quantization.prepare(module, inplace=True)
    module(torch.randn(2, 1, 5, 5))
    return quantization.convert(module, inplace=True)


class Exportable(nn.Module):
    """A module with something to compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def export(module: nn.Module, path: Path) -> Path:
    """Export a program that holds the module and makes no use of it."""
    program = Exportable()
    program.__dict__.update(
        {part: module.__dict__[part] for part in ("_parameters", "_buffers", "_modules")}
    )
    torch.export.save(torch.export.export(program, (torch.ones(1),)), path)
    return path


def by_torch(path: Path) -> State:
    """The state_dict that torch reads."""
    return dict(torch.jit.load(path, map_location="cpu").state_dict())


def constants_by_torch(path: Path) -> State:
    """The tensors that the code of ``forward`` refers to, by their names."""
    return dict(torch.jit.load(path, map_location="cpu").code_with_constants[1].const_mapping)


def rezipped(path: Path, edit: Callable[[str, bytes], bytes | None]) -> bytes:
    """The archive with other bytes in its records; None leaves one out."""
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            data = edit(name.partition("/")[2], old.read(name))
            if data is not None:
                new.writestr(name, data)
    return made.getvalue()
