"""The page as a file: what is in it, and that nothing of a checkpoint is anything but text."""

from __future__ import annotations

import base64
import getpass
import hashlib
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from ckptkit.analysis.diff import compare
from ckptkit.api import open_checkpoint
from ckptkit.views.page import embedded, facts, page, page_file
from tests.views.page import made
from tests.views.parsed import Parsed


def made_page(*paths: Path, values: bool = False) -> bytes:
    def none(_: int) -> None: ...

    seen = [page_file(open_checkpoint(path), none if values else None) for path in paths]
    if len(seen) == 1:
        return page(facts(*seen))
    a, b = (each.checkpoint.weights for each in seen)
    return page(facts(*seen, compare(a, b, values=values)))


def told(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Parsed(data.decode()).all("script")[0])
    return found


def test_what_it_tells(tmp_path: Path) -> None:
    found = told(made_page(made.training(tmp_path / "run.pth")))
    assert found["schema"] == "ckptkit.page/1"
    (file,), tensors = found["files"], found["tensors"]
    expected = {"format": "torch-zip", "weights": "model", "tied": 1, "optimizer": 960}
    assert expected.items() <= file.items()
    assert file["totals"]["unused_nbytes"] == 4 * 997
    assert file["causes"][0]["title"].startswith("The weights are in its entry 'model'")
    assert ["epoch", "7"] in file["values"]["rows"]
    embed, head, part = (
        tensors["name"].index(name) for name in ("embed.weight", "head.weight", "slice")
    )
    assert tensors["shapes"][tensors["shape"][embed]] == "[30, 8]"
    assert [tensors[name][embed] for name in ("parameters", "nbytes")] == [240, 960]
    assert [tensors[name][head] for name in ("parameters", "stored")] == [0, 960]
    assert tensors["same"][str(head)] == embed
    assert tensors["place"][str(head)] == "model.head.weight"
    assert tensors["remark"][str(part)] == "view of 4.0 kB"
    assert not tensors["valued"] and tensors["stats"] == {}


def test_headers_alone_are_read(tmp_path: Path, lengths_read: list[int]) -> None:
    path = made.training(tmp_path / "run.pth")
    checkpoint = open_checkpoint(path)
    before = len(lengths_read)
    page(facts(page_file(checkpoint)))
    assert len(lengths_read) == before
    page_file(checkpoint, lambda _: None)
    assert len(lengths_read) > before


def test_values(tmp_path: Path) -> None:
    found = told(made_page(made.training(tmp_path / "run.pth"), values=True))["tensors"]
    stats = found["stats"][str(found["name"].index("embed.weight"))]
    embed = made.state_dict()["embed.weight"]
    assert stats["mean"] == pytest.approx(embed.mean().item(), rel=1e-4)
    assert stats["norm"] == pytest.approx(embed.norm().item(), rel=1e-4)
    assert (stats["count"], sum(stats["bins"])) == (240, 240)
    assert stats["from"] <= embed.min().item() and embed.max().item() <= stats["to"]


def test_two_files(tmp_path: Path) -> None:
    found = told(
        made_page(made.training(tmp_path / "a.pth"), made.other(tmp_path / "b.pth"), values=True)
    )
    diff, tensors = found["diff"], found["tensors"]
    states = {
        name: diff["states"][state]
        for name, state in zip(tensors["name"], diff["state"], strict=True)
    }
    assert states["layers.2.attn.weight"] == "same"
    assert states["layers.0.attn.weight"] == "changed"
    assert states["layers.1.attn.weight"] == "mismatched"
    assert states["layers.0.mlp.weight"] == "renamed"
    assert states["head.weight"] == "unexpected"
    assert states["extra.bias"] == "missing"
    assert states["optimizer.state.0.exp_avg"] == "not compared"
    assert "layers.0.ffn.weight" not in states  # it stands beside the name in A
    other = {tensors["name"][int(number)]: facts for number, facts in diff["other"].items()}
    assert other["layers.0.mlp.weight"]["name"] == "layers.0.ffn.weight"
    assert other["layers.1.attn.weight"] == {"dtype": "float32", "shape": "[5, 5]"}
    changed = other["layers.0.attn.weight"]
    assert (changed["changed"], changed["largest"]) == (1, pytest.approx(2.0))
    weights = made.state_dict()["layers.0.attn.weight"]
    weights[0, 0] += 2
    assert changed["norm"] == pytest.approx(weights.norm().item(), rel=1e-4)


def test_two_files_that_are_one(tmp_path: Path) -> None:
    path = made.training(tmp_path / "a.pth")
    diff = told(made_page(path, path))["diff"]
    assert {diff["states"][state] for state in diff["state"]} == {"same", "not compared"}


@pytest.mark.parametrize("values", [False, True])
def test_PG_01_hostile_names_are_text(tmp_path: Path, values: bool) -> None:
    """Markup in names adds no element, and names arrive as they are, visible."""
    clean = Parsed(made_page(made.training(tmp_path / "run.pth"), values=values).decode())
    path = made.hostile(tmp_path / "<script>alert(1)<script>.pth")
    data = made_page(path, path, values=values)
    seen = Parsed(data.decode())
    assert [tag for tag, _ in seen.tags] == [tag for tag, _ in clean.tags]
    assert seen.all("script")[1:] == clean.all("script")[1:]
    names = told(data)["tensors"]["name"]
    assert names[:2] == list(made.HOSTILE[:2])
    assert names[4:6] == [r"\u202egnp.\u202c", r"a\nb"]
    assert r"\x1b[31mred" in names and "ünï" in names


def test_PG_02_the_policy_allows_its_own_script_alone(tmp_path: Path) -> None:
    seen = Parsed(made_page(made.training(tmp_path / "run.pth")).decode())
    (policy,) = [attrs["content"] or "" for tag, attrs in seen.tags if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'; ")
    for directive, text in (
        ("script-src", seen.all("script")[1]),
        ("style-src", seen.all("style")[0]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert not any(
        name.startswith("on") or name in ("src", "href", "style")
        for _, attrs in seen.tags
        for name in attrs
    )


def test_PG_03_nothing_of_this_machine_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.training(tmp_path / "run.pth")
    monkeypatch.chdir(tmp_path)
    data = made_page(Path("run.pth"), values=True).decode()
    assert str(tmp_path) not in data and tmp_path.name not in data
    facts_alone = json.dumps(told(data.encode()))
    for word in {getpass.getuser(), socket.gethostname()}:
        assert re.search(rf"\b{re.escape(word)}\b", facts_alone) is None


def test_the_same_file_gives_the_same_page(tmp_path: Path) -> None:
    a, b = made.training(tmp_path / "a.pth"), made.other(tmp_path / "b.pth")
    assert made_page(a, b, values=True) == made_page(a, b, values=True)


def test_it_loads_nothing(tmp_path: Path) -> None:
    data = made_page(made.training(tmp_path / "run.pth")).decode()
    addresses = re.findall(r"https?://[^\s\"'`]+", data)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "@import" not in data and "url(" not in data


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "odd.pth"
    odd = {
        "inf": torch.tensor([1.0, float("inf"), float("-inf"), float("nan")]),
        "c": torch.tensor([1 + 2j]),
    }
    huge = {"huge": torch.tensor([1.7e308, -1.7e308], dtype=torch.float64), "none": torch.zeros(0)}
    torch.save(
        {**odd, **huge, "packed": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)},
        path,
    )
    stats = told(made_page(path, values=True))["tensors"]["stats"]
    assert (stats["0"]["nan"], stats["0"]["inf"], stats["0"]["mean"]) == (1, 2, 1.0)
    assert stats["1"]["mean"] is None and stats["2"]["norm"] is None
    assert stats["3"]["count"] == 0 and "bins" not in stats["3"]
    assert "4" not in stats


def test_what_may_stand_in_a_script() -> None:
    text = embedded({"</script>": "<!-- & \u2028 \ud800"})
    assert not re.search("[<>&\u2028]", text) and text.isascii()
    assert json.loads(text) == {"</script>": "<!-- & \u2028 \ud800"}
