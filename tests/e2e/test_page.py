"""The chat page in a real browser without a screen: that nothing leaves, and nothing comes in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.page_server import running

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no chromium and chromedriver: apt-get install chromium chromium-driver",
    ),
]

PROMPT = "Tell me a story about a fox."
WAIT_S = 60
CSS = "css selector"


@dataclass
class Page:
    """The page in a browser. `bodies`: what the server was asked to complete."""

    browser: Chrome
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.browser.find_element(CSS, selector).text)

    def click(self, selector: str) -> None:
        self.browser.find_element(CSS, selector).click()

    def fill(self, selector: str, text: str) -> None:
        field = self.browser.find_element(CSS, selector)
        field.clear()
        field.send_keys(text)

    def send(self, text: str) -> None:
        self.fill("#input", text)
        self.click("#send")

    def until(self, holds: Callable[[], object]) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.browser, WAIT_S, poll_frequency=0.05).until(lambda _: holds())

    def until_done(self) -> None:
        self.until(lambda: self.browser.find_elements(CSS, "body[data-state=done]"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service as Driver

    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options, Driver(str(DRIVER)))
    try:
        yield chrome
    finally:
        chrome.quit()


@pytest.fixture
def page(browser: Chrome) -> Iterator[Page]:
    with running() as (address, bodies):
        browser.get(address)
        browser.get_log("browser")  # of the page before
        yield Page(browser, bodies)


def test_nothing_is_shown_where_nothing_leaves(page: Page) -> None:
    page.click("summary")
    page.fill("#max_tokens", "4")
    page.fill("#system", "Be kind.")
    page.send(PROMPT)
    page.until_done()
    assert page.text("#log .user") == PROMPT
    assert page.text("#log .assistant")
    roles = [one["role"] for one in page.bodies[0]["messages"]]
    assert roles == ["system", "user"]
    assert "not one byte" in page.text("#total")
    assert "Nothing: no row" in page.text("#attack")
    page.send("And then?")
    page.until(lambda: len(page.bodies) == 2)
    page.until_done()
    roles = [one["role"] for one in page.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert page.browser.get_log("browser") == []  # errors and CSP violations of the console


def test_the_browser_refuses_what_the_page_does_not_bring(page: Page) -> None:
    said = page.browser.execute_async_script(
        """
        const [told] = arguments, seen = new Set();
        document.addEventListener('securitypolicyviolation', (event) => {
          seen.add(event.effectiveDirective);
          if (seen.size === 4) told([...seen].sort());
        });
        try { document.body.innerHTML += '<b></b>'; } catch {}
        new Image().src = 'http://127.0.0.1:9/';
        fetch('http://127.0.0.1:9/').catch(() => null);
        document.body.setAttribute('style', 'color: red');
        """
    )
    assert said == ["connect-src", "img-src", "require-trusted-types-for", "style-src-attr"]
