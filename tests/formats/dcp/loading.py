"""Loads a folder into a model that is sharded over the processes: run by each of them.

    run_ranks(2, "tests.formats.dcp.loading", FOLDER, FILE)

FILE holds the same state_dict whole.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def main(folder: str, file: str) -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    fully_shard(model)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    expected = torch.load(file, weights_only=True)["model"]
    for name, tensor in model.state_dict().items():
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(found, expected[name]), name
    dist.destroy_process_group()
