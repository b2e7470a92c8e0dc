"""A seeded thousand of composed pickles: none that scan calls clean does anything."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRONMENT
from tests.fuzz.composing import seeds
from tests.fuzz.compositions import (
    NONE,
    Node,
    call,
    changed,
    const,
    mapping,
    named,
    read,
    size,
    write,
)

COMMAND = const("touch canary")
FIRE = named("usercode", "fire")
RUN = named("torch.utils.collect_env", "run")
PIPES = "torch.utils.data.datapipes"
INNER = write(call(named("os", "system"), COMMAND), 2)


def duck(**attributes: Node) -> Node:
    """A SimpleNamespace with attributes."""
    pairs = [part for name, value in attributes.items() for part in (const(name), value)]
    return changed(call(named("types", "SimpleNamespace")), "build", mapping(*pairs))


def tuple_of(*parts: Node) -> Node:
    return ("tuple", None, parts)


def list_of(*parts: Node) -> Node:
    return ("list", None, parts)


def later(*parts: Node) -> Node:
    """A call that is made when the partial is called."""
    return call(named("functools", "partial"), *parts)


def computed(hook: str) -> Node:
    """A SimpleNamespace that gets a hook by a state that is the result of a call."""
    pairs = list_of(tuple_of(const(hook), RUN))
    empty = call(named("types", "SimpleNamespace"))
    return changed(empty, "build", call(named("builtins", "dict"), pairs))


def made(module: str, name: str, state: Node) -> Node:
    """NEWOBJ and BUILD."""
    return changed(("new", None, (named(module, name),)), "build", state)


def stdlib() -> Node:
    """os.system by way of what other modules import."""
    system = later(named("operator", "methodcaller"), const("system"))
    chain = list_of(system, COMMAND, named("random", "_os"))
    return later(named("functools", "reduce"), named("operator", "call"), chain)


def objects(flags: int, data: Node) -> Node:
    """An array of objects by a dtype with these flags."""
    parts = (3, "|", None, None, None, -1, -1, flags)
    plain = call(named("numpy", "dtype"), const("O8"), const(False), const(True))
    dtype = changed(plain, "build", tuple_of(*map(const, parts)))
    empty = tuple_of(const(0))
    array = call(
        named("numpy._core.multiarray", "_reconstruct"),
        named("numpy", "ndarray"),
        empty,
        const(b"b"),
    )
    state = tuple_of(const(1), tuple_of(const(1)), dtype, const(False), data)
    return changed(array, "build", state)


SCRIPT = "torch.jit._pickle"
CODE = call(named(SCRIPT, "__loader__.source_to_code"), const(b"open('canary', 'w')"), const("x"))
BAD = {
    "keys": call(named("builtins", "dict"), duck(keys=later(RUN, COMMAND))),
    "stdlib": call(named("builtins", "dict"), duck(keys=stdlib())),
    "ordered": call(named("collections", "OrderedDict"), duck(keys=stdlib())),
    "default": call(named("collections", "defaultdict"), const(None), duck(keys=stdlib())),
    "uuid": call(named("uuid", "UUID"), duck(replace=FIRE)),
    "parameter": call(named("torch.nn.parameter", "Parameter"), duck(detach=FIRE)),
    "to": call(named("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
               duck(to=FIRE), const(None), const("cpu"), const(False)),
    "setstate": changed(computed("__setstate__"), "build", COMMAND),
    "append": changed(computed("append"), "append", COMMAND),
    "datapipe": call(named("builtins", "list"), made(
        f"{PIPES}.iter.callable", "MapperIterDataPipe",
        mapping(const("fn"), RUN, const("datapipe"), list_of(COMMAND)))),
    "wrapper": made(f"{PIPES}.datapipe", "_IterDataPipeSerializationWrapper", tuple_of(
        call(named("builtins", "bytes"), list_of(*map(const, INNER))), const(False))),
    "exec": call(named("builtins", "dict"), duck(
        keys=call(named(SCRIPT, "build_intlist.__class__"), CODE, mapping()))),
    "write": call(named(SCRIPT, "__loader__.set_data"), const("canary"), const(b"x")),
    "evaluates": ("new", None, (named("sympy", "sin"), const("1+1"))),
}  # fmt: skip
USER = named("usercode", "Net")


def owned(**attributes: Node) -> Node:
    """An object of somebody's class with attributes."""
    pairs = [part for name, value in attributes.items() for part in (const(name), value)]
    return changed(("new", None, (USER,)), "build", mapping(*pairs))


def array(dtype: Node, shape: Node, *data: Node) -> Node:
    """An array, with a state unless there is no data."""
    rebuilt = named("numpy._core.multiarray", "_reconstruct")
    made = call(rebuilt, named("numpy", "ndarray"), shape, const(b"b"))
    state = tuple_of(const(1), tuple_of(const(1)), dtype, const(False), *data)
    return changed(made, "build", state) if data else made


def record(field: Node, flags: int) -> Node:
    """The dtype of a record of eight bytes with one field."""
    plain = call(named("numpy", "dtype"), const("V8"), const(False), const(True))
    fields = mapping(const("a"), field)
    numbers = map(const, (8, 1, flags))
    parts = (const(3), const("|"), const(None), tuple_of(const("a")), fields, *numbers)
    return changed(plain, "build", tuple_of(*parts))


def made_by_cpp() -> Node:
    """An object of a class of C++ whose memory is set up by the state that is missing here."""
    return ("new", None, (named("torch.distributed.tensor.placement_types", "Partial"),))


UTILS, NOTHING = "torch._utils", call(named("collections", "OrderedDict"))
TEXT_TYPE = call(named("numpy", "dtype"), const("V8"), const(False), const(True))
LONGS = changed(call(named("numpy", "dtype"), const("i8"), const(False), const(True)), "build",
                tuple_of(*map(const, (3, "<", None, None, None, -1, -1, 0))))  # fmt: skip
STORED = ("binpersid", None, (tuple_of(const("storage"), named("torch", "FloatStorage"),
                                       const("0"), const("cpu"), const(0)),))  # fmt: skip
PARAMETER = call(named(UTILS, "_rebuild_parameter_with_state"),
                 call(named("torch", "Tensor")), const(False), NOTHING,
                 mapping(const("to"), FIRE))  # fmt: skip
FOUND = {
    "pointers": objects(0, const(b"A" * 8)),
    "pointers-in-a-record": array(
        record(tuple_of(call(named("numpy", "dtype"), const("O8")), const(0)), 0),
        tuple_of(const(0)), const(b"A" * 8)),
    "shape": array(NONE, tuple_of(const(2**63 - 1))),
    "shape-of-numbers": changed(array(NONE, tuple_of(const(0))), "build", tuple_of(
        const(1), tuple_of(const(2**63 - 1)), LONGS, const(False), const(b"A" * 8))),
    "owned-detach": call(named("torch.nn.parameter", "Parameter"), owned(detach=FIRE)),
    "owned-to": call(named(UTILS, "_rebuild_device_tensor_from_cpu_tensor"),
                     owned(to=FIRE), named("torch", "float32"), const("cpu"), const(False)),
    "dressed-to": call(named(UTILS, "_rebuild_device_tensor_from_cpu_tensor"),
                       PARAMETER, named("torch", "float32"), const("cpu"), const(False)),
    "owned-keys": call(named("copyreg", "__newobj_ex__"), USER, tuple_of(), owned(keys=FIRE)),
    "forward-reference": call(named("operator", "getitem"), named("typing", "List"), const("1+1")),
    "fraction": call(named("fractions", "Fraction"), const("1e999999999")),
    "class-by-slot": changed(call(named("argparse", "Namespace")), "build", tuple_of(
        const(None), mapping(const("__class__"), named("usercode", "Caller")))),
    "mapping-items": call(
        named(UTILS, "_rebuild_parameter_with_state"), call(named("torch", "Tensor")),
        const(False), NOTHING, changed(changed(NOTHING, "setitem", const("a"), const(1)),
                                       "build", mapping(const("items"), FIRE))),
}  # fmt: skip
# What is seen by nothing but scan: torch refuses the rest of the arguments, or reads what lies
# behind.
SILENT = {
    "zone": call(named("zoneinfo", "ZoneInfo._unpickle"), const("os.path/x"), const(True)),
    "zone-of-a-path": call(named("zoneinfo", "ZoneInfo._unpickle"), const("../x"), const(True)),
    "metadata": call(named(UTILS, "_rebuild_tensor_v2"), STORED, const(0), tuple_of(), tuple_of(),
                     const(False), const(None), mapping(const(True), const(64))),
    "newobj-ex-keys": ("newex", None, (USER, tuple_of(), owned(keys=FIRE))),  # as Python's own pickle
    "beyond-the-element": array(
        record(tuple_of(call(named("numpy", "dtype"), const("i8")), const(1 << 20)), 16),
        tuple_of(const(0)), const(b"A" * 8)),
    "built-after-use": tuple_of(("put", None, (TEXT_TYPE,)), array(
        TEXT_TYPE, tuple_of(const(0)), const(b"A" * 8))),
    "sizes": call(named("numpy._core.multiarray", "scalar"), changed(
        TEXT_TYPE, "build", tuple_of(*map(const, (3, "<", None, None, None, -1, 0)))), const(b"A" * 8)),
    "no-state": mapping(made_by_cpp(), const(1)),
    "quantizer": call(named(UTILS, "_rebuild_qtensor"), STORED, const(0), tuple_of(), tuple_of(),
                      tuple_of(named("torch", "per_tensor_affine"), const(0.1),
                               owned(__torch_function__=FIRE)), const(False), const(None)),
}  # fmt: skip
BAD |= FOUND
GOOD = {
    "pointers-that-are-none": objects(63, list_of(const(1))),
    "namespace": duck(keys=const(1)),
}
OLD = pytest.mark.skipif(sys.version_info < (3, 11), reason="operator.call")


def hunt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which may fork."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.soundness", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)


def tried(cases: dict[str, Node], folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each pickle did in the sandbox, and the verdict of scan."""
    options = []
    for name, node in cases.items():
        path = folder / f"{name}.pkl"
        path.write_bytes(write(node, 4))
        options += ["--file", str(path)]
    done = hunt(*options)
    assert not (folder / "canary").exists()
    return {each["file"]: each for each in map(json.loads, done.stdout.splitlines())}


@OLD
def test_sandbox_sees_what_bad_pickles_do_and_scan_reports_them(tmp_path: Path) -> None:
    told = tried(BAD | GOOD | SILENT, tmp_path)
    assert [name for name in BAD if not told[name]["events"]] == []
    assert [name for name in BAD | SILENT if told[name]["clean"]] == []
    assert [name for name in GOOD if told[name]["events"] or not told[name]["clean"]] == []


@OLD
def test_a_thousand_compositions_are_what_scan_says() -> None:
    done = hunt("--count", "1000", "--seed", "1")
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
    assert "1,000 compositions" in done.stdout


def test_trees_are_what_was_pickled() -> None:
    value = {"a": [1, 2.5, None, (True, b"x")], "b": {"c": {1, 2}}}
    for protocol in (2, 4):
        tree = read(pickle.dumps(value, protocol))
        for spelling in (0, 1, 2):
            assert pickle.loads(write(tree, 4, spelling)) == value
    assert all(size(node) for node in seeds())
