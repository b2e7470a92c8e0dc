"""matching: which keys are one under two names, in what order of evidence, each once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice, product
from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.analysis.matching import Kind, Matching, match, similarity

Shapes = Mapping[str, tuple[int, ...]]


def paired(old: Shapes, new: Shapes) -> dict[str, str]:
    return {pair.old: pair.new for pair in matched(old, new).renamed}


def matched(old: Shapes, new: Shapes) -> Matching:
    return match(
        *({name: Kind("float32", shape) for name, shape in side.items()} for side in (old, new))
    )


def layers(form: str, numbers: range, parts: Shapes) -> dict[str, tuple[int, ...]]:
    return {form.format(n, part): shape for n in numbers for part, shape in parts.items()}


LINEAR: Shapes = {"weight": (8, 8), "bias": (8,)}
QKV: Shapes = {f"{x}.weight": (8, 8) for x in ("query", "key", "value")}


def test_a_rule_is_used_everywhere() -> None:
    """One layer fits in two places; the other layers decide which."""
    parts = {"attn.q.w": (8, 8), "attn.k.w": (8, 8), "mlp.up.w": (32, 8), "norm.w": (8,)}
    old = layers("encoder.layer.{}.{}", range(4), parts)
    names = {name: name.replace("encoder.layer.", "blocks.") for name in reversed(old)}
    found = matched(old, {new: old[name] for name, new in names.items()})
    assert {pair.old: pair.new for pair in found.renamed} == names
    assert {(pair.why, pair.confidence) for pair in found.renamed} == {("suffix", 0.95)}


def test_the_longest_suffix_wins() -> None:
    new = {"b.weight": (3, 3), "c.head.weight": (3, 3)}
    assert paired({"a.head.weight": (3, 3)}, new) == {"a.head.weight": "c.head.weight"}


@pytest.mark.parametrize(
    "there, back", [("", "module."), ("module.", ""), ("model.", "net."), ("a.b.", "")]
)
def test_prefixes(there: str, back: str) -> None:
    names = {"conv1.weight": (4, 1), "conv2.weight": (4, 1), "fc.weight": (4, 4), "fc.bias": (4,)}
    old, new = ({prefix + name: shape for name, shape in names.items()} for prefix in (there, back))
    assert paired(old, new) == {there + name: back + name for name in names}


def test_names_decide_where_shapes_are_equal_and_the_order_is_another() -> None:
    old = layers("h.{}.attention.{}", range(3), QKV)
    new = layers("blocks.{}.attn.{}", range(3), {f"{x}_proj.weight": (8, 8) for x in "kvq"})
    assert paired(old, new) == {
        f"h.{n}.attention.{x}.weight": f"blocks.{n}.attn.{x[0]}_proj.weight"
        for n in range(3)
        for x in ("query", "key", "value")
    }


def test_order_decides_where_names_say_nothing() -> None:
    new = layers("h.{}.{}", range(3), {f"{x}.weight": (8, 8) for x in "012"})
    found = matched(layers("h.{}.{}", range(3), QKV), new)
    assert {pair.old.split(".")[2]: pair.new.split(".")[2] for pair in found.renamed} == {
        "query": "0", "key": "1", "value": "2",
    }  # fmt: skip
    assert {pair.why for pair in found.renamed} == {"order"}
    assert all(pair.confidence < 0.7 for pair in found.renamed)


def test_layers_that_begin_at_another_number() -> None:
    old, new = layers("layers.{}.{}", range(1, 5), LINEAR), layers("blocks.{}.{}", range(4), LINEAR)
    assert paired(old, new) == {name: name.replace(f"layers.{n}", f"blocks.{n - 1}") for name in old
                                for n in [int(name.split(".")[1])]}  # fmt: skip


def test_a_sequence_and_named_layers() -> None:
    old = layers("net.{}.{}", range(0, 5, 2), LINEAR)
    new = layers("fc{}.{}", range(1, 4), LINEAR)
    assert paired(old, new) == {
        f"net.{2 * n}.{part}": f"fc{n + 1}.{part}" for n in range(3) for part in LINEAR
    }  # fmt: skip


def test_an_index_inside_a_part() -> None:
    """As in torchvision's vision transformers."""
    old = layers("layers.encoder_layer_{}.{}", range(12), LINEAR)
    assert paired(old, layers("blocks.{}.{}", range(12), LINEAR)) == {
        f"layers.encoder_layer_{n}.{part}": f"blocks.{n}.{part}"
        for n in range(12)
        for part in LINEAR
    }


def test_fewer_layers_keep_their_numbers() -> None:
    old, new = layers("layers.{}.{}", range(6), LINEAR), layers("blocks.{}.{}", range(4), LINEAR)
    assert paired(old, new) == {name.replace("blocks", "layers"): name for name in new}


def test_another_last_part() -> None:
    """LayerNorm.gamma of the first BERT is LayerNorm.weight today."""
    old = layers("layer.{}.LayerNorm.{}", range(3), {"gamma": (8,), "beta": (8,)})
    new = layers("layer.{}.LayerNorm.{}", range(3), {"weight": (8,), "bias": (8,)})
    assert paired(old, new) == {
        name: name.replace("gamma", "weight").replace("beta", "bias") for name in old
    }  # fmt: skip


def test_the_bias_goes_where_its_weight_goes() -> None:
    old = {"stem.weight": (7, 3), "stem.bias": (7,), "other.bias": (7,)}
    new = {"x.bias": (7,), "first.bias": (7,), "first.weight": (7, 3)}
    assert paired(old, new)["stem.bias"] == "first.bias"


def test_the_nearest_names_of_a_shape() -> None:
    names = ("net.decoder.attention.gain", "net.decoder.mlp.gain")
    old = dict.fromkeys((*names, "net.zzz.www"), (5, 5))
    found = matched(old, {f"{name}s": (5, 5) for name in reversed(names)})
    assert [(pair.old, pair.new) for pair in found.renamed] == [(n, f"{n}s") for n in names]
    assert {pair.why for pair in found.renamed} == {"edit"}


def test_nothing_in_common_stays_alone() -> None:
    assert paired({"mine": (1,)}, {"theirs": (1,)}) == {}
    assert matched({"mine": (1,)}, {"theirs": (2, 2)}).reshaped == ()


def test_other_shapes_are_never_renamed() -> None:
    old = {"module.fc.weight": (10, 8), "module.a.weight": (8, 8), "module.a.bias": (8,)}
    new = {"fc.weight": (7, 8), "a.weight": (8, 8), "a.bias": (8,)}
    found = matched(old, new)
    assert [pair.old for pair in found.renamed] == ["module.a.weight", "module.a.bias"]
    (pair,) = found.reshaped
    assert (pair.old, pair.new, pair.why) == ("module.fc.weight", "fc.weight", "suffix")
    assert (pair.a.shape, pair.b.shape) == ((10, 8), (7, 8))
    assert pair.confidence < 0.5


def test_pairs_of_equal_dtype_come_first() -> None:
    old = {"a": Kind("float32", (3, 3)), "b": Kind("int64", (3, 3))}
    new = {"c": Kind("int64", (3, 3)), "d": Kind("float32", (3, 3))}
    assert {pair.old: pair.new for pair in match(old, new).renamed} == {"a": "d", "b": "c"}


WORDS = st.sampled_from(("a", "b", "layer", "0", "1", "10", "conv2", "weight", ""))
NAMES = st.lists(WORDS, min_size=1, max_size=4).map(".".join)
SIDES = st.dictionaries(NAMES, st.sampled_from(((), (2,), (2, 2), (3, 2))), max_size=12)


@given(SIDES, SIDES)
def test_each_key_once_and_of_one_shape(old: Shapes, new: Shapes) -> None:
    old, new = (
        {k: v for k, v in side.items() if k not in other}
        for side, other in ((old, new), (new, old))
    )
    found = matched(old, new)
    pairs = (*found.renamed, *found.reshaped)
    assert len({pair.old for pair in pairs}) == len({pair.new for pair in pairs}) == len(pairs)
    assert all(old[pair.old] == new[pair.new] for pair in found.renamed)
    assert all(old[pair.old] != new[pair.new] for pair in found.reshaped)
    assert all(0 < pair.confidence < 1 for pair in pairs)
    renamed = [pair.old for pair in found.renamed]
    assert renamed == [name for name in old if name in renamed]


def test_many_keys_with_nothing_in_common_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more names are compared than allowed, and it is said."""
    from ckptkit.analysis import matching

    compared = []

    def counted(*names: object) -> float:
        compared.append(names)
        return 0.0

    monkeypatch.setattr(matching, "similarity", counted)
    words = ["".join(each) for each in islice(product(ascii_lowercase, repeat=3), 2_000)]
    found = matched(
        {f"{w}.x{w}": (n % 9, 4) for n, w in enumerate(words)},
        {f"{w}q.y{w}": (4, 4) for w in words[:1500]},
    )
    assert len(compared) <= matching.COMPARISONS + matching.COMPARED
    assert found.unsearched > 0


def test_names_of_a_thousand_parts() -> None:
    """The names of a hostile file cost no more than their length."""
    old = {f"{n}." + "a1." * 20_000 + "w": (2, 2) for n in range(20)}
    assert len(paired(old, {f"b{name}": shape for name, shape in old.items()})) == 20


def test_similarity() -> None:
    def of(one: str, other: str) -> float:
        return similarity(one.split("."), other.split("."))

    assert of("a.b", "a.b") == 1
    assert of("a.b", "c.d") == 0
    assert of("query", "q_proj") > of("query", "k_proj")
    assert of("encoder.attention.w", "encoder.attn.w") > of("encoder.attention.w", "encoder.mlp.w")
    assert of("a" * 100_000, "b" * 100_000) == 0
