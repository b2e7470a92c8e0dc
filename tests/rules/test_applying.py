"""Rules on checkpoints: the pairs of the vectors through every container, and other entries."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import CollisionError, TensorError
from tests.conftest import Ok, Run
from tests.rules.families import RULES, VECTORS

Loaded = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> tuple[object, ...]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), data


def assert_same(found: Any, expected: Any) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert raw(found[name]) == raw(tensor), name


def written(folder: Path, *steps: Any, **more: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"steps": steps, **more}))
    return path


def recipe(folder: Path, lines: list[str]) -> Path:
    return written(folder, {"rules": lines, "keep": "rest"})


CONTAINERS = ["model.safetensors", "model.pth", "shards", "dcp"]


def stored(state: Loaded, folder: Path, container: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / container
    if container.endswith(".safetensors"):
        save_file(state, path)
    elif container.endswith(".pth"):
        torch.save(state, path)
    elif container == "dcp":
        from torch.distributed import checkpoint

        checkpoint.save(state, checkpoint_id=path, no_dist=True)
    else:
        path.mkdir()
        names = sorted(state)
        parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({name: state[name] for name in part}, path / file)
        places = {name: file for file, part in parts.items() for name in part}
        index = {"metadata": {}, "weight_map": places}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not VECTORS.is_dir(), reason="CKPTKIT_VECTORS is not set")
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("family", RULES)
def test_the_pairs_both_ways(family: str, container: str, tmp_path: Path, ok: Ok) -> None:
    sides = [load_file(VECTORS / family / f"{side}.safetensors") for side in "ab"]
    config = VECTORS / family / "config.json"
    path = recipe(tmp_path, RULES[family])
    for number, (source, expected) in enumerate((sides, sides[::-1])):
        place = stored(source, tmp_path / f"in{number}", container)
        out = tmp_path / f"out{number}{Path(container).suffix or '.pth'}"
        reverse = ["--reverse"] * number
        ok("run", path, place, out, "--config", config, "--verify", *reverse)
        assert_same(ckptkit.load(out), expected)


def test_config_beside_the_source_is_found(tmp_path: Path, run: Run, ok: Ok) -> None:
    weight = torch.arange(48.0).reshape(12, 4)
    rule = "q [(h r two) i] -> q2 [(h two r) i] with h=config.heads two=2"
    path = recipe(tmp_path, [rule])
    for name in ("model.pth", "model.safetensors"):
        stored({"q": weight}, tmp_path / "run", name)
        lacking = run("run", path, tmp_path / "run" / name, tmp_path / "out.pth")
        assert lacking.code == 2
        assert "cannot infer how 12 splits into (h r two)" in lacking.stderr
        assert "--arg h" in lacking.stderr
        (tmp_path / "run" / "config.json").write_text('{"heads": 3, "limit": Infinity}')
        said = ok("run", path, tmp_path / "run" / name, tmp_path / "out.pth", "--force")
        assert "config.json next to the source describes the old layout" in said
        expected = weight.reshape(3, 2, 2, 4).transpose(1, 2).reshape(12, 4)
        assert_same(ckptkit.load(tmp_path / "out.pth"), {"q2": expected})
        (tmp_path / "run" / "config.json").unlink()


@pytest.mark.parametrize(
    "text", ["[1]", "{", "{" * 100_000, '{"a": ' + "9" * 5_000 + "}", " " * (2 << 20)]
)
def test_what_is_no_configuration(tmp_path: Path, run: Run, text: str) -> None:
    torch.save({"q": torch.ones(4)}, tmp_path / "a.pth")
    (tmp_path / "c.json").write_text(text)
    rule = "q [(h d)] -> r [h d] with h=config.heads"
    args = ("--rule", rule, "--config", tmp_path / "c.json")
    done = run("convert", tmp_path / "a.pth", tmp_path / "b.pth", *args)
    assert done.code == 2
    assert "c.json" in done.stderr


def test_one_line_rules(tmp_path: Path, run: Run, ok: Ok) -> None:
    state = {"a.q": torch.ones(2, 3), "a.k": torch.zeros(2, 3), "n": torch.ones(1)}
    torch.save(state, tmp_path / "a.pth")
    rule = "a.{p:q|k} [o i] -> qk [(p o) i]"
    ok("convert", tmp_path / "a.pth", tmp_path / "b.safetensors", "--rule", rule)
    expected = {"qk": torch.cat([torch.ones(2, 3), torch.zeros(2, 3)]), "n": torch.ones(1)}
    assert_same(load_file(tmp_path / "b.safetensors"), expected)
    odd = run("convert", tmp_path / "a.pth", tmp_path / "c.pth", "--rule", rule, "--arg", "o=3")
    assert odd.code == 3
    assert not (tmp_path / "c.pth").exists()
    unused = run("convert", tmp_path / "a.pth", tmp_path / "c.pth", "--rule", rule, "--arg", "x=3")
    assert unused.code == 2
    assert "--arg x" in unused.stderr
    bare = run("convert", tmp_path / "a.pth", tmp_path / "c.pth", "--arg", "x=3")
    assert bare.code == 2


def test_a_dry_run_says_all(tmp_path: Path, run: Run) -> None:
    state = {f"e.{n}.w{m}": torch.ones(3, 4) for n in range(2) for m in (1, 3)}
    torch.save({**state, "n.weight": torch.ones(1)}, tmp_path / "a.pth")
    lines = ["e.{e}.w{m:1|3} [o i] -> g [e (m o) i]", "n.{w:*} -> norm.{w}"]
    path = recipe(tmp_path, lines)
    done = run("run", path, tmp_path / "a.pth", tmp_path / "b.pth", "--dry-run")
    assert "step 1, rules: 4 + 1 of 5 keys taken, 0 kept; 2 written" in done.stdout
    assert "4 -> 1 tensor [2, 6, 4] float32, 192 B joined" in done.stdout
    assert "reversible: yes" in done.stdout
    assert not (tmp_path / "b.pth").exists()
    done = run("run", path, tmp_path / "a.pth", tmp_path / "b.pth", "--dry-run", "--json")
    said = json.loads(done.stdout)
    assert said["reversible"] is True
    assert [(r["matched"], r["made"], r["nbytes"], r["how"]) for r in said["rules"]] == [
        (4, 1, 192, "joined"),
        (1, 1, 4, "moved"),
    ]
    dropping = recipe(tmp_path, ["e.{e}.w{m:1|3} -> e.{e}.w{m:1|-}"])
    done = run("run", dropping, tmp_path / "a.pth", tmp_path / "b.pth", "--dry-run")
    assert "reversible: rule 1 drops 24 elements" in done.stdout
    assert "rule 1 dropped 24 elements" in done.stdout


def test_steps_in_a_row_and_back(tmp_path: Path, ok: Ok) -> None:
    """Split a fused matrix, turn q and k alone, join in another order: three steps, one plan."""
    steps = [
        {"add": "model."},
        {"rules": ["model.qkv [(p o) i] -> model.{p:q|k|v} [o i]"]},
        {"rules": ["model.{p:q|k} [(h r two) i] -> model.{p} [(h two r) i]"], "keep": "rest"},
        {"rules": ["model.{p:k|v|q} [o i] -> model.kvq [(p o) i]"]},
        {"rename": {"map": {"model.kvq": "model.fused"}}},
        {"cast": "float32"},
        {"wrap": "state_dict"},
        {"compute": {"model.f*": "x + 1"}},
    ]
    path = written(tmp_path, *steps, args={"two": 2, "h": "config.heads or 4"})
    weight = torch.randn(48, 5)
    torch.save({"qkv": weight}, tmp_path / "a.pth")
    ok("run", path, tmp_path / "a.pth", tmp_path / "b.pth", "--arg", "h=2")
    q, k, v = (each.contiguous() for each in weight.chunk(3))
    q, k = (each.reshape(2, 4, 2, 5).transpose(1, 2).reshape(16, 5) for each in (q, k))
    found = torch.load(tmp_path / "b.pth")
    assert_same(found["state_dict"], {"model.fused": torch.cat([k, v, q]) + 1})
    said = ok("run", path, tmp_path / "b.pth", tmp_path / "c.pth", "--reverse", "--arg", "h=2")
    assert "not undone: cast" in said
    assert_same(torch.load(tmp_path / "c.pth"), {"qkv": weight + 1 - 1})


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"rename": {"sub": {"a": "b"}}}, "step 1 (rename)"),
        ({"extract": ["a", "b"]}, "step 1 (extract)"),
        ({"average": ["a.pth"]}, "step 1 (average)"),
    ],
)
def test_what_cannot_be_undone(step: Any, said: str, tmp_path: Path, run: Run) -> None:
    torch.save({"y.a": torch.ones(1), "y.b": torch.ones(2)}, tmp_path / "a.pth")
    done = run("run", written(tmp_path, step), tmp_path / "a.pth", tmp_path / "b.pth", "--reverse")
    assert done.code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- rules: [a]", "step 1, rule 1"),
        ("- rules: []", "no rule"),
        ("- rules: [a -> b]\n  kep: rest", "unknown option 'kep'"),
        ("- rules: [a -> b]\n  sizes: {h: [1]}", "not a size"),
        ("- rules: [a -> b]\n  sizes: 3", "not a mapping from axis names to sizes"),
        ("- rules: [a -> b]\nargs: {x: 1.5}", "not a size"),
        ("- rulez: [a -> b]", "did you mean rules"),
    ],
)
def test_recipes_that_are_wrong(text: str, said: str, tmp_path: Path, run: Run) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pth")
    (tmp_path / "r.yaml").write_text(f"steps:\n{text}\n")
    done = run("run", tmp_path / "r.yaml", tmp_path / "a.pth", tmp_path / "b.pth")
    assert done.code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("[b -> c, d -> e]", "a.pth: step 2, rule 2 matches no key"),
        ("[c -> d]", "a.pth: step 2, rule 1 matches no key"),
        ("['b [i j] -> c [j i]']", "a.pth: step 2, rule 1: b has 1 dimension"),
        ("['bb ->? y']", "a.pth: step 2: 1 key is matched by no rule: b; nearest: rule 1, bb"),
    ],
)
def test_errors_name_the_step(rules: str, said: str, tmp_path: Path, run: Run) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pth")
    (tmp_path / "r.yaml").write_text(f"steps:\n- rules: [a -> b]\n- rules: {rules}\n")
    done = run("run", tmp_path / "r.yaml", tmp_path / "a.pth", tmp_path / "b.pth")
    assert said in done.stderr


# What else a tree holds


def applied(state: Any, *lines: str, tmp_path: Path, **given: Any) -> Any:
    torch.save(state, tmp_path / "in.pth")
    made = ckptkit.apply_rules(ckptkit.open(tmp_path / "in.pth"), lines, **given)
    ckptkit.save(made, tmp_path / "out.pth", force=True)
    return made, torch.load(tmp_path / "out.pth", weights_only=False)


def test_a_target_has_a_storage_of_its_own(tmp_path: Path) -> None:
    state = {"qkv": torch.arange(12.0)}
    _, found = applied(state, "qkv [(p o)] -> {p:q|k|v} [o]", tmp_path=tmp_path)
    assert [found[p].untyped_storage().nbytes() for p in "qkv"] == [16, 16, 16]


def test_ties_stay_and_are_said_where_they_do_not(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "b": weight, "c": torch.ones(1)}
    _, found = applied(state, "{x:a|b} [o i] -> {x} [i o]", keep="rest", tmp_path=tmp_path)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert torch.equal(found["a"], weight.t())
    made, found = applied(state, "a [o i] -> a [i o]", keep="rest", tmp_path=tmp_path)
    assert found["a"].data_ptr() != found["b"].data_ptr()
    assert any("no longer tied: 'a', 'b'" in note for note in made.notes)


def test_views_and_parameters_are_what_their_sources_are(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "p.0": torch.nn.Parameter(base[:2].clone()),
        "p.1": torch.nn.Parameter(base[1:].clone()),
        "m.0": torch.nn.Parameter(torch.ones(2)),
        "m.1": torch.ones(2),
        "v": base.t(),
    }
    lines = ("{k:p|m}.{n} [...] -> {k} [n ...]", "v [i o] -> v2 [o i]")
    made, found = applied(state, *lines, tmp_path=tmp_path)
    assert isinstance(found["p"], torch.nn.Parameter) and found["p"].requires_grad
    assert not isinstance(found["m"], torch.nn.Parameter)
    assert any("some of their sources are not parameters" in each for each in made.warnings)
    assert torch.equal(found["v2"], base)


def test_what_is_no_plain_tensor_can_be_renamed(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    quantized = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    state = {"s": sparse, "q": quantized, "w": torch.ones(1)}
    _, found = applied(state, "{n:s|q} -> new.{n}", keep="rest", tmp_path=tmp_path)
    assert torch.equal(found["new.s"].to_dense(), torch.eye(3))
    assert found["new.q"].is_quantized
    with pytest.raises(TensorError, match="can only be renamed"):
        applied(state, "q [o i] -> q [i o]", keep="rest", tmp_path=tmp_path)


def test_conjugates_and_strides_are_carried_out(tmp_path: Path) -> None:
    conj = torch.tensor([[1 + 2j, 3 - 1j]]).conj()
    strided = torch.arange(24.0).reshape(4, 6)[::2, ::3]
    _, found = applied({"c": conj, "s": strided}, "{n:c|s} [o i] -> {n} [i o]", tmp_path=tmp_path)
    assert torch.equal(found["c"], conj.resolve_conj().t())
    assert torch.equal(found["s"], strided.t())


def test_tensors_without_elements_and_without_dimensions(tmp_path: Path) -> None:
    state = {"e": torch.ones(0, 4), "n": torch.tensor(7), "m": torch.tensor(8)}
    _, found = applied(state, "e [o i] -> f [i o]", "{x:n|m} [] -> nm [x]", tmp_path=tmp_path)
    assert found["f"].shape == (4, 0)
    assert found["nm"].tolist() == [7, 8]


def test_metadata_goes_where_the_modules_go(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
            self.experts = torch.nn.ModuleList(both)
            self.norm = torch.nn.BatchNorm1d(2)
            self.act = torch.nn.ReLU()

    lines = ("experts.{e}.weight [o i] -> moe.stacked [e o i]", "norm.{w:*} -> moe.bn.{w}")
    _, found = applied(Net().state_dict(), *lines, tmp_path=tmp_path)
    assert isinstance(found, OrderedDict)
    versions = {path: entry["version"] for path, entry in found._metadata.items()}
    assert versions == {"": 1, "act": 1, "moe": 1, "moe.bn": 2}


def test_other_values_of_a_mapping_stay(tmp_path: Path) -> None:
    state = {"a.w": torch.ones(2), "epoch": 3, "b.w": torch.zeros(2)}
    _, found = applied(state, "{x:a|b}.w [o] -> w [x o]", tmp_path=tmp_path)
    assert list(found) == ["w", "epoch"]
    with pytest.raises(CollisionError, match="epoch"):
        applied(state, "{x:a|b}.w [o] -> epoch [x o]", tmp_path=tmp_path)


def test_other_mappings_by_their_paths(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2)}, "ema": {"a": torch.zeros(2)}}
    _, found = applied(state, "a -> b", keys=["model", "ema"], tmp_path=tmp_path)
    assert [list(found[each]) for each in ("model", "ema")] == [["b"], ["b"]]


def test_fixtures_of_each_kind_of_input(tmp_path: Path) -> None:
    """A big-endian, compressed or sharded source gives the same elements as a plain one."""
    import numpy as np

    array = np.arange(60, dtype=">f4").reshape(5, 12)
    np.savez_compressed(tmp_path / "a.npz", x=array)
    made = ckptkit.apply_rules(tmp_path / "a.npz", "x [o (h d)] -> y [(h o) d] with h=3")
    ckptkit.save(made, tmp_path / "b.pth")
    expected = array.astype("<f4").reshape(5, 3, 4).transpose(1, 0, 2).reshape(15, 4)
    assert torch.load(tmp_path / "b.pth")["y"].tolist() == expected.tolist()


def test_ties_and_entries_are_steps(tmp_path: Path, run: Run, ok: Ok) -> None:
    weight = torch.ones(2, 3)
    torch.save({"model": {"embed.weight": weight}, "optimizer": {"x": 1}}, tmp_path / "a.pth")
    steps = {"drop-entry": ["optimizer", "none"]}, {"tie": {"head.weight": "embed.weight"}}
    path = written(tmp_path, *steps)
    done = run("run", path, tmp_path / "a.pth", tmp_path / "b.pth")
    assert done.code == 0, done.stderr
    assert "there is no entry 'none'" in done.stderr
    found = torch.load(tmp_path / "b.pth")
    assert list(found) == ["model"]
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    ok("run", path, tmp_path / "b.pth", tmp_path / "c.pth", "--reverse")
    assert list(torch.load(tmp_path / "c.pth")["model"]) == ["embed.weight"]
    apart = {"model": {"embed.weight": weight, "head.weight": weight.clone()}}
    torch.save(apart, tmp_path / "d.pth")
    done = run("run", path, tmp_path / "d.pth", tmp_path / "e.pth", "--reverse")
    assert done.code == 2
    assert "is not tied" in done.stderr


def test_arrays_of_numpy_become_tensors(tmp_path: Path) -> None:
    import numpy as np

    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(6, dtype=">i4").reshape(2, 3)}
    torch.save({**arrays, "c": torch.ones(2, 3, dtype=torch.float64)}, tmp_path / "in.pth")
    made = ckptkit.apply_rules(
        tmp_path / "in.pth", ["{p:a|c} [o i] -> ac [i (p o)]", "b [o i] -> b.{o} [i]"]
    )
    assert "converted NumPy arrays to tensors: 'ac', 'b.0', 'b.1'" in made.notes
    ckptkit.save(made, tmp_path / "out.pth")
    joined = torch.cat([torch.from_numpy(arrays["a"]), torch.ones(2, 3)]).T
    rows = dict(zip(("b.0", "b.1"), torch.from_numpy(arrays["b"].astype("i4")), strict=True))
    assert_same(torch.load(tmp_path / "out.pth"), {"ac": joined, **rows})
