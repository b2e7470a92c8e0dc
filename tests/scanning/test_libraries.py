"""No false alarm: what libraries leave in checkpoints, in their own values where torch and numpy
make them, else in the opcodes that torchao 0.18, tensordict, lightning, transformers 5 and pandas 2
write."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum as enum_
import fractions
import functools
import importlib
import itertools
import pathlib
import random
import re
import types
import typing
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit import api as convert
from ckptkit.core.errors import UnsafeGlobalError
from ckptkit.pickles.judge import allowlist
from ckptkit.scanning.files import scan
from ckptkit.scanning.verdict import counts, findings
from tests.formats.torch_zip.archives import storage, tensor
from tests.scanning.hostile_pickles import beside_a_tensor, built, call, name, text

OF_PYTHON: dict[str, Callable[[], Any]] = {
    "datetime": lambda: [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.timedelta(1)],
    "numbers": lambda: [decimal.Decimal("1.5"), fractions.Fraction(1, 2), 1j],
    "paths": lambda: [
        pathlib.PurePosixPath("a/b"), uuid.uuid4(), re.compile("a"), slice(1, None), range(3)],
    "bags": lambda: [
        argparse.Namespace(a=[1]), types.SimpleNamespace(b={"c": 2}),
        collections.ChainMap({"a": 1})],
    "containers": lambda: [
        collections.deque([1], 5), collections.Counter("aab"), frozenset("ab"), {1, 2}],
    "factories": lambda: collections.defaultdict(collections.OrderedDict, a=1),
    "partial": lambda: functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "random": lambda: random.Random(0),
    "typing": lambda: [typing.Optional[int], typing.Dict[str, int], typing.Any],  # noqa: UP006, UP045
    "error": lambda: ValueError("x"),
}  # fmt: skip
OF_NUMPY: dict[str, Callable[[], Any]] = {
    "scalars": lambda: [
        np.float64(1), np.int32(2), np.bool_(True), np.datetime64("2026-01-01"), np.str_("x")],
    "arrays": lambda: [
        np.ones(3), np.asfortranarray(np.ones((2, 3))), np.array(["a", None], dtype=object)],
    "records": lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    "masked": lambda: np.ma.array([1, 2], mask=[0, 1]),
    "generators": lambda: [
        np.random.RandomState(0), np.random.default_rng(0), np.random.get_state()],
    "types": lambda: [np.float32, np.dtype("f4"), np.ndarray],
}  # fmt: skip


def _optimizer() -> Any:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    return [optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)]


OF_TORCH: dict[str, Callable[[], Any]] = {
    "transformer": lambda: torch.nn.Transformer(8, 2, 1, 1, 8),
    "recurrent": lambda: [torch.nn.LSTM(2, 2), torch.nn.GRU(2, 2), torch.nn.MultiheadAttention(4, 2)],
    "optimizers": _optimizer,
    "tensors": lambda: [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.ones(2, device="meta"),
                        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
                        torch.nn.Buffer(torch.ones(1)), torch.nn.parameter.UninitializedParameter()],
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "distributions": lambda: torch.distributions.Normal(torch.zeros(1), torch.ones(1)),
    "activations": lambda: [torch.nn.functional.relu, torch.relu, torch.nn.functional.gelu, torch.tanh],
}  # fmt: skip
MADE = {**OF_PYTHON, **OF_NUMPY, **OF_TORCH}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", MADE)
def test_values_that_people_save(case: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.pth"
    torch.save({"w": torch.ones(2), "value": MADE[case]()}, path)
    no_alarm(path)


def no_alarm(path: Path) -> None:
    """Neither scan nor convert objects, and scan does not object to what convert wrote."""
    again = path.with_name("again.pth")
    for each in (path, again):
        found = scan(each)
        assert not counts(found, strict=False), [str(why) for why in findings(found, strict=True)]
        if each is path:
            convert.convert(path, again)


_NONE = b"N"
_WORKFLOWS = "torchao.quantization.quantize_"
_LAYOUT = call("torch.serialization._get_layout", text("torch.strided"))
_INNER = tensor(storage(numel=2), (2,))
_SUBCLASS = b"(" + b"".join((
    name("torchao.quantization.Float8Tensor"), name("torch.float32"), b"K\2\x85", b"K\1\x85", b"K\0", _LAYOUT,
    call("torch.device", text("cpu")), b"\x89",
)) + b"t"  # fmt: skip


def mapping(*pairs: bytes) -> bytes:
    """A dict by one SETITEMS."""
    return b"}(" + b"".join(pairs) + b"u"


def enum(dotted: str, value: bytes) -> bytes:
    """A member of an enumeration, by its value."""
    return call(dotted, value)


OF_LIBRARIES = {
    "torchao-float8": call(
        "torch._tensor._rebuild_from_type_v2", name("torch._utils._rebuild_wrapper_subclass"),
        name("torchao.quantization.Float8Tensor"), _SUBCLASS,
        mapping(text("qdata"), _INNER, text("block_size"), b"](K\1K\2e", text("kernel_preference"),
                enum(f"{_WORKFLOWS}.common.kernel_preference.KernelPreference", text("auto")))),
    "torchao-kwargs": built(
        name(f"{_WORKFLOWS}.workflows.int8.int8_tensor.QuantizeTensorToInt8Kwargs") + b")\x81",
        text("granularity"),
        built(name("torchao.quantization.granularity.PerRow") + b")\x81", text("dim"), b"K\1"),
        text("mapping_type"), enum("torchao.quantization.quant_primitives.MappingType", b"K\1")),
    "torchao-config": built(
        name("torchao.float8.config.CastConfig") + b")\x81",
        text("scaling_type"), enum("torchao.float8.config.ScalingType", text("dynamic")),
        text("scaling_granularity"),
        enum("torchao.float8.config.ScalingGranularity", text("tensorwise")),
        text("target_dtype"), _NONE),
    "tensordict": call(
        "tensordict._reductions._make_td", name("tensordict._td.TensorDict"),
        mapping(text("_tensordict"), mapping(text("a"), _INNER), text("_device"), _NONE,
                text("_batch_size"), call("torch.Size", b"K\2\x85"), text("_td_dim_names"), _NONE)),
    "tensordict-values": built(
        name("tensordict.tensorclass.NonTensorData") + b")\x81",
        text("non_tensordict"), mapping(text("data"), text("x"))),
    "lightning": name("lightning_fabric.utilities.data.AttributeDict") + b")\x81(" + text("lr") + b"K\1u",
    "transformers": built(
        name("transformers.training_args.TrainingArguments") + b")\x81",
        text("optim"), enum("transformers.training_args.OptimizerNames", text("adamw_torch_fused")),
        text("save_strategy"), enum("transformers.trainer_utils.SaveStrategy", text("steps")),
        text("accelerator_config"),
        built(name("transformers.trainer_pt_utils.AcceleratorConfig") + b")\x81", text("split_batches"), b"\x89"),
        text("distributed_state"),
        built(name("accelerate.state.PartialState") + b")\x81", text("distributed_type"),
              enum("accelerate.utils.dataclasses.DistributedType", text("NO")))),
    "pandas": mapping(
        text("a"), call("pandas._libs.tslibs.timestamps._unpickle_timestamp", b"K\1", _NONE, call(
            "datetime.timezone", call("datetime.timedelta", b"K\0", b"K\0", b"K\0")), b"K\x09"),
        text("b"), call("pandas._libs.tslibs.timedeltas._timedelta_unpickle", b"K\1", b"K\x0a"),
        text("c"), call("pandas._libs.tslibs.nattype._nat_unpickle", _NONE), text("d"), name("pandas.NA"),
        text("e"), call("pandas.Period", _NONE, call("pandas._libs.tslibs.offsets.MonthEnd", b"K\1", b"\x89"), b"K\1"),
        text("f"), call("pandas.Interval", b"K\0", b"K\1", text("right"))),
    "omegaconf": built(
        name("omegaconf.dictconfig.DictConfig") + b")\x81", text("_metadata"),
        built(name("omegaconf.base.ContainerMetadata") + b")\x81", text("ref_type"), name("typing.Any"),
              text("resolver_cache"), call("collections.defaultdict", name("builtins.dict")))),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_LIBRARIES)
def test_values_of_libraries(case: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.pth"
    path.write_bytes(beside_a_tensor(OF_LIBRARIES[case]).data)
    no_alarm(path)


# What the allowlist has nowhere: callables of the file's choosing, iterators, datasets, other code.
CALLABLES: dict[str, Callable[[], Any]] = {
    "class": lambda: torch.optim.lr_scheduler.OneCycleLR,
    "dataset": lambda: torch.utils.data.TensorDataset(torch.ones(2)),
    "iterator": lambda: itertools.count(3),
    "factory": lambda: collections.defaultdict(collections.ChainMap),
    "partial": lambda: functools.partial(torch.optim.Adam, lr=0.1),
    "partial-of-print": lambda: {"f": functools.partial(print, "x")},
    "namespace": lambda: types.SimpleNamespace(setdefault=print),
    "method": lambda: torch.nn.Linear(1, 1).state_dict,
}


@pytest.mark.parametrize("case", CALLABLES)
def test_callables_are_findings_and_are_not_written(case: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.pth"
    torch.save({"w": torch.ones(2), "value": CALLABLES[case]()}, path)
    assert counts(scan(path), strict=False)
    with pytest.raises(UnsafeGlobalError):
        convert.convert(path, tmp_path / "again.pth")


def test_all_enumerations_are_enumerations() -> None:
    """As far as their packages are installed: a class that is called runs its __init__."""
    found = [made for made in map(resolved, sorted(allowlist().enums)) if made is not None]
    assert found
    assert [made for made in found if not issubclass(made, enum_.Enum)] == []


def resolved(row: tuple[str, str]) -> Any:
    """Return what a row names; None if it is not here."""
    try:
        return getattr(importlib.import_module(row[0]), row[1], None)
    except ImportError:
        return None


def test_the_same_names_with_other_arguments_are_findings(tmp_path: Path) -> None:
    """The rows hold what the libraries write and nothing else."""
    bag = built(name("types.SimpleNamespace") + b")R", text("x"), name("mine.nets.run"))
    for body in (
        call("tensordict._reductions._make_td", name("mine.nets.Net"), mapping()),
        call("pandas._libs.tslibs.timedeltas._timedelta_unpickle", bag, b"K\1"),
        enum("torchao.quantization.quant_primitives.MappingType", bag),
        call("torchao.float8.config.CastConfig", text("dynamic")),  # through its __init__
        call("numpy.dtype", bag),
        call("functools.reduce", name("operator.add"), b"(" + name("builtins.int") + b"t"),
        call("operator.getitem", name("os.environ"), text("HOME")),
        built(name("transformers.training_args.TrainingArguments") + b")\x81") + b"Na",
    ):
        path = tmp_path / "saved.pth"
        path.write_bytes(beside_a_tensor(body).data)
        assert counts(scan(path), strict=False), body
