"""The chat page in a real browser without a screen, in front of a real server and gpu-service.

What no model can be made to say, errors in the midst of an answer and answers that never end, comes
of a small server of the tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.page_server import BREAK, ENDLESS, REFUSE, running
from tests.kit.service import running_server, running_service

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
# Kept where the page is worked on: pytest --basetemp says where.
CSS = "css selector"
SIZES = {"wide": (1280, 900), "narrow": (420, 900)}


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

    def complaints(self) -> list[str]:
        """Return errors and CSP violations that the console got since this was last called."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service as Driver

    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.add_argument("--window-size={},{}".format(*SIZES["wide"]))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options, Driver(str(DRIVER)))
    try:
        yield chrome
    finally:
        chrome.quit()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("gpu")
    with running_service("demo", f"unix://{folder}/gpu", "--arithmetic", "both") as service:
        yield service.endpoint


@pytest.fixture
def opened(browser: Chrome, endpoint: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    with running(request.param, endpoint) as (address, bodies):
        _open(browser, address)
        yield Page(browser, bodies)


def _open(browser: Chrome, address: str) -> None:
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(address)
    browser.get_log("browser")  # of the page before


@pytest.mark.parametrize("policy", ["attention-in-tee", "shielded"])
def test_an_answer_fills_three_panes(
    browser: Chrome, endpoint: str, policy: str, tmp_path: Path
) -> None:
    options = ("--page", "--policy", policy, "--dtype", "float32", "--gpu", endpoint)
    with running_server(*options) as server:
        _open(browser, server.address)
        _three_panes(Page(browser), tmp_path, shielded=policy == "shielded")


def _three_panes(page: Page, tmp_path: Path, *, shielded: bool) -> None:
    assert "A page cannot vouch for the server that served it." in page.text("header")
    page.click("summary")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "64")
    page.click("summary")
    page.send(PROMPT)
    page.until(lambda: page.text("#log .assistant"))
    page.until_done()

    assert page.text("#log .user") == PROMPT
    assert len(page.text("#log .assistant").split()) > 20
    kept = page.text("#kept")
    assert PROMPT in kept
    assert "64 tokens" in kept
    assert "KiB for" in kept
    assert ("63 pads used" if shielded else "none under this policy") in kept
    assert "qkv_proj" in page.text("#operators")
    assert "first token after" in page.text("#pace")
    assert len(page.browser.find_elements(CSS, "#latency rect")) >= 40

    assert "requests" in page.text("#total")
    assert len(page.browser.find_elements(CSS, "#samples .sample")) == 3
    heads = [one.text for one in page.browser.find_elements(CSS, "#samples .hex")]
    assert all(len(bytes.fromhex(head.replace(" ", ""))) == 64 for head in heads)
    assert len(page.browser.find_elements(CSS, "#histogram rect")) == 256
    evenness, attack = page.text("#evenness"), page.text("#attack")
    if shielded:
        assert evenness.startswith("As even as chance makes them")
        assert "Nothing recovered" in attack
        assert "fox" not in attack
    else:
        assert evenness.startswith("Uneven")
        assert "recovered (whatever their order)" in attack
        assert PROMPT in attack

    for name, size in SIZES.items():
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for scheme in ("light", "dark"):
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            page.browser.save_screenshot(str(tmp_path / f"{name}-{scheme}.png"))
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.browser.execute_script(f"return {wide}") == 0
    assert page.complaints() == []


@pytest.mark.parametrize("opened", ["tee-only"], indirect=True)
def test_nothing_is_shown_where_nothing_leaves(opened: Page) -> None:
    page = opened
    page.click("summary")
    page.fill("#max_tokens", "4")
    page.fill("#system", "Be kind.")
    page.send(PROMPT)
    page.until_done()
    roles = [one["role"] for one in page.bodies[0]["messages"]]
    assert roles == ["system", "user"]
    assert "not one byte" in page.text("#total")
    assert "Nothing: no row" in page.text("#attack")
    page.send("And then?")
    page.until(lambda: len(page.bodies) == 2)
    page.until_done()
    roles = [one["role"] for one in page.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert page.complaints() == []


@pytest.mark.parametrize("opened", ["tee-only"], indirect=True)
def test_errors_are_readable_and_an_answer_can_be_stopped(opened: Page) -> None:
    page = opened
    page.send(REFUSE)
    page.until_done()
    refused = "400 invalid_request_error: body.messages: refused"
    assert page.text("#log .error") == refused
    page.click("#clear")
    assert not page.browser.find_elements(CSS, "#log .error")
    page.send(BREAK)
    page.until(lambda: page.text("#log") and "was lost" in page.text("#log"))
    page.until_done()
    assert page.text("#log .error") == "server_error: the service was lost"
    page.click("#clear")
    page.send(ENDLESS)
    page.until(lambda: "on on" in page.text("#log .assistant"))
    page.click("#stop")
    page.until_done()
    assert not page.browser.find_elements(CSS, "#log .error")
    # The console says of the refused request what the page says; of all else nothing.
    assert all("400 (Bad Request)" in one for one in page.complaints())


@pytest.mark.parametrize("opened", ["tee-only"], indirect=True)
def test_the_browser_refuses_what_the_page_does_not_bring(opened: Page) -> None:
    page = opened
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
