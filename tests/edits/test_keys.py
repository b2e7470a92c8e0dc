"""Edits of names, against torch's own state_dicts of the same modules."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from torch import nn

import ckptkit
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CollisionError, UsageError
from ckptkit.core.tree import Global, Node, OrderedMapping
from ckptkit.edits.keys import add_prefix, rename, select, strip_prefix
from tests.conftest import ROOT
from tests.edits.trees import checkpoint, from_torch, lines, metadata, module, named, tensor

Edited = Callable[[Checkpoint], Checkpoint]


def net() -> nn.Module:
    """Submodules with and without parameters, buffers, a tie."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2)),
    )
    model[3][1].weight = model[3][0].weight
    return model


def names(ck: Checkpoint) -> list[str]:
    return list(ck.weights)


def strip(*prefixes: str) -> Edited:
    return partial(strip_prefix, prefix=prefixes)


def by(*pairs: tuple[str, str], **map: str) -> Edited:
    return partial(rename, map=map, sub=pairs)


@pytest.mark.parametrize(
    ("edit", "old", "new", "said"),
    [
        (strip(), "module.a.module.w module.amodule.w", "a.module.w amodule.w", ""),
        (strip("_orig_mod"), "_orig_mod.a.w _orig_mod.b _orig_model", "a.w b _orig_model", ""),
        (strip("pre_"), "pre_w", "w", ""),
        (strip("module.", "module."), "module.module.w", "w", ""),
        (strip(), "module. module.w", "module. w", ""),  # never an empty name
        (strip(), "module.w module._extra_state", "w _extra_state", ""),
        (strip(), "n_averaged module.w module.b", "n_averaged w b", "stripped 'module.' from 2 keys"),
        (strip(), "n_averaged module.w", "n_averaged w", "1 key without the prefix, not changed: 'n_averaged'"),
        (strip(), "module.module.w module.b", "module.w b", "1 key still starts with 'module.': strip 'module.'"),
        (strip(), "module._orig_mod.w", "_orig_mod.w", "1 key still starts with '_orig_mod.'"),
        (lambda ck: strip_prefix(strip_prefix(ck)), "module.module.w module.b", "w b", ""),
        (partial(add_prefix, prefix="net"), "w", "net.w", ""),
        (partial(add_prefix, prefix="pre_"), "w", "pre_w", ""),
        (partial(add_prefix, prefix="m."), "w", "m.w", "added 'm.' to 1 key"),
        (by(a="b", b="a"), "a b", "b a", "renamed 2 keys"),
        (
            partial(rename, map={"x.beta": "x.gamma"}, sub=[("(?i)GAMMA", "weight"), (r"^(\w+)\.w", r"\1.W")]),
            "x.gamma x.beta", "x.Weight x.gamma", "renamed 2 keys",
        ),
        (by((r"^(\w+\w+)+$", "x")), "a" * 40 + "!", "a" * 40 + "!", "no key is renamed"),  # `re` would never end
        (partial(select, keep=["enc.*"]), "enc.a.w enc.b.w dec.a.w", "enc.a.w enc.b.w", "dropped 1 key, kept 2"),
        (partial(select, drop=["*.a.w"]), "enc.a.w enc.b.w dec.a.w", "enc.b.w", ""),
        (partial(select, keep=["enc.*", "dec.*"], drop=["enc.b.*"]), "enc.a.w enc.b.w dec.a.w", "enc.a.w dec.a.w", ""),
    ],
)  # fmt: skip
def test_names(edit: Edited, old: str, new: str, said: str) -> None:
    ck = checkpoint(*old.split())
    done = edit(ck)
    assert list(done.root) == new.split()
    assert said in lines(done)
    storages = [each.storage for each in done.root.values()]
    assert storages == [each.storage for each in ck.root.values() if each.storage in storages]


NET = net()
PAIR = nn.ModuleDict({"enc": NET, "head": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        (nn.DataParallel(NET), strip(), NET),
        (NET, add_prefix, nn.DataParallel(NET)),
        (norm := nn.BatchNorm1d(2), add_prefix, nn.DataParallel(norm)),  # version 2 at the root
        (NET, partial(add_prefix, prefix="a.b."), nn.ModuleDict({"a": nn.ModuleDict({"b": NET})})),
        (NET, lambda ck: strip_prefix(add_prefix(ck)), NET),
        (PAIR, by(("^enc", "encoder"), ("^head", "top")),
         nn.ModuleDict({"encoder": NET, "top": PAIR["head"]})),
    ],
)  # fmt: skip
def test_the_state_dict_of_the_other_module(
    before: nn.Module, edit: Edited, after: nn.Module
) -> None:
    ck = Checkpoint(from_torch(before.state_dict()))
    done, want = edit(ck), after.state_dict()
    assert names(done) == list(want) and isinstance(done.root, OrderedMapping)
    assert list(metadata(done).items()) == list(want._metadata.items())
    assert [t.storage for t in done.weights.values()] == [t.storage for t in ck.weights.values()]
    assert not done.warnings
    assert names(ck) == list(before.state_dict()), "the input is as it was"


@pytest.mark.parametrize("prefixes", [("module.", "_orig_mod."), ("_orig_mod.", "module.")])
@pytest.mark.parametrize("outer", ["module.", "_orig_mod."])
def test_strip_takes_two_prefixes_in_either_nesting(prefixes: tuple[str, str], outer: str) -> None:
    state = NET.state_dict()
    both = outer + ("_orig_mod." if outer == "module." else "module.")
    wrapped = OrderedMapping((both + name, value) for name, value in from_torch(state).items())
    versions = {"": {"version": 7}, outer[:-1]: {"version": 8}}
    inside = {(both + path).rstrip("."): value for path, value in state._metadata.items()}
    wrapped.state = {"_metadata": OrderedMapping({**versions, **inside})}
    done = strip_prefix(Checkpoint(wrapped), prefixes)
    assert names(done) == list(state)
    assert list(metadata(done).items()) == list(state._metadata.items())
    assert not done.warnings


@pytest.mark.parametrize(
    ("edit", "error", "match"),
    [
        (lambda: strip_prefix(checkpoint("w", "module.w")), CollisionError, "'w' and 'module.w' would both become 'w'"),
        (lambda: strip_prefix(checkpoint("a.w", "b.w"), ["a.", "b."]), CollisionError, "would both become 'w'"),
        (lambda: strip_prefix(checkpoint("w"), ""), UsageError, "empty prefix"),
        (lambda: strip_prefix(Checkpoint({"m": named("module.w"), "epoch": 1}), key=["epoch"]), UsageError, "not a dict"),
        (lambda: strip_prefix(checkpoint("module.w"), key=["nowhere"]), UsageError, "no entry"),
        (lambda: add_prefix(checkpoint("w"), ""), UsageError, "empty prefix"),
        (
            lambda: add_prefix(Checkpoint({"w": tensor(), "m_w": "no weight, so it keeps its name"}), "m_"),
            CollisionError, "'w' and 'm_w' would both become 'm_w'",
        ),
        (lambda: rename(checkpoint("layer1.weight", "layer2.bias"), {"layer1.weigth": "w"}), UsageError, "layer1.weight"),
        (lambda: rename(checkpoint("a"), {"a": ""}), UsageError, "cannot be renamed"),
        (lambda: rename(checkpoint("a"), {"a": 1}), UsageError, "."),
        (lambda: rename(checkpoint("a"), {}, [("a", "")]), UsageError, "make the name 'a' empty"),
        (lambda: rename(checkpoint("x"), {}, [("(", "")]), UsageError, "bad substitution"),
        (lambda: rename(checkpoint("x"), {}, [("a", r"\1")]), UsageError, "bad substitution"),
        (lambda: rename(checkpoint("x"), {}, [("(?P<n>a)", r"\g<m>")]), UsageError, "bad substitution"),
        (lambda: rename(checkpoint("x"), {}, [("a", "\\")]), UsageError, "bad substitution"),
        (lambda: rename(checkpoint("a.1.w", "a.2.w"), {}, [(r"\.\d", "")]), CollisionError, "'a.1.w' and 'a.2.w'"),
        (lambda: select(checkpoint("Enc.w"), keep=["enc.*"]), UsageError, "no weight matches"),
        (lambda: select(checkpoint("encoder.weight"), drop=["encodr.weight"]), UsageError, "encoder.weight"),
        (lambda: select(checkpoint("a"), drop=["*"]), UsageError, "drops all weights"),
    ],
)  # fmt: skip
def test_what_is_refused(edit: Callable[[], object], error: type[UsageError], match: str) -> None:
    with pytest.raises(error) as caught:
        edit()
    assert match == "." or match in f"{caught.value} {caught.value.hint}"


def test_rename_takes_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.edits.keys.SECONDS", 0)
    with pytest.raises(UsageError, match="takes more than 0 seconds"):
        rename(checkpoint("a" * 60 + "b"), sub=[(r"(a|aa)+$", "x")])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (strip(), "no key starts with 'module.'"),
        (by(("zz", "y")), "no key is renamed"),
        (partial(select, keep=["*"]), "the globs keep every weight, so no weight is dropped"),
    ],
)
def test_nothing_to_do(edit: Edited, said: str) -> None:
    ck = checkpoint("w")
    done = edit(ck)
    assert done.root is ck.root
    assert done.warnings == (said,) and not done.notes


@pytest.mark.parametrize(
    ("old", "paths", "edit", "expected"),
    [
        ("a.b.w a.b.c.w", ["", "a", "a.b", "a.b.c"], strip("a.b."), {"": 2, "c": 3}),
        ("a.b.w a.x", ["", "a", "a.b"], strip("a.b."), {"": 2, "a": 1}),
        ("net_conv.w net_w", ["", "net_conv"], strip("net_"), {"": 0, "conv": 1}),
        ("norm.gamma norm.beta", ["", "norm"], by(("gamma", "weight")), {"": 0, "norm": 1}),
        ("a.w a.b", ["", "a"], partial(rename, map={"a.w": "x.w", "a.b": "y.b"}), {"": 0}),
        ("3.0.w 3.1.w 1.w", ["", "3", "3.0", "3.1", "1"], partial(select, keep=["3.*"]), {"": 0, "3": 1, "3.0": 2, "3.1": 3}),
    ],
)  # fmt: skip
def test_metadata_follows(
    old: str, paths: list[str], edit: Edited, expected: dict[str, int]
) -> None:
    root = OrderedMapping(named(*old.split()))
    versions = {path: {"version": n} for n, path in enumerate(paths)}
    root.state = {"_metadata": OrderedMapping(versions)}
    done = edit(Checkpoint(root))
    found = [(path, each["version"]) for path, each in metadata(done).items()]
    assert found == list(expected.items())
    dropped = "dropped 1 _metadata entry of modules whose new name is unclear: 'a'"
    assert (dropped in lines(done)) == (old == "a.w a.b")


STATE = {"state": {"module.w": {"step": 1}, 3: {}}, "param_groups": []}
QINT8 = Global("torch", "qint8")


@pytest.mark.parametrize(
    ("root", "edit", "path", "expected"),
    [
        ({"model": named("module.w"), "optimizer": STATE}, partial(strip_prefix, key=["model", "optimizer.state"]),
         "optimizer.state", ["w", 3]),
        # An entry that is not a weight has no module to be in; dotted names next to weights have.
        ({"epoch": 3, "fc.weight": tensor(), "fc._packed_params.dtype": QINT8}, add_prefix,
         "", ["epoch", "module.fc.weight", "module.fc._packed_params.dtype"]),
        ({"w": tensor(), "mw": 1, 3: 2}, partial(add_prefix, prefix="m", key=[""]), "", ["m.w", "m.mw", 3]),
        ({"epoch": 3, "a.w": tensor(), "b.w": tensor()}, partial(select, keep=["a.*"]), "", ["epoch", "a.w"]),
        (OrderedMapping({"a.w": tensor(), "a._extra_state": {}, "b.w": tensor(), "b._extra_state": {}}),
         partial(select, drop=["b.*"]), "", ["a.w", "a._extra_state"]),
    ],
)  # fmt: skip
def test_other_entries(root: Node, edit: Edited, path: str, expected: list[object]) -> None:
    node = edit(Checkpoint(root)).root
    for key in filter(None, path.split(".")):
        node = node[key]
    assert list(node) == expected


def test_strip_twice_needed_at_the_root_is_said_once() -> None:
    """The keys at the root are those that it edited, in an OrderedDict with `_metadata` too."""
    file = ROOT / "fixtures/torch-zip/module_module.pth"
    (warning,) = strip_prefix(ckptkit.open(file)).warnings
    assert warning.startswith("10 keys still start")


def test_strip_says_where_else_the_prefix_is() -> None:
    root = {"state_dict": named("module.w"), "my ema": named("module.w"), "epoch": 1}
    done = strip_prefix(Checkpoint(root))
    assert list(done.root["my ema"]) == ["module.w"]
    assert "key=['state_dict', 'my ema']" in lines(done)


def test_strip_keys_are_exactly_those() -> None:
    root = {"state_dict": named("module.w"), "ema": {"shadow": named("module.w")}}
    done = strip_prefix(Checkpoint(root), key=["ema.shadow"])
    assert list(done.root["ema"]["shadow"]) == ["w"]
    assert list(done.root["state_dict"]) == ["module.w"]
    both = strip_prefix(Checkpoint(root), key=["ema.shadow", "state_dict"])
    assert list(both.root["state_dict"]) == ["w"]
    assert not both.warnings


def test_strip_one_mapping_in_two_places_stays_one() -> None:
    shared = named("module.w")
    done = strip_prefix(Checkpoint({"state_dict": shared, "best": [shared]}))
    assert done.root["best"][0] is done.root["state_dict"]
    assert not done.warnings


def test_strip_of_a_pickled_module_gives_its_plain_state_dict() -> None:
    weight = tensor(kind="parameter", requires_grad=True)
    inner = module({"w": weight, "none": None}, buffers=[("mean", tensor())])
    parallel = Global("torch.nn.parallel", "DataParallel")
    done = strip_prefix(
        Checkpoint({"net": module(submodules={"module": inner}, callable=parallel)})
    )
    assert isinstance(done.root["net"], OrderedMapping)
    assert list(done.root["net"]) == ["w", "mean"]
    plain = done.weights["w"]
    assert (plain.kind, plain.requires_grad, plain.storage) == ("tensor", False, weight.storage)
    said = "the pickled module of net (torch.nn.parallel.DataParallel) is now its plain state_dict"
    assert said in done.notes


@pytest.mark.parametrize("seed", range(5))
def test_order_types_and_the_rest_of_the_tree_stay(seed: int) -> None:
    some = [f"module.{'abc'[n % 3]}.{n}" for n in range(9)]
    random.Random(seed).shuffle(some)
    weights = OrderedMapping(named(*some), {"other attribute": 1})
    args = (1, "module.a", {"b": {1: None}})
    ck = Checkpoint({"state_dict": weights, "moments": list(weights.values()), "args": args})
    done = rename(add_prefix(strip_prefix(ck)), sub=[("a", "A")])
    assert names(done) == [name.replace("a", "A") for name in some]
    assert list(done.root) == ["state_dict", "moments", "args"]
    assert done.root["state_dict"].state == {"other attribute": 1}
    assert done.root["args"] == args
    assert list(map(id, done.weights.values())) == list(map(id, done.root["moments"]))
