"""The page in a real browser: cells appear, go on, finish, diverge and fail while one looks.

It needs Playwright's client and a Chromium.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from altgrad.common.files import read_json, write_json
from altgrad.execution import Task
from altgrad.watch import events
from altgrad.watch.__main__ import Server
from altgrad.watch.events import Events
from tests.watch.conftest import PROJECT, started

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
INK = """(() => {
  const c = document.querySelector("canvas"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  let n = 0;
  for (let i = 3; i < d.length; i += 4) n += d[i] > 0;
  return n;
})()"""
ORANGE = INK.replace("d[i] > 0", "d[i] > 99 && d[i - 3] > 150 && d[i - 1] < 90")  # pixels of E4M3's colour
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture
def game(play):
    return play(seeds=(0, 1), diverged={"E4M3-adamw-1-1": 40})


class Shown:
    """The page about a project, and what went wrong on it."""

    def __init__(self, browser: Any, url: str, width: int = 1280) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 800})
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._hear)
        self.page.goto(url)

    def _hear(self, message: Any) -> None:
        if message.type == "error" and "favicon" not in str(message.location):
            self.problems.append(message.text)

    def wait(self, selector: str, text: str) -> None:
        """Wait until an element has ``text`` in it."""
        playwright.expect(self.page.locator(selector)).to_contain_text(text, timeout=15_000)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def redrawn(self) -> None:
        """Wait until what was asked for last is drawn: the page draws in the next frame."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def row(self, key: str) -> list[str]:
        """Return the texts of a cell's row."""
        return self.page.locator("#cells tbody tr", has_text=key).locator("td").all_inner_texts()


@pytest.fixture
def shown(game, browser, monkeypatch) -> Iterator[Any]:
    monkeypatch.setattr(events, "EVERY", 0.1)
    with Server(Events(game.root, price=3.0), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = Shown(browser, server.url)
        yield found
        found.page.close()
        server.shutdown()
    assert found.problems == []


def test_cells_appear_go_on_finish_diverge_and_fail_before_ones_eyes(game, shown):
    a, b, c, d = game.keys
    shown.wait("#summary", "0 of 4 cells trained")
    game.train(a, 20)
    shown.wait("#cells tbody", a)
    assert shown.row(a)[:3] == [a, "trains", "20 of 60"]
    game.train(a, 40)
    shown.wait("#cells tbody", "40 of 60")
    for key in (a, c):
        game.finish(key)
        game.diagnose(key)
    shown.wait("#summary", "2 of 4 cells trained · 2 diagnosed")
    game.finish(d)
    shown.wait("#summary", "1 diverged")
    assert shown.row(d)[1].startswith("diverged at step 40")
    failed = game.root / Task("train", b, (), 1).failed
    failed.parent.mkdir(parents=True)
    failed.write_text(HOSTILE)
    shown.wait("#summary", "1 failed")
    assert shown.row(b)[1] == "failed" and shown.row(b)[-1] == HOSTILE
    assert shown.page.locator("img").count() == 0 and shown.page.title() != "1"

    shown.page.select_option("#which", "all")
    losses = {key: read_json(game.root / "data/runs" / key / "metrics.json")["val_loss"] for key in (a, c)}
    assert shown.row(c)[3:5] == [f"{losses[c] - losses[a]:+.4f}".replace("-", "−"), f"{losses[c]:.4f}"]
    table = shown.page.locator("#comparison tbody tr").all_inner_texts()
    assert len(table) == 2 and "1 of 2" in table[0] and f"{losses[a]:.4f}" in table[0]


def test_a_name_with_markup_in_it_does_nothing(game, shown):
    index = game.root / "data/grid/index.json"
    key = game.keys[2]
    cell = read_json(game.root / "data/grid" / f"{key}.json") | {"format": HOSTILE}
    write_json(game.root / "data/grid" / f"{key}.json", cell)
    write_json(index, read_json(index))
    os.utime(index)
    game.finish(game.keys[0])
    game.finish(key)
    shown.wait("#comparison tbody", "onerror")
    assert shown.text("#legend").count("onerror") == 1
    assert shown.page.locator("img").count() == 0 and shown.page.title() != "1"


def test_the_page_goes_on_when_its_server_was_away(game, browser):
    (game.root / "params.yaml").write_bytes((PROJECT / "params.yaml").read_bytes())
    with started(game.root, "--port", "0") as url:
        shown = Shown(browser, url)
        shown.wait("#summary", "0 of 4")
    shown.wait("#problem", "does not answer")
    game.finish(game.keys[0])
    with started(game.root, "--port", url.rsplit(":", 1)[1].strip("/")):
        shown.wait("#summary", "1 of 4")
        assert shown.page.locator("#problem").is_hidden()
    shown.page.close()


def test_the_chart_draws_what_is_chosen_and_tells_the_line_under_the_pointer(game, shown):
    for key in game.keys[:3]:
        game.finish(key)
    shown.wait("#summary", "3 of 4")
    counts = {}
    for measure in ("difference", "val", "train", "norm"):
        shown.page.select_option("#measure", measure)
        shown.redrawn()
        counts[measure] = shown.page.evaluate(INK)
    assert all(count > 2000 for count in counts.values()) and len(set(counts.values())) == 4
    shown.page.select_option("#measure", "val")
    shown.redrawn()
    orange = shown.page.evaluate(ORANGE)
    shown.page.locator("#legend button", has_text="E4M3").click()
    shown.redrawn()
    assert orange and not shown.page.evaluate(ORANGE)
    assert {text.partition("-")[0] for text in pointed_at(shown) if "-adamw" in text} == {"bf16"}, "no hidden line"
    shown.page.locator("#legend button", has_text="E4M3").click()
    for measure in ("norm", "val"):  # another measure forgets the last line that was pointed at
        shown.page.select_option("#measure", measure)
    shown.redrawn()
    assert pointed_at(shown, until="bf16")[-1].startswith("bf16")
    assert not shown.page.evaluate(ORANGE), "a line stands out while the pointer is at it"
    shown.page.mouse.move(0, 0)
    shown.redrawn()
    assert shown.page.evaluate(ORANGE)


def pointed_at(shown: Shown, until: str = "none") -> list[str]:
    """Move the pointer over the chart, up to a line ``until``; return the text of each line that was the nearest."""
    box, texts = shown.page.locator("canvas").bounding_box(), []
    for share, height in itertools.product(range(5, 100, 5), repeat=2):
        shown.page.mouse.move(box["x"] + box["width"] * share / 100, box["y"] + box["height"] * height / 100)
        texts.append(shown.text("#under"))
        if texts[-1].startswith(until):
            break
    shown.redrawn()
    return texts


def test_a_metric_that_several_layers_have_a_flag_of_is_said_once(game, shown):
    key = game.keys[0]
    diagnosis = game.whole / "data/diag" / f"{key}.json"
    values = {("a", "zeroed_frac"): 0.25, ("b", "zeroed_frac"): 0.5, ("b", "dead_units"): 0.75, ("", "sharpness"): 40}
    flags = [{"layer": layer, "metric": name, "value": value, "limit": 0} for (layer, name), value in values.items()]
    write_json(diagnosis, read_json(diagnosis) | {"flags": flags})
    game.finish(key)
    game.diagnose(key)
    shown.wait("#cells tbody", "sharpness")
    assert shown.row(key)[-1] == "zeroed_frac 0.25 to 0.5 in 2 layers; dead_units 0.75 in b; sharpness 40"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_its_width(width, game, browser):
    for key in game.keys:
        game.finish(key)
        game.diagnose(key)
    with Server(Events(game.root), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = Shown(browser, server.url, width)
        shown.wait("#summary", "4 of 4")
        assert shown.page.evaluate("document.documentElement.scrollWidth") == width
        shown.page.close()
        server.shutdown()
