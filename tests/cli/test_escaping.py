"""Names from a file, whatever command prints them: no control character leaves, in text, errors,
JSON, CSV or SARIF."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptkit import cli
from ckptkit.cli import render
from tests.cli.conftest import Ckptkit

NAMES = [
    "\x1b]0;title\x07", "\x1b[2J\x1b[H", "\x1b]52;c;aGk=\x07", "\x1b]8;;http://evil\x1b\\", "a\rb", "x\n[OK] safe",
    "\u202egnp.exe", "a\u2066b", "\x85", "\x9b31m", "\u200b", "\u2028", "nul\0nul", "\x7f", "tab\tbed", "\ud800",
    "=cmd|' /C calc'!A0", "@SUM(1)", "+1", "-1", "<script>alert(1)</script>", "%s%n{0}", "[bold]", "größe 模型",
]  # fmt: skip
FOREIGN = "evil\x1b[2J"  # a module
# These print nothing of a file; browse has a screen.
SILENT = {"train", "rules", "formats", "env", "completion", "browse", "help"}


class Given:
    """Files in the working directory, by the names that the arguments below have for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = {f"module.{name}.{i}": torch.ones(2, 2) for i, name in enumerate(NAMES)}
        second = {f"{name}2": value / (value - value) for name, value in weights.items()}
        self.files = {
            "F": "F\x1b[2J\n\u202e.pth", "G": "G.pth", "S": "S.safetensors",
            "L": "L.safetensors", "C": "cut\x07.pth", "R": "recipe\x07.toml",
        }  # fmt: skip
        entries: dict[Any, object] = {
            "model": weights,
            "model_ema": weights,
            **{f"{n}!": n for n in NAMES},
        }
        torch.save({**entries, 3: self._object(monkeypatch)}, self.files["F"])
        torch.save(second, self.files["G"])
        valid = [name for name in NAMES if "\ud800" not in name]
        whole = {name: value for name, value in weights.items() if "\ud800" not in name}
        save_file(whole, self.files["S"], metadata=dict(zip(valid, valid, strict=True)))
        name = next(f"{each}2.lora_" for each in whole)  # an adapter of one of them
        factors = {"A.weight": torch.ones(1, 2), "B.weight": torch.ones(2, 1)}
        save_file({f"{name}{each}": value for each, value in factors.items()}, self.files["L"])
        Path(self.files["C"]).write_bytes(Path(self.files["F"]).read_bytes()[:-3000])
        Path(self.files["R"]).write_text('[[steps]]\nadd = "\\u001b[2J"\n')
        self.count = 0

    def _object(self, monkeypatch: pytest.MonkeyPatch) -> object:
        """One whose class is in a module with an odd name."""
        module = types.ModuleType(FOREIGN)
        made = type("Kl\x1b[31mass", (), {"__module__": FOREIGN})
        setattr(module, made.__name__, made)
        monkeypatch.setitem(sys.modules, FOREIGN, module)
        found = made()
        found.field = "\x1b]0;x\x07"
        return found

    def arguments(self, words: Sequence[str]) -> list[str]:
        """Words with the files put in; O, OS, OD, OH are outputs that are not there yet."""
        self.count += 1
        out = f"out\x1b[{self.count}"
        outputs = {"O": f"{out}.pth", "OS": f"{out}.safetensors", "OD": out, "OH": f"{out}.html"}
        return [{**self.files, **outputs}.get(word, word) for word in words]


FIRST, SECOND = f"module.{NAMES[0]}.0", "module.\x1b[2Jmissing"
CALLS: dict[str, list[list[str]]] = {
    "inspect": [
        *(["F"], ["G"], ["S"], ["C"], ["F", "--tree"], ["F", "--flat"], ["F", "--keys", "*"], ["F", "--key", SECOND]),
        ["G", "--sort", "name"], ["S", "--names"],
    ],
    "strip-module": [["G", "O"], ["F", "O", "--key", "model"], ["F", "O", "--dry-run"], ["S", "OS"], ["F", "F"]],
    "add-module": [["G", "O"], ["G", "O", "--prefix", "\x1b[2J"]],
    "remap": [["G", "O", "--to", "cpu"], ["F", "O", "--to", "cpu"], ["F", "O", "--device", "\x1b[2J=cpu"]],
    "diff": [
        *(["F", "G", "--key", "model", "--key-b", ""], ["G", "S"], ["G", "S", "--values"], ["G", "--model", "\x1b[2J"]),
        ["G", "S", "--write-map", "O"],
    ],
    "convert": [
        *(["F", "OS", "--key", "model"], ["G", "OS"], ["S", "O"], ["F", "OS", "--all"], ["G", "O", "--drop", "*\x1b*"]),
        *(["S", "OD", "--format", "sharded", "--shard-size", "99"], ["G", "O", "--cast", "\x1b[2J"]),
        *(["G", "O", "--rule", "{m:**} -> x.{m}"], ["G", "O", "--rule", "\x1b[2J -> y"], ["G", "O", "--like", "S"]),
    ],
    "rename": [["G", "O", "--sub", "module=\x1b[2J"], ["G", "O", "--sub", ".*=\x07"], ["G", "O", "--map", "\x1b.json"]],
    "extract": [["F", "O", "--key", "model"], ["F", "O", "--key", f"{NAMES[0]}!"], ["F", "O", "--key", SECOND]],
    "wrap": [["G", "O", "--key", "\x1b[2J"]],
    "average": [["G", "G", "O"], ["G", "S", "O"]],
    "join": [["G", "S", "O"], ["G", "G", "O"]],
    "resize": [["G", "O", "--keys", "*", "--rows", "2"]],
    "merge": [["G", "S", "O", "--method", "linear"], ["G", "G", "O", "--method", "linear"]],
    "ema": [["F", "O"]],
    "run": [["R", "G", "O"], ["\x1b[2J", "G", "O"]],
    "recover": [["G", "O"], ["F", "O"], ["C", "O"]],
    "doctor": [["F"], ["G"], ["S"], ["C"]],
    "scan": [["F"], ["F", "--strict"], ["G", "S", "C"], ["F", "--sarif"]],
    "stats": [["G"], ["F", "--key", "model"], ["S", "--csv"], ["G", "--fold"], ["G", "--depth", "1"]],
    "show": [["G", "--nan"], ["S", FIRST], ["S", SECOND], ["G", f"{FIRST}2", "--with", "S", "--name-b", FIRST]],
    "report": [["G", "-o", "OH"], ["G", "S", "-o", "OH"], ["F", "-o", "OH", "--values"]],
    "verify": [["F"], ["G"], ["S"], ["C"], ["G", "--values"]],
    "check": [
        *(["G", "--expect", "*.\x1b*", "--expect", "x\x1b[2J"], ["G", "--like", "S"]),
        ["S", "--expect", "* finite"],
    ],
    "digest": [["F", "--key", "model"], ["G"], ["S"], ["F", "--all"]],
    "delta": [
        *(["make", "G", "G", "OD"], ["make", "G", "F", "OD"], ["apply", "G", "S", "O"], ["inspect", "S"]),
        *(["apply", "G", "C", "O"], ["verify", "G", "S"], ["squash", "S", "OD"]),
    ],
    "lora": [["merge", "G", "L", "O", "--alpha", "2"], ["merge", "F", "L", "O"], ["merge", "G", "S", "O"]],
    "batch": [["strip-module", "--into", "OD", "G"], ["strip-module", "--into", "OD", "S", "F", "C"]],
}  # fmt: skip


OURS = 98  # a colour that no file asks for


def unpainted(text: str) -> str:
    """Remove the colors that ckptkit adds."""
    return re.sub(rf"\x1b\[{OURS}m(.*?)\x1b\[0m", r"\1", text)


def test_every_command_is_tried() -> None:
    assert {*cli.COMMANDS} - SILENT <= CALLS.keys()


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("name", [each for each in cli.COMMANDS if each in CALLS])
def test_CL_01_CL_02_CL_03_nothing_but_text_leaves(
    name: str, terminal: bool, tmp_path: Path, ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given(monkeypatch)
    monkeypatch.setattr(render, "is_terminal", lambda stream: terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(render, "COLOURS", dict.fromkeys(render.COLOURS, OURS))
    worked = 0
    for words in CALLS[name]:
        for options in ([], ["--json"]):
            if options and ("--sarif" in words or "--csv" in words or "--tree" in words):
                continue
            asked = given.arguments(words)
            result = ckptkit(
                name, *([asked[0], *options, *asked[1:]] if name == "batch" else [*options, *asked])
            )
            assert result.exit_code in (0, 1, 2, 3, 4), (words, result.stderr)
            for text in map(unpainted, (result.stdout, result.stderr)):
                odd = [
                    line
                    for line in text.splitlines(keepends=True)
                    if line.rstrip("\n") != render.escape(line.rstrip("\n"))
                ]
                assert odd == [], (words, options)
                assert not any(line.startswith("[OK]") for line in text.splitlines())
            if result.stdout and (options or "--sarif" in words):
                json.loads(result.stdout)
            worked += result.exit_code in (0, 1)
    assert worked


def test_CL_01_a_name_of_a_mebibyte(ckptkit: Ckptkit) -> None:
    """Is shown whole in a pipe, escaped, and in no time."""
    name = "\x1b[2J" * (1 << 18)
    torch.save({f"module.{name}": torch.ones(1), "module.b": torch.ones(1)}, "long.pth")
    for command in ("inspect", "stats", "scan", "verify", "digest", "doctor"):
        result = ckptkit(command, "long.pth")
        assert result.exit_code in (0, 1, 3) and "\x1b" not in result.stdout + result.stderr
    assert r"\x1b[2J" * (1 << 18) in ckptkit("inspect long.pth").stdout


def test_CL_01_a_page_shows_names_as_text(
    ckptkit: Ckptkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given(monkeypatch)
    assert ckptkit("report", *given.arguments(["G", "S", "-o", "OH"])).exit_code == 0
    (page,) = tmp_path.glob("*.html")
    text = page.read_text(encoding="utf-8")
    assert "<script>alert(1)" not in text and "alert(1)" in text
    assert not any(
        (ord(char) < 32 and char != "\n") or char in "\x7f\x85\x9b\u202e\u2066\u200b\u2028"
        for char in text
    )


def test_CL_02_no_cell_is_a_formula(ckptkit: Ckptkit) -> None:
    """A spreadsheet would compute a formula when it opens the file."""
    torch.save({name: torch.ones(1) for name in NAMES}, "bare.pth")
    header, *rows = csv.reader(io.StringIO(ckptkit("stats --csv bare.pth").stdout))
    assert len(rows) == len(NAMES)
    column = header.index("name")
    assert [row[column] for row in rows if row[column][:1] in "=+-@\t\r"] == []
