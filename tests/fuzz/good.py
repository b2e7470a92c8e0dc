"""Values of Python, numpy and torch that checkpoints hold, one of each kind, as libraries write them."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import io
import itertools
import pathlib
import pickle
import random
import re
import sys
import types
import uuid
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.utils.prune
from torch import nn, optim
from torch.distributed.checkpoint import metadata
from torch.distributed.tensor import Replicate, Shard

from tests.fuzz.trees import Node, read


def seeds() -> list[Node]:
    """Return the trees of good values, as torch.save and pickle write them."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in good():
            for save in (_saved, lambda each: pickle.dumps(each, 4)):
                try:
                    found.append(read(save(value)))
                    break
                except Exception:  # what cannot be pickled, in one of the two ways
                    continue
    return found


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as made_:
        name = next(name for name in made_.namelist() if name.endswith("data.pkl"))
        return made_.read(name)


def good() -> Iterator[Any]:
    """Yield values of Python, numpy and torch that checkpoints hold, one of each kind."""
    tensor = torch.arange(6.0).reshape(2, 3)
    yield from (
        {"a": [1, 2.5, None, True], "b": (b"x", bytearray(b"y"), "z")}, {1, 2}, frozenset((1,)), 1j, slice(1, 2), range(3),
        collections.OrderedDict(a=1), collections.Counter("aab"), collections.defaultdict(list, a=[1]), collections.defaultdict(dict),
        collections.deque([1, 2], 3), types.SimpleNamespace(a=1), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        datetime.timedelta(1), decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=5), pathlib.Path("a"), random.Random(1),
        functools.partial(nn.functional.relu, inplace=True), itertools.count(), ValueError("a"), io.BytesIO(b"a"), re.compile("a"),
    )  # fmt: skip
    yield from (
        np.arange(6).reshape(2, 3), np.array([1, "a"], object), np.float32(1.5), np.dtype("i4,f8"), np.dtype("O"), np.dtype("M8[D]"),
        np.zeros(2, [("a", "i4"), ("b", "O")]), np.datetime64("2020-01-01"), np.random.default_rng(1), np.random.RandomState(1),
        np.matrix([[1]]), np.array("x"), np.zeros(3, ">i2"), np.zeros(3, "M8[D]"), np.ma.masked_array([1], [True]),
    )  # fmt: skip
    dressed = nn.Parameter(tensor)
    dressed.note = "a"
    yield from (
        tensor, nn.Parameter(tensor), dressed, torch.Size([1]), torch.device("cpu"), torch.float32, torch.strided, tensor.to_sparse(),
        torch.quantize_per_tensor(tensor, 0.1, 1, torch.quint8), torch.empty(2, device="meta"), torch.nested.nested_tensor([tensor]),
        torch.zeros(2).untyped_storage(), torch.torch_version.TorchVersion("1"), nn.functional.relu, optim.lr_scheduler.LambdaLR,
        nn.utils.rnn.pack_sequence([tensor]), torch.amp.GradScaler("cpu"),
    )  # fmt: skip
    linear = nn.Linear(2, 2)
    modules = [
        linear, nn.LSTM(2, 2), nn.GRU(1, 1), nn.MultiheadAttention(2, 1), nn.TransformerEncoderLayer(2, 1, 2), nn.TransformerDecoderLayer(2, 1, 2),
        nn.Conv2d(1, 1, 1), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU(), nn.Softmax(1)), nn.ModuleDict({"a": nn.GELU()}), nn.ModuleList([nn.Identity()]),
        nn.ParameterList([nn.Parameter(tensor)]), nn.ParameterDict({"a": nn.Parameter(tensor)}), nn.Upsample(scale_factor=2), nn.AvgPool3d(2),
        nn.DataParallel(nn.Linear(1, 1)), nn.utils.spectral_norm(nn.Linear(2, 2)), nn.utils.weight_norm(nn.Linear(2, 2)),
        nn.utils.prune.l1_unstructured(nn.Linear(2, 2), "weight", 1), optim.swa_utils.AveragedModel(nn.Linear(1, 1)),
        torch.ao.nn.quantized.Conv2d(1, 1, 1), torch.ao.nn.quantized.Conv1d(1, 1, 1), torch.ao.quantization.MinMaxObserver(),
        torch.ao.quantization.FakeQuantize(), torch.ao.nn.quantized.ReLU6(),
    ]  # fmt: skip
    hooked_ = nn.Linear(1, 1)
    hooked_.register_forward_hook(
        sys.modules["torch.ao.quantization.quantize"]._observer_forward_hook
    )
    yield from (*modules, hooked_, linear.state_dict(), torch.ao.quantization.default_qconfig)
    linear(torch.zeros(1, 2)).sum().backward()
    for kind in (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop,
                 optim.Rprop, optim.Adafactor):  # fmt: skip
        optimizer = kind(linear.parameters(), lr=0.1)
        optimizer.step()
        yield optimizer
        yield optimizer.state_dict()
    optimizer = optim.SGD(linear.parameters(), 0.1)
    yield from (
        optim.lr_scheduler.StepLR(optimizer, 2), optim.lr_scheduler.CosineAnnealingLR(optimizer, 2), optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        optim.lr_scheduler.SequentialLR(optimizer, [optim.lr_scheduler.StepLR(optimizer, 2)], []), optim.swa_utils.SWALR(optimizer, 0.1),
        optim.lr_scheduler.OneCycleLR(optimizer, 1, 4),
    )  # fmt: skip
    data = torch.utils.data
    dataset = data.TensorDataset(tensor)
    yield from (data.DataLoader(dataset), data.Subset(dataset, [0]), data.ConcatDataset([dataset]), data.RandomSampler(dataset),
                data.BatchSampler([0], 1, False))  # fmt: skip
    one = torch.distributions
    yield from (
        one.Normal(tensor, 1.0), one.Independent(one.Normal(tensor, 1.0), 1),
        one.Categorical(tensor), one.AffineTransform(0, 1),
    )  # fmt: skip
    properties = metadata.TensorProperties(torch.float32)
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    stored = metadata.TensorStorageMetadata(properties, torch.Size([2]), [chunk])
    index = metadata.MetadataIndex("a", torch.Size([0]))
    yield from (metadata.Metadata({"a": stored}, {"a": ("a",)}, {index: 1}), Shard(0), Replicate())
