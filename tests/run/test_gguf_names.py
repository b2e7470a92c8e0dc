"""A GGUF file beside its original: what `diff` explains, and the way back into a file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from tests.conftest import Ok, Run
from tests.formats.gguf_files import Entry, Typed, made
from tests.run.test_gguf import CASES, LLAMA, VECTORS, entry, model, needs_vectors, runs

State = dict[str, torch.Tensor]
HEADS = {"attention__head_count": 4, "attention__head_count_kv": 2}
QUANTIZED = VECTORS / "quantized-llama-q4_k_m"


NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm",
    "blk.0.attn_norm": "layers.0.input_layernorm",
    "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
    **{f"blk.0.attn_{g}": f"layers.0.self_attn.{h}_proj"
       for g, h in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))},
    **{f"blk.0.ffn_{p}": f"layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")},
}  # fmt: skip


def q8_0(values: np.ndarray[Any, Any]) -> bytes:
    """Blocks by the formula of ggml, one number at a time."""
    made = b""
    for block in values.astype("f4").reshape(-1, 32):
        largest = max(abs(x) for x in block)
        scale = np.float32(largest / np.float32(127))
        inverse = np.float32(1) / scale if scale else np.float32(0)
        codes = []
        for x in block:
            y = float(np.float32(x * inverse))
            whole = int(abs(y)) + (abs(y) - int(abs(y)) >= 0.5)
            codes.append(whole if y >= 0 else -whole)
        made += np.float16(scale).tobytes() + struct.pack("32b", *codes)
    return made


def turned(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of Hugging Face, from that of llama.cpp."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, State]:
    """A file of Q8_0, F32 and F16, and the weights that it was made of."""
    torch.manual_seed(3)
    state: State = {f"model.{name}.weight": torch.randn(32, 32) for name in NAMES.values()}
    state["model.embed_tokens.weight"] = torch.randn(6, 32)
    for name in state:
        if "norm" in name:
            state[name] = torch.randn(32) + ("layers" not in name)
    tensors = [entry("rope_freqs.weight", 4)]
    for old, new in NAMES.items():
        values = state[f"model.{new}.weight"]
        for p, heads in (("q", 4), ("k", 2)):  # by hand: pairs of neighbors
            if old == f"blk.0.attn_{p}":
                values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(32, 32)
        number, data = 0, values.numpy().tobytes()
        if "ffn" in old and "norm" not in old:
            number, data = 1, values.half().numpy().tobytes()
        elif values.dim() == 2:
            number, data = 8, q8_0(values.numpy())
        tensors.append(Entry(f"{old}.weight", tuple(values.shape), number, data))
    return model(tmp_path, "llama", tensors, **HEADS), state


def written(folder: Path, state: State) -> Path:
    (folder / "hf").mkdir(exist_ok=True)
    save_file(state, folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text("{}")
    return folder / "hf"


def both(ok: Ok, source: Path, hf: Path, *said: str) -> str:
    """`diff` succeeds both ways, and prints this. Return what the second prints."""
    for sides in ((source, hf), (hf, source)):
        text = " ".join(ok("diff", *sides).split())
        assert [each for each in said if each not in text] == []
    return text


def facts(run: Run, *words: object) -> dict[str, Any]:
    """What `diff --json` prints."""
    found: dict[str, Any] = json.loads(run("diff", *words, "--json").stdout)
    return found


# diff


@needs_vectors
def test_diff_of_the_vectors(run: Run) -> None:
    checks = json.loads((QUANTIZED / "case.json").read_text())["checks"]
    for check in (each for each in checks if each["do"] == "diff"):
        done = run("diff", QUANTIZED / check["a"], QUANTIZED / check["b"], "--json")
        assert done.code == check["exit"]
        found = json.loads(done.stdout)
        assert found["missing"] == found["unexpected"] == found["mismatched"] == []
        rows = {row["name"]: row for row in found["changed"]}
        assert [n for n, row in rows.items() if not row["explained"]] == check["unexplained"]
        for name, expected in check["relative"].items():
            if expected["relative"] == 0:
                assert name not in rows
                continue
            assert rows[name]["type"] == expected["type"]
            assert rows[name]["relative"] == pytest.approx(expected["relative"], rel=1e-6)


@needs_vectors
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.parent.name)
def test_each_model_is_its_original(case: Path, ok: Ok) -> None:
    for check in runs(case):
        both(ok, case.parent / check["source"], case.parent / check["expect"])


def test_types_explain(pair: tuple[Path, State], tmp_path: Path, run: Run, ok: Ok) -> None:
    """Q8_0 within its limit; F16 and F32 exactly, of floats that are rounded so; notes."""
    source, state = pair
    original = {name: each.bfloat16() if "embed" in name else each for name, each in state.items()}
    original["lm_head.weight"] = original["model.embed_tokens.weight"].clone()
    original["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    both(
        ok,
        source,
        written(tmp_path, original),
        "the same model: 11 keys; the types of the GGUF file explain 5 differing tensors",
        "5 tensors differ, within the error of Q8_0 (0.",
        "limit 1.25 %)",
        "rope_freqs.weight (only in GGUF files)",
        "lm_head.weight (equal to model.embed_tokens.weight)",
        "inv_freq (llama.cpp does not convert it)",
    )
    said = ok("diff", source, tmp_path / "hf", "--no-values")
    assert "same names and shapes: 11 keys; values not compared" in said
    for sides in ((source, tmp_path / "hf"), (tmp_path / "hf", source)):
        assert ckptkit.diff(*sides).explained


def test_what_no_type_explains(pair: tuple[Path, State], tmp_path: Path, run: Run) -> None:
    source, state = pair
    q, k = (f"model.layers.0.self_attn.{p}_proj.weight" for p in "qk")
    norm, up = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    changed = {**state, q: turned(state[q], 4), norm: state[norm] - 1, up: state[up] * 1.01}
    changed[k] = torch.randn(32, 32)
    done = run("diff", source, written(tmp_path, changed))
    assert done.code == 1
    lines = {line.split(":")[0]: line for line in done.stdout.splitlines() if ": differs" in line}
    assert set(lines) == {q, k, norm, up}
    why = "more than the error of Q8_0 (limit 1.25 %)"
    assert f"{why}; both files have the same rows in a different order" in lines[q]
    assert "another order" not in lines[k]
    assert "but F32 is a lossless type" in lines[norm]
    assert "but F16 is a lossless type" in lines[up]
    assert "4 changed, of 11 keys" in done.stdout
    rows = facts(run, tmp_path / "hf", source, "--keys", "*norm*")["changed"]
    assert [(row["name"], row["type"], row["explained"]) for row in rows] == [(norm, "F32", False)]


def test_keys_of_one_side(pair: tuple[Path, State], tmp_path: Path, run: Run) -> None:
    source, state = pair
    other = dict(state)
    other["lm_head.weight"] = other.pop("model.norm.weight").repeat(6, 1)
    hf = written(tmp_path, other)
    for sides, missing in (((source, hf), "lm_head"), ((hf, source), "model.norm")):
        found = facts(run, *sides)
        unexpected = {"lm_head": "model.norm", "model.norm": "lm_head"}[missing]
        assert found["missing"] == [f"{missing}.weight"]
        assert found["unexpected"] == [f"{unexpected}.weight"]
    done = run("diff", source, written(tmp_path, {**state, "model.norm.weight": torch.ones(31)}))
    assert done.code == 1 and "[31]" in done.stdout


def test_rows_that_the_file_lacks(
    pair: tuple[Path, State], tmp_path: Path, run: Run, ok: Ok
) -> None:
    """Rows of an embedding beyond the vocabulary of the tokenizer are notes, both ways."""
    source, state = pair
    embed = "model.embed_tokens.weight"
    state[embed] = torch.cat([state[embed], torch.randn(3, 32)])
    hf = written(tmp_path, state)
    both(ok, source, hf, f"3 rows of {embed} (dropped by llama.cpp)")
    said = ok("convert", hf, tmp_path / "new.gguf", "--like", source)
    assert "dropped rows that the GGUF file does not have: 'token_embd.weight'" in said
    assert (tmp_path / "new.gguf").read_bytes() == source.read_bytes()
    state[embed] = state[embed][:5].clone()
    done = run("diff", source, written(tmp_path, state))
    assert done.code == 1
    assert embed in done.stdout


def test_first_positions_of_roberta(tmp_path: Path, ok: Ok) -> None:
    """The rows that the padding takes come first in the original, and are not in the file."""
    block = ["attn_q", "attn_k", "attn_v", "attn_output", "attn_output_norm", "ffn_up", "ffn_down",
             "layer_output_norm"]  # fmt: skip
    names = ["token_embd", "position_embd", "token_types", "token_embd_norm",
             *(f"blk.0.{each}" for each in block)]  # fmt: skip
    tensors = [entry(f"{name}.weight", *((4,) if "norm" in name else (6, 4))) for name in names]
    tensors += [entry(f"{name}.bias", 4) for name in names if "blk" in name or "norm" in name]
    source = model(tmp_path, "bert", tensors)
    ok("run", "gguf", source, tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    positions = "embeddings.position_embeddings.weight"
    state[positions] = torch.cat([torch.zeros(2, 4), state[positions]])
    state["pooler.dense.bias"] = torch.ones(4)
    said = " ".join(ok("diff", source, written(tmp_path, state)).split())
    assert f"2 rows of {positions} (dropped by llama.cpp)" in said
    assert "pooler.dense.bias (llama.cpp does not convert it)" in said
    ok("convert", tmp_path / "hf", tmp_path / "new.gguf", "--like", source)
    assert (tmp_path / "new.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("strip, add", [("model.", ""), ("", "bert.")])
def test_names_with_another_prefix_pair(
    strip: str, add: str, pair: tuple[Path, State], tmp_path: Path, run: Run, ok: Ok
) -> None:
    """The names are those of the original; the command is about the file that it changes."""
    source, state = pair
    q, up = (f"model.layers.0.{each}_proj.weight" for each in ("self_attn.q", "mlp.up"))
    changed = {**state, q: turned(state[q], 4), up: state[up] * 1.01}
    other = {add + name.removeprefix(strip): each for name, each in changed.items()}
    hf = written(tmp_path, other) / "model.safetensors"
    wrong = [add + each.removeprefix(strip) for each in (q, up)]
    for sides in ((source, hf), (hf, source)):
        found = facts(run, *sides)
        assert found["missing"] == found["unexpected"] == found["renamed"] == []
        rows = {row["name"]: row for row in found["changed"]}
        assert [name for name, row in rows.items() if not row["explained"]] == wrong
        assert rows[wrong[0]]["type"] == "Q8_0"
        assert rows[wrong[0]]["relative"] > 1
    other = {add + name.removeprefix(strip): each for name, each in state.items()}
    written(tmp_path, other)
    prefix = f"names in {hf} {'have the additional' if add else 'lack the'} prefix"
    said = both(ok, source, hf, "the same model: 11 keys", prefix)
    _, *words = said.split("remove it: " if add else "to add it: ")[1].split()
    ok(*words[: words.index(str(hf)) + 2])
    (made,) = (path for path in (tmp_path / "hf").glob("*.safetensors") if path != hf)
    assert "prefix" not in run("diff", source, made).stdout


def test_names_without_a_prefix_beside_a_head(tmp_path: Path, run: Run, ok: Ok) -> None:
    """A name of both files stays; of two copies of the model, none is chosen."""
    source = model(tmp_path, "llama", [*LLAMA, entry("output.weight", 5, 8)], **HEADS)
    ok("run", "gguf", source, tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in state.items()}
    assert "lm_head.weight" in bare
    said = ok("diff", source, written(tmp_path, bare))
    assert "equal: 12 keys" in said and "lack the prefix 'model.'\n" in said
    copies = {f"{copy}.{name}": each.clone() for copy in "ab" for name, each in state.items()}
    found = facts(run, source, written(tmp_path, copies))
    assert (len(found["missing"]), len(found["unexpected"])) == (24, 12)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_model_of_a_multimodal_model(
    prefix: str, pair: tuple[Path, State], tmp_path: Path, run: Run, ok: Ok
) -> None:
    """Weights of the vision model are a note; others that the file lacks, a difference."""
    source, state = pair
    new = f"{prefix}model." if prefix == "language_model." else prefix
    other = {name.replace("model.", new): each for name, each in state.items()}
    vision = {"model.visual.patch_embed.proj.weight": torch.ones(3),
              "vision_tower.norm.weight": torch.ones(32), "mtp.norm.weight": torch.ones(32)}  # fmt: skip
    hf = written(tmp_path, other | vision)
    both(
        ok,
        source,
        hf,
        "the same model: 11 keys",
        f"{prefix!r}",
        "mtp.norm.weight (llama.cpp does not convert it)",
        "2 weights for an mmproj file: model.visual.patch_embed.proj.weight",
    )
    written(tmp_path, other | vision | {"model.other.weight": torch.ones(32)})
    found = facts(run, source, hf)
    assert (found["missing"], found["unexpected"]) == (["model.other.weight"], [])


def test_nan_is_not_explained(pair: tuple[Path, State], tmp_path: Path, run: Run) -> None:
    source, state = pair
    state["model.embed_tokens.weight"][2, 3] = float("nan")
    rows = facts(run, source, written(tmp_path, state))["changed"]
    wrong = [row["name"] for row in rows if not row["explained"]]
    assert wrong == ["model.embed_tokens.weight"]
    state["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    done = run("diff", source, written(tmp_path, state))
    assert done.code == 1
    for name, why in (("embed_tokens", "more than the error of Q8_0"), ("up_proj", "but F16 is")):
        line = next(x for x in done.stdout.splitlines() if f"{name}.weight: " in x)
        assert f"differs in NaN or infinite elements, {why}" in line


def test_other_pairs_are_compared_as_they_are(
    pair: tuple[Path, State], tmp_path: Path, run: Run, ok: Ok
) -> None:
    """Two GGUF files; one and its own names in safetensors; one without a recipe; --stored."""
    source, state = pair
    assert "equal: 12 keys (names, dtypes" in ok("diff", source, source)
    plain = tmp_path / "plain.safetensors"
    ok("convert", source, plain, "--dequantize", "float32")
    assert "12 keys" in ok("diff", source, plain)
    hf = written(tmp_path, state)
    assert run("diff", source, hf, "--stored").code == 1
    (tmp_path / "other").mkdir()
    other = model(tmp_path / "other", "qwen99", LLAMA)
    assert run("diff", other, hf).code == 1


# The way back


@needs_vectors
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.parent.name)
def test_back_into_the_file(case: Path, tmp_path: Path, run: Run, ok: Ok) -> None:
    """The same bytes again; of mamba, whose A went through logarithms, nearly."""
    source, out = case.parent / "model.gguf", tmp_path / "new.gguf"
    ok("run", "gguf", source, tmp_path / "hf", "--dequantize", "float32")
    done = run("convert", tmp_path / "hf", out, "--like", source)
    if case.parent == QUANTIZED:
        assert done.code == 3
        assert "writes only the types F32, F16, BF16, Q8_0, not output.weight (Q6_K)" in done.stderr
        assert not out.exists()
        return
    assert done.code == 0, done.stderr
    old, new = source.read_bytes(), out.read_bytes()
    assert len(old) == len(new)
    if case.parent.name == "model-mamba":
        assert sum(a != b for a, b in zip(old, new, strict=True)) < 800
    else:
        assert old == new


def test_new_weights_in_an_old_file(
    pair: tuple[Path, State], tmp_path: Path, run: Run, ok: Ok
) -> None:
    """Other numbers, in the types of the file; what Hugging Face lacks stays."""
    source, _ = pair
    torch.manual_seed(4)
    shapes = load_file(written(tmp_path, pair[1]) / "model.safetensors")
    state = {name: torch.randn(each.shape).bfloat16() for name, each in shapes.items()}
    state["model.embed_tokens.weight"][1] = 0
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    out = tmp_path / "new.gguf"
    said = ok("convert", written(tmp_path, state), out, "--like", source)
    assert "metadata, tokenizer and types of" in said
    assert "copied the tensors 'rope_freqs.weight' of the GGUF file" in said
    data = out.read_bytes()
    embedding = q8_0(state["model.embed_tokens.weight"].float().numpy())
    assert data.count(embedding) == 1
    up = state["model.layers.0.mlp.up_proj.weight"].half().numpy().tobytes()
    assert data.count(up) == 1
    ok("diff", out, tmp_path / "hf")
    again = run("convert", tmp_path / "hf", out, "--like", source)
    assert again.code != 0 and "--force" in again.stderr
    ok("convert", tmp_path / "hf", tmp_path / "x.gguf", "--like", source, "--dry-run")
    assert not (tmp_path / "x.gguf").exists()


def test_a_file_into_another(pair: tuple[Path, State], tmp_path: Path, run: Run, ok: Ok) -> None:
    """Names of the file are kept: the same types are copied, floats are written in its types."""
    source, _ = pair
    for words in ((), ("--dequantize", "float32")):
        ok("convert", source, tmp_path / "b.gguf", "--like", source, "--force", *words)
        assert (tmp_path / "b.gguf").read_bytes() == source.read_bytes()
    done = run("convert", source, source, "--like", source, "--force")
    assert done.code == 2
    assert "--like and DST are the same file" in done.stderr
    done = run("run", "gguf", source, tmp_path / "c.gguf")
    assert done.code == 2
    assert "'gguf' cannot be written" in done.stderr
    assert not (tmp_path / "c.gguf").exists()


def test_tensors_without_elements(tmp_path: Path, ok: Ok) -> None:
    source = model(tmp_path, "llama", [entry("a", 2, 3), entry("b", 0, 4), entry("c", 0), LLAMA[0]])
    ok("convert", source, tmp_path / "new.gguf", "--like", source)
    assert (tmp_path / "new.gguf").read_bytes() == source.read_bytes()


def test_refused(pair: tuple[Path, State], tmp_path: Path, run: Run) -> None:
    source, state = pair
    out = tmp_path / "new.gguf"

    def refused(said: str, changed: State, *like: object) -> None:
        done = run("convert", written(tmp_path, changed), out, *(["--like", *like] if like else []))
        assert done.code in (1, 2, 3), done.stdout
        assert said in " ".join(done.stderr.split())
        assert not out.exists()

    norm, embed = "model.norm.weight", "model.embed_tokens.weight"
    refused("convert_hf_to_gguf.py of llama.cpp makes a new file", state)
    refused("is not a GGUF file; --like needs a single", state, tmp_path / "hf")
    lacking = {name: each for name, each in state.items() if name != norm}
    refused("matches no key", lacking, source)
    refused("compares the names", lacking, source)
    head = {**state, "lm_head.weight": torch.ones(6, 32)}
    refused("1 key unexpected: 'output.weight'", head, source)
    few, large = (
        {**state, embed: each} for each in (torch.ones(5, 32), torch.full((6, 32), torch.inf))
    )
    refused("token_embd.weight [5, 32] instead of [6, 32]", few, source)
    refused("contains NaN, infinite or too large values", large, source)
    refused("is not a float dtype", {**state, embed: torch.ones(6, 32).int()}, source)
    big = tmp_path / "big.gguf"
    values = np.arange(8, dtype=">f4")
    big.write_bytes(made([("general.architecture", "llama")],
                         [Entry("token_embd.weight", (2, 4), 0, values.tobytes())], order=">"))  # fmt: skip
    refused("", state, big)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_gemma_go_back(dtype: torch.dtype, tmp_path: Path, run: Run, ok: Ok) -> None:
    """x + 1 as the script computes it: in float16 for float16, else in float32; diff explains it."""
    torch.manual_seed(5)
    state = {
        f"model.{new}.weight": (torch.randn((8,) if "norm" in new else (8, 8)) / 9).to(dtype)
        for new in NAMES.values()
    }
    save_file(state, tmp_path / "hf.safetensors")
    skeleton = [
        entry(f"{old}.weight", *state[f"model.{new}.weight"].shape) for old, new in NAMES.items()
    ]
    source = model(tmp_path, "gemma", skeleton)
    out = tmp_path / "out.gguf"
    ok("convert", tmp_path / "hf.safetensors", out, "--like", source)
    ok("convert", out, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    for old, new in NAMES.items():
        weight = state[f"model.{new}.weight"]
        if "norm" in old:
            weight = (weight if dtype == torch.float16 else weight.float()) + 1
        assert torch.equal(found[f"{old}.weight"], weight.float()), old
    ok("diff", out, tmp_path / "hf.safetensors")
    forgotten = {name: each + 1 if "norm" in name else each for name, each in state.items()}
    save_file(forgotten, tmp_path / "forgotten.safetensors")
    done = run("diff", out, tmp_path / "forgotten.safetensors")
    assert done.code == 1
    assert "model.norm.weight: differs by" in done.stdout


def test_skeletons_that_are_not_filled(tmp_path: Path, run: Run, ok: Ok) -> None:
    """Big-endian and split files name the tool that converts them; nothing is written."""
    save_file({"a.weight": torch.ones(4)}, tmp_path / "a.safetensors")
    out = tmp_path / "out.gguf"
    keys = [("general.architecture", "other")]

    def fill(skeleton: Path) -> Any:
        return run("convert", tmp_path / "a.safetensors", out, "--like", skeleton)

    (tmp_path / "big.gguf").write_bytes(made(keys, [entry("a.weight", 4)], order=">"))
    done = fill(tmp_path / "big.gguf")
    assert done.code == 3
    assert "is big-endian" in done.stderr and "gguf-convert-endian COPY little" in done.stderr
    for number in (1, 2):
        split = [("split.no", Typed(2, number - 1)), ("split.count", Typed(2, 2))]
        split.append(("split.tensors.count", Typed(5, 2)))
        (tmp_path / f"m-{number:05}-of-00002.gguf").write_bytes(
            made([*keys, *split], [entry(f"{'ab'[number - 1]}.weight", 4)])
        )
    done = fill(tmp_path / "m-00001-of-00002.gguf")
    assert done.code == 3
    assert "is a split model" in done.stderr and "llama-gguf-split --merge" in done.stderr
    assert not out.exists()
    # Without a recipe for the architecture, the names must be those of the file.
    (tmp_path / "own.gguf").write_bytes(made(keys, [entry("a.weight", 4)]))
    ok("convert", tmp_path / "a.safetensors", out, "--like", tmp_path / "own.gguf")
    (tmp_path / "names.gguf").write_bytes(made(keys, [entry("b.weight", 4)]))
    out.unlink()
    done = fill(tmp_path / "names.gguf")
    assert done.code == 3
    assert "there is no recipe for the architecture 'other'" in done.stderr
