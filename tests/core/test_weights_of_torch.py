"""The weights of real checkpoints: whole modules, trainers' files and copies, saved by torch.

The oracle for modules is `state_dict()` of what torch.load makes of the same file.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptkit
from ckptkit.analysis.summary import summarize
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import LimitError
from ckptkit.core.tree import Global, Node, Object, join
from ckptkit.core.weights import locate, module_state
from tests.core.test_weights import tensor as lazy

State = dict[str, torch.Tensor]


def saved(value: Any, folder: Path, **options: Any) -> Path:
    torch.save(value, folder / "saved.pt", **options)
    return folder / "saved.pt"


def opened(value: Any, folder: Path, **options: Any) -> Checkpoint:
    return ckptkit.open(saved(value, folder, **options))


def forward_hook(module: nn.Module, args: Any, output: Any) -> None:
    """A hook that a pickle can name."""


def adding_hook(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[prefix + "added"] = torch.ones(1)


# Whole modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU())
        self.head = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.head.weight
        self.again = self.head
        self.own = nn.Parameter(torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("shown", torch.zeros(2))
        self.register_buffer("no_buffer", None)
        self.register_parameter("no_parameter", None)
        self.register_module("nothing", None)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_forward_hook(forward_hook)
    module[0].register_full_backward_hook(forward_hook)
    return module


def half_on_device() -> nn.Module:
    return nn.DataParallel(Net().half())


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[return-value]


def compiled_inside() -> nn.Module:
    return nn.DataParallel(nn.Sequential(OrderedDict(encoder=compiled(), head=nn.Linear(2, 2))))


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def checkpointed() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mine": Net,
    "of torch": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    "DataParallel": lambda: nn.DataParallel(Net()),
    "DataParallel twice": lambda: nn.DataParallel(nn.DataParallel(Net())),
    "half": half_on_device,
    "hooks": hooked,
    "average": lambda: AveragedModel(Net()),
    "LSTM": lambda: nn.LSTM(2, 2, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "lists": lambda: nn.ModuleList(
        [nn.ParameterList([nn.Parameter(torch.ones(1))] * 2), nn.ModuleList()]
    ),
    "dicts": lambda: nn.ModuleDict(
        {"p": nn.ParameterDict({"b": torch.ones(1), "a": torch.zeros(2)})}
    ),
    "without weights": lambda: nn.Sequential(nn.ReLU()),
    "compiled": compiled,
    "compiled inside": compiled_inside,
    "traced": traced,
    "checkpointed": checkpointed,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", MODULES)
def test_modules(case: str, zipped: bool, tmp_path: Path) -> None:
    path = saved(
        {"epoch": 3, "net": MODULES[case]()}, tmp_path, _use_new_zipfile_serialization=zipped
    )
    expected = torch.load(path, weights_only=False)["net"].state_dict()
    checkpoint = ckptkit.open(path)
    weights = checkpoint.weights if expected else {}
    assert list(weights) == list(expected)
    # inspect shows each name once, except for submodules that have several places
    names = [row.name for row in summarize(checkpoint).rows if row.name is not None]
    assert sorted(names) == sorted(expected)
    for name, value in (ckptkit.load(path) if expected else {}).items():
        assert torch.equal(value, expected[name]), name
        assert weights[name].stride == expected[name].stride()
    tied = {name: id(each.storage) for name, each in weights.items()}
    same = {name: value.untyped_storage().data_ptr() for name, value in expected.items()}
    assert all((tied[a] == tied[b]) == (same[a] == same[b]) for a in tied for b in tied)


@pytest.mark.parametrize("older", ["_non_persistent_buffers_set", "_modules"])
def test_modules_from_before_an_attribute(older: str, tmp_path: Path) -> None:
    """All buffers were persistent, and modules of torch 0.1.1 had no submodules: containers had."""
    module = nn.BatchNorm1d(2)
    names = list(module.state_dict())
    del module.__dict__[older]
    assert list(
        opened(nn.DataParallel(module) if older != "_modules" else module, tmp_path).weights
    )[-5:] == [f"module.{name}" if older != "_modules" else name for name in names]


# What only the code of a class could say


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def get_extra_state(self) -> Any:
        return {"step": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def unread(value: Any, folder: Path) -> tuple[str, ...]:
    checkpoint = opened(value, folder)
    assert checkpoint.selection is not None
    module = checkpoint.selection.module
    assert module is not None
    assert set(module.unread) <= set(summarize(checkpoint).warnings)
    return module.unread


def test_get_extra_state_cannot_run(tmp_path: Path) -> None:
    module = nn.Sequential(WithExtra(), WithExtra())
    assert [name for name in module.state_dict() if name not in opened(module, tmp_path).weights] == [
        "0._extra_state", "1._extra_state",
    ]  # fmt: skip
    (said,) = unread(module, tmp_path)
    assert "get_extra_state" in said and f"({__name__}.WithExtra)" in said


def test_hooks_of_a_state_dict_do_not_run(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    module[1].register_state_dict_post_hook(adding_hook)
    assert "1.added" in module.state_dict()
    (said,) = unread(module, tmp_path)
    assert "hooks, so entries may differ: 1" in said
    module.register_state_dict_post_hook(adding_hook)
    (said,) = unread(module, tmp_path)
    assert "entries may differ: the module itself, 1" in said


@pytest.mark.filterwarnings("ignore")
def test_weights_in_a_form_of_their_own(tmp_path: Path) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})
    assert [
        said
        for said in unread(quantized, tmp_path)
        if "cannot read their classes" in said and ": 0, 0._packed" in said
    ]
    (said,) = unread(nn.Sequential(nn.LazyLinear(3)), tmp_path)
    assert said.endswith("cannot read their classes: 0.weight, 0.bias")


def test_modules_of_torch_need_no_warning(tmp_path: Path) -> None:
    for module in (
        nn.DataParallel(nn.Linear(2, 2)),
        nn.utils.spectral_norm(nn.Linear(2, 2)),
        checkpointed(),
    ):
        assert unread(module, tmp_path) == ()


def test_edits_and_conversions_say_the_same(tmp_path: Path) -> None:
    path = saved(nn.DataParallel(WithExtra()), tmp_path)
    stripped = ckptkit.strip_prefix(ckptkit.open(path), "module.")
    assert [note for note in stripped.notes if "get_extra_state" in note]
    conversion = ckptkit.save(ckptkit.open(path), tmp_path / "out.safetensors")
    assert [note for note in conversion.plan.notes if "get_extra_state" in note]


def test_hostile_modules_end() -> None:
    """Inside themselves, compiled again and again, and with hooks about hooks."""
    held: dict[str, Node] = {"_parameters": {"w": lazy()}, "_buffers": {}, "_modules": {}}
    module = Object(Global("m", "C"), new=True)
    module.steps.append(("build", held))
    compiled: Node = module
    for _ in range(5_000):
        compiled = Object(Global("torch._dynamo.eval_frame", "OptimizedModule"), (compiled,))
    assert module_state(compiled) is None
    hook: Node = Global("m", "hook")
    for _ in range(5_000):
        wrapped = Object(Global("torch.nn.modules.module", "_WrappedHook"), new=True)
        wrapped.steps.append(("build", {"hook": hook}))
        hook = wrapped
    held["_state_dict_hooks"] = {1: hook}
    assert module_state(module) is not None
    held["_modules"]["again"] = Object(
        Global("torch._dynamo.eval_frame", "OptimizedModule"), (module,)
    )
    with pytest.raises(LimitError):
        module_state(module)


# Wrappers, trainers' files, copies


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def adam(of: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.Adam(of.parameters())
    of(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def lightning(**more: Any) -> dict[str, Any]:
    """The top level of a Lightning checkpoint."""
    net = model()
    return {
        "epoch": 1, "global_step": 20, "pytorch-lightning_version": "2.6.6",
        "state_dict": OrderedDict((f"net.{name}", value) for name, value in net.state_dict().items()),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_loop.state_dict": {"_batches_that_stepped": 20}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(1.0), "best_k_models": {}}},
        "optimizer_states": [adam(net)], "lr_schedulers": [{"last_epoch": 1, "_last_lr": [0.1]}],
        "hparams_name": "kwargs", "hyper_parameters": {"lr": 0.1, "net": model(), "args": argparse.Namespace(depth=2)},
        **more,
    }  # fmt: skip


def lit_ema() -> dict[str, Any]:
    """Latent diffusion: the averages are in the state_dict, without the dots of their names."""
    live = {f"model.{name}": value for name, value in model().state_dict().items()}
    averages = {f"model_ema.{name.replace('.', '')}": value.clone() for name, value in live.items()}
    return {
        **live,
        **averages,
        "model_ema.decay": torch.tensor(0.999),
        "model_ema.num_updates": torch.tensor(5),
    }


def averaged(net: nn.Module) -> State:
    found: State = AveragedModel(net).state_dict()
    return found


def attributed(state: State) -> State:
    """As FSDP leaves it: tensors with attributes of Python."""
    for value in state.values():
        value.mine = 1  # type: ignore[attr-defined]
    return state


# What is saved, where its weights are, and what else could be meant.
WRAPPERS: dict[str, tuple[Callable[[], Any], str, set[str]]] = {
    "bare": (lambda: model().state_dict(), "", set()),
    "DataParallel": (lambda: nn.DataParallel(model()).state_dict(), "", set()),
    "compiled": (lambda: torch.compile(model()).state_dict(), "", set()),  # type: ignore[attr-defined]
    "average": (lambda: averaged(model()), "", set()),
    "attributes": (lambda: attributed(model().state_dict()), "", set()),
    "Lightning": (lightning, "state_dict", {"hyper_parameters.net"}),
    "Lightning, averaged": (
        lambda: lightning(current_model_state=model().state_dict(), averaging_state={"n_averaged": torch.tensor(3)}),
        "state_dict", {"hyper_parameters.net", "current_model_state", "averaging_state"},
    ),
    "Lightning, metrics": (
        lambda: lightning(state_dict={**model().state_dict(), "metric.values": [], "metric.name": "f1"}),
        "state_dict", {"hyper_parameters.net"},
    ),
    "LitEma": (lambda: {"state_dict": lit_ema(), "global_step": 5}, "state_dict", set()),
    "timm": (
        lambda: {
            "epoch": 3, "arch": "resnet", "state_dict": model().state_dict(), "optimizer": adam(model()),
            "args": argparse.Namespace(model="resnet"), "state_dict_ema": model().state_dict(), "metric": 80.0,
        },
        "state_dict", {"state_dict_ema"},
    ),
    "YOLO": (lambda: {"epoch": -1, "model": model().half(), "ema": model(), "optimizer": None}, "model", {"ema"}),
    "YOLO, stripped": (lambda: {"epoch": -1, "model": None, "ema": model(), "updates": None}, "ema", set()),
    "BasicSR": (lambda: {"params": model().state_dict(), "params_ema": model().state_dict()}, "params", {"params_ema"}),
    "torch_ema": (
        lambda: {"model": model().state_dict(), "ema": {"decay": 0.9, "shadow_params": list(model().parameters())}},
        "model", set(),
    ),
    "swa": (
        lambda: {"swa_state_dict": averaged(model()), "state_dict": model().state_dict()},
        "state_dict", {"swa_state_dict"},
    ),
    "module": (lambda: {"net": nn.DataParallel(model()), "acc": 91.0, "epoch": 3}, "net", set()),
    "DeepSpeed": (
        lambda: {"module": model().state_dict(), "buffer_names": ["1.running_mean"], "param_shapes": [{"0.weight":
            torch.Size([3, 2])}], "optimizer": None, "ds_config": {"zero": 1}},
        "module", set(),
    ),
    "a tuple": (lambda: (model().state_dict(), adam(model())), "0", set()),
    "quantized": (
        lambda: {
            "state_dict": torch.ao.quantization.quantize_dynamic(model(), {nn.Linear}).state_dict(),
            "hyper_parameters": {"net": model()},
        },
        "state_dict", {"hyper_parameters.net"},
    ),
    "extra state": (lambda: {"model": {**nn.Sequential(WithExtra()).state_dict()}, "step": 1}, "model", set()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", WRAPPERS)
def test_wrappers(case: str, tmp_path: Path) -> None:
    make, place, others = WRAPPERS[case]
    value = make()
    checkpoint = opened(value, tmp_path)
    weights = checkpoint.required
    assert join(weights.path) == place
    assert set(map(join, weights.others)) == others
    meant = value
    for key in weights.path:
        meant = meant[key]
    state = meant.state_dict() if isinstance(meant, nn.Module) else meant
    assert list(checkpoint.weights) == [
        name for name, each in state.items() if isinstance(each, torch.Tensor)
    ]


def test_a_few_tensors_among_other_values_are_no_weights() -> None:
    root = {"model": {"name": "x", "layers": 3, "scale": lazy()}, "generator": {"a": lazy()}}
    found = locate(root)
    assert found is not None
    assert found.path == ("generator",)
