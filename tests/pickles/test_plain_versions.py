"""Versions of modules recognized at once, against the same pickles read opcode by opcode."""

from __future__ import annotations

import copy
import io
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tree import (
    ModuleVersion,
    Node,
    OrderedMapping,
    Pairs,
    module_versions,
    nodes,
    type_name,
    versions_state,
)
from ckptkit.formats.format import WriteOptions
from ckptkit.pickles import machine as module
from ckptkit.pickles.live import node
from ckptkit.pickles.machine import unpickle
from ckptkit.pickles.plain_versions import PlainVersions
from tests.pickles.making import emit, isomorphic, saved, to_python

PADDING = [f"{n}" for n in range(300)]  # fills the part of the memo that one byte addresses
ONE = {"version": 1}


def pickled(versions: dict[str, Any]) -> bytes:
    """The pickle of a state_dict whose ``_metadata`` begins as that of a large file does."""
    state = OrderedDict(padding=PADDING)
    state._metadata = OrderedDict({"": {"version": 1}, "first": {"version": 1}, **versions})  # type: ignore[attr-defined]
    with zipfile.ZipFile(io.BytesIO(saved(state))) as archive:
        return archive.read("archive/data.pkl")


def alike(count: int = 3) -> dict[str, Any]:
    return {f"layer.{n}": dict(ONE) for n in range(count)}


def outcome(data: bytes) -> Node:
    """The tree, or what is said instead."""
    try:
        return unpickle(Memory(data)).root
    except CkptkitError as error:
        return type(error).__name__, str(error)


def both(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    """The outcome, and that of a machine which knows opcodes alone; with dicts for versions."""
    found = outcome(data)
    with monkeypatch.context() as patch:
        patch.setattr(PlainVersions, "read", lambda *_: 0)
        return plain(found), plain(outcome(data))


def plain(root: Node) -> Node:
    """The tree with a dict of its own for each version that it shares."""
    for holder in nodes(root):
        if isinstance(holder, dict):
            for key, value in holder.items():
                holder[key] = own(value)
        elif isinstance(holder, Pairs):
            holder.pairs[:] = [(key, own(value)) for key, value in holder.pairs]
    return root


def own(value: Node) -> Node:
    return dict(value) if value.__class__ is ModuleVersion else value


def shared(root: Node) -> list[str]:
    """The modules whose versions were recognized."""
    versions = module_versions(root) or {}
    return [path for path, each in versions.items() if each.__class__ is ModuleVersion]


def test_versions_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickled({**alike(), "other": {"version": 2}, "large": {"version": 700}})
    assert shared(outcome(data)) == ["first", *alike(), "other", "large"]
    assert isomorphic(*both(data, monkeypatch))


def test_what_ckptkit_writes_is_recognized() -> None:
    root = outcome(pickled(alike()))
    data = emit(root).data
    assert data == emit(plain(root)).data
    assert shared(outcome(data)) == ["first", *alike()]


def test_names_longer_than_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names and others than ASCII among them."""
    data = pickled({f"{n}.{'é' * (n % 200)}": dict(ONE) for n in range(2500)})
    assert len(shared(outcome(data))) > 1500
    assert isomorphic(*both(data, monkeypatch))


@pytest.mark.parametrize("window", [1, 16, 1000])
def test_a_window_may_end_anywhere(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", window)
    monkeypatch.setattr(module, "FIRST_WINDOW", window)
    assert isomorphic(*both(pickled(alike(20)), monkeypatch))


@pytest.mark.parametrize("seed", range(6))
def test_changed_code_reads_as_its_opcodes_do(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte changed or left out: the same tree or the same refusal."""
    chance = random.Random(seed)
    data = pickled(alike(4))
    for at in range(data.index(b"layer.0") - 30, len(data)):
        changed = bytearray(data)
        changed[at : at + 1] = chance.choice(
            [bytes([each]) for each in (changed[at] ^ 1, *b"rqhjKMX(t.R012susb}")] + [b""]
        )
        assert isomorphic(*both(bytes(changed), monkeypatch)), (
            f"byte {at}: {changed[at : at + 1]!r}"
        )


def entry_of(data: bytes) -> int:
    """The memo entry of the last version of a pickle that goes on with another name."""
    at = data.rindex(b"}r") + 2
    return int.from_bytes(data[at : at + 4], "little")


NAME = b"X\x04\0\0\0more"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(lambda n: NAME + b"j" + n, id="a reference: two modules share it"),
        pytest.param(lambda n: NAME + b"K\x02s" + NAME + b"K\x02", id="another key"),
        pytest.param(lambda n: b"X\x07\0\0\0versionK\x02s" + NAME + b"K\x02", id="its key again"),
        pytest.param(
            lambda n: NAME + b"0r\xff\xff\0\0" + NAME + b"j\xff\xff\0\0", id="stored again"
        ),
        pytest.param(lambda n: NAME + b"02", id="its key is popped, and it is repeated"),
        pytest.param(lambda n: NAME + b"00", id="dropped"),
        pytest.param(lambda n: NAME + b"b" + NAME + b"K\x02", id="a state"),
        pytest.param(lambda n: NAME + b"a" + NAME + b"K\x02", id="an item of no list"),
        pytest.param(lambda n: NAME + b"(1" + b"r\xff\xff\0\0K\x02", id="a mark that is popped"),
    ],
)
def test_what_follows_may_change_it(
    more: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all is read opcode by opcode."""
    data = pickled(alike())
    at = data.rindex(b"K\x01s") + 3
    changed = data[:at] + more(entry_of(data).to_bytes(4, "little")) + data[at:]
    found, expected = both(changed, monkeypatch)
    assert isomorphic(found, expected)


def test_one_that_two_modules_share_stays_shared() -> None:
    one = dict(ONE)
    versions = module_versions(outcome(pickled({"a": one, "b": one})))
    assert versions is not None
    assert versions["a"] is versions["b"]
    assert versions["a"] is not versions[""]
    assert versions["a"].__class__ is dict


@pytest.mark.parametrize(
    "value", [{"version": True}, {"version": -1}, {"version": 2**40}, {"VERSION": 1}, {1: 1}, {}]
)
def test_others_are_dicts(value: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickled({"a": dict(value), "b": dict(value), "c": {**value, "more": 1}})
    assert shared(outcome(data)) == ["first"]
    assert isomorphic(*both(data, monkeypatch))


def test_only_attributes_are_shared() -> None:
    """A dict of the same kind elsewhere is one that a user may change."""
    values = OrderedDict({"padding": PADDING, **alike()})
    with zipfile.ZipFile(
        io.BytesIO(saved({"_metadata": values, "x": {"_metadata": dict(values)}}))
    ) as archive:
        root = outcome(archive.read("archive/data.pkl"))
    assert {each.__class__ for each in root["x"]["_metadata"].values()} == {list, dict}


# As a value


def test_it_cannot_be_changed() -> None:
    version = ModuleVersion(ONE)
    changes: list[Callable[[], object]] = [
        lambda: version.__setitem__("version", 2), lambda: version.__delitem__("version"),
        lambda: version.update(version=2), lambda: version.setdefault("a", 1), version.clear,
        lambda: version.pop("version"), version.popitem, lambda: version.__ior__({"a": 1}),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(TypeError, match="put a new dict in its place"):
            change()
    assert version == ONE
    assert type_name(version) == "dict"


def test_a_copy_is_a_dict() -> None:
    version = ModuleVersion(ONE)
    for made in (
        copy.copy(version),
        copy.deepcopy(version),
        version | {},
        to_python(node(version)),
    ):
        assert type(made) is dict
        assert made == ONE


def state_dict() -> OrderedMapping:
    one = ModuleVersion(ONE)
    return OrderedMapping((), versions_state({"a": one, "b": one}))


def test_each_module_has_its_own_where_the_tree_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    state = OrderedDict(x=torch.zeros(2))
    state._metadata = OrderedDict({f"{n}": dict(ONE) for n in range(400)})  # type: ignore[attr-defined]
    torch.save(state, path)
    versions = ckptkit.load(path)._metadata
    assert versions == state._metadata  # type: ignore[attr-defined]
    assert len({*map(id, versions.values())}) == 400
    assert {*map(type, versions.values())} == {dict}


def test_each_module_has_its_own_in_a_value_of_this_process() -> None:
    versions = module_versions(node(state_dict()))
    assert versions == {"a": ONE, "b": ONE}
    assert versions is not None and versions["a"] is not versions["b"]


@pytest.mark.parametrize("everything", [False, True])
def test_each_module_has_its_own_in_safetensors(tmp_path: Path, everything: bool) -> None:
    """With and without --all, the same bytes as of a dict for each."""
    written = []
    state = (
        OrderedDict(x=torch.zeros(2), padding=PADDING)
        if everything
        else OrderedDict(x=torch.zeros(2))
    )
    state._metadata = OrderedDict({f"{n}": dict(ONE) for n in range(400)})  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "a.pth")
    for number in range(2):
        ck = ckptkit.open(tmp_path / "a.pth")
        if number:
            plain(ck.root)
        else:
            assert len(shared(ck.root)) > 200
        path = tmp_path / f"{number}.safetensors"
        ckptkit.save(ck, path, options=WriteOptions(everything=everything))
        written.append(path.read_bytes())
    assert written[0] == written[1]
