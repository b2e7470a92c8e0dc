"""The devices of a run."""

from __future__ import annotations

import os

import torch

from ckptkit.trainer.config import Config, RequestError


def available() -> list[str]:
    """Return the devices of this machine that CUDA_VISIBLE_DEVICES does not hide."""
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    return ["cpu", *gpus, *["mps"] * torch.backends.mps.is_available()]


def choose(config: Config) -> tuple[torch.device, ...]:
    """Return the devices of a config, the one that holds the model first.

    Raises RequestError if one does not exist.
    """
    there = available()
    if not config.devices:
        gpus = [name for name in there if name.startswith("cuda")]
        wanted = (gpus[:1] if config.parallel == "none" else gpus) or ["cpu"]
    else:
        wanted = ["cuda:0" if name == "cuda" else name for name in config.devices]
    for name in wanted:
        if name not in there:
            raise RequestError(
                f"there is no device {name} here", hint=f"--devices {', '.join(there)}{_hidden()}"
            )
    _check(config, wanted)
    return tuple(map(torch.device, wanted))


def _hidden() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible} renumbers and hides GPUs)"


def _check(config: Config, wanted: list[str]) -> None:
    if len(set(wanted)) < len(wanted):
        raise RequestError(f"--devices names {max(wanted, key=wanted.count)} twice")
    if len(wanted) == 1:
        return
    if config.parallel == "none":
        raise RequestError(
            f"one device is enough for --parallel none, not {len(wanted)}", hint="--parallel dp"
        )
    others = [name for name in wanted if not name.startswith("cuda")]
    if others:
        raise RequestError(
            f"{others[0]} cannot share the work with other devices",
            hint="--devices names GPUs only, or the CPU only",
        )
