"""The pickle machine against Python's own, opcode by opcode, at every window."""

from __future__ import annotations

import collections
import gc
import math
import pickle
import pickletools
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.errors import FormatError, LimitError, UnsafeGlobalError, UnsupportedError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Storage
from ckptkit.core.tree import (
    ByteString,
    Global,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
)
from ckptkit.pickles import machine as module
from ckptkit.pickles.storages import StorageTable
from ckptkit.pickles.values import unpickle
from ckptkit.scanning.trace import trace
from tests.formats.torch_zip.archives import pickle_of, storage, tensor, text
from tests.pickles.making import emit, machine, same, to_python

PROTOCOLS = range(6)


def table() -> StorageTable:
    """Storages of any key, of as many bytes as the pickle says."""
    return StorageTable(
        lambda key, nbytes, device: Storage(Range(Memory(bytes(nbytes)), 0, nbytes), device)
    )


def frame(data: bytes) -> bytes:
    return b"\x95" + struct.pack("<Q", len(data)) + data


# Each with what Python makes of it; together they use every opcode that does not lead out of the
# file.
PLAIN = [
    b"I42\n.", b"I-7\n.", b"I01\n.", b"I00\n.", b"L-5L\n.", b"L5\n.", b"K\xff.", b"M\x01\x02.", b"J\xff\xff\xff\xff.",
    b"\x80\x02\x8a\x00.", b"\x8a\x02\x00\xff.", b"\x8b\x03\x00\x00\x00\x01\x02\x03.",
    b"F-1.5e3\n.", b"G\x3f\xf0\x00\x00\x00\x00\x00\x00.", b"Finf\n.",
    b"N.", b"\x80\x02\x88.", b"\x80\x02\x89.",
    b"S'it\\'s \\x41\\n'\n.", b'S"a b"\n.', b"T\x03\0\0\0abc.", b"U\x03abc.", b"U\x00.",
    b"V\\u00e9\xe9 \\\\n\n.", b"X\x02\0\0\0\xc3\xa9.", b"\x8c\x02\xc3\xa9.", b"\x8d\x02" + bytes(7) + b"\xc3\xa9.",
    b"X\x03\0\0\0\xed\xa0\x80.",
    b"\x80\x03C\x02\x00\xff.", b"\x80\x03B\x02\0\0\0\x00\xff.", b"\x80\x04\x8e\x02" + bytes(7) + b"\x00\xff.",
    b"\x80\x05\x96\x02" + bytes(7) + b"\x00\xff.",
    b"].", b"]K\x01a.", b"](K\x01K\x02e.", b"(K\x01K\x02l.", b"](e.",
    b").", b"(K\x01K\x02K\x03K\x04t.", b"(t.", b"K\x01\x85.", b"K\x01K\x02\x86.", b"K\x01K\x02K\x03\x87.",
    b"}.", b"}X\x01\0\0\0aK\x01s.", b"}(X\x01\0\0\0aK\x01X\x01\0\0\0bK\x02u.", b"(X\x01\0\0\0aK\x01d.", b"}(u.",
    b"}K\x01K\x02s.", b"}(K\x01K\x02G\x3f\xf8\x00\x00\x00\x00\x00\x00Nu.", b"}K\x01K\x02\x86Ns.",
    b"\x80\x04\x8f(K\x01K\x02\x90.", b"\x80\x04(K\x01K\x02\x91.",
    b"K\x052\x86.", b"K\x05\x85q\x00K\x050h\x00\x86.", b"(K\x05tq\x00(K\x051h\x00\x86." , b"K\x05\x94h\x00\x86.",
    b"K\x05q\x00h\x00\x86.", b"K\x05r\0\0\0\0j\0\0\0\0\x86.", b"K\x05r\xff\xff\x0f\0j\xff\xff\x0f\0\x86.",
    b"K\x05p9\ng9\n\x86.", b"\x80\x04\x8c\x01a\x94h\x00\x86.",
    b"\x80\x04" + frame(b"K\x01K\x02\x86."), b"\x80\x04" + frame(b"K\x01") + frame(b"K\x02\x86."),
    b"\x80\x04" + frame(b"") + b"N.", b"\x80\x02\x80\x02N.",
    b"\x80\x02c__builtin__\nset\n](K\x01K\x02e\x85R.",
    b"\x80\x04\x8c\x08builtins\x8c\x07complex\x93K\x01K\x02\x86R.",
]  # fmt: skip

# What stands for something that is not made.
SYMBOLIC = [
    (b"c__main__\nThing\n.", Global("__main__", "Thing")),
    (b"\x80\x04\x8c\x01m\x8c\x03A.B\x93.", Global("m", "A.B")),
]
CALLS = [
    (b"cm\nf\n(K\x01tR.", (1,), False), (b"(K\x01im\nf\n.", (1,), False), (b"(cm\nf\nK\x01o.", (1,), False),
    (b"\x80\x02cm\nf\n)\x81.", (), True), (b"\x80\x04\x8c\x01m\x8c\x01f\x93K\x01\x85}\x92.", (1,), True),
]  # fmt: skip
REFUSED = [
    b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00.", b"\x97.", b"N\x98.", b"P1\n.",
    b"K\x01Q.",
]  # fmt: skip

OUTSIDE = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "PERSID", "BINPERSID"}


@pytest.fixture(params=[None, 16, 17, 23, 64], ids=lambda size: f"window-{size or 'whole'}")
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int | None]:
    """The size of the window, and with it that of the byte strings that stay in the source."""
    if request.param is not None:
        monkeypatch.setattr(module, "WINDOW", request.param)
        monkeypatch.setattr(module, "LARGE", 32)
    yield request.param


def test_plain_values_are_those_of_pickle(window: int | None) -> None:
    for data in PLAIN:
        assert same(to_python(machine(data)), pickle.loads(data)), data


def test_every_opcode_is_in_these_tests() -> None:
    used = {
        opcode.name
        for data in (
            *PLAIN,
            *(each[0] for each in SYMBOLIC),
            *(each[0] for each in CALLS),
            *REFUSED,
            BUILT,
            POP_MARK,
        )
        for opcode, _, _ in pickletools.genops(data)
    }
    assert used == {opcode.name for opcode in pickletools.opcodes}


def test_every_opcode_has_a_branch_or_a_row() -> None:
    known = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    inline = {*b"r\x68KX(tR\x85\x86QM\x89)qJ}suj\x87."}
    assert known == module.NAMES
    assert module.RARE.keys() | inline == known.keys() and not module.RARE.keys() & inline


@pytest.mark.parametrize(("data", "expected"), SYMBOLIC)
def test_names_are_kept_as_names(data: bytes, expected: Global, window: int | None) -> None:
    assert machine(data) == expected


@pytest.mark.parametrize(("data", "args", "new"), CALLS)
def test_calls_are_kept_as_calls(
    data: bytes, args: tuple[int, ...], new: bool, window: int | None
) -> None:
    made = machine(data)
    assert isinstance(made, Object)
    assert (made.callable, made.args, made.new, made.steps) == (Global("m", "f"), args, new, [])


@pytest.mark.parametrize("data", REFUSED, ids=repr)
def test_PK_03_PK_28_references_out_of_the_file_are_refused(data: bytes) -> None:
    (opcode,) = {each.name for each, _, _ in pickletools.genops(data)} & OUTSIDE
    with pytest.raises(UnsupportedError, match="persistent" if opcode == "BINPERSID" else opcode):
        machine(data)


BUILT = b"cm\nf\n)R(K\x01K\x02e(K\x03NuNb]b."
POP_MARK = b"(]q\x00(h\x00K\x02K\x03K\x04tq\x01a1h\x01."


def test_a_value_may_leave_the_stack_where_the_tree_holds_it() -> None:
    """dill fills the globals of a function after the function: it gets them from the memo, and
    drops them again."""
    made = machine(b"](cm\nf\n}q\x00\x85Rh\x00(X\x01\0\0\0aK\x01u0h\x00X\x01\0\0\0bK\x02s0Ne.")
    assert made[1] is None and made[0].args == ({"a": 1, "b": 2},)
    both = b"cm\nf\n}q\x00(X\x01\0\0\0aK\x01u\x85Rq\x010h\x00(X\x01\0\0\0aK\x02X\x01\0\0\0bh\x01u."
    repeated = machine(both)  # of a key that was set twice
    assert [key for key, _ in repeated.pairs] == ["a", "a", "b"]
    with pytest.raises(UnsupportedError, match="discards"):
        machine(b"]cm\nf\n}q\x00\x85R0h\x00(X\x01\0\0\0aK\x01u0.")


def test_dill_sets_attributes_of_code_that_it_made() -> None:
    """dill 0.4 of a recursive function and of a class in ``__main__``; no other call may be
    dropped."""
    setter = b"c__builtin__\ngetattr\n(cdill\n_dill\nX\x08\0\0\0_setattrc__builtin__\nsetattr\ntR"
    for call in (setter, b"c__builtin__\nsetattr\n"):
        for made in ("_create_cell", "_create_type"):
            data = b"\x80\x02}(X\1\0\0\0acdill._dill\n%s\n)Rq\0%sh\0X\1\0\0\0n]q\1\x87R0h\1K\1a0u."
            read = unpickle(Memory(data % (made.encode(), call)))
            assert list(read.root) == ["a"] and "1 attribute of functions" in read.warnings[0]
    for target in (b"cm\nf\n)R", b"}"):
        with pytest.raises(UnsupportedError, match="discards"):
            machine(b"\x80\x02%sq\0c__builtin__\nsetattr\nh\0X\1\0\0\0nN\x87R0." % target)


def test_what_is_done_to_an_object_is_kept_in_order() -> None:
    made = machine(BUILT)
    assert made.steps == [("append", [1, 2]), ("set", [(3, None)]), ("build", None), ("build", [])]
    assert made.state == []


class Reduced:
    """Pickles as whatever it is told."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_items_of_a_deque_and_of_a_defaultdict(protocol: int) -> None:
    made = machine(pickle.dumps(collections.deque([1, 2, 3], 5), protocol))
    assert (made.args, made.steps) == (((), 5), [("append", [1, 2, 3])])
    made = machine(pickle.dumps(collections.defaultdict(list, {"a": 1, "b": 2}), protocol))
    assert made.callable == Global("collections", "defaultdict")
    assert (made.args, made.steps) == (
        (Global("builtins", "list"),),
        [("set", [("a", 1), ("b", 2)])],
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ordered_dict_with_attributes_of_any_name(protocol: int) -> None:
    value = collections.OrderedDict(items=1, state=2)
    value.keys = 3  # type: ignore[method-assign,assignment]
    made = machine(pickle.dumps(value, protocol))
    assert isinstance(made, OrderedMapping)
    assert dict(made) == {"items": 1, "state": 2}
    assert made.state == {"keys": 3}


class Outer:
    class Inner:
        pass


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nested_classes_have_one_name_in_every_protocol(protocol: int) -> None:
    assert machine(pickle.dumps(Outer.Inner, protocol)) == Global(__name__, "Outer.Inner")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_names_of_python_2_are_mapped_below_protocol_3(protocol: int) -> None:
    assert machine(pickle.dumps([set, print, range], protocol)) == [
        Global("builtins", name) for name in ("set", "print", "range")
    ]


def test_names_of_python_2_stay_in_protocol_4() -> None:
    assert machine(b"\x80\x04\x8c\x0b__builtin__\x8c\x04eval\x93.") == Global("__builtin__", "eval")


def test_the_protocol_that_counts_is_the_latest_as_in_python() -> None:
    late = b"\x80\x04\x80\x02c__builtin__\neval\n."
    assert pickle.loads(late) is eval
    assert machine(late) == Global("builtins", "eval")


def test_globals_are_listed_once_each_in_order() -> None:
    assert unpickle(Memory(b"(cb\nb\nca\na\ncb\nb\nt.")).globals == (
        Global("b", "b"),
        Global("a", "a"),
    )


def test_stop_and_protocol() -> None:
    read = unpickle(Memory(b"...\x80\x03N.rest"), 3)
    assert (read.root, read.protocol, read.stop, read.warnings) == (None, 3, 7, ())


# Generated values


def _hashable() -> st.SearchStrategy[Any]:
    plain = st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(-(2**80), 2**80), st.floats(allow_nan=False),
        st.text(max_size=8), st.binary(max_size=12),
    )  # fmt: skip
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=6)


def values() -> st.SearchStrategy[Any]:
    plain = st.one_of(
        st.none(), st.booleans(), st.integers(-(2**2100), 2**2100), st.integers(-70000, 70000), st.floats(),
        st.complex_numbers(), st.text(max_size=80), st.binary(max_size=80), st.binary(max_size=60).map(bytearray),
        st.sets(_hashable(), max_size=5), st.frozensets(_hashable(), max_size=5),
    )  # fmt: skip
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.lists(inner, max_size=5),
            st.lists(inner, max_size=5).map(tuple),
            st.dictionaries(_hashable(), inner, max_size=5),
            inner.map(lambda each: [each, each, (each,)]),
        ),
        max_leaves=20,
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=values())
def test_generated_values(protocol: int, window: int | None, value: Any) -> None:
    data = pickle.dumps(value, protocol)
    assert same(to_python(machine(data)), value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_integers_at_every_boundary(protocol: int) -> None:
    bits = (7, 8, 15, 16, 31, 32, 63, 64, 127, 2039, 2040, 2047, 2048, 4096)
    numbers = [sign * (2**n + d) for n in bits for d in (-1, 0, 1) for sign in (1, -1)]
    assert machine(pickle.dumps(numbers, protocol)) == numbers


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2000, 2001])
def test_batches(protocol: int, count: int) -> None:
    value = [
        list(range(count)), {i: i for i in range(count)}, tuple(range(count)), set(range(count)),
    ]  # fmt: skip
    assert same(to_python(machine(pickle.dumps(value, protocol))), value)


def test_more_than_one_window_and_many_frames(window: int | None) -> None:
    value = {f"key {i}": [i, str(i) * 3, bytes(i % 90)] for i in range(300)}
    for protocol in PROTOCOLS:
        assert same(to_python(machine(pickle.dumps(value, protocol))), value)


def test_frames_longer_than_a_real_window() -> None:
    value = [list(range(300_000)), "x" * 3_000_000, bytes(2_000_000), "é" * 40_000]
    for protocol in (2, 3, 4, 5):
        assert same(to_python(machine(pickle.dumps(value, protocol))), value)
    framed = b"\x80\x04" + frame(
        b"]" + b"(" + b"K\x01" * 700_000 + b"e" + b"X" + struct.pack("<I", 9) + b"123456789\x86."
    )
    assert machine(framed) == ([1] * 700_000, "123456789")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 9, 13])
def test_no_opcode_minds_where_the_window_ends(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", size)
    for data in PLAIN:
        read = unpickle(Memory(b"." * 5 + data + b"........"), 5)
        assert (same(to_python(read.root), pickle.loads(data)), read.stop) == (True, len(data) + 5)


# What contains itself


def recursive_list() -> Any:
    value: list[Any] = [1.5]
    value.append(value)
    return value


def recursive_dict() -> Any:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    return value


def recursive_tuple(*more: Any) -> Any:
    inner: list[Any] = []
    value = (inner, *more)
    inner.append(value)
    return value


def recursive_deep() -> Any:
    inner: dict[str, Any] = {}
    value = ((inner, 7000), (1, 2, 3, 4.5, inner))
    inner["top"] = value
    inner["half"] = value[1]
    return value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_lists_and_dicts_that_contain_themselves(protocol: int, window: int | None) -> None:
    made = machine(pickle.dumps(recursive_list(), protocol))
    assert made[0] == 1.5
    assert made[1] is made
    made = machine(pickle.dumps(recursive_dict(), protocol))
    assert list(made) == ["a", "self"]
    assert made["self"] is made


MORE = (), ("x",), (70000, 2.5), (1, 2, 3, 4, 1j), (b"bytes", "s", None, 10**30, (), [])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tuples_that_contain_themselves(protocol: int, window: int | None) -> None:
    for more in MORE:
        made = machine(pickle.dumps(recursive_tuple(*more), protocol))
        assert made[0][0] is made, more
        assert len(made[0]) == 1, more
        assert same(to_python(made[1:]), more), more


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tuples_that_contain_each_other(protocol: int, window: int | None) -> None:
    made = machine(pickle.dumps(recursive_deep(), protocol))
    assert made[0][0]["top"] is made
    assert made[0][0]["half"] is made[1]
    assert (made[0][1], made[1][:4]) == (7000, (1, 2, 3, 4.5))


def test_a_long_tuple_that_contains_itself_costs_linear_time() -> None:
    made = machine(pickle.dumps(recursive_tuple(*([] for _ in range(100_000))), 2))
    assert made[0][0] is made


# The memo


def test_memo_entries_may_begin_anywhere() -> None:
    assert machine(b"(K\x01q\x01h\x01K\x03q\x09h\x09h\x01t.") == (1, 1, 3, 3, 1)
    assert machine(b"(K\x01r\xff\xff\xff\xffj\xff\xff\xff\xfft.") == (1, 1)
    assert machine(b"(K\x01p99999999999999999999\ng99999999999999999999\nt.") == (1, 1)


@pytest.mark.parametrize(
    "data", [b"h\x00.", b"g3\n.", b"j\0\0\0\x01.", b"K\x01q\x05h\x04.", b"Nq\x05j\x02\0\0\0."]
)
def test_memo_entries_that_were_not_stored(data: bytes) -> None:
    with pytest.raises(FormatError, match="empty memo entry"):
        machine(data)


def test_memoize_counts_as_python_does() -> None:
    data = b"\x80\x04(K\x01q\x01K\x02\x94K\x03\x94h\x01h\x02t."
    try:
        expected = pickle.loads(data)
    except pickle.UnpicklingError:
        expected = None
    assert expected is None or machine(data) == expected


# Strings of Python 2


def test_strings_of_python_2_are_text_if_that_is_certain() -> None:
    assert machine(b"U\x03abc.") == "abc"
    assert machine(b"S'a\\xe9'\n.") == ByteString(b"a\xe9")
    assert machine(b"S'\xc3\xa9'\n.") == ByteString(b"\xc3\xa9")  # not decoded and encoded again
    made = machine(b"(U\x02\xff\x00T\x02\0\0\0\xff\x00t.")
    assert made == (ByteString(b"\xff\x00"), ByteString(b"\xff\x00"))


# Arguments that CPython reads, and no pickler writes: its two machines differ in some.


SPELLINGS = {
    b"I%s\n.": [b"010", b"+1", b" 1", b"1 ", b"-0", b"1_0", b"0x1", b"1L0", b""],
    b"L%s\n.": [b"01L", b"1l", b"1LL", b" 1L"],
    b"F%s\n.": [b" 1.0", *b"1_0.0 +1.0 .5 1E5 Infinity 0x1p3 -nan".split()],
    b"S%s\n.": [b" 'a'", b"'a' ", *rb"""'\101' '\d' '\xA' 'a'b' 'a" '\xAA' '""".split()],
    b"(K\x01p%s\nt.": [b"00", b"01", b"+1", b" 1", b"1 ", b"-1", b"0" * 25 + b"1"],
    b"(K\x01p1\ng%s\nt.": [b"01", b" 1", b"1L", b"-1"],
}


@pytest.mark.parametrize(
    "data", [form % spelled for form, all_ in SPELLINGS.items() for spelled in all_], ids=repr
)
def test_other_spellings_than_those_of_picklers(data: bytes) -> None:
    with pytest.raises(FormatError, match="no pickler"):
        machine(data)
    assert trace(Memory(data)).error is not None


@pytest.mark.parametrize("put", [b"p1\n", b"q\x01", b"r\x01\0\0\0"])
def test_a_place_of_the_memo_holds_one_value(put: bytes) -> None:
    data = b"(K\x01" + put + b"K\x02" + put + b"h\x01t."
    with pytest.raises(FormatError, match="two values"):
        machine(data)
    assert "two values" in trace(Memory(data)).doubts[0]


def test_dict_with_keys_of_python_2() -> None:
    assert machine(b"}(U\x01aK\x01U\x01\xe9K\x02u.") == {"a": 1, ByteString(b"\xe9"): 2}


# Byte strings that stay where they are


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("size", [module.LARGE - 1, module.LARGE, 3 << 20])
def test_long_byte_strings_stay_in_the_source(protocol: int, size: int) -> None:
    value = [b"a" * size, 1, b"b" * size, bytearray(b"c" * size)]
    source = Memory(pickle.dumps(value, protocol))
    read = unpickle(source)
    assert isinstance(read.root[0], StoredBytes if size >= module.LARGE else bytes)
    assert isinstance(read.root[3], bytearray) == (size < module.LARGE) or protocol < 5
    assert same(to_python(read.root), value)
    assert read.stop == source.size


def test_long_strings_of_python_2_stay_in_the_source() -> None:
    made = machine(b"T" + struct.pack("<i", 70_000) + b"\xe9" * 70_000 + b".")
    assert (made.kind, made.extent.length) == ("python2", 70_000)


# Mappings that Python could not hold


@pytest.mark.parametrize("data", [
    b"}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.", b"}X\x01\0\0\0aK\x01sX\x01\0\0\0aK\x02s.",
    b"(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02d.",
    b"ccollections\nOrderedDict\n)R(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.",
])  # fmt: skip
def test_PK_25_repeated_keys_are_all_kept(data: bytes) -> None:
    read = unpickle(Memory(data))
    assert isinstance(read.root, Pairs)
    assert read.root.pairs == [("a", 1), ("a", 2)]
    assert read.warnings


def test_PK_25_keys_that_merge_are_all_kept() -> None:
    made = machine(b"}(K\x01X\x01\0\0\0aI01\nX\x01\0\0\0bG\x3f\xf0\0\0\0\0\0\0X\x01\0\0\0cu.")
    assert [(type(key), value) for key, value in made.pairs] == [
        (int, "a"),
        (bool, "b"),
        (float, "c"),
    ]


def test_PK_25_pairs_stand_wherever_the_mapping_is_shared() -> None:
    made = machine(b"(}q\x00X\x01\0\0\0aK\x01sX\x01\0\0\0aK\x02sh\x00X\x01\0\0\0bK\x03sl.")
    assert isinstance(made[0], Pairs)
    assert made[0] is made[1]
    assert made[0].pairs == [("a", 1), ("a", 2), ("b", 3)]


def test_PK_25_an_ordered_dict_keeps_its_attributes() -> None:
    made = machine(b"ccollections\nOrderedDict\n)R(K\x01K\x01K\x01K\x02u}X\x01\0\0\0xK\x05sb.")
    assert (made.pairs, made.state) == ([(1, 1), (1, 2)], {"x": 5})


@pytest.mark.parametrize("key", [b"]", b"}", b"]\x85", b"\x8f", b"K\x01]\x85\x86"])
def test_PK_29_unhashable_keys_are_shown(key: bytes) -> None:
    made = machine(b"\x80\x04}" + key + b"K\x01s.")
    assert isinstance(made, Pairs)
    assert len(made.pairs) == 1


def test_keys_of_any_hashable_kind() -> None:
    made = machine(b"\x80\x04}(NK\x01cm\nf\nK\x02cm\nf\n)RK\x03(K\x01K\x02\x91K\x04C\x01aK\x05u.")
    assert list(made.values()) == [1, 2, 3, 4, 5]
    assert [type(key) for key in made] == [type(None), Global, Object, SetNode, bytes]


def test_many_keys_of_text_are_no_attack() -> None:
    value = {(str(i), str(-i)): i for i in range(LIMITS.odd_keys + 5)}
    assert machine(pickle.dumps(value, 2)) == value


@pytest.mark.parametrize("kind", [lambda i: (i, 1), lambda i: i + 0.5, lambda i: 2**61 + i])
def test_PK_24_keys_with_hashes_that_a_file_can_choose_are_counted(kind: Any) -> None:
    value = {kind(i): i for i in range(LIMITS.odd_keys)}
    assert machine(pickle.dumps(value, 2)) == value
    value[kind(-1)] = 1
    with pytest.raises(LimitError, match="odd_keys"):
        machine(pickle.dumps(value, 2))


# Plain values that are spelled as calls


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [
    b"", b"\x00\xff" * 300, bytearray(), bytearray(b"\x80"), 1 - 2j, complex(math.inf, -0.0), {1},
    set(), frozenset(),
])  # fmt: skip
def test_values_spelled_as_calls(protocol: int, value: Any) -> None:
    assert same(to_python(machine(pickle.dumps(value, protocol))), value)


@pytest.mark.parametrize("data", [
    b"c__builtin__\ncomplex\n(L" + b"9" * 400 + b"L\nK\x01tR.",
    b"c__builtin__\ncomplex\n(X\x01\0\0\x001K\x01tR.", b"c__builtin__\nset\n(K\x05tR.",
    b"c_codecs\nencode\n(X\x02\0\0\0\xc4\x80X\x06\0\0\0latin1tR.",
])  # fmt: skip
def test_calls_that_python_would_fail_or_do_otherwise(data: bytes) -> None:
    with pytest.raises((FormatError, UnsupportedError)):
        machine(data)


@pytest.mark.parametrize(
    ("data", "args"),
    [
        (b"c__builtin__\nbytearray\n(X\x01\0\0\0aX\x06\0\0\0utf-16tR.", ("a", "utf-16")),
        (b"c__builtin__\nbytes\n(](K\x01K\x02etR.", ([1, 2],)),
        (b"c__builtin__\nbytearray\n(L1099511627776L\ntR.", (1 << 40,)),
    ],
)
def test_bytes_of_anything_but_bytes_stay_a_call_that_is_not_written(
    data: bytes, args: tuple[Any, ...]
) -> None:
    made = machine(data)
    assert isinstance(made, Object) and made.args == args
    with pytest.raises(UnsafeGlobalError):
        emit(made)


def test_encode_in_another_encoding_stays_a_call() -> None:
    made = machine(b"c_codecs\nencode\n(X\x01\0\0\0aX\x05\0\0\0utf-8tR.")
    assert isinstance(made, Object)
    assert made.args == ("a", "utf-8")


# Values from pickle that keep their classes are opaque


def test_an_opaque_value_is_compared_by_identity() -> None:
    a, b = machine(pickle.dumps([Reduced(len, ((),)), Reduced(len, ((),))]))
    assert a != b
    assert a == a


NOT_UTF8 = "contains a Python 2 string that is not UTF-8 (SHORT_BINSTRING at byte 2)"


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("encoding", ["latin1", "latin-1"])
def test_bytes_spelled_as_text(kind: type, encoding: str) -> None:
    call = f"c__builtin__\n{kind.__name__}\n".encode()
    made = machine(b"\x80\x02" + call + text("a\xff") + text(encoding) + b"\x86R.")
    assert type(made) is kind and made == b"a\xff"


def test_the_collector_stays_off() -> None:
    enabled = gc.isenabled()
    gc.disable()
    try:
        assert machine(b"\x80\x02K\x05.") == 5
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert machine(b"\x80\x02K\x05.") == 5 and gc.isenabled()
    if not enabled:
        gc.disable()


def test_a_storage_of_a_long_name() -> None:
    """A key and a device that are together longer than a name may be."""
    half = LIMITS.name_bytes // 2
    fits = pickle_of(tensor(storage(key=text("k" * half), location="d" * half)))
    assert unpickle(Memory(fits), persistent_load=table().load).root["a"].shape == (4,)
    over = pickle_of(tensor(storage(key=text("k" * half), location="d" * (half + 1))))
    with pytest.raises(LimitError, match="name_bytes"):
        unpickle(Memory(over), persistent_load=table().load)


def test_text_of_python_2_that_is_utf_8() -> None:
    """Text that torch.load cannot decode is refused; text that it decodes is kept."""
    fine = trace(Memory(b"\x80\x02U\x02\xc3\xa9."))
    assert (fine.error, fine.refused) == (None, trace(Memory(b"\x80\x02U\x02ab.")).refused)
    assert trace(Memory(b"\x80\x02U\x02\xc3\xff.")).refused == NOT_UTF8


def test_bytes_with_characters_that_are_none() -> None:
    spelled = b"\x80\x02c_codecs\nencode\n" + text("\u0100") + text("latin1") + b"\x86R."
    assert "encodes bytes with characters above 255" in str(trace(Memory(spelled)).error)
