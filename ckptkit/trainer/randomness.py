"""Random number generators: seed, save and restore their states."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy
import torch

from ckptkit.trainer.config import Config


def seed(config: Config, rank: int = 0) -> None:
    """Seed Python, numpy, torch and all GPUs, differently in each process.

    With ``deterministic``, torch refuses nondeterministic algorithms.
    """
    number = config.seed + rank
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)  # GPUs included
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def state() -> dict[str, Any]:
    """Return the states of all generators, as plain values and tensors."""
    numpys: Any = numpy.random.get_state(legacy=False)
    key = torch.from_numpy(numpys["state"]["key"].astype("int64"))
    return {
        "python": random.getstate(),
        "numpy": {**numpys, "state": {**numpys["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(saved: dict[str, Any]) -> None:
    """Restore the states that :func:`state` returned; missing GPUs are ignored."""
    numpys = saved["numpy"]
    random.setstate(saved["python"])
    numpy.random.set_state(
        {**numpys, "state": {**numpys["state"], "key": numpys["state"]["key"].numpy()}}
    )
    torch.set_rng_state(saved["torch"])
    for device, cuda_state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
