"""Sixteen problems, sixteen solved: each is made for real, torch fails as people know it, the
command mends it.

The table is that of the README. Each test makes the files that its row names in a folder of its
own, sees torch fail with the message, runs the command of the row, and loads what it wrote with
torch.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fixtures.making.frameworks import lightning
from tests import forked
from tests.conftest import COMMAND, ENVIRONMENT, ROOT

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("## Sixteen problems")[1]
# For each problem, the message that people search for, and what to type.
PROBLEMS: list[tuple[str, str]] = re.findall(
    r"^\| .* \| (.*) \| `(.*)` \|$", SECTION.split("\n## ")[0], re.MULTILINE
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fails(number: int, attempt: Callable[[], object], *, kind: type[Exception]) -> None:
    """Torch says what the table says: each of the pieces between the dots."""
    with pytest.raises(kind) as caught:
        attempt()
    said = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", f"{caught.value}"))
    message = PROBLEMS[number - 1][0].strip("`")
    for piece in re.split(r" \.\.\. |\. (?=Unexpected)", message):
        assert piece in said


def run(number: int, *, code: int = 0, limit: int | None = None) -> str:
    """Run the command of the table, as it stands there, in a process of its own. `limit` is all the
    memory it may have. Return its output."""
    program, *words = shlex.split(PROBLEMS[number - 1][1])
    assert program == "ckptkit"

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        encoding="utf-8",
        env=ENVIRONMENT,
        timeout=120,
        preexec_fn=limited,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout


def load(path: str) -> Any:
    return torch.load(path, weights_only=True)


def test_each_row_has_a_test() -> None:
    numbers = sorted(
        int(number) for name in globals() for number in re.findall(r"^test_(\d+)", name)
    )
    assert [1, *numbers] == [*range(1, len(PROBLEMS) + 1)]


@pytest.mark.filterwarnings("ignore:.*torch:DeprecationWarning")
@pytest.mark.parametrize(("number", "wrap"), [(1, nn.DataParallel), (2, torch.compile)])
def test_02_prefixes(number: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    def net() -> nn.Module:
        return nn.Linear(2, 2, bias=False)

    torch.save(wrap(net()).state_dict(), "run.pth")
    fails(number, lambda: net().load_state_dict(load("run.pth")), kind=RuntimeError)
    run(number)
    net().load_state_dict(load("plain.pth"))


def test_03_cuda_on_a_cpu_machine(
    simulated_cuda: Callable[..., AbstractContextManager[None]],
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with simulated_cuda(1):
        torch.save(nn.Linear(2, 2).state_dict(), "run.pth")
    fails(3, lambda: load("run.pth"), kind=RuntimeError)
    run(3)
    nn.Linear(2, 2).load_state_dict(load("cpu.pth"))


def test_04_weights_only_refuses() -> None:
    state = nn.Linear(2, 2).state_dict()
    torch.save({"model": state, "args": Namespace(lr=0.1), "epoch": 3}, "run.pth")
    fails(4, lambda: load("run.pth"), kind=pickle.UnpicklingError)
    run(4)
    found = load("plain.pth")
    assert found["epoch"] == 3
    nn.Linear(2, 2).load_state_dict(found["model"])


def test_05_the_class_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my_old_project.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = torch.nn.Linear(2, 2)\n"
    )
    script = "import torch, my_old_project; torch.save(my_old_project.Net(), 'run.pth')"
    assert forked.program(script, cwd=Path.cwd()).returncode == 0
    Path("my_old_project.py").unlink()
    fails(5, lambda: torch.load("run.pth", weights_only=False), kind=ModuleNotFoundError)
    run(5)
    nn.ModuleDict({"fc": nn.Linear(2, 2)}).load_state_dict(load_file("weights.safetensors"))


def test_06_tensors_share_memory() -> None:
    embedding = torch.ones(3, 2)
    torch.save({"embed.weight": embedding, "head.weight": embedding}, "run.pth")
    fails(6, lambda: save_file(load("run.pth"), "net.safetensors"), kind=RuntimeError)
    run(6)
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    from safetensors.torch import load_model

    missing, unexpected = load_model(model, "net.safetensors")
    assert not missing and not unexpected
    assert torch.equal(model.get_parameter("head.weight"), embedding)


def test_07_cut() -> None:
    torch.save({"first": torch.arange(1e5), "last": torch.ones(100_000)}, "cut.pth")
    os.truncate("cut.pth", 600_000)
    fails(7, lambda: load("cut.pth"), kind=RuntimeError)
    run(7)
    assert torch.equal(load("intact.pth")["first"], torch.arange(1e5))


def test_08_git_lfs_pointer() -> None:
    """There is nothing to mend in the file: the command says what it is, and what to type in the
    clone."""
    Path("run.pth").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 440449768\n"
    )
    fails(8, lambda: torch.load("run.pth", weights_only=False), kind=pickle.UnpicklingError)
    said = run(8, code=3)
    assert "Git LFS pointer" in said and "440,449,768 bytes" in said
    assert "     git lfs pull\n" in said


def test_09_a_slice_saves_the_whole_storage() -> None:
    large = torch.arange(1e6).reshape(1000, 1000)
    torch.save({"rows": large[:2]}, "run.pth")
    assert Path("run.pth").stat().st_size > 4_000_000
    run(9)
    assert Path("small.pth").stat().st_size < 20_000
    assert torch.equal(load("small.pth")["rows"], large[:2])


def test_10_the_optimizer_weighs_most() -> None:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "epoch": 1}, "run.pth")
    run(10)
    assert Path("model.pth").stat().st_size < 0.4 * Path("run.pth").stat().st_size
    model.load_state_dict(load("model.pth"))


def test_11_zero() -> None:
    """Saved by DeepSpeed with three ranks; beside it what DeepSpeed's own script makes of it."""
    shutil.copytree(ROOT / "fixtures/deepspeed/zero2-fp32-3ranks", "zero")
    fails(11, lambda: load("zero"), kind=IsADirectoryError)
    run(11)
    expected = load(str(ROOT / "fixtures/deepspeed/zero2-fp32-3ranks.fp32.pth"))
    state = load("net.pth")
    assert state.keys() >= expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_12_fsdp_or_dcp() -> None:
    """Saved under FSDP by two ranks; what torch's own dcp_to_torch_save makes of it is equal."""
    from tests.formats.dcp.making import whole

    shutil.copytree(ROOT / "fixtures/dcp/fsdp_bare", "step_100")
    fails(12, lambda: load("step_100"), kind=IsADirectoryError)
    expected = whole(Path("step_100"))
    run(12)
    state = load("net.pth")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_13_size_mismatch() -> None:
    def net(classes: int) -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, classes)})

    torch.save(net(10).state_dict(), "run.pth")
    fails(13, lambda: net(3).load_state_dict(load("run.pth"), strict=False), kind=RuntimeError)
    run(13)
    model = net(3)
    done = model.load_state_dict(load("body.pth"), strict=False)
    assert (done.missing_keys, done.unexpected_keys) == (["head.weight", "head.bias"], [])
    assert torch.equal(model.get_parameter("body.weight"), load("run.pth")["body.weight"])


PLAIN = """
import resource, torch
from safetensors.torch import save_file
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {limit}, used + {limit}))
save_file(torch.load("pytorch_model.bin", weights_only=True), "model.safetensors")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as on Linux")
def test_14_larger_than_the_memory() -> None:
    """200 MB of weights where torch may have 100 MB more than it has for itself, and ckptkit 256
    MiB with Python."""
    torch.save(
        {f"layers.{n}.weight": torch.full((5_000, 1_000), float(n)) for n in range(10)},
        "pytorch_model.bin",
    )
    plain = subprocess.run(
        [sys.executable, "-c", PLAIN.format(limit=100_000_000)],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert PROBLEMS[13][0].strip("`") in plain.stderr
    run(14, limit=256 << 20)
    state = load_file("model.safetensors")
    assert len(state) == 10 and all(
        bool((state[f"layers.{n}.weight"] == n).all()) for n in range(10)
    )
    for name in ("pytorch_model.bin", "model.safetensors"):
        Path(name).unlink()


def test_15_lightning() -> None:
    from ckptkit.trainer.models.cnn import Cnn

    def net() -> Cnn:
        return Cnn((1, 32, 32), classes=10, width=0.15)

    torch.save(lightning(net()), "run.ckpt")
    fails(15, lambda: net().load_state_dict(load("run.ckpt")), kind=RuntimeError)
    assert "no problems left" in run(15)
    net().load_state_dict(load("net.pth"))


def test_16_an_adapter_without_effect() -> None:
    """Its names are those of the model inside another one: a loader that skips unknown names adds
    nothing. The command that is printed merges it."""
    for folder in ("base", "adapter"):
        Path(folder).mkdir()
    save_file({"model.fc.weight": torch.zeros(3, 4)}, "base/model.safetensors")
    factors = {"lora_A": torch.ones(1, 4), "lora_B": torch.ones(3, 1)}
    at = "base_model.model.language_model.model.fc"
    named = {f"{at}.{name}.weight": each for name, each in factors.items()}
    save_file(named, "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    state = {name.removeprefix("base_model.model."): each for name, each in named.items()}
    model = nn.ModuleDict({"model": nn.ModuleDict({"fc": nn.Linear(4, 3, bias=False)})})
    done = model.load_state_dict(state, strict=False)
    assert len(done.unexpected_keys) == 2
    said = run(16, code=1)
    assert "error (prefix)" in said
    command = shlex.split(next(line for line in said.splitlines() if "lora merge" in line))
    subprocess.run([*COMMAND, *command[1:]], check=True, env=ENVIRONMENT, timeout=120)
    merged = load_file(f"{command[-1]}/model.safetensors")
    assert torch.equal(merged["model.fc.weight"], torch.full((3, 4), 2.0))
