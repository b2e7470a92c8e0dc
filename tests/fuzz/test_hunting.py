"""What hunts have found before is reported by scan, and the sandbox sees what it does."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.conftest import ROOT
from tests.fuzz.holes import HOLES
from tests.fuzz.hunting import clean
from tests.fuzz.material import COMMAND, EVIL, FIRE, NET, TENSOR, group, made, pair
from tests.fuzz.trees import (
    MAGIC,
    NONE,
    Node,
    apply,
    call,
    changed,
    const,
    file,
    late,
    mapped,
    mapping,
    named,
    read,
    write,
)

RUN = named("torch.utils.collect_env", "run")
PIPES = "torch.utils.data.datapipes"
SCRIPT, UTILS = "torch.jit._pickle", "torch._utils"
NOTHING = apply("collections.OrderedDict")
EMPTY = group("tuple")


def duck(**attributes: Node) -> Node:
    """A SimpleNamespace with attributes."""
    pairs = [part for name, value in attributes.items() for part in (const(name), value)]
    return changed(apply("types.SimpleNamespace"), "build", mapping(*pairs))


def owned(**attributes: Node) -> Node:
    """An object of somebody's class with attributes."""
    return changed(("new", None, (NET,)), "build", duck(**attributes)[2][1])


def later(*parts: Node) -> Node:
    """A call that is made when the partial is called."""
    return apply("functools.partial", *parts)


def dicted(value: Node) -> Node:
    """What asks for keys."""
    return apply("builtins.dict", value)


def computed(hook: str) -> Node:
    """A SimpleNamespace that gets a hook by a state that is the result of a call."""
    return changed(apply("types.SimpleNamespace"), "build", dicted(pair(const(hook), RUN)))


def stdlib() -> Node:
    """os.system by way of what other modules import."""
    chain = group(
        "list",
        later(named("operator", "methodcaller"), const("system")),
        COMMAND,
        named("random", "_os"),
    )
    return later(named("functools", "reduce"), named("operator", "call"), chain)


def dtype(kind: str, *state: Any) -> Node:
    """A numpy.dtype, with a state unless that is empty."""
    plain = apply("numpy.dtype", const(kind), const(False), const(True))
    parts = [each if isinstance(each, tuple) else const(each) for each in state]
    return changed(plain, "build", group("tuple", *parts)) if state else plain


def array(kind: Node, shape: Node, *data: Node) -> Node:
    """An array, with a state unless there is no data."""
    rebuilt = named("numpy._core.multiarray", "_reconstruct")
    empty = call(rebuilt, named("numpy", "ndarray"), shape, const(b"b"))
    state = group("tuple", const(1), group("tuple", const(1)), kind, const(False), *data)
    return changed(empty, "build", state) if data else empty


def objects(flags: int, data: Node) -> Node:
    """An array of objects by a dtype with these flags."""
    return array(
        dtype("O8", 3, "|", None, None, None, -1, -1, flags), group("tuple", const(0)), data
    )


def record(field: Node, flags: int) -> Node:
    """The dtype of a record of eight bytes with one field."""
    return dtype(
        "V8", 3, "|", None, group("tuple", const("a")), mapping(const("a"), field), 8, 1, flags
    )


def adam(groups: Node, **state: Node) -> Node:
    """An optimizer whose __setstate__ goes through these groups."""
    empty = {"defaults": mapping(), "state": mapping(), **state, "param_groups": groups}
    return made(
        ("torch.optim.adam", "Adam"),
        mapping(*(part for key in empty for part in (const(key), empty[key]))),
    )


def stored(*parts: Node) -> Node:
    return ("binpersid", None, (group("tuple", *parts),))


CODE = call(named(SCRIPT, "__loader__.source_to_code"), const(b"open('canary', 'w')"), const("x"))
PARAMETER = call(
    named(UTILS, "_rebuild_parameter_with_state"),
    apply("torch.Tensor"),
    const(False),
    NOTHING,
    mapping(const("to"), FIRE),
)
LONGS = dtype("i8", 3, "<", None, None, None, -1, -1, 0)
BAD = {
    "keys": dicted(duck(keys=later(RUN, COMMAND))),
    "stdlib": dicted(duck(keys=stdlib())),
    "ordered": apply("collections.OrderedDict", duck(keys=stdlib())),
    "default": apply("collections.defaultdict", NONE, duck(keys=stdlib())),
    "uuid": apply("uuid.UUID", duck(replace=FIRE)),
    "parameter": apply("torch.nn.parameter.Parameter", duck(detach=FIRE)),
    "to": call(named(UTILS, "_rebuild_device_tensor_from_cpu_tensor"), duck(to=FIRE), NONE, const("cpu"), const(False)),
    "setstate": changed(computed("__setstate__"), "build", COMMAND),
    "append": changed(computed("append"), "append", COMMAND),
    "datapipe": apply("builtins.list", made((f"{PIPES}.iter.callable", "MapperIterDataPipe"),
                                                     mapping(const("fn"), RUN, const("datapipe"), group("list", COMMAND), const("input_col"), NONE, const("output_col"), NONE))),
    "wrapper": made((f"{PIPES}.datapipe", "_IterDataPipeSerializationWrapper"), group(
        "tuple", apply("builtins.bytes", group("list", *map(const, EVIL))), const(False))),
    "exec": dicted(duck(keys=call(named(SCRIPT, "build_intlist.__class__"), CODE, mapping()))),
    "write": call(named(SCRIPT, "__loader__.set_data"), COMMAND, const(b"x")),
    "evaluates": ("new", None, (named("sympy", "sin"), const("1+1"))),
    "pointers": objects(0, const(b"A" * 8)),
    "octal": array(dtype("O8", 3, "|", None, None, None, -1, -1, ("octal", 63, ())), group("tuple", const(0)), group("list", *[const(1)] * 64)),
    "pointers-in-a-record": array(record(group("tuple", dtype("O8"), const(0)), 0), group("tuple", const(0)), const(b"A" * 8)),
    "times": dtype("M8", 3, "<", None, None, None, -1, -1, 0),
    "shape": array(NONE, group("tuple", const(2**63 - 1))),
    "shape-of-numbers": changed(array(NONE, group("tuple", const(0))), "build", group(
        "tuple", const(1), group("tuple", const(2**63 - 1)), LONGS, const(False), const(b"A" * 8))),
    "owned-detach": apply("torch.nn.parameter.Parameter", owned(detach=FIRE)),
    "owned-to": call(named(UTILS, "_rebuild_device_tensor_from_cpu_tensor"), owned(to=FIRE), named("torch", "float32"), const("cpu"), const(False)),
    "dressed-to": call(named(UTILS, "_rebuild_device_tensor_from_cpu_tensor"), PARAMETER, named("torch", "float32"), const("cpu"), const(False)),
    "owned-keys": apply("copyreg.__newobj_ex__", NET, EMPTY, owned(keys=FIRE)),
    "forward-reference": apply("operator.getitem", named("typing", "List"), const("1+1")),
    "fraction": apply("fractions.Fraction", const("1e999999999")),
    "class-by-slot": changed(apply("argparse.Namespace"), "build", group("tuple", NONE, mapping(const("__class__"), named("usercode", "Caller")))),
    "mapping-items": call(named(UTILS, "_rebuild_parameter_with_state"), apply("torch.Tensor"), const(False), NOTHING, changed(
        changed(NOTHING, "setitem", const("a"), const(1)), "build", mapping(const("items"), FIRE))),
    "disguised": call(("disguised", (("usercode", "fire"), ("collections", "OrderedDict")), ())),
    "factory": adam(group("list", apply("collections.defaultdict", later(FIRE, COMMAND)))),
    "input": adam(group("list", apply("collections.defaultdict", later(named("builtins", "input"), COMMAND)))),
    "deque": adam(apply("collections.deque", group("list", duck(setdefault=later(FIRE, COMMAND))))),
    "list": adam(apply("builtins.list", group("list", duck(setdefault=FIRE)))),
    "tuple": adam(apply("builtins.tuple", group("list", duck(setdefault=FIRE)))),
    "literal": adam(group("list", duck(setdefault=FIRE))),
    "late": adam(late(duck(setdefault=FIRE))),
    "defaults": adam(group("list"), defaults=duck(setdefault=FIRE)),
    "endless": made(("torch.nn.modules.linear", "Linear"), mapping(const("_buffers"), apply("itertools.count"))),
}  # fmt: skip
MODULE = stored(const("module"), FIRE, NONE, NONE)
ELSEWHERE = (
    const("storage"), named("torch", "FloatStorage"), const("0"), duck(startswith=FIRE), const(1),
)  # fmt: skip
LEGACY = {
    "legacy-factory": adam(group("list", apply("collections.defaultdict", MODULE))),
    "legacy-location": stored(*ELSEWHERE),
}
EVIL_CALL = b"cusercode\nfire\n(S'x'\ntR"
BARE = {  # files that nothing but their first bytes makes pickles
    "index": b"cusercode\nfire\n(S'x'\np0001\ntR.",
    "index-first": b"K\1p01\n0" + EVIL_CALL + b".",
    "magic-as-text": b"I%d\n." % MAGIC + EVIL_CALL + b".",
    "magic-after-others": b"NN00" + pickle.dumps(MAGIC, 2) + EVIL_CALL + b".",
    **{f"name-after-{at}": EVIL_CALL + b"0c%b\n." % name for at, name in enumerate((b"a b\nc", b"\n", b"os\n1", b"os..path\nx"))},
}  # fmt: skip
# What nothing but scan sees: torch refuses the rest of the arguments, or reads what lies behind.
SILENT = {
    "zone": call(named("zoneinfo", "ZoneInfo._unpickle"), const("os.path/x"), const(True)),
    "zone-that-is-missing": call(named("zoneinfo", "ZoneInfo._unpickle"), const("Mars/Olympus"), const(True)),
    "zone-of-a-path": call(named("zoneinfo", "ZoneInfo._unpickle"), const("../x"), const(True)),
    "metadata": call(named(UTILS, "_rebuild_tensor_v2"), TENSOR[2][1], const(0), EMPTY, EMPTY, const(False), NONE, mapping(const(True), const(64))),
    "newobj-ex-keys": ("newex", None, (NET, EMPTY, owned(keys=FIRE))),  # as Python's own pickle
    "beyond-the-element": array(record(group("tuple", dtype("i8"), const(1 << 20)), 16), group("tuple", const(0)), const(b"A" * 8)),
    "built-after-use": group("tuple", ("put", None, (dtype("V8"),)), array(dtype("V8"), group("tuple", const(0)), const(b"A" * 8))),
    "sizes": apply("numpy._core.multiarray.scalar", dtype("V8", 3, "<", None, None, None, -1, 0), const(b"A" * 8)),
    "no-state": mapping(("new", None, (named("torch.distributed.tensor.placement_types", "Partial"),)), const(1)),
    "quantizer": call(named(UTILS, "_rebuild_qtensor"), TENSOR[2][1], const(0), EMPTY, EMPTY, group(
        "tuple", named("torch", "per_tensor_affine"), const(0.1), owned(__torch_function__=FIRE)), const(False), NONE),
}  # fmt: skip
GOOD = {
    "pointers-that-are-none": objects(63, group("list", const(1))),
    "namespace": duck(keys=const(1)),
}


SCRIPT = "import sys, warnings; warnings.simplefilter('ignore'); from tests.fuzz.__main__ import main; print([main(each.split()) for each in sys.argv[1:]])"
# For each hole a file that it lets through.
OPENED = {
    "memo_index": "disguised", "optimizer": "factory", "location": "legacy-location", "datetimes": "times", "endless": "endless",
    "deque": "deque", "results": "list", "bags": "literal", "bags_as_texts": "uuid", "twice": "setstate", "datapipes": "datapipe",
    "loaders": "write", "evaluated": "evaluates", "pointers": "pointers",
}  # fmt: skip


def written(name: str, node: Node) -> bytes:
    return file(node, 4, 0, "legacy30" if name in LEGACY else "raw")


def shown(*lines: str) -> list[str]:
    """What commands print, in a process of its own, which may fork, and then their codes."""
    return forked.program(SCRIPT, *lines, cwd=ROOT, seconds=600).output.splitlines()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="operator.call")
def test_the_sandbox_sees_what_bad_pickles_do_and_scan_reports_them(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, node in {**BAD, **LEGACY, **GOOD, **SILENT}.items():
        (folder / name).write_bytes(written(name, node))
    for name, data in BARE.items():
        (folder / name).write_bytes(data)
    said = shown(f"load {' '.join(map(str, folder.iterdir()))}")
    assert not (folder / "canary").exists() and said[-1] == "[0]", said[-20:]
    told = {each["file"]: each for each in map(json.loads, filter(_is_json, said))}
    assert [name for name in [*BAD, *LEGACY, *BARE] if not told[name]["events"]] == []
    assert [name for name in [*BAD, *LEGACY, *SILENT, *BARE] if told[name]["clean"]] == []
    assert [name for name in GOOD if told[name]["events"] or not told[name]["clean"]] == []


def _is_json(line: str) -> bool:
    return line.startswith('{"file"')


def test_hunts_find_nothing_but_the_holes_of_reviews() -> None:
    said = shown("hunt --few --count 60 --writers", "holes twice --few --count 20000")
    text = "\n".join(said)
    assert said[-1] == "[0, 0]", text[-8_000:]
    assert "60 files" in text and " 0 harmless" not in text  # of which something was written


@pytest.mark.parametrize("name", OPENED)
def test_holes_are_open(name: str) -> None:
    case, hole = OPENED[name], HOLES[name]
    node = {**BAD, **LEGACY}[case]
    assert not clean(written(case, node)) and clean(written(case, mapped(node, hole)))


def test_trees_are_what_was_pickled() -> None:
    value = {"a": [1, 2.5, None, (True, b"x")], "b": {"c": {1, 2}}}
    for protocol in (2, 4):
        tree = read(pickle.dumps(value, protocol))
        for spelling in (0, 1, 2):
            assert pickle.loads(write(tree, 4, spelling)) == value
