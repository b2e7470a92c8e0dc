"""Checkpoints to look at, made by torch."""

from __future__ import annotations

from pathlib import Path

import torch

HOSTILE = (
    "</script><script>document.title='run'</script>", "<img src=x onerror=document.title='run'>", "<!--", "]]>",
    "\u202egnp.\u202c", "a\nb", "{{data}}", "'\"&amp;", "\u2028line", "__proto__", "__proto__.x", "constructor.name",
    "..", "", "\x1b[31mred", "$x^2$", "ünï", "\ufe0f", "0", "toString",
)  # fmt: skip


def state_dict() -> dict[str, torch.Tensor]:
    """A small transformer with tied weights."""
    torch.manual_seed(0)
    made = {
        f"layers.{n}.{part}.weight": torch.randn(8, 8) for n in range(3) for part in ("attn", "mlp")
    }
    made["embed.weight"] = torch.randn(30, 8)
    made["head.weight"] = made["embed.weight"]
    return made


def training(path: Path) -> Path:
    """A wrapper with an optimizer, a slice of a large storage, and values."""
    weights = state_dict()
    optimizer = {
        "state": {0: {"exp_avg": torch.zeros(30, 8)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    whole = {"model": weights, "optimizer": optimizer, "slice": torch.zeros(1000)[:3], "epoch": 7}
    torch.save(whole, path)
    return path


def other(path: Path) -> Path:
    """The same, renamed, reshaped, changed, without and with more."""
    weights = {key.replace("mlp", "ffn"): tensor.clone() for key, tensor in state_dict().items()}
    weights["layers.0.attn.weight"][0, 0] += 2
    weights["layers.1.attn.weight"] = torch.ones(5, 5)
    del weights["head.weight"]
    weights["extra.bias"] = torch.ones(4)
    torch.save(weights, path)
    return path


def hostile(path: Path) -> Path:
    torch.save({name: torch.tensor([float("nan"), 1.0]) for name in HOSTILE}, path)
    return path


def many(path: Path, tensors: int) -> Path:
    one = torch.zeros(4)
    torch.save(
        {f"blocks.{n // 20}.experts.{n % 20}.w": one[: 1 + n % 3] for n in range(tensors)}, path
    )
    return path
