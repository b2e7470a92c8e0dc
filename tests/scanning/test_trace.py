"""The tracer against CPython's own unpickler, and what it notes of pickles that no machine comes
through."""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
import random
import struct
from collections import Counter, OrderedDict
from typing import Any

import pytest

from ckptkit.core.bytesource import Memory
from ckptkit.core.limits import LIMITS
from ckptkit.core.tree import Global
from ckptkit.pickles.machine import FIRST_WINDOW, LARGE, WINDOW
from ckptkit.pickles.streams import Trace
from ckptkit.scanning.trace import WEIGHTS_ONLY_OPCODES, trace
from tests.fuzz.machines import InPython
from tests.scanning.hostile_pickles import (
    CALLS,
    SYSTEM,
    TOUCH,
    UNCLEAR,
    call,
    name,
    pickle2,
    pickle4,
    raw,
    short,
    text,
)


def traced(data: bytes) -> Trace:
    return trace(Memory(data))


def names(found: Trace) -> list[str]:
    return list(map(str, found.globals))


def kinds(data: bytes) -> set[str]:
    return {each.kind for each in traced(data).calls}


class Thing:
    """Pickled by name, never loaded here."""

    def __init__(self) -> None:
        self.inner = [1, {"a": (2, 3.5)}]


VALUES: list[Any] = [
    None, [1, -2, 1 << 40, -(1 << 70), 2.5, True], {"a": b"bytes", "b": bytearray(b"more")}, {1, 2}, frozenset("ab"),
    ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), "text\n\u20ac", OrderedDict(a=1), Counter("aab"), 1 + 2j, Thing(),
    Thing, [[]] * 3, b"x" * 70_000, "y" * 70_000, slice(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
def test_names_and_end_are_those_of_cpython(protocol: int) -> None:
    for value in VALUES:
        data = pickle.dumps(value, protocol)
        machine = InPython(data)
        machine.load()
        found = traced(data + b"behind")
        said = repr(value)[:80]
        assert (found.error, found.doubts, found.stop) == (None, (), len(data)), said
        named = [name for step, *name in machine.log.events if step == "name"]
        assert [[each.module, each.name] for each in found.globals] == _distinct(named), said
        made = Counter(each[1] for each in machine.log.events if each[0] == "make")
        calls = {each.name: each.times for each in found.calls}
        assert {f"{module}.{name}": count for (module, name), count in made.items()} == calls, said


def _distinct(names: list[list[str]]) -> list[list[str]]:
    return [each for at, each in enumerate(names) if each not in names[:at]]


def test_the_opcodes_of_weights_only_are_torchs_own() -> None:
    import torch._weights_only_unpickler as own

    codes = {each.name: each.code.encode("latin-1") for each in pickletools.opcodes}
    imported = {
        value for key, value in vars(own).items() if key.isupper() and isinstance(value, bytes)
    }
    assert {codes[each] for each in WEIGHTS_ONLY_OPCODES} == imported


@pytest.mark.parametrize("case", CALLS)
def test_PK_01_PK_02_every_call_is_noted(case: str) -> None:
    assert kinds(CALLS[case]) & {"harmful", "unknown", "loads"}


@pytest.mark.parametrize("case", UNCLEAR)
def test_PK_04_what_cannot_be_told_is_said(case: str) -> None:
    found = traced(UNCLEAR[case])
    noted = {each.kind for each in found.calls}
    assert found.error or found.doubts or found.values or noted & {"allocates", "unsure"}
    assert not noted & {"harmful", "unknown"}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_PK_03_extensions_are_not_looked_up(size: int) -> None:
    copyreg.add_extension("os", "system", 1)
    try:
        found = traced(
            bytes([0x80, 4, {1: 0x82, 2: 0x83, 4: 0x84}[size]])
            + (1).to_bytes(size, "little")
            + b"."
        )
    finally:
        copyreg.remove_extension("os", "system", 1)
    assert found.globals == () and "uses copyreg extension 1, which" in found.doubts[0]


def test_PK_05_dropped_calls_stay() -> None:
    for data in (
        pickle2(SYSTEM + b"0N"),
        pickle2(b"((" + name("os.system") + text(TOUCH) + b"o1N"),
        pickle2(SYSTEM + b"2"),
    ):
        assert [each.name for each in traced(data).calls] == ["os.system"]


def test_PK_06_dotted_names_are_whole() -> None:
    found = traced(
        pickle4(short("pathlib") + short("os.system") + b"\x93" + short(TOUCH) + b"\x85R")
    )
    assert found.globals == (Global("pathlib", "os.system"),) and found.calls[0].kind == "harmful"


def test_PK_07_names_of_python_2() -> None:
    assert traced(pickle2(call("__builtin__.set", b"]"))).calls[0].kind == "accepted"
    assert names(traced(pickle4(name("__builtin__.set")))) == ["__builtin__.set"]


def test_PK_11_byte_strings_are_handed_on() -> None:
    inner = pickle2(SYSTEM)
    assert [
        each.source.read(0, each.source.size) for each in traced(pickle4(raw(inner))).nested
    ] == [inner]
    (nested,) = traced(pickle2(call("torch.storage._load_from_bytes", raw(b"anything")))).nested
    assert nested.loaded
    large = b"\x80\x02" + bytes(70_000)
    assert [each.source.size for each in traced(pickle4(raw(large))).nested] == [len(large)]


@pytest.mark.parametrize(
    "tail", [b"", b"\xff", b"0000000.", b"h\x09.", b"X\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\xff"]
)
def test_PK_14_what_ran_before_the_failure_is_noted(tail: bytes) -> None:
    found = traced(b"\x80\x02" + SYSTEM + tail)
    assert found.error is not None and [each.name for each in found.calls] == ["os.system"]


def test_PK_14_cut_anywhere() -> None:
    data = pickle2(b"}" + text("a") + call("os.system", text(TOUCH)) + b"s")
    at = traced(data).calls[0].offset
    for length in range(len(data)):
        found = traced(data[:length])
        assert found.error is not None and len(found.calls) == (length > at)


def test_PK_15_nothing_but_a_trace_comes_of_any_bytes() -> None:
    rng = random.Random(0)
    golden = [*CALLS.values(), *UNCLEAR.values()]
    for _ in range(3_000):
        data = bytearray(rng.choice(golden))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        assert isinstance(traced(bytes(data)), Trace)


def test_PK_16_frames_that_two_machines_read_differently() -> None:
    body = b"K\x01."
    for size in (1, 4, 1 << 63):
        assert traced(b"\x80\x04\x95" + struct.pack("<Q", size) + body).doubts
    for size in (2, 3):
        assert not traced(b"\x80\x04\x95" + struct.pack("<Q", size) + body).doubts


def test_PK_18_lengths_that_lie_allocate_nothing() -> None:
    for lie in (
        b"\x8e" + b"\xff" * 7 + b"\x3f", b"\x8d\0\0\0\0\0\1\0\0", b"\x8b\xff\xff\xff\x7f",
        b"T\xff\xff\xff\xff", b"\x8a\xff",
    ):  # fmt: skip
        assert traced(b"\x80\x04" + lie).error


def test_PK_20_floods_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.core.limits.LIMITS", type(LIMITS)(trace_bytes=10_000))
    found = traced(b"N0" * 20_000)
    assert found.error is not None and "trace_bytes" in found.error


def test_PK_21_PK_22_PK_23_shapes_cost_nothing() -> None:
    assert traced(b"\x80\x02" + b"]q\0" + b"h\0h\0h\0\x87q\0" * 1_000 + b".").error is None
    assert traced(b"\x80\x02]q\0h\0a.").error is None
    deep = traced(b"\x80\x02" + name("mine.f") + b")" + b"\x85" * 200_000 + b"R.")
    assert deep.error is None and len(deep.calls[0].args) < 200


def test_a_thousand_equal_calls_are_one() -> None:
    found = traced(pickle2(b"](" + call("os.system", text(TOUCH)) * 1_000 + b"e"))
    assert [(each.name, each.times) for each in found.calls] == [("os.system", 1_000)]


def test_harm_hidden_behind_a_thousand_harmless_calls_is_another_call() -> None:
    rebuild, kind = name("torch._utils._rebuild_parameter"), name("torch.Tensor")
    good = call(
        "torch._tensor._rebuild_from_type_v2",
        rebuild,
        kind,
        name("torch.Tensor") + b")R\x88N\x87",
        b"}",
    )
    bad = call("torch._tensor._rebuild_from_type_v2", name("os.system"), kind, b")", b"}")
    assert kinds(pickle2(b"](" + good * 1_000 + bad + b"e")) == {"accepted", "harmful"}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (call("collections.OrderedDict"), "accepted"),
        (call("pathlib.PosixPath", text("a")), "harmless"),
        (name("mine.Net") + b")\x81", "class"),
        (call("mine.Net"), "unknown"),
        (call("transformers.trainer_utils.IntervalStrategy", text("no")), "harmless"),
        (name("torch.nn.modules.linear.Linear") + b")\x81", "harmless"),
        (call("torch.nn.modules.linear.Linear", b"K\1", b"K\1"), "harmful"),
        (call("copyreg._reconstructor", name("mine.Net"), name("builtins.object"), b"N"), "class"),
        (
            call("copyreg._reconstructor", name("subprocess.Popen"), name("builtins.object"), b"N"),
            "harmful",
        ),
        (call("torch._tensor._rebuild_from_type_v2", name("mine.f"), b"N", b")", b"}"), "unknown"),
        (call("builtins.list", call("builtins.range", b"J\0\0\0\x7f")), "unsure"),
        (call("torch.storage._load_from_bytes", raw(b"x")), "loads"),
        (call("builtins.dict", call("types.SimpleNamespace")), "unsure"),
        (call("builtins.bytes", b"](K\x63K\x6fe"), "unsure"),
        (name("types.SimpleNamespace") + b")R" + call("mine.state") + b"b", "unsure"),
        (name("mine.Net") + b")\x81}b}b", "harmful"),
        (name("mine.Net") + b")\x81}bNa", "harmful"),
        (name("mine.Net") + b")\x81Na}" + b"b", "class"),
        (name("pathlib.PosixPath") + b")R}b", "unsure"),
        (b")Na", "unsure"),
    ],
)
def test_kinds_of_calls(data: bytes, kind: str) -> None:
    assert kind in kinds(pickle2(data))


def adam(group: bytes) -> bytes:
    """An Adam whose state has one group of parameters: its __setstate__ calls methods of it."""
    state = b"}(" + text("state") + b"}" + text("param_groups") + group + text("defaults") + b"}u"
    return name("torch.optim.adam.Adam") + b")\x81" + state + b"b"


NAMESPACE = call("types.SimpleNamespace")


@pytest.mark.parametrize(("body", "is_clean"), [
    (adam(b"]}a"), True),
    (adam(b"]" + call("collections.defaultdict", name("builtins.dict")) + b"a"), False),
    (adam(b"]" + call("collections.defaultdict", name("mine.f")) + b"a"), False),
    (call("collections.defaultdict", name("functools.partial")), False),
    (adam(call("collections.deque") + NAMESPACE + b"a"), False),
    (adam(call("builtins.list", b"]" + NAMESPACE + b"a")), False),
    (adam(call("builtins.tuple", b"]" + NAMESPACE + b"a")), False),
    (adam(b"]" + call("builtins.dict", b"}" + text("a") + NAMESPACE + b"s") + b"a"), False),
])  # fmt: skip
def test_what_answers_in_the_words_of_the_file_is_found_in_what_calls_gave(
    body: bytes, is_clean: bool
) -> None:
    assert (kinds(pickle2(body)) <= {"accepted", "harmless", "class"}) == is_clean


@pytest.mark.parametrize("items", [8, 9])
def test_a_type_of_dates_has_a_unit(items: int) -> None:
    state = b"(K\x04" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
    state += b"}(" + raw(b"ns") + b"K\x01K\x01K\x01t\x86" if items == 9 else b""
    dtype = call("numpy.dtype", text("M8"), b"\x89", b"\x88") + state + b"tb"
    assert ("unsure" in kinds(pickle2(dtype))) == (items == 8)


@pytest.mark.parametrize(
    ("part", "value"),
    [(0, text("torch.FloatStorage")), (1, b"K\x00"), (2, NAMESPACE), (3, b"\x88")],
)
def test_the_parts_of_a_persistent_id_are_judged(part: int, value: bytes) -> None:
    parts = [name("torch.FloatStorage"), text("0"), text("cpu"), b"K\x04"]
    right = pickle2(b"(" + text("storage") + b"".join(parts) + b"tQ")
    parts[part] = value
    wrong = pickle2(b"(" + text("storage") + b"".join(parts) + b"tQ")
    assert traced(right).doubts == () and "identifies a storage" in traced(wrong).doubts[0]


@pytest.mark.parametrize(("body", "refused"), [
    (text("a"), None), (short("a"), "SHORT_BINUNICODE"), (b"U\x01\xff", "Python 2"),
    (b")" + text("a") + b"a", "changes"), (b"}N" + b"b", "state"),
    (text("pid") + b"Q", "persistent"),
])  # fmt: skip
def test_what_weights_only_refuses_besides_names(body: bytes, refused: str | None) -> None:
    from torch._weights_only_unpickler import Unpickler

    found = traced(pickle2(body)).refused
    assert (found is None) == (refused is None) and (refused is None or refused in str(found))
    machine = Unpickler(io.BytesIO(pickle2(body)), encoding="utf-8")
    if refused is None:
        machine.load()  # type: ignore[no-untyped-call]
    else:
        with pytest.raises((pickle.UnpicklingError, UnicodeDecodeError)):
            machine.load()  # type: ignore[no-untyped-call]


def test_large_bytes_in_what_is_read_already() -> None:
    """They are passed over wherever they are: behind the window, or, after something large, in
    it."""
    first = text("x" * WINDOW)
    large = b"B" + struct.pack("<I", LARGE) + bytes(LARGE)
    data = b"\x80\x03(" + first + large + large + b"K\x01t."
    found = trace(Memory(data))
    assert LARGE > FIRST_WINDOW and found.error is None and found.stop == len(data)
