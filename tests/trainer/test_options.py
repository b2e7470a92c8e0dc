"""The options that people copy: sharding by block, 16 bits, averages, workers, validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckptkit
from ckptkit.trainer import loop, parallel
from ckptkit.trainer.config import MODELS, Config, RequestError, RunFiles
from ckptkit.trainer.data import load
from ckptkit.trainer.models import build

from .conftest import Prepare, same
from .test_loop import SMALL, trained, weights

TINY = replace(SMALL, width=0.25, epochs=1)


def config_of(model: str, **options: Any) -> Config:
    segmented = {"segments": 2} if model in ("mlp", "generator") else {}
    efficient = {"memory_efficient": True} if model == "densenet" else {}
    width = 0.05 if model == "mlp" else 0.25
    return replace(TINY, **{"model": model, "width": width, **segmented, **efficient, **options})


@pytest.mark.parametrize("model", MODELS)
def test_F3_blocks_come_before_the_root(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters are in a block that is called as a whole, but for recurrent layers."""
    from torch.distributed import fsdp

    sharded: list[tuple[nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(
        fsdp, "fully_shard", lambda module, **options: sharded.append((module, options))
    )
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_: "mesh")
    config = config_of(model, amp=True)
    net = build(config, load(config).shape, 10)
    parallel.shard(net, config, parallel.ProcessGroup((torch.device("cpu"),)))
    modules = [module for module, _ in sharded]
    assert modules[-1] is net
    assert len(modules) > 3
    assert len({id(each) for each in modules}) == len(modules)
    assert not any(isinstance(each, (nn.Sequential, nn.ModuleList)) for each in modules)
    covered = {id(each) for module in modules[:-1] for each in module.parameters()}
    left = [name for name, each in net.named_parameters() if id(each) not in covered]
    assert all(name.startswith("recurrent.") for name in left)
    policies = {options["mp_policy"] for _, options in sharded}
    assert [(each.param_dtype, each.reduce_dtype) for each in policies] == [
        (torch.bfloat16, torch.float32)
    ]
    assert {options["mesh"] for _, options in sharded} == {"mesh"}


@pytest.mark.parametrize("model", MODELS)
def test_F3_every_model_trains_by_blocks(model: str, tmp_path: Path) -> None:
    """Segments and recomputed bottlenecks included: the same weights as unsharded."""
    config = config_of(model, batch_size=128)
    loop.train(config, tmp_path / "plain", log=loop.silent)
    loop.train(replace(config, parallel="fsdp"), tmp_path / "sharded", log=loop.silent)
    found, expected = (
        dict(ckptkit.load(tmp_path / name, mmap=False)) for name in ("sharded", "plain")
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_F3_bfloat16_shards(tmp_path: Path) -> None:
    config = replace(TINY, parallel="fsdp", amp=True)
    loop.train(config, tmp_path / "sharded", log=loop.silent)
    found = ckptkit.load(tmp_path / "sharded")
    assert {each.dtype for each in found.values()} == {torch.float32}


def test_F3_shards_are_not_exchanged_through_gloo_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", lambda **_: pytest.fail("joined"))
    with pytest.raises(RequestError, match="FSDP needs a GPU for each process: 2 proc") as caught:
        parallel.join(torch.device("cuda:0"), 1, is_sharded=True)
    assert caught.value.hint == "use --nproc-per-node 1, --parallel ddp, or --devices cpu"


@pytest.mark.slow
def test_F4_S17_crnn_learns_to_read_at_its_defaults(tmp_path: Path) -> None:
    """Seeds 0 to 4 give 0.92 to 0.98, in minutes each; here the first."""
    pytest.importorskip("sklearn")
    config = Config(model="crnn", devices=("cpu",), seed=0)
    assert loop.train(config, tmp_path / "crnn.pth", log=loop.silent) >= 0.9


def test_float16_scales_the_loss(prepared: Prepare) -> None:
    run = prepared(amp=True, amp_dtype="float16", batch_size=128)
    kinds: set[torch.dtype] = set()
    run.model.register_forward_hook(lambda model, inputs, output: kinds.add(output.dtype))
    seen: list[float] = []
    scale = run.scaler.scale

    def note(loss: Tensor) -> Tensor:
        scaled: Tensor = scale(loss)  # type: ignore[no-untyped-call]
        seen.append((scaled / loss).item())
        return scaled

    run.scaler.scale = note  # type: ignore[assignment,method-assign]
    loop.train_epoch(run)
    assert kinds == {torch.float16}
    assert all(each > 1000 for each in seen)


def test_float16_resumes_with_its_scale(tmp_path: Path) -> None:
    config = replace(
        TINY, epochs=2, amp=True, amp_dtype="float16", clip_norm=1.0, save_form="full", save_every=1
    )
    loop.train(config, tmp_path / "two.pth", log=loop.silent)
    half = torch.load(tmp_path / "two.epoch1.pth", weights_only=True)
    assert half["scaler"]["_growth_tracker"] > 0
    files = RunFiles(resume=tmp_path / "two.epoch1.pth")
    loop.train(config, tmp_path / "more.pth", files, log=loop.silent)
    two, more = (torch.load(tmp_path / name, weights_only=True) for name in ("two.pth", "more.pth"))
    assert same(two["model"], more["model"])
    assert two["scaler"] == more["scaler"]


def test_clipping_sees_gradients_that_are_not_scaled(prepared: Prepare) -> None:
    run = prepared(
        amp=True, amp_dtype="float16", batch_size=512, clip_norm=0.01, lr=1.0, momentum=0.0
    )
    before = [each.detach().clone() for each in run.model.parameters()]
    loop.train_epoch(run)
    pairs = zip(run.model.parameters(), before, strict=True)
    change = torch.cat([(each.detach() - old).flatten() for each, old in pairs])
    assert change.norm().item() == pytest.approx(0.01, rel=1e-2)


def test_S23_the_type_of_the_norm(prepared: Prepare) -> None:
    """With inf, the largest element of the gradient is clipped."""
    run = prepared(
        clip_norm=0.001, clip_norm_type=float("inf"), lr=1.0, momentum=0.0, batch_size=512
    )
    before = [each.detach().clone() for each in run.model.parameters()]
    loop.train_epoch(run)
    pairs = zip(run.model.parameters(), before, strict=True)
    change = torch.cat([(each.detach() - old).flatten() for each, old in pairs])
    assert change.abs().max().item() == pytest.approx(0.001, rel=1e-3)
    assert change.norm().item() > 0.001


def test_a_moving_average_is_saved_tested_and_resumed(tmp_path: Path) -> None:
    config = replace(TINY, epochs=2, ema=0.5, save_form="full", save_every=1)
    said: list[str] = []
    loop.train(config, tmp_path / "two.pth", log=said.append)
    assert said[-2].startswith("moving average: test loss ")
    two = torch.load(tmp_path / "two.pth", weights_only=True)
    names = {"n_averaged", *(f"module.{name}" for name in two["model"])}
    assert set(two["ema"]) == names
    assert two["ema"]["n_averaged"] == 16
    assert not torch.equal(two["ema"]["module.fc3.bias"], two["model"]["fc3.bias"])
    torch.testing.assert_close(
        two["ema"]["module.fc3.bias"], two["model"]["fc3.bias"], rtol=0.1, atol=0.01
    )
    files = RunFiles(resume=tmp_path / "two.epoch1.pth")
    loop.train(config, tmp_path / "more.pth", files, log=loop.silent)
    more = torch.load(tmp_path / "more.pth", weights_only=True)
    assert same(two["ema"], more["ema"])


def test_compiled_models_keep_their_names(tmp_path: Path) -> None:
    """With a backend that compiles nothing: what is tested is the way there."""
    plain = weights(trained(tmp_path, "plain.pth", epochs=1))
    compiled = weights(trained(tmp_path, "compiled.pth", epochs=1, torch_compile="eager"))
    assert list(compiled) == list(plain)
    torch.testing.assert_close(compiled, plain)


@pytest.mark.parametrize("options", [{"workers": 2}, {"foreach": False}, {"empty_cache": True}])
def test_what_changes_no_weight(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = weights(trained(tmp_path, "plain.pth", epochs=1))
    assert same(weights(trained(tmp_path, "other.pth", epochs=1, **options)), plain)


def test_distributed_sampler_learns_too(tmp_path: Path) -> None:
    one = weights(trained(tmp_path, "one.pth", epochs=1, sampler="distributed"))
    again = weights(trained(tmp_path, "again.pth", epochs=1, sampler="distributed"))
    assert same(one, again)
    assert not same(one, weights(trained(tmp_path, "hand.pth", epochs=1)))


def test_S19_benchmark_is_restored_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    original = loop.train_epoch

    def note(*arguments: Any) -> float:
        seen.append(torch.backends.cudnn.benchmark)
        return original(*arguments)

    monkeypatch.setattr(loop, "train_epoch", note)
    trained(tmp_path, epochs=1, benchmark=True)
    assert seen == [True]
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("model", ["cnn", "crnn"])
def test_validation_images_are_no_training_images(model: str) -> None:
    config = replace(TINY, model=model, validation=4)
    data, whole = load(config), load(replace(config, validation=0))
    assert data.validation is not None
    inputs = data.validation[0]
    assert len(inputs) + len(data.train[0]) == len(whole.train[0])
    kept = {each.numpy().tobytes() for each in data.train[0]}
    assert not kept & {each.numpy().tobytes() for each in inputs}
    assert torch.equal(data.test[0], whole.test[0])


def test_the_test_set_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    original = loop.test

    def note(run: Any, labelled: Any = None, *rest: Any) -> tuple[float, float]:
        looked.append(labelled is run.data.test)
        return original(run, labelled, *rest)

    monkeypatch.setattr(loop, "test", note)
    trained(tmp_path, epochs=3, save_best=True)
    assert looked == [False, False, False, True]
    assert (tmp_path / "run.best.pth").exists()


def test_the_digits_are_trained_on_in_several_orders() -> None:
    pytest.importorskip("sklearn")
    lines, digits = (load(Config(model=model)).train for model in ("crnn", "cnn"))
    assert len(lines[0]) == 6 * len(digits[0]) // 4
    sums = [part.sum().item() for part in (lines[0], digits[0])]
    assert sums[0] == pytest.approx(6 * sums[1], rel=1e-3)


def test_sync_batch_norm_takes_the_place_of_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, model="densenet", parallel="ddp", sync_batch_norm=True)
    with pytest.raises(RequestError, match="SyncBatchNorm of torch works only on GPUs"):
        parallel.choose(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert len(parallel.choose(replace(config, devices=()))) == 2
    made: list[nn.Module] = []
    monkeypatch.setattr(
        nn.parallel, "DistributedDataParallel", lambda model, **_: made.append(model)
    )
    net = build(config, (3, 32, 32), 10)
    names = list(net.state_dict())
    parallel.wrap(net, config, parallel.ProcessGroup((torch.device("cpu"),)))
    norms = [
        each for each in made[0].modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)
    ]
    assert {type(each) for each in norms} == {nn.SyncBatchNorm}
    assert list(net.state_dict()) == names


def test_a_snapshot_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(memory_snapshot=tmp_path / "snapshot.pickle")
    with pytest.raises(RequestError, match="records the allocator of a GPU"):
        loop.train(TINY, tmp_path / "run.pth", files, log=loop.silent)
    from ckptkit.trainer import log

    called: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **how: called.append(how))
    monkeypatch.setattr(memory, "_dump_snapshot", called.append)
    run = type("Fake", (), {"group": parallel.ProcessGroup((torch.device("cuda:0"),))})()
    with pytest.raises(ValueError, match="within"), log.memory_snapshot(run, tmp_path / "s"):
        raise ValueError("within")
    assert called == [{}, str(tmp_path / "s"), {"enabled": None}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_device": "cpu"}, "--output-device cpu needs --parallel dp\n"),
        ({"save_best": True, "validation": 0}, "the test set must not select"),
        ({"benchmark": True, "deterministic": True}, "cuDNN would choose algorithms by time"),
        ({"amp_dtype": "float16"}, "--amp-dtype float16 needs --amp\n"),
        (
            {"amp": True, "amp_dtype": "float16", "parallel": "fsdp"},
            "does not support with fsdp",
        ),
        ({"ema": 0.9, "parallel": "fsdp"}, "--ema 0.9 --parallel fsdp: .* does not support this"),
        ({"ema": 0.9, "save_form": "bare"}, "a bare checkpoint cannot contain"),
        ({"sync_batch_norm": True}, "--sync-batch-norm needs --parallel ddp or --parallel fsdp"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Config(**options)
    assert caught.value.hint


def test_validation_1_leaves_nothing() -> None:
    with pytest.raises(RequestError, match="holds out every image"):
        load(replace(TINY, validation=1))


def test_every_process_evaluates_its_images(prepared: Prepare) -> None:
    """300 images over 7 processes in batches of 2: the last batch leaves some without one."""
    run = prepared(data="random")
    labelled = tuple(part[:37] for part in run.data.train)
    expected = loop.test(run, labelled)  # type: ignore[arg-type]
    totals, calls = [0.0, 0.0], []

    class Rank:
        """One of seven processes, whose sums are added up here."""

        world, device = 7, torch.device("cpu")

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def of_rank_0(self, value: Tensor) -> Tensor:
            return value

        def all_reduce_sum(self, *values: float) -> list[float]:
            totals[:] = [a + b for a, b in zip(totals, values, strict=True)]
            return list(values)

    run.model.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for rank in range(7):
        run.group = Rank(rank)  # type: ignore[assignment]
        loop.test(run, labelled, batch_size=2)  # type: ignore[arg-type]
        counts.append(len(calls))
    assert [total / 37 for total in totals] == pytest.approx(expected)
    assert counts == [3 * number for number in range(1, 8)]  # equally often


def test_a_backend_that_torch_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"torch\.compile: Invalid backend: 'nonsense'"
    ) as caught:
        trained(tmp_path, epochs=1, torch_compile="nonsense")
    assert caught.value.hint is not None
    assert "--torch-compile inductor" in caught.value.hint


def test_save_best_cannot_begin_when_a_run_is_resumed(tmp_path: Path) -> None:
    """The images that it would select on have been trained on."""
    files = RunFiles(resume=trained(tmp_path, epochs=1, save_form="full"))
    config = replace(SMALL, save_form="full", save_best=True)
    with pytest.raises(RequestError, match=r"--validation 10 contradicts .* with --validation 0"):
        loop.train(config, tmp_path / "more.pth", files, log=loop.silent)
