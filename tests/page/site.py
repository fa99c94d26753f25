"""A tab of a browser, and texts of a page, as a user sees them."""

from __future__ import annotations

import json
from typing import Any

from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

from compat.page.browser import LAPTOP
from compat.waiting import eventually


class Tab:
    """A tab at a site. A page's live part is sent again all the time, so each look finds its elements anew."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        self.url = url.rstrip("/")

    def open(self, path: str) -> None:
        """Open a page."""
        self.browser.get(self.url + path)

    def text(self, selector: str = "body") -> str:
        """Return what is visible of the first element; empty without one."""
        try:
            return self.browser.find_element(By.CSS_SELECTOR, selector).text
        except (NoSuchElementException, StaleElementReferenceException):
            return ""

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements, also of those that are scrolled out."""
        found = self.js("return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector)
        return [" ".join(each.split()) for each in found]

    def cell(self, job: str, column: str) -> str:
        """Return the text of a job's cell on the overview, by the heading of its column."""
        headings = self.texts("table.jobs th")
        return self.texts(f"#job-{job} td")[headings.index(column)]

    def choose(self, field: str, value: str) -> None:
        """Choose an option of a form's field."""
        Select(self.find(f"[name={field}]")).select_by_visible_text(value)

    def find(self, selector: str) -> WebElement:
        """Return an element when it is there."""
        return eventually(lambda: self.browser.find_elements(By.CSS_SELECTOR, selector), awaited=selector)[0]

    def wait_for(self, words: str, selector: str = "body") -> str:
        """Wait until an element shows some words; return its text."""
        return eventually(lambda: self.text(selector), lambda found: words in found, f"{words!r} in {selector}")

    def js(self, script: str, *arguments: Any) -> Any:
        """Run a function's body in the page."""
        return self.browser.execute_script(script, *arguments)

    def press(self, keys: str) -> None:
        """Press keys, wherever the focus is."""
        self.browser.switch_to.active_element.send_keys(keys)

    def show_as(self, size: tuple[int, int] = LAPTOP, theme: str = "light") -> None:
        """Give the window a size, and the system a theme."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """Return what the console of the browser says of mistakes: scripts that fail, content that is forbidden.

        A socket that ends because the tab opens another page is none.
        """
        messages = [each["message"] for each in self.browser.get_log("browser")]
        return [each for each in messages if "WebSocket" not in each]

    def requested(self) -> list[str]:
        """Return the URLs that were requested since the last call."""
        messages = [json.loads(each["message"])["message"] for each in self.browser.get_log("performance")]
        sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        sockets = [each["params"] for each in messages if each["method"] == "Network.webSocketCreated"]
        return [each["request"]["url"] for each in sent] + [each["url"] for each in sockets]
