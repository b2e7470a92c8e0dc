"""The page in headless Chromium: it loads, searches, goes into a layer, and complains about
nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.views.page import made
from tests.views.page.test_report import made_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser: that of CKPTKIT_BROWSER, of the system, or of playwright; skips the test where
    there is none."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives a browser, is not installed"
    )
    own = os.environ.get("CKPTKIT_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    with api.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no headless Chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


class Visit:
    """A page that is open, and all that it complained about or asked the network for."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(10_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def found(self) -> str:
        text: str = self.page.locator("#found").inner_text()
        return text

    def search(self, words: str) -> str:
        self.page.fill("#search", words)
        self.page.wait_for_timeout(200)
        return self.found()

    def rows(self) -> list[str]:
        texts: list[str] = self.page.locator(".tbody .tr > :first-child").all_inner_texts()
        return texts

    def tile(self, path: str) -> Any:
        return self.page.locator(f'.tile[data-path="{path}"]').first


Open = Any


@pytest.fixture
def visit(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    """``visit(page_bytes)``; at the end nothing may have been complained about."""
    visits = []

    def opened(data: bytes, width: int = 1600, scheme: str = "light") -> Visit:
        (tmp_path / "page.html").write_bytes(data)
        visits.append(Visit(chromium, tmp_path / "page.html", width, scheme))
        return visits[-1]

    yield opened
    for each in visits:
        assert each.said == []
        assert [url for url in each.asked if not url.startswith("file:")] == []
        assert len(each.asked) == 1
        each.page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1600, "light"), (800, "dark"), (360, "light")])
def test_it_loads(visit: Open, tmp_path: Path, width: int, scheme: str) -> None:
    page = visit(made_page(made.training(tmp_path / "run.pth")), width, scheme)
    assert page.page.locator("h1").inner_text().endswith("run.pth")
    assert page.found() == "10 tensors, 624 parameters, 3.5 kB"
    assert (
        page.page.locator(".cause.note strong")
        .first.inner_text()
        .startswith("The weights are in its entry")
    )
    assert page.page.locator(".tile.leaf").count() >= 8
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width


def test_both_colour_schemes(visit: Open, tmp_path: Path) -> None:
    data = made_page(made.training(tmp_path / "run.pth"))
    colours = [
        visit(data, scheme=scheme).page.evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours == ["rgb(255, 255, 255)", "rgb(17, 21, 26)"]


def test_search_and_sort(visit: Open, tmp_path: Path) -> None:
    page = visit(made_page(made.training(tmp_path / "run.pth")))
    assert page.search("attn").startswith("3 of 10 tensors, 192 parameters")
    assert page.search("LAYERS 1").startswith("2 of 10")
    assert page.search("layers.*.mlp").startswith("3 of 10")
    assert page.search("[30,").startswith("3 of 10")
    assert page.search("no such thing").startswith("0 of 10")
    assert page.page.locator(".empty").is_visible()
    assert page.search("") == "10 tensors, 624 parameters, 3.5 kB"
    page.page.locator(".thead button", has_text="parameters").click()
    assert page.rows()[0].startswith("embed.weight")
    page.page.locator(".thead button", has_text="name").click()
    assert page.rows()[0].startswith("embed.weight") and page.rows()[-1].startswith("slice")
    page.page.locator(".thead button", has_text="name").click()
    assert page.rows()[0].startswith("slice")


def test_into_a_layer_and_out(visit: Open, tmp_path: Path) -> None:
    page = visit(made_page(made.training(tmp_path / "run.pth")))
    page.tile("model.layers.1").click(position={"x": 3, "y": 3})
    assert page.page.locator("#crumbs").inner_text().startswith("everything / model / layers / 1")
    assert page.found().startswith("2 of 10 tensors, 128 parameters")
    assert page.page.locator(".tile.leaf").count() == 2
    page.page.locator("#crumbs button", has_text="layers").click()
    assert page.found().startswith("6 of 10")
    page.page.locator("#within button").click()
    assert page.found() == "10 tensors, 624 parameters, 3.5 kB"


def test_parameters_instead_of_bytes(visit: Open, tmp_path: Path) -> None:
    page = visit(made_page(made.training(tmp_path / "run.pth")))
    assert page.page.locator(".tile.unused").count() == 1
    assert page.tile("optimizer.state.0.exp_avg").count() == 1
    page.page.locator("#measure button", has_text="parameters").click()
    assert page.page.locator(".tile.unused").count() == 0
    assert page.tile("optimizer.state.0.exp_avg").count() == 0
    page.page.select_option("#colours", "dtype")
    assert page.page.locator("#legend").inner_text().startswith("float32")


def test_a_tensor_alone(visit: Open, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "w.pth")
    page = visit(made_page(tmp_path / "w.pth"))
    page.tile("model.w").click()
    assert page.page.locator("#detail h3").inner_text() == "w"


def test_one_tensor(visit: Open, tmp_path: Path) -> None:
    page = visit(made_page(made.training(tmp_path / "run.pth"), values=True))
    page.search("head")
    page.page.locator(".tbody .tr").first.click()
    text = page.page.locator("#detail").inner_text()
    assert "dtype\nfloat32\nshape\n[30, 8]\ndevice\ncpu\n" in text
    assert "embed.weight" in text and "norm" in text
    assert page.page.locator("#detail code").inner_text().endswith("run.pth head.weight")
    assert page.page.locator("#detail svg rect").count() > 4
    page.page.keyboard.press("Escape")
    assert not page.page.locator("#detail").is_visible()


def test_two_files(visit: Open, tmp_path: Path) -> None:
    page = visit(
        made_page(made.training(tmp_path / "a.pth"), made.other(tmp_path / "b.pth"), values=True)
    )
    layers = page.page.locator("#differences td:first-child").all_inner_texts()
    assert layers == [
        "model.layers.{0..2}.attn", "model.layers.{0..2}.mlp", "model.head", "extra", "model.embed",
    ]  # fmt: skip
    assert "1 of 2" in page.page.locator("#differences tr", has_text="attn").inner_text()
    assert "unchanged" in page.page.locator("#differences tr.dim").inner_text()
    page.page.locator('[data-state="renamed"]').click()
    assert page.found().startswith("3 of 11")
    assert "→ layers.0.ffn.weight" in page.rows()[0]
    page.page.locator('[data-state="renamed"]').click()
    page.page.locator("#differences td button", has_text="mlp").click()
    assert page.found().startswith("3 of 11")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_how_far_each_layer_moved(visit: Open, tmp_path: Path, scheme: str) -> None:
    a, b = tmp_path / "a.pth", tmp_path / "b.pth"
    weights = {f"blocks.{n}.{part}.weight": torch.ones(4) for n in range(4) for part in "xy"}
    torch.save({**weights, "head.weight": torch.ones(4)}, a)
    for n in (2, 3):
        weights[f"blocks.{n}.x.weight"] = torch.ones(4) * (1 + n / 10)
    torch.save({**weights, "head.weight": torch.full((4,), 3.0)}, b)
    page = visit(made_page(a, b, values=True), 1280, scheme)
    rows = page.page.locator("#differences .scroll").first.locator("tr").all_inner_texts()
    assert [row.split()[0] for row in rows[1:]] == ["head", "blocks.{0..3}.x", "blocks.{0..3}.y"]
    assert "200%" in rows[1] and "25.5%" in rows[2] and "2 of 4" in rows[2]
    columns = page.page.locator("#parts .columns button")
    titles = [each.get_attribute("title") for each in columns.all()]
    assert titles == [
        "blocks.0: unchanged", "blocks.1: unchanged", "blocks.2: 20%", "blocks.3: 30%", "head: 200%",
    ]  # fmt: skip
    heights = [bar.bounding_box()["height"] for bar in page.page.locator("#parts i").all()]
    assert heights[0] == heights[1] == 2 < heights[2] < heights[3] < heights[4]
    assert page.rows()[:3] == ["head.weight", "blocks.3.x.weight", "blocks.2.x.weight"]
    assert page.page.locator("#legend").inner_text().startswith("same")
    columns.nth(2).click()
    assert page.found().startswith("2 of 9")


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_all_columns_fit_into_1280_pixels(
    visit: Open, tmp_path: Path, values: bool, pair: bool
) -> None:
    a, b = made.training(tmp_path / "a.pth"), made.other(tmp_path / "b.pth")
    page = visit(made_page(*((a, b) if pair else (a,)), values=values), 1280)
    assert page.page.evaluate(
        "(t => t.scrollWidth <= t.clientWidth)(document.getElementById('table'))"
    )


def test_what_both_files_suffer_from_is_said_once(visit: Open, tmp_path: Path) -> None:
    paths = tmp_path / "a.pth", tmp_path / "b.pth"
    for path in paths:
        torch.save({"module.w": torch.ones(3), "module.b": torch.ones(3)}, path)
    page = visit(made_page(*paths))
    (cause,) = page.page.locator(".cause.error").all_inner_texts()
    assert "a.pth" in cause and "b.pth" in cause and cause.count("ckptkit strip-module") == 2
    tops = [page.page.locator(each).bounding_box()["y"] for each in ("#differences", "#diagnosis")]
    assert tops[0] < tops[1]


@pytest.mark.parametrize("width", [1600, 360])
def test_PG_04_hostile_names_run_nothing(visit: Open, tmp_path: Path, width: int) -> None:
    path = made.hostile(tmp_path / "<img src=x onerror=document.title='run'>.pth")
    page = visit(made_page(path, path, values=True), width)
    assert page.page.title().endswith("<img src=x onerror=document.title='run'>.pth - ckptkit")
    assert page.rows()[0].startswith(made.HOSTILE[0])
    assert page.page.locator("img").count() == 0 and page.page.locator("script").count() == 2
    for name in ("__proto__", "constructor", "\\u202e", "{{data}}"):
        assert not page.search(name).startswith("0 ")
    page.page.locator(".tbody .tr").first.click()
    assert page.page.locator("#detail h3").inner_text() == "{{data}}"


def test_a_great_many_tensors_are_not_in_the_page_at_once(visit: Open, tmp_path: Path) -> None:
    page = visit(made_page(made.many(tmp_path / "many.pth", 5_000)))
    assert page.found().startswith("5,000 tensors")
    assert page.page.evaluate("document.querySelectorAll('*').length") < 12_000
    assert page.page.locator(".tbody .tr").count() < 100
    assert page.search("blocks.249.").startswith("20 of 5,000")
    page.search("")
    page.page.evaluate("document.getElementById('table').scrollTop = 1e9")
    page.page.wait_for_timeout(200)
    assert page.rows()[-1].startswith("blocks.249.experts.19.w")
    assert page.page.locator(".tbody .tr").count() < 100
