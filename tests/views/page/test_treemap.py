"""treemap: areas in proportion, tiles side by side, and no more of them than can be seen."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.analysis.shares import Branch, branches, shares
from ckptkit.analysis.summary import summarize
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.views.page import page_file, static, tensors, treemap
from ckptkit.views.treemap import DEEPEST, WINDOW, Frame, Tile, TileBox, strips, tiles
from tests.analysis.made import checkpoint, tensor

BARE = Frame(0, 0, 0, 0)
SQUARE = TileBox(0, 0, 100, 100)


def squarified(values: list[float], box: TileBox) -> list[TileBox]:
    return [each for _, boxes in strips(values, box) for each in boxes]


def sized(sizes: dict[str, int]) -> Checkpoint:
    return checkpoint({name: tensor(*[0.0] * size) for name, size in sizes.items()})


def tree(sizes: dict[str, int]) -> Branch:
    made = sized(sizes)
    return branches(shares(summarize(made), made.root))


def by_label(found: Iterable[Tile]) -> dict[str, Tile]:
    return {tile.label: tile for tile in found}


def overlap(a: TileBox, b: TileBox) -> float:
    width = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    height = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
    return max(0.0, width) * max(0.0, height)


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.floats(1, 1e3), st.floats(1, 1e3)
)
def test_areas_are_in_proportion_and_do_not_overlap(
    values: list[int], width: float, height: float
) -> None:
    values.sort(reverse=True)
    boxes = squarified(values, TileBox(3, 5, width, height))
    for value, box in zip(values, boxes, strict=True):
        assert box.width * box.height == pytest.approx(value / sum(values) * width * height)
        assert box.x >= 3 - 1e-6 and box.y >= 5 - 1e-6
        assert box.x + box.width <= 3 + width * (1 + 1e-9)
        assert box.y + box.height <= 5 + height * (1 + 1e-9)
    overlaps = [overlap(a, b) for n, a in enumerate(boxes) for b in boxes[:n]]
    assert max(overlaps, default=0) <= 1e-6 * width * height


def test_the_example_of_the_paper() -> None:
    """6, 6, 4, 3, 2, 2, 1 in 6 by 4: figure 5 of Bruls, Huizing and van Wijk."""
    boxes = squarified([6, 6, 4, 3, 2, 2, 1], TileBox(0, 0, 6, 4))
    assert [(round(box.width, 2), round(box.height, 2)) for box in boxes] == [
        (3, 2), (3, 2), (1.71, 2.33), (1.29, 2.33), (1.2, 1.67), (1.2, 1.67), (0.6, 1.67),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [12, 24, 32])
def test_equal_tiles_are_read_in_one_direction(count: int) -> None:
    """Column by column, as the layers of a model that are of one size."""
    boxes = squarified([1] * count, TileBox(0, 0, 1200, 560))
    assert boxes == sorted(boxes, key=lambda box: (round(box.x, 6), box.y))


@given(st.floats(0, 1e-300))
def test_no_room_is_no_failure(side: float) -> None:
    assert len(squarified([3, 2, 1], TileBox(0, 0, side, 10))) == 3


def test_inside_and_beside() -> None:
    made = tree({"enc.a": 6, "enc.b": 2, "head.w": 8})
    found = by_label(tiles(made, "nbytes", SQUARE, Frame(1, 10, 20, 0)))
    leaves = {label: tile.leaf for label, tile in found.items()}
    assert leaves == {"enc": False, "head.w": True, "a": True, "b": True}
    outer, inner = found["enc"].box, found["a"].box
    assert (inner.x, inner.y) == (outer.x + 1, outer.y + 10)
    areas = {label: tile.box.width * tile.box.height for label, tile in found.items()}
    assert areas["a"] == pytest.approx(3 * areas["b"])
    assert overlap(found["enc"].box, found["head.w"].box) == 0


def test_what_cannot_be_seen_is_one_tile() -> None:
    small = tree({"big": 500, **{f"small{n}": 1 for n in range(20)}})
    found = by_label(tiles(small, "nbytes", SQUARE, Frame(0, 0, 0, 50)))
    assert found.keys() == {"big", "20 more"}
    assert found["20 more"].rest == 20


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"a": 2, "a.b": 3, "c": 1}, [("a", False), ("c", True), ("b", True), ("a", True)]),
        ({"model.w": 3}, [("model.w", True)]),
        ({}, []),
    ],
    ids=["a tensor with others below has a tile of its own", "a tensor alone", "nothing"],
)
def test_tiles(sizes: dict[str, int], expected: list[tuple[str, bool]]) -> None:
    found = list(tiles(tree(sizes), "nbytes", SQUARE, BARE))
    assert [(tile.label, tile.leaf) for tile in found] == expected
    assert len(found) != 1 or found[0].box == SQUARE


def test_no_tiles_without_end() -> None:
    deep = tree({"a." * 20 + "x": 1, **{"a." * n + "y": 1 for n in range(1, 20)}})
    assert len(list(tiles(deep, "nbytes", SQUARE, BARE))) <= 2 * DEEPEST + 2


# Runs the page's script on a treemap: the pieces of the branches that are zoomed into.
SCRIPT = """
const made = JSON.parse(require("fs").readFileSync(0, "utf8"));
const source = made.script + `
  const nodes = treeOf(facts.treemap, tensors);
  const shown = number => placed(nodes[number], made.measure, made.unused, 0, 0, 1200, 560);
  return made.zoomed.map(number => shown(number).map(([piece, ...box]) => [piece.label, ...box]));`;
const found = new Function("facts", "tensors", "made", source)({ treemap: made.treemap }, made.tensors, made);
console.log(JSON.stringify(found));
"""


def on_a_page(made: Checkpoint, measure: str, zoomed: list[str]) -> list[list[list[Any]]]:
    """Return the pieces that the page's script places in 1200 x 560, by label and box."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    seen = page_file(made).shares
    unused = summarize(made).totals.unused_nbytes
    placed = treemap(seen, unused)
    columns = tensors([(share, None) for share in seen], valued=False)
    paths = [""]
    for number in range(1, len(placed["label"])):
        name = placed["labels"][placed["label"][number]]
        paths.append(".".join(filter(None, (paths[placed["parent"][number]], name))))
    given = {
        "script": static("treemap.js"), "treemap": placed, "tensors": columns, "measure": measure,
        "unused": unused, "zoomed": [paths.index(path) for path in zoomed],
    }  # fmt: skip
    done = subprocess.run(
        [node, "-e", SCRIPT], input=json.dumps(given), capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    found: list[list[list[Any]]] = json.loads(done.stdout)
    return found


SIZES = {
    "enc.a.w": 600, "enc.a.b": 40, "enc.b": 200, "head.w": 800, "x": 50, "only.one.a": 60, "only.one.b": 30,
}  # fmt: skip


@pytest.mark.parametrize("measure", ["nbytes", "parameters"])
def test_the_page_places_what_the_picture_draws(measure: str) -> None:
    (shown,) = on_a_page(sized(SIZES), measure, [""])
    drawn = {tile.label: tile.box for tile in tiles(tree(SIZES), measure, WINDOW, BARE)}
    assert {label for label, *_ in shown} == {"enc", "head.w", "x", "only.one"}
    for label, *box in shown:
        assert box == pytest.approx(drawn[label])


def test_the_page_zooms() -> None:
    inside, alone, above = on_a_page(sized(SIZES), "nbytes", ["enc", "enc.a", "only"])
    assert [label for label, *_ in inside] == ["a", "b"]
    assert [label for label, *_ in above] == ["one"]
    for found in (inside, alone, above):
        assert sum(width * height for *_, width, height in found) == pytest.approx(1200 * 560)


def test_small_ones_and_unused_bytes_are_pieces_of_the_page() -> None:
    small = {f"small{n}": tensor(0.0) for n in range(40)}
    storage = tensor(*[0.0] * 90_000)
    part = replace(storage, shape=(60_000,))
    (shown,) = on_a_page(checkpoint({"big": part, **small}), "nbytes", [""])
    areas = {label: width * height for label, _, _, width, height in shown}
    assert set(areas) == {"big", "in no tensor", "40 more"}
    assert areas["big"] == pytest.approx(2 * areas["in no tensor"])
    assert sum(areas.values()) == pytest.approx(1200 * 560)
