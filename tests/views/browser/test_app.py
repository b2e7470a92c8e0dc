"""browse: keys pressed in a terminal that textual pretends, and what is on the screen then."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.api import open_checkpoint
from ckptkit.core.errors import InputError
from ckptkit.diagnosis.cause import ERROR, Cause
from tests.cli.conftest import Ckptkit, ckptkit
from tests.views.page import made

pytest.importorskip("textual", reason="textual, which browse is made with, is not installed")

from ckptkit.views.browser import AT_ONCE, Browser, TreeContents

__all__ = ["ckptkit"]


class Screen:
    """The screen after some keys."""

    def __init__(self, app: Browser) -> None:
        self.root = app.names.root
        self.command = app.command
        self.panel = str(app.query_one("#panel").render())  # type: ignore[attr-defined]
        self.lines = [str(node.label) for node in _open(app.names.root)]
        self.names = [line.split()[0] for line in self.lines]
        self.result = app.return_value
        self.picture = app.export_screenshot()


def _open(node: Any) -> list[Any]:
    """Nodes that are in sight."""
    below = [each for child in node.children for each in _open(child)] if node.is_expanded else []
    return [node, *below]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """textual waits 20 ms, three times a key, to see that a process has nothing to do."""
    monkeypatch.setattr("textual._wait.SLEEP_GRANULARITY", 1 / 200, raising=False)
    monkeypatch.setattr("textual._wait.SLEEP_IDLE", 1 / 2_000, raising=False)


def none() -> tuple[Cause, ...]:
    return ()


def pressed(
    path: Path | str,
    *keys: str,
    size: tuple[int, int] = (120, 40),
    diagnose: Callable[[], tuple[Cause, ...]] = none,
    key: str | None = None,
) -> Screen:
    """Keys, one after the other; text in quotes is typed."""

    async def run() -> Screen:
        app = Browser(TreeContents(open_checkpoint(path, key=key), str(path), key), diagnose)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            for each in keys:
                await pilot.press(*(each[1:-1] if each.startswith("'") else [each]))
                await app.workers.wait_for_complete()
                await pilot.pause()
            return Screen(app)

    return asyncio.run(run())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return made.training(tmp_path / "run.pth")


def test_what_is_there_at_first(file: Path) -> None:
    screen = pressed(file)
    names = ["everything", "model", "optimizer.state.0.exp_avg", "slice", "values"]
    assert screen.names == names
    assert "624" in screen.lines[0] and "8 tensors" in screen.lines[1]
    for line in ("parameters        624", "in no tensor      4.0 kB", "optimizer         960 B"):
        assert f"{line}\n" in screen.panel
    assert "float32" in screen.panel
    assert screen.command == f"ckptkit inspect {file}"


def test_no_value_is_read_before_someone_asks(file: Path, lengths_read: list[int]) -> None:
    checkpoint = open_checkpoint(file)
    before = len(lengths_read)
    TreeContents(checkpoint, str(file))
    assert len(lengths_read) == before


def test_into_the_tree(file: Path) -> None:
    screen = pressed(file, "down", "enter", "down", "enter")
    assert screen.names[:6] == ["everything", "model", "layers", "0", "1", "2"]
    assert "model.layers\n" in screen.panel and "parameters        384  (61.5%)" in screen.panel
    assert screen.command == f"ckptkit inspect {file} --tree --keys 'model.layers.*'"


def test_left_and_right_as_in_a_file_manager(file: Path) -> None:
    opened = pressed(file, "down", "right")
    assert opened.names[:3] == ["everything", "model", "layers"]
    assert "model\n" in opened.panel
    inside = pressed(file, "down", "right", "right")
    assert inside.lines == opened.lines and "model.layers\n" in inside.panel
    assert pressed(file, "down", "right", "right", "left").panel == opened.panel
    closed = pressed(file, "down", "right", "right", "left", "left")
    assert closed.lines == pressed(file).lines and closed.panel == opened.panel
    up = pressed(file, "down", "left", "left", "left", "down", "down", "down", "right")
    assert up.lines == closed.lines  # the root stays open, a leaf has nothing to open


def test_the_list_of_keys(file: Path) -> None:
    screen = pressed(file, "down", "?")
    for key, action in (("→", "expand"), ("/", "find"), ("?", "this list"), ("q", "quit")):
        assert any(line.startswith(key) and action in line for line in screen.panel.splitlines())
    assert screen.command == pressed(file, "down").command
    assert pressed(file, "down", "?", "escape").panel == pressed(file, "down").panel
    assert "[?]" in pressed(file, "slash", "?", "enter").command  # a question mark in a search


def test_a_message_does_not_cover_the_command(file: Path) -> None:
    async def run() -> tuple[int, int]:
        app = Browser(TreeContents(open_checkpoint(file), str(file)), none)
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            await pilot.press("s")
            await pilot.pause(0.1)
            toasts = app.screen.query("Toast")
            return toasts.last().region.bottom, app.query_one("#command").region.y

    bottom, command = asyncio.run(run())
    assert 0 < bottom <= command


def test_the_command_shows_the_same(file: Path, ckptkit: Ckptkit) -> None:
    for keys, found in (
        (("down", "enter", "down"), "layers. 6 tensors"),
        (("slash", "'head'", "enter", "down"), "head.weight: float32 [30, 8]"),
        (("slash", "'layers.1'", "enter"), "layers.1.attn.weight"),
    ):
        words = shlex.split(pressed(file, *keys).command)
        result = ckptkit(*words[1:])
        assert result.exit_code == 0, result.stderr
        assert found in result.stdout or "head.weight, float32 [30, 8]" in result.stdout


def test_search(file: Path) -> None:
    screen = pressed(file, "slash", "'attn'", "enter")
    assert "3 found" in screen.lines[0]
    assert screen.names[1:] == ["model.layers", *(f"{n}.attn.weight" for n in range(3))]
    assert screen.command == f"ckptkit inspect {file} --keys '*attn*'"
    back = pressed(file, "slash", "'attn'", "enter", "slash", "'nothing'", "enter", "escape")
    assert back.lines == pressed(file).lines
    assert "1 found" in pressed(file, "slash", "'[3]'", "enter").lines[0]  # shapes count as well


EMBED = ("slash", "'embed'", "enter", "down")  # select embed.weight


def test_values(file: Path, ckptkit: Ckptkit) -> None:
    embed = made.state_dict()["embed.weight"]
    screen = pressed(file, *EMBED, "v")
    assert screen.command == f"ckptkit show {file} embed.weight"
    for value in (embed[0, 0].item(), embed[15, 3].item()):
        assert f"{value:.3g}" in screen.panel
    assert f"mean {embed.mean().item():.3g}" in screen.panel and "█" in screen.panel
    assert "240 values" in screen.panel and "float32" in screen.panel
    assert pressed(file, *EMBED, "enter").panel == screen.panel
    part = pressed(file, *EMBED, "colon", "'29,1:3'", "enter")
    assert "[29, 1:3]" in part.panel and "2 values" in part.panel
    shown = [f"{value.item():.3g}" in part.panel for value in embed[29, :2]]
    assert shown == [False, True]
    assert part.command == f"ckptkit show {file} embed.weight 29,1:3"
    assert ckptkit(*shlex.split(part.command)[1:]).exit_code == 0
    wrong = pressed(file, *EMBED, "colon", "'99'", "enter")
    assert "out of range for dimension 0" in wrong.panel


def test_a_large_tensor_is_read_at_its_corner(tmp_path: Path, lengths_read: list[int]) -> None:
    torch.save({"w": torch.arange(3 << 20).reshape(3, -1)}, tmp_path / "big.pth")
    screen = pressed(tmp_path / "big.pth", "down", "v")
    assert "too large for statistics" in screen.panel and "1048576" in screen.panel
    assert sum(lengths_read) < 1 << 20


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    path, codes = tmp_path / "q.pth", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    torch.save({"q": codes, "e": torch.zeros(0, 3)}, path)
    assert "are not plain numbers" in pressed(path, "down", "v").panel
    assert "no elements" in pressed(path, "down", "down", "v").panel


def test_diagnosis(file: Path) -> None:
    cause = Cause("x", ERROR, "It is \x1b[31mred.", "Because.", "ckptkit paint [bold]it[/bold]")
    screen = pressed(file, "d", diagnose=lambda: (cause,))
    assert r"error  It is \x1b[31mred." in screen.panel
    assert "ckptkit paint [bold]it[/bold]" in screen.panel
    assert screen.command == f"ckptkit doctor {file}"
    assert "no problem found" in pressed(file, "d").panel

    def fail() -> tuple[Cause, ...]:
        raise InputError("is gone", where="x")

    assert "x: is gone" in pressed(file, "d", diagnose=fail).panel


@pytest.mark.parametrize("key", ["s", "m"])
def test_sort_and_unit_keep_the_cursor_and_what_is_expanded(file: Path, key: str) -> None:
    inside = pressed(file, "down", "right", "right", "right", "right")
    screen = pressed(file, "down", "right", "right", "right", "right", key)
    assert sorted(screen.names) == sorted(inside.names)
    assert screen.command == inside.command and "model.layers.0\n" in screen.panel


def test_sort_and_unit(file: Path) -> None:
    by_size = pressed(file, "m", "s", "down", "enter")
    assert "3.5 kB" in by_size.lines[0]
    assert by_size.names[2:5] == ["layers", "embed.weight", "head.weight"]
    by_name = pressed(file, "s", "s", "down", "enter")
    assert by_name.names[2:5] == ["embed.weight", "head.weight", "layers"]


def test_other_entries(file: Path) -> None:
    screen = pressed(file, "end")
    assert "epoch: 7" in screen.panel and screen.command == f"ckptkit inspect {file} --tree"


def test_leaving(file: Path) -> None:
    command = f"ckptkit inspect --key model {file} --tree --keys 'model.*'"
    assert pressed(file, "down", "c", key="model").result == command
    assert pressed(file, "q").result is None


def test_many_tensors_are_put_into_the_tree_bit_by_bit(tmp_path: Path) -> None:
    one = torch.zeros(1)
    torch.save({f"w{n}": one for n in range(AT_ONCE + 20)}, tmp_path / "flat.pth")
    screen = pressed(tmp_path / "flat.pth")
    assert len(screen.lines) == AT_ONCE + 2 and screen.lines[-1].startswith("20 more")
    screen = pressed(tmp_path / "flat.pth", "end", "enter")
    assert len(screen.lines) == AT_ONCE + 21 and screen.lines[-1].startswith(f"w{AT_ONCE + 19}")


def test_a_remote_file(file: Path) -> None:
    import fsspec

    url = "memory://browse/run.pth"
    with fsspec.open(url, "wb") as there:
        there.write(file.read_bytes())
    screen = pressed(url, *EMBED, "v")
    assert f"mean {made.state_dict()['embed.weight'].mean().item():.3g}" in screen.panel
    assert screen.command == f"ckptkit show {url} embed.weight"


def test_only_what_was_opened_is_in_the_tree(tmp_path: Path) -> None:
    screen = pressed(made.many(tmp_path / "many.pth", 2_000))
    (blocks,) = screen.root.children
    assert "2,000 tensors" in str(blocks.label) and not blocks.children


@pytest.mark.parametrize("size", [(30, 10), (200, 50)])
def test_BR_01_hostile_names(tmp_path: Path, size: tuple[int, int]) -> None:
    path = made.hostile(tmp_path / "[bold]x.pth")
    screen = pressed(path, *["down", "v"] * 6, size=size)
    assert "<img src=x onerror=document.title='run'>" in "".join(screen.lines)
    assert r"\x1b[31mred" in "".join(screen.lines) and r"\u202egnp" in "".join(screen.lines)
    assert "\x1b" not in screen.picture and "\u202e" not in screen.picture
    assert all(line.isprintable() for line in screen.panel.splitlines())


def test_no_tensors(tmp_path: Path) -> None:
    torch.save({"n": 1}, tmp_path / "n.pth")
    screen = pressed(tmp_path / "n.pth", "v")
    assert screen.names == ["everything", "values"]
