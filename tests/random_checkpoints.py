"""Random checkpoints as torch.save makes them: the input of test_differential. Equal seeds give
equal trees."""

from __future__ import annotations

import io
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from fixtures.making.devices import simulated_cuda

NUMBERS = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint8", "uint16",
    "uint32", "uint64", "bool", "complex128", "complex64", "complex32",
]  # fmt: skip
# Torch can neither read types without a typed storage from a legacy stream, nor swap their bytes.
TYPED = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex128", "complex64",
]  # fmt: skip
KINDS = ("state_dict", "wrapped", "wrapped", "module", "nameless", "tree", "optimizer", "tensor")
WORDS = (
    "a", "weight", "läyer", "x.y", "", "new\nline", "0", "\U0001f600", "module.",
    "_orig_mod.module.", "tab\t", "é" * 90,
)  # fmt: skip
KEYS = (*WORDS, 1, 0, -7, True, False, None, 2.5, (1, 2), 2**70, 1 << 63, torch.float16)
SCALARS = (
    0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63, -(2**63), 10**40, True, False, None, 0.0, -0.0, 1e-310,
    float("inf"), float("-inf"), float("nan"), 3.14, "", "text", "new\nline", "ünï\U0001f600", "a" * 300, b"",
    b"\x00\xff", b"b" * 300, 1 + 2j, complex("-0"), torch.float32, torch.device("cpu"), torch.device("cuda:3"),
    torch.Size([2, 3]), torch.Size([]), torch.strided, torch.per_tensor_affine, (), 2.0**0.5,
)  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A tree, and how it is to be saved."""

    tree: Any
    legacy: bool
    protocol: int
    cuda: bool
    crc: bool
    deflated: bool
    big_endian: bool

    def save(self, path: Path) -> None:
        """Write the file."""
        torch.serialization.set_crc32_options(self.crc)
        try:
            with simulated_cuda(1) if self.cuda else nullcontext():
                torch.save(
                    self.tree,
                    path,
                    pickle_protocol=self.protocol,
                    _use_new_zipfile_serialization=not self.legacy,
                )
        finally:
            torch.serialization.set_crc32_options(True)
        if self.deflated or self.big_endian:
            self._repack(path)

    def _repack(self, path: Path) -> None:
        """The same records, deflated, or said to be big-endian: other numbers then, and as good."""
        old = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
        with zipfile.ZipFile(
            path, "w", zipfile.ZIP_DEFLATED if self.deflated else zipfile.ZIP_STORED
        ) as new:
            for info in old.infolist():
                data = old.read(info)
                if info.filename.endswith(
                    "/.format_version"
                ):  # its reader computes where stored records are
                    continue
                swapped = self.big_endian and info.filename.endswith("/byteorder")
                new.writestr(info.filename, b"big" if swapped else data)


def make(seed: int, *, weights: bool = False) -> Made:
    """The checkpoint number `seed`; with `weights`, one that is a state_dict or holds it under a
    well-known name."""
    random = Random(seed)
    torch.manual_seed(seed)
    legacy = random.random() < 0.25
    big_endian = not legacy and random.random() < 0.1
    trees = _Trees(random, TYPED if legacy or big_endian else NUMBERS, plain=big_endian)
    deflated = not legacy and random.random() < 0.15
    return Made(
        trees.checkpoint(KINDS[:4] if weights else KINDS),
        legacy,
        random.choice((2, 2, 2, 2, 3, 4, 5)),
        random.random() < 0.4,
        deflated or big_endian or random.random() < 0.8,
        deflated,
        big_endian,
    )


class _Trees:
    """Makes values; what it made before comes again now and then."""

    def __init__(self, random: Random, dtypes: list[str], *, plain: bool) -> None:
        self.random = random
        self.dtypes = dtypes
        self.plain = plain  # strided numbers only
        self.tensors: list[torch.Tensor] = []
        self.containers: list[Any] = []

    def checkpoint(self, kinds: Sequence[str]) -> Any:
        kind = self.random.choice(kinds)
        if kind == "state_dict":
            return self.state_dict()
        if kind == "tensor":
            return self.tensor()
        if kind == "tree":
            return self.tree(4)
        if kind == "optimizer":
            return {
                "state": self.optimizer()["state"],
                "param_groups": [{"lr": 0.1, "params": [0, 1]}],
            }
        name = self.random.choice(
            ("state_dict", "model", "net") if kind == "wrapped" else ("odd name", "x.y")
        )
        states = self.module() if kind == "module" else {name: self.state_dict()}
        beside = {
            "epoch": 3, "extra": self.tree(2), "optimizer": self.optimizer(),
            "again": next(iter(states.values())),
        }  # fmt: skip
        items = [
            *states.items(),
            *self.random.sample(list(beside.items()), self.random.randrange(4)),
        ]
        self.random.shuffle(items)
        return dict(items)

    def state_dict(self) -> dict[str, Any]:
        """Names to tensors; some wrapped, some not."""
        prefix = self.random.choice(
            ("", "module.", "_orig_mod.", "module._orig_mod.", "module.module.")
        )
        names = [
            f"{prefix}layer{n}.{part}"
            for n in range(self.random.randrange(1, 4))
            for part in ("weight", "bias")
        ]
        if self.random.random() < 0.3:
            names += ["bare", "läyer.\U0001f600", "deep." * 20 + "w"]
        entries = {name: self.tensor() for name in names}
        if self.random.random() < 0.5:
            return entries
        made = OrderedDict(entries)
        if self.random.random() < 0.7:
            modules = {name.rpartition(".")[0]: {"version": 1} for name in names}
            made._metadata = OrderedDict({"": {"version": 1}, **modules})  # type: ignore[attr-defined]
        return made

    def module(self) -> dict[str, Any]:
        """The state_dict of a real module, wrapped now and then."""
        layers = [
            torch.nn.Linear(3, 2),
            torch.nn.BatchNorm1d(2),
            torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)),
        ]
        model: torch.nn.Module = torch.nn.Sequential(*self.random.sample(layers, 2))
        if self.random.random() < 0.6:
            model = torch.nn.DataParallel(model)
        return {"model": model.state_dict(keep_vars=self.random.random() < 0.3)}

    def optimizer(self) -> dict[str, Any]:
        weights = [torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(3))]
        optimizer = torch.optim.Adam(weights, lr=1e-3, amsgrad=self.random.random() < 0.5)
        torch.stack([weight.square().sum() for weight in weights]).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    def tree(self, depth: int) -> Any:
        if depth == 0 or self.random.random() < 0.15:
            return self.leaf()
        if self.containers and self.random.random() < 0.15:
            return self.random.choice(self.containers)
        made = self.container([self.tree(depth - 1) for _ in range(self.random.randrange(5))])
        self.containers.append(made)
        return made

    def container(self, items: list[Any]) -> Any:
        kind = self.random.choice((dict, dict, OrderedDict, list, tuple, Counter, set, bytearray))
        if kind in (list, tuple):
            return kind(items)
        if kind is Counter:
            return Counter(dict.fromkeys(self.random.sample(WORDS, 2), 1))
        if kind is set:
            return set(self.random.sample(KEYS[:15], 3))
        if kind is bytearray:
            return bytearray(b"\x00\xfftext")
        return kind(zip(self.random.sample(KEYS, len(items)), items, strict=True))

    def leaf(self) -> Any:
        return self.tensor() if self.random.random() < 0.4 else self.random.choice(SCALARS)

    # Tensors

    def tensor(self) -> torch.Tensor:
        """A new one, a view of an old one, or an old one."""
        choice = self.random.random()
        made: torch.Tensor
        if self.tensors and choice < 0.1:
            return self.random.choice(self.tensors)
        if self.tensors and choice < 0.25:
            made = self.random.choice(self.tensors)
            if made.layout == torch.strided and not made.is_quantized and not made.is_nested:
                made = self.view(made.detach())
        elif choice < 0.35 and not self.plain:
            made = self.odd()
        else:
            made = self.view(self.numbers())
        self.tensors.append(made)
        return made

    def numbers(self) -> torch.Tensor:
        """Random bytes as numbers: NaN, infinities and denormals among them."""
        shape = self.random.choice(((), (0,), (1,), (3,), (2, 3), (2, 0, 3), (4, 2, 2), (1, 5, 1)))
        dtype = getattr(torch, self.random.choice(self.dtypes))
        itemsize = torch.empty((), dtype=dtype).element_size()
        count = torch.Size(shape).numel()
        bits = torch.randint(
            0, 2 if dtype == torch.bool else 256, (count * itemsize,), dtype=torch.uint8
        )
        return bits.view(dtype).reshape(shape)

    def view(self, base: torch.Tensor) -> torch.Tensor:
        kind = self.random.choice(
            (
                "same",
                "same",
                "same",
                "transposed",
                "sliced",
                "expanded",
                "parameter",
                "grad",
                "bits",
            )
        )
        if kind == "transposed":
            return base.permute(tuple(range(base.dim() - 1, -1, -1)))
        if kind == "sliced" and base.dim() and base.shape[0] > 1:
            return base[1:] if self.random.random() < 0.5 else base[::2]
        if kind == "expanded":
            return base.unsqueeze(0).expand(2, *base.shape)
        grad = (
            base.is_floating_point() and not base.is_neg()
        )  # torch cannot load a leaf that is negated
        if kind == "parameter":
            return torch.nn.Parameter(base, requires_grad=grad and self.random.random() < 0.7)
        if kind == "grad" and grad and base.itemsize > 1:  # nor one of 8 bits
            return base.detach().requires_grad_()
        if kind == "bits" and not base.dtype.is_complex:
            return torch._neg_view(base) if base.dtype in (torch.float32, torch.float64) else base
        return (
            base.conj() if kind == "bits" and base.dtype != torch.complex32 else base
        )  # whose NaN it would quieten

    def odd(self) -> torch.Tensor:
        """Tensors that are more than numbers in a row."""
        made = self.random.choice(ODD)()
        assert isinstance(made, torch.Tensor)
        return made


def with_attributes() -> torch.Tensor:
    made = torch.arange(3.0)
    made.note = "kept"  # type: ignore[attr-defined]
    return made


def parameter_with_attributes() -> torch.Tensor:
    made = torch.nn.Parameter(torch.arange(3.0))
    made.note = {"kept": 1}  # type: ignore[attr-defined]
    return made


ODD = (
    with_attributes,
    parameter_with_attributes,
    lambda: torch.quantize_per_tensor(torch.randn(2, 3), 0.1, 3, torch.qint8),
    lambda: torch.quantize_per_channel(
        torch.randn(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8
    ),
    lambda: torch.randn(3, 3).to_sparse(),
    lambda: torch.zeros(2, 2).to_sparse(),
    lambda: torch.empty(2, 3, device="meta"),
    lambda: torch.empty(4, 3, device="meta", dtype=torch.float16).t(),
    lambda: torch.nn.Parameter(torch.empty(2, device="meta")),
    lambda: torch.nn.Parameter(torch.randn(2, 2).to_sparse()),
)
