"""The devices of a run."""

from __future__ import annotations

import os

import torch

from ckptkit.trainer.config import Config, RequestError

# Models whose backward pass is not deterministic on GPUs, and the operation that is not. Source:
# torch.use_deterministic_algorithms.
NONDETERMINISTIC = {"generator": "backward pass of ReflectionPad2d", "crnn": "CTC loss"}


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
        names = (gpus[:1] if config.parallel == "none" else gpus) or ["cpu"]
    else:
        names = ["cuda:0" if name == "cuda" else name for name in config.devices]
    for name in names:
        if name not in there:
            raise RequestError(
                f"there is no device {name} here", hint=f"--devices {', '.join(there)}{_hidden()}"
            )
    _check(config, names)
    return tuple(map(torch.device, names))


def _hidden() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible} renumbers and hides GPUs)"


def _check(config: Config, names: list[str]) -> None:
    if config.deterministic and config.model in NONDETERMINISTIC and names[0].startswith("cuda"):
        raise RequestError(
            f"torch has no deterministic {NONDETERMINISTIC[config.model]} for GPUs",
            hint="--devices cpu, or without --deterministic",
        )
    if len(names) == 1:
        return
    if config.parallel == "none":
        raise RequestError(
            f"one device is enough for --parallel none, not {len(names)}", hint="--parallel dp"
        )
    if is_simulated(config, names):
        return
    if len(set(names)) < len(names):
        raise RequestError(f"--devices names {max(names, key=names.count)} twice")
    others = [name for name in names if not name.startswith("cuda")]
    if others:
        raise RequestError(
            f"{others[0]} cannot share the work with other devices",
            hint="--devices names GPUs only, or the CPU only",
        )


def is_simulated(config: Config, names: list[str]) -> bool:
    """Return whether the devices are the CPU several times: DataParallel without GPUs."""
    return config.parallel.startswith("dp") and set(names) == {"cpu"}
