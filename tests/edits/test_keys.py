from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from torch import nn

import ckptkit
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CollisionError, UsageError
from ckptkit.core.tree import Global, OrderedMapping
from ckptkit.edits.keys import add_prefix, rename, select, strip_prefix
from tests.conftest import ROOT
from tests.edits.trees import checkpoint, from_torch, lines, metadata, module, named, tensor


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


# strip_prefix


def test_strip_is_the_state_dict_of_the_module_inside() -> None:
    model = net()
    ck = Checkpoint(from_torch(nn.DataParallel(model).state_dict()))
    done = strip_prefix(ck)
    assert names(done) == list(model.state_dict())
    assert list(metadata(done).items()) == list(model.state_dict()._metadata.items())
    assert done.weights["3.0.weight"].storage is done.weights["3.1.weight"].storage
    assert isinstance(done.root, OrderedMapping)
    assert done.notes == (f"stripped 'module.' from {len(ck.weights)} keys",)
    assert not done.warnings
    assert names(ck)[0] == "module.0.weight", "the input is as it was"


@pytest.mark.parametrize("prefixes", [("module.", "_orig_mod."), ("_orig_mod.", "module.")])
@pytest.mark.parametrize("outer", ["module.", "_orig_mod."])
def test_strip_takes_two_prefixes_in_either_nesting(prefixes: tuple[str, str], outer: str) -> None:
    model = net()
    inner = "_orig_mod." if outer == "module." else "module."
    wrapped = OrderedMapping(
        (outer + inner + name, value) for name, value in from_torch(model.state_dict()).items()
    )
    versions = {"": {"version": 7}, outer[:-1]: {"version": 8}}
    inside = {
        (outer + inner + path).rstrip("."): value
        for path, value in model.state_dict()._metadata.items()
    }
    wrapped.state = {"_metadata": OrderedMapping({**versions, **inside})}
    done = strip_prefix(Checkpoint(wrapped), prefixes)
    assert names(done) == list(model.state_dict())
    assert list(metadata(done).items()) == list(model.state_dict()._metadata.items())
    assert not done.warnings


@pytest.mark.parametrize(
    ("old", "prefixes", "new"),
    [
        ("module.a.module.w module.amodule.w", ["module."], "a.module.w amodule.w"),
        ("_orig_mod.a.w _orig_mod.b _orig_model", ["_orig_mod"], "a.w b _orig_model"),
        ("pre_w", ["pre_"], "w"),
        ("module.module.w", ["module.", "module."], "w"),
        ("module. module.w", ["module."], "module. w"),  # never an empty name
        ("n_averaged module.w module.b", ["module."], "n_averaged w b"),
        ("module.w module._extra_state", ["module."], "w _extra_state"),
    ],
)
def test_strip(old: str, prefixes: list[str], new: str) -> None:
    assert list(strip_prefix(checkpoint(*old.split()), prefixes).root) == new.split()


@pytest.mark.parametrize(
    ("old", "prefix", "new"), [("w", "net", "net.w"), ("w", "pre_", "pre_w"), ("w", "m.", "m.w")]
)
def test_add(old: str, prefix: str, new: str) -> None:
    assert names(add_prefix(checkpoint(old), prefix)) == [new]


def test_strip_takes_one_level_and_points_out_the_next() -> None:
    done = strip_prefix(checkpoint("module.module.w", "module.b"))
    assert names(done) == ["module.w", "b"]
    assert "1 key still starts with 'module.': strip 'module.'" in lines(done)
    assert names(strip_prefix(done)) == ["w", "b"]


def test_strip_twice_needed_at_the_root_is_said_once() -> None:
    """The keys at the root are those that it edited, in an OrderedDict with `_metadata` too."""
    file = ROOT / "fixtures/torch-zip/module_module.pth"
    (warning,) = strip_prefix(ckptkit.open(file)).warnings
    assert warning.startswith("10 keys still start")


def test_strip_points_out_another_wrapper() -> None:
    done = strip_prefix(checkpoint("module._orig_mod.w"))
    assert "1 key still starts with '_orig_mod.'" in lines(done)


def test_strip_reports_other_keys() -> None:
    done = strip_prefix(checkpoint("n_averaged", "module.w", "module.b"))
    assert done.notes == ("stripped 'module.' from 2 keys",)
    assert "1 key without the prefix, not changed: 'n_averaged'" in lines(done)


@pytest.mark.parametrize(
    ("edit", "error", "match"),
    [
        (lambda: strip_prefix(checkpoint("w", "module.w")), CollisionError, "'w' and 'module.w' would both become 'w'"),
        (lambda: strip_prefix(checkpoint("a.w", "b.w"), ["a.", "b."]), CollisionError, "would both become 'w'"),
        (lambda: strip_prefix(checkpoint("w"), ""), UsageError, "empty prefix"),
        (lambda: strip_prefix(Checkpoint({"m": named("module.w"), "epoch": 1}), key=["epoch"]), UsageError, "not a dict"),
        (lambda: strip_prefix(checkpoint("module.w"), key=["nowhere"]), UsageError, "no entry"),
        (lambda: add_prefix(checkpoint("w"), ""), UsageError, "empty prefix"),
        (lambda: rename(checkpoint("a"), {"a": ""}), UsageError, "cannot be renamed"),
        (lambda: rename(checkpoint("a"), {"a": 1}), UsageError, "."),
        (lambda: rename(checkpoint("a"), {}, [("a", "")]), UsageError, "make the name 'a' empty"),
        (lambda: rename(checkpoint("x"), {}, [("(", "")]), UsageError, "bad substitution"),
        (lambda: rename(checkpoint("x"), {}, [("a", r"\1")]), UsageError, "bad substitution"),
        (lambda: rename(checkpoint("x"), {}, [("(?P<n>a)", r"\g<m>")]), UsageError, "bad substitution"),
        (lambda: rename(checkpoint("x"), {}, [("a", "\\")]), UsageError, "bad substitution"),
        (lambda: rename(checkpoint("a.1.w", "a.2.w"), {}, [(r"\.\d", "")]), CollisionError, "'a.1.w' and 'a.2.w'"),
        (lambda: select(checkpoint("Enc.w"), keep=["enc.*"]), UsageError, "no key matches"),
        (lambda: select(checkpoint("a"), drop=["*"]), UsageError, "drops all weights"),
    ],
)  # fmt: skip
def test_what_is_refused(edit: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        edit()


def test_strip_nothing() -> None:
    ck = checkpoint("w")
    done = strip_prefix(ck)
    assert done.root is ck.root
    assert done.warnings == ("no key starts with 'module.'",)
    assert not done.notes


@pytest.mark.parametrize(
    ("old", "paths", "prefix", "expected"),
    [
        ("a.b.w a.b.c.w", ["", "a", "a.b", "a.b.c"], "a.b.", {"": 2, "c": 3}),
        ("a.b.w a.x", ["", "a", "a.b"], "a.b.", {"": 2, "a": 1}),
        ("net_conv.w net_w", ["", "net_conv"], "net_", {"": 0, "conv": 1}),
    ],
)
def test_strip_moves_the_metadata(
    old: str, paths: list[str], prefix: str, expected: dict[str, int]
) -> None:
    root = OrderedMapping(named(*old.split()))
    versions = {path: {"version": n} for n, path in enumerate(paths)}
    root.state = {"_metadata": OrderedMapping(versions)}
    found = metadata(strip_prefix(Checkpoint(root), prefix))
    assert [(path, each["version"]) for path, each in found.items()] == list(expected.items())


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


def test_strip_key_of_an_optimizer_state_by_name() -> None:
    root = {
        "model": named("module.w"),
        "optimizer": {"state": {"module.w": {"step": 1}, 3: {}}, "param_groups": []},
    }
    done = strip_prefix(Checkpoint(root), key=["model", "optimizer.state"])
    assert list(done.root["optimizer"]["state"]) == ["w", 3]


def test_strip_one_mapping_in_two_places_stays_one() -> None:
    shared = named("module.w")
    done = strip_prefix(Checkpoint({"state_dict": shared, "best": [shared]}))
    assert done.root["best"][0] is done.root["state_dict"]
    assert not done.warnings


def test_strip_of_a_pickled_module_gives_its_plain_state_dict() -> None:
    weight = tensor(kind="parameter", requires_grad=True)
    inner = module({"w": weight, "none": None}, buffers=[("mean", tensor())])
    ck = Checkpoint(
        {
            "net": module(
                submodules={"module": inner}, callable=Global("torch.nn.parallel", "DataParallel")
            )
        }
    )
    done = strip_prefix(ck)
    assert isinstance(done.root["net"], OrderedMapping)
    assert list(done.root["net"]) == ["w", "mean"]
    plain = done.weights["w"]
    assert (plain.kind, plain.requires_grad, plain.storage) == ("tensor", False, weight.storage)
    assert (
        "the pickled module of net (torch.nn.parallel.DataParallel) is now its plain state_dict"
        in done.notes
    )


# add_prefix


@pytest.mark.parametrize("model", [net(), nn.BatchNorm1d(2)], ids=["net", "version 2 at the root"])
def test_add_is_the_state_dict_of_data_parallel(model: nn.Module) -> None:
    wanted = nn.DataParallel(model).state_dict()
    done = add_prefix(Checkpoint(from_torch(model.state_dict())))
    assert names(done) == list(wanted)
    assert list(metadata(done).items()) == list(wanted._metadata.items())
    assert done.notes == (f"added 'module.' to {len(wanted)} keys",)


def test_add_two_components_is_what_torch_gives() -> None:
    inner = net()
    outer = nn.ModuleDict({"a": nn.ModuleDict({"b": inner})})
    done = add_prefix(Checkpoint(from_torch(inner.state_dict())), "a.b.")
    assert list(metadata(done).items()) == list(outer.state_dict()._metadata.items())


def test_add_then_strip_is_where_we_were() -> None:
    ck = Checkpoint(from_torch(net().state_dict()))
    back = strip_prefix(add_prefix(ck))
    assert names(back) == names(ck)
    assert list(metadata(back).items()) == list(metadata(ck).items())


def test_add_leaves_the_wrapper_alone() -> None:
    """An entry that is not a weight has no module to be in; dotted names next to weights have."""
    root = {"epoch": 3, "fc.weight": tensor(), "fc._packed_params.dtype": Global("torch", "qint8")}
    done = add_prefix(Checkpoint(root))
    assert list(done.root) == ["epoch", "module.fc.weight", "module.fc._packed_params.dtype"]


def test_add_collision() -> None:
    with pytest.raises(CollisionError, match="'w' and 'm_w' would both become 'm_w'"):
        add_prefix(Checkpoint({"w": tensor(), "m_w": "no weight, so it keeps its name"}), "m_")


def test_add_to_all_keys_of_a_mapping_that_was_named() -> None:
    done = add_prefix(Checkpoint({"w": tensor(), "mw": 1, 3: 2}), "m", key=[""])
    assert list(done.root) == ["m.w", "m.mw", 3]


# rename


def test_rename_exchanges_two_names() -> None:
    ck = checkpoint("a", "b")
    done = rename(ck, {"a": "b", "b": "a"})
    assert names(done) == ["b", "a"]
    assert done.weights["b"].storage is ck.weights["a"].storage


def test_rename_map_first_then_substitutions_in_order() -> None:
    done = rename(
        checkpoint("x.gamma", "x.beta"),
        {"x.beta": "x.gamma"},
        [("(?i)GAMMA", "weight"), (r"^(\w+)\.w", r"\1.W")],
    )
    assert names(done) == ["x.Weight", "x.gamma"] and done.notes == ("renamed 2 keys",)


def test_rename_absent_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        rename(checkpoint("layer1.weight", "layer2.bias"), {"layer1.weigth": "w"})
    assert caught.value.hint is not None
    assert "layer1.weight" in caught.value.hint


def test_rename_takes_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`re` would never end here."""
    ck = checkpoint("a" * 40 + "!")
    assert names(rename(ck, sub=[(r"^(\w+\w+)+$", "x")])) == ["a" * 40 + "!"]
    monkeypatch.setattr("ckptkit.edits.keys.SECONDS", 0)
    with pytest.raises(UsageError, match="takes more than 0 seconds"):
        rename(checkpoint("a" * 60 + "b"), sub=[(r"(a|aa)+$", "x")])


def test_rename_nothing() -> None:
    ck = checkpoint("a")
    done = rename(ck, sub=[("zz", "y")])
    assert done.root is ck.root
    assert done.warnings


def test_rename_metadata_follows() -> None:
    """Against torch: the same modules under other names."""
    old = nn.ModuleDict({"enc": net(), "head": nn.Linear(2, 2)})
    new = nn.ModuleDict({"encoder": old["enc"], "top": old["head"]})
    done = rename(
        Checkpoint(from_torch(old.state_dict())), sub=[("^enc", "encoder"), ("^head", "top")]
    )
    assert list(metadata(done).items()) == list(new.state_dict()._metadata.items())
    assert names(done) == list(new.state_dict())
    assert not done.warnings


def test_rename_metadata_that_cannot_follow_is_dropped_and_named() -> None:
    root = OrderedMapping(named("a.w", "a.b"))
    root.state = {"_metadata": OrderedMapping({"": {}, "a": {"version": 2}})}
    done = rename(Checkpoint(root), {"a.w": "x.w", "a.b": "y.b"})
    assert list(metadata(done)) == [""]
    assert "dropped 1 _metadata entry of modules whose new name is unclear: 'a'" in lines(done)


def test_rename_of_a_parameter_keeps_its_module() -> None:
    root = OrderedMapping(named("norm.gamma", "norm.beta"))
    root.state = {"_metadata": OrderedMapping({"": {}, "norm": {"version": 2}})}
    done = rename(Checkpoint(root), sub=[("gamma", "weight"), ("beta", "bias")])
    assert dict(metadata(done)) == {"": {}, "norm": {"version": 2}}


# select


def test_select_keep_and_drop() -> None:
    ck = checkpoint("enc.a.w", "enc.b.w", "dec.a.w")
    assert names(select(ck, keep=["enc.*"])) == ["enc.a.w", "enc.b.w"]
    assert names(select(ck, drop=["*.a.w"])) == ["enc.b.w"]
    assert names(select(ck, keep=["enc.*", "dec.*"], drop=["enc.b.*"])) == ["enc.a.w", "dec.a.w"]
    assert select(ck, keep=["enc.*"]).notes == ("dropped 1 key, kept 2",)


def test_select_unmatched_glob_says_what_is_near() -> None:
    with pytest.raises(UsageError) as caught:
        select(checkpoint("encoder.weight", "decoder.weight"), drop=["encodr.weight"])
    assert caught.value.hint is not None
    assert "encoder.weight" in caught.value.hint


def test_select_everything() -> None:
    ck = checkpoint("a")
    done = select(ck, keep=["*"])
    assert done.root is ck.root
    assert done.warnings


def test_select_keeps_what_is_no_weight() -> None:
    done = select(Checkpoint({"epoch": 3, "a.w": tensor(), "b.w": tensor()}), keep=["a.*"])
    assert list(done.root) == ["epoch", "a.w"]


def test_select_drops_extra_state_by_name() -> None:
    root = OrderedMapping(
        {"a.w": tensor(), "a._extra_state": {}, "b.w": tensor(), "b._extra_state": {}}
    )
    assert list(select(Checkpoint(root), drop=["b.*"]).root) == ["a.w", "a._extra_state"]


def test_select_prunes_metadata() -> None:
    done = select(Checkpoint(from_torch(net().state_dict())), keep=["3.*"])
    assert list(metadata(done)) == ["", "3", "3.0", "3.1"]

    assert done.weights["3.0.weight"].storage is done.weights["3.1.weight"].storage


# all of them


@pytest.mark.parametrize("seed", range(5))
def test_order_types_and_the_rest_of_the_tree_stay(seed: int) -> None:
    some = [f"module.{'abc'[n % 3]}.{n}" for n in range(9)]
    random.Random(seed).shuffle(some)
    weights = OrderedMapping(named(*some), {"other attribute": 1})
    moments = [weights[name] for name in some]
    ck = Checkpoint(
        {"state_dict": weights, "moments": moments, "args": (1, "module.a", {"b": {1: None}})}
    )
    done = rename(add_prefix(strip_prefix(ck)), sub=[("a", "A")])
    assert names(done) == [name.replace("a", "A") for name in some]
    assert list(done.root) == ["state_dict", "moments", "args"]
    assert done.root["state_dict"].state == {"other attribute": 1}
    assert done.root["args"] == (1, "module.a", {"b": {1: None}})
    assert [id(each) for each in done.weights.values()] == [
        id(each) for each in done.root["moments"]
    ]
