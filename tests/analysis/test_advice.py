"""advice: the right command, ready to paste."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from ckptkit.analysis.advice import advise, strip_module
from ckptkit.analysis.summary import summarize
from ckptkit.core.tree import Global, Node
from ckptkit.core.weights import WRAPPERS
from ckptkit.formats.table import BY_SUFFIX
from tests.analysis.made import checkpoint, module, opaque, tensor, view


def advice(root: Node, **fields: object) -> tuple[str, ...]:
    return advise(summarize(checkpoint(root, **fields)))


def test_nothing_to_say() -> None:
    assert advice({"fc.weight": tensor(1), "module_list.0": tensor(2)}) == ()


def test_all_keys_have_the_prefix() -> None:
    (line,) = advice({"module.a": tensor(1), "module.b": tensor(2)})
    assert line == "all keys start with 'module.': ckptkit strip-module run.pth run-stripped.pth"


def test_most_keys_have_the_prefix() -> None:
    (line,) = advice({"_orig_mod.a": tensor(1), "_orig_mod.b": tensor(2), "c": tensor(3)})
    assert line.startswith(
        "2 of 3 keys start with '_orig_mod.': ckptkit strip-module --prefix _orig_mod. run.pth"
    )


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_every_wrapper_is_known(prefix: str) -> None:
    """The doctor knows the same: there is one table."""
    (line,) = advice({f"{prefix}a": tensor(1), f"{prefix}b": tensor(2)})
    assert f"{prefix!r}: ckptkit strip-module" in line
    assert (f"--prefix {prefix} run.pth" in line) is (prefix != "module.")


def test_a_file_that_torch_does_not_load_is_not_refused_by_it() -> None:
    root = {"a": tensor(1), "b": opaque("my.Class")}
    ck = checkpoint(root, globals=(Global("my", "Class"),))
    assert advise(summarize(replace(ck, format="torch-unpacked"))) == ()
    assert len(advise(summarize(ck))) == 1


def test_few_keys_with_the_prefix_are_a_part_of_the_model() -> None:
    assert advice({"module.a": tensor(1), "b": tensor(2)}) == ()


def test_prefixes_outside_the_weights_do_not_count() -> None:
    assert advice({"model": {"a": tensor(1)}, "module.x": tensor(1), "module.y": tensor(1)}) == ()


def test_devices() -> None:
    (line,) = advice(
        {"a": tensor(1, device="cuda:3"), "b": tensor(1), "c": tensor(1, device="mps")}
    )
    assert (
        line
        == "saved on cuda:3, mps; to load it without that device: ckptkit remap --to cpu run.pth run-cpu.pth"
    )


def test_waste() -> None:
    big = tensor(*[0.0] * (1 << 19))
    (line,) = advice({"a": view(big, (10,))})
    assert line.endswith("ckptkit convert --compact run.pth run-compact.pth")
    assert line.startswith("2,097,112 bytes")
    assert advice({"a": view(big, (1 << 19,))}) == ()


def test_objects_that_weights_only_refuses() -> None:
    names = (Global("argparse", "Namespace"), Global("collections", "OrderedDict"))
    (line,) = advice(
        {"model": {"a": tensor(1)}, "args": opaque("argparse.Namespace")}, globals=names
    )
    assert line.startswith("torch.load(weights_only=True) refuses argparse.Namespace; ")
    assert line.endswith("ckptkit convert --objects drop run.pth run-plain.pth")


@pytest.mark.parametrize("format", ["safetensors", "dcp", "deepspeed", "pickle"])
def test_what_torch_load_does_not_read_it_does_not_refuse(format: str) -> None:
    root = {"model": {"a": tensor(1)}, "args": opaque("argparse.Namespace")}
    found = summarize(checkpoint(root, globals=(Global("argparse", "Namespace"),)))
    assert advise(replace(found, format=format)) == ()


@pytest.mark.parametrize(
    "path, output",
    [
        ("a/net.PT", "a/net-compact.PT"),
        ("v1.tar", "v1-compact.pth"),
        ("blobs/0a1b", "blobs/0a1b-compact.pth"),
    ],
)
def test_convert_is_given_a_suffix_that_it_knows(path: str, output: str) -> None:
    found = summarize(checkpoint({"a": view(tensor(*[0.0] * (1 << 19)), (10,))}))
    (line,) = advise(replace(found, path=path))
    assert shlex.split(line)[-1] == output


def test_a_whole_module_keeps_its_weights() -> None:
    (line,) = advice(module({"weight": tensor(1)}), globals=(Global("models", "Net"),))
    assert line.endswith("ckptkit convert run.pth run-weights.safetensors")


def test_what_runs_code_is_dropped_by_every_edit() -> None:
    on_gpu = {f"module.{name}": tensor(1, device="cuda:0") for name in "ab"}
    strip, remap = advice({**on_gpu, "x": opaque("os.system", "ls")})
    assert strip.endswith("ckptkit strip-module --objects drop run.pth run-stripped.pth")
    assert remap.endswith("ckptkit remap --objects drop --to cpu run.pth run-cpu.pth")
    assert advice({"x": opaque("os.system", on_gpu["module.a"])}) == ()


def test_what_else_could_be_meant() -> None:
    (line,) = advice({"model": {"a": tensor(1)}, "ema": {"a": tensor(1)}})
    assert line == "ema also contains weights: ckptkit inspect --key ema run.pth"


@pytest.mark.parametrize(
    "path", ["a b.pth", "it's.pth", "$HOME/`x`.pth", "-rf.pth", "run.pth.tar", "run", "dir/"]
)
def test_CL_05_paths_survive_the_shell(path: str) -> None:
    words = shlex.split(strip_module(path))
    assert words[-2] == path
    assert (words[-3] == "--") == path.startswith("-")


def test_outputs_lie_beside_inputs() -> None:
    def output(path: str) -> str:
        return shlex.split(strip_module(path))[-1]

    assert output("a/run.pth.tar") == "a/run-stripped.pth.tar"
    assert output("a/v1.5.ckpt") == "a/v1.5-stripped.ckpt"
    assert output("https://host/a/run.pth") == "run-stripped.pth"
    assert output("shards/") == "shards-stripped"
    for suffix in BY_SUFFIX:
        assert output(f"a/run{suffix}") == f"a/run-stripped{suffix}"
    for name in ("run.tar.gz", "run.nemo", "run.pkl", "run.npy"):  # read, and not written
        assert output(name) == "run-stripped.pth"


def test_long_lists_are_cut() -> None:
    names = tuple(Global("m", f"C{n}") for n in range(9))
    found = summarize(checkpoint({"x": opaque("m.C0")}))
    (line,) = advise(replace(found, globals=names))
    assert "m.C3 and 5 more" in line
