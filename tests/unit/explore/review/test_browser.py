"""The page in a real browser: headless Chromium, no network, a phone, a pointer and a printer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.review_case import h200_review

from tilecast.explore.review.page.charts import charts
from tilecast.explore.review.review import Review

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def review() -> Review:
    return h200_review()


@pytest.fixture(scope="module")
def path(review: Review, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "review.html"
    file.write_text(review.page(), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


class Seen:
    """A page that was opened, and everything it said or asked for."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.context.set_default_timeout(120_000)
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn]")


@pytest.fixture(scope="module")
def desk(browser: Any, path: Path) -> Iterator[Seen]:
    seen = Seen(browser, path, viewport={"width": 1280, "height": 900})
    yield seen
    seen.context.close()


def test_it_loads_in_silence_and_asks_for_nothing(desk: Seen, path: Path) -> None:
    assert desk.messages == []
    assert [url for url in desk.requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]


def test_every_chart_is_drawn(desk: Seen, review: Review) -> None:
    found = charts(review)
    assert {"forecast", "waterfall", "roofline", "tornado", "map", "accuracy", "change", "before", "after"} <= set(
        found
    )
    for ident, chart in found.items():
        node = desk.page.locator(f"#plot-{ident}")
        box = node.locator("svg.main-svg").first.bounding_box()
        assert box is not None and box["width"] > 500 and box["height"] > 80, ident
        marks = node.evaluate(
            """node => [...node.querySelectorAll('.bars .point path, .scatterlayer .points path, .heatmaplayer image')]
                .filter(mark => { const b = mark.getBoundingClientRect(); return b.width > 0 && b.height > 0; }).length"""
        )
        assert marks > 0, ident
        assert node.get_attribute("aria-label").startswith(chart.title)


def test_hovering_a_bar_says_operation_unit_cycles_and_what_it_waits_for(desk: Seen) -> None:
    desk.page.locator("#plot-before").scroll_into_view_if_needed()
    # The bar of an exponential that lies inside the view, by its label.
    spot = desk.page.locator("#plot-before").evaluate(
        """node => { const [low, high] = node.layout.xaxis.range;
            for (const trace of node.data) for (let i = 0; i < trace.x.length; i++)
                if (/^exp/.test(trace.text[i]) && trace.name === 'exp' && trace.base[i] > low && trace.base[i] + trace.x[i] < high) {
                    const box = node.getBoundingClientRect(), full = node._fullLayout;
                    return { x: box.left + full._size.l + full.xaxis.d2p(trace.base[i] + trace.x[i] / 2),
                             y: box.top + full._size.t + full.yaxis.d2p(trace.y[i]) };
                } }"""
    )
    desk.page.mouse.move(spot["x"], spot["y"])
    desk.page.wait_for_selector("#plot-before .hovertext")
    text = desk.page.locator("#plot-before .hovertext").text_content()
    for word in ("exp", "of block", "cycles", "mufu", "consumer"):
        assert word in text
    assert "waited" in text or "released by" in text


def test_the_buttons_zoom_and_come_back(desk: Seen) -> None:
    def width() -> float:
        low, high = desk.page.evaluate("document.getElementById('plot-before').layout.xaxis.range")
        return float(high - low)

    def press(name: str) -> None:
        desk.page.locator(f"button[data-chart='plot-before'][data-move='{name}']").click()

    at_first = width()
    press("in")
    assert width() == pytest.approx(at_first / 2)
    press("all")
    assert width() > 2 * at_first
    press("steady")
    assert width() == pytest.approx(at_first)


def test_a_phone_needs_no_sideways_scrolling(browser: Any, path: Path, review: Review) -> None:
    seen = Seen(browser, path, viewport={"width": 375, "height": 800}, is_mobile=True, has_touch=True)
    assert seen.page.evaluate("document.scrollingElement.scrollWidth") <= 375
    widths = seen.page.evaluate(
        "[...document.querySelectorAll('.plot svg.main-svg')].map(s => s.getBoundingClientRect().right)"
    )
    assert len(widths) >= len(charts(review)) and max(widths) <= 375
    assert seen.messages == []
    seen.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(browser: Any, path: Path, scheme: str) -> None:
    seen = Seen(browser, path, viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    pairs = seen.page.evaluate(
        """() => { const out = [];
            const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };
            for (const e of document.querySelectorAll('h1, h2, p, td, th, a, dt, dd, small, figcaption, button, code, li, footer'))
                out.push([getComputedStyle(e).color, ground(e)]);
            for (const e of document.querySelectorAll('.plot .xtick text, .plot .ytick text, .plot .legendtext'))
                out.push([getComputedStyle(e).fill, ground(e.closest('.plot'))]);
            return [...new Set(out.map(p => p.join('|')))]; }"""
    )
    assert len(pairs) >= 3
    for pair in pairs:
        assert contrast(*pair.split("|")) >= 4.5, pair
    seen.context.close()


def contrast(one: str, other: str) -> float:
    """WCAG contrast ratio of two CSS rgb() colours."""

    def luminance(colour: str) -> float:
        parts = [float(p) / 255 for p in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_labels_on_bars_stand_out() -> None:
    from tilecast.explore.review.page.charts import COLOURS

    def rgb(text: str) -> str:
        return "rgb(" + ", ".join(str(int(text[i : i + 2], 16)) for i in (1, 3, 5)) + ")"

    for kind, (fill, ink) in COLOURS.items():
        assert contrast(rgb(fill), rgb(ink)) >= 4.5, kind


def test_paper_gets_static_charts_and_every_section(desk: Seen, review: Review) -> None:
    desk.page.emulate_media(media="print")
    try:
        shown = desk.page.evaluate(
            "[...document.querySelectorAll('.static')].map(i => i.complete && i.naturalWidth > 0 && i.getBoundingClientRect().height > 50)"
        )
        assert len(shown) == len(charts(review)) and all(shown)
        assert not any(
            desk.page.evaluate(
                "[...document.querySelectorAll('.plot, .tools, nav')].map(e => e.getBoundingClientRect().height > 0)"
            )
        )
        pdf = desk.page.pdf(format="A4", prefer_css_page_size=True)
        assert (
            pdf.startswith(b"%PDF")
            and pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") + pdf.count(b"/Type /Page/") >= 5
        )
    finally:
        desk.page.emulate_media(media="screen")


def test_without_scripts_the_drawings_are_there(browser: Any, path: Path) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 800, "height": 900})
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator(".static").first.is_visible()
    assert not page.locator(".plot").first.is_visible()
    context.close()
