"""The report in a real browser: silent, alone, and readable everywhere.

That it has the numbers of the summary is shown in test_report.py.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.compare import record
from hvdtrain.compare.report import html_report
from tests.compare.records import make_record
from tests.compare.test_report import NASTY, renamed

# Its fixtures of the module are made once.
pytestmark = [pytest.mark.xdist_group("compare-browser"), pytest.mark.exhaustive]

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
DRIVER = shutil.which("chromedriver") or ""
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --disable-dev-shm-usage
    --disable-crash-reporter --disable-breakpad --hide-scrollbars""".split()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium, whose profile and temporary files all lie in a folder that goes with it."""
    if not (CHROMIUM and DRIVER):
        assert "CI" not in os.environ, "CI needs chromium and chromedriver"
        pytest.skip("chromium or chromedriver is not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="hvdtrain-test-", ignore_cleanup_errors=True) as home:
        options = Options()
        options.binary_location = CHROMIUM
        for flag in [*FLAGS, f"--user-data-dir={home}/profile"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        own = {"HOME": home, "TMPDIR": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
        driver = webdriver.Chrome(options, Service(DRIVER, env={**os.environ, **own}))
        try:
            yield driver
        finally:
            driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page with two world sizes, a failed arm, and long names full of signs."""
    folder = tmp_path_factory.mktemp("compare")
    made = make_record(ranks=(1, 2), scaling="weak", blocks=20)
    made = renamed(made, "compat/shm x2", "my_package.engines:" + "AVeryLongName" * 3)
    made = renamed(made, "ddp/mpi x2", NASTY)
    (folder / record.NAME).write_text(json.dumps(made))
    return html_report.write(record.read(folder), folder).as_uri()


UNPACK = """
    for (const image of document.querySelectorAll('figure img')) {
        const text = decodeURIComponent(image.currentSrc.slice(image.currentSrc.indexOf(',') + 1));
        const svg = new DOMParser().parseFromString(text, 'image/svg+xml').documentElement;
        svg.setAttribute('width', image.getBoundingClientRect().width);
        svg.removeAttribute('height');
        image.closest('picture').replaceWith(svg);
    }
"""


def opened(browser: Any, page: str, width: int = 1100, media: str = "") -> Any:
    """Open the page in a window of a width in CSS pixels, on a screen that asks for dark pages."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": scheme})
    browser.get(page)
    return browser


def unpacked(browser: Any, page: str, width: int = 1100) -> Any:
    """Open the page, with each picture that is shown as part of it, so that its texts are known."""
    opened(browser, page, width).execute_script(UNPACK)
    return browser


def test_nothing_is_said_and_nothing_is_asked_for(browser: Any, page: str) -> None:
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get_log("performance")
    opened(browser, page)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [page]


def test_the_browser_would_have_said_something(browser: Any, tmp_path: Path) -> None:
    """So that the test above cannot pass because nothing is ever logged."""
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='missing.png'><script>oops()</script>")
    browser.get(bad.as_uri())
    assert len(browser.get_log("browser")) >= 2


@pytest.mark.parametrize("width", [320, 390, 1100])
def test_the_page_never_scrolls_sideways(browser: Any, page: str, width: int) -> None:
    opened(browser, page, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    outside = browser.execute_script(
        """return [...document.querySelectorAll('body *')].filter(e => {
            const box = e.getBoundingClientRect();
            return !e.closest('.scroll') && !e.closest('svg') && box.right > arguments[0] + 1;
        }).map(e => e.outerHTML.slice(0, 80))""",
        width,
    )
    assert outside == []


OVERLAPS = """
    const found = [];
    for (const svg of document.querySelectorAll('figure svg')) {
        const frame = svg.getBoundingClientRect();
        if (!frame.width) continue;
        const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim());
        const boxes = texts.map(t => t.getBoundingClientRect());
        boxes.forEach((a, i) => {
            if (a.left < frame.left - 1 || a.right > frame.right + 1)
                found.push(['outside', texts[i].textContent]);
            for (let j = 0; j < i; j++) {
                const b = boxes[j];
                const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
                const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
                if (across > 1 && down > 0.3 * Math.min(a.height, b.height))
                    found.push([texts[i].textContent, texts[j].textContent]);
            }
        });
    }
    return found;
"""


@pytest.mark.parametrize("width", [320, 390, 1100])
def test_texts_of_pictures_are_large_and_cover_no_others(
    browser: Any, page: str, width: int
) -> None:
    assert unpacked(browser, page, width).execute_script(OVERLAPS) == []
    smallest = browser.execute_script(
        """return Math.min(...[...document.querySelectorAll('figure svg text')].map(t => {
            const scale = t.getScreenCTM() ? t.getScreenCTM().a : 0;
            return t.closest('svg').getBoundingClientRect().width
                ? parseFloat(getComputedStyle(t).fontSize) * scale : 99;
        }))"""
    )
    assert smallest >= 9


def test_who_cannot_see_it_has_words_and_headings(browser: Any, page: str) -> None:
    labels = opened(browser, page).execute_script(
        "return [...document.querySelectorAll('img')].map(e => e.alt)"
    )
    assert len(labels) == 3
    assert all(len(label) > 40 for label in labels)
    levels = browser.execute_script(
        "return [...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])"
    )
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert browser.execute_script("return document.documentElement.lang") == "en"


def test_pictures_have_the_colours_of_the_page(browser: Any, page: str) -> None:
    """Dark on white, whatever the screen asks for."""
    paper, ink = unpacked(browser, page).execute_script(
        """return [getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector('figure svg text')).fill]"""
    )
    paper, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (paper, ink))
    assert ink < 350 < 700 < paper


def test_tables_are_whole_on_paper(browser: Any, page: str) -> None:
    a4 = round((210 - 2 * 13) / 25.4 * 96)  # the page's width in CSS pixels, without its margins
    opened(browser, page, a4, media="print")
    cut = browser.execute_script(
        """return [...document.querySelectorAll('table, figure, pre')].filter(
            e => e.getBoundingClientRect().right > arguments[0] + 1).map(e => e.id)""",
        a4,
    )
    assert cut == []
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"  # light, even where the screen is dark
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    content = base64.b64decode(pdf["data"])
    assert content.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 20
