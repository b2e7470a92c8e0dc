"""render: nothing from a file moves the cursor, numbers are exact, JSON is JSON."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from io import StringIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.analysis.summary import json_number
from ckptkit.cli import render
from ckptkit.core.errors import OutputError
from tests.cli.conftest import Ckptkit, Terminal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("größe 模型 🙂", "größe 模型 🙂"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("a\rb\nc\td", r"a\rb\nc\td"),
        ("\x7f\x85\x9b", r"\x7f\x85\x9b"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        ("a\u200bb\ufeffc\u2060", r"a\u200bb\ufeffc\u2060"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\udcff", r"\udcff"),
        ("a\u00a0b", r"a\xa0b"),
        ("v\ufe0f\U000e0100\u3164\u115f\u034f", r"v\ufe0f\U000e0100\u3164\u115f\u034f"),
        ("\U000f0000", r"\U000f0000"),
    ],
)
def test_CL_01_escape(text: str, expected: str) -> None:
    assert render.escape(text) == expected


@given(st.text(st.characters(), max_size=20))
def test_CL_01_what_is_printed_is_printable(text: str) -> None:
    shown = render.escape(text)
    assert shown.isprintable()
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
    if text.isascii() and text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_089_896, "1.1 MB"),
        (2 << 30, "2.1 GB"),
        (5 * 10**12, "5.0 TB"),
        (10**18, "1,000.0 PB"),
        (1 << 5_000, "inf PB"),
    ],
)
def test_size(nbytes: int, expected: str) -> None:
    assert render.size(nbytes) == expected


def test_plural() -> None:
    assert [render.plural(n, "tensor") for n in (0, 1, 97_000)] == [
        "0 tensors",
        "1 tensor",
        "97,000 tensors",
    ]


@pytest.mark.parametrize(
    ("heads", "rows", "right", "lines"),
    [
        ("name size", ["a|1 B", "long.name|10 kB"], "size",
         ["name         size", "a             1 B", "long.name   10 kB"]),
        ("name x", ["007|1e5", "0x10|-0"], "", ["name    x", "007     1e5", "0x10    -0"]),
        ("name", [], "", []),
    ],
)  # fmt: skip
def test_a_table_aligns(heads: str, rows: list[str], right: str, lines: list[str]) -> None:
    cells = [row.split("|") for row in rows]
    assert list(render.table(heads.split(), cells, right=right.split())) == lines


def test_a_long_table_is_aligned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"n{i}", f"{i} B") for i in range(3_000)]
    lines = list(render.table(("name", "size"), rows, right=("size",)))
    assert [*lines[:2], lines[-1]] == ["name      size", "n0         0 B", "n2999   2999 B"]
    monkeypatch.setattr(render, "table_format", "github")
    assert list(render.table(("name", "size"), [], right=("size",))) == []


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("github", r"| a\|b | uint8 | [1] | 1 B |"),
        ("html", "<tr><td>a|b </td><td>uint8 </td>"),
        ("latex", r"a|b & uint8 & [1] & 1 B & cpu \\"),
        ("rst", "a|b uint8 [1] 1 B"),
        ("tsv", "a|b uint8 [1] 1 B"),
    ],
)
def test_tables_for_documents(ckptkit: Ckptkit, form: str, row: str) -> None:
    torch.save({"a|b": torch.zeros(1, dtype=torch.uint8), "long.n": torch.zeros(100)}, "a.pth")
    text = ckptkit(f"inspect a.pth --table {form}").stdout
    assert row in re.sub(r"[ \t]+", " ", text)
    assert "--table" not in ckptkit("inspect --help").stdout
    assert "--table" in ckptkit("inspect --help-all").stdout


def test_on_a_terminal_the_name_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    name = "encoder." * 10 + "weight"
    lines = list(render.table(("name", "shape"), [(name, "[16, 3, 3, 3]")]))
    assert max(map(len, lines)) < 40
    assert "..." in lines[1] and lines[1].startswith("encoder.") and "weight  [16" in lines[1]


def test_in_a_pipe_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", StringIO())
    monkeypatch.setenv("COLUMNS", "40")
    name = "encoder." * 1_000
    _, row = render.table(("name", "shape"), [(name, "[]")])
    assert name in row


@pytest.mark.parametrize("room", [16, 17, 40])
def test_shortened(room: int) -> None:
    text = "".join(map(chr, range(97, 123))) * 4
    cut = render.shortened(text, room)
    assert len(cut) == room
    assert text.startswith(cut.split("...")[0]) and text.endswith(cut.split("...")[1])
    assert render.shortened("short", room) == "short"


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda t: st.lists(t) | st.dictionaries(st.text(), t)
    )
)
def test_CL_03_json_pieces_are_the_json(value: object) -> None:
    assert json.loads("".join(render.json_pieces(value))) == value


@pytest.mark.parametrize("count", [0, 1, 999, 1_000, 1_001, 2_500])
def test_iterators_are_lists(count: int) -> None:
    inner = ({"m": iter([1]), "x": "\ud800"} for _ in range(2))
    text = "".join(render.json_pieces({"n": iter(range(count)), "of": inner}))
    assert json.loads(text) == {"n": list(range(count)), "of": [{"m": [1], "x": "\ud800"}] * 2}
    assert text.isascii()


def test_iterators_are_not_read_ahead() -> None:
    def endless() -> object:
        yield from range(10_000_000_000)

    pieces = render.json_pieces({"n": endless()})
    assert sum(len(next(pieces)) for _ in range(5)) < 100_000


def test_CL_03_no_word_that_json_lacks() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        list(render.json_pieces({"x": float("nan")}))
    words = [json_number(x) for x in (float("nan"), float("inf"), float("-inf"), 0.5, "NaN", None)]
    assert words == ["NaN", "Infinity", "-Infinity", 0.5, "NaN", None]


def test_CL_04_a_closed_standard_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match="standard output: is closed"):
        render.emit("lost")


def test_CL_04_a_closed_standard_error_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    render.warn("unheard")


def test_CL_02_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    render.warn("run.pth: bad key 'a\n[OK] safe'", "do\nthis")
    assert capsys.readouterr().err == "warning: run.pth: bad key 'a\\n[OK] safe'\nhint: do\\nthis\n"


@pytest.mark.parametrize("label", ["error", "warning", "note"])
def test_messages_begin_with_what_they_are(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    say = {"error": render.error, "warning": render.warn, "note": render.note}[label]
    say("run.pth: text", "do this")
    say("text")
    assert capsys.readouterr() == (
        "", f"{label}: run.pth: text\nhint: do this\n{label}: text\n"
    )  # fmt: skip


def test_names_that_would_become_equal_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "50")
    size = "12,345,678,901,234,567,890"
    long = [f"layers.attention.{name}.projection.weight" for name in ("query", "values")]
    cut = list(render.table(("name", "size"), [(long[0], size)]))
    assert "..." in cut[1] and len(cut[1]) < 50
    whole = list(render.table(("name", "size"), [(name, size) for name in long], right=("size",)))
    assert whole == [long[0], f"  size {size}", long[1], f"  size {size}"]
