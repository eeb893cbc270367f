"""The report in a real browser: silent, alone, and readable everywhere.

That it has the numbers of the table is shown in test_table.py.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.compare.report import html_report
from tests.compare.records import make_record, table_of
from tests.compare.test_table import NASTY, renamed
from tests.environments import require

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
    require(*(() if CHROMIUM else ("chromium",)), "chromedriver")
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
    """The address of a page with a failed arm, and long names full of signs."""
    made = renamed(make_record(20), "shm", "my_package.engines:" + "AVeryLongName" * 3)
    made = renamed(made, "mpi", NASTY)
    made["arms"]["a"]["command"] = "torchrun train.py --data /a" + "/long/path" * 40
    return html_report.write(table_of(made), tmp_path_factory.mktemp("compare")).as_uri()


def opened(browser: Any, page: str, width: int = 1100, media: str = "") -> Any:
    """Open the page in a window of a width in CSS pixels, on a screen that asks for dark pages."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": scheme})
    browser.get(page)
    return browser


def test_nothing_is_said_and_nothing_is_asked_for(browser: Any, page: str, tmp_path: Path) -> None:
    """Of a bad page the browser would say something."""
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='missing.png'><script>oops()</script>")
    browser.get(bad.as_uri())
    assert len(browser.get_log("browser")) >= 2
    browser.get("about:blank")
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


# The last is A4 without its margins, in CSS pixels.
@pytest.mark.parametrize(
    ("width", "media"), [(320, ""), (400, ""), (1000, ""), (1400, ""), (695, "print")]
)
def test_the_page_is_whole_and_light(browser: Any, page: str, width: int, media: str) -> None:
    """Nothing makes it scroll sideways; a narrow screen alone cuts the table of speed off."""
    opened(browser, page, width, media)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    outside = browser.execute_script(
        """return [...document.querySelectorAll('body *')].filter(e => !e.closest(arguments[1]) &&
            (e.getBoundingClientRect().right > arguments[0] || e.scrollWidth > e.offsetWidth)
        ).map(e => e.outerHTML.slice(0, 80))""",
        width,
        "svg, .scroll" if width < 600 else "svg",
    )
    assert outside == []
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"  # even where the screen is dark
