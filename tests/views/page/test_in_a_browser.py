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
    assert layers == ["model.layers.{0..1}.attn", "model.layers.{0..2}.mlp", "model.head", "extra"]
    page.page.locator('[data-state="renamed"]').click()
    assert page.found().startswith("3 of 11")
    assert "→ layers.0.ffn.weight" in page.rows()[0]
    page.page.locator('[data-state="renamed"]').click()
    page.page.locator("#differences td button", has_text="mlp").click()
    assert page.found().startswith("3 of 11")


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
    page = visit(made_page(made.many(tmp_path / "many.pth", 20_000)))
    assert page.found().startswith("20,000 tensors")
    assert page.page.evaluate("document.querySelectorAll('*').length") < 12_000
    assert page.page.locator(".tbody .tr").count() < 100
    assert page.search("blocks.999.").startswith("20 of 20,000")
    page.search("")
    page.page.evaluate("document.getElementById('table').scrollTop = 1e9")
    page.page.wait_for_timeout(200)
    assert page.rows()[-1].startswith("blocks.999.experts.19.w")
    assert page.page.locator(".tbody .tr").count() < 100
